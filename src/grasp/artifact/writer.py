"""Writing an artifact: created or resumed under a lock, shard by shard, the manifest last."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast, get_args

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
from grasp.artifact.manifest import (
    ArrayDtype,
    ArrayEntry,
    BuildRecord,
    Manifest,
    dump_json,
    plain_json,
    provenance,
    read_manifest,
    read_record,
    write_manifest,
)
from grasp.artifact.shards import ArraySpec, ShardWriter, parquet_bytes
from grasp.artifact.tables import assemble_rows, check_units, row_name, shard_table, units_per_target
from grasp.errors import ArtifactError, ShapeError
from grasp.files import (
    DirectoryLock,
    FileEntry,
    differences,
    entry_of,
    is_part,
    out_of_space,
    own_directory,
    remove_parts,
    write_whole,
)

__all__ = ["ArraySpec", "ArtifactWriter"]


class PartWriter:
    """What the build of an artifact and of an extension have in common: shards of their own, under one lock."""

    def __init__(self, path: Path, shards: ShardWriter, lock: DirectoryLock, *, owns_lock: bool) -> None:
        self.path = path
        self._shards = shards
        self._lock = lock
        self._owns_lock = owns_lock

    @property
    def n_shards(self) -> int:
        return self._shards.grid.n_shards

    @property
    def finished(self) -> frozenset[int]:
        """Shards that need not be written again."""
        return self._shards.finished

    def bounds(self, k: int) -> tuple[int, int]:
        """First row of shard k, and the row after its last."""
        return self._shards.grid.bounds(k)

    def close(self) -> None:
        """Give the lock back, if it was taken here."""
        if self._owns_lock:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_writable(self) -> None:
        if not self._lock.held:
            raise ArtifactError(f"{self.path}: this writer is closed")


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
        grid = ShardGrid(n_rows, shard_rows)
        shards = ShardWriter(path, 0, grid, arrays, array_dtype(dtype))
        _unit_columns(arrays)
        record = build_record(grid, arrays, dtype, identity)
        held = lock or lock_artifact(path)
        writer = cls(path, shards, held, owns_lock=lock is None)
        try:
            claim(path, record, resume=resume, over=f"delete {path}")
            remove_parts(path)
            shards.prepare()
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
        self._shards.write(k, arrays, table, sums, lambda i: row_name(table, start, i))

    def sums(self) -> dict[str, NDArray[np.float64]]:
        """Totals over all rows; all shards must be finished."""
        return self._shards.sums()

    def finish(
        self,
        *,
        manifest: Mapping[str, Any],
        moments: Mapping[str, NDArray[Any]],
        units: pa.Table,
        gains: Mapping[str, float] | None = None,
        rows_kept: bool = False,
    ) -> None:
        """Assemble what is left and write the manifest: from now on the artifact can be opened.

        Args:
            manifest: mappings `made_by`, `fingerprints`, `settings`, `skipped`, `details`, any of them.
            moments: what `ArtifactReader.moments` gives back.
            units: unit_id, target and whatever else; in the order of the columns of the relevance arrays.
            gains: name of an array -> what a reader multiplies it by; known only when all rows have been seen.
            rows_kept: tokens/ stays, and its checksums are taken.
        Raises:
            ArtifactError: shards are missing, units or gains do not fit, the disk is full.
        """
        self._require_writable()
        given = provenance(manifest)
        self._check_gains(gains or {})
        check_units(units, _unit_columns(self._shards.arrays))
        missing = sorted(set(range(self.n_shards)) - self.finished)
        if missing:
            raise ArtifactError(
                f"{self.path}: {self._shards.progress()}; write the others first, from shard {missing[0]}"
            )
        contents = moment_bytes(moments, self.sums())
        with out_of_space(f"{self.path}: not finished", self._shards.progress):
            assemble_rows([self._shards.table_path(k) for k in range(self.n_shards)], self.path / ROWS)
            write_whole(self.path / part_file("units", ".parquet", 0), parquet_bytes(units))
            write_whole(self.path / part_file("moments", ".safetensors", 0), contents)
            write_manifest(self.path, self._manifest(given, units, gains or {}, rows_kept))

    def _require_writable(self) -> None:
        super()._require_writable()
        if self.complete:
            raise ArtifactError(f"{self.path}: is complete; a finished artifact is not written again")

    def _check_gains(self, gains: Mapping[str, float]) -> None:
        unknown = sorted(gains.keys() - self._shards.arrays)
        wrong = {name: gain for name, gain in gains.items() if not 0 < gain < np.inf}
        if unknown or wrong:
            raise ArtifactError(f"gains: no such arrays {unknown}, not positive and finite {wrong}")

    def _manifest(
        self, given: Mapping[str, Any], units: pa.Table, gains: Mapping[str, float], rows_kept: bool
    ) -> Manifest:
        kept = (self.path / TOKENS).iterdir() if rows_kept else ()
        groups = self._shards.groups({})
        names = (BUILD, ROWS, part_file("units", ".parquet", 0), part_file("moments", ".safetensors", 0))
        files: dict[str, FileEntry] = {name: entry_of(self.path / name) for name in names}
        files |= self._shards.files()
        files |= FeatureSpool(self.path / "features").files(self.path)
        return Manifest(
            n_rows=self._shards.grid.n_rows,
            shard_rows=self._shards.grid.shard_rows,
            targets=units_per_target(units),
            arrays={
                name: ArrayEntry(
                    width=spec.width,
                    unit=spec.unit,
                    sign=spec.sign,
                    gain=gains.get(name, 1.0),
                    groups=(groups[name],),
                )
                for name, spec in self._shards.arrays.items()
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


def array_dtype(dtype: str) -> ArrayDtype:
    """`dtype`, if arrays can be stored in it."""
    known = get_args(ArrayDtype)
    if dtype not in known:
        raise ArtifactError(f"array_dtype: got {dtype!r}, expected one of {list(known)}")
    return cast(ArrayDtype, dtype)


def build_record(
    grid: ShardGrid, arrays: Mapping[str, ArraySpec], dtype: str, identity: Mapping[str, Any]
) -> BuildRecord:
    """What a resumed build must agree with, in every field."""
    return BuildRecord(
        n_rows=grid.n_rows,
        shard_rows=grid.shard_rows,
        arrays={name: spec.record(dtype) for name, spec in sorted(arrays.items())},
        identity=plain_json(identity, "identity"),
    )


def claim(directory: Path, record: BuildRecord, *, resume: bool, over: str) -> None:
    """Begin the build that `record` describes in `directory`, or make sure that it is the one begun there.

    Raises:
        ArtifactError: another build was begun there; `over` says how to start again.
    """
    path = directory / BUILD
    if not path.exists():
        if (directory / MANIFEST).exists():
            raise ArtifactError(f"{directory}: damaged: a {MANIFEST} but no {BUILD}; {over} to start again")
        directory.mkdir(parents=True, exist_ok=True)
        with out_of_space(str(directory), lambda: "nothing is written yet"):
            write_whole(path, dump_json(record))
        return
    if not resume:
        raise ArtifactError(
            f"{directory}: a build was begun here; run again with --resume to go on, or {over} to start again"
        )
    old, new = (each.model_dump(mode="json") for each in (read_record(path, BuildRecord), record))
    different = list(differences(old | old.pop("identity"), new | new.pop("identity")))
    if different:
        raise ArtifactError(
            f"{directory}: the build begun here is another one: {'; '.join(different)}; "
            f"go on with the old settings, choose another place, or {over} to start again"
        )


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
