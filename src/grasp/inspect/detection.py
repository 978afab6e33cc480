"""Evaluate a detection score against a ground truth, and choose a threshold without one.

Start with `measure` and `threshold`.

Shape letters: N rows. Scores are higher for more suspicious rows.
"""

from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from grasp.arrays import F64, Bool
from grasp.errors import SettingsError

TAIL_SHARES = (0.1, 0.4)  # tail shares from which the skewness is estimated
SKEWNESS_MARGIN = 2.0  # times 1 / sqrt(N), about the standard error of the skewness
FITTED_NOTES = (
    "The threshold is estimated from the scores, assuming that at most about 5 % of the rows are wrong.",
    "In tests without wrong rows, 0 to 4.4 times as many rows were flagged as the requested 1 % or 5 %.",
    "For a guaranteed rate, mark rows verified to be correct in a column and pass it as --clean.",
)
VERIFIED_NOTES = ("The rate holds on average for correct rows like the verified ones, if these were drawn at random.",)
CONSTANT_NOTES = ("Most rows have the same score: the threshold is not informative.",)


@dataclass(frozen=True, slots=True)
class AtCut:
    """Precision, recall and F1 of the first `k` rows."""

    k: int
    precision: float
    recall: float
    f1: float

    @property
    def shares(self) -> tuple[float, float, float]:
        return self.precision, self.recall, self.f1


@dataclass(frozen=True, slots=True)
class Detection:
    """Evaluation of a score; intervals are 95 %."""

    n_rows: int
    n_planted: int
    auroc: float
    auroc_low: float
    auroc_high: float
    average_precision: float
    at_k: AtCut  # k = number of planted rows, or as requested
    best: AtCut  # at the k with the highest F1, which depends on the truth


def measure(score_N: F64, planted_N: Bool, k: int | None = None) -> Detection:
    """Compare a score with the truth. Ties count half in the AUROC; elsewhere earlier rows come first."""
    count, n_rows = int(planted_N.sum()), len(planted_N)
    if count in (0, n_rows):
        raise SettingsError(f"truth: {count} of {n_rows} rows are planted, expected some and not all")
    k = count if k is None else k
    if not 1 <= k <= n_rows:
        raise SettingsError(f"k: got {k}, expected 1 to {n_rows}")
    # AUROC and its interval. Source: DeLong, DeLong and Clarke-Pearson 1988
    planted, clean = np.sort(score_N[planted_N]), np.sort(score_N[~planted_N])
    above, below = placement(planted, clean), placement(clean, planted)
    value, reach = (
        float(above.mean()),
        ndtri(0.975) * sqrt(float(above.var() / len(planted) + below.var() / len(clean))),
    )
    hits_N = np.cumsum(planted_N[np.argsort(-score_N, kind="stable")], dtype=np.int64)
    rank_N = np.arange(1, n_rows + 1)
    best_index = int(np.argmax(2 * hits_N / (rank_N + count)))
    return Detection(
        n_rows=n_rows,
        n_planted=count,
        auroc=value,
        auroc_low=max(value - reach, 0.0),
        auroc_high=min(value + reach, 1.0),
        average_precision=average_precision(score_N, planted_N),
        at_k=_cut(hits_N, count, k),
        best=_cut(hits_N, count, best_index + 1),
    )


def _cut(hits_N: NDArray[np.int64], count: int, k: int) -> AtCut:
    hits = int(hits_N[k - 1])
    return AtCut(k, hits / k, hits / count, 2 * hits / (k + count))


def auroc(score_N: F64, planted_N: Bool) -> float:
    """Return the probability that a planted row scores higher than a clean one; ties count half."""
    return float(placement(score_N[planted_N], np.sort(score_N[~planted_N])).mean())


def placement(value_N: F64, reference_M: F64) -> F64:
    """Return the share of sorted `reference_M` below each value; ties count half."""
    below = np.searchsorted(reference_M, value_N, "left") + np.searchsorted(reference_M, value_N, "right")
    return np.asarray(below / (2 * len(reference_M)))


def average_precision(score_N: F64, planted_N: Bool) -> float:
    """Return the sum over thresholds of precision times gained recall; rows with equal scores share a threshold."""
    order = np.argsort(-score_N, kind="stable")
    hits_N = np.cumsum(planted_N[order])
    last_N = np.append(np.flatnonzero(np.diff(score_N[order])), len(order) - 1)  # last row of each run of equal scores
    precision, recall = hits_N[last_N] / (last_N + 1), hits_N[last_N] / hits_N[-1]
    return float((np.diff(recall, prepend=0.0) * precision).sum())


@dataclass(frozen=True, slots=True)
class Threshold:
    """The score above which rows are flagged, so that about the requested share of correct rows is flagged."""

    value: float
    false_positive_rate: float
    n_flagged: int
    expected_false: float  # number of rows, if all are correct
    all_alike: bool  # the score is not informative
    notes: tuple[str, ...]  # assumptions of the rate

    @property
    def beyond_chance(self) -> bool:
        """Return whether more rows are flagged than expected of correct rows, by two standard deviations."""
        return self.n_flagged > self.expected_false + 2 * sqrt(self.expected_false)


def threshold(score_N: F64, false_positive_rate: float) -> Threshold:
    """Estimate a threshold from a null distribution: the lower half of the scores, mirrored at the median and rescaled.

    Scores of correct rows may be skewed. The skewness is estimated from the middle: for a quantile z deviations out,
    the distance from the median to the upper quantile is exp(g z) times that to the lower one, with g fitted to tails
    of 10 to 40 % of the rows and increased by about its standard error, 2 / sqrt(N). The same law extrapolates the
    requested upper quantile from the lower one. It is exact for Tukey's g-and-h family (normal and log-normal scores,
    symmetric heavy tails), and close for gamma scores and maxima. If g < 0, where the long lower tail says little about
    the short upper one, the threshold is at least that of a normal upper half of the same width, and monotone in the
    rate; hardly any correct row is then flagged.

    Assumptions: correct rows are skewed in the tail as in the middle, and few rows are wrong. Up to about 5 % wrong
    rows matter little; more of them raise the threshold, which is then conservative.
    """
    _check_rate(false_positive_rate)
    tail_P = np.linspace(*TAIL_SHARES, 31)
    rate_R = np.append(np.geomspace(min(false_positive_rate, TAIL_SHARES[1]), TAIL_SHARES[1], 40), false_positive_rate)
    middle, low_R = float(np.median(score_N)), np.quantile(score_N, rate_R)
    upper_P, lower_P = np.quantile(score_N, 1 - tail_P) - middle, middle - np.quantile(score_N, tail_P)
    usable_P = (upper_P > 0) & (lower_P > 0)
    alike = bool(low_R[-1] == middle or not usable_P.any())
    if alike:
        value = float(np.max(score_N))
    else:
        z_P = -ndtri(tail_P[usable_P])
        lean = (
            float(z_P @ np.log(upper_P[usable_P] / lower_P[usable_P]) / (z_P @ z_P))
            + SKEWNESS_MARGIN / len(score_N) ** 0.5
        )
        value = float(np.max(middle + np.exp(-lean * ndtri(rate_R)) * (middle - low_R)))
        if lean < 0:
            value = max(value, middle - float(upper_P[usable_P][0] / z_P[0] * ndtri(false_positive_rate)))
    return _threshold(score_N, value, false_positive_rate, FITTED_NOTES, alike=alike)


def threshold_of_checked(score_N: F64, right_N: Bool, false_positive_rate: float) -> Threshold:
    """Compute a threshold from rows known to be correct: a conformal test with their scores as null distribution.

    Another correct row is flagged with at most the requested rate, on average over the choice of known rows, for any
    distribution of scores, if the known rows were drawn at random from the correct ones.
    """
    _check_rate(false_positive_rate)
    known = np.sort(score_N[right_N])
    place = ceil((len(known) + 1) * (1 - false_positive_rate) - 1e-9)
    if place > len(known):
        least = ceil(1 / false_positive_rate - 1e-9) - 1
        raise SettingsError(
            f"{len(known)} rows are known to be correct, expected at least {least} for a false-positive rate of "
            f"{false_positive_rate:g}; verify more, drawn at random, or use a higher rate"
        )
    return _threshold(score_N, float(known[place - 1]), false_positive_rate, VERIFIED_NOTES)


def threshold_like(score_N: F64, other: Threshold) -> Threshold:
    """Compute a threshold that flags at most as many rows as `other`, since ranks have no null distribution."""
    value = float(np.sort(score_N)[::-1][min(other.n_flagged, len(score_N) - 1)])
    return _threshold(score_N, value, other.false_positive_rate, FITTED_NOTES, alike=other.all_alike)


def _check_rate(rate: float) -> None:
    if not 0 < rate < 0.5:
        raise SettingsError(f"false-positive rate: got {rate}, expected more than 0 and less than 0.5")


def _threshold(score_N: F64, value: float, rate: float, notes: tuple[str, ...], *, alike: bool = False) -> Threshold:
    flagged = int((score_N > value).sum())
    return Threshold(value, rate, flagged, rate * len(score_N), alike, (*notes, *(CONSTANT_NOTES if alike else ())))


def mean_ranks(scores: list[F64]) -> F64:
    """Return the mean of the ranks, scaled to 0 to 1, with mid-ranks for ties; scores need no common unit."""
    return np.asarray(np.mean([placement(score, np.sort(score)) for score in scores], axis=0))
