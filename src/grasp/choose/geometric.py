"""The road for protocols with geometry: rows by exact marginal gains, and what is proven of the result."""

from dataclasses import dataclass

import numpy as np

from grasp.choose.additive import F64, best_rows
from grasp.choose.certificate import is_aligned, upper_bound
from grasp.choose.greedy import Picks, choose
from grasp.choose.limits import I64, Limits
from grasp.choose.objective import Objective
from grasp.extract.progress import Progress
from grasp.predict.predictor import Predictor

SIZES_TRIED = 4  # a budget in tokens is a number of rows only once rows are chosen
SIZE_SHARE = 0.005
OPTIMAL = "optimal: rows are worth what they are worth, whatever else is kept"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Rows in the order in which they were taken, and what is proven of them."""

    row_index: I64
    gain: F64 | None  # exact marginal gain of each when it was taken; None: its effect
    bound: float | None  # no selection of as many rows within the limits has a higher change
    guarantee: str
    notes: tuple[str, ...]


def choose_rows(predictor: Predictor, weights_T: F64, limits: Limits, progress: Progress | None = None) -> Chosen:
    """Rows of high predicted change, redundancy and all.

    Args:
        weights_T: weights of the predictor's targets, adding up to 1.
        progress: told of the rows taken.
    """
    objective, picks = _sized(predictor, weights_T, limits, progress)
    if picks is None:
        return Chosen(best_rows(objective.linear_N, limits), None, None, OPTIMAL, ())
    bound, reason = upper_bound(objective, limits, picks.row_index)
    rewards = any(bend > 0 for bend in objective.curvature.values())
    note = "the protocol rewards a part of the geometry: rows that resemble one another attract one another"
    proven = f"no upper bound: {reason}" if bound is None else _guarantee(objective, limits, picks)
    return Chosen(picks.row_index, picks.gain, bound, proven, (note,) if rewards else ())


def _sized(
    predictor: Predictor, weights_T: F64, limits: Limits, progress: Progress | None
) -> tuple[Objective, Picks | None]:
    """Choose; under a budget in tokens, until the number of rows is the one that was assumed."""
    size = limits.budget
    if limits.cost_N is not None:
        size = max(1, round(limits.budget / float(limits.cost_N[limits.allowed_N].mean())))
    for _ in range(SIZES_TRIED):
        objective = Objective.of(predictor, weights_T, min(size, predictor.n_rows))
        if not objective.curvature:
            return objective, None
        picks = choose(objective, limits, progress)
        found = len(picks.row_index)
        if abs(found - size) <= SIZE_SHARE * size:
            break
        size = found
    return (objective if found == size else Objective.of(predictor, weights_T, found)), picks


def _guarantee(objective: Objective, limits: Limits, picks: Picks) -> str:
    """What is proven, in words."""
    searched = picks.searched and limits.unit == "rows" and bool(np.all(picks.gain >= 0))
    if searched and is_aligned(objective, limits):
        return "at least 1 - 1/e of the best gain: the pool is aligned, hence V submodular, and no gain is negative"
    return "no selection of as many rows exceeds the bound: every geometry is a penalty, hence the relaxation concave"
