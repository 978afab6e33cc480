"""The rows of a text corpus on disk: token ids, shard by shard; see `shard_files` for how they are kept."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.corpus.documents import Document, Tokenizer, column_roles, documents_of
from grasp.corpus.labels import IDS_COLUMN, LABELLED_COLUMN
from grasp.corpus.packing import Cursor, Packer, Row, SkipLog
from grasp.corpus.shard_files import RowStream, ShardStore
from grasp.corpus.sources import Source, open_source
from grasp.errors import CorpusError, ModelError
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
    labelled: NDArray[np.bool_] | None = None  # tokens that carry loss, beside flat_ids; None: all but a row's first

    def ids(self, i: int) -> NDArray[np.int32]:
        """Token ids of row i of this shard."""
        return self.flat_ids[self.offsets[i] : self.offsets[i + 1]]

    def mask(self, i: int) -> NDArray[np.bool_] | None:
        """Which of them carry loss; None: all but the first."""
        return None if self.labelled is None else self.labelled[self.offsets[i] : self.offsets[i + 1]]

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
        labelled = None if self.labelled is None else self.labelled[flat]
        return RowShard(-1, self.flat_ids[flat], offsets, self.table.take(pa.array(index)), labelled)

    @classmethod
    def joined(cls, parts: Sequence["RowShard"]) -> "RowShard":
        """Rows of all parts, one after the other."""
        lengths = np.concatenate([np.diff(part.offsets) for part in parts])
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        flat = np.concatenate([part.flat_ids for part in parts])
        labelled = None
        if any(part.labelled is not None for part in parts):
            labelled = np.concatenate(
                [_all_but_the_first(part.offsets) if part.labelled is None else part.labelled for part in parts]
            )
        return cls(-1, flat, offsets, pa.concat_tables([part.table for part in parts]), labelled)


def _all_but_the_first(offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The mask of rows of which every token is predicted."""
    labelled = np.ones(offsets[-1], dtype=np.bool_)
    labelled[offsets[:-1]] = False
    return labelled


class RowStore(ShardStore[RowShard]):
    """The rows of a corpus, complete and on disk; opens without reading them."""

    holds: ClassVar[str] = "tokens"
    seed: ClassVar[bytes] = b"grasp rows 1"
    content: ClassVar[tuple[str, ...]] = (IDS_COLUMN, LABELLED_COLUMN)

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
            progress: called with the rows of each shard that is finished; the first time also with those before it.
        Raises:
            CorpusError: the corpus is empty or malformed, names a row twice, or is not the one that
                `directory` was begun with.
        """
        source = source or open_source(settings.path, settings.split)
        documents = documents_of(source, settings)
        first = [_written_out(document, tokenizer, settings) for document in islice(documents, ENCODE_DOCUMENTS)]
        if settings.max_length is None:  # what the model reads, at most `LONGEST`, or rows of ids that are longer
            longest = max([LONGEST, *(len(document.input_ids) for document in first if document.input_ids is not None)])
            settings = settings.model_copy(update={"max_length": min(longest, context or longest)})
        stream, reader = TextRows(source, settings, tokenizer), {"tokenizer": _identity(tokenizer, first)}
        details = {"max_length": settings.max_length, "columns": column_roles(source, settings)}
        return cls._write(
            directory, source, stream, reader, progress, shard_rows=shard_rows, replace=replace, details=details
        )

    def _shard(self, start: int, whole: pa.Table) -> RowShard:
        ids = whole.column(IDS_COLUMN).combine_chunks()
        offsets = ids.offsets.to_numpy().astype(np.int64)
        return RowShard(start, ids.values.to_numpy(), offsets, self._public(whole), _mask_of(whole))

    @cached_property
    def masked(self) -> bool:
        """Whether of some rows only a part carries loss, as of conversations."""
        return any(_mask_of(self._read(k, [LABELLED_COLUMN])) is not None for k in range(self.n_shards))

    def supervised(self) -> NDArray[np.int64]:
        return np.concatenate([self.supervised_of(k) for k in range(self.n_shards)])

    def supervised_of(self, k: int) -> NDArray[np.int64]:
        """The same of one shard."""
        table = self._read(k, ["n_tokens", LABELLED_COLUMN])
        labelled = _mask_of(table)
        lengths = np.asarray(table.column("n_tokens"), dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        return lengths - 1 if labelled is None else np.add.reduceat(labelled.astype(np.int64), starts)

    @staticmethod
    def _hashed(whole: pa.Table) -> Iterator[bytes]:
        ids = whole.column(IDS_COLUMN).combine_chunks()
        flat, offsets, labelled = ids.values.to_numpy(), ids.offsets.to_numpy(), _mask_of(whole)
        for i, name in enumerate(whole.column("row_id").to_pylist()):
            row = slice(offsets[i], offsets[i + 1])
            yield _row_bytes(name, flat[row], None if labelled is None else labelled[row])


class TextRows(RowStream[Row]):
    """Documents, tokenised a batch at a time and packed; none is packed before it is due.

    Args:
        with_texts: each row has the span of text that it holds.
    """

    def __init__(
        self, source: Source, settings: CorpusSettings, tokenizer: Tokenizer, *, with_texts: bool = False
    ) -> None:
        super().__init__(settings)
        self._source, self._tokenizer, self._with_texts = source, tokenizer, with_texts

    def rows(self, cursor: Cursor, log: SkipLog) -> Iterator[Row]:
        packer = Packer(self.settings, self._tokenizer, cursor, log)
        documents = documents_of(self._source, self.settings, start=cursor.document)
        for batch in _batches(_written_out(document, self._tokenizer, self.settings) for document in documents):
            as_text = [document for document in batch if _is_tokenised(document)]
            texts = [str(document.text) for document in as_text]
            encoded: Iterator[tuple[list[int], list[int] | None]]
            if self._with_texts or any(document.answers is not None for document in as_text):
                encoded = iter(self._tokenizer.encode_with_ends(texts))
            else:
                encoded = ((ids, None) for ids in self._tokenizer.encode(texts))
            for document in batch:
                self.next_document = document.index + 1
                yield from packer.feed(document, *(next(encoded) if _is_tokenised(document) else (None, None)))
        yield from packer.finish()

    def payload(self, rows: Sequence[Row]) -> dict[str, pa.Array]:
        offsets = np.cumsum([0, *(row.n_tokens for row in rows)], dtype=np.int32)
        ids = {IDS_COLUMN: pa.ListArray.from_arrays(offsets, np.concatenate([row.input_ids for row in rows]))}
        if all(row.labelled is None for row in rows):
            return ids
        masks = [
            _all_but_the_first(np.array([0, row.n_tokens])) if row.labelled is None else row.labelled for row in rows
        ]
        return ids | {LABELLED_COLUMN: pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(masks)))}

    def where(self, document: int) -> str:
        return next(documents_of(self._source, self.settings, start=document)).where


def rows_with_texts(settings: CorpusSettings, tokenizer: Tokenizer) -> Iterator[Row]:
    """The rows of a corpus as a store has them, each with its text, streamed; nothing is written.

    Raises:
        CorpusError: the corpus is malformed.
    """
    source = open_source(settings.path, settings.split)
    return TextRows(source, settings, tokenizer, with_texts=True).rows(Cursor(), SkipLog())


def _written_out(document: Document, tokenizer: Tokenizer, settings: CorpusSettings) -> Document:
    """A conversation as the text that the model reads, and what of a text carries loss."""
    text, answers, loss_on = document.text, document.answers, settings.loss_on
    if document.conversation is not None:
        if document.conversation.fault is not None:
            return document
        try:
            text, spans = tokenizer.chat(document.conversation, last_only=loss_on == "completion")
            answers = tuple(spans)
        except ModelError as err:
            raise CorpusError(f"{document.where}: {err}") from err
    if answers is None or text is None:
        if loss_on in ("assistant", "completion"):
            raise CorpusError(
                f"{document.where}: has no answer that could carry loss; corpus.loss_on: got {loss_on}, expected all"
            )
        return document
    chosen = {"all": ((0, len(text)),), "completion": answers[-1:]}.get(loss_on or "", answers)
    return replace(document, text=text, answers=chosen)


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


def _identity(tokenizer: Tokenizer, first: Sequence[Document]) -> dict[str, Any]:
    """What tells a tokenizer, its hash of the first texts among it: two that differ seldom agree on them."""
    eos_id, vocab_size = tokenizer.eos_id, tokenizer.vocab_size
    if eos_id is not None and not 0 <= eos_id < vocab_size:
        raise CorpusError(f"tokenizer: its EOS id {eos_id} is outside the vocabulary of {vocab_size}")
    probes = list(islice((document for document in first if _is_tokenised(document)), PROBE_TEXTS))
    encoded: list[Any] = tokenizer.encode([str(document.text)[:PROBE_CHARS] for document in probes])
    encoded += [document.answers for document in probes if document.answers is not None]
    encoding = hashlib.blake2b(json.dumps(encoded).encode(), digest_size=16).hexdigest()
    return {"eos_id": eos_id, "vocab_size": vocab_size, "encoding": encoding}


class Fingerprint:
    """Hash over row_id, input_ids and tokens that carry loss, in row order; that of a store of these rows."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(RowStore.seed, digest_size=16)

    def add(self, row: Row) -> None:
        """The next row."""
        self._digest.update(_row_bytes(row.row_id, row.input_ids, row.labelled))

    def __str__(self) -> str:
        return self._digest.hexdigest()


def _mask_of(whole: pa.Table) -> NDArray[np.bool_] | None:
    if LABELLED_COLUMN not in whole.column_names:
        return None
    labelled: NDArray[np.bool_] = whole.column(LABELLED_COLUMN).combine_chunks().values.to_numpy(zero_copy_only=False)
    return labelled


def _row_bytes(row_id: str, input_ids: NDArray[np.int32], labelled: NDArray[np.bool_] | None) -> bytes:
    name = row_id.encode()
    sizes = len(name).to_bytes(4, "little") + name + len(input_ids).to_bytes(4, "little")
    mask = b"" if labelled is None or labelled[1:].all() else b"labelled" + np.packbits(labelled).tobytes()
    return sizes + input_ids.astype("<i4", copy=False).tobytes() + mask
