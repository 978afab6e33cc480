"""Pooled relevance of rows to units: hidden match times residual match; and the sketches of pooled features.

Shape letters: N rows, E units, H hidden width, V vocabulary, C coordinates that many units share, D sketch width.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from scipy.sparse import csr_array, diags_array

from grasp.arrays import F32, F64, I64, Floats
from grasp.kernels.sketch import CountSketch, gaussian_projection
from grasp.kernels.whitening import Moments, Whitener
from grasp.models.residuals import PooledFeatures
from grasp.settings import FeatureSettings

# A coordinate that at least this share of the units has is kept dense: past it a dense row of E numbers costs less
# than its scattered entries.
SHARED = 1 / 8


def damp(match: Floats) -> Floats:
    """sgn(x) log(1 + |x|): odd, strictly increasing, unitless. Source: eq:grasp-score."""
    return np.asarray(np.copysign(np.log1p(np.abs(match)), match))


@dataclass(frozen=True, slots=True)
class PreparedUnits:
    """The questions' side of the pooled kernel, made once: D xi_e split by how many units share a coordinate."""

    hidden_EH: Floats
    shared_C: I64
    shared_CE: Floats  # their D xi_e, dense
    rare_VE: csr_array  # all other coordinates, sparse


def prepare_units(unit_hidden_EH: Floats, unit_residual_EV: csr_array, precondition_V: Floats) -> PreparedUnits:
    """Fold the preconditioner D into the units and split their residuals.

    Args:
        unit_hidden_EH: whitened unit summaries.
        unit_residual_EV: pooled sparse residuals, not scaled.
        precondition_V: the diagonal of D.
    """
    n_units, vocab = unit_residual_EV.shape
    scaled_VE = csr_array((unit_residual_EV @ diags_array(precondition_V)).T)
    units_per_V = np.diff(scaled_VE.indptr)
    shared_C = np.flatnonzero(units_per_V >= max(1.0, SHARED * n_units))
    is_rare_V = np.ones(vocab)
    is_rare_V[shared_C] = 0.0
    rare_VE = csr_array(diags_array(is_rare_V) @ scaled_VE)
    rare_VE.eliminate_zeros()
    kind = np.result_type(unit_residual_EV.dtype, unit_hidden_EH.dtype)
    return PreparedUnits(
        hidden_EH=unit_hidden_EH,
        shared_C=shared_C,
        shared_CE=np.ascontiguousarray(scaled_VE[shared_C].toarray(), dtype=kind),
        rare_VE=rare_VE.astype(kind),
    )


def pooled_relevance(hidden_NH: Floats, residual_NV: csr_array, units: PreparedUnits) -> Floats:
    r"""Predict how much each row of a block helps each unit, first order only.

    The hidden match is H = <h~_i, h~_e>, the residual match R = xi_i^T D xi_e, exact on sparse residuals.

    Args:
        hidden_NH: whitened row summaries.
        residual_NV: pooled sparse row residuals, not scaled; at most K + 1 entries per pooled position.
    Returns:
        (N, E), unitless, in the precision of the inputs. Positive: training on the row should lower the unit's loss.
    Source: eq:grasp-components; eq:grasp-score, a = R sgn(H) log(1 + |H|). Deviation: none.
    Cost: O(N E H) and the entries that rows and units share; memory: one block of rows.
    """
    hidden_match_NE = np.asarray(hidden_NH @ units.hidden_EH.T)
    residual_match_NE = np.asarray((residual_NV @ units.rare_VE).toarray())
    if len(units.shared_C):
        residual_match_NE += residual_NV[:, units.shared_C] @ units.shared_CE
    return np.asarray(residual_match_NE * damp(hidden_match_NE))


@dataclass(frozen=True, slots=True)
class PooledKernel:
    """The pooled kernel and the two sketches, ready to be applied: pooled moments are folded in."""

    whitener: Whitener
    project_HD: F64  # whitening, then P_h
    sketch_VD: csr_array  # D^{1/2}, then CountSketch
    units: PreparedUnits | None  # none: no pooled relevance is built

    @classmethod
    def prepare(cls, units: PooledFeatures, moments: Moments, settings: FeatureSettings) -> Self:
        whitener = Whitener.fit(moments, tau=settings.tau, alpha=settings.alpha, epsilon=settings.epsilon)
        vocab = len(whitener.precondition_V)
        project = gaussian_projection(settings.hidden_width, len(whitener.mean_H), settings.seed)
        count = CountSketch.draw(vocab, settings.residual_width, settings.seed, "residual")
        prepared = None
        if "pooled" in settings.kernels:
            white_EH = whitener.whiten(units.hidden_NH)
            prepared = prepare_units(white_EH, units.residual_NV, whitener.precondition_V)
        return cls(
            whitener=whitener,
            project_HD=whitener.map_HH @ project.T,
            sketch_VD=count.matrix(np.sqrt(whitener.precondition_V)),
            units=prepared,
        )

    def sketches(self, pooled: PooledFeatures) -> dict[str, F32]:
        """Hidden and residual sketch of N rows, before their gains. Source: eq:feature-sketch."""
        centred_NH = pooled.hidden_NH - self.whitener.mean_H
        return {
            "hidden_sketch": (centred_NH @ self.project_HD).astype(np.float32),
            "residual_sketch": (pooled.residual_NV @ self.sketch_VD).toarray().astype(np.float32),
        }

    def relevance(self, pooled: PooledFeatures) -> dict[str, F32]:
        """Pooled relevance of N rows for all units; nothing where it is not built."""
        if self.units is None:
            return {}
        white_NH = self.whitener.whiten(pooled.hidden_NH)
        relevance_NE = pooled_relevance(white_NH, pooled.residual_NV, self.units)
        return {"relevance_pooled": np.asarray(relevance_NE, dtype=np.float32)}

    def unit_relevance(self, units: PooledFeatures) -> F64:
        """Relevance of each unit to itself, (E,)."""
        assert self.units is not None
        white_EH = self.whitener.whiten(units.hidden_NH)
        relevance_EE = pooled_relevance(white_EH, units.residual_NV, self.units)
        return np.asarray(relevance_EE, dtype=np.float64).diagonal().copy()
