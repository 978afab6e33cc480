"""The rows of a text corpus on disk: token ids, shard by shard; see `shard_files` for how they are kept."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.corpus.documents import Document, SpanTokenizer, Tokenizer, column_roles, documents_of
from grasp.corpus.labels import IDS_COLUMN
from grasp.corpus.packing import Cursor, Packer, Row, SkipLog
from grasp.corpus.shard_files import FORMAT, RowStream, ShardStore
from grasp.corpus.sources import Source, open_source
from grasp.errors import CorpusError
from grasp.settings import CorpusSettings

ENCODE_DOCUMENTS: Final = 256
ENCODE_CHARS: Final = 4_000_000  # long documents make smaller batches: memory is a shard and a batch
PROBE_TEXTS: Final = 16
PROBE_CHARS: Final = 2_000
LONGEST: Final = 2_048  # tokens of a row, where neither a setting nor the model's context says less


@dataclass(frozen=True, slots=True)
class RowShard:
    """Rows and their token ids, ragged: row i is flat_ids[offsets[i]:offsets[i + 1]]."""

    start: int  # row_index of the first row; -1 for rows picked one by one
    flat_ids: NDArray[np.int32]
    offsets: NDArray[np.int64]  # (n + 1,)
    table: pa.Table  # row_id, doc_id, n_tokens, snippet, then the labels

    def ids(self, i: int) -> NDArray[np.int32]:
        """Token ids of row i of this shard."""
        return self.flat_ids[self.offsets[i] : self.offsets[i + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_tokens(self) -> int:
        """Tokens of all its rows."""
        return len(self.flat_ids)

    def tokens_of(self, index: NDArray[np.int64]) -> int:
        """Tokens of some rows."""
        return int(np.diff(self.offsets)[index].sum())

    def take(self, index: NDArray[np.int64]) -> "RowShard":
        """Rows by position in the shard, in the order given."""
        lengths = np.diff(self.offsets)[index]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        flat = np.repeat(self.offsets[:-1][index] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return RowShard(-1, self.flat_ids[flat], offsets, self.table.take(pa.array(index)))

    @classmethod
    def joined(cls, parts: Sequence["RowShard"]) -> "RowShard":
        """Rows of all parts, one after the other."""
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        flat = np.concatenate([part.flat_ids for part in parts])
        return cls(-1, flat, offsets, pa.concat_tables([part.table for part in parts]))


class RowStore(ShardStore[RowShard]):
    """The rows of a corpus, complete and on disk; opens without reading them."""

    holds: ClassVar[str] = "tokens"
    seed: ClassVar[bytes] = b"grasp rows 1"
    content: ClassVar[tuple[str, ...]] = (IDS_COLUMN,)
    unpredicted: ClassVar[int] = 1  # nothing comes before the first token of a row that could predict it

    @classmethod
    def write(
        cls,
        directory: Path,
        settings: CorpusSettings,
        tokenizer: Tokenizer,
        *,
        shard_rows: int,
        context: int | None = None,
        source: Source | None = None,
        replace: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Self:
        """Read, tokenise and pack the corpus; go on where an earlier call was cut off; open what is complete.

        Args:
            shard_rows: rows in a shard: what is held in memory, and what a kill can cost.
            context: positions of the model that will read them, where `settings.max_length` says nothing.
            source: the corpus, where it is in memory.
            replace: throw away what was begun here with other input.
            progress: called with the number of rows finished so far, after each shard.
        Raises:
            CorpusError: the corpus is empty or malformed, names a row twice, or is not the one that
                `directory` was begun with.
        """
        source = source or open_source(settings.path, settings.split)
        first = list(islice(documents_of(source, settings), ENCODE_DOCUMENTS))
        settings = settings.model_copy(update={"max_length": row_length(settings, context, first)})
        plan = _plan(source, settings, tokenizer, shard_rows, first)
        stream = TextRows(source, settings, tokenizer)
        details = {"max_length": settings.max_length, "columns": column_roles(source, settings)}
        return cls._write(directory, plan, stream, progress, replace=replace, details=details)

    def _shard(self, start: int, whole: pa.Table) -> RowShard:
        ids = whole.column(IDS_COLUMN).combine_chunks()
        offsets = ids.offsets.to_numpy().astype(np.int64)
        return RowShard(start, ids.values.to_numpy(), offsets, self._public(whole))

    @staticmethod
    def _hashed(whole: pa.Table) -> Iterator[bytes]:
        ids = whole.column(IDS_COLUMN).combine_chunks()
        flat, offsets = ids.values.to_numpy(), ids.offsets.to_numpy()
        for i, name in enumerate(whole.column("row_id").to_pylist()):
            yield _row_bytes(name, flat[offsets[i] : offsets[i + 1]])


class TextRows(RowStream[Row]):
    """Documents, tokenised a batch at a time and packed; none is packed before it is due."""

    def __init__(self, source: Source, settings: CorpusSettings, tokenizer: Tokenizer) -> None:
        super().__init__(settings)
        self._source, self._tokenizer = source, tokenizer

    def rows(self, cursor: Cursor, log: SkipLog) -> Iterator[Row]:
        packer = Packer(self.settings, self._tokenizer, cursor, log)
        for batch in _batches(documents_of(self._source, self.settings, start=cursor.document)):
            texts = [document.text for document in batch if document.text is not None and _is_tokenised(document)]
            encoded = iter(self._encode(texts) if texts else [])
            for document in batch:
                self.next_document = document.index + 1
                yield from packer.feed(document, *(next(encoded) if _is_tokenised(document) else (None, None)))
        yield from packer.finish()

    def _encode(self, texts: list[str]) -> Iterable[tuple[list[int], list[int] | None]]:
        return ((ids, None) for ids in self._tokenizer.encode(texts))

    def payload(self, rows: Sequence[Row]) -> dict[str, pa.Array]:
        offsets = np.concatenate([[0], np.cumsum([row.n_tokens for row in rows])]).astype(np.int32)
        return {IDS_COLUMN: pa.ListArray.from_arrays(offsets, np.concatenate([row.input_ids for row in rows]))}

    def where(self, document: int) -> str:
        return next(documents_of(self._source, self.settings, start=document)).where


class _TextRowsWithTexts(TextRows):
    """The same, each with the span of text that it holds."""

    _tokenizer: SpanTokenizer

    def _encode(self, texts: list[str]) -> Iterable[tuple[list[int], list[int] | None]]:
        return self._tokenizer.encode_with_ends(texts)


def rows_with_texts(settings: CorpusSettings, tokenizer: SpanTokenizer) -> Iterator[Row]:
    """The rows of a corpus as a store has them, each with its text, streamed; nothing is written.

    Raises:
        CorpusError: the corpus is malformed.
    """
    source = open_source(settings.path, settings.split)
    return _TextRowsWithTexts(source, settings, tokenizer).rows(Cursor(), SkipLog())


def _is_tokenised(document: Document) -> bool:
    return document.input_ids is None and bool(document.text) and not str(document.text).isspace()


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += len(document.text or "")
        if len(batch) == ENCODE_DOCUMENTS or chars >= ENCODE_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def row_length(settings: CorpusSettings, context: int | None, documents: Iterable[Document]) -> int:
    """The longest row: as the settings say, else what the model reads, at most `LONGEST`, or rows that are longer."""
    if settings.max_length is not None:
        return settings.max_length
    longest = max((len(document.input_ids) for document in documents if document.input_ids is not None), default=0)
    return min(max(LONGEST, longest), context or max(LONGEST, longest))


def _plan(
    source: Source, settings: CorpusSettings, tokenizer: Tokenizer, shard_rows: int, first: Sequence[Document]
) -> dict[str, Any]:
    """What makes this store this store. The path is not in it: a corpus may move."""
    eos_id, vocab_size = tokenizer.eos_id, tokenizer.vocab_size
    if eos_id is not None and not 0 <= eos_id < vocab_size:
        raise CorpusError(f"tokenizer: its EOS id {eos_id} is outside the vocabulary of {vocab_size}")
    return {
        "format": FORMAT,
        "settings": settings.model_dump(mode="json", exclude={"path"}) | {"shard_rows": shard_rows},
        "tokenizer": {"eos_id": eos_id, "vocab_size": vocab_size, "encoding": _probe(tokenizer, first)},
        "corpus": {name: [size, stamp] for name, size, stamp in source.identity()},
    }


def _probe(tokenizer: Tokenizer, first: Sequence[Document]) -> str:
    """Hash of what the tokenizer makes of the first texts: two that differ seldom agree on them."""
    tokenised = (document for document in first if _is_tokenised(document))
    texts = [str(document.text)[:PROBE_CHARS] for document in islice(tokenised, PROBE_TEXTS)]
    encoded = tokenizer.encode(texts) if texts else []
    return hashlib.blake2b(json.dumps(encoded).encode(), digest_size=16).hexdigest()


class Fingerprint:
    """Hash over (row_id, input_ids) in row order, lengths included; that of a store of these rows."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(RowStore.seed, digest_size=16)

    def add(self, row_id: str, input_ids: NDArray[np.int32]) -> None:
        """The next row."""
        self._digest.update(_row_bytes(row_id, input_ids))

    def __str__(self) -> str:
        return self._digest.hexdigest()


def _row_bytes(row_id: str, input_ids: NDArray[np.int32]) -> bytes:
    name = row_id.encode()
    sizes = len(name).to_bytes(4, "little") + name + len(input_ids).to_bytes(4, "little")
    return sizes + input_ids.astype("<i4", copy=False).tobytes()
