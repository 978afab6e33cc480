"""In-run Shapley as a method: rows, batches, units and layers of a replay, resuming, and refusals."""

from itertools import pairwise

import numpy as np
import pytest

from grasp.baselines.inrun import STATE, InRun, _trainable_copy
from grasp.baselines.replay import Replay
from grasp.errors import ModelError
from grasp.methods.registry import score_rows
from grasp.models.gradients import Example
from grasp.seeds import stream
from tests.baselines.world import N_ROWS, N_UNITS, Clock, configured_method, matrix
from tests.faults import Killed

QUICK = {"learning_rate": 1e-3}


def scored(world, place, inputs=None, **settings):
    inputs = inputs or world.inputs()
    return score_rows(configured_method("inrun", **QUICK | settings), inputs, place)


def by_hand(inputs, batches, **settings):
    """Replay batches of row indices with the mean loss of all units, and return {row: value}."""
    arguments = {"layers": ("all",), "order": 1, "weight_decay": 0.01} | QUICK | settings
    units = [Example(unit.input_ids, unit.first) for unit in inputs.unit_tokens]
    replay = Replay(_trainable_copy(inputs.model), units, np.full((1, N_UNITS), 1 / N_UNITS), **arguments)
    result = {}
    for index in batches:
        rows = inputs.rows_at(np.array(index))
        value = replay.advance([Example(rows.ids(i)) for i in range(len(index))])
        result |= dict(zip(index, value[:, 0], strict=True))
    return result


@pytest.mark.parametrize("order", [1, 2])
def test_batches_are_those_of_the_seed_and_the_last_one_may_be_short(world, tmp_path, order):
    inputs = world.inputs()
    permuted = stream(5, "inrun", "order").permutation(30).tolist()
    expected = by_hand(inputs, [permuted[i:j] for i, j in pairwise([0, 12, 24, 30])], order=order)
    result = matrix(scored(world, tmp_path, utility="global", prefix_rows=30, batch_rows=12, order=order, seed=5))
    assert result.shape == (N_ROWS, 1)
    np.testing.assert_allclose(result[:30, 0], [expected[i] for i in range(30)], rtol=1e-5, atol=1e-10)


def test_rows_after_the_prefix_score_zero_and_are_counted(world, tmp_path):
    result = scored(world, tmp_path, prefix_rows=30)
    assert (matrix(result)[30:] == 0).all()
    assert (matrix(result)[:30] != 0).all()
    assert result.account.counts == {"rows after the prefix, scored 0": 10}
    longer = scored(world, tmp_path, prefix_rows=1000)
    assert not longer.account.counts
    assert (matrix(longer) != 0).all()


@pytest.mark.parametrize("keep_seconds", [0.0, 60.0])
def test_a_killed_replay_resumes_from_its_stored_state(world, tmp_path, monkeypatch, keep_seconds):
    monkeypatch.setattr("grasp.baselines.inrun.SAVE_SECONDS", keep_seconds)
    settings = {"order": 2, "batch_rows": 8}
    expected = matrix(scored(world, tmp_path / "whole", **settings))
    with pytest.raises(Killed):
        scored(world, tmp_path / "cut", world.inputs(progress=Clock(left=3)), **settings)
    assert bool(list(tmp_path.glob(f"cut/inrun-*/work/{STATE}"))) == (keep_seconds == 0.0)
    rest = Clock()
    np.testing.assert_array_equal(
        matrix(scored(world, tmp_path / "cut", world.inputs(progress=rest), **settings)), expected
    )
    assert rest.announced["replaying training"] == (16 if keep_seconds == 0.0 else 40)


def test_a_replay_that_diverges_names_step_and_rows(world, tmp_path):
    with pytest.raises(ModelError, match=r"step [12].* rows? \d+.*learning_rate"):
        scored(world, tmp_path, learning_rate=1e30, batch_rows=4)


def test_a_single_block_is_scored_without_earlier_rows(world, tmp_path):
    inputs = world.inputs()
    scorer = InRun(configured_method("inrun", prefix_rows=20, **QUICK).method.settings).prepare(inputs, tmp_path, 0)
    whole = scorer.score(0, N_ROWS)
    np.testing.assert_array_equal(scorer.score(15, 25), whole[15:25])
    np.testing.assert_array_equal(scorer.score(30, 40), np.zeros((10, N_UNITS)))
