"""Mean, standard deviation and scatter of columns in float64, accumulated over blocks of rows.

Start with `StreamingMoments`, which is updated block by block; its property `mean_std` computes z-scores.
Shape letters: N rows, B subsets, C columns. *Scatter* is the sum of squared deviations from the mean.
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
    """Mean and standard deviation of each column over a sample of rows or of subsets, for z-scores.

    Attributes:
        mean_C: means, (C,).
        std_C: standard deviations, (C,).
    """

    mean_C: F64
    std_C: F64

    @property
    def inverse_std_C(self) -> F64:  # noqa: N802 - a shape suffix
        """Return 1 / std, (C,); 0 for a column without variance (up to rounding), which then contributes nothing."""
        return ratio(1.0, self.std_C, minimum=RELATIVE_ZERO * np.maximum(np.abs(self.mean_C), np.finfo(float).tiny))

    def z_scores(self, value_BC: F64) -> F64:
        """Return z-scores (x - mean) / std; 0 without variance. Source: eq:component-predictor of the paper."""
        return np.asarray((value_BC - self.mean_C) * self.inverse_std_C)


@dataclass(slots=True)
class StreamingMoments:
    """Count, mean and scatter of columns, accumulated block by block.

    Blocks are merged by Chan's update: sum x^2 - n mean^2 would cancel if the mean is much larger than the standard
    deviation, as it is in some dimensions of hidden states.

    Attributes:
        n_rows: number of rows added so far.
        mean_C: mean of each column.
        scatter: sum of (x - mean)^2 of each column, (C,); with `products` the scatter matrix, the sum of the outer
            products of centred rows, (C, C).
        products: accumulate the scatter matrix, as covariances require.
    """

    n_rows: int = 0
    mean_C: F64 = field(default_factory=lambda: np.zeros(1))
    scatter: F64 = field(default_factory=lambda: np.zeros(1))
    products: bool = False

    @classmethod
    def from_blocks(cls, blocks: Iterable[tuple[int, NDArray[Any]]], out_NC: F32 | None = None) -> Self:
        """Accumulate moments over blocks of rows.

        Args:
            blocks: index of the first row of each block, and its rows.
            out_NC: array that receives a copy of all rows; None: none is made.
        """
        moments = cls()
        for start, block in blocks:
            if out_NC is not None:
                out_NC[start : start + len(block)] = block
            moments.add(block)
        return moments

    def add(self, values_NC: NDArray[Any]) -> None:
        """Add a block of rows; an empty block changes nothing."""
        if not len(values_NC):
            return
        values_NC = np.asarray(values_NC, dtype=np.float64)
        mean_C = np.ones(len(values_NC)) @ values_NC / len(values_NC)  # a matrix product is the fastest sum over rows
        centred_NC = values_NC - mean_C
        scatter = centred_NC.T @ centred_NC if self.products else np.einsum("nc,nc->c", centred_NC, centred_NC)
        self._combine(len(values_NC), mean_C, scatter)

    def merge(self, other: Self) -> None:
        """Add the rows of another accumulator of the same columns."""
        if other.n_rows:
            self._combine(other.n_rows, other.mean_C, other.scatter)

    def _combine(self, n_new: int, mean_C: F64, scatter: F64) -> None:
        """Add `n_new` rows of which mean and scatter are known."""
        n_rows, shift_C = self.n_rows + n_new, mean_C - self.mean_C
        # Chan: S = S_a + S_b + n_a n_b / (n_a + n_b) (mean_b - mean_a)(mean_b - mean_a)^T
        between = np.outer(shift_C, shift_C) if self.products else shift_C**2
        self.scatter = (self.scatter + scatter) + between * (self.n_rows * n_new / n_rows)
        self.mean_C, self.n_rows = self.mean_C + shift_C * (n_new / n_rows), n_rows

    @property
    def mean_std(self) -> MeanStd:
        """Return mean and population standard deviation (divisor N) of each column; undefined with `products`."""
        return MeanStd(self.mean_C, np.sqrt(self.scatter / self.n_rows))
