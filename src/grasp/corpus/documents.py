"""A stream of documents: text or token ids, a stable name, and labels."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.corpus.labels import Label, is_text
from grasp.corpus.records import Record, check_id_columns, id_columns, is_list, names_and_labels, read_records, valid
from grasp.corpus.sources import Source, open_source
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

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Text of each row of token ids."""


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
    return documents_of(open_source(settings.path, settings.split), settings, start=start)


def documents_of(source: Source, settings: CorpusSettings, *, start: int = 0) -> Iterator[Document]:
    """Documents of a source that is open, from position `start` to the limit that the settings give."""
    content = settings.text_column, settings.ids_column

    def check(columns: Mapping[str, pa.DataType | None], where: str) -> None:
        _check_columns(columns, settings, where)

    for record in read_records(source, settings, content, check, start):
        text, ids = record.values.get(settings.text_column), record.values.get(settings.ids_column)
        if not isinstance(text, str | None):
            raise CorpusError(
                f"{record.where}: text column {settings.text_column!r} holds {type(text).__name__}, expected text"
            )
        text, ids = None if text is None else valid(text), _token_ids(ids, settings.ids_column, record.where)
        row_id, doc_id, labels = names_and_labels(record, settings, content)
        yield Document(
            index=record.index,
            doc_id=_made_id(record, text, ids) if doc_id is None else doc_id,
            row_id=row_id,
            text=text,
            input_ids=ids,
            labels=labels,
            where=record.where,
            ignored=record.ignored,
        )


def column_roles(source: Source, settings: CorpusSettings) -> dict[str, str]:
    """Which column of the first record became what: text or input_ids, row_id, doc_id."""
    content = settings.text_column, settings.ids_column
    record = next(read_records(source, settings, content, lambda *_: None, 0), None)
    if record is None:
        return {}
    row, doc = id_columns(settings, record.values)
    roles = {"text": content[0], "input_ids": content[1], "row_id": row, "doc_id": doc}
    return {role: column for role, column in roles.items() if column is not None and column in record.values}


def _check_columns(columns: Mapping[str, pa.DataType | None], settings: CorpusSettings, where: str) -> None:
    """A text or ids column must exist and be of its type, and so must an id column that was asked for by name."""
    text, ids = settings.text_column, settings.ids_column
    if text not in columns and ids not in columns:
        raise CorpusError(
            f"{where}: no text column {text!r} and no ids column {ids!r}; columns found: "
            f"{', '.join(columns) or 'none'}; name the one that holds the text with --text-column (corpus.text_column)"
        )
    check_id_columns(settings, list(columns), where)
    kind = columns.get(ids)
    if kind is not None and not pa.types.is_null(kind) and not (is_list(kind) and pa.types.is_integer(kind.value_type)):
        raise CorpusError(f"{where}: ids column {ids!r} holds {kind}, expected lists of integers")
    kind = columns.get(text)
    if kind is not None and not is_text(kind) and not pa.types.is_null(kind):
        raise CorpusError(f"{where}: text column {text!r} holds {kind}, expected text")


def _made_id(record: Record, text: str | None, ids: NDArray[np.int32] | None) -> str:
    """Name out of content and position: 64 bits of a hash, and the index, which keeps repeats apart."""
    digest = content_hash(text or "") if ids is None else _hash(ids.astype("<i4").tobytes())
    return f"{digest}-{record.index}"


def content_hash(text: str) -> str:
    """What the made names of documents with this text begin with; a dash and the position follow."""
    return _hash(text.encode())


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _token_ids(ids: Any, column: str, where: str) -> NDArray[np.int32] | None:
    if ids is None:
        return None
    if isinstance(ids, pa.Array):
        if ids.null_count:
            raise CorpusError(f"{where}: the list of token ids holds a null, expected integers")
        ids = ids.to_numpy(zero_copy_only=False)
    elif not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise CorpusError(f"{where}: ids column {column!r} holds {ids!r:.60}, expected a list of integers")
    try:
        array = np.asarray(ids, dtype=np.int64)
    except OverflowError:
        array = np.full(1, _INT32.max + 1)  # does not even fit 64 bits: refused below
    if array.size and not (_INT32.min <= array.min() and array.max() <= _INT32.max):
        raise CorpusError(f"{where}: a token id does not fit 32 bits, so it is outside any vocabulary")
    return array.astype(np.int32)
