"""The predictor as a quadratic function of the rows that are kept: what selection and mixtures maximise.

For subsets S of one size every component is linear in the kept rows but for ||s||^2 of the sketch sums s, so

    V(S) = constant + sum_{i in S} linear_i + sum_h curvature_h || sum_{i in S} phi_ih ||^2 .

Under the weighting `mean` the factor 1 / size is that of the size asked for: a budget is a size.
Shape letters: N rows, T targets, D sketch width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from grasp.choose.sketches import ChosenRows, SketchRows
from grasp.predict.geometry import JOINT, QuadraticWeights, SubsetMass
from grasp.predict.scorer import Scorer
from grasp.predict.source import F64


@dataclass(frozen=True, slots=True)
class Slopes:
    """The prediction for a weighted mean of targets, as weights of components in natural units."""

    relevance_T: Mapping[str, F64]  # by kernel
    halves: Mapping[str, QuadraticWeights]
    constant: float  # what the means of the calibration family take off

    @classmethod
    def of(cls, scorer: Scorer, weights_T: F64) -> Self:
        """Slopes of V = sum_t q_t V_t, the q_t adding up to 1. Source: eq:component-predictor."""
        moments, protocol = scorer.task.moments, scorer.protocol
        assert isinstance(protocol.match, dict)
        relevance: dict[str, F64] = {}
        constant = 0.0
        for kernel, weight in protocol.match.items():
            inverse_T = moments[kernel].inverse_E
            relevance[str(kernel)] = weight * weights_T * inverse_T
            constant -= float(relevance[str(kernel)] @ moments[kernel].mean_E)
        total = float(weights_T.sum())
        halves: dict[str, QuadraticWeights] = {}
        for name, omega in protocol.components.items():
            slope = total * omega * float(moments[name].inverse_E[0])
            constant -= slope * float(moments[name].mean_E[0])
            half, kind = name.split(".")
            for one in JOINT if half == "joint" else (half,):
                halves[one] = halves.get(one, QuadraticWeights()).plus(kind, slope)
        return cls(
            relevance, {half: weights for half, weights in halves.items() if weights != QuadraticWeights()}, constant
        )


@dataclass(frozen=True, slots=True)
class Objective:
    """V over subsets of `size` rows."""

    size: int
    constant: float
    linear_N: F64
    curvature: Mapping[str, float]  # by half; without those that are 0
    sketches: SketchRows  # the halves of `curvature`

    @classmethod
    def of(cls, source: ChosenRows, scorer: Scorer, weights_T: F64, size: int) -> Self:
        """V of a scorer for a weighted mean of its targets.

        Args:
            weights_T: weights of the scorer's targets, adding up to 1.
            size: rows of the subsets that are compared.
        Cost: one pass over the held relevance, and one over every sketch that the protocol weighs.
        """
        slopes = Slopes.of(scorer, weights_T)
        protocol, n_rows = scorer.protocol, scorer.n_rows
        mass = SubsetMass(np.array([float(size)]), np.array([float(n_rows - size)]), n_rows)
        factor = float(mass.factor(protocol.side, protocol.weighting)[0])
        linear_N = factor * _relevance(scorer, slopes)
        constant = slopes.constant
        omitted = protocol.side == "omitted"
        if omitted:
            totals = {kernel: scorer.task.kernels[kernel].rows.total_E for kernel in slopes.relevance_T}
            constant -= factor * sum(float(slope_T @ totals[kernel]) for kernel, slope_T in slopes.relevance_T.items())
        for half, weights in slopes.halves.items():
            linear_N += factor**2 * _half_linear(source, scorer, half, weights, size)
            constant += factor**2 * _half_constant(scorer, half, weights, size)
        bends = {half: factor**2 * weights.bend for half, weights in slopes.halves.items()}
        curvature = {half: bend for half, bend in bends.items() if bend != 0.0}
        return cls(size, constant, linear_N, curvature, SketchRows.of(source, scorer, tuple(curvature)))

    @property
    def is_concave(self) -> bool:
        """Whether every geometry is a penalty (or there is none): then relaxation gives upper bounds."""
        return all(bend <= 0.0 for bend in self.curvature.values())

    @property
    def bends_D(self) -> F64:  # noqa: N802 - a shape suffix
        """Curvature of every coordinate of the joined sketches, (D,)."""
        parts = [np.full(len(self.sketches.mean(half)), bend) for half, bend in self.curvature.items()]
        return np.concatenate(parts) if parts else np.empty(0)

    def value(self, linear: float, sketch_D: F64) -> float:
        """V from the sum of `linear_N` over the kept rows and the sum of their sketches, joined."""
        return self.constant + linear + float(self.bends_D @ sketch_D**2)


def _relevance(scorer: Scorer, slopes: Slopes) -> F64:
    """sum over kernels and targets of slope x a_i, (N,), float64."""
    out_N = np.zeros(scorer.n_rows)
    for kernel, slope_T in slopes.relevance_T.items():
        for start, block_nT in scorer.task.kernels[kernel].held.blocks():
            out_N[start : start + len(block_nT)] += np.einsum("nt,t->n", block_nT, slope_T)
    return out_N


def _half_linear(source: ChosenRows, scorer: Scorer, half: str, weights: QuadraticWeights, size: int) -> F64:
    """What K_self, K_cent and, on the omitted side, K_raw of one sketch add per kept row, (N,).

    Kept rows S, T the sum over the corpus: ||T - s||^2 = ||T||^2 - 2 <T, s> + ||s||^2, and the centred component is
    ||s - |S| mean||^2 on either side.
    """
    totals = scorer.sketches[half].totals
    omitted = scorer.protocol.side == "omitted"
    rows = SketchRows.of(source, scorer, (half,))
    out_N = np.zeros(scorer.n_rows)
    if weights.own:
        out_N += (-weights.own if omitted else weights.own) * rows.norms()[half]
    vector_D = -2.0 * weights.cent * size * totals.mean_D
    if omitted:
        vector_D = vector_D - 2.0 * weights.raw * totals.total_D
    if np.any(vector_D):
        out_N += rows.dot(vector_D)
    return out_N


def _half_constant(scorer: Scorer, half: str, weights: QuadraticWeights, size: int) -> float:
    totals = scorer.sketches[half].totals
    constant = weights.cent * size**2 * float(totals.mean_D @ totals.mean_D)
    if scorer.protocol.side == "omitted":
        constant += weights.raw * float(totals.total_D @ totals.total_D) + weights.own * totals.norm
    return constant
