"""Sketches of rows: random projections that preserve inner products, JL of hidden states, CountSketch of residuals.

A sketch is the projection of a row's mean hidden state, whitened, or of its mean residual, preconditioned. Maps are
drawn with numpy and applied with torch or scipy, so that they are equal on every device. Start with
`gaussian_projection` and `CountSketch`. Labels `eq:` in "Source" are those of the paper; docs/paper_map.md lists them.

Shape letters: B rows, P positions, K kept per residual, H hidden width, V vocabulary, D sketch width.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from grasp.arrays import F64, I64
from grasp.artifact.writer import ArraySpec
from grasp.kernels.kernel import Batch, Kernel
from grasp.kernels.whitening import FeatureMoments, HiddenMoments, Moments, SummaryMoments, Whitener
from grasp.seeds import stream
from grasp.settings import FeatureSettings


def gaussian_projection(width: int, hidden_size: int, seed: int) -> F64:
    """Draw a Johnson-Lindenstrauss map P_h, (D, H), with entries N(0, 1/D): inner products are unbiased.

    Whitened hidden states are isotropic, so that no principal axis is better than another: hence a random map. If the
    sketch is as wide as the state, the map is the identity and the sketch is exact.
    """
    if width >= hidden_size:
        return np.eye(hidden_size)
    draw = stream(seed, "sketch", "hidden", width, hidden_size).standard_normal((width, hidden_size))
    return np.asarray(draw / np.sqrt(width), dtype=np.float64)


@dataclass(frozen=True, slots=True)
class CountSketch:
    """A CountSketch: each coordinate is added to one of D buckets with a random sign; unbiased inner products."""

    bucket: I64
    sign: F64
    width: int

    @classmethod
    def draw(cls, size: int, width: int, seed: int, purpose: str) -> Self:
        """Draw a bucket and a sign for each of `size` coordinates; `purpose` names the random stream."""
        generator = stream(seed, "sketch", purpose, width, size)
        return cls(
            bucket=generator.integers(0, width, size=size),
            sign=generator.choice(np.array([-1.0, 1.0]), size=size),
            width=width,
        )

    def matrix(self, weight: F64 | float = 1.0) -> csr_array:
        """Return the sparse map of diag(weight) followed by the sketch, (size, D)."""
        size = len(self.bucket)
        return csr_array((self.sign * weight, self.bucket, np.arange(size + 1)), shape=(size, self.width))


class Sketch(Kernel):
    """A sketch of every row, independent of the units; `prepare` sets `width`, the number of columns."""

    prefix = ""
    width: int

    def spec(self, units: Batch) -> ArraySpec:
        return ArraySpec(self.width, unit="none", sign="none")


class SummarySketch(Sketch):
    """A sketch of the summary of a row, with moments over summaries as in the paper, or over positions."""

    @classmethod
    def moment_types_of(cls, settings: FeatureSettings) -> tuple[type[Moments], ...]:
        """Return the moments of summaries, which are over positions if summaries average all of them."""
        return (SummaryMoments if settings.summary_positions else HiddenMoments,)

    def whitener(self) -> Whitener:
        """Return the whitener of summaries."""
        (moment_type,) = self.moment_types_of(self.settings)
        moments = self.corpus.by_type[moment_type]
        assert isinstance(moments, FeatureMoments)
        return Whitener.from_settings(moments.value, self.settings)


class HiddenSketch(SummarySketch):
    """The sketch of hidden states. Source: eq:feature-sketch of the paper."""

    name = "hidden_sketch"

    def prepare(self, units: Batch) -> None:
        self.width, whitener = min(self.settings.hidden_width, self.model.hidden_size), self.whitener()
        project_DH = gaussian_projection(self.settings.hidden_width, self.model.hidden_size, self.settings.seed)
        self._mean_H = torch.from_numpy(whitener.mean_H).to(self.model.device)
        # Whitening and projection are linear and applied to the mean of a row, so one matrix does both.
        self._map_HD = torch.from_numpy(whitener.map_HH @ project_DH.T).to(self.model.device)

    def score(self, batch: Batch) -> Tensor:
        sum_BH = self._mean_H.new_zeros(batch.n_rows, len(self._mean_H)).index_add_(
            0, batch.row_P, batch.hidden_PH.double()
        )
        return ((sum_BH / batch.positions_B[:, None] - self._mean_H) @ self._map_HD).float()


class ResidualSketch(SummarySketch):
    """The sketch of residuals. Source: eq:feature-sketch of the paper."""

    name = "residual_sketch"

    def prepare(self, units: Batch) -> None:
        self.width = self.settings.residual_width
        sketch = CountSketch.draw(self.model.vocab_size, self.width, self.settings.seed, "residual")
        self._bucket_V = torch.from_numpy(sketch.bucket).to(self.model.device)
        # D^{1/2} on both sides of an inner product is the D of the residual match.
        weight_V = sketch.sign * np.sqrt(self.whitener().precondition_V)
        self._weight_V = torch.from_numpy(weight_V).float().to(self.model.device)

    def score(self, batch: Batch) -> Tensor:
        index_PK = batch.residual.index_PK
        value_PK = batch.residual.value_PK.float() * self._weight_V[index_PK]
        # index_add_ over (row, bucket) sums the coordinates of all positions of a row in one pass
        bucket_PK = batch.row_P[:, None] * self.width + self._bucket_V[index_PK]
        sum_BD = value_PK.new_zeros(batch.n_rows * self.width).index_add_(0, bucket_PK.flatten(), value_PK.flatten())
        return sum_BD.view(batch.n_rows, self.width) / batch.positions_B[:, None]
