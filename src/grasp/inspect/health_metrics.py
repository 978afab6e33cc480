"""Numerical measurements of the health checks, and the record of a check. Start with `Check`.

Shape letters: N rows of a sample, B subsets, E units, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from grasp.arrays import F64, Floats, ratio


@dataclass(frozen=True, slots=True)
class Check:
    """A line of `grasp info --check`: measurement, verdict, and advice."""

    name: str
    measured: str  # description
    healthy: str  # healthy range
    verdict: str  # healthy, look, or not measured
    advice: str  # what to change, or why it was not measured
    numbers: dict[str, float]  # the verdict is based on the first one, if on a single one


def judge_check(
    name: str, measured: str, healthy: str, is_healthy: bool, advice: str, numbers: dict[str, float]
) -> Check:
    """Return a check with a verdict.

    Args:
        name: name of the check.
        measured: description of the measurement.
        healthy: description of the healthy range.
        is_healthy: whether the measurement is in the healthy range.
        advice: what to change, dropped if the measurement is healthy.
        numbers: measured numbers.
    """
    return Check(name, measured, healthy, "healthy" if is_healthy else "look", "" if is_healthy else advice, numbers)


def unmeasured_check(name: str, healthy: str, reason: str) -> Check:
    """Return a check that could not be measured, for the given reason."""
    return Check(name, "not measured", healthy, "not measured", reason, {})


def top_shares(blocks: Iterable[Floats]) -> F64:
    """Return the share of the largest row in each column's sum of squares, (E,); 0 for a column of zeros."""
    largest_E, total_E = np.zeros(1), np.zeros(1)
    for block in blocks:
        square_nE = np.asarray(block, dtype=np.float64) ** 2
        largest_E, total_E = np.maximum(largest_E, square_nE.max(axis=0)), total_E + square_nE.sum(axis=0)
    return ratio(largest_E, total_E)


def truncated_mass(residual_NV: csr_array) -> float:
    """Return the mean share of the absolute mass of residuals that was truncated to the top k.

    A complete residual sums to 0, and the truncated entries are positive (probabilities), so that their sum is minus
    the sum of the stored ones. With a soft cap on the logits this holds only approximately.
    """
    stored_N = np.asarray(abs(residual_NV).sum(axis=1), dtype=np.float64).ravel()
    truncated_N = np.maximum(-np.asarray(residual_NV.sum(axis=1), dtype=np.float64).ravel(), 0.0)
    return float(np.mean(ratio(truncated_N, stored_N + truncated_N)))


@dataclass(frozen=True, slots=True)
class Stability:
    """Pairs of subsets whose predicted order is certain. Source: eq:pairwise-stability-bound."""

    bound: float  # share of pairs whose gap is beyond twice the largest error
    certain: float  # share of pairs whose difference of errors is smaller than their gap
    accuracy: float  # share of pairs in the right order


def stability(predicted_B: F64, realized_B: F64) -> Stability:
    """Compute the bound and the accuracy that it bounds, after scaling the prediction to the utility by least squares.

    A negative slope is set to 0, so that the order of a wrong prediction is not reversed.
    """
    centred_B = predicted_B - predicted_B.mean()
    square_sum = float(centred_B @ centred_B)
    slope = max(float(centred_B @ (realized_B - realized_B.mean())) / square_sum, 0.0) if square_sum > 0 else 0.0
    scaled_B = realized_B.mean() + slope * centred_B
    error_B = scaled_B - realized_B
    b, c = np.triu_indices(len(realized_B), 1)
    gap = np.abs(realized_B[b] - realized_B[c])
    is_ordered = (scaled_B[b] - scaled_B[c]) * (realized_B[b] - realized_B[c]) > 0
    return Stability(
        bound=float((gap > 2 * np.abs(error_B).max()).mean()),
        certain=float((np.abs(error_B[b] - error_B[c]) < gap).mean()),
        accuracy=float(is_ordered.mean()),
    )
