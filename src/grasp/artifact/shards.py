"""Writing shards: every file whole or not there, the completion mark last."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.artifact.layout import ShardGrid, chunk_file, group_name, part_dir, scale_file
from grasp.artifact.manifest import (
    ArrayDtype,
    ColumnGroup,
    ShardMark,
    SumEntry,
    dump_json,
    finished_shards,
    read_record,
)
from grasp.errors import ArtifactError, ShapeError
from grasp.files import FileEntry, checksum, entry_of, out_of_space, remove_parts, write_whole


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


class ShardWriter:
    """The shards of one part of an artifact: of the build itself (part 0) or of its part-th extension."""

    def __init__(
        self, root: Path, part: int, grid: ShardGrid, arrays: Mapping[str, ArraySpec], dtype: ArrayDtype
    ) -> None:
        for name, spec in arrays.items():
            if spec.width < 1:
                raise ArtifactError(f"{name}: got width {spec.width}, expected at least one column")
        self.root = root
        self.grid = grid
        self.arrays = dict(arrays)
        self.dtype: ArrayDtype = dtype
        self._part = part
        self._marks_dir = root / part_dir(part) / "shards"
        self._scales = {name: spec.scale() for name, spec in arrays.items()}
        self._shards: dict[int, dict[str, FileEntry]] = {}  # files of those that are finished

    def prepare(self) -> None:
        """Make directories, write the scales, clear what a kill left aside, find the finished shards."""
        self._shards = finished_shards(self.root, self._part, self.grid)
        with out_of_space(f"{self.root}: nothing was written", self.progress):
            self._marks_dir.mkdir(parents=True, exist_ok=True)
            for name, scale_E in self._scales.items():
                path, content = self.root / self._scale_file(name), npy_bytes(scale_E)
                path.parent.mkdir(parents=True, exist_ok=True)
                remove_parts(path.parent)
                if not path.exists() or path.read_bytes() != content:
                    write_whole(path, content)
        remove_parts(self._marks_dir)

    @property
    def finished(self) -> frozenset[int]:
        return frozenset(self._shards)

    def progress(self) -> str:
        """How far the build is, in words."""
        return f"{len(self._shards)} of {self.grid.n_shards} shards are finished"

    def groups(self, first_column: Mapping[str, int]) -> dict[str, ColumnGroup]:
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

    def write(
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
        totals = {name: _sum_entry(name, value, k) for name, value in sums.items()}
        mark = ShardMark(start=start, stop=stop, files={}, sums=totals)
        where = f"{self.root}: shard {k} was not written"
        with out_of_space(where, self.progress):
            try:
                self._shards[k] = self._commit(k, files, mark).files
            except OSError:
                self._withdraw(k, files)
                raise

    def files(self) -> dict[str, FileEntry]:
        """Size and checksum of everything this part wrote, by path relative to the artifact."""
        scales = [self._scale_file(name) for name in self.arrays]
        entries = {path.as_posix(): entry_of(self.root / path) for path in scales}
        for k in sorted(self._shards):
            entries |= self._shards[k]
            mark = self._relative(k, ".json")
            entries[mark.as_posix()] = entry_of(self.root / mark)
        return entries

    def sums(self) -> dict[str, NDArray[np.float64]]:
        """Totals over all shards, added in the order of the rows whatever order they were written in."""
        if len(self._shards) < self.grid.n_shards:
            raise ArtifactError(f"{self.root}: {self.progress()}: totals need all of them")
        totals = self._sums_of(0)
        for k in range(1, self.grid.n_shards):
            part = self._sums_of(k)
            if _shapes(part) != _shapes(totals):
                raise ShapeError(f"{self.root}: sums: shard {k} has {_shapes(part)}, shard 0 has {_shapes(totals)}")
            totals = {name: totals[name] + part[name] for name in totals}
        return totals

    def table_path(self, k: int) -> Path:
        """Row table of shard k."""
        return self.root / self._relative(k, ".parquet")

    def _scale_file(self, name: str) -> Path:
        return scale_file(group_name(name, self._part))

    def _sums_of(self, k: int) -> dict[str, NDArray[np.float64]]:
        mark = read_record(self.root / self._relative(k, ".json"), ShardMark)
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

    def _commit(self, k: int, files: Mapping[Path, bytes], mark: ShardMark) -> ShardMark:
        entries = {path.as_posix(): write_whole(self.root / path, data) for path, data in files.items()}
        mark = mark.model_copy(update={"files": entries})
        write_whole(self.root / self._relative(k, ".json"), dump_json(mark))
        return mark

    def _withdraw(self, k: int, files: Mapping[Path, bytes]) -> None:
        for relative in (self._relative(k, ".json"), *files):  # the mark first: no mark without its files
            (self.root / relative).unlink(missing_ok=True)


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


def _sum_entry(name: str, value: NDArray[np.float64], k: int) -> SumEntry:
    array = np.asarray(value, dtype=np.float64)
    if not np.isfinite(array).all():
        raise ArtifactError(f"sum {name} of shard {k}: got a number that is not finite")
    return SumEntry.of(array)


def _shapes(arrays: Mapping[str, NDArray[np.float64]]) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in sorted(arrays.items())}
