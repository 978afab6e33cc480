"""A filtered copy of a corpus: whole records, as they are, of the documents that are kept.

Records stream from the source to shards; what is held is a shard of JSON records, or a batch of a table. The directory
is written aside and renamed: where it exists, it is whole.
"""

import datetime
import decimal
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, Literal, Protocol, Self, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.corpus.sources import ArrowChunk, Chunk, DatasetSource, FileSource, JsonRecord, open_source
from grasp.errors import CorpusError, SettingsError
from grasp.extras import require
from grasp.files import discard, written_aside

Format = Literal["parquet", "jsonl", "datasets"]
FORMATS: tuple[str, ...] = get_args(Format)
SHARD_RECORDS = 50_000
SHARD_CHARS = 64 << 20  # of JSON records that wait to become a table


def checked_format(text: str) -> Format:
    """A format by its name.

    Raises:
        SettingsError: another name.
    """
    for known in get_args(Format):
        if text == known:
            found: Format = known
            return found
    raise SettingsError(f"--format: got {text!r}, expected one of {', '.join(FORMATS)}")


def own_format(path: str) -> Format:
    """The format that a corpus has itself."""
    source = open_source(path)
    if isinstance(source, DatasetSource):
        return "datasets"
    assert isinstance(source, FileSource)
    return "parquet" if source.files[0][1].endswith(".parquet") else "jsonl"


def write_corpus(path: str, kept_M: NDArray[np.bool_], out: Path, kind: Format) -> int:
    """Copy the records of `path` that are kept to the new directory `out`. Returns how many.

    Args:
        kept_M: by position in the corpus; records beyond its end are left out.
    Raises:
        SettingsError: `out` exists.
        CorpusError: records that the format cannot hold.
        MissingExtraError: `datasets` is asked for and not installed.
    """
    if out.exists():
        raise SettingsError(f"{out}: is there already; give another name, or remove it")
    if kind == "datasets":
        require("datasets", extra="datasets", feature="writing a `datasets` directory")
    with written_aside(out) as part:
        if kind != "datasets":
            return _write_shards(path, kept_M, part, kind)
        shards = out.with_name(out.name + ".shards.part")
        discard(shards)
        try:
            n_records = _write_shards(path, kept_M, shards, kind)
            _as_datasets(shards, part)
        finally:
            discard(shards)
        return n_records


def _write_shards(path: str, kept_M: NDArray[np.bool_], directory: Path, kind: Format) -> int:
    directory.mkdir(parents=True)
    writer = _JsonLines(directory) if kind == "jsonl" else _Parquet(directory)
    with writer:
        for chunk in _chunks(path, len(kept_M)):
            writer.add(chunk, kept_M)
    return writer.n_records


class _Writer(Protocol):
    n_records: int

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def add(self, chunk: Chunk, kept_M: NDArray[np.bool_]) -> None: ...


class _JsonLines:
    """part-00000.jsonl, ...: one record a line."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._file: IO[str] | None = None
        self.n_records = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def add(self, chunk: Chunk, kept_M: NDArray[np.bool_]) -> None:
        for record in _records(chunk, kept_M):
            if self.n_records % SHARD_RECORDS == 0:
                self._open()
            assert self._file is not None
            try:
                self._file.write(json.dumps(record, ensure_ascii=False, default=_plain) + "\n")
            except TypeError as err:
                raise CorpusError(f"{chunk.name}: {err}; JSON lines cannot hold it, use --format parquet") from err
            self.n_records += 1

    def _open(self) -> None:
        self._stack.close()
        path = self._directory / f"part-{self.n_records // SHARD_RECORDS:05d}.jsonl"
        # halves of surrogate pairs, which JSON may spell and UTF-8 cannot, become question marks
        self._file = self._stack.enter_context(path.open("w", encoding="utf-8", errors="replace", newline="\n"))


class _Parquet:
    """part-00000.parquet, ...: tables as they are; a new file where the columns change."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: pq.ParquetWriter | None = None
        self._n_files = 0
        self._in_file = 0
        self._waiting: list[dict[str, Any]] = []
        self._chars = 0
        self.n_records = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._flush()
        if self._writer is not None:
            self._writer.close()

    def add(self, chunk: Chunk, kept_M: NDArray[np.bool_]) -> None:
        if isinstance(chunk, ArrowChunk):
            kept = _kept(chunk, kept_M)
            if kept.any():
                table = chunk.batch if isinstance(chunk.batch, pa.Table) else pa.Table.from_batches([chunk.batch])
                self._write(table.filter(pa.array(kept)).replace_schema_metadata(None))
            return
        for record in _records(chunk, kept_M):
            self._waiting.append(record)
            self._chars += sum(len(value) for value in record.values() if isinstance(value, str))
            if len(self._waiting) == SHARD_RECORDS or self._chars >= SHARD_CHARS:
                self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        names = list(dict.fromkeys(name for record in self._waiting for name in record))
        try:
            columns = {name: pa.array([record.get(name) for record in self._waiting]) for name in names}
        except (pa.ArrowException, OverflowError) as err:
            raise CorpusError(
                f"records {self.n_records:,} on: {' '.join(str(err).split())}; a table cannot hold it, use "
                "--format jsonl"
            ) from err
        self._waiting, self._chars = [], 0
        self._write(pa.table(columns), new_file=True)

    def _write(self, table: pa.Table, *, new_file: bool = False) -> None:
        if self._writer is not None and (
            new_file or self._in_file >= SHARD_RECORDS or not self._writer.schema.equals(table.schema)
        ):
            self._writer.close()
            self._writer = None
        if self._writer is None:
            path = self._directory / f"part-{self._n_files:05d}.parquet"
            self._writer = pq.ParquetWriter(path, table.schema, compression="zstd")
            self._n_files += 1
            self._in_file = 0
        self._writer.write_table(table)
        self._in_file += table.num_rows
        self.n_records += table.num_rows


def _chunks(path: str, n_documents: int) -> Iterator[Chunk]:
    """Records with all of their columns, up to the last document."""
    select: Callable[[pa.Schema, str], list[str]] = lambda schema, _: list(schema.names)  # noqa: E731
    for chunk in open_source(path).chunks(0, select):
        if chunk.index >= n_documents:
            return
        yield chunk


def _kept(chunk: ArrowChunk, kept_M: NDArray[np.bool_]) -> NDArray[np.bool_]:
    out = np.zeros(chunk.batch.num_rows, dtype=np.bool_)
    known = kept_M[chunk.index : chunk.index + len(out)]
    out[: len(known)] = known
    return out


def _records(chunk: Chunk, kept_M: NDArray[np.bool_]) -> Iterator[dict[str, Any]]:
    if isinstance(chunk, JsonRecord):
        if kept_M[chunk.index]:
            yield chunk.record
        return
    yield from chunk.batch.filter(pa.array(_kept(chunk, kept_M))).to_pylist()


def _plain(value: object) -> object:
    """Times as ISO text, decimals as numbers; anything else JSON has no word for."""
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return float(value)
    raise TypeError(f"a value of type {type(value).__name__}")


def _as_datasets(shards: Path, out: Path) -> None:
    """Parquet shards as a `datasets` directory."""
    datasets = require("datasets", extra="datasets", feature="writing a `datasets` directory")
    files = sorted(str(file) for file in shards.glob("*.parquet"))
    utils = datasets.utils
    were_shown = not utils.are_progress_bars_disabled()
    utils.disable_progress_bars()
    try:
        datasets.Dataset.from_parquet(files, cache_dir=str(shards / "cache")).save_to_disk(str(out))
    finally:
        if were_shown:
            utils.enable_progress_bars()
