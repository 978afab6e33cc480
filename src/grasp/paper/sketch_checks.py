"""Health checks of sketches and of the pooled kernel for `grasp info --check`, on a sample of the rows.

Start with `check_sketches`. The measurements are in `sketch_metrics` and `sketch_accuracy`.

A *sketch* phi_i is a random projection of a feature vector of row i: of its hidden state (`hidden`), of its residual
(`residual`), of its gradient of the output layer (`product`), or of the hidden state and the residual side by side
(`joint`, the direct sum). The geometry of a subset with weights w is ``K_raw = |sum_i w_i phi_i|^2``; it is the sum of
K_self, its terms with i = j, and K_pair. K_cent is K_raw with phi centred over the corpus. A protocol adds these
*components*, e.g. ``joint.pair``, to the predicted utility with weights omega. docs/paper_map.md maps them to the
equations of the paper.

With omega < 0 the predicted gain of a row falls as rows are added, unless the row's phi opposes the sum of the others.
So selection by a greedy algorithm has a guarantee only if few pairs of rows have a negative inner product.

Shape letters: N rows of the sample, B subsets, E units, D sketch width.
"""

from collections.abc import Iterator
from dataclasses import asdict
from math import isnan

import numpy as np

from grasp.arrays import F64
from grasp.errors import GraspError
from grasp.inspect.health import SampledArtifact
from grasp.inspect.health_metrics import Check, judge_check, rank_agreement, unmeasured_check
from grasp.paper import sketch_metrics as metrics
from grasp.paper.protocol import InteractionProtocol
from grasp.paper.sketch_accuracy import CHECKS, ExactKernels, check_accuracy
from grasp.paper.subset_sums import required_sketches
from grasp.predict.scoring_rule import ScoringProtocol, kernel_weights

SKETCHES = ("hidden", "residual", "product")
IDENTITY_TOLERANCE = 1e-9  # error of kernels of unit vectors in float64: a larger one is not rounding
MIN_SUMMARY_SHARE = 0.5
MIN_RANKS = 0.5
MAX_MEAN_GAP = 0.1
MAX_NEGATIVE_SHARE = 0.05
HEALTHY_SUMMARY = f"{MIN_SUMMARY_SHARE} or more: the summary retains more of the gradient than it loses"
HEALTHY_ALIGNMENT = (
    f"at most {MAX_NEGATIVE_SHARE:.0%} of the sum of absolute inner products: gains then diminish as rows are added "
    "(nearly submodular)"
)


def check_sketches(sample: SampledArtifact, protocol: ScoringProtocol) -> Iterator[Check]:
    """Yield checks of the pooled kernel if the protocol uses it, and of sketches if it has components."""
    artifact, features = sample.artifact, sample.features
    resolved = protocol.resolved_for(artifact)
    # if the model cannot be run on the sample, `features` is the error; checks that need them report its text
    kernels = features if isinstance(features, GraspError) else ExactKernels.from_artifact(artifact, features)
    if "pooled" in kernel_weights(resolved):
        yield from _check_pooled(sample, kernels)
    if isinstance(resolved, InteractionProtocol) and resolved.components:
        yield from _check_geometry(sample, kernels, resolved)


def _sketch(sample: SampledArtifact, sketch_name: str) -> F64:
    """Return a sketch as stored: scaled by a gain, so that its mean squared norm over the corpus is 1, (N, D)."""
    return sample.array(f"{sketch_name}_sketch")


def _stored_sketches(sample: SampledArtifact) -> tuple[str, ...]:
    return tuple(name for name in SKETCHES if f"{name}_sketch" in sample.artifact.array_names)


# ------------------------------------------------------------------------------------------------------ pooled kernel


def _check_pooled(sample: SampledArtifact, kernels: ExactKernels | GraspError) -> Iterator[Check]:
    """Check what is lost by averaging hidden states and residuals over positions before taking their product."""
    if isinstance(kernels, GraspError):
        yield unmeasured_check("pooled summaries", HEALTHY_SUMMARY, str(kernels))
    else:
        yield _check_summary(kernels, sample.weight_BN)
    if {"pooled", "output_layer"} <= set(sample.artifact.kernels):
        yield _compare_kernels(sample)


def _check_summary(kernels: ExactKernels, weight_BN: F64) -> Check:
    """Check how much of the gradients of the output layer their pooled summaries retain."""
    positions, pooling = kernels.positions, kernels.settings.row_positions[-1]
    pooled_B, product_B = (
        metrics.raw_geometry(weight_BN, gram_NN) for gram_NN in (kernels.pooled_product_NN, positions.product_NN)
    )
    ranks = rank_agreement(pooled_B, product_B)
    return judge_check(
        name="pooled summaries",
        measured=f"{positions.summary_share:.2f} of the squared norm of a row's output-layer gradient is in its "
        f"summary over {pooling}, {positions.same_positions_share:.2f} in a summary over the "
        f"positions of the gradient; rank correlation of K_raw over subsets {ranks:+.2f}",
        healthy=HEALTHY_SUMMARY,
        is_healthy=positions.summary_share >= MIN_SUMMARY_SHARE,
        advice="rank by the kernel output_layer (without --rule paper), and take geometry, if any, from product.*; the "
        "pooled kernel has lost most of the gradient",
        numbers={"share": positions.summary_share, "same_share": positions.same_positions_share, "ranks": ranks},
    )


def _compare_kernels(sample: SampledArtifact) -> Check:
    """Check whether the pooled kernel ranks rows as the kernel over all positions does."""
    pooled_NE, output_layer_NE = (sample.array(f"relevance_{kernel}") for kernel in ("pooled", "output_layer"))
    rho_E = [rank_agreement(a, b) for a, b in zip(pooled_NE.T, output_layer_NE.T, strict=True)]
    rho = float(np.nanmean(rho_E)) if not all(map(isnan, rho_E)) else float("nan")
    return judge_check(
        name="pooled and output_layer",
        measured=f"rank correlation of their relevance over rows {rho:+.2f}, mean over units",
        healthy=f"{MIN_RANKS} or more",
        is_healthy=rho >= MIN_RANKS,
        advice="the kernels rank rows differently: prefer output_layer, or let `grasp calibrate` select",
        numbers={"ranks": rho},
    )


# ----------------------------------------------------------------------------------------------------------- sketches


def _check_geometry(
    sample: SampledArtifact, kernels: ExactKernels | GraspError, protocol: InteractionProtocol
) -> Iterator[Check]:
    """Check stored sketches against full features, and properties of the stored sketches."""
    yield from _check_opposed_sketches(sample, protocol)
    if isinstance(kernels, GraspError):
        yield from (unmeasured_check(name, healthy, str(kernels)) for name, healthy in CHECKS.items())
        yield unmeasured_check("opposed gradients", HEALTHY_ALIGNMENT, str(kernels))
    else:
        yield from check_accuracy(kernels, _sketches_without_gain(sample), sample.weight_BN)
        yield _check_opposed_gradients(metrics.negative_pairs(kernels.positions.gradient_NN))
    yield _check_direct_sum_bound(metrics.direct_sum_gap(_sketch(sample, "hidden"), _sketch(sample, "residual")))
    for name in _stored_sketches(sample):
        yield _check_effective_rank(f"{name}_sketch", _sketch(sample, name))


def _sketches_without_gain(sample: SampledArtifact) -> dict[str, F64]:
    """Return stored sketches in the units of the features that they project."""
    arrays = sample.artifact.manifest.arrays
    gain_by_name = {name: float(arrays[f"{name}_sketch"].gain) or 1.0 for name in _stored_sketches(sample)}
    return {name: _sketch(sample, name) / gain for name, gain in gain_by_name.items()}


def _check_opposed_gradients(negative: metrics.NegativePairs) -> Check:
    return judge_check(
        name="opposed gradients",
        measured=f"{negative.pairs:.0%} of pairs of output-layer gradients, not centred, have a negative inner "
        f"product, {negative.magnitude:.0%} of the sum of absolute inner products",
        healthy=HEALTHY_ALIGNMENT,
        is_healthy=negative.magnitude <= MAX_NEGATIVE_SHARE,
        advice="the gradients of these rows are not aligned: a penalty on the norm of their sum has no diminishing "
        "returns, with any sketch",
        numbers=asdict(negative),
    )


def _check_direct_sum_bound(gap: metrics.DirectSumGap) -> Check:
    """Check how far the direct-sum kernel is from the product kernel, and that the gap is what the paper derives."""
    share_of_bound = gap.largest / gap.bound if gap.bound else 1.0
    is_identity = gap.identity_error <= IDENTITY_TOLERANCE
    advice = "rows are too far apart for an informative bound: see `direct sum for product`"
    if not is_identity:
        advice = "the identity fails: the sketches contain nan or infinity, or this is a bug; please report it"
    return judge_check(
        name="direct-sum bound",
        measured=f"difference of the direct-sum and the product kernel {gap.mean:.2f} in the mean, {gap.largest:.2f} "
        f"at most, {share_of_bound:.0%} of the bound of {gap.bound:.2f}; the formula of the difference "
        f"{'holds' if is_identity else 'FAILS'}, to {gap.identity_error:.0e}",
        healthy=f"a mean of {MAX_MEAN_GAP} or less, between kernels in [-1, 1]: rows are close enough for the direct "
        "sum to approximate the product",
        is_healthy=is_identity and gap.mean <= MAX_MEAN_GAP,
        advice=advice,
        numbers=asdict(gap) | {"share_of_bound": share_of_bound},
    )


def _check_effective_rank(name: str, sketch_ND: F64) -> Check:
    rank = metrics.effective_rank(sketch_ND)
    width = min(sketch_ND.shape[1], len(sketch_ND) - 1)  # largest rank of a centred sketch of N rows
    return judge_check(
        name=f"effective rank, {name.replace('_', ' ')}",
        measured=f"{rank:.1f} of {width}",
        healthy=f"{max(1, width // 8)} or more",
        is_healthy=rank >= width / 8,
        advice="a few directions dominate: lower features.tau (hidden), raise features.epsilon (residual), or use a "
        "narrower sketch; near-duplicate rows also cause this",
        numbers={"rank": rank, "width": float(width)},
    )


def _check_opposed_sketches(sample: SampledArtifact, protocol: InteractionProtocol) -> Iterator[Check]:
    """Check the sketches of each component for pairs of rows with a negative inner product.

    A sum of kernels without such pairs has none either, so components are checked one by one. For subsets of one size
    K_raw, K_pair and K_cent differ by linear terms only, and K_self is linear.
    """
    name = "pairs that oppose each other"
    nonlinear = {
        component: omega
        for component, omega in protocol.components.items()
        if omega and not component.endswith(".self")
    }
    if not nonlinear:
        yield judge_check(
            name=name,
            measured=f"protocol {protocol.name} has no pairwise terms: gains are additive",
            healthy=HEALTHY_ALIGNMENT,
            is_healthy=True,
            advice="",
            numbers=asdict(metrics.NegativePairs(pairs=0.0, magnitude=0.0)),
        )
    for component, omega in nonlinear.items():
        required = required_sketches({component: omega})
        missing = sorted(set(required) - set(_stored_sketches(sample)))
        if missing:
            reason = f"the artifact has no {' and '.join(missing)} sketch"
            yield unmeasured_check(f"{name}, {component}", HEALTHY_ALIGNMENT, reason)
            continue
        sketch_ND = np.concatenate([_sketch(sample, sketch) for sketch in required], axis=1)
        negative = metrics.negative_pairs(sketch_ND @ sketch_ND.T)
        yield judge_check(
            name=f"{name}, {component}",
            measured=f"{negative.pairs:.0%} of pairs of sketches have a negative inner product, "
            f"{negative.magnitude:.0%} of the sum of absolute inner products (weight {omega:+g})",
            healthy=HEALTHY_ALIGNMENT,
            is_healthy=omega < 0 and negative.magnitude <= MAX_NEGATIVE_SHARE,
            advice=_advice_on_opposed_sketches(component, omega),
            numbers=asdict(negative) | {"omega": omega},
        )


def _advice_on_opposed_sketches(component: str, omega: float) -> str:
    if omega > 0:
        return "the weight is positive, so gains grow and `grasp select` has no bound; use a negative weight"
    advice = "greedy selection with this protocol has no guarantee: see the bound that `grasp select` prints; "
    if component.startswith(("hidden", "joint")):
        return advice + "hidden states are centred, so about half of the pairs have negative products for any rows"
    return advice + "in a narrow sketch the sign of small inner products is random: a wider one may be aligned"
