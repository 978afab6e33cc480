"""Fixed seeded linear maps: JL for hidden states, CountSketch for residuals, TensorSketch for their product.

One distribution on every device: maps are drawn with numpy and only applied with torch or scipy.
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

    bucket: I64
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

    def matrix(self, weight: F64 | float = 1.0) -> csr_array:
        """(size, D) sparse map of diag(weight) followed by the sketch."""
        size = len(self.bucket)
        return csr_array((self.sign * weight, self.bucket, np.arange(size + 1)), shape=(size, self.width))


@dataclass(frozen=True, slots=True)
class ProductMaps:
    """TensorSketch of the token-level product G_i = mean_t h~_t (x) D^{1/2} xi_t: two random maps, whitening folded in.

    <sketch_i, sketch_j> estimates <G_i, G_j> without bias, the geometry that the direct sum of the paper gives up. The
    count sketches of the two factors are convolved by FFT per position and averaged in the frequency domain.
    """

    mean_H: Tensor
    hidden_HD: Tensor  # whitening, then CountSketch
    bucket_V: Tensor
    weight_V: Tensor  # sign * D^{1/2}
    width: int

    @classmethod
    def prepare(cls, whitener: Whitener, width: int, seed: int, device: torch.device) -> Self:
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
        """Sketches of `n_rows` rows, (n_rows, D), float32; `row_P` says which row each position belongs to."""
        hidden_PD = (hidden_PH.float() - self.mean_H) @ self.hidden_HD
        residual_PD = torch.zeros_like(hidden_PD)
        signed_PK = residual.value_PK * self.weight_V[residual.index_PK]
        residual_PD.scatter_add_(1, self.bucket_V[residual.index_PK], signed_PK)
        # The count sketch of an outer product is the circular convolution of its factors': a product of spectra.
        # The inverse transform is linear, so it is taken once a row, after the mean over positions.
        product_PF = torch.fft.rfft(hidden_PD) * torch.fft.rfft(residual_PD)
        sum_NF = product_PF.new_zeros(n_rows, product_PF.shape[1]).index_add_(0, row_P, product_PF)
        positions_N = torch.bincount(row_P, minlength=n_rows).clamp(min=1)
        sketch_ND: Tensor = torch.fft.irfft(sum_NF / positions_N[:, None], n=self.width)
        return sketch_ND


class Sketch(Kernel):
    """A sketch of every row: it has nothing to do with units."""

    @property
    @abstractmethod
    def width(self) -> int:
        """Return how many numbers it has."""

    @property
    def array(self) -> str:
        return self.name

    def spec(self, units: Batch) -> ArraySpec:
        return ArraySpec(self.width, unit="none", sign="none")


class SummarySketch(Sketch):
    """A sketch of the summary of a row: with moments of summaries as in the paper, or with those of positions."""

    @classmethod
    def kinds_of(cls, settings: FeatureSettings) -> tuple[type[Moments], ...]:
        return (summary_moments(settings),)

    def whitener(self) -> Whitener:
        """Return what whitens and preconditions summaries."""
        return Whitener.of(self.moments(summary_moments(self.settings)).value, self.settings)


def summary_moments(settings: FeatureSettings) -> type[FeatureMoments]:
    """Return the moments that whiten summaries: of summaries where they average some positions, else of positions."""
    return SummaryMoments if settings.summary_positions else HiddenMoments
