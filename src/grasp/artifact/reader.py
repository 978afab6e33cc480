"""Reading an artifact: tables and moments when asked for, arrays in blocks of rows that stay on disk."""

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

RELEVANCE = "relevance_"  # of an array, before the name of its kernel
# Names that version 0.2 gave to kernels, settings and moments.
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
VERIFY = "`grasp verify` names everything that is broken"
LARGEST = 1e30  # of a number: squares, and sums of them, stay finite
HALF_EXPONENT = np.int16(0x7C00)  # all ones: infinity, or no number
SIGN_AND_REST = np.int32(-0x70002000)  # where the bits of a float16 lie in a float32
BIAS = np.float32(2.0**112)  # between the exponents of both
WIDEST = 2.0**15  # scales up to it, times BIAS, are finite
AT_ONCE = 1 << 16  # numbers that stay in the cache until they are done
Columns = Integers | Sequence[int] | slice | None


@dataclass(frozen=True, slots=True)
class Leaks:
    """Rows that contain questions of one target.

    Attributes:
        row_index: these rows, ascending.
        n_compared: questions that were looked for, of `n_questions`; the others are too short.
    """

    row_index: I64
    n_compared: int
    n_questions: int

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], target: str) -> Self | None:
        """Read what `arrays` gives; None: nothing of this target."""
        rows, counts = f"{LEAKS}{target}.rows", f"{LEAKS}{target}.questions"
        if rows not in arrays:
            return None
        return cls(np.asarray(arrays[rows], dtype=np.int64), *(int(count) for count in arrays[counts]))

    def arrays(self, target: str) -> dict[str, I64]:
        """Return it as named arrays, which stand among the moments of an artifact."""
        counts = np.array([self.n_compared, self.n_questions])
        return {f"{LEAKS}{target}.rows": self.row_index, f"{LEAKS}{target}.questions": counts}

    def __str__(self) -> str:
        few = {0: "no row contains a question", 1: "one row contains a question"}
        n_rows, short = len(self.row_index), self.n_questions - self.n_compared
        if not self.n_compared:
            return "its questions are too short to be looked for in the rows"
        summary = few.get(n_rows, f"{n_rows:,} rows contain questions")
        return summary + f" ({short:,} of {self.n_questions:,} are too short to be looked for)" * bool(short)


class ArtifactReader:
    """A complete artifact. Opening reads the manifest only; arrays are read block by block."""

    def __init__(self, manifest: Manifest, files: Files) -> None:
        self.path = files.root  # of a remote artifact the directory that keeps what was fetched of it
        self.where = files.where  # what the user calls it: the path, or the URL; for messages
        self.manifest = _with_present_names(manifest)
        self._files = files
        self._tokens = Files(files.root, manifest.rows_kept, VERIFY)
        self._last_chunk: dict[str, tuple[int, NDArray[Any]]] = {}  # by group: shard and array; a few blocks share it
        self.grid = ShardGrid(manifest.n_rows, manifest.shard_rows)
        self.n_rows = manifest.n_rows
        self.targets = tuple(manifest.targets)
        self.array_names = tuple(self.manifest.arrays)
        features = self.manifest.settings.get("features", {})  # empty: not recorded
        self.feature_settings: Mapping[str, Any] = dict(features)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a complete artifact: a directory, or a URL whose files are fetched as they are needed.

        Raises:
            ArtifactError: nothing there, not finished (how far it is, and how to go on), damaged, or of
                another format version (both versions named).
        """
        if remote_url(path) is None and kind_of(local_path(path) / MANIFEST) == "nothing":
            raise ArtifactError(why_not_open(local_path(path)))
        return cls(*open_store(path, SIGNED_MANIFEST, VERIFY))

    @property
    def reads(self) -> dict[str, Reads]:
        """What no output may replace, for `check_outputs`: the artifact, and what it says that it was built from."""
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
        """Where a path of the build's settings is now: a relative one is meant from the directory of the build."""
        base = self.manifest.details.get("built_in")
        resolved = self.path / str(base) / path
        return str(resolved) if base is not None and "://" not in path and resolved.exists() else path

    def require_one_corpus(self) -> None:
        """See that the rows come from one corpus, which can be read again.

        Raises:
            ArtifactError: it was merged; its parts are named.
        """
        if parts := self.manifest.details.get("parts"):
            raise ArtifactError(
                f"{self.where}: was merged, and its parts have corpora of their own; for texts, tokens or new targets "
                f"ask the parts: {', '.join(part['path'] for part in parts)}"
            )

    @property
    def rows_path(self) -> Path:
        """rows.parquet: row_index, row_id, doc_id, n_tokens, loss, snippet, labels; in row order."""
        return self._files.file(ROWS)

    @property
    def keeps_features(self) -> bool:
        """Whether the features of every shard were kept."""
        return all(SHARD_FEATURES.format(k) in self.manifest.files for k in range(self.grid.n_shards))

    def features(self, k: int) -> dict[str, NDArray[Any]]:
        """Kept features of shard k: named arrays.

        Raises:
            ArtifactError: they were not kept, or are damaged.
        """
        return read_tensors(self._files.file(SHARD_FEATURES.format(k)), VERIFY)

    @property
    def tokens_path(self) -> Path:
        """Directory of the rows themselves, where they were kept; each of its files is the one that was written.

        Raises:
            ArtifactError: one of them is damaged.
        """
        for name in self.manifest.rows_kept if (self.path / TOKENS).exists() else ():
            self._tokens.file(name)
        return self.path / TOKENS

    @cached_property
    def units(self) -> pa.Table:
        """Units in the order of the columns of the relevance arrays."""
        tables = [read_table(self._files.file(name), VERIFY) for name in self.manifest.units]
        units = pa.concat_tables(tables, promote_options="default").combine_chunks()
        if (counts := dict(Counter(units["target"].to_pylist()))) != self.manifest.targets:
            raise ArtifactError(
                f"{self.where}: its manifest has units {self.manifest.targets}, the tables {counts}; build it again"
            )
        return units

    def leaks(self, target: str) -> Leaks | None:
        """Return which rows contain questions of `target`; None: an earlier version built it, and nobody looked."""
        return Leaks.from_arrays(self.moments, target)

    @cached_property
    def moments(self) -> "MomentArrays":
        """What the build kept beside the arrays; each is read when it is asked for."""
        return MomentArrays([self._files.file(name) for name in self.manifest.moments], sums=False)

    @cached_property
    def sums(self) -> "MomentArrays":
        """float64 totals over all rows, by name, as the build gave them: before the gain of an array."""
        return MomentArrays([self._files.file(name) for name in self.manifest.moments], sums=True)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Kernels by whose relevance rows can be compared, by name."""
        return tuple(name.removeprefix(RELEVANCE) for name in self.array_names if name.startswith(RELEVANCE))

    def relevance_name(self, match: str) -> str:
        """Array that holds the relevance of a kernel.

        Raises:
            ArtifactError: it was not built; the message says what there is.
        """
        name = f"{RELEVANCE}{match}"
        if name not in self.manifest.arrays:
            raise ArtifactError(
                f"{self.where}: has no relevance by {match!r}, only by {', '.join(self.kernels)}; build it with "
                f"features.kernels that name {match!r}"
            )
        return name

    def unit_columns(self, target: str) -> I64:
        """Columns of the relevance arrays that are units of `target`."""
        if target not in self.manifest.targets:
            raise ArtifactError(f"{self.where}: has no target {target!r}; it has {list(self.targets)}")
        return np.flatnonzero(self.units["target"].to_numpy(zero_copy_only=False) == target).astype(np.int64)

    def array_scale(self, name: str) -> F32:
        """What the stored numbers of each column are multiplied by, before the gain, (width,).

        Raises:
            ArtifactError: no such array; its scales are damaged, or none that a build writes.
        """
        if name not in self.manifest.arrays:
            raise ArtifactError(f"{self.where}: has no array {name!r}; it has {list(self.array_names)}")
        scales = []
        for group in self.manifest.arrays[name].groups:
            path = self._files.file(SCALE.format(group.name))
            scales.append(np.array(_array(path, (group.stop - group.start,), "float32")))
            if not np.abs(scales[-1]).max() <= LARGEST:  # nan compares false
                raise ArtifactError(f"{path}: holds a number that is not finite or over {LARGEST:g}; build it again")
        return np.concatenate(scales)

    def array_blocks(
        self, name: str, *, columns: Columns = None, block_rows: int | None = None
    ) -> Iterator[tuple[int, F32]]:
        """Rows of an array from first to last, in blocks: (start row, (n, columns) float32, scaled back).

        Args:
            columns: which, in which order; none: all.
            block_rows: rows in a block (the last may be short); none: those of a shard.
        Raises:
            ArtifactError: no such array or column; a chunk file is missing or cut.
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
        """Chosen rows of an array, in the order given: (len(row_index), columns) float32, scaled back."""
        picks, width = self._picks(name, columns)
        return self._read(picks, (len(row_index), width), self._by_shard(row_index))

    def row_batches(
        self, columns: Sequence[str] | None = None, *, batch_rows: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        """Stream the row table, all columns or those named."""
        with readable(self.rows_path, VERIFY), pq.ParquetFile(self.rows_path) as file:
            unknown = sorted(set(columns or ()) - set(file.schema_arrow.names))
            if unknown:
                raise ArtifactError(f"{self.rows_path}: no columns {unknown}; it has {file.schema_arrow.names}")
            yield from file.iter_batches(batch_size=batch_rows, columns=columns)

    def rows(self, row_index: Integers) -> pa.Table:
        """Chosen rows of the row table, in the order given, reading only the shards that hold them."""
        with readable(self.rows_path, VERIFY):
            schema = pq.read_schema(self.rows_path)
        tables, places = [schema.empty_table()], [np.empty(0, dtype=np.int64)]
        for k, rows, where in self._by_shard(row_index):
            tables.append(read_table(self._files.file(SHARD_ROWS.format(k)), VERIFY).take(rows))
            places.append(where)
        table = pa.concat_tables(tables, promote_options="permissive").select(schema.names)
        return table.take(np.argsort(np.concatenate(places))).combine_chunks()

    def _by_shard(self, row_index: Integers) -> Iterator[tuple[int, I64, I64]]:
        """The shards of some rows: which shard, which rows of it, and where in `row_index` these are."""
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
        """What is wanted of each group of columns, and how many columns there are in all."""
        scale_E, entry = self.array_scale(name), self.manifest.arrays[name]
        if columns is None or isinstance(columns, slice):
            chosen = np.arange(entry.width, dtype=np.int64)[columns or slice(None)]
        else:
            chosen = np.asarray(columns, dtype=np.int64)
        outside = chosen[(chosen < 0) | (chosen >= entry.width)]
        if outside.size:
            raise ArtifactError(f"{name}: got column {int(outside[0])}, expected 0 to {entry.width - 1}")
        picks = []
        for group in entry.groups:
            places = np.flatnonzero((chosen >= group.start) & (chosen < group.stop))
            if len(places):
                source, goal = (  # a run of neighbours as a slice, which NumPy reads without a copy
                    slice(int(index[0]), int(index[-1]) + 1) if np.all(np.diff(index) == 1) else index
                    for index in (chosen[places] - group.start, places)
                )
                picks.append(_Pick(group, scale_E[chosen[places]] * np.float32(entry.gain), source, goal))
        return picks, len(chosen)

    def _read(
        self, picks: list["_Pick"], shape: tuple[int, int], pieces: Iterable[tuple[int, slice | I64, slice | I64]]
    ) -> F32:
        """An array of pieces: of which shard, which of its rows, and which rows of the result they become."""
        out_NE = np.empty(shape, dtype=np.float32)
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
                with np.errstate(over="ignore", invalid="ignore"):  # what comes of it is looked at below
                    if isinstance(goal, slice) and isinstance(pick.goal, slice):
                        _scaled_into(out_NE[goal, pick.goal], stored_NE, pick.scale_E)
                    else:
                        rows_goal, columns_goal = np.arange(shape[0])[goal], np.arange(shape[1])[pick.goal]
                        out_NE[np.ix_(rows_goal, columns_goal)] = np.multiply(stored_NE, pick.scale_E, dtype=np.float32)
        with np.errstate(invalid="ignore"):
            ends = float(out_NE.max(initial=0.0)), float(out_NE.min(initial=0.0))
        # What no build writes: signed by a stranger, it would rank rows by chance without a word. nan compares false.
        if not (ends[0] <= LARGEST and ends[1] >= -LARGEST):
            raise ArtifactError(
                f"{self.where}: {picks[0].group.name}: holds a number that is not finite or over {LARGEST:g}; build it "
                "again"
            )
        return out_NE


class _Pick(NamedTuple):
    """Columns wanted from one group: which of its columns, and which columns of the result they become."""

    group: ColumnGroup
    scale_E: F32
    source: slice | I64
    goal: slice | I64


def _with_present_names(manifest: Manifest) -> Manifest:
    """The same, with the names of today where it has those of version 0.2, of arrays and of settings."""
    features = manifest.settings.get("features")
    if not isinstance(features, dict) or "match" not in features:
        return manifest
    arrays = {_ARRAYS.get(name, name): entry for name, entry in manifest.arrays.items()}
    renamed = {RENAMED_SETTINGS.get(name, name): value for name, value in features.items() if name not in _OLD_SETTINGS}
    kernels = [name.removeprefix(RELEVANCE) for name in arrays]
    if not renamed.get("product_width"):  # 0: no such sketch
        renamed.pop("product_width", None)
    settings = {**manifest.settings, "features": renamed | {"kernels": kernels}}
    return manifest.model_copy(update={"arrays": arrays, "settings": settings})


class MomentArrays(Mapping[str, NDArray[Any]]):
    """Named arrays of the moments files, read one by one when asked for.

    A total that an extension carries on (one number for each of its new columns) is joined to the first part.
    """

    def __init__(self, paths: Sequence[Path], *, sums: bool) -> None:
        self._prefix = SUM if sums else ""
        self._places: dict[str, list[tuple[Path, str]]] = {}  # where each is, and what it is called there
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
    """An array as it lies on disk; only what is used of it is read.

    Its header is known before, so it is compared and never parsed: half the time, and a stranger's means nothing.
    """
    header = _npy_header(shape, dtype)
    with readable(path, VERIFY), path.open("rb") as file:
        if file.read(len(header)) == header:
            return np.memmap(file, np.dtype(dtype).newbyteorder("<"), mode="r", offset=len(header), shape=shape)
    raise ArtifactError(f"{path}: holds no array {shape} of {dtype}; {VERIFY}")


@lru_cache
def _npy_header(shape: tuple[int, ...], dtype: str) -> bytes:
    buffer = io.BytesIO()
    fields = {"descr": np.dtype(dtype).newbyteorder("<").str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()


def _scaled_into(out_NE: F32, stored_NE: NDArray[Any], scale_E: F32) -> None:
    """stored_NE * scale_E in float32; of float16 bit for bit what NumPy makes of it, in a third of the time.

    NumPy widens one number at a time. Here the bits of all are moved to where float32 has sign, exponent and mantissa,
    which leaves 2^-112 of the number, exactly. Infinity and large scales, which no build writes, take NumPy's way.
    """
    if stored_NE.dtype != np.float16 or np.abs(scale_E).max(initial=0.0) >= WIDEST:
        np.multiply(stored_NE, scale_E, out=out_NE)
        return
    stored_NE, step = np.asarray(stored_NE), max(1, AT_ONCE // max(1, out_NE.shape[1]))
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
    """Why there is no complete artifact at `path`, and what to do."""
    if not path.exists():
        return f"{path}: no such artifact; make one with `grasp build --out {shlex.quote(str(path))}`"
    if not (path / BUILD).exists() and (path / MARKER).exists():
        return (
            f"{path}: a build was begun here, and no shard of it is finished; wait for it, or run the same "
            "`grasp build` again with --resume to go on"
        )
    if not (path / BUILD).exists():
        return f"{path}: not an artifact (no {BUILD}); make one with `grasp build --out {shlex.quote(str(path))}`"
    record = read_record(path / BUILD, BuildRecord)
    grid = ShardGrid(record.n_rows, record.shard_rows)
    done = len(BuiltShards(path, 0, grid).parts)
    return (
        f"{path}: not finished: {done} of {grid.n_shards} shards; "
        f"run the same `grasp build` again with --resume to go on"
    )
