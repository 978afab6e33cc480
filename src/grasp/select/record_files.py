"""Write the records of an export as files: Parquet, JSON lines, a JSON array, CSV, TSV, or a `datasets` directory.

Text files are compressed like those of the corpus. Start with `FileFormat` and `write_records`.
"""

import csv
import io
import lzma
import re
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from math import isnan
from pathlib import Path
from typing import IO, Any, Literal, Self, TypeAlias, cast, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from grasp.corpus.documents import records_in
from grasp.corpus.labels import label_text
from grasp.corpus.sources import ArrowChunk, FileSource, PartOfSource, Source, parquet_batches
from grasp.corpus.text_files import COMPRESSION_BY_SUFFIX, DELIMITER, begins_with_bracket, file_type, open_decompressed
from grasp.errors import CorpusError, SettingsError
from grasp.extras import require
from grasp.files import discard
from grasp.select.export_tables import schema_of_file, table_of_records, unify_schemas
from grasp.text import json_text

Kind = Literal["parquet", "jsonl", "json", "csv", "tsv", "datasets"]
SOURCE = "source"  # the format of the corpus
TABLE_KINDS = ("parquet", "datasets")
Item: TypeAlias = pa.Table | dict[str, Any]  # a table of rows, or a JSON record

SHARD_RECORDS = 50_000
SHARD_CHARS = 64 << 20  # characters of JSON records that are buffered before they become a table
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>(?:[KMG]i?)?B|)", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


@dataclass(frozen=True, slots=True)
class ShardSize:
    """Maximum size of a file: records, and bytes before compression, of text or of Arrow tables in memory."""

    records: int = SHARD_RECORDS
    n_bytes: int = sys.maxsize

    @classmethod
    def parse(cls, text: str | int) -> Self:
        """Parse a number of records, or a size such as 256MB.

        Raises:
            SettingsError: anything else.
        """
        match = _SIZE.fullmatch(str(text).strip().replace(",", "").replace("_", ""))
        if match is None or float(match["number"]) * _UNITS[match["unit"].upper()] < 1:
            raise SettingsError(f"shard_size: got {text!r}, expected a size such as 256MB, or a number of records")
        amount = int(float(match["number"]) * _UNITS[match["unit"].upper()])
        return cls(records=amount) if not match["unit"] else cls(sys.maxsize, amount)


DEFAULT_SIZE = ShardSize()


@dataclass(frozen=True, slots=True)
class FileFormat:
    """Format of the files of an export.

    Attributes:
        compression: suffix of compressed text files, e.g. `.gz`, or empty.
    """

    kind: Kind = "parquet"
    compression: str = ""

    @classmethod
    def parse(cls, text: str, source: Source) -> Self:
        """Parse the name of a format; text files are compressed like those of `source`.

        Raises:
            SettingsError: the name is unknown.
        """
        if text not in (SOURCE, *get_args(Kind)):
            raise SettingsError(f"format: got {text!r}, expected one of {', '.join((SOURCE, *get_args(Kind)))}")
        original = _format_of(source)
        kind = original.kind if text == SOURCE else cast(Kind, text)
        return cls(kind, "" if kind in TABLE_KINDS else original.compression)

    @property
    def suffix(self) -> str:
        """Return the suffix of its files."""
        return f".{self.kind}{self.compression}"


def _format_of(source: Source) -> FileFormat:
    """Return the format of the first file of a source."""
    source = source.whole if isinstance(source, PartOfSource) else source
    if not isinstance(source, FileSource):
        return FileFormat("datasets")
    name, path = source.files[0]
    kind, compression = file_type(name)
    if kind == "json":
        with source.fs.open(path, "rb") as handle:
            kind = "json" if begins_with_bracket(open_decompressed(handle, name)) else "jsonl"
    return FileFormat(cast(Kind, kind), compression)


def write_records(out: Path, form: FileFormat, items: Iterable[Item], size: ShardSize) -> int:
    """Write records to files part-00000, part-00001, ... in an existing directory, and return their number.

    Args:
        items: tables or JSON records. The records of JSON files are written unchanged; in other formats, and if they
            come from tables, all records have the same columns.

    Raises:
        CorpusError: a record cannot be represented in the format.
        MissingExtraError: the format is `datasets` and the library is not installed.
    """
    items = iter(items)
    first = next(items, None)
    items = items if first is None else chain([first], items)
    if form.kind in ("json", "jsonl") and not isinstance(first, pa.Table):
        return _write_text(out, form, items, size, ())
    if form.kind == "parquet":
        return _count_rows(_write_parquet(out, items, size))
    shards = out / "shards"
    shards.mkdir()
    tables = _write_parquet(shards, items, ShardSize())
    n_records = _count_rows(tables)
    if form.kind == "datasets":
        _save_as_dataset(tables, shards / "cache", out)
    else:
        names = pq.read_schema(tables[0]).names if tables else []
        _write_text(out, form, _read_records(tables), size, names)
    discard(shards)
    return n_records


def _count_rows(tables: Iterable[Path]) -> int:
    """Return the number of rows of Parquet files."""
    return sum(pq.read_metadata(file).num_rows for file in tables)


def _read_records(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """Yield the records of Parquet files."""
    for path in files:
        with pq.ParquetFile(path) as file:
            for batch in parquet_batches(file, file.schema_arrow.names):
                yield from (record for _, record in records_in(ArrowChunk(0, path.name, 0, batch)))


def _write_text(out: Path, form: FileFormat, records: Iterable[Any], size: ShardSize, names: Iterable[str]) -> int:
    """Write text files, and return the number of records.

    Args:
        names: columns of CSV and TSV.
    """
    begin, between, end = b"", b"\n", b"\n"
    text_of: Callable[[dict[str, Any]], bytes] = _json_line
    if form.kind == "json":
        begin, between, end = b"[\n", b",\n", b"\n]\n"
    elif form.kind in DELIMITER:
        text_of = _delimited_line(DELIMITER[form.kind], tuple(names))
        begin = text_of(dict(zip(names, names, strict=True))) + b"\n"
    n_records = n_files = n_in_file = n_bytes = 0
    with ExitStack() as stack:
        for record in records:
            try:
                text = text_of(record)
            except TypeError as err:
                raise CorpusError(f"record {n_records:,}: {err}; not representable as JSON, write parquet") from err
            if n_files and n_in_file < size.records and n_bytes + len(between) + len(text) + len(end) <= size.n_bytes:
                text = between + text
            else:
                stack.close()
                file = stack.enter_context(_open_compressed(out / f"part-{n_files:05d}{form.suffix}"))
                stack.callback(file.write, end)
                text, n_files, n_in_file, n_bytes = begin + text, n_files + 1, 0, 0
            file.write(text)
            n_records, n_in_file, n_bytes = n_records + 1, n_in_file + 1, n_bytes + len(text)
    return n_records


def _open_compressed(path: Path) -> Any:
    """Open a file for writing, compressed according to its suffix."""
    codec = COMPRESSION_BY_SUFFIX.get(path.suffix)
    if codec is None:
        return path.open("wb")
    return lzma.open(path, "wb") if codec == "xz" else pa.CompressedOutputStream(str(path), codec)


def _json_line(record: dict[str, Any]) -> bytes:
    """Return a record as a line of JSON without its end."""
    return json_text(record, None, only_ascii=False).encode()


def _delimited_line(delimiter: str, names: tuple[str, ...]) -> Callable[[dict[str, Any]], bytes]:
    """Return a function that writes a record as a line of CSV without its end; nested values are JSON."""

    def text_of(record: dict[str, Any]) -> bytes:
        line: IO[str] = io.StringIO()
        values = (record.get(name) for name in names)
        csv.writer(line, delimiter=delimiter, lineterminator="").writerow(
            json_text(value, None, only_ascii=False)
            if isinstance(value, list | dict)
            else None
            if isinstance(value, float) and isnan(value)
            else label_text(value)
            for value in values
        )
        return cast(io.StringIO, line).getvalue().encode()

    return text_of


def _write_parquet(shards: Path, items: Iterable[Item], size: ShardSize) -> list[Path]:
    """Write part-00000.parquet, ..., all with one schema, and return their paths.

    JSON records are buffered up to SHARD_RECORDS or SHARD_CHARS; each buffer becomes a table.
    """
    writer: pq.ParquetWriter | None = None
    files: list[Path] = []
    n_in_file = n_bytes = 0
    with ExitStack() as stack:
        for table in _batch_tables(items):
            start, schema = 0, schema_of_file(table.schema)
            while start < table.num_rows:
                rest, n_records = table.slice(start), 0
                if writer is not None and writer.schema.equals(schema, check_metadata=True):
                    n_records = _n_fitting(rest, size.records - n_in_file, size.n_bytes - n_bytes)
                if writer is None or not n_records:
                    stack.close()
                    files.append(shards / f"part-{len(files):05d}.parquet")
                    writer = stack.enter_context(pq.ParquetWriter(files[-1], schema, compression="zstd"))
                    n_in_file = n_bytes = 0
                    n_records = max(1, _n_fitting(rest, size.records, size.n_bytes))
                part = rest.slice(0, n_records)
                writer.write_table(part)
                start, n_in_file, n_bytes = start + n_records, n_in_file + n_records, n_bytes + part.nbytes
    unify_schemas(files)
    return files


def _n_fitting(table: pa.Table, max_records: int, n_bytes: int) -> int:
    """Return how many records, at most `max_records`, from the start of a table fit into `n_bytes` bytes."""
    max_records = min(max_records, table.num_rows)
    return bisect_right(range(1, max_records + 1), n_bytes, key=lambda n: table.slice(0, n).nbytes)


def _batch_tables(items: Iterable[Item]) -> Iterator[pa.Table]:
    """Yield tables unchanged, and JSON records in batches as tables."""
    pending: list[dict[str, Any]] = []
    chars = 0
    for item in items:
        if isinstance(item, pa.Table):
            yield item
            continue
        pending.append(item)
        chars += sum(len(value) for value in item.values() if isinstance(value, str))
        if len(pending) == SHARD_RECORDS or chars >= SHARD_CHARS:
            yield table_of_records(pending)
            pending, chars = [], 0
    if pending:
        yield table_of_records(pending)


def _save_as_dataset(files: Iterable[Path], cache: Path, out: Path) -> None:
    """Write Parquet files as a `datasets` directory."""
    datasets = require("datasets", extra="datasets", feature="writing a `datasets` directory")
    were_shown = not datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()
    try:
        names = sorted(str(file) for file in files)
        datasets.Dataset.from_parquet(names, cache_dir=str(cache)).save_to_disk(str(out))
    finally:
        if were_shown:
            datasets.utils.enable_progress_bars()
