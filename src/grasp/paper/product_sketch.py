"""The sketch of token-level products of hidden states and residuals, which the direct sum of the paper lacks.

Shape letters: B rows of a batch, P positions, N rows, H hidden width, V vocabulary, D sketch width, F frequencies.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from grasp.kernels.kernel import Batch
from grasp.kernels.sketch import CountSketch, Sketch
from grasp.kernels.whitening import HiddenMoments, Whitener
from grasp.models.residuals import SparseResidual


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


class ProductSketch(Sketch):
    """The sketch of token-level products; see `ProductMaps`."""

    name = "product_sketch"
    moment_types = (HiddenMoments,)

    def prepare(self, units: Batch) -> None:
        self.width = self.settings.residual_width
        whitener = Whitener.from_settings(self.moments(HiddenMoments).value, self.settings)
        self._maps = ProductMaps.prepare(whitener, self.width, self.settings.seed, self.model.device)

    def score(self, batch: Batch) -> Tensor:
        return self._maps.apply(batch.hidden_PH, batch.residual, batch.row_P, batch.n_rows)
