"""Records of a source as plain values, whatever they are stored in, and which of their columns are what."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from grasp.corpus.labels import Label, is_label, label_name, label_text, label_values
from grasp.corpus.sources import ArrowChunk, JsonRecord, Source
from grasp.errors import CorpusError
from grasp.settings import CorpusSettings

ROW_ID_COLUMNS = ("row_id", "id")  # the first that is there names the rows, unless a setting says otherwise
DOC_ID_COLUMN = "doc_id"

# Sees the columns of a table with their types, or of a JSON record without; says which are content, or raises.
ContentOf = Callable[[Mapping[str, pa.DataType | None], str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a corpus."""

    index: int  # position in the corpus, from 0
    name: str  # of its file
    where: str  # file and line or row, for messages
    values: Mapping[str, Any]  # scalars, and the columns of content
    content: Sequence[str]  # columns that are no labels
    ignored: tuple[str, ...]  # columns that cannot be labels: nested or binary


def read_records(source: Source, settings: CorpusSettings, content_of: ContentOf, start: int) -> Iterator[Record]:
    """Records from position `start` to the limit of the settings.

    Args:
        content_of: columns that are read whatever they hold; of lists the values are Arrow arrays.
    Raises:
        CorpusError: a file is damaged, `content_of` refuses its columns, or a text is not UTF-8.
    """
    known: dict[str, tuple[Sequence[str], tuple[str, ...]]] = {}  # content and ignored columns of each file

    def select(schema: pa.Schema, name: str) -> list[str]:
        content = content_of({column.name: column.type for column in schema}, name)
        read = [column.name for column in schema if column.name in content or is_label(column.type)]
        known[name] = content, tuple(sorted(set(schema.names) - set(read)))
        return read

    for chunk in source.chunks(start, select):
        if isinstance(chunk, JsonRecord):
            records: Iterable[Record] = [_of_line(chunk, content_of)]
        else:
            records = _of_batch(chunk, *known[chunk.name])
        for record in records:
            if settings.limit is not None and record.index >= settings.limit:
                return
            yield record


def _of_line(chunk: JsonRecord, content_of: ContentOf) -> Record:
    where = f"{chunk.name}:{chunk.line}"
    try:
        line = _valid(chunk.record)
    except RecursionError as err:
        raise CorpusError(f"{where}: lists in lists deeper than can be read; mend or remove the line") from err
    content = content_of(dict.fromkeys(line), where)
    ignored = tuple(sorted(k for k, v in line.items() if isinstance(v, list | dict) and k not in content))
    values = {name: value for name, value in line.items() if name not in ignored}
    return Record(chunk.index, chunk.name, where, values, content, ignored)


def _of_batch(chunk: ArrowChunk, content: Sequence[str], ignored: tuple[str, ...]) -> Iterator[Record]:
    batch = chunk.batch
    try:
        columns = {name: _values(batch.column(name)) for name in batch.schema.names}
    except UnicodeDecodeError as err:
        raise CorpusError(f"{chunk.name}: rows from {chunk.first} on: text is not UTF-8: {err}") from err
    for i in range(batch.num_rows):
        where = f"{chunk.name}, row {chunk.first + i}"
        values = {name: column[i] for name, column in columns.items()}
        yield Record(chunk.index + i, chunk.name, where, values, content, ignored)


def _values(column: pa.Array | pa.ChunkedArray) -> Sequence[Any]:
    """Plain values; lists stay Arrow, since token ids are many."""
    if is_label(column.type):
        return label_values(column)
    if is_list(column.type):
        return [item.values if item.is_valid else None for item in column]
    values: list[Any] = column.to_pylist()
    return values


def is_list(kind: pa.DataType) -> bool:
    """Whether an Arrow column of this type holds lists."""
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)
    return any(test(kind) for test in tests)


def id_columns(settings: CorpusSettings, names: Mapping[str, Any] | Sequence[str]) -> tuple[str | None, str | None]:
    """Columns that name the rows and the documents; an empty setting asks for made names."""
    row = settings.row_id_column
    if row is None:
        row = next((name for name in ROW_ID_COLUMNS if name in names), None)
    return row or None, DOC_ID_COLUMN if settings.doc_id_column is None else settings.doc_id_column or None


def names_and_labels(record: Record, settings: CorpusSettings) -> tuple[str | None, str | None, dict[str, Label]]:
    """The row_id and doc_id that a record brings, and its labels; a label that is not a number is missing."""
    row, doc = id_columns(settings, record.values)
    row_id, doc_id = (None if name is None else label_text(record.values.get(name)) for name in (row, doc))
    special = {*record.content, row, doc}
    labels = {label_name(k): _label(value) for k, value in record.values.items() if k not in special}
    return row_id, doc_id, labels


def check_id_columns(settings: CorpusSettings, names: Sequence[str], where: str) -> None:
    """See that an id column that was asked for by name is there; our own names mean one if there is one."""
    for setting in ("row_id_column", "doc_id_column"):
        column = getattr(settings, setting)
        if column and column not in (*names, ROW_ID_COLUMNS[0], DOC_ID_COLUMN):
            raise CorpusError(
                f"{where}: no column {column!r}, which corpus.{setting} asks for; columns found: {', '.join(names)}"
            )


def _valid(value: Any) -> Any:
    """The same in text that UTF-8 can hold: JSON may spell halves of surrogate pairs, which no tokenizer takes."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return value
    if isinstance(value, dict):
        return {_valid(key): _valid(part) for key, part in value.items()}
    return [_valid(part) for part in value] if isinstance(value, list) else value


def _label(value: Label) -> Label:
    return None if isinstance(value, float) and math.isnan(value) else value
