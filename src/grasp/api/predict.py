"""Predict changes of utility for parts of the corpus: the function `predict` behind `Artifact.predict`.

A question (`drop`, `keep`, `weight` or `subsets`) is converted to subsets with row weights, for which
`Predictor` predicts the change of each target's utility relative to the whole corpus. The question `by` predicts
dropping and doubling each value of a label. With runs, an `OutcomePredictor` adds the change in their unit, with an
interval. Shape letters: B subsets, T targets, E units, G slices, i.e. values of a label, N rows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from grasp.arrays import F64
from grasp.artifact.label_table import LabelColumn, LabelTable
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import MAX_SLICES, checked_targets, label_column, leak_notes, row_tokens
from grasp.errors import SettingsError
from grasp.files import check_outputs
from grasp.predict.default_protocol import resolve_protocol
from grasp.predict.predictor import EFFECT_SIZE, SIMILARITY_SKETCHES, Predictor
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.predict.slice_intervals import dropped_errors
from grasp.predict.slices import LabelSlices, label_slices, list_slices, slice_effects
from grasp.predict.subset_tables import RowIndex, read_subsets
from grasp.predict.weights import SubsetBlock, single_subset
from grasp.results import Result, first_notes, write_tables
from grasp.text import as_names, plain, signed, text_table

if TYPE_CHECKING:
    import pandas as pd

    from grasp.runs.calibration import ExtrapolationLog, OutcomePredictor
    from grasp.runs.table import RunTable
    from grasp.runs.training_runs import TrainingRuns

MAX_INTERVAL_CELLS = 20_000_000  # values times units, 8 bytes each, up to which intervals are computed
MAX_LINES_SHOWN = 30  # printed lines per target
REPLAY_NOTE = (
    "intervals do not contain the uncertainty of the replay, which has no parts by question: they are too narrow"
)
FEW_UNITS = 20  # intervals over fewer units have too little coverage
# prefixes of columns in effect sizes; other columns are in the unit of the runs
EFFECT_SIZE_COLUMNS = ("change", "effect", "if_", "redundancy")


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(Result):
    """Predicted changes of subsets or slices, relative to the whole corpus.

    Attributes:
        unit: unit of `change` (or `if_dropped`, `if_doubled`).
        lines: total number of lines; `table` has the first ones if they were written to a file.
    """

    unit: str = EFFECT_SIZE
    lines: int = 0

    def _printed_cells(self) -> tuple[list[str], list[list[str]]]:
        names = list(self.table.column_names)
        rows = self.table.slice(0, MAX_LINES_SHOWN).to_pylist()
        return names, [[_cell(name, row[name]) for name in names] for row in rows]

    def _below(self) -> Sequence[str]:
        more = self.lines - min(MAX_LINES_SHOWN, len(self.table))
        return [*([f"... and {more:,} more lines"] if more > 0 else []), *first_notes(self.notes)]


@dataclass(frozen=True, eq=False, repr=False)
class SlicePrediction(Prediction):
    """Predicted effects of the values of a label, most useful first for every target."""

    label: str = ""

    def _intervals(self) -> list[str]:
        """Return the names of the columns that have an interval."""
        names = self.table.column_names
        return [name for name in names if f"{name}_low" in names]

    def __repr__(self) -> str:
        """Return one table per target; if there are many values, only the most and the least useful."""
        names = [name for name in self.table.column_names if name != "target"]
        headings = [*(self.label if name == "value" else name for name in names), ""]
        lines = self.table.to_pylist()
        text: list[str] = []
        for target in dict.fromkeys(line["target"] for line in lines):
            target_lines = [line for line in lines if line["target"] == target]
            n_left_out = len(target_lines) - MAX_LINES_SHOWN
            if n_left_out > 0:
                half = MAX_LINES_SHOWN // 2
                target_lines = target_lines[:half] + target_lines[-half:]
            cells = []
            for line in target_lines:
                ends = [(line[f"{name}_low"], line[f"{name}_high"]) for name in self._intervals()]
                mark = "*" if any(None not in (low, high) and low <= 0 <= high for low, high in ends) else ""
                cells.append([*(_cell(name, line[name]) for name in names), mark])
            text.append(text_table(f"{target}: effect of each {self.label}", headings, cells))
            if n_left_out > 0:
                text.append(f"... and {n_left_out:,} more values between the two groups")
        return "\n".join([*text, *map(plain, self._below())])

    def _below(self) -> Sequence[str]:
        """Return the meaning of the interval and, with all notes, of other columns; and notes."""
        lines = []
        for name in self._intervals():
            interval = (
                "95 % interval over the units of the target and over documents" if name == "if_dropped" else "interval"
            )
            lines.append(
                f"{name}_low, {name}_high: {interval}; if it contains 0 (*), dropping the value may help or harm"
            )
        if self.all_notes:
            lines.append("effect: mean effect of the rows; above 0, they help more than the average row of the corpus")
            if "redundancy" in self.table.column_names:
                lines.append(
                    "redundancy: cosine similarity of the slice to all other rows; near 1 they can replace it, below 0 "
                    "they cannot"
                )
        return [*lines, *first_notes(self.notes)]


def predict(
    artifact: ArtifactReader,
    *,
    by: str | None = None,
    drop: str | None = None,
    keep: str | None = None,
    weight: Mapping[str, float] | str | Sequence[str] = (),
    subsets: "Path | str | pa.Table | pd.DataFrame | Mapping[str, Sequence[str]] | None" = None,
    target: str | Sequence[str] | None = None,
    runs: "TrainingRuns | RunTable | Path | str | None" = None,
    out: Path | str | None = None,
    protocol: ScoringProtocol | Path | str | None = None,
    units: bool = False,
) -> Prediction:
    """Predict the change of targets if rows are dropped, kept or re-weighted.

    The change is relative to the whole corpus: 0 is the corpus, higher is better. Pass exactly one of `by`, `drop`,
    `keep`, `weight` and `subsets`.

    Args:
        by: label, or an expression such as host(url), year(date) or bins(score, 5); predict dropping and doubling each
            of its values.
        drop: condition on labels; drop these rows, e.g. "topic = 'Games'".
        keep: condition on labels; keep only these rows.
        weight: condition and weight of its rows, e.g. "topic = 'Games': 0.3"; other rows have weight 1. In Python also
            a mapping; the weights of a row that matches several conditions are multiplied.
        subsets: many subsets at once: Parquet with row_id[, subset_id, weight]. In Python also a table, or a mapping
            from names to row_ids.
        target: targets, separated by commas. Default: all.
        runs: retrained or imported runs; adds the change in their unit, with an interval.
        out: file for the lines; Parquet is written in bounded memory. Of subsets, the result has the first lines only.
        protocol: protocol to predict with. Default: the built-in protocol.
        units: also return one row per unit.
    Raises:
        SettingsError: no or several questions, or a question that leaves no rows.
        SubsetError: an expression is invalid or matches no row or all rows, or subsets have unknown rows.
        ProtocolError: the artifact does not fit the protocol, or has no such target.
    """
    out = None if out is None else Path(out)
    if out is not None:
        check_outputs({"out": out}, artifact.protected_paths, tables=["out"])
    if not isinstance(weight, Mapping):
        weight = _parse_weights(as_names(weight)) if weight else {}
    questions = {"drop": drop, "keep": keep, "weight": weight or None, "by": by, "subsets": subsets}
    requested = [name for name, value in questions.items() if value is not None]
    if len(requested) != 1:
        got = ", ".join(requested) or "none"
        raise SettingsError(f"predict: got {got}, expected one of {', '.join(questions)}")
    if by is not None and units:
        raise SettingsError("predict: units has no effect with by; drop it")
    targets, labels = checked_targets(artifact, target), LabelTable(artifact.rows_path)
    scoring_rule = resolve_protocol(protocol, artifact, subsets=True)
    blocks: Iterable[SubsetBlock] = ()
    if by is not None:
        column = label_column(artifact, by, "by")  # raises with the list of labels
    elif subsets is not None:
        blocks, headline = _read_subsets(artifact, subsets), ""
    elif weight:
        blocks, headline = _weighted_subset(labels, weight)
    else:
        expression = drop if drop is not None else keep
        assert expression is not None
        selection = labels.matching(expression)
        verb, mask_N = ("drop", ~selection.mask_N) if drop is not None else ("keep", selection.mask_N)
        blocks = [single_subset(f"{verb} {expression}", mask_N)]
        headline = f"{verb}s {share_text(int(selection.mask_N.sum()), labels.n_rows)}"
        if selection.n_null:
            headline += f"; {selection.n_null:,} rows without a value count as not selected"
    sketches = SIMILARITY_SKETCHES if runs is not None or by is not None else ()
    predictor = Predictor.from_artifact(artifact, scoring_rule, targets, per_unit=units, sketches=sketches)
    outcomes = extrapolations = None
    if runs is not None:
        from grasp.runs.calibration import ExtrapolationLog, fit_outcomes  # noqa: PLC0415 - read only if there are runs

        outcomes, extrapolations = fit_outcomes(predictor, artifact, runs), ExtrapolationLog()
    if by is not None:
        return _predict_slices(artifact, predictor, column, outcomes, extrapolations, out)
    reader = prediction_table(predictor, artifact, blocks, outcomes=outcomes, extrapolations=extrapolations)
    if out is None:
        table = reader.read_all()
        lines = len(table)
    else:
        first_lines: list[pa.Table] = []
        tables = (pa.Table.from_batches([batch]) for batch in reader)
        lines = write_tables(reader.schema, _keep_first(tables, first_lines), out)
        table = pa.concat_tables([reader.schema.empty_table(), *first_lines])
    notes = (
        *(() if extrapolations is None else extrapolations.notes),
        *leak_notes(artifact, predictor.units.targets),
        *prediction_notes(predictor, outcomes),
    )
    return Prediction(table, headline, notes, unit=predictor.unit, lines=lines)


def _keep_first(tables: Iterable[pa.Table], first_lines: list[pa.Table]) -> Iterator[pa.Table]:
    """Yield tables, and add those with the lines that are printed to `first_lines`."""
    n_lines = 0
    for table in tables:
        if n_lines < MAX_LINES_SHOWN:
            first_lines.append(table.slice(0, MAX_LINES_SHOWN - n_lines))
            n_lines += table.num_rows
        yield table


def prediction_notes(predictor: Predictor, outcomes: "OutcomePredictor | None" = None) -> tuple[str, ...]:
    """Return notes on the predictor and its intervals, and one line with unit and protocol.

    Args:
        predictor: predictor of the changes.
        outcomes: predictor in the unit of the runs, if there are runs.
    """
    notes = [] if outcomes is None else [outcomes.title, *outcomes.notes]
    if predictor.has_replay and outcomes is None:
        notes.append(REPLAY_NOTE)
    if predictor.dropped:
        notes.append(f"ignored, no variance: {', '.join(predictor.dropped)}")
    return (*notes, f"{predictor.scale}; {predictor.protocol_text}")


def few_units(counts: Mapping[str, int]) -> list[str]:
    """Return a warning if targets have too few units for reliable intervals."""
    few = ", ".join(f"{target} {n}" for target, n in counts.items() if n < FEW_UNITS)
    return [f"few units ({few}): intervals over fewer than {FEW_UNITS} units are too narrow"] if few else []


def share_text(rows: int, of: int) -> str:
    """Format a share of rows, e.g. `900 of 9,468 rows (9.5 %)`."""
    return f"{rows:,} of {of:,} rows ({100 * rows / of:.1f} %)"


def _read_subsets(artifact: ArtifactReader, subsets: Any) -> Iterable[SubsetBlock]:
    """Read subsets from a file, a table, a DataFrame, or a mapping from names to row_ids."""
    if isinstance(subsets, Mapping):
        lists = {str(name): [str(row_id) for row_id in row_ids] for name, row_ids in subsets.items()}
        empty = [name for name, row_ids in lists.items() if not row_ids]
        if empty:
            raise SettingsError(f"subsets: {', '.join(empty)}: has no rows; expected at least one")
        names = [name for name, row_ids in lists.items() for _ in row_ids]
        row_ids = [row_id for row_ids in lists.values() for row_id in row_ids]
        subsets = pa.table({"subset_id": pa.array(names, pa.string()), "row_id": pa.array(row_ids, pa.string())})
    elif not isinstance(subsets, Path | str | pa.Table):
        subsets = pa.Table.from_pandas(subsets, preserve_index=False)
    index = RowIndex.from_parquet(artifact.rows_path)
    corpus = artifact.manifest.fingerprints.get("corpus")
    return read_subsets(subsets, index, corpus=corpus)


def _weighted_subset(labels: LabelTable, weight: Mapping[str, float]) -> tuple[Iterable[SubsetBlock], str]:
    """Return the subset of re-weighted rows, and a headline."""
    weight_N, changed_N = np.ones(labels.n_rows), np.zeros(labels.n_rows, dtype=np.bool_)
    for expression, value in weight.items():
        mask_N = labels.matching(expression).mask_N
        weight_N[mask_N] *= value
        changed_N |= mask_N
    retained_N = weight_N != 0
    if not retained_N.any():
        raise SettingsError(f"weight: all {labels.n_rows:,} rows have weight 0; expected at least one above 0")
    dropped = int((~retained_N).sum())
    headline = f"changes the weight of {share_text(int(changed_N.sum()), labels.n_rows)}"
    headline += f", drops {dropped:,} of them" if dropped else ""
    return [single_subset("weighted", retained_N, weight_N[retained_N])], headline


def _parse_weights(texts: Sequence[str]) -> dict[str, float]:
    """Parse EXPR:NUMBER into expressions and weights, split at the last colon."""
    weights: dict[str, float] = {}
    for text in texts:
        expression, _, number = text.rpartition(":")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if not expression.strip() or not 0 <= weight < np.inf or expression in weights:
            raise SettingsError(
                f"weight: got {text!r}, expected EXPR:NUMBER with 0 or more, each EXPR once, e.g. "
                "\"topic = 'Games': 0.3\""
            )
        weights[expression] = weight
    return weights


def _predict_slices(
    artifact: ArtifactReader,
    predictor: Predictor,
    column: LabelColumn,
    outcomes: "OutcomePredictor | None",
    extrapolations: "ExtrapolationLog | None",
    out: Path | None,
) -> SlicePrediction:
    """Predict dropping and doubling the values of a label: all values for a file, the largest ones for the screen."""
    tokens_N = row_tokens(artifact)
    element_slices = list_slices(column, tokens_N)  # None unless the cells of the column are lists
    slices = element_slices or label_slices(column, tokens_N)
    if out is not None and slices.n_grouped > 0:
        slices = label_slices(column, tokens_N, most=len(column.values))
    effects = slice_effects(predictor, slices)
    targets = predictor.units.targets

    # only one kind of interval per table: with runs, their 90 % prediction intervals
    is_too_large = len(slices.slices) * len(predictor.units.columns_E) > MAX_INTERVAL_CELLS
    bounds = None
    if outcomes is None and not is_too_large:
        bounds = dropped_errors(artifact, predictor, effects, slices).interval
    columns_GT: dict[str, F64] = {"effect": effects.effect_GT, "if_dropped": effects.dropped_GT}
    if bounds is not None:
        columns_GT |= dict(zip(("if_dropped_low", "if_dropped_high"), bounds, strict=True))
    columns_GT["if_doubled"] = effects.doubled_GT
    if effects.redundancy_G is not None:
        columns_GT["redundancy"] = np.repeat(effects.redundancy_G[:, None], len(targets), axis=1)
    runs_notes: tuple[str, ...] = ()
    if outcomes is not None and extrapolations is not None:
        changes = outcomes.predict(slices.dropped)
        columns_GT |= changes.columns
        extrapolations.add([f"without {name}" for name in slices.names], changes)
        runs_notes = (
            f"{outcomes.unit} is the change if the value is dropped; if_dropped has an interval without runs only",
            *extrapolations.notes,
        )

    # the most important first: what makes numbers wrong, what the intervals are, then what the table lacks
    notes = leak_notes(artifact, targets)
    if bounds is not None:
        notes += few_units(dict(zip(targets, predictor.units.counts_T.tolist(), strict=True)))
    elif is_too_large:
        notes.append(f"no intervals: {len(slices.slices):,} values are too many to compare by unit")
    notes += runs_notes
    if element_slices is not None:
        assert element_slices.membership_GN is not None
        if element_slices.membership_GN.sum(axis=0).max() > 1:
            notes.append("a row counts for each of its values, so slices overlap")
        if len(element_slices.slices) == MAX_SLICES:
            notes.append(f"the {MAX_SLICES} values with the most rows; others are not listed")
    if slices.n_grouped:
        notes.append(f"{slices.n_grouped:,} small values are grouped into one slice")
    if column.note:
        notes.append(column.note)
    table = _slice_table(predictor, slices, columns_GT)
    result = SlicePrediction(
        table,
        f"predicted effect of dropping or doubling each {column.name}",
        (*notes, *prediction_notes(predictor, outcomes)),
        unit=predictor.unit,
        lines=len(table),
        label=column.name,
    )
    if out is not None:
        result.write(out)
    return result


def _slice_table(predictor: Predictor, slices: LabelSlices, columns_GT: Mapping[str, F64]) -> pa.Table:
    """Return one line per target and slice, target by target, the most useful slice first."""
    dropped_GT = columns_GT["if_dropped"]
    g, t = (index.reshape(-1) for index in np.indices(dropped_GT.shape))
    order = np.lexsort((np.nan_to_num(dropped_GT).reshape(-1), t))
    slice_index, target_index = pa.array(g[order]), pa.array(t[order])
    columns: dict[str, pa.Array] = {
        "value": pa.array([label_slice.name for label_slice in slices.slices], pa.string()).take(slice_index),
        "target": pa.array(predictor.units.targets, pa.string()).take(target_index),
        "rows": pa.array([label_slice.rows for label_slice in slices.slices], pa.int64()).take(slice_index),
        "tokens": pa.array([label_slice.tokens for label_slice in slices.slices], pa.int64()).take(slice_index),
    }
    for name, values_GT in columns_GT.items():
        columns[name] = pa.array(values_GT.reshape(-1)[order], pa.float64(), from_pandas=True)
    return pa.table(columns, metadata=_metadata(predictor))


def _cell(name: str, value: Any) -> str:
    """Format a cell of the column `name`."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return signed(value, 3 if name.startswith(EFFECT_SIZE_COLUMNS) else 4)  # changes in nats are small
    return f"{value:,}" if isinstance(value, int) else str(value)


def prediction_table(
    predictor: Predictor,
    artifact: ArtifactReader,
    blocks: Iterable[SubsetBlock],
    *,
    outcomes: "OutcomePredictor | None" = None,
    extrapolations: "ExtrapolationLog | None" = None,
) -> pa.RecordBatchReader:
    """Predict any number of subsets in bounded memory; batches are computed while the reader is consumed, once.

    Args:
        predictor: predictor; if it has units, the lines of the units follow those of their tasks.
        blocks: retained sides, drawn or read lazily; one block is held in memory at a time.
        outcomes: predictor in the unit of the runs; adds e.g. nats, nats_low and nats_high, which are null for units.
        extrapolations: log that records subsets outside of the range of the runs.
    Returns:
        Reader with columns subset_id, target[, unit_id], change, and those of `outcomes`.
    """
    interval_columns = [] if outcomes is None else [f"{outcomes.unit}{end}" for end in ("", "_low", "_high")]
    text_columns = ["subset_id", "target"] + (["unit_id"] if predictor.unit_level is not None else [])
    fields = [(name, pa.string()) for name in text_columns]
    fields += [(name, pa.float64()) for name in ("change", *interval_columns)]
    schema, units = pa.schema(fields, _metadata(predictor)), predictor.units

    def batches() -> Iterator[pa.RecordBatch]:
        for block in blocks:
            sums = predictor.sums(block.weights)
            numbers = {"change": predictor.change_of(sums)}
            if outcomes is not None:
                changes = outcomes.predict(block.weights)
                numbers |= changes.columns
                if extrapolations is not None:
                    extrapolations.add(block.subset_ids, changes)
            texts = {"target": np.array(units.targets, dtype=object)}
            yield _lines(schema, block.subset_ids, texts, numbers)
            if predictor.unit_level is not None:
                numbers = {"change": predictor.unit_change(block.weights, sums)}
                texts = {
                    "target": np.repeat(np.array(units.targets, dtype=object), units.counts_T),
                    "unit_id": artifact.units.column("unit_id").to_numpy(zero_copy_only=False)[units.columns_E],
                }
                yield _lines(schema, block.subset_ids, texts, numbers)

    return pa.RecordBatchReader.from_batches(schema, batches())


def _metadata(predictor: Predictor) -> dict[str, str]:
    """Return the metadata of a file of predictions."""
    provenance = f"{predictor.scale}; {predictor.protocol.description}"
    return {"grasp.protocol": predictor.protocol.name, "grasp.provenance": provenance}


def _lines(
    schema: pa.Schema, subset_ids: Sequence[str], texts: Mapping[str, Any], numbers: Mapping[str, F64]
) -> pa.RecordBatch:
    """Return the lines of one level (tasks or units), subset by subset; missing values are null."""
    shape = numbers["change"].shape
    text_columns = {
        name: np.tile(values, shape[0]) for name, values in {"unit_id": np.full(shape[1], None), **texts}.items()
    }
    text_columns["subset_id"] = np.repeat(np.array(subset_ids, dtype=object), shape[1])
    arrays = [
        pa.array(text_columns[field.name], field.type)
        if field.name in text_columns
        else pa.array(np.broadcast_to(numbers.get(field.name, np.float64(np.nan)), shape).reshape(-1), from_pandas=True)
        for field in schema
    ]
    return pa.record_batch(arrays, schema=schema)
