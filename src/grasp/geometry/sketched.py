"""Compare K of stored sketches with K of the exact kernels: their own full kernel, and the product kernel.

Start with `of_sketches`. Exact kernels are computed for a sample of the rows; sketches can be recomputed at any width.
Shape letters: N rows of the sample, P their positions, B subsets, H hidden width, V vocabulary, D sketch width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.geometry import sketch_measures as measures
from grasp.inspect.health_metrics import Check, judge_check, rank_agreement, unmeasured_check
from grasp.inspect.rescoring import SampleFeatures
from grasp.kernels.kernel import CorpusMoments, make_kernels
from grasp.kernels.whitening import Whitener, second_moments
from grasp.settings import FeatureSettings

Half = Literal["hidden", "residual", "product"]


@dataclass(frozen=True, slots=True)
class PositionProducts:
    """Quantities that require the positions of rows, in the coordinates of `output_layer`.

    An artifact without moments of positions (`rule: paper`) uses the coordinates of the pooled kernel instead.
    """

    product_NN: F64  # <G_i, G_j>, G = mean_t h~_t (x) D^1/2 xi_t, which the product sketch estimates
    gradient_NN: F64  # the same with uncentred hidden states: gradients of the output layer
    kept_share: float  # share of ||G||^2 in the pooled summary of the artifact
    same_share: float  # share of ||G||^2 in a summary over the positions of G


@dataclass(frozen=True)
class Kernels:
    """Inner products of all pairs of sampled rows, (N, N) float64 each, whitened and scaled as in the build."""

    settings: FeatureSettings
    features: SampleFeatures
    moments: Mapping[str, NDArray[Any]]  # as stored in the artifact
    hidden_NN: F64
    residual_NN: F64
    positions: PositionProducts

    @classmethod
    def from_artifact(cls, artifact: ArtifactReader, features: SampleFeatures) -> Self:
        """Compute the kernels of sampled rows of an artifact."""
        settings = FeatureSettings.model_validate(artifact.feature_settings)
        prefixes = [prefix for prefix in ("summary", "hidden") if f"{prefix}.count" in artifact.moments]
        pooled, token = (second_moments(artifact.moments, prefixes[at]) for at in (0, -1))
        whitener = Whitener.of(pooled, settings)
        return cls(
            settings,
            features,
            artifact.moments,
            *measures.gram(whitener.whiten(features.hidden_NH), _scaled(whitener, features.residual_NV)),
            _of_positions(Whitener.of(token, settings), features),
        )

    @property
    def pooled_product_NN(self) -> F64:  # noqa: N802 - a shape suffix
        """Product kernel of the pooled summaries. Source: prop:local-direct-sum."""
        return self.hidden_NN * self.residual_NN

    @property
    def joint_NN(self) -> F64:  # noqa: N802 - a shape suffix
        """Direct-sum kernel of the pooled summaries. Source: eq:feature-sketch."""
        return measures.unit_gram(self.hidden_NN) + measures.unit_gram(self.residual_NN)

    def full(self, half: Half) -> F64:
        """Return the exact inner products that a sketch estimates."""
        if half == "product":
            return self.positions.product_NN
        return self.hidden_NN if half == "hidden" else self.residual_NN

    def sketch(self, half: Half, width: int) -> F64:
        """Return the sketch of the sample that a build with this width would store, without gain, (N, D)."""
        batch, name = self.features.batch, f"{half}_sketch"
        settings = self.settings.model_copy(update={f"{half}_width": width})
        sizes = FeatureSizes(batch.hidden_PH.shape[1], batch.vocab_size, batch.hidden_PH.device)
        corpus = CorpusMoments(sizes)
        (kernel,) = make_kernels([name], sizes, settings, corpus)
        corpus.load(self.moments)
        kernel.prepare(batch)
        return np.asarray(kernel.score(batch).double().cpu().numpy())


@dataclass
class FeatureSizes:
    """Sizes of the model that computed the features."""

    hidden_size: int
    vocab_size: int
    device: torch.device


def _scaled(whitener: Whitener, residual_NV: csr_array) -> csr_array:
    return csr_array(residual_NV.astype(np.float64) @ diags_array(np.sqrt(whitener.precondition_V)))


def _of_positions(whitener: Whitener, features: SampleFeatures) -> PositionProducts:
    at, n_rows = features.batch, len(features.row_index)
    hidden_PH = whitener.whiten(at.hidden_PH.float().cpu().numpy())
    residual_PV, row_P = _scaled(whitener, features.residual_PV), at.row_P.cpu().numpy()
    product_NN = measures.position_gram(hidden_PH, residual_PV, row_P, n_rows)
    offset_H = whitener.mean_H @ whitener.map_HH
    mean_NP = measures.row_means(row_P, n_rows)
    stored = whitener.whiten(features.hidden_NH), _scaled(whitener, features.residual_NV)
    same = mean_NP @ hidden_PH, csr_array(mean_NP @ residual_PV)
    return PositionProducts(
        product_NN=product_NN,
        gradient_NN=measures.uncentred_gram(product_NN, offset_H, hidden_PH, residual_PV, row_P),
        kept_share=measures.rank_one_share(hidden_PH, residual_PV, row_P, *stored),
        same_share=measures.rank_one_share(hidden_PH, residual_PV, row_P, *same),
    )


MIN_RANK_CORRELATION = 0.8  # rank correlation from which a sketch is healthy
MAX_WIDTH = 8192  # largest width that is tried
HALVES: tuple[Half, ...] = ("hidden", "residual", "product")
PRODUCT_HALVES = ("hidden", "residual", "joint")
HEALTHY_SKETCH = (
    f"error at most twice that of a Gaussian sketch of this width, and ranks {MIN_RANK_CORRELATION} or more"
)
HEALTHY_PRODUCT = (
    f"ranks {MIN_RANK_CORRELATION} or more with the product of positions: K then ranks subsets as their updates do"
)
HEALTHY_DIRECT = f"ranks {MIN_RANK_CORRELATION} or more"
NAMES = {
    **{f"{half} sketch": HEALTHY_SKETCH for half in HALVES},
    **{f"{half} sketch for product": HEALTHY_PRODUCT for half in PRODUCT_HALVES},
    "direct sum for product": HEALTHY_DIRECT,
}


@dataclass(frozen=True, slots=True)
class Fit:
    """Agreement over subsets between K of a sketch and K of the exact kernel."""

    error: float  # median relative error
    ranks: float
    width: int

    @property
    def allowed(self) -> float:
        """Twice the relative standard deviation of a squared norm that a Gaussian sketch of this width estimates."""
        return 2 * sqrt(2 / self.width)

    @property
    def good(self) -> bool:
        return self.error <= self.allowed and self.ranks >= MIN_RANK_CORRELATION


def of_sketches(kernels: Kernels, sketches: Mapping[str, F64], weight_BN: F64) -> Iterator[Check]:
    """Yield all checks of the sketches of an artifact.

    Args:
        sketches: (N, D) by half, without gains; product only if it was built.
    """
    for half in HALVES:
        if half not in sketches:
            why = f"not built: features.kernels does not contain {half}_sketch"
            yield unmeasured_check(f"{half} sketch", HEALTHY_SKETCH, why)
        else:
            yield _against_exact(kernels, half, sketches[half], kernels.full(half), weight_BN)
    for name in PRODUCT_HALVES:
        yield _for_product(kernels, name, sketches, weight_BN)
    yield _direct_sum(kernels, weight_BN)


def fit(sketch_ND: F64, full_NN: F64, weight_BN: F64) -> Fit:
    """Compare K of a sketch with K of the exact kernel that it estimates."""
    estimate_B, true_B = _norms(sketch_ND, weight_BN), measures.subset_norms(weight_BN, full_NN)
    error, ranks = measures.relative_error(estimate_B, true_B), rank_agreement(estimate_B, true_B)
    return Fit(error, ranks, sketch_ND.shape[1])


def _norms(sketch_ND: F64, weight_BN: F64) -> F64:
    return np.asarray(((weight_BN @ sketch_ND) ** 2).sum(axis=1))


def _against_exact(kernels: Kernels, half: Half, sketch_ND: F64, full_NN: F64, weight_BN: F64) -> Check:
    measured = fit(sketch_ND, full_NN, weight_BN)
    true_B = measures.subset_norms(weight_BN, full_NN)
    apart = float(true_B.std() / true_B.mean()) if true_B.any() else 0.0
    numbers = {"error": measured.error, "ranks": measured.ranks, "width": float(measured.width), "apart": apart}
    value = f"K {measured.error:.1%} off, ranks agree {measured.ranks:+.2f} (width {measured.width}; K of subsets "
    value += f"varies by {apart:.1%})"
    if half == "product":
        pooled = rank_agreement(
            _norms(sketch_ND, weight_BN), measures.subset_norms(weight_BN, kernels.pooled_product_NN)
        )
        value += f"; {pooled:+.2f} with the product of pooled rows, which it does not estimate"
        numbers["pooled_ranks"] = pooled
    wide = None if measured.good else healthy_width(kernels, half, full_NN, weight_BN, measured.width)
    if wide is not None:
        numbers |= {"healthy_width": float(wide.width), "healthy_ranks": wide.ranks}
    healthy = (
        f"at most {measured.allowed:.0%} off, twice the error of a Gaussian sketch, and ranks {MIN_RANK_CORRELATION} "
        "or more"
    )
    return judge_check(f"{half} sketch", value, healthy, measured.good, _wider(half, wide), numbers)


def healthy_width(kernels: Kernels, half: Half, full_NN: F64, weight_BN: F64, width: int) -> Fit | None:
    """Return the fit of the first doubled width that is healthy; None if there is none up to MAX_WIDTH."""
    exact = kernels.features.hidden_NH.shape[1] if half == "hidden" else MAX_WIDTH
    while width < min(exact, MAX_WIDTH):
        width = min(2 * width, exact)
        wide = fit(kernels.sketch(half, width), full_NN, weight_BN)
        if wide.good:
            return wide
    return None


def _wider(half: str, wide: Fit | None) -> str:
    named = f"{half}.*" if half == "product" else f"{half}.* and joint.*"
    drop = f"drop {named} from the protocol"
    if wide is None:
        return f"{drop}: no width up to {MAX_WIDTH} distinguishes these subsets"
    measured = f"on this sample ranks {wide.ranks:+.2f}, {wide.error:.1%} off"
    return f"build with features.{half}_width: {wide.width} ({measured}), or {drop}"


def _for_product(kernels: Kernels, half: str, sketches: Mapping[str, F64], weight_BN: F64) -> Check:
    name = f"{half} sketch for product"
    parts = [sketches[part] for part in (("hidden", "residual") if half == "joint" else (half,))]
    if half == "joint":
        parts = [part / (sqrt(float((part**2).sum(axis=1).mean())) or 1.0) for part in parts]
    estimate_B = _norms(np.concatenate(parts, axis=1), weight_BN)
    full_NN = {"hidden": kernels.hidden_NN, "residual": kernels.residual_NN, "joint": kernels.joint_NN}[half]
    true_B = measures.subset_norms(weight_BN, kernels.positions.product_NN)
    pooled_B = measures.subset_norms(weight_BN, kernels.pooled_product_NN)
    numbers = {
        "ranks": rank_agreement(estimate_B, true_B),
        "pooled_ranks": rank_agreement(estimate_B, pooled_B),
        "error": measures.scaled_error(estimate_B, true_B),
        "full_ranks": rank_agreement(measures.subset_norms(weight_BN, full_NN), true_B),
    }
    advice = "too narrow for its features: build with the widths that the sketch checks suggest"
    if not numbers["full_ranks"] >= MIN_RANK_CORRELATION:
        advice = f"no width helps, {half}.* is another kernel: use product.*, wide enough, or no geometry"
    return judge_check(
        name,
        f"ranks agree {numbers['ranks']:+.2f} with the product of positions, {numbers['pooled_ranks']:+.2f} with that "
        f"of pooled rows, {numbers['error']:.1%} off once scaled; all its features agree {numbers['full_ranks']:+.2f}",
        HEALTHY_PRODUCT,
        numbers["ranks"] >= MIN_RANK_CORRELATION,
        advice,
        numbers,
    )


def _direct_sum(kernels: Kernels, weight_BN: F64) -> Check:
    direct_B = measures.subset_norms(weight_BN, kernels.joint_NN)
    product_B = measures.subset_norms(weight_BN, kernels.pooled_product_NN)
    ranks, error = rank_agreement(direct_B, product_B), measures.scaled_error(direct_B, product_B)
    return judge_check(
        "direct sum for product",
        f"of pooled rows with all their features ranks agree {ranks:+.2f}, {error:.1%} off once scaled",
        HEALTHY_DIRECT,
        ranks >= MIN_RANK_CORRELATION,
        "joint.* does not approximate the product for these rows: use product.*, wide enough, or no geometry",
        {"ranks": ranks, "error": error},
    )
