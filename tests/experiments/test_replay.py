"""Replays train like the runs of `experiments.finetune`; a row is scored by the orders that contain it."""

import copy

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.replay.setting import optimizer_settings
from experiments.worlds.training import Recipe, train
from grasp.training.adamw import AdamWTraining
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
