"""Sketches of the rows, side by side, as a selection reads them: products with a vector, and chosen rows.

What a predictor holds in memory is used from there; what does not fit stays on disk and is read in blocks.
Shape letters: N rows of the corpus, n rows of a block or chosen ones, D widths of all halves together.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grasp.predict.row_arrays import F32, F64, RowArrays
from grasp.predict.sketches import Sketch

BLOCK_ROWS = 8_192
CHOSEN_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class SketchRows:
    """The halves that an objective bends over."""

    artifact: RowArrays
    sketches: Mapping[str, Sketch]
    halves: tuple[str, ...]

    @property
    def width(self) -> int:
        """D."""
        return sum(len(self.mean(half)) for half in self.halves)

    def mean(self, half: str) -> F64:
        """phi-bar of one half."""
        return self.sketches[half].totals.mean_D

    def split(self, vector_D: F64) -> Mapping[str, F64]:
        """A vector over all halves as one vector a half."""
        cuts = np.cumsum([len(self.mean(half)) for half in self.halves])[:-1]
        return dict(zip(self.halves, np.split(vector_D, cuts), strict=True))

    def joined(self, parts: Mapping[str, F64]) -> F64:
        """One vector a half as a vector over all halves, (D,)."""
        return np.concatenate([parts[half] for half in self.halves])

    def blocks(self) -> Iterator[tuple[int, tuple[F32, ...]]]:
        """(first row, (n, width) of every half), rows from first to last; the same cuts for every half."""
        readers = [self.sketches[half].blocks(BLOCK_ROWS) for half in self.halves]
        for parts in zip(*readers, strict=True):
            yield parts[0][0], tuple(block for _, block in parts)

    def norms(self) -> Mapping[str, F64]:
        """||phi_i||^2 of every row, (N,) by half."""
        out = {half: np.empty(self.artifact.n_rows) for half in self.halves}
        for start, parts in self.blocks():
            for half, block in zip(self.halves, parts, strict=True):
                out[half][start : start + len(block)] = np.einsum("nd,nd->n", block, block, dtype=np.float64)
        return out

    def dot(self, vector_D: F64) -> F64:
        """<phi_i, vector> of every row, (N,), float64."""
        out_N = np.zeros(self.artifact.n_rows)
        vectors = self.split(vector_D)
        for start, parts in self.blocks():
            for half, block in zip(self.halves, parts, strict=True):
                out_N[start : start + len(block)] += np.einsum("nd,d->n", block, vectors[half])
        return out_N

    def rows(self, row_index: NDArray[np.int64]) -> F64:
        """Chosen rows, in the order given: (n, D), float64."""
        out_nD = np.empty((len(row_index), self.width))
        start = 0
        for half in self.halves:
            part = self._half_rows(half, row_index)
            out_nD[:, start : start + part.shape[1]] = part
            start += part.shape[1]
        return out_nD

    def dot_rows(self, row_index: NDArray[np.int64], vector_D: F64) -> F64:
        """<phi_i, vector> of chosen rows, (n,), the same numbers as `dot`."""
        out_n = np.zeros(len(row_index))
        vectors = self.split(vector_D)
        for start in range(0, len(row_index), CHOSEN_ROWS):
            part = slice(start, start + CHOSEN_ROWS)
            for half in self.halves:
                out_n[part] += np.einsum("nd,d->n", self._half_rows(half, row_index[part]), vectors[half])
        return out_n

    def _half_rows(self, half: str, row_index: NDArray[np.int64]) -> F32:
        held_NC = self.sketches[half].held.held_NC
        if held_NC is None:
            return self.artifact.array_rows(f"{half}_sketch", row_index)
        return held_NC[row_index, :-1]
