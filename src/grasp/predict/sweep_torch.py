"""Weighted sums of gathered rows with torch; the only module of the package that imports torch.

Memory bandwidth is the limit, and `embedding_bag` reads rows at least twice as fast as scipy (`benchmarks/sweep.py`).
Long subsets are split into pieces whose sums are added in float64, because the rounding error of a float32 sum of n
numbers grows with sqrt(n).
Shape letters: B subsets, N rows, C value columns, P pieces.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.arrays import F64

PIECE = 128  # rows that are summed in float32


def sums(values_NC: NDArray[Any], weights_BN: csr_array) -> F64:
    """Return W @ X, sum_i w_i x_i of each subset, (B, C), with an error of at most 2e-6 sum_i |w_i x_i|.

    Sums are float32 within pieces of PIECE rows and float64 across pieces.
    """
    if not weights_BN.shape[0]:
        return np.empty((0, values_NC.shape[1]))
    start_P, first_B = _pieces(weights_BN.indptr)
    is_unweighted = bool(np.all(weights_BN.data == 1.0))
    sum_PC = torch.nn.functional.embedding_bag(
        torch.from_numpy(weights_BN.indices),  # int32 or int64, the same dtype as indptr in scipy
        torch.from_numpy(np.ascontiguousarray(values_NC, dtype=np.float32)),
        torch.from_numpy(start_P),
        mode="sum",
        per_sample_weights=None if is_unweighted else torch.from_numpy(weights_BN.data.astype(np.float32)),
        include_last_offset=True,
    )
    return np.asarray(np.add.reduceat(sum_PC.numpy().astype(np.float64), first_B, axis=0))


def _pieces(indptr: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Return the start of each piece of at most PIECE entries (plus the end), and the first piece of each subset.

    A subset without entries gets one empty piece.
    """
    length_B = np.diff(indptr)
    count_B = np.maximum(-(-length_B // PIECE), 1)
    first_B = np.concatenate([[0], np.cumsum(count_B)[:-1]]).astype(np.int64)
    index_P = np.arange(count_B.sum()) - np.repeat(first_B, count_B)  # of the piece within its subset
    start_P = np.repeat(indptr[:-1], count_B) + index_P * PIECE
    return np.append(start_P, indptr[-1]).astype(indptr.dtype), first_B
