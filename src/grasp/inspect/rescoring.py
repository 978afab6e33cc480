"""Recompute what a build computed for a sample of rows, for the health checks of an artifact (`grasp.inspect.health`).

`sample_features` reads or recomputes the features of the rows: hidden states and residuals at the positions that carry
loss.

Shape letters: N rows of the sample, H hidden width, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import vstack

from grasp.artifact.reader import ArtifactReader
from grasp.errors import GraspError, ModelError
from grasp.hub import fetched_before
from grasp.models.batch import Batch
from grasp.models.build_source import BuildSource
from grasp.models.checkpoint import REPOSITORY
from grasp.models.residuals import PooledFeatures
from grasp.pipeline.model_pass import ModelPass, merge_batches, read_batches
from grasp.seeds import stream

MAX_SHARDS = 8  # shards read for a sample, since shards of stored features may be large


@dataclass(frozen=True)
class SampleFeatures:
    """Features of a sample of rows at every position.

    Attributes:
        batch: features of all rows, with positions sorted by row.
        source: where the features are from.
    """

    batch: Batch
    source: Literal["kept features", "the model"]


def reopen_source(artifact: ArtifactReader, overrides: Mapping[str, Any] | None = None) -> BuildSource:
    """Load the model and the rows of an artifact; the model is not downloaded.

    Args:
        artifact: artifact to recompute.
        overrides: settings that differ from those of the build, e.g. the present directory of the model.
    Raises:
        ModelError: the model is neither a local directory nor in the cache of the hub.
    """
    source = BuildSource(artifact, overrides)
    _ = source.rows  # loads the rows, so that their errors precede those of the model
    name = source.settings.model.path
    cached = REPOSITORY.fullmatch(name) and fetched_before(name)
    if not (Path(name).exists() or cached):
        raise ModelError(
            f"model.path: {name}: no such local model; restore it, or pass its present directory with --set "
            "model.path=DIR"
        )
    _ = source.model
    return source


def features_one_by_one(source: BuildSource, row_index: NDArray[np.int64]) -> PooledFeatures:
    """Return summaries of rows, each of which is a batch of its own."""
    model_pass, rows = forward_only(source), source.rows
    summaries = [
        batch.summary for i in range(len(row_index)) for _, batch in model_pass.batches(rows.rows(row_index[[i]]))
    ]
    hidden_NH = np.concatenate([summary.hidden_NH for summary in summaries])
    return PooledFeatures(hidden_NH, vstack([summary.residual_NV for summary in summaries], format="csr"))


def forward_only(source: BuildSource) -> ModelPass:
    """Return the forward pass of the model of a build, without the backward pass that some kernels need."""
    return ModelPass(source.model, source.settings.features)


def sample_features(
    artifact: ArtifactReader, row_index: NDArray[np.int64], source: BuildSource | GraspError
) -> SampleFeatures:
    """Return the features of rows: stored ones, or else recomputed in batches as the build makes them.

    Args:
        artifact: artifact of the rows.
        row_index: rows of the sample, ascending.
        source: model and rows of the build, or the error that loading them raised. Stored features do not need them.
    Raises:
        GraspError: `source`, if it is an error and the artifact has no stored features.
    """
    if not artifact.keeps_features:
        if isinstance(source, GraspError):
            raise source
        batches = list(forward_only(source).batches(source.rows.rows(row_index)))
    else:
        model_pass = None if isinstance(source, GraspError) else forward_only(source)
        batches = _stored_batches(artifact, row_index, model_pass)
    n_rows = len(row_index)
    source_name: Literal["kept features", "the model"] = "kept features" if artifact.keeps_features else "the model"
    return SampleFeatures(merge_batches(batches, n_rows).rows(0, n_rows), source_name)


def _stored_batches(
    artifact: ArtifactReader, row_index: NDArray[np.int64], model_pass: ModelPass | None
) -> list[tuple[NDArray[np.int64], Batch]]:
    """Read the stored batches of a sample, each restricted to its rows and with their positions in the sample."""
    shard_rows, vocab_size = artifact.grid.shard_rows, int(artifact.manifest.details["vocab_size"])
    position_of_row = np.full(artifact.n_rows, -1, dtype=np.int64)  # position in the sample; -1: not in it
    position_of_row[row_index] = np.arange(len(row_index))
    batches = []
    for k in map(int, np.unique(row_index // shard_rows)):
        for index, batch in read_batches(artifact.features(k), model_pass, vocab_size):
            position = position_of_row[k * shard_rows + index]
            in_sample = np.flatnonzero(position >= 0)
            if len(in_sample):
                batches.append((position[in_sample], batch.select_rows(in_sample)))
    return batches


def sample_rows(artifact: ArtifactReader, n_rows: int, seed: int) -> NDArray[np.int64]:
    """Draw rows uniformly from at most eight uniformly drawn shards, in row order."""
    generator = stream(seed, "audit", "sample")
    grid = artifact.grid
    shards = generator.permutation(grid.n_shards)[:MAX_SHARDS]
    pool_N = np.concatenate([np.arange(*grid.bounds(int(k))) for k in sorted(shards)])
    return np.sort(generator.choice(pool_N, size=min(n_rows, len(pool_N)), replace=False)).astype(np.int64)
