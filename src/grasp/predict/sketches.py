"""Sketches of the rows, ready to be summed over subsets. Shape letters: B subsets, N rows, D sketch width."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from grasp.predict.geometry import SketchSums, SketchTotals
from grasp.predict.row_arrays import F32, Blocks, RowArrays
from grasp.predict.row_sums import RowSums
from grasp.predict.standardize import PairSums, RowMoments
from grasp.predict.weights import Weights, is_plain, squared

PAIR_ROWS = 8_192


@dataclass(frozen=True, slots=True)
class Sketch:
    """One sketch of every row, with ||phi||^2 beside it."""

    totals: SketchTotals
    norms: RowMoments  # of ||phi||^2 over the corpus
    held: RowSums  # of the sketch, and of ||phi||^2 as the last column
    read: Callable[[int], Blocks]

    @classmethod
    def of(cls, artifact: RowArrays, half: str) -> Self:
        """Read the sketch once for its totals, and once more to hold it where it fits."""

        def blocks() -> Blocks:
            return _with_norms(artifact.array_blocks(f"{half}_sketch"))

        parts = [(block.sum(axis=0, dtype=np.float64), RowMoments.of(block[:, -1:])) for _, block in blocks()]
        total_C = np.sum([total for total, _ in parts], axis=0)
        norms = functools.reduce(RowMoments.merge, (moments for _, moments in parts))
        totals = SketchTotals(total_C[:-1], float(total_C[-1]), norms.n_rows)
        held = RowSums(blocks, artifact.n_rows, len(total_C))
        return cls(totals, norms, held, lambda rows: artifact.array_blocks(f"{half}_sketch", block_rows=rows))

    def blocks(self, block_rows: int) -> Blocks:
        """The sketch in blocks of so many rows, from memory where it is held."""
        held_NC = self.held.held_NC
        if held_NC is None:
            yield from self.read(block_rows)
            return
        for start in range(0, len(held_NC), block_rows):
            yield start, held_NC[start : start + block_rows, :-1]

    def sums(self, weights: Weights) -> SketchSums:
        """Sums over B subsets."""
        both_BC = self.held.sums(weights)
        square_B = both_BC[:, -1] if is_plain(weights) else self.held.sums(squared(weights))[:, -1]
        return SketchSums(both_BC[:, :-1], both_BC[:, -1], square_B)


def pair_sums(sketches: Sequence[Sketch]) -> PairSums:
    """Sums over pairs of rows of one sketch, or of several side by side; one pass."""
    sums = PairSums.empty(np.concatenate([sketch.totals.mean_D for sketch in sketches]))
    for parts in zip(*(sketch.blocks(PAIR_ROWS) for sketch in sketches), strict=True):
        sums = sums.plus(np.concatenate([block for _, block in parts], axis=1))
    return sums


def _with_norms(blocks: Blocks) -> Iterator[tuple[int, F32]]:
    for start, block in blocks:
        norm_n = np.einsum("nd,nd->n", block, block, dtype=np.float64)
        yield start, np.column_stack([block, norm_n]).astype(np.float32, copy=False)
