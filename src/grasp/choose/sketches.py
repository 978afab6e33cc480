"""Sketches of the rows, side by side, as a selection reads them: products with a vector, and chosen rows.

Shape letters: N rows of the corpus, n chosen ones, D widths of all sketches together.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from grasp.choose.limits import I64
from grasp.predict.row_arrays import F64
from grasp.predict.sketches import Sketch

CHOSEN_ROWS = 65_536  # that are read at once


@dataclass(frozen=True, slots=True)
class SketchRows:
    """The sketches that geometry is taken of, by half: hidden, residual, product."""

    halves: Mapping[str, Sketch]

    @property
    def mean_D(self) -> F64:  # noqa: N802 - a shape suffix
        """phi-bar of all of them."""
        return np.concatenate([sketch.totals.mean_D for sketch in self.halves.values()])

    def norms(self) -> dict[str, F64]:
        """||phi_i||^2 of every row, (N,) by half."""
        return {half: sketch.norms_of_rows() for half, sketch in self.halves.items()}

    def sum_of(self, row_index: I64) -> F64:
        """Sum of chosen rows, (D,), float64."""
        parts = (self.rows(row_index[at : at + CHOSEN_ROWS]) for at in range(0, len(row_index), CHOSEN_ROWS))
        return sum((part.sum(axis=0) for part in parts), np.zeros(len(self.mean_D)))

    def rows(self, row_index: I64) -> F64:
        """Chosen rows, in the order given: (n, D), float64."""
        parts = [sketch.rows(row_index).astype(np.float64) for sketch in self.halves.values()]
        return np.concatenate(parts, axis=1)

    def dot(self, vector_D: F64) -> F64:
        """<phi_i, vector> of every row, (N,), float64."""
        return np.asarray(sum(sketch.dot(vector) for sketch, vector in self._with(vector_D)))

    def dot_rows(self, row_index: I64, vector_D: F64) -> F64:
        """<phi_i, vector> of chosen rows, (n,), the same numbers as `dot`."""
        out_n = np.zeros(len(row_index))
        for start in range(0, len(row_index), CHOSEN_ROWS):
            part = slice(start, start + CHOSEN_ROWS)
            for sketch, vector in self._with(vector_D):
                out_n[part] += np.einsum("nd,d->n", sketch.rows(row_index[part]), vector)
        return out_n

    def _with(self, vector_D: F64) -> Iterator[tuple[Sketch, F64]]:
        """Every sketch with its part of a vector."""
        cuts = np.cumsum([len(sketch.totals.mean_D) for sketch in self.halves.values()])[:-1]
        return zip(self.halves.values(), np.split(vector_D, cuts), strict=True)
