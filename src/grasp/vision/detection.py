"""Estimate a threshold of a detection score without a ground truth.

A detection score is higher for more suspicious rows. Start with `estimate_threshold`.

Shape letters: N rows, P tail shares, R false-positive rates.
"""

from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
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


def placement(value_N: F64, reference_M: F64) -> F64:
    """Return the share of sorted `reference_M` below each value; ties count half."""
    below = np.searchsorted(reference_M, value_N, "left") + np.searchsorted(reference_M, value_N, "right")
    return np.asarray(below / (2 * len(reference_M)))


@dataclass(frozen=True, slots=True)
class Threshold:
    """A score above which rows are flagged, so that about the requested share of correct rows is flagged."""

    value: float
    false_positive_rate: float
    n_flagged: int
    expected_false: float  # number of rows, if all are correct
    all_alike: bool  # the score is not informative
    notes: tuple[str, ...]  # assumptions of the rate

    @property
    def beyond_chance(self) -> bool:
        """Return whether more rows are flagged than expected if all are correct, by two standard deviations."""
        return self.n_flagged > self.expected_false + 2 * sqrt(self.expected_false)


def estimate_threshold(score_N: F64, false_positive_rate: float) -> Threshold:
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

    Args:
        score_N: score of each row.
        false_positive_rate: share of correct rows that may be flagged, between 0 and 0.5.
    Raises:
        SettingsError: the rate is out of range.
    """
    _check_rate(false_positive_rate)
    tail_P = np.linspace(*TAIL_SHARES, 31)
    rate_R = np.append(np.geomspace(min(false_positive_rate, TAIL_SHARES[1]), TAIL_SHARES[1], 40), false_positive_rate)
    median, low_quantile_R = float(np.median(score_N)), np.quantile(score_N, rate_R)
    upper_P, lower_P = np.quantile(score_N, 1 - tail_P) - median, median - np.quantile(score_N, tail_P)
    usable_P = (upper_P > 0) & (lower_P > 0)
    is_constant = bool(low_quantile_R[-1] == median or not usable_P.any())
    if is_constant:
        value = float(np.max(score_N))
    else:
        # Least squares of log(upper / lower) = g z through the origin.
        z_P = -ndtri(tail_P[usable_P])
        skewness = float(z_P @ np.log(upper_P[usable_P] / lower_P[usable_P]) / (z_P @ z_P))
        skewness += SKEWNESS_MARGIN / len(score_N) ** 0.5
        # The largest value over all larger rates: a smaller rate must not give a lower threshold.
        value = float(np.max(median + np.exp(-skewness * ndtri(rate_R)) * (median - low_quantile_R)))
        if skewness < 0:
            value = max(value, median - float(upper_P[usable_P][0] / z_P[0] * ndtri(false_positive_rate)))
    return _threshold(score_N, value, false_positive_rate, FITTED_NOTES, is_constant=is_constant)


def conformal_threshold(score_N: F64, correct_N: Bool, false_positive_rate: float) -> Threshold:
    """Compute a threshold from rows known to be correct: a conformal test with their scores as null distribution.

    Another correct row is flagged with at most the requested rate, on average over the choice of known rows, for any
    distribution of scores, if the known rows were drawn at random from the correct ones.

    Args:
        score_N: score of each row.
        correct_N: rows known to be correct.
        false_positive_rate: share of correct rows that may be flagged, between 0 and 0.5.
    Raises:
        SettingsError: the rate is out of range, or too few rows are known to be correct.
    """
    _check_rate(false_positive_rate)
    correct = np.sort(score_N[correct_N])
    rank = ceil((len(correct) + 1) * (1 - false_positive_rate) - 1e-9)  # despite rounding, e.g. of (99 + 1) * 0.99
    if rank > len(correct):
        min_correct = ceil(1 / false_positive_rate - 1e-9) - 1
        raise SettingsError(
            f"{len(correct)} rows are known to be correct, expected at least {min_correct} for a false-positive rate "
            f"of {false_positive_rate:g}; verify more, drawn at random, or use a higher rate"
        )
    return _threshold(score_N, float(correct[rank - 1]), false_positive_rate, VERIFIED_NOTES)


def matching_threshold(score_N: F64, other: Threshold) -> Threshold:
    """Compute a threshold that flags at most as many rows as `other`, since ranks have no null distribution."""
    value = float(np.sort(score_N)[::-1][min(other.n_flagged, len(score_N) - 1)])
    return _threshold(score_N, value, other.false_positive_rate, FITTED_NOTES, is_constant=other.all_alike)


def _check_rate(rate: float) -> None:
    """Raise an error unless a false-positive rate is between 0 and 0.5."""
    if not 0 < rate < 0.5:
        raise SettingsError(f"false-positive rate: got {rate}, expected more than 0 and less than 0.5")


def _threshold(
    score_N: F64, value: float, rate: float, notes: tuple[str, ...], *, is_constant: bool = False
) -> Threshold:
    """Return the record of a threshold, with the number of rows above it."""
    n_flagged = int((score_N > value).sum())
    return Threshold(
        value, rate, n_flagged, rate * len(score_N), is_constant, (*notes, *(CONSTANT_NOTES if is_constant else ()))
    )


def mean_ranks(scores: list[F64]) -> F64:
    """Return the mean of the ranks, scaled to 0 to 1, with mid-ranks for ties; scores need no common unit."""
    return np.asarray(np.mean([placement(score, np.sort(score)) for score in scores], axis=0))
