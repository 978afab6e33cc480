"""Mean and standard deviation of every component over a calibration family, used to compute z-scores.

`sampled_moments` computes them from drawn subsets of any family. `relevance_moments`, `self_moments` and `pair_moments`
are closed forms for uniform families (subsets of one fixed size) and Bernoulli families (rows drawn independently).

Closed forms: given its size m, a subset is a uniform draw of m rows without replacement. A and K_self are g(m) times
the mean of a row value over the drawn rows. K_raw, K_pair and K_cent are sums over pairs of drawn rows, so their
variance depends on the probabilities that two, three and four given rows are all drawn. The components and the two
weightings are defined in `subset_sums`; labels `eq:` are those of the paper (docs/paper_map.md).

Shape letters: B subsets, E units or targets (C where both occur), N rows, n rows of a block, D sketch width, M possible
sizes of a subset.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F64
from grasp.errors import SubsetError
from grasp.moments import MeanStd, StreamingMoments
from grasp.paper.subset_sums import Kind
from grasp.predict.families import Family
from grasp.predict.weights import Side
from grasp.runs.predictions import Weighting

MAX_DEVIATIONS = 10.0  # Bernoulli sizes further from their mean than this many standard deviations are neglected


def sampled_moments(blocks: Iterable[Mapping[str, F64]]) -> dict[str, MeanStd]:
    """Compute mean and standard deviation of named components over subsets that arrive in blocks.

    Args:
        blocks: blocks of B subsets; values by component name, (B, E) or (B,), with the same names in every block.
    Raises:
        SubsetError: fewer than two subsets.
    """
    moments: dict[str, StreamingMoments] = {}  # one row per subset
    for block in blocks:
        for name, value in block.items():
            moments.setdefault(name, StreamingMoments()).add(value.reshape(len(value), -1))
    for subset_moments in moments.values():
        n_subsets = subset_moments.n_rows
        if n_subsets < 2:
            raise SubsetError(f"calibration: got {n_subsets} subsets, expected at least 2 to standardise by")
    return {name: subset_moments.mean_std for name, subset_moments in moments.items()}


@dataclass(frozen=True, slots=True)
class PairSums:
    """Sums over the corpus of a centred sketch, psi = phi - mean, which determine the moments of its geometry."""

    n_rows: int
    mean_D: F64
    gram_DD: F64  # sum of psi psi^T
    norm4: float  # sum of ||psi||^4
    skew_D: F64  # sum of ||psi||^2 psi

    @classmethod
    def of(cls, blocks: Iterable[NDArray[Any]], mean_D: F64) -> Self:
        """Compute the sums over the rows of a sketch, which arrive in blocks, (n, D)."""
        n_rows, norm4, gram_DD, skew_D = 0, 0.0, np.zeros((len(mean_D), len(mean_D))), np.zeros(len(mean_D))
        for sketch_nD in blocks:
            psi_nD = np.asarray(sketch_nD, dtype=np.float64) - mean_D
            norm2_n = np.einsum("nd,nd->n", psi_nD, psi_nD)
            n_rows += len(psi_nD)
            gram_DD += psi_nD.T @ psi_nD
            norm4 += float(norm2_n @ norm2_n)
            skew_D += norm2_n @ psi_nD
        return cls(n_rows, mean_D, gram_DD, norm4, skew_D)


def has_closed_form(family: Family) -> bool:
    """Return whether the moments of all components have a closed form."""
    return family.kind in ("uniform", "bernoulli")


def relevance_moments(rows: StreamingMoments, family: Family, side: Side, weighting: Weighting) -> MeanStd:
    """Return the exact mean and standard deviation of A_e over a uniform or Bernoulli family.

    Args:
        rows: moments of the relevance over the rows of the corpus.
        family: uniform or Bernoulli family.
        side: rows that are scored.
        weighting: `count` or `mean`.
    Source: eq:grasp-subset-relevance under the draw; the mean of an inclusion-weighted sum as in eq:ratio-scaling.
    """
    sign = 1.0 if side == "retained" else -1.0
    # A is the sum of m values (m^1 times their mean) for `count`, their mean (m^0) for `mean`
    moments = _scaled_mean_moments(rows, _sizes(family, rows.n_rows, side), 1.0 if weighting == "count" else 0.0)
    return MeanStd(sign * moments.mean_C, moments.std_C)


def self_moments(norms: StreamingMoments, family: Family, side: Side, weighting: Weighting) -> MeanStd:
    """Return the exact mean and standard deviation of K_self over a uniform or Bernoulli family.

    Args:
        norms: moments of ||phi_i||^2 over the rows of the corpus.
        family: uniform or Bernoulli family.
        side: rows that are scored.
        weighting: `count` or `mean`.
    Source: eq:ia-components.
    """
    # K_self is the sum of m squared norms (m^1 times their mean), divided by m^2 for weighting `mean`
    return _scaled_mean_moments(norms, _sizes(family, norms.n_rows, side), 1.0 if weighting == "count" else -1.0)


def pair_moments(sums: PairSums, kind: Kind, family: Family, side: Side, weighting: Weighting) -> MeanStd:
    """Return the exact mean and standard deviation of a geometric component over a uniform or Bernoulli family.

    Let psi be the centred sketch, s its sum over the m drawn rows, X = sum_{i != j} <psi_i, psi_j>,
    Y = sum_i ||psi_i||^2 and L = <s, mean>. For weighting `count`,

        K_cent = X + Y,    K_self = Y + 2 L + m ||mean||^2,    K_raw = X + Y + 2 m L + m^2 ||mean||^2,

    and K_pair = K_raw - K_self; weighting `mean` divides all by m^2.

    Args:
        sums: sums of the sketch over the corpus.
        kind: raw, self, pair or cent.
        family: uniform or Bernoulli family.
        side: rows that are scored.
        weighting: `count` or `mean`.
    Source: eq:ia-components under the draw. Deviation: none; the paper takes these moments from a sample.
    """
    size_M, probability_M = _sizes(family, sums.n_rows, side)
    inverse_size_M = np.where(size_M > 0, 1.0 / np.maximum(size_M, 1.0), 0.0)
    factor_M = np.ones_like(size_M) if weighting == "count" else inverse_size_M
    mean_norm2 = float(sums.mean_D @ sums.mean_D)
    ones_M, zeros_M = np.ones_like(size_M), np.zeros_like(size_M)
    weights_3M, constant_M = {  # component = weights . (X, Y, L) + constant, for each size m
        "raw": (np.array([ones_M, ones_M, 2.0 * size_M]), size_M**2 * mean_norm2),
        "self": (np.array([zeros_M, ones_M, 2.0 * ones_M]), size_M * mean_norm2),
        "pair": (np.array([ones_M, zeros_M, 2.0 * (size_M - 1.0)]), (size_M**2 - size_M) * mean_norm2),
        "cent": (np.array([ones_M, ones_M, zeros_M]), zeros_M),
    }[kind]
    mean_3M, product_33M = _drawn_sums(sums, size_M)
    covariance_33M = product_33M - mean_3M[:, None] * mean_3M[None]
    mean_M = factor_M**2 * (np.einsum("am,am->m", weights_3M, mean_3M) + constant_M)
    variance_M = factor_M**4 * np.einsum("am,abm,bm->m", weights_3M, covariance_33M, weights_3M)
    # law of total variance: mean of the variances given the size, plus variance of the means
    mean = float(probability_M @ mean_M)
    variance = float(probability_M @ (np.maximum(variance_M, 0.0) + (mean_M - mean) ** 2))
    return MeanStd(np.array([mean]), np.array([np.sqrt(variance)]))


def _drawn_sums(sums: PairSums, size_M: F64) -> tuple[F64, F64]:
    """Return the expectations of X, Y and L, (3, M), and of their products, (3, 3, M), over draws of m rows.

    X, Y and L are defined in `pair_moments`. A product of two sums over pairs is a sum over quadruples of rows, grouped
    by the number of different rows, which determines the probability that all of them are drawn: p2 for squares (the
    same pair twice), p3 for chains (pairs that share a row), p4 for disjoint pairs. Because the psi of the corpus add
    up to 0, each group follows from a few sums, without a loop over rows: sum_{j != i} <psi_i, psi_j> = -||psi_i||^2.
    """
    p1, p2, p3, p4 = (_all_drawn(k, sums.n_rows, size_M) for k in (1, 2, 3, 4))
    norm2 = float(np.trace(sums.gram_DD))  # sum of ||psi||^2
    along_mean = float(sums.mean_D @ sums.gram_DD @ sums.mean_D)  # sum of <psi, mean>^2
    skew = float(sums.skew_D @ sums.mean_D)  # sum of ||psi||^2 <psi, mean>
    squares = float((sums.gram_DD**2).sum()) - sums.norm4  # sum over pairs i != j of <psi_i, psi_j>^2
    chains = sums.norm4 - squares  # sum over i, j, k all different of <psi_i, psi_j> <psi_i, psi_k>
    disjoint = norm2**2 - 2.0 * squares - 4.0 * chains  # the rest: (sum_{i != j} <psi_i, psi_j>)^2 = norm2^2
    xx = 2.0 * squares * p2 + 4.0 * chains * p3 + disjoint * p4
    xy = -2.0 * sums.norm4 * p2 + (2.0 * sums.norm4 - norm2**2) * p3
    xl = 2.0 * skew * (p3 - p2)
    yy = sums.norm4 * p1 + (norm2**2 - sums.norm4) * p2
    yl, ll = skew * (p1 - p2), along_mean * (p1 - p2)
    # expectations of X, Y and L, then of their products: xy is that of X Y
    mean_3M = np.array([-norm2 * p2, norm2 * p1, np.zeros_like(p1)])
    return mean_3M, np.array([[xx, xy, xl], [xy, yy, yl], [xl, yl, ll]])


def _all_drawn(k: int, n_rows: int, size_M: F64) -> F64:
    """Return the probability that k given rows are all among m rows drawn without replacement, (M,)."""
    probability_M = np.ones_like(size_M)
    for i in range(k):
        probability_M = probability_M * (np.maximum(size_M - i, 0.0) / (n_rows - i) if n_rows > i else 0.0)
    return probability_M


def _sizes(family: Family, n_rows: int, side: Side) -> tuple[F64, F64]:
    """Return the possible sizes of the side, (M,), and their probabilities; draws retain at least one row."""
    fraction = family.fraction
    assert fraction is not None
    if family.kind == "uniform":
        size = np.array([max(1.0, float(round(fraction * n_rows)))])
        probability = np.ones(1)
    else:
        mean, half_range = fraction * n_rows, MAX_DEVIATIONS * (1.0 + np.sqrt(fraction * (1.0 - fraction) * n_rows))
        size = np.arange(max(1.0, np.floor(mean - half_range)), min(n_rows, np.ceil(mean + half_range)) + 1.0)
        # Binomial probabilities by the ratio of successive ones, P(m + 1) / P(m), in logarithms: the coefficients
        # themselves overflow for some thousand rows.
        ratio = (n_rows - size[:-1]) / size[1:] * (fraction / (1.0 - fraction))
        log_probability = np.concatenate([[0.0], np.cumsum(np.log(ratio))])
        probability = np.exp(log_probability - log_probability.max())
        probability = probability / probability.sum()
    return (size if side == "retained" else n_rows - size), probability


def _scaled_mean_moments(rows: StreamingMoments, sizes: tuple[F64, F64], power: float) -> MeanStd:
    """Return moments of m^power * (mean of x over m rows drawn without replacement) for random m; 0 for m = 0."""
    # The mean of m of N values, drawn without replacement, has the variance S^2 (1/m - 1/N), S^2 = scatter / (N - 1).
    size_M, probability_M = sizes
    drawn_M = np.maximum(size_M, 1.0)
    factor_M = np.where(size_M > 0, drawn_M**power, 0.0)
    variance_given_size = float(probability_M @ (factor_M**2 * (1.0 / drawn_M - 1.0 / rows.n_rows)))
    mean_factor = float(probability_M @ factor_M)
    factor_variance = float(probability_M @ (factor_M - mean_factor) ** 2)
    row_variance_C = rows.scatter / max(rows.n_rows - 1, 1)
    # law of total variance over m: the first term scales with the variance of a row, the second with its squared mean
    variance_C = variance_given_size * row_variance_C + factor_variance * rows.mean_C**2
    return MeanStd(mean_factor * rows.mean_C, np.sqrt(np.maximum(variance_C, 0.0)))
