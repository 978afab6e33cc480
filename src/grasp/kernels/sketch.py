"""Seeded random projections: JL for hidden states, CountSketch for residuals, TensorSketch for their product.

Maps are drawn with numpy and applied with torch or scipy, so that they are equal on every device. Start with
`gaussian_projection`, `CountSketch` and `ProductMaps`. Labels `eq:` in "Source" are those of the paper;
docs/paper_map.md lists them.

Shape letters: P positions, N rows, H hidden width, V vocabulary, D sketch width, F frequencies.
"""

from abc import abstractmethod
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
from grasp.models.residuals import SparseResidual
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


@dataclass(frozen=True, slots=True)
class ProductMaps:
    """TensorSketch of the token-level product G_i = mean_t h~_t (x) D^{1/2} xi_t: two random maps, whitening folded in.

    <sketch_i, sketch_j> is an unbiased estimate of <G_i, G_j>, which the direct sum of the paper does not represent.
    The count sketches of the two factors are convolved by FFT per position and averaged in the frequency domain.
    """

    mean_H: Tensor
    hidden_HD: Tensor  # whitening, then CountSketch
    bucket_V: Tensor
    weight_V: Tensor  # sign * D^{1/2}
    width: int

    @classmethod
    def prepare(cls, whitener: Whitener, width: int, seed: int, device: torch.device) -> Self:
        """Draw both CountSketches, and fold the whitening into the dense one and D^{1/2} into the sparse one."""
        hidden = CountSketch.draw(len(whitener.mean_H), width, seed, "product-hidden")
        residual = CountSketch.draw(len(whitener.precondition_V), width, seed, "product-residual")
        weight_V = residual.sign * np.sqrt(whitener.precondition_V)
        return cls(
            mean_H=torch.from_numpy(whitener.mean_H).float().to(device),
            hidden_HD=torch.from_numpy(whitener.map_HH @ hidden.matrix().toarray()).float().to(device),
            bucket_V=torch.from_numpy(residual.bucket).to(device),
            weight_V=torch.from_numpy(weight_V).float().to(device),
            width=width,
        )

    def apply(self, hidden_PH: Tensor, residual: SparseResidual, row_P: Tensor, n_rows: int) -> Tensor:
        """Return sketches of `n_rows` rows, (n_rows, D), float32; `row_P` is the row of each position."""
        # Centre before projecting: a large mean would cancel in float32 after the projection.
        hidden_PD = (hidden_PH.float() - self.mean_H) @ self.hidden_HD
        residual_PD = torch.zeros_like(hidden_PD)
        signed_PK = residual.value_PK * self.weight_V[residual.index_PK]
        residual_PD.scatter_add_(1, self.bucket_V[residual.index_PK], signed_PK)
        # The count sketch of an outer product is the circular convolution of its factors': a product of spectra.
        # The inverse transform is linear, so it is applied once per row, after the mean over positions.
        product_PF = torch.fft.rfft(hidden_PD) * torch.fft.rfft(residual_PD)
        sum_NF = product_PF.new_zeros(n_rows, product_PF.shape[1]).index_add_(0, row_P, product_PF)
        positions_N = torch.bincount(row_P, minlength=n_rows).clamp(min=1)
        sketch_ND: Tensor = torch.fft.irfft(sum_NF / positions_N[:, None], n=self.width)
        return sketch_ND


class Sketch(Kernel):
    """A sketch of every row, independent of the units."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Return the number of columns."""

    @property
    def array(self) -> str:
        return self.name

    def spec(self, units: Batch) -> ArraySpec:
        return ArraySpec(self.width, unit="none", sign="none")


class SummarySketch(Sketch):
    """A sketch of the summary of a row, with moments over summaries as in the paper, or over positions."""

    @classmethod
    def moment_types_of(cls, settings: FeatureSettings) -> tuple[type[Moments], ...]:
        return (summary_moments(settings),)

    def whitener(self) -> Whitener:
        """Return the whitener of summaries."""
        return Whitener.from_settings(self.moments(summary_moments(self.settings)).value, self.settings)


def summary_moments(settings: FeatureSettings) -> type[FeatureMoments]:
    """Return the moments that whiten summaries: over summaries if these average some positions, else over positions."""
    return SummaryMoments if settings.summary_positions else HiddenMoments
