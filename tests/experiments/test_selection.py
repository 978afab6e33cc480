"""Selection for some questions, evaluated on others: split of questions, training, intervals, summary."""

from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from experiments.selection.agreement import share_of_best
from experiments.selection.choices import METHODS, Request, World
from experiments.selection.run import Trainer, interval, measured, summary
from grasp.training.recipe import named_recipe

N_ROWS, N_UNITS = 50, 12


@pytest.fixture
def world():
    artifact = SimpleNamespace(n_rows=N_ROWS, unit_columns=lambda target: np.arange(N_UNITS))
    return World(artifact)


def line(method="mean", target="sciq", others=1.0, known=2.0, seed=0):
    request = {"method": method, "target": target, "questions": 4, "share": 0.2, "draw": 0, "seed": seed}
    return request | {"others": [others], "known": [known]}


def test_questions_are_split_in_halves_at_random(world):
    known, others = world.questions("sciq")
    assert sorted([*known, *others]) == list(range(N_UNITS))
    assert len(known) == N_UNITS // 2
    assert set(known) != set(world.questions("sciq", draw=1)[0])


def test_selected_rows_have_the_highest_scores_for_the_known_questions(world, monkeypatch):
    score_N = np.random.default_rng(0).random(N_ROWS)
    known_questions = []
    monkeypatch.setitem(METHODS, "mean", lambda world, target, known, draw: known_questions.append(known) or score_N)
    rows = world.rows(Request("sciq", "mean", 4, 0.2))
    np.testing.assert_array_equal(rows, np.sort(np.argsort(-score_N)[:10]))
    np.testing.assert_array_equal(known_questions[0], np.sort(world.questions("sciq")[0][:4]))


def test_random_rows_are_the_same_for_all_tasks(world):
    chosen = [world.rows(Request(target, "random", 4, 0.2)) for target in ("sciq", "piqa")]
    np.testing.assert_array_equal(*chosen)


def test_gain_is_the_loss_after_random_rows_minus_that_after_the_selection(world, monkeypatch, tmp_path):
    monkeypatch.setitem(METHODS, "mean", lambda world, target, known, draw: np.arange(N_ROWS))
    trainer = Trainer(world, tmp_path, named_recipe("tiny"))
    monkeypatch.setattr(trainer, "losses", lambda rows, seed: rows.mean() * np.arange(N_UNITS))
    request = Request("sciq", "mean", 4, 0.2)
    result = measured(world, trainer, request, seed=0)
    known, others = world.questions("sciq")
    per_unit = (world.rows(Request("sciq", "random", 4, 0.2)).mean() - np.arange(40, 50).mean()) * np.arange(N_UNITS)
    np.testing.assert_allclose(result["known"], per_unit[known[:4]], atol=1e-5)
    np.testing.assert_allclose(result["others"], per_unit[others], atol=1e-5)


def test_the_interval_equals_student_t():
    values = [0.1, 0.4, 0.3, 0.7]
    ends = ttest_1samp(values, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose(interval(values), [np.mean(values), *ends], atol=5e-4)
    assert interval([0.25]) == [0.25]


def test_summary_averages_seeds_before_tasks():
    lines = [line(others=1.0), line(others=3.0, seed=1), line(target="piqa", others=5.0, known=8.0)]
    (cell,) = summary(lines)
    assert cell["tasks"] == {"piqa": 5.0, "sciq": 2.0}
    assert cell["others"][0] == 3.5
    assert cell["carried"] == pytest.approx(3.5 / 5.0)
    assert cell["seeds"] == 2


def test_share_of_best_is_1_for_the_ranking_itself_and_0_for_a_constant_mean():
    relevance_N = np.random.default_rng(0).standard_normal(100)
    assert share_of_best(relevance_N, relevance_N) == pytest.approx(1.0)
    assert share_of_best(-relevance_N, relevance_N) < 0
