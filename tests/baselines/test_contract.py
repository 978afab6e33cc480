"""Contract tests of all methods. A method is tested here as soon as it is registered.

Shapes and finite numbers; sign; the same numbers for the same seed, other blocks, other batches and after a kill;
records of stored data and time; predictions of subsets are sums of scores.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from grasp.methods.contract import RowMethod
from grasp.methods.registry import load_method, method_predictions, score_rows
from tests.baselines.world import METHODS, N_ROWS, N_UNITS, Clock, configured_method, copies, matrix
from tests.faults import Killed

# Settings that make a method fit a world of 40 rows and seconds; none: its defaults.
SMALL: dict[str, dict[str, Any]] = {
    "tracin": {"layers": "all"},
    "less": {"layers": "all"},
    "trak": {"dimension": 16},
    "inrun": {"batch_rows": 4},
}
# Relative to the largest score: what rounding in other blocks and batches may change.
TOLERANCE = 2e-4

UNTARGETED = ("random", "length", "loss")
BY_TARGET = ("inrun",)  # scores rows for the mean loss of a target's units; see test_replay for single units
ROW_METHODS = [name for name in METHODS if issubclass(load_method(name), RowMethod)]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a cache in which the scores of every method are computed once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def scored(world, place):
    """Return the scores of a method, and its record."""

    def of(name):
        inputs = world.inputs()
        return score_rows(configured_method(name, **SMALL.get(name, {})), inputs, place)

    return of


def rescored(world, place, name, **changes):
    """Return the scores of the same method in a separate cache."""
    inputs = world.inputs(**changes)
    return matrix(score_rows(configured_method(name, **SMALL.get(name, {})), inputs, place))


def close(result, expected):
    return np.abs(result - expected).max() <= TOLERANCE * max(np.abs(expected).max(), 1e-30)


@pytest.mark.parametrize("name", ROW_METHODS)
def test_every_row_has_a_finite_score_for_every_unit(name, scored):
    result = matrix(scored(name))
    targeted = name not in UNTARGETED
    assert result.shape == (N_ROWS, N_UNITS if targeted else 1)
    assert np.isfinite(result).all()
    assert result.std() > 0
    assert scored(name).account.covers
    assert scored(name).seconds.wall > 0


@pytest.mark.parametrize("name", ROW_METHODS)
def test_a_row_with_the_text_of_a_unit_has_the_highest_score(name, world, scored):
    kind = load_method(name)
    if name in (*UNTARGETED, *BY_TARGET) or "runs" in kind.requires:
        pytest.skip("its scores are not of this row and this unit alone")
    result = matrix(scored(name))
    copy_E = result[copies(world.inputs()), np.arange(N_UNITS)]
    others_NE = result[N_UNITS:]  # of each unit apart: momentum, say, lifts all rows of a unit alike
    assert ((copy_E - others_NE.mean(axis=0)) / others_NE.std(axis=0)).mean() > 0.5


@pytest.mark.parametrize("name", ROW_METHODS)
def test_scores_do_not_depend_on_blocks_and_batches_up_to_rounding(name, world, tmp_path, scored):
    expected = matrix(scored(name))
    assert close(rescored(world, tmp_path, name, block_rows=15, batch_tokens=150), expected)


@pytest.mark.parametrize("name", ROW_METHODS)
def test_killed_and_resumed_gives_the_same_scores_bit_for_bit(name, world, tmp_path, scored):
    with pytest.raises(Killed):
        rescored(world, tmp_path, name, progress=Clock(left=2))
    assert list(tmp_path.glob(f"{name}-*/work"))
    assert not list(tmp_path.glob(f"{name}-*/method.json"))
    clock = Clock()
    np.testing.assert_array_equal(rescored(world, tmp_path, name, progress=clock), matrix(scored(name)))
    assert not list(tmp_path.glob(f"{name}-*/work"))


@pytest.mark.parametrize("name", ROW_METHODS)
def test_a_second_call_reads_the_cached_scores(name, world, place, scored):
    expected = matrix(scored(name))
    clock = Clock(left=1)  # it would not survive a single block
    np.testing.assert_array_equal(rescored(world, place, name, progress=clock), expected)
    assert not any(name.startswith("scoring rows") for name in clock.announced)


@pytest.mark.parametrize("name", list(METHODS))
def test_predictions_are_complete_named_and_independent_of_the_order_of_subsets(name, world, place):
    inputs = world.inputs()
    subsets = inputs.required_runs.subsets
    configured = configured_method(name, **SMALL.get(name, {}))
    cache = place
    result = method_predictions(configured, inputs, subsets, cache, renamed={"facts": "theirs"})
    predictions = result
    assert predictions.method == name
    assert predictions.targets == ("theirs",)
    assert len(predictions.units) == N_UNITS
    assert predictions.values_BE.shape == (8, N_UNITS)
    assert np.isfinite(predictions.values_BE).all()
    assert all(line.startswith(f"{name}: ") for line in result.notes)
    assert (predictions.method_role == "supervised oracle") == configured.method.is_oracle
    backwards = method_predictions(configured, inputs, subsets[::-1], cache)
    where = [backwards.subset_ids.index(subset) for subset in predictions.subset_ids]
    np.testing.assert_allclose(backwards.values_BE[where], predictions.values_BE, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ROW_METHODS)
def test_the_prediction_of_a_subset_is_the_mean_or_sum_of_its_row_scores(name, world, place):
    inputs = world.inputs()
    configured, cache = configured_method(name, **SMALL.get(name, {})), place
    result = np.broadcast_to(matrix(score_rows(configured, inputs, cache)), (N_ROWS, N_UNITS))
    (block,) = inputs.required_runs.subsets
    predicted = method_predictions(configured, inputs, [block], cache)
    for b in range(len(block.subset_ids)):
        rows = block.weights_BN[[b]].indices
        np.testing.assert_allclose(predicted.values_BE[b], result[rows].mean(axis=0), rtol=1e-6, atol=1e-9)
    assert predicted.cost is not None
    assert predicted.cost.wall_seconds > 0
    summed = method_predictions(replace(configured, negative_scale=0.0, weighting="count"), inputs, [block], cache)
    rows = block.weights_BN[[0]].indices
    np.testing.assert_allclose(summed.values_BE[0], np.maximum(result[rows], 0.0).sum(axis=0))
