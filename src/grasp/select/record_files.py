"""Write records as a corpus: Parquet, JSON lines, a JSON array, CSV, TSV, or a `datasets` directory.

Text files are compressed like those of the corpus. A corpus is a directory of files, which `datasets.load_dataset` and
`grasp build` read, or one that `datasets.load_from_disk` reads. It contains `_manifest.yaml` with the arguments, the
counts and a checksum of each file. Start with `write_corpus`.
"""

import csv
import io
import lzma
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import isnan
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, cast, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from grasp.corpus.documents import records_in
from grasp.corpus.labels import label_text
from grasp.corpus.sources import ArrowChunk, FileSource, PartOfSource, Source, parquet_batches
from grasp.corpus.text_files import COMPRESSION_BY_SUFFIX, DELIMITER, begins_with_bracket, file_type, open_decompressed
from grasp.errors import CorpusError, SettingsError
from grasp.extras import require
from grasp.files import atomic_path, check_directory, discard, entry_of
from grasp.select.export_tables import schema_of_file, table_of_records, unify_schemas
from grasp.text import json_text
from grasp.yaml_files import write_yaml

Kind = Literal["parquet", "jsonl", "json", "csv", "tsv", "datasets"]
SOURCE = "source"  # the format of the corpus
Item: TypeAlias = pa.Table | dict[str, Any]  # a table of rows, or a JSON record
MANIFEST = "_manifest.yaml"  # `datasets` reads any .json as data, and Arrow any file without a leading underscore

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
        amount = 0 if match is None else int(float(match["number"]) * _UNITS[match["unit"].upper()])
        if match is None or amount < 1:
            raise SettingsError(f"shard_size: got {text!r}, expected a size such as 256MB, or a number of records")
        return cls(sys.maxsize, amount) if match["unit"] else cls(records=amount)


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
        source = source.whole if isinstance(source, PartOfSource) else source
        kind, compression = "datasets", ""
        if isinstance(source, FileSource):  # the format of its first file
            name, path = source.files[0]
            kind, compression = file_type(name)
            if kind == "json":
                with source.fs.open(path, "rb") as handle:
                    kind = "json" if begins_with_bracket(open_decompressed(handle, name)) else "jsonl"
        kind = kind if text == SOURCE else text
        return cls(cast(Kind, kind), "" if kind in ("parquet", "datasets") else compression)


@dataclass(frozen=True, slots=True)
class Export:
    """Summary of a written export."""

    path: Path
    holds: str  # rows or documents
    records: int
    tokens: int
    note: str = ""  # difference in tokens from the selected rows, or how a trainer reads the files

    def __str__(self) -> str:
        size = f"{self.records:,} {self.holds}, {self.tokens:,} tokens{self.note}"
        return f"{self.path}: {size}; described in {MANIFEST}"


def write_corpus(
    out: Path,
    form: FileFormat,
    holds: str,
    items: Iterable[Item],
    tokens: int,
    request: Mapping[str, Any],
    size: ShardSize = ShardSize(),
) -> Export:
    """Write rows or documents to files part-00000, part-00001, ... in a directory, atomically.

    The records of JSON files are written unchanged; in other formats, and if they come from tables, all records have
    the same columns.

    Args:
        out: new directory.
        form: format of the files.
        holds: rows or documents.
        items: tables or JSON records.
        tokens: number of tokens in them; 0 if unknown.
        request: arguments to record in the manifest.
        size: maximum size of a file.

    Raises:
        CorpusError: a record cannot be represented in the format.
        MissingExtraError: the format is `datasets` and the library is not installed.
    """
    check_directory(out)
    if form.kind == "datasets":
        require("datasets", extra="datasets", feature="writing a `datasets` directory")
    with atomic_path(out) as part:
        part.mkdir(parents=True)
        n_records = _write_records(part, form, items, size)
        contents = {
            "holds": holds,
            "order": "of the corpus" + ("; column `order` has the rank in the selection" if holds == "rows" else ""),
            "records": n_records,
            "tokens": tokens,
            "format": form.kind,
            "files": {file.name: entry_of(file).model_dump() for file in sorted(part.iterdir())},
        }
        write_yaml({**request, **contents}, part / MANIFEST)
    return Export(out, holds, n_records, tokens)


def _write_records(out: Path, form: FileFormat, items: Iterable[Item], size: ShardSize) -> int:
    """Write records to files in an existing directory, and return their number."""
    items = iter(items)
    first = next(items, None)
    items = items if first is None else chain([first], items)
    if form.kind in ("json", "jsonl") and not isinstance(first, pa.Table):
        return _write_text(out, form, items, size, ())
    is_final = form.kind == "parquet"
    shards = out if is_final else out / "shards"
    shards.mkdir(exist_ok=True)
    tables = _write_parquet(shards, items, size if is_final else ShardSize())
    n_records: int = sum(pq.read_metadata(file).num_rows for file in tables)
    if form.kind == "datasets":
        datasets = require("datasets", extra="datasets", feature="writing a `datasets` directory")
        were_shown = not datasets.utils.are_progress_bars_disabled()
        datasets.utils.disable_progress_bars()
        try:
            loaded = datasets.Dataset.from_parquet([str(file) for file in tables], cache_dir=str(shards / "cache"))
            loaded.save_to_disk(str(out))
        finally:
            if were_shown:
                datasets.utils.enable_progress_bars()
    elif not is_final:
        names = pq.read_schema(tables[0]).names if tables else []
        batches = (batch for path in tables for batch in parquet_batches(pq.ParquetFile(path), names))
        records = (record for batch in batches for _, record in records_in(ArrowChunk(0, "", 0, batch)))
        _write_text(out, form, records, size, names)
    if not is_final:
        discard(shards)
    return n_records


def _write_text(out: Path, form: FileFormat, records: Iterable[Any], size: ShardSize, names: Iterable[str]) -> int:
    """Write text files, and return the number of records."""
    begin, between, end = (b"[\n", b",\n", b"\n]\n") if form.kind == "json" else (b"", b"\n", b"\n")
    delimiter, names = DELIMITER.get(form.kind), tuple(names)
    if delimiter is not None:
        begin = _line(dict(zip(names, names, strict=True)), delimiter, names) + b"\n"
    codec = COMPRESSION_BY_SUFFIX.get(form.compression)
    open_file: Any = partial(pa.CompressedOutputStream, compression=codec)
    if codec is None or codec == "xz":
        open_file = partial(lzma.open if codec else open, mode="wb")

    n_records = n_files = n_in_file = n_bytes = 0
    with ExitStack() as stack:
        for record in records:
            try:
                text = _line(record, delimiter, names)
            except TypeError as err:
                raise CorpusError(f"record {n_records:,}: {err}; not representable as JSON, write parquet") from err
            if n_files and n_in_file < size.records and n_bytes + len(between) + len(text) + len(end) <= size.n_bytes:
                text = between + text
            else:
                stack.close()
                path = out / f"part-{n_files:05d}.{form.kind}{form.compression}"
                file = stack.enter_context(open_file(str(path)))
                stack.callback(file.write, end)
                text, n_files, n_in_file, n_bytes = begin + text, n_files + 1, 0, 0
            file.write(text)
            n_records, n_in_file, n_bytes = n_records + 1, n_in_file + 1, n_bytes + len(text)
    return n_records


def _line(record: Mapping[str, Any], delimiter: str | None, names: Iterable[str]) -> bytes:
    """Return a record as a line without its end: JSON or, if there is a delimiter, CSV whose nested values are JSON."""
    if delimiter is None:
        return json_text(record, None, only_ascii=False).encode()
    cells: list[str | None] = []
    for value in (record.get(name) for name in names):
        if isinstance(value, list | dict):
            cells.append(json_text(value, None, only_ascii=False))
        else:
            cells.append(None if isinstance(value, float) and isnan(value) else label_text(value))
    line = io.StringIO()
    csv.writer(line, delimiter=delimiter, lineterminator="").writerow(cells)
    return line.getvalue().encode()


def _write_parquet(shards: Path, items: Iterable[Item], size: ShardSize) -> list[Path]:
    """Write part-00000.parquet, ..., all with one schema, and return their paths."""
    writer: pq.ParquetWriter | None = None
    files: list[Path] = []
    n_in_file = n_bytes = 0
    with ExitStack() as stack:
        for table in batch_tables(items):
            schema = schema_of_file(table.schema)
            while table.num_rows:
                n_records = 0
                if writer is not None and writer.schema.equals(schema, check_metadata=True):
                    n_records = _n_fitting(table, size.records - n_in_file, size.n_bytes - n_bytes)
                if writer is None or not n_records:
                    stack.close()
                    files.append(shards / f"part-{len(files):05d}.parquet")
                    writer = stack.enter_context(pq.ParquetWriter(files[-1], schema, compression="zstd"))
                    n_in_file = n_bytes = 0
                    n_records = max(1, _n_fitting(table, size.records, size.n_bytes))
                part, table = table.slice(0, n_records), table.slice(n_records)  # noqa: PLW2901
                writer.write_table(part)
                n_in_file, n_bytes = n_in_file + n_records, n_bytes + part.nbytes
    unify_schemas(files)
    return files


def _n_fitting(table: pa.Table, max_records: int, n_bytes: int) -> int:
    """Return how many records, at most `max_records`, from the start of a table fit into `n_bytes` bytes."""
    max_records = min(max_records, table.num_rows)
    return bisect_right(range(1, max_records + 1), n_bytes, key=lambda n: table.slice(0, n).nbytes)


def batch_tables(items: Iterable[Item]) -> Iterator[pa.Table]:
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
