"""What greedy selection maximises: the prediction for a protocol with geometry, as a quadratic function of the rows.

For subsets S of one size every component is linear in the kept rows but for ||s||^2 of the sketch sums s, so

    change(S) = constant + sum_{i in S} linear_i + sum_h curvature_h || sum_{i in S} phi_ih ||^2 .

Under the weighting `mean` the factor 1 / size is that of the size asked for: a budget is a size.

How far from the best possible is a selection? Where every geometry is a penalty, the relaxation of V to weights
between 0 and 1 is concave, so its tangent at any point x bounds V of every subset of as many rows that keeps the
floors and caps:

    V(T) <= V(x) + max over such T of <gradient(x), T - x> .

The bound needs no alignment of the sketches; it is improved by a few steps of Frank and Wolfe from the selection on.
Shape letters: N rows, n chosen ones, T targets, D widths of all sketches together, P rows of the pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from grasp.arrays import F64, I64
from grasp.artifact.rows import ranked
from grasp.geometry.geometry_predictor import InteractionPredictor
from grasp.geometry.subset_sums import QuadraticWeights, SubsetMass
from grasp.geometry.terms import NormedSketch
from grasp.runs.predictions import Weighting
from grasp.select.budget import Limits, within

CHOSEN_ROWS = 65_536  # that are read at once


@dataclass(frozen=True, slots=True)
class Objective:
    """The change over subsets of `size` rows."""

    size: int
    constant: float
    linear_N: F64
    curvature: Mapping[str, float]  # by half; without those that are 0
    sketches: Mapping[str, NormedSketch]  # the halves of `curvature`, in its order
    weighting: Weighting

    @classmethod
    def from_predictor(cls, predictor: InteractionPredictor, weights_T: F64, size: int) -> Self:
        """The change that a predictor with geometry gives a weighted mean of its targets.

        Args:
            weights_T: weights of the predictor's targets, adding up to 1.
            size: rows of the subsets that are compared.
        Cost: one pass over the effects, and one over every sketch that the protocol weighs.
        """
        protocol, terms = predictor.protocol, predictor.terms
        mass = SubsetMass.plain(np.array([float(size)]), predictor.n_rows)
        factor = float(mass.factor(protocol.side, protocol.weighting)[0])
        slope_T = weights_T * predictor.task.gain_C
        zero = float(slope_T @ predictor.task.offset_C)  # of a row whose effect is the mean
        linear_N = factor * (predictor.task.effects.dot(slope_T) + zero)
        constant = -predictor.n_rows * zero
        whole = terms.whole()
        for name, omega in protocol.components.items():
            moments = terms.moments[name]
            constant -= omega * (float(moments.inverse_E[0] * moments.mean_E[0]) + whole[name])
        for half, weights in terms.halves.items():
            linear_N += factor**2 * _half_linear(predictor, half, weights, size)
            constant += factor**2 * _half_constant(predictor, half, weights, size)
        bends = {half: factor**2 * weights.bend for half, weights in terms.halves.items()}
        curvature = {half: bend for half, bend in bends.items() if bend != 0.0}
        sketches = {half: predictor.sketches[half] for half in curvature}
        return cls(size, constant, linear_N, curvature, sketches, protocol.weighting)

    @property
    def is_concave(self) -> bool:
        """Whether every geometry is a penalty (or there is none): then relaxation gives upper bounds."""
        return all(bend <= 0.0 for bend in self.curvature.values())

    @property
    def bends_D(self) -> F64:  # noqa: N802 - a shape suffix
        """Curvature of every coordinate of the joined sketches, (D,)."""
        parts = [np.full(len(self.sketches[half].totals.mean_D), bend) for half, bend in self.curvature.items()]
        return np.concatenate(parts) if parts else np.empty(0)

    def rows(self, row_index: I64) -> F64:
        """Joined sketches of chosen rows, in the order given: (n, D), float64."""
        parts = [sketch.rows(row_index).astype(np.float64) for sketch in self.sketches.values()]
        return np.concatenate(parts, axis=1)

    def sum_of(self, row_index: I64) -> F64:
        """Sum of the joined sketches of chosen rows, (D,), float64."""
        parts = (self.rows(row_index[at : at + CHOSEN_ROWS]) for at in range(0, len(row_index), CHOSEN_ROWS))
        return sum((part.sum(axis=0) for part in parts), np.zeros(len(self.bends_D)))

    def dot(self, vector_D: F64) -> F64:
        """<phi_i, vector> of every row, (N,), float64."""
        cuts = np.cumsum([len(sketch.totals.mean_D) for sketch in self.sketches.values()])[:-1]
        parts = zip(self.sketches.values(), np.split(vector_D, cuts), strict=True)
        return np.asarray(sum(sketch.dot(part_D) for sketch, part_D in parts))

    def value(self, linear: float, sketch_D: F64) -> float:
        """The change from the sum of `linear_N` over the kept rows and the sum of their sketches, joined."""
        return self.constant + linear + float(self.bends_D @ sketch_D**2)


def _half_linear(predictor: InteractionPredictor, half: str, weights: QuadraticWeights, size: int) -> F64:
    """What K_self, K_cent and, on the omitted side, K_raw of one sketch add per kept row, (N,).

    Kept rows S, T the sum over the corpus: ||T - s||^2 = ||T||^2 - 2 <T, s> + ||s||^2, and the centred component is
    ||s - |S| mean||^2 on either side.
    """
    sketch, omitted = predictor.sketches[half], predictor.protocol.side == "omitted"
    totals = sketch.totals
    out_N = np.zeros(predictor.n_rows)
    if weights.own:
        out_N += (-weights.own if omitted else weights.own) * sketch.norms_of_rows()
    vector_D = -2.0 * weights.cent * size * totals.mean_D
    if omitted:
        vector_D = vector_D - 2.0 * weights.raw * totals.total_D
    if np.any(vector_D):
        out_N += sketch.dot(vector_D)
    return out_N


def _half_constant(predictor: InteractionPredictor, half: str, weights: QuadraticWeights, size: int) -> float:
    totals = predictor.sketches[half].totals
    constant = weights.cent * size**2 * float(totals.mean_D @ totals.mean_D)
    if predictor.protocol.side == "omitted":
        constant += weights.raw * float(totals.total_D @ totals.total_D) + weights.own * totals.norm
    return constant


def best_rows(value_N: F64, constraints: Limits) -> I64:
    """The rows with the highest worth that the limits allow, best first; ties go to the earlier row."""
    return within(ranked(value_N, among_N=constraints.allowed_N), constraints)


STEPS = 8
ENOUGH = 1e-3  # of the distance to the value of taking rows at random: closer is not worth a pass
ALIGNED_ROWS = 8_192  # pairs of a larger pool are not looked at


def upper_bound(
    objective: Objective, constraints: Limits, row_index: I64, steps: int = STEPS
) -> tuple[float | None, str]:
    """The bound of the module's docstring, or None and why there is none.

    Floors and caps in tokens are left out of it, which can only raise the bound.
    """
    if not objective.is_concave:
        return None, "a part of the geometry is rewarded: V is not concave"
    in_rows = constraints.in_rows(len(row_index))
    start = x = _Point.from_rows(objective, row_index)
    bound = np.inf
    for _ in range(steps):
        at, best = _tangent(objective, in_rows, x)
        bound = min(bound, at)
        if bound - start.value <= ENOUGH * abs(start.value - objective.constant):
            break
        x = _towards(objective, x, _Point.from_rows(objective, best))
    return float(max(bound, start.value)), ""


def is_aligned(objective: Objective, constraints: Limits) -> bool | None:
    """Whether the pool is aligned, so that V is submodular on it. Source: prop:aligned-submodularity.

    None where the pool is larger than ALIGNED_ROWS. Without curvature every pool is.
    """
    if not objective.curvature:
        return True
    rows = np.flatnonzero(constraints.allowed_N)
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
    def from_rows(cls, objective: Objective, row_index: I64) -> "_Point":
        linear = float(objective.linear_N[row_index].sum())
        sketch_D = objective.sum_of(row_index)
        return cls(linear, sketch_D, objective.value(linear, sketch_D))


def _tangent(objective: Objective, constraints: Limits, x: _Point) -> tuple[float, I64]:
    """The tangent's largest value over subsets, and where it is reached."""
    gradient_N = objective.linear_N + objective.dot(2.0 * objective.bends_D * x.sketch_D)
    best = best_rows(gradient_N, constraints)
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
