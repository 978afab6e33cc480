"""Documents become rows: cut one by one (`document`), or as one EOS-joined stream (`concat`). Turns are one row.

A row carries the cursor at which the row after it begins. Packing from that cursor on gives the same rows as
packing everything, and that is all that resuming takes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from grasp.corpus.conversations import Span
from grasp.corpus.documents import Document, Tokenizer
from grasp.corpus.labels import Label
from grasp.errors import CorpusError
from grasp.settings import CorpusSettings

MIN_ROW_TOKENS: Final = 2  # one token has no next token to predict
END_SHARE: Final = 1 / 8  # of a row: the default of `shortest_end`
LISTED_IDS: Final = 1_000


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the corpus: where the next row begins. Packing can begin at any of them."""

    document: int = 0  # index of the document
    token: int = 0  # position among its tokens
    named: int = 0  # rows that already carry its name


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

    input_ids: NDArray[np.int32]
    labelled: NDArray[np.bool_] | None = None  # tokens that carry loss; None: all but the first
    text: str | None = None  # the spans of its documents, a blank line between two; None: nobody told where tokens end


@dataclass(frozen=True, slots=True)
class Skipped:
    """What was left out: counts by reason, and the first ids of each.

    Reasons: `empty`, `whitespace` (documents); `one_token` (rows); `short_end` (last rows of documents that are cut
    apart); `cut` (documents that lost their end to `max_rows_per_document`); `turn_order`, `empty_answer`, `no_answer`
    (see `Conversation.fault`); `no_loss` (conversations of which no token carries loss); `cut_begin` (conversations
    that are longer than a row).
    """

    counts: Mapping[str, int]
    ids: Mapping[str, tuple[str, ...]]


@dataclass(slots=True)
class SkipLog:
    """Counts and lists what is left out. `drain` hands over what came since the last time."""

    counts: Counter[str] = field(default_factory=Counter)
    ids: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, name: str) -> None:
        """One more; only the first ids are listed."""
        self.extend({reason: 1}, {reason: [name]})

    def extend(self, counts: Mapping[str, int], ids: Mapping[str, list[str]]) -> None:
        """Take over what another log counted."""
        self.counts.update(counts)
        for reason, names in ids.items():
            listed = self.ids.setdefault(reason, [])
            listed.extend(names[: LISTED_IDS - len(listed)])

    def drain(self) -> Skipped:
        """Counts and ids so far; the log is empty afterwards."""
        drained = self.frozen()
        self.counts, self.ids = Counter(), {}
        return drained

    def frozen(self) -> Skipped:
        """The whole account."""
        return Skipped(dict(self.counts), {reason: tuple(names) for reason, names in self.ids.items()})


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of one document that wait for a row."""

    document: Document
    first: int  # position of the first of them in the document
    total: int  # tokens of the whole document
    ids: NDArray[np.int32]
    begin: int = 0  # character of the document at which it begins
    ends: NDArray[np.int64] | None = None  # character after each of its tokens

    def cut(self, first: int, stop: int) -> "_Piece":
        """Its tokens [first, stop); what lies between two tokens goes with the second."""
        if self.ends is None:
            return _Piece(self.document, self.first + first, self.total, self.ids[first:stop])
        begin = int(self.ends[first - 1]) if first else self.begin
        return _Piece(self.document, self.first + first, self.total, self.ids[first:stop], begin, self.ends[first:stop])

    def labelled(self, answers: Sequence[Span]) -> NDArray[np.bool_]:
        """Which of its tokens are of answers that begin after its first token, or with the text."""
        assert self.ends is not None
        labelled = np.zeros(len(self.ids), dtype=np.bool_)
        for start, stop in answers:
            if start > self.begin or not self.first:
                labelled |= (self.ends > start) & (self.ends <= stop)
        labelled[:1] = False
        return labelled

    @property
    def text(self) -> str | None:
        """Its span of the document."""
        whole = self.document.text
        if whole is not None and len(self.ids) == self.total:
            return whole
        return None if whole is None or self.ends is None else whole[self.begin : self.ends[-1]]


class Packer:
    """Cuts documents, fed in order with their tokens, into rows.

    Args:
        settings: packing, max_length (which must be a number), max_rows_per_document, shortest_end and snippet_chars
            are used.
        tokenizer: gives the mark of a text's end, the size of the vocabulary, and the text of rows that have none.
        cursor: where the first row begins; the document fed first must be `cursor.document`.
        log: takes what is left out.
    """

    def __init__(self, settings: CorpusSettings, tokenizer: Tokenizer, cursor: Cursor, log: SkipLog) -> None:
        assert settings.max_length is not None
        self._settings = settings
        self._length = settings.max_length
        self._shortest_end = int(END_SHARE * self._length) if settings.shortest_end is None else settings.shortest_end
        self._tokenizer = tokenizer
        self._log = log
        self._eos = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype=np.int32)
        self._resume = cursor
        self._pieces: list[_Piece] = []
        self._waiting = 0  # tokens in the pieces
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
        if fault is not None:
            self._log.add(fault, _base_id(document))
        elif document.input_ids is not None:
            yield from self._flush(Cursor(document.index))
            if not len(document.input_ids):
                self._log.add("empty", _base_id(document))
            ids = self._checked(document, document.input_ids)
            yield from self._cut(_Piece(document, 0, len(ids), ids))
        elif not document.text or tokens is None:
            self._log.add("whitespace" if document.text else "empty", _base_id(document))
        elif not tokens:
            self._log.add("empty", _base_id(document))
        else:
            mark = self._eos if document.conversation is None else self._eos[:0]  # a template brings its own
            ids = np.concatenate([self._checked(document, np.asarray(tokens, dtype=np.int64)), mark])
            ends_N = None
            if ends is not None:  # the last token, which may be the mark of the end, takes what is left of the text
                ends_N = np.full(len(ids), len(document.text), dtype=np.int64)
                ends_N[: len(ids) - 1] = ends[: len(ids) - 1]
            whole = _Piece(document, 0, len(ids), ids, ends=ends_N)
            if document.answers is not None:
                yield from self._answered(whole, document.answers)
            else:
                yield from (self._concat if self._settings.packing == "concat" else self._cut)(whole)

    def finish(self) -> Iterator[Row]:
        """The last, short row of a stream."""
        yield from self._flush(Cursor(self._next_document))

    def _cut(self, whole: _Piece) -> Iterator[Row]:
        """`document` packing, and any that comes as ids: rows of max_length; the last one is shorter, or left out."""
        document, length, most = whole.document, self._length, self._settings.max_rows_per_document
        stop = whole.total if most is None else min(whole.total, most * length)
        for first in range(self._start(document), stop, length):
            if first and whole.total - first < self._shortest_end:
                self._log.add("short_end", f"{_base_id(document)}#{first // length}")
                break
            after = Cursor(document.index, first + length, first // length + 1)
            yield from self._row([whole.cut(first, first + length)], after)
        if stop < whole.total:
            self._log.add("cut", _base_id(document))

    def _answered(self, whole: _Piece, answers: Sequence[Span]) -> Iterator[Row]:
        """A text of which the answers carry loss, as one row; too long, it keeps the last answer and what is before."""
        if self._settings.packing == "concat":
            raise CorpusError(
                f"{whole.document.where}: a row is one conversation; corpus.packing: got concat, expected document"
            )
        if whole.ends is None:
            raise CorpusError(
                f"{whole.document.where}: the tokenizer cannot tell which tokens are the answer; use a fast one "
                "(tokenizer.json)"
            )
        labelled = whole.labelled(answers)
        if not labelled.any():
            self._log.add("no_loss", _base_id(whole.document))
            return
        if whole.total > self._length:
            self._log.add("cut_begin", _base_id(whole.document))
            last = int(np.flatnonzero(labelled)[-1])
            # an answer that is longer than a row loses its end, so that it is read from its beginning
            answer = int(np.searchsorted(whole.ends, answers[-1][0], side="right"))
            first = min(max(0, last + 1 - self._length), max(0, answer - 1))
            whole = whole.cut(first, first + self._length)
            labelled = whole.labelled(answers)
        after = Cursor(whole.document.index + 1)
        yield from self._row([whole], after, None if labelled[1:].all() else labelled)

    def _concat(self, whole: _Piece) -> Iterator[Row]:
        """`concat` packing: rows of exactly max_length out of the stream.

        Before a document came, less than a row was waiting, so that what is left after a row is its own.
        """
        document = whole.document
        rest_of_it = whole.cut(self._start(document), whole.total)
        if len(rest_of_it.ids):
            self._pieces.append(rest_of_it)
            self._waiting += len(rest_of_it.ids)
        while self._waiting >= self._length:
            pieces = self._take(self._length)
            dominant = _dominant(pieces).document.index
            rest = self._pieces[0].first if self._pieces else whole.total
            named = self._named[document.index] + (dominant == document.index)
            yield from self._row(pieces, Cursor(document.index, rest, named))

    def _flush(self, after: Cursor) -> Iterator[Row]:
        if self._waiting:
            yield from self._row(self._take(self._waiting), after)

    def _start(self, document: Document) -> int:
        return self._resume.token if document.index == self._resume.document else 0

    def _take(self, n_tokens: int) -> list[_Piece]:
        """First tokens of the stream, at most a row of them."""
        taken: list[_Piece] = []
        self._waiting -= n_tokens
        while n_tokens:
            piece = self._pieces.pop(0)
            head = piece.cut(0, n_tokens)
            taken.append(head)
            if len(head.ids) < len(piece.ids):
                self._pieces.insert(0, piece.cut(n_tokens, len(piece.ids)))
            n_tokens -= len(head.ids)
        return taken

    def _row(self, pieces: list[_Piece], after: Cursor, labelled: NDArray[np.bool_] | None = None) -> Iterator[Row]:
        """The row, unless too short; named after the document with the most tokens, the earliest on a tie."""
        main = _dominant(pieces)
        document = main.document
        ordinal = self._named[document.index]
        self._named = Counter({index: n for index, n in self._named.items() if index >= document.index})
        self._named[document.index] += 1
        row_id = _base_id(document) + (f"#{ordinal}" if ordinal else "")
        ids = np.concatenate([piece.ids for piece in pieces])
        if len(ids) < MIN_ROW_TOKENS:
            self._log.add("one_token", row_id)
            return
        texts = [piece.text for piece in pieces]
        yield Row(
            row_id=row_id,
            doc_id=document.doc_id,
            document=document.index,
            n_tokens=len(ids),
            input_ids=ids,
            labelled=labelled,
            snippet=self._snippet(main),
            labels=document.labels,
            ignored=tuple(sorted({name for piece in pieces for name in piece.document.ignored})),
            after=after,
            text=None if None in texts else "\n\n".join(text for text in texts if text is not None),
        )

    def _snippet(self, main: _Piece) -> str:
        """Text for reading, white space folded, from a word near the row's first token on.

        Tokens are not mapped back to characters: the start is in proportion to their number. Ids alone are decoded.
        """
        n_chars, share, document = self._settings.snippet_chars, main.first / main.total, main.document
        text = document.text if document.conversation is None else str(document.conversation)
        if text is None and n_chars:
            share, (text,) = 0.0, self._tokenizer.decode([main.ids[:n_chars].tolist()])
        text = text or ""
        start = round(len(text) * share)
        if start:
            start = text.find(" ", start - 1, start + 64) + 1 or start
        return " ".join(text[start : start + 4 * n_chars].split())[:n_chars]

    def _checked(self, document: Document, ids: NDArray[np.signedinteger]) -> NDArray[np.int32]:
        vocab_size = self._tokenizer.vocab_size
        bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if bad.size:
            raise CorpusError(
                f"{document.where}: row {_base_id(document)!r} has the token id {ids[bad[0]]} at position "
                f"{bad[0]}, outside the vocabulary of {vocab_size} (0 to {vocab_size - 1}); "
                "use the tokenizer that the model was trained with"
            )
        return ids.astype(np.int32)


def _base_id(document: Document) -> str:
    return document.doc_id if document.row_id is None else document.row_id


def _dominant(pieces: list[_Piece]) -> _Piece:
    """First piece of the document with the most tokens; a document has one piece in a row."""
    return max(pieces, key=lambda piece: len(piece.ids))
