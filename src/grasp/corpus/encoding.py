"""Encode texts into token ids and loss masks, for rows and units.

A text is encoded once, as a whole; answers are not encoded separately from their prompts. Spans of characters are
mapped to tokens by the offsets that the tokenizer reports:

- A token carries loss if it contains a character of a span, e.g. its last one and a newline. This is the rule of
  `return_assistant_tokens_mask` in transformers, which trainers use.
- A token may contain the end of a prompt and the beginning of its completion. If its part of the prompt is white space,
  it belongs to the completion, as in lm-evaluation-harness. Otherwise the prompt has as many tokens as when encoded
  alone, as in lm-evaluation-harness and TRL. At least one token belongs to the completion.

Special tokens are those that the checkpoint's tokenizer adds around a text, but never twice; chat templates write their
own. Start with `encode_texts`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from grasp.arrays import I32, I64, Bool
from grasp.corpus.conversations import Conversation, Span
from grasp.errors import CorpusError


class Tokenizer(Protocol):
    """Interface of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Return the size of the model's vocabulary; ids must be in [0, vocab_size)."""

    @property
    def eos_id(self) -> int | None:
        """Return the id of the end-of-text token, if any."""

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Return the ids that begin every text, usually BOS or none."""

    @property
    def suffix_ids(self) -> tuple[int, ...]:
        """Return the ids that end every document, usually EOS; if empty, documents are joined without a separator."""

    @property
    def context_ids(self) -> tuple[int, ...]:
        """Return the ids used for an empty prompt: BOS, else EOS, as in lm-evaluation-harness."""

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return token ids of each text, without special tokens."""

    def encode_with_spans(self, texts: Sequence[str]) -> list[tuple[list[int], list[Span] | None]]:
        """Return the ids of `encode` and the characters of each token; None if the tokenizer reports none."""

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row of token ids."""

    def render(self, conversation: Conversation, *, last_only: bool = False) -> "RenderedChat":
        """Render a conversation with the model's chat template."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation rendered by its chat template.

    Attributes:
        spans: characters that carry loss: each answer with its end-of-turn token, or the marked parts of it.
        unwritten: parts of answers that the template omits: keys of `text.SKIPPED`, and turns.
    """

    text: str
    spans: tuple[Span, ...]
    unwritten: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelText:
    """A text as the model reads it.

    Attributes:
        loss_spans: characters that carry loss. Default: all.
        kind: `chat` has special tokens in the text; `pair` is a prompt with one span, its completion.
    """

    text: str
    loss_spans: tuple[Span, ...] | None = None
    kind: Literal["text", "pair", "chat"] = "text"


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Tokens of a text.

    Attributes:
        ids: (L,), with special tokens at the beginning, but not at the end.
        n_prefix: number of special tokens at the beginning.
        loss_mask: (L,), tokens that carry loss; None means all but the first.
        ends: (L,), exclusive end character of each token; None if the tokenizer reports no offsets.
    """

    ids: I32 | I64
    n_prefix: int = 0
    loss_mask: Bool | None = None
    ends: I64 | None = None


def encode_texts(texts: Sequence[ModelText], tokenizer: Tokenizer) -> list[TokenizedText]:
    """Encode texts, each as a whole, with masks of the tokens that carry loss.

    Raises:
        CorpusError: the tokenizer reports no offsets, and the boundary of an answer is ambiguous without them.
    """
    encoded = tokenizer.encode_with_spans([text.text for text in texts])
    tokenized = []
    for text, (ids, spans) in zip(texts, encoded, strict=True):
        mask = None if text.loss_spans is None else _loss_mask(text, ids, spans, tokenizer)
        prefix = () if text.kind == "chat" else tokenizer.prefix_ids
        if tuple(ids[: len(prefix)]) == prefix:  # the text contains them already
            prefix = ()
        front = np.zeros(len(prefix), dtype=np.int64)
        ends = None if spans is None else np.array([end for _, end in spans], dtype=np.int64)
        tokenized.append(
            TokenizedText(
                ids=np.array([*prefix, *ids], dtype=np.int64),
                n_prefix=len(prefix),
                loss_mask=None if mask is None else np.concatenate([front.astype(np.bool_), mask]),
                ends=None if ends is None else np.concatenate([front, ends]),
            )
        )
    return tokenized


def _loss_mask(text: ModelText, ids: list[int], spans: list[Span] | None, tokenizer: Tokenizer) -> Bool:
    """Return which tokens of a text contain a character of its spans, (L,)."""
    assert text.loss_spans is not None
    mask = np.zeros(len(ids), dtype=np.bool_)
    if not ids:
        return mask
    if spans is None:
        for start, stop in text.loss_spans:
            mask[slice(*(_count_tokens_before(text, char, ids, tokenizer) for char in (start, stop)))] = True
        return mask
    begin_L, end_L = np.array(spans, dtype=np.int64).T
    for start, stop in text.loss_spans:
        # A token [begin, end) shares a character with [start, stop) if end > start and begin < stop. Some tokenizers
        # trim white space from offsets: a token of white space alone has width 0, begin == end, and may be at the stop.
        mask |= (end_L > start) & ((begin_L < stop) | (end_L <= stop))
    if text.kind == "pair" and mask.any():
        ((prompt_end, _),) = text.loss_spans
        first = int(np.flatnonzero(mask)[0])
        if begin_L[first] < prompt_end and not text.text[begin_L[first] : prompt_end].isspace():
            (prompt_ids,) = tokenizer.encode([text.text[:prompt_end]])
            mask[: min(len(prompt_ids), len(ids) - 1)] = False
    return mask


def _count_tokens_before(text: ModelText, char: int, ids: list[int], tokenizer: Tokenizer) -> int:
    """Return the number of tokens before a character without offsets, by encoding the text up to it."""
    if char == len(text.text):
        return len(ids)
    before = text.text[:char]
    # White space at the end of a prompt may be part of the first token of its completion.
    encoded = tokenizer.encode((before, before.rstrip()) if text.kind == "pair" else (before,))
    for prompt_ids in encoded:
        if ids[: len(prompt_ids)] == prompt_ids:
            return len(prompt_ids)
    if text.kind == "pair":
        return min(len(encoded[0]), len(ids) - 1)
    raise CorpusError(
        "the tokenizer reports no offsets, and a token contains the end of a prompt and the beginning of its answer, "
        "or the end of an answer, so the boundary is ambiguous; use a fast tokenizer (tokenizer.json)"
    )
