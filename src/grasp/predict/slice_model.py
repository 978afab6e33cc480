"""What `grasp predict` says of subsets that weigh the slices of a label, from G and G x G numbers.

Give every row of slice g the weight f_g: 0 drops the slice, 1 keeps it, 0.3 keeps 30 % of its weight. All that a
score depends on is then linear in f, or quadratic in it through the Gram matrix of the slices' sketch sums
C_gh = <Phi_g, Phi_h>, and through p_g = sum ||phi_i||^2 over the rows of g. With u = f on the retained side and
1 - f on the omitted one, n_g the rows, N their sum, and c = 1 or 1 / sum |u_g| n_g by the weighting:

    A      =  c sum_g f_g s_g                                     (retained; s_g: sum of the relevance)
    A      =  c (sum_g f_g s_g - total)                           (omitted)
    K_raw  =  c^2 u' C u
    K_self =  c^2 sum_g u_g^2 p_g
    K_pair =  K_raw - K_self
    K_cent =  c^2 v' C v,   v_g = u_g - sum_h u_h n_h / N         (sum_g Phi_g is N times the mean sketch)

Keeping each row with the weight f_g gives the relevance that a random part f_g of the slice has on average. Quadratic
terms see lighter rows, not fewer: K_self weighs f_g^2 p_g, where a random part of plain rows has f_g p_g on average.
Source: eq:component-predictor, eq:grasp-subset-relevance, eq:ia-components. Shape letters: B subsets, G slices,
T targets, D sketch width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from grasp.predict.blocks import Side
from grasp.predict.geometry import JOINT, QuadraticWeights, SketchSums, SubsetMass, Weighting
from grasp.predict.label_slices import LabelSlices
from grasp.predict.scorer import Scorer
from grasp.predict.source import F64


@dataclass(frozen=True, slots=True)
class Component:
    """One term of a prediction: weight x (value - mean) / std."""

    weight: float
    mean_T: F64  # of one number where it is the same for all targets
    inverse_T: F64  # 1 / std; 0 where it does not vary


@dataclass(frozen=True, slots=True)
class SliceFormula:
    """All components and their z-scores folded into one formula:

    V_t = c (sum_g f_g relevance_gt - taken_t) + c^2 sum_h (raw_h u'C_h u + own_h sum_g u_g^2 p_hg + cent_h v'C_h v)
          - constant_t
    """

    relevance_GT: F64
    taken_T: F64  # 0 on the retained side
    quadratic: Mapping[str, QuadraticWeights]  # by half
    constant_T: F64


@dataclass(frozen=True, slots=True)
class SliceModel:
    """A scorer's predictions as a function of one weight a slice."""

    label: str
    targets: tuple[str, ...]
    side: Side
    weighting: Weighting
    rows_G: F64
    relevance_GT: Mapping[str, F64]  # by kernel: sums over the rows of each slice
    total_T: Mapping[str, F64]
    gram_GG: Mapping[str, F64]  # by half; joint where hidden and residual are there
    norm_G: Mapping[str, F64]
    kernels: Mapping[str, Component]
    geometry: Mapping[str, Component]  # by `half.kind`
    whole_T: F64  # utility of the whole corpus

    @classmethod
    def of(cls, scorer: Scorer, slices: LabelSlices) -> Self:
        """Sum relevance and sketches over the slices; memory: the slices, and one block of rows."""
        sums = scorer.sums(slices.indicators())
        grams, norms = _grams(sums.sketch)
        protocol = scorer.protocol
        assert isinstance(protocol.match, dict)
        weights = {str(kernel): weight for kernel, weight in protocol.match.items()}
        return cls(
            label=slices.label,
            targets=scorer.units.targets,
            side=protocol.side,
            weighting=protocol.weighting,
            rows_G=slices.rows_G.astype(np.float64),
            relevance_GT=dict(sums.task),
            total_T={kernel: scorer.task.kernels[kernel].rows.total_E for kernel in weights},
            gram_GG=grams,
            norm_G=norms,
            kernels={name: _component(scorer, name, weight) for name, weight in weights.items()},
            geometry={name: _component(scorer, name, omega) for name, omega in protocol.components.items()},
            whole_T=scorer.score_tasks(scorer.whole())[1].utility_BE[0],
        )

    def formula(self) -> SliceFormula:
        """The predictions as one formula."""
        slope = {kernel: one.weight * one.inverse_T for kernel, one in self.kernels.items()}
        quadratic: dict[str, QuadraticWeights] = {}
        constant_T = sum(
            (slope[kernel] * one.mean_T for kernel, one in self.kernels.items()), np.zeros(len(self.targets))
        )
        for name, one in self.geometry.items():
            half, kind = name.split(".")
            weight = one.weight * float(one.inverse_T[0])
            quadratic[half] = quadratic.get(half, QuadraticWeights()).plus(kind, weight)
            constant_T = constant_T + weight * float(one.mean_T[0])
        relevance_GT = sum((slope[k] * sum_GT for k, sum_GT in self.relevance_GT.items()), np.zeros(self._shape))
        taken_T = sum((slope[k] * total_T for k, total_T in self.total_T.items()), np.zeros(len(self.targets)))
        return SliceFormula(relevance_GT, taken_T * (self.side == "omitted"), quadratic, constant_T)

    def utilities(self, weight_BG: F64) -> F64:
        """Predicted utility of subsets that give the rows of each slice its weight, (B, T).

        Args:
            weight_BG: at least 0, with a positive sum of weights over the rows.
        """
        weight_BG = np.asarray(weight_BG, dtype=np.float64)
        formula = self.formula()
        sum_BT = weight_BG @ formula.relevance_GT - formula.taken_T
        return np.asarray(
            self._factor(weight_BG) * sum_BT + self._quadratic(formula, weight_BG)[:, None] - formula.constant_T
        )

    def changes(self, weight_BG: F64) -> F64:
        """Utility minus that of the whole corpus, (B, T)."""
        return np.asarray(self.utilities(weight_BG) - self.whole_T)

    def geometry_change(self, weight_BG: F64) -> F64:
        """What geometry adds to `changes`, the same for every target, (B,)."""
        formula, whole_1G = self.formula(), np.ones((1, len(self.rows_G)))
        return np.asarray(self._quadratic(formula, weight_BG) - self._quadratic(formula, whole_1G))

    def cosines(self, half: str, *, centred: bool) -> F64:
        """(G, G) cosine of the slices' sketch sums, nan where a sum is zero; the diagonal is 1.

        Args:
            centred: take the mean sketch of the corpus off every row first.
        """
        gram_GG = self.gram_GG[half]
        if centred:
            shift_GG = np.eye(len(self.rows_G)) - np.outer(self.rows_G, np.ones(len(self.rows_G))) / self.rows_G.sum()
            gram_GG = shift_GG @ gram_GG @ shift_GG.T
        size_G = np.sqrt(np.maximum(np.diag(gram_GG), 0.0))
        product_GG = np.outer(size_G, size_G)
        floor = 1e-12 * float(np.trace(self.gram_GG[half]))
        cosine_GG = np.divide(gram_GG, product_GG, out=np.full_like(gram_GG, np.nan), where=product_GG > floor)
        return np.asarray(np.clip(cosine_GG, -1.0, 1.0))

    @property
    def _shape(self) -> tuple[int, int]:
        return len(self.rows_G), len(self.targets)

    def _factor(self, weight_BG: F64) -> F64:
        """c of the formula, (B, 1)."""
        mass = SubsetMass(weight_BG @ self.rows_G, np.abs(1.0 - weight_BG) @ self.rows_G, int(self.rows_G.sum()))
        return mass.factor(self.side, self.weighting)[:, None]

    def _quadratic(self, formula: SliceFormula, weight_BG: F64) -> F64:
        """The quadratic terms, (B,)."""
        side_BG = weight_BG if self.side == "retained" else 1.0 - weight_BG
        shift_BG = side_BG - (side_BG @ self.rows_G)[:, None] / self.rows_G.sum()
        out_B = np.zeros(len(weight_BG))
        for half, weights in formula.quadratic.items():
            gram_GG, norm_G = self.gram_GG[half], self.norm_G[half]
            out_B += weights.raw * np.einsum("bg,gh,bh->b", side_BG, gram_GG, side_BG)
            out_B += weights.cent * np.einsum("bg,gh,bh->b", shift_BG, gram_GG, shift_BG)
            out_B += weights.own * (side_BG**2 @ norm_G)
        return self._factor(weight_BG)[:, 0] ** 2 * out_B


def _component(scorer: Scorer, name: str, weight: float) -> Component:
    moments = scorer.task.moments[name]
    return Component(weight, moments.mean_E, moments.inverse_E)


def _grams(sketch: Mapping[str, SketchSums]) -> tuple[dict[str, F64], dict[str, F64]]:
    """Gram matrices of the slices and sums of squared norms, by half; joint adds. Source: eq:feature-sketch."""
    grams = {half: sums.total_BD @ sums.total_BD.T for half, sums in sketch.items()}
    norms = {half: sums.norm_B for half, sums in sketch.items()}
    if all(half in grams for half in JOINT):
        grams["joint"] = grams["hidden"] + grams["residual"]
        norms["joint"] = norms["hidden"] + norms["residual"]
    return grams, norms
