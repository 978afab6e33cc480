"""Checks of how accurately stored sketches estimate the geometry of subsets, on a sample of the rows.

The geometry of a subset with weights w is ``K_raw = sum_ij w_i w_j k_ij``, with an inner product k_ij of rows i and j.
A sketch estimates it by ``|sum_i w_i phi_i|^2`` (`subset_sums`). It is compared with exact kernels: matrices of k_ij of
the sampled rows. h~ are whitened hidden states, xi residuals (predicted probabilities minus the one-hot vector of the
next token), D a diagonal matrix that weights rare tokens up, and (x) is the outer product:

    kernel             k_ij                                                    estimated by the sketch
    hidden             <h~_i, h~_j>, averages over positions                   hidden
    residual           <D^1/2 xi_i, D^1/2 xi_j>, averages over positions       residual
    product            <G_i, G_j>, G_i the average of h~_t (x) D^1/2 xi_t      product
    pooled product     hidden times residual, elementwise                      none; approximates product in the paper
    joint              hidden + residual, each of mean squared norm 1          both side by side

`product` is the inner product of preconditioned gradients of the output layer. A sketch is healthy if it estimates its
own kernel, and useful if it ranks subsets as `product` does.

Start with `check_accuracy`. Sketches can be recomputed at any width, which gives the width that would be sufficient.
Shape letters: N rows of the sample, P their positions, B subsets, H hidden width, V vocabulary, D sketch width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import sqrt
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.inspect.health_metrics import Check, judge_check, rank_agreement, unmeasured_check
from grasp.inspect.rescoring import SampleFeatures
from grasp.kernels.kernel import CorpusMoments, make_kernels
from grasp.kernels.whitening import Whitener, second_moments
from grasp.paper import sketch_metrics as metrics
from grasp.settings import FeatureSettings

StoredSketch = Literal["hidden", "residual", "product"]

MIN_RANK_CORRELATION = 0.8  # rank correlation from which a sketch is healthy
MAX_WIDTH = 8192  # largest width that is tried
# The setting of `features` that is the width of a sketch.
WIDTH_SETTINGS = {"hidden": "hidden_width", "residual": "residual_width", "product": "residual_width"}
STORED: tuple[StoredSketch, ...] = ("hidden", "residual", "product")
PROXIES = ("hidden", "residual", "joint")  # sketches of other kernels, used in place of the product
HEALTHY_SKETCH = (
    f"error at most twice that of a Gaussian sketch of this width, and ranks {MIN_RANK_CORRELATION} or more"
)
HEALTHY_PRODUCT = (
    f"ranks {MIN_RANK_CORRELATION} or more with the product of positions: K then ranks subsets as their updates do"
)
HEALTHY_DIRECT = f"ranks {MIN_RANK_CORRELATION} or more"
# names of all checks of this module, with what is healthy
CHECKS = {
    **{f"{name} sketch": HEALTHY_SKETCH for name in STORED},
    **{f"{name} sketch for product": HEALTHY_PRODUCT for name in PROXIES},
    "direct sum for product": HEALTHY_DIRECT,
}


@dataclass(frozen=True, slots=True)
class PositionKernels:
    """Quantities that require the hidden states and residuals of all positions of a row.

    They are whitened and scaled by the moments of positions, as in the kernel `output_layer`. An artifact for the
    protocol of the paper has moments of averages only, which are used instead.

    Attributes:
        product_NN: the product kernel.
        gradient_NN: the same with hidden states that are not centred: inner products of gradients of the output layer.
        summary_share: share of |G_i|^2 that the outer product of the row's averages retains: their mean squared cosine.
            The averages are those of the artifact, over `features.summary_positions`.
        same_positions_share: the same for averages over the positions of G_i.
    """

    product_NN: F64
    gradient_NN: F64
    summary_share: float
    same_positions_share: float


@dataclass(frozen=True)
class ExactKernels:
    """Exact kernels of the sampled rows, (N, N) float64 each, whitened and scaled as in the build."""

    settings: FeatureSettings
    features: SampleFeatures
    moments: Mapping[str, NDArray[Any]]  # as stored in the artifact
    hidden_NN: F64
    residual_NN: F64
    positions: PositionKernels

    @classmethod
    def from_artifact(cls, artifact: ArtifactReader, features: SampleFeatures) -> Self:
        """Compute the kernels of sampled rows of an artifact."""
        settings = FeatureSettings.model_validate(artifact.feature_settings)
        # "summary" are moments of averages over positions, "hidden" of single positions; one of them may be missing
        has_summary, has_positions = (f"{prefix}.count" in artifact.moments for prefix in ("summary", "hidden"))
        pooled = second_moments(artifact.moments, "summary" if has_summary else "hidden")
        positions = second_moments(artifact.moments, "hidden" if has_positions else "summary")
        whitener = Whitener.from_settings(pooled, settings)
        return cls(
            settings,
            features,
            artifact.moments,
            *metrics.gram_matrices(whitener.whiten(features.hidden_NH), _scaled(whitener, features.residual_NV)),
            _position_kernels(Whitener.from_settings(positions, settings), features),
        )

    @property
    def pooled_product_NN(self) -> F64:  # noqa: N802 - a shape suffix
        """Product kernel of the pooled summaries. Source: prop:local-direct-sum."""
        return self.hidden_NN * self.residual_NN

    @property
    def joint_NN(self) -> F64:  # noqa: N802 - a shape suffix
        """Direct-sum kernel of the pooled summaries. Source: eq:feature-sketch."""
        return metrics.normalized_gram(self.hidden_NN) + metrics.normalized_gram(self.residual_NN)

    def full_kernel(self, sketch_name: StoredSketch) -> F64:
        """Return the exact inner products that a sketch estimates, (N, N)."""
        if sketch_name == "product":
            return self.positions.product_NN
        return self.hidden_NN if sketch_name == "hidden" else self.residual_NN

    def sketch(self, sketch_name: StoredSketch, width: int) -> F64:
        """Return the sketch that a build with this width would compute of the sample, before it is scaled, (N, D)."""
        batch, name = self.features.batch, f"{sketch_name}_sketch"
        settings = self.settings.model_copy(update={WIDTH_SETTINGS[sketch_name]: width})
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
    """Return D^1/2 xi of every row, with the preconditioner D of the residual."""
    return csr_array(residual_NV.astype(np.float64) @ diags_array(np.sqrt(whitener.precondition_V)))


def _position_kernels(whitener: Whitener, features: SampleFeatures) -> PositionKernels:
    batch, n_rows = features.batch, features.batch.n_rows
    hidden_PH = whitener.whiten(batch.hidden_PH.float().cpu().numpy())
    residual_PV, row_P = _scaled(whitener, features.residual_PV), batch.row_P.cpu().numpy()
    product_NN = metrics.position_gram(hidden_PH, residual_PV, row_P, n_rows)
    offset_H = whitener.mean_H @ whitener.map_HH  # the whitened mean, which centring subtracted
    mean_NP = metrics.row_means(row_P, n_rows)
    stored = whitener.whiten(features.hidden_NH), _scaled(whitener, features.residual_NV)
    same = mean_NP @ hidden_PH, csr_array(mean_NP @ residual_PV)
    return PositionKernels(
        product_NN=product_NN,
        gradient_NN=metrics.uncentred_gram(product_NN, offset_H, hidden_PH, residual_PV, row_P),
        summary_share=metrics.rank_one_share(hidden_PH, residual_PV, row_P, *stored),
        same_positions_share=metrics.rank_one_share(hidden_PH, residual_PV, row_P, *same),
    )


@dataclass(frozen=True, slots=True)
class SketchAgreement:
    """Agreement over subsets between K_raw of a sketch and K_raw of the exact kernel."""

    error: float  # median relative error
    ranks: float  # rank correlation
    width: int
    variation: float  # coefficient of variation of the exact K_raw

    @property
    def allowed(self) -> float:
        """Twice the relative standard deviation of a squared norm that a Gaussian sketch of this width estimates."""
        return 2 * sqrt(2 / self.width)

    @property
    def is_healthy(self) -> bool:
        return self.error <= self.allowed and self.ranks >= MIN_RANK_CORRELATION


def check_accuracy(kernels: ExactKernels, sketches: Mapping[str, F64], weight_BN: F64) -> Iterator[Check]:
    """Yield all checks of the sketches of an artifact.

    Args:
        kernels: exact kernels of the sampled rows.
        sketches: (N, D) by name, without gains; product only if it was built.
        weight_BN: row weights of the subsets.
    """
    for name in STORED:
        if name not in sketches:
            reason = f"not built: features.kernels does not contain {name}_sketch"
            yield unmeasured_check(f"{name} sketch", HEALTHY_SKETCH, reason)
        else:
            yield _check_full_kernel(kernels, name, sketches[name], kernels.full_kernel(name), weight_BN)
    for proxy in PROXIES:
        yield _check_product_kernel(kernels, proxy, sketches, weight_BN)
    yield _check_direct_sum(kernels, weight_BN)


def measure_agreement(sketch_ND: F64, full_NN: F64, weight_BN: F64) -> SketchAgreement:
    """Compare K_raw of B subsets by a sketch with K_raw by the exact kernel that it estimates."""
    estimate_B, true_B = _raw(sketch_ND, weight_BN), metrics.raw_geometry(weight_BN, full_NN)
    return SketchAgreement(
        error=metrics.relative_error(estimate_B, true_B),
        ranks=rank_agreement(estimate_B, true_B),
        width=sketch_ND.shape[1],
        variation=float(true_B.std() / true_B.mean()) if true_B.any() else 0.0,
    )


def _raw(sketch_ND: F64, weight_BN: F64) -> F64:
    """Return K_raw of B subsets from a sketch, (B,)."""
    return np.asarray(((weight_BN @ sketch_ND) ** 2).sum(axis=1))


def _check_full_kernel(
    kernels: ExactKernels, sketch_name: StoredSketch, sketch_ND: F64, full_NN: F64, weight_BN: F64
) -> Check:
    """Check a sketch against its full kernel; if it fails, look for a sufficient width."""
    measured = measure_agreement(sketch_ND, full_NN, weight_BN)
    numbers: dict[str, float] = asdict(measured)
    value = f"K {measured.error:.1%} off, ranks agree {measured.ranks:+.2f} (width {measured.width}; K of subsets "
    value += f"varies by {measured.variation:.1%})"
    if sketch_name == "product":
        pooled = rank_agreement(_raw(sketch_ND, weight_BN), metrics.raw_geometry(weight_BN, kernels.pooled_product_NN))
        value += f"; {pooled:+.2f} with the product of pooled rows, which it does not estimate"
        numbers["pooled_ranks"] = pooled
    wider = None if measured.is_healthy else healthy_width(kernels, sketch_name, full_NN, weight_BN, measured.width)
    if wider is not None:
        numbers |= {"healthy_width": float(wider.width), "healthy_ranks": wider.ranks}
    healthy = (
        f"at most {measured.allowed:.0%} off, twice the error of a Gaussian sketch, and ranks {MIN_RANK_CORRELATION} "
        "or more"
    )
    advice = _width_advice(sketch_name, wider)
    return judge_check(f"{sketch_name} sketch", value, healthy, measured.is_healthy, advice, numbers)


def healthy_width(
    kernels: ExactKernels, sketch_name: StoredSketch, full_NN: F64, weight_BN: F64, width: int
) -> SketchAgreement | None:
    """Double the width until the sketch is healthy, and return its agreement; None if no width is, up to
    MAX_WIDTH or to the width of the hidden states."""
    # at the width of the hidden states, their sketch is exact
    max_width = min(kernels.features.hidden_NH.shape[1], MAX_WIDTH) if sketch_name == "hidden" else MAX_WIDTH
    while width < max_width:
        width = min(2 * width, max_width)
        wider = measure_agreement(kernels.sketch(sketch_name, width), full_NN, weight_BN)
        if wider.is_healthy:
            return wider
    return None


def _width_advice(sketch_name: str, wider: SketchAgreement | None) -> str:
    components = f"{sketch_name}.*" if sketch_name == "product" else f"{sketch_name}.* and joint.*"
    drop = f"drop {components} from the protocol"
    if wider is None:
        return f"{drop}: no width up to {MAX_WIDTH} distinguishes these subsets"
    measured = f"on this sample ranks {wider.ranks:+.2f}, {wider.error:.1%} off"
    return f"build with features.{WIDTH_SETTINGS[sketch_name]}: {wider.width} ({measured}), or {drop}"


def _check_product_kernel(kernels: ExactKernels, proxy: str, sketches: Mapping[str, F64], weight_BN: F64) -> Check:
    """Check whether a hidden, residual or joint sketch ranks subsets as the product kernel does."""
    stored = [sketches[name] for name in (("hidden", "residual") if proxy == "joint" else (proxy,))]
    if proxy == "joint":  # the gain of each sketch, which makes its mean squared norm 1
        stored = [sketch_ND / (sqrt(float((sketch_ND**2).sum(axis=1).mean())) or 1.0) for sketch_ND in stored]
    estimate_B = _raw(np.concatenate(stored, axis=1), weight_BN)
    full_NN = {"hidden": kernels.hidden_NN, "residual": kernels.residual_NN, "joint": kernels.joint_NN}[proxy]
    true_B = metrics.raw_geometry(weight_BN, kernels.positions.product_NN)
    pooled_B = metrics.raw_geometry(weight_BN, kernels.pooled_product_NN)
    numbers = {
        "ranks": rank_agreement(estimate_B, true_B),
        "pooled_ranks": rank_agreement(estimate_B, pooled_B),
        "error": metrics.scaled_error(estimate_B, true_B),
        "full_ranks": rank_agreement(metrics.raw_geometry(weight_BN, full_NN), true_B),
    }
    advice = "too narrow for its features: build with the widths that the sketch checks suggest"
    if not numbers["full_ranks"] >= MIN_RANK_CORRELATION:  # also if it is NaN, as of subsets with the same K
        advice = f"no width helps, {proxy}.* is another kernel: use product.*, wide enough, or no geometry"
    return judge_check(
        f"{proxy} sketch for product",
        f"ranks agree {numbers['ranks']:+.2f} with the product of positions, {numbers['pooled_ranks']:+.2f} with that "
        f"of pooled rows, {numbers['error']:.1%} off once scaled; all its features agree {numbers['full_ranks']:+.2f}",
        HEALTHY_PRODUCT,
        numbers["ranks"] >= MIN_RANK_CORRELATION,
        advice,
        numbers,
    )


def _check_direct_sum(kernels: ExactKernels, weight_BN: F64) -> Check:
    """Check whether the direct sum of the full kernels ranks subsets as their product (prop:local-direct-sum)."""
    direct_B = metrics.raw_geometry(weight_BN, kernels.joint_NN)
    product_B = metrics.raw_geometry(weight_BN, kernels.pooled_product_NN)
    ranks, error = rank_agreement(direct_B, product_B), metrics.scaled_error(direct_B, product_B)
    return judge_check(
        "direct sum for product",
        f"of pooled rows with all their features ranks agree {ranks:+.2f}, {error:.1%} off once scaled",
        HEALTHY_DIRECT,
        ranks >= MIN_RANK_CORRELATION,
        "joint.* does not approximate the product for these rows: use product.*, wide enough, or no geometry",
        {"ranks": ranks, "error": error},
    )
