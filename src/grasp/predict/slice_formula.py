"""The predictor as a formula in one weight a slice: G and G x G numbers that a page can compute with by itself.

Give every row of slice g the weight f_g: 0 drops the slice, 1 keeps it, 0.3 keeps 30 % of its weight. With n_g the rows
and e_g the sum of the effects of a slice, the change against the corpus is

    sum_g f_g e_g / sum_g f_g n_g

for an additive protocol of the retained side and the mean. In general, with u = f on the retained side and 1 - f on the
omitted one, N the rows, c = 1 or 1 / sum |u_g| n_g by the weighting, the Gram matrix of the slices' sketch sums
C_gh = <Phi_g, Phi_h>, and p_g the sum of ||phi_i||^2 over the slice, it is

    c (sum_g f_g relevance_g - taken) + c^2 (raw u'C u + own sum_g u_g^2 p_g + cent v'C v) - corpus,
    v_g = u_g - sum_h u_h n_h / N                                    (sum_g Phi_g is N times the mean sketch),

with `corpus` the value of the same at f = 1. Keeping each row with the weight f_g gives the relevance that a random
part f_g of the slice has on average; quadratic terms see lighter rows, not fewer.
Source: eq:component-predictor, eq:grasp-subset-relevance, eq:ia-components. Shape letters: G slices, T targets.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from grasp.predict.blocks import Side
from grasp.predict.geometry import JOINT, QuadraticWeights, SubsetMass, Weighting
from grasp.predict.predictor import Predictor, SubsetSums
from grasp.predict.row_arrays import F64


@dataclass(frozen=True, slots=True)
class SliceFormula:
    """The numbers of the formula in the module's docstring: a page needs no others."""

    side: Side
    weighting: Weighting
    rows_G: F64
    relevance_GT: F64
    taken_T: F64  # 0 on the retained side
    corpus_T: F64
    quadratic: Mapping[str, QuadraticWeights]  # by half; empty for an additive protocol
    gram_GG: Mapping[str, F64]  # by half; joint where hidden and residual are there
    norm_G: Mapping[str, F64]

    @classmethod
    def of(cls, predictor: Predictor, slices: SubsetSums) -> Self:
        """Coefficients of a predictor for the slices whose sums these are."""
        protocol, rows_G = predictor.protocol, slices.mass.retained_B
        gain_T, offset_T = predictor.task.gain_C, predictor.task.offset_C
        grams, norms = _grams(slices)
        halves = {} if predictor.geometry is None else predictor.geometry.halves
        whole = predictor.whole()
        factor = float(SubsetMass.whole(predictor.n_rows).factor(protocol.side, protocol.weighting)[0])
        total_T = predictor.n_rows * gain_T * offset_T
        corpus_T = factor * total_T if protocol.side == "retained" else np.zeros_like(total_T)
        bend = 0.0
        if protocol.side == "retained":
            for half, weights in halves.items():
                total_D, norm = whole.sketch[half].total_BD[0], float(whole.sketch[half].norm_B[0])
                bend += factor**2 * (weights.raw * float(total_D @ total_D) + weights.own * norm)
        return cls(
            side=protocol.side,
            weighting=protocol.weighting,
            rows_G=rows_G,
            relevance_GT=gain_T * (slices.effect_BT + np.outer(rows_G, offset_T)),
            taken_T=total_T * (protocol.side == "omitted"),
            corpus_T=corpus_T + bend,
            quadratic=halves,
            gram_GG=grams,
            norm_G=norms,
        )

    def cosines(self, half: str) -> F64:
        """(G, G) cosine of the slices' sketch sums, the mean sketch of the corpus taken off every row first.

        nan where a sum is zero; the diagonal is 1.
        """
        gram_GG, rows_G = self.gram_GG[half], self.rows_G
        shift_GG = np.eye(len(rows_G)) - np.outer(rows_G, np.ones(len(rows_G))) / rows_G.sum()
        centred_GG = shift_GG @ gram_GG @ shift_GG.T
        size_G = np.sqrt(np.maximum(np.diag(centred_GG), 0.0))
        product_GG = np.outer(size_G, size_G)
        floor = 1e-12 * float(np.trace(gram_GG))
        cosine_GG = np.divide(centred_GG, product_GG, out=np.full_like(gram_GG, np.nan), where=product_GG > floor)
        return np.asarray(np.clip(cosine_GG, -1.0, 1.0))


def _grams(slices: SubsetSums) -> tuple[dict[str, F64], dict[str, F64]]:
    """Gram matrices of the slices and sums of squared norms, by half; joint adds. Source: eq:feature-sketch."""
    grams = {half: sums.total_BD @ sums.total_BD.T for half, sums in slices.sketch.items()}
    norms = {half: sums.norm_B for half, sums in slices.sketch.items()}
    if all(half in grams for half in JOINT):
        grams["joint"] = sum((grams[half] for half in JOINT), np.zeros_like(grams[JOINT[0]]))
        norms["joint"] = sum((norms[half] for half in JOINT), np.zeros_like(norms[JOINT[0]]))
    return grams, norms
