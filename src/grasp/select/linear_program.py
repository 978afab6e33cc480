"""Optimise mixtures: maximise l'p + sum_g c_g(p_g) over a simplex with bounds. Start with `solve`.

    sum p = 1,   low <= p <= high,   1/2 sum |p - current| <= distance

The c_g are concave and piecewise linear. Each p_g is the sum of its segments, which are filled steepest first without
further constraints, so this is a linear program. It is solved by HiGHS.

Shape letters: G label values, K knots of the piecewise linear functions.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import linprog, lsq_linear

from grasp.arrays import F64, ratio
from grasp.errors import SettingsError

EQUATION_WEIGHT = 1e5  # of an equation, relative to the squares that `least_step` minimises


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
