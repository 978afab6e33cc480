"""Measurements behind the checks of an artifact: arrays in, numbers out; and what is said of one.

Shape letters: N rows of a sample, B subsets, E units, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from grasp.arrays import F64, Floats, ratio
from grasp.runs.metrics import spearman


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `grasp info --check`: what was measured, whether it is healthy, and what to change."""

    name: str
    measured: str  # in words
    healthy: str  # what a healthy value is
    verdict: str  # healthy, look, or not measured
    advice: str  # what to change, or why nothing was measured
    numbers: dict[str, float]  # the first one is what the verdict is about, where it is about one


def judge_check(name: str, measured: str, healthy: str, good: bool, advice: str, numbers: dict[str, float]) -> Check:
    """A measurement; the advice is kept where it is not good."""
    return Check(name, measured, healthy, "healthy" if good else "look", "" if good else advice, numbers)


def unmeasured_check(name: str, healthy: str, why: str) -> Check:
    """A measurement that could not be taken."""
    return Check(name, "not measured", healthy, "not measured", why, {})


def rank_agreement(first_B: F64, second_B: F64) -> float:
    """Spearman's rho as a number; nan where one of the two is constant."""
    return float(spearman(first_B, second_B))


def top_shares(blocks: Iterable[Floats]) -> F64:
    """Share of each column's sum of squares that its largest row holds, (E,); of a column of zeros 0."""
    most_E, total_E = np.zeros(1), np.zeros(1)
    for block in blocks:
        square_nE = np.asarray(block, dtype=np.float64) ** 2
        most_E, total_E = np.maximum(most_E, square_nE.max(axis=0)), total_E + square_nE.sum(axis=0)
    return ratio(most_E, total_E)


def mass_outside(residual_NV: csr_array) -> float:
    """Mean share of a residual's absolute mass that top-k cut off.

    A whole residual adds up to 0, so that what is missing, all of it positive, is minus the sum of what is there. With
    a soft cap on the logits it adds up to 0 only nearly, and so is this.
    """
    retained = np.asarray(abs(residual_NV).sum(axis=1), dtype=np.float64).ravel()
    cut_off = np.maximum(-np.asarray(residual_NV.sum(axis=1), dtype=np.float64).ravel(), 0.0)
    total = retained + cut_off
    return float(np.mean(ratio(cut_off, total)))


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
