"""Export of a two-dimensional map of the rows for Embedding Atlas (PyPI `embedding-atlas`), which reads Parquet.

The coordinates are the first two principal components of the concatenated hidden and residual sketches, so rows with
similar sketches are close to each other. Start with `write_atlas`.

Shape letters: N rows, D sketch width.
"""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.errors import ArtifactError, SettingsError
from grasp.files import atomic_path, claim_directory
from grasp.predict.predictor import SIMILARITY_SKETCHES, Predictor
from grasp.predict.scoring_rule import ScoringProtocol


def write_atlas(
    artifact: ArtifactReader,
    directory: Path,
    *,
    protocol: ScoringProtocol | None = None,
    targets: Sequence[str] | None = None,
) -> str:
    """Write a directory with one Parquet file: row_id, text, labels, relevance_TARGET, projection_x, projection_y.

    Memory: two coordinates and one effect per target for every row; the row table is read in batches.

    Returns:
        The command that opens the map in Embedding Atlas.

    Raises:
        ArtifactError: the artifact has no sketches.
        SettingsError: the directory cannot be written, holds other files, or is an input of the artifact.
        ProtocolError: the artifact does not fit the protocol, or has no such target.
    """
    names = [f"{half}_sketch" for half in SIMILARITY_SKETCHES if f"{half}_sketch" in artifact.array_names]
    if not names:
        raise ArtifactError(
            f"{artifact.location}: the artifact has no sketches, which the map is computed from; build it with "
            "features.hidden_width and features.residual_width above 0"
        )
    claim_directory(directory, ".grasp-atlas", lambda _: False, artifact.protected_paths)
    predictor = Predictor.from_artifact(artifact, protocol, targets)
    projection_N2 = _principal_coordinates(artifact, names)
    path, start = directory / "rows.parquet", 0
    try:
        with atomic_path(path) as part:
            writer = None
            for batch in artifact.row_batches():
                table = pa.Table.from_batches([batch]).drop_columns(["row_index"])
                table = table.rename_columns(["text" if name == "snippet" else name for name in table.column_names])
                rows = slice(start, start + batch.num_rows)
                for target, effect_N in zip(predictor.units.targets, predictor.effect_NT[rows].T, strict=True):
                    table = table.append_column(f"relevance_{target}", pa.array(effect_N, pa.float32()))
                for axis, coordinate_N in zip("xy", projection_N2[rows].T, strict=True):
                    table = table.append_column(f"projection_{axis}", pa.array(coordinate_N, pa.float32()))
                writer = writer or pq.ParquetWriter(part, table.schema, compression="zstd")
                writer.write_table(table)
                start = rows.stop
            if writer is not None:
                writer.close()
    except OSError as err:
        raise SettingsError(f"--atlas: got {directory}, which cannot be written ({err.strerror})") from err
    return f"embedding-atlas {shlex.quote(str(path))} --text text --x projection_x --y projection_y"


def _principal_coordinates(artifact: ArtifactReader, names: Sequence[str]) -> F64:
    """Return the principal coordinates of the rows, (N, 2); the second is 0 for a sketch of width 1."""

    def blocks() -> Iterator[F64]:
        for parts in zip(*(artifact.array_blocks(name) for name in names), strict=True):
            yield np.concatenate([block for _, block in parts], axis=1).astype(np.float64)

    # Covariance from two streaming sums, cov = E[x x^T] - E[x] E[x]^T, in float64; rows are never held all at once.
    sums = [(block.sum(axis=0), block.T @ block) for block in blocks()]
    mean_D = np.sum([total_D for total_D, _ in sums], axis=0) / artifact.n_rows
    second_moment_DD = np.sum([square_DD for _, square_DD in sums], axis=0) / artifact.n_rows
    _, axes_DD = np.linalg.eigh(second_moment_DD - np.outer(mean_D, mean_D))  # eigenvalues ascend
    axes_D2 = axes_DD[:, ::-1][:, :2]
    axes_D2 = axes_D2 * np.where(axes_D2.sum(axis=0) < 0, -1.0, 1.0)  # eigenvectors have no sign: fix one
    projection_N2 = np.concatenate([(block - mean_D) @ axes_D2 for block in blocks()])
    return np.pad(projection_N2, ((0, 0), (0, 2 - projection_N2.shape[1])))
