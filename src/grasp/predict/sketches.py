"""Sketches (64 numbers that stand for a row) ready to be summed over subsets.

Shape letters: B subsets, N rows, D sketch width.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from grasp.predict.geometry import SketchSums, SketchTotals
from grasp.predict.row_arrays import F32, F64, Blocks, RowArrays
from grasp.predict.row_sums import RowSums
from grasp.predict.standardize import PairSums, RowMoments
from grasp.predict.weights import Weights, is_plain, squared

BLOCK_ROWS = 8_192


@dataclass(frozen=True, slots=True)
class Sketch:
    """One sketch of every row, with ||phi||^2 beside it."""

    totals: SketchTotals
    norms: RowMoments  # of ||phi||^2 over the corpus
    held: RowSums  # of the sketch, and of ||phi||^2 as the last column
    artifact: RowArrays
    name: str  # of its array

    @classmethod
    def of(cls, artifact: RowArrays, half: str) -> Self:
        """Read the sketch once for its totals, and once more to hold it where it fits."""

        name = f"{half}_sketch"

        def blocks() -> Blocks:
            return _with_norms(artifact.array_blocks(name))

        parts = [(block.sum(axis=0, dtype=np.float64), RowMoments.of(block[:, -1:])) for _, block in blocks()]
        total_C = np.sum([total for total, _ in parts], axis=0)
        norms = functools.reduce(RowMoments.merge, (moments for _, moments in parts))
        totals = SketchTotals(total_C[:-1], float(total_C[-1]), norms.n_rows)
        held = RowSums(blocks, artifact.n_rows, len(total_C))
        return cls(totals, norms, held, artifact, name)

    def blocks(self) -> Blocks:
        """The sketch in blocks of BLOCK_ROWS, from memory where it is held."""
        held_NC = self.held.held_NC
        if held_NC is None:
            yield from self.artifact.array_blocks(self.name, block_rows=BLOCK_ROWS)
            return
        for start in range(0, len(held_NC), BLOCK_ROWS):
            yield start, held_NC[start : start + BLOCK_ROWS, :-1]

    def rows(self, row_index: NDArray[np.int64]) -> F32:
        """Chosen rows, in the order given."""
        held_NC = self.held.held_NC
        return self.artifact.array_rows(self.name, row_index) if held_NC is None else held_NC[row_index, :-1]

    def dot(self, vector_D: F64) -> F64:
        """<phi_i, vector> of every row, (N,)."""
        return np.concatenate([np.einsum("nd,d->n", block, vector_D) for _, block in self.blocks()])

    def norms_of_rows(self) -> F64:
        """||phi_i||^2 of every row, (N,)."""
        parts = [np.einsum("nd,nd->n", block, block, dtype=np.float64) for _, block in self.blocks()]
        return np.concatenate(parts)

    def sums(self, weights: Weights) -> SketchSums:
        """Sums over B subsets."""
        both_BC = self.held.sums(weights)
        square_B = both_BC[:, -1] if is_plain(weights) else self.held.sums(squared(weights))[:, -1]
        return SketchSums(both_BC[:, :-1], both_BC[:, -1], square_B)


def pair_sums(sketches: Sequence[Sketch]) -> PairSums:
    """Sums over pairs of rows of one sketch, or of several side by side; one pass."""
    sums = PairSums.empty(np.concatenate([sketch.totals.mean_D for sketch in sketches]))
    for parts in zip(*(sketch.blocks() for sketch in sketches), strict=True):
        sums = sums.plus(np.concatenate([block for _, block in parts], axis=1))
    return sums


def _with_norms(blocks: Blocks) -> Iterator[tuple[int, F32]]:
    for start, block in blocks:
        norm_n = np.einsum("nd,nd->n", block, block, dtype=np.float64)
        yield start, np.column_stack([block, norm_n]).astype(np.float32, copy=False)
