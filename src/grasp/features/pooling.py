"""Row and unit summaries: hidden states and sparse residuals averaged over positions.

Shape letters: P positions, N rows, H hidden width, V vocabulary, K kept per residual.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from grasp.features.residuals import SparseResidual


@dataclass(frozen=True, slots=True)
class PooledFeatures:
    """Averages over a row's pooled positions; hidden states not yet whitened, residuals not yet scaled."""

    hidden_NH: NDArray[np.float32]
    residual_NV: csr_array  # float32, coordinates sorted, each at most once a row


def pool(hidden_PH: Tensor, residual: SparseResidual, row_P: Tensor, n_rows: int, vocab: int) -> PooledFeatures:
    """Average hidden states and sparse residuals over each row's positions.

    Args:
        row_P: which row each position belongs to, in [0, n_rows); every row has at least one.
    Source: eq:sequence-pooling. Deviation: none.
    """
    count_N = torch.bincount(row_P, minlength=n_rows).float()
    hidden = hidden_PH.float()
    sum_NH = hidden.new_zeros(n_rows, hidden.shape[1]).index_add_(0, row_P, hidden)
    value_PK = residual.value_PK / count_N[row_P][:, None]
    keep = value_PK != 0
    key = (row_P[:, None] * vocab + residual.index_PK)[keep]
    unique, inverse = torch.unique(key, sorted=True, return_inverse=True)
    value = torch.zeros(len(unique), dtype=torch.float32, device=key.device)
    value.index_add_(0, inverse, value_PK[keep])
    row = torch.div(unique, vocab, rounding_mode="floor")
    indptr = torch.zeros(n_rows + 1, dtype=torch.int64)
    indptr[1:] = torch.cumsum(torch.bincount(row, minlength=n_rows), 0).cpu()
    return PooledFeatures(
        hidden_NH=(sum_NH / count_N[:, None]).cpu().numpy(),
        residual_NV=csr_array(
            (value.cpu().numpy(), (unique - row * vocab).to(torch.int32).cpu().numpy(), indptr.numpy()),
            shape=(n_rows, vocab),
        ),
    )
