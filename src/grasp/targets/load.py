"""From target settings to the units of a run: read from files, tables or tasks, left out, drawn.

A record is a unit, in one of the forms that people have: prompt and completion; question and answer; conversations and
instructions, as a corpus has them; a sample log of lm-evaluation-harness, see `sample_logs`; requests of olmes, see
`olmes`; any other by the templates of a `DatasetTarget`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grasp.corpus.conversations import FAULTS, Conversation, Template, answer_parts, conversation_in
from grasp.corpus.documents import records_in
from grasp.corpus.passages import task_root
from grasp.corpus.sources import IN_MEMORY, Source, open_source
from grasp.errors import CorpusError, TargetError
from grasp.seeds import stream
from grasp.settings import DatasetTarget, TargetSettings
from grasp.targets.olmes import ALIASES, is_request, read_task, units_of_requests
from grasp.targets.sample_logs import is_sample, refuse_unscored, units_of_log
from grasp.targets.units import LossOn, Unit, UnitSet
from grasp.text import parse_json
from grasp.yaml_files import describe

LOOKED_FOR = (
    "expected `prompt` and `completion`, `question` and `answer`, `messages`, `instruction` and `output`, a sample log "
    "of lm-evaluation-harness with `doc`, `target` and `arguments`, or requests of olmes"
)
# files of a harness: one per task
_LOG = re.compile(r"samples_(?P<task>.+?)(?:_\d{4}-\d\d-\d\dT.*)?|task-\d+-(?P<olmes>.+)-requests")
_ENDING = re.compile(r"(?:\.(?:jsonl?|parquet|gz|zst))+$")
_FILE = re.compile(r".*\.(?:jsonl?|parquet)(?:\.gz|\.zst)?", re.DOTALL)

Records = Iterable[tuple[str, Mapping[str, Any]]]  # where it is, for messages, and its fields
T = TypeVar("T")


def load_units(settings: TargetSettings, in_memory: Sequence[Unit] = ()) -> UnitSet:
    """Units of every target named, in the order named; within a target in the order drawn.

    `units_per_target` units are drawn without replacement. The draw depends on the seed, the target's name
    and the number of its units alone, and draws are nested: the first 64 of 128 are the 64. Leaving a unit
    out moves no other one, except that later ones take the places that come free.

    Args:
        in_memory: the units that a name beginning with `sources.IN_MEMORY` stands for.
    Raises:
        TargetError: no target, an unknown or empty one, a record of no known form (with file and line), two targets of
            one name, a unit_id that occurs twice.
        MissingExtraError: what a target is read with is not installed.
    """
    given: list[Sequence[Unit]] = []
    for name in settings.names:
        # a file: by a folder, a scheme, an ending, or because it is there
        looks_so = name.startswith(IN_MEMORY) or "/" in name or "\\" in name or _FILE.fullmatch(name) is not None
        if in_memory and name.startswith(IN_MEMORY):
            given.append(in_memory)
        elif looks_so or Path(name).is_file():
            for file in _logs_in(name) or [name]:
                records = _array_in(file) or records_of(file, field="targets.names")
                units = units_of(records, target_name(file), settings.loss_on)
                if not units:
                    raise TargetError(f"{file}: no units; {LOOKED_FOR}")
                given.append(units)
        else:
            given.append(read_task(name, settings.variant, settings.loss_on, task_root()))
    given += [read_mapped(target, settings.loss_on) for target in settings.datasets]
    pools: dict[str, list[Unit]] = {}
    for group in given:
        if clash := sorted({unit.target for unit in group} & pools.keys()):
            raise TargetError(f"targets: {', '.join(clash)} is named twice, expected each target once")
        for unit in group:
            pools.setdefault(unit.target, []).append(unit)
    if not pools:
        raise TargetError("targets.names: got none, expected at least one task or file of units")
    target_of: dict[str, str] = {}
    for unit in chain.from_iterable(pools.values()):
        for part in ("target", "unit_id", "prompt", "completion"):
            text: str = getattr(unit, part)  # of a conversation the prompt is all that is said
            try:
                text.encode()
            except UnicodeEncodeError as err:  # JSON may spell halves of pairs, which no tokenizer and no table takes
                raise TargetError(
                    f"unit {unit.unit_id!a} of {unit.target!a}: {part}: half of a surrogate pair at character "
                    f"{err.start}, which is no text; mend it"
                ) from err
        if other := target_of.get(unit.unit_id):
            raise TargetError(
                f"targets: unit_id {unit.unit_id!r} occurs twice (in {other} and {unit.target}), expected each once"
            )
        target_of[unit.unit_id] = unit.target
    drawn = [draw(target, pool, [unit.unit_id for unit in pool], settings) for target, pool in pools.items()]
    excluded = frozenset(settings.exclude_units)
    found = tuple(unit.unit_id for unit in chain.from_iterable(pools.values()) if unit.unit_id in excluded)
    sizes = {target: len(pool) for target, pool in pools.items()}
    return UnitSet(tuple(chain.from_iterable(drawn)), found, sizes, tuple(chain.from_iterable(pools.values())))


def draw(target: str, pool: Sequence[T], unit_ids: Sequence[str], settings: TargetSettings) -> list[T]:
    """What is scored of a target, in the order drawn.

    Raises:
        TargetError: all of it is left out.
    """
    # An alias draws what its task draws: the stream is named by the task that stands behind it.
    order = stream(settings.seed, "units", ALIASES.get(target, target)).permutation(len(pool))
    excluded = frozenset(settings.exclude_units)
    kept = [pool[k] for k in order if unit_ids[k] not in excluded]
    if not kept:
        raise TargetError(f"targets: {target} has {len(pool)} units and all are in exclude_units, expected one or more")
    return kept[: settings.units_per_target]


def target_name(path: str) -> str:
    """What a file's target is called where no record says: the file's name without its ending."""
    stem = _ENDING.sub("", PurePosixPath(path.partition("::")[0].rstrip("/")).name)
    log = _LOG.fullmatch(stem)
    return log["task"] or log["olmes"] if log else stem


def records_of(
    data: Source | str, split: str | None = None, field: str = "targets"
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Records of a source, or of what a path names, with all of their columns; `field` is the setting that names it.

    Raises:
        TargetError: it cannot be read.
    """
    try:
        source = open_source(data, split, field) if isinstance(data, str) else data
        for chunk in source.chunks(0, lambda schema, _: list(schema.names)):
            yield from records_in(chunk, mend=False)  # half of a pair in a question is refused
    except CorpusError as err:
        raise TargetError(str(err) if str(err).startswith(field) else f"{field}: {err}") from err


def _logs_in(directory: str) -> list[str]:
    """Logs of a harness in a local directory and below, one per task; none: it is something else.

    Raises:
        TargetError: two logs of one task.
    """
    logs: dict[str, str] = {}
    for path in sorted(Path(directory).rglob("*") if Path(directory).is_dir() else ()):
        if _FILE.fullmatch(path.name) and _LOG.fullmatch(_ENDING.sub("", path.name)):
            first = logs.setdefault(target_name(path.name), str(path))
            if first != str(path):
                raise TargetError(f"{directory}: {first} and {path} are logs of one task; name the file that you mean")
    return list(logs.values())


def _array_in(file: str) -> Records | None:
    """Records of a local file that is one JSON list of objects, as harnesses wrote before; None: another file."""
    if not file.endswith((".json", ".jsonl")) or not Path(file).is_file():
        return None
    with Path(file).open("rb") as handle:
        if not handle.read(64).lstrip().startswith(b"["):
            return None
    try:
        records = parse_json(Path(file).read_bytes())
    except ValueError as err:
        raise TargetError(f"{file}: not JSON: {err}; mend or write it again") from err
    if not records or not all(isinstance(record, Mapping) for record in records):
        return None
    return [(f"{file}: record {k}", record) for k, record in enumerate(records)]


class UnitFields(BaseModel):
    """What a record may hold; other fields are left alone."""

    model_config = ConfigDict(strict=True, frozen=True)

    prompt: str
    completion: str
    task: Annotated[str, Field(min_length=1)] | None = None
    unit_id: str | int | None = None
    loss_on: LossOn | None = None
    choices: list[str] = []
    gold: int | None = None
    support: str | None = None


def units_of(records: Records, task: str, loss_on: LossOn) -> list[Unit]:
    """Records as units; unit_id is the record's own, else ``<task>:<position among the records of that task>``.

    The first record says whether they are a log of a harness, whose records belong together.
    """
    records = iter(records)
    head = list(islice(records, 1))
    records = chain(head, records)
    for is_log, read in ((is_sample, units_of_log), (is_request, units_of_requests)):
        if head and is_log(head[0][1]):
            return read(records, task, loss_on)
    units: list[Unit] = []
    seen: dict[str, int] = {}
    for where, record in records:
        fields, conversation = _fields(record, where)
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
        if conversation is None:
            units.append(unit)
            continue
        answers = conversation.answers  # a unit for the last, or for every one, each after all that was said before it
        chosen = answers if unit.loss_on == "assistant" else answers[-1:]
        for k in chosen:
            own = replace(
                unit,
                unit_id=unit.unit_id if len(chosen) == 1 else f"{unit.unit_id}#{answers.index(k)}",
                loss_on="all" if unit.loss_on == "all" else "completion",
                conversation=Conversation(conversation.turns[: k + 1], conversation.tools),
            )
            units.append(own)
    return units


def _fields(record: Mapping[str, Any], where: str) -> tuple[UnitFields, Conversation | None]:
    """A record in any of the forms."""
    given = {name: value for name, value in record.items() if value is not None}
    conversation = None
    if not isinstance(given.get("completion"), str):
        try:
            conversation = conversation_in(given, where)
        except CorpusError as err:
            raise TargetError(str(err)) from err
        if conversation is not None and conversation.fault is not None:
            raise TargetError(f"{where}: {FAULTS[conversation.fault]}; mend it or take it out")
    if conversation is not None:  # it ends with an answer, or what follows is left out
        last = conversation.turns[conversation.answers[-1]]
        parts = [last["content"], *answer_parts(last).values()]
        completion = next(text for part in parts if (text := str(part or "")).strip())
        given |= {"prompt": conversation.content, "completion": completion}
    elif {"question", "answer"} <= given.keys() and "prompt" not in given:
        question, answer = given.pop("question"), _answer(given.pop("answer"), where)
        given |= {"prompt": f"Question: {question}\nAnswer:", "completion": f" {answer}"}
    elif not {"prompt", "completion"} & given.keys():
        refuse_unscored(record, where)
        named = ", ".join(f"{name} (null)" if value is None else str(name) for name, value in record.items())
        raise TargetError(f"{where}: has the fields {named or 'none'}; {LOOKED_FOR}")
    try:
        fields = UnitFields.model_validate(given)
    except ValidationError as err:
        raise TargetError(describe(err, where)) from err
    if not fields.completion.strip():
        raise TargetError(f"{where}: completion: got {fields.completion!r}, expected text to score")
    if fields.gold is not None and not 0 <= fields.gold < len(fields.choices):
        raise TargetError(
            f"{where}: gold: got {fields.gold}, expected the position of one of {len(fields.choices)} choices"
        )
    return fields, conversation


def _answer(answer: Any, where: str) -> str:
    """Return the text of an answer: of several that are right (Natural Questions, TriviaQA) the first."""
    found = answer
    if isinstance(found, Mapping):
        found = found.get("value")
    if isinstance(found, list) and found:
        found = found[0]
    if isinstance(found, bool) or not isinstance(found, str | int | float):
        raise TargetError(f"{where}: answer: got {answer!r:.60}, expected a text or a list of texts")
    return str(found)


def read_mapped(target: DatasetTarget, loss_on: LossOn) -> list[Unit]:
    """Every record of a source as a unit, by format strings; unit_id is ``<name>:<id column or position>``.

    Raises:
        MissingExtraError: `datasets` is needed and not installed.
        TargetError: nothing to read, an unknown split or column (with those that there are), an empty completion.
    """
    where = f"targets.datasets.{target.name}"
    try:
        templates = Template(target.prompt, f"{where}.prompt"), Template(target.completion, f"{where}.completion")
    except CorpusError as err:
        raise TargetError(str(err)) from err
    used = templates[0].columns | templates[1].columns | (set() if target.unit_id is None else {target.unit_id})
    units = []
    for k, (_, record) in enumerate(records_of(target.path, target.split, where)):
        missing = sorted(used - record.keys())
        if missing:
            raise TargetError(f"{where}: no column {', '.join(missing)}; {target.path} has {', '.join(record)}")
        try:
            prompt, completion = (template.fill(record, f"{target.path}, row {k}") for template in templates)
        except CorpusError as err:
            raise TargetError(str(err)) from err
        if not completion.strip():
            raise TargetError(f"{where}: row {k}: completion: got {completion!r}, expected text to score")
        unit_id = f"{target.name}:{k if target.unit_id is None else record[target.unit_id]}"
        units.append(Unit(unit_id, target.name, prompt, completion, loss_on))
    if not units:
        raise TargetError(f"{where}: {target.path} has no rows, expected at least one")
    return units
