"""Optimal mixtures for protocols with interactions: `grasp.select.mix` with a quadratic objective.

Start with `optimize_mixture`. A mixture is given by the shares p of G slices of the corpus. With the mean sketch m_g,
the mean squared norm q_g and the number of rows n_g of each slice, and f = 1 for weighting `mean`, f = N for `count`,

    K_raw = f^2 ||sum_g p_g m_g||^2,   K_cent = f^2 ||sum_g p_g (m_g - mean)||^2,   K_self = f^2 sum_g p_g^2 q_g / n_g,

so V = l'p + p'Q p + constant is quadratic in the shares p. The omitted side with `count` has row weights 1 - w, which
is quadratic too. The omitted side with `mean` is not, because V then depends only on the direction of the change; it
raises ProtocolError.

If Q is negative semidefinite (geometry is a penalty), this is one convex program. Otherwise the convex part of the
objective is replaced by its tangent and the program is solved repeatedly (convex-concave procedure, Yuille and
Rangarajan 2003, which never lowers the value) from many starting points; the best result is a local optimum, not proven
to be global.
Shape letters: G slices, N rows, T targets, D sketch width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from grasp.arrays import F64
from grasp.errors import ProtocolError
from grasp.geometry.geometry_predictor import InteractionPredictor, InteractionSums
from grasp.predict.slices import LabelSlices
from grasp.seeds import stream
from grasp.select import quadratic_program
from grasp.select.mix import OptimizedMixture, RepetitionCurves
from grasp.select.objective import SelectionObjective
from grasp.select.quadratic_program import MixtureProblem

EIGENVALUE_TOLERANCE = 1e-10  # positive eigenvalues below this fraction of the largest are rounding error
MAX_STEPS = 200  # steps of the convex-concave procedure from one starting point
RANDOM_STARTS = 32
TOLERANCE = 1e-9  # relative improvement at which the procedure stops


def optimize_mixture(objective: SelectionObjective, slices: LabelSlices, problem: MixtureProblem) -> OptimizedMixture:
    """Return the best mixture within the bounds: the global optimum, or the best local optimum.

    Args:
        objective: targets, their weights, and the predictor.
        slices: slices of the corpus that are mixed.
        problem: bounds of the shares, and the largest distance from the current mixture.
    Raises:
        ProtocolError: the protocol scores the omitted side with weighting `mean`.
    """
    predictor = objective.predictor
    assert isinstance(predictor, InteractionPredictor)
    protocol, current_G = predictor.protocol, problem.current_G
    if (protocol.side, protocol.weighting) == ("omitted", "mean"):
        raise ProtocolError(
            f"protocol {protocol.name!r} scores the mean of the omitted rows, which is undefined for a mixture; use "
            "a protocol with side retained, or weighting count"
        )
    sums = predictor.sums(slices.each)
    effect_G, quadratic_GG = coefficients(predictor, objective.weights_T, sums, slices.rows_G.astype(np.float64))
    # With a training budget, the value of each slice has diminishing returns: the program uses a piecewise linear
    # approximation (segments) of these curves in place of the linear term.
    curves = (
        None
        if objective.train_tokens is None
        else RepetitionCurves(objective.budget_predictor.repetition_law, effect_G, current_G)
    )
    segments = None if curves is None else curves.segments(problem.low_G, problem.high_G)
    linear_G = effect_G if segments is None else 0.0 * effect_G
    solution = solve(replace(problem, linear_G=linear_G, segments=segments), quadratic_GG)

    def value(p_G: F64) -> float:
        """Return the predicted change of a mixture, with the exact curves."""
        change = float(predictor.change(slices.weights((p_G / current_G)[None]))[0] @ objective.weights_T)
        return change if curves is None else change + curves.value(p_G) - float(effect_G @ p_G)

    def gap(p_G: F64) -> float:
        """Return the error of the piecewise linear approximation."""
        return 0.0 if curves is None or segments is None else max(segments.value(p_G) - curves.value(p_G), 0.0)

    if solution.is_global:
        return OptimizedMixture(solution.p_G, "optimal", (), value, gap)
    note = (
        "the protocol has a positive geometry weight, so the problem is not convex: the best of "
        f"{solution.starts} local searches is shown, and there may be a better mixture"
    )
    return OptimizedMixture(solution.p_G, f"the best of {solution.starts} local searches", (note,), value, gap)


def coefficients(
    predictor: InteractionPredictor, weights_T: F64, sums: InteractionSums, rows_G: F64
) -> tuple[F64, F64]:
    """Return l (G,) and Q (G, G) of V(p) = constant + l'p + p'Q p.

    Args:
        predictor: predictor of the protocol.
        weights_T: weights of the targets of the predictor.
        sums: sums over the rows of each slice.
        rows_G: number of rows of each slice.
    """
    factor = 1.0 if predictor.protocol.weighting == "mean" else float(predictor.n_rows)
    slope_T = weights_T * predictor.task.gain_C
    linear_G = factor * ((sums.effect_BT @ slope_T) / rows_G + float(slope_T @ predictor.task.offset_C))
    quadratic_GG = np.zeros((len(rows_G), len(rows_G)))
    for name, weights in predictor.terms.quadratic_weights.items():
        totals = predictor.sketches[name].totals
        mean_GD = sums.sketch[name] / rows_G[:, None]
        mean_norm2_G = sums.sketch_sums[name].sum_w_norm2_B / rows_G
        centred_GD = mean_GD - totals.mean_D
        quadratic_GG += factor**2 * (weights.raw * mean_GD @ mean_GD.T + weights.cent * centred_GD @ centred_GD.T)
        quadratic_GG += factor**2 * weights.self_norm * np.diag(mean_norm2_G / rows_G)
        if predictor.protocol.side == "omitted":
            # Linear part of ||T - N sum_g p_g m_g||^2, T the sum of sketches over the corpus, and of
            # sum_g n_g q_g (1 - N p_g / n_g)^2. The weighting is `count` on this side, so factor = N.
            linear_G += -2.0 * factor * (weights.raw * mean_GD @ totals.total_D + weights.self_norm * mean_norm2_G)
    return linear_G, quadratic_GG


@dataclass(frozen=True, slots=True)
class Solution:
    """A mixture with its value, and whether it is a proven global optimum."""

    p_G: F64
    value: float
    is_global: bool  # the program is convex
    starts: int


def solve(problem: MixtureProblem, quadratic_GG: F64) -> Solution:
    """Maximize the objective plus p'Q p; the result is global if the problem is convex.

    Args:
        problem: constraints, and the objective without the quadratic term.
        quadratic_GG: Q; need not be symmetric.
    Raises:
        SettingsError: no mixture satisfies the bounds and the distance.
    """
    concave_GG, convex_GG = _split(quadratic_GG)
    first = quadratic_program.solve(problem, problem.linear_G, concave_GG)

    def value(p_G: F64) -> float:
        return problem.value(p_G) + float(p_G @ quadratic_GG @ p_G)

    if not convex_GG.any():
        return Solution(first, value(first), True, 1)
    optima = [_local_optimum(problem, value, concave_GG, convex_GG, start) for start in (first, *_starts(problem))]
    best = max(optima, key=value)
    return Solution(best, value(best), False, len(optima))


def _split(quadratic_GG: F64) -> tuple[F64, F64]:
    """Split Q into a negative and a positive semidefinite part; the second is exactly 0 if Q has no positive part."""
    values_G, vectors_GG = np.linalg.eigh(0.5 * (quadratic_GG + quadratic_GG.T))
    positive_G = np.where(values_G > EIGENVALUE_TOLERANCE * np.abs(values_G).max(initial=0.0), values_G, 0.0)
    convex_GG = (vectors_GG * positive_G) @ vectors_GG.T
    if not positive_G.any():
        return quadratic_GG, convex_GG
    return (vectors_GG * np.minimum(values_G, 0.0)) @ vectors_GG.T, convex_GG


def _starts(problem: MixtureProblem) -> Iterator[F64]:
    """Yield starting points: the current mixture, and vertices of the feasible set in axis and random directions."""
    n = len(problem.linear_G)
    random_RG = stream(0, "mixture", "starts").standard_normal((RANDOM_STARTS, n))
    yield problem.current_G
    for direction_G in np.concatenate([np.eye(n), random_RG]):
        yield quadratic_program.solve(problem, direction_G)


def _local_optimum(
    problem: MixtureProblem, value: Callable[[F64], float], concave_GG: F64, convex_GG: F64, p_G: F64
) -> F64:
    """Return the local optimum that the convex-concave procedure reaches from the mixture `p_G`."""
    # the tangent of p'C p at p_0 is 2 p_0'C p + constant
    for _ in range(MAX_STEPS):
        next_G = quadratic_program.solve(problem, problem.linear_G + 2.0 * convex_GG @ p_G, concave_GG)
        if value(next_G) - value(p_G) <= TOLERANCE * abs(value(next_G)):
            return next_G
        p_G = next_G
    return p_G
