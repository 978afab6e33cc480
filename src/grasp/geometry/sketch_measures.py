"""Measures of sketch quality, used by `sketch_checks` and `sketched`: arrays in, numbers out.

Shape letters: N rows of a sample, P positions, B subsets, D sketch width, H hidden width, V vocabulary.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.spatial.distance import pdist

from grasp.arrays import F64, Floats

BLOCK_ELEMENTS = 4 * 1024 * 1024  # elements of the gradients held in memory at once


def gram(hidden_NH: Floats, residual_NV: csr_array) -> tuple[F64, F64]:
    """Return inner products of all pairs of rows in each half, (N, N) float64 each."""
    hidden = np.asarray(hidden_NH, dtype=np.float64)
    return hidden @ hidden.T, np.asarray((residual_NV @ residual_NV.T).toarray(), dtype=np.float64)


def position_gram(hidden_PH: Floats, residual_PV: csr_array, row_P: NDArray[np.int64], n_rows: int) -> F64:
    """Return exact <G_i, G_j>, (N, N), for G_i = mean over the positions of row i of h_t (x) xi_t.

    Args:
        row_P: row of each position, ascending; a row without positions has G = 0.
    Cost: N^2 H for each coordinate that occurs; memory: BLOCK_ELEMENTS.
    """
    edges = np.searchsorted(row_P, np.arange(n_rows + 1))
    by_coordinate = residual_PV.astype(np.float64).tocsc()
    occurs = np.flatnonzero(np.diff(by_coordinate.indptr))
    step = max(1, BLOCK_ELEMENTS // (n_rows * hidden_PH.shape[1]))
    out_NN = np.zeros((n_rows, n_rows))
    for first in range(0, len(occurs), step):
        block = by_coordinate[:, occurs[first : first + step]].tocsr()
        gradient = [(block[a:b].T @ hidden_PH[a:b]).ravel() / max(1, b - a) for a, b in pairwise(edges)]
        gradient_NX = np.stack(gradient)
        out_NN += gradient_NX @ gradient_NX.T
    return out_NN


def uncentred_gram(
    gram_NN: F64, offset_H: F64, hidden_PH: Floats, residual_PV: csr_array, row_P: NDArray[np.int64]
) -> F64:
    """Return `position_gram` for hidden states h_t + offset from that of h_t, (N, N).

    Uses G_i(h + offset) = G_i(h) + offset (x) mean xi_t.
    """
    mean_NP = row_means(row_P, len(gram_NN))
    mean_NV = csr_array(mean_NP @ residual_PV)
    along_NV = csr_array(mean_NP @ residual_PV.multiply((hidden_PH @ offset_H)[:, None]).tocsr())
    cross_NN = (along_NV @ mean_NV.T).toarray()
    return np.asarray(gram_NN + cross_NN + cross_NN.T + (offset_H @ offset_H) * (mean_NV @ mean_NV.T).toarray())


def row_means(row_P: NDArray[np.int64], n_rows: int) -> csr_array:
    """Return the (N, P) matrix that averages over the positions of each row."""
    count_N = np.bincount(row_P, minlength=n_rows)
    return csr_array((1.0 / count_N[row_P], (row_P, np.arange(len(row_P)))), shape=(n_rows, len(row_P)))


def subset_norms(weight_BN: F64, gram_NN: F64) -> F64:
    """Return K_raw = w^T G w of B subsets from inner products of rows, (B,). Source: eq:ia-components."""
    return np.asarray(np.einsum("bn,nm,bm->b", weight_BN, gram_NN, weight_BN))


def relative_error(estimate_B: F64, true_B: F64) -> float:
    """Return the median of |estimate - true| / true over subsets with nonzero K."""
    nonzero = true_B > 0
    return float(np.median(np.abs(estimate_B - true_B)[nonzero] / true_B[nonzero])) if nonzero.any() else 0.0


def scaled_error(estimate_B: F64, true_B: F64) -> float:
    """Return the relative error after scaling the estimate; a protocol weight absorbs any common factor."""
    nonzero = (estimate_B > 0) & (true_B > 0)
    scale = float(np.median(true_B[nonzero] / estimate_B[nonzero])) if nonzero.any() else 1.0
    return relative_error(scale * estimate_B, true_B)


@dataclass(frozen=True, slots=True)
class DirectSumBound:
    """Differences between the direct-sum kernel and the product kernel over pairs. Source: prop:local-direct-sum."""

    off: float  # largest error of the identity |k_dir - 1 - k_prod| = 1/4 d_h^2 d_r^2: rounding, or a bug
    largest: float  # largest |k_dir - 1 - k_prod| over pairs
    mean: float  # mean of the same
    bound: float  # 1/4 delta_h^2 delta_r^2 from the largest distances


def direct_sum_bound(hidden_ND: Floats, residual_ND: Floats) -> DirectSumBound:
    """Compare the kernels of the normalised halves on every pair of rows.

    Rows with a zero hidden or residual part have no direction and are ignored. The gap of a pair equals 1/4 d_h^2 d_r^2
    algebraically; comparing kernels from inner products with distances from differences checks the implementation. The
    size of the gap depends on the rows.
    Source: eq:direct-sum-local-bound.
    """
    nonzero_N = hidden_ND.any(axis=1) & residual_ND.any(axis=1)
    x, r = (np.asarray(half_ND[nonzero_N], dtype=np.float64) for half_ND in (hidden_ND, residual_ND))
    x, r = (half / np.linalg.norm(half, axis=1, keepdims=True) for half in (x, r))
    pairs = np.triu_indices(len(x), 1)
    if not len(pairs[0]):
        return DirectSumBound(0.0, 0.0, 0.0, 0.0)
    apart_h, apart_r = pdist(x, "sqeuclidean"), pdist(r, "sqeuclidean")
    alike_h, alike_r = (x @ x.T)[pairs], (r @ r.T)[pairs]
    gap = np.abs(alike_h + alike_r - 1 - alike_h * alike_r)
    bound = 0.25 * float(apart_h.max() * apart_r.max())
    off = float(np.abs(gap - 0.25 * apart_h * apart_r).max())
    return DirectSumBound(off, float(gap.max()), float(gap.mean()), bound)


def unit_gram(gram_NN: F64) -> F64:
    """Normalize inner products so that the mean squared norm is 1 (the constants c_h and c_r)."""
    mean = float(gram_NN.diagonal().mean())
    return np.asarray(gram_NN / mean if mean > 0 else gram_NN)


def effective_rank(sketch_ND: Floats) -> float:
    """Return (sum of eigenvalues)^2 / (sum of squared eigenvalues) of the sketch covariance, between 1 and D."""
    centred = np.asarray(sketch_ND, np.float64) - np.asarray(sketch_ND, np.float64).mean(axis=0)
    value = np.linalg.svd(centred, compute_uv=False) ** 2
    return float(value.sum() ** 2 / (value**2).sum()) if value.any() else 0.0


def negative_pairs(gram_NN: F64) -> tuple[float, float]:
    """Return the share of pairs with a negative inner product, and their share of the total absolute value."""
    pair = gram_NN[np.triu_indices(len(gram_NN), 1)]
    mass = float(np.abs(pair).sum())
    return float((pair < 0).mean()), float(-pair[pair < 0].sum() / mass) if mass > 0 else 0.0


def rank_one_share(
    hidden_PH: Floats, residual_PV: csr_array, row_P: NDArray[np.int64], hidden_NH: Floats, residual_NV: csr_array
) -> float:
    r"""Return the mean squared cosine between G_i = mean_t h_t (x) xi_t and the rank-1 summary h_i (x) xi_i, over rows.

    Measures how much of the output layer gradient the summary keeps: 1 for a row with a single position that is its own
    summary. All arguments are in the same coordinates; rows without positions or with a zero gradient are ignored.
    """
    edges = np.searchsorted(row_P, np.arange(len(hidden_NH) + 1))
    shares = []
    for i, (start, stop) in enumerate(pairwise(edges)):
        if stop == start:
            continue
        h_TT, r_TT = gram(hidden_PH[start:stop], residual_PV[start:stop])
        whole = float((h_TT * r_TT).mean())
        summary_H, summary_V = np.asarray(hidden_NH[i], np.float64), residual_NV[[i]].astype(np.float64)
        match_T = (residual_PV[start:stop] @ summary_V.T).toarray().ravel()
        cross = float(((hidden_PH[start:stop] @ summary_H) * match_T).mean())
        pooled = float(summary_H @ summary_H) * float(summary_V.power(2).sum())
        if whole > 0 and pooled > 0:
            shares.append(cross**2 / (whole * pooled))
    return float(np.mean(shares)) if shares else float("nan")
