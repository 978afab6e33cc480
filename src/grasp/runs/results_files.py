"""Results that evaluation harnesses wrote: a folder a run, with the files of lm-evaluation-harness or olmes in it.

    a/my__model/results_2025-01-01T10-00-00.000001.json      lm-evaluation-harness; results.json before version 0.4.3
    a/task-000-sciq-metrics.json, a/metrics-all.jsonl        olmes

All files of a run are read. Where a result is there twice, the newest counts, and a note names both if they differ.
Results of a task are comparable if they come from equally many examples in the prompt, one version of the task, and
equally many questions: within a run the newest file decides, between runs a difference is an error.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isnan
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from grasp.errors import RunsError
from grasp.runs.table import Direction
from grasp.text import parse_json

LOWER = r"loss|perplexity|ppl|nll|bpb|bits_per_byte|error|brier|(^|[/_.])ce($|[/_.])"
HIGHER = (
    r"acc|f1|exact_match|(^|[/_.])em($|[/_.])|bleu|rouge|(?<!primary_)score|pass@|reward|auc|utility|mrr|recall|precision"
    r"|sum_logits|logits_per_(token|char)"
)
NAMED = 3  # results that a note names

_DATE = re.compile(r"_?(\d{4}-\d\d-\d\dT[\d.-]+)$")
_HARNESS = re.compile(r"results.*\.json|.+_\d{4}-\d\d-\d\dT[\d.-]+\.json")
_OLMES = re.compile(r"task-\d+-.+-metrics\.json|metrics-all\.jsonl|\d{8}-\d{6}-.+-tasks\.jsonl")
_NAMES = ("alias", "name", " ")  # texts beside the metrics
_NO_METRICS = ("samples", "sample_len", "bypass")  # numbers of questions; what stands for a metric if nothing is scored
_UNKNOWN = (None, "N/A", "Yaml")

Kind = Literal["values", "conditions", "groups", "models", "texts"]
_KINDS: Mapping[Kind, str] = {
    "values": "files of a run differ, the newest counts",
    "conditions": "results of a run were left out, as a newer file has other conditions",
    "groups": "means of groups are older than results of their tasks",
    "models": "files of a run name different models",
    "texts": "results that are no numbers were left out",
}


def direction_by_name(metric: str) -> Direction | None:
    """Whether more of a metric is better, by its name; None: the name does not tell."""
    return "lower" if re.search(LOWER, metric.lower()) else "higher" if re.search(HIGHER, metric.lower()) else None


@dataclass(frozen=True, slots=True)
class TaskResults:
    """What a file says of a task.

    Attributes:
        file: its path below the directory of all runs.
        conditions: examples in the prompt, version, number of questions; those that the file names.
        date: when it was evaluated, as digits that sort; empty: not known.
        group: tasks that it is the mean of.
        texts: metrics whose value is no number.
    """

    task: str
    file: str
    values: Mapping[str, float]
    directions: Mapping[str, Direction]
    conditions: Mapping[str, Any]
    date: str
    model: str | None = None
    alias: str | None = None
    group: Sequence[str] = ()
    texts: Sequence[str] = ()

    @property
    def columns(self) -> frozenset[str]:
        """Its metrics, as the table of all runs calls them."""
        return frozenset(f"{self.task}/{name}" for name in self.values)

    def is_about(self, metrics: Collection[str]) -> bool:
        """Whether some of these metrics are among its own."""
        return any(name in metrics for name in self.columns)


@dataclass(frozen=True, slots=True)
class Remark:
    """What was passed over or stands out, and the metrics it is about."""

    kind: Kind
    metrics: Collection[str]
    text: str

    def is_about(self, metrics: Collection[str]) -> bool:
        """Whether it concerns some of these metrics, or results that became none."""
        return not self.metrics or any(name in metrics for name in self.metrics)


@dataclass(frozen=True, slots=True)
class HarnessResults:
    """Results of all runs in a directory.

    Attributes:
        by_run: of every run the results of each task.
    """

    root: Path
    by_run: Mapping[str, Mapping[str, TaskResults]]
    remarks: Sequence[Remark]

    @property
    def table(self) -> pa.Table:
        """A row per run and a column `task/metric` each; NaN: the run has none."""
        values = {
            run: {f"{task}/{name}": value for task, result in of_run.items() for name, value in result.values.items()}
            for run, of_run in self.by_run.items()
        }
        names = dict.fromkeys(name for of_run in values.values() for name in of_run)
        columns = {name: pa.array([of_run.get(name, float("nan")) for of_run in values.values()]) for name in names}
        return pa.table({"run": pa.array(list(values), pa.string()), **columns})

    @property
    def directions(self) -> dict[str, Direction]:
        """Of the metrics whose files say whether more is better."""
        results = [result for of_run in self.by_run.values() for result in of_run.values()]
        return {f"{result.task}/{name}": way for result in results for name, way in result.directions.items()}

    def check_comparable(self, metrics: Collection[str]) -> None:
        """Check that runs were evaluated alike on the tasks of these metrics.

        Raises:
            RunsError: two runs differ in the conditions of a task.
        """
        first: dict[tuple[str, str], tuple[str, TaskResults]] = {}  # that names a condition of a task
        for run, of_run in self.by_run.items():
            for task, result in of_run.items():
                for condition, value in result.conditions.items() if result.is_about(metrics) else ():
                    other_run, other = first.setdefault((task, condition), (run, result))
                    if other.conditions[condition] != value:
                        raise RunsError(
                            f"{self.root}: {task}: runs {other_run!r} and {run!r} were evaluated with {condition} "
                            f"{other.conditions[condition]} and {value} ({other.file}, {result.file}); evaluate them "
                            f"alike, or leave the task out: --metrics '!{task}/*'"
                        )

    def notes_about(self, metrics: Collection[str]) -> list[str]:
        """What should be known of these metrics, a sentence per kind."""
        notes = []
        for kind, heading in _KINDS.items():
            about = [one.text for one in self.remarks if one.kind == kind and one.is_about(metrics)]
            if about:
                more = f"; and {len(about) - NAMED} more" if len(about) > NAMED else ""
                notes.append(f"{heading}: {'; '.join(about[:NAMED])}{more}")
        results = {task: result for of_run in self.by_run.values() for task, result in of_run.items()}
        tasks = [task for task, result in results.items() if result.is_about(metrics)]
        for task in tasks:
            members = [name for name in results[task].group if name in tasks]
            if members:
                text = f"{task} is a mean of tasks that are metrics as well ({len(members)}, e.g. {members[0]})"
                notes.append(f"{text}; each counts on its own, choose with --metrics")
        return notes


def read_results(root: Path) -> HarnessResults:
    """Read every results file below a directory.

    Raises:
        RunsError: no file, a damaged one, or two that differ where nothing says which is newer.
    """
    found: dict[str, list[TaskResults]] = {}
    for path in sorted(root.rglob("*.json*")):
        read = _of_harness if _HARNESS.fullmatch(path.name) else _of_olmes if _OLMES.fullmatch(path.name) else None
        if read is None:
            continue
        parts = path.relative_to(root).parts
        file = str(path.relative_to(root))
        run = parts[0] if len(parts) > 1 else _DATE.sub("", path.stem) or path.stem
        try:
            found.setdefault(run, []).extend(read(path, file))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError) as err:
            harness = "lm-evaluation-harness" if read is _of_harness else "olmes"
            raise RunsError(f"{path}: is no results file of {harness}: {err!r:.200}") from err
    if not found:
        raise RunsError(
            f"{root}: holds no results*.json and no *-metrics.json; expected a folder a run, with the files that "
            "lm-evaluation-harness or olmes wrote"
        )
    aliases: dict[tuple[str, str], set[str | None]] = {}
    for run, results in found.items():
        for result in results:
            aliases.setdefault((run, result.task), set()).add(result.alias)
    # olmes calls variants of a task by one name, and tells them apart by an alias
    variants = {task for (_, task), names in aliases.items() if len(names) > 1}
    remarks: list[Remark] = []
    by_run = {}
    for run, results in found.items():
        named = [replace(one, task=one.alias) if one.alias and one.task in variants else one for one in results]
        by_run[run] = _newest(run, named, remarks)
    return HarnessResults(root, by_run, remarks)


def _newest(run: str, results: Sequence[TaskResults], remarks: list[Remark]) -> dict[str, TaskResults]:
    """Of each task the newest results, and what only older files under the same conditions have; adds to `remarks`."""
    by_task: dict[str, list[TaskResults]] = {}
    for result in results:
        by_task.setdefault(result.task, []).append(result)
    merged: dict[str, TaskResults] = {}
    for task, same_task in by_task.items():
        newest, *older = sorted(same_task, key=lambda result: result.date, reverse=True)
        source, conditions = dict.fromkeys(newest.values, newest), dict(newest.conditions)
        for result in older:
            others = {name: value for name, value in result.conditions.items() if conditions.get(name, value) != value}
            if others:
                differences = ", ".join(f"{name} {conditions[name]} and {value}" for name, value in others.items())
                _refuse_undated(run, task, differences, newest, result)
                text = f"{run}: {task}: {differences} ({newest.file}, {result.file})"
                remarks.append(Remark("conditions", newest.columns, text))
                continue
            conditions |= result.conditions
            for name, value in result.values.items():
                used = source.setdefault(name, result)
                if used.values[name] != value and not isnan(used.values[name] + value):
                    differences = f"{name} {used.values[name]:.9g} and {value:.9g}"
                    _refuse_undated(run, task, differences, used, result)
                    text = f"{run}: {task}: {differences} ({used.file}, {result.file})"
                    remarks.append(Remark("values", {f"{task}/{name}"}, text))
        directions = {name: way for result in (*reversed(older), newest) for name, way in result.directions.items()}
        values = {name: result.values[name] for name, result in source.items()}
        merged[task] = replace(newest, values=values, directions=directions, conditions=conditions)
        if texts := sorted({name for result in same_task for name in result.texts} - source.keys()):
            remarks.append(Remark("texts", merged[task].columns, f"{run}: {task}: {', '.join(texts)}"))
    for mean in merged.values():
        for task in mean.group:
            now, before = merged.get(task), [one for one in by_task.get(task, ()) if one.file == mean.file]
            if now and any(now.values.get(name) != value for one in before for name, value in one.values.items()):
                text = f"{run}: {mean.task} ({mean.file}) is older than {task} ({now.file})"
                remarks.append(Remark("groups", mean.columns, text))
    models = dict.fromkeys(result.model for result in results if result.model)
    if len(models) > 1:
        columns = frozenset().union(*(result.columns for result in merged.values()))
        remarks.append(Remark("models", columns, f"{run}: {', '.join(models)}"))
    return merged


def _refuse_undated(run: str, task: str, differences: str, one: TaskResults, other: TaskResults) -> None:
    if one.date == other.date:
        raise RunsError(
            f"run {run!r}: {task} has {differences} in {one.file} and {other.file}, and no date tells which is newer; "
            "take one of them away"
        )


# ------------------------------------------------------------------------------------------------- files of a harness


def _of_harness(path: Path, file: str) -> Iterator[TaskResults]:
    """Results of lm-evaluation-harness: `metric,filter` of every task; before version 0.4 `metric`."""
    data = parse_json(path.read_bytes())
    config = data.get("config") or {}
    name_date, date = _DATE.search(path.stem), data.get("date")
    if name_date is not None:
        when = name_date[1]
    else:
        when = datetime.fromtimestamp(date, UTC).strftime("%Y%m%d%H%M%S%f") if isinstance(date, int | float) else ""
    for task, found in data["results"].items():
        has_filters = any("," in key for key in found)
        values, texts = {}, []
        for key, value in found.items():
            metric, _, kind = key.partition(",")
            if (has_filters and "," not in key) or key in _NAMES or metric.endswith("_stderr"):
                continue
            name = key if kind not in ("", "none") else metric
            if isinstance(value, bool) or not isinstance(value, int | float):
                texts.append(name)
            elif metric not in _NO_METRICS:
                values[name] = float(value)
        better = data.get("higher_is_better", {}).get(task) or {}
        conditions = {
            "n-shot": (data.get("n-shot") or {}).get(task, config.get("num_fewshot")),
            "version": (data.get("versions") or {}).get(task),
            "questions": ((data.get("n-samples") or {}).get(task) or {}).get("effective"),
        }
        yield TaskResults(
            task=task,
            file=file,
            values=values,
            directions={
                name: "higher" if better[metric] else "lower"
                for name in values
                if better.get(metric := name.partition(",")[0]) is not None
            },
            conditions=_known(conditions),
            date=re.sub(r"\D", "", when),
            model=data.get("model_name"),
            group=data.get("group_subtasks", {}).get(task, ()),
            texts=texts,
        )


def _known(conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conditions that a file names; a number may be written as a text (`"version": "1"`)."""
    known = {name: value for name, value in conditions.items() if value not in _UNKNOWN}
    for name, value in known.items():
        if isinstance(value, str):
            with suppress(ValueError):
                known[name] = float(value)
    return known


def _of_olmes(path: Path, file: str) -> Iterator[TaskResults]:
    """Metrics of olmes, of one task or a line each; those of a run without a model hold none."""
    text = path.read_bytes()
    for data in map(parse_json, text.splitlines()) if path.suffix == ".jsonl" else [parse_json(text)]:
        config, metrics = data["task_config"], data.get("metrics")
        primary = direction_by_name(config.get("primary_metric") or "")
        if metrics is None:
            continue
        values = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        conditions = {
            "n-shot": config.get("num_shots"),
            "version": config.get("version"),
            "questions": data.get("num_instances") or None,
        }
        yield TaskResults(
            task=data["task_name"],
            file=file,
            values=values,
            directions={"primary_score": primary} if primary and "primary_score" in values else {},
            conditions=_known(conditions),
            date=re.sub(r"\D", "", data.get("current_date", "")),
            model=(data.get("model_config") or {}).get("model"),
            alias=(config.get("metadata") or {}).get("alias"),
        )
