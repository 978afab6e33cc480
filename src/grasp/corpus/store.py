"""The rows of a text corpus on disk: token ids, shard by shard; see `shard_files` for how they are kept."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.corpus.documents import Document, SpanTokenizer, Tokenizer, documents_of, read_documents
from grasp.corpus.labels import IDS_COLUMN
from grasp.corpus.packing import Cursor, Packer, Row, SkipLog, Skipped
from grasp.corpus.shard_files import FORMAT, ShardStore, StoreWriter, begin, first_duplicate, read_shard
from grasp.corpus.sources import Source, open_source
from grasp.errors import CorpusError
from grasp.settings import CorpusSettings

ENCODE_DOCUMENTS: Final = 256
ENCODE_CHARS: Final = 4_000_000  # long documents make smaller batches: memory is a shard and a batch
PROBE_TEXTS: Final = 16
PROBE_CHARS: Final = 2_000


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
    unpredicted: ClassVar[int] = 1  # nothing comes before the first token of a row that could predict it

    @classmethod
    def write(
        cls,
        directory: Path,
        settings: CorpusSettings,
        tokenizer: Tokenizer,
        *,
        shard_rows: int,
        progress: Callable[[int], None] | None = None,
    ) -> Self:
        """Read, tokenise and pack the corpus; go on where an earlier call was cut off; open what is complete.

        Args:
            shard_rows: rows in a shard: what is held in memory, and what a kill can cost.
            progress: called with the number of rows finished so far, after each shard.
        Raises:
            CorpusError: the corpus is empty or malformed, names a row twice, or is not the one that
                `directory` was begun with.
        """
        source = open_source(settings.path)
        begin(directory, _plan(source, settings, tokenizer, shard_rows))
        if not (directory / "store.json").exists():
            writer = _Writer(directory, source, settings, tokenizer, shard_rows)
            writer.write_shards(progress or _silent)
            writer.finish()
        return cls.open(directory)

    def _shard(self, start: int, whole: pa.Table) -> RowShard:
        ids = whole.column(IDS_COLUMN).combine_chunks()
        offsets = ids.offsets.to_numpy().astype(np.int64)
        return RowShard(start, ids.values.to_numpy(), offsets, self._public(whole))


def _silent(_: int) -> None:
    return


class _Writer:
    """Writes the shards that are missing, then closes the store."""

    def __init__(
        self, directory: Path, source: Source, settings: CorpusSettings, tokenizer: Tokenizer, shard_rows: int
    ) -> None:
        self._directory = directory
        self._source = source
        self._settings = settings
        self._tokenizer = tokenizer
        self._shard_rows = shard_rows
        self._log = SkipLog()
        self._shards = StoreWriter(directory, self._log)

    def write_shards(self, progress: Callable[[int], None]) -> None:
        """Every shard from the cursor of the last finished one on."""
        states = self._shards.states
        cursor = Cursor(**states[-1]["cursor"]) if states else Cursor()
        packer = Packer(self._settings, self._tokenizer.eos_id, self._tokenizer.vocab_size, cursor, self._log)
        documents = documents_of(self._source, self._settings, start=cursor.document)
        encode: Encode = lambda texts: ((ids, None) for ids in self._tokenizer.encode(texts))  # noqa: E731
        rows = _packed(documents, encode, packer)
        while shard := list(islice(rows, self._shard_rows)):
            # A short shard is the last one: what came after its last row has been read and counted as well.
            whole = len(shard) == self._shard_rows
            self._write_shard(shard, shard[-1].after if whole else Cursor(packer.next_document))
            progress(self._shards.n_rows)
        self._end = packer.next_document

    def finish(self) -> None:
        """Check the names, compute the fingerprint, and mark the store complete."""
        self._check_not_empty(self._shards.skipped())
        self._check_names()
        self._shards.close(
            holds=RowStore.holds,
            shard_rows=self._shard_rows,
            n_documents=self._end,
            fingerprint=_fingerprint(self._directory, len(self._shards.states)),
        )

    def _write_shard(self, rows: list[Row], after: Cursor) -> None:
        lengths = [len(row.input_ids) for row in rows]
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        ids = pa.ListArray.from_arrays(offsets, np.concatenate([row.input_ids for row in rows]))
        self._shards.add(rows, lengths, {IDS_COLUMN: ids}, asdict(after))

    def _check_not_empty(self, skipped: Skipped) -> None:
        if self._shards.states:
            return
        if not self._end:
            raise CorpusError(f"{self._settings.path}: the corpus is empty, expected at least one document")
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.counts.items())
        raise CorpusError(
            f"{self._settings.path}: none of the {self._end} documents gives a row ({reasons}); "
            "expected one with at least two tokens"
        )

    def _check_names(self) -> None:
        """Every row_id once. DuckDB counts them and spills to disk: memory does not grow with the corpus."""
        twice = first_duplicate(self._directory, len(self._shards.states), self._shard_rows)
        if twice is None:
            return
        row_id, places = twice
        shown = " and ".join(f"{self._where(document)} (row_index {row})" for row, document in places)
        raise CorpusError(
            f"row_id {row_id!r} occurs twice: {shown}; give every row a name of its own in the column "
            f"{self._settings.row_id_column!r}, or drop one of them"
        )

    def _where(self, document: int) -> str:
        return next(documents_of(self._source, self._settings, start=document)).where


Encode = Callable[[list[str]], Iterable[tuple[list[int], list[int] | None]]]


def _packed(documents: Iterable[Document], encode: Encode, packer: Packer) -> Iterator[Row]:
    """Rows of a stream of documents, tokenised a batch at a time; no document is packed before it is due."""
    for batch in _batches(documents):
        texts = [document.text for document in batch if document.text is not None and _is_tokenised(document)]
        encoded = iter(encode(texts) if texts else [])
        for document in batch:
            yield from packer.feed(document, *(next(encoded) if _is_tokenised(document) else (None, None)))
    yield from packer.finish()


def rows_with_texts(settings: CorpusSettings, tokenizer: SpanTokenizer) -> Iterator[Row]:
    """The rows of a corpus as a store has them, each with its text, streamed; nothing is written.

    Raises:
        CorpusError: the corpus is malformed.
    """
    packer = Packer(settings, tokenizer.eos_id, tokenizer.vocab_size, Cursor(), SkipLog())
    return _packed(read_documents(settings), tokenizer.encode_with_ends, packer)


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


def _plan(source: Source, settings: CorpusSettings, tokenizer: Tokenizer, shard_rows: int) -> dict[str, Any]:
    """What makes this store this store. The path is not in it: a corpus may move."""
    eos_id, vocab_size = tokenizer.eos_id, tokenizer.vocab_size
    if eos_id is not None and not 0 <= eos_id < vocab_size:
        raise CorpusError(f"tokenizer: its EOS id {eos_id} is outside the vocabulary of {vocab_size}")
    return {
        "format": FORMAT,
        "settings": settings.model_dump(mode="json", exclude={"path"}) | {"shard_rows": shard_rows},
        "tokenizer": {
            "eos_id": eos_id,
            "vocab_size": vocab_size,
            "encoding": _probe(source, settings, tokenizer),
        },
        "corpus": {name: [size, stamp] for name, size, stamp in source.identity()},
    }


def _probe(source: Source, settings: CorpusSettings, tokenizer: Tokenizer) -> str:
    """Hash of what the tokenizer makes of the first texts: two that differ seldom agree on them."""
    first = islice(documents_of(source, settings), ENCODE_DOCUMENTS)
    tokenised = (document for document in first if _is_tokenised(document))
    texts = [str(document.text)[:PROBE_CHARS] for document in islice(tokenised, PROBE_TEXTS)]
    encoded = tokenizer.encode(texts) if texts else []
    return hashlib.blake2b(json.dumps(encoded).encode(), digest_size=16).hexdigest()


class Fingerprint:
    """Hash over (row_id, input_ids) in row order, lengths included; shards do not enter."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(b"grasp rows 1", digest_size=16)

    def add(self, row_id: str, input_ids: NDArray[np.int32]) -> None:
        """The next row."""
        encoded = row_id.encode()
        self._digest.update(len(encoded).to_bytes(4, "little") + encoded + len(input_ids).to_bytes(4, "little"))
        self._digest.update(input_ids.astype("<i4", copy=False).tobytes())

    def __str__(self) -> str:
        return self._digest.hexdigest()


def _fingerprint(directory: Path, n_shards: int) -> str:
    found = Fingerprint()
    for k in range(n_shards):
        table = read_shard(directory, k, ["row_id", IDS_COLUMN])
        ids = table.column(IDS_COLUMN).combine_chunks()
        flat, offsets = ids.values.to_numpy(), ids.offsets.to_numpy()
        for i, name in enumerate(table.column("row_id").to_pylist()):
            found.add(name, flat[offsets[i] : offsets[i + 1]])
    return str(found)
