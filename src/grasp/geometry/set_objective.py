"""The objective of greedy selection: the predicted change of a protocol with geometry as a quadratic set function.

Start with `Objective.from_predictor` and `upper_bound`. For subsets S of one size, every component is linear in the
retained rows except for the squared norm of the sum of sketches. With phi_ih the sketch h of row i, therefore,

    change(S) = constant + sum_{i in S} linear_i + sum_h curvature_h || sum_{i in S} phi_ih ||^2 .

With the weighting `mean`, the factor 1 / size uses the requested size: the budget fixes the size.

Upper bound: if no curvature is positive (geometry is a penalty), the relaxation of V to row weights between 0 and 1 is
concave, so its tangent at any point x bounds V of every subset T of the same size that satisfies the floors and caps:

    V(T) <= V(x) + max over such T of <gradient(x), T - x> .

Frank-Wolfe steps, starting from the selection, tighten the bound.

A pool of rows is *aligned* if no pair of its sketches has a negative inner product. A penalty on the norm is then
submodular (prop:aligned-submodularity of the paper), which gives greedy selection its guarantee. The upper bound does
not require an aligned pool.
Shape letters: N rows, n selected rows, T targets, D total width of the concatenated sketches, P rows of the pool.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from grasp.arrays import F64, I64
from grasp.artifact.rows import ranked
from grasp.geometry.geometry_predictor import InteractionPredictor
from grasp.geometry.sketches import SketchWithNorms
from grasp.geometry.subset_sums import QuadraticWeights, WeightSums
from grasp.runs.predictions import Weighting
from grasp.select.budget import Constraints, take_within_budget

BLOCK_ROWS = 65_536  # rows whose sketches are summed at once


@dataclass(frozen=True, slots=True)
class Objective:
    """The predicted change as a quadratic function over subsets of `size` rows; see the module docstring."""

    size: int
    constant: float
    linear_N: F64
    curvature: Mapping[str, float]  # by sketch name, without zeros
    sketches: Mapping[str, SketchWithNorms]  # those of `curvature`, in the same order
    weighting: Weighting

    @classmethod
    def from_predictor(cls, predictor: InteractionPredictor, weights_T: F64, size: int) -> Self:
        """Create the objective for a weighted mean of the targets of a predictor with geometry.

        Args:
            predictor: predictor of the protocol.
            weights_T: weights of the predictor's targets, adding up to 1.
            size: number of rows of the subsets.
        Cost: one pass over the effects, and one over every sketch of the protocol.
        """
        protocol, terms = predictor.protocol, predictor.terms
        weight_sums = WeightSums.binary(np.array([float(size)]), predictor.n_rows)
        factor = float(weight_sums.factor(protocol.side, protocol.weighting)[0])
        slope_T = weights_T * predictor.task.gain_C
        mean_row = float(slope_T @ predictor.task.offset_C)  # value of a row whose effect is 0, the mean
        linear_N = factor * (predictor.task.effects.dot(slope_T) + mean_row)
        constant = -predictor.n_rows * mean_row
        corpus_z = terms.corpus_z()
        for name, omega in protocol.components.items():
            mean_std = terms.mean_std[name]
            constant -= omega * (float(mean_std.inverse_std_C[0] * mean_std.mean_C[0]) + corpus_z[name])
        for name, weights in terms.quadratic_weights.items():
            linear_N += factor**2 * _sketch_linear(predictor, name, weights, size)
            constant += factor**2 * _sketch_constant(predictor, name, weights, size)
        curvatures = {name: factor**2 * weights.curvature for name, weights in terms.quadratic_weights.items()}
        curvature = {name: value for name, value in curvatures.items() if value != 0.0}
        sketches = {name: predictor.sketches[name] for name in curvature}
        return cls(size, constant, linear_N, curvature, sketches, protocol.weighting)

    @property
    def is_concave(self) -> bool:
        """Return whether no curvature is positive; then the relaxation gives upper bounds."""
        return all(value <= 0.0 for value in self.curvature.values())

    @property
    def curvature_D(self) -> F64:  # noqa: N802 - a shape suffix
        """Curvature of every coordinate of the concatenated sketches, (D,)."""
        by_sketch = [np.full(len(self.sketches[name].totals.mean_D), value) for name, value in self.curvature.items()]
        return np.concatenate(by_sketch) if by_sketch else np.empty(0)

    def rows(self, row_index: I64) -> F64:
        """Return the concatenated sketches of the given rows, in this order, (n, D) float64."""
        by_sketch = [sketch.rows(row_index).astype(np.float64) for sketch in self.sketches.values()]
        return np.concatenate(by_sketch, axis=1)

    def sum_of(self, row_index: I64) -> F64:
        """Return the sum of the concatenated sketches of the given rows, (D,) float64."""
        blocks = (self.rows(row_index[start : start + BLOCK_ROWS]) for start in range(0, len(row_index), BLOCK_ROWS))
        return sum((block_nD.sum(axis=0) for block_nD in blocks), np.zeros(len(self.curvature_D)))

    def dot(self, vector_D: F64) -> F64:
        """Return the inner product of the concatenated sketches of every row with a vector, (N,) float64."""
        stops = np.cumsum([len(sketch.totals.mean_D) for sketch in self.sketches.values()])[:-1]
        segments = zip(self.sketches.values(), np.split(vector_D, stops), strict=True)
        return np.asarray(sum(sketch.dot(segment_D) for sketch, segment_D in segments))

    def value(self, linear: float, sketch_D: F64) -> float:
        """Return the change from the sums of `linear_N` and of the concatenated sketches over the retained rows."""
        return self.constant + linear + float(self.curvature_D @ sketch_D**2)


def _sketch_linear(predictor: InteractionPredictor, name: str, weights: QuadraticWeights, size: int) -> F64:
    """Return the linear term per row of K_self, K_cent and, on the omitted side, K_raw of one sketch, (N,).

    With s the sum of sketches over the retained rows S, and T the sum over the corpus, ||T - s||^2 = ||T||^2 -
    2 <T, s> + ||s||^2, and the centred component is ||s - |S| mean||^2 on either side.
    """
    sketch, omitted = predictor.sketches[name], predictor.protocol.side == "omitted"
    totals = sketch.totals
    linear_N = np.zeros(predictor.n_rows)
    if weights.self_norm:
        linear_N += (-weights.self_norm if omitted else weights.self_norm) * sketch.squared_norms()
    vector_D = -2.0 * weights.cent * size * totals.mean_D
    if omitted:
        vector_D = vector_D - 2.0 * weights.raw * totals.total_D
    if np.any(vector_D):
        linear_N += sketch.dot(vector_D)
    return linear_N


def _sketch_constant(predictor: InteractionPredictor, name: str, weights: QuadraticWeights, size: int) -> float:
    """Return the constant terms of the same components; the derivation is that of `_sketch_linear`."""
    totals = predictor.sketches[name].totals
    constant = weights.cent * size**2 * float(totals.mean_D @ totals.mean_D)
    if predictor.protocol.side == "omitted":
        constant += weights.raw * float(totals.total_D @ totals.total_D) + weights.self_norm * totals.sum_norm2
    return constant


def best_rows(value_N: F64, constraints: Constraints) -> I64:
    """Return the rows with the highest values that satisfy the constraints, best first; ties go to the earlier row."""
    return take_within_budget(ranked(value_N, among_N=constraints.allowed_M), constraints)


MAX_STEPS = 8  # Frank-Wolfe steps
GAP_TOLERANCE = 1e-3  # stop if the gap is below this fraction of the improvement over random rows
ALIGNED_ROWS = 8_192  # largest pool for which all pairs are checked


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


def is_aligned(objective: Objective, constraints: Constraints) -> bool | None:
    """Return whether the pool is aligned, so that V is submodular on it. Source: prop:aligned-submodularity.

    None if the pool has more than ALIGNED_ROWS rows. Every pool is aligned if there is no curvature.
    """
    if not objective.curvature:
        return True
    rows = np.flatnonzero(constraints.allowed_M)
    if len(rows) > ALIGNED_ROWS:
        return None
    sketch_PD = objective.rows(rows) * np.sqrt(np.abs(objective.curvature_D))
    # an inner product of 0 may be slightly negative by rounding
    lowest = -1e-9 * float(np.einsum("pd,pd->p", sketch_PD, sketch_PD).max(initial=0.0))
    blocks = (sketch_PD[start : start + 1024] @ sketch_PD.T for start in range(0, len(rows), 1024))
    return objective.is_concave and all(bool((block >= lowest).all()) for block in blocks)


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


def _maximize_tangent(objective: Objective, constraints: Constraints, x: _Point) -> tuple[float, I64]:
    """Return the maximum of the tangent at x over feasible subsets, and the subset that attains it."""
    gradient_N = objective.linear_N + objective.dot(2.0 * objective.curvature_D * x.sketch_D)
    best = best_rows(gradient_N, constraints)
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
