"""Health checks of sketches and of the pooled kernel, on a sample of the rows. Start with `check_sketches`.

Shape letters: N rows of the sample, B subsets, D sketch width.
"""

from collections.abc import Iterator
from dataclasses import asdict
from math import isnan

import numpy as np

from grasp.arrays import F64
from grasp.errors import GraspError
from grasp.geometry import sketch_measures as measures
from grasp.geometry.geometry_rule import InteractionProtocol
from grasp.geometry.sketched import NAMES, Kernels, of_sketches
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
    fitted = protocol.fitted(artifact.array_names, artifact.feature_settings)
    kernels = features if isinstance(features, GraspError) else Kernels.from_artifact(artifact, features)
    if "pooled" in kernel_weights(fitted):
        yield from _of_pooled(subject, kernels)
    if isinstance(fitted, InteractionProtocol) and fitted.components:
        yield from _of_geometry(subject, kernels, fitted)


def _sketch(subject: Subject, half: str) -> F64:
    """Return a sketch as stored, with the gain that normalizes the mean squared norm of the half to 1."""
    return subject.array(f"{half}_sketch")


def _halves(subject: Subject) -> tuple[str, ...]:
    return tuple(half for half in SKETCHES if f"{half}_sketch" in subject.artifact.array_names)


def _of_pooled(subject: Subject, kernels: Kernels | GraspError) -> Iterator[Check]:
    """Check what is lost by pooling positions before the product."""
    if isinstance(kernels, GraspError):
        yield unmeasured_check("pooled for tokens", HEALTHY_SUMMARY, str(kernels))
    else:
        yield _rank_one(kernels, subject.weight_BN)
    if {"pooled", "output_layer"} <= set(subject.artifact.kernels):
        yield _kernels(subject)


def _rank_one(kernels: Kernels, weight_BN: F64) -> Check:
    at, settings = kernels.positions, kernels.settings
    pooled_B, product_B = (measures.subset_norms(weight_BN, g) for g in (kernels.pooled_product_NN, at.product_NN))
    ranks = rank_agreement(pooled_B, product_B)
    return judge_check(
        "pooled for tokens",
        f"{at.kept_share:.2f} of the output gradient's square is in the summary of {settings.row_positions[-1]}, "
        f"{at.same_share:.2f} in one of the gradient's own positions (mean squared cosine, whitened and scaled); ranks "
        f"of K agree {ranks:+.2f}",
        HEALTHY_SUMMARY,
        at.kept_share >= 0.5,
        "rank by the kernel output_layer (without --rule paper), and take geometry, if any, from product.*; the "
        "pooled kernel has lost most of the gradient",
        {"share": at.kept_share, "same_share": at.same_share, "ranks": ranks},
    )


def _kernels(subject: Subject) -> Check:
    pooled_NE, token_NE = (subject.array(f"relevance_{kernel}") for kernel in ("pooled", "output_layer"))
    each = [rank_agreement(a, b) for a, b in zip(pooled_NE.T, token_NE.T, strict=True)]
    rho = float(np.nanmean(each)) if not all(map(isnan, each)) else float("nan")
    return judge_check(
        "pooled against token relevance",
        f"ranks of rows agree {rho:+.2f}, mean over units",
        "0.5 or more",
        rho >= 0.5,
        "the kernels rank rows differently: prefer output_layer, or let `grasp calibrate` select",
        {"ranks": rho},
    )


def _of_geometry(subject: Subject, kernels: Kernels | GraspError, protocol: InteractionProtocol) -> Iterator[Check]:
    """Check stored sketches against full features, and properties of the stored sketches."""
    yield from _complement(subject, protocol)
    if isinstance(kernels, GraspError):
        yield from (unmeasured_check(name, healthy, str(kernels)) for name, healthy in NAMES.items())
    else:
        arrays = subject.artifact.manifest.arrays
        gains = {half: float(arrays[f"{half}_sketch"].gain) or 1.0 for half in _halves(subject)}
        sketches = {half: _sketch(subject, half) / gain for half, gain in gains.items()}
        yield from of_sketches(kernels, sketches, subject.weight_BN)
    if isinstance(kernels, GraspError):
        yield unmeasured_check("opposed gradients", HEALTHY_ALIGNMENT, str(kernels))
    else:
        yield _opposed(*measures.negative_pairs(kernels.positions.gradient_NN))
    yield _bound(measures.direct_sum_bound(_sketch(subject, "hidden"), _sketch(subject, "residual")))
    for half in _halves(subject):
        yield _rank(f"{half}_sketch", _sketch(subject, half))


def _opposed(pairs: float, mass: float) -> Check:
    return judge_check(
        "opposed gradients",
        f"{pairs:.0%} of pairs of output gradients, not centred, have a negative inner product, {mass:.0%} of the mass",
        HEALTHY_ALIGNMENT,
        mass <= 0.05,
        "these rows are not an aligned pool: a penalty on the norm of their update has no diminishing returns, "
        "with any sketch",
        {"pairs": pairs, "mass": mass},
    )


def _bound(bound: measures.DirectSumBound) -> Check:
    tight = bound.largest / bound.bound if bound.bound else 1.0
    right = bound.off <= IDENTITY_TOLERANCE
    advice = "rows are too far apart for an informative bound: see `direct sum for product`"
    if not right:
        advice = "the identity fails: the sketches contain nan or infinity, or this is a bug; please report it"
    return judge_check(
        "direct-sum bound",
        f"{'met' if right else 'BROKEN'} (an identity, to {bound.off:.0e}: it checks the code); gap "
        f"{bound.mean:.2f} in the mean, {bound.largest:.2f} at most, {tight:.0%} of the bound of {bound.bound:.2f}",
        "a mean gap of 0.1 or less, between kernels in [-1, 1]: rows are close enough for the direct sum to "
        "approximate the product",
        right and bound.mean <= 0.1,
        advice,
        asdict(bound) | {"tight": tight},
    )


def _rank(name: str, sketch_ND: F64) -> Check:
    rank = measures.effective_rank(sketch_ND)
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


def _complement(subject: Subject, protocol: InteractionProtocol) -> Iterator[Check]:
    """Check each component with curvature; a sum of aligned kernels is aligned.

    For subsets of one size, K_raw, K_pair and K_cent contribute ||sum phi_i||^2 of the sketches; K_self is linear.
    """
    name = "pairs that complement"
    bent = {half: omega for half, omega in protocol.components.items() if omega and not half.endswith(".self")}
    if not bent:
        value = f"protocol {protocol.name} has no pairwise terms: gains are additive"
        yield judge_check(name, value, HEALTHY_ALIGNMENT, True, "", {"pairs": 0.0, "mass": 0.0})
    for component, omega in bent.items():
        half = component.split(".")[0]
        lacking = {"hidden", "residual"} - set(_halves(subject)) if half == "joint" else {half} - set(_halves(subject))
        if lacking:
            why = f"the artifact has no {' and '.join(sorted(lacking))} sketch"
            yield unmeasured_check(f"{name}, {component}", HEALTHY_ALIGNMENT, why)
            continue
        parts = [_sketch(subject, part) for part in (("hidden", "residual") if half == "joint" else (half,))]
        sketch_ND = np.concatenate(parts, axis=1)
        yield _complements(component, omega, *measures.negative_pairs(sketch_ND @ sketch_ND.T))


def _complements(component: str, omega: float, pairs: float, mass: float) -> Check:
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
