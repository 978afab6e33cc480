"""Writing an artifact: created or resumed under a lock, shard by shard, the manifest last; or targets added to one.

The columns of new targets are new arrays beside the old ones. Nothing that is there is written again, so the artifact
stays readable as it was until the manifest is replaced.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.artifact.layout import (
    BUILD,
    FEATURES,
    MANIFEST,
    MARKER,
    PER_UNIT,
    ROWS,
    SUM,
    TOKENS,
    ShardGrid,
    part_dir,
    part_file,
    row_file,
)
from grasp.artifact.manifest import (
    SIGNED_MANIFEST,
    ArrayEntry,
    BuildRecord,
    Manifest,
    provenance,
)
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.shards import ArraySpec, PartWriter
from grasp.artifact.spool import FeatureSpool
from grasp.artifact.tables import assemble_rows, check_units, row_name, shard_table
from grasp.errors import ArtifactError, ShapeError
from grasp.files import FileEntry, checksum, entry_of, is_part, out_of_space, own_directory, write_whole
from grasp.store.contents import parquet_bytes, tensor_bytes
from grasp.store.locks import DirectoryLock
from grasp.store.records import read_record


class ArtifactWriter(PartWriter):
    """One build being written: a shard is visible only when whole, the artifact only when complete."""

    DONE = "is complete; a finished artifact is not written again"

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
        lock: DirectoryLock | None = None,
    ) -> Self:
        """Create the artifact at `path`, or go on with the build that was begun there.

        Args:
            identity: all that decides what the numbers will be (fingerprints, settings); JSON.
            arrays: name -> spec. Arrays whose name begins with `relevance_` have one column for each unit.
            dtype: `float16` or `float32`, of every array.
            lock: taken on `path` beforehand; none: taken here. `close` gives it back.
        Raises:
            ArtifactError: locked by another writer; another identity than the build in progress, every
                differing field named.
        """
        path = Path(path)
        writer = cls(path, 0, ShardGrid(n_rows, shard_rows), arrays, dtype, identity)
        widths = {name: spec.width for name, spec in arrays.items() if name.startswith(PER_UNIT)}
        if len(set(widths.values())) > 1:
            raise ShapeError(f"relevance arrays have different widths {widths}; each has one column for each unit")
        try:
            writer.claim(lock or lock_artifact(path))
        except BaseException:
            writer.close()
            raise
        return writer

    @property
    def complete(self) -> bool:
        """Whether the artifact was finished already: nothing is left to write."""
        return (self.root / MANIFEST).exists()

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
        start, stop = self.grid.bounds(k)
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
        unknown = sorted((gains or {}).keys() - self.arrays)
        wrong = {name: gain for name, gain in (gains or {}).items() if not 0 < gain < np.inf}
        if unknown or wrong:
            raise ArtifactError(f"gains: no such arrays {unknown}, not positive and finite {wrong}")
        check_units(units, next((spec.width for name, spec in self.arrays.items() if name.startswith(PER_UNIT)), None))
        missing = sorted(set(range(self.grid.n_shards)) - self.finished)
        if missing:
            raise ArtifactError(f"{self.root}: {self.progress()}; write the others first, from shard {missing[0]}")
        contents = moment_bytes(moments, self.sums() if sums is None else sums)
        with out_of_space(f"{self.root}: not finished", self.progress):
            assemble_rows([self.root / row_file(k) for k in range(self.grid.n_shards)], self.root / ROWS)
            write_whole(self.root / part_file("units", ".parquet", 0), parquet_bytes(units))
            write_whole(self.root / part_file("moments", ".safetensors", 0), contents)
            SIGNED_MANIFEST.write(self.root, self._manifest(given, units, gains or {}, rows_kept))

    def _manifest(
        self, given: Mapping[str, Any], units: pa.Table, gains: Mapping[str, float], rows_kept: bool
    ) -> Manifest:
        kept = (self.root / TOKENS).iterdir() if rows_kept else ()
        groups = self._groups({})
        names = (BUILD, ROWS, part_file("units", ".parquet", 0), part_file("moments", ".safetensors", 0))
        files: dict[str, FileEntry] = {name: entry_of(self.root / name) for name in names}
        files |= self._files()
        kept_features = FeatureSpool(self.root / FEATURES).entries()
        files |= {f"{FEATURES}/{name}": entry for name, entry in kept_features.items()}
        return Manifest(
            n_rows=self.grid.n_rows,
            shard_rows=self.grid.shard_rows,
            targets=dict(Counter(units["target"].to_pylist())),
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
    return DirectoryLock(path, MARKER)


def is_artifact(path: Path) -> bool:
    """Whether a complete artifact lies there."""
    try:
        return bool(SIGNED_MANIFEST.read(path))
    except ArtifactError:
        return False


def moment_bytes(moments: Mapping[str, NDArray[Any]], sums: Mapping[str, NDArray[np.float64]]) -> bytes:
    """Moments and the totals over the rows as one safetensors file."""
    clash = sorted(name for name in moments if name.startswith(SUM))
    if clash:
        raise ArtifactError(f"moments: {clash}: names beginning with {SUM!r} are kept for the sums over rows")
    return tensor_bytes({**moments, **{SUM + name: value for name, value in sums.items()}})


class ArtifactExtension(PartWriter):
    """New units of an artifact being written, with the discipline of a build: lock, whole shards, resume."""

    DONE = "these targets are in the artifact already"
    _artifact: ArtifactReader
    _units: pa.Table

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        identity: Mapping[str, Any],
        units: pa.Table,
        arrays: Mapping[str, ArraySpec],
        dtype: str,
        lock: DirectoryLock | None = None,
    ) -> Self:
        """Begin to add `units`, or go on with the extension that was begun.

        Args:
            identity: all that decides what the numbers will be; JSON.
            units: of targets that the artifact does not have; one for each new column, in their order.
            arrays: name of a relevance array -> spec of its new columns; all relevance arrays.
            dtype: of the new columns; need not be that of the old ones.
        Raises:
            ArtifactError: as `ArtifactWriter.open`; also a target that is there already, and arrays that are
                not the artifact's relevance arrays.
        """
        path = Path(path)
        ArtifactReader.open(path)  # before the lock, which would make the directory
        held = lock or lock_artifact(path)
        try:
            artifact = ArtifactReader.open(path)
            check_units(units, _common_width(artifact, arrays))
            names = list(zip(units["target"].to_pylist(), units["unit_id"].to_pylist(), strict=True))
            part, key = len(artifact.manifest.units), {**identity, "units": checksum(repr(names).encode())}
            extension = cls(path, part, artifact.grid, arrays, dtype, key)
            builds = {earlier: artifact.path / part_dir(earlier) / BUILD for earlier in range(1, part)}
            done = next((k for k, at in builds.items() if read_record(at, BuildRecord) == extension.record), None)
            if done is None:
                if known := sorted(set(units["target"].to_pylist()) & set(artifact.targets)):
                    raise ArtifactError(
                        f"{artifact.path}: has targets {known} already; add only targets that it does not have, "
                        "or build a new artifact"
                    )
            else:
                extension = cls(path, done, artifact.grid, arrays, dtype, key)
            extension._artifact, extension._units = artifact, units
            extension.claim(held)
            return extension
        except BaseException:
            held.release()
            raise

    @property
    def complete(self) -> bool:
        """Whether these units are in the artifact already: nothing is left to write."""
        return self._part < len(self._artifact.manifest.units)

    def write_shard(self, k: int, arrays: Mapping[str, NDArray[Any]], sums: Mapping[str, NDArray[np.float64]]) -> None:
        """Write the new columns of shard k whole, in any order of k.

        Args:
            arrays: name -> (rows of the shard, new units).
            sums: name -> float64 totals over the rows of the shard, joined on the last axis to the totals of
                that name which the artifact has.
        Raises:
            ArtifactError, ShapeError: as `ArtifactWriter.write_shard`.
        """
        self._require_writable()
        unknown = sorted(set(sums) - set(self._artifact.sums))
        if unknown:
            raise ArtifactError(f"sums: the artifact has no {unknown} to join to, only {list(self._artifact.sums)}")
        start, _ = self.grid.bounds(k)

        def name_of(i: int) -> str:
            return f"row {start + i} (row_id {self._artifact.rows(np.array([start + i]))['row_id'][0].as_py()!r})"

        self._write(k, arrays, None, sums, name_of)

    def finish(
        self, *, manifest: Mapping[str, Any] | None = None, moments: Mapping[str, NDArray[Any]] | None = None
    ) -> None:
        """Replace the manifest: from now on the new targets are part of the artifact.

        Args:
            manifest: entries that replace those of the same name within `made_by`, `fingerprints`, `settings`,
                `skipped` and `details`.
            moments: further moments, under names that the artifact does not have yet.
        """
        self._require_writable()
        given = provenance(manifest or {})
        clash = sorted(set(moments or {}) & set(self._artifact.moments))
        if clash:
            raise ArtifactError(f"moments: the artifact has {clash} already; give new names")
        contents = moment_bytes(moments or {}, self.sums())
        units, moment_file = (part_file(*names, self._part) for names in _TABLES)
        with out_of_space(f"{self.root}: the targets were not added", self.progress):
            write_whole(self.root / units, parquet_bytes(self._units))
            write_whole(self.root / moment_file, contents)
            SIGNED_MANIFEST.write(self.root, self._manifest(given, units, moment_file))
        self._artifact = ArtifactReader.open(self.root)

    def _manifest(self, given: Mapping[str, dict[str, Any]], units: str, moments: str) -> Manifest:
        old = self._artifact.manifest
        build = (part_dir(self._part) / BUILD).as_posix()
        new_files: dict[str, FileEntry] = {name: entry_of(self.root / name) for name in (build, units, moments)}
        groups = self._groups({name: entry.width for name, entry in old.arrays.items()})
        widened = {
            name: ArrayEntry(
                width=group.stop,
                unit=old.arrays[name].unit,
                sign=old.arrays[name].sign,
                gain=old.arrays[name].gain,
                groups=(*old.arrays[name].groups, group),
            )
            for name, group in groups.items()
        }
        return old.model_copy(
            update={
                "targets": old.targets | dict(Counter(self._units["target"].to_pylist())),
                "arrays": old.arrays | widened,
                "units": (*old.units, units),
                "moments": (*old.moments, moments),
                "files": old.files | new_files | self._files(),
                **{name: getattr(old, name) | entries for name, entries in given.items()},
            }
        )


_TABLES = (("units", ".parquet"), ("moments", ".safetensors"))


def _common_width(artifact: ArtifactReader, arrays: Mapping[str, ArraySpec]) -> int:
    """Number of new columns, the same in all relevance arrays, which mean what the old columns mean."""
    wanted = [name for name in artifact.array_names if name.startswith(PER_UNIT)]
    if sorted(wanted) != sorted(arrays):
        raise ArtifactError(
            f"{artifact.path}: arrays to extend: got {sorted(arrays)}, expected {sorted(wanted)}; where an earlier "
            "grasp built it, build it again with all targets"
        )
    if not wanted:
        raise ArtifactError(f"{artifact.path}: has no relevance arrays; targets cannot be added to it")
    widths = {spec.width for spec in arrays.values()}
    if len(widths) > 1:
        raise ArtifactError(f"arrays to extend: got widths {sorted(widths)}, expected one: a column for each unit")
    for name, spec in arrays.items():
        old = artifact.manifest.arrays[name]
        if (spec.unit, spec.sign) != (old.unit, old.sign):
            raise ArtifactError(
                f"{name}: got unit {spec.unit!r} and sign {spec.sign!r}, the artifact has {old.unit!r} "
                f"and {old.sign!r}; columns of one array mean one thing"
            )
    return widths.pop()
