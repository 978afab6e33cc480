"""A recipe and a corpus small enough to train many times in a test."""

import numpy as np

from grasp.runs.llama import LlamaShape
from grasp.runs.recipe import TrainingRecipe
from grasp.runs.training_rows import InMemoryRows
from grasp.targets import UnitTokens

RECIPE = TrainingRecipe(
    name="toy",
    shape=LlamaShape(vocab_size=32, hidden=16, intermediate=24, layers=2, heads=2, context=12),
    steps=12,
    batch_rows=6,
    learning_rate=1e-2,
    warmup_steps=2,
)


def corpus(n_rows=40):
    """Rows that count up from a random start, of 4 to 12 tokens: something to learn."""
    rng = np.random.default_rng(0)
    return InMemoryRows.of([(rng.integers(32) + np.arange(rng.integers(4, 13))) % 32 for _ in range(n_rows)])


def units():
    return [UnitTokens((k + np.arange(3 + k % 5)).astype(np.int32) % 32, 1 + k % 2) for k in range(9)]
