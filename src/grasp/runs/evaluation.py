"""Metrics of predictions on runs, for every method and target, as text, JSON and CSV.

`grasp.runs.metrics` defines the metrics. A method is anything that predicts utilities of subsets: a scoring rule of
GRASP, or a baseline. Results are marked if the method was selected on the same runs. Start with `evaluate_predictions`.

Shape letters: B subsets, S seeds, E units, R resamples of the subsets.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import pyarrow as pa

from grasp.errors import RunsError
from grasp.results import Result
from grasp.runs.metrics import (
    CEILINGS,
    METRICS,
    RESAMPLES,
    TargetMetrics,
    average,
    noise_ceilings,
    target_metrics,
)
from grasp.runs.predictions import Cost, MethodRole, Predictions
from grasp.runs.training_runs import Role, TrainingRuns, Utilities
from grasp.seeds import bootstrap_weights
from grasp.text import json_text, number, plain, text_table

GROUP_HEADINGS: dict[MethodRole, str] = {
    "oracle-selected": "oracle-selected: configured on the evaluated utilities; not comparable with the others",
    "supervised oracle": "supervised oracles: fitted on other subsets of these runs; a ceiling, not a prediction",
}
COST_COLUMNS = ("floats a row", "build s")
HEADINGS = {
    "task_rho": "task rho",
    "task_ceiling": "ceiling",
    "positive": "positive",
    "mean_lds": "mean LDS",
    "lds_ceiling": "ceiling",
    "pairwise": "pairwise",
}
MARKS = {  # marks after the name of a target, and their explanations
    "in sample": "the method was selected on these results; expect lower values on other runs",
    "same runs": "the method was selected on other targets of these models; expect lower values on other models",
    "held-out": "reserved for evaluation; protocols are not selected on it",
}


@dataclass(frozen=True, slots=True)
class MethodResult:
    """Metrics of one method on every target."""

    predictions: Predictions
    targets: tuple[TargetMetrics, ...]
    mean: TargetMetrics  # mean over the targets
    selected_on: Collection[str]  # targets of these runs that the method was selected on
    marks: Mapping[str, tuple[str, ...]]  # by target: those of `MARKS` that apply

    @property
    def method(self) -> str:
        return self.predictions.method

    def marked(self, target: str) -> str:
        """Return the name of a target with its marks."""
        return f"{target} ({', '.join(self.marks[target])})" if self.marks[target] else target


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Evaluation(Result):
    """Agreement of predictions with retrained models: one line per method and target, and their mean.

    An undefined value is null in the table, with a reason in another column.
    """

    environment: str
    recipe: str
    family: str
    utilities: Utilities
    resamples: int
    roles: Mapping[str, Role]  # by target
    methods: tuple[MethodResult, ...]

    @property
    def n_subsets(self) -> int:
        return len(self.utilities.subset_ids)

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.utilities.seeds

    def records(self) -> list[dict[str, Any]]:
        """Return the lines of the table."""
        records: list[dict[str, Any]] = self.table.to_pylist()
        return records

    def to_json(self) -> str:
        """Return all results except for the resamples as JSON."""
        fields = ("headline", "environment", "recipe", "family", "n_subsets", "seeds", "resamples", "roles", "notes")
        return json_text({name: getattr(self, name) for name in fields} | {"results": self.records()}) + "\n"

    def __repr__(self) -> str:
        """Return one line per method and target, oracles separately, with explanations below."""
        with_cost = any(result.predictions.cost is not None for result in self.methods)
        group_order: list[MethodRole] = ["predictor", *GROUP_HEADINGS]
        roles: list[MethodRole] = []
        rows: list[list[str]] = []
        for result in sorted(self.methods, key=lambda result: group_order.index(result.predictions.method_role)):
            cost, cost_cells = result.predictions.cost, ["-", "-"]  # the cells of `COST_COLUMNS`
            if cost is not None:
                floats = f"{cost.features} + {cost.scores}" if cost.features else str(cost.scores)
                cost_cells = [floats, "-" if cost.wall_seconds is None else f"{cost.wall_seconds:.1f}"]
            metrics_by_name = {result.marked(metrics.target): metrics for metrics in result.targets}
            if len(metrics_by_name) > 1:
                suffix = " (in sample)" if result.selected_on else ""
                metrics_by_name[result.mean.target + suffix] = result.mean
            for name, metrics in metrics_by_name.items():
                # ceilings without their interval, which is below the table
                estimates = (
                    replace(metrics[metric], low=None) if metric in CEILINGS else metrics[metric] for metric in HEADINGS
                )
                cells = list(map(str, estimates))
                rows.append([result.method, name, str(metrics.n_units), *cells, *(cost_cells if with_cost else [])])
                roles.append(result.predictions.method_role)
        headings = ["method", "target", "units", *HEADINGS.values(), *(COST_COLUMNS if with_cost else ())]
        heading, *lines = text_table("", headings, rows, left=2, wrap=False).splitlines()
        text, group = [plain(self.headline), heading], "predictor"
        for method_role, line in zip(roles, lines, strict=True):
            if method_role != group:
                text.append(GROUP_HEADINGS[method_role])
                group = method_role
            text.append(line)
        return "\n".join([*text, *map(plain, self._explanations())])

    def marks(self) -> list[str]:
        """Return explanations of the marks that occur."""
        used = {mark for result in self.methods for marks in result.marks.values() for mark in marks}
        return [f"{mark}: {explanation}" for mark, explanation in MARKS.items() if mark in used]

    def _explanations(self) -> list[str]:
        """Return the lines below the table: intervals of ceilings, marks, notes, and reasons of undefined values."""
        # all methods share the ceilings
        ceilings = {metrics.target: metrics["task_ceiling"] for metrics in self.methods[0].targets}
        intervals = [
            f"{target} {number(ceiling.low, 2)} to {number(ceiling.high, 2)}"
            for target, ceiling in ceilings.items()
            if ceiling.low is not None
        ]
        title = "ceiling: noise ceiling, estimated from the agreement of seeds; for task rho, 95 % intervals: "
        lines = dict.fromkeys([*[title + ", ".join(intervals)] * bool(intervals), *self.marks(), *self.notes])
        undefined: dict[tuple[str, str], dict[str, None]] = {}  # targets by metric and reason, each once
        for result in self.methods:
            for metrics in result.targets:
                for metric in HEADINGS:
                    if reason := metrics[metric].reason:
                        name = metric if metric in CEILINGS else f"{metric} of {result.method}"
                        undefined.setdefault((name, reason), {})[metrics.target] = None
                for reason, n in metrics.undefined_units.items():
                    excluded = f"{n} of {metrics.n_units} units of {metrics.target} for {result.method}: {reason}"
                    lines[f"excluded: {excluded}"] = None
        return [*lines, *(f"undefined: {name} on {', '.join(on)}: {why}" for (name, why), on in undefined.items())]


def evaluate_predictions(
    runs: TrainingRuns,
    predictions: Sequence[Predictions],
    *,
    targets: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    resamples: int = RESAMPLES,
    notes: Sequence[str] = (),
    selected_on: Mapping[str, Collection[str]] | None = None,
) -> Evaluation:
    """Compare predictions with the utilities of runs.

    Of unfinished runs, the subsets are used that have a result for every seed; the headline then begins with their
    number.

    Args:
        runs: runs whose utilities are compared.
        predictions: predictions of every subset of the runs, and of every unit of `targets` or of the whole task.
        targets: default: all targets of the runs that every method predicts.
        seeds: training seeds to use; default: all.
        resamples: bootstrap resamples of the subsets.
        notes: notes to include in the result.
        selected_on: by method, the targets of these runs that it was selected on.
    Raises:
        RunsError: utilities or predictions are incomplete or not finite; the message names which.
    """
    common = [name for name in runs.targets if all(name in prediction.targets for prediction in predictions)]
    if targets is None and not common:
        raise RunsError(
            f"{runs.path}: has targets {list(runs.targets)}, the predictions "
            f"{[(prediction.method, list(prediction.targets)) for prediction in predictions]}; none is common to all"
        )
    selected_targets = tuple(common if targets is None else targets)
    utilities = runs.utilities(seeds=seeds, partial=True)
    if not utilities.subset_ids:
        raise RunsError(f"{runs.path}: no subset has a result for every seed; wait for more results")
    weights_RB = bootstrap_weights(len(utilities.subset_ids), resamples=resamples)
    measured_of = {target: utilities.select(target) for target in selected_targets}
    ceilings = {target: noise_ceilings(measured.values_BSE, weights_RB) for target, measured in measured_of.items()}

    roles = {target: runs.role_of(target) for target in selected_targets}
    methods = []
    for prediction in predictions:
        by_target = []
        for target, measured in measured_of.items():
            values_BE, task_B = prediction.aligned(measured.subset_ids, target, measured.unit_ids)
            args = target, values_BE, measured.values_BSE, weights_RB
            by_target.append(target_metrics(*args, task_predicted_B=task_B, ceilings=ceilings[target]))
        known = (selected_on or {}).get(prediction.method, ())
        marks = {
            target: ("in sample",)
            if target in known
            else tuple(compress(("held-out", "same runs"), (role == "held-out", known)))
            for target, role in roles.items()
        }
        methods.append(MethodResult(prediction, tuple(by_target), average(by_target), known, marks))
    info = runs.info
    family = info.family.spec if info.family else "given subsets"
    unfinished = f"{runs.unfinished()}; " if runs.pending() else ""
    return Evaluation(
        table=_table(methods, roles),
        headline=f"{unfinished}environment {runs.name}: recipe {info.recipe}, {family}, {len(utilities.subset_ids)} "
        f"subsets, seeds {', '.join(map(str, utilities.seeds))}; 95 % intervals over {resamples} resamples of the "
        "subsets",
        notes=(*notes, *runs.notes),
        environment=runs.name,
        recipe=info.recipe,
        family=family,
        utilities=utilities.select(*selected_targets),
        resamples=resamples,
        roles=roles,
        methods=tuple(methods),
    )


def _table(methods: Sequence[MethodResult], roles: Mapping[str, Role]) -> pa.Table:
    """Return one line per method and target, and one for the mean over targets; missing values are null."""
    records: list[dict[str, Any]] = []
    for result in methods:
        cost = result.predictions.cost or Cost(None, None)
        method_columns = {
            "standing": result.predictions.method_role,
            "feature_floats": cost.features,
            "score_floats": cost.scores,
            "build_wall_seconds": cost.wall_seconds,
            "build_cpu_seconds": cost.cpu_seconds,
        }
        for metrics in (*result.targets, result.mean):
            is_mean = metrics is result.mean
            record: dict[str, Any] = {"method": result.method, "target": metrics.target}
            record |= {} if is_mean else {"role": roles[metrics.target]}
            record |= {"n_subsets": metrics.n_subsets, "n_units": metrics.n_units}
            for metric in (*METRICS, *CEILINGS):
                estimate = metrics[metric]
                record |= {metric: estimate.value, f"{metric}_low": estimate.low, f"{metric}_high": estimate.high}
                record |= {f"{metric}_reason": estimate.reason} if estimate.reason else {}
            if not is_mean:
                record["undefined_units"] = sum(metrics.undefined_units.values())
                record["undefined_why"] = "; ".join(f"{reason}: {n}" for reason, n in metrics.undefined_units.items())
            in_sample = bool(result.selected_on) if is_mean else metrics.target in result.selected_on
            records.append(record | method_columns | {"in_sample": in_sample})
    fields = dict.fromkeys(name for record in records for name in record)
    return pa.Table.from_pylist([{name: record.get(name) for name in fields} for record in records])
