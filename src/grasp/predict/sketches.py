"""Sketches of rows: what rows are like, whatever they are good for. Two sets of rows are alike if their sums are.

Shape letters: B subsets, N rows, D sketch width.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.predict.row_arrays import cached
from grasp.predict.row_sums import RowSums, block_rows
from grasp.predict.weights import Weights


@dataclass(frozen=True, slots=True)
class Sketch:
    """One sketch of every row."""

    held: RowSums
    total_D: F64  # over the corpus

    @classmethod
    def from_artifact(cls, artifact: ArtifactReader, half: str) -> Self:
        """Read the sketch, and hold it where it fits."""
        name = f"{half}_sketch"
        width = next(artifact.array_blocks(name, block_rows=1))[1].shape[1]
        held = RowSums(lambda: artifact.array_blocks(name, block_rows=block_rows(width)), artifact.n_rows, width)
        totals = (block.sum(axis=0, dtype=np.float64) for _, block in held.blocks())
        return cls(held, cached(artifact, name, 8 * width, lambda: np.asarray(np.sum(list(totals), axis=0))))

    @property
    def width(self) -> int:
        """D."""
        return self.held.width

    def sums(self, weights: Weights) -> F64:
        """sum_i w_i phi_i of every subset, (B, D)."""
        return self.held.sums(weights)

    def dot(self, vector_D: F64) -> F64:
        """<phi_i, vector> of every row, (N,)."""
        return self.held.dot(vector_D)
