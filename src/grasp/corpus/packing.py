"""Documents become rows: cut one by one (`document`), or as one EOS-joined stream (`concat`). Turns are one row.

A row carries the cursor at which the row after it begins. Packing from that cursor on gives the same rows as
packing everything, and that is all that resuming takes.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from grasp.arrays import I32, I64, Bool
from grasp.corpus.conversations import Span
from grasp.corpus.documents import Document, Tokenizer
from grasp.corpus.labels import Label
from grasp.errors import CorpusError, ModelError
from grasp.settings import CorpusSettings

MIN_ROW_TOKENS: Final = 2  # one token has no next token to predict
END_SHARE: Final = 1 / 8  # of a row: the default of `shortest_end`
LISTED_IDS: Final = 1_000
ENCODE_DOCUMENTS: Final = 256
ENCODE_CHARS: Final = 4_000_000  # long documents make smaller batches: memory is a shard and a batch


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the corpus: where the next row begins. Packing can begin at any of them."""

    document: int = 0  # index of the document
    token: int = 0  # position among its tokens
    named: int = 0  # rows that already carry its name


START: Final = Cursor()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """What every row has, of text or of images: its names, its labels, where it came from."""

    row_id: str
    doc_id: str
    document: int  # index of the document that gave the most tokens
    n_tokens: int
    snippet: str
    labels: Mapping[str, Label]
    ignored: tuple[str, ...]  # columns of its documents that cannot be labels
    after: Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(StoredRow):
    """One training sequence."""

    input_ids: I32
    labelled: Bool | None = None  # tokens that carry loss; None: all but the first
    text: str | None = None  # the spans of its documents, a blank line between two; None: nobody told where tokens end


@dataclass(slots=True)
class Skipped:
    """What was left out: counts by reason, and the first ids of each.

    Reasons: `empty`, `whitespace` (documents); `one_token` (rows); `short_end` (last rows of documents that are cut
    apart); `cut` (documents that lost their end to `max_rows_per_document`); `turn_order`, `empty_answer`, `no_answer`
    (see `Conversation.fault`); `no_loss` (conversations of which no token carries loss); `cut_begin` (conversations
    that are longer than a row).
    """

    counts: dict[str, int] = field(default_factory=dict)
    ids: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        """One more; only the first ids are listed."""
        self.extend({reason: 1}, {reason: [name]})

    def extend(self, counts: Mapping[str, int], ids: Mapping[str, Sequence[str]]) -> None:
        """Take over what was counted elsewhere."""
        for reason, number in counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + number
        for reason, names in ids.items():
            listed = self.ids.setdefault(reason, [])
            listed.extend(names[: LISTED_IDS - len(listed)])

    def drain(self) -> "Skipped":
        """What came since the last time; nothing is left here."""
        drained = Skipped(self.counts, self.ids)
        self.counts, self.ids = {}, {}
        return drained


def pack(
    documents: Iterable[Document],
    settings: CorpusSettings,
    tokenizer: Tokenizer,
    cursor: Cursor = START,
    skipped: Skipped | None = None,
    *,
    with_texts: bool = False,
) -> Iterator[Row]:
    """Documents as rows: tokenised a batch at a time and packed; none is packed before it is due.

    Args:
        documents: those from `cursor.document` on.
        settings: max_length must be a number.
        cursor: where the first row begins.
        skipped: takes what is left out.
        with_texts: each row has the span of text that it holds.
    Raises:
        CorpusError: the corpus is malformed, or an id is outside the vocabulary.
    """
    packer = Packer(settings, tokenizer, cursor, Skipped() if skipped is None else skipped)
    written = (written_out(document, tokenizer, settings) for document in documents)
    while True:
        batch: list[Document] = []
        chars = 0
        for document in written:
            batch.append(document)
            chars += len(document.text or "")
            if len(batch) == ENCODE_DOCUMENTS or chars >= ENCODE_CHARS:
                break
        if not batch:
            break
        as_text = [document for document in batch if document.is_tokenised]
        texts = [str(document.text) for document in as_text]
        encoded: Iterator[tuple[list[int], list[int] | None]]
        if with_texts or any(document.answers is not None for document in as_text):
            encoded = iter(tokenizer.encode_with_ends(texts))
        else:
            encoded = ((ids, None) for ids in tokenizer.encode(texts))
        tokens = {document.index: one for document, one in zip(as_text, encoded, strict=True)}
        for document in batch:
            yield from packer.feed(document, *tokens.get(document.index, (None, None)))
    yield from packer.finish()


def written_out(document: Document, tokenizer: Tokenizer, settings: CorpusSettings) -> Document:
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


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of one document that wait for a row."""

    document: Document
    first: int  # position of the first of them in the document
    total: int  # tokens of the whole document
    ids: I32
    begin: int = 0  # character of the document at which it begins
    ends: I64 | None = None  # character after each of its tokens

    def cut(self, first: int, stop: int) -> "_Piece":
        """Its tokens [first, stop); what lies between two tokens goes with the second."""
        if self.ends is None:
            return _Piece(self.document, self.first + first, self.total, self.ids[first:stop])
        begin = int(self.ends[first - 1]) if first else self.begin
        return _Piece(self.document, self.first + first, self.total, self.ids[first:stop], begin, self.ends[first:stop])

    def labelled(self, answers: Sequence[Span]) -> Bool:
        """Which of its tokens are of answers that begin after its first token, or with the text."""
        assert self.ends is not None
        labelled = np.zeros(len(self.ids), dtype=np.bool_)
        for start, stop in answers:
            if start > self.begin or not self.first:
                labelled |= (self.ends > start) & (self.ends <= stop)
        labelled[:1] = False
        return labelled


class Packer:
    """Cuts documents, fed in order with their tokens, into rows.

    Args:
        tokenizer: gives the mark of a text's end, the size of the vocabulary, and the text of rows that have none.
        cursor: where the first row begins; the document fed first must be `cursor.document`.
    """

    def __init__(self, settings: CorpusSettings, tokenizer: Tokenizer, cursor: Cursor, skipped: Skipped) -> None:
        assert settings.max_length is not None
        self._settings, self._length = settings, settings.max_length
        self._tokenizer, self._skipped, self._resume = tokenizer, skipped, cursor
        self._waiting: list[_Piece] = []  # of a stream: less than a row between two documents
        self._n_waiting = 0  # tokens in them
        self._named = Counter({cursor.document: cursor.named})
        self._next_document = cursor.document

    def feed(self, document: Document, tokens: list[int] | None, ends: list[int] | None = None) -> Iterator[Row]:
        """Rows that `document` completes.

        Args:
            tokens: of its text; None where it comes with ids or has no text.
            ends: the character of its text after each token, for rows that know their text.
        Raises:
            CorpusError: an id outside the vocabulary.
        """
        self._next_document = document.index + 1
        fault = None if document.conversation is None else document.conversation.fault
        if document.input_ids is not None and fault is None:
            yield from self.finish(document.index)
            fault = None if len(document.input_ids) else "empty"
            ids = document.input_ids.astype(np.int64)
        else:
            if fault is None and not tokens:
                fault = "whitespace" if document.text and tokens is None else "empty"
            ids = np.array(tokens or (), dtype=np.int64)
        if fault is not None:
            self._skipped.add(fault, document.name)
            return
        vocab_size = self._tokenizer.vocab_size
        bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if bad.size:
            raise CorpusError(
                f"{document.where}: row {document.name!r} has the token id {ids[bad[0]]} at position "
                f"{bad[0]}, outside the vocabulary of {vocab_size} (0 to {vocab_size - 1}); "
                "use the tokenizer that the model was trained with"
            )
        ends_N = None
        if document.input_ids is None:
            if document.conversation is None and self._tokenizer.eos_id is not None:  # a template brings its own mark
                ids = np.append(ids, self._tokenizer.eos_id)
            if ends is not None:  # the last token, which may be the mark of the end, takes what is left of the text
                ends_N = np.full(len(ids), len(document.text or ""), dtype=np.int64)
                ends_N[:-1] = ends[: len(ids) - 1]
        whole = _Piece(document, 0, len(ids), ids.astype(np.int32), ends=ends_N)
        if document.input_ids is None and document.answers is not None:
            yield from self._answered(whole, document.answers)
            return
        start = self._resume.token if document.index == self._resume.document else 0
        if document.input_ids is None and self._settings.packing == "concat":
            yield from self._concat(whole.cut(start, whole.total))
            return
        # `document` packing, and any that comes as ids: rows of max_length; the last one is shorter, or left out
        length, most, shortest = self._length, self._settings.max_rows_per_document, self._settings.shortest_end
        if shortest is None:
            shortest = int(END_SHARE * length)
        stop = whole.total if most is None else min(whole.total, most * length)
        for first in range(start, stop, length):
            if first and whole.total - first < shortest:
                self._skipped.add("short_end", f"{document.name}#{first // length}")
                break
            yield from self._row([whole.cut(first, first + length)], document.index, first + length)
        if stop < whole.total:
            self._skipped.add("cut", document.name)

    def finish(self, next_document: int | None = None) -> Iterator[Row]:
        """The last, short row of a stream, at its end or before a document that comes as ids."""
        if self._waiting:
            pieces, self._waiting, self._n_waiting = self._waiting, [], 0
            yield from self._row(pieces, self._next_document if next_document is None else next_document, 0)

    def _answered(self, whole: _Piece, answers: Sequence[Span]) -> Iterator[Row]:
        """A text of which the answers carry loss, as one row; too long, it keeps the last answer and what is before."""
        document = whole.document
        if self._settings.packing == "concat":
            raise CorpusError(
                f"{document.where}: a row is one conversation; corpus.packing: got concat, expected document"
            )
        if whole.ends is None:
            raise CorpusError(
                f"{document.where}: the tokenizer cannot tell which tokens are the answer; use a fast one "
                "(tokenizer.json)"
            )
        labelled = whole.labelled(answers)
        if not labelled.any():
            self._skipped.add("no_loss", document.name)
            return
        if whole.total > self._length:
            self._skipped.add("cut_begin", document.name)
            last = int(np.flatnonzero(labelled)[-1])
            # an answer that is longer than a row loses its end, so that it is read from its beginning
            answer = int(np.searchsorted(whole.ends, answers[-1][0], side="right"))
            first = min(max(0, last + 1 - self._length), max(0, answer - 1))
            whole = whole.cut(first, first + self._length)
            labelled = whole.labelled(answers)
        yield from self._row([whole], document.index + 1, 0, None if labelled[1:].all() else labelled)

    def _concat(self, piece: _Piece) -> Iterator[Row]:
        """`concat` packing: rows of exactly max_length out of the stream, to which the rest of a document comes."""
        if len(piece.ids):
            self._waiting.append(piece)
            self._n_waiting += len(piece.ids)
        while self._n_waiting >= self._length:
            row, missing = [], self._length
            self._n_waiting -= missing
            while missing:
                head = self._waiting.pop(0)
                if len(head.ids) > missing:
                    self._waiting.insert(0, head.cut(missing, len(head.ids)))
                    head = head.cut(0, missing)
                row.append(head)
                missing -= len(head.ids)
            # less than a row was waiting before the document came, so what is left after a row is its own
            rest = self._waiting[0].first if self._waiting else piece.total
            yield from self._row(row, piece.document.index, rest)

    def _row(
        self, pieces: list[_Piece], next_document: int, next_token: int, labelled: Bool | None = None
    ) -> Iterator[Row]:
        """The row, unless too short; named after the document with the most tokens, the earliest on a tie."""
        main = max(pieces, key=lambda piece: len(piece.ids))
        document = main.document
        ordinal = self._named[document.index]
        self._named = Counter({index: n for index, n in self._named.items() if index >= document.index})
        self._named[document.index] += 1
        row_id = document.name + (f"#{ordinal}" if ordinal else "")
        ids = np.concatenate([piece.ids for piece in pieces])
        if len(ids) < MIN_ROW_TOKENS:
            self._skipped.add("one_token", row_id)
            return
        texts: list[str | None] = []  # the spans of the documents
        for piece in pieces:
            text = piece.document.text
            if text is not None and len(piece.ids) < piece.total:
                text = None if piece.ends is None else text[piece.begin : piece.ends[-1]]
            texts.append(text)
        # To read: from a word near the row's first token on, white space folded. Tokens are not mapped back to
        # characters: the start is in proportion to their number. Ids alone are decoded.
        n_chars, share = self._settings.snippet_chars, main.first / main.total
        text = document.text if document.conversation is None else str(document.conversation)
        if text is None and n_chars:
            share, (text,) = 0.0, self._tokenizer.decode([main.ids[:n_chars].tolist()])
        text = text or ""
        start = round(len(text) * share)
        if start:
            start = text.find(" ", start - 1, start + 64) + 1 or start
        yield Row(
            row_id=row_id,
            doc_id=document.doc_id,
            document=document.index,
            n_tokens=len(ids),
            input_ids=ids,
            labelled=labelled,
            snippet=" ".join(text[start : start + 4 * n_chars].split())[:n_chars],
            labels=document.labels,
            ignored=tuple(sorted({name for piece in pieces for name in piece.document.ignored})),
            after=Cursor(next_document, next_token, self._named[next_document]),
            text=None if None in texts else "\n\n".join(text for text in texts if text is not None),
        )


def row_bytes(row_id: str, input_ids: I32, labelled: Bool | None) -> bytes:
    """What of a row enters the fingerprint of its corpus: name, tokens, and which of them carry loss."""
    name = row_id.encode()
    sizes = len(name).to_bytes(4, "little") + name + len(input_ids).to_bytes(4, "little")
    mask = b"" if labelled is None or labelled[1:].all() else b"labelled" + np.packbits(labelled).tobytes()
    return sizes + input_ids.astype("<i4", copy=False).tobytes() + mask
