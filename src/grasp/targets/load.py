"""Load the units of target settings from files, tables and tasks, and draw a sample of them.

A record is a unit. Accepted forms are prompt and completion; question and answer; conversations and instructions, as in
a corpus; sample logs of lm-evaluation-harness (`sample_logs`); requests of OLMES (`olmes`); and any other columns, by
the templates of a `DatasetTarget`. Start with `load_units`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from math import isfinite
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grasp.corpus.conversations import (
    FAULTS,
    PAIR,
    Content,
    Conversation,
    Template,
    answer_parts,
    conversation_in,
    form_of,
    is_preference_pair,
    read_preference_pair,
)
from grasp.corpus.documents import records_in
from grasp.corpus.passages import task_root
from grasp.corpus.sources import IN_MEMORY, Source, open_source
from grasp.dataset_entries import resolve_entry
from grasp.errors import CorpusError, TargetError
from grasp.seeds import stream
from grasp.settings import CorpusSettings, DatasetTarget, TargetSettings
from grasp.targets.choices import parse_choices, question_prompt, right_choices
from grasp.targets.margins import split_metric, with_metric
from grasp.targets.olmes import ALIASES, is_request, read_task, units_of_requests
from grasp.targets.sample_logs import is_sample, refuse_unscored, units_of_log
from grasp.targets.units import MARGIN, LossOn, Unit, UnitSet
from grasp.text import parse_json
from grasp.yaml_files import describe

EXPECTED_FIELDS = (
    "expected `prompt` and `completion`, `question` and `answer`, `choices` and `answer`, `messages`, `instruction` "
    "and `output`, `chosen` and `rejected`, a sample log of lm-evaluation-harness with `doc`, `target` and "
    "`arguments`, or requests of olmes"
)
# Names of log files of evaluation harnesses, which write one file per task.
_LOG_NAME = re.compile(r"samples_(?P<task>.+?)(?:_\d{4}-\d\d-\d\dT.*)?|task-\d+-(?P<olmes>.+)-requests")
_SUFFIX = re.compile(r"(?:\.(?:jsonl?|ndjson|csv|tsv|parquet|gz|zst|bz2|xz))+$")
_FILE_NAME = re.compile(r".*\.(?:jsonl?|ndjson|csv|tsv|parquet)(?:\.(?:gz|zst|bz2|xz))?", re.DOTALL)

Records = Iterable[tuple[str, Mapping[str, Any]]]  # location for messages, and fields
T = TypeVar("T")


def load_units(settings: TargetSettings, in_memory: Sequence[Unit] = ()) -> UnitSet:
    """Load the units of all targets, in the order of `settings.names`; within a target, in the order of the draw.

    `units_per_target` units are drawn without replacement. The draw depends on the seed, the name of the target and
    its number of units only. Draws are nested: the first 64 of 128 units are those of a draw of 64. Excluding a unit
    does not change the order of the others.

    Args:
        in_memory: units of the target whose name begins with `sources.IN_MEMORY`.
    Raises:
        TargetError: there is no target; a target is unknown or empty; a record has an unknown form (the message has
            file and line); two targets have the same name; a unit_id is not unique.
        MissingExtraError: a package that reads the target is not installed.
    """
    unit_lists: list[Sequence[Unit]] = []
    weighted: list[tuple[str, Records]] = []  # own metrics, by the name of their file
    for full_name in settings.names:
        name, metric = (full_name, None) if Path(full_name).exists() else split_metric(full_name)
        n_groups = len(unit_lists)
        # a file name has a directory, a URL scheme or a known suffix, or the file exists
        is_file = name.startswith(IN_MEMORY) or "/" in name or "\\" in name or _FILE_NAME.fullmatch(name) is not None
        if in_memory and name.startswith(IN_MEMORY):
            unit_lists.append(in_memory)
        elif (entry := resolve_entry(name)) is not None:
            unit_lists.append(units_of(_entry_records(entry), target_name(entry["path"]), settings.loss_on))
        elif is_file or Path(name).is_file():
            for file in _find_logs(name) or [name]:
                unread = iter(_read_json_list(file) or records_of(file, field="targets.names"))
                first_records = list(islice(unread, 1))
                records = chain(first_records, unread)
                if first_records and is_weight(first_records[0][1]):
                    weighted.append((target_name(file), records))
                    continue
                units = units_of(records, target_name(file), settings.loss_on)
                if not units:
                    raise TargetError(f"{file}: no units; {EXPECTED_FIELDS}")
                unit_lists.append(units)
        else:
            unit_lists.append(read_task(name, settings.variant, settings.loss_on, task_root()))
        if metric is not None:
            unit_lists[n_groups:] = [[with_metric(unit, metric) for unit in group] for group in unit_lists[n_groups:]]
    unit_lists += [read_mapped(target, settings.loss_on) for target in settings.datasets]
    pools: dict[str, list[Unit]] = {}
    own_metrics: set[str] = set()  # targets all of whose units count
    for group in unit_lists:
        if clash := sorted({unit.target for unit in group} & pools.keys()):
            raise TargetError(f"targets: {', '.join(clash)} is named twice, expected unique targets")
        for unit in group:
            pools.setdefault(unit.target, []).append(unit)
    for name, weights in weighted:
        metrics = weighted_units(weights, name, {unit.unit_id: unit for unit in chain.from_iterable(pools.values())})
        if clash := sorted(metrics.keys() & pools.keys()):
            raise TargetError(f"targets: {', '.join(clash)} is named twice, expected unique targets")
        pools |= metrics
        own_metrics |= metrics.keys()
    if not pools:
        raise TargetError("targets.names: got none, expected at least one task or file of units")
    target_of: dict[str, str] = {}
    for unit in chain.from_iterable(pools.values()):
        for part in ("target", "unit_id", "prompt", "completion"):
            text: str = getattr(unit, part)  # for a conversation, the prompt has the text of all turns
            try:
                text.encode()
            except UnicodeEncodeError as err:  # JSON can contain lone surrogates; tokenizers and tables reject them
                raise TargetError(
                    f"unit {unit.unit_id!a} of {unit.target!a}: {part}: half of a surrogate pair at character "
                    f"{err.start}, which is not valid text; fix the file"
                ) from err
        if other := target_of.get(unit.unit_id):
            raise TargetError(
                f"targets: unit_id {unit.unit_id!r} occurs twice (in {other} and {unit.target}), expected unique ids"
            )
        target_of[unit.unit_id] = unit.target
    all_units = settings.model_copy(update={"units_per_target": None})
    drawn = [
        draw(target, pool, [unit.unit_id for unit in pool], all_units if target in own_metrics else settings)
        for target, pool in pools.items()
    ]
    excluded = frozenset(settings.exclude_units)
    excluded_ids = tuple(
        unit.unit_id
        for unit in chain.from_iterable(pools.values())
        if {unit.unit_id, split_metric(unit.unit_id)[0]} & excluded
    )
    sizes = {target: len(pool) for target, pool in pools.items()}
    return UnitSet(tuple(chain.from_iterable(drawn)), excluded_ids, sizes, tuple(chain.from_iterable(pools.values())))


def draw(target: str, pool: Sequence[T], unit_ids: Sequence[str], settings: TargetSettings) -> list[T]:
    """Draw `settings.units_per_target` items of a target, without those that are excluded.

    Args:
        pool: all items of the target, with their `unit_ids`.
    Raises:
        TargetError: all units are excluded.
    """
    # The random stream is named after the task of an alias, so that both draw the same units.
    task, _ = split_metric(target)  # the metrics of a task draw the same units
    order = stream(settings.seed, "units", ALIASES.get(task, task)).permutation(len(pool))
    excluded = frozenset(settings.exclude_units)
    remaining = [pool[k] for k in order if not {unit_ids[k], split_metric(unit_ids[k])[0]} & excluded]
    if not remaining:
        raise TargetError(f"targets: {target} has {len(pool)} units and all are in exclude_units; keep at least one")
    return remaining[: settings.units_per_target]


def is_weight(record: Mapping[str, Any]) -> bool:
    """Return whether a record is the weight of a unit in a metric of the user."""
    return "weight" in record and record.keys() <= {"unit_id", "weight", "target"}


def weighted_units(records: Records, name: str, known: Mapping[str, Unit]) -> dict[str, list[Unit]]:
    """Return the units of metrics of the user, by target: units of other targets with signed weights.

    Args:
        records: records of `unit_id`, `weight` and optionally `target`.
        name: target of records without one.
        known: units of other targets, by unit_id.
    Raises:
        TargetError: an unknown unit, or a weight that is 0 or not a number.
    """
    metrics: dict[str, list[Unit]] = {}
    for location, record in records:
        unit_id, weight, target = record.get("unit_id"), record.get("weight"), record.get("target") or name
        unit = known.get(str(unit_id))
        if unit is None:
            some = ", ".join(list(known)[:3]) or "none"
            raise TargetError(
                f"{location}: unit_id: {unit_id!r} is not a unit of the other targets ({some}, ...); name its target "
                "too, e.g. --targets sciq,weights.jsonl; targets that an artifact already has are not read"
            )
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight) or not weight:
            raise TargetError(f"{location}: weight: got {weight!r}, expected a number other than 0; its sign is kept")
        metrics.setdefault(str(target), []).append(
            replace(unit, unit_id=f"{unit_id}@{target}", target=str(target), weight=unit.weight * float(weight))
        )
    return metrics


def split_names(text: str) -> list[str]:
    """Split names separated by commas; an existing file may have commas in its name."""
    if Path(text).is_file():
        return [text]
    return [part.strip() for part in text.split(",") if part.strip()]


def target_name(path: str) -> str:
    """Return the default name of the target of a file: the file name without suffix, or the task of a log file."""
    stem = _SUFFIX.sub("", PurePosixPath(path.partition("::")[0].rstrip("/")).name)
    log = _LOG_NAME.fullmatch(stem)
    return log["task"] or log["olmes"] if log else stem


def records_of(
    data: Source | str, split: str | None = None, field: str = "targets"
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the records of a source or path, each with its location and all columns.

    Args:
        field: the setting that has the path, for messages.
    Raises:
        TargetError: the data cannot be read.
    """
    try:
        source = open_source(data, split, field) if isinstance(data, str) else data
        for chunk in source.chunks(0, lambda schema, _: list(schema.names)):
            yield from records_in(chunk, repair=False)  # lone surrogates in a question are an error
    except CorpusError as err:
        raise TargetError(str(err) if str(err).startswith(field) else f"{field}: {err}") from err


def _entry_records(entry: Mapping[str, Any]) -> Records:
    """Yield the records of a dataset entry in the usual form: turns, or prompt and completion."""
    is_preference = entry["fields"]["form"] == "preference"
    settings = CorpusSettings.model_validate({**entry, "form": "preference" if is_preference else None})
    for location, record in records_of(settings.path, settings.split, field="targets.names"):
        try:
            form = form_of(record.keys(), settings, location)
            content = form.read(record, location)
        except CorpusError as err:
            raise TargetError(str(err)) from err
        usual = {name: value for name, value in record.items() if name not in form.sources}
        if content.rejected is not None and content.conversation is not None:
            assert content.rejected.conversation is not None
            (*prompt, chosen), rejected = content.conversation.turns, content.rejected.conversation.turns[-1]
            tools = list(content.conversation.tools)
            yield location, usual | {"prompt": prompt, "chosen": [chosen], "rejected": [rejected], "tools": tools}
        elif content.conversation is not None:
            untrained = content.conversation.untrained
            turns = [
                turn | ({"weight": 0} if k in untrained else {}) for k, turn in enumerate(content.conversation.turns)
            ]
            yield location, usual | {"messages": turns, "tools": list(content.conversation.tools)}
        else:
            text, ((start, _), *_) = content.text or "", content.answers or ((0, 0),)
            yield location, usual | {"prompt": text[:start], "completion": text[start:]}


def _find_logs(directory: str) -> list[str]:
    """Return the log files of a harness below a local directory, one per task; empty if there are none.

    Raises:
        TargetError: there are two log files of a task.
    """
    logs: dict[str, str] = {}
    for path in sorted(Path(directory).rglob("*") if Path(directory).is_dir() else ()):
        if _FILE_NAME.fullmatch(path.name) and _LOG_NAME.fullmatch(_SUFFIX.sub("", path.name)):
            first = logs.setdefault(target_name(path.name), str(path))
            if first != str(path):
                raise TargetError(f"{directory}: {first} and {path} are logs of the same task; pass one of the files")
    return list(logs.values())


def _read_json_list(file: str) -> Records | None:
    """Return the records of a local file that is a JSON list of objects (older harnesses); None: it is not."""
    if not file.endswith((".json", ".jsonl")) or not Path(file).is_file():
        return None
    with Path(file).open("rb") as handle:
        if not handle.read(64).lstrip().startswith(b"["):
            return None
    try:
        records = parse_json(Path(file).read_bytes())
    except ValueError as err:
        raise TargetError(f"{file}: not JSON: {err}; fix or regenerate the file") from err
    if not records or not all(isinstance(record, Mapping) for record in records):
        return None
    return [(f"{file}: record {k}", record) for k, record in enumerate(records)]


class UnitFields(BaseModel):
    """Fields of a record; other fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)

    prompt: str
    completion: str
    task: Annotated[str, Field(min_length=1)] | None = None
    unit_id: str | int | None = None
    loss_on: LossOn | None = None
    choices: list[str] = []
    gold: Annotated[int, Field(ge=0)] | None = None
    support: str | None = None


def units_of(records: Records, task: str, loss_on: LossOn) -> list[Unit]:
    """Convert records to units. The default unit_id is ``<task>:<position among the records of the task>``.

    If the first record is one of a harness log, all records are parsed as a log, in which several records may belong to
    one unit.

    Args:
        task: target of records without a field `task`.
    """
    records = iter(records)
    first_records = list(islice(records, 1))
    records = chain(first_records, records)
    for is_log, read in ((is_sample, units_of_log), (is_request, units_of_requests)):
        if first_records and is_log(first_records[0][1]):
            return read(records, task, loss_on)
    units: list[Unit] = []
    seen: dict[str, int] = {}
    records = list(records)
    parsed = {k: quiz for k, (location, record) in enumerate(records) if (quiz := parse_choices(record, location))}
    golds = right_choices([*parsed.values()])
    quizzes = {k: quiz.fields(gold) for (k, quiz), gold in zip(parsed.items(), golds, strict=True)}
    for k, (location, record) in enumerate(records):
        pair = _parse_pair(record, location)
        fields, conversation = _parse_fields(record, location, quizzes.get(k)) if pair is None else (pair[0], None)
        target = fields.task or task
        position = seen[target] = seen.get(target, -1) + 1
        unit = Unit(
            unit_id=f"{target}:{position}" if fields.unit_id is None else str(fields.unit_id),
            target=target,
            prompt=fields.prompt,
            completion=fields.completion,
            loss_on=fields.loss_on or loss_on,
            choices=tuple(fields.choices),
            gold=fields.gold,
            support=fields.support,
        )
        if pair is not None:
            units.append(_pair_unit(unit, pair[1], location))
            continue
        if conversation is None:
            units.append(unit)
            continue
        # One unit for the last answer, or for every answer; the context of each are all turns before it.
        answers = conversation.answers
        scored_answers = answers if unit.loss_on == "assistant" else answers[-1:]
        for turn in scored_answers:
            answer_unit = replace(
                unit,
                unit_id=unit.unit_id if len(scored_answers) == 1 else f"{unit.unit_id}#{answers.index(turn)}",
                loss_on="all" if unit.loss_on == "all" else "completion",
                conversation=Conversation(conversation.turns[: turn + 1], conversation.tools),
            )
            units.append(answer_unit)
    return units


def _parse_pair(record: Mapping[str, Any], location: str) -> tuple[UnitFields, Content] | None:
    """Parse a preference pair; None: the record has another form."""
    if not is_preference_pair(record):
        return None
    try:
        content = read_preference_pair({name: value for name, value in record.items() if value is not None}, location)
        named = {name: record[name] for name in ("task", "unit_id") if record.get(name) is not None}
        return UnitFields.model_validate({"prompt": "", "completion": "-", **named}), content
    except CorpusError as err:
        raise TargetError(str(err)) from err
    except ValidationError as err:
        raise TargetError(describe(err, location)) from err


def _pair_unit(unit: Unit, content: Content, location: str) -> Unit:
    """Return a preference pair as the margin of its chosen answer over the rejected one."""
    if unit.loss_on == "all":
        raise TargetError(f"{location}: a preference pair is a margin of completions; got loss_on all")
    assert content.rejected is not None
    sides = []
    for side in (content, content.rejected):
        if side.conversation is not None:
            answer = str(side.conversation.turns[-1]["content"])
            sides.append(
                replace(
                    unit,
                    prompt=side.conversation.content,
                    completion=answer,
                    loss_on="completion",
                    conversation=side.conversation,
                )
            )
        else:
            assert side.text is not None
            assert side.answers is not None
            ((begin, end),) = side.answers
            if not side.text[begin:end].strip():
                name = PAIR[len(sides)]
                raise TargetError(
                    f"{location}: {name}: no text follows the prompt {side.text[:begin]!r:.60}; remove the record"
                )
            sides.append(replace(unit, prompt=side.text[:begin], completion=side.text[begin:end], loss_on="completion"))
    chosen, rejected = sides
    return replace(chosen, others=(rejected,), metric=MARGIN)


def _parse_fields(
    record: Mapping[str, Any], location: str, quiz: Mapping[str, Any] | None
) -> tuple[UnitFields, Conversation | None]:
    """Parse a record of any form, and its conversation if it has one.

    Args:
        quiz: fields of a record of multiple choice.
    """
    values = {name: value for name, value in record.items() if value is not None}
    conversation = None
    if quiz is not None:
        values |= quiz
    if not isinstance(values.get("completion"), str):
        try:
            conversation = conversation_in(values, location)
        except CorpusError as err:
            raise TargetError(str(err)) from err
        if conversation is not None and conversation.fault is not None:
            raise TargetError(f"{location}: {FAULTS[conversation.fault]}; fix or remove the record")
    if conversation is not None:  # turns after the last answer are ignored
        last = conversation.turns[conversation.answers[-1]]
        parts = [last["content"], *answer_parts(last).values()]
        completion = next(text for part in parts if (text := str(part or "")).strip())
        values |= {"prompt": conversation.content, "completion": completion}
    elif {"question", "answer"} <= values.keys() and "prompt" not in values:
        values |= {
            "prompt": question_prompt(values, location),
            "completion": f" {_parse_answer(values['answer'], location)}",
        }
    elif not {"prompt", "completion"} & values.keys():
        refuse_unscored(record, location)
        names = ", ".join(f"{name} (null)" if value is None else str(name) for name, value in record.items())
        raise TargetError(f"{location}: has the fields {names or 'none'}; {EXPECTED_FIELDS}")
    try:
        fields = UnitFields.model_validate(values)
    except ValidationError as err:
        raise TargetError(describe(err, location)) from err
    if not fields.completion.strip():
        raise TargetError(f"{location}: completion: got {fields.completion!r}, expected text to score")
    if fields.gold is not None and fields.gold >= len(fields.choices):
        raise TargetError(
            f"{location}: gold: got {fields.gold}, expected the position of one of {len(fields.choices)} choices"
        )
    return fields, conversation


def _parse_answer(answer: Any, location: str) -> str:
    """Return the text of an answer; the first one if several are correct (Natural Questions, TriviaQA)."""
    text = answer
    if isinstance(text, Mapping):
        text = text.get("value")
    if isinstance(text, list) and text:
        text = text[0]
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise TargetError(f"{location}: answer: got {answer!r:.60}, expected a text or a list of texts")
    return str(text)


def read_mapped(target: DatasetTarget, loss_on: LossOn) -> list[Unit]:
    """Convert every record of a source to a unit by format strings; unit_id is ``<name>:<id column or position>``.

    Raises:
        MissingExtraError: `datasets` is required and not installed.
        TargetError: there is nothing to read, a split or column does not exist (the message lists existing ones), or a
            completion is empty.
    """
    location = f"targets.datasets.{target.name}"
    try:
        templates = Template(target.prompt, f"{location}.prompt"), Template(target.completion, f"{location}.completion")
    except CorpusError as err:
        raise TargetError(str(err)) from err
    used = templates[0].columns | templates[1].columns | (set() if target.unit_id is None else {target.unit_id})
    units = []
    for k, (_, record) in enumerate(records_of(target.path, target.split, location)):
        missing = sorted(used - record.keys())
        if missing:
            raise TargetError(f"{location}: no column {', '.join(missing)}; {target.path} has {', '.join(record)}")
        try:
            prompt, completion = (template.fill(record, f"{target.path}, row {k}") for template in templates)
        except CorpusError as err:
            raise TargetError(str(err)) from err
        if not completion.strip():
            raise TargetError(f"{location}: row {k}: completion: got {completion!r}, expected text to score")
        unit_id = f"{target.name}:{k if target.unit_id is None else record[target.unit_id]}"
        units.append(Unit(unit_id, target.name, prompt, completion, loss_on))
    if not units:
        raise TargetError(f"{location}: {target.path} has no rows, expected at least one")
    return units
