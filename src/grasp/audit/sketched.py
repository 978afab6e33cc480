"""How far K of the stored sketches is from what it stands for: its own full kernel, and the product kernel.

Shape letters: N rows of the sample, B subsets, D sketch width.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt

import numpy as np

from grasp.audit import measures
from grasp.audit.check import Check, check, missing
from grasp.audit.kernels import F64, Half, Kernels

RANKS = 0.8  # agreement of orders that is called healthy
WIDEST = 8192  # that is tried before it is said that no width is healthy
HALVES: tuple[Half, ...] = ("hidden", "residual", "product")
OF_PRODUCT = ("hidden", "residual", "joint")
HEALTHY_SKETCH = f"at most twice off what so many numbers give, and ranks {RANKS} or more"
HEALTHY_PRODUCT = f"ranks {RANKS} or more with the product of positions: K then orders subsets as their updates do"
HEALTHY_DIRECT = f"ranks {RANKS} or more"
NAMES = {
    **{f"{half} sketch": HEALTHY_SKETCH for half in HALVES},
    **{f"{half} sketch for product": HEALTHY_PRODUCT for half in OF_PRODUCT},
    "direct sum for product": HEALTHY_DIRECT,
}


@dataclass(frozen=True, slots=True)
class Fit:
    """K by a sketch against K by a full kernel, over subsets."""

    error: float  # median relative error
    ranks: float
    width: int

    @property
    def allowed(self) -> float:
        """Twice the relative standard deviation of a squared norm by so many Gaussian numbers."""
        return 2 * sqrt(2 / self.width)

    @property
    def good(self) -> bool:
        return self.error <= self.allowed and self.ranks >= RANKS


def of_sketches(kernels: Kernels, sketches: Mapping[str, F64], weight_BN: F64) -> Iterator[Check]:
    """All lines about the sketches of an artifact.

    Args:
        sketches: (N, D) by half, without their gains; product only where it is built.
    """
    for half in HALVES:
        if half not in sketches:
            why = "there is none: features.product_width is 0, or features.match is pooled"
            yield missing(f"{half} sketch", HEALTHY_SKETCH, why)
        elif (full_NN := kernels.full(half)) is None:
            yield missing(f"{half} sketch", HEALTHY_SKETCH, "positions were not kept, and it is a sketch of theirs")
        else:
            yield _own(kernels, half, sketches[half], full_NN, weight_BN)
    for name in OF_PRODUCT:
        yield _for_product(kernels, name, sketches, weight_BN)
    yield _direct_sum(kernels, weight_BN)


def fit(sketch_ND: F64, full_NN: F64, weight_BN: F64) -> Fit:
    """Compare K of a sketch with K of the kernel that it stands for."""
    found_B, true_B = _norms(sketch_ND, weight_BN), measures.subset_norms(weight_BN, full_NN)
    error, ranks = measures.relative_error(found_B, true_B), measures.rank_agreement(found_B, true_B)
    return Fit(error, ranks, sketch_ND.shape[1])


def _norms(sketch_ND: F64, weight_BN: F64) -> F64:
    return np.asarray(((weight_BN @ sketch_ND) ** 2).sum(axis=1))


def _own(kernels: Kernels, half: Half, sketch_ND: F64, full_NN: F64, weight_BN: F64) -> Check:
    found = fit(sketch_ND, full_NN, weight_BN)
    true_B = measures.subset_norms(weight_BN, full_NN)
    apart = float(true_B.std() / true_B.mean()) if true_B.any() else 0.0
    numbers = {"error": found.error, "ranks": found.ranks, "width": float(found.width), "apart": apart}
    value = f"K {found.error:.1%} off, ranks agree {found.ranks:+.2f} ({found.width} wide; K of subsets differs by "
    value += f"{apart:.1%})"
    if half == "product":
        pooled = measures.rank_agreement(
            _norms(sketch_ND, weight_BN), measures.subset_norms(weight_BN, kernels.pooled_product_NN)
        )
        value += f"; {pooled:+.2f} with the product of pooled rows, which it is not a sketch of"
        numbers["pooled_ranks"] = pooled
    wide = None if found.good else healthy_width(kernels, half, full_NN, weight_BN, found.width)
    if wide is not None:
        numbers |= {"healthy_width": float(wide.width), "healthy_ranks": wide.ranks}
    healthy = f"at most {found.allowed:.0%} off, twice what {found.width} numbers give, and ranks {RANKS} or more"
    return check(f"{half} sketch", value, healthy, found.good, _wider(half, wide), numbers)


def healthy_width(kernels: Kernels, half: Half, full_NN: F64, weight_BN: F64, width: int) -> Fit | None:
    """The first doubling of the width whose sketch of these rows is healthy; none up to WIDEST."""
    exact = kernels.features.hidden_NH.shape[1] if half == "hidden" else WIDEST
    while width < min(exact, WIDEST):
        width = min(2 * width, exact)
        wide = fit(kernels.sketch(half, width), full_NN, weight_BN)
        if wide.good:
            return wide
    return None


def _wider(half: str, wide: Fit | None) -> str:
    named = f"{half}.*" if half == "product" else f"{half}.* and joint.*"
    leave = f"leave {named} out of the protocol"
    if wide is None:
        return f"{leave}: no width up to {WIDEST} tells these subsets apart"
    measured = f"on this sample ranks {wide.ranks:+.2f}, {wide.error:.1%} off"
    return f"build with features.{half}_width: {wide.width} ({measured}), or {leave}"


def _for_product(kernels: Kernels, half: str, sketches: Mapping[str, F64], weight_BN: F64) -> Check:
    name = f"{half} sketch for product"
    if kernels.positions is None:
        return missing(name, HEALTHY_PRODUCT, "positions were not kept; build with keep_features: true and match: both")
    parts = [sketches[part] for part in (("hidden", "residual") if half == "joint" else (half,))]
    if half == "joint":
        parts = [part / (sqrt(float((part**2).sum(axis=1).mean())) or 1.0) for part in parts]
    found_B = _norms(np.concatenate(parts, axis=1), weight_BN)
    full_NN = {"hidden": kernels.hidden_NN, "residual": kernels.residual_NN, "joint": kernels.joint_NN}[half]
    true_B = measures.subset_norms(weight_BN, kernels.positions.product_NN)
    pooled_B = measures.subset_norms(weight_BN, kernels.pooled_product_NN)
    numbers = {
        "ranks": measures.rank_agreement(found_B, true_B),
        "pooled_ranks": measures.rank_agreement(found_B, pooled_B),
        "error": measures.scaled_error(found_B, true_B),
        "full_ranks": measures.rank_agreement(measures.subset_norms(weight_BN, full_NN), true_B),
    }
    advice = "too narrow for what its features tell: build with the widths that the lines of the sketches name"
    if not numbers["full_ranks"] >= RANKS:
        advice = f"no width mends it, {half}.* is another kernel: use product.*, wide enough, or no geometry"
    return check(
        name,
        f"ranks agree {numbers['ranks']:+.2f} with the product of positions, {numbers['pooled_ranks']:+.2f} with that "
        f"of pooled rows, {numbers['error']:.1%} off once scaled; all its features agree {numbers['full_ranks']:+.2f}",
        HEALTHY_PRODUCT,
        numbers["ranks"] >= RANKS,
        advice,
        numbers,
    )


def _direct_sum(kernels: Kernels, weight_BN: F64) -> Check:
    direct_B = measures.subset_norms(weight_BN, kernels.joint_NN)
    product_B = measures.subset_norms(weight_BN, kernels.pooled_product_NN)
    ranks, error = measures.rank_agreement(direct_B, product_B), measures.scaled_error(direct_B, product_B)
    return check(
        "direct sum for product",
        f"of pooled rows with all their features ranks agree {ranks:+.2f}, {error:.1%} off once scaled",
        HEALTHY_DIRECT,
        ranks >= RANKS,
        "joint.* is no stand-in for the product of these rows: use product.*, wide enough, or no geometry",
        {"ranks": ranks, "error": error},
    )
