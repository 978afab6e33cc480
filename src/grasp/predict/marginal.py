"""One row more, and the paper's surrogates for a training step, in natural units.

Shape letters: B subsets, E units (or targets), n candidate rows, D sketch width.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from grasp.predict.geometry import Geometry, SketchSums, SketchTotals, SubsetMass, Weighting

F64 = NDArray[np.float64]


def additive(relevance_NE: NDArray[Any], weights_BN: Any) -> F64:
    """sum_{i in S} w_i a_ie, (B, E). Source: eq:additive-utility, eq:method-additive, eq:prelim-additive."""
    return np.asarray(weights_BN @ np.asarray(relevance_NE, dtype=np.float64))


def interaction_surrogate(relevance_B: F64, raw_B: F64, *, step: float, penalty: float) -> F64:
    """eta A(T) - lambda K_raw(T), (B,). Source: eq:ideal-interaction-surrogate, eq:sketched-surrogate."""
    return np.asarray(step * relevance_B - penalty * raw_B)


def marginal_geometry(
    sums: SketchSums, mass: SubsetMass, corpus: SketchTotals, sketch_nD: NDArray[Any], weighting: Weighting
) -> Geometry:
    """Geometry of S + {k} for n candidate rows k of weight 1, (n,) each; S is one subset, retained side.

    ||t + phi||^2 = ||t||^2 + 2 <t, phi> + ||phi||^2, so a candidate costs O(D).
    """
    sketch_nD = np.asarray(sketch_nD, dtype=np.float64)
    total_D, weight = sums.total_BD[0], float(mass.retained_B[0])
    norm_n = np.einsum("nd,nd->n", sketch_nD, sketch_nD)
    factor = 1.0 if weighting == "count" else 1.0 / (weight + 1.0)
    raw_n = total_D @ total_D + 2.0 * (sketch_nD @ total_D) + norm_n
    self_n = sums.square_norm_B[0] + norm_n
    shift_D = total_D - weight * corpus.mean_D
    centred_nD = sketch_nD - corpus.mean_D
    cent_n = shift_D @ shift_D + 2.0 * (centred_nD @ shift_D) + np.einsum("nd,nd->n", centred_nD, centred_nD)
    raw_n, self_n, cent_n = (factor**2 * part for part in (raw_n, self_n, cent_n))
    return Geometry(raw_B=raw_n, self_B=self_n, pair_B=raw_n - self_n, cent_B=cent_n)


def marginal_relevance(sum_E: F64, mass: SubsetMass, relevance_nE: NDArray[Any], weighting: Weighting) -> F64:
    """A_e of S + {k} for n candidate rows k of weight 1, (n, E); S is one subset, retained side."""
    factor = 1.0 if weighting == "count" else 1.0 / (float(mass.retained_B[0]) + 1.0)
    return np.asarray(factor * (sum_E + np.asarray(relevance_nE, dtype=np.float64)))
