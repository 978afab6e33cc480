"""Represent units, the scored elements of a target, as text and as tokens. Start with `UnitSet.tokenize`."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from grasp.arrays import I32
from grasp.corpus.conversations import Conversation, UnusableConversationError
from grasp.corpus.encoding import ModelText, TokenizedText, encode_texts
from grasp.corpus.packing import Skipped
from grasp.errors import CorpusError, ModelError, TargetError
from grasp.text import skipped_lines

if TYPE_CHECKING:
    from grasp.corpus.encoding import Tokenizer

LossOn = Literal["completion", "assistant", "all"]


@dataclass(frozen=True, slots=True)
class Unit:
    """One scored element: the loss of `completion` after `prompt`.

    `choices` are the candidate continuations as they would be appended, so `choices[gold] == completion`. If the
    candidates of a task differ in the prompt instead (winogrande), they are the candidate prompts.

    A conversation ends with an answer. Its prompt and completion are set by `UnitSet.rendered`, and `ending` is the
    text that the chat template writes after the answer.
    """

    unit_id: str
    target: str
    prompt: str
    completion: str
    loss_on: LossOn = "completion"
    choices: tuple[str, ...] = ()
    gold: int | None = None
    support: str | None = None
    image_hash: str | None = None  # hash of the pixels of a trusted image
    conversation: Conversation | None = None
    ending: str = ""


@dataclass(frozen=True, slots=True)
class UnitTokens:
    """Tokens of one unit; the labels that carry loss are ``input_ids[first:]``, first >= 1."""

    input_ids: I32
    first: int


@dataclass(frozen=True)
class UnitSet:
    """All units of a run, grouped by target in the order of the settings."""

    units: tuple[Unit, ...]
    excluded: tuple[str, ...] = ()  # unit_ids of `exclude_units` that exist
    drawn_from: Mapping[str, int] = field(default_factory=dict)  # number of available units per target
    pool: tuple[Unit, ...] = ()  # all available units, including those that were not drawn
    unwritten: Skipped = field(default_factory=Skipped)  # parts of units that the chat template omits

    @property
    def targets(self) -> tuple[str, ...]:
        """Return the names of the targets, in order."""
        return tuple(dict.fromkeys(unit.target for unit in self.units))

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of ids, targets, texts and losses of the units, in order."""
        digest = hashlib.blake2b(digest_size=16)
        for unit in self.units:
            digest.update(repr((unit.unit_id, unit.target, unit.prompt, unit.completion, unit.loss_on)).encode())
        return digest.hexdigest()

    def rendered(self, tokenizer: "Tokenizer") -> "UnitSet":
        """Render conversations as text: the last answer is the completion, the text before it the prompt.

        Raises:
            TargetError: the tokenizer's chat template rejects a conversation, or marks its answer in several spans; the
                message has the unit_id.
        """
        units = []
        unwritten = Skipped()
        for unit in self.units:
            if unit.conversation is None:
                units.append(unit)
                continue
            try:
                chat = tokenizer.render(unit.conversation, last_only=True)
            except UnusableConversationError as err:
                (why,) = skipped_lines({err.reason: 1}, {err.reason: [str(err)]})
                raise TargetError(
                    f"unit {unit.unit_id!r} of {unit.target} is one of the {why.removeprefix('1 ')}"
                ) from err
            except ModelError as err:
                raise TargetError(f"unit {unit.unit_id!r} of {unit.target}: {err}") from err
            if len(chat.spans) > 1:
                raise TargetError(
                    f"unit {unit.unit_id!r} of {unit.target}: the chat template marks its answer in {len(chat.spans)} "
                    "spans with text between them, expected one; use a template that marks it as one (--tokenizer)"
                )
            for reason, _ in chat.unwritten:
                unwritten.add(reason, unit.unit_id, unit.unit_id)
            ((start, stop),), text = chat.spans, chat.text
            units.append(replace(unit, prompt=text[:start], completion=text[start:stop], ending=text[stop:]))
        return replace(self, units=tuple(units), unwritten=unwritten)

    def tokenize(self, tokenizer: "Tokenizer", max_length: int) -> list[UnitTokens]:
        """Encode each unit as one text, prompt and completion together, in at most `max_length` tokens.

        `grasp.corpus.encoding` defines which tokens carry loss, for units as for rows. A prompt that is too long is
        truncated at its beginning, after special tokens. An empty prompt is replaced by BOS or EOS, so that the first
        token of the completion has a context.

        Raises:
            TargetError: a completion has no tokens or is too long; a token id is outside the vocabulary; a prompt is
                empty and the tokenizer has neither BOS nor EOS. The message has the unit_id.
        """
        texts = []
        for unit in self.units:
            begin = len(unit.prompt)
            span = begin, begin + len(unit.completion)
            text = unit.prompt + unit.completion + unit.ending
            texts.append(ModelText(text, (span,), "pair" if unit.conversation is None else "chat"))
        try:
            encoded = encode_texts(texts, tokenizer)
        except CorpusError as err:
            raise TargetError(f"targets: {err}") from err
        return [_cut(unit, tokens, tokenizer, max_length) for unit, tokens in zip(self.units, encoded, strict=True)]


def _cut(unit: Unit, tokens: TokenizedText, tokenizer: "Tokenizer", max_length: int) -> UnitTokens:
    """Return the tokens of a unit up to the last one that carries loss, with as much of the prompt as fits."""
    where = f"unit {unit.unit_id!r} of {unit.target}"
    assert tokens.loss_mask is not None
    scored = np.flatnonzero(tokens.loss_mask)
    if not unit.completion or not len(scored):
        raise TargetError(f"{where}: the completion {unit.completion!r} has no tokens, expected at least one")
    first, ids = int(scored[0]), tokens.ids if unit.loss_on == "all" else tokens.ids[: scored[-1] + 1]
    if first == 0:
        context = np.array(tokenizer.context_ids, dtype=np.int64)
        if not len(context):
            raise TargetError(f"{where}: the prompt is empty and the tokenizer has no end-of-text token to replace it")
        first, ids = len(context), np.concatenate([context, ids])
    prefix = tokenizer.prefix_ids  # prepended by the tokenizer, or part of the text
    n_front = min(first, len(prefix)) if tuple(ids[: len(prefix)].tolist()) == prefix else 0
    n_prefix = n_front if len(ids) > max_length else 0
    n_scored = len(ids) - first
    if n_scored + max(1, n_prefix) > max_length:
        raise TargetError(
            f"{where}: the completion has {n_scored} tokens, expected at most {max_length - max(1, n_prefix)} in "
            "addition to one token of context; increase targets.max_length or exclude the unit"
        )
    ids = np.concatenate([ids[:n_prefix], ids[n_prefix:][-(max_length - n_prefix) :]])
    outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if outside.size:
        raise TargetError(
            f"{where}: token id {outside[0]} is outside the model's vocabulary of {tokenizer.vocab_size};"
            " the tokenizer does not belong to the model"
        )
    return UnitTokens(ids.astype(np.int32), max(1, n_front) if unit.loss_on == "all" else len(ids) - n_scored)
