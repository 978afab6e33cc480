"""Fixed seeded linear maps: JL for hidden states, CountSketch for residuals, TensorSketch for their product.

One distribution on every device: maps are drawn with numpy and only applied with torch or scipy.
Shape letters: H hidden width, V vocabulary, D sketch width.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.features.moments import F64
from grasp.seeds import stream


def gaussian_projection(width: int, hidden_size: int, seed: int) -> F64:
    """JL map P_h, (D, H), entries N(0, 1/D), so that inner products are kept in expectation.

    Whitened hidden states are isotropic: no principal axis is better than another, hence a random map. Where the
    sketch is as wide as the state the map is the identity and the sketch is exact.
    """
    if width >= hidden_size:
        return np.eye(hidden_size)
    draw = stream(seed, "sketch", "hidden", width, hidden_size).standard_normal((width, hidden_size))
    return np.asarray(draw / np.sqrt(width), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class CountSketch:
    """Each input coordinate goes to one of D buckets with a sign; unbiased for inner products."""

    bucket: NDArray[np.int64]
    sign: F64
    width: int

    @classmethod
    def draw(cls, size: int, width: int, seed: int, purpose: str) -> Self:
        generator = stream(seed, "sketch", purpose, width, size)
        return cls(
            bucket=generator.integers(0, width, size=size),
            sign=generator.choice(np.array([-1.0, 1.0]), size=size),
            width=width,
        )

    def matrix(self, weight: F64) -> csr_array:
        """(size, D) sparse map of diag(weight) followed by the sketch."""
        rows = np.arange(len(self.bucket) + 1)
        shape = (len(self.bucket), self.width)
        return csr_array((self.sign * weight, self.bucket, rows), shape=shape)

    def dense(self) -> F64:
        """(size, D) dense map; for small inputs only."""
        out = np.zeros((len(self.bucket), self.width))
        out[np.arange(len(self.bucket)), self.bucket] = self.sign
        return out
