r"""TensorSketch of the token-level product G_i = mean_t h~_t (x) D^{1/2} xi_t.

<sketch_i, sketch_j> estimates <G_i, G_j> without bias, the geometry that the direct sum of the paper gives up.
The count sketches of the two factors are convolved by FFT per position and averaged in the frequency domain.
Shape letters: P positions, N rows, H hidden width, V vocabulary, D sketch width, F frequencies.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from grasp.features.residuals import SparseResidual
from grasp.features.sketch import CountSketch
from grasp.features.whitening import Whitener


@dataclass(frozen=True, slots=True)
class ProductSketch:
    """Makes product sketches: the two random maps, with whitening and preconditioning folded in."""

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
            hidden_HD=torch.from_numpy(whitener.map_HH @ hidden.dense()).float().to(device),
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
