"""Encode texts into token ids and loss masks: the one function behind rows and units alike.

A text is encoded once, as a whole; no answer is encoded apart from its prompt. Spans of characters become tokens by the
offsets that the tokenizer reports:

- A token carries loss if it holds a character of a span, its last one together with a newline, say. So does the mask of
  transformers (`return_assistant_tokens_mask`) that trainers use.
- A token may hold the end of a prompt and the beginning of its completion. If what it holds of the prompt is white
  space, it belongs to the completion, as lm-evaluation-harness moves that space. Otherwise as many tokens belong to the
  prompt as it has when encoded alone: so count lm-evaluation-harness and TRL. At least one token is of the completion.

Special tokens are those that the checkpoint's tokenizer puts around a text, never twice; chat templates write their
own. Start with `encode_texts`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from grasp.arrays import I64, Bool
from grasp.corpus.conversations import Conversation, Span
from grasp.errors import CorpusError


class Tokenizer(Protocol):
    """What the corpus asks of a tokenizer; handed in by the caller, never loaded here."""

    @property
    def vocab_size(self) -> int:
        """Size of the model's vocabulary; ids must lie in [0, vocab_size)."""

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-text token; none: there is none."""

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids that begin every text, BOS in most tokenizers that have any."""

    @property
    def suffix_ids(self) -> tuple[int, ...]:
        """Ids that end every document, EOS in most tokenizers; none: documents are joined without a mark."""

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Ids that stand in for an empty prompt: BOS, else EOS, as in lm-evaluation-harness."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids of each text, without special tokens."""

    def encode_with_spans(self, texts: Sequence[str]) -> list[tuple[list[int], list[Span] | None]]:
        """Return the ids of `encode` and the characters of each token; None if the tokenizer reports none."""

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of token ids."""

    def render(self, conversation: Conversation, *, last_only: bool = False) -> "RenderedChat":
        """Write a conversation by the model's chat template."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation as its chat template writes it.

    Attributes:
        spans: characters that carry loss: each answer with the mark at its end, or the parts of it that are marked.
        unwritten: what the template left out of answers of which it wrote something, keys of `text.SKIPPED` with turns.
    """

    text: str
    spans: tuple[Span, ...]
    unwritten: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelText:
    """A text as the model reads it.

    Attributes:
        loss_spans: characters that carry loss; None: all.
        kind: a `chat` has its special tokens in the text; a `pair` is a prompt with the one span of its completion.
    """

    text: str
    loss_spans: tuple[Span, ...] | None = None
    kind: Literal["text", "pair", "chat"] = "text"


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Tokens of a text.

    Attributes:
        ids: (L,), special tokens in front included, none at the end.
        n_prefix: how many of them the tokenizer put in front of the text.
        loss_mask: (L,), tokens that carry loss; None: all but the first.
        ends: (L,), the character after each token; None if the tokenizer does not report it.
    """

    ids: I64
    n_prefix: int
    loss_mask: Bool | None
    ends: I64 | None


def encode_texts(texts: Sequence[ModelText], tokenizer: Tokenizer) -> list[TokenizedText]:
    """Encode texts, each as a whole, and say which tokens carry loss.

    Raises:
        CorpusError: the tokenizer reports no offsets, and the border of an answer cannot be found without them.
    """
    encoded = tokenizer.encode_with_spans([text.text for text in texts])
    return [_tokenized(text, ids, spans, tokenizer) for text, (ids, spans) in zip(texts, encoded, strict=True)]


def _tokenized(text: ModelText, ids: list[int], spans: list[Span] | None, tokenizer: Tokenizer) -> TokenizedText:
    mask = None if text.loss_spans is None else _loss_mask(text, ids, spans, tokenizer)
    prefix = () if text.kind == "chat" else tokenizer.prefix_ids
    if tuple(ids[: len(prefix)]) == prefix:  # the text has them in it
        prefix = ()
    front = np.zeros(len(prefix), dtype=np.int64)
    return TokenizedText(
        ids=np.array([*prefix, *ids], dtype=np.int64),
        n_prefix=len(prefix),
        loss_mask=None if mask is None else np.concatenate([front.astype(np.bool_), mask]),
        ends=None if spans is None else np.concatenate([front, np.array([end for _, end in spans], dtype=np.int64)]),
    )


def _loss_mask(text: ModelText, ids: list[int], spans: list[Span] | None, tokenizer: Tokenizer) -> Bool:
    """Return which tokens of a text, (L,), hold a character of its spans."""
    assert text.loss_spans is not None
    mask = np.zeros(len(ids), dtype=np.bool_)
    if not ids:
        return mask
    if spans is None:
        for start, stop in text.loss_spans:
            mask[_tokens_before(text, start, ids, tokenizer) : _tokens_until(text, stop, ids, tokenizer)] = True
        return mask
    begin, end = np.array(spans, dtype=np.int64).T
    for start, stop in text.loss_spans:
        mask |= (end > start) & ((begin < stop) | (end <= stop))  # trimmed offsets of white space have no width
    if text.kind == "pair" and mask.any():
        ((border, _),) = text.loss_spans
        first = int(np.flatnonzero(mask)[0])
        if begin[first] < border and not text.text[begin[first] : border].isspace():
            mask[: _length_of_prompt(text.text[:border], ids, tokenizer)] = False
    return mask


def _length_of_prompt(prompt: str, ids: list[int], tokenizer: Tokenizer) -> int:
    """Return how many tokens a prompt has when encoded alone, at most all but one of the whole text's `ids`."""
    return min(len(tokenizer.encode([prompt])[0]), len(ids) - 1)


def _tokens_before(text: ModelText, place: int, ids: list[int], tokenizer: Tokenizer) -> int:
    """Return how many tokens stand before a character, without offsets: those of the text up to it, if they agree."""
    prompt = text.text[:place]
    for known in (prompt, prompt.rstrip()) if text.kind == "pair" else (prompt,):
        (before,) = tokenizer.encode([known])
        if ids[: len(before)] == before:
            return len(before)
    if text.kind == "pair":
        return _length_of_prompt(prompt, ids, tokenizer)
    raise CorpusError(
        "the tokenizer reports no offsets, and a token holds the end of a prompt and the beginning of its answer, so "
        "which tokens are the answer cannot be told; use a fast tokenizer (tokenizer.json)"
    )


def _tokens_until(text: ModelText, place: int, ids: list[int], tokenizer: Tokenizer) -> int:
    """Return how many tokens reach up to a character, without offsets; the token that holds it counts."""
    if place == len(text.text):
        return len(ids)
    (until,) = tokenizer.encode([text.text[:place]])
    agree = next((k for k, (token, other) in enumerate(zip(ids, until, strict=False)) if token != other), len(until))
    return agree + (agree < len(until))
