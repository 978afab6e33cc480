"""Writing an artifact: created or resumed under a lock, shard by shard, the manifest last."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.artifact.features import FeatureSpool, tensor_bytes
from grasp.artifact.layout import (
    BUILD,
    MANIFEST,
    MARKER,
    PER_UNIT,
    ROWS,
    SUM,
    TOKENS,
    ShardGrid,
    part_file,
)
from grasp.artifact.manifest import ArrayEntry, Manifest, provenance, read_manifest, write_manifest
from grasp.artifact.shards import ArraySpec, PartWriter, parquet_bytes
from grasp.artifact.tables import assemble_rows, check_units, row_name, shard_table, units_per_target
from grasp.errors import ArtifactError, ShapeError
from grasp.files import FileEntry, entry_of, is_part, out_of_space, own_directory, write_whole
from grasp.locks import DirectoryLock

__all__ = ["ArraySpec", "ArtifactWriter"]


class ArtifactWriter(PartWriter):
    """One build being written: a shard is visible only when whole, the artifact only when complete."""

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        identity: Mapping[str, Any],
        n_rows: int,
        shard_rows: int,
        arrays: Mapping[str, ArraySpec],
        dtype: str,
        resume: bool = True,
        lock: DirectoryLock | None = None,
    ) -> Self:
        """Create the artifact at `path`, or go on with the build that was begun there.

        Args:
            identity: all that decides what the numbers will be (fingerprints, settings); JSON.
            arrays: name -> spec. Arrays whose name begins with `relevance_` have one column for each unit.
            dtype: `float16` or `float32`, of every array.
            resume: False refuses a build that is there already.
            lock: taken on `path` beforehand (and kept after `close`); none: taken here.
        Raises:
            ArtifactError: locked by another writer; another identity than the build in progress, every
                differing field named; `resume` is False and there is a build.
        """
        path = Path(path)
        writer = cls(path, 0, ShardGrid(n_rows, shard_rows), arrays, dtype, identity)
        _unit_columns(arrays)
        try:
            writer.begin(lock or lock_artifact(path), owns_lock=lock is None, resume=resume)
        except BaseException:
            writer.close()
            raise
        return writer

    @property
    def complete(self) -> bool:
        """Whether the artifact was finished already: nothing is left to write."""
        return (self.path / MANIFEST).exists()

    def write_shard(
        self,
        k: int,
        arrays: Mapping[str, NDArray[Any]],
        rows: pa.Table,
        sums: Mapping[str, NDArray[np.float64]],
    ) -> None:
        """Write shard k whole, in any order of k.

        Args:
            arrays: name -> (rows of the shard, width).
            rows: row_id, doc_id, n_tokens, loss, snippet and labels, in row order; row_index is added here.
            sums: name -> float64 totals over the rows of the shard; added up over shards in row order.
        Raises:
            ArtifactError: a number is not finite or does not fit the stored type (array, row and column
                named); the disk is full (nothing of this shard is left); the shard is finished already.
            ShapeError: an array or the row table does not have the rows of the shard.
        """
        self._require_writable()
        start, stop = self.bounds(k)
        table = shard_table(rows, start, stop)
        self._write(k, arrays, table, sums, lambda i: row_name(table, start, i))

    def finish(
        self,
        *,
        manifest: Mapping[str, Any],
        moments: Mapping[str, NDArray[Any]],
        units: pa.Table,
        sums: Mapping[str, NDArray[np.float64]] | None = None,
        gains: Mapping[str, float] | None = None,
        rows_kept: bool = False,
    ) -> None:
        """Assemble what is left and write the manifest: from now on the artifact can be opened.

        Args:
            manifest: mappings `made_by`, `fingerprints`, `settings`, `skipped`, `details`, any of them.
            moments: what `ArtifactReader.moments` gives back.
            units: unit_id, target and whatever else; in the order of the columns of the relevance arrays.
            sums: totals over all rows, where they are known better than from the shards; None: of the shards.
            gains: name of an array -> what a reader multiplies it by; known only when all rows have been seen.
            rows_kept: tokens/ stays, and its checksums are taken.
        Raises:
            ArtifactError: shards are missing, units or gains do not fit, the disk is full.
        """
        self._require_writable()
        given = provenance(manifest)
        self._check_gains(gains or {})
        check_units(units, _unit_columns(self.arrays))
        missing = sorted(set(range(self.n_shards)) - self.finished)
        if missing:
            raise ArtifactError(f"{self.path}: {self.progress()}; write the others first, from shard {missing[0]}")
        contents = moment_bytes(moments, self.sums() if sums is None else sums)
        with out_of_space(f"{self.path}: not finished", self.progress):
            assemble_rows([self.path / self._relative(k, ".parquet") for k in range(self.n_shards)], self.path / ROWS)
            write_whole(self.path / part_file("units", ".parquet", 0), parquet_bytes(units))
            write_whole(self.path / part_file("moments", ".safetensors", 0), contents)
            write_manifest(self.path, self._manifest(given, units, gains or {}, rows_kept))

    def _require_writable(self) -> None:
        super()._require_writable()
        if self.complete:
            raise ArtifactError(f"{self.path}: is complete; a finished artifact is not written again")

    def _check_gains(self, gains: Mapping[str, float]) -> None:
        unknown = sorted(gains.keys() - self.arrays)
        wrong = {name: gain for name, gain in gains.items() if not 0 < gain < np.inf}
        if unknown or wrong:
            raise ArtifactError(f"gains: no such arrays {unknown}, not positive and finite {wrong}")

    def _manifest(
        self, given: Mapping[str, Any], units: pa.Table, gains: Mapping[str, float], rows_kept: bool
    ) -> Manifest:
        kept = (self.path / TOKENS).iterdir() if rows_kept else ()
        groups = self._groups({})
        names = (BUILD, ROWS, part_file("units", ".parquet", 0), part_file("moments", ".safetensors", 0))
        files: dict[str, FileEntry] = {name: entry_of(self.path / name) for name in names}
        files |= self._files()
        files |= FeatureSpool(self.path / "features").files(self.path)
        return Manifest(
            n_rows=self.grid.n_rows,
            shard_rows=self.grid.shard_rows,
            targets=units_per_target(units),
            arrays={
                name: ArrayEntry(
                    width=spec.width,
                    unit=spec.unit,
                    sign=spec.sign,
                    gain=gains.get(name, 1.0),
                    groups=(groups[name],),
                )
                for name, spec in self.arrays.items()
            },
            units=(part_file("units", ".parquet", 0),),
            moments=(part_file("moments", ".safetensors", 0),),
            files=files,
            rows_kept={f"{TOKENS}/{file.name}": entry_of(file) for file in sorted(kept) if not is_part(file)},
            **given,
        )


def lock_artifact(path: Path) -> DirectoryLock:
    """Make the directory `path` an artifact's, if it is new or empty, and keep other writers out of it.

    Raises:
        ArtifactError: another process, or another writer of this one, is at work there.
        SettingsError: something else lies there, of which nothing is touched.
    """
    own_directory(path, MARKER, is_artifact)
    return DirectoryLock.acquire(path, MARKER)


def is_artifact(path: Path) -> bool:
    """Whether a complete artifact lies there."""
    try:
        return bool(read_manifest(path))
    except ArtifactError:
        return False


def moment_bytes(moments: Mapping[str, NDArray[Any]], sums: Mapping[str, NDArray[np.float64]]) -> bytes:
    """Moments and the totals over the rows as one safetensors file."""
    clash = sorted(name for name in moments if name.startswith(SUM))
    if clash:
        raise ArtifactError(f"moments: {clash}: names beginning with {SUM!r} are kept for the sums over rows")
    return tensor_bytes({**moments, **{SUM + name: value for name, value in sums.items()}})


def _unit_columns(arrays: Mapping[str, ArraySpec]) -> int | None:
    widths = {name: spec.width for name, spec in arrays.items() if name.startswith(PER_UNIT)}
    if len(set(widths.values())) > 1:
        raise ShapeError(f"relevance arrays have different widths {widths}; each has one column for each unit")
    return next(iter(widths.values()), None)
