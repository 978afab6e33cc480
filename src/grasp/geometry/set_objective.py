"""The objective of greedy selection: the predicted change of a protocol with geometry as a quadratic set function.

A protocol with geometry predicts V(S) = sum_m weight_m z(A_m(S)) + sum_c omega_c z(K_c(S)), see `grasp.geometry.terms`.
With phi_ih the sketch h of row i and s_h its sum over the retained rows S, the components of a sketch are

    K_raw  = || s_h ||^2,   K_self = sum_{i in S} || phi_ih ||^2,   K_cent = || s_h - |S| mean_h ||^2

(`pair` is K_raw - K_self). A protocol of the *omitted side* takes K_raw and K_self over the omitted rows instead. For
subsets of one size, everything but || s_h ||^2 is linear in the retained rows:

    change(S) = V(S) - V(corpus) = constant + sum_{i in S} linear_i + sum_h curvature_h || s_h ||^2 .

With the weighting `mean`, sums are divided by the requested size: the budget fixes it. Start with
`Objective.from_predictor`; `grasp.geometry.upper_bound` bounds the change of any selection.

Shape letters: N rows, n given rows, T targets, C columns of effects (one per target here), D total width of the
concatenated sketches.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from grasp.arrays import F64, I64
from grasp.geometry.geometry_predictor import InteractionPredictor
from grasp.geometry.sketches import SketchWithNorms
from grasp.geometry.subset_sums import QuadraticWeights, WeightSums
from grasp.runs.predictions import Weighting

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
        terms, weighting = predictor.terms, predictor.protocol.weighting
        weight_sums = WeightSums.binary(np.array([float(size)]), predictor.n_rows)
        factor = float(weight_sums.factor(predictor.protocol.side, weighting)[0])  # 1, or 1 / size
        linear_N, constant = _relevance_terms(predictor, weights_T, factor)
        for value in _component_constants(predictor):
            constant -= value
        for name, weights in terms.quadratic_weights.items():
            linear_N += factor**2 * _sketch_linear(predictor, name, weights, size)
            constant += factor**2 * _sketch_constant(predictor, name, weights, size)
        curvatures = {name: factor**2 * weights.curvature for name, weights in terms.quadratic_weights.items()}
        curvature = {name: value for name, value in curvatures.items() if value != 0.0}
        sketches = {name: predictor.sketches[name] for name in curvature}
        return cls(size, constant, linear_N, curvature, sketches, weighting)

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


def _relevance_terms(predictor: InteractionPredictor, weights_T: F64, factor: float) -> tuple[F64, float]:
    """Return the linear term of each row, (N,), and the constant, of the weighted relevance of the targets.

    z of the relevance is affine in the effects of rows: a retained row adds factor (gain effect + offset), with effects
    that sum to 0 over the corpus. The corpus is thus worth N times the offset, and the change is relative to it.
    """
    effects = predictor.task
    gain_T = weights_T * effects.gain_C
    mean_row = float(gain_T @ effects.offset_C)  # value of a row whose effect is 0
    return factor * (effects.effects.dot(gain_T) + mean_row), -predictor.n_rows * mean_row


def _component_constants(predictor: InteractionPredictor) -> Iterator[float]:
    """Yield what each component subtracts: omega z(K(S)) - omega z(K(corpus)) with z(K) = (K - mean) / std."""
    terms = predictor.terms
    corpus_z = terms.corpus_z()  # z(K) of the corpus, by component
    for name, omega in predictor.protocol.components.items():
        mean_std = terms.mean_std[name]  # over the calibration family, as arrays of one element
        yield omega * (float(mean_std.inverse_std_C[0] * mean_std.mean_C[0]) + corpus_z[name])


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
