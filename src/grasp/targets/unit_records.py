"""Convert records, the lines of a JSONL file or rows of a table, to units.

The form of a record follows from its fields (`form_of`): prompt and completion; question and answer; multiple choice
(`grasp.targets.choices`); a conversation or an instruction, as in a corpus (`grasp.corpus.conversations`); a preference
pair; or a form that a reader of `target` claims (`grasp.file_readers`), such as logs of harnesses.

A location is the file and line of a record; error messages begin with it. Start with `units_from_records`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain, islice
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grasp.corpus.conversations import (
    EXTRA_COLUMNS,
    FAULTS,
    OUTPUTS,
    PAIR,
    TEXT,
    TURNS,
    Content,
    Conversation,
    answer_parts,
    conversation_in,
    holds_turns,
    read_preference_pair,
)
from grasp.corpus.text_files import DELIMITER, file_type
from grasp.errors import TargetError, at
from grasp.file_readers import claimed
from grasp.targets.choices import MultipleChoice, choices_field, parse_choices, question_prompt, right_choices
from grasp.targets.units import MARGIN, LossOn, Unit
from grasp.yaml_files import describe

EXPECTED_FIELDS = (
    "expected `prompt` and `completion`, `question` and `answer`, `choices` and `answer`, `messages`, `instruction` "
    "and `output`, `chosen` and `rejected`, or the log of a harness with the requests that it scored"
)

Records = Iterable[tuple[str, Mapping[str, Any]]]  # pairs of a location and the fields of the record there


class UnitFields(BaseModel):
    """The fields of a unit as a record gives them, after conversion to prompt and completion; others are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)

    prompt: str
    completion: str
    task: Annotated[str, Field(min_length=1)] | None = None
    unit_id: str | int | None = None
    loss_on: LossOn | None = None
    choices: list[str] = []
    gold: Annotated[int, Field(ge=0)] | None = None
    changed_choices: int = 0
    support: str | None = None


def units_from_records(records: Records, task: str, loss_on: LossOn) -> list[Unit]:
    """Convert records to units. The default unit_id is ``<task>:<position among the records of the task>``.

    If a reader of `target` claims the first record, e.g. as one of a harness log, it converts all records.

    Args:
        records: locations and fields of the records.
        task: target of records without a field `task`.
        loss_on: tokens that carry loss in records without a field `loss_on`.
    Raises:
        TargetError: a record has an unknown form or an invalid field.
    """
    records = iter(records)
    first_records = list(islice(records, 1))  # [] if there are no records
    records = chain(first_records, records)
    if first_records and (claim := claimed("target", first_records[0][1])) is not None:
        units: list[Unit] = claim.reader.read(records, task, loss_on)
        return units
    parsed: list[tuple[str, dict[str, Any], str]] = []  # location, fields that are not null, and form
    questions: list[MultipleChoice] = []  # parsed together: all records say how an answer names its choice
    for location, record in records:
        values = {name: value for name, value in record.items() if value is not None}
        with at(location):
            form = form_of(values)
            if not form:  # names may be capitalised: Question, A, B, C, D, Answer
                values = {name if len(name) == 1 else name.lower(): value for name, value in values.items()} | values
                form = form_of(values)
            if not form and values.keys().isdisjoint(("prompt", "completion")):
                names = ", ".join(str(name) if name in values else f"{name} (null)" for name in record) or "none"
                hint = ""
                if file_type(location.rpartition(":")[0])[0] in DELIMITER:
                    hint = "; the first line has the names, e.g. question,A,B,C,D,answer"
                raise TargetError(f"has the fields {names}; {EXPECTED_FIELDS}{hint}")
            if form == "choices":
                questions.append(parse_choices(values, location))
        parsed.append((location, values, form))
    fields_of_choices = map(MultipleChoice.fields, questions, right_choices(questions))
    units = []
    n_records: dict[str, int] = {}  # by target
    for location, values, form in parsed:
        more = next(fields_of_choices) if form == "choices" else {}
        with at(location, TargetError):
            fields, content = _parse_fields(values | more, form)
            target = fields.task or task
            position = n_records.get(target, 0)
            n_records[target] = position + 1
            unit = Unit(
                unit_id=f"{target}:{position}" if fields.unit_id is None else str(fields.unit_id),
                target=target,
                loss_on=fields.loss_on or loss_on,
                choices=tuple(fields.choices),
                **fields.model_dump(exclude={"task", "unit_id", "loss_on", "choices"}),
            )
            if content is None:
                units.append(unit)
            elif content.rejected is not None:
                units.append(_pair_unit(unit, content))
            elif content.conversation is not None:
                units += _conversation_units(unit, content.conversation)
    return units


def form_of(values: Mapping[str, Any]) -> str:
    """Return the form of a record by its fields that are not null: the first one that fits; empty if none does."""
    names = values.keys()
    if "completion" not in names and not names.isdisjoint(PAIR):
        return "pair"
    if choices_field(values) is not None:
        return "choices"
    if isinstance(values.get("completion"), str):
        return "completion"
    has_output = "instruction" in names and not names.isdisjoint(OUTPUTS)
    has_turns = any(holds_turns(values.get(name), name) for name in (TEXT, *TURNS))
    if {"prompt", "completion"} <= names or has_output or has_turns:
        return "turns"
    return "question" if {"question", "answer"} <= names and "prompt" not in names else ""


def _conversation_units(unit: Unit, conversation: Conversation) -> list[Unit]:
    """Return a unit for the last answer of a conversation, or for every answer if `loss_on` is assistant.

    The prompt of an answer is all turns before it. With several units, their ids end with the number of the answer.
    """
    answers = conversation.answers  # indices of turns
    scored_answers = answers if unit.loss_on == "assistant" else answers[-1:]
    return [
        replace(
            unit,
            unit_id=unit.unit_id if len(scored_answers) == 1 else f"{unit.unit_id}#{answers.index(turn)}",
            loss_on="all" if unit.loss_on == "all" else "completion",
            conversation=replace(conversation, turns=conversation.turns[: turn + 1], untrained=frozenset()),
        )
        for turn in scored_answers
    ]


def _pair_unit(unit: Unit, pair: Content) -> Unit:
    """Return a unit with the margin of the chosen answer of a preference pair over the rejected one."""
    if unit.loss_on == "all":
        raise TargetError("a preference pair is a margin of completions; got loss_on all")
    answers = []
    for name, side in zip(PAIR, (pair, pair.rejected), strict=True):
        assert side is not None
        if side.conversation is not None:
            prompt, answer = side.conversation.content, str(side.conversation.turns[-1]["content"])
        else:
            assert side.text is not None
            assert side.answers is not None
            ((begin, end),) = side.answers
            prompt, answer = side.text[:begin], side.text[begin:end]
            if not answer.strip():
                raise TargetError(f"{name}: no text follows the prompt {prompt!r:.60}; remove the record")
        answers.append(
            replace(unit, prompt=prompt, completion=answer, loss_on="completion", conversation=side.conversation)
        )
    return replace(answers[0], others=(answers[1],), metric=MARGIN)


def _parse_fields(values: dict[str, Any], form: str) -> tuple[UnitFields, Content | None]:
    """Parse a record, and its content if that is a conversation or a preference pair."""
    if "completion" in values and values.get("label") is False:
        raise TargetError("label: got false, an undesirable completion (KTO), expected a right one; remove the record")
    if form == "question":
        space = "" if "system" in values else " "  # beside a system text, question and answer are turns
        answer = values["answer"].get("value") if isinstance(values["answer"], Mapping) else values["answer"]
        if isinstance(answer, list) and answer:  # several are correct (Natural Questions, TriviaQA): the first one
            answer = answer[0]
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise TargetError(f"answer: got {values['answer']!r:.60}, expected a text or a list of texts")
        values |= {"prompt": question_prompt(values), "completion": f"{space}{answer}"}
    content = None
    if form == "pair":
        content = read_preference_pair(values)
        named: dict[str, Any] = {name: values[name] for name in ("task", "unit_id") if name in values}
        values = {"prompt": "", "completion": "-", **named}  # its sides have other ones
    elif form == "turns" or not values.keys().isdisjoint(EXTRA_COLUMNS):
        conversation = conversation_in(values)
        if conversation is not None and conversation.fault:
            raise TargetError(f"{FAULTS[conversation.fault]}; fix or remove the record")
        if conversation is not None and form == "choices":
            raise TargetError(
                f"system: got {values['system']!r:.60}, but choices follow a text; add it to the prompt, or remove it"
            )
        if conversation is not None:
            content = Content(conversation=conversation)
            last_answer = conversation.turns[conversation.answers[-1]]  # turns after it are ignored
            # the text of an answer, or its reasoning or tool calls if it has no text
            parts = [last_answer["content"], *answer_parts(last_answer).values()]
            completion = next(text for part in parts if (text := str(part or "")).strip())
            values |= {"prompt": conversation.content, "completion": completion}
    try:
        fields = UnitFields.model_validate(values)
    except ValidationError as err:
        raise TargetError(describe(err, "")) from err
    if not fields.completion.strip():
        raise TargetError(f"completion: got {fields.completion!r}, expected text to score")
    if fields.gold is not None and fields.gold >= len(fields.choices):
        raise TargetError(f"gold: got {fields.gold}, expected the position of one of {len(fields.choices)} choices")
    return fields, content
