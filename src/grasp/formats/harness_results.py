"""Read results of evaluation harnesses: one folder per run, with files of lm-evaluation-harness or olmes.

Start with `read`.

    a/my__model/results_2025-01-01T10-00-00.000001.json      lm-evaluation-harness; results.json before version 0.4.3
    a/task-000-sciq-metrics.json, a/metrics-all.jsonl        olmes

All files of a run are read. If a result occurs twice, the newest is used, and a note names both if they differ. Results
of a task are comparable if they have the same number of few-shot examples, task version and number of questions: within
a run, the newest file decides; between runs, a difference is an error.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isnan
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from grasp.errors import RunsError
from grasp.runs.metric_names import direction_by_name, is_standard_error
from grasp.runs.training_runs import Direction
from grasp.text import parse_json

MAX_RESULTS_LISTED = 3  # results listed in a note

_DATE = re.compile(r"_?(\d{4}-\d\d-\d\dT[\d.-]+)$")
_LM_HARNESS = re.compile(r"results.*\.json|.+_\d{4}-\d\d-\d\dT[\d.-]+\.json")
_OLMES = re.compile(r"task-\d+-.+-metrics\.json|metrics-all\.jsonl|\d{8}-\d{6}-.+-tasks\.jsonl")
_NO_METRICS = ("samples", "sample_len", "bypass")  # numbers of questions; placeholder if nothing is evaluated
_UNKNOWN = (None, "N/A", "Yaml")  # values of conditions that lm-evaluation-harness writes if they are unknown

RemarkTopic = Literal["values", "conditions", "models"]
_HEADINGS: Mapping[RemarkTopic, str] = {
    "values": "files of a run differ; using the newest",
    "conditions": "results of a run were ignored, since a newer file has other conditions",
    "models": "files of a run name different models",
}


@dataclass(frozen=True, slots=True)
class TaskResults:
    """Results of one task in one file.

    Attributes:
        task: name of the task, or of a group of tasks.
        values: value of each metric.
        directions: whether higher or lower is better, for the metrics of which the file says so.
        file: path relative to the directory of all runs.
        conditions: number of few-shot examples, task version and number of questions, as far as the file has them.
        date: evaluation date as sortable digits; empty if unknown.
        model: name of the model, if the file has it.
        alias: further name of the task, which distinguishes variants of a task in files of olmes.
    """

    task: str
    file: str
    values: Mapping[str, float]
    directions: Mapping[str, Direction]
    conditions: Mapping[str, Any]
    date: str
    model: str | None = None
    alias: str | None = None

    @property
    def columns(self) -> frozenset[str]:
        """Names of the metrics in the table of all runs."""
        return frozenset(f"{self.task}/{name}" for name in self.values)


class Remark(NamedTuple):
    """A note on ignored or inconsistent results, and the metrics that it concerns; empty: all."""

    topic: RemarkTopic
    metrics: Collection[str]
    text: str


@dataclass(frozen=True, slots=True)
class HarnessResults:
    """Results of all runs in a directory.

    Attributes:
        by_run: results by run and task.
    """

    root: Path
    by_run: Mapping[str, Mapping[str, TaskResults]]
    remarks: Sequence[Remark]

    @property
    def table(self) -> pa.Table:
        """Table with one row per run and one column per `task/metric`; NaN if missing."""
        lines: list[dict[str, Any]] = [
            {"run": run} | {f"{r.task}/{name}": value for r in by_task.values() for name, value in r.values.items()}
            for run, by_task in self.by_run.items()
        ]
        empty: dict[str, Any] = dict.fromkeys((name for line in lines for name in line), float("nan"))
        return pa.Table.from_pylist([empty | line for line in lines])

    @property
    def directions(self) -> dict[str, Direction]:
        """Whether higher or lower is better, for the metrics of which the files say so."""
        results = [result for by_task in self.by_run.values() for result in by_task.values()]
        return {
            f"{result.task}/{name}": direction for result in results for name, direction in result.directions.items()
        }

    def notes_about(self, metrics: Collection[str]) -> list[str]:
        """Return notes on these metrics, one sentence per topic.

        Raises:
            RunsError: two runs differ in the conditions of a task of these metrics.
        """
        first: dict[tuple[str, str], tuple[str, TaskResults]] = {}  # first run with a condition of a task
        for run, by_task in self.by_run.items():
            for task, result in by_task.items():
                if result.columns.isdisjoint(metrics):
                    continue
                for condition, value in result.conditions.items():
                    other_run, other = first.setdefault((task, condition), (run, result))
                    if other.conditions[condition] != value:
                        raise RunsError(
                            f"{self.root}: {task}: runs {other_run!r} and {run!r} were evaluated with {condition} "
                            f"{other.conditions[condition]} and {value} ({other.file}, {result.file}); evaluate them "
                            f"with the same conditions, or exclude the task: --metrics '!{task}/*'"
                        )
        notes = []
        for topic, heading in _HEADINGS.items():
            relevant = [
                remark for remark in self.remarks if not remark.metrics or not set(metrics).isdisjoint(remark.metrics)
            ]
            texts = [remark.text for remark in relevant if remark.topic == topic]
            if texts:
                more = f"; and {len(texts) - MAX_RESULTS_LISTED} more" if len(texts) > MAX_RESULTS_LISTED else ""
                notes.append(f"{heading}: {'; '.join(texts[:MAX_RESULTS_LISTED])}{more}")
        return notes


def claims(path: Path) -> str:
    """Claim every directory that no other package claims; `read` says what it lacks."""
    return "it is a directory" if path.is_dir() else ""


def read(root: Path) -> HarnessResults:
    """Read every results file below a directory.

    Raises:
        RunsError: no results file, a damaged file, or files that differ without a date to tell which is newer.
    """
    by_run: dict[str, list[TaskResults]] = {}
    for path in sorted(root.rglob("*.json*")):
        if _LM_HARNESS.fullmatch(path.name):
            harness, parse = "lm-evaluation-harness", _parse_lm_harness
        elif _OLMES.fullmatch(path.name):
            harness, parse = "olmes", _parse_olmes
        else:
            continue
        directories = path.relative_to(root).parts[:-1]
        # A run is named after the directory of its files, or after the file if that is not in a directory.
        run = directories[0] if directories else _DATE.sub("", path.stem) or path.stem
        try:
            by_run.setdefault(run, []).extend(parse(path, str(path.relative_to(root))))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError) as err:
            raise RunsError(f"{path}: not a results file of {harness}: {err!r:.200}") from err
    if not by_run:
        raise RunsError(
            f"{root}: contains no results*.json and no *-metrics.json; expected one folder per run, with files of "
            "lm-evaluation-harness or olmes"
        )
    # olmes gives variants of a task the same name and different aliases
    aliases: dict[tuple[str, str], set[str | None]] = {}
    for run, results in by_run.items():
        for result in results:
            aliases.setdefault((run, result.task), set()).add(result.alias)
    variants = {task for (_, task), names in aliases.items() if len(names) > 1}
    remarks: list[Remark] = []
    merged = {}
    for run, results in by_run.items():
        named = [
            replace(result, task=result.alias) if result.alias and result.task in variants else result
            for result in results
        ]
        by_task: dict[str, list[TaskResults]] = {}
        for result in named:
            by_task.setdefault(result.task, []).append(result)
        merged[run] = {task: _merge_task(run, same_task, remarks) for task, same_task in by_task.items()}
        models = dict.fromkeys(result.model for result in named if result.model)
        if len(models) > 1:
            metrics = frozenset().union(*(result.columns for result in merged[run].values()))
            remarks.append(Remark("models", metrics, f"{run}: {', '.join(models)}"))
    return HarnessResults(root, merged, remarks)


def _merge_task(run: str, results: Sequence[TaskResults], remarks: list[Remark]) -> TaskResults:
    """Merge the results of one task from different files. Appends to `remarks`.

    The newest results are completed from older files with the same conditions.
    """
    newest, *older = sorted(results, key=lambda result: result.date, reverse=True)
    task = newest.task
    source = dict.fromkeys(newest.values, newest)  # results from which each metric is used
    conditions = dict(newest.conditions)
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
    oldest_first = (*reversed(older), newest)
    directions = {name: direction for result in oldest_first for name, direction in result.directions.items()}
    values = {name: result.values[name] for name, result in source.items()}
    return replace(newest, values=values, directions=directions, conditions=conditions)


def _refuse_undated(run: str, task: str, differences: str, first: TaskResults, second: TaskResults) -> None:
    """Raise an error if no date tells which of two different results is newer."""
    if first.date == second.date:
        raise RunsError(
            f"run {run!r}: {task} has {differences} in {first.file} and {second.file}, and no date tells which is "
            "newer; remove one of them"
        )


def _parse_lm_harness(path: Path, file: str) -> Iterator[TaskResults]:
    """Parse a file of lm-evaluation-harness. Its metrics are named `metric,filter`; before version 0.4, `metric`."""
    data = parse_json(path.read_bytes())
    config = data.get("config") or {}
    date_in_name, date = _DATE.search(path.stem), data.get("date")
    if date_in_name is not None:
        timestamp = date_in_name[1]
    elif isinstance(date, int | float):
        timestamp = datetime.fromtimestamp(date, UTC).strftime("%Y%m%d%H%M%S%f")
    else:
        timestamp = ""
    for task, metrics in data["results"].items():
        has_filters = any("," in key for key in metrics)
        values = {}
        for key, value in metrics.items():
            metric, _, filter_name = key.partition(",")
            if (has_filters and "," not in key) or is_standard_error(metric):
                continue
            if metric not in _NO_METRICS and isinstance(value, int | float) and not isinstance(value, bool):
                values[metric if filter_name in ("", "none") else key] = float(value)
        higher_is_better = data.get("higher_is_better", {}).get(task) or {}
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
                name: "higher" if higher_is_better[metric] else "lower"
                for name in values
                if higher_is_better.get(metric := name.partition(",")[0]) is not None
            },
            conditions=_recorded_conditions(conditions),
            date=re.sub(r"\D", "", timestamp),
            model=data.get("model_name"),
        )


def _recorded_conditions(conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conditions that a file contains; numbers may be strings (`"version": "1"`)."""
    recorded = {name: value for name, value in conditions.items() if value not in _UNKNOWN}
    for name, value in recorded.items():
        if isinstance(value, str):
            with suppress(ValueError):
                recorded[name] = float(value)
    return recorded


def _parse_olmes(path: Path, file: str) -> Iterator[TaskResults]:
    """Parse a file of olmes with one task, or one task per line; tasks without metrics are skipped."""
    text = path.read_bytes()
    for data in map(parse_json, text.splitlines()) if path.suffix == ".jsonl" else [parse_json(text)]:
        config, metrics = data["task_config"], data.get("metrics")
        primary_direction = direction_by_name(config.get("primary_metric") or "")
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
            directions={"primary_score": primary_direction} if primary_direction and "primary_score" in values else {},
            conditions=_recorded_conditions(conditions),
            date=re.sub(r"\D", "", data.get("current_date", "")),
            model=(data.get("model_config") or {}).get("model"),
            alias=(config.get("metadata") or {}).get("alias"),
        )
