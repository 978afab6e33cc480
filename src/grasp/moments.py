"""Mean, standard deviation and scatter of columns in float64, accumulated over blocks of rows.

Start with `StreamingMoments`, which is updated block by block; its property `mean_std` computes z-scores.
Shape letters: N rows, B subsets, E columns. *Scatter* is the sum of squared deviations from the mean.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F32, F64, ratio

# A standard deviation below this fraction of the mean is rounding error, not variance.
RELATIVE_ZERO = 1e-9


@dataclass(frozen=True, slots=True)
class MeanStd:
    """Mean and standard deviation of each column over a sample (rows, or subsets), (E,); used for z-scores."""

    mean_E: F64
    std_E: F64

    @property
    def inverse_std_E(self) -> F64:  # noqa: N802 - a shape suffix
        """1 / std; 0 for a column without variance (up to rounding), which thereby contributes nothing."""
        return ratio(1.0, self.std_E, least=RELATIVE_ZERO * np.maximum(np.abs(self.mean_E), np.finfo(float).tiny))

    def z_scores(self, value_BE: F64) -> F64:
        """Return z-scores (x - mean) / std; 0 for columns without variance. Source: eq:component-predictor."""
        return np.asarray((value_BE - self.mean_E) * self.inverse_std_E)


@dataclass(slots=True)
class StreamingMoments:
    """Count, mean and scatter of columns, accumulated block by block.

    Blocks are merged by Chan's update: sum x^2 - n mean^2 would cancel if the mean is much larger than the standard
    deviation, as it is in some dimensions of hidden states.

    Attributes:
        n_rows: number of rows added so far.
        mean_E: mean of each column.
        scatter: sum of (x - mean)^2 of each column, (E,); with `products` the scatter matrix, the sum of the outer
            products of centred rows, (E, E).
        products: accumulate the scatter matrix, as covariances require.
    """

    n_rows: int = 0
    mean_E: F64 = field(default_factory=lambda: np.zeros(1))
    scatter: F64 = field(default_factory=lambda: np.zeros(1))
    products: bool = False

    @classmethod
    def from_blocks(cls, blocks: Iterable[tuple[int, NDArray[Any]]], out_NE: F32 | None = None) -> Self:
        """Accumulate moments over blocks of rows, and store the rows in `out_NE` if it is given."""
        moments = cls()
        for start, block in blocks:
            if out_NE is not None:
                out_NE[start : start + len(block)] = block
            moments.add(block)
        return moments

    def add(self, values_NE: NDArray[Any]) -> None:
        """Add a block of rows; an empty block changes nothing."""
        if not len(values_NE):
            return
        values_NE = np.asarray(values_NE, dtype=np.float64)
        mean_E = np.ones(len(values_NE)) @ values_NE / len(values_NE)  # a matrix product is the fastest sum over rows
        centred_NE = values_NE - mean_E
        scatter = centred_NE.T @ centred_NE if self.products else np.einsum("ne,ne->e", centred_NE, centred_NE)
        self._combine(len(values_NE), mean_E, scatter)

    def merge(self, other: Self) -> None:
        """Add the rows of another accumulator of the same columns."""
        if other.n_rows:
            self._combine(other.n_rows, other.mean_E, other.scatter)

    def _combine(self, n_new: int, mean_E: F64, scatter: F64) -> None:
        n_rows, shift_E = self.n_rows + n_new, mean_E - self.mean_E
        # Chan: S = S_a + S_b + n_a n_b / (n_a + n_b) (mean_b - mean_a)(mean_b - mean_a)^T
        between = np.outer(shift_E, shift_E) if self.products else shift_E**2
        self.scatter = (self.scatter + scatter) + between * (self.n_rows * n_new / n_rows)
        self.mean_E, self.n_rows = self.mean_E + shift_E * (n_new / n_rows), n_rows

    @property
    def mean_std(self) -> MeanStd:
        """Mean and population standard deviation (divisor N) of each column; undefined with `products`."""
        return MeanStd(self.mean_E, np.sqrt(self.scatter / self.n_rows))
