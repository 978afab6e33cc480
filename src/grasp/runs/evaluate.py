"""Predictions against an environment: metrics of every target, side by side, as text, JSON and CSV."""

import csv
import io
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from grasp.artifact.reader import ArtifactReader
from grasp.errors import EnvironmentDataError
from grasp.runs.environment import ALL_SUFFIX, Environment
from grasp.runs.environment_info import Role
from grasp.runs.metrics import (
    METRICS,
    RESAMPLES,
    Estimate,
    TargetMetrics,
    average_ceilings,
    average_over_targets,
    noise_ceilings,
    target_metrics,
)
from grasp.runs.predictions import Cost, Predictions, Standing
from grasp.seeds import bootstrap_weights
from grasp.targets.units import Unit, UnitSet

AVERAGE = "average"
IN_SAMPLE = "in sample"
APART: dict[Standing, str] = {
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


@dataclass(frozen=True, slots=True)
class MethodResult:
    """One method on every target, and the mean over targets."""

    method: str
    targets: tuple[TargetMetrics, ...]
    standing: Standing = "predictor"
    cost: Cost | None = None
    in_sample: bool = False  # chosen on this environment: its figures are better than they would be elsewhere

    def average(self, metric: str) -> Estimate:
        """Mean over targets of a metric, or of `task_ceiling` and `lds_ceiling`."""
        if metric in ("task_ceiling", "lds_ceiling"):
            return average_ceilings(self.targets, _CEILINGS[metric])
        return average_over_targets(self.targets, metric)


_CEILINGS = {"task_ceiling": "task_rho", "lds_ceiling": "mean_lds"}


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """What methods reach in one environment."""

    environment: str
    recipe: str
    family: str
    n_subsets: int
    seeds: tuple[int, ...]
    resamples: int
    roles: dict[str, Role]  # of each target
    methods: tuple[MethodResult, ...]
    notes: tuple[str, ...] = ()  # how the methods came about

    def noted(self, note: str) -> "EvaluationReport":
        """The same with one more note."""
        return replace(self, notes=(*self.notes, note))

    def records(self) -> list[dict[str, Any]]:
        """One flat record a method and target, and one a method for the mean over its targets."""
        out: list[dict[str, Any]] = []
        for result in self.methods:
            about = _about(result)
            out += [self._record(result.method, row) | about for row in result.targets]
            record: dict[str, Any] = {"method": result.method, "target": AVERAGE, "n_subsets": self.n_subsets}
            record["n_units"] = sum(row.n_units for row in result.targets)
            for metric in (*METRICS, *_CEILINGS):
                record |= _flat(metric, result.average(metric))
            out.append(record | about)
        return out

    def _record(self, method: str, row: TargetMetrics) -> dict[str, Any]:
        record: dict[str, Any] = {
            "method": method,
            "target": row.target,
            "role": self.roles[row.target],
            "n_subsets": row.n_subsets,
            "n_units": row.n_units,
        }
        for metric in (*METRICS, *_CEILINGS):
            record |= _flat(metric, estimate_of(row, metric))
        for metric, spread in row.over_seeds.items():
            record |= {f"{metric}_seed_mean": spread.mean, f"{metric}_seed_sd": spread.sd}
        record["undefined_units"] = sum(row.undefined_units.values())
        record["undefined_why"] = "; ".join(f"{why}: {n}" for why, n in row.undefined_units.items())
        return record

    def to_json(self) -> str:
        """Everything but the resamples; an undefined value is null and has a reason beside it."""
        head = asdict(self) | {"methods": None}
        del head["methods"]
        return json.dumps(head | {"results": self.records()}, indent=1, allow_nan=False) + "\n"

    def to_csv(self) -> str:
        """The records, one a line; an undefined value is an empty cell."""
        records = self.records()
        fields = list(dict.fromkeys(name for record in records for name in record))
        out = io.StringIO()
        writer = csv.DictWriter(out, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return out.getvalue()

    def table(self) -> str:
        """Plain text: a line a method and target, oracles apart; what is undefined is explained below."""
        with_cost = any(result.cost is not None for result in self.methods)
        lines = [["method", "target", "units", *HEADINGS.values(), *(COSTS if with_cost else ())]]
        order: list[Standing] = ["predictor", *APART]
        sorted_methods = sorted(self.methods, key=lambda result: order.index(result.standing))
        standings: list[Standing] = []
        for result in sorted_methods:
            own = self._lines(result, with_cost)
            lines += own
            standings += [result.standing] * len(own)
        head = (
            f"environment {self.environment}: recipe {self.recipe}, {self.family}, {self.n_subsets} subsets, "
            f"seeds {', '.join(map(str, self.seeds))}; 95 % intervals over {self.resamples} resamples of the subsets"
        )
        return "\n".join([head, *_set_apart(_columns(lines), standings), *self._notes()]) + "\n"

    def _lines(self, result: MethodResult, with_cost: bool) -> list[list[str]]:
        """Cells of one method: a line a target, and the mean over targets where there are several."""
        cost = list(_cost_cells(result.cost)) if with_cost else []
        seen = f" ({IN_SAMPLE})" if result.in_sample else ""
        lines = []
        for row in result.targets:
            name = row.target + (" (held-out)" if self.roles[row.target] == "held-out" else "") + seen
            cells = [_cell(metric, estimate_of(row, metric)) for metric in HEADINGS]
            lines.append([result.method, name, str(row.n_units), *cells, *cost])
        if len(result.targets) > 1:
            cells = [_cell(metric, result.average(metric)) for metric in HEADINGS]
            lines.append([result.method, AVERAGE + seen, str(sum(r.n_units for r in result.targets)), *cells, *cost])
        return lines

    def _notes(self) -> list[str]:
        notes: dict[str, None] = dict.fromkeys(self.notes)
        for result in self.methods:
            for row in result.targets:
                for metric in (*HEADINGS, "task_rho_standardised"):
                    reason = estimate_of(row, metric).reason
                    whose = "" if metric in _CEILINGS else f" of {result.method}"  # a ceiling is the environment's
                    if reason:
                        notes[f"undefined: {metric}{whose} on {row.target}: {reason}"] = None
                for why, n in row.undefined_units.items():
                    notes[f"left out: {n} of {row.n_units} units of {row.target} for {result.method}: {why}"] = None
        return list(notes)


def evaluate(
    environment: Environment,
    predictions: Sequence[Predictions],
    *,
    targets: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    partial: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
    notes: Sequence[str] = (),
    in_sample: Collection[str] = (),
) -> EvaluationReport:
    """Compare predictions with the utilities of an environment.

    Args:
        predictions: each must predict every subset of the environment, and every unit of `targets` or its task.
        targets: None: all targets of the environment that every method predicts.
        seeds: retraining seeds to use; None: all.
        partial: of an unfinished environment use the subsets that are there.
        seed: of the resamples.
        notes: how the methods came about, kept in the report.
        in_sample: methods that were chosen on this environment.
    Raises:
        EnvironmentDataError: utilities or predictions are incomplete or not finite; the message names which.
    """
    if not predictions:
        raise EnvironmentDataError("evaluate: got no predictions, expected at least one method")
    names = tuple(targets) if targets is not None else _common(environment, predictions)
    utilities = environment.utilities(seeds=seeds, partial=partial)
    if not utilities.subset_ids:
        raise EnvironmentDataError(f"{environment.path}: no subset has a result for every seed yet; wait for some")
    weights_RB = bootstrap_weights(len(utilities.subset_ids), resamples=resamples, seed=seed)
    realized = {name: utilities.of(name) for name in names}
    ceilings = {name: noise_ceilings(own.values_BSE, weights_RB) for name, own in realized.items()}

    def metrics(prediction: Predictions, target: str) -> TargetMetrics:
        own = realized[target]
        values_BE, task_B = prediction.aligned(own.subset_ids, target, own.unit_ids)
        return target_metrics(
            target, values_BE, own.values_BSE, weights_RB, task_predicted_B=task_B, ceilings=ceilings[target]
        )

    return EvaluationReport(
        environment=environment.name,
        recipe=environment.info.recipe,
        family=environment.info.family.spec if environment.info.family else "given subsets",
        n_subsets=len(utilities.subset_ids),
        seeds=utilities.seeds,
        resamples=resamples,
        roles={name: environment.role_of(name) for name in names},
        methods=tuple(
            MethodResult(p.method, tuple(metrics(p, name) for name in names), p.standing, p.cost, p.method in in_sample)
            for p in predictions
        ),
        notes=tuple(notes),
    )


def estimate_of(row: TargetMetrics, metric: str) -> Estimate:
    """A metric of a target, or one of its ceilings, by name."""
    source = (row.ceilings, _CEILINGS[metric]) if metric in _CEILINGS else (row, metric)
    estimate: Estimate = getattr(*source)
    return estimate


def target_fingerprint(units: Sequence[Unit]) -> str:
    """Fingerprint of the units of one target, in order."""
    return UnitSet(tuple(units)).fingerprint


def artifact_targets(environment: Environment, artifact: ArtifactReader) -> dict[str, str]:
    """Targets of the environment that the artifact has: environment's name -> artifact's name.

    An environment scores `sciq` with its loss on the completion and `sciq@all` with its loss on every token; an
    artifact has one of the two, under the name `sciq`.

    Raises:
        EnvironmentDataError: corpora differ, units of a target differ, or no target is common to both.
    """
    where = str(artifact.path)
    try:
        environment.check_corpus(artifact.manifest.fingerprints.get("corpus", "none"), where)
    except EnvironmentDataError as err:
        command = environment.info.build_command(environment.path)
        raise EnvironmentDataError(f"{err}" + (f": {command}" if command else "")) from err
    loss_on = artifact.manifest.settings.get("targets", {}).get("loss_on", "completion")
    lines = artifact.units.select(["unit_id", "target", "prompt", "completion"]).to_pylist()
    common: dict[str, str] = {}
    for name, info in environment.info.targets.items():
        own = name.removesuffix(ALL_SUFFIX)
        if own not in artifact.targets or info.loss_on != loss_on:
            continue
        units = [Unit(**line, loss_on=loss_on) for line in lines if line["target"] == own]
        environment.check_target(name, target_fingerprint(units), where)
        common[name] = own
    if not common:
        raise EnvironmentDataError(
            f"{where}: has targets {list(artifact.targets)} with loss_on {loss_on!r}; {environment.path} has "
            f"{[(name, info.loss_on) for name, info in environment.info.targets.items()]}; none is common to both"
        )
    return common


def _common(environment: Environment, predictions: Sequence[Predictions]) -> tuple[str, ...]:
    names = tuple(name for name in environment.targets if all(name in p.targets for p in predictions))
    if not names:
        raise EnvironmentDataError(
            f"{environment.path}: has targets {list(environment.targets)}, the predictions "
            f"{[(p.method, list(p.targets)) for p in predictions]}; none is common to all"
        )
    return names


def _flat(metric: str, estimate: Estimate) -> dict[str, Any]:
    flat: dict[str, Any] = {metric: estimate.value, f"{metric}_low": estimate.low, f"{metric}_high": estimate.high}
    return flat | ({f"{metric}_reason": estimate.reason} if estimate.reason else {})


def _about(result: MethodResult) -> dict[str, Any]:
    """How a method stands and what it costs, flat."""
    cost = result.cost
    return {
        "standing": result.standing,
        "in_sample": result.in_sample,
        "feature_floats": None if cost is None else cost.features,
        "score_floats": None if cost is None else cost.scores,
        "build_wall_seconds": None if cost is None else cost.wall_seconds,
        "build_cpu_seconds": None if cost is None else cost.cpu_seconds,
    }


def _cost_cells(cost: Cost | None) -> tuple[str, str]:
    """Floats a row, features + scores, and wall seconds."""
    if cost is None:
        return "-", "-"
    floats = f"{cost.features} + {cost.scores}" if cost.features else str(cost.scores)
    return floats, "-" if cost.wall_seconds is None else f"{cost.wall_seconds:.1f}"


def _set_apart(lines: list[str], standings: Sequence[Standing]) -> list[str]:
    """A heading before the first method of each standing that is no match for the others; lines[0] has the columns."""
    out, before = lines[:1], "predictor"
    for line, standing in zip(lines[1:], standings, strict=True):
        if standing != before:
            out.append(APART[standing])
            before = standing
        out.append(line)
    return out


def _cell(metric: str, estimate: Estimate) -> str:
    if estimate.value is not None and metric in _CEILINGS:
        return f"{estimate.value:.3f}"
    return str(estimate)


def _columns(lines: list[list[str]]) -> list[str]:
    """Left-aligned names, right-aligned numbers."""
    widths = [max(len(line[c]) for line in lines) for c in range(len(lines[0]))]
    return [
        "  ".join(
            cell.ljust(width) if c < 2 else cell.rjust(width)
            for c, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
