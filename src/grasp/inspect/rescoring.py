"""Features of a sample of an artifact's rows: those that were kept, or the model run again.

And how far a ranking hangs on the rows whose moments whiten it: moments of two other samples, and both rankings.
Shape letters: N rows of the sample, P their positions, H hidden width, V vocabulary, T targets, E units.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.build.moments import STATES
from grasp.build.provenance import BuildSource
from grasp.build.score_shard import (
    PositionKernels,
    Positions,
    ShardForward,
    forward_shard,
    forward_units,
    position_sums,
)
from grasp.errors import ArtifactError, EnvironmentDataError, GraspError, ModelError
from grasp.hub import fetched_before
from grasp.inspect.health_metrics import rank_agreement
from grasp.models.checkpoint import REPOSITORY
from grasp.models.residuals import PooledFeatures
from grasp.predict.predictor import UnitSelection, counted
from grasp.predict.scoring_rule import ScoringProtocol, kernel_weights
from grasp.runs.alignment import Joined
from grasp.runs.metrics import MIN_SUBSETS
from grasp.runs.retrained import Environment
from grasp.seeds import stream

MOST_SHARDS = 8  # read for a sample: a shard of kept features may be large
HOW_TO_KEEP = "restore what the artifact was built from, or build it with keep_features: true"


@dataclass(frozen=True)
class SampleFeatures:
    """Full features of some rows."""

    row_index: NDArray[np.int64]
    hidden_NH: NDArray[np.float32]
    residual_NV: csr_array
    positions: Positions | None  # of the token kernel, in order of row; `row_P` is the place in the sample
    source: Literal["kept features", "the model"]

    @cached_property
    def residual_PV(self) -> csr_array:  # noqa: N802 - a shape suffix
        """Residuals at the positions; a coordinate that is there twice adds up."""
        at = self.positions
        assert at is not None
        n, k = at.index_PK.shape
        entries = (
            at.value_PK.astype(np.float32).ravel(),
            at.index_PK.ravel().astype(np.int64),
            np.arange(0, n * k + 1, k),
        )
        found = csr_array(entries, shape=(n, self.residual_NV.shape[1]))
        found.sum_duplicates()
        found.eliminate_zeros()
        return found


def reopened(artifact: ArtifactReader, own: Mapping[str, Any] | None = None) -> BuildSource:
    """The model and the rows of an artifact, loaded; a model that is not on this machine is not asked of a hub."""
    origin = BuildSource(artifact, own)
    _ = origin.rows
    name = origin.settings.model.path
    cached = REPOSITORY.fullmatch(name) and fetched_before(name)
    if not (Path(name).exists() or cached):
        raise ModelError(
            f"model.path: {name}: not on this disk, seen from here; restore what the artifact was built from, or say "
            "where the model is now with --set model.path=DIR"
        )
    _ = origin.model
    return origin


def features_alone(origin: BuildSource, row_index: NDArray[np.int64]) -> PooledFeatures:
    """Pooled features of each row run by itself."""
    rows, settings = origin.rows, origin.settings.features
    parts = [forward_shard(origin.model, rows.rows(row_index[[i]]), settings, None) for i in range(len(row_index))]
    hidden_NH = np.concatenate([part.pooled.hidden_NH for part in parts])
    return PooledFeatures(hidden_NH, vstack([part.pooled.residual_NV for part in parts], format="csr"))


def sample_features(
    artifact: ArtifactReader, row_index: NDArray[np.int64], origin: BuildSource | GraspError
) -> SampleFeatures:
    """Kept features where they are, else those of the model, in the build's batches; `origin` may be an error."""
    if artifact.keeps_features:
        source: Literal["kept features", "the model"] = "kept features"
        size, vocab = artifact.grid.shard_rows, int(artifact.manifest.detail("vocab_size"))
        parts = [
            (ShardForward.unspool(artifact.features(int(k)), vocab), row_index[row_index // size == k] - k * size)
            for k in np.unique(row_index // size)
        ]
    elif isinstance(origin, GraspError):
        raise origin
    else:
        source, rows = "the model", origin.rows.rows(row_index)
        forward = forward_shard(origin.model, rows, origin.settings.features, None, keep_positions=True)
        parts = [(forward, np.arange(len(row_index)))]
    # some rows of each part, ascending, one part after the other
    positions, done = [], 0
    for shard, here in parts:
        if (at := shard.positions) is not None:
            place = np.full(len(shard.loss_N), -1, dtype=np.int32)
            place[here] = np.arange(len(here)) + done
            chosen = place[at.row_P] >= 0
            some = {name: array[chosen] for name, array in at.arrays().items()}
            positions.append(some | {"row_P": place[some["row_P"]]})
        done += len(here)
    joined = {name: np.concatenate([part[name] for part in positions]) for name in positions[0]} if positions else {}
    return SampleFeatures(
        row_index,
        np.concatenate([shard.pooled.hidden_NH[here] for shard, here in parts]).astype(np.float32),
        vstack([shard.pooled.residual_NV[here] for shard, here in parts], format="csr"),
        Positions(**joined) if joined else None,
        source,
    )


def sample_rows(artifact: ArtifactReader, n_rows: int, seed: int) -> NDArray[np.int64]:
    """Rows drawn uniformly from at most eight shards drawn uniformly, in row order."""
    generator = stream(seed, "audit", "sample")
    grid = artifact.grid
    shards = generator.permutation(grid.n_shards)[:MOST_SHARDS]
    pool_N = np.concatenate([np.arange(*grid.bounds(int(k))) for k in sorted(shards)])
    return np.sort(generator.choice(pool_N, size=min(n_rows, len(pool_N)), replace=False)).astype(np.int64)


def environment_subsets(
    artifact: ArtifactReader, environment: Environment, row_index: NDArray[np.int64], subsets: int
) -> F64:
    """Weights of an environment's first subsets as far as they are in the sample, each adding up to 1, (B, N)."""
    blocks = Joined.from_environment(environment, artifact).blocks
    weight_BN = np.concatenate([block.weights_BN[:, row_index].toarray() for block in blocks])[:subsets]
    total_B = weight_BN.sum(axis=1)
    if (total_B > 0).sum() < MIN_SUBSETS:
        raise EnvironmentDataError(
            f"{environment.path}: {int((total_B > 0).sum())} of its subsets have rows among the {len(row_index)} of "
            f"the sample, expected at least {MIN_SUBSETS}; take more rows"
        )
    return np.asarray(weight_BN[total_B > 0] / total_B[total_B > 0, None])


MOST_POSITIONS = 16_384  # of each sample: a draw of this size is less steady than that of a large build


def redrawn(
    artifact: ArtifactReader, features: SampleFeatures, origin: BuildSource, protocol: ScoringProtocol, seed: int
) -> tuple[dict[str, float], int]:
    """Rank the rows of a sample twice, as the protocol counts them, by moments of samples without a row in common.

    Each sample of moments has as many positions as a build draws, if the corpus has twice as many, and no more than
    `MOST_POSITIONS`: where half of the corpus is less than the build read, rankings agree less than they would for it.

    Returns:
        Spearman's rho over rows, by target, without those that have one score for all rows; and the positions of the
        smaller sample.
    """
    fitted = protocol.fitted(artifact.array_names, artifact.feature_settings)
    kernels = kernel_weights(fitted)
    if {"pooled", "gradient"} & set(kernels) or origin.has_images or features.positions is None:
        raise ArtifactError("measured for texts, and kernels that look at positions: all but pooled and gradient")
    # two samples of moments, and the kernels that the protocol counts, whatever the loss over these would choose
    settings, model = origin.settings.features, origin.model
    samples = _two_samples(origin.rows.supervised(), settings.moment_positions, seed)
    if not all(len(sample) for sample in samples):
        raise ArtifactError(f"measured for two rows and more; the corpus has {artifact.n_rows}")
    moments = []
    for sample in samples:
        rows = origin.rows.rows(sample)
        moments.append(position_sums(model, rows, settings, max(1, rows.n_tokens // STATES)).moments())
    units = forward_units(model, origin.unit_tokens, [unit.unit_id for unit in origin.units.units], settings)
    chosen = {f"{kernel}_match": kernel in kernels for kernel in ("neighbour", "shift", "tilt")}
    settings = settings.model_copy(update={**chosen, "product_width": 0})
    # score of every row for every target: kernels in units of their own spread, added with their weights
    columns = UnitSelection.from_targets(artifact, artifact.targets)
    rankings = []
    for drawn in moments:
        prepared = PositionKernels.prepare(units, drawn, settings, model)
        batches = features.positions.batches(len(features.row_index), model.device)
        parts = [prepared.apply(batch) for batch in batches]
        total_NT = np.zeros((len(features.row_index), len(columns.targets)))
        for kernel, weight in kernels.items():
            relevance_NE = np.concatenate([part[f"relevance_{kernel}"] for part in parts])[:, columns.columns_E]
            score_NT = columns.mean_per_task(counted(relevance_NE, fitted.negative_of(kernel)))
            total_NT += weight * score_NT / np.maximum(score_NT.std(axis=0), np.finfo(np.float64).tiny)
        rankings.append(total_NT.T)
    agreement = {
        target: rank_agreement(first_N, second_N)
        for target, first_N, second_N in zip(artifact.targets, *rankings, strict=True)
    }
    known = {target: rho for target, rho in agreement.items() if np.isfinite(rho)}
    if not known:
        raise ArtifactError("measured where rows differ in relevance; here every target has one score for all")
    return known, min(drawn.token.count for drawn in moments)


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
