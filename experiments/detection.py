"""Evaluate a detection score against a ground truth.

A detection score is higher for more suspicious rows; planted rows are those known to be wrong. Start with
`evaluate_scores`. Shape letter: N rows.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy.special import ndtri

from grasp.arrays import F64, Bool
from grasp.errors import SettingsError
from grasp.vision.detection import placement


@dataclass(frozen=True, slots=True)
class MetricsAtK:
    """Precision, recall and F1 of the `k` rows with the highest scores."""

    k: int
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True, slots=True)
class Detection:
    """Evaluation of a score; intervals are 95 %."""

    n_rows: int
    n_planted: int
    auroc: float
    auroc_low: float
    auroc_high: float
    average_precision: float
    at_k: MetricsAtK  # k = number of planted rows, or as requested
    best: MetricsAtK  # at the k with the highest F1, which is known only with a ground truth


def evaluate_scores(score_N: F64, planted_N: Bool, k: int | None = None) -> Detection:
    """Compare scores with the ground truth. Ties count half in the AUROC; elsewhere earlier rows come first.

    Args:
        score_N: score of each row.
        planted_N: rows that are known to be wrong.
        k: number of first rows for precision and recall. Default: the number of wrong rows.
    Raises:
        SettingsError: no row or every row is wrong, or `k` is out of range.
    """
    n_planted, n_rows = int(planted_N.sum()), len(planted_N)
    if n_planted in (0, n_rows):
        raise SettingsError(f"truth: {n_planted} of {n_rows} rows are planted, expected some and not all")
    k = n_planted if k is None else k
    if not 1 <= k <= n_rows:
        raise SettingsError(f"k: got {k}, expected 1 to {n_rows}")
    # The placement of a value is the share of the other group below it; the AUROC is the mean placement of planted rows
    # among clean ones. The variance of its estimate is the sum of the variances of both placements over their numbers.
    # Source: DeLong, DeLong and Clarke-Pearson 1988
    planted, clean = np.sort(score_N[planted_N]), np.sort(score_N[~planted_N])
    planted_placement, clean_placement = placement(planted, clean), placement(clean, planted)
    value = float(planted_placement.mean())
    variance = float(planted_placement.var() / len(planted) + clean_placement.var() / len(clean))
    half_width = ndtri(0.975) * sqrt(variance)
    hits_N = np.cumsum(planted_N[np.argsort(-score_N, kind="stable")], dtype=np.int64)

    def metrics(k: int) -> MetricsAtK:
        hits = int(hits_N[k - 1])
        return MetricsAtK(k, hits / k, hits / n_planted, 2 * hits / (k + n_planted))

    return Detection(
        n_rows=n_rows,
        n_planted=n_planted,
        auroc=value,
        auroc_low=max(value - half_width, 0.0),
        auroc_high=min(value + half_width, 1.0),
        average_precision=average_precision(score_N, planted_N),
        at_k=metrics(k),
        best=metrics(int(np.argmax(2 * hits_N / (np.arange(1, n_rows + 1) + n_planted))) + 1),
    )


def auroc(score_N: F64, planted_N: Bool) -> float:
    """Return the probability that a planted row scores higher than a clean one; ties count half."""
    return float(placement(score_N[planted_N], np.sort(score_N[~planted_N])).mean())


def average_precision(score_N: F64, planted_N: Bool) -> float:
    """Return the sum over thresholds of precision times gained recall; rows with equal scores share a threshold."""
    order = np.argsort(-score_N, kind="stable")
    hits_N = np.cumsum(planted_N[order])
    last_N = np.append(np.flatnonzero(np.diff(score_N[order])), len(order) - 1)  # last row of each run of equal scores
    precision, recall = hits_N[last_N] / (last_N + 1), hits_N[last_N] / hits_N[-1]
    return float((np.diff(recall, prepend=0.0) * precision).sum())
