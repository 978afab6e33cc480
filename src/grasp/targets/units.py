"""Units: the scored elements of a target, as text and as tokens."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from grasp.arrays import I32
from grasp.corpus.conversations import Conversation
from grasp.errors import ModelError, TargetError

if TYPE_CHECKING:
    from grasp.corpus.documents import Tokenizer

LossOn = Literal["completion", "assistant", "all"]


@dataclass(frozen=True, slots=True)
class Unit:
    """One scored element: the loss of `completion` after `prompt`.

    `choices` are the candidate continuations as they would be appended (so `choices[gold] == completion`);
    where the candidates of a task differ in the prompt instead (winogrande), they are the candidate prompts.
    A conversation, which ends with an answer, has no prompt and no completion until a tokenizer writes it out.
    """

    unit_id: str
    target: str
    prompt: str
    completion: str
    loss_on: LossOn = "completion"
    choices: tuple[str, ...] = ()
    gold: int | None = None
    support: str | None = None
    image_hash: str | None = None  # of a trusted picture's pixels
    conversation: Conversation | None = None


@dataclass(frozen=True, slots=True)
class UnitTokens:
    """Tokens of one unit; the labels that carry loss are ``input_ids[first:]``, first >= 1."""

    input_ids: I32
    first: int


@dataclass(frozen=True)
class UnitSet:
    """All units of a run, target after target, in the order in which the targets were named."""

    units: tuple[Unit, ...]
    excluded: tuple[str, ...] = ()  # unit_ids that were named in `exclude_units` and found
    drawn_from: Mapping[str, int] = field(default_factory=dict)  # units that there are of each target

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(unit.target for unit in self.units))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of what is scored: ids, targets, texts and the tokens that carry loss, in order."""
        digest = hashlib.blake2b(digest_size=16)
        for unit in self.units:
            digest.update(repr((unit.unit_id, unit.target, unit.prompt, unit.completion, unit.loss_on)).encode())
        return digest.hexdigest()

    def written_out(self, tokenizer: "Tokenizer") -> "UnitSet":
        """The same with every conversation as text: its last answer is the completion, the rest the prompt.

        Raises:
            TargetError: one that the tokenizer's chat template cannot write out; the message names the unit.
        """
        units = []
        for unit in self.units:
            if unit.conversation is None:
                units.append(unit)
                continue
            try:
                text, ((start, stop),) = tokenizer.chat(unit.conversation, last_only=True)
            except ModelError as err:
                raise TargetError(f"unit {unit.unit_id!r} of {unit.target}: {err}") from err
            units.append(replace(unit, prompt=text[:start], completion=text[start:stop], conversation=None))
        return replace(self, units=tuple(units))

    def tokenize(self, tokenizer: "Tokenizer", max_length: int) -> list[UnitTokens]:
        """Prompt and completion encoded apart and joined, at most `max_length` tokens each.

        A prompt that is too long loses its beginning; an empty one is replaced by the end-of-text token, so
        that the completion's first token has a context.

        Raises:
            TargetError: a completion has no tokens or does not fit, a token id lies outside the vocabulary,
                or a prompt is empty and the tokenizer has no end-of-text token. The message names the unit.
        """
        prompts = tokenizer.encode([unit.prompt for unit in self.units])
        completions = tokenizer.encode([unit.completion for unit in self.units])
        tokens = []
        for unit, prompt, completion in zip(self.units, prompts, completions, strict=True):
            where = f"unit {unit.unit_id!r} of {unit.target}"
            if not completion:
                raise TargetError(f"{where}: the completion {unit.completion!r} has no tokens, expected at least one")
            if len(completion) >= max_length:
                raise TargetError(
                    f"{where}: the completion has {len(completion)} tokens, expected at most {max_length - 1}"
                    " beside one token of context; raise targets.max_length or exclude the unit"
                )
            before = prompt or ([] if tokenizer.eos_id is None else [tokenizer.eos_id])
            if not before:
                raise TargetError(
                    f"{where}: the prompt is empty and the tokenizer has no end-of-text token to stand in"
                )
            context = before[-(max_length - len(completion)) :]
            ids = np.asarray([*context, *completion], dtype=np.int64)
            outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
            if outside.size:
                raise TargetError(
                    f"{where}: token id {outside[0]} lies outside the model's vocabulary of {tokenizer.vocab_size};"
                    " the tokenizer does not belong to the model"
                )
            first = 1 if unit.loss_on == "all" else len(context)
            tokens.append(UnitTokens(ids.astype(np.int32), first))
        return tokens
