"""Read or recompute full features of a sample of rows, and rank the rows with moments of other samples.

The health checks need both. Start with `sample_features` and `rank_by_two_samples`.

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
from grasp.build.model_pass import ModelPass, compute_moments, merge_batches, read_batches
from grasp.build.provenance import BuildSource
from grasp.errors import ArtifactError, GraspError, ModelError, RunsError
from grasp.hub import fetched_before
from grasp.inspect.health_metrics import rank_agreement
from grasp.kernels.kernel import Batch, make_kernels
from grasp.kernels.whitening import STATES
from grasp.models.causal_lm import BATCH_ROWS
from grasp.models.checkpoint import REPOSITORY
from grasp.models.residuals import PooledFeatures
from grasp.predict.predictor import UnitSelection, downweight_negative
from grasp.predict.scoring_rule import REPLAY, ScoringProtocol, kernel_weights
from grasp.runs.alignment import Alignment
from grasp.runs.metrics import MIN_SUBSETS
from grasp.runs.training_runs import TrainingRuns
from grasp.seeds import stream

MAX_SHARDS = 8  # shards read for a sample, since shards of stored features may be large
HOW_TO_KEEP = "restore the inputs of the artifact, or rebuild it with keep_features: true"


@dataclass(frozen=True)
class SampleFeatures:
    """Full features of some rows.

    Attributes:
        batch: features of all rows, with positions sorted by row.
    """

    row_index: NDArray[np.int64]
    batch: Batch
    source: Literal["kept features", "the model"]

    @property
    def hidden_NH(self) -> NDArray[np.float32]:  # noqa: N802 - a shape suffix
        """Return hidden states averaged over the positions of summaries."""
        return self.batch.summary.hidden_NH

    @property
    def residual_NV(self) -> csr_array:  # noqa: N802 - a shape suffix
        """Return residuals averaged over the positions of summaries."""
        return self.batch.summary.residual_NV

    @cached_property
    def residual_PV(self) -> csr_array:  # noqa: N802 - a shape suffix
        """Return the residuals at the positions; duplicate coordinates are summed."""
        index_PK = self.batch.residual.index_PK.cpu().numpy()
        value_PK = self.batch.residual.value_PK.float().cpu().numpy()
        n, k = index_PK.shape
        entries = (value_PK.ravel(), index_PK.ravel(), np.arange(0, n * k + 1, k))
        residual_PV = csr_array(entries, shape=(n, self.batch.vocab_size), copy=True)  # do not modify the batch
        residual_PV.sum_duplicates()
        residual_PV.eliminate_zeros()
        return residual_PV


def reopen_source(artifact: ArtifactReader, overrides: Mapping[str, Any] | None = None) -> BuildSource:
    """Load the model and the rows of an artifact; the model is not downloaded."""
    source = BuildSource(artifact, overrides)
    _ = source.rows
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
    parts = [batch.summary for i in range(len(row_index)) for _, batch in model_pass.batches(rows.rows(row_index[[i]]))]
    hidden_NH = np.concatenate([part.hidden_NH for part in parts])
    return PooledFeatures(hidden_NH, vstack([part.residual_NV for part in parts], format="csr"))


def forward_only(source: BuildSource) -> ModelPass:
    """Return the model of a build, without backward passes."""
    return ModelPass(source.model, source.settings.features)


def sample_features(
    artifact: ArtifactReader, row_index: NDArray[np.int64], source: BuildSource | GraspError
) -> SampleFeatures:
    """Read stored features, or else recompute them in the build's batches; `source` may be an error."""
    model_pass = None if isinstance(source, GraspError) else forward_only(source)
    if not artifact.keeps_features:
        if isinstance(source, GraspError):
            raise source
        batches = list(forward_only(source).batches(source.rows.rows(row_index)))
        return SampleFeatures(row_index, merge_batches(batches, len(row_index)).rows(0, len(row_index)), "the model")
    size, parts, vocab_size = artifact.grid.shard_rows, [], int(artifact.manifest.details["vocab_size"])
    sample_position_N = np.full(artifact.n_rows, -1, dtype=np.int64)  # position in the sample; -1: not in it
    sample_position_N[row_index] = np.arange(len(row_index))
    for k in np.unique(row_index // size):
        for index, batch in read_batches(artifact.features(int(k)), model_pass, vocab_size):
            position_B = sample_position_N[int(k) * size + index]
            if (position_B >= 0).any():
                in_sample = np.flatnonzero(position_B >= 0)
                parts.append((position_B[in_sample], batch.select_rows(in_sample)))
    return SampleFeatures(row_index, merge_batches(parts, len(row_index)).rows(0, len(row_index)), "kept features")


def sample_rows(artifact: ArtifactReader, n_rows: int, seed: int) -> NDArray[np.int64]:
    """Draw rows uniformly from at most eight uniformly drawn shards, in row order."""
    generator = stream(seed, "audit", "sample")
    grid = artifact.grid
    shards = generator.permutation(grid.n_shards)[:MAX_SHARDS]
    pool_N = np.concatenate([np.arange(*grid.bounds(int(k))) for k in sorted(shards)])
    return np.sort(generator.choice(pool_N, size=min(n_rows, len(pool_N)), replace=False)).astype(np.int64)


def environment_subsets(
    artifact: ArtifactReader, runs: TrainingRuns, row_index: NDArray[np.int64], subsets: int
) -> F64:
    """Return the weights of the first subsets of runs, restricted to the sample and normalised to 1, (B, N)."""
    blocks = Alignment.from_runs(runs, artifact).blocks
    weight_BN = np.concatenate([block.weights_BN[:, row_index].toarray() for block in blocks])[:subsets]
    total_B = weight_BN.sum(axis=1)
    if (total_B > 0).sum() < MIN_SUBSETS:
        raise RunsError(
            f"{runs.path}: {int((total_B > 0).sum())} of its subsets have rows among the {len(row_index)} of "
            f"the sample, expected at least {MIN_SUBSETS}; take more rows"
        )
    return np.asarray(weight_BN[total_B > 0] / total_B[total_B > 0, None])


MAX_POSITIONS = 16_384  # per sample; rankings by so few positions are less stable than those of a large build


def rank_by_two_samples(
    artifact: ArtifactReader, features: SampleFeatures, source: BuildSource, protocol: ScoringProtocol, seed: int
) -> tuple[dict[str, float], int]:
    """Rank the rows of a sample by a scoring rule, with moments from two disjoint samples of rows.

    Each sample of moments has as many positions as that of a build, but at most half of the corpus and
    `MAX_POSITIONS`, in which case rankings agree less than they would with samples of the build's size.

    Returns:
        Spearman's rho over rows by target, except targets with constant scores; and the positions of the smaller
        sample.
    """
    resolved = protocol.resolved_for(artifact.array_names, artifact.feature_settings)
    kernels = kernel_weights(resolved)
    if {"pooled", "gradient", REPLAY} & set(kernels) or source.has_images:
        raise ArtifactError("supported only for texts, and for all kernels but pooled, gradient and replay")
    settings = source.settings.features.model_copy(update={"kernels": tuple(kernels)})
    model_pass = ModelPass(source.model, settings)
    samples = _two_samples(source.rows.loss_counts(), settings.sample_positions, seed)
    if not all(len(sample) for sample in samples):
        raise ArtifactError(f"requires at least two rows; the corpus has {artifact.n_rows}")
    units = model_pass.units(source.unit_tokens, [unit.unit_id for unit in source.units.units])
    features_batch = features.batch
    # Scores of rows by target: kernels divided by their standard deviation, and added with their weights.
    columns = UnitSelection.from_targets(artifact, artifact.targets)
    rankings, counts = [], []
    for sample in samples:
        rows = source.rows.rows(sample)
        corpus = compute_moments(model_pass, rows, states_every=max(1, rows.n_tokens // STATES))
        prepared_kernels = make_kernels(kernels, source.model, settings, corpus)
        total_NT = np.zeros((features_batch.n_rows, len(columns.targets)))
        for kernel in prepared_kernels:
            kernel.prepare(units)
            starts = range(0, features_batch.n_rows, BATCH_ROWS)
            parts = [
                kernel.score(features_batch.rows(start, min(start + BATCH_ROWS, features_batch.n_rows))).cpu().numpy()
                for start in starts
            ]
            relevance_NE = np.concatenate(parts)[:, columns.columns_E]
            score_NT = columns.mean_per_task(downweight_negative(relevance_NE, resolved.negative_factor(kernel.name)))
            weight = kernels[kernel.name]
            total_NT += weight * score_NT / np.maximum(score_NT.std(axis=0), np.finfo(np.float64).tiny)
        rankings.append(total_NT.T)
        counts.append(corpus.n_positions)
    agreement = {
        target: rank_agreement(first_N, second_N)
        for target, first_N, second_N in zip(artifact.targets, *rankings, strict=True)
    }
    defined = {target: rho for target, rho in agreement.items() if np.isfinite(rho)}
    if not defined:
        raise ArtifactError("requires different scores of rows; every target has the same score for all rows")
    return defined, min(counts)


def _two_samples(
    loss_counts_N: NDArray[np.int64], positions: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw two disjoint samples of rows, in row order, with `positions` positions each, or half of all if fewer."""
    n_positions = min(positions, MAX_POSITIONS, int(loss_counts_N.sum()) // 2)
    order = stream(seed, "audit", "moments").permutation(len(loss_counts_N))
    total = np.concatenate([[0], np.cumsum(loss_counts_N[order])])  # positions of the first rows of the order
    middle = min(int(np.searchsorted(total, n_positions)), len(order) - 1)  # leave a row for the other sample
    stop = max(int(np.searchsorted(total, total[middle] + n_positions)), middle + 1)
    return np.sort(order[:middle]), np.sort(order[middle:stop])
