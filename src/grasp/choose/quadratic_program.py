"""Small quadratic programmes over mixtures: maximise l'p + p'Q p over a simplex with bounds and a distance.

    sum p = 1,   low <= p <= high,   1/2 sum |p - current| <= distance

Where Q is negative semidefinite (every geometry is a penalty) this is one convex programme, solved by Clarabel, an
interior-point method. Where it is not, the part that bends upwards is replaced by its tangent and the programme is
solved again from there, which never lowers the value (convex-concave procedure), from many starts: the best is kept,
and it is a local optimum, not proven to be the global one.
Shape letters: G values.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import clarabel
import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from grasp.errors import SettingsError
from grasp.seeds import stream

F64 = NDArray[np.float64]

CONVEX_SHARE = 1e-10  # eigenvalues this small against the largest are rounding
STEPS = 200
RANDOM_STARTS = 32
STILL = 1e-9
ON_BOUND = 1e-7


@dataclass(frozen=True, slots=True)
class Programme:
    """What is maximised, over what."""

    linear_G: F64
    quadratic_GG: F64
    low_G: F64
    high_G: F64
    current_G: F64
    distance: float | None = None  # total variation; None: any

    def value(self, p_G: F64) -> float:
        """l'p + p'Q p."""
        return float(self.linear_G @ p_G + p_G @ self.quadratic_GG @ p_G)


@dataclass(frozen=True, slots=True)
class Solution:
    """A mixture, and what is known of it."""

    p_G: F64
    value: float
    is_global: bool  # proven: the programme is convex
    starts: int


def solve(programme: Programme) -> Solution:
    """Solve, globally where the programme is convex.

    Raises:
        SettingsError: no mixture satisfies the bounds and the distance.
    """
    down_GG, up_GG = _split(programme.quadratic_GG)
    first = _maximise(programme, programme.linear_G, down_GG)
    if first is None:
        raise SettingsError(
            "--floor, --cap, --distance: no mixture satisfies all of them; lower a floor, raise a cap or the distance"
        )
    if not up_GG.any():
        return Solution(first, programme.value(first), True, 1)
    ends = [_climb(programme, down_GG, up_GG, start) for start in (first, *_starts(programme))]
    best = max(ends, key=programme.value)
    return Solution(best, programme.value(best), False, len(ends))


def _split(quadratic_GG: F64) -> tuple[F64, F64]:
    """Q as a negative plus a positive semidefinite part; the second is exactly 0 where Q is negative semidefinite."""
    values_G, vectors_GG = np.linalg.eigh(0.5 * (quadratic_GG + quadratic_GG.T))
    up_G = np.where(values_G > CONVEX_SHARE * np.abs(values_G).max(initial=0.0), values_G, 0.0)
    up_GG = (vectors_GG * up_G) @ vectors_GG.T
    if not up_G.any():
        return quadratic_GG, up_GG
    return (vectors_GG * np.minimum(values_G, 0.0)) @ vectors_GG.T, up_GG


def _starts(programme: Programme) -> Iterator[F64]:
    """The current mixture, and corners of the feasible mixtures: farthest out towards each value, and at random."""
    n = len(programme.linear_G)
    flat_GG = np.zeros_like(programme.quadratic_GG)
    random_RG = stream(0, "mixture", "starts").standard_normal((RANDOM_STARTS, n))
    yield programme.current_G
    for direction_G in np.concatenate([np.eye(n), random_RG]):
        corner = _maximise(programme, direction_G, flat_GG)
        assert corner is not None
        yield corner


def _climb(programme: Programme, down_GG: F64, up_GG: F64, p_G: F64) -> F64:
    for _ in range(STEPS):
        found = _maximise(programme, programme.linear_G + 2.0 * up_GG @ p_G, down_GG)
        assert found is not None
        if programme.value(found) - programme.value(p_G) <= STILL * abs(programme.value(found)):
            return found
        p_G = found
    return p_G


def _maximise(programme: Programme, linear_G: F64, down_GG: F64) -> F64 | None:
    """The convex programme; None where no mixture is feasible.

    Variables are p and, with a distance, t >= |p - current|. Numbers are scaled so that the largest is 1.
    """
    n = len(linear_G)
    scale = max(float(np.abs(linear_G - linear_G.mean()).max(initial=0.0)), float(np.abs(down_GG).max(initial=0.0)))
    scale = scale if scale > 0 else 1.0
    size = n if programme.distance is None else 2 * n
    bend = np.zeros((size, size))
    bend[:n, :n] = np.triu(-2.0 * down_GG / scale)  # the solver reads the upper triangle
    cost = np.zeros(size)
    cost[:n] = -(linear_G - linear_G.mean()) / scale  # on the simplex a constant changes nothing
    matrix, right, cones = _constraints(programme, n)
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-10
    found = clarabel.DefaultSolver(sparse.csc_matrix(bend), cost, matrix, right, cones, settings).solve()
    if found.status in (clarabel.SolverStatus.PrimalInfeasible, clarabel.SolverStatus.AlmostPrimalInfeasible):
        return None
    if found.status not in (clarabel.SolverStatus.Solved, clarabel.SolverStatus.AlmostSolved):
        raise SettingsError(
            f"mixture: the solver stopped with {found.status}; the protocol's geometry may be out of all proportion to "
            "its relevance: choose another protocol"
        )
    return _repaired(np.array(found.x)[:n], programme)


def _constraints(programme: Programme, n: int) -> tuple[sparse.csc_matrix, F64, list[object]]:
    """A x + s = b with s = 0 in the first cone and s >= 0 in the second."""
    one, eye = np.ones((1, n)), np.eye(n)
    matrix = np.concatenate([one, -eye, eye])
    right = np.concatenate([[1.0], -programme.low_G, programme.high_G])
    if programme.distance is not None:
        near = np.block([[eye, -eye], [-eye, -eye], [np.zeros((1, n)), one]])
        matrix = np.concatenate([np.pad(matrix, ((0, 0), (0, n))), near])
        right = np.concatenate([right, programme.current_G, -programme.current_G, [2.0 * programme.distance]])
    return sparse.csc_matrix(matrix), right, [clarabel.ZeroConeT(1), clarabel.NonnegativeConeT(len(right) - 1)]


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
