"""A small artifact to write and read, with values that float16 represents exactly, so that rounding hides no error."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from grasp.artifact.manifest import MARKER
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import ArraySpec, ArtifactWriter, lock_artifact


@dataclass
class World:
    n_rows: int = 23
    shard_rows: int = 5
    n_units: int = 4
    width: int = 3
    dtype: str = "float16"
    identity: dict[str, Any] = field(default_factory=lambda: {"model": {"dtype": "float32"}, "seed": 0})

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)
        self.scale = np.array([0.25, 1.0, 8.0, 2.0][: self.n_units] + [1.0] * max(0, self.n_units - 4))
        steps = rng.integers(-500, 500, size=(self.n_rows, self.n_units))
        self.values = {
            "hidden_sketch": rng.integers(-99, 99, size=(self.n_rows, self.width)).astype(np.float32) / 16,
            "relevance_output_layer": (steps * self.scale).astype(np.float32),
        }
        self.specs = {
            "hidden_sketch": ArraySpec(self.width, "1", "none"),
            "relevance_output_layer": ArraySpec(self.n_units, "1", "positive: lowers loss", self.scale),
        }
        self.rows = pa.table(
            {
                "row_id": [f"row-{i}" for i in range(self.n_rows)],
                "doc_id": [f"doc-{i // 2}" for i in range(self.n_rows)],
                "n_tokens": pa.array(np.arange(self.n_rows) + 2, type=pa.int32()),
                "loss": rng.random(self.n_rows).astype(np.float32),
                "snippet": [f"text of row {i}" for i in range(self.n_rows)],
                "topic": [["games", "science", None][i % 3] for i in range(self.n_rows)],
            }
        )
        self.units = pa.table(
            {
                "unit_id": [str(e) for e in range(self.n_units)],
                "target": ["sciq" if e < self.n_units - 1 else "openbookqa" for e in range(self.n_units)],
            }
        )
        self.moments = {
            "mean_hidden": rng.random(self.width),
            "step": np.array(3, dtype=np.int64),
            "covariance": rng.random((self.width, self.width)).T,
        }
        self.manifest = {
            "made_by": {"grasp": "0.1.0"},
            "fingerprints": {"corpus": "abc"},
            "settings": {"shard_rows": self.shard_rows},
            "skipped": {"empty": 2},
        }

    @contextmanager
    def open(self, path: Path, **changes: Any) -> Iterator[ArtifactWriter]:
        arguments: dict[str, Any] = {
            "identity": self.identity,
            "n_rows": self.n_rows,
            "shard_rows": self.shard_rows,
            "arrays": self.specs,
            "dtype": self.dtype,
        }
        with lock_artifact(path):
            yield ArtifactWriter.open(path, **(arguments | changes))

    def begin(self, path: Path, **changes: Any) -> ArtifactWriter:
        """Begin or resume an artifact without writing a shard."""
        with self.open(path, **changes) as writer:
            return writer

    def shard(self, k: int) -> tuple[dict[str, np.ndarray], pa.Table, dict[str, np.ndarray]]:
        part = slice(k * self.shard_rows, min((k + 1) * self.shard_rows, self.n_rows))
        arrays = {name: values[part] for name, values in self.values.items()}
        sums = {name: values.astype(np.float64).sum(axis=0) / 3 for name, values in arrays.items()}
        return arrays, self.rows.slice(part.start, part.stop - part.start), sums

    def fill(self, writer: ArtifactWriter, shards: Iterable[int] | None = None) -> None:
        for k in range(writer.grid.n_shards) if shards is None else shards:
            if k in writer.left:
                writer.write_shard(k, *self.shard(k))

    def finish(self, writer: ArtifactWriter) -> None:
        writer.finish(manifest=self.manifest, moments=self.moments, units=self.units)

    def write(self, path: Path) -> Path:
        with self.open(path) as writer:
            self.fill(writer)
            self.finish(writer)
        return path

    @property
    def new_units(self) -> pa.Table:
        return pa.table({"unit_id": ["a", "b"], "target": ["boolq", "piqa"]})

    @property
    def new_values(self) -> np.ndarray:
        return self.values["relevance_output_layer"][:, [1, 0]] * np.float32(64)

    @contextmanager
    def open_extension(self, path: Path, **changes: Any) -> Iterator[ArtifactWriter]:
        spec = ArraySpec(2, "1", "positive: lowers loss", np.array([64.0, 32.0]))
        arguments: dict[str, Any] = {
            "identity": {"seed": 1},
            "units": self.new_units,
            "arrays": {"relevance_output_layer": spec},
            "dtype": "float32",
        }
        ArtifactReader.open(path)  # before the lock, which would make the directory
        with lock_artifact(path):
            yield ArtifactWriter.extend(path, **(arguments | changes))

    def fill_extension(self, extension: ArtifactWriter, shards: Iterable[int] | None = None) -> None:
        for k in range(extension.grid.n_shards) if shards is None else shards:
            if k in extension.left:
                block = self.new_values[slice(*extension.grid.bounds(k))]
                extension.write_shard(k, {"relevance_output_layer": block}, None, {})

    def extend(self, path: Path) -> Path:
        with self.open_extension(path) as extension:
            if not extension.complete:
                self.fill_extension(extension)
                extension.finish(manifest={"fingerprints": {"targets": "new"}}, moments={"more": np.arange(3.0)})
        return path


def contents(path: Path) -> dict[str, bytes]:
    """Return every file of a directory except the marker, whose text may be a process id."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != MARKER)
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def main() -> None:
    """Run a slow build in a separate process that a test kills; `--hold` only takes the lock."""
    world = World(n_rows=60, shard_rows=2)
    with world.open(Path(sys.argv[1])) as writer:
        while "--hold" in sys.argv:
            time.sleep(1)
        for k in range(writer.grid.n_shards):
            world.fill(writer, [k])
            time.sleep(0.01)
        time.sleep(60)


if __name__ == "__main__":
    main()
