"""Store what a monitor measured, and summarise it: as tables, and as a line of a table of runs.

The table has one row per value: `step`, `measure` (loss, dpo_loss, margin, effect, target_loss, predicted, measured),
`source`, `target`, `value`, the bounds `low` and `high`, and `rows` and `tokens` that a loss is a mean of. Losses by a
further label have the measure `loss/LABEL`, and its values as sources. Start with `summarise`.
Shape letters: B mixtures, G sources, T targets.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from scipy.special import ndtri

from grasp.arrays import F64
from grasp.errors import RunsError
from grasp.mixtures import MixtureWeights, write_mixture
from grasp.results import Result, write_table
from grasp.select.change_intervals import COVERAGE
from grasp.select.guards import CONFIDENCE, Guards
from grasp.select.linear_program import MixtureProblem, solve
from grasp.store.checksummed_parquet import read_checksummed

FILE, MIXTURE_FILE = "monitor.parquet", "mixture.yaml"
TEXTS, NUMBERS = ("measure", "source", "target"), ("value", "low", "high", "rows", "tokens")
SCHEMA = pa.schema(
    [("step", pa.int64()), *((name, pa.string()) for name in TEXTS), *((name, pa.float64()) for name in NUMBERS)]
)
HELPS, HURTS, UNCLEAR = "helps", "hurts", "not distinguishable from zero"
STOPPED, NEVER = "stopped helping", "no measurement shows help"
MAX_FACTOR, MAX_MOVED = 4.0, 0.2  # of a source's share; share of all tokens that a proposed mixture moves
UNIT = 1e-3  # of printed effects, in nats
Line = dict[str, Any]  # a row of a table


class MonitorRecord:
    """The rows of the table so far.

    Args:
        labels: names of the labels; the values of the first one are the sources.
        directory: where the table is stored; None: nowhere.
    """

    def __init__(self, labels: Sequence[str], directory: Path | None = None) -> None:
        self.labels, self.directory = labels, directory
        self.rows: list[Line] = []
        self.notes: list[str] = []

    def add(self, step: int, measure: str, value: float, half_width: float = nan, **fields: Any) -> None:
        """Add a value with its interval; fields that do not apply are omitted, and numbers that are not finite null."""
        texts = {name: str(fields.get(name, "")) for name in TEXTS}
        fields |= {"value": value, "low": value - half_width, "high": value + half_width}
        numbers = {name: float(fields[name]) if isfinite(fields.get(name, nan)) else None for name in NUMBERS}
        self.rows.append({"step": step, **texts, "measure": measure, **numbers})

    def select(self, measure: str, **fields: str) -> list[Line]:
        """Return the rows of a measure with these fields, in the order of the steps."""
        wanted = {"measure": measure, **fields}
        return [row for row in self.rows if all(row[name] == value for name, value in wanted.items())]

    def by(self, name: str, measure: str, **fields: str) -> dict[str, list[Line]]:
        """Return the rows of a measure by the sorted values of a field."""
        rows = self.select(measure, **fields)
        return {value: [row for row in rows if row[name] == value] for value in sorted({row[name] for row in rows})}

    def last_step(self, measure: str) -> int:
        """Return the last step with a measure, 0 if there is none."""
        return max((row["step"] for row in self.select(measure)), default=0)

    def suffix(self, label: str) -> str:
        """Return the end of a measure's name that is by a label: empty for the sources."""
        return "" if label == self.labels[0] else f"/{label}"

    def to_table(self) -> pa.Table:
        """Return the rows as a table, with labels and notes in its metadata."""
        about = json.dumps({"labels": self.labels, "notes": self.notes})
        return pa.Table.from_pylist(self.rows, SCHEMA).replace_schema_metadata({"monitor": about})

    def write(self) -> None:
        """Store the table atomically, if there is a directory for it."""
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            write_table(self.to_table(), self.directory / FILE)

    def resume(self, step: int) -> None:
        """Read the rows up to a checkpoint; later ones are measured again."""
        if self.directory is not None and (self.directory / FILE).exists():
            self.rows = [row for row in MonitorRecord.read(self.directory).rows if row["step"] <= step]

    @classmethod
    def read(cls, run: Path) -> "MonitorRecord":
        """Read the table of a run.

        Args:
            run: directory of the table, or of the trainer's output.
        Raises:
            RunsError: there is no table, or it is damaged.
        """
        path = next((path for path in (run / FILE, run / "monitor" / FILE) if path.is_file()), None)
        if path is None:
            raise RunsError(f"{run}: no {FILE}; expected the output directory of a training with grasp.Monitor")
        try:
            table = read_checksummed(path)
            about = json.loads(table.schema.metadata[b"monitor"])
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as err:
            raise RunsError(f"{path}: cannot be read as the table of a monitor: {err}") from err
        record = cls(about["labels"])
        record.rows, record.notes = table.to_pylist(), about["notes"]
        return record


def read(run: Path) -> Result:
    """Summarise the stored table of a run, for `grasp report --monitor`; errors as `MonitorRecord.read`."""
    return summarise(MonitorRecord.read(run))


def summarise(record: MonitorRecord) -> Result:
    """Return the tables of a record, and write the proposed mixture beside the stored table."""
    findings, parts = list[str](), [_losses(record, label) for label in record.labels]
    headline = f"{len(record.by('source', 'loss'))} sources in {record.last_step('loss'):,} steps"
    if effects := _effects(record):
        headline += "; an effect is the change of a target's loss by one more step on a source, in 1e-3 nats"
        mixture = _mixture(record)
        parts += [_table("effect of one more step on a source, 95 % intervals", effects), _checks(record), mixture]
        for kind in (HURTS, STOPPED, NEVER):
            names = [f"{row['source']} ({row['target']})" for row in effects if kind in row["verdict"]]
            findings += [f"{kind}: {', '.join(names)}"] * bool(names)
        findings += mixture.notes
    shown = tuple(replace(part, notes=()) for part in parts if len(part))
    return Result(record.to_table(), headline, (*findings, *record.notes), parts=shown)


def _table(title: str, rows: Sequence[Line], notes: Sequence[str] = ()) -> Result:
    table = pa.Table.from_pandas(pd.DataFrame(rows), preserve_index=False)
    return Result(table, title, tuple(notes), signs=False)


def _losses(record: MonitorRecord, label: str) -> Result:
    """Return the losses by value of a label: means of the first and last tenth of the logs, and their difference."""
    rows, suffix = [], record.suffix(label)
    for source, logged in record.by("source", f"loss{suffix}").items():
        row: Line = {label: source, "tokens": round(sum(line["tokens"] for line in logged))}
        for measure in ("loss", "dpo_loss", "margin"):
            lines = record.select(measure + suffix, source=source)
            if values := [line["value"] for line in lines if line["value"] is not None]:
                tenth = max(1, len(values) // 10)
                first, last = float(np.mean(values[:tenth])), float(np.mean(values[-tenth:]))
                row |= {f"{measure}, first": first, f"{measure}, last": last, f"{measure}, change": last - first}
        rows.append(row)
    return _table(f"loss by {label}", rows)


def _state(row: Line) -> str:
    """Return what a measurement shows: an interval without zero, or nothing."""
    if row["low"] is None or row["high"] is None or row["low"] <= 0 <= row["high"]:
        return UNCLEAR
    return HELPS if row["high"] < 0 else HURTS


def _effects(record: MonitorRecord) -> list[Line]:
    """Return the effects of sources on targets, and since which step they help or hurt."""
    rows = []
    for target in record.by("target", "effect"):
        for source, measured in record.by("source", "effect", target=target).items():
            last = measured[-1]
            effects = np.array([measured[0]["value"], last["value"], last["low"], last["high"]], dtype=float) / UNIT
            cells = dict(zip(("first", "last", "low", "high"), effects.tolist(), strict=True))
            states = [_state(row) for row in measured]
            helped = [row["step"] for row, state in zip(measured, states, strict=True) if state == HELPS]
            verdict = f"{STOPPED} after step {helped[-1]}" if helped else f"{UNCLEAR}; {NEVER}"
            if states[-1] != UNCLEAR:
                since = next(k for k in range(len(states)) if set(states[k:]) == {states[-1]})
                verdict = f"{states[-1]} since step {measured[since]['step']}"
            rows.append({"target": target, "source": source, **cells, "verdict": verdict})
    return rows


def _checks(record: MonitorRecord) -> Result:
    """Return predicted and measured changes of the targets' losses, added over all measurements."""
    rows = []
    for target, losses in record.by("target", "target_loss").items():
        row: Line = {"target": target, "steps": f"{losses[0]['step']}-{losses[-1]['step']}"}
        row |= {"loss, first": losses[0]["value"], "loss, last": losses[-1]["value"]}
        # half-widths add up, since the questions are the same in all measurements
        predicted, measured = (
            pd.DataFrame(record.select(measure, target=target), columns=NUMBERS, dtype=float).sum(skipna=False)
            for measure in ("predicted", "measured")
        )
        row |= {"predicted change": predicted["value"], "low": predicted["low"], "high": predicted["high"]}
        rows.append(row | {"measured change": measured["value"]})
    return _table("check: change of the targets' losses", rows)


def _mixture(record: MonitorRecord) -> Result:
    """Propose a mixture of the sources from the last effects, and write it; without rows if none is proposed.

    Each effect counts by the bound of its interval that is nearer to zero, and guards keep every target from becoming
    worse. Effects are first-order, so the mixture stays near the present one: it moves at most MAX_MOVED of the tokens,
    and no share by more than MAX_FACTOR. Sources with an unknown interval keep their share.
    """
    title, losses = "mixture for the rest of the training", record.by("source", "loss")
    last = [row for row in record.select("effect") if row["step"] == record.last_step("effect")]
    last = [row for row in last if row["source"] in losses]
    targets, sources = (sorted({row[name] for row in last}) for name in ("target", "source"))
    if len(sources) < 2 or all(_state(row) == UNCLEAR for row in last):
        note = "no other mixture is proposed: no effect of the last measurement is distinguishable from zero"
        return _table(title, [], [note])
    pivot = pd.DataFrame(last).pivot(index="target", columns="source")
    low_TG, value_TG, high_TG = (pivot[name].to_numpy(float) / UNIT for name in ("low", "value", "high"))
    error_TG = high_TG - value_TG
    rows_G, tokens_G = (np.array([sum(row[name] for row in losses[s]) for s in sources]) for name in ("rows", "tokens"))
    now_G, is_free_G = tokens_G / tokens_G.sum(), np.isfinite(error_TG).all(axis=0)
    factor_G = np.where(is_free_G, MAX_FACTOR, 1.0)
    problem = MixtureProblem(now_G / factor_G, np.minimum(1.0, now_G * factor_G), now_G, MAX_MOVED)

    def changes(share_BG: F64) -> tuple[F64, F64]:
        """Return the predicted improvement of each target per step, and its lower bound, (B, T) each."""
        moved_BG = share_BG - now_G
        change_BT = -moved_BG @ np.nan_to_num(value_TG).T
        error_BT = np.sqrt(moved_BG**2 @ np.nan_to_num(error_TG).T ** 2)
        return change_BT, change_BT - error_BT * ndtri(CONFIDENCE) / ndtri((1 + COVERAGE) / 2)

    gain_G = -np.nan_to_num(np.clip(0.0, low_TG, high_TG)).sum(axis=0)
    share_G, outcomes = Guards(tuple(targets), 0.0, changes).optimize(
        problem, lambda share_BG: share_BG @ gain_G, [solve(problem, gain_G), now_G]
    )
    notes = [outcome.note for outcome in outcomes]
    if record.directory is not None:
        sizes = {"rows": rows_G, "tokens": tokens_G, "documents": rows_G}
        weights = MixtureWeights(record.labels[0], tuple(sources), sizes, share_G / now_G)
        notes.insert(0, write_mixture(weights, record.directory / MIXTURE_FILE, "yaml"))
    lines = zip(sources, now_G.tolist(), share_G.tolist(), strict=True)
    return _table(
        title, [{record.labels[0]: source, "now": now, "proposed": share} for source, now, share in lines], notes
    )


def table_of_runs(records: Iterable[tuple[str, MonitorRecord]]) -> pa.Table:
    """Return one line per run for `grasp runs import`: shares of tokens, and losses of sources and targets."""
    lines = []
    for name, record in records:
        logged = record.by("source", "loss")
        tokens = {source: sum(row["tokens"] for row in rows) for source, rows in logged.items()}
        line: Line = {"run": name}
        line |= {f"train/{source}": count / sum(tokens.values()) for source, count in tokens.items()}
        line |= {f"{source}/loss": rows[-1]["value"] for source, rows in logged.items()}
        targets = record.by("target", "target_loss")
        lines.append(line | {f"{target}/loss": rows[-1]["value"] for target, rows in targets.items()})
    columns = dict.fromkeys(column for line in lines for column in line)
    empty = {column: 0.0 if column.startswith("train/") else None for column in columns}
    return pa.Table.from_pylist([empty | line for line in lines])
