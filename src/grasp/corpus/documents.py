"""A stream of documents: text or token ids, a stable name, and labels."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.corpus.labels import Label, is_label, is_text, label_name, label_text, label_values
from grasp.corpus.sources import ArrowChunk, Chunk, JsonRecord, Source, open_source
from grasp.errors import CorpusError
from grasp.settings import CorpusSettings

_INT32 = np.iinfo(np.int32)


class Tokenizer(Protocol):
    """What the corpus asks of a tokenizer; handed in by the caller, never loaded here."""

    @property
    def eos_id(self) -> int | None:
        """Id put after every document; none: documents are joined without a mark."""

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary; ids must lie in [0, vocab_size)."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""


class SpanTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows where in the text its tokens end."""

    def encode_with_ends(self, texts: Sequence[str]) -> list[tuple[list[int], list[int] | None]]:
        """The ids of `encode`, and the character after each token; None where the tokenizer cannot tell."""


@dataclass(frozen=True, slots=True)
class Document:
    """One record of the corpus. Its `input_ids`, if any, are used as they are; `text` is then for reading."""

    index: int  # position in the corpus, from 0, skipped documents included
    doc_id: str
    row_id: str | None
    text: str | None
    input_ids: NDArray[np.int32] | None
    labels: Mapping[str, Label]
    where: str = ""  # file and line or row, for messages
    ignored: tuple[str, ...] = field(default=(), repr=False)  # columns that cannot be labels: nested or binary


def read_documents(settings: CorpusSettings, *, start: int = 0) -> Iterator[Document]:
    """Stream the documents of a corpus, files sorted by name, from position `start` on.

    Raises:
        CorpusError: at the call, when there is nothing to read; while streaming, when a file is damaged,
            or has neither the text nor the ids column.
    """
    return documents_of(open_source(settings.path), settings, start=start)


def documents_of(source: Source, settings: CorpusSettings, *, start: int = 0) -> Iterator[Document]:
    """Documents of a source that is open, from position `start` to the limit that the settings give."""
    names = _Names(settings)
    for chunk in source.chunks(start, names.select):
        for document in names.documents(chunk):
            if settings.limit is not None and document.index >= settings.limit:
                return
            yield document


@dataclass(frozen=True, slots=True)
class _Names:
    """Which column is what, by the settings."""

    settings: CorpusSettings
    ignored: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of each table, by its name

    def select(self, schema: pa.Schema, name: str) -> list[str]:
        """Columns worth reading; checks that what must be there is there and has a type that can be read."""
        self._check_fields(schema.names, name)
        for column in schema:
            self._check_type(column, name)
        read = [column.name for column in schema if column.name in self._content or is_label(column.type)]
        self.ignored[name] = tuple(sorted(set(schema.names) - set(read)))
        return read

    @property
    def _content(self) -> tuple[str, str]:
        return self.settings.text_column, self.settings.ids_column

    def _check_fields(self, found: Iterable[str], where: str) -> None:
        """A text or ids column must exist, and so must an id column that was asked for by name."""
        found, wanted = list(found), self.settings
        columns = f"columns found: {', '.join(found) or 'none'}"
        if wanted.text_column not in found and wanted.ids_column not in found:
            raise CorpusError(
                f"{where}: no text column {wanted.text_column!r} and no ids column {wanted.ids_column!r}; "
                f"{columns}. Set corpus.text_column to the one that holds the text"
            )
        for setting in ("row_id_column", "doc_id_column"):
            column = getattr(wanted, setting)
            if column not in found and column != CorpusSettings.model_fields[setting].default:
                raise CorpusError(f"{where}: no column {column!r}, which corpus.{setting} asks for; {columns}")

    def _check_type(self, column: pa.Field, where: str) -> None:
        kind = column.type
        if column.name == self.settings.ids_column:
            if not (_is_list(kind) and pa.types.is_integer(kind.value_type)) and not pa.types.is_null(kind):
                raise CorpusError(f"{where}: ids column {column.name!r} holds {kind}, expected lists of integers")
        elif column.name == self.settings.text_column and not is_text(kind) and not pa.types.is_null(kind):
            raise CorpusError(f"{where}: text column {column.name!r} holds {kind}, expected text")

    def documents(self, chunk: Chunk) -> Iterator[Document]:
        if isinstance(chunk, JsonRecord):
            yield self._of_record(chunk)
        else:
            yield from self._of_batch(chunk)

    def _of_record(self, chunk: JsonRecord) -> Document:
        record, where = chunk.record, f"{chunk.name}:{chunk.line}"
        self._check_fields(record, where)
        scalars = {key: value for key, value in record.items() if not isinstance(value, list | dict)}
        ignored = tuple(sorted(record.keys() - scalars.keys() - {self.settings.ids_column}))
        column = self.settings.text_column
        text = record.get(column)
        if not isinstance(text, str | None):
            raise CorpusError(f"{where}: text column {column!r} holds {type(text).__name__}, expected text")
        ids = _json_ids(record, self.settings, where)
        return self._document(chunk.index, where, text=text, ids=ids, values=scalars, ignored=ignored)

    def _of_batch(self, chunk: ArrowChunk) -> Iterator[Document]:
        batch, settings = chunk.batch, self.settings
        names = batch.schema.names
        ids = batch.column(settings.ids_column) if settings.ids_column in names else None
        try:
            columns = {name: label_values(batch.column(name)) for name in names if name != settings.ids_column}
        except UnicodeDecodeError as err:
            raise CorpusError(f"{chunk.name}: rows from {chunk.first} on: text is not UTF-8: {err}") from err
        ignored = self.ignored[chunk.name]
        for i in range(batch.num_rows):
            where = f"{chunk.name}, row {chunk.first + i}"
            values = {name: column[i] for name, column in columns.items()}
            text = values.get(settings.text_column)
            assert text is None or isinstance(text, str)  # _check_type has seen to it
            array = None if ids is None else _arrow_ids(ids[i], where)
            yield self._document(chunk.index + i, where, text=text, ids=array, values=values, ignored=ignored)

    def _document(
        self,
        index: int,
        where: str,
        *,
        text: str | None,
        ids: NDArray[np.int32] | None,
        values: Mapping[str, Label],
        ignored: tuple[str, ...],
    ) -> Document:
        special = (*self._content, self.settings.row_id_column, self.settings.doc_id_column)
        text = None if text is None else _valid(text)
        given = label_text(values.get(self.settings.doc_id_column))
        row_id = label_text(values.get(self.settings.row_id_column))
        labels = {_valid(label_name(name)): _valid_label(v) for name, v in values.items() if name not in special}
        return Document(
            index=index,
            doc_id=_made_id(index, text, ids) if given is None else _valid(given),
            row_id=None if row_id is None else _valid(row_id),
            text=text,
            input_ids=ids,
            labels=labels,
            where=where,
            ignored=ignored,
        )


def _made_id(index: int, text: str | None, ids: NDArray[np.int32] | None) -> str:
    """Name out of content and position: 64 bits of a hash, and the index, which keeps repeats apart."""
    return f"{content_hash(text or '') if ids is None else _hash(ids.astype('<i4').tobytes())}-{index}"


def content_hash(text: str) -> str:
    """What the made names of documents with this text begin with; a dash and the position follow."""
    return _hash(text.encode())


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _valid(text: str) -> str:
    """Text that UTF-8 can hold: JSON may spell halves of surrogate pairs, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _valid_label(value: Label) -> Label:
    return _valid(value) if isinstance(value, str) else value


def _is_list(kind: pa.DataType) -> bool:
    tests = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_list_view)
    return any(test(kind) for test in tests)


def _json_ids(record: Mapping[str, Any], settings: CorpusSettings, where: str) -> NDArray[np.int32] | None:
    ids = record.get(settings.ids_column)
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise CorpusError(f"{where}: ids column {settings.ids_column!r} holds {ids!r:.60}, expected a list of integers")
    return _as_int32(ids, where)


def _arrow_ids(scalar: Any, where: str) -> NDArray[np.int32] | None:
    if not scalar.is_valid:
        return None
    if scalar.values.null_count:
        raise CorpusError(f"{where}: the list of token ids holds a null, expected integers")
    return _as_int32(scalar.values.to_numpy(zero_copy_only=False), where)


def _as_int32(ids: Any, where: str) -> NDArray[np.int32]:
    try:
        array = np.asarray(ids, dtype=np.int64)
    except OverflowError:
        array = np.full(1, _INT32.max + 1)  # does not even fit 64 bits: refused below
    if array.size and not (_INT32.min <= array.min() and array.max() <= _INT32.max):
        raise CorpusError(f"{where}: a token id does not fit 32 bits, so it is outside any vocabulary")
    return array.astype(np.int32)
