"""Small programmes over mixtures: maximise l'p + sum_g c_g(p_g) over a simplex with bounds.

    sum p = 1,   low <= p <= high,   1/2 sum |p - current| <= distance

The c_g, if there are any, are concave and made of straight pieces: p_g is filled piece by piece, steepest first. It is
one convex programme, solved by Clarabel, an interior-point method.

The value that a model fitted to runs predicts saturates, so its maximum is in general not at a corner. `frank_wolfe`
maximises it: each step solves a linear programme for the corner in the direction of steepest ascent, then searches
along the line to this corner.
Shape letters: B mixtures, G values, K ends of straight pieces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import clarabel
import numpy as np
from scipy import sparse

from grasp.arrays import F64, ratio
from grasp.errors import SettingsError

ON_BOUND = 1e-7
STEPS = 60
REACH = np.linspace(0.0, 1.0, 33) ** 2  # parts of the way to a corner that are tried
NUDGE = 1e-3  # of a slice's share and an even share, for difference quotients
STILL = 1e-6


@dataclass(frozen=True, slots=True)
class Segments:
    """Concave functions of every p_g, straight between their knots; the outer knots are the bounds of p_g."""

    knots_GK: F64
    value_GK: F64

    @property
    def width_GK(self) -> F64:  # noqa: N802 - a shape suffix
        """Lengths of the pieces, (G, K - 1)."""
        return np.diff(self.knots_GK, axis=1)

    @property
    def slope_GK(self) -> F64:  # noqa: N802 - a shape suffix
        """Their slopes, (G, K - 1)."""
        return ratio(np.diff(self.value_GK, axis=1), self.width_GK)

    def value(self, p_G: F64) -> float:
        """sum_g c_g(p_g)."""
        lines = zip(p_G, self.knots_GK, self.value_GK, strict=True)
        return float(sum(np.interp(p, knots_K, value_K) for p, knots_K, value_K in lines))


@dataclass(frozen=True, slots=True)
class Programme:
    """What is maximised, over what."""

    linear_G: F64
    low_G: F64
    high_G: F64
    current_G: F64
    distance: float | None = None  # total variation; None: any
    segments: Segments | None = None

    def value(self, p_G: F64) -> float:
        """l'p + sum_g c_g(p_g)."""
        curved = 0.0 if self.segments is None else self.segments.value(p_G)
        return float(self.linear_G @ p_G) + curved


def solve(programme: Programme, linear_G: F64 | None = None, down_GG: F64 | None = None) -> F64:
    """The mixture with the highest l'p + p'Q p + sum_g c_g(p_g), (G,).

    Variables are p, with a distance t >= |p - current|, and what of each straight piece is filled. Numbers are
    scaled so that the largest is 1.

    Args:
        linear_G: l; None: that of the programme.
        down_GG: Q, negative semidefinite; None: 0.
    Raises:
        SettingsError: no mixture satisfies the bounds and the distance.
    """
    linear_G = programme.linear_G if linear_G is None else linear_G
    down_GG = np.zeros((len(linear_G), len(linear_G))) if down_GG is None else down_GG
    n = len(linear_G)
    slopes = np.empty(0) if programme.segments is None else programme.segments.slope_GK.reshape(-1)
    # on the simplex a constant changes nothing
    linear_G, slopes = linear_G - linear_G.mean(), slopes - (slopes.mean() if slopes.size else 0.0)
    scale = max(float(np.abs(part).max(initial=0.0)) for part in (linear_G, slopes, down_GG))
    scale = scale if scale > 0 else 1.0
    size = n if programme.distance is None else 2 * n
    bend = sparse.lil_matrix((size + slopes.size, size + slopes.size))
    bend[:n, :n] = np.triu(-2.0 * down_GG / scale)  # the solver reads the upper triangle
    cost = np.zeros(size + slopes.size)
    cost[:n], cost[size:] = -linear_G / scale, -slopes / scale
    matrix, right, cones = _constraints(programme, n)
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-10
    solution = clarabel.DefaultSolver(sparse.csc_matrix(bend), cost, matrix, right, cones, settings).solve()
    if solution.status in (clarabel.SolverStatus.PrimalInfeasible, clarabel.SolverStatus.AlmostPrimalInfeasible):
        raise SettingsError(
            "floor, cap, distance: no mixture satisfies all of them; lower a floor, raise a cap or the distance"
        )
    if solution.status not in (clarabel.SolverStatus.Solved, clarabel.SolverStatus.AlmostSolved):
        raise SettingsError(
            f"mixture: the solver stopped with {solution.status}; the geometry may outweigh the relevance by far; "
            "choose another protocol"
        )
    return _repaired(np.array(solution.x)[:n], programme)


def _constraints(programme: Programme, n: int) -> tuple[sparse.csc_matrix, F64, list[object]]:
    """A x + s = b with s = 0 in the first cone and s >= 0 in the second."""
    ones_1G, eye = np.ones((1, n)), np.eye(n)
    matrix = np.concatenate([ones_1G, -eye, eye])
    right = np.concatenate([[1.0], -programme.low_G, programme.high_G])
    if programme.distance is not None:
        near = np.block([[eye, -eye], [-eye, -eye], [np.zeros((1, n)), ones_1G]])
        matrix = np.concatenate([np.pad(matrix, ((0, 0), (0, n))), near])
        right = np.concatenate([right, programme.current_G, -programme.current_G, [2.0 * programme.distance]])
    if programme.segments is None:
        return sparse.csc_matrix(matrix), right, [clarabel.ZeroConeT(1), clarabel.NonnegativeConeT(len(right) - 1)]
    width = programme.segments.width_GK
    filled = sparse.eye(width.size)
    adds = sparse.kron(sparse.eye(n), -np.ones((1, width.shape[1])))
    begin = sparse.csc_matrix(np.pad(eye, ((0, 0), (0, matrix.shape[1] - n))))
    parts: list[list[Any]] = [[begin, adds], [sparse.csc_matrix(matrix), None], [None, -filled], [None, filled]]
    whole = sparse.csc_matrix(sparse.bmat(parts))
    bounds = np.concatenate([programme.segments.knots_GK[:, 0], right, np.zeros(width.size), width.reshape(-1)])
    return whole, bounds, [clarabel.ZeroConeT(n + 1), clarabel.NonnegativeConeT(len(bounds) - n - 1)]


def _repaired(p_G: F64, programme: Programme) -> F64:
    """What an interior point leaves: put weights that touch a bound on it, and let the others add up to the rest."""
    low, high = programme.low_G, programme.high_G
    p_G = np.where(p_G - low < ON_BOUND, low, np.where(high - p_G < ON_BOUND, high, p_G))
    free = (p_G > low) & (p_G < high)
    rest = 1.0 - p_G[~free].sum()
    if free.any() and p_G[free].sum() > 0:
        p_G = p_G.copy()
        p_G[free] *= rest / p_G[free].sum()
    return np.clip(p_G, low, high)


def frank_wolfe(programme: Programme, value: Callable[[F64], F64], starts: Sequence[F64]) -> F64:
    """The best mixture found, (G,).

    Args:
        programme: its bounds and distance hold; what it maximises does not count.
        value: of mixtures (B, G), however large their sum, (B,).
        starts: mixtures; those outside of the bounds are passed over, one at least is within.
    """
    linear = replace(programme, segments=None)
    low_G, high_G = programme.low_G - STILL, programme.high_G + STILL
    ends = []
    for start_G in starts:
        if not ((low_G <= start_G) & (start_G <= high_G)).all():
            continue
        p_G = start_G
        for _ in range(STEPS):
            nudge_G = NUDGE * (p_G + 1.0 / len(p_G))
            values = value(np.concatenate([p_G[None], p_G + np.diag(nudge_G)]))
            slope_G = (values[1:] - values[0]) / nudge_G
            corner_G = solve(linear, slope_G)
            path_BG = p_G + REACH[:, None] * (corner_G - p_G)
            along_B = value(path_BG)
            best = int(np.argmax(along_B))
            if along_B[best] - values[0] <= STILL * np.ptp(along_B):
                break
            p_G = path_BG[best]
        ends.append(p_G)
    return ends[int(np.argmax(value(np.stack(ends))))]
