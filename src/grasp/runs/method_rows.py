"""Rows ranked by a published method: its stored scores, by blocks of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.extract.progress import Progress, Silent
from grasp.predict.row_arrays import F32, Blocks
from grasp.runs.configured import ConfiguredMethod
from grasp.runs.contract import MethodScores
from grasp.runs.development import Scored
from grasp.runs.environment import Environment
from grasp.runs.material import Material
from grasp.runs.method_predictions import scores
from grasp.runs.methods import retrained


@dataclass(frozen=True, slots=True)
class MethodRows:
    """The rows of an artifact under the scores of a method, which are its one array."""

    artifact: ArtifactReader
    label: str
    found: MethodScores

    @property
    def n_rows(self) -> int:
        return self.artifact.n_rows

    @property
    def array_names(self) -> tuple[str, ...]:
        return (f"relevance_{self.label}",)

    def unit_columns(self, target: str) -> NDArray[np.int64]:
        """Columns of the target's units: those of the artifact."""
        return self.artifact.unit_columns(target)

    def array_blocks(
        self, name: str, *, columns: NDArray[np.int64] | None = None, block_rows: int | None = None
    ) -> Blocks:
        """Scores in blocks of the stored size; one that does not depend on the unit is the same in every column."""
        del name, block_rows
        chosen = np.arange(len(self.artifact.units)) if columns is None else columns
        for start, block in self.found:
            own: F32 = block.astype(np.float32)
            yield start, own[:, chosen] if own.shape[1] > 1 else np.repeat(own, len(chosen), axis=1)


def method_rows(
    artifact: ArtifactReader,
    configured: ConfiguredMethod,
    *,
    environment: Environment | None = None,
    checkpoints: Sequence[Path] = (),
    cache: Path | None = None,
    progress: Progress | None = None,
) -> MethodRows:
    """Score the rows by a method, unless that was done before.

    Args:
        environment: for a method that is made from retrained subsets.
    Raises:
        GraspError: what the method needs is not there, or it scores no rows.
    """
    known = None
    if environment is not None:
        scored = Scored.of(environment, artifact)
        known = retrained(scored, environment.utilities().of(*scored.renamed.values()))
    material = Material(artifact, checkpoint_places=tuple(checkpoints), retrained=known, progress=progress or Silent())
    return MethodRows(artifact, configured.label, scores(configured, material, cache))


def method_values(rows: MethodRows, target: str) -> NDArray[np.float64]:
    """Score of every row for a target, the mean over its units, (N,)."""
    blocks = rows.array_blocks(rows.array_names[0], columns=rows.unit_columns(target))
    return np.concatenate([block.mean(axis=1, dtype=np.float64) for _, block in blocks])
