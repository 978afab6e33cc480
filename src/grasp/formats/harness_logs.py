"""Parse sample logs of lm-evaluation-harness (`--log_samples`) to units.

A record (a sample) has a document (`doc`, a question), a `target` (its gold answer), and the `arguments` of the
requests that the harness sent to the model:

    multiple choice     (context, continuation) of every choice; the target is the position or the text of the gold one
    log-likelihood      one (context, continuation)
    rolling             one (text,), which is scored completely
    generation          one (context, settings); no continuation was scored, so the target is appended

Newer versions write the arguments as `{"gen_args_0": {"arg_0": ..., "arg_1": ...}}`, the target as `str(target)`, and
one record per filter of the answers.

The text of a target can be ambiguous: "2" is a position or a text, "['a', 'b']" a list or a text. All documents of a
task use the same encoding. It is therefore inferred from the whole log: it must fit every document, and if several
encodings do, it must agree with the accuracy that the harness logged. So `read` has three steps:

    1. parse each record, to a unit if its target is not ambiguous, else to a `_MultipleChoice` or a `_Generation`
    2. `resolve` the gold answers of all documents of a task together
    3. convert each document to a unit (`to_unit`)
"""

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import isnan
from typing import Any, NamedTuple, TypeVar

from grasp.corpus.conversations import FAULTS, conversation_in
from grasp.errors import TargetError, at
from grasp.targets.units import LossOn, Unit
from grasp.text import parse_json

LOG_NAME = re.compile(r"samples_(?P<task>.+?)(?:_\d{4}-\d\d-\d\dT.*)?")  # samples_<task>_<time>.jsonl
_SHOWN = 60  # characters of a value in a message
# metrics of tasks whose target consists of tests or rules instead of an answer (humaneval, mbpp, ifeval)
_NO_ANSWER = re.compile(r"pass(?:@|_at_)|prompt_level_|schema_compliance")
_OPTIONS_FIELD = re.compile(r"choice|option|ending", re.IGNORECASE)  # names of fields with choices
_REMEDY = "write its questions as `prompt` and `completion`"
# Files of harnesses that do not contain the scored requests: the fields of their records, and what to use instead.
_NOT_SCORED = {
    ("doc_id", "prompt_0", "truth"): "a write-out of lm-evaluation-harness 0.3 joins prompt and answer, so the scored "
    "text is unknown; log with --log_samples of version 0.4 or later",
    ("doc_id", "model_output", "metrics"): "predictions of olmes have no prompts; use the -requests.jsonl file, which "
    "--save-raw-requests true writes",
}

Arguments = tuple[Any, ...]  # of one request: (context, continuation), (text,) or (context, settings)
T = TypeVar("T")


class _Prediction(NamedTuple):
    """The most likely choice by the logged likelihoods, and whether the harness counted it as correct."""

    position: int
    is_correct: bool


def claims(record: Mapping[str, Any]) -> str:
    """Return why a record is one of a harness, with or without the requests that it scored."""
    if record.get("doc") is not None and record.get("arguments") is not None:
        return "it has `doc` and `arguments`, as sample logs of lm-evaluation-harness"
    names = next((names for names in _NOT_SCORED if record.keys() >= set(names)), None)
    return f"it has {', '.join(names)}, as files of harnesses without requests" if names else ""


def read(records: Iterable[tuple[str, Mapping[str, Any]]], task: str, loss_on: LossOn) -> list[Unit]:
    """Convert the documents of a log to units; unit_id is ``<task>:<doc_id>``.

    Args:
        records: locations and fields of the records.
        task: target of records without a field `task`.
        loss_on: tokens of the units that carry loss.
    Raises:
        TargetError: the scored text or the gold answer of a record is unknown (the message has file and line), or a
            document occurs twice with different content.
    """
    samples: list[tuple[str, Unit | _MultipleChoice | _Generation]] = []
    for position, (location, record) in enumerate(records):
        with at(location):
            if reason := next((why for names, why in _NOT_SCORED.items() if record.keys() >= set(names)), None):
                raise TargetError(reason)
            if not claims(record):
                raise TargetError("has no `doc` and `arguments`, expected a sample like the preceding records")
            samples.append((location, _parse_sample(record, location, task, position, loss_on)))
    for sample_type in (_MultipleChoice, _Generation):
        samples_by_task: dict[str, list[Any]] = {}
        for _, sample in samples:
            if isinstance(sample, sample_type):
                samples_by_task.setdefault(sample.unit.target, []).append(sample)
        for task_samples in samples_by_task.values():
            sample_type.resolve(task_samples)
    units: dict[str, Unit] = {}
    for location, sample in samples:
        with at(location, TargetError):
            unit = sample if isinstance(sample, Unit) else sample.to_unit()
        first = units.setdefault(unit.unit_id, unit)  # the harness logs a document once per filter
        names = [field.name for field in fields(Unit)]
        if differing := [name for name in names if getattr(unit, name) != getattr(first, name)]:
            raise TargetError(
                f"{location}: document {unit.unit_id!r} occurs twice and differs in {', '.join(differing)}; expected "
                "the log of one task, with one record per document and filter"
            )
    return list(units.values())


def _parse_sample(
    record: Mapping[str, Any], location: str, task: str, position: int, loss_on: LossOn
) -> "Unit | _MultipleChoice | _Generation":
    """Parse a record: to a unit if its requests have one continuation, else to a sample that is resolved later."""
    try:
        requests = [tuple(_ordered_values(request)) for request in _ordered_values(record["arguments"])]
        if not all(requests) or not requests:
            raise ValueError("no requests, or a request without arguments")
    except (TypeError, ValueError) as err:
        raise TargetError(
            f"arguments: got {str(record['arguments'])[:_SHOWN]}, expected the requests of a sample"
        ) from err
    if media := next((request[2] for request in requests if len(request) > 2), None):
        raise TargetError(
            f"arguments: got {media!r:.{_SHOWN}} in addition to text; expected a context and a "
            "continuation, images and audio are not supported"
        )
    record_task = record.get("task")
    name = record_task if isinstance(record_task, str) and record_task else task
    doc_id = position if record.get("doc_id") is None else record["doc_id"]
    unit = Unit(f"{name}:{doc_id}", name, "", "", loss_on)
    context, *rest = requests[0]
    if len(requests) == 1 and not rest and isinstance(context, str):  # rolling
        return replace(unit, completion=_require_text(context))
    if rest and not isinstance(rest[0], str):  # generation: settings in the place of a continuation
        return _Generation.parse(record, location, unit, context)
    fault = ""
    if not rest:
        fault = f"got {context!r:.{_SHOWN}}, expected (context, continuation)"
    elif any(len(request) != 2 or not all(isinstance(part, str) for part in request) for request in requests):
        fault = "expected the context and the continuation of every request as text"
    elif "acc_mutual_info" in record and not any(request[0] for request in requests):
        fault = "all contexts are empty, so requests for acc_mutual_info cannot be distinguished"
    if fault:
        raise TargetError(f"arguments: {fault}")
    # For the metric `acc_mutual_info` every choice is scored a second time, without context: up to version 0.4.3 after
    # each request, later after all requests. So half of the requests have a context. If another share has, all requests
    # are conditional, some with an empty context.
    positions = [k for k, request in enumerate(requests) if request[0] != ""]
    if 2 * len(positions) != len(requests):
        positions = list(range(len(requests)))
    pairs = [requests[k] for k in positions]  # (context, continuation) of each choice
    if len(pairs) == 1:  # log-likelihood
        return replace(unit, prompt=pairs[0][0], completion=_require_text(pairs[0][1]))
    return _MultipleChoice.parse(location, unit, pairs, record.get("target"), _parse_prediction(record, positions))


def _ordered_values(group: Any) -> list[Any]:
    """Return the values of a list, or of `{name_0: ...}` by number, without null: an empty cell of a table."""
    if isinstance(group, Mapping):
        group = [group[name] for name in sorted(group, key=lambda name: int(str(name).rpartition("_")[2]))]
    if not isinstance(group, list | tuple):
        raise TypeError(type(group).__name__)
    return [value for value in group if value is not None]


def _require_text(text: str) -> str:
    """Return a completion; raise an error if it is blank."""
    if not text.strip():
        raise TargetError(f"completion: got {text!r}, expected text to score")
    return text


@dataclass(slots=True)
class _MultipleChoice:
    """A document with one request per choice. Gold choices are positions of them."""

    location: str
    unit: Unit  # without its prompt, completion and choices
    pairs: Sequence[Arguments]  # context and continuation of each choice
    target: str
    by_number: tuple[int, ...]  # gold, if a number is a position, and any other target the text of a choice
    by_text: tuple[int, ...]  # gold, if every target is the text of a choice
    predicted: _Prediction | None
    gold: tuple[int, ...] = ()  # set by `resolve`; the first one is scored

    @classmethod
    def parse(
        cls, location: str, unit: Unit, pairs: Sequence[Arguments], target: Any, predicted: _Prediction | None
    ) -> "_MultipleChoice":
        """Return a document, with the gold choices by both encodings."""
        texts = [continuation for _, continuation in pairs]
        value = _parse_literal(target) if isinstance(target, str) else target
        numbers = value if isinstance(value, list) else [value]  # of all correct choices
        are_positions = all(isinstance(number, int) and 0 <= number < len(pairs) for number in numbers)
        positions = tuple(map(int, numbers)) if are_positions else ()
        if len(set(texts)) > 1:
            # a number that is not a text (True, or an integer in older logs) is a position
            by_text = () if isinstance(target, int) else _find_choices(target, texts)
            by_number = positions or by_text
        elif positions and not _find_choices(target, texts):  # the choices are contexts, and the target is the position
            by_number = by_text = positions
        else:  # the choices are contexts, and the target is the text of the one continuation (winogrande)
            # the prediction if it is correct, else the other one of two choices
            by_number = by_text = ()
            if predicted is not None and predicted.is_correct:
                by_number = by_text = (predicted.position,)
            elif predicted is not None and len(pairs) == 2:
                by_number = by_text = (1 - predicted.position,)
            if not by_text:
                raise TargetError(
                    f"target: got {target!r:.{_SHOWN}}, which follows all {len(pairs)} contexts, and `acc` "
                    f"and `filtered_resps` do not determine the correct context; {_REMEDY}"
                )
        return cls(location, unit, pairs, str(target), by_number, by_text, predicted)

    @staticmethod
    def resolve(samples: "Sequence[_MultipleChoice]") -> None:
        """Set `gold` of all documents of a task, whose targets are encoded alike: by number or by text."""
        if invalid := next((sample for sample in samples if not sample.by_number), None):
            raise TargetError(
                f"{invalid.location}: target: got {invalid.target!r:.{_SHOWN}}, expected the number or the text of one "
                f"of its {len(invalid.pairs)} requests"
            )
        # By each encoding, the gold choices of all documents. An encoding must fit all documents.
        encodings = [[sample.by_number for sample in samples], [sample.by_text for sample in samples]]
        encodings = [encoding for encoding in encodings if all(encoding)]
        # If the encodings disagree on a document, the logged accuracies of all documents must select one encoding.
        differing = [k for k in range(len(samples)) if len({encoding[k][0] for encoding in encodings}) > 1]
        if differing:
            encodings = [
                encoding
                for encoding in encodings
                if all(
                    sample.predicted is None or (sample.predicted.position in gold) == sample.predicted.is_correct
                    for sample, gold in zip(samples, encoding, strict=True)
                )
            ]
            if len(encodings) != 1:
                sample = samples[differing[0]]
                number, text = (sample.pairs[gold[0]][1] for gold in (sample.by_number, sample.by_text))
                raise TargetError(
                    f"{sample.location}: target: got {sample.target!r:.{_SHOWN}}, which is the number of {number!r} "
                    f"and the text of {text!r}, and `acc` and `filtered_resps` do not resolve the ambiguity; {_REMEDY}"
                )
        for sample, gold in zip(samples, encodings[0], strict=True):
            sample.gold = gold

    def to_unit(self) -> Unit:
        """Return the document as a unit, with the gold choice as its completion; other gold ones are no choices."""
        first, others = self.gold[0], {*self.gold[1:]} - {self.gold[0]}
        contexts, texts = zip(*(pair for k, pair in enumerate(self.pairs) if k not in others), strict=True)
        gold = first - sum(k < first for k in others)
        choices = texts if len(set(contexts)) == 1 else contexts
        completion = _require_text(texts[gold])
        return replace(self.unit, prompt=contexts[gold], completion=completion, choices=choices, gold=gold)


def _find_choices(target: Any, texts: Sequence[str]) -> tuple[int, ...]:
    """Return the positions of the choices with the text of a target, or with one of its texts if it is a list.

    All choices may have the same delimiter before the text.
    """
    value = _parse_literal(target) if isinstance(target, str) else target
    are_texts = isinstance(value, list) and all(isinstance(text, str) for text in value)
    answers = value if isinstance(target, list) or (are_texts and value) else [target]
    positions: list[int] = []
    for answer in answers:
        if isinstance(answer, str) and answer.strip():
            equal = [k for k, text in enumerate(texts) if text.strip() == answer.strip()]
            positions += equal or [
                k
                for k, text in enumerate(texts)
                if text.endswith(answer) and all(other.startswith(text.removesuffix(answer)) for other in texts)
            ]
    return tuple(dict.fromkeys(positions))


def _parse_prediction(record: Mapping[str, Any], positions: Sequence[int]) -> _Prediction | None:
    """Return the prediction by the requests at `positions`; None without log-likelihoods or an accuracy of 0 or 1."""
    try:
        accuracy = float(record["acc"])
        answers = record.get("filtered_resps") or [answer[0] for answer in record["resps"]]
        likelihoods = [float(answers[k][0]) for k in positions]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    if accuracy not in (0.0, 1.0) or any(isnan(value) for value in likelihoods):
        return None
    return _Prediction(likelihoods.index(max(likelihoods)), accuracy == 1.0)


@dataclass(slots=True)
class _Generation:
    """A document whose answer was generated."""

    location: str
    unit: Unit  # without its completion
    turns: list[Mapping[str, Any]] | None  # messages of a chat; None: the prompt of the unit is a text
    target: str
    answers: tuple[str, ...] | None  # correct ones, if the target is the text of a list; None: the target is the answer
    canonical: str | None  # the answer that the document prefers
    is_quoted: bool  # the target looks like a list, but is a text in the document
    answer: str = ""  # set by `resolve`

    @classmethod
    def parse(cls, record: Mapping[str, Any], location: str, unit: Unit, context: Any) -> "_Generation":
        """Parse a record whose request is a text or a chat to continue, with the answers that its target lists."""
        doc, target, turns = record["doc"], record.get("target"), list[Mapping[str, Any]]()
        # the harness logs the messages of a chat as a list with one JSON text
        texts = [*context] if isinstance(context, list | tuple) else []
        chat = texts[0] if len(texts) == 1 and isinstance(texts[0], str) else context
        if isinstance(chat, str) and chat.startswith("[{"):
            with suppress(ValueError):
                chat = parse_json(chat)
        if isinstance(chat, list) and chat and all(isinstance(turn, Mapping) and "role" in turn for turn in chat):
            turns = [{name: turn.get(name) for name in ("role", "content")} for turn in chat]
        elif not isinstance(context, str):
            raise TargetError(f"arguments: got the context {context!r:.{_SHOWN}}, expected text or messages")
        unit = replace(unit, prompt="" if turns else context)
        value = target if isinstance(target, list) else _parse_literal(str(target))
        is_quoted = isinstance(target, str) and any(target in text for text in _nested_values(doc, str))
        # the harness wrote str(list of texts), which another text that looks like a list need not equal
        is_list = isinstance(value, list) and str(value) == str(target) and all(isinstance(text, str) for text in value)
        fault = ""
        # "None" is str(None), unless the document has this text
        if target is None or (target == "None" and "None" not in _nested_values(doc, str)):
            fault = "missing"
        elif reason := _not_an_answer(record, doc, str(target)):
            fault = f"got {target!r:.{_SHOWN}}, {reason}"
        elif isinstance(value, list) and not is_list and not is_quoted:
            fault = (
                f"got {str(target)!r:.{_SHOWN}}, which looks like a list of answers, but is neither a Python list of "
                "strings nor a text of the document"
            )
        if fault:
            raise TargetError(f"target: {fault}; {_REMEDY}")
        canonical = None  # documents of triviaqa have a preferred answer next to the list of all answers
        for mapping in _nested_values(doc, dict) if is_list and value else ():
            if canonical is None and value in mapping.values():
                canonical = next((mapping[name] for name in ("value", "answer") if mapping.get(name) in value), None)
        return cls(location, unit, turns or None, str(target), tuple(value) if is_list else None, canonical, is_quoted)

    @staticmethod
    def resolve(samples: "Sequence[_Generation]") -> None:
        """Set `answer` of all documents of a task. Targets are lists of answers unless all documents quote them."""
        are_lists = any(sample.answers is not None and not sample.is_quoted for sample in samples)
        for sample in samples:
            sample.answer = sample.target
            if are_lists and sample.answers is not None:
                if not sample.answers:
                    raise TargetError(f"{sample.location}: target: got an empty list of answers; remove the record")
                sample.answer = sample.canonical or sample.answers[0]

    def to_unit(self) -> Unit:
        """Return the document as a unit, with the correct answer as its completion."""
        if self.turns is None:
            context, answer = self.unit.prompt, self.answer
            delimiter = "" if not context or context[-1].isspace() or answer[:1].isspace() else " "
            return replace(self.unit, completion=_require_text(delimiter + answer))
        turns = [*self.turns, {"role": "assistant", "content": _require_text(self.answer)}]
        conversation = conversation_in({"messages": turns})
        assert conversation is not None
        if conversation.fault is not None:
            raise TargetError(FAULTS[conversation.fault])
        loss_on: LossOn = "all" if self.unit.loss_on == "all" else "completion"  # few-shot examples are not scored
        return replace(
            self.unit,
            prompt=conversation.content,
            completion=self.answer,
            loss_on=loss_on,
            conversation=conversation,
        )


def _parse_literal(text: str) -> Any:
    """Parse the Python literal of an integer, a bool or a list; None: the text is none of these."""
    if not re.fullmatch(r"\[.*\]|\d+|True|False", text, re.DOTALL):
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # invalid escape sequences
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _not_an_answer(record: Mapping[str, Any], doc: Any, target: str) -> str | None:
    """Return why the target of a generation is not an answer that a model could give; None: it is one.

    Some tasks with generated answers log tests, names of fields, or the number of a choice as their target.
    """
    if any(_NO_ANSWER.match(name) for name in record):
        return "which consists of tests or rules, not of an answer"
    mappings = list(_nested_values(doc, dict))
    if any(target == ",".join(map(str, mapping)) for mapping in mappings if len(mapping) > 1):
        return "which lists field names of the document"
    if not target.isdecimal():
        return None
    # a number in the document, never a text
    is_number = target in map(str, _nested_values(doc, int)) and target not in _nested_values(doc, str)
    labels = [mapping.get("label") for mapping in mappings]
    # lists that may be the choices: all lists of texts if the target is a number, else those in a field of options
    choice_lists = _lists_of_texts(doc) if is_number else []
    for mapping in mappings:
        options = [value for name, value in mapping.items() if _OPTIONS_FIELD.search(str(name))]
        choice_lists += [texts for value in options for texts in _lists_of_texts(value)]
    is_position = any(target in map(str, range(len(texts))) and target not in texts for texts in choice_lists)
    if is_position or (is_number and target in map(str, labels)):
        return "which may be the number of a choice (doc_to_choice), whose text is not in the log"
    return None


def _lists_of_texts(value: Any) -> list[list[str]]:
    """Return the lists of texts in a part of a document, including those that are stored as text."""
    parsed = [_parse_literal(text) for text in _nested_values(value, str)]
    lists = [*_nested_values(value, list), *(literal for literal in parsed if isinstance(literal, list))]
    return [texts for texts in lists if texts and all(isinstance(text, str) for text in texts)]


def _nested_values(doc: Any, value_type: type[T]) -> Iterator[T]:
    """Yield the values of one type in a document at any depth, outer ones first."""
    level = [doc]  # all values at one depth
    while level:
        yield from (value for value in level if isinstance(value, value_type))
        containers = [
            value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)
        ]
        level = [value for container in containers for value in container]
