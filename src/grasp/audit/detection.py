"""How well a score finds what was planted, and where to cut it when nobody knows.

Shape letters: N rows. Scores are higher for more suspicious rows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from grasp.errors import SettingsError
from grasp.seeds import stream

F64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
RESAMPLES = 1000
LEAST_SHARE = 1e-3  # of the median: a score that is not positive has no logarithm


@dataclass(frozen=True, slots=True)
class AtCut:
    """What the first `k` rows hold."""

    k: int
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True, slots=True)
class Detection:
    """One score against the truth; intervals are 95 % by bootstrap over rows, planted and clean apart."""

    n_rows: int
    n_planted: int
    auroc: float
    auroc_low: float
    auroc_high: float
    average_precision: float
    at_k: AtCut  # k = number planted, or as asked
    best: AtCut  # at the cut with the highest F1, which only the truth can tell


def measure(score_N: F64, planted_N: Bool, k: int | None = None, seed: int = 0) -> Detection:
    """Compare a score with the truth. Ties count half in the AUROC; elsewhere they go to the row that comes first.

    Raises:
        SettingsError: nothing, or everything, was planted; k outside 1 to N.
    """
    count, n_rows = int(planted_N.sum()), len(planted_N)
    if count in (0, n_rows):
        raise SettingsError(f"truth: {count} of {n_rows} rows are planted, expected some and not all")
    k = count if k is None else k
    if not 1 <= k <= n_rows:
        raise SettingsError(f"k: got {k}, expected 1 to {n_rows}")
    low, high = _interval(score_N, planted_N, seed)
    hits_N = np.cumsum(planted_N[np.argsort(-score_N, kind="stable")], dtype=np.int64)
    rank_N = np.arange(1, n_rows + 1)
    best = int(np.argmax(2 * hits_N / (rank_N + count)))
    return Detection(
        n_rows=n_rows,
        n_planted=count,
        auroc=auroc(score_N, planted_N),
        auroc_low=low,
        auroc_high=high,
        average_precision=average_precision(score_N, planted_N),
        at_k=_cut(hits_N, count, k),
        best=_cut(hits_N, count, best + 1),
    )


def _cut(hits_N: NDArray[np.int64], count: int, k: int) -> AtCut:
    hits = int(hits_N[k - 1])
    return AtCut(k, hits / k, hits / count, 2 * hits / (k + count))


def auroc(score_N: F64, planted_N: Bool) -> float:
    """Chance that a planted row scores higher than a clean one, ties half."""
    count = int(planted_N.sum())
    above = float(rankdata(score_N)[planted_N].sum()) - count * (count + 1) / 2
    return above / (count * (len(planted_N) - count))


def average_precision(score_N: F64, planted_N: Bool) -> float:
    """Sum over cuts of precision times the recall gained there; rows of one score are taken together."""
    order = np.argsort(-score_N, kind="stable")
    hits_N = np.cumsum(planted_N[order])
    last_N = np.append(np.flatnonzero(np.diff(score_N[order])), len(order) - 1)  # of each run of equal scores
    precision, recall = hits_N[last_N] / (last_N + 1), hits_N[last_N] / hits_N[-1]
    return float((np.diff(recall, prepend=0.0) * precision).sum())


def _interval(score_N: F64, planted_N: Bool, seed: int) -> tuple[float, float]:
    generator = stream(seed, "audit", "auroc")
    planted, clean = np.sort(score_N[planted_N]), np.sort(score_N[~planted_N])
    below = np.searchsorted(clean, planted, "left"), np.searchsorted(clean, planted, "right")
    values = np.empty(RESAMPLES)
    for r in range(RESAMPLES):
        weight = generator.multinomial(len(clean), np.full(len(clean), 1 / len(clean)))
        mass = np.concatenate([[0], np.cumsum(weight)])
        share = (mass[below[0]] + mass[below[1]]) / (2 * len(clean))
        values[r] = share[generator.integers(len(planted), size=len(planted))].mean()
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True, slots=True)
class Threshold:
    """A cut that lets through, of clean rows, about the share asked for."""

    value: float
    false_positive_rate: float
    n_flagged: int
    expected_false: float  # rows, if all were clean
    all_alike: bool  # the score says nothing


def threshold(score_N: F64, false_positive_rate: float, *, largest: bool = False) -> Threshold:
    """Cut by a null distribution: the lower half of the scores, mirrored at their median.

    It takes most rows to be clean, and clean scores to lie symmetrically about their middle: what is planted sits in
    the upper half and leaves the lower one as it was. With a share p of planted rows the median moves up a little, so
    that the cut is on the safe side.

    Args:
        largest: every score is the largest of many, whose distribution leans to the right: mirrored in logarithms,
            where it is about symmetric. The less a row's numbers have to do with one another, the more are flagged:
            up to about eight times the rate for heavy-tailed ones, hardly any where they go together.
    Raises:
        SettingsError: a rate outside (0, 0.5).
    """
    if not 0 < false_positive_rate < 0.5:
        raise SettingsError(f"false-positive rate: got {false_positive_rate}, expected more than 0 and less than 0.5")
    middle = float(np.median(score_N))
    low = float(np.quantile(score_N, false_positive_rate))
    leans = largest and middle > 0
    value = middle**2 / max(low, middle * LEAST_SHARE) if leans else 2 * middle - low
    flagged = int((score_N > value).sum())
    return Threshold(value, false_positive_rate, flagged, false_positive_rate * len(score_N), low == middle)


def disagreement(feature_ND: NDArray[np.floating], label_N: NDArray[np.int64], k: int) -> tuple[F64, Bool]:
    """Share of a row's k nearest other rows, by cosine, that have another label, each counted by its similarity.

    Returns:
        The share, (N,), and which rows are alone in their label: these have no geometry of their own, and get the
        median share, an opinion neither way.
    """
    unit_ND = np.asarray(feature_ND, np.float64)
    size_N = np.linalg.norm(unit_ND, axis=1)
    unit_ND = unit_ND / np.where(size_N > 0, size_N, 1)[:, None]
    n_rows, k = len(unit_ND), min(k, len(unit_ND) - 1)
    share_N = np.zeros(n_rows)
    for start in range(0, n_rows, 1024):
        stop = min(start + 1024, n_rows)
        cosine = unit_ND[start:stop] @ unit_ND.T
        cosine[np.arange(stop - start), np.arange(start, stop)] = -np.inf
        near = np.argpartition(-cosine, k - 1, axis=1)[:, :k]
        weight = np.maximum(np.take_along_axis(cosine, near, axis=1), 1e-6)
        other = label_N[near] != label_N[start:stop, None]
        share_N[start:stop] = (weight * other).sum(axis=1) / weight.sum(axis=1)
    counts = np.bincount(label_N)
    alone_N = counts[label_N] == 1
    if alone_N.any() and not alone_N.all():
        share_N[alone_N] = np.median(share_N[~alone_N])
    return share_N, alone_N


def fused(scores: list[F64]) -> F64:
    """Mean of the ranks, each from 0 to 1: no score outweighs another by its unit."""
    return np.asarray(np.mean([(rankdata(score) - 0.5) / len(score) for score in scores], axis=0))
