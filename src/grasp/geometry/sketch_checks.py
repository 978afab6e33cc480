"""Health checks of sketches and of the pooled kernel for `grasp info --check`, on a sample of the rows.

Start with `check_sketches`. The measurements are in `sketch_metrics` and `sketch_accuracy`.

Shape letters: N rows of the sample, B subsets, D sketch width.
"""

from collections.abc import Iterator
from dataclasses import asdict
from math import isnan

import numpy as np

from grasp.arrays import F64
from grasp.errors import GraspError
from grasp.geometry import sketch_metrics as metrics
from grasp.geometry.geometry_rule import InteractionProtocol
from grasp.geometry.sketch_accuracy import CHECKS, ExactKernels, check_accuracy
from grasp.geometry.subset_sums import required_sketches
from grasp.inspect.health import Subject
from grasp.inspect.health_metrics import Check, judge_check, rank_agreement, unmeasured_check
from grasp.predict.scoring_rule import ScoringProtocol, kernel_weights

SKETCHES = ("hidden", "residual", "product")
IDENTITY_TOLERANCE = 1e-9  # error of kernels of unit vectors in float64: a larger one is not rounding
HEALTHY_SUMMARY = "0.5 or more: the summary keeps more of the gradient than it loses"
HEALTHY_ALIGNMENT = "at most 5% of the mass negative: gains then diminish as rows are added (nearly submodular)"


def check_sketches(subject: Subject, protocol: ScoringProtocol) -> Iterator[Check]:
    """Yield checks of the pooled kernel if the protocol uses it, and of sketches if it has components."""
    artifact, features = subject.artifact, subject.features
    resolved = protocol.resolved_for(artifact.array_names, artifact.feature_settings)
    kernels = features if isinstance(features, GraspError) else ExactKernels.from_artifact(artifact, features)
    if "pooled" in kernel_weights(resolved):
        yield from _check_pooled(subject, kernels)
    if isinstance(resolved, InteractionProtocol) and resolved.components:
        yield from _check_geometry(subject, kernels, resolved)


def _sketch(subject: Subject, sketch_name: str) -> F64:
    """Return a sketch as stored, with the gain that makes its mean squared norm over the corpus 1."""
    return subject.array(f"{sketch_name}_sketch")


def _stored_sketches(subject: Subject) -> tuple[str, ...]:
    return tuple(name for name in SKETCHES if f"{name}_sketch" in subject.artifact.array_names)


def _check_pooled(subject: Subject, kernels: ExactKernels | GraspError) -> Iterator[Check]:
    """Check what is lost by pooling positions before the product."""
    if isinstance(kernels, GraspError):
        yield unmeasured_check("pooled for tokens", HEALTHY_SUMMARY, str(kernels))
    else:
        yield _check_summary(kernels, subject.weight_BN)
    if {"pooled", "output_layer"} <= set(subject.artifact.kernels):
        yield _compare_kernels(subject)


def _check_summary(kernels: ExactKernels, weight_BN: F64) -> Check:
    """Check how much of the gradients of the output layer their pooled summaries keep."""
    positions, settings = kernels.positions, kernels.settings
    pooled_B, product_B = (
        metrics.raw_geometry(weight_BN, gram_NN) for gram_NN in (kernels.pooled_product_NN, positions.product_NN)
    )
    ranks = rank_agreement(pooled_B, product_B)
    return judge_check(
        "pooled for tokens",
        f"{positions.summary_share:.2f} of the output gradient's square is in the summary of "
        f"{settings.row_positions[-1]}, {positions.same_positions_share:.2f} in one of the gradient's own positions "
        f"(mean squared cosine, whitened and scaled); ranks of K agree {ranks:+.2f}",
        HEALTHY_SUMMARY,
        positions.summary_share >= 0.5,
        "rank by the kernel output_layer (without --rule paper), and take geometry, if any, from product.*; the "
        "pooled kernel has lost most of the gradient",
        {"share": positions.summary_share, "same_share": positions.same_positions_share, "ranks": ranks},
    )


def _compare_kernels(subject: Subject) -> Check:
    """Check whether the pooled kernel ranks rows as the kernel of all positions does."""
    pooled_NE, output_layer_NE = (subject.array(f"relevance_{kernel}") for kernel in ("pooled", "output_layer"))
    rho_E = [rank_agreement(a, b) for a, b in zip(pooled_NE.T, output_layer_NE.T, strict=True)]
    rho = float(np.nanmean(rho_E)) if not all(map(isnan, rho_E)) else float("nan")
    return judge_check(
        "pooled against token relevance",
        f"ranks of rows agree {rho:+.2f}, mean over units",
        "0.5 or more",
        rho >= 0.5,
        "the kernels rank rows differently: prefer output_layer, or let `grasp calibrate` select",
        {"ranks": rho},
    )


def _check_geometry(
    subject: Subject, kernels: ExactKernels | GraspError, protocol: InteractionProtocol
) -> Iterator[Check]:
    """Check stored sketches against full features, and properties of the stored sketches."""
    yield from _check_complements(subject, protocol)
    if isinstance(kernels, GraspError):
        yield from (unmeasured_check(name, healthy, str(kernels)) for name, healthy in CHECKS.items())
    else:
        arrays = subject.artifact.manifest.arrays
        gains = {name: float(arrays[f"{name}_sketch"].gain) or 1.0 for name in _stored_sketches(subject)}
        sketches = {name: _sketch(subject, name) / gain for name, gain in gains.items()}
        yield from check_accuracy(kernels, sketches, subject.weight_BN)
    if isinstance(kernels, GraspError):
        yield unmeasured_check("opposed gradients", HEALTHY_ALIGNMENT, str(kernels))
    else:
        yield _check_opposed_gradients(*metrics.negative_pairs(kernels.positions.gradient_NN))
    yield _check_direct_sum_bound(metrics.direct_sum_bound(_sketch(subject, "hidden"), _sketch(subject, "residual")))
    for name in _stored_sketches(subject):
        yield _check_effective_rank(f"{name}_sketch", _sketch(subject, name))


def _check_opposed_gradients(pairs: float, mass: float) -> Check:
    return judge_check(
        "opposed gradients",
        f"{pairs:.0%} of pairs of output gradients, not centred, have a negative inner product, {mass:.0%} of the mass",
        HEALTHY_ALIGNMENT,
        mass <= 0.05,
        "these rows are not an aligned pool: a penalty on the norm of their update has no diminishing returns, "
        "with any sketch",
        {"pairs": pairs, "mass": mass},
    )


def _check_direct_sum_bound(bound: metrics.DirectSumBound) -> Check:
    tight = bound.largest / bound.bound if bound.bound else 1.0
    is_identity = bound.off <= IDENTITY_TOLERANCE
    advice = "rows are too far apart for an informative bound: see `direct sum for product`"
    if not is_identity:
        advice = "the identity fails: the sketches contain nan or infinity, or this is a bug; please report it"
    return judge_check(
        "direct-sum bound",
        f"{'met' if is_identity else 'BROKEN'} (an identity, to {bound.off:.0e}: it checks the code); gap "
        f"{bound.mean:.2f} in the mean, {bound.largest:.2f} at most, {tight:.0%} of the bound of {bound.bound:.2f}",
        "a mean gap of 0.1 or less, between kernels in [-1, 1]: rows are close enough for the direct sum to "
        "approximate the product",
        is_identity and bound.mean <= 0.1,
        advice,
        asdict(bound) | {"tight": tight},
    )


def _check_effective_rank(name: str, sketch_ND: F64) -> Check:
    rank = metrics.effective_rank(sketch_ND)
    width = min(sketch_ND.shape[1], len(sketch_ND) - 1)
    return judge_check(
        f"effective rank, {name.replace('_', ' ')}",
        f"{rank:.1f} of {width}",
        f"{max(1, width // 8)} or more",
        rank >= width / 8,
        "a few directions dominate: lower features.tau (hidden), raise features.epsilon (residual), or use a narrower "
        "sketch; near-duplicate rows also cause this",
        {"rank": rank, "width": float(width)},
    )


def _check_complements(subject: Subject, protocol: InteractionProtocol) -> Iterator[Check]:
    """Check each component with curvature for pairs of rows with a negative inner product, which complement each other.

    A pool without such pairs is aligned: gains diminish. A sum of aligned kernels is aligned, so components are checked
    one by one. For subsets of one size, K_raw, K_pair and K_cent contribute ||sum phi_i||^2 of the sketches;
    K_self is linear.
    """
    name = "pairs that complement"
    curved = {
        component: omega
        for component, omega in protocol.components.items()
        if omega and not component.endswith(".self")
    }
    if not curved:
        value = f"protocol {protocol.name} has no pairwise terms: gains are additive"
        yield judge_check(name, value, HEALTHY_ALIGNMENT, True, "", {"pairs": 0.0, "mass": 0.0})
    for component, omega in curved.items():
        required = required_sketches({component: omega})
        missing = sorted(set(required) - set(_stored_sketches(subject)))
        if missing:
            reason = f"the artifact has no {' and '.join(missing)} sketch"
            yield unmeasured_check(f"{name}, {component}", HEALTHY_ALIGNMENT, reason)
            continue
        sketch_ND = np.concatenate([_sketch(subject, sketch) for sketch in required], axis=1)
        yield _judge_complements(component, omega, *metrics.negative_pairs(sketch_ND @ sketch_ND.T))


def _judge_complements(component: str, omega: float, pairs: float, mass: float) -> Check:
    advice = "greedy selection with this protocol has no guarantee: see the bound that `grasp select` prints"
    if component.startswith(("hidden", "joint")):
        advice += "; hidden states are centred, so about half of the pairs have negative products for any rows"
    else:
        advice += "; in a narrow sketch the sign of small inner products is random: a wider one may be aligned"
    if omega > 0:
        advice = "the weight is positive, so gains grow and `grasp select` has no bound; use a negative weight"
    return judge_check(
        f"pairs that complement, {component}",
        f"{pairs:.0%} of pairs of sketches have a negative inner product, {mass:.0%} of the mass (weight {omega:+g})",
        HEALTHY_ALIGNMENT,
        omega < 0 and mass <= 0.05,
        advice,
        {"pairs": pairs, "mass": mass, "omega": omega},
    )
