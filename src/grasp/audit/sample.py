"""Features of a sample of an artifact's rows: those that were kept, or the model run again.

Shape letters: N rows of the sample, P their positions, H hidden width, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from huggingface_hub import try_to_load_from_cache
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from grasp.artifact.reader import ArtifactReader
from grasp.errors import EnvironmentDataError, GraspError, ModelError
from grasp.extract.forward import Positions, ShardForward, forward_shard
from grasp.extract.reopen import Origin
from grasp.features.pooling import PooledFeatures
from grasp.models.causal_lm import REPOSITORY
from grasp.predict.weights import as_csr
from grasp.runs.environment import Environment
from grasp.runs.metrics import MIN_SUBSETS
from grasp.runs.scored import Scored
from grasp.seeds import stream

F64 = NDArray[np.float64]
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


def reopened(artifact: ArtifactReader, own: Mapping[str, Any] | None = None) -> Origin:
    """The model and the rows of an artifact, loaded; a model that is not on this machine is not asked of a hub.

    Raises:
        GraspError: one of them is not there, or not what the artifact was built from.
    """
    origin = Origin(artifact, own)
    _ = origin.rows
    name = origin.settings.model.path
    cached = REPOSITORY.fullmatch(name) and isinstance(try_to_load_from_cache(name, "config.json"), str)
    if not (Path(name).exists() or cached):
        raise ModelError(
            f"model.path: {name}: not on this disk, seen from here; restore what the artifact was built from, or say "
            "where the model is now with --set model.path=DIR"
        )
    _ = origin.model
    return origin


def features_alone(origin: Origin, row_index: NDArray[np.int64]) -> PooledFeatures:
    """Pooled features of each row run by itself."""
    rows, settings = origin.rows, origin.settings.features
    parts = [forward_shard(origin.model, rows.rows(row_index[[i]]), settings, None) for i in range(len(row_index))]
    hidden_NH = np.concatenate([part.pooled.hidden_NH for part in parts])
    return PooledFeatures(hidden_NH, vstack([part.pooled.residual_NV for part in parts], format="csr"))


def sample_features(
    artifact: ArtifactReader, row_index: NDArray[np.int64], origin: Origin | GraspError
) -> SampleFeatures:
    """Kept features where they are, else those of the model, in the build's batches.

    Raises:
        GraspError: there are none, and the model cannot be run again (`origin` says why).
    """
    if len(artifact.features.finished) == artifact.grid.n_shards:
        size, vocab = artifact.grid.shard_rows, int(artifact.manifest.detail("vocab_size"))
        shards = [int(k) for k in np.unique(row_index // size)]
        parts = [
            (ShardForward.unspool(artifact.features.read(k), vocab), row_index[row_index // size == k] - k * size)
            for k in shards
        ]
        return _together(row_index, parts, "kept features")
    if isinstance(origin, GraspError):
        raise origin
    rows = origin.rows.rows(row_index)
    forward = forward_shard(origin.model, rows, origin.settings.features, None, keep_positions=True)
    return _together(row_index, [(forward, np.arange(len(row_index)))], "the model")


def _together(
    row_index: NDArray[np.int64],
    parts: Sequence[tuple[ShardForward, NDArray[np.int64]]],
    source: Literal["kept features", "the model"],
) -> SampleFeatures:
    """Some rows of each part, ascending, one part after the other."""
    positions, done = [], 0
    for shard, here in parts:
        if (at := shard.positions) is not None:
            place = np.full(len(shard.loss_N), -1, dtype=np.int32)
            place[here] = np.arange(len(here)) + done
            chosen = place[at.row_P] >= 0
            some = {field.name: getattr(at, field.name)[chosen] for field in fields(Positions)}
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


def random_halves(n_rows: int, subsets: int, seed: int) -> F64:
    """Weights of halves of the sample, each adding up to 1, (B, N)."""
    generator = stream(seed, "audit", "subsets")
    half = n_rows // 2
    weight_BN = np.zeros((subsets, n_rows))
    for weight_N in weight_BN:
        weight_N[generator.choice(n_rows, size=half, replace=False)] = 1.0 / half
    return weight_BN


def environment_subsets(
    artifact: ArtifactReader, environment: Environment, row_index: NDArray[np.int64], subsets: int
) -> F64:
    """Weights of an environment's first subsets as far as they are in the sample, each adding up to 1, (B, N).

    Raises:
        EnvironmentDataError: it is not the artifact's, or fewer than 3 of its subsets have rows in the sample.
    """
    blocks = Scored.of(environment, artifact).blocks
    weight_BN = np.concatenate([as_csr(block.weights_BN)[:, row_index].toarray() for block in blocks])[:subsets]
    total_B = weight_BN.sum(axis=1)
    if (total_B > 0).sum() < MIN_SUBSETS:
        raise EnvironmentDataError(
            f"{environment.path}: {int((total_B > 0).sum())} of its subsets have rows among the {len(row_index)} of "
            f"the sample, expected at least {MIN_SUBSETS}; take more rows"
        )
    return np.asarray(weight_BN[total_B > 0] / total_B[total_B > 0, None])
