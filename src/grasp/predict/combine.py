"""From standardised components to predicted utility. Shape letters: B subsets, E units (or targets), n rows."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grasp.predict.geometry import Geometry, SketchSums, SketchTotals, SubsetMass, Weighting
from grasp.predict.standardize import ComponentMoments

F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ComponentTable:
    """Components of B subsets in natural units, side and weighting applied.

    Attributes:
        relevance: A of every kernel, (B, E); for a task its units are averaged, for units each has its own.
        geometry: K by name, e.g. `joint.pair`, (B,).
    """

    relevance: Mapping[str, F64]
    geometry: Mapping[str, F64]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted utility, (B, E), in standard deviations of A over the calibration family, and what it is made of."""

    utility_BE: F64
    parts: Mapping[str, F64]  # omega_c z(K_c) (B, 1) and weight z(A) (B, E), by name; they add up to the utility


def combine(
    table: ComponentTable,
    moments: Mapping[str, ComponentMoments],
    *,
    match_weights: Mapping[str, float],
    omega: Mapping[str, float],
) -> Prediction:
    """V-hat = sum_m weight_m z(A_m) + sum_c omega_c z(K_c); a penalty is a negative omega.

    Components that do not vary over the calibration family contribute 0; `dropped` lists them.
    Source: eq:component-predictor. Deviation: several relevance kernels may be summed as z-scores.
    """
    parts = {name: weight * moments[name].z(table.relevance[name]) for name, weight in match_weights.items()}
    parts |= {name: weight * moments[name].z(table.geometry[name][:, None]) for name, weight in omega.items()}
    return Prediction(np.asarray(sum(parts.values())), parts)


def dropped(moments: Mapping[str, ComponentMoments]) -> tuple[str, ...]:
    """Components without variance over the calibration family: for a vector of units, without any."""
    return tuple(name for name, item in moments.items() if not item.varies_E.any())


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


def marginal_gain(with_row: Prediction, without: Prediction) -> F64:
    """V-hat(S + {k}) - V-hat(S), (n, E). Source: eq:discrete-second-difference is its difference once more."""
    return np.asarray(with_row.utility_BE - without.utility_BE)
