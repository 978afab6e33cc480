"""Read an artifact: tables and moments lazily, arrays in memory-mapped blocks of rows.

An artifact is the directory that a build writes (`artifact/manifest.py` lists its files). For each row of the corpus it
has a row of every array. The columns of an array `relevance_KERNEL` are units (scored elements of a target, such as
the questions of a benchmark), or whole targets. Other arrays are sketches: short projections of a row's features.

A number is stored as a shard of rows by a group of columns, divided by a scale per column so that it fits float16:
value = stored number * scale * gain. The gain is one factor per array, which is known only after all rows (see
`grasp.pipeline.pipeline.sketch_gain`).

Moments are the means and covariances over the corpus that kernels use, and sums over all rows. They are named arrays in
the moments files. Start with `ArtifactReader.open` and `ArtifactReader.array_blocks`.

Shape letters: N rows, n rows of a block, E columns.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
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
    TOKENS,
    BuildRecord,
    BuiltShards,
    ColumnGroup,
    Manifest,
    ShardGrid,
)
from grasp.corpus.row_store import RowStore
from grasp.errors import ArtifactError
from grasp.files import InputPaths, kind_of
from grasp.kernel_table import BuiltRule
from grasp.readers import Reader, load_reader
from grasp.store.contents import read_table, read_tensors, readable
from grasp.store.directory import Files
from grasp.store.records import read_record
from grasp.store.remote import local_path, open_store, remote_url

RELEVANCE = "relevance_"  # prefix of the arrays of relevance
VERIFY = "`grasp verify` lists all damaged files"

# Settings that name the inputs of a build, with a phrase for messages.
_INPUT_SETTINGS = (
    ("the corpus", "corpus", "path"),
    ("a target", "targets", "names"),
    ("the model", "model", "path"),
    ("the tokenizer", "model", "tokenizer"),
)

# Conversion of float16 to float32, see `_scaled_into`.
SIGN_AND_REST = np.int32(-0x70002000)  # bits of a float32 that come from the float16
BIAS = np.float32(2.0**112)  # 2^(127 - 15), the difference of the exponent biases
MAX_SCALE = 2.0**15  # scales below it stay finite when multiplied by BIAS
BLOCK_NUMBERS = 1 << 16  # numbers per block, which fit the cache of a CPU

Columns = Integers | Sequence[int] | slice | None


@dataclass(frozen=True, slots=True)
class Leaks:
    """Rows that contain questions of one target.

    Attributes:
        row_index: indices of the rows, ascending.
        n_compared: number of questions that were searched for in the rows; the others are too short.
        n_questions: number of questions of the target.
    """

    row_index: I64
    n_compared: int
    n_questions: int

    def arrays(self, target: str) -> dict[str, I64]:
        """Return named arrays, which are stored with the moments."""
        counts = np.array([self.n_compared, self.n_questions])
        return {f"{LEAKS}{target}.rows": self.row_index, f"{LEAKS}{target}.questions": counts}

    def __str__(self) -> str:
        if not self.n_compared:
            return "its questions are too short to search for in the rows"
        few = {0: "no row contains a question", 1: "one row contains a question"}
        n_rows, n_short = len(self.row_index), self.n_questions - self.n_compared
        summary = few.get(n_rows, f"{n_rows:,} rows contain questions")
        if n_short:
            summary += f" ({n_short:,} of {self.n_questions:,} are too short to search for)"
        return summary


class ArtifactReader:
    """A complete artifact. `open` reads only the manifest; arrays are read in blocks.

    Attributes:
        path: directory of the files; of a remote artifact, the local cache.
        location: path or URL as the user gave it, for messages.
        manifest: the manifest.
        grid: division of the rows into shards.
        n_rows: number of rows.
        targets: names of the targets.
        array_names: names of the arrays.
        feature_settings: settings of the kernels; empty if the manifest does not record them.
    """

    def __init__(self, manifest: Manifest, files: Files) -> None:
        self.path = files.root
        self.location = files.location
        self.manifest = manifest
        self._files = files
        self._tokens = Files(files.root, manifest.rows_kept, VERIFY)
        # The last array file read of each column group, with its shard, since several blocks read the same file.
        self._last_chunk: dict[str, tuple[int, NDArray[Any]]] = {}
        self.grid = ShardGrid(manifest.n_rows, manifest.shard_rows)
        self.n_rows = manifest.n_rows
        self.targets = tuple(manifest.targets)
        self.array_names = tuple(self.manifest.arrays)
        self.feature_settings: Mapping[str, Any] = dict(self.manifest.settings.get("features", {}))

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a complete artifact: a directory, or a URL whose files are downloaded when needed.

        Raises:
            ArtifactError: not an artifact, unfinished (with its progress and how to resume), damaged, or of another
                format version.
        """
        return cls(*open_manifest(path))

    @property
    def protected_paths(self) -> dict[str, InputPaths]:
        """Return the paths that outputs must not replace, as `check_outputs` expects them: the artifact, its inputs."""
        paths: dict[str, InputPaths] = {"is the artifact": [str(self.path)]}
        reader = self.manifest.details.get("reader")
        files = () if self.reader is None else self.reader.settings.inputs.items()
        for phrase, *keys in (*_INPUT_SETTINGS, *((phrase, "model", reader, name) for name, phrase in files)):
            value: Any = self.manifest.settings
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            names = value if isinstance(value, list) else [value]
            paths[f"is {phrase} of the artifact"] = [self.resolve_path(name) for name in names if isinstance(name, str)]
        return paths

    def resolve_path(self, path: str) -> str:
        """Resolve a path of the build's settings, which is relative to the working directory of the build.

        A path that does not exist there is returned unchanged.
        """
        build_directory = self.manifest.details.get("built_in")  # relative to the artifact
        if build_directory is None or "://" in path:
            return path
        resolved = self.path / str(build_directory) / path
        return str(resolved) if resolved.exists() else path

    def require_one_corpus(self) -> None:
        """Check that the rows come from one corpus, which can be read again.

        Raises:
            ArtifactError: the artifact was merged; the message names its parts.
        """
        if parts := self.manifest.details.get("parts"):
            raise ArtifactError(
                f"{self.location}: is merged from artifacts with different corpora; for texts, tokens or new targets "
                f"use its parts: {', '.join(part['path'] for part in parts)}"
            )

    @property
    def reader(self) -> Reader | None:
        """Return the reader of the rows; None: they are texts."""
        name = self.manifest.details.get("reader")
        return None if name is None else load_reader(name)

    def require_texts(self, remedy: str) -> None:
        """Check that the rows are texts.

        Raises:
            ArtifactError: they are not; the message ends with `remedy`.
        """
        if self.reader is not None:
            raise ArtifactError(
                f"{self.location}: its rows are no texts, but read by `{self.manifest.details['reader']}`; {remedy}"
            )

    def open_rows(self) -> RowStore:
        """Open the rows as the model read them.

        Raises:
            ArtifactError: they were not stored or are of another corpus, or the artifact was merged.
            CorpusError: they are damaged.
        """
        self.require_one_corpus()
        if not self.tokens_path.exists():
            raise ArtifactError(f"{self.location}: rows were not stored; rebuild it with keep_tokens: true")
        rows = (RowStore if self.reader is None else self.reader.rows).open(self.tokens_path)
        self.prove(corpus=rows.fingerprint)
        return rows

    def prove(self, **now: str) -> None:
        """Check that fingerprints of inputs, by name, are equal to those of the build.

        Raises:
            ArtifactError: an input has changed.
        """
        recorded = {name: self.manifest.fingerprints.get(name) for name in now}
        if changed := [name for name in now if now[name] != recorded[name]]:
            listed = "; ".join(f"{name} {now[name]}, was {recorded[name]}" for name in changed)
            raise ArtifactError(
                f"{self.location}: {' and '.join(changed)} changed since it was built ({listed}); restore the inputs, "
                "or build a new artifact"
            )

    @cached_property
    def rows_path(self) -> Path:
        """Return the path of rows.parquet, in row order: row_index, row_id, doc_id, n_tokens, loss, snippet, labels.

        Raises:
            ArtifactError: the file is missing or damaged, or its rows are not those of the artifact.
        """
        path = self._files.file(ROWS)
        with readable(path, VERIFY), pq.ParquetFile(path) as file:
            schema, n_rows = file.schema_arrow, file.metadata.num_rows
        problems = [f"got {n_rows:,} rows, expected {self.n_rows:,}"] if n_rows != self.n_rows else []
        for name in ("row_index", "n_tokens"):
            if name not in schema.names or not pa.types.is_integer(kind := schema.field(name).type):
                got = f"got {kind}" if name in schema.names else "missing"
                problems.append(f"{name}: {got}, expected integers")
        if problems:
            raise ArtifactError(f"{path}: {'; '.join(problems)}; build the artifact again")
        return path

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
        """Return the directory of the tokenised rows, which does not exist if the build did not keep them.

        Its files are verified first.

        Raises:
            ArtifactError: a file is damaged.
        """
        for name in self.manifest.rows_kept if (self.path / TOKENS).exists() else ():
            self._tokens.file(name)
        return self.path / TOKENS

    @cached_property
    def units(self) -> pa.Table:
        """Read the table of units, in the order of the columns of the relevance arrays."""
        tables = [read_table(self._files.file(name), VERIFY) for name in self.manifest.units]
        return pa.concat_tables(tables, promote_options="default").combine_chunks()

    def leaks(self, target: str) -> Leaks | None:
        """Return the rows that contain questions of `target`; None if the rows are images."""
        rows_name, counts_name = f"{LEAKS}{target}.rows", f"{LEAKS}{target}.questions"
        if rows_name not in self.moments:
            return None
        n_compared, n_questions = (int(count) for count in self.moments[counts_name])
        return Leaks(np.asarray(self.moments[rows_name], dtype=np.int64), n_compared, n_questions)

    @cached_property
    def moments(self) -> "MomentArrays":
        """Return the moments and other arrays of the build, which are read lazily."""
        return MomentArrays([self._files.file(name) for name in self.manifest.moments])

    @property
    def kernels(self) -> tuple[str, ...]:
        """Return the names of the kernels whose relevance is stored."""
        return tuple(name.removeprefix(RELEVANCE) for name in self.array_names if name.startswith(RELEVANCE))

    @property
    def rule(self) -> BuiltRule:
        """Return the weights of the kernels in predictions, as the build recorded them.

        Raises:
            ArtifactError: the manifest has no valid rule.
        """
        try:
            return TypeAdapter(BuiltRule).validate_python(self.manifest.details.get("rule"))
        except ValidationError as err:
            raise ArtifactError(
                f"{self.location}: manifest.json: details.rule: {err.errors()[0]['msg']}; rebuild it"
            ) from err

    def relevance_name(self, kernel: str) -> str:
        """Return the name of the relevance array of a kernel.

        Raises:
            ArtifactError: no such array; the message lists the kernels.
        """
        name = f"{RELEVANCE}{kernel}"
        if name not in self.manifest.arrays:
            raise ArtifactError(
                f"{self.location}: has no relevance by {kernel!r}, only by {', '.join(self.kernels)}; rebuild it with "
                f"{kernel!r} in features.kernels"
            )
        return name

    def unit_columns(self, target: str) -> I64:
        """Return the columns of the relevance arrays that are units of `target`."""
        assert target in self.manifest.targets, target
        return np.flatnonzero(self.units["target"].to_numpy(zero_copy_only=False) == target).astype(np.int64)

    def array_scale(self, name: str) -> F32:
        """Return the scale of each column, (E,) with E = `ArrayEntry.width`."""
        scales = []
        for group in self.manifest.arrays[name].groups:
            path = self._files.file(SCALE.format(group.name))
            scales.append(np.array(_map_array(path, (group.stop - group.start,), "float32")))
        return np.concatenate(scales)

    def array_blocks(
        self, name: str, *, columns: Columns = None, block_rows: int | None = None
    ) -> Iterator[tuple[int, F32]]:
        """Yield an array in blocks of rows: the first row of the block, and its numbers, (n, E) float32.

        Relevance has a column for every unit, also if it is stored by target.

        Args:
            name: name of the array.
            columns: columns in the order of the result. Default: all.
            block_rows: rows of a block (the last may be shorter). Default: those of a shard.
        Raises:
            ArtifactError: a file is missing or truncated.
        """
        column_reads, width = self._plan_columns(name, columns)
        block_rows = block_rows or self.grid.shard_rows
        for start in range(0, self.n_rows, block_rows):
            stop = min(start + block_rows, self.n_rows)
            yield start, self._read(column_reads, width, np.arange(start, stop))

    def array_rows(self, name: str, row_index: Integers, *, columns: Columns = None) -> F32:
        """Read rows of an array, in the given order, (len(row_index), E) float32; see `array_blocks`."""
        column_reads, width = self._plan_columns(name, columns)
        return self._read(column_reads, width, row_index)

    def row_batches(
        self, columns: Sequence[str] | None = None, *, batch_rows: int = 65_536
    ) -> Iterator[pa.RecordBatch]:
        """Stream the row table, all columns or those of `columns`."""
        with readable(self.rows_path, VERIFY), pq.ParquetFile(self.rows_path) as file:
            if unknown := sorted({*(columns or ())} - {*file.schema_arrow.names}):
                raise ArtifactError(f"{self.rows_path}: no columns {unknown}; it has {file.schema_arrow.names}")
            yield from file.iter_batches(batch_size=batch_rows, columns=columns)

    def rows(self, row_index: Integers) -> pa.Table:
        """Read rows of the row table, in the given order, from only the shards that contain them."""
        with readable(self.rows_path, VERIFY):  # of a stranger, shards may differ from the row table
            schema = pq.read_schema(self.rows_path)
            tables, positions = [schema.empty_table()], [np.empty(0, dtype=np.int64)]
            for k, rows, result_rows in self._split_rows(row_index):
                tables.append(read_table(self._files.file(SHARD_ROWS.format(k)), VERIFY).take(rows))
                positions.append(result_rows)
            table = pa.concat_tables(tables, promote_options="permissive").select(schema.names)
            return table.take(np.argsort(np.concatenate(positions))).combine_chunks()

    def _split_rows(self, row_index: Integers) -> Iterator[tuple[int, I64, I64]]:
        """Yield each shard that has some of these rows, the rows within it, and their positions in `row_index`."""
        rows = np.asarray(row_index, dtype=np.int64)
        assert ((rows >= 0) & (rows < self.n_rows)).all()
        order = np.argsort(rows, kind="stable")
        shard = rows[order] // self.grid.shard_rows
        for positions in np.split(order, np.flatnonzero(np.diff(shard)) + 1) if len(rows) else ():
            k = int(rows[positions[0]]) // self.grid.shard_rows
            yield k, rows[positions] - k * self.grid.shard_rows, positions

    def _plan_columns(self, name: str, columns: Columns) -> tuple[list["_ColumnRead"], int]:
        """Return what to read from each group of an array, and the number of columns of the result."""
        scale_E, entry = self.array_scale(name), self.manifest.arrays[name]
        width = sum(self.manifest.targets.values()) if entry.targets else entry.width
        if columns is None or isinstance(columns, slice):
            requested = np.arange(width, dtype=np.int64)[columns or slice(None)]
        else:
            requested = np.asarray(columns, dtype=np.int64)
        assert ((requested >= 0) & (requested < width)).all()
        if entry.targets:  # from units to the column of their target; -1, which is in no group, if it has none
            column_of = {target: column for column, target in enumerate(entry.targets)}
            targets = self.units["target"].take(pa.array(requested)).to_pylist()
            requested = np.array([column_of.get(target, -1) for target in targets], dtype=np.int64)
        column_reads: list[_ColumnRead] = []
        for group in entry.groups:
            positions = np.flatnonzero((requested >= group.start) & (requested < group.stop))
            if len(positions):
                factor_E = scale_E[requested[positions]] * np.float32(entry.gain)
                column_reads.append((group, factor_E, _as_slice(requested[positions] - group.start), positions))
        return column_reads, len(requested)

    def _read(self, column_reads: Sequence["_ColumnRead"], width: int, row_index: Integers) -> F32:
        """Read rows and columns of an array, (len(row_index), width); columns that no group has are 0."""
        out_NE = np.zeros((len(row_index), width), dtype=np.float32)
        for k, rows, result_rows in self._split_rows(row_index):
            to_rows = _as_slice(result_rows)
            for group, factor_E, group_columns, result_columns in column_reads:
                shard, chunk_NE = self._last_chunk.get(group.name, (-1, None))
                if chunk_NE is None or shard != k:
                    n_stored = min(self.grid.shard_rows, self.n_rows - k * self.grid.shard_rows)
                    path = self._files.file(CHUNK.format(group.name, k))
                    chunk_NE = _map_array(path, (n_stored, group.stop - group.start), group.dtype)
                    self._last_chunk[group.name] = k, chunk_NE
                stored_NE = chunk_NE[_as_slice(rows)][:, group_columns]
                to_columns = _as_slice(result_columns)
                if isinstance(to_rows, slice) and isinstance(to_columns, slice):
                    _scaled_into(out_NE[to_rows, to_columns], stored_NE, factor_E)
                else:
                    out_NE[np.ix_(result_rows, result_columns)] = np.multiply(stored_NE, factor_E, dtype=np.float32)
        return out_NE


class Opened(Protocol):
    """An opened artifact, such as `grasp.Artifact`."""

    @property
    def files(self) -> ArtifactReader: ...


# A column group, scale times gain of its columns, the columns within the group, and within the result.
_ColumnRead = tuple[ColumnGroup, F32, slice | I64, I64]


def _as_slice(index: I64) -> slice | I64:
    """Return consecutive indices as a slice, which NumPy reads without a copy; others unchanged."""
    return slice(int(index[0]), int(index[-1]) + 1) if np.all(np.diff(index) == 1) else index


class MomentArrays(Mapping[str, NDArray[Any]]):
    """Named arrays of the moments files of the build and of each extension, read lazily."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths: dict[str, Path] = {}
        for path in paths:
            with readable(path, VERIFY), safe_open(path, framework="numpy") as file:
                self._paths |= dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> NDArray[Any]:
        path = self._paths[name]
        with readable(path, VERIFY), safe_open(path, framework="numpy") as file:
            array: NDArray[Any] = file.get_tensor(name)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def _map_array(path: Path, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    """Memory-map an array file of a known shape and dtype."""
    with readable(path, VERIFY):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.memmap) or (array.shape, array.dtype.str) != (shape, f"<{np.dtype(dtype).str[1:]}"):
        raise ArtifactError(f"{path}: expected an array {shape} of {dtype}; {VERIFY}")
    return array


def _scaled_into(out_NE: F32, stored_NE: NDArray[Any], scale_E: F32) -> None:
    """Compute stored_NE * scale_E in float32; for float16 bit-identical to NumPy in a third of the time.

    NumPy converts one number at a time. Here the bits of a float16 are moved into a float32: the sign stays in front
    (int16 to int32 extends it), and exponent and mantissa move left by 23 - 10 = 13 bits. The result is the number
    times 2^-112, exactly (subnormals included), since the exponent biases are 15 and 127. The factor 2^112 is
    multiplied into the scale. Infinity and NaN, which no build writes, would be wrong. Large scales use NumPy.
    """
    if stored_NE.dtype != np.float16 or np.abs(scale_E).max(initial=0.0) >= MAX_SCALE:
        np.multiply(stored_NE, scale_E, out=out_NE)
        return
    stored_NE, step = np.asarray(stored_NE), max(1, BLOCK_NUMBERS // max(1, out_NE.shape[1]))
    for start in range(0, len(out_NE), step):
        rows = slice(start, start + step)
        bits_nE, wide_nE = stored_NE[rows].view(np.int16), out_NE[rows].view(np.int32)
        np.copyto(wide_nE, bits_nE)
        wide_nE <<= 13
        wide_nE &= SIGN_AND_REST
        out_NE[rows] *= scale_E * BIAS


def open_manifest(path_or_url: Path | str) -> tuple[Manifest, Files]:
    """Read the manifest of a complete artifact; errors as `ArtifactReader.open`."""
    path = local_path(path_or_url)
    if remote_url(path_or_url) is not None or kind_of(path / MANIFEST) != "nothing":
        return open_store(path_or_url, SIGNED_MANIFEST, VERIFY)
    create = f"create one with `grasp build --out {shlex.quote(str(path))}`"
    if not path.exists():
        reason = f"no such artifact; {create}"
    elif (path / BUILD).exists():
        record = read_record(path / BUILD, BuildRecord)
        shards = BuiltShards(path, 0, ShardGrid(record.n_rows, record.shard_rows))
        reason = f"not finished: {shards.progress()}; run the same `grasp build` with --resume to continue"
    elif (path / MARKER).exists():
        reason = "not finished: no shard is written; wait for it, or run the same `grasp build` with --resume"
    else:
        reason = f"not an artifact (no {BUILD}); {create}"
    raise ArtifactError(f"{path}: {reason}")
