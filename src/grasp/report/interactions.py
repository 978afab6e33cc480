"""Which slices push the model the same way, and which complete each other. Shape letter: G slices.

Delta_g Delta_h ||s||^2 = 2 <Phi_g, Phi_h>: under a penalty on redundancy two slices whose sketch sums point the same
way are worth less together than apart. The mean sketch of the corpus is taken off first: what all rows share, every
subset has.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from grasp.predict.row_arrays import F64
from grasp.predict.slice_formula import SliceFormula

PAIRS_SHOWN = 6
HALVES = ("joint", "product", "hidden", "residual")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two slices, and the cosine of their centred sketch sums."""

    first: int
    second: int
    cosine: float


@dataclass(frozen=True, slots=True)
class Interactions:
    """Cosine of the slices' centred sketch sums: above 0 redundant, below 0 completing.

    Source: eq:discrete-second-difference, eq:ia-discrete-curvature.
    """

    half: str
    cosine_GG: F64  # nan where a slice has the mean sketch of the corpus
    order_G: NDArray[np.int64]  # like next to like
    redundant: tuple[Pair, ...]  # the most
    completing: tuple[Pair, ...]


def interactions(formula: SliceFormula) -> Interactions | None:
    """Interactions by the joint sketch, else by the one that there is; None where it has none."""
    half = next((half for half in HALVES if half in formula.gram_GG), None)
    if half is None:
        return None
    cosine_GG = formula.cosines(half)
    pairs = _pairs(cosine_GG)
    return Interactions(
        half=half,
        cosine_GG=cosine_GG,
        order_G=_order(cosine_GG),
        redundant=tuple(pair for pair in pairs if pair.cosine > 0)[:PAIRS_SHOWN],
        completing=tuple(pair for pair in reversed(pairs) if pair.cosine < 0)[:PAIRS_SHOWN],
    )


def _pairs(cosine_GG: F64) -> list[Pair]:
    """Every pair that has a cosine, from the most redundant to the most completing."""
    i, j = np.triu_indices(len(cosine_GG), 1)
    pairs = [Pair(int(a), int(b), float(cosine_GG[a, b])) for a, b in zip(i, j, strict=True)]
    return sorted((pair for pair in pairs if np.isfinite(pair.cosine)), key=lambda pair: -pair.cosine)


def _order(cosine_GG: F64) -> NDArray[np.int64]:
    """Leaves of a clustering by average distance 1 - cosine."""
    distance_GG = 1.0 - np.where(np.isfinite(cosine_GG), cosine_GG, 0.0)
    np.fill_diagonal(distance_GG, 0.0)
    tree = linkage(squareform(np.maximum(distance_GG, 0.0), checks=False), method="average", optimal_ordering=True)
    return np.asarray(leaves_list(tree), dtype=np.int64)
