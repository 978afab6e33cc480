"""Write an artifact shard by shard, the manifest last, or add targets to a finished one. Builds are resumable.

Targets that are added later are an extension: its columns are a new group of each relevance array, in files of their
own (see `artifact/manifest.py`). Existing files are not rewritten, so the artifact
stays readable until the manifest is replaced. Start with `ArtifactWriter.open` and `ArtifactWriter.extend`.
"""

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.arrays import F32, F64
from grasp.artifact.manifest import (
    BUILD,
    CHUNK,
    FEATURES,
    MANIFEST,
    MARKER,
    PER_UNIT,
    PROVENANCE,
    ROW_COLUMNS,
    ROWS,
    RUN,
    SCALE,
    SHARD_ROWS,
    SIGNED_MANIFEST,
    SUM,
    TOKENS,
    ArrayDtype,
    ArrayEntry,
    ArrayFiles,
    BuildRecord,
    BuiltShards,
    ColumnGroup,
    Manifest,
    ShardGrid,
    of_part,
)
from grasp.artifact.reader import ArtifactReader
from grasp.errors import ArtifactError, GraspError
from grasp.files import (
    FileEntry,
    atomic_path,
    checksum,
    claim_directory,
    entry_of,
    is_part,
    remove_parts,
    report_full_disk,
    write_atomically,
)
from grasp.store.contents import npy_bytes, parquet_bytes, tensor_bytes
from grasp.store.directory import Content
from grasp.store.locks import locked
from grasp.store.records import plain_json, read_record

_GROUP_ROWS = 65_536  # rows of a Parquet row group: fast to scan, small in memory


@contextmanager
def lock_artifact(path: Path) -> Iterator[None]:
    """Claim the directory `path` for an artifact, and lock it against other writers.

    After an error before anything was written, nothing remains.

    Raises:
        ArtifactError: another writer, in this or another process, holds the lock.
        SettingsError: the directory has other files, which are not touched.
    """
    is_new = not path.exists()
    claim_directory(path, MARKER, _is_artifact)
    with locked(path / MARKER):
        try:
            yield
        except GraspError:
            if is_new and {entry.name for entry in path.iterdir()} <= {MARKER, RUN}:
                shutil.rmtree(path)
            raise


def _is_artifact(path: Path) -> bool:
    try:
        return bool(SIGNED_MANIFEST.read(path))
    except ArtifactError:
        return False


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array of N rows: number of columns, meaning and sign of its numbers, and the divisor of each column."""

    width: int
    unit: str
    sign: str
    scale_E: NDArray[Any] | None = None  # powers of two, so that scaling does not round. Default: ones


class ArtifactWriter(BuiltShards):
    """Writer of a build, or of new units of an artifact. Shards and the manifest are written atomically.

    The caller holds `lock_artifact`.
    """

    def __init__(
        self,
        root: Path,
        part: int,
        grid: ShardGrid,
        arrays: Mapping[str, ArraySpec],
        dtype: str,
        identity: Mapping[str, Any],
    ) -> None:
        super().__init__(root, part, grid)
        self.complete = False  # nothing is left to write
        self._part, self._dtype, self._arrays = part, cast(ArrayDtype, dtype), dict(arrays)
        self._artifact: ArtifactReader | None = None  # the artifact that is extended
        self._units: pa.Table | None = None  # the units that are added
        self._scales: dict[str, F32] = {}
        for name, spec in arrays.items():
            scale_E = np.ones(spec.width) if spec.scale_E is None else np.asarray(spec.scale_E, dtype=np.float64)
            assert scale_E.shape == (spec.width,)
            assert (np.frexp(scale_E)[0] == 0.5).all(), "powers of two, so that scaling does not round"
            self._scales[name] = scale_E.astype(np.float32)
        self.record = BuildRecord(
            n_rows=grid.n_rows,
            shard_rows=grid.shard_rows,
            arrays={
                name: {
                    "width": spec.width,
                    "unit": spec.unit,
                    "sign": spec.sign,
                    "dtype": dtype,
                    "scale": checksum(self._scales[name].tobytes()),
                }
                for name, spec in sorted(arrays.items())
            },
            identity=plain_json(identity),
        )

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
    ) -> Self:
        """Start an artifact at `path`, or resume its build.

        Args:
            identity: everything that determines the numbers (fingerprints, settings), as JSON.
            arrays: name -> spec. Arrays with the prefix `relevance_` have one column per unit.
            dtype: dtype of every array, `float16` or `float32`.
        Raises:
            ArtifactError: the identity differs from that of the build in progress; the message names every field.
        """
        writer = cls(Path(path), 0, ShardGrid(n_rows, shard_rows), arrays, dtype, identity)
        writer._begin()
        return writer

    @classmethod
    def extend(
        cls,
        path: Path | str,
        *,
        identity: Mapping[str, Any],
        units: pa.Table,
        arrays: Mapping[str, ArraySpec],
        dtype: str,
    ) -> Self:
        """Start to add `units` to an artifact, or resume the extension.

        Args:
            identity: everything that determines the numbers, as JSON.
            units: units of targets that the artifact lacks, in the order of the new columns.
            arrays: name of a relevance array -> spec of its new columns; all relevance arrays.
            dtype: dtype of the new columns; may differ from that of the old ones.
        Raises:
            ArtifactError: as `open`; or a target exists already, or arrays differ from the artifact's relevance arrays.
        """
        artifact = ArtifactReader.open(path)
        wanted = [
            name
            for name, entry in artifact.manifest.arrays.items()
            if name.startswith(PER_UNIT) and not entry.targets  # new targets may lack a column of their own
        ]
        assert sorted(wanted) == sorted(arrays)
        assert {spec.width for spec in arrays.values()} == {len(units)}
        names = list(zip(units["target"].to_pylist(), units["unit_id"].to_pylist(), strict=True))
        key = {**identity, "units": checksum(repr(names).encode())}
        n_parts = len(artifact.manifest.units)
        extension = cls(artifact.path, n_parts, artifact.grid, arrays, dtype, key)
        for part in range(1, n_parts):
            if read_record(artifact.path / "extensions" / str(part) / BUILD, BuildRecord) == extension.record:
                extension = cls(artifact.path, part, artifact.grid, arrays, dtype, key)
                extension.complete = True
        known = sorted(set(units["target"].to_pylist()) & set(artifact.targets))
        if known and not extension.complete:
            raise ArtifactError(
                f"{artifact.path}: has targets {known} already; add only new targets, or build a new artifact"
            )
        extension._artifact, extension._units = artifact, units
        extension._begin()
        return extension

    def _begin(self) -> None:
        """Write the plan (identity of the build) and the scales, which come before the shards, or check those there."""
        if self._artifact is None:
            self.complete = (self.root / MANIFEST).exists()
        self.begin(self.record.model_dump(mode="json"))
        with report_full_disk(f"{self.root}: nothing was written", self.progress):
            for name, scale_E in self._scales.items():
                path, content = self.root / SCALE.format(of_part(name, self._part)), npy_bytes(scale_E)
                path.parent.mkdir(parents=True, exist_ok=True)
                remove_parts(path.parent)
                if not path.exists() or path.read_bytes() != content:
                    write_atomically(path, content)

    def write_shard(
        self, k: int, arrays: Mapping[str, NDArray[Any]], rows: pa.Table | None, sums: Mapping[str, F64]
    ) -> None:
        """Write shard k atomically, in any order of k.

        Args:
            arrays: name -> (rows of the shard, width).
            rows: row_id, doc_id, n_tokens, loss, snippet and labels, in row order; row_index is added. None for an
                extension, whose rows are those of the artifact.
            sums: name -> sums over the rows of the shard, float64, which `finish` adds over shards.
        Raises:
            ArtifactError: a number is not finite or does not fit the stored type (the message names array, row and
                column), or the disk is full (no file of this shard remains).
        """
        assert k in self.left
        assert arrays.keys() == self._arrays.keys()
        start, stop = self.grid.bounds(k)
        files: dict[str, Content] = {}
        for name, scale_E in self._scales.items():
            assert arrays[name].shape == (stop - start, len(scale_E)), name
            stored = encode(name, arrays[name], scale_E, self._dtype, start=start, rows=rows)
            files[CHUNK.format(of_part(name, self._part), k)] = npy_bytes(stored)
        if rows is not None:
            assert rows.num_rows == stop - start
            labels = [name for name in rows.column_names if name not in ROW_COLUMNS]
            table = rows.select([*ROW_COLUMNS, *labels]).replace_schema_metadata(None)
            table = table.add_column(0, "row_index", pa.array(np.arange(start, stop, dtype=np.int64)))
            files[SHARD_ROWS.format(k)] = parquet_bytes(table)
        sums_of_shard = {name: tuple(sums[name].tolist()) for name in sorted(sums)}
        self.put(f"{k:05d}", files, start=start, stop=stop, sums=sums_of_shard)

    def sums(self) -> dict[str, F64]:
        """Return the sums over all rows, added in row order: rounding does not depend on the order of writing."""
        sums = [self.mark(f"{k:05d}").sums for k in range(self.grid.n_shards)]
        return {name: np.asarray(sum(np.array(shard[name]) for shard in sums)) for name in sums[0]}

    def finish(
        self,
        *,
        manifest: Mapping[str, Any],
        moments: Mapping[str, NDArray[Any]],
        units: pa.Table | None = None,
        gains: Mapping[str, float] | None = None,
        rows_kept: bool = False,
    ) -> None:
        """Write the remaining files and the manifest, after which the artifact, or the extension, is complete.

        Args:
            manifest: any of the mappings `made_by`, `fingerprints`, `settings`, `skipped`, `details`; entries of an
                extension replace those of the same name.
            moments: arrays for `ArtifactReader.moments`, besides the sums over rows; those of an extension need new
                names.
            units: for a build, unit_id, target and further columns, in the order of the columns of the relevance
                arrays.
            gains: name of an array -> factor that readers apply; it depends on all rows.
            rows_kept: keep tokens/, and record its checksums.
        Raises:
            ArtifactError: the disk is full.
        """
        assert not self.complete
        assert not self.left
        assert manifest.keys() <= set(PROVENANCE)
        units = units if self._units is None else self._units
        assert units is not None
        assert self._artifact is None or not moments.keys() & self._artifact.moments.keys()
        provenance = {key: plain_json(value) for key, value in manifest.items()}
        arrays = {**moments, **{SUM + name: value for name, value in self.sums().items()}}
        what = "not finished" if self._artifact is None else "the targets were not added"
        with report_full_disk(f"{self.root}: {what}", self.progress):
            unit_file = f"{of_part('units', self._part)}.parquet"
            moment_file = f"{of_part('moments', self._part)}.safetensors"
            token_files = sorted((self.root / TOKENS).iterdir()) if rows_kept else ()
            files = self._write_tables({unit_file: parquet_bytes(units), moment_file: tensor_bytes(arrays)})
            if self._artifact is not None:
                before = self._artifact.manifest
            else:
                rows, shard = self.grid.n_rows, self.grid.shard_rows
                before = Manifest(n_rows=rows, shard_rows=shard, targets={}, arrays={}, units=(), moments=(), files={})
            entries = {
                name: _with_columns(
                    before.arrays.get(name),
                    spec,
                    of_part(name, self._part),
                    self._dtype,
                    gain=(gains or {}).get(name, 1.0),
                )
                for name, spec in self._arrays.items()
            }
            added = {
                "targets": before.targets | dict(Counter(units["target"].to_pylist())),
                "arrays": before.arrays | entries,
                "units": (*before.units, unit_file),
                "moments": (*before.moments, moment_file),
                "files": before.files | files,
                "rows_kept": before.rows_kept
                | {f"{TOKENS}/{file.name}": entry_of(file) for file in token_files if not is_part(file)},
            }
            updated_provenance = {name: getattr(before, name) | entries for name, entries in provenance.items()}
            SIGNED_MANIFEST.write(self.root, before.model_copy(update=added | updated_provenance))
        self.complete = True

    def _write_tables(self, contents: Mapping[str, bytes]) -> dict[str, FileEntry]:
        """Write the table of rows and other files; return the entries of all files of this part."""
        names = [self.schema.plan, *contents]
        if self._artifact is None:
            shards = [self.root / SHARD_ROWS.format(k) for k in range(self.grid.n_shards)]
            # columns that a shard lacks are null
            schema = pa.unify_schemas([pq.read_schema(shard) for shard in shards], promote_options="permissive")
            with atomic_path(self.root / ROWS) as path, pq.ParquetWriter(path, schema, compression="zstd") as writer:
                pending = schema.empty_table()
                for shard in shards:
                    with pq.ParquetFile(shard) as file:
                        pending = pa.concat_tables([pending, file.read()], promote_options="permissive")
                    full = pending.num_rows - pending.num_rows % _GROUP_ROWS
                    if full:
                        writer.write_table(pending.slice(0, full), row_group_size=_GROUP_ROWS)
                        pending = pending.slice(full)
                if pending.num_rows:
                    writer.write_table(pending, row_group_size=_GROUP_ROWS)
            names.insert(1, ROWS)
        for name, content in contents.items():
            write_atomically(self.root / name, content)
        names += [SCALE.format(of_part(name, self._part)) for name in self._arrays]
        files = {name: entry_of(self.root / name) for name in names} | self.entries()
        if self._artifact is None:
            features = ArrayFiles(self.root / FEATURES).entries()
            files |= {f"{FEATURES}/{name}": entry for name, entry in features.items()}
        return files


def _with_columns(
    old: ArrayEntry | None,
    spec: ArraySpec,
    group_name: str,
    dtype: ArrayDtype,
    *,
    gain: float = 1.0,
    targets: Iterable[str] = (),
) -> ArrayEntry:
    """Return the entry of an array with a group of new columns, which follow those that it has already."""
    start, groups, old_targets = (old.width, old.groups, old.targets) if old else (0, (), ())
    group = ColumnGroup(name=group_name, start=start, stop=start + spec.width, dtype=dtype)
    return ArrayEntry(
        width=group.stop,
        unit=spec.unit,
        sign=spec.sign,
        gain=old.gain if old else gain,
        groups=(*groups, group),
        targets=(*old_targets, *targets),
    )


def add_target_columns(
    path: Path,
    name: str,
    columns: Mapping[str, F64],
    *,
    spec: ArraySpec,
    dtype: ArrayDtype,
    details: Mapping[str, Any],
) -> None:
    """Add columns for whole targets to a finished artifact, as an array or to one, with details of the manifest.

    The artifact stays readable: the manifest is replaced after all other files are written. The caller holds
    `lock_artifact`.

    Args:
        name: name of the array, with the prefix `relevance_`.
        columns: (N,) numbers by target; may be empty.
        spec: meaning of the array; its width is ignored.
        details: replace those of the same name.
    Raises:
        ArtifactError: a number is not finite, or the disk is full (the artifact is unchanged).
    """
    artifact = ArtifactReader.open(path)
    before, grid = artifact.manifest, artifact.grid
    old, updates = before.arrays.get(name), dict[str, Any]()
    with report_full_disk(f"{path}: {name} was not added", lambda: "the artifact is unchanged"):
        if columns:
            group_name = of_part(name, len(old.groups) if old else 0)
            added = replace(spec, width=len(columns))
            entry = _with_columns(old, added, group_name, dtype, targets=columns)
            value_NT, scale_T = np.stack(list(columns.values()), axis=1), np.ones(len(columns), dtype=np.float32)
            names = [SCALE.format(group_name), *(CHUNK.format(group_name, k) for k in range(grid.n_shards))]
            (path / names[0]).parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path / names[0], npy_bytes(scale_T))
            stored_NT = encode(name, value_NT, scale_T, dtype)
            for k, file in enumerate(names[1:]):
                write_atomically(path / file, npy_bytes(stored_NT[slice(*grid.bounds(k))]))
            files = {file: entry_of(path / file) for file in names}
            updates = {"arrays": before.arrays | {name: entry}, "files": before.files | files}
        provenance = {"details": before.details | plain_json(details)}
        SIGNED_MANIFEST.write(path, before.model_copy(update=updates | provenance))


def encode(
    name: str, values_NE: NDArray[Any], scale_E: F32, dtype: str, *, start: int = 0, rows: pa.Table | None = None
) -> NDArray[Any]:
    """Divide by the scale and convert to the stored dtype; NaN, infinity and overflow are refused with their place."""
    with np.errstate(over="ignore", under="ignore"):
        stored_NE = (values_NE / scale_E).astype(np.dtype(dtype).newbyteorder("<"))
    for row, column in np.argwhere(~np.isfinite(stored_NE))[:1]:
        value = values_NE[row, column]
        if np.isfinite(value):
            advice = "set array_dtype: float32 and rebuild" if dtype == "float16" else "rescale the column"
            largest = float(np.finfo(dtype).max)
            problem = f"{value:g} at scale {scale_E[column]:g} does not fit {dtype} (largest {largest:g}); {advice}"
        else:
            problem = f"got {value}, expected a finite number; try model.dtype: float32, or exclude the row"
        row_id = "" if rows is None else f" (row_id {rows['row_id'][int(row)].as_py()!r})"
        raise ArtifactError(f"{name}: row {start + row}{row_id}, column {column}: {problem}")
    return stored_NE
