"""An upper bound of the predicted change of any selection, and the condition of the guarantee of greedy selection.

If no curvature is positive (geometry is a penalty), the relaxation of the objective V to row weights between 0 and 1 is
concave, so its tangent at any point x bounds V of every subset T of the same size that satisfies the floors and caps:

    V(T) <= V(x) + max over such T of <gradient(x), T - x> .

Frank-Wolfe steps, starting from the selection, tighten the bound. Start with `upper_bound`.

A pool of rows is *aligned* if no pair of its sketches has a negative inner product. A penalty on the norm of their sum
is then submodular (prop:aligned-submodularity of the paper), which gives greedy selection its guarantee. The upper
bound does not require an aligned pool.

Shape letters: N rows, P rows of the pool, D total width of the concatenated sketches.
"""

from dataclasses import dataclass

import numpy as np

from grasp.arrays import F64, I64
from grasp.geometry.set_objective import Objective
from grasp.select.budget import Constraints, best_items

MAX_STEPS = 8  # Frank-Wolfe steps
GAP_TOLERANCE = 1e-3  # stop if the gap is below this fraction of what the selected rows contribute to V
ALIGNED_ROWS = 8_192  # largest pool for which all pairs are checked


@dataclass(frozen=True, slots=True)
class _Point:
    """A point of the relaxation (row weights between 0 and 1), given by the sums that V depends on."""

    linear: float  # sum of linear_i
    sketch_D: F64  # sum of the concatenated sketches
    value: float  # V

    @classmethod
    def from_rows(cls, objective: Objective, row_index: I64) -> "_Point":
        linear = float(objective.linear_N[row_index].sum())
        sketch_D = objective.sum_of(row_index)
        return cls(linear, sketch_D, objective.value(linear, sketch_D))


def upper_bound(
    objective: Objective, constraints: Constraints, row_index: I64, steps: int = MAX_STEPS
) -> tuple[float | None, str]:
    """Return an upper bound of the objective over feasible subsets of as many rows, or None and the reason.

    Floors and caps in tokens are ignored, which can only raise the bound.

    Args:
        objective: objective of the selection.
        constraints: budget, floors, caps and candidate rows.
        row_index: the selected rows, from which the Frank-Wolfe steps start.
        steps: maximum number of steps.
    """
    if not objective.is_concave:
        return None, "a geometry weight is positive: V is not concave"
    row_constraints = constraints.in_rows(len(row_index))
    start = x = _Point.from_rows(objective, row_index)
    bound = np.inf
    for _ in range(steps):
        tangent_maximum, best = _maximize_tangent(objective, row_constraints, x)
        bound = min(bound, tangent_maximum)
        if bound - start.value <= GAP_TOLERANCE * abs(start.value - objective.constant):
            break
        x = _line_search(objective, x, _Point.from_rows(objective, best))
    return float(max(bound, start.value)), ""


def is_submodular(objective: Objective, constraints: Constraints) -> bool | None:
    """Return whether geometry is a penalty and the pool is aligned, so that V is submodular on it.

    None: not known, because the pool has more than ALIGNED_ROWS rows. Source: prop:aligned-submodularity.
    """
    if not objective.curvature:
        return True
    if not objective.is_concave:
        return False
    rows = np.flatnonzero(constraints.allowed_M)
    if len(rows) > ALIGNED_ROWS:
        return None
    sketch_PD = objective.rows(rows) * np.sqrt(np.abs(objective.curvature_D))
    # an inner product of 0 may be slightly negative by rounding
    lowest = -1e-9 * float(np.einsum("pd,pd->p", sketch_PD, sketch_PD).max(initial=0.0))
    blocks = (sketch_PD[start : start + 1024] @ sketch_PD.T for start in range(0, len(rows), 1024))
    return all(bool((block >= lowest).all()) for block in blocks)


def _maximize_tangent(objective: Objective, constraints: Constraints, x: _Point) -> tuple[float, I64]:
    """Return the maximum of the tangent at x over feasible subsets, and the subset that attains it."""
    gradient_N = objective.linear_N + objective.dot(2.0 * objective.curvature_D * x.sketch_D)
    best = best_items(gradient_N, constraints)
    gradient_at_x = x.linear + 2.0 * float(objective.curvature_D @ x.sketch_D**2)  # <gradient(x), x>
    return x.value + float(gradient_N[best].sum()) - gradient_at_x, best


def _line_search(objective: Objective, x: _Point, y: _Point) -> _Point:
    """Return the best point on the segment from x to y, along which V is a parabola."""
    linear, sketch_D = y.linear - x.linear, y.sketch_D - x.sketch_D
    # V(x + step (y - x)) = V(x) + slope step + curvature step^2
    slope = linear + 2.0 * float((objective.curvature_D * x.sketch_D) @ sketch_D)
    curvature = float(objective.curvature_D @ sketch_D**2)
    step = 1.0 if curvature >= 0.0 else min(1.0, max(0.0, -slope / (2.0 * curvature)))
    linear, sketch_D = x.linear + step * linear, x.sketch_D + step * sketch_D
    return _Point(linear, sketch_D, objective.value(linear, sketch_D))
