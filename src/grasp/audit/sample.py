"""Features of a sample of an artifact's rows: those that were kept, or the model run again.

Shape letters: N rows of the sample, P their positions, H hidden width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from huggingface_hub import try_to_load_from_cache
from numpy.typing import NDArray
from scipy.sparse import csr_array, vstack

from grasp.artifact.reader import Artifact
from grasp.corpus.image_store import ImageStore
from grasp.corpus.store import RowStore
from grasp.errors import EnvironmentDataError, GraspError, ModelError
from grasp.extract.forward import ShardForward
from grasp.extract.passes import Rows, row_passes
from grasp.extract.reopen import Origin
from grasp.features.extract import BatchFeatures
from grasp.features.pooling import pool
from grasp.models.causal_lm import REPOSITORY
from grasp.models.reference import Reference
from grasp.predict.weights import as_csr
from grasp.runs.development import Scored
from grasp.runs.environment import Environment
from grasp.runs.metrics import MIN_SUBSETS
from grasp.seeds import stream
from grasp.settings import FeatureSettings

F64 = NDArray[np.float64]
MOST_SHARDS = 8  # read for a sample: a shard of kept features may be large
HOW_TO_KEEP = "restore what the artifact was built from, or build it with `grasp build --keep-features`"


@dataclass(frozen=True, slots=True)
class PositionFeatures:
    """The positions of the token kernel (`features.token_positions`) of the sampled rows, in order of row."""

    hidden_PH: NDArray[np.float32]
    residual_PV: csr_array
    row_P: NDArray[np.int64]  # place in the sample


@dataclass(frozen=True, slots=True)
class SampleFeatures:
    """Full features of some rows."""

    row_index: NDArray[np.int64]
    hidden_NH: NDArray[np.float32]
    residual_NV: csr_array
    positions: PositionFeatures | None
    source: Literal["kept features", "the model"]


@dataclass(frozen=True)
class Rerun:
    """The reference model and the rows of an artifact, proved to be its own."""

    model: Reference
    rows: RowStore | ImageStore
    settings: FeatureSettings

    @classmethod
    def of(cls, artifact: Artifact) -> "Rerun":
        """Load both.

        Raises:
            GraspError: one of them is not there, or not what the artifact was built from.
        """
        origin = Origin(artifact)
        rows, name = origin.rows, origin.settings.model.path
        if not _is_at_hand(name):
            raise ModelError(f"model.path: {name}: not on this disk, seen from here; {HOW_TO_KEEP}")
        return cls(origin.model, rows, origin.settings.features)

    def features(self, row_index: NDArray[np.int64]) -> SampleFeatures:
        """Run the model over the rows, in the build's batches."""
        hidden_NH, residual_NV, positions = self._run(self.rows.rows(row_index))
        return SampleFeatures(row_index, hidden_NH, residual_NV, positions, "the model")

    def alone(self, row_index: NDArray[np.int64]) -> tuple[NDArray[np.float32], csr_array]:
        """Pooled features of each row run by itself."""
        parts = [self._run(self.rows.rows(row_index[i : i + 1])) for i in range(len(row_index))]
        return np.concatenate([part[0] for part in parts]), vstack([part[1] for part in parts], format="csr")

    def _run(self, rows: Rows) -> tuple[NDArray[np.float32], csr_array, PositionFeatures]:
        specs = (self.settings.pooling, self.settings.token_positions)
        vocab = self.model.vocab_size
        hidden, residual, places, positions = [], [], [], []
        for index, batch in row_passes(self.model, rows, specs, self.settings.top_k):
            pooled = pool(*batch.take(0), len(index), vocab)
            hidden.append(pooled.hidden_NH)
            residual.append(pooled.residual_NV)
            places.append(index)
            positions.append(_positions(batch, index, vocab))
        back = np.argsort(np.concatenate(places))
        return np.concatenate(hidden)[back], vstack(residual, format="csr")[back], _joined(positions)


def _is_at_hand(name: str) -> bool:
    """Whether a model can be loaded without asking a hub."""
    if Path(name).exists():
        return True
    return bool(REPOSITORY.fullmatch(name)) and isinstance(try_to_load_from_cache(name, "config.json"), str)


def _positions(batch: BatchFeatures, index: NDArray[np.int64], vocab: int) -> PositionFeatures:
    hidden_PH, residual, row_P = batch.take(1)
    return PositionFeatures(
        hidden_PH.float().cpu().numpy(),
        sparse_rows(residual.index_PK.cpu().numpy(), residual.value_PK.float().cpu().numpy(), vocab),
        index[row_P.cpu().numpy()],
    )


def sparse_rows(index_PK: NDArray[np.integer], value_PK: NDArray[np.floating], vocab: int) -> csr_array:
    """Residuals of P positions as a matrix; a coordinate that is there twice adds up."""
    n, k = index_PK.shape
    entries = value_PK.astype(np.float32).ravel(), index_PK.ravel().astype(np.int64), np.arange(0, n * k + 1, k)
    found = csr_array(entries, shape=(n, vocab))
    found.sum_duplicates()
    found.eliminate_zeros()
    return found


def _joined(parts: Sequence[PositionFeatures]) -> PositionFeatures:
    row_P = np.concatenate([part.row_P for part in parts])
    order = np.argsort(row_P, kind="stable")
    return PositionFeatures(
        np.concatenate([part.hidden_PH for part in parts])[order],
        vstack([part.residual_PV for part in parts], format="csr")[order],
        row_P[order],
    )


def sample_rows(artifact: Artifact, n_rows: int, seed: int) -> NDArray[np.int64]:
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
    artifact: Artifact, environment: Environment, row_index: NDArray[np.int64], subsets: int
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
            f"the sample, expected at least {MIN_SUBSETS}; raise --rows"
        )
    return np.asarray(weight_BN[total_B > 0] / total_B[total_B > 0, None])


def sample_features(artifact: Artifact, row_index: NDArray[np.int64], rerun: Rerun | GraspError) -> SampleFeatures:
    """Kept features where they are, else those of the model.

    Raises:
        GraspError: there are none, and the model cannot be run again (`rerun` says why).
    """
    if len(artifact.features.finished) == artifact.grid.n_shards:
        return _kept(artifact, row_index)
    if isinstance(rerun, GraspError):
        raise rerun
    return rerun.features(row_index)


def _kept(artifact: Artifact, row_index: NDArray[np.int64]) -> SampleFeatures:
    size, vocab = artifact.grid.shard_rows, int(artifact.manifest.details["vocab_size"])
    hidden, residual, positions = [], [], []
    done = 0
    for k in np.unique(row_index // size):
        here = row_index[row_index // size == k] - k * size
        shard = ShardForward.unspool(artifact.features.read(int(k)), vocab)
        hidden.append(shard.pooled.hidden_NH[here])
        residual.append(shard.pooled.residual_NV[here])
        if shard.positions is not None:
            place = np.full(size, -1, dtype=np.int64)
            place[here] = np.arange(len(here)) + done
            chosen = place[shard.positions.row_P] >= 0
            index_PK, value_PK = shard.positions.index_PK[chosen], shard.positions.value_PK[chosen]
            positions.append(
                PositionFeatures(
                    shard.positions.hidden_PH[chosen].astype(np.float32),
                    sparse_rows(index_PK, value_PK, vocab),
                    place[shard.positions.row_P[chosen]],
                )
            )
        done += len(here)
    return SampleFeatures(
        row_index,
        np.concatenate(hidden).astype(np.float32),
        vstack(residual, format="csr"),
        _joined(positions) if positions else None,
        "kept features",
    )
