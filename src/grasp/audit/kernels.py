"""The kernels that the sketches of an artifact stand for, in full, of a sample of its rows; and sketches of any width.

Shape letters: N rows of the sample, P their positions, H hidden width, V vocabulary, D sketch width.
"""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array

from grasp.artifact.reader import ArtifactReader
from grasp.audit import measures
from grasp.audit.sample import SampleFeatures
from grasp.extract.finish import PooledKernel, whiten
from grasp.extract.moments import unspool_moments
from grasp.features.moments import Moments
from grasp.features.pooling import PooledFeatures
from grasp.features.product_sketch import ProductSketch
from grasp.features.whitening import Whitener
from grasp.settings import FeatureSettings

F64 = NDArray[np.float64]
Half = Literal["hidden", "residual", "product"]


@dataclass(frozen=True, slots=True)
class PositionKernels:
    """What takes the positions of the rows, in the coordinates of the token kernel.

    An artifact without token moments (`match: pooled`) has no such coordinates: those of the pooled kernel are used.
    """

    product_NN: F64  # <G_i, G_j>, G = mean_t h~_t (x) D^1/2 xi_t: what the product sketch is one of
    gradient_NN: F64  # the same with hidden states that are not centred: gradients of the output layer
    kept_share: float  # of G's square in the summary that the artifact pools
    same_share: float  # of G's square in a summary over the very positions of G


@dataclass(frozen=True)
class Kernels:
    """Inner products of all pairs of the sample, (N, N) each, float64, whitened and scaled as the build does."""

    settings: FeatureSettings
    features: SampleFeatures
    pooled: Moments
    token: Moments  # the pooled ones where there are none
    hidden_NN: F64
    residual_NN: F64
    positions: PositionKernels | None  # none: kept features without positions

    @classmethod
    def of(cls, artifact: ArtifactReader, features: SampleFeatures) -> Self:
        """Kernels of some rows of an artifact."""
        settings = FeatureSettings.model_validate(artifact.feature_settings)
        pooled = unspool_moments(artifact.moments, "pooled.")
        token = unspool_moments(artifact.moments, "token.") if "token.count" in artifact.moments else pooled
        whitener = _whitener(pooled, settings)
        return cls(
            settings,
            features,
            pooled,
            token,
            *measures.gram(whiten(whitener, features.hidden_NH), _scaled(whitener, features.residual_NV)),
            _of_positions(_whitener(token, settings), features),
        )

    @property
    def pooled_product_NN(self) -> F64:  # noqa: N802 - a shape suffix
        """Product kernel of the pooled summaries. Source: prop:local-direct-sum."""
        return self.hidden_NN * self.residual_NN

    @property
    def joint_NN(self) -> F64:  # noqa: N802 - a shape suffix
        """Direct-sum kernel of the pooled summaries. Source: eq:feature-sketch."""
        return measures.unit_gram(self.hidden_NN) + measures.unit_gram(self.residual_NN)

    def full(self, half: Half) -> F64 | None:
        """The exact inner products that a sketch estimates; none where they need positions that were not kept."""
        if half == "product":
            return None if self.positions is None else self.positions.product_NN
        return self.hidden_NN if half == "hidden" else self.residual_NN

    def sketch(self, half: Half, width: int) -> F64:
        """The sketch that a build with this width keeps of the sample, before its gain, (N, D)."""
        if half == "product":
            return self._product_sketch(width)
        settings = self.settings.model_copy(update={"match": "token", f"{half}_width": width})  # no pooled relevance
        pooled = PooledFeatures(self.features.hidden_NH, self.features.residual_NV)
        found = PooledKernel.prepare(pooled, self.pooled, settings).sketches(pooled)
        return np.asarray(found[f"{half}_sketch"], dtype=np.float64)

    def _product_sketch(self, width: int) -> F64:
        at, cpu = self.features.positions, torch.device("cpu")
        assert at is not None
        sketch = ProductSketch.prepare(_whitener(self.token, self.settings), width, self.settings.seed, cpu)
        batches = at.batches(len(self.features.row_index), cpu)
        parts = [sketch.apply(one.hidden_PH, one.residual, one.row_P, one.n_rows).double() for one in batches]
        return np.asarray(torch.cat(parts).numpy())


def _whitener(moments: Moments, settings: FeatureSettings) -> Whitener:
    return Whitener.fit(moments, tau=settings.tau, alpha=settings.alpha, epsilon=settings.epsilon)


def _scaled(whitener: Whitener, residual_NV: csr_array) -> csr_array:
    return csr_array(residual_NV.astype(np.float64) @ diags_array(np.sqrt(whitener.precondition_V)))


def _of_positions(whitener: Whitener, features: SampleFeatures) -> PositionKernels | None:
    at, n_rows = features.positions, len(features.row_index)
    if at is None:
        return None
    hidden_PH = whiten(whitener, at.hidden_PH.astype(np.float32))
    residual_PV, row_P = _scaled(whitener, features.residual_PV), at.row_P.astype(np.int64)
    product_NN = measures.position_gram(hidden_PH, residual_PV, row_P, n_rows)
    offset_H = whitener.mean_H @ whitener.map_HH
    mean_NP = measures.row_means(row_P, n_rows)
    kept = whiten(whitener, features.hidden_NH), _scaled(whitener, features.residual_NV)
    same = mean_NP @ hidden_PH, csr_array(mean_NP @ residual_PV)
    return PositionKernels(
        product_NN=product_NN,
        gradient_NN=measures.uncentred_gram(product_NN, offset_H, hidden_PH, residual_PV, row_P),
        kept_share=measures.rank_one_share(hidden_PH, residual_PV, row_P, *kept),
        same_share=measures.rank_one_share(hidden_PH, residual_PV, row_P, *same),
    )
