"""Writing shards under one lock: every file whole or not there, the completion mark last.

`FeatureSpool` keeps arrays shard by shard outside of the artifact's own: kept features, and the work area of a build.
"""

import io
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from grasp.artifact.layout import BUILD, MANIFEST, ShardGrid, chunk_file, group_name, part_dir, scale_file
from grasp.artifact.manifest import (
    ArrayDtype,
    BuildRecord,
    ColumnGroup,
    ShardMark,
    SumEntry,
    dump_json,
    finished_shards,
    plain_json,
    read_record,
)
from grasp.errors import ArtifactError, ShapeError
from grasp.files import FileEntry, checksum, differences, entry_of, fault, out_of_space, remove_parts, write_whole
from grasp.locks import DirectoryLock


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of N rows: `width` columns, what a number means, and per column what it was divided by."""

    width: int
    unit: str
    sign: str
    scale_E: NDArray[Any] | None = None

    def scale(self) -> NDArray[np.float32]:
        """(width,) float32; ones where none was given.

        Raises:
            ShapeError: not one scale a column.
            ArtifactError: not positive powers of two that float32 holds (any other factor would round).
        """
        if self.scale_E is None:
            return np.ones(self.width, dtype=np.float32)
        given = np.asarray(self.scale_E, dtype=np.float64)
        if given.shape != (self.width,):
            raise ShapeError(f"scale: got shape {given.shape}, expected ({self.width},): one for each column")
        mantissa, exponent = np.frexp(given)
        wrong = np.flatnonzero((mantissa != 0.5) | (exponent < -125) | (exponent > 128))
        if wrong.size:
            column = int(wrong[0])
            raise ArtifactError(f"scale: column {column}: got {given[column]:g}, expected a power of two")
        return given.astype(np.float32)

    def record(self, dtype: str) -> dict[str, Any]:
        """What a resumed build must agree with."""
        return {
            "width": self.width,
            "unit": self.unit,
            "sign": self.sign,
            "dtype": dtype,
            "scale": checksum(self.scale().tobytes()),
        }


class PartWriter:
    """One part of an artifact, the build itself (part 0) or its part-th extension: its shards, under one lock."""

    def __init__(
        self,
        path: Path,
        part: int,
        grid: ShardGrid,
        arrays: Mapping[str, ArraySpec],
        dtype: str,
        identity: Mapping[str, Any],
    ) -> None:
        for name, spec in arrays.items():
            if spec.width < 1:
                raise ArtifactError(f"{name}: got width {spec.width}, expected at least one column")
        if dtype not in get_args(ArrayDtype):
            raise ArtifactError(f"array_dtype: got {dtype!r}, expected one of {list(get_args(ArrayDtype))}")
        self.path = path
        self.grid = grid
        self.arrays = dict(arrays)
        self.dtype = cast(ArrayDtype, dtype)
        self.record = BuildRecord(
            n_rows=grid.n_rows,
            shard_rows=grid.shard_rows,
            arrays={name: spec.record(dtype) for name, spec in sorted(arrays.items())},
            identity=plain_json(identity, "identity"),
        )
        self._part = part
        self._marks_dir = path / part_dir(part) / "shards"
        self._scales = {name: spec.scale() for name, spec in arrays.items()}
        self._shards: dict[int, dict[str, FileEntry]] = {}  # files of those that are finished
        self._lock: DirectoryLock | None = None
        self._owns_lock = False

    def begin(self, lock: DirectoryLock, *, owns_lock: bool, resume: bool) -> None:
        """Claim the place, make directories, write the scales, clear what a kill left aside, find finished shards."""
        self._lock, self._owns_lock = lock, owns_lock
        directory = self.path / part_dir(self._part)
        self._claim(directory, resume)
        remove_parts(self.path, directory)
        self._shards = finished_shards(self.path, self._part, self.grid)
        with out_of_space(f"{self.path}: nothing was written", self.progress):
            self._marks_dir.mkdir(parents=True, exist_ok=True)
            for name, scale_E in self._scales.items():
                path, content = self.path / self._scale_file(name), npy_bytes(scale_E)
                path.parent.mkdir(parents=True, exist_ok=True)
                remove_parts(path.parent)
                if not path.exists() or path.read_bytes() != content:
                    write_whole(path, content)
        remove_parts(self._marks_dir)

    def _claim(self, directory: Path, resume: bool) -> None:
        """Begin the build in `directory`, or make sure that it is the one begun there."""
        path, over = directory / BUILD, f"delete {directory}"
        if not path.exists():
            if (directory / MANIFEST).exists():
                raise ArtifactError(f"{directory}: damaged: a {MANIFEST} but no {BUILD}; {over} to start again")
            directory.mkdir(parents=True, exist_ok=True)
            with out_of_space(str(directory), lambda: "nothing is written yet"):
                write_whole(path, dump_json(self.record))
            return
        if not resume:
            raise ArtifactError(
                f"{directory}: a build was begun here; run again with --resume to go on, or {over} to start again"
            )
        old, new = (each.model_dump(mode="json") for each in (read_record(path, BuildRecord), self.record))
        if different := list(differences(old | old.pop("identity"), new | new.pop("identity"))):
            raise ArtifactError(
                f"{directory}: the build begun here is another one: {'; '.join(different)}; "
                f"go on with the old settings, choose another place, or {over} to start again"
            )

    @property
    def n_shards(self) -> int:
        return self.grid.n_shards

    @property
    def finished(self) -> frozenset[int]:
        """Shards that need not be written again."""
        return frozenset(self._shards)

    def bounds(self, k: int) -> tuple[int, int]:
        """First row of shard k, and the row after its last."""
        return self.grid.bounds(k)

    def close(self) -> None:
        """Give the lock back, if it was taken here."""
        if self._owns_lock and self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_writable(self) -> None:
        if self._lock is None or not self._lock.held:
            raise ArtifactError(f"{self.path}: this writer is closed")

    def progress(self) -> str:
        """How far the build is, in words."""
        return f"{len(self._shards)} of {self.grid.n_shards} shards are finished"

    def _groups(self, first_column: Mapping[str, int]) -> dict[str, ColumnGroup]:
        """The column group of every array, whose columns begin where `first_column` says (0 by default)."""
        return {
            name: ColumnGroup(
                name=group_name(name, self._part),
                start=first_column.get(name, 0),
                stop=first_column.get(name, 0) + spec.width,
                dtype=self.dtype,
            )
            for name, spec in self.arrays.items()
        }

    def _write(
        self,
        k: int,
        arrays: Mapping[str, NDArray[Any]],
        table: pa.Table | None,
        sums: Mapping[str, NDArray[np.float64]],
        row_name: Callable[[int], str],
    ) -> None:
        """Write shard k; it is finished when this returns, and as if never begun when this raises."""
        start, stop = self.grid.bounds(k)
        if k in self._shards:
            raise ArtifactError(f"shard {k} is finished already; write only those that are not in `finished`")
        content = self._encode(arrays, stop - start, row_name)
        files = {chunk_file(group_name(name, self._part), k): npy_bytes(stored) for name, stored in content.items()}
        if table is not None:
            files[self._relative(k, ".parquet")] = parquet_bytes(table)
        arrays_of_sums = {name: np.asarray(value, dtype=np.float64) for name, value in sums.items()}
        for name, value in arrays_of_sums.items():
            if not np.isfinite(value).all():
                raise ArtifactError(f"sum {name} of shard {k}: got a number that is not finite")
        totals = {name: SumEntry.of(value) for name, value in arrays_of_sums.items()}
        mark = self._relative(k, ".json")
        with out_of_space(f"{self.path}: shard {k} was not written", self.progress):
            try:
                entries = {path.as_posix(): write_whole(self.path / path, data) for path, data in files.items()}
                record = ShardMark(start=start, stop=stop, files=entries, sums=totals)
                write_whole(self.path / mark, dump_json(record))
            except OSError:
                for relative in (mark, *files):  # the mark first: no mark without its files
                    (self.path / relative).unlink(missing_ok=True)
                raise
        self._shards[k] = entries

    def _files(self) -> dict[str, FileEntry]:
        """Size and checksum of everything this part wrote, by path relative to the artifact."""
        scales = [self._scale_file(name) for name in self.arrays]
        entries = {path.as_posix(): entry_of(self.path / path) for path in scales}
        for k in sorted(self._shards):
            entries |= self._shards[k]
            mark = self._relative(k, ".json")
            entries[mark.as_posix()] = entry_of(self.path / mark)
        return entries

    def sums(self) -> dict[str, NDArray[np.float64]]:
        """Totals over all shards, added in the order of the rows whatever order they were written in."""
        if len(self._shards) < self.grid.n_shards:
            raise ArtifactError(f"{self.path}: {self.progress()}: totals need all of them")
        totals = self._sums_of(0)
        for k in range(1, self.grid.n_shards):
            part = self._sums_of(k)
            if _shapes(part) != _shapes(totals):
                raise ShapeError(f"{self.path}: sums: shard {k} has {_shapes(part)}, shard 0 has {_shapes(totals)}")
            totals = {name: totals[name] + part[name] for name in totals}
        return totals

    def _scale_file(self, name: str) -> Path:
        return scale_file(group_name(name, self._part))

    def _sums_of(self, k: int) -> dict[str, NDArray[np.float64]]:
        mark = read_record(self.path / self._relative(k, ".json"), ShardMark)
        return {name: mark.sums[name].array() for name in sorted(mark.sums)}

    def _relative(self, k: int, suffix: str) -> Path:
        return part_dir(self._part) / "shards" / f"{k:05d}{suffix}"

    def _encode(
        self, arrays: Mapping[str, NDArray[Any]], n: int, row_name: Callable[[int], str]
    ) -> dict[str, NDArray[Any]]:
        missing, unexpected = sorted(self.arrays.keys() - arrays), sorted(arrays.keys() - self.arrays)
        if missing or unexpected:
            raise ArtifactError(f"arrays of a shard: missing {missing}, unexpected {unexpected}")
        return {
            name: encode(
                name,
                arrays[name],
                shape=(n, spec.width),
                scale_E=self._scales[name],
                dtype=self.dtype,
                row_name=row_name,
            )
            for name, spec in self.arrays.items()
        }


def encode(
    name: str,
    values_NE: NDArray[Any],
    *,
    shape: tuple[int, int],
    scale_E: NDArray[np.float32],
    dtype: str,
    row_name: Callable[[int], str],
) -> NDArray[Any]:
    """Divide by the scale and round to the stored type, little-endian.

    Raises:
        ShapeError: not the shape of the shard.
        ArtifactError: a value is NaN or infinite, or too large for `dtype`; names array, row and column.
    """
    values_NE = np.asarray(values_NE)
    if values_NE.shape != shape:
        raise ShapeError(f"{name}: got shape {values_NE.shape}, expected {shape}: rows of the shard, columns")
    place = _first(~np.isfinite(values_NE))
    if place is not None:
        raise ArtifactError(
            f"{name}: {row_name(place[0])}, column {place[1]}: got {values_NE[place]}, expected a finite "
            "number; the model or its precision is at fault: try model.dtype: float32, or leave the row out"
        )
    with np.errstate(over="ignore", under="ignore"):
        stored_NE = (values_NE / scale_E).astype(np.dtype(dtype).newbyteorder("<"))
    place = _first(~np.isfinite(stored_NE))
    if place is not None:
        advice = "set array_dtype: float32 and build again" if dtype == "float16" else "rescale the column"
        raise ArtifactError(
            f"{name}: {row_name(place[0])}, column {place[1]}: {values_NE[place]:g} at scale "
            f"{scale_E[place[1]]:g} does not fit {dtype} (largest {float(np.finfo(dtype).max):g}); {advice}"
        )
    return stored_NE


def npy_bytes(array: NDArray[Any]) -> bytes:
    """An array as the bytes of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)  # one order: its header is compared
    return buffer.getvalue()


def parquet_bytes(table: pa.Table) -> bytes:
    """A table as the bytes of a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _first(mask_NE: NDArray[np.bool_]) -> tuple[int, int] | None:
    if not mask_NE.any():
        return None
    row, column = np.unravel_index(int(mask_NE.argmax()), mask_NE.shape)
    return int(row), int(column)


def _shapes(arrays: Mapping[str, NDArray[np.float64]]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in sorted(arrays.items())}


def tensor_bytes(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Named arrays as the bytes of a safetensors file; the same arrays give the same bytes."""
    content: bytes = safetensors.numpy.save({name: np.asarray(arrays[name], order="C") for name in sorted(arrays)})
    return content


class FeatureSpool:
    """A directory of `shard-00000.safetensors`, each with a mark beside it that says it is whole."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, k: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep the arrays of shard k (any shapes); replaces what was kept of it.

        Raises:
            ArtifactError: the disk is full (nothing of this shard is left).
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        data, mark = self._data(k), self._mark(k)
        contents = tensor_bytes(arrays)
        mark.unlink(missing_ok=True)
        with out_of_space(f"{data}: not written", lambda: f"{len(self.finished)} shards are finished here"):
            try:
                write_whole(mark, dump_json(write_whole(data, contents)))
            except OSError:
                for path in (mark, data):
                    path.unlink(missing_ok=True)
                raise

    def read(self, k: int) -> dict[str, NDArray[Any]]:
        """The arrays of shard k.

        Raises:
            ArtifactError: shard k is not here, or damaged.
        """
        if not self.has(k):
            raise ArtifactError(f"{self._data(k)}: shard {k} is not kept here")
        if what := fault(self.directory, self._data(k).name, read_record(self._mark(k), FileEntry)):
            raise ArtifactError(f"{self._data(k)}: {what}; build it again")
        try:
            arrays: dict[str, NDArray[Any]] = safetensors.numpy.load_file(self._data(k))
        except SafetensorError as err:
            raise ArtifactError(f"{self._data(k)}: damaged: {err}; build it again") from err
        return arrays

    def has(self, k: int) -> bool:
        """Whether shard k is whole."""
        mark, data = self._mark(k), self._data(k)
        return mark.is_file() and data.is_file() and data.stat().st_size == read_record(mark, FileEntry).bytes

    @property
    def finished(self) -> frozenset[int]:
        """Numbers of the shards that are whole."""
        found = (int(path.stem.removeprefix("shard-")) for path in self.directory.glob("shard-*.json"))
        return frozenset(k for k in found if self.has(k))

    def files(self, root: Path) -> dict[str, FileEntry]:
        """Size and checksum of everything here, by path relative to `root`."""
        entries: dict[str, FileEntry] = {}
        for k in sorted(self.finished):
            data, mark = self._data(k), self._mark(k)
            entries[data.relative_to(root).as_posix()] = read_record(mark, FileEntry)
            entries[mark.relative_to(root).as_posix()] = entry_of(mark)
        return entries

    def clear(self) -> None:
        """Remove the directory and all that is in it."""
        if self.directory.exists():
            shutil.rmtree(self.directory)

    def _data(self, k: int) -> Path:
        return self.directory / f"shard-{k:05d}.safetensors"

    def _mark(self, k: int) -> Path:
        return self.directory / f"shard-{k:05d}.json"
