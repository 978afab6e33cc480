"""Predictions against an environment: metrics of every target, side by side, as text, JSON and CSV."""

import csv
import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from grasp.errors import RunsError
from grasp.results import Result
from grasp.runs.metrics import (
    CEILINGS,
    METRICS,
    RESAMPLES,
    Estimate,
    TargetMetrics,
    average,
    noise_ceilings,
    target_metrics,
)
from grasp.runs.predictions import Cost, MethodRole, Predictions
from grasp.runs.retrained import Role, TrainingRuns, Utilities
from grasp.seeds import bootstrap_weights
from grasp.text import json_text, number, plain, text_table

APART: dict[MethodRole, str] = {
    "oracle-selected": "oracle-selected: configured on the utilities they are judged by, so no match for the others",
    "supervised oracle": "supervised oracles: fitted on other subsets of this environment, so a ceiling and no match",
}
COSTS = ("floats a row", "build s")
HEADINGS = {
    "task_rho": "task rho",
    "task_ceiling": "ceiling",
    "positive": "positive",
    "mean_lds": "mean LDS",
    "lds_ceiling": "ceiling",
    "pairwise": "pairwise",
}
MARKS = {  # behind the name of a target, and what each means
    "in sample": "the method was chosen by these very figures; on other runs expect less",
    "same runs": "the method was chosen on these retrained models, by other targets; on other models expect less",
    "held-out": "kept back: no protocol may be chosen on it",
}


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One method on every target."""

    predictions: Predictions
    targets: tuple[TargetMetrics, ...]
    mean: TargetMetrics  # over the targets
    chosen_on: Collection[str] = ()  # targets of these very runs that the method was chosen by

    @property
    def method(self) -> str:
        return self.predictions.method


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Evaluation(Result):
    """How well predictions agree with retraining: a line a method and target, and one for the mean over targets.

    An undefined value is null in the table and has a reason beside it.
    """

    environment: str
    recipe: str
    family: str
    utilities: Utilities
    resamples: int
    roles: Mapping[str, Role]  # of each target
    methods: tuple[MethodResult, ...]

    @property
    def n_subsets(self) -> int:
        return len(self.utilities.subset_ids)

    @property
    def seeds(self) -> tuple[int, ...]:
        return self.utilities.seeds

    def records(self) -> list[dict[str, Any]]:
        """The lines of the table."""
        records: list[dict[str, Any]] = self.table.to_pylist()
        return records

    def to_json(self) -> str:
        """Everything but the resamples."""
        fields = ("environment", "recipe", "family", "n_subsets", "seeds", "resamples", "roles", "notes")
        return json_text({name: getattr(self, name) for name in fields} | {"results": self.records()}) + "\n"

    def to_csv(self) -> str:
        """The records, one a line; an undefined value is an empty cell."""
        out = io.StringIO()
        writer = csv.DictWriter(out, self.table.column_names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.records())
        return out.getvalue()

    def __repr__(self) -> str:
        """A line a method and target, oracles apart; what is undefined or marked is explained below."""
        with_cost = any(result.predictions.cost is not None for result in self.methods)
        order: list[MethodRole] = ["predictor", *APART]
        lines: list[tuple[MethodRole, list[str]]] = []
        for result in sorted(self.methods, key=lambda result: order.index(result.predictions.standing)):
            known, cost = result.predictions.cost, ["-", "-"] if with_cost else []
            if known is not None:  # floats a row, features + scores, and wall seconds
                floats = f"{known.features} + {known.scores}" if known.features else str(known.scores)
                cost = [floats, "-" if known.wall_seconds is None else f"{known.wall_seconds:.1f}"]
            rows = {self.marked(row.target, result): row for row in result.targets}
            if len(rows) > 1:
                rows[result.mean.target + (" (in sample)" if result.chosen_on else "")] = result.mean
            for name, row in rows.items():
                cells = [_cell(metric, row[metric]) for metric in HEADINGS]
                lines.append((result.predictions.standing, [result.method, name, str(row.n_units), *cells, *cost]))
        headings = ["method", "target", "units", *HEADINGS.values(), *(COSTS if with_cost else ())]
        heading, *body = text_table("", headings, [line for _, line in lines], left=2).splitlines()
        text, before = [plain(self.headline), heading], "predictor"
        for (standing, _), line in zip(lines, body, strict=True):
            text += [APART[standing]] if standing != before else []
            text.append(line)
            before = standing
        return "\n".join([*text, *map(plain, self._below())])

    def marked(self, target: str, result: MethodResult) -> str:
        """The target, with what is to be known of the method's figures on it; the words are those of `MARKS`."""
        if target in result.chosen_on:
            return f"{target} (in sample)"
        marks = ["held-out"] * (self.roles[target] == "held-out") + ["same runs"] * bool(result.chosen_on)
        return f"{target} ({', '.join(marks)})" if marks else target

    def marks(self) -> list[str]:
        """What the marks behind targets mean, those that occur."""
        marked = " ".join(self.marked(row.target, result) for result in self.methods for row in result.targets)
        return [f"{mark}: {says}" for mark, says in MARKS.items() if mark in marked]

    def _below(self) -> list[str]:
        """What the ceilings are and how sure, whatever the method; marks; notes; what is undefined and why."""
        ceilings = {row.target: row["task_ceiling"] for result in self.methods[:1] for row in result.targets}
        intervals = [
            f"{target} {number(one.low, 2)} to {number(one.high, 2)}"
            for target, one in ceilings.items()
            if one.low is not None
        ]
        said = "ceiling: an estimate by how well seeds agree; of task rho, with 95 % intervals: "
        lines = dict.fromkeys([*([said + ", ".join(intervals)] if intervals else []), *self.marks(), *self.notes])
        for result in self.methods:
            for row in result.targets:
                for metric in (*HEADINGS, "task_rho_standardised"):
                    whose = "" if metric in CEILINGS else f" of {result.method}"  # a ceiling is the environment's
                    if reason := row[metric].reason:
                        lines[f"undefined: {metric}{whose} on {row.target}: {reason}"] = None
                for why, n in row.undefined_units.items():
                    lines[f"left out: {n} of {row.n_units} units of {row.target} for {result.method}: {why}"] = None
        return list(lines)


def _cell(metric: str, estimate: Estimate) -> str:
    """A ceiling without its interval, which is told below."""
    return f"{estimate.value:.3f}" if estimate.value is not None and metric in CEILINGS else str(estimate)


def evaluation_of(
    environment: TrainingRuns,
    predictions: Sequence[Predictions],
    *,
    targets: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    partial: bool = False,
    resamples: int = RESAMPLES,
    notes: Sequence[str] = (),
    chosen_on: Mapping[str, Collection[str]] | None = None,
) -> Evaluation:
    """Compare predictions with the utilities of an environment.

    Args:
        predictions: each must predict every subset of the environment, and every unit of `targets` or its task.
        targets: None: all targets of the environment that every method predicts.
        seeds: retraining seeds to use; None: all.
        partial: of an unfinished environment use the subsets that are there.
        notes: how the methods came about, kept in the report.
        chosen_on: by method, the targets of these very runs that it was chosen by.
    Raises:
        RunsError: utilities or predictions are incomplete or not finite; the message names which.
    """
    if not predictions:
        raise RunsError("evaluate: got no predictions, expected at least one method")
    common = [name for name in environment.targets if all(name in p.targets for p in predictions)]
    if targets is None and not common:
        raise RunsError(
            f"{environment.path}: has targets {list(environment.targets)}, the predictions "
            f"{[(p.method, list(p.targets)) for p in predictions]}; none is common to all"
        )
    names = tuple(common if targets is None else targets)
    utilities = environment.utilities(seeds=seeds, partial=partial)
    if not utilities.subset_ids:
        raise RunsError(f"{environment.path}: no subset has a result for every seed yet; wait for some")
    weights_RB = bootstrap_weights(len(utilities.subset_ids), resamples=resamples)
    realized = {name: utilities.select(name) for name in names}
    ceilings = {name: noise_ceilings(own.values_BSE, weights_RB) for name, own in realized.items()}

    def metrics(prediction: Predictions, target: str) -> TargetMetrics:
        own = realized[target]
        values_BE, task_B = prediction.aligned(own.subset_ids, target, own.unit_ids)
        return target_metrics(
            target, values_BE, own.values_BSE, weights_RB, task_predicted_B=task_B, ceilings=ceilings[target]
        )

    roles = {name: environment.role_of(name) for name in names}
    seen = chosen_on or {}
    of_targets = [tuple(metrics(prediction, name) for name in names) for prediction in predictions]
    methods = tuple(
        MethodResult(prediction, rows, average(rows), seen.get(prediction.method, ()))
        for prediction, rows in zip(predictions, of_targets, strict=True)
    )
    info = environment.info
    family = info.family.spec if info.family else "given subsets"
    return Evaluation(
        table=_table(methods, roles),
        headline=f"environment {environment.name}: recipe {info.recipe}, {family}, {len(utilities.subset_ids)} "
        f"subsets, seeds {', '.join(map(str, utilities.seeds))}; 95 % intervals over {resamples} resamples of the "
        "subsets",
        notes=(*notes, *environment.notes),
        environment=environment.name,
        recipe=info.recipe,
        family=family,
        utilities=utilities.select(*names),
        resamples=resamples,
        roles=roles,
        methods=methods,
    )


def _table(methods: Sequence[MethodResult], roles: Mapping[str, Role]) -> pa.Table:
    """A line a method and target, then one for the mean over targets; what a line does not have is null."""
    records: list[dict[str, Any]] = []
    for result in methods:
        cost = result.predictions.cost or Cost(None, None)
        about = {
            "standing": result.predictions.standing,
            "feature_floats": cost.features,
            "score_floats": cost.scores,
            "build_wall_seconds": cost.wall_seconds,
            "build_cpu_seconds": cost.cpu_seconds,
        }
        for row in (*result.targets, result.mean):
            record: dict[str, Any] = {"method": result.method, "target": row.target}
            record |= {} if row is result.mean else {"role": roles[row.target]}
            record |= {"n_subsets": row.n_subsets, "n_units": row.n_units}
            for metric in (*METRICS, *CEILINGS):
                estimate = row[metric]
                record |= {metric: estimate.value, f"{metric}_low": estimate.low, f"{metric}_high": estimate.high}
                record |= {f"{metric}_reason": estimate.reason} if estimate.reason else {}
            for metric, (mean, sd) in row.over_seeds.items():
                record |= {f"{metric}_seed_mean": mean, f"{metric}_seed_sd": sd}
            if row is not result.mean:
                record["undefined_units"] = sum(row.undefined_units.values())
                record["undefined_why"] = "; ".join(f"{why}: {n}" for why, n in row.undefined_units.items())
            in_sample = bool(result.chosen_on) if row is result.mean else row.target in result.chosen_on
            records.append(record | about | {"in_sample": in_sample})
    fields = dict.fromkeys(name for record in records for name in record)
    return pa.Table.from_pylist([{name: record.get(name) for name in fields} for record in records])
