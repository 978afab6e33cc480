"""Sample logs of lm-evaluation-harness (`--log_samples`): what was scored of each document, and its right answer.

A record holds a document (`doc`), the `target`, and the `arguments` of its requests:

    multiple choice     (context, continuation) of every choice; the target is the position or the text of the right one
    log-likelihood      one (context, continuation)
    rolling             one (text,), all of which is scored
    generation          one (context, settings); no continuation was scored, so that the target is appended

Newer versions write the arguments as `{"gen_args_0": {"arg_0": ..., "arg_1": ...}}`, the target as `str(target)`, and a
record per filter of the answers. The text of a target does not say all: "2" is a position or a text, "['a', 'b']" a
list or a text. A task has one way to say it, so that the log as a whole is asked: every document must fit, and the
accuracy that the harness logged decides where both ways do.
"""

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isnan
from typing import Any, TypeVar

from grasp.corpus.conversations import FAULTS, conversation_in
from grasp.errors import CorpusError, TargetError
from grasp.targets.units import LossOn, Unit
from grasp.text import parse_json

_SHOWN = 60  # characters of a value in a message
# metrics of tasks whose target holds tests or rules, not an answer (humaneval, mbpp, ifeval)
_NO_ANSWER = re.compile(r"pass(?:@|_at_)|prompt_level_|schema_compliance")
_CHOICES = re.compile(r"choice|option|ending", re.IGNORECASE)  # fields of a document that hold the choices
_INSTEAD = "write its questions as `prompt` and `completion`"
# fields of what looks like a log and does not hold what was scored
_NOT_SCORED = {
    ("doc_id", "prompt_0", "truth"): "a write-out of lm-evaluation-harness 0.3 joins prompt and answer, so that it "
    "does not say what was scored; log with --log_samples of version 0.4 or later",
    ("doc_id", "model_output", "metrics"): "predictions of olmes hold no prompts; name the -requests.jsonl file, which "
    "--save-raw-requests true writes",
}

Arguments = tuple[Any, ...]
T = TypeVar("T")


def is_sample(record: Mapping[str, Any]) -> bool:
    """Whether a record is a line of a sample log."""
    return record.get("doc") is not None and record.get("arguments") is not None


def refuse_unscored(record: Mapping[str, Any], where: str) -> None:
    """Refuse a record of a harness that does not say what was scored.

    Raises:
        TargetError: what it is, and what to use instead.
    """
    for names, reason in _NOT_SCORED.items():
        if record.keys() >= set(names):
            raise TargetError(f"{where}: {reason}")


def units_of_log(records: Iterable[tuple[str, Mapping[str, Any]]], task: str, loss_on: LossOn) -> list[Unit]:
    """Documents of a log as units; unit_id is ``<task>:<doc_id>``.

    Raises:
        TargetError: a record that does not say what was scored, or which answer is right (with file and line); a
            document that occurs twice and differs.
    """
    samples: list[tuple[str, Unit | _Choices | _Generation]] = []
    for position, (where, record) in enumerate(records):
        if not is_sample(record):
            raise TargetError(f"{where}: has no `doc` and `arguments`, expected a sample as in the lines before it")
        samples.append((where, _sample(record, where, task, position, loss_on)))
    for kind in (_Choices, _Generation):
        by_task: dict[str, list[Any]] = {}
        for _, sample in samples:
            if isinstance(sample, kind):
                by_task.setdefault(sample.unit.target, []).append(sample)
        for group in by_task.values():
            kind.decide(group)
    units: dict[str, Unit] = {}
    for where, sample in samples:
        unit = sample if isinstance(sample, Unit) else sample.answered()
        first = units.setdefault(unit.unit_id, unit)  # the harness logs a document once for every filter
        if differing := [part.name for part in fields(Unit) if getattr(unit, part.name) != getattr(first, part.name)]:
            raise TargetError(
                f"{where}: document {unit.unit_id!r} occurs twice and differs in {', '.join(differing)}; expected the "
                "log of one task, with one record for each document and filter"
            )
    return list(units.values())


def _sample(
    record: Mapping[str, Any], where: str, task: str, position: int, loss_on: LossOn
) -> "Unit | _Choices | _Generation":
    """What a record says; choices and generations are decided upon later."""
    requests, doc, target = _requests(record["arguments"], where), record["doc"], record.get("target")
    own_task = record.get("task")
    name = own_task if isinstance(own_task, str) and own_task else task
    doc_id = position if record.get("doc_id") is None else record["doc_id"]
    unit = Unit(f"{name}:{doc_id}", name, "", "", loss_on)
    context, *rest = requests[0]
    if len(requests) == 1 and not rest and isinstance(context, str):
        return replace(unit, completion=_text_to_score(context, where))
    if not rest:
        raise TargetError(f"{where}: arguments: got {context!r:.{_SHOWN}}, expected (context, continuation)")
    if not isinstance(rest[0], str):
        turns = _turns(context)
        if turns is None and not isinstance(context, str):
            raise TargetError(f"{where}: arguments: got the context {context!r:.{_SHOWN}}, expected text or messages")
        if target is None or (target == "None" and "None" not in _parts(doc, str)):  # str() of none
            raise TargetError(f"{where}: target: is missing; {_INSTEAD}")
        if reason := _why_no_answer(record, doc, str(target)):
            raise TargetError(f"{where}: target: got {target!r:.{_SHOWN}}, {reason}; {_INSTEAD}")
        return _Generation.read(where, replace(unit, prompt="" if turns else context), turns, target, doc)
    if any(len(request) != 2 or not all(isinstance(part, str) for part in request) for request in requests):
        raise TargetError(f"{where}: arguments: expected the context and the continuation of every request as text")
    places = _conditional(requests, record, where)
    pairs = [requests[k] for k in places]
    if len(pairs) == 1:
        return replace(unit, prompt=pairs[0][0], completion=_text_to_score(pairs[0][1], where))
    return _Choices.read(where, unit, pairs, target, _predicted(record, places))


# ------------------------------------------------------------------------------------------------------ requests


def _requests(arguments: Any, where: str) -> list[Arguments]:
    """Arguments of each request, in order.

    Raises:
        TargetError: something else; pictures or sounds beside the text.
    """
    try:
        requests = [tuple(_in_order(request)) for request in _in_order(arguments)]
        if not all(requests) or not requests:
            raise ValueError
    except (TypeError, ValueError) as err:
        raise TargetError(
            f"{where}: arguments: got {str(arguments)[:_SHOWN]}, expected the requests of a sample"
        ) from err
    if more := next((request[2] for request in requests if len(request) > 2), None):
        raise TargetError(
            f"{where}: arguments: got {more!r:.{_SHOWN}} beside the text; expected a context and a continuation, "
            "pictures and sounds are not read"
        )
    return requests


def _in_order(group: Any) -> list[Any]:
    """Values of a list, or of `{name_0: ..., name_1: ...}` in the order of the numbers; null is an empty table cell."""
    if isinstance(group, Mapping):
        group = [group[name] for name in sorted(group, key=lambda name: int(str(name).rpartition("_")[2]))]
    if not isinstance(group, list | tuple):
        raise TypeError(type(group).__name__)
    return [value for value in group if value is not None]


def _conditional(requests: Sequence[Arguments], record: Mapping[str, Any], where: str) -> list[int]:
    """Positions of the requests for choices.

    `acc_mutual_info` has every choice scored a second time, after nothing: in turn with the first time up to version
    0.4.3, later after all of them.
    """
    after_context = [k for k, request in enumerate(requests) if request[0] != ""]
    if "acc_mutual_info" in record and not after_context:
        raise TargetError(
            f"{where}: arguments: contexts are empty, so that those of acc_mutual_info look like the others"
        )
    return after_context if 2 * len(after_context) == len(requests) else list(range(len(requests)))


def _turns(context: Any) -> list[Mapping[str, Any]] | None:
    """Messages to a chat model, which the harness logs as JSON in a list of one text; None: it is another context."""
    if isinstance(context, list | tuple) and len(context) == 1 and isinstance(context[0], str):
        context = context[0]
    if isinstance(context, str) and context.startswith("[{"):
        try:
            context = parse_json(context)
        except ValueError:
            return None
    is_chat = isinstance(context, list) and all(isinstance(turn, Mapping) and "role" in turn for turn in context)
    return [{name: turn.get(name) for name in ("role", "content")} for turn in context] if is_chat and context else None


def _text_to_score(text: str, where: str) -> str:
    if not text.strip():
        raise TargetError(f"{where}: completion: got {text!r}, expected text to score")
    return text


# ----------------------------------------------------------------------------------------------- multiple choice


@dataclass(slots=True)
class _Choices:
    """A document with a request for each choice.

    Attributes:
        by_number: right choices if a number is a position, and another text the text of a choice.
        by_text: right choices if every target is the text of a choice.
        predicted: the most likely choice, and whether the harness counted it as right; None: not logged.
    """

    where: str
    unit: Unit
    pairs: Sequence[Arguments]
    target: str
    by_number: tuple[int, ...]
    by_text: tuple[int, ...]
    predicted: tuple[int, bool] | None
    gold: int = -1

    @classmethod
    def read(
        cls, where: str, unit: Unit, pairs: Sequence[Arguments], target: Any, predicted: tuple[int, bool] | None
    ) -> "_Choices":
        texts = [continuation for _, continuation in pairs]
        number = _numbers(target, len(pairs))
        if len(set(texts)) > 1:
            by_text = () if isinstance(target, int) else _choices_called(target, texts)
            by_number = number or by_text
        elif number and not _choices_called(target, texts):
            by_number = by_text = number
        else:  # the contexts are the choices, and the target is what follows each of them (winogrande)
            by_number = by_text = _right_by_accuracy(predicted, len(pairs))
            if not by_text:
                raise TargetError(
                    f"{where}: target: got {target!r:.{_SHOWN}}, which follows all {len(pairs)} contexts, and `acc` "
                    f"and `filtered_resps` do not tell which context is right; {_INSTEAD}"
                )
        return cls(where, unit, pairs, str(target), by_number, by_text, predicted)

    @staticmethod
    def decide(samples: "Sequence[_Choices]") -> None:
        """Set `gold` of all documents of a task, whose targets are numbers or texts alike.

        Raises:
            TargetError: a target that is neither, or that can be both.
        """
        if unfit := next((sample for sample in samples if not sample.by_number), None):
            raise TargetError(
                f"{unfit.where}: target: got {unfit.target!r:.{_SHOWN}}, expected the number or the text of one of its "
                f"{len(unfit.pairs)} requests"
            )
        readings = [[sample.by_number for sample in samples], [sample.by_text for sample in samples]]
        readings = [right for right in readings if all(right)]
        differing = [k for k in range(len(samples)) if len({right[k][0] for right in readings}) > 1]
        if differing:
            readings = [right for right in readings if all(map(_Choices._agrees, samples, right))]
            if len(readings) != 1:
                sample = samples[differing[0]]
                number, text = (sample.pairs[right[0]][1] for right in (sample.by_number, sample.by_text))
                raise TargetError(
                    f"{sample.where}: target: got {sample.target!r:.{_SHOWN}}, which is the number of {number!r} and "
                    f"the text of {text!r}, and `acc` and `filtered_resps` do not tell which is meant; {_INSTEAD}"
                )
        for sample, right in zip(samples, readings[0], strict=True):
            sample.gold = right[0]

    def _agrees(self, right: tuple[int, ...]) -> bool:
        """Whether the harness counted its prediction as right if, and only if, it is one of these choices."""
        return self.predicted is None or (self.predicted[0] in right) == self.predicted[1]

    def answered(self) -> Unit:
        contexts, texts = zip(*self.pairs, strict=True)
        return replace(
            self.unit,
            prompt=contexts[self.gold],
            completion=_text_to_score(texts[self.gold], self.where),
            choices=texts if len(set(contexts)) == 1 else contexts,
            gold=self.gold,
        )


def _numbers(target: Any, count: int) -> tuple[int, ...]:
    """Positions below `count` that a target names: one, or a list of them where several choices are right."""
    given = _literal(target) if isinstance(target, str) else target
    named = given if isinstance(given, list) else [given]
    whole = all(isinstance(number, int) and 0 <= number < count for number in named)
    return tuple(map(int, named)) if whole else ()


def _choices_called(target: Any, texts: Sequence[str]) -> tuple[int, ...]:
    """Positions of the choices with a text; a delimiter may stand before all of them."""
    names = target if isinstance(target, list) else _aliases(target) or [target]
    found: list[int] = []
    for name in names:
        if isinstance(name, str) and name.strip():
            same = [k for k, text in enumerate(texts) if text.strip() == name.strip()]
            ends = [k for k, text in enumerate(texts) if text.endswith(name)]
            found += same or [k for k in ends if all(text.startswith(texts[k].removesuffix(name)) for text in texts)]
    return tuple(dict.fromkeys(found))


def _predicted(record: Mapping[str, Any], places: Sequence[int]) -> tuple[int, bool] | None:
    """The most likely of the requests at these places, and whether the harness counted it as right."""
    try:
        accuracy = float(record["acc"])
        answers = record.get("filtered_resps") or [answer[0] for answer in record["resps"]]
        likelihoods = [float(answers[k][0]) for k in places]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    if accuracy not in (0.0, 1.0) or any(isnan(value) for value in likelihoods):
        return None
    return likelihoods.index(max(likelihoods)), accuracy == 1.0


def _right_by_accuracy(predicted: tuple[int, bool] | None, count: int) -> tuple[int, ...]:
    """The right choice, where the accuracy leaves one: the prediction, or of two choices the other one."""
    if predicted is None:
        return ()
    choice, is_right = predicted
    return (choice,) if is_right else (1 - choice,) if count == 2 else ()


# ---------------------------------------------------------------------------------------------------- generation


@dataclass(slots=True)
class _Generation:
    """A document whose answer was generated.

    Attributes:
        turns: messages to a chat model; the prompt of the unit is then empty.
        answers: right answers, if the target reads as a list of them; None: it is a text.
        canonical: the answer that the document prefers.
        is_quoted: the target looks like a list, and the document holds it as a text.
    """

    where: str
    unit: Unit
    turns: list[Mapping[str, Any]] | None
    target: str
    answers: tuple[str, ...] | None
    canonical: str | None
    is_quoted: bool
    answer: str = ""

    @classmethod
    def read(
        cls, where: str, unit: Unit, turns: list[Mapping[str, Any]] | None, target: Any, doc: Any
    ) -> "_Generation":
        found = target if isinstance(target, list) else _literal(str(target))
        if not isinstance(found, list):
            return cls(where, unit, turns, str(target), None, None, False)
        is_quoted = isinstance(target, str) and any(target in text for text in _parts(doc, str))
        is_written = str(found) == str(target) and all(isinstance(text, str) for text in found)
        if not is_written and not is_quoted:
            raise TargetError(
                f"{where}: target: got {str(target)!r:.{_SHOWN}}, which looks like a list of answers, but is neither "
                f"one of texts as Python writes it nor part of the document; {_INSTEAD}"
            )
        answers = tuple(found) if is_written else None
        return cls(where, unit, turns, str(target), answers, _canonical(answers, doc), is_quoted)

    @staticmethod
    def decide(samples: "Sequence[_Generation]") -> None:
        """Set `answer` of all documents of a task: a list is one of answers, unless every document quotes it.

        Raises:
            TargetError: a list without answers.
        """
        lists = any(sample.answers is not None and not sample.is_quoted for sample in samples)
        for sample in samples:
            sample.answer = sample.target
            if lists and sample.answers is not None:
                if not sample.answers:
                    raise TargetError(f"{sample.where}: target: got an empty list of answers; take the record out")
                sample.answer = sample.canonical or sample.answers[0]

    def answered(self) -> Unit:
        if self.turns is None:
            context, answer = self.unit.prompt, self.answer
            joint = "" if not context or context[-1].isspace() or answer[:1].isspace() else " "
            return replace(self.unit, completion=_text_to_score(joint + answer, self.where))
        turns = [*self.turns, {"role": "assistant", "content": _text_to_score(self.answer, self.where)}]
        try:
            conversation = conversation_in({"messages": turns}, self.where)
        except CorpusError as err:
            raise TargetError(str(err)) from err
        assert conversation is not None
        if conversation.fault is not None:
            raise TargetError(f"{self.where}: {FAULTS[conversation.fault]}")
        loss_on: LossOn = "all" if self.unit.loss_on == "all" else "completion"  # examples are no units
        return replace(
            self.unit,
            prompt=conversation.content,
            completion=self.answer,
            loss_on=loss_on,
            conversation=conversation,
        )


def _literal(text: str) -> Any:
    """The number, truth value or list that Python writes as this text; None: another text. Nothing is executed."""
    if not re.fullmatch(r"\[.*\]|\d+|True|False", text, re.DOTALL):
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # an escape that Python does not know
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _aliases(target: Any) -> tuple[str, ...] | None:
    """Texts of a target that reads as a list of texts; None: it does not."""
    found = _literal(target) if isinstance(target, str) else None
    return tuple(found) if isinstance(found, list) and all(isinstance(text, str) for text in found) else None


def _canonical(answers: Sequence[str] | None, doc: Any) -> str | None:
    """The answer that the document names beside the list of all of them, as triviaqa does; None: no such answer."""
    for place in _parts(doc, dict):
        if answers and list(answers) in place.values():
            named = [place[name] for name in ("value", "answer") if place.get(name) in answers]
            if named:
                return str(named[0])
    return None


def _why_no_answer(record: Mapping[str, Any], doc: Any, target: str) -> str | None:
    """Why the target of a generation is no answer that a model could give; None: it is one."""
    if any(_NO_ANSWER.match(name) for name in record):
        return "which tests or rules are scored by, and is no answer"
    if any(target == ",".join(map(str, place)) for place in _parts(doc, dict) if len(place) > 1):
        return "which names fields of the document"
    if not target.isdecimal():
        return None
    is_number = target in map(str, _parts(doc, int)) and target not in _parts(doc, str)
    label = [place.get("label") for place in _parts(doc, dict)]
    texts = _lists_of_texts(doc) if is_number else []
    for place in _parts(doc, dict):
        texts += [
            found for name, value in place.items() if _CHOICES.search(str(name)) for found in _lists_of_texts(value)
        ]
    numbers_one = any(target in map(str, range(len(found))) and target not in found for found in texts)
    if numbers_one or (is_number and target in map(str, label)):
        return "which may be the number of a choice (doc_to_choice), whose text the log does not hold"
    return None


def _lists_of_texts(value: Any) -> list[list[str]]:
    """Lists of texts in a part of a document, those that are written as a text among them."""
    lists = [*_parts(value, list), *(found for text in _parts(value, str) if isinstance(found := _literal(text), list))]
    return [found for found in lists if found and all(isinstance(text, str) for text in found)]


def _parts(doc: Any, kind: type[T]) -> Iterator[T]:
    """Values of one type in a document, at any depth, outer ones first."""
    level = [doc]
    while level:
        yield from (value for value in level if isinstance(value, kind))
        groups = [
            value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)
        ]
        level = [part for group in groups for part in group]
