"""Represent units, the scored elements of a target, as text (`Unit`) and as tokens (`UnitTokens`).

A unit has a prompt and a completion, its right answer. The utility of a unit, which is higher for a better model, is
minus the loss of the completion, or a margin or accuracy of the right answer over wrong ones (`grasp.targets.margins`).
`UnitSet` has all units of a run. Its main functions are `UnitSet.rendered`, which applies the chat template to
conversations, and `UnitSet.tokenize`. The last functions of the module store units in the unit table of an artifact.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from grasp.arrays import I32
from grasp.corpus.conversations import Conversation, UnusableConversationError
from grasp.corpus.encoding import ModelText, TokenizedText, encode_texts
from grasp.corpus.packing import Skipped
from grasp.errors import ModelError, TargetError
from grasp.text import skipped_lines

if TYPE_CHECKING:
    from grasp.corpus.encoding import Tokenizer

LossOn = Literal["completion", "assistant", "all"]
LOSS = "loss"  # the metric of a unit with one answer
MARGIN = "margin"  # the metric of a preference pair
PER_CHAR, PER_TOKEN = "_per_char", "_per_token"  # suffixes of metrics that normalise log-probabilities by length


@dataclass(frozen=True, slots=True)
class Unit:
    """One scored element: the loss of `completion` after `prompt`, or a margin between several answers.

    Attributes:
        unit_id: unique among the units of all targets.
        target: name of the target.
        prompt: text before the completion. `UnitSet.rendered` sets prompt and completion of a conversation.
        completion: the right answer.
        loss_on: tokens that carry loss; completion, or all of prompt and completion.
        choices: the candidate completions, as they would be appended to the prompt. If the candidates of a task differ
            in the prompt instead (winogrande), the candidate prompts.
        gold: position in `choices` of the completion, or of the prompt.
        changed_choices: number of choices from which white space was removed that not all of them have.
        support: a text with the evidence for the answer, which tasks like SciQ have.
        conversation: a conversation that ends with the right answer; None: the prompt is a text.
        ending: text that the chat template writes after the answer of a conversation.
        others: the wrong answers of a margin, each with its own prompt; empty if the utility is -loss.
        metric: loss, margin, margin_per_char, margin_per_token, or an accuracy (see `grasp.targets.margins`).
        weight: signed factor of the utility; not 1 in user-defined metrics.
    """

    unit_id: str
    target: str
    prompt: str
    completion: str
    loss_on: LossOn = "completion"
    choices: tuple[str, ...] = ()
    gold: int | None = None
    changed_choices: int = 0
    support: str | None = None
    conversation: Conversation | None = None
    ending: str = ""
    others: "tuple[Unit, ...]" = ()
    metric: str = LOSS
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class UnitTokens:
    """Tokens of one unit.

    Attributes:
        input_ids: tokens of prompt and completion, (L,).
        first: index of the first token that carries loss, at least 1: the model predicts ``input_ids[first:]``.
        others: the wrong answers of a margin.
        scale: factor from the mean loss of the answer to its negative log-probability, as the metric counts it.
        weight: signed factor of the utility.
        is_accuracy: whether the utility is 1 if the answer is more likely than all others, else 0.
    """

    input_ids: I32
    first: int
    others: "tuple[UnitTokens, ...]" = ()
    scale: float = 1.0
    weight: float = 1.0
    is_accuracy: bool = False

    @property
    def longest(self) -> int:
        """Return the number of tokens of the longest answer with its prompt."""
        return max(len(answer.input_ids) for answer in (self, *self.others))


@dataclass(frozen=True)
class UnitSet:
    """All units of a run, grouped by target in the order of the settings.

    Attributes:
        units: the units that were drawn.
        excluded: unit_ids of the setting `exclude_units` that exist.
        drawn_from: number of available units per target.
        pool: all available units, including those that were not drawn.
        unwritten: parts of units that are not scored: tools or reasoning that the chat template omits, and white space
            around single choices.
    """

    units: tuple[Unit, ...]
    excluded: tuple[str, ...] = ()
    drawn_from: Mapping[str, int] = field(default_factory=dict)
    pool: tuple[Unit, ...] = ()
    unwritten: Skipped = field(default_factory=Skipped)

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
            if unit.metric != LOSS or unit.weight != 1.0:
                others = [(other.prompt, other.completion) for other in unit.others]
                digest.update(repr((unit.metric, unit.weight, others)).encode())
        return digest.hexdigest()

    def rendered(self, tokenizer: "Tokenizer") -> "UnitSet":
        """Return the units with conversations rendered as text: the last answer is the completion.

        Args:
            tokenizer: tokenizer with the chat template.
        Raises:
            TargetError: the tokenizer's chat template rejects a conversation, or marks its answer in several spans; the
                message has the unit_id.
        """
        unwritten = Skipped()
        units = tuple(_render(unit, tokenizer, unwritten) for unit in self.units)
        for unit in units:
            for _ in range(unit.changed_choices):
                unwritten.add("choice_space", unit.unit_id, unit.unit_id)
        return replace(self, units=units, unwritten=unwritten)

    def tokenize(self, tokenizer: "Tokenizer", max_length: int, context: int | None = None) -> list[UnitTokens]:
        """Encode each unit as one text, prompt and completion together.

        `grasp.corpus.encoding` defines which tokens carry loss, for units as for rows. A prompt that is too long is
        truncated at its beginning, after special tokens, for both sides of a preference pair alike. An empty prompt is
        replaced by BOS or EOS, so that the first token of the completion has a context.

        Args:
            tokenizer: tokenizer of the model.
            max_length: maximum number of tokens of a unit, `targets.max_length`.
            context: context length of the model, which also limits units; None if there is no limit.
        Raises:
            TargetError: a completion has no tokens or is too long; a token id is outside the vocabulary; a prompt is
                empty and the tokenizer has neither BOS nor EOS. The message has the unit_id.
        """
        texts = []
        answers = [answer for unit in self.units for answer in (unit, *unit.others)]
        for unit in answers:
            begin = len(unit.prompt)
            span = begin, begin + len(unit.completion)
            text = unit.prompt + unit.completion + unit.ending
            texts.append(ModelText(text, (span,), "pair" if unit.conversation is None else "chat"))
        encoded = encode_texts(texts, tokenizer)
        pairs = zip(answers, encoded, strict=True)  # the right answer of a unit, then its wrong ones
        unit_tokens = []
        for unit in self.units:
            sides = list(islice(pairs, 1 + len(unit.others)))
            n_scored = [0 if tokens.loss_mask is None else int(tokens.loss_mask.sum()) for _, tokens in sides]
            # Both sides of a preference pair keep the same prompt. Each choice keeps what fits, as in
            # lm-evaluation-harness.
            n_longest = 0 if unit.choices else max(n_scored)
            right, *wrong = (
                _truncate(answer, tokens, tokenizer, max_length, context, max(0, n_longest - n))
                for (answer, tokens), n in zip(sides, n_scored, strict=True)
            )
            if unit.metric != LOSS and not unit.metric.endswith(PER_TOKEN):
                per_char = unit.metric.endswith(PER_CHAR)
                # characters without surrounding white space, as lm-evaluation-harness counts them
                right, *wrong = (
                    replace(
                        side,
                        scale=(len(side.input_ids) - side.first) / (len(answer.completion.strip()) if per_char else 1),
                    )
                    for side, (answer, _) in zip((right, *wrong), sides, strict=True)
                )
            is_accuracy = unit.metric.startswith("accuracy")
            unit_tokens.append(replace(right, others=tuple(wrong), weight=unit.weight, is_accuracy=is_accuracy))
        return unit_tokens


def _render(unit: Unit, tokenizer: "Tokenizer", unwritten: Skipped) -> Unit:
    """Return a unit with its conversations rendered as text, and count what the chat template omits in `unwritten`."""
    others = tuple(_render(other, tokenizer, unwritten) for other in unit.others)
    if unit.conversation is None:
        return replace(unit, others=others) if others else unit
    try:
        chat = tokenizer.render(unit.conversation, last_only=True)
        fault = (
            f": the chat template marks its answer in {len(chat.spans)} spans with text between them, expected one; "
            "use a template that marks it as one (--tokenizer)"
        ) * (len(chat.spans) > 1)
    except UnusableConversationError as err:
        (reason_text,) = skipped_lines({err.reason: 1}, {err.reason: [str(err)]})
        fault = f" is one of the {reason_text.removeprefix('1 ')}"
    except ModelError as err:
        fault = f": {err}"
    if fault:
        raise TargetError(f"unit {unit.unit_id!r} of {unit.target}{fault}")
    for reason, _ in chat.unwritten:
        unwritten.add(reason, unit.unit_id, unit.unit_id)
    ((start, stop),), text = chat.spans, chat.text
    return replace(unit, prompt=text[:start], completion=text[start:stop], ending=text[stop:], others=others)


def _truncate(
    unit: Unit, tokens: TokenizedText, tokenizer: "Tokenizer", max_length: int, context: int | None, n_reserved: int
) -> UnitTokens:
    """Return the tokens of a unit up to the last one that carries loss, with as much of the prompt as fits.

    The prompt loses its beginning, but not the special tokens that the tokenizer puts before texts (`prefix_ids`).
    Room is left for `n_reserved` tokens, since another answer is longer.
    """
    location, remedy = f"unit {unit.unit_id!r} of {unit.target}", "increase targets.max_length"
    if context is not None and context <= max_length:
        max_length, remedy = context, f"the context of the model is {context} tokens; use a model with a longer one"
    assert tokens.loss_mask is not None
    scored = np.flatnonzero(tokens.loss_mask)
    context_ids = np.array(tokenizer.context_ids, dtype=np.int64)  # BOS or EOS
    fault = ""
    if not unit.completion or not len(scored):
        fault = f"the completion {unit.completion!r} has no tokens, expected at least one"
    elif scored[0] == 0 and not len(context_ids):
        fault = "the prompt is empty and the tokenizer has no end-of-text token to replace it"
    if fault:
        raise TargetError(f"{location}: {fault}")
    # `first` is the first token of the completion; a chat template may write tokens without loss after it
    first, ids = int(scored[0]), tokens.ids if unit.loss_on == "all" else tokens.ids[: scored[-1] + 1]
    if first == 0:  # a token needs a context to be predicted from
        first, ids = len(context_ids), np.concatenate([context_ids, ids])
    prefix = tokenizer.prefix_ids  # prepended by the tokenizer, or part of the text
    n_prefix = min(first, len(prefix)) if tuple(ids[: len(prefix)].tolist()) == prefix else 0
    capacity = max_length - n_reserved
    n_before = n_prefix if len(ids) > capacity else 0  # tokens before the part that is removed
    n_scored = len(ids) - first
    if n_scored + max(1, n_before) > capacity:
        fault = (
            f"the completion has {n_scored + n_reserved} tokens, expected at most {max_length - max(1, n_before)} in "
            f"addition to one token of context; {remedy}, shorten the completion, or exclude the unit "
            "(targets.exclude_units)"
        )
    ids = np.concatenate([ids[:n_before], ids[n_before:][-(capacity - n_before) :]])
    outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if outside.size and not fault:
        fault = (
            f"token id {outside[0]} is outside the model's vocabulary of {tokenizer.vocab_size}; the tokenizer does "
            "not belong to the model"
        )
    if fault:
        raise TargetError(f"{location}: {fault}")
    return UnitTokens(ids.astype(np.int32), max(1, n_prefix) if unit.loss_on == "all" else len(ids) - n_scored)


METRIC_COLUMN = "metric"
WEIGHT_COLUMN = "weight"
ANSWERS_COLUMN = "answers"  # of a unit with a metric: scale and tokens of the right answer, then of each wrong one
_TEXT_FIELDS = {"prompt": pa.string(), "completion": pa.string()}
_TOKEN_FIELDS = {"scale": pa.float64(), "first": pa.int32(), "input_ids": pa.list_(pa.int32())}


def unit_columns(units: Sequence[Unit], tokens: Sequence[UnitTokens]) -> dict[str, pa.Array]:
    """Return the columns of a unit table that units with a metric or a weight need; none for other units.

    Args:
        units: the units.
        tokens: their tokens.
    """
    columns: dict[str, pa.Array] = {}
    if any(unit.weight != 1.0 for unit in units):
        columns[WEIGHT_COLUMN] = pa.array([unit.weight for unit in units], pa.float64())
    if all(unit.metric == LOSS for unit in units):
        return columns
    answers = [
        None
        if unit.metric == LOSS
        else [
            {name: getattr(answer, name) for name in _TEXT_FIELDS}
            | {name: getattr(side, name) for name in _TOKEN_FIELDS}
            for answer, side in zip((unit, *unit.others), (unit_tokens, *unit_tokens.others), strict=True)
        ]
        for unit, unit_tokens in zip(units, tokens, strict=True)
    ]
    columns[METRIC_COLUMN] = pa.array([unit.metric for unit in units], pa.string())
    columns[ANSWERS_COLUMN] = pa.array(answers, pa.list_(pa.struct({**_TEXT_FIELDS, **_TOKEN_FIELDS})))
    return columns


def stored_units(table: pa.Table, loss_on: LossOn) -> tuple[Unit, ...]:
    """Return the units of a unit table.

    Args:
        table: a unit table, with the columns of `unit_columns` if it has metrics.
        loss_on: tokens that carry loss, which the table does not store.
    """
    records = table.select(["unit_id", "target", "prompt", "completion"]).to_pylist()
    units = [Unit(**record, loss_on=loss_on) for record in records]
    for k, (metric, weight, answers) in enumerate(_metrics(table)):
        others = tuple(
            replace(units[k], prompt=answer["prompt"], completion=answer["completion"]) for answer in answers[1:]
        )
        units[k] = replace(units[k], others=others, metric=metric, weight=weight)
    return tuple(units)


def stored_tokens(table: pa.Table, token_ids: Sequence[Sequence[int]]) -> list[UnitTokens]:
    """Return the tokens of the units of a unit table.

    Args:
        table: a unit table.
        token_ids: token ids of the units, of which the last `n_positions` (a column of the table) carry loss.
    """
    counts, units = table["n_positions"].to_pylist(), []
    for ids, count, (_, weight, answers) in zip(token_ids, counts, _metrics(table), strict=True):
        if answers:
            right, *wrong = (
                UnitTokens(np.asarray(answer["input_ids"], dtype=np.int32), answer["first"], scale=answer["scale"])
                for answer in answers
            )
        else:
            right, wrong = UnitTokens(np.asarray(ids, dtype=np.int32), len(ids) - count), []
        units.append(replace(right, others=tuple(wrong), weight=weight))
    return units


def _metrics(table: pa.Table) -> list[tuple[str, float, list[dict[str, Any]]]]:
    """Return metric, weight and answers of each unit; answers are empty if the metric is the loss."""
    columns = [
        table[name].to_pylist() if name in table.column_names else [None] * len(table)
        for name in (METRIC_COLUMN, WEIGHT_COLUMN, ANSWERS_COLUMN)
    ]
    # null in tables that were joined: a unit without the column
    return [
        (metric or LOSS, 1.0 if weight is None else weight, answers or [])
        for metric, weight, answers in zip(*columns, strict=True)
    ]
