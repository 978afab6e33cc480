"""Replays train like the runs of `experiments.finetune`; a row is scored by the orders that contain it."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.replay.run import added, drawn, filled, predicted, probed
from experiments.replay.setting import Rows, optimizer_settings
from experiments.worlds.setting import Corpus
from experiments.worlds.training import Recipe, train
from grasp.training.adamw import AdamWTraining
from grasp.training.metagradient import Metagradient, middle_steps
from grasp.training.recipe import OptimizerRecipe
from grasp.training.trajectory import Trajectory
from tests.models.toy import InMemoryRows

RNG = np.random.default_rng(0)
ROWS = [RNG.integers(1, 40, size=8).astype(np.int32) for _ in range(7)]


def test_a_trajectory_with_the_recipe_of_the_runs_equals_their_training():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, pad_token_id=None, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    recipe = Recipe("small", "a model", steps=6, batch_rows=3, learning_rate=1e-3, bfloat16=False)
    theirs, ours = copy.deepcopy(model), copy.deepcopy(model)
    first_N = np.array([1, 2, 1, 4, 1, 1, 3])
    losses = train(theirs, ROWS, first_N, range(7), recipe)
    masks = [np.arange(8) >= first for first in first_N]
    order = [np.array(batch) for batch in recipe.batches(range(7))]
    training = AdamWTraining(ours, OptimizerRecipe(**optimizer_settings(recipe)))
    trajectory = Trajectory(training, InMemoryRows.from_rows(ROWS, masks), order)
    # sums in another order, in float32, through two layers and six steps
    np.testing.assert_allclose(trajectory.train(), losses, atol=1e-5)
    for parameter, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=0, atol=2e-5)


def test_rows_keep_their_first_token_with_loss():
    class Store:
        n_rows, fingerprint = 7, "x"

        def rows(self, index):
            batch = InMemoryRows.from_rows(ROWS).rows(index)
            return SimpleNamespace(flat_ids=batch.flat_ids, offsets=batch.offsets, table=None)

    store = Store()
    rows = Rows(Corpus(store, np.array([1, 2, 1, 9, 1, 1, 3]), None))
    batch = rows.rows(np.array([1, 3, 6]))
    assert batch.loss_mask.reshape(3, 8).sum(axis=1).tolist() == [6, 0, 5]
    assert rows.n_rows == 7


def result(order_KB, drawn_KBT):
    steps, _, n_targets = drawn_KBT.shape
    empty = np.zeros((steps, n_targets))
    probe_MNT = np.random.default_rng(1).standard_normal((2, 4, n_targets))
    return Metagradient(np.array(order_KB), drawn_KBT, np.array([0, 1]), probe_MNT, empty[0], empty)


def test_rows_in_no_order_have_no_score_and_are_ignored_in_subsets():
    replay = result([[0, 1], [2, 0]], np.array([[[1.0], [3.0]], [[5.0], [2.0]]]))
    score_NT = drawn([replay], 4)
    spread = np.std([3.0, 3.0, 5.0])
    np.testing.assert_allclose(score_NT[:3, 0], np.array([3.0, 3.0, 5.0]) / spread)
    assert np.isnan(score_NT[3]).all()
    np.testing.assert_allclose(predicted(score_NT, np.array([[0.25, 0.0, 0.25, 0.5]])), [[4.0 / spread]])
    assert filled(score_NT)[3] == pytest.approx(score_NT[:3].mean())
    first = drawn([replay], 4, 0.0, 0.5)
    np.testing.assert_allclose(first[:2, 0], [1.0, 3.0])
    assert np.isnan(first[2:]).all()
    second_replay = result([[3, 3], [3, 3]], np.ones((2, 2, 1)))
    second_replay.order_KB[1, 1] = 2
    score_NT = drawn([replay], 4)
    both_NT = drawn([replay, second_replay], 4)
    np.testing.assert_allclose(both_NT[:2], score_NT[:2])
    np.testing.assert_allclose(both_NT[2:, 0], [(score_NT[2, 0] + 1.0) / 2, 3.0])  # spread of 3 and 1 is 1
    np.testing.assert_allclose(probed([replay, replay]), replay.probed())
    assert added(score_NT, replay.probed()).std() > 0


def test_probe_steps_are_spread_evenly():
    assert middle_steps(192, 5) == (19, 57, 96, 134, 172)
    assert middle_steps(48, 4) == (6, 18, 30, 42)
