"""Load the units of the targets in the settings, and draw a sample of each target.

A target is a task on which the model is evaluated; a unit is one scored element of it, such as a question with its
answer. A target is the name of a task that a reader knows, a file of records (`grasp.targets.unit_records` has the
accepted forms), a directory of harness logs, or an entry of a dataset configuration.

A user-defined metric is a target made of the units of other targets with signed weights. Its file has records of
`unit_id` and `weight`. Start with `load_units`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from math import isfinite
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from grasp.corpus.conversations import form_of
from grasp.corpus.documents import records_in
from grasp.corpus.sources import IN_MEMORY, Source, open_source, unread_files_note
from grasp.corpus.text_files import DELIMITER, FILE_TYPES, cell_value, file_type
from grasp.errors import TargetError, at
from grasp.file_readers import claimed, readers
from grasp.seeds import stream
from grasp.settings import CorpusSettings, TargetSettings
from grasp.targets.margins import METRICS, split_metric, with_metric
from grasp.targets.unit_records import EXPECTED_FIELDS, Records, units_from_records
from grasp.targets.units import Unit, UnitSet
from grasp.text import did_you_mean

_SUFFIX = re.compile(r"(?:\.(?:jsonl?|ndjson|csv|tsv|parquet|pq|gz|gzip|zstd?|bz2|xz))+$", re.IGNORECASE)

T = TypeVar("T")


def load_units(settings: TargetSettings, in_memory: Sequence[Unit] = ()) -> UnitSet:
    """Load the units of all targets, in the order of `settings.names`; within a target, in the order of the draw.

    `units_per_target` units are drawn without replacement. The draw depends on the seed, the name of the target and
    its number of units only. Draws are nested: the first 64 of 128 units are those of a draw of 64. Excluding a unit
    does not change the order of the others. User-defined metrics keep all their units.

    Args:
        settings: names of the targets, and how their units are drawn.
        in_memory: units of the target whose name begins with `sources.IN_MEMORY`.
    Raises:
        TargetError: there is no target; a target is unknown or empty; a record has an unknown form (the message has
            file and line); two targets have the same name; a unit_id is not unique.
        MissingExtraError: a package that reads the target is not installed.
    """
    unit_lists: list[Sequence[Unit]] = []
    weight_files: list[tuple[str, Records]] = []
    for name in settings.names:
        units_of_name, weights_of_name = _load_name(name, settings, in_memory)
        unit_lists += units_of_name
        weight_files += weights_of_name
    # All units by target, in the order of the files: the population that each draw is from.
    population: dict[str, list[Unit]] = {}
    for units in unit_lists:
        _require_unique_targets({unit.target for unit in units}, population)
        for unit in units:
            population.setdefault(unit.target, []).append(unit)
    metric_names: set[str] = set()
    for name, weights in weight_files:
        metrics = weighted_units(weights, name, {unit.unit_id: unit for unit in chain(*population.values())})
        _require_unique_targets(metrics, population)
        population |= metrics
        metric_names |= metrics.keys()
    if not population:
        raise TargetError("targets.names: got none, expected at least one task or file of units")
    all_units = tuple(chain(*population.values()))
    _validate_units(all_units)
    draw_all = settings.model_copy(update={"units_per_target": None})
    drawn = [
        draw(target, units, [unit.unit_id for unit in units], draw_all if target in metric_names else settings)
        for target, units in population.items()
    ]
    excluded = frozenset(settings.exclude_units)
    excluded_ids = tuple(
        unit.unit_id for unit in all_units if not excluded.isdisjoint((unit.unit_id, split_metric(unit.unit_id)[0]))
    )
    sizes = {target: len(units) for target, units in population.items()}
    return UnitSet(tuple(chain(*drawn)), excluded_ids, sizes, all_units)


def _load_name(
    full_name: str, settings: TargetSettings, in_memory: Sequence[Unit]
) -> tuple[list[Sequence[Unit]], list[tuple[str, Records]]]:
    """Return what a name of the settings refers to: units by file, and names and records of files of weights."""
    # an existing file may have an @ in its name
    name, metric = (full_name, None) if Path(full_name).exists() else split_metric(full_name)
    unit_lists: list[Sequence[Unit]] = []
    weight_files: list[tuple[str, Records]] = []
    # a file name has a directory, a URL scheme or a known suffix, or the file exists
    is_file = name.startswith(IN_MEMORY) or "/" in name or "\\" in name or file_type(name)[0] in FILE_TYPES
    task, _, unknown = name.rpartition("@")  # a metric that does not exist
    if in_memory and name.startswith(IN_MEMORY):
        unit_lists.append(in_memory)
    elif (claim := claimed("corpus", name)) is not None:
        entry = claim.reader.read(name)
        unit_lists.append(units_from_records(_entry_records(entry), target_name(entry["path"]), settings.loss_on))
    elif task and not Path(name).exists() and (Path(task).exists() or not is_file):  # no task has an @ in its name
        raise TargetError(
            f"targets.names: {name}: no such file, and no metric {unknown!r}{did_you_mean(unknown, METRICS)}; expected "
            f"a task or a file, and @ with one of {', '.join(METRICS)}"
        )
    elif is_file or Path(name).is_file():
        for file in _find_logs(name) or [name]:
            unread = read_records(file)
            first_records = list(islice(unread, 1))  # [] if there are no records
            records = chain(first_records, unread)
            fields = first_records[0][1].keys() if first_records else ()
            if "weight" in fields and {"unit_id", "weight", "target"}.issuperset(fields):  # of a user-defined metric
                weight_files.append((target_name(file), records))
                continue
            units = units_from_records(records, target_name(file), settings.loss_on)
            if not units:
                raise TargetError(f"{file}: no units; {EXPECTED_FIELDS}")
            unit_lists.append(units)
    elif (claim := claimed("task", name)) is not None:
        unit_lists.append(claim.reader.read(name, settings.variant, settings.loss_on))
    else:
        raise TargetError(f"targets.names: {name!r} is no file, and no reader knows a task of this name")
    if metric is not None:
        unit_lists = [[with_metric(unit, metric) for unit in units] for units in unit_lists]
    return unit_lists, weight_files


def _require_unique_targets(names: Iterable[str], known: Mapping[str, Any]) -> None:
    """Raise an error if a name is one of the known targets."""
    if duplicates := sorted(known.keys() & names):
        raise TargetError(f"targets: {', '.join(duplicates)} is named twice, expected unique targets")


def _validate_units(units: Iterable[Unit]) -> None:
    """Raise an error if a text of a unit is not valid Unicode, or a unit_id occurs twice."""
    target_of: dict[str, str] = {}
    for unit in units:
        for field in ("target", "unit_id", "prompt", "completion"):
            text: str = getattr(unit, field)  # for a conversation, the prompt has the text of all turns
            try:
                text.encode()
            except UnicodeEncodeError as err:  # JSON can contain lone surrogates; tokenizers and tables reject them
                raise TargetError(
                    f"unit {unit.unit_id!a} of {unit.target!a}: {field}: half of a surrogate pair at character "
                    f"{err.start}, which is not valid text; fix the file"
                ) from err
        if other := target_of.get(unit.unit_id):
            raise TargetError(
                f"targets: unit_id {unit.unit_id!r} occurs twice (in {other} and {unit.target}), expected unique ids"
            )
        target_of[unit.unit_id] = unit.target


def draw(target: str, items: Sequence[T], unit_ids: Sequence[str], settings: TargetSettings) -> list[T]:
    """Draw `settings.units_per_target` items of a target, without those that are excluded.

    Args:
        target: name of the target, of which the draw is a function.
        items: all items of the target.
        unit_ids: unit_id of each item.
        settings: number of units, seed and excluded units.
    Raises:
        TargetError: all units are excluded.
    """
    task, _ = split_metric(target)  # all metrics of a task draw the same units
    # An alias has the random stream of its task, so that both draw the same units.
    aliases = {alias: name for reader in readers("task").values() for alias, name in reader.ALIASES.items()}
    order = stream(settings.seed, "units", aliases.get(task, task)).permutation(len(items))
    excluded = frozenset(settings.exclude_units)
    # by the id of a unit, or by its id without the metric: `sciq:3` excludes `sciq:3@margin`
    remaining = [items[k] for k in order if excluded.isdisjoint((unit_ids[k], split_metric(unit_ids[k])[0]))]
    if not remaining:
        raise TargetError(f"targets: {target} has {len(items)} units and all are in exclude_units; keep at least one")
    return remaining[: settings.units_per_target]


def weighted_units(records: Records, name: str, known: Mapping[str, Unit]) -> dict[str, list[Unit]]:
    """Return the units of user-defined metrics, by target: units of other targets with signed weights.

    Args:
        records: records of `unit_id`, `weight` and optionally `target`, the name of the metric.
        name: name of the metric of records without a `target`.
        known: units of all other targets, by unit_id.
    Raises:
        TargetError: an unknown unit, or a weight that is 0 or not a number.
    """
    metrics: dict[str, list[Unit]] = {}
    for location, record in records:
        unit_id, target = record.get("unit_id"), record.get("target") or name
        weight: Any = record.get("weight")
        if isinstance(weight, str) and file_type(location.rpartition(":")[0])[0] in DELIMITER:
            weight = cell_value(weight)
        unit, fault = known.get(str(unit_id)), ""
        if unit is None:
            examples = ", ".join(list(known)[:3]) or "none"
            fault = (
                f"unit_id: {unit_id!r} is not a unit of the other targets ({examples}, ...); name its target too, e.g. "
                "--targets sciq,weights.jsonl; targets that an artifact already has are not read"
            )
        elif isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight) or not weight:
            fault = f"weight: got {weight!r}, expected a number other than 0, with a decimal point; its sign is kept"
        if unit is None or fault:
            raise TargetError(f"{location}: {fault}")
        metrics.setdefault(str(target), []).append(
            replace(unit, unit_id=f"{unit_id}@{target}", target=str(target), weight=unit.weight * float(weight))
        )
    return metrics


def split_names(text: str) -> list[str]:
    """Split names separated by commas; an existing file may have commas in its name."""
    return [text] if Path(text).is_file() else [part.strip() for part in text.split(",") if part.strip()]


def target_name(path: str) -> str:
    """Return the default name of the target of a file: the file name without suffix, or the task of a log file.

    A part of the path after `::`, which names a member of an archive or a table, is ignored.
    """
    stem = _SUFFIX.sub("", PurePosixPath(path.partition("::")[0].rstrip("/")).name)
    matches = (reader.LOG_NAME.fullmatch(stem) for reader in readers("target").values())
    return next((match["task"] for match in matches if match), stem)


def read_records(data: Source | str, split: str | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the records of a source or path, each with its location and all columns.

    Args:
        data: an opened source, or the path of a file or `datasets` directory.
        split: split of a `datasets` directory; None: the only one.
    Raises:
        TargetError: the data cannot be read.
    """
    with at("targets.names" if isinstance(data, str) else "targets", TargetError):
        source = open_source(data, split) if isinstance(data, str) else data
        for chunk in source.chunks(0, lambda schema, _: list(schema.names)):
            yield from records_in(chunk, repair=False)  # lone surrogates in a question are an error


def _entry_records(entry: Mapping[str, Any]) -> Records:
    """Yield the records of an entry of a dataset configuration in the usual names, with the other fields of a unit."""
    is_preference = entry["fields"]["form"] == "preference"
    settings = CorpusSettings.model_validate({**entry, "form": "preference" if is_preference else None})
    for location, record in read_records(settings.path, settings.split):
        with at(location, TargetError):
            content = form_of(tuple(record), settings).usual(record)
        # all of a text carries loss
        content = {"prompt": "", "completion": content["text"] or ""} if "text" in content else content
        yield location, {name: record[name] for name in ("task", "unit_id", "loss_on") if name in record} | content


def unread_files_notes(settings: TargetSettings) -> list[str]:
    """Return notes on the files in local directories of targets that are not read; a directory of logs has none."""
    directories = [name for name in settings.names if Path(name).is_dir()]
    of_records = [name for name in directories if not (claimed("corpus", name) or _find_logs(name))]
    return [f"{name}: {note}" for name in of_records for note in unread_files_note(open_source(name))]


def _find_logs(directory: str) -> list[str]:
    """Return the log files of a harness below a local directory, one per task; empty if there are none."""
    logs: dict[str, str] = {}
    for path in sorted(Path(directory).rglob("*") if Path(directory).is_dir() else ()):
        task = target_name(path.name)
        if file_type(path.name)[0] in FILE_TYPES and task != _SUFFIX.sub("", path.name):  # its name is that of a log
            first = logs.setdefault(task, str(path))
            if first != str(path):
                raise TargetError(f"{directory}: {first} and {path} are logs of the same task; pass one of the files")
    return list(logs.values())
