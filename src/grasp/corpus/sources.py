"""Sources of records: Parquet and JSONL files through fsspec, `datasets`, and tables in memory.

A source yields records by position, independent of their meaning. It streams: memory is a block of lines, or a batch of
a Parquet row group. Start with `open_source`.
"""

import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any, Protocol
from urllib.parse import unquote

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from grasp.corpus.labels import label_text
from grasp.corpus.text_files import DELIMITER, FILE_TYPES, file_type, one_line, text_records
from grasp.corpus.values import plain_values
from grasp.errors import CorpusError, at
from grasp.extras import require
from grasp.hub import is_path, refusal, suggest_path
from grasp.store.remote import remote_errors

EXPECTED_CORPUS = "expected .parquet, .jsonl, .json, .csv or .tsv, a directory of such files, or a `datasets` directory"
BATCH_ROWS = 256
IN_MEMORY = "in memory, "  # prefix of a recorded path for objects in memory; the fingerprint follows
_HUB_NAME = re.compile(r"[\w-]+(?:/[\w-][\w.-]*)?")
_FILE_SUFFIX = re.compile(
    r"\.(?:parquet|pq|jsonl?|ndjson|csv|tsv|txt|arrow|feather|gz|gzip|zstd?|bz2|xz|zip|tar)$", re.IGNORECASE
)
_DIGEST_BYTES = 64 << 20  # local files up to this size are identified by content, which takes a tenth of a second
_DIGEST_ROWS = 65_536
_MAX_EXAMPLES = 4  # names of files that are not read, in a note
# A part of a split as in `datasets`: [:100], train[10%:20%], train[-5:]. The split of a single file has no name.
_PART = re.compile(r"(?P<name>[^\[\]]*)\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\]")
_MEASURED_BYTES = 16 << 20  # JSON lines are counted up to this size, and extrapolated beyond
_STAMPS = ("mtime", "ETag", "etag", "LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True, slots=True)
class ArrowChunk:
    """Consecutive records of one table: `first` is the position in the file, `index` that in the corpus."""

    index: int
    name: str
    first: int
    batch: pa.RecordBatch
    file_labels: Mapping[str, str] = field(default_factory=dict)  # what the location of the file says of its records


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """One record of a text file; `line` counts from 1, `index` is the position in the corpus."""

    index: int
    name: str
    line: int  # of JSON arrays the position of the record
    record: dict[str, Any]
    file_labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def location(self) -> str:
        """Return file and line, for messages."""
        return f"{self.name}:{self.line}"


Chunk = ArrowChunk | JsonRecord
Selector = Callable[[pa.Schema, str], Sequence[str]]  # returns the columns to read, given a schema and the file name


class Source(Protocol):
    """An ordered list of records."""

    def identity(self) -> list[list[str]]:
        """Return [name, size, stamp] of each file, which identify the corpus without reading all of it.

        A stamp is a digest of the content of a small local file, otherwise a date or version from the file system.
        """

    def chunks(self, start: int, select: Selector) -> Iterator[Chunk]:
        """Yield the records from position `start` on, in order."""

    def approximate_length(self, n: int) -> int:
        """Return the number of records; of text files at least `n` are counted, the rest is extrapolated by bytes."""


def is_local(path: str) -> bool:
    """Return whether a corpus is on a local disk, without network access."""
    try:
        fs, root = fsspec.core.url_to_fs(path)
        return isinstance(fs, LocalFileSystem) and bool(fs.exists(root))
    except (ValueError, ImportError, OSError):
        return False


def is_parquet(path: str) -> bool:
    """Return whether a file is Parquet, by its name."""
    return file_type(path)[0] == "parquet"


def open_source(path: str, split: str | None = None) -> Source:
    """Open a file, a directory, a `datasets` directory, or a hub dataset, or a part of it.

    Args:
        path: local path, URL of a file system that fsspec supports, or name of a hub dataset.
        split: split of a `datasets` directory or hub dataset, or of a directory with files named after splits. A range
            of records or percents may follow, by the rules of `datasets`: `train[:10%]`, or `[-5:]` without splits.
    Raises:
        CorpusError: no such path, an unsupported file type, a directory without a supported file, several splits and
            none is named, or an empty or invalid range.
        MissingExtraError: `datasets` is needed and not installed.
    """
    if split is None or "[" not in split:
        return _open_whole(path, split)
    part = _PART.fullmatch(split)
    if part is None:
        raise CorpusError(f"split: got {split!r}, expected one range of a split, such as train[:10%]")
    whole = _open_whole(path, part["name"] or None)
    n_records = whole.approximate_length(sys.maxsize)  # exact, since that many are counted
    numbers = [int(bound.rstrip("%")) if bound else None for bound in part.group("start", "stop")]
    if "%" in split:  # of either bound: it holds for both, as in `datasets`
        numbers = [None if percent is None else round(percent * n_records / 100) for percent in numbers]
    start, stop, _ = slice(*numbers).indices(n_records)
    if start >= stop:
        raise CorpusError(f"split: got {split!r}, which has no record: {path} has {n_records:,}")
    return PartOfSource(whole, split, start, stop)


def _open_whole(path: str, split: str | None) -> Source:
    """Open all records of a path or split; see `open_source`."""
    if path.startswith(IN_MEMORY):
        raise CorpusError(
            f"it was a table {path}, which is not on disk; pass the same object again, or save it as Parquet and pass "
            "the file"
        )
    try:
        with remote_errors(path, CorpusError):
            fs, root = fsspec.core.url_to_fs(path)
            exists, is_file = fs.exists(root), fs.isfile(root)
    except (ValueError, ImportError, OSError) as err:
        raise CorpusError(f"{path}: cannot be opened: {one_line(err)}") from err
    if not exists:  # a dataset of the hub
        is_link = os.path.lexists(path)
        fault = "a broken or circular symbolic link" if is_link else f"no such file or directory{suggest_path(path)}"
        if is_link or not _HUB_NAME.fullmatch(path) or _FILE_SUFFIX.search(path) or is_path(path):
            raise CorpusError(f"{path}: {fault}; {EXPECTED_CORPUS}")
        datasets = require("datasets", extra="datasets", feature=f"{path}, which is not a local path; a hub dataset")
        try:
            if offline := refusal():
                raise OSError(offline)
            table = _select_split(datasets.load_dataset(path), split, path)
        except (OSError, ValueError) as err:
            raise CorpusError(
                f"{path}: {fault}, and no hub dataset of that name is available: {one_line(err)}"
            ) from err
        return TableSource(table.data.table, path, [[path, str(table.num_rows), str(table.info.version)]])
    # names in messages: paths of local files, URLs otherwise
    shown = str if isinstance(fs, LocalFileSystem) else fs.unstrip_protocol
    if is_file:
        fault = f"split: got {split!r}, but {path} is one file and has no splits; omit it"
        if split is None:
            fault = f"{shown(root)}: unknown file type {PurePosixPath(root).suffix!r}; {EXPECTED_CORPUS}"
        if split is not None or file_type(root)[0] not in FILE_TYPES:
            raise CorpusError(fault)
        return FileSource(fs, [(shown(root), root)], root.rpartition("/")[0])
    is_saved_table = fs.exists(f"{root}/state.json") and fs.exists(f"{root}/dataset_info.json")
    if is_saved_table or fs.exists(f"{root}/dataset_dict.json"):
        datasets = require("datasets", extra="datasets", feature=f"reading the `datasets` directory {path}")
        try:
            table = _select_split(datasets.load_from_disk(path), split, path)
        except (OSError, ValueError, KeyError, IndexError, pa.ArrowException) as err:  # IndexError: an empty table
            raise CorpusError(f"{path}: incomplete `datasets` directory: {one_line(err)}; save it again") from err
        return TableSource(table.data.table, path, [_file_identity(fs, file, root) for file in sorted(fs.find(root))])
    files, unread = _files_of_directory(fs, root, path, split)
    return FileSource(fs, [(shown(file), file) for file in files], root, _partitions(files, root), unread)


def _files_of_directory(fs: Any, root: str, path: str, split: str | None) -> tuple[list[str], tuple[str, ...]]:
    """Return the files of records in a directory, sorted, and the other ones; see `open_source` for the arguments."""
    with remote_errors(path, CorpusError):
        relative = {file: PurePosixPath(file).relative_to(root) for file in sorted(fs.find(root))}
    visible = [file for file, steps in relative.items() if not any(s.startswith((".", "_")) for s in steps.parts)]
    # Other files next to the data are mostly notes on it, e.g. dataset_info.json, statistics.csv. C4, Dolma and others
    # use `.json.gz` for JSON lines; plain `.json` files seldom are.
    records = [file for file in visible if file_type(file)[0] in FILE_TYPES]
    rank_of = {file: (file_type(file)[0] in DELIMITER, file_type(file) == ("json", "")) for file in records}
    lowest = min(rank_of.values(), default=None)
    files = [file for file in records if rank_of[file] == lowest]
    unread = tuple(str(relative[file]) for file in visible if rank_of.get(file) != lowest)
    fault = f"{path}: no file of records in this directory; {EXPECTED_CORPUS}"
    if split is not None:
        named = re.compile(rf"(?:.*/)?{re.escape(split)}[-./][^/]*(?:/.*)?")
        files = [file for file in files if named.fullmatch(str(relative[file]))]
        fault = f"split: got {split!r}, but no file of {path} is named after it"
    if len({is_parquet(file) for file in files}) > 1:
        fault = f"{path}: contains both Parquet and JSONL files ({files[0]}, ...); move one kind elsewhere"
        files = []
    if not files:
        raise CorpusError(fault)
    return files, unread


def unread_files_note(source: Source) -> list[str]:
    """Return a note on the files of a directory that are not read, with an example of each suffix; empty if none."""
    whole = source.whole if isinstance(source, PartOfSource) else source
    unread = whole.unread if isinstance(whole, FileSource) else ()
    examples = sorted({PurePosixPath(file).suffix.lower(): file for file in reversed(unread)}.values())[:_MAX_EXAMPLES]
    more = ", ..." if len(unread) > len(examples) else ""
    return [f"{len(unread):,} file{'s' * (len(unread) > 1)} not read: {', '.join(examples)}{more}"] if unread else []


@dataclass(frozen=True)
class FileSource:
    """Parquet or JSONL files, read in order."""

    fs: Any
    files: Sequence[tuple[str, str]]  # (name for messages, path in the file system), in reading order
    root: str
    partitions: Mapping[str, "Partition"] = field(default_factory=dict)  # by path, for files in folders KEY=VALUE
    unread: tuple[str, ...] = ()  # relative paths of other files in the directory, without hidden ones

    def identity(self) -> list[list[str]]:
        """Return relative name, size, and digest, modification time or entity tag of each file."""
        with remote_errors(self.files[0][0], CorpusError):
            return [_file_identity(self.fs, path, self.root) for _, path in self.files]

    @cached_property
    def _file_labels(self) -> dict[str, dict[str, str]]:
        """Return, by path, the file without its suffix, and its directory if the files are in several.

        Both are relative to the root. Folders KEY=VALUE are labels of their own. One file has no labels.
        """
        if len(self.files) < 2:
            return {}
        relative = {path: PurePosixPath(path).relative_to(self.root) for _, path in self.files}
        folders = {
            path: "/".join(part for part in steps.parts[:-1] if "=" not in part) for path, steps in relative.items()
        }
        in_several = len(set(folders.values())) > 1
        labels = {}
        for path, steps in relative.items():
            suffixes = steps.suffixes[-2 if file_type(steps.name)[1] else -1 :]
            labels[path] = {"file": str(steps).removesuffix("".join(suffixes))}
            if in_several:
                labels[path]["directory"] = folders[path]
        return labels

    def chunks(self, start: int, select: Selector) -> Iterator[Chunk]:
        """Yield the records from position `start` on; earlier lines are not parsed, earlier row groups not read."""
        file_start = 0  # index of the first record of the file
        for name, path in self.files:
            skip = max(0, start - file_start)  # records of the file before `start`
            if is_parquet(path):
                file_start += yield from self._parquet_chunks(name, path, file_start, skip, select)
                continue
            partition, file_labels = self.partitions.get(path, {}), self._file_labels.get(path, {})
            with _open_file(self.fs, path, name) as handle:
                for line, record in text_records(handle, name, skip):
                    if record is not None:  # otherwise it is one of the first `skip`
                        with at(f"{name}:{line}"):
                            for key in partition.keys() & record.keys():
                                _require_equal(key, partition, [record[key]])
                        record |= {key: value for key, (_, value) in partition.items() if key not in record}
                        yield JsonRecord(file_start, name, line, record, file_labels)
                    file_start += 1

    def _parquet_chunks(
        self, name: str, path: str, file_start: int, skip: int, select: Selector
    ) -> Generator[Chunk, None, int]:
        """Yield the records of a Parquet file after the first `skip`; return the number of all its records."""
        partition = self.partitions.get(path, {})
        with _open_parquet(self.fs, path, name) as file:
            schema = file.schema_arrow
            _refuse_duplicate_columns(schema.names, name)
            for key, (_, value) in partition.items():
                if key not in file.schema_arrow.names:
                    schema = schema.append(pa.field(key, pa.scalar(value).type))
            columns = list(select(schema, name))
            groups, first, n_rows = [], 0, 0  # row groups to read, and the position of their first row
            for group in range(file.metadata.num_row_groups):
                n_rows += file.metadata.row_group(group).num_rows
                if n_rows > skip:
                    groups.append(group)
                else:
                    first = n_rows
            columns_in_file = [column for column in columns if column in file.schema_arrow.names]
            for batch in parquet_batches(file, columns_in_file, groups):
                n_before = max(0, skip - first)  # rows of the batch to skip
                if n_before < batch.num_rows:
                    rest = batch.slice(n_before)
                    for key, (_, value) in partition.items():
                        if key in batch.schema.names:
                            with at(name):
                                _require_equal(key, partition, plain_values(rest.column(key)))
                        elif key in columns:
                            rest = rest.append_column(key, pa.repeat(pa.scalar(value), rest.num_rows))
                    position = first + n_before
                    yield ArrowChunk(file_start + position, name, position, rest, self._file_labels.get(path, {}))
                first += batch.num_rows
        return n_rows

    def approximate_length(self, n: int) -> int:
        """Count at least `n` records, and extrapolate from their bytes if a large part of text files is not read."""
        if all(is_parquet(path) for _, path in self.files):
            n_rows = 0
            for name, path in self.files:
                with _open_parquet(self.fs, path, name) as file:
                    n_rows += int(file.metadata.num_rows)
            return n_rows
        with remote_errors(self.files[0][0], CorpusError):
            sizes = [int(self.fs.size(path) or 0) for _, path in self.files]
        read_bytes, records = 0, 0  # bytes of the files before the current one, and records
        for (name, path), size in zip(self.files, sizes, strict=True):
            with _open_file(self.fs, path, name) as handle:
                for _ in text_records(handle, name, sys.maxsize):  # skips all: counts, does not parse
                    records += 1
                    if records < n or handle.closed:  # a decompressor closes the file at its end
                        continue
                    # decompression reads blocks ahead, so the position is accurate only after a large part
                    if (n_bytes := read_bytes + handle.tell()) >= _MEASURED_BYTES:
                        return int(records * sum(sizes) / n_bytes)
            read_bytes += size
        return records


def parquet_batches(
    file: pq.ParquetFile, columns: Sequence[str], row_groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield batches of whole columns of a Parquet file.

    pyarrow takes `a.b` for the field `b` of a struct `a`, and `a` for every column that begins with `a.`. If a name in
    the file has a dot, all columns are read, and the requested ones are selected by name.
    """
    dotted = any("." in name for name in file.schema_arrow.names)
    for batch in file.iter_batches(BATCH_ROWS, row_groups=row_groups, columns=None if dotted else columns):
        yield batch.select(columns)


# Labels of a file from folders KEY=VALUE, as Hive, Spark and pyarrow write them: each value as text, and typed.
Partition = Mapping[str, tuple[str | None, str | int | None]]
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)


def _partitions(files: Sequence[str], root: str) -> dict[str, Partition]:
    """Return the labels of each file from its folders below `root`.

    As in pyarrow, the values of a key are integers if all of them are, and text otherwise. pyarrow itself has integers
    of 32 bits, and loses the text of a value such as `007`.
    """
    texts: dict[str, dict[str, str | None]] = {}
    as_text = set()  # keys with a value that is no integer
    for file in files:
        for folder in PurePosixPath(file).relative_to(root).parts[:-1]:
            key, equals, value = (unquote(part) for part in folder.partition("="))
            if not key or not equals:
                continue
            text = None if value == NO_VALUE else value
            if texts.setdefault(file, {}).setdefault(key, text) != text:
                raise CorpusError(f"{file}: its folders have two values of {key!r}; rename one of them")
            if text is not None and not _INTEGER.fullmatch(text):
                as_text.add(key)
    return {
        file: {key: (text, text if text is None or key in as_text else int(text)) for key, text in labels.items()}
        for file, labels in texts.items()
    }


def _require_equal(key: str, partition: Partition, values: Sequence[Any]) -> None:
    """Raise an error if a column contradicts the folder of the same name."""
    text, typed = partition[key]
    for value in values:
        if label_text(value) not in (text, label_text(typed)):
            raise CorpusError(
                f"column {key!r} has the value {value!r:.60}, but its folder says {key}={text}; rename one of them, or "
                "correct the column"
            )


def _file_identity(fs: Any, path: str, root: str) -> list[str]:
    """Return name, size and stamp: a digest of small local files, so that copies are equal, else a date."""
    info = fs.info(path)
    size = info.get("size")
    if isinstance(fs, LocalFileSystem) and size <= _DIGEST_BYTES:
        with _open_file(fs, path, path) as handle:
            stamp = hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    else:
        stamp = next((str(info[key]) for key in _STAMPS if info.get(key)), "")
    return [path.removeprefix(root).lstrip("/"), str(size), stamp]


@contextmanager
def _open_file(fs: Any, path: str, name: str) -> Iterator[Any]:
    """Open a file for reading, as `fs.open`, with an error that names it."""
    try:
        with remote_errors(name, CorpusError), fs.open(path, "rb") as handle:
            yield handle
    except OSError as err:
        raise CorpusError(f"{name}: cannot be opened: {one_line(err)}") from err


@contextmanager
def _open_parquet(fs: Any, path: str, name: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file; raise CorpusError if it is invalid or truncated."""
    with _open_file(fs, path, name) as handle:
        try:
            yield pq.ParquetFile(handle, arrow_extensions_enabled=True)
        except (pa.ArrowException, OSError) as err:
            raise CorpusError(f"{name}: damaged or truncated Parquet file: {one_line(err)}; write it again") from err


def _refuse_duplicate_columns(names: Sequence[str], location: str) -> None:
    """Raise an error if a column name occurs more than once."""
    duplicates = [name for name, count in Counter(names).items() if count > 1]
    if duplicates:
        raise CorpusError(
            f"{location}: has the column {', '.join(duplicates)} more than once; rename or drop one of them"
        )


@dataclass(frozen=True, slots=True)
class TableSource:
    """A table in memory, or a memory-mapped table of `datasets`."""

    table: pa.Table
    name: str
    file_identities: list[list[str]]  # see `identity`

    def identity(self) -> list[list[str]]:
        """Return name, size and stamp of each file, or the number of rows and a digest of the content."""
        return self.file_identities

    def approximate_length(self, n: int) -> int:
        """Return the number of rows of the table."""
        return int(self.table.num_rows)

    def chunks(self, start: int, select: Selector) -> Iterator[Chunk]:
        """Yield the records from position `start` on."""
        table = self.table.select(list(select(self.table.schema, self.name)))
        for batch in table.slice(start).to_batches(max_chunksize=BATCH_ROWS):
            yield ArrowChunk(start, self.name, start, batch)
            start += batch.num_rows


@dataclass(frozen=True, slots=True)
class PartOfSource:
    """Consecutive records of another source, from `first` up to `stop`; positions count from `first`."""

    whole: Source
    split: str  # as it was named, for the identity
    first: int
    stop: int

    def identity(self) -> list[list[str]]:
        """Return the files of the whole source, and the range."""
        return [*self.whole.identity(), [self.split, str(self.stop - self.first), ""]]

    def approximate_length(self, n: int) -> int:
        """Return the number of records."""
        return self.stop - self.first

    def chunks(self, start: int, select: Selector) -> Iterator[Chunk]:
        """Yield the records from position `start` on."""
        for chunk in self.whole.chunks(self.first + start, select):
            if chunk.index >= self.stop:
                return
            part = replace(chunk, index=chunk.index - self.first)
            if isinstance(part, ArrowChunk):
                part = replace(part, batch=part.batch.slice(0, self.stop - chunk.index))
            yield part


def table_source(data: Any, split: str | None = None, what: str = "corpus") -> TableSource:
    """Open a table in memory as a source.

    Args:
        data: a pandas DataFrame, a pyarrow Table, a `datasets.Dataset`, or a DatasetDict, of which `split` is read.
        split: split of a DatasetDict.
        what: name of the argument, for messages.
    Raises:
        CorpusError: another type, columns that Arrow does not support, or several splits and none is named.
    """
    table, reason = data, f"got {type(data).__name__}"
    try:
        if hasattr(data, "iloc"):  # a DataFrame; pandas is slow to import
            table = pa.Table.from_pandas(data, preserve_index=False)
        elif hasattr(data, "with_format") or isinstance(data, Mapping):
            table = _select_split(data, split, what)[:]
    except (pa.ArrowException, TypeError) as err:
        reason = f"got a column that Arrow cannot hold ({one_line(err)})"
    if not isinstance(table, pa.Table):
        raise CorpusError(
            f"{what}: {reason}, expected a path, a pandas DataFrame, a pyarrow Table or a `datasets.Dataset`, with one "
            "type per column"
        )
    _refuse_duplicate_columns(table.column_names, what)
    digest = hashlib.blake2b(digest_size=16)  # of names, types and values, independent of chunks
    for first in range(0, max(1, table.num_rows), _DIGEST_ROWS):
        batch = table.slice(first, _DIGEST_ROWS).combine_chunks().replace_schema_metadata(None)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_table(batch)
        digest.update(sink.getvalue())
    return TableSource(table, "corpus", [["table", str(table.num_rows), digest.hexdigest()]])


def _select_split(loaded: Any, split: str | None, location: str) -> Any:
    """Return the table, its only split, or the named split, in Arrow format."""
    tables = loaded if isinstance(loaded, Mapping) else {str(loaded.split): loaded}
    names = ", ".join(sorted(tables))
    name = next(iter(tables)) if split is None and len(tables) == 1 else split
    if name in tables:
        return tables[name].with_format("arrow")
    kind = "" if isinstance(loaded, Mapping) else ", which is one table"
    fault = f"split: got {split!r}, expected one of the splits of {location}{kind}: {names}"
    if split is None:
        fault = f"{location}: has the splits {names}; select one with --split (corpus.split)"
    raise CorpusError(fault)
