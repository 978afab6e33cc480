"""The finishing half of a shard: from features and moments to the arrays of the artifact. Needs no model.

Shape letters: N rows, E units, H hidden width, V vocabulary, D sketch width.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.features.moments import F64, Moments, Whitener
from grasp.features.pooled_match import PreparedUnits, pooled_relevance, prepare_units
from grasp.features.residuals import PooledFeatures
from grasp.features.sketch import CountSketch, gaussian_projection
from grasp.settings import FeatureSettings


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
        if settings.pooled:
            white_EH = whiten(whitener, units.hidden_NH)
            prepared = prepare_units(white_EH, units.residual_NV, whitener.precondition_V)
        return cls(
            whitener=whitener,
            project_HD=whitener.map_HH @ project.T,
            sketch_VD=count.matrix(np.sqrt(whitener.precondition_V)),
            units=prepared,
        )

    def sketches(self, pooled: PooledFeatures) -> dict[str, NDArray[np.float32]]:
        """Hidden and residual sketch of N rows, before their gains. Source: eq:feature-sketch."""
        centred_NH = pooled.hidden_NH - self.whitener.mean_H
        return {
            "hidden_sketch": (centred_NH @ self.project_HD).astype(np.float32),
            "residual_sketch": (pooled.residual_NV @ self.sketch_VD).toarray().astype(np.float32),
        }

    def relevance(self, pooled: PooledFeatures) -> dict[str, NDArray[np.float32]]:
        """Pooled relevance of N rows for all units; nothing where it is not built."""
        if self.units is None:
            return {}
        white_NH = whiten(self.whitener, pooled.hidden_NH)
        relevance_NE = pooled_relevance(white_NH, pooled.residual_NV, self.units)
        return {"relevance_pooled": np.asarray(relevance_NE, dtype=np.float32)}

    def unit_relevance(self, units: PooledFeatures) -> F64:
        """Relevance of each unit to itself, (E,)."""
        assert self.units is not None
        white_EH = whiten(self.whitener, units.hidden_NH)
        relevance_EE = pooled_relevance(white_EH, units.residual_NV, self.units)
        return np.asarray(relevance_EE, dtype=np.float64).diagonal().copy()


def whiten(whitener: Whitener, hidden_NH: NDArray[np.floating]) -> F64:
    """h~ = W (h - mean), (N, H), float64. Source: eq:grasp-hidden-whiten."""
    return np.asarray((hidden_NH - whitener.mean_H) @ whitener.map_HH, dtype=np.float64)
