"""Geometry and relevance of subsets, from weighted sums over their rows.

Start with `SketchSums.geometry` and `subset_relevance`. All components depend on a few sums over the retained rows: of
weights, of sketches, and of squared sketch norms. The omitted side, the weighting and the centring follow by arithmetic
from these sums and the totals of the corpus, so that the complement of a subset is never constructed.

Shape letters: B subsets, N rows of the corpus, D sketch width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from grasp.arrays import F64, ratio
from grasp.predict.weights import Side, Weights
from grasp.runs.predictions import Weighting

Half = Literal["hidden", "residual", "joint", "product"]
Kind = Literal["raw", "self", "pair", "cent"]
JOINT: tuple[Half, ...] = ("hidden", "residual")  # the halves that `joint` concatenates


@dataclass(frozen=True, slots=True)
class Geometry:
    """Quadratic components of B subsets, each (B,), in the squared unit of the sketch. Source: eq:ia-components."""

    raw_B: F64
    self_B: F64
    pair_B: F64
    cent_B: F64

    def __getitem__(self, kind: Kind) -> F64:
        values: F64 = getattr(self, f"{kind}_B")
        return values


@dataclass(frozen=True, slots=True)
class QuadraticWeights:
    """Weights of K_raw, K_self and K_cent of one sketch; K_pair = K_raw - K_self is folded into the first two."""

    raw: float = 0.0
    self_norm: float = 0.0  # weight of K_self
    cent: float = 0.0

    @property
    def curvature(self) -> float:
        """Weight of ||s||^2, which occurs in K_raw and in K_cent."""
        return self.raw + self.cent

    def plus(self, kind: str, weight: float) -> "QuadraticWeights":
        """Return these weights plus a component of this kind and weight."""
        raw, self_part, cent = {"raw": (1, 0, 0), "self": (0, 1, 0), "pair": (1, -1, 0), "cent": (0, 0, 1)}[kind]
        return QuadraticWeights(self.raw + raw * weight, self.self_norm + self_part * weight, self.cent + cent * weight)


@dataclass(frozen=True, slots=True)
class SubsetMass:
    """Sums of weights of B subsets, used by weighting `mean` and by centring."""

    retained_B: F64  # sum of w_i
    omitted_B: F64  # sum of |1 - w_i| over the corpus; for weights 0 and 1, the number of omitted rows
    n_rows: int

    @classmethod
    def from_weights(cls, weights: Weights) -> Self:
        """Compute the sums of weights of each subset of a block."""
        return cls(weights.sums, weights.total(lambda weight: np.abs(1.0 - weight)), weights.shape[1])

    @classmethod
    def binary(cls, retained_B: F64, n_rows: int) -> Self:
        """Return the sums for subsets of `retained_B` rows of weight 1."""
        return cls(retained_B, n_rows - retained_B, n_rows)

    @classmethod
    def corpus(cls, n_rows: int) -> Self:
        """Return the sums for the corpus, as a block of one subset."""
        return cls.binary(np.array([float(n_rows)]), n_rows)

    def factor(self, side: Side, weighting: Weighting) -> F64:
        """Return the factor of raw weights, (B,): 1 for `count`, 1 / sum |w| for `mean`, 0 for an empty side."""
        mass_B = self.retained_B if side == "retained" else self.omitted_B
        return np.ones_like(mass_B) if weighting == "count" else ratio(1.0, mass_B)


@dataclass(frozen=True, slots=True)
class SketchSums:
    """Sums of one sketch over the retained rows of B subsets with raw weights, float64."""

    total_BD: F64  # sum of w_i phi_i
    norm_B: F64  # sum of w_i ||phi_i||^2
    square_norm_B: F64  # sum of w_i^2 ||phi_i||^2

    def geometry(self, mass: SubsetMass, corpus: "SketchTotals", side: Side, weighting: Weighting) -> Geometry:
        """Compute the components of one sketch for a side and a weighting.

        The omitted side has weights 1 - w_i: for binary weights these are the omitted rows; a row that is doubled
        (w = 2) has the weight -1. Its sums follow from those of the retained side: sum (1 - w) phi = T - s, and
        sum (1 - w)^2 ||phi||^2 = ||Phi||^2 - 2 sum w ||phi||^2 + sum w^2 ||phi||^2, which rounding may make slightly
        negative. pair = raw - self cancels strongly: of some 10^5 rows, K_raw and K_self may agree in five digits.
        Hence float64.

        Source: eq:ia-components. Deviation: `mean` divides the weights by their sum (design, weighting).
        """
        total_BD, square_B, weight_B = self.total_BD, self.square_norm_B, mass.retained_B
        if side == "omitted":
            total_BD = corpus.total_D - total_BD
            square_B = np.maximum(corpus.norm - 2.0 * self.norm_B + square_B, 0.0)
            weight_B = mass.n_rows - weight_B
        factor_B = mass.factor(side, weighting)
        total_BD = total_BD * factor_B[:, None]
        raw_B = np.einsum("bd,bd->b", total_BD, total_BD)
        self_B = square_B * factor_B**2
        shift_BD = total_BD - np.outer(weight_B * factor_B, corpus.mean_D)
        cent_B = np.einsum("bd,bd->b", shift_BD, shift_BD)
        return Geometry(raw_B=raw_B, self_B=self_B, pair_B=raw_B - self_B, cent_B=cent_B)


@dataclass(frozen=True, slots=True)
class SketchTotals:
    """Sums of one sketch over the whole corpus."""

    total_D: F64
    norm: float  # sum of ||phi_i||^2
    n_rows: int

    @property
    def mean_D(self) -> F64:  # noqa: N802 - a shape suffix
        """phi-bar of eq:ia-components."""
        return np.asarray(self.total_D / self.n_rows)

    def as_subset(self) -> SketchSums:
        """Return the corpus as a block of one subset."""
        norm_B = np.array([self.norm])
        return SketchSums(self.total_D[None], norm_B, norm_B)


def direct_sum(hidden: Geometry, residual: Geometry) -> Geometry:
    """Return the geometry of the concatenated sketch, whose components are sums. Source: eq:feature-sketch."""
    return Geometry(
        raw_B=hidden.raw_B + residual.raw_B,
        self_B=hidden.self_B + residual.self_B,
        pair_B=hidden.pair_B + residual.pair_B,
        cent_B=hidden.cent_B + residual.cent_B,
    )


def subset_relevance(sum_BE: F64, total_E: F64, mass: SubsetMass, side: Side, weighting: Weighting) -> F64:
    """Return A_e of B subsets from sums over their retained rows, (B, E), in the unit of the relevance.

    Args:
        sum_BE: sum of w_i a_ie over retained rows, raw weights.
        total_E: sum of a_ie over the corpus.
    Source: eq:grasp-subset-relevance. Deviation: on the omitted side the sign is flipped, so that higher is better on
        either side (design, side).
    """
    factor_B1 = mass.factor(side, weighting)[:, None]
    if side == "retained":
        return np.asarray(factor_B1 * sum_BE)
    return np.asarray(factor_B1 * (sum_BE - total_E))


def halves_needed(components: Mapping[str, float]) -> tuple[str, ...]:
    """Return the sketches that `half.kind` components require; `joint` requires hidden and residual."""
    halves = {name.split(".")[0] for name in components}
    if "joint" in halves:
        halves |= set(JOINT)
    return tuple(half for half in ("hidden", "residual", "product") if half in halves)
