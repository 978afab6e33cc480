"""Pack documents into rows: split each document (`document`), or one EOS-joined stream (`concat`).

A conversation is one row. Each row has the cursor at which the next row begins; packing from a cursor gives the same
rows as packing from the start, so that packing can be resumed at any row. Start with `pack`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import AliasChoices, Field

from grasp.arrays import I32, I64, Bool
from grasp.corpus.conversations import UnusableConversationError
from grasp.corpus.documents import Document
from grasp.corpus.encoding import ModelText, TokenizedText, Tokenizer, encode_texts
from grasp.corpus.labels import Label
from grasp.errors import CorpusError, ModelError
from grasp.settings import CorpusSettings

MIN_ROW_TOKENS: Final = 2  # one token has no next token to predict
MIN_END_SHARE: Final = 1 / 8  # shorter last rows of a document are skipped; share of a row, default of `shortest_end`
MAX_LISTED_IDS: Final = 1_000
MAX_LISTED_EXAMPLES: Final = 3
ENCODE_DOCUMENTS: Final = 256
ENCODE_CHARS: Final = 4_000_000  # bounds the memory of a batch of long documents


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position in the corpus at which the next row begins."""

    document: int = 0  # index of the document
    token: int = 0  # position among its tokens
    # number of earlier rows that are named after the document; written as `named` before version 0.3
    n_named_rows: Annotated[int, Field(validation_alias=AliasChoices("n_named_rows", "named"))] = 0


START: Final = Cursor()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    """Fields of every row, of text or images: names, labels, and origin."""

    row_id: str
    doc_id: str
    document: int  # index of the document with the most tokens
    n_tokens: int
    snippet: str
    labels: Mapping[str, Label]
    ignored: tuple[str, ...]  # columns of its documents that cannot be labels
    next_cursor: Cursor


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(StoredRow):
    """One training sequence."""

    input_ids: I32
    loss_mask: Bool | None = None  # tokens that carry loss; None: all but the first
    # (document index, start and end character) of its texts; None if the tokenizer reports no offsets
    spans: tuple[tuple[int, int, int], ...] | None = None
    split: int | None = None  # of a preference pair: number of tokens of the chosen side, which precede the others


@dataclass(slots=True)
class Skipped:
    """Skipped documents, rows and parts of them: counts by reason, and the first ids and examples of each.

    Reasons are the keys of `grasp.text.SKIPPED`. Most concern a whole document or row; `short_end`, `cut` and
    `cut_begin` a part of one; `cut_answer`, `no_calls` and `no_reasoning` a part of an answer that the chat template
    omits.
    """

    counts: dict[str, int] = field(default_factory=dict)
    ids: dict[str, list[str]] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)  # file and line, and the error

    def add(self, reason: str, name: str, example: str = "") -> None:
        """Add one; only the first ids and examples are stored."""
        self.extend({reason: 1}, {reason: [name]}, {reason: [example]} if example else {})

    def extend(
        self, counts: Mapping[str, int], ids: Mapping[str, Sequence[str]], examples: Mapping[str, Sequence[str]]
    ) -> None:
        """Add the counts, ids and examples of another account."""
        for reason, number in counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + number
        for listed, more, most in ((self.ids, ids, MAX_LISTED_IDS), (self.examples, examples, MAX_LISTED_EXAMPLES)):
            for reason, names in more.items():
                entries = listed.setdefault(reason, [])
                entries.extend(names[: most - len(entries)])

    def drain(self) -> "Skipped":
        """Return everything since the last call, and reset."""
        drained = Skipped(self.counts, self.ids, self.examples)
        self.counts, self.ids, self.examples = {}, {}, {}
        return drained


def pack(
    documents: Iterable[Document],
    settings: CorpusSettings,
    tokenizer: Tokenizer,
    cursor: Cursor = START,
    skipped: Skipped | None = None,
) -> Iterator[Row]:
    """Tokenise documents in batches, and yield them as rows.

    Args:
        documents: documents from `cursor.document` on.
        settings: settings with a `max_length`.
        cursor: position of the first row.
        skipped: receives skipped documents and rows.
    Raises:
        CorpusError: the corpus is malformed, or an id is outside the vocabulary.
    """
    packer = Packer(settings, tokenizer, cursor, Skipped() if skipped is None else skipped)
    written = (render_document(document, tokenizer, settings) for document in documents)
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
        sides = [(document, document.rejected) for document in batch]
        as_text = [side for pair in sides for side in pair if side is not None and side.is_tokenised]
        try:
            encoded = encode_texts([model_text(document) for document in as_text], tokenizer)
        except CorpusError as err:
            raise CorpusError(f"{as_text[0].where} and following documents: {err}") from err
        tokens = {id(document): text for document, text in zip(as_text, encoded, strict=True)}
        for document, rejected in sides:
            yield from packer.feed(document, tokens.get(id(document)), tokens.get(id(rejected)))
    yield from packer.finish()


def render_document(document: Document, tokenizer: Tokenizer, settings: CorpusSettings) -> Document:
    """Return a document as the text that the model reads, with the spans that carry loss.

    Raises:
        CorpusError: the tokenizer has no chat template, or no answer could carry the requested loss.
    """
    text, answers, loss_on = document.text, document.answers, settings.loss_on
    if document.rejected is not None:
        if loss_on in ("assistant", "all"):
            raise CorpusError(f"corpus.loss_on: got {loss_on}, but DPO compares completions; remove it")
        loss_on, completions = "completion", settings.model_copy(update={"loss_on": "completion"})
        rejected = render_document(document.rejected, tokenizer, completions)
        document = replace(document, rejected=rejected)
        if rejected.unusable:
            return replace(document, left_out=rejected.left_out, unusable=True)
    left_out = () if document.rejected is None else document.rejected.left_out
    if document.conversation is not None:
        if (fault := document.conversation.fault) is not None:
            return replace(document, left_out=((fault, document.where),), unusable=True)
        try:
            chat = tokenizer.render(document.conversation, last_only=loss_on == "completion")
        except UnusableConversationError as err:
            return replace(document, left_out=((err.reason, f"{document.where}: {err}"),), unusable=True)
        except ModelError as err:
            raise CorpusError(f"{document.where}: {err}") from err
        text, answers = chat.text, chat.spans
        left_out += tuple((reason, f"{document.where}: turn {k}") for reason, k in chat.unwritten)
    if answers is None or text is None:
        if loss_on in ("assistant", "completion"):
            raise CorpusError(
                f"{document.where}: has no answer to carry loss; corpus.loss_on: got {loss_on}, expected all"
            )
        return document
    return replace(document, text=text, answers=((0, len(text)),) if loss_on == "all" else answers, left_out=left_out)


def model_text(document: Document) -> ModelText:
    """Return the text of a rendered document, for `encode_texts`."""
    kind: Literal["text", "pair", "chat"] = "text" if document.answers is None else "pair"
    return ModelText(str(document.text), document.answers, "chat" if document.conversation is not None else kind)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive tokens of one document."""

    document: Document
    first: int  # position of the first token in the document
    total: int  # tokens of the whole document
    ids: I32
    begin: int = 0  # start character in the document
    ends: I64 | None = None  # exclusive end character of each token
    loss_mask: Bool | None = None  # tokens that carry loss; None: all

    @property
    def span(self) -> tuple[int, int, int] | None:
        """Return document index, start and end character, or None without text or offsets."""
        text = self.document.text
        if text is None:
            return None
        if len(self.ids) == self.total:
            return self.document.index, 0, len(text)
        return None if self.ends is None else (self.document.index, self.begin, int(self.ends[-1]))

    def cut(self, first: int, stop: int) -> "_Piece":
        """Return the tokens [first, stop); characters between two tokens belong to the second."""
        ids, at, loss_mask = self.ids[first:stop], self.first + first, self.loss_mask
        if loss_mask is not None:
            loss_mask = loss_mask[first:stop]
        if self.ends is None:
            return _Piece(self.document, at, self.total, ids, loss_mask=loss_mask)
        begin = int(self.ends[first - 1]) if first else self.begin
        return _Piece(self.document, at, self.total, ids, begin, self.ends[first:stop], loss_mask)


class Packer:
    """Packs documents into rows; documents are fed in order, with their tokens.

    Args:
        tokenizer: provides special tokens, the size of the vocabulary, and the text of rows of token ids.
        cursor: position of the first row; the first document must be `cursor.document`.
    """

    def __init__(self, settings: CorpusSettings, tokenizer: Tokenizer, cursor: Cursor, skipped: Skipped) -> None:
        assert settings.max_length is not None
        self._settings, self._length = settings, settings.max_length
        self._tokenizer, self._skipped, self._resume = tokenizer, skipped, cursor
        self._prefix = np.array(tokenizer.prefix_ids, dtype=np.int32)  # special tokens at the beginning of every row
        if len(self._prefix) >= self._length:
            raise CorpusError(
                f"corpus.max_length: got {self._length}, expected more than the {len(self._prefix)} special tokens "
                "that begin every text"
            )
        self._waiting: list[_Piece] = []  # pending pieces of a stream: less than a row between two documents
        self._n_waiting = 0  # number of their tokens
        self._named_rows = Counter({cursor.document: cursor.n_named_rows})
        self._next_document = cursor.document

    def feed(
        self, document: Document, tokens: TokenizedText | None, rejected: TokenizedText | None = None
    ) -> Iterator[Row]:
        """Yield the rows that `document` completes.

        Args:
            tokens: tokens of its text; None if it has token ids or no text.
            rejected: tokens of the rejected side of a preference pair.
        Raises:
            CorpusError: an id outside the vocabulary.
        """
        self._next_document = document.index + 1
        for reason, example in document.left_out:
            self._skipped.add(reason, document.name, example)
        if document.unusable:
            return
        if document.input_ids is not None:
            yield from self.finish(document.index)
            fault = None if len(document.input_ids) else "empty"
            ids, mask, ends_N = document.input_ids.astype(np.int64), None, None
        else:
            is_empty = tokens is None or len(tokens.ids) == tokens.n_prefix
            fault = None if not is_empty else "whitespace" if document.text and tokens is None else "empty"
            ids = np.array((), dtype=np.int64) if tokens is None else tokens.ids
            mask, ends_N = (None, None) if tokens is None else (tokens.loss_mask, tokens.ends)
        if fault is not None:
            self._skipped.add(fault, document.name, document.where)
            return
        whole = self._piece(document, ids, mask, ends_N)
        if document.rejected is not None:
            if rejected is None:
                self._skipped.add("empty", document.name)
                return
            other = self._piece(document.rejected, rejected.ids, rejected.loss_mask, rejected.ends)
            yield from self._pair(whole, other)
            return
        if document.input_ids is None and mask is not None:
            yield from self._with_answers(whole)
            return
        start = self._resume.token if document.index == self._resume.document else 0
        if document.input_ids is None and self._settings.packing == "concat":
            yield from self._concat(whole.cut(start, whole.total))
            return
        # `document` packing, and all documents of token ids: rows of max_length; a short last row is skipped
        most, shortest = self._settings.max_rows_per_document, self._settings.shortest_end
        if shortest is None:
            shortest = int(MIN_END_SHARE * self._length)
        prefix = self._prefix if document.input_ids is None else self._prefix[:0]
        first = start
        for number in count(self._named_rows[document.index]):
            if first >= whole.total:
                return
            if number == most:
                self._skipped.add("cut", document.name)
                return
            if first and whole.total - first < shortest:
                self._skipped.add("short_end", f"{document.name}#{number}")
                return
            capacity = self._length - (len(prefix) if first else 0)
            yield from self._row([whole.cut(first, first + capacity)], document.index, first + capacity, prefix=prefix)
            first += capacity

    def _piece(self, document: Document, ids: I64, mask: Bool | None, ends_N: I64 | None) -> "_Piece":
        """Return the tokens of a document, with the special tokens that end a text."""
        vocab_size = self._tokenizer.vocab_size
        bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
        if bad.size:
            raise CorpusError(
                f"{document.where}: row {document.name!r} has the token id {ids[bad[0]]} at position "
                f"{bad[0]}, outside the vocabulary of {vocab_size} (0 to {vocab_size - 1}); "
                "use the tokenizer that the model was trained with"
            )
        if document.input_ids is None:
            if document.conversation is None:  # chat templates write their own end-of-turn tokens
                suffix = np.array(self._tokenizer.suffix_ids, dtype=np.int64)
                if np.array_equal(ids[len(ids) - len(suffix) :], suffix):  # the text ends with it already
                    suffix = suffix[:0]
                ids = np.concatenate([ids, suffix])
                if mask is not None:
                    mask = np.concatenate([mask, np.full(len(suffix), mask.any())])
                if ends_N is not None:
                    ends_N = np.concatenate([ends_N, np.full(len(suffix), ends_N[-1])])
            if ends_N is not None:  # the last token, which may be EOS, extends to the end of the text
                ends_N[-1] = len(document.text or "")
        return _Piece(document, 0, len(ids), ids.astype(np.int32), ends=ends_N, loss_mask=mask)

    def finish(self, next_document: int | None = None) -> Iterator[Row]:
        """Yield the last, short row of a stream, at its end or before a document of token ids."""
        if self._waiting:
            pieces, self._waiting, self._n_waiting = self._waiting, [], 0
            next_document = self._next_document if next_document is None else next_document
            yield from self._row(pieces, next_document, 0, prefix=self._prefix)

    def _with_answers(self, whole: _Piece) -> Iterator[Row]:
        """Yield a text whose answers carry loss as one row.

        If it is too long, the row ends with the last answer, and the beginning is cut off after the special tokens. An
        answer whose beginning is cut off carries no loss; the end of an answer longer than a row is cut off.
        """
        if (fitted := self._fit(whole)) is not None:
            yield from self._row([fitted[0]], whole.document.index + 1, 0, prefix=fitted[1])

    def _fit(self, whole: _Piece) -> tuple[_Piece, I32] | None:
        """Return a text whose answers carry loss as at most a row, and its special tokens; None if no loss is left."""
        document, loss_mask = whole.document, whole.loss_mask
        assert loss_mask is not None
        if self._settings.packing == "concat":
            raise CorpusError(
                f"{document.where}: conversations are one row each; corpus.packing: got concat, expected document"
            )
        loss_mask[:1] = False
        if not loss_mask.any():
            self._skipped.add("no_loss", document.name, document.where)
            return None
        prefix = self._prefix[: 0 if self._n_prefix(whole) else None]
        if whole.total > self._length:
            self._skipped.add("cut_begin", document.name)
            capacity = self._length - len(prefix)
            last = int(np.flatnonzero(loss_mask)[-1])
            before = int(np.flatnonzero(~loss_mask[:last])[-1])  # the token before the last answer
            first = min(max(0, last + 1 - capacity), before)
            loss_mask[first : first + int(np.argmin(loss_mask[first:]))] = (
                False  # the remainder of an answer whose beginning is cut off
            )
            whole = whole.cut(first, first + capacity)
        return whole, prefix

    def _pair(self, chosen: _Piece, rejected: _Piece) -> Iterator[Row]:
        """Yield a preference pair as one row: the tokens of its chosen side, then those of the other one."""
        sides = []
        for side in (chosen, rejected):
            if (fitted := self._fit(side)) is None:
                return
            sides.append(list(self._row([fitted[0]], chosen.document.index + 1, 0, prefix=fitted[1])))
        if not all(sides):
            return
        (first,), (second,) = sides
        masks = [np.arange(row.n_tokens) > 0 if row.loss_mask is None else row.loss_mask for row in (first, second)]
        yield replace(
            first,
            n_tokens=first.n_tokens + second.n_tokens,
            input_ids=np.concatenate([first.input_ids, second.input_ids]),
            loss_mask=np.concatenate(masks),
            split=first.n_tokens,
            spans=None,
        )

    def _n_prefix(self, piece: _Piece) -> int:
        """Return how many special tokens are added to a row that begins with `piece`."""
        return 0 if np.array_equal(piece.ids[: len(self._prefix)], self._prefix) else len(self._prefix)

    def _concat(self, piece: _Piece) -> Iterator[Row]:
        """Append the tokens of a document to the stream, and yield its rows of exactly max_length."""
        if len(piece.ids):
            self._waiting.append(piece)
            self._n_waiting += len(piece.ids)
        while self._waiting and self._n_waiting >= (missing := self._length - self._n_prefix(self._waiting[0])):
            row = []
            self._n_waiting -= missing
            while missing:
                head = self._waiting.pop(0)
                if len(head.ids) > missing:
                    self._waiting.insert(0, head.cut(missing, len(head.ids)))
                    head = head.cut(0, missing)
                row.append(head)
                missing -= len(head.ids)
            # Less than a row was pending before this document, so the remainder after a row belongs to it.
            remainder = self._waiting[0].first if self._waiting else piece.total
            yield from self._row(row, piece.document.index, remainder, prefix=self._prefix)

    def _row(self, pieces: list[_Piece], next_document: int, next_token: int, *, prefix: I32) -> Iterator[Row]:
        """Yield a row unless it is too short; it is named after its largest document, the first one on a tie.

        Args:
            prefix: special tokens at the beginning, added if missing.
        """
        main = max(pieces, key=lambda piece: len(piece.ids))
        document = main.document
        ordinal = self._named_rows[document.index]
        self._named_rows = Counter({index: n for index, n in self._named_rows.items() if index >= document.index})
        self._named_rows[document.index] += 1
        row_id = document.name + (f"#{ordinal}" if ordinal else "")
        ids, loss_mask = np.concatenate([piece.ids for piece in pieces]), main.loss_mask
        if not np.array_equal(ids[: len(prefix)], prefix):
            ids = np.concatenate([prefix, ids])
            loss_mask = (
                None if loss_mask is None else np.concatenate([np.zeros(len(prefix), dtype=np.bool_), loss_mask])
            )
        if loss_mask is not None and loss_mask[1:].all():
            loss_mask = None
        if len(ids) < MIN_ROW_TOKENS:
            self._skipped.add("one_token", row_id)
            return
        spans = [span for piece in pieces if (span := piece.span) is not None]
        yield Row(
            row_id=row_id,
            doc_id=document.doc_id,
            document=document.index,
            n_tokens=len(ids),
            input_ids=ids,
            loss_mask=loss_mask,
            snippet=self._snippet(main),
            labels=document.labels,
            ignored=tuple(sorted({name for piece in pieces for name in piece.document.ignored})),
            next_cursor=Cursor(next_document, next_token, self._named_rows[next_document]),
            spans=tuple(spans) if len(spans) == len(pieces) else None,
        )

    def _snippet(self, piece: _Piece) -> str:
        """Return the beginning of the text of a piece for display, with white space folded."""
        n_chars, document = self._settings.snippet_chars, piece.document
        if not n_chars:
            return ""
        if piece.span is None:  # no text, or a part of one whose tokenizer reports no offsets
            (text,) = self._tokenizer.decode([piece.ids[:n_chars].tolist()])
        elif document.conversation is not None and len(piece.ids) == piece.total:
            text = str(document.conversation)
        else:
            _, begin, end = piece.span
            text = str(document.text)[begin : min(end, begin + 4 * n_chars)]
        return " ".join(text[: 4 * n_chars].split())[:n_chars]


def row_bytes(row_id: str, input_ids: I32, loss_mask: Bool | None, split: int | None = None) -> bytes:
    """Return the bytes of a row for the fingerprint of the corpus: name, tokens, loss mask and chosen tokens."""
    name = row_id.encode()
    sizes = len(name).to_bytes(4, "little") + name + len(input_ids).to_bytes(4, "little")
    mask = b"" if loss_mask is None or loss_mask[1:].all() else b"loss_mask" + np.packbits(loss_mask).tobytes()
    side = b"" if split is None else b"split" + split.to_bytes(4, "little")
    return sizes + input_ids.astype("<i4", copy=False).tobytes() + mask + side
