"""How far from the best possible is a selection? An upper bound, for protocols with geometry.

Where every geometry is a penalty, the relaxation of V to weights between 0 and 1 is concave, so its tangent at any
point x bounds V of every subset of as many rows that keeps the floors and caps:

    V(T) <= V(x) + max over such T of <gradient(x), T - x> .

The bound needs no alignment of the sketches; it is improved by a few steps of Frank and Wolfe from the selection on.
Shape letters: N rows, D sketch width, P rows of the pool.
"""

from dataclasses import dataclass

import numpy as np

from grasp.choose.additive import F64, best_rows
from grasp.choose.limits import I64, Limits
from grasp.choose.objective import Objective

STEPS = 8
ENOUGH = 1e-3  # of the distance to the value of taking rows at random: closer is not worth a pass
ALIGNED_ROWS = 8_192  # pairs of a larger pool are not looked at


def upper_bound(objective: Objective, limits: Limits, row_index: I64, steps: int = STEPS) -> tuple[float | None, str]:
    """The bound of the module's docstring, or None and why there is none.

    Floors and caps in tokens are left out of it, which can only raise the bound.
    """
    if not objective.is_concave:
        return None, "a part of the geometry is rewarded: V is not concave"
    choice = limits.in_rows(len(row_index))
    start = x = _Point.of(objective, row_index)
    bound = np.inf
    for _ in range(steps):
        at, best = _tangent(objective, choice, x)
        bound = min(bound, at)
        if bound - start.value <= ENOUGH * abs(start.value - objective.constant):
            break
        x = _towards(objective, x, _Point.of(objective, best))
    return float(max(bound, start.value)), ""


def is_aligned(objective: Objective, limits: Limits) -> bool | None:
    """Whether the pool is aligned, so that V is submodular on it. Source: prop:aligned-submodularity.

    None where the pool is larger than ALIGNED_ROWS. Without curvature every pool is.
    """
    if not objective.curvature:
        return True
    rows = np.flatnonzero(limits.allowed_N)
    if len(rows) > ALIGNED_ROWS:
        return None
    sketch_PD = objective.rows(rows) * np.sqrt(np.abs(objective.bends_D))
    floor = -1e-9 * float(np.einsum("pd,pd->p", sketch_PD, sketch_PD).max(initial=0.0))
    blocks = (sketch_PD[start : start + 1024] @ sketch_PD.T for start in range(0, len(rows), 1024))
    return objective.is_concave and all(bool((block >= floor).all()) for block in blocks)


@dataclass(frozen=True, slots=True)
class _Point:
    """A set of rows with weights between 0 and 1, by the sums that V depends on."""

    linear: float
    sketch_D: F64
    value: float

    @classmethod
    def of(cls, objective: Objective, row_index: I64) -> "_Point":
        linear = float(objective.linear_N[row_index].sum())
        sketch_D = objective.sum_of(row_index)
        return cls(linear, sketch_D, objective.value(linear, sketch_D))


def _tangent(objective: Objective, choice: Limits, x: _Point) -> tuple[float, I64]:
    """The tangent's largest value over subsets, and where it is reached."""
    gradient_N = objective.linear_N + objective.dot(2.0 * objective.bends_D * x.sketch_D)
    best = best_rows(gradient_N, choice)
    at_x = x.linear + 2.0 * float(objective.bends_D @ x.sketch_D**2)
    return x.value + float(gradient_N[best].sum()) - at_x, best


def _towards(objective: Objective, x: _Point, y: _Point) -> _Point:
    """Best point between two: V is a parabola there."""
    linear, sketch_D = y.linear - x.linear, y.sketch_D - x.sketch_D
    slope = linear + 2.0 * float((objective.bends_D * x.sketch_D) @ sketch_D)
    bend = float(objective.bends_D @ sketch_D**2)
    step = 1.0 if bend >= 0.0 else min(1.0, max(0.0, -slope / (2.0 * bend)))
    linear, sketch_D = x.linear + step * linear, x.sketch_D + step * sketch_D
    return _Point(linear, sketch_D, objective.value(linear, sketch_D))
