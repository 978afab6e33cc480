"""Optimise mixtures: maximise l'p + sum_g c_g(p_g) over a simplex with bounds. Start with `solve`.

    sum p = 1,   low <= p <= high,   1/2 sum |p - current| <= distance

The c_g are concave and piecewise linear. Each p_g is the sum of its segments, which are filled steepest first without
further constraints, so this is a linear program. It is solved by Clarabel, an interior-point method.

The value that a model fitted to runs predicts saturates, so its maximum is in general not at a corner. `frank_wolfe`
maximises it: each step solves a linear program for the corner in the direction of steepest ascent, then searches
along the line to this corner.
Shape letters: B mixtures, G label values, K knots of the piecewise linear functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import clarabel
import numpy as np
from scipy import sparse

from grasp.arrays import F64, ratio
from grasp.errors import SettingsError

BOUND_TOLERANCE = 1e-7  # a weight this close to a bound is set to the bound
MAX_STEPS = 60  # maximum number of steps of `frank_wolfe` per start
STEP_SIZES = np.linspace(0.0, 1.0, 33) ** 2  # of the line search towards a corner
DIFFERENCE_STEP = 1e-3  # finite-difference step, relative to the weight plus an even weight
MIN_RELATIVE_GAIN = 1e-6  # stop if a step gains less than this part of the range along the line


@dataclass(frozen=True, slots=True)
class Segments:
    """Concave piecewise linear function of each p_g; the outer knots are the bounds of p_g."""

    knots_GK: F64
    value_GK: F64

    @property
    def width_GK(self) -> F64:  # noqa: N802 - a shape suffix
        """Return the lengths of the segments, (G, K - 1)."""
        return np.diff(self.knots_GK, axis=1)

    @property
    def slope_GK(self) -> F64:  # noqa: N802 - a shape suffix
        """Return the slopes of the segments, (G, K - 1)."""
        return ratio(np.diff(self.value_GK, axis=1), self.width_GK)

    def value(self, p_G: F64) -> float:
        """Return sum_g c_g(p_g)."""
        lines = zip(p_G, self.knots_GK, self.value_GK, strict=True)
        return float(sum(np.interp(p, knots_K, value_K) for p, knots_K, value_K in lines))


@dataclass(frozen=True, slots=True)
class MixtureProblem:
    """Objective and constraints of a mixture.

    Attributes:
        linear_G: coefficients l of the linear term.
        low_G: lower bound of each weight.
        high_G: upper bound of each weight.
        current_G: mixture that `distance` is measured from.
        distance: maximum total variation distance from `current_G`; None: unlimited.
        segments: the functions c_g; None: 0.
    """

    linear_G: F64
    low_G: F64
    high_G: F64
    current_G: F64
    distance: float | None = None
    segments: Segments | None = None

    def value(self, p_G: F64) -> float:
        """Return l'p + sum_g c_g(p_g)."""
        curved = 0.0 if self.segments is None else self.segments.value(p_G)
        return float(self.linear_G @ p_G) + curved


def solve(problem: MixtureProblem, linear_G: F64 | None = None) -> F64:
    """Return the mixture p that maximises l'p + sum_g c_g(p_g), (G,).

    The variables are p; t with t >= |p - current| if there is a distance; and the filled length of each segment.
    Coefficients are scaled so that the largest is 1.

    Args:
        problem: bounds, distance, and default objective.
        linear_G: coefficients l; None: those of `problem`.

    Raises:
        SettingsError: no mixture satisfies the bounds and the distance, or the solver fails.
    """
    linear_G = problem.linear_G if linear_G is None else linear_G
    n = len(linear_G)
    slopes = np.empty(0) if problem.segments is None else problem.segments.slope_GK.reshape(-1)
    # a constant does not change the optimum, since p adds up to 1; without it the scale is that of the differences
    linear_G, slopes = linear_G - linear_G.mean(), slopes - (slopes.mean() if slopes.size else 0.0)
    scale = max(float(np.abs(part).max(initial=0.0)) for part in (linear_G, slopes))
    scale = scale if scale > 0 else 1.0
    size = n if problem.distance is None else 2 * n
    quadratic = sparse.csc_matrix((size + slopes.size, size + slopes.size))
    cost = np.zeros(size + slopes.size)
    cost[:n], cost[size:] = -linear_G / scale, -slopes / scale  # Clarabel minimises x'Px / 2 + q'x, here with P = 0
    matrix, right, cones = _constraints(problem, n)
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-10
    solution = clarabel.DefaultSolver(quadratic, cost, matrix, right, cones, settings).solve()
    if solution.status not in (clarabel.SolverStatus.Solved, clarabel.SolverStatus.AlmostSolved):
        raise SettingsError(
            f"floor, cap, distance: found no mixture that satisfies all of them ({solution.status}); lower a floor, or "
            "raise a cap or the distance"
        )
    return _snap_to_bounds(np.array(solution.x)[:n], problem)


def _constraints(problem: MixtureProblem, n: int) -> tuple[sparse.csc_matrix, F64, list[object]]:
    """Return A, b and cones of the constraints A x + s = b, with s = 0 in the first cone and s >= 0 in the second."""
    ones_1G, eye = np.ones((1, n)), np.eye(n)
    matrix = np.concatenate([ones_1G, -eye, eye])
    right = np.concatenate([[1.0], -problem.low_G, problem.high_G])
    if problem.distance is not None:
        # t >= p - current, t >= current - p, sum t <= 2 distance
        distance_rows = np.block([[eye, -eye], [-eye, -eye], [np.zeros((1, n)), ones_1G]])
        matrix = np.concatenate([np.pad(matrix, ((0, 0), (0, n))), distance_rows])
        right = np.concatenate([right, problem.current_G, -problem.current_G, [2.0 * problem.distance]])
    if problem.segments is None:
        return sparse.csc_matrix(matrix), right, [clarabel.ZeroConeT(1), clarabel.NonnegativeConeT(len(right) - 1)]
    width = problem.segments.width_GK
    # p_g - sum of its filled segments = first knot; 0 <= filled length <= width
    filled = sparse.eye(width.size)
    minus_filled = sparse.kron(sparse.eye(n), -np.ones((1, width.shape[1])))
    select_p = sparse.csc_matrix(np.pad(eye, ((0, 0), (0, matrix.shape[1] - n))))
    blocks: list[list[Any]] = [
        [select_p, minus_filled],
        [sparse.csc_matrix(matrix), None],
        [None, -filled],
        [None, filled],
    ]
    all_constraints = sparse.csc_matrix(sparse.bmat(blocks))
    bounds = np.concatenate([problem.segments.knots_GK[:, 0], right, np.zeros(width.size), width.reshape(-1)])
    return all_constraints, bounds, [clarabel.ZeroConeT(n + 1), clarabel.NonnegativeConeT(len(bounds) - n - 1)]


def _snap_to_bounds(p_G: F64, problem: MixtureProblem) -> F64:
    """Set weights that are close to a bound to it, and rescale the others so that all add up to 1.

    The solution of an interior-point method is strictly inside the bounds.
    """
    low, high = problem.low_G, problem.high_G
    p_G = np.where(p_G - low < BOUND_TOLERANCE, low, np.where(high - p_G < BOUND_TOLERANCE, high, p_G))
    is_free_G = (p_G > low) & (p_G < high)
    free_total = 1.0 - p_G[~is_free_G].sum()
    if is_free_G.any() and p_G[is_free_G].sum() > 0:
        p_G = p_G.copy()
        p_G[is_free_G] *= free_total / p_G[is_free_G].sum()
    return np.clip(p_G, low, high)


def frank_wolfe(problem: MixtureProblem, value: Callable[[F64], F64], starts: Sequence[F64]) -> F64:
    """Return the best local maximum of a smooth function of mixtures, (G,), by the algorithm of Frank and Wolfe.

    Args:
        problem: bounds and distance; its objective is ignored.
        value: function of mixtures, (B, G) -> (B,), that is also defined if they do not add up to 1.
        starts: initial mixtures; those outside the bounds are ignored, and at least one must be inside.
    """
    linear = replace(problem, segments=None)
    low_G, high_G = problem.low_G - MIN_RELATIVE_GAIN, problem.high_G + MIN_RELATIVE_GAIN
    optima = []
    for start_G in starts:
        if not ((low_G <= start_G) & (start_G <= high_G)).all():
            continue
        p_G = start_G
        for _ in range(MAX_STEPS):
            # forward differences; an even share is added to the step, since p_g may be 0
            step_G = DIFFERENCE_STEP * (p_G + 1.0 / len(p_G))
            values = value(np.concatenate([p_G[None], p_G + np.diag(step_G)]))
            slope_G = (values[1:] - values[0]) / step_G
            corner_G = solve(linear, slope_G)
            path_BG = p_G + STEP_SIZES[:, None] * (corner_G - p_G)
            path_B = value(path_BG)
            best = int(np.argmax(path_B))
            if path_B[best] - values[0] <= MIN_RELATIVE_GAIN * np.ptp(path_B):
                break
            p_G = path_BG[best]
        optima.append(p_G)
    return optima[int(np.argmax(value(np.stack(optima))))]
