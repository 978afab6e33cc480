"""Measurements behind the diagnostics: arrays in, numbers out.

Shape letters: N rows of a sample, P positions, B subsets, D sketch width, H hidden width, V vocabulary.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.stats import spearmanr

F64 = NDArray[np.float64]
F = NDArray[np.floating[Any]]


def gram(hidden_NH: F, residual_NV: csr_array) -> tuple[F64, F64]:
    """Inner products of all pairs of rows in each half, (N, N) each, float64."""
    hidden = np.asarray(hidden_NH, dtype=np.float64)
    return hidden @ hidden.T, np.asarray((residual_NV @ residual_NV.T).toarray(), dtype=np.float64)


def subset_norms(weight_BN: F64, gram_NN: F64) -> F64:
    """K_raw of B subsets from inner products of rows: w^T G w. Source: eq:ia-components."""
    return np.asarray(np.einsum("bn,nm,bm->b", weight_BN, gram_NN, weight_BN))


def relative_error(found_B: F64, true_B: F64) -> float:
    """Median of |found - true| / true over subsets whose K is not zero."""
    there = true_B > 0
    return float(np.median(np.abs(found_B - true_B)[there] / true_B[there])) if there.any() else 0.0


def rank_agreement(one_B: F64, other_B: F64) -> float:
    """Spearman's rho; nan where one of the two is constant."""
    if np.ptp(one_B) == 0 or np.ptp(other_B) == 0:
        return float("nan")
    return float(spearmanr(one_B, other_B).statistic)


@dataclass(frozen=True, slots=True)
class DirectSum:
    """How the direct-sum kernel stands to the product kernel. Source: prop:local-direct-sum."""

    largest: float  # of |k_dir - 1 - k_prod| over pairs
    bound: float  # 1/4 delta_h^2 delta_r^2 with the largest distances
    mean_share: float  # mean of the discrepancy over pairs, as a share of the bound
    ranks: float  # of K_dir and K_prod over subsets

    @property
    def satisfied(self) -> bool:
        return self.largest <= self.bound * (1 + 1e-9) + 1e-12


def direct_sum(hidden_NN: F64, residual_NN: F64, weight_BN: F64) -> DirectSum:
    """Compare the two kernels of the normalised halves on every pair, and of the halves as they are on subsets.

    Rows without a hidden or a residual part have no direction and are left out of the pairs.
    Source: eq:direct-sum-local-bound. The discrepancy is exactly 1/4 d_h^2 d_r^2, so the bound holds; the diagnostic
    is how large it is.
    """
    there = np.flatnonzero((hidden_NN.diagonal() > 0) & (residual_NN.diagonal() > 0))
    pairs = np.triu_indices(len(there), 1)
    x, r = (_cosines(half_NN[np.ix_(there, there)])[pairs] for half_NN in (hidden_NN, residual_NN))
    gap = np.abs(x + r - 1 - x * r)
    bound = 0.25 * float((2 - 2 * x).max(initial=0)) * float((2 - 2 * r).max(initial=0))
    direct_B = subset_norms(weight_BN, _unit(hidden_NN) + _unit(residual_NN))
    product_B = subset_norms(weight_BN, hidden_NN * residual_NN)
    share = float(gap.mean() / bound) if bound > 0 and len(gap) else 0.0
    return DirectSum(float(gap.max(initial=0)), bound, share, rank_agreement(direct_B, product_B))


def _cosines(gram_NN: F64) -> F64:
    size_N = np.sqrt(gram_NN.diagonal())
    return np.asarray(gram_NN / np.outer(size_N, size_N))


def _unit(gram_NN: F64) -> F64:
    """A half whose mean squared norm is 1, as c_h and c_r make it."""
    mean = float(gram_NN.diagonal().mean())
    return np.asarray(gram_NN / mean if mean > 0 else gram_NN)


def effective_rank(sketch_ND: F) -> float:
    """(sum of eigenvalues)^2 / sum of their squares, of the covariance of the sketch: 1 to D."""
    centred = np.asarray(sketch_ND, np.float64) - np.asarray(sketch_ND, np.float64).mean(axis=0)
    value = np.linalg.svd(centred, compute_uv=False) ** 2
    return float(value.sum() ** 2 / (value**2).sum()) if value.any() else 0.0


def mass_outside(residual_NV: csr_array) -> float:
    """Mean share of a residual's absolute mass that top-k cut off.

    A whole residual adds up to 0, so that what is missing, all of it positive, is minus the sum of what is there. With
    a soft cap on the logits it adds up to 0 only nearly, and so is this.
    """
    kept = np.asarray(abs(residual_NV).sum(axis=1), dtype=np.float64).ravel()
    missing = np.maximum(-np.asarray(residual_NV.sum(axis=1), dtype=np.float64).ravel(), 0.0)
    total = kept + missing
    return float(np.mean(np.divide(missing, total, out=np.zeros_like(total), where=total > 0)))


def negative_pairs(gram_NN: F64) -> tuple[float, float]:
    """Share of pairs of rows whose inner product is negative, and their share of the absolute mass of all pairs."""
    pair = gram_NN[np.triu_indices(len(gram_NN), 1)]
    mass = float(np.abs(pair).sum())
    return float((pair < 0).mean()), float(-pair[pair < 0].sum() / mass) if mass > 0 else 0.0


def rank_one_share(hidden_PH: F, residual_PV: csr_array, row_P: NDArray[np.int64], n_rows: int) -> float:
    r"""Mean squared cosine between mean_t h_t (x) xi_t and h (x) xi of the pooled summaries, over rows.

    What the rank-1 summary of the paper keeps of the gradient of the output layer: 1 for one position, or for positions
    that are all alike.
    """
    edges = np.searchsorted(row_P, np.arange(n_rows + 1))
    shares = []
    for start, stop in pairwise(edges):
        if stop == start:
            continue
        hidden, residual = np.asarray(hidden_PH[start:stop], np.float64), residual_PV[start:stop].astype(np.float64)
        h_TT, r_TT = gram(hidden, residual)
        count = stop - start
        whole = float((h_TT * r_TT).sum()) / count**2
        cross = float((h_TT.mean(axis=1) * r_TT.mean(axis=1)).mean())
        pooled = float(h_TT.mean()) * float(r_TT.mean())
        if whole > 0 and pooled > 0:
            shares.append(cross**2 / (whole * pooled))
    return float(np.mean(shares)) if shares else float("nan")


@dataclass(frozen=True, slots=True)
class Stability:
    """Pairs of subsets that the error of the prediction cannot turn round. Source: eq:pairwise-stability-bound."""

    bound: float  # share of pairs whose gap is beyond twice the largest error
    certain: float  # share of pairs whose own errors are smaller than their gap
    accuracy: float  # share of pairs in the right order


def stability(predicted_B: F64, realized_B: F64) -> Stability:
    """The bound and what it bounds, after the prediction was put on the scale of the utility by least squares.

    A prediction that falls as the utility rises gets a slope of 0: its order is not turned round.
    """
    centred = predicted_B - predicted_B.mean()
    spread = float(centred @ centred)
    slope = max(float(centred @ (realized_B - realized_B.mean())) / spread, 0.0) if spread > 0 else 0.0
    scaled_B = realized_B.mean() + slope * centred
    error_B = scaled_B - realized_B
    b, c = np.triu_indices(len(realized_B), 1)
    gap = np.abs(realized_B[b] - realized_B[c])
    right = (scaled_B[b] - scaled_B[c]) * (realized_B[b] - realized_B[c]) > 0
    return Stability(
        bound=float((gap > 2 * np.abs(error_B).max()).mean()),
        certain=float((np.abs(error_B[b] - error_B[c]) < gap).mean()),
        accuracy=float(right.mean()),
    )
