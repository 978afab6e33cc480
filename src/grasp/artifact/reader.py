"""Read an artifact: tables and moments lazily, arrays in memory-mapped blocks of rows.

Start with `ArtifactReader.open`.
"""

import io
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from safetensors import safe_open

from grasp.arrays import F32, I64, Integers
from grasp.artifact.manifest import (
    BUILD,
    CHUNK,
    LEAKS,
    MANIFEST,
    MARKER,
    ROWS,
    SCALE,
    SHARD_FEATURES,
    SHARD_ROWS,
    SIGNED_MANIFEST,
    SUM,
    TOKENS,
    BuildRecord,
    BuiltShards,
    ColumnGroup,
    Manifest,
    ShardGrid,
)
from grasp.errors import ArtifactError
from grasp.files import Reads, kind_of
from grasp.store.contents import read_table, read_tensors, readable
from grasp.store.directory import Files
from grasp.store.records import read_record
from grasp.store.remote import local_path, open_store, remote_url

RELEVANCE = "relevance_"  # prefix of the arrays of relevance
# Names of kernels, settings and moments in version 0.2.
RENAMED_KERNELS = {
    "token": "output_layer",
    "input": "embedding",
    "neighbour": "knn",
    "shift": "hidden_bias",
    "tilt": "hidden_linear",
}
_ARRAYS = {f"{RELEVANCE}{old}": f"{RELEVANCE}{new}" for old, new in RENAMED_KERNELS.items()}
RENAMED_SETTINGS = {
    "pooling": "summary_positions",
    "token_positions": "positions",
    "moment_positions": "sample_positions",
    "gradient_rows": "sample_rows",
    "kept_mb": "max_cache_mb",  # of versions between 0.2 and 0.3
}
_OLD_SETTINGS = (
    "match",
    "input_match",
    "neighbour_match",
    "shift_match",
    "tilt_match",
    "gradient_match",
    "moment_rows",
)
_MOMENTS = {"token": "hidden", "input": "delta", "neighbour": "states", "pooled": "summary"} | _ARRAYS
_BUILT_FROM = (
    ("the corpus", "corpus", "path"),
    ("a target", "targets", "names"),
    ("the model", "model", "path"),
    ("the tokenizer", "model", "tokenizer"),
    ("the output layer", "model", "classifier", "fitted_head"),
)
VERIFY = "`grasp verify` lists all damaged files"
LARGEST = 1e30  # largest magnitude: squares and their sums stay finite
HALF_EXPONENT = np.int16(0x7C00)  # all bits set: infinity or NaN
SIGN_AND_REST = np.int32(-0x70002000)  # bits of a widened float16 in a float32
BIAS = np.float32(2.0**112)  # 2^(127 - 15), the difference of the exponent biases
MAX_SCALE = 2.0**15  # scales below it stay finite when multiplied by BIAS
BLOCK_NUMBERS = 1 << 16  # numbers per block, which fit the cache
Columns = Integers | Sequence[int] | slice | None


@dataclass(frozen=True, slots=True)
class Leaks:
    """Rows that contain questions of one target.

    Attributes:
        row_index: indices of the rows, ascending.
        n_compared: number of questions that were searched for, out of `n_questions`; the others are too short.
    """

    row_index: I64
    n_compared: int
    n_questions: int

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], target: str) -> Self | None:
        """Read from named arrays; None if they lack the target."""
        rows, counts = f"{LEAKS}{target}.rows", f"{LEAKS}{target}.questions"
        if rows not in arrays:
            return None
        return cls(np.asarray(arrays[rows], dtype=np.int64), *(int(count) for count in arrays[counts]))

    def arrays(self, target: str) -> dict[str, I64]:
        """Return named arrays, which are stored with the moments."""
        counts = np.array([self.n_compared, self.n_questions])
        return {f"{LEAKS}{target}.rows": self.row_index, f"{LEAKS}{target}.questions": counts}

    def __str__(self) -> str:
        few = {0: "no row contains a question", 1: "one row contains a question"}
        n_rows, short = len(self.row_index), self.n_questions - self.n_compared
        if not self.n_compared:
            return "its questions are too short to search for in the rows"
        summary = few.get(n_rows, f"{n_rows:,} rows contain questions")
        return summary + f" ({short:,} of {self.n_questions:,} are too short to search for)" * bool(short)


class ArtifactReader:
    """A complete artifact. `open` reads only the manifest; arrays are read in blocks."""

    def __init__(self, manifest: Manifest, files: Files) -> None:
        self.path = files.root  # of a remote artifact the cache directory
        self.location = files.where  # path or URL as the user gave it, for messages
        self.manifest = _with_present_names(manifest)
        self._files = files
        self._tokens = Files(files.root, manifest.rows_kept, VERIFY)
        self._last_chunk: dict[
            str, tuple[int, NDArray[Any]]
        ] = {}  # by group: shard and array, since several blocks read one chunk
        self.grid = ShardGrid(manifest.n_rows, manifest.shard_rows)
        self.n_rows = manifest.n_rows
        self.targets = tuple(manifest.targets)
        self.array_names = tuple(self.manifest.arrays)
        features = self.manifest.settings.get("features", {})  # empty if not recorded
        self.feature_settings: Mapping[str, Any] = dict(features)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a complete artifact: a directory, or a URL whose files are downloaded when needed.

        Raises:
            ArtifactError: not an artifact, unfinished (with its progress and how to resume), damaged, or of another
                format version.
        """
        if remote_url(path) is None and kind_of(local_path(path) / MANIFEST) == "nothing":
            raise ArtifactError(why_not_open(local_path(path)))
        return cls(*open_store(path, SIGNED_MANIFEST, VERIFY))

    @property
    def reads(self) -> dict[str, Reads]:
        """Return the paths that outputs must not replace, for `check_outputs`: the artifact and its inputs."""
        settings, inputs = self.manifest.settings, {"is the artifact": [str(self.path)]}
        for phrase, *steps in _BUILT_FROM:
            value: Any = settings
            for step in steps:
                value = value.get(step) if isinstance(value, dict) else None
            inputs[f"is {phrase} of the artifact"] = [
                self.place(path) for path in (value if isinstance(value, list) else [value]) if isinstance(path, str)
            ]
        return dict(inputs)

    def place(self, path: str) -> str:
        """Resolve a path of the build's settings, relative to the working directory of the build."""
        base = self.manifest.details.get("built_in")
        resolved = self.path / str(base) / path
        return str(resolved) if base is not None and "://" not in path and resolved.exists() else path

    def require_one_corpus(self) -> None:
        """Check that the rows come from one corpus, which can be reread.

        Raises:
            ArtifactError: the artifact was merged; the message names its parts.
        """
        if parts := self.manifest.details.get("parts"):
            raise ArtifactError(
                f"{self.location}: is merged from artifacts with different corpora; for texts, tokens or new targets "
                f"use its parts: {', '.join(part['path'] for part in parts)}"
            )

    @property
    def rows_path(self) -> Path:
        """Return the path of rows.parquet: row_index, row_id, doc_id, n_tokens, loss, snippet, labels; in row order."""
        return self._files.file(ROWS)

    @property
    def keeps_features(self) -> bool:
        """Return whether the features of every shard are stored."""
        return all(SHARD_FEATURES.format(k) in self.manifest.files for k in range(self.grid.n_shards))

    def features(self, k: int) -> dict[str, NDArray[Any]]:
        """Read the stored features of shard k as named arrays.

        Raises:
            ArtifactError: not stored, or damaged.
        """
        return read_tensors(self._files.file(SHARD_FEATURES.format(k)), VERIFY)

    @property
    def tokens_path(self) -> Path:
        """Return the directory of the rows, after verifying its files, if they are stored.

        Raises:
            ArtifactError: a file is damaged.
        """
        for name in self.manifest.rows_kept if (self.path / TOKENS).exists() else ():
            self._tokens.file(name)
        return self.path / TOKENS

    @cached_property
    def units(self) -> pa.Table:
        """Read the units, in the order of the columns of the relevance arrays."""
        tables = [read_table(self._files.file(name), VERIFY) for name in self.manifest.units]
        units = pa.concat_tables(tables, promote_options="default").combine_chunks()
        if (counts := dict(Counter(units["target"].to_pylist()))) != self.manifest.targets:
            raise ArtifactError(
                f"{self.location}: units in the manifest {self.manifest.targets} and in the tables {counts} differ; "
                "rebuild it"
            )
        return units

    @cached_property
    def _unit_targets(self) -> list[str]:
        targets: list[str] = self.units["target"].to_pylist()
        return targets

    def leaks(self, target: str) -> Leaks | None:
        """Return the rows that contain questions of `target`; None if an earlier version built the artifact."""
        return Leaks.from_arrays(self.moments, target)

    @cached_property
    def moments(self) -> "MomentArrays":
        """Return the moments and other arrays of the build, which are read lazily."""
        return MomentArrays([self._files.file(name) for name in self.manifest.moments], sums=False)

    @cached_property
    def sums(self) -> "MomentArrays":
        """Return float64 totals over all rows by name, before the gain of an array."""
        return MomentArrays([self._files.file(name) for name in self.manifest.moments], sums=True)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Return the names of the kernels whose relevance is stored."""
        return tuple(name.removeprefix(RELEVANCE) for name in self.array_names if name.startswith(RELEVANCE))

    def relevance_name(self, match: str) -> str:
        """Return the name of the relevance array of a kernel.

        Raises:
            ArtifactError: no such array; the message lists the kernels.
        """
        name = f"{RELEVANCE}{match}"
        if name not in self.manifest.arrays:
            raise ArtifactError(
                f"{self.location}: has no relevance by {match!r}, only by {', '.join(self.kernels)}; rebuild it with "
                f"{match!r} in features.kernels"
            )
        return name

    def unit_columns(self, target: str) -> I64:
        """Return the columns of the relevance arrays that are units of `target`."""
        if target not in self.manifest.targets:
            raise ArtifactError(f"{self.location}: has no target {target!r}; it has {list(self.targets)}")
        return np.flatnonzero(self.units["target"].to_numpy(zero_copy_only=False) == target).astype(np.int64)

    def array_scale(self, name: str) -> F32:
        """Return the factor of the stored numbers of each column, before the gain, (width,).

        Raises:
            ArtifactError: no such array, or invalid scales.
        """
        if name not in self.manifest.arrays:
            raise ArtifactError(f"{self.location}: has no array {name!r}; it has {list(self.array_names)}")
        scales = []
        for group in self.manifest.arrays[name].groups:
            path = self._files.file(SCALE.format(group.name))
            scales.append(np.array(_array(path, (group.stop - group.start,), "float32")))
            if not np.abs(scales[-1]).max() <= LARGEST:  # nan compares false
                raise ArtifactError(f"{path}: contains a number that is not finite or exceeds {LARGEST:g}; rebuild it")
        return np.concatenate(scales)

    def array_blocks(
        self, name: str, *, columns: Columns = None, block_rows: int | None = None
    ) -> Iterator[tuple[int, F32]]:
        """Yield an array in blocks of rows: (start row, (n, columns) float32), rescaled.

        Relevance has a column for every unit, also if it is stored by target.

        Args:
            columns: columns in the order of the result. Default: all.
            block_rows: rows of a block (the last may be shorter). Default: those of a shard.
        Raises:
            ArtifactError: no such array or column; a chunk file is missing or truncated.
        """
        picks, width = self._picks(name, columns)
        shard_rows = self.grid.shard_rows
        size = shard_rows if block_rows is None else block_rows
        if size < 1:
            raise ArtifactError(f"block_rows: got {size}, expected at least 1")
        for start in range(0, self.n_rows, size):
            stop, pieces = min(start + size, self.n_rows), []
            for k in range(start // shard_rows, -(-stop // shard_rows)):
                first, end = max(start, k * shard_rows), min(stop, (k + 1) * shard_rows)
                in_shard = slice(first - k * shard_rows, end - k * shard_rows)
                pieces.append((k, in_shard, slice(first - start, end - start)))
            yield start, self._read(picks, (stop - start, width), pieces)

    def array_rows(self, name: str, row_index: Integers, *, columns: Columns = None) -> F32:
        """Read rows of an array, in the given order: (len(row_index), columns) float32, rescaled."""
        picks, width = self._picks(name, columns)
        return self._read(picks, (len(row_index), width), self._by_shard(row_index))

    def row_batches(
        self, columns: Sequence[str] | None = None, *, batch_rows: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        """Stream the row table, all columns or those of `columns`."""
        with readable(self.rows_path, VERIFY), pq.ParquetFile(self.rows_path) as file:
            unknown = sorted(set(columns or ()) - set(file.schema_arrow.names))
            if unknown:
                raise ArtifactError(f"{self.rows_path}: no columns {unknown}; it has {file.schema_arrow.names}")
            yield from file.iter_batches(batch_size=batch_rows, columns=columns)

    def rows(self, row_index: Integers) -> pa.Table:
        """Read rows of the row table, in the given order, from only the shards that contain them."""
        with readable(self.rows_path, VERIFY):
            schema = pq.read_schema(self.rows_path)
        tables, places = [schema.empty_table()], [np.empty(0, dtype=np.int64)]
        for k, rows, where in self._by_shard(row_index):
            tables.append(read_table(self._files.file(SHARD_ROWS.format(k)), VERIFY).take(rows))
            places.append(where)
        table = pa.concat_tables(tables, promote_options="permissive").select(schema.names)
        return table.take(np.argsort(np.concatenate(places))).combine_chunks()

    def _by_shard(self, row_index: Integers) -> Iterator[tuple[int, I64, I64]]:
        """Yield shards of some rows: shard number, rows within the shard, and their positions in `row_index`."""
        rows = np.asarray(row_index, dtype=np.int64)
        outside = rows[(rows < 0) | (rows >= self.n_rows)]
        if outside.size:
            raise ArtifactError(f"row_index: got {int(outside[0])}, expected 0 to {self.n_rows - 1}")
        order = np.argsort(rows, kind="stable")
        shard = rows[order] // self.grid.shard_rows
        for where in np.split(order, np.flatnonzero(np.diff(shard)) + 1) if len(rows) else ():
            k = int(rows[where[0]]) // self.grid.shard_rows
            yield k, rows[where] - k * self.grid.shard_rows, where

    def _picks(self, name: str, columns: Columns) -> tuple[list["_Pick"], int]:
        """Return the requested columns of each group, and the total number of columns."""
        scale_E, entry = self.array_scale(name), self.manifest.arrays[name]
        width = sum(self.manifest.targets.values()) if entry.targets else entry.width
        if columns is None or isinstance(columns, slice):
            chosen = np.arange(width, dtype=np.int64)[columns or slice(None)]
        else:
            chosen = np.asarray(columns, dtype=np.int64)
        outside = chosen[(chosen < 0) | (chosen >= width)]
        if outside.size:
            raise ArtifactError(f"{name}: got column {int(outside[0])}, expected 0 to {width - 1}")
        if entry.targets:  # the column of the unit's target; -1, which no group has, if there is none
            column_of = {target: column for column, target in enumerate(entry.targets)}
            chosen = np.array([column_of.get(target, -1) for target in self._unit_targets], dtype=np.int64)[chosen]
        picks = []
        for group in entry.groups:
            places = np.flatnonzero((chosen >= group.start) & (chosen < group.stop))
            if len(places):
                source, goal = (  # consecutive columns as a slice, which NumPy reads without a copy
                    slice(int(index[0]), int(index[-1]) + 1) if np.all(np.diff(index) == 1) else index
                    for index in (chosen[places] - group.start, places)
                )
                picks.append(_Pick(group, scale_E[chosen[places]] * np.float32(entry.gain), source, goal))
        return picks, len(chosen)

    def _read(
        self, picks: list["_Pick"], shape: tuple[int, int], pieces: Iterable[tuple[int, slice | I64, slice | I64]]
    ) -> F32:
        """Read an array from pieces: shard number, rows within the shard, and rows of the result."""
        out_NE = np.zeros(shape, dtype=np.float32)
        for k, rows, goal in pieces:
            n_stored = min(self.grid.shard_rows, self.n_rows - k * self.grid.shard_rows)
            for pick in picks:
                group = pick.group
                shard, chunk_NE = self._last_chunk.get(group.name, (-1, None))
                if chunk_NE is None or shard != k:
                    path = self._files.file(CHUNK.format(group.name, k))
                    chunk_NE = _array(path, (n_stored, group.stop - group.start), group.dtype)
                    self._last_chunk[group.name] = k, chunk_NE
                stored_NE = chunk_NE[rows][:, pick.source]
                with np.errstate(over="ignore", invalid="ignore"):  # the result is validated below
                    if isinstance(goal, slice) and isinstance(pick.goal, slice):
                        _scaled_into(out_NE[goal, pick.goal], stored_NE, pick.scale_E)
                    else:
                        rows_goal, columns_goal = np.arange(shape[0])[goal], np.arange(shape[1])[pick.goal]
                        out_NE[np.ix_(rows_goal, columns_goal)] = np.multiply(stored_NE, pick.scale_E, dtype=np.float32)
        with np.errstate(invalid="ignore"):
            ends = float(out_NE.max(initial=0.0)), float(out_NE.min(initial=0.0))
        # No build writes such numbers; a forged artifact could, and rankings would be arbitrary. NaN compares false.
        if not (ends[0] <= LARGEST and ends[1] >= -LARGEST):
            raise ArtifactError(
                f"{self.location}: {picks[0].group.name}: contains a number that is not finite or exceeds {LARGEST:g}; "
                "rebuild it"
            )
        return out_NE


class _Pick(NamedTuple):
    """Columns of one group: columns to read, and columns of the result."""

    group: ColumnGroup
    scale_E: F32
    source: slice | I64
    goal: slice | I64


def _with_present_names(manifest: Manifest) -> Manifest:
    """Return the manifest with current names of arrays and settings, if it has those of an earlier version."""
    features = manifest.settings.get("features")
    if not isinstance(features, dict) or not features.keys() & {"match", "kept_mb"}:
        return manifest
    arrays = {_ARRAYS.get(name, name): entry for name, entry in manifest.arrays.items()}
    renamed = {RENAMED_SETTINGS.get(name, name): value for name, value in features.items() if name not in _OLD_SETTINGS}
    kernels = [name.removeprefix(RELEVANCE) for name in arrays]
    if not renamed.get("product_width"):  # 0 meant no sketch
        renamed.pop("product_width", None)
    settings = {**manifest.settings, "features": {"kernels": kernels} | renamed}
    return manifest.model_copy(update={"arrays": arrays, "settings": settings})


class MomentArrays(Mapping[str, NDArray[Any]]):
    """Named arrays of the moments files, read lazily.

    Totals of an extension (one number per new column) are appended to those of the build.
    """

    def __init__(self, paths: Sequence[Path], *, sums: bool) -> None:
        self._prefix = SUM if sums else ""
        self._places: dict[str, list[tuple[Path, str]]] = {}  # by present name: file and stored name of each part
        for path in paths:
            with readable(path, VERIFY), safe_open(path, framework="numpy") as file:
                for key in file.keys():  # noqa: SIM118 - not a mapping
                    if key.startswith(SUM) == sums:
                        name = key.removeprefix(self._prefix)
                        first, dot, suffix = name.partition(".")
                        present_name = "loss" if name == "token.loss" else f"{_MOMENTS.get(first, first)}{dot}{suffix}"
                        self._places.setdefault(present_name, []).append((path, key))

    def __getitem__(self, name: str) -> NDArray[Any]:
        parts = []
        for path, key in self._places[name]:
            with readable(path, VERIFY), safe_open(path, framework="numpy") as file:
                parts.append(file.get_tensor(key))
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _array(path: Path, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Memory-map a stored array.

    The expected header is known, so it is compared and not parsed: faster, and safe for untrusted files.
    """
    header = _npy_header(shape, dtype)
    with readable(path, VERIFY), path.open("rb") as file:
        if file.read(len(header)) == header:
            return np.memmap(file, np.dtype(dtype).newbyteorder("<"), mode="r", offset=len(header), shape=shape)
    raise ArtifactError(f"{path}: expected an array {shape} of {dtype}; {VERIFY}")


@lru_cache
def _npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    buffer = io.BytesIO()
    fields = {"descr": np.dtype(dtype).newbyteorder("<").str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()


def _scaled_into(out_NE: F32, stored_NE: NDArray[Any], scale_E: F32) -> None:
    """Compute stored_NE * scale_E in float32; for float16 bit-identical to NumPy in a third of the time.

    NumPy converts one number at a time. Here the bits of all numbers are shifted to the sign, exponent and mantissa of
    a float32, which is the number times 2^-112, exactly (subnormals included), since the exponent biases are 15 and
    127. The factor 2^112 is folded into the scale. Infinity, NaN and large scales, which no build writes, use NumPy.
    """
    if stored_NE.dtype != np.float16 or np.abs(scale_E).max(initial=0.0) >= MAX_SCALE:
        np.multiply(stored_NE, scale_E, out=out_NE)
        return
    stored_NE, step = np.asarray(stored_NE), max(1, BLOCK_NUMBERS // max(1, out_NE.shape[1]))
    for start in range(0, len(out_NE), step):
        rows = slice(start, start + step)
        bits_nE, wide_nE = stored_NE[rows].view(np.int16), out_NE[rows].view(np.int32)
        if (bits_nE & HALF_EXPONENT).max(initial=0) == HALF_EXPONENT:
            np.multiply(stored_NE[rows], scale_E, out=out_NE[rows])
            continue
        np.copyto(wide_nE, bits_nE)
        wide_nE <<= 13
        wide_nE &= SIGN_AND_REST
        out_NE[rows] *= scale_E * BIAS


def why_not_open(path: Path) -> str:
    """Return why there is no complete artifact at `path`, and what to do."""
    if not path.exists():
        return f"{path}: no such artifact; create one with `grasp build --out {shlex.quote(str(path))}`"
    if not (path / BUILD).exists() and (path / MARKER).exists():
        return (
            f"{path}: a build was started here, but no shard is finished; wait for it, or run the same `grasp build` "
            "with --resume"
        )
    if not (path / BUILD).exists():
        return f"{path}: not an artifact (no {BUILD}); create one with `grasp build --out {shlex.quote(str(path))}`"
    record = read_record(path / BUILD, BuildRecord)
    grid = ShardGrid(record.n_rows, record.shard_rows)
    done = len(BuiltShards(path, 0, grid).parts)
    return (
        f"{path}: not finished: {done} of {grid.n_shards} shards; run the same `grasp build` with --resume to continue"
    )
