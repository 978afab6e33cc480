"""Shares of a label's values for protocols in which rows bear on one another: `grasp.select.mix`, with a quadratic.

With the mean sketch m_g and the mean squared norm q_g of each slice, and f = 1 under the weighting `mean`, N under
`count`,

    K_raw = f^2 |sum_g p_g m_g|^2,   K_cent = f^2 |sum_g p_g (m_g - mean)|^2,   K_self = f^2 sum_g p_g^2 q_g / n_g,

so V is linear plus quadratic in p: l'p + p'Q p. On the omitted side with `count` every row counts 1 - w, which is
quadratic as well. With `mean` it is not: there V depends on the direction of a change alone, and is refused.

Where Q is negative semidefinite (every geometry is a penalty) this is one convex programme. Where it is not, the part
that bends upwards is replaced by its tangent and the programme is solved again from there, which never lowers the value
(convex-concave procedure), from many starts: the best is kept, and it is a local optimum, not proven to be the global
one.
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
from grasp.select.mix import ExposureCurves, Mixed
from grasp.select.objective import SelectionObjective
from grasp.select.quadratic_program import Programme

CONVEX_SHARE = 1e-10  # eigenvalues this small against the largest are rounding
STEPS = 200
RANDOM_STARTS = 32
STILL = 1e-9


def optimize_mixture(objective: SelectionObjective, slices: LabelSlices, programme: Programme) -> Mixed:
    """The best mixture within the bounds of a programme, or the best that was found.

    Raises:
        ProtocolError: a protocol of the omitted side with weighting `mean`.
    """
    predictor = objective.predictor
    assert isinstance(predictor, InteractionPredictor)
    protocol, current_G = predictor.protocol, programme.current_G
    if (protocol.side, protocol.weighting) == ("omitted", "mean"):
        raise ProtocolError(
            f"protocol {protocol.name!r} scores the mean of what is left out, which has no size for a mixture; choose "
            "one that scores the retained side, or counts"
        )
    sums = predictor.sums(slices.each)
    effect_G, quadratic_GG = coefficients(predictor, objective.weights_T, sums, slices.rows_G.astype(np.float64))
    # a training budget bends what each slice is worth
    curves = None if objective.train_tokens is None else ExposureCurves(objective.trained.exposure, effect_G, current_G)
    segments = None if curves is None else curves.segments(programme.low_G, programme.high_G)
    linear_G = effect_G if segments is None else 0.0 * effect_G
    solution = solve(replace(programme, linear_G=linear_G, segments=segments), quadratic_GG)

    def value(p_G: F64) -> float:
        change = float(predictor.change(slices.weights((p_G / current_G)[None]))[0] @ objective.weights_T)
        return change if curves is None else change + curves.value(p_G) - float(effect_G @ p_G)

    def short(p_G: F64) -> float:
        return 0.0 if curves is None or segments is None else max(segments.value(p_G) - curves.value(p_G), 0.0)

    if solution.is_global:
        return Mixed(solution.p_G, "the best mixture", (), value, short)
    note = (
        "the protocol rewards a part of the geometry, so the problem is not convex: the best of "
        f"{solution.starts} local searches is shown, and there may be a better mixture"
    )
    return Mixed(solution.p_G, f"the best of {solution.starts} local searches", (note,), value, short)


def coefficients(
    predictor: InteractionPredictor, weights_T: F64, parts: InteractionSums, rows_G: F64
) -> tuple[F64, F64]:
    """l (G,) and Q (G, G) of V(p) = constant + l'p + p'Q p."""
    factor = 1.0 if predictor.protocol.weighting == "mean" else float(predictor.n_rows)
    slope_T = weights_T * predictor.task.gain_C
    linear_G = factor * ((parts.effect_BT @ slope_T) / rows_G + float(slope_T @ predictor.task.offset_C))
    quadratic_GG = np.zeros((len(rows_G), len(rows_G)))
    for half, weights in predictor.terms.halves.items():
        totals = predictor.sketches[half].totals
        mean_GD = parts.sketch[half] / rows_G[:, None]
        norm_G = parts.normed[half].norm_B / rows_G
        centred_GD = mean_GD - totals.mean_D
        quadratic_GG += factor**2 * (weights.raw * mean_GD @ mean_GD.T + weights.cent * centred_GD @ centred_GD.T)
        quadratic_GG += factor**2 * weights.own * np.diag(norm_G / rows_G)
        if predictor.protocol.side == "omitted":
            # the linear part of ||T - N sum p m||^2 and of sum_g n_g q_g (1 - N p_g / n_g)^2; factor is N here
            linear_G += -2.0 * factor * (weights.raw * mean_GD @ totals.total_D + weights.own * norm_G)
    return linear_G, quadratic_GG


@dataclass(frozen=True, slots=True)
class Solution:
    """A mixture, and what is known of it."""

    p_G: F64
    value: float
    is_global: bool  # proven: the programme is convex
    starts: int


def solve(programme: Programme, quadratic_GG: F64) -> Solution:
    """Maximise the value of the programme and p'Q p; globally where that is convex.

    Raises:
        SettingsError: no mixture satisfies the bounds and the distance.
    """
    down_GG, up_GG = _split(quadratic_GG)
    first = quadratic_program.solve(programme, programme.linear_G, down_GG)

    def value(p_G: F64) -> float:
        return programme.value(p_G) + float(p_G @ quadratic_GG @ p_G)

    if not up_GG.any():
        return Solution(first, value(first), True, 1)
    ends = [_climb(programme, value, down_GG, up_GG, start) for start in (first, *_starts(programme))]
    best = max(ends, key=value)
    return Solution(best, value(best), False, len(ends))


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
    random_RG = stream(0, "mixture", "starts").standard_normal((RANDOM_STARTS, n))
    yield programme.current_G
    for direction_G in np.concatenate([np.eye(n), random_RG]):
        yield quadratic_program.solve(programme, direction_G)


def _climb(programme: Programme, value: Callable[[F64], float], down_GG: F64, up_GG: F64, p_G: F64) -> F64:
    for _ in range(STEPS):
        found = quadratic_program.solve(programme, programme.linear_G + 2.0 * up_GG @ p_G, down_GG)
        if value(found) - value(p_G) <= STILL * abs(value(found)):
            return found
        p_G = found
    return p_G
