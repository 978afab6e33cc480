"""Geometry and relevance of subsets, from weighted sums over their rows.

A sketch phi_i is a short vector per row. The geometry of a subset with row weights w_i consists of four quadratic
components (eq:ia-components):

    K_raw  = ||sum_i w_i phi_i||^2               K_self = sum_i w_i^2 ||phi_i||^2
    K_pair = K_raw - K_self                      K_cent = ||sum_i w_i (phi_i - mean of the corpus)||^2

Its relevance is A_e = sum_i w_i a_ie (eq:grasp-subset-relevance). A protocol chooses the *side* whose rows are weighted
(the retained rows, or the omitted ones) and the *weighting*: `count` uses w_i as they are, `mean` divides them by their
sum.

Start with `SketchSums.geometry` and `subset_relevance`. All components depend on a few sums over the retained rows: of
weights, of sketches, and of squared sketch norms. The omitted side, the weighting and the centring follow by arithmetic
from these sums and the totals of the corpus, so that the complement of a subset is never constructed.

Labels `eq:` are those of the paper; docs/paper_map.md lists them.
Shape letters: B subsets, N rows of the corpus, D sketch width, E units.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from grasp.arrays import F64, ratio
from grasp.predict.weights import Side, Weights
from grasp.runs.predictions import Weighting

# A component of a protocol is named `<sketch>.<kind>`, e.g. `joint.pair`.
SketchName = Literal["hidden", "residual", "joint", "product"]
Kind = Literal["raw", "self", "pair", "cent"]
JOINT: tuple[SketchName, ...] = ("hidden", "residual")  # `joint` is the concatenation of these stored sketches


# Quadratic components of B subsets, each (B,), in the squared unit of the sketch. Source: eq:ia-components.
Geometry = dict[Kind, F64]


@dataclass(frozen=True, slots=True)
class WeightSums:
    """Sums of weights of B subsets, used by weighting `mean` and by centring."""

    retained_B: F64  # sum of w_i
    omitted_B: F64  # sum of |1 - w_i| over the corpus; for weights 0 and 1, the number of omitted rows
    n_rows: int

    @classmethod
    def from_weights(cls, weights: Weights) -> Self:
        """Compute the sums of weights of each subset of a block."""
        return cls(weights.sums, weights.total(lambda weight: np.abs(1.0 - weight)), weights.shape[1])

    @classmethod
    def corpus(cls, n_rows: int) -> Self:
        """Return the sums for the corpus, as a block of one subset."""
        return cls(np.array([float(n_rows)]), np.zeros(1), n_rows)

    def factor(self, side: Side, weighting: Weighting) -> F64:
        """Return the factor of raw weights, (B,): 1 for `count`, 1 / sum |w| for `mean`, 0 for an empty side."""
        sum_B = self.retained_B if side == "retained" else self.omitted_B
        return np.ones_like(sum_B) if weighting == "count" else ratio(1.0, sum_B)


@dataclass(frozen=True, slots=True)
class SketchSums:
    """Sums of one sketch over the retained rows of B subsets with raw weights, float64."""

    total_BD: F64  # sum of w_i phi_i
    sum_w_norm2_B: F64  # sum of w_i ||phi_i||^2
    sum_w2_norm2_B: F64  # sum of w_i^2 ||phi_i||^2

    def geometry(self, weight_sums: WeightSums, corpus: "SketchTotals", side: Side, weighting: Weighting) -> Geometry:
        """Compute the components of one sketch for a side and a weighting.

        The omitted side has weights 1 - w_i: for binary weights these are the omitted rows; a row that is doubled
        (w = 2) has the weight -1. Its sums follow from those of the retained side: with T the sum of phi over the
        corpus and s the sum over the retained side, sum (1 - w) phi = T - s, and sum (1 - w)^2 ||phi||^2 =
        sum ||phi||^2 - 2 sum w ||phi||^2 + sum w^2 ||phi||^2, which rounding may make slightly negative.
        K_pair = K_raw - K_self cancels strongly: of some 10^5 rows, K_raw and K_self may agree in five digits. Hence
        float64.

        Source: eq:ia-components. Deviation: weighting `mean` divides the weights by their sum.
        """
        total_BD, self_B, weight_B = self.total_BD, self.sum_w2_norm2_B, weight_sums.retained_B
        if side == "omitted":
            total_BD = corpus.total_D - total_BD
            self_B = np.maximum(corpus.sum_norm2 - 2.0 * self.sum_w_norm2_B + self_B, 0.0)
            weight_B = weight_sums.n_rows - weight_B
        factor_B = weight_sums.factor(side, weighting)
        total_BD = total_BD * factor_B[:, None]
        self_B = self_B * factor_B**2
        raw_B = np.einsum("bd,bd->b", total_BD, total_BD)
        centred_BD = total_BD - np.outer(weight_B * factor_B, corpus.mean_D)
        cent_B = np.einsum("bd,bd->b", centred_BD, centred_BD)
        return {"raw": raw_B, "self": self_B, "pair": raw_B - self_B, "cent": cent_B}


@dataclass(frozen=True, slots=True)
class SketchTotals:
    """Sums of one sketch over the whole corpus."""

    total_D: F64  # sum of phi_i
    sum_norm2: float  # sum of ||phi_i||^2
    n_rows: int

    @property
    def mean_D(self) -> F64:  # noqa: N802 - a shape suffix
        """Mean sketch of the corpus, phi-bar of eq:ia-components."""
        return np.asarray(self.total_D / self.n_rows)

    def as_subset(self) -> SketchSums:
        """Return the corpus as a block of one subset."""
        sum_norm2_B = np.array([self.sum_norm2])  # all weights are 1
        return SketchSums(self.total_D[None], sum_norm2_B, sum_norm2_B)


def direct_sum(hidden: Geometry, residual: Geometry) -> Geometry:
    """Return the geometry of the concatenated sketch, whose components are sums. Source: eq:feature-sketch."""
    return {kind: hidden[kind] + residual[kind] for kind in hidden}


def subset_relevance(sum_BE: F64, total_E: F64, weight_sums: WeightSums, side: Side, weighting: Weighting) -> F64:
    """Return A_e of B subsets from sums over their retained rows, (B, E), in the unit of the relevance.

    Args:
        sum_BE: sum of w_i a_ie over retained rows, raw weights.
        total_E: sum of a_ie over the corpus.
        weight_sums: sums of the weights of the subsets.
        side: rows that are scored; on the omitted side a row has the weight 1 - w_i.
        weighting: `count` or `mean`.
    Source: eq:grasp-subset-relevance. Deviation: on the omitted side the sign is flipped, so that higher is better on
        either side.
    """
    factor_B1 = weight_sums.factor(side, weighting)[:, None]
    if side == "retained":
        return np.asarray(factor_B1 * sum_BE)
    return np.asarray(factor_B1 * (sum_BE - total_E))


def required_sketches(components: Iterable[str]) -> tuple[str, ...]:
    """Return the stored sketches that components such as `joint.pair` require; `joint` requires hidden and residual."""
    names = {component.split(".")[0] for component in components}
    if "joint" in names:
        names |= set(JOINT)
    return tuple(name for name in ("hidden", "residual", "product") if name in names)
