"""How far a ranking hangs on the rows whose moments whiten it: moments of two other samples, and both rankings.

Shape letters: N rows ranked, T targets, E units.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.audit.measures import rank_agreement
from grasp.audit.sample import SampleFeatures
from grasp.errors import ArtifactError
from grasp.extract.forward import TokenKernel, UnitFeatures, forward_units, position_sums
from grasp.extract.moments import STATES
from grasp.extract.reopen import Origin
from grasp.features.moments import PositionMoments
from grasp.predict.predictor import kernel_weights
from grasp.predict.protocol import ScoringProtocol
from grasp.predict.relevance import UnitSelection, counted
from grasp.predict.row_arrays import F32, F64
from grasp.seeds import stream

MOST_POSITIONS = 16_384  # of each sample: a draw of this size is less steady than that of a large build


@dataclass(frozen=True, slots=True)
class Redrawn:
    """Two rankings of the same rows, by moments of two samples that have no row in common."""

    agreement: dict[str, float]  # Spearman's rho over rows, by target; without those that have one score for all rows
    positions: int  # of the smaller sample


def redrawn(
    artifact: ArtifactReader, features: SampleFeatures, origin: Origin, protocol: ScoringProtocol, seed: int
) -> Redrawn:
    """Rank the rows of a sample twice, as the protocol counts them.

    Each sample of moments has as many positions as a build draws, if the corpus has twice as many, and no more than
    `MOST_POSITIONS`: where half of the corpus is less than the build read, rankings agree less than they would for it.

    Raises:
        ArtifactError: the protocol ranks by a kernel without token moments, rows are images, or nothing can be ranked.
    """
    fitted = protocol.fitted(artifact.array_names, artifact.feature_settings)
    kernels = list(kernel_weights(fitted))
    if "pooled" in kernels or origin.has_images or features.positions is None:
        raise ArtifactError("measured for texts, and kernels that look at positions: token, input, neighbour, shift")
    samples = _two_samples(origin.rows.supervised(), origin.settings.features.moment_positions, seed)
    if not all(len(sample) for sample in samples):
        raise ArtifactError(f"measured for two rows and more; the corpus has {artifact.n_rows}")
    names = [unit.unit_id for unit in origin.units.units]
    units = forward_units(origin.model, origin.unit_tokens, names, origin.settings.features)
    drawn = [_moments(origin, sample) for sample in samples]
    rankings = []
    for moments in drawn:
        kernel = _kernel(origin, units, moments, kernels)
        batches = features.positions.batches(len(features.row_index), origin.model.device)
        parts = [kernel.apply(batch) for batch in batches]
        arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        rankings.append(_ranking(artifact, arrays, fitted))
    pairs = zip(artifact.targets, *(ranking_NT.T for ranking_NT in rankings), strict=True)
    agreement = {target: rank_agreement(first_N, second_N) for target, first_N, second_N in pairs}
    known = {target: rho for target, rho in agreement.items() if np.isfinite(rho)}
    if not known:
        raise ArtifactError("measured where rows differ in relevance; here every target has one score for all")
    return Redrawn(known, min(moments.token.count for moments in drawn))


def _two_samples(
    supervised_N: NDArray[np.int64], positions: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Whole rows of either, uniform, in row order, until they hold `positions`; the half of all, if that is less."""
    wanted = min(positions, MOST_POSITIONS, int(supervised_N.sum()) // 2)
    order = stream(seed, "audit", "moments").permutation(len(supervised_N))
    reached = np.concatenate([[0], np.cumsum(supervised_N[order])])
    first = min(int(np.searchsorted(reached, wanted)), len(order) - 1)  # a long row must leave the other sample one
    second = max(int(np.searchsorted(reached, reached[first] + wanted)), first + 1)
    return np.sort(order[:first]), np.sort(order[first:second])


def _moments(origin: Origin, row_index: NDArray[np.int64]) -> PositionMoments:
    rows = origin.rows.rows(row_index)
    every = max(1, rows.n_tokens // STATES)
    return position_sums(origin.model, rows, origin.settings.features, every).moments()


def _kernel(origin: Origin, units: UnitFeatures, moments: PositionMoments, kernels: Sequence[str]) -> TokenKernel:
    """Those kernels that the protocol counts, whatever the loss over this sample would choose."""
    chosen = {f"{kernel}_match": kernel in kernels for kernel in ("neighbour", "shift")}
    settings = origin.settings.features.model_copy(update={**chosen, "product_width": 0})
    return TokenKernel.prepare(units, moments, settings, origin.model)


def _ranking(artifact: ArtifactReader, arrays: dict[str, F32], fitted: ScoringProtocol) -> F64:
    """Score of every row for every target, (N, T): kernels in units of their own spread, added with their weights."""
    units = UnitSelection.of(artifact, artifact.targets)
    total_NT = np.zeros((len(next(iter(arrays.values()))), len(units.targets)))
    for kernel, weight in kernel_weights(fitted).items():
        score_NT = units.mean_per_task(counted(arrays[f"relevance_{kernel}"][:, units.columns_E], fitted.negative))
        total_NT += weight * score_NT / np.maximum(score_NT.std(axis=0), np.finfo(np.float64).tiny)
    return total_NT
