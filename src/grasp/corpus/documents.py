"""Stream documents: text, conversation or token ids, a stable id, and labels.

Start with `read_documents`. A *record* is a line of JSON or a row of a table. Each of its columns has a role:

    content    text, turns of a conversation, or token ids, of which other columns say which carry loss (`LOSS_MASKS`).
               How a document is read from them is its *form* (`conversations.Form`); the columns of the form have
               standard names, which a record may name otherwise
    ids        row id and document id
    labels     all others with values that can be labels
    ignored    the rest: binary values, lists of numbers or of records
"""

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa

from grasp.arrays import I32, Bool
from grasp.corpus.conversations import IDS, Conversation, Form, Span, form_of, holds_turns
from grasp.corpus.labels import Flattener, Label, has_labels, is_json, is_list, is_text, label_name, label_text
from grasp.corpus.sources import ArrowChunk, Chunk, JsonRecord, Source, open_source, unread_files_note
from grasp.corpus.text_files import DELIMITER, cell_value, file_type, one_line
from grasp.corpus.values import plain_json, plain_values
from grasp.errors import CorpusError, at
from grasp.settings import CorpusSettings
from grasp.text import did_you_mean

ROW_ID_COLUMNS = ("row_id", "id")  # the first existing one holds row ids, unless a setting names another column
DOC_ID_COLUMN = "doc_id"
PADDING_MASK = "attention_mask"  # of tokenized records, as trainers write them; 0: padding
LOSS_MASKS = {"labels": -100, "completion_mask": 0, "assistant_masks": 0}  # and the value of tokens without loss
FIRST_DOCUMENTS = 256  # documents that are read when a corpus is opened

Columns = Mapping[str, pa.DataType | None]  # with their types; None for fields of JSON, whose types are not known
# Function that returns the columns of content, and the form in which they are read, such as `content_columns`.
ContentOf = Callable[[Columns], tuple[Sequence[str], Form | None]]


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a corpus."""

    index: int  # position in the corpus, from 0
    file: str
    location: str  # file and line or row, for messages
    row_id: str | None
    doc_id: str | None
    labels: Mapping[str, Label]
    values: Mapping[str, Any]  # plain values of all columns but the ignored ones; token ids may be an array
    ignored: tuple[str, ...]  # columns and nested fields without labels: binary, lists of numbers or of records
    form: Form | None  # how its content is read; None: not as text


@dataclass(frozen=True, slots=True)
class _Roles:
    """Roles of the columns of a file, or of the fields of a JSON line."""

    form: Form | None
    row_id: str | None  # column of row ids; None: generated
    label_by_column: Mapping[str, str]  # names of labels
    dotted_columns: frozenset[str]  # columns with a dot in their name, as nested fields have as labels
    ignored: tuple[str, ...]
    columns_to_read: Sequence[str]  # all but the ignored ones


def read_records(source: Source, settings: CorpusSettings, content_of: ContentOf, start: int) -> Iterator[Record]:
    """Yield the records from position `start` up to the limit of the settings.

    Args:
        source: files or a table that holds the records.
        settings: columns of ids, nested fields that are labels, and the limit.
        content_of: returns the columns of content, which are not labels, and their form.
        start: position of the first record.
    Raises:
        CorpusError: a file is damaged, its columns are invalid, or a text is not UTF-8.
    """
    roles_by_file: dict[str, _Roles] = {}
    # Roles by the fields of a JSON line. Only the last line is kept, since the next one mostly has the same fields.
    roles_of_line: dict[tuple[str, ...], _Roles] = {}
    flattener = Flattener(settings.label_paths)

    def select_columns(schema: pa.Schema, file: str) -> Sequence[str]:
        """Assign roles when the source opens a file, and tell it which columns to read."""
        with at(file):
            columns = {column.name: column.type for column in schema}
            roles_by_file[file] = _assign_roles(columns, settings, content_of)
        return roles_by_file[file].columns_to_read

    for chunk in source.chunks(start, select_columns):
        file_labels = chunk.file_labels if settings.path_labels else {}
        for index, (location, values) in enumerate(records_in(chunk, as_arrays=True), start=chunk.index):
            if settings.limit is not None and index >= settings.limit:
                return
            if isinstance(chunk, JsonRecord):
                fields = tuple(values)
                if fields not in roles_of_line:
                    with at(location):
                        roles_of_line = {fields: _assign_roles(dict.fromkeys(fields), settings, content_of)}
                roles = roles_of_line[fields]
            else:
                roles = roles_by_file[chunk.name]
            row_id = None if roles.row_id is None else label_text(values.get(roles.row_id))
            doc_id = label_text(values.get(DOC_ID_COLUMN))
            if doc_id is None:  # the id of a record identifies its document
                doc_id = row_id
            only_text = isinstance(chunk, JsonRecord) and file_type(chunk.name)[0] in DELIMITER
            labels: dict[str, Label] = dict(file_labels)
            # Labels of nested fields that have the name of a column, as in {"a": {"b": 1}, "a.b": 2}. The column takes
            # precedence if it has a value: label a.b is 2 here, and 1 if the column is null.
            shadowed: dict[str, Label] = {}
            without_label: set[str] = set()
            for column, label in roles.label_by_column.items():
                value = values.get(column)
                if flattener.is_nested(label, value):
                    for path, part in flattener.labels(label, value, without_label):
                        (shadowed if path in roles.dotted_columns else labels)[path] = part
                elif only_text and isinstance(value, str):
                    labels[label] = cell_value(value)
                elif column in values:  # NaN is a missing label
                    labels[label] = None if isinstance(value, float) and math.isnan(value) else value
            labels |= {path: part for path, part in shadowed.items() if labels.get(path) is None}
            # nested values of label columns are large, and only needed for labels
            large = [name for name in roles.label_by_column if isinstance(values.get(name), list | dict)]
            yield Record(
                index=index,
                file=chunk.name,
                location=location,
                row_id=row_id,
                doc_id=doc_id,
                labels=labels,
                values={name: value for name, value in values.items() if name not in large},
                ignored=tuple(sorted({*roles.ignored, *without_label})) if without_label else roles.ignored,
                form=roles.form,
            )


def _assign_roles(columns: Columns, settings: CorpusSettings, content_of: ContentOf) -> _Roles:
    """Assign the columns of a file, or the fields of a JSON line, to ids, content and labels."""
    content, form = content_of(columns)
    others = {column: data_type for column, data_type in columns.items() if column not in content}
    with_label_paths = {path.partition(".")[0] for path in settings.label_paths}
    ignored = tuple(
        sorted(
            column
            for column, data_type in others.items()
            if data_type is not None and not has_labels(data_type) and column not in with_label_paths
        )
    )
    ids = id_columns(settings, columns)
    return _Roles(
        form=form,
        row_id=ids[0],
        label_by_column={column: label_name(column) for column in others if column not in (*ignored, *ids)},
        dotted_columns=frozenset(column for column in others if "." in column),
        ignored=ignored,
        columns_to_read=[column for column in columns if column not in ignored],
    )


def records_in(chunk: Chunk, *, as_arrays: bool = False, repair: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the location of each record of a chunk, for messages, and its plain values.

    Args:
        chunk: consecutive records of a source.
        as_arrays: lists of token ids and their masks remain Arrow arrays, for speed.
        repair: replace unpaired surrogates in JSON lines.
    Raises:
        CorpusError: text is not UTF-8, JSON in a column is not JSON, or a value is nested too deeply.
    """
    if isinstance(chunk, JsonRecord):
        try:
            record = {  # with null fields, which are columns
                plain_json(name, repair=repair): plain_json(value, repair=repair)
                for name, value in chunk.record.items()
            }
        except RecursionError as err:
            raise CorpusError(f"{chunk.location}: nested too deeply; fix or remove the line") from err
        yield chunk.location, record
        return
    names = chunk.batch.schema.names
    arrays = token_columns(names) if as_arrays else ()
    columns = [_column_values(chunk, name, as_arrays=name in arrays) for name in names]
    for k, row in enumerate(zip(*columns, strict=True), start=chunk.first):
        yield f"{chunk.name}, row {k}", dict(zip(names, row, strict=True))


def _column_values(chunk: ArrowChunk, name: str, *, as_arrays: bool) -> list[Any]:
    """Return the plain values of a column; an error names the row that causes it."""
    column = chunk.batch.column(name)
    if as_arrays and is_list(column.type):
        return [item.values if item.is_valid else None for item in column]
    try:
        return plain_values(column)
    except (ValueError, RecursionError):
        for k in range(len(column)):  # find the row for the message
            try:
                plain_values(column.slice(k, 1))
            except (ValueError, RecursionError) as err:
                kind = "not UTF-8: " if isinstance(err, UnicodeDecodeError) else ""
                reason = "nested too deeply" if isinstance(err, RecursionError) else one_line(err)
                raise CorpusError(
                    f"{chunk.name}, row {chunk.first + k}: column {name!r}: {kind}{reason}; fix or remove the value"
                ) from err
        raise


def id_columns(settings: CorpusSettings, names: Collection[str]) -> tuple[str | None, str]:
    """Return the columns of row ids, None if they are generated, and of document ids, which records may lack.

    The setting of row ids is a column, "" to generate ids, or None for the first existing one of ROW_ID_COLUMNS.
    `row_id` and `doc_id` may also be named explicitly without existing, since some files of a corpus may lack them.

    Raises:
        CorpusError: another column of the settings does not exist.
    """
    row_id = settings.row_id_column
    if row_id is None:
        row_id = next((name for name in ROW_ID_COLUMNS if name in names), None)
    elif row_id and row_id not in (*names, ROW_ID_COLUMNS[0], DOC_ID_COLUMN):
        hint = did_you_mean(row_id, names)
        raise CorpusError(
            f"no column {row_id!r}{hint}, named by corpus.row_id_column; columns found: {', '.join(names)}"
        )
    return row_id or None, DOC_ID_COLUMN


_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, slots=True)
class Document:
    """A record of the corpus. If it has `input_ids`, they are used unchanged, and `text` is only for display.

    `loss_mask` says which of them carry loss; None: all.

    A conversation has no text until a chat template renders it.
    """

    index: int  # position in the corpus, from 0, skipped documents included
    doc_id: str
    row_id: str | None
    text: str | None
    input_ids: I32 | None
    labels: Mapping[str, Label]
    answers: tuple[Span, ...] | None = None  # spans of the text that carry loss; None: all
    conversation: Conversation | None = None
    # set when a chat template renders a conversation: skipped parts, as keys of `grasp.text.SKIPPED` with locations
    left_out: tuple[tuple[str, str], ...] = ()
    unusable: bool = False  # a conversation that yields no row
    location: str = ""  # file and line or row, for messages
    ignored: tuple[str, ...] = field(default=(), repr=False)  # columns that cannot be labels: nested or binary
    loss_mask: Bool | None = None
    rejected: "Document | None" = None  # the other side of a preference pair, whose chosen side this is

    @property
    def name(self) -> str:
        """Return the id from which the ids of its rows are derived."""
        return self.doc_id if self.row_id is None else self.row_id

    @property
    def needs_tokenizer(self) -> bool:
        """Return whether it has text to tokenize, apart from white space."""
        return self.input_ids is None and not self.unusable and bool(self.text) and not str(self.text).isspace()


def read_documents(settings: CorpusSettings, *, source: Source | None = None, start: int = 0) -> Iterator[Document]:
    """Stream the documents of a corpus, files sorted by name, from position `start` up to the limit of the settings.

    Args:
        settings: settings of the corpus.
        source: the open source. Default: open the path of the settings.
        start: position of the first document.
    Raises:
        CorpusError: nothing to read, a damaged file, or columns that match no form, or several.
    """
    source = source or open_source(settings.path, settings.split)
    return _build_documents(read_records(source, settings, partial(content_columns, settings), start))


class Corpus:
    """An open corpus of texts, whose first documents are already read.

    Attributes:
        first: the first documents, at most 256; empty after the first call of `documents`.
        columns: roles of the columns of the first record: content in standard names, token ids, row and document ids.
    """

    def __init__(self, source: Source, settings: CorpusSettings) -> None:
        self.source, self.settings = source, settings
        records = read_records(source, settings, partial(content_columns, settings), 0)
        first_record = list(islice(records, 1))  # empty if the corpus is
        self.columns: dict[str, str] = {}
        for record in first_record:
            form = record.form
            assert form is not None
            columns: dict[str, str | None] = dict(zip(form.columns, form.sources, strict=True))
            if form.kind == "text":
                has_turns = holds_turns(record.values.get(form.sources[0]), form.columns[0])
                text_source = columns.pop(form.columns[0])
                columns = {"turns" if has_turns else "text": text_source, **columns}
            row_id, doc_id = id_columns(settings, [*record.values, *record.ignored])
            columns |= {name: name for name in token_columns(record.values)} | {"row_id": row_id, "doc_id": doc_id}
            self.columns = {role: column for role, column in columns.items() if column in record.values and column}
        documents = _build_documents(chain(first_record, records))
        self.first = list(islice(documents, FIRST_DOCUMENTS))
        self._remaining: Iterator[Document] | None = documents

    @property
    def notes(self) -> list[str]:
        """Return notes on the dataset entry that says how it is read, and on files that are not read."""
        notes, fields = unread_files_note(self.source), self.settings.fields
        if fields is None or not fields.origin:
            return notes
        return [f"{fields.origin}: {self.settings.path}, read as {fields.form}", *fields.notes, *notes]

    def documents(self, start: int) -> Iterator[Document]:
        """Yield the documents from position `start` on; the first call with 0 continues the open stream."""
        if start == 0 and self._remaining is not None:
            first, self.first, remaining, self._remaining = self.first, [], self._remaining, None
            return chain(first, remaining)
        return read_documents(self.settings, source=self.source, start=start)


def _build_documents(records: Iterable[Record]) -> Iterator[Document]:
    """Build documents from records."""
    for record in records:
        assert record.form is not None
        with at(record.location):
            input_ids, loss_mask = _token_ids(record.values)
            content = record.form.read(record.values)
        if (doc_id := record.doc_id) is None:  # a hash of the content, and the position, which distinguishes duplicates
            sides = [side for side in (content, content.rejected) if side is not None]
            text = "".join(
                (side.text or "") if side.conversation is None else side.conversation.content for side in sides
            )
            hashed = content_hash(text.encode() if input_ids is None else input_ids.astype("<i4").tobytes())
            doc_id = f"{hashed}-{record.index}"
        document = Document(
            index=record.index,
            doc_id=doc_id,
            row_id=record.row_id,
            text=content.text,
            input_ids=input_ids,
            labels=record.labels,
            answers=content.answers,
            conversation=content.conversation,
            location=record.location,
            ignored=record.ignored,
            loss_mask=loss_mask,
        )
        if (side := content.rejected) is None:
            yield document
        else:
            rejected = replace(document, text=side.text, answers=side.answers, conversation=side.conversation)
            yield replace(document, rejected=rejected)


def token_columns(names: Collection[str]) -> tuple[str, ...]:
    """Return the columns that a tokenized record may have, of token ids and their masks; none if it is not one."""
    return (IDS, PADDING_MASK, *LOSS_MASKS) if IDS in names else ()


def _token_ids(values: Mapping[str, Any]) -> tuple[I32 | None, Bool | None]:
    """Return the token ids of a record, if it has them, without padding, and which carry loss; None: all."""
    if values.get(IDS) is None:
        return None, None
    ids, is_token, loss_mask, fault = np.empty(0, np.int32), np.ones(0, np.bool_), np.ones(0, np.bool_), ""
    for name, value in ((name, values[name]) for name in token_columns(values) if values.get(name) is not None):
        is_valid = isinstance(value, list) and all(type(number) in (int, bool) for number in value)
        # of any type of integers, since a cast of unsigned 64-bit ids to signed ones would wrap; a null is NaN
        plain = value.to_numpy(zero_copy_only=False) if isinstance(value, pa.Array) else value if is_valid else np.nan
        column = np.asarray(plain)
        if column.size and not (_INT32.min <= column.min() and column.max() <= _INT32.max):
            shown = value.to_pylist() if isinstance(value, pa.Array) else value
            fault = f"holds {shown!r:.60}, expected integers of 32 bits, none of them null"
        elif name == IDS:
            ids, (is_token, loss_mask) = column.astype(np.int32), np.ones((2, len(column)), dtype=np.bool_)
        elif len(column) != len(ids):
            fault = f"has {len(column)} values, expected one for each of the {len(ids)} token ids"
        elif name == "labels" and ((column != ids) & (column != LOSS_MASKS[name])).any():
            fault = "differs from input_ids, expected the same ids, not shifted, or -100 without loss"
        elif name == PADDING_MASK:
            is_token = column != 0
        else:
            loss_mask &= column != LOSS_MASKS[name]
        if fault:
            raise CorpusError(f"column {name!r} {fault}")
    return ids[is_token], None if loss_mask[is_token].all() else loss_mask[is_token]


def content_columns(settings: CorpusSettings, columns: Columns) -> tuple[tuple[str, ...], Form]:
    """Return the columns of content, which are not labels, after validating their types, and their form."""
    form, lists = form_of(tuple(columns), settings), token_columns(columns)
    text = form.sources[0] if form.kind == "text" else None
    for column, data_type in columns.items():
        if data_type is None or pa.types.is_null(data_type) or column not in (*lists, text):  # None: JSON, of any type
            continue
        if column in lists:
            kind = data_type.value_type if is_list(data_type) else data_type
            is_valid = is_list(data_type) and (pa.types.is_integer(kind) or pa.types.is_boolean(kind))
        else:
            is_valid = is_text(data_type) or pa.types.is_nested(data_type) or is_json(data_type)
        if not is_valid:
            expected = "lists of integers" if column in lists else "text or a list of turns"
            expected += ", one for each token id; rename it if it is a label" if column in lists[1:] else ""
            raise CorpusError(f"column {column!r} holds {data_type}, expected {expected}")
    return (*form.sources, *lists), form


def content_hash(content: bytes) -> str:
    """Return the first part of generated document ids; a dash and the position follow."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()
