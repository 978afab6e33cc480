"""A recipe and a corpus small enough to train many times in a test."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grasp.targets import UnitTokens
from grasp.training.llama import LlamaShape
from grasp.training.recipe import TrainingRecipe

RECIPE = TrainingRecipe(
    name="toy",
    shape=LlamaShape(vocab_size=32, hidden=16, intermediate=24, layers=2, heads=2, context=12),
    steps=12,
    batch_rows=6,
    learning_rate=1e-2,
    warmup_steps=2,
)


@dataclass(frozen=True, slots=True)
class InMemoryRows:
    """Rows in memory with the interface of a row store."""

    flat_ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    loss_mask: NDArray[np.bool_] | None = None

    @classmethod
    def from_rows(
        cls, rows: Sequence[Sequence[int] | NDArray[np.int32]], loss_mask: Sequence[NDArray[np.bool_]] | None = None
    ) -> "InMemoryRows":
        flat = [np.asarray(row, dtype=np.int32) for row in rows]
        offsets = np.cumsum([0, *(len(row) for row in flat)], dtype=np.int64)
        masks = None if loss_mask is None else np.concatenate([*loss_mask, np.zeros(0, np.bool_)])
        return cls(np.concatenate(flat) if flat else np.zeros(0, np.int32), offsets, masks)

    @property
    def n_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(self.flat_ids.tobytes(), digest_size=16)
        digest.update(self.offsets.tobytes())
        if self.loss_mask is not None:
            digest.update(np.packbits(self.loss_mask).tobytes())
        return digest.hexdigest()

    def rows(self, row_index: NDArray[np.int64], /) -> "InMemoryRows":
        spans = [slice(self.offsets[i], self.offsets[i + 1]) for i in row_index]
        masks = None if self.loss_mask is None else [self.loss_mask[span] for span in spans]
        return InMemoryRows.from_rows([self.flat_ids[span] for span in spans], masks)


def corpus(n_rows=40):
    """Return rows of 4 to 12 tokens that count up from a random start, which a model can learn."""
    rng = np.random.default_rng(0)
    return InMemoryRows.from_rows([(rng.integers(32) + np.arange(rng.integers(4, 13))) % 32 for _ in range(n_rows)])


def units():
    return [UnitTokens((k + np.arange(3 + k % 5)).astype(np.int32) % 32, 1 + k % 2) for k in range(9)]
