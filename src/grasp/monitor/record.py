"""Store what a monitor measured, and summarise it: as text, as an offline page, and as a line of a table of runs.

The table has one row per value: `step`, `measure` (loss, dpo_loss, margin, effect, target_loss, predicted, measured),
`label`, `source`, `target`, `value`, the bounds `low` and `high`, and `rows` and `tokens` that a loss is a mean of.
Start with `Summary.of`. Shape letters: G sources, T targets.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from grasp.errors import RunsError
from grasp.mixtures import MixtureWeights, write_mixture
from grasp.results import Result, html_table, write_table
from grasp.select.linear_program import MixtureProblem, solve
from grasp.store.checksummed_parquet import read_checksummed
from grasp.text import number, plain, text_table

FILE, MIXTURE_FILE = "monitor.parquet", "mixture.yaml"
TEXTS, NUMBERS = ("measure", "label", "source", "target"), ("value", "low", "high", "rows", "tokens")
SCHEMA = pa.schema(
    [("step", pa.int64()), *((name, pa.string()) for name in TEXTS), *((name, pa.float64()) for name in NUMBERS)]
)
HELPS, HURTS, UNCLEAR = "helps", "hurts", "not distinguishable from zero"
STOPPED, NEVER = "stopped helping", "no measurement shows help"
MAX_FACTOR, MAX_MOVED = 4.0, 0.2  # of a source's share; share of all tokens that a proposed mixture moves
COLOURS = ("#0b62a4", "#d9480f", "#2b8a3e", "#862e9c", "#c92a2a", "#5c5f66")
Line = dict[str, Any]  # a row of the table
Block = tuple[str, list[str], list[list[str]]]  # title, headings and rows of a printed table


class Record:
    """The rows of the table so far.

    Args:
        labels: names of the labels; effects are those of the values of the first one.
        directory: where the table is stored; None: nowhere.
    """

    def __init__(self, labels: Sequence[str], directory: Path | None = None) -> None:
        self.labels, self.directory = tuple(labels), directory
        self.rows: list[Line] = []
        self.notes: list[str] = []

    def add(self, step: int, measure: str, **fields: Any) -> None:
        """Add a row; fields that do not apply are omitted, and those that are not finite are null."""
        texts = {name: str(fields.get(name, "")) for name in TEXTS}
        numbers = {name: float(fields[name]) if isfinite(fields.get(name, nan)) else None for name in NUMBERS}
        self.rows.append({"step": step, **texts, "measure": measure, **numbers})

    def select(self, measure: str, **fields: str) -> list[Line]:
        """Return the rows of a measure with these fields, in the order of the steps."""
        wanted = {"measure": measure, **fields}
        return [row for row in self.rows if all(row[name] == value for name, value in wanted.items())]

    def by_source(self, measure: str, **fields: str) -> dict[str, list[Line]]:
        """Return the rows of a measure with these fields by source, sorted."""
        rows = self.select(measure, **fields)
        return {
            source: [row for row in rows if row["source"] == source] for source in sorted({r["source"] for r in rows})
        }

    def last_step(self, measure: str) -> int:
        """Return the last step with a measure, 0 if there is none."""
        return max((row["step"] for row in self.select(measure)), default=0)

    @property
    def targets(self) -> list[str]:
        """Return the sorted names of the targets."""
        return sorted({row["target"] for row in self.select("target_loss")})

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
            self.rows = [row for row in Record.read(self.directory).rows if row["step"] <= step]

    @classmethod
    def read(cls, run: Path) -> "Record":
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


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Summary(Result):
    """What a monitor measured; printed as a few tables."""

    blocks: tuple[Block, ...]
    record: Record

    @classmethod
    def of(cls, record: Record) -> "Summary":
        """Summarise a record, and write the proposed mixture beside the stored table."""
        findings, blocks = list[str](), [_losses(record, label) for label in record.labels]
        verdicts = {
            (target, source): _verdict(rows)
            for target in record.targets
            for source, rows in record.by_source("effect", target=target).items()
        }
        if verdicts:
            blocks += [_effects(record, verdicts), _checks(record)]
            for kind in (HURTS, STOPPED, NEVER):
                names = [f"{source} ({target})" for (target, source), text in verdicts.items() if kind in text]
                findings += [f"{kind}: {', '.join(names)}"] * bool(names)
            mixture, note = _mixture(record)
            blocks += [mixture] if mixture else []
            findings.append(note)
        sources, last = record.by_source("loss", label=record.labels[0]), record.last_step("loss")
        headline = f"{len(sources)} sources in {last:,} steps"
        if verdicts:
            headline += "; an effect is the change of a target's loss by one more step on a source, in 1e-3 nats"
        return cls(record.to_table(), headline, (*findings, *record.notes), blocks=tuple(blocks), record=record)

    def __repr__(self) -> str:
        tables = [text_table(title, headings, rows, left=_names(headings)) for title, headings, rows in self.blocks]
        return "\n\n".join([plain(self.headline), *tables, "\n".join(map(plain, self.notes))]).rstrip()

    def _repr_html_(self) -> str:
        record = self.record
        curves = {f"loss by {label}": record.by_source("loss", label=label) for label in record.labels}
        curves |= {f"effect on {target}": record.by_source("effect", target=target) for target in record.targets}
        tables = [f"<h3>{escape(plain(title))}</h3>{html_table(names, rows)}" for title, names, rows in self.blocks]
        notes = "".join(f"<p>{escape(plain(note))}</p>" for note in self.notes)
        figures = "".join(f"<h3>{escape(plain(title))}</h3>{_figure(lines)}" for title, lines in curves.items())
        return f"<p><b>{escape(plain(self.headline))}</b></p>{''.join(tables)}{notes}{figures}"


def _names(headings: Sequence[str]) -> int:
    return 2 if headings[0] == "target" and headings[1] == "source" else 1


def _mean(rows: Sequence[Line], weight: str) -> float:
    return float(np.average([row["value"] for row in rows], weights=[row[weight] for row in rows]))


def _losses(record: Record, label: str) -> Block:
    """Return the losses by a label: means of the first and the last tenth of the logs, and the change of the last."""
    measures = [name for name in ("loss", "dpo_loss", "margin") if record.select(name)]
    rows = []
    for source, logged in record.by_source("loss", label=label).items():
        cells = [source, f"{sum(row['tokens'] for row in logged):,.0f}"]
        for measure in measures:
            values = [row for row in record.select(measure, label=label, source=source) if row["value"] is not None]
            tenth = max(1, len(values) // 10)
            weight = "tokens" if measure == "loss" else "rows"
            means = [_mean(part, weight) if part else None for part in (values[:tenth], values[-tenth:])]
            before = values[-2 * tenth : -tenth]
            trend = None if not before or means[1] is None else means[1] - _mean(before, weight)
            cells += [number(means[0]), number(means[1]), number(trend, sign="+")]
        rows.append(cells)
    headings = [f"{measure}, {part}" for measure in measures for part in ("first", "last", "trend")]
    return f"loss by {label}", [label, "tokens", *headings], rows


def _state(row: Line) -> str:
    """Return what a measurement shows: an interval without zero, or nothing."""
    if row["low"] is None or row["high"] is None or row["low"] <= 0 <= row["high"]:
        return UNCLEAR
    return HELPS if row["high"] < 0 else HURTS


def _verdict(measured: Sequence[Line]) -> str:
    """Return what a source does to a target, and since which step."""
    states = [_state(row) for row in measured]
    if states[-1] != UNCLEAR:
        since = next(k for k in range(len(states)) if set(states[k:]) == {states[-1]})
        return f"{states[-1]} since step {measured[since]['step']}"
    if HELPS not in states:
        return f"{UNCLEAR}; {NEVER}"
    last = len(states) - 1 - states[::-1].index(HELPS)
    return f"{STOPPED} after step {measured[last]['step']}"


def _milli(value: float | None) -> str:
    return "-" if value is None else f"{1000 * value:+.3g}"


def _effects(record: Record, verdicts: dict[tuple[str, str], str]) -> Block:
    rows = []
    for (target, source), verdict in verdicts.items():
        measured = record.select("effect", target=target, source=source)
        cells = [_milli(measured[0]["value"]), *(_milli(measured[-1][name]) for name in ("value", "low", "high"))]
        rows.append([target, source, *cells, verdict])
    headings = ["target", "source", "first effect", "last effect", "low", "high", "verdict"]
    return "effect of one more step on a source, 95 % intervals", headings, rows


def _checks(record: Record) -> Block:
    """Return predicted and measured changes of the targets' losses, added over all measurements."""
    rows = []
    for target in record.targets:
        losses = record.select("target_loss", target=target)
        predicted, measured = record.select("predicted", target=target), record.select("measured", target=target)
        centre = sum(row["value"] for row in predicted)
        widths = [np.nan if row["high"] is None else row["high"] - row["value"] for row in predicted]
        half_width = float(np.sum(widths))  # the questions are the same in all measurements
        cells = [centre, centre - half_width, centre + half_width, sum(row["value"] for row in measured)]
        span = f"{losses[0]['step']}-{losses[-1]['step']}"
        shown = [number(cell, sign="+") for cell in cells] if predicted else ["-"] * 4
        rows.append([target, span, number(losses[0]["value"]), number(losses[-1]["value"]), *shown])
    headings = ["target", "steps", "loss, first", "loss, last", "predicted change", "low", "high", "measured change"]
    return "check: change of the targets' losses", headings, rows


def _mixture(record: Record) -> tuple[Block | None, str]:
    """Propose a mixture of the sources from the last effects, and write it.

    Each effect counts by the bound of its interval that is nearer to zero. Effects are first-order, so the
    mixture stays near the present one: it moves at most MAX_MOVED of the tokens, and no share by more than MAX_FACTOR.
    """
    step = record.last_step("effect")
    effects: dict[str, float] = {}
    for row in record.select("effect"):
        if row["step"] == step:
            bound = {UNCLEAR: 0.0, HELPS: row["high"], HURTS: row["low"]}[_state(row)]
            effects[row["source"]] = effects.get(row["source"], 0.0) + bound
    if len(effects) < 2 or not any(effects.values()):
        return None, "no other mixture is proposed: no effect of the last measurement is distinguishable from zero"
    losses = record.by_source("loss", label=record.labels[0])
    rows_G, tokens_G = (
        np.array([sum(row[measure] for row in losses.get(source, ())) for source in effects])
        for measure in ("rows", "tokens")
    )
    now_G = tokens_G / tokens_G.sum()
    problem = MixtureProblem(now_G / MAX_FACTOR, np.minimum(1.0, now_G * MAX_FACTOR), now_G, MAX_MOVED)
    proposed_G = solve(problem, -np.array(list(effects.values())))
    sizes = {"rows": rows_G, "tokens": tokens_G, "documents": rows_G}
    weights = MixtureWeights(record.labels[0], tuple(effects), sizes, proposed_G / now_G)
    note = f"the proposed mixture moves at most {MAX_MOVED:.0%} of the tokens, by the lower bounds of effects"
    if record.directory is not None:
        note = f"{note}: {record.directory / MIXTURE_FILE}"
        write_mixture(weights, record.directory / MIXTURE_FILE, "yaml")
    rows = [
        [source, f"{now:.1%}", f"{share:.1%}"] for source, now, share in zip(effects, now_G, proposed_G, strict=True)
    ]
    return ("mixture for the rest of the training", [record.labels[0], "now", "proposed"], rows), note


def _figure(curves: Mapping[str, Sequence[Line]]) -> str:
    """Draw curves of values by step as SVG, with a legend."""
    points = [(row["step"], row["value"]) for rows in curves.values() for row in rows if row["value"] is not None]
    if not points:
        return "<p>no values</p>"
    (x0, y0), (x1, y1) = np.min(points, axis=0), np.max(points, axis=0)

    def place(row: Line) -> str:
        x, y = (row["step"] - x0) / max(x1 - x0, 1), (row["value"] - y0) / ((y1 - y0) or 1)
        return f"{10 + 580 * x:.1f},{190 - 180 * y:.1f}"

    parts, legend = [], []
    for k, (name, rows) in enumerate(curves.items()):
        colour = COLOURS[k % len(COLOURS)]
        path = " ".join(place(row) for row in rows if row["value"] is not None)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        legend.append(f'<span style="color:{colour}">&#9632; {escape(plain(name))}</span>')
    axis = f"steps {x0:g} to {x1:g}; from {y0:.3g} to {y1:.3g}"
    return f'<svg viewBox="0 0 600 200" width="600">{"".join(parts)}</svg><p>{" ".join(legend)} ({axis})</p>'


def table_of_runs(records: Iterable[tuple[str, Record]]) -> pa.Table:
    """Return one line per run for `grasp runs import`: shares of tokens, and losses of sources and targets."""
    lines = []
    for name, record in records:
        logged = record.by_source("loss", label=record.labels[0])
        tokens = {source: sum(row["tokens"] for row in rows) for source, rows in logged.items()}
        line: Line = {"run": name}
        line |= {f"train/{source}": count / sum(tokens.values()) for source, count in tokens.items()}
        line |= {f"{source}/loss": rows[-1]["value"] for source, rows in logged.items()}
        for target in record.targets:
            line[f"{target}/loss"] = record.select("target_loss", target=target)[-1]["value"]
        lines.append(line)
    columns = list(dict.fromkeys(column for line in lines for column in line))
    empty = {column: 0.0 for column in columns if column.startswith("train/")}
    return pa.Table.from_pylist([dict.fromkeys(columns) | empty | line for line in lines])
