"""Shapley values over retrained models: enumeration equals values of separately trained coalitions."""

from dataclasses import replace

import numpy as np
import pytest

from grasp.baselines.retraining_shapley import RetrainingGame
from grasp.baselines.shapley import exact_shapley
from grasp.baselines.stored import shared_directory
from grasp.baselines.work import WorkArea
from grasp.errors import RunsError, SettingsError, SubsetError
from grasp.methods.registry import method_predictions, score_rows
from grasp.models.unit_loss import evaluate_units
from grasp.runs.retrained import RetrainedRuns
from grasp.training.recipe import TrainingRecipe
from grasp.training.train import train
from tests.baselines.world import N_ROWS, N_UNITS, configured_method, matrix

TOPIC = np.arange(N_ROWS) % 3


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a cache of trained coalitions."""
    return tmp_path_factory.mktemp("games")


def game_of(inputs, place):
    work = WorkArea(place / "work", shared_directory(place, inputs, 1))
    return RetrainingGame(inputs, work, TOPIC, seed=0)


def trained_one_by_one(inputs):
    """Return the utility of a coalition of topics by `train` and the plain model."""
    recipe = TrainingRecipe.model_validate(inputs.required_runs.runs.info.recipe_settings)

    def utility(masks_BG):
        out = []
        for mask in masks_BG:
            retained = mask[TOPIC]
            if retained.sum() < recipe.batch_rows:
                return np.full((1, N_UNITS), np.nan)
            model = train(recipe, inputs.store, seed=0, retained=retained).model
            out.append(-evaluate_units(model, inputs.unit_tokens))
        return np.stack(out)

    return utility


def run(inputs, place, **settings):
    settings = {"players": "topic", "permutations": 0} | settings
    return score_rows(configured_method("retraining_shapley", **settings), inputs, place)


def test_the_utility_of_a_coalition_equals_that_of_training_on_it(world, place):
    inputs = world.inputs()
    game = game_of(inputs, place)
    masks = np.array([[True, False, True], [True, True, True]])
    np.testing.assert_allclose(game(masks), trained_one_by_one(inputs)(masks), rtol=1e-5)


def test_values_by_enumeration_equal_the_formula_divided_among_rows_of_a_group(world, place):
    inputs = world.inputs()
    game = game_of(inputs, place)
    result = matrix(run(inputs, place))
    expected = exact_shapley(game, 3)
    for topic in range(3):
        np.testing.assert_allclose(result[topic == TOPIC].sum(axis=0), expected[topic], rtol=1e-5, atol=1e-7)
        assert np.ptp(result[topic == TOPIC], axis=0).max() == 0


def test_values_sum_to_the_gain_of_training(world, place):
    inputs = world.inputs()
    result = matrix(run(inputs, place, permutations=2))
    game = game_of(inputs, place)
    nothing, everything = game(np.array([[False] * 3, [True] * 3]))
    np.testing.assert_allclose(result.sum(axis=0), everything - nothing, rtol=1e-4, atol=1e-5)
    assert (everything > nothing).all()


def test_a_coalition_is_trained_once(world, tmp_path):
    inputs, work = world.inputs(), WorkArea(tmp_path)
    first = RetrainingGame(inputs, work, TOPIC, seed=0)
    masks = np.array([[True, True, False], [True, True, False], [True, False, False]])
    answers = first(masks)
    reopened = RetrainingGame(inputs, work, TOPIC, seed=0)
    np.testing.assert_array_equal(reopened(masks), answers)
    assert (first.trained, reopened.trained) == (2, 0)
    assert reopened.ready.wall > 0
    by_row = RetrainingGame(inputs, work, np.arange(N_ROWS), seed=0)  # other players, the same rows
    np.testing.assert_array_equal(by_row((TOPIC == 0)[None]), answers[2:])
    assert by_row.trained == 0


def test_coalitions_too_small_for_training_have_the_utility_of_an_untrained_model(world, tmp_path):
    inputs = world.inputs()
    game = RetrainingGame(inputs, WorkArea(tmp_path), np.arange(N_ROWS), seed=0)
    masks = np.zeros((3, N_ROWS), dtype=bool)
    masks[1, :3] = True  # the recipe's batch has 4 rows
    masks[2, 10:12] = True
    answers = game(masks)
    assert game.trained == 1
    assert (answers == answers[0]).all()


def test_the_recorded_time_includes_earlier_retraining(world, tmp_path):
    inputs = world.inputs()
    subsets = inputs.required_runs.subsets
    place = tmp_path
    first, second = (
        method_predictions(
            configured_method("retraining_shapley", players="topic", permutations=n), inputs, subsets, place
        )
        for n in (0, 1)
    )
    assert first.cost is not None
    assert second.cost is not None
    assert second.cost.wall_seconds > 0.5 * first.cost.wall_seconds


def test_stored_values_depend_on_the_players(world):
    inputs = world.inputs()
    decided = [
        configured_method("retraining_shapley", players=players).method.extra_identity(inputs)
        for players in ("rows", "topic", "label")
    ]
    assert decided[0] != decided[1] == decided[2]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"players": "rows", "permutations": 100}, SettingsError, "more than most_runs 2,000"),
        ({"players": "rows"}, SettingsError, "more than most_runs 2,000"),
        ({"players": "theme"}, SubsetError, "theme"),
        ({"truncation": 0.1}, SettingsError, "truncation: no effect"),
    ],
)
def test_invalid_games_are_refused(settings, error, message, world, tmp_path):
    with pytest.raises(error, match=message):
        run(world.inputs(), tmp_path, **settings)


def test_an_environment_without_its_recipe_is_refused(world, tmp_path):
    inputs = world.inputs()
    known = inputs.required_runs
    info = known.runs.info.model_copy(update={"recipe_settings": {}})
    bare = replace(known, runs=RetrainedRuns(known.runs.path, info))
    with pytest.raises(RunsError, match=r"recipe_settings: .*name: missing"):
        run(replace(inputs, runs=bare), tmp_path)
