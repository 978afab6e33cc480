"""Metrics of sketch quality, used by `sketch_checks` and `sketch_accuracy`: arrays in, numbers out.

A Gram matrix contains the inner products of all pairs of rows. (x) is the outer product: the gradient of the output
layer at position t is h_t (x) xi_t, with the hidden state h and the residual xi (predicted probabilities minus one-hot
label). Labels `eq:` and `prop:` are those of the paper; docs/paper_map.md lists them.
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


def gram_matrices(hidden_NH: Floats, residual_NV: csr_array) -> tuple[F64, F64]:
    """Return the Gram matrices of hidden states and of residuals, (N, N) float64 each."""
    hidden = np.asarray(hidden_NH, dtype=np.float64)
    return hidden @ hidden.T, np.asarray((residual_NV @ residual_NV.T).toarray(), dtype=np.float64)


def position_gram(hidden_PH: Floats, residual_PV: csr_array, row_P: NDArray[np.int64], n_rows: int) -> F64:
    """Return exact <G_i, G_j>, (N, N), for G_i = mean over the positions of row i of h_t (x) xi_t.

    Coordinates of the vocabulary are processed in blocks, so that the gradients are never held in memory.

    Args:
        hidden_PH: hidden states of all positions.
        residual_PV: residuals of all positions.
        row_P: row of each position, ascending; a row without positions has G = 0.
        n_rows: number of rows, N.
    Cost: N^2 H for each coordinate that occurs; memory: BLOCK_ELEMENTS.
    """
    offsets = np.searchsorted(row_P, np.arange(n_rows + 1))  # positions of row i: offsets[i] to offsets[i + 1]
    by_coordinate = residual_PV.astype(np.float64).tocsc()
    used_coordinates = np.flatnonzero(np.diff(by_coordinate.indptr))
    step = max(1, BLOCK_ELEMENTS // (n_rows * hidden_PH.shape[1]))
    gram_NN = np.zeros((n_rows, n_rows))
    for first in range(0, len(used_coordinates), step):
        block = by_coordinate[:, used_coordinates[first : first + step]].tocsr()
        gradients = [
            (block[start:stop].T @ hidden_PH[start:stop]).ravel() / max(1, stop - start)
            for start, stop in pairwise(offsets)
        ]
        gradient_NX = np.stack(gradients)  # X = step * H elements of the gradient
        gram_NN += gradient_NX @ gradient_NX.T
    return gram_NN


def uncentred_gram(
    gram_NN: F64, offset_H: F64, hidden_PH: Floats, residual_PV: csr_array, row_P: NDArray[np.int64]
) -> F64:
    """Return `position_gram` for hidden states h_t + offset from that of h_t, (N, N).

    Uses G_i(h + offset) = G_i(h) + offset (x) mean xi_t.
    """
    mean_NP = row_means(row_P, len(gram_NN))
    mean_NV = csr_array(mean_NP @ residual_PV)
    # <G_i(h), offset (x) mean xi> = <mean_t <h_t, offset> xi_t, mean xi>
    along_offset_NV = csr_array(mean_NP @ residual_PV.multiply((hidden_PH @ offset_H)[:, None]).tocsr())
    cross_NN = (along_offset_NV @ mean_NV.T).toarray()
    return np.asarray(gram_NN + cross_NN + cross_NN.T + (offset_H @ offset_H) * (mean_NV @ mean_NV.T).toarray())


def row_means(row_P: NDArray[np.int64], n_rows: int) -> csr_array:
    """Return the (N, P) matrix that averages over the positions of each row."""
    count_N = np.bincount(row_P, minlength=n_rows)
    return csr_array((1.0 / count_N[row_P], (row_P, np.arange(len(row_P)))), shape=(n_rows, len(row_P)))


def raw_geometry(weight_BN: F64, gram_NN: F64) -> F64:
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
class DirectSumGap:
    """Gap between the direct-sum kernel and the product kernel over pairs of rows. Source: prop:local-direct-sum.

    The gap of a pair is ``|k_dir - 1 - k_prod| = 1/4 d_h^2 d_r^2``, with the two kernels and the distances d_h, d_r of
    the pair's normalized hidden states and residuals.
    """

    identity_error: float  # largest error of this identity: rounding, or a bug
    largest: float  # largest gap
    mean: float  # mean gap
    bound: float  # 1/4 d_h^2 d_r^2 of the largest distances


def direct_sum_gap(hidden_ND: Floats, residual_ND: Floats) -> DirectSumGap:
    """Compare the direct-sum and the product kernel of normalized hidden states and residuals on every pair of rows.

    Rows with a zero hidden state or residual have no direction and are ignored. The gap of a pair equals 1/4 d_h^2
    d_r^2 algebraically; comparing kernels from inner products with distances from differences checks the
    implementation. The size of the gap depends on the rows.
    Source: eq:direct-sum-local-bound.
    """
    nonzero_N = hidden_ND.any(axis=1) & residual_ND.any(axis=1)
    hidden, residual = (np.asarray(values_ND[nonzero_N], np.float64) for values_ND in (hidden_ND, residual_ND))
    hidden, residual = (values / np.linalg.norm(values, axis=1, keepdims=True) for values in (hidden, residual))
    pairs = np.triu_indices(len(hidden), 1)
    if not len(pairs[0]):
        return DirectSumGap(0.0, 0.0, 0.0, 0.0)
    distance2_h, distance2_r = pdist(hidden, "sqeuclidean"), pdist(residual, "sqeuclidean")
    cosine_h, cosine_r = (hidden @ hidden.T)[pairs], (residual @ residual.T)[pairs]
    gap = np.abs(cosine_h + cosine_r - 1 - cosine_h * cosine_r)
    bound = 0.25 * float(distance2_h.max() * distance2_r.max())
    identity_error = float(np.abs(gap - 0.25 * distance2_h * distance2_r).max())
    return DirectSumGap(identity_error, float(gap.max()), float(gap.mean()), bound)


def normalized_gram(gram_NN: F64) -> F64:
    """Normalize inner products so that the mean squared norm is 1 (the constants c_h and c_r of eq:feature-sketch)."""
    mean = float(gram_NN.diagonal().mean())
    return np.asarray(gram_NN / mean if mean > 0 else gram_NN)


def effective_rank(sketch_ND: Floats) -> float:
    """Return (sum of eigenvalues)^2 / (sum of squared eigenvalues) of the sketch covariance, between 1 and D."""
    centred = np.asarray(sketch_ND, np.float64) - np.asarray(sketch_ND, np.float64).mean(axis=0)
    value = np.linalg.svd(centred, compute_uv=False) ** 2
    return float(value.sum() ** 2 / (value**2).sum()) if value.any() else 0.0


@dataclass(frozen=True, slots=True)
class NegativePairs:
    """How many pairs of rows have a negative inner product."""

    pairs: float  # share of pairs
    magnitude: float  # their share of the sum of absolute inner products


def negative_pairs(gram_NN: F64) -> NegativePairs:
    """Count the pairs of different rows with a negative inner product."""
    products = gram_NN[np.triu_indices(len(gram_NN), 1)]
    total = float(np.abs(products).sum())
    magnitude = float(-products[products < 0].sum() / total) if total > 0 else 0.0
    return NegativePairs(pairs=float((products < 0).mean()), magnitude=magnitude)


def rank_one_share(
    hidden_PH: Floats, residual_PV: csr_array, row_P: NDArray[np.int64], hidden_NH: Floats, residual_NV: csr_array
) -> float:
    r"""Return the mean squared cosine between G_i = mean_t h_t (x) xi_t and the rank-1 summary h_i (x) xi_i, over rows.

    Measures how much of the output layer gradient the summary keeps: 1 for a row with a single position that is its own
    summary. All arguments are in the same coordinates; rows without positions or with a zero gradient are ignored.
    """
    offsets = np.searchsorted(row_P, np.arange(len(hidden_NH) + 1))  # of row i: offsets[i] to offsets[i + 1]
    shares = []
    for i, (start, stop) in enumerate(pairwise(offsets)):
        if stop == start:
            continue
        hidden_TT, residual_TT = gram_matrices(hidden_PH[start:stop], residual_PV[start:stop])
        gradient_norm2 = float((hidden_TT * residual_TT).mean())
        summary_H, summary_V = np.asarray(hidden_NH[i], np.float64), residual_NV[[i]].astype(np.float64)
        residual_match_T = (residual_PV[start:stop] @ summary_V.T).toarray().ravel()
        cross = float(((hidden_PH[start:stop] @ summary_H) * residual_match_T).mean())
        summary_norm2 = float(summary_H @ summary_H) * float(summary_V.power(2).sum())
        if gradient_norm2 > 0 and summary_norm2 > 0:
            shares.append(cross**2 / (gradient_norm2 * summary_norm2))
    return float(np.mean(shares)) if shares else float("nan")
