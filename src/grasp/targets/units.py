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

    `choices` are the candidate continuations as they would be appended (so `choices[gold] == completion`);
    where the candidates of a task differ in the prompt instead (winogrande), they are the candidate prompts.
    A conversation, which ends with an answer, has no prompt and no completion until a tokenizer writes it out; what the
    chat template writes after the answer is then its `ending`.
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
    ending: str = ""


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
    pool: tuple[Unit, ...] = ()  # all units that there are, also those that were not drawn
    unwritten: Skipped = field(default_factory=Skipped)  # what a chat template leaves out of units that it writes

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
        """Return the same with every conversation as text: its last answer is the completion, the rest the prompt.

        Raises:
            TargetError: one that the tokenizer's chat template cannot write out, or whose answer it marks in several
                spans; the message names the unit.
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

        Which tokens carry loss is said in `grasp.corpus.encoding`, of units as of rows. A prompt that is too long loses
        its beginning, but for the special tokens in front. An empty one is replaced by BOS or EOS, so that the
        completion's first token has a context.

        Raises:
            TargetError: a completion has no tokens or does not fit, a token id lies outside the vocabulary,
                or a prompt is empty and there is no token to stand in. The message names the unit.
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
    """Return the tokens of a unit up to its last one with loss, with as much of its prompt as there is room for."""
    where = f"unit {unit.unit_id!r} of {unit.target}"
    assert tokens.loss_mask is not None
    scored = np.flatnonzero(tokens.loss_mask)
    if not unit.completion or not len(scored):
        raise TargetError(f"{where}: the completion {unit.completion!r} has no tokens, expected at least one")
    first, ids = int(scored[0]), tokens.ids if unit.loss_on == "all" else tokens.ids[: scored[-1] + 1]
    if first == 0:
        context = np.array(tokenizer.context_ids, dtype=np.int64)
        if not len(context):
            raise TargetError(f"{where}: the prompt is empty and the tokenizer has no end-of-text token to stand in")
        first, ids = len(context), np.concatenate([context, ids])
    prefix = tokenizer.prefix_ids  # the tokenizer puts it in front, or the text has it
    n_front = min(first, len(prefix)) if tuple(ids[: len(prefix)].tolist()) == prefix else 0
    n_prefix = n_front if len(ids) > max_length else 0
    n_scored = len(ids) - first
    if n_scored + max(1, n_prefix) > max_length:
        raise TargetError(
            f"{where}: the completion has {n_scored} tokens, expected at most {max_length - max(1, n_prefix)} beside "
            "one token of context; raise targets.max_length or exclude the unit"
        )
    ids = np.concatenate([ids[:n_prefix], ids[n_prefix:][-(max_length - n_prefix) :]])
    outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if outside.size:
        raise TargetError(
            f"{where}: token id {outside[0]} lies outside the model's vocabulary of {tokenizer.vocab_size};"
            " the tokenizer does not belong to the model"
        )
    return UnitTokens(ids.astype(np.int32), max(1, n_front) if unit.loss_on == "all" else len(ids) - n_scored)
