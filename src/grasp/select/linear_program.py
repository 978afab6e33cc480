"""Optimise mixtures: maximise l'p + sum_g c_g(p_g) over a simplex with bounds. Start with `solve`.

    sum p = 1,   low <= p <= high,   1/2 sum |p - current| <= distance

The c_g are concave and piecewise linear. Each p_g is the sum of its segments, which are filled steepest first without
further constraints, so this is a linear program. It is solved by HiGHS.

The value that a model fitted to runs predicts saturates, so its maximum is in general not at a corner. `frank_wolfe`
maximises it: each step solves a linear program for the corner in the direction of steepest ascent, then searches
along the line to this corner.
Shape letters: B mixtures, G label values, K knots of the piecewise linear functions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import linprog, lsq_linear

from grasp.arrays import F64, ratio
from grasp.errors import SettingsError

MAX_STEPS = 60  # maximum number of steps of `frank_wolfe` per start
STEP_SIZES = np.linspace(0.0, 1.0, 33) ** 2  # of the line search towards a corner
DIFFERENCE_STEP = 1e-3  # finite-difference step, relative to the weight plus an even weight
EQUATION_WEIGHT = 1e5  # of an equation, relative to the squares that `least_step` minimises
MIN_RELATIVE_GAIN = 1e-6  # stop if a step gains less than this part of the range along the line


@dataclass(frozen=True, slots=True)
class Segments:
    """Concave piecewise linear function of each p_g; the outer knots are the bounds of p_g."""

    knots_GK: F64
    value_GK: F64

    def value(self, p_G: F64) -> float:
        """Return sum_g c_g(p_g)."""
        lines = zip(p_G, self.knots_GK, self.value_GK, strict=True)
        return float(sum(np.interp(p, knots_K, value_K) for p, knots_K, value_K in lines))


@dataclass(frozen=True, slots=True)
class MixtureProblem:
    """Constraints of a mixture, and the piecewise linear part of its objective.

    Attributes:
        low_G: lower bound of each weight.
        high_G: upper bound of each weight.
        current_G: mixture that `distance` is measured from.
        distance: maximum total variation distance from `current_G`; None: unlimited.
        segments: the functions c_g; None: 0.
    """

    low_G: F64
    high_G: F64
    current_G: F64
    distance: float | None = None
    segments: Segments | None = None


def solve(problem: MixtureProblem, linear_G: F64 | None = None) -> F64:
    """Return the mixture p that maximises l'p + sum_g c_g(p_g), (G,).

    The variables are p; t with t >= |p - current| if there is a distance; and the filled length of each segment.
    Coefficients are scaled so that the largest is 1.

    Args:
        problem: bounds, distance and the functions c_g.
        linear_G: coefficients l; None: 0.

    Raises:
        SettingsError: no mixture satisfies the bounds and the distance, or the solver fails.
    """
    low_G, high_G, n = problem.low_G, problem.high_G, len(problem.low_G)
    linear_G = np.zeros(n) if linear_G is None else linear_G
    slopes, width_GK = np.empty(0), np.empty((n, 0))
    if problem.segments is not None:
        width_GK = np.diff(problem.segments.knots_GK, axis=1)
        slopes = ratio(np.diff(problem.segments.value_GK, axis=1), width_GK).reshape(-1)
    # a constant does not change the optimum, since p adds up to 1; without it the scale is that of the differences
    linear_G, slopes = linear_G - linear_G.mean(), slopes - (slopes.mean() if slopes.size else 0.0)
    scale = max(float(np.abs(part).max(initial=0.0)) for part in (linear_G, slopes)) or 1.0
    n_t = 0 if problem.distance is None else n
    size = n + n_t + slopes.size
    eye, total_1x = sparse.eye(n), np.zeros((1, size))
    total_1x[0, :n] = 1.0
    equal: list[Any] = [total_1x]
    equal_to, constraints = [np.ones(1)], dict[str, Any]()
    bounds = [np.stack([low_G, high_G], axis=1)]
    if problem.distance is not None:
        # p - t <= current, -p - t <= -current, sum t <= 2 distance
        blocks: list[list[Any]] = [[eye, -eye], [-eye, -eye], [None, np.ones((1, n))]]
        rows = sparse.bmat(blocks)
        constraints["A_ub"] = sparse.hstack([rows, sparse.csr_matrix((2 * n + 1, slopes.size))])
        constraints["b_ub"] = np.concatenate([problem.current_G, -problem.current_G, [2.0 * problem.distance]])
        bounds.append(np.tile([0.0, np.inf], (n, 1)))
    if problem.segments is not None:
        # p_g - sum of its filled segments = first knot; 0 <= filled length <= width
        filled = sparse.kron(eye, np.ones((1, width_GK.shape[1])))
        equal.append(sparse.hstack([eye, sparse.csr_matrix((n, n_t)), -filled]))
        equal_to.append(problem.segments.knots_GK[:, 0])
        bounds.append(np.stack([np.zeros(width_GK.size), width_GK.reshape(-1)], axis=1))
    constraints["A_eq"] = sparse.vstack([sparse.csr_matrix(rows) for rows in equal])
    constraints["b_eq"] = np.concatenate(equal_to)
    constraints["bounds"] = np.concatenate(bounds)
    solution: Any = linprog(
        np.concatenate([-linear_G / scale, np.zeros(n_t), -slopes / scale]),
        **constraints,
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if not solution.success:
        raise SettingsError(
            "floor, cap, distance: found no mixture that satisfies all of them; lower a floor, or raise a cap or the "
            "distance"
        )
    return np.asarray(np.clip(solution.x[:n], low_G, high_G))


def least_step(problem: MixtureProblem, linear_G: F64, gain: float) -> F64:
    """Return the change d of the current mixture with the least sum of squares for which l'd = gain, (G,).

    Args:
        problem: bounds within which some mixture has this gain; its distance and segments are ignored.
        linear_G: coefficients l, on average about 0.
        gain: difference of l'p between the mixtures.
    """
    scale = float(np.abs(linear_G).max())
    # bounded least squares, with both equations as rows of large weight
    equations = EQUATION_WEIGHT * np.stack([linear_G / scale, np.ones_like(linear_G)])
    right_side = np.append(np.zeros_like(linear_G), [EQUATION_WEIGHT * gain / scale, 0.0])
    bounds = problem.low_G - problem.current_G, problem.high_G - problem.current_G
    rows = np.vstack([np.eye(len(linear_G)), equations])
    return np.asarray(lsq_linear(rows, right_side, bounds, method="bvls").x)


def frank_wolfe(problem: MixtureProblem, value: Callable[[F64], F64], starts: Sequence[F64]) -> F64:
    """Return the best local maximum of a smooth function of mixtures, (G,), by the algorithm of Frank and Wolfe.

    Args:
        problem: bounds and distance; its segments are ignored.
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
