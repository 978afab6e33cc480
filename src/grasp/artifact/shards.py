"""Writing shards under one lock: every file whole or not there, the completion mark last."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, cast, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.artifact.layout import BUILD, MANIFEST, ShardGrid, chunk_file, group_name, row_file, scale_file
from grasp.artifact.manifest import ArrayDtype, BuildRecord, BuiltShards, ColumnGroup, SumEntry
from grasp.errors import ArtifactError, ShapeError
from grasp.files import FileEntry, checksum, entry_of, out_of_space, remove_parts, write_whole
from grasp.store.contents import npy_bytes, parquet_bytes
from grasp.store.directory import Content
from grasp.store.locks import DirectoryLock
from grasp.store.records import plain_json


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


class PartWriter(BuiltShards, ABC):
    """One part of an artifact, the build itself (part 0) or its part-th extension: its shards, under one lock."""

    DONE: ClassVar[str]  # why nothing more is written

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
        for name, spec in arrays.items():
            if spec.width < 1:
                raise ArtifactError(f"{name}: got width {spec.width}, expected at least one column")
        if dtype not in get_args(ArrayDtype):
            raise ArtifactError(f"array_dtype: got {dtype!r}, expected one of {list(get_args(ArrayDtype))}")
        self.arrays = dict(arrays)
        self.dtype = cast(ArrayDtype, dtype)
        self._group = {name: group_name(name, part) for name in arrays}
        self._scales = {name: spec.scale() for name, spec in arrays.items()}
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
            identity=plain_json(identity, "identity"),
        )
        self._part = part
        self._lock: DirectoryLock | None = None

    def claim(self, lock: DirectoryLock) -> None:
        """Begin, or go on: the plan, then the scales. The lock is this writer's until it is closed."""
        self._lock = lock
        plan = self.root / self.schema.plan
        if not plan.exists() and (plan.parent / MANIFEST).exists():
            raise ArtifactError(f"{self.root}: damaged: a {MANIFEST} but no {BUILD}; delete {self.root} to start again")
        self.begin(self.record.model_dump(mode="json"))
        with out_of_space(f"{self.root}: nothing was written", self.progress):
            for name, scale_E in self._scales.items():
                path, content = self.root / scale_file(self._group[name]), npy_bytes(scale_E)
                path.parent.mkdir(parents=True, exist_ok=True)
                remove_parts(path.parent)
                if not path.exists() or path.read_bytes() != content:
                    write_whole(path, content)

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether nothing is left to write."""

    def close(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_writable(self) -> None:
        if self._lock is None or not self._lock.held:
            raise ArtifactError(f"{self.root}: this writer is closed")
        if self.complete:
            raise ArtifactError(f"{self.root}: {self.DONE}")

    def _groups(self, first_column: Mapping[str, int]) -> dict[str, ColumnGroup]:
        """The column group of every array, whose columns begin where `first_column` says (0 by default)."""
        return {
            name: ColumnGroup(
                name=self._group[name],
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
        if k in self.finished:
            raise ArtifactError(f"shard {k} is finished already; write only those that are not in `finished`")
        missing, unexpected = sorted(self.arrays.keys() - arrays), sorted(arrays.keys() - self.arrays)
        if missing or unexpected:
            raise ArtifactError(f"arrays of a shard: missing {missing}, unexpected {unexpected}")
        files: dict[str, Content] = {}
        for name, spec in self.arrays.items():
            shape, scale_E = (stop - start, spec.width), self._scales[name]
            stored = encode(name, arrays[name], shape=shape, scale_E=scale_E, dtype=self.dtype, row_name=row_name)
            files[chunk_file(self._group[name], k)] = npy_bytes(stored)
        if table is not None:
            files[row_file(k)] = parquet_bytes(table)
        arrays_of_sums = {name: np.asarray(value, dtype=np.float64) for name, value in sums.items()}
        for name, value in arrays_of_sums.items():
            if not np.isfinite(value).all():
                raise ArtifactError(f"sum {name} of shard {k}: got a number that is not finite")
        totals = {name: SumEntry.from_array(value) for name, value in arrays_of_sums.items()}
        self.put(f"{k:05d}", files, start=start, stop=stop, sums=totals)

    def _files(self) -> dict[str, FileEntry]:
        """Size and checksum of everything this part wrote, by path relative to the artifact."""
        scales = [scale_file(group) for group in self._group.values()]
        return {name: entry_of(self.root / name) for name in scales} | self.entries()

    def sums(self) -> dict[str, NDArray[np.float64]]:
        """Totals over all shards, added in the order of the rows whatever order they were written in."""
        if len(self.parts) < self.grid.n_shards:
            raise ArtifactError(f"{self.root}: {self.progress()}: totals need all of them")
        totals: dict[str, NDArray[np.float64]] = {}
        for k in range(self.grid.n_shards):
            part = {name: entry.array() for name, entry in sorted(self.mark(f"{k:05d}").sums.items())}
            shapes, before = ({name: value.shape for name, value in sums.items()} for sums in (part, totals))
            if k > 0 and shapes != before:
                raise ShapeError(f"{self.root}: sums: shard {k} has {shapes}, shard 0 has {before}")
            totals = {name: totals[name] + value if k > 0 else value for name, value in part.items()}
        return totals


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
    for row, column in np.argwhere(~np.isfinite(values_NE))[:1]:
        raise ArtifactError(
            f"{name}: {row_name(int(row))}, column {column}: got {values_NE[row, column]}, expected a finite "
            "number; the model or its precision is at fault: try model.dtype: float32, or leave the row out"
        )
    with np.errstate(over="ignore", under="ignore"):
        stored_NE = (values_NE / scale_E).astype(np.dtype(dtype).newbyteorder("<"))
    for row, column in np.argwhere(~np.isfinite(stored_NE))[:1]:
        advice = "set array_dtype: float32 and build again" if dtype == "float16" else "rescale the column"
        raise ArtifactError(
            f"{name}: {row_name(int(row))}, column {column}: {values_NE[row, column]:g} at scale "
            f"{scale_E[column]:g} does not fit {dtype} (largest {float(np.finfo(dtype).max):g}); {advice}"
        )
    return stored_NE
