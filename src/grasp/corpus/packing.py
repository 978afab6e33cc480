"""Pack documents into rows, each document separately.

With L = `max_length`, and p special tokens (usually BOS) at the beginning of every row, the rows of a text are its
tokens [0, L), [L, 2 L - p), [2 L - p, 3 L - 2 p), ...: the first p tokens of a document are the special ones, later
rows get p of their own. A short last row is skipped. Token ids of the corpus are split alike, with p = 0.

A conversation, a prompt with its completion, and a preference pair are one row each (`_Packer._pack_answers`,
`_Packer._pack_preference_pair`). Each row has the cursor at which the next row begins; packing from a cursor gives the
same rows as packing from the start, so that packing can be resumed at any row. Start with `pack`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Final, Literal

import numpy as np

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
    n_named_rows: int = 0  # number of earlier rows of the document


START: Final = Cursor()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training sequence."""

    row_id: str
    doc_id: str
    document: int  # index of its document
    n_tokens: int
    snippet: str
    labels: Mapping[str, Label]
    ignored: tuple[str, ...]  # columns of its document that cannot be labels
    next_cursor: Cursor
    input_ids: I32
    loss_mask: Bool | None = None  # tokens that carry loss; None: all but the first
    # document index, start and end character of its text; None if the tokenizer reports no offsets
    span: tuple[int, int, int] | None = None
    split: int | None = None  # of a preference pair: number of tokens of the chosen side, which precede the others


@dataclass(slots=True)
class Skipped:
    """Skipped documents, rows and parts of them: counts by reason (`grasp.text.SKIPPED`), first ids and examples."""

    counts: dict[str, int] = field(default_factory=dict)
    ids: dict[str, list[str]] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)  # file and line, and the error

    def add(self, reason: str, name: str, example: str = "") -> None:
        """Count a skipped document, row or part of one; only the first ids and examples are stored."""
        self.extend({reason: 1}, {reason: [name]}, {reason: [example]} if example else {})

    def extend(
        self, counts: Mapping[str, int], ids: Mapping[str, Sequence[str]], examples: Mapping[str, Sequence[str]]
    ) -> None:
        """Add counts, ids and examples by reason, e.g. those of another `Skipped`."""
        for reason, number in counts.items():
            self.counts[reason] = self.counts.get(reason, 0) + number
        for listed, new, limit in ((self.ids, ids, MAX_LISTED_IDS), (self.examples, examples, MAX_LISTED_EXAMPLES)):
            for reason, names in new.items():
                entries = listed.setdefault(reason, [])
                entries.extend(names[: limit - len(entries)])

    def drain(self) -> "Skipped":
        """Return everything that was added since the last call, and reset."""
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
    packer = _Packer(settings, tokenizer, cursor, Skipped() if skipped is None else skipped)
    batch: list[Document] = []
    n_chars = 0
    for document in chain(documents, [None]):
        if document is not None:
            batch.append(render_document(document, tokenizer, settings))
            n_chars += len(batch[-1].text or "")
            if len(batch) < ENCODE_DOCUMENTS and n_chars < ENCODE_CHARS:
                continue
        sides = [side for whole in batch for side in (whole, whole.rejected) if side is not None]
        with_text = [side for side in sides if side.needs_tokenizer]
        texts = []
        for side in with_text:
            kind: Literal["text", "pair", "chat"] = "text" if side.answers is None else "pair"
            texts.append(ModelText(str(side.text), side.answers, kind if side.conversation is None else "chat"))
        tokens = {id(side): text for side, text in zip(with_text, encode_texts(texts, tokenizer), strict=True)}
        for whole in batch:  # `rejected` is None unless it is a preference pair
            yield from packer.rows_of(whole, tokens.get(id(whole)), tokens.get(id(whole.rejected)))
        batch, n_chars = [], 0


def render_document(document: Document, tokenizer: Tokenizer, settings: CorpusSettings) -> Document:
    """Return a document as the text that the model reads, with the spans that carry loss.

    A conversation that cannot be rendered is marked as unusable, with the reason in `left_out`.

    Raises:
        CorpusError: the tokenizer has no chat template, or no answer could carry the requested loss.
    """
    if document.rejected is None:
        return _render_side(document, tokenizer, settings.loss_on)
    rejected = _render_side(document.rejected, tokenizer, "completion")
    if rejected.unusable:
        return replace(document, rejected=rejected, left_out=rejected.left_out, unusable=True)
    chosen = _render_side(replace(document, rejected=rejected), tokenizer, "completion")
    return chosen if chosen.unusable else replace(chosen, left_out=rejected.left_out + chosen.left_out)


def _render_side(document: Document, tokenizer: Tokenizer, loss_on: str | None) -> Document:
    """Render a document, or one side of a preference pair; see `render_document`."""
    text, loss_spans, left_out = document.text, document.answers, document.left_out
    if document.conversation is not None:
        if (fault := document.conversation.fault) is not None:
            return replace(document, left_out=((fault, document.location),), unusable=True)
        try:
            chat = tokenizer.render(document.conversation, last_only=loss_on == "completion")
        except UnusableConversationError as err:
            return replace(document, left_out=((err.reason, f"{document.location}: {err}"),), unusable=True)
        except ModelError as err:
            raise CorpusError(f"{document.location}: {err}") from err
        text, loss_spans = chat.text, chat.spans
        left_out = tuple((reason, f"{document.location}: turn {k}") for reason, k in chat.unwritten)
    if loss_spans is None or text is None:
        if loss_on == "completion" or (loss_on == "assistant" and document.loss_mask is None):
            raise CorpusError(
                f"{document.location}: has no answer to carry loss; corpus.loss_on: got {loss_on}, expected all"
            )
        return replace(document, loss_mask=None) if loss_on == "all" else document
    answers = ((0, len(text)),) if loss_on == "all" else loss_spans
    return replace(document, text=text, answers=answers, left_out=left_out)


class _Packer:
    """Split documents with tokens into rows; see `pack` for the arguments."""

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

    def rows_of(
        self, document: Document, tokens: TokenizedText | None, rejected: TokenizedText | None
    ) -> Iterator[Row]:
        """Yield the rows of a document."""
        for reason, example in document.left_out:
            self._skipped.add(reason, document.name, example)
        if document.unusable:
            return
        has_tokens = tokens is not None and len(tokens.ids) > tokens.n_prefix
        if not (has_tokens if document.input_ids is None else len(document.input_ids)):
            is_space = document.input_ids is None and tokens is None and bool(document.text)
            self._skipped.add("whitespace" if is_space else "empty", document.name, document.location)
            return
        whole = self._whole_document(document, tokens)
        if whole.loss_mask is None:
            yield from self._split_document(document, whole)
            return
        sides = [whole]
        if document.rejected is not None:
            if rejected is None:
                self._skipped.add("empty", document.name)
                return
            sides.append(self._whole_document(document.rejected, rejected))
        for side in sides:
            assert side.loss_mask is not None
            side.loss_mask[:1] = False  # nothing predicts the first token
            if not side.loss_mask.any():
                self._skipped.add("no_loss", document.name, document.location)
                return
        yield from (
            self._pack_answers(document, whole) if len(sides) == 1 else self._pack_preference_pair(document, sides)
        )

    def _split_document(self, document: Document, whole: TokenizedText) -> Iterator[Row]:
        """Yield a text or token ids as rows of max_length tokens; a short last row is skipped."""
        n_tokens, max_rows = len(whole.ids), self._settings.max_rows_per_document
        min_end_tokens = self._settings.shortest_end
        if min_end_tokens is None:
            min_end_tokens = int(MIN_END_SHARE * self._length)
        prefix = self._prefix if document.input_ids is None else self._prefix[:0]
        resume = self._resume if document.index == self._resume.document else START
        start = resume.token
        for ordinal in count(resume.n_named_rows):
            if start >= n_tokens:
                return
            if ordinal == max_rows:
                self._skipped.add("cut", document.name)
                return
            if start and n_tokens - start < min_end_tokens:
                self._skipped.add("short_end", f"{document.name}#{ordinal}")
                return
            # The tokens of the document begin with the prefix already; later rows need room for their own.
            stop = start + self._length - (len(prefix) if start else 0)
            yield from self._build_row(document, whole, start, stop, prefix, Cursor(document.index, stop, ordinal + 1))
            start = stop

    def _whole_document(self, document: Document, tokens: TokenizedText | None) -> TokenizedText:
        """Return all tokens of a document, with the special tokens that end a text."""
        unchecked: I32 | I64 | None = document.input_ids if tokens is None else tokens.ids
        assert unchecked is not None
        vocab_size = self._tokenizer.vocab_size
        bad = np.flatnonzero((unchecked < 0) | (unchecked >= vocab_size))
        if bad.size:
            raise CorpusError(
                f"{document.location}: row {document.name!r} has the token id {unchecked[bad[0]]} at position "
                f"{bad[0]}, outside the vocabulary of {vocab_size} (0 to {vocab_size - 1}); "
                "use the tokenizer that the model was trained with"
            )
        if tokens is None:
            return TokenizedText(unchecked.astype(np.int32, copy=False), loss_mask=document.loss_mask)
        ids, loss_mask, ends = tokens.ids, tokens.loss_mask, tokens.ends
        if document.conversation is None:  # chat templates write their own end-of-turn tokens
            suffix = np.array(self._tokenizer.suffix_ids, dtype=np.int64)
            if np.array_equal(ids[len(ids) - len(suffix) :], suffix):  # the text ends with it already
                suffix = suffix[:0]
            ids = np.concatenate([ids, suffix])
            if loss_mask is not None:
                loss_mask = np.concatenate([loss_mask, np.full(len(suffix), loss_mask.any())])
            if ends is not None:
                ends = np.concatenate([ends, np.full(len(suffix), ends[-1])])
        if ends is not None:  # the last token, which may be EOS, extends to the end of the text
            ends[-1] = len(document.text or "")
        return TokenizedText(ids.astype(np.int32), tokens.n_prefix, loss_mask, ends)

    def _pack_answers(self, document: Document, whole: TokenizedText) -> Iterator[Row]:
        """Yield a text whose answers carry loss as one row.

        If it is too long, the row ends with the last answer, and the beginning is cut off after the special tokens. An
        answer whose beginning is cut off carries no loss; the end of an answer longer than a row is cut off.
        """
        assert whole.loss_mask is not None
        loss_mask, start, stop = whole.loss_mask, 0, len(whole.ids)
        has_prefix = np.array_equal(whole.ids[: len(self._prefix)], self._prefix)
        prefix = self._prefix if has_prefix else self._prefix[:0]
        if len(whole.ids) > self._length:
            self._skipped.add("cut_begin", document.name)
            capacity = self._length - len(prefix)
            last_loss = int(np.flatnonzero(loss_mask)[-1])
            before_answer = int(np.flatnonzero(~loss_mask[:last_loss])[-1])  # the token before the last answer
            start = min(max(0, last_loss + 1 - capacity), before_answer)
            # An answer that began before `start` has lost its beginning: its remaining tokens carry no loss.
            remainder = int(np.argmin(loss_mask[start:]))
            loss_mask[start : start + remainder] = False
            stop = start + capacity
        yield from self._build_row(document, whole, start, stop, prefix, Cursor(document.index + 1))

    def _pack_preference_pair(self, document: Document, sides: Sequence[TokenizedText]) -> Iterator[Row]:
        """Yield a preference pair as one row: the tokens of the chosen side, then those of the rejected side.

        Both sides keep their prompt, as in TRL (`keep_start`): an answer that is too long loses its end, and a pair
        whose prompt leaves no room for an answer is skipped.
        """
        n_prompt_tokens = [int(np.argmax(np.asarray(side.loss_mask))) for side in sides]
        if max(n_prompt_tokens) >= self._length:
            self._skipped.add("long_prompt", document.name, document.location)
            return
        rows: list[Row] = []
        for side, whole in zip((document, document.rejected), sides, strict=True):
            assert side is not None
            if len(whole.ids) > self._length:
                self._skipped.add("cut_end", document.name)
            rows += self._build_row(side, whole, 0, self._length, self._prefix[:0], Cursor(document.index + 1))
        masks = [np.arange(row.n_tokens) > 0 if row.loss_mask is None else row.loss_mask for row in rows]
        yield replace(
            rows[0],
            n_tokens=sum(row.n_tokens for row in rows),
            input_ids=np.concatenate([row.input_ids for row in rows]),
            loss_mask=np.concatenate(masks),
            split=rows[0].n_tokens,
            span=None,
        )

    def _build_row(
        self, document: Document, whole: TokenizedText, start: int, stop: int, prefix: I32, next_cursor: Cursor
    ) -> Iterator[Row]:
        """Yield the tokens [start, stop) of a document as a row, unless it is too short."""
        ids, span = whole.ids[start:stop].astype(np.int32, copy=False), None
        loss_mask = None if whole.loss_mask is None else whole.loss_mask[start:stop]
        is_whole = len(ids) == len(whole.ids)
        if document.text is not None and is_whole:
            span = document.index, 0, len(document.text)
        elif document.text is not None and whole.ends is not None:
            # characters between two tokens belong to the second
            start_char = int(whole.ends[start - 1]) if start else 0
            span = document.index, start_char, int(whole.ends[start:stop][-1])
        text, n_chars = "", self._settings.snippet_chars
        if n_chars and span is None:  # no text, or a part of one whose tokenizer reports no offsets
            (text,) = self._tokenizer.decode([ids[:n_chars].tolist()])
        elif document.conversation is not None and is_whole:
            text = str(document.conversation)
        elif span is not None:
            _, begin, end = span
            text = str(document.text)[begin : min(end, begin + 4 * n_chars)]
        ordinal = max(0, next_cursor.n_named_rows - 1)  # among the rows of the document
        row_id = document.name + (f"#{ordinal}" if ordinal else "")
        if not np.array_equal(ids[: len(prefix)], prefix):
            ids = np.concatenate([prefix, ids])
            if loss_mask is not None:
                loss_mask = np.concatenate([np.zeros(len(prefix), dtype=np.bool_), loss_mask])
        if loss_mask is not None and loss_mask[1:].all():
            loss_mask = None
        if len(ids) < MIN_ROW_TOKENS:
            self._skipped.add("one_token", row_id)
            return
        yield Row(
            row_id=row_id,
            doc_id=document.doc_id,
            document=document.index,
            n_tokens=len(ids),
            input_ids=ids.copy(),  # not a view, which would keep the tokens of the whole document in memory
            loss_mask=loss_mask,
            snippet=" ".join(text[: 4 * n_chars].split())[:n_chars],
            labels=document.labels,
            ignored=document.ignored,
            next_cursor=next_cursor,
            span=span,
        )
