"""What happens to a target if a part of the corpus is kept, dropped or re-weighted? The verb `predict`.

Every question becomes subsets with weights, every subset a change against the whole corpus, by one predictor.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import checked_targets, label_column, leak_notes, row_tokens
from grasp.artifact.where import LabelColumn, LabelTable
from grasp.errors import SettingsError, ShapeError
from grasp.files import check_outputs
from grasp.predict.families import parse_family
from grasp.predict.predictor import EFFECT_SIZE, SIMILAR, Predictor
from grasp.predict.scoring_rule import ScoringProtocol, as_protocol
from grasp.predict.slices import dropped_intervals, label_slices, slice_effects
from grasp.predict.subset_tables import RowIndex, read_subsets
from grasp.predict.weights import SubsetBlock, one_subset
from grasp.results import Result, write_tables
from grasp.text import plain, several, signed, text_table

if TYPE_CHECKING:
    import pandas as pd

    from grasp.runs.calibration import OutcomePredictor, Outside
    from grasp.runs.retrained import Environment
    from grasp.runs.table import RunTable

SHOWN = 30  # lines of one target
FEW = 20  # questions: an interval over fewer misses the truth too often
OURS = ("change", "effect", "if_", "redundancy", "level", "part_", "value_")  # columns that are not of the runs


@dataclass(frozen=True, eq=False, repr=False)
class Prediction(Result):
    """Changes of subsets or slices against the whole corpus.

    Attributes:
        unit: what `change` (or `if_dropped`, `if_doubled`) is measured in.
        lines: how many there are; `table` holds the first of them where they were written to a file.
    """

    unit: str = EFFECT_SIZE
    lines: int = 0

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        names = list(self.table.column_names)
        rows = self.table.slice(0, SHOWN).to_pylist()
        return names, [[_cell(name, row[name]) for name in names] for row in rows]

    def _below(self) -> Sequence[str]:
        more = self.lines - min(SHOWN, len(self.table))
        return [*([f"... and {more:,} more lines"] if more > 0 else []), *self.notes]


@dataclass(frozen=True, eq=False, repr=False)
class SlicePrediction(Prediction):
    """What each value of a label is worth, most useful first for every target."""

    label: str = ""

    def __repr__(self) -> str:
        """A table a target; of many values the most and the least useful."""
        names = [name for name in self.table.column_names if name != "target"]
        headings = [self.label if name == "value" else name.replace("_", " ") for name in names]
        lines, text = self.table.to_pylist(), [plain(self.headline)]
        for target in dict.fromkeys(line["target"] for line in lines):
            of_target = [line for line in lines if line["target"] == target]
            shown = of_target if len(of_target) <= SHOWN else of_target[: SHOWN // 2] + of_target[-(SHOWN // 2) :]
            cells = [[_cell(name, line[name]) for name in names] for line in shown]
            text.append(text_table(f"{target}: what each {self.label} is worth", headings, cells))
            if len(shown) < len(of_target):
                text.append(f"... and {len(of_target) - len(shown):,} more values between these halves")
        return "\n".join([*text, *map(plain, self.notes)])


def predict(
    artifact: ArtifactReader,
    *,
    by: str | None = None,
    drop: str | None = None,
    keep: str | None = None,
    weight: Mapping[str, float] | str | Sequence[str] = (),
    subsets: "Path | str | pa.Table | pd.DataFrame | Mapping[str, Sequence[str]] | None" = None,
    target: str | Sequence[str] | None = None,
    runs: "Environment | RunTable | Path | str | None" = None,
    out: Path | str | None = None,
    protocol: ScoringProtocol | Path | str | None = None,
    omitted: bool = False,
    family: str | None = None,
    count: int = 100,
    seed: int = 0,
    units: bool = False,
    components: bool = False,
) -> Prediction:
    """What happens to a target if rows are dropped, kept or re-weighted?

    The change against the whole corpus, 0 = the corpus, higher is better. One question at a time: a label, rows to drop
    or to keep, weights, or subsets.

    Args:
        by: a label: what dropping, and doubling, each of its values does.
        drop: condition on labels: these rows are dropped, e.g. "topic = 'Games'".
        keep: condition on labels: only these rows are kept.
        weight: condition and weight of its rows, 1 for others, e.g. "topic = 'Games': 0.3". In Python also a mapping;
            where a row is in several, their product.
        subsets: many subsets at once: Parquet of row_id[, subset_id, weight]. In Python also a table, or name ->
            row_ids.
        target: targets, separated by commas. Default: all.
        runs: runs, retrained or imported: the change in their unit, with an interval.
        out: file that the lines are written to, Parquet while they are made; the result then shows the first.
        protocol: protocol to predict with. Default: the one that ships.
        omitted: the subsets of `subsets` name the rows that are left out.
        family: draw subsets: uniform:F, bernoulli:Q, mixture:L or groups:L.
        count: subsets drawn with `family`.
        seed: seed of that draw.
        units: a line for every unit as well.
        components: the level, and what each part of the prediction adds.
    Raises:
        SettingsError: not one question, or one that leaves no row.
        SubsetError: an expression that is no condition, or tells no rows apart; subsets of other rows.
        ProtocolError: the artifact does not fit the protocol, or has no such target.
    """
    out = None if out is None else Path(out)
    if out is not None:
        check_outputs({"out": out}, artifact.reads, tables=["out"])
    if not isinstance(weight, Mapping):
        weight = parse_weights(several(weight), "weight") if weight else {}
    asked = {"drop": drop, "keep": keep, "weight": weight or None, "by": by, "subsets": subsets, "family": family}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) != 1:
        got = ", ".join(given) or "nothing to predict"
        raise SettingsError(f"predict: got {got}, expected one of {', '.join(asked)}")
    idle = {"omitted": omitted and subsets is None, "units": units and by is not None}
    idle |= {"components": components and by is not None}
    if any(idle.values()):
        useless = ", ".join(name for name, value in idle.items() if value)
        raise SettingsError(f"predict: got {useless} with {given[0]}, where it has no meaning; leave it out")
    targets, labels = checked_targets(artifact, target), LabelTable(artifact.rows_path)
    chosen = as_protocol(protocol, artifact)
    blocks: Iterable[SubsetBlock] = ()
    if by is not None:
        column = label_column(artifact, by, "by")  # or it says what there is
    elif subsets is not None:
        blocks, headline = _listed(artifact, subsets, omitted), ""
    elif family is not None:
        drawn = parse_family(family)
        of_rows = None if drawn.label is None else labels.column(drawn.label, "family")
        blocks = drawn.draw(count, n_rows=labels.n_rows, labels=of_rows, seed=seed, purpose="drawn")
        headline = f"{count:,} subsets drawn from {drawn}"
    elif weight:
        blocks, headline = _weighted(labels, weight)
    else:
        expression = drop if drop is not None else keep
        assert expression is not None
        selection = labels.matching(expression)
        verb, mask_N = ("drop", ~selection.mask_N) if drop is not None else ("keep", selection.mask_N)
        blocks = [one_subset(f"{verb} {expression}", mask_N)]
        headline = f"{verb}s {share(int(selection.mask_N.sum()), labels.n_rows)}"
        if selection.n_null:
            headline += f"; {selection.n_null:,} rows have no label there and count as not selected"
    sketches = SIMILAR if runs is not None or by is not None else ()
    predictor = Predictor.from_artifact(
        artifact, chosen, targets, per_unit=units, components=components, sketches=sketches
    )
    intervals = outside = None
    if runs is not None:
        from grasp.runs.calibration import Outside, learn  # noqa: PLC0415 - read only if there are runs

        intervals, outside = learn(predictor, artifact, runs), Outside()
    if by is not None:
        return _by(artifact, predictor, column, intervals, outside, out)
    made = prediction_table(predictor, artifact, blocks, components=components, intervals=intervals, outside=outside)
    if out is None:
        held = made.read_all()
        lines = len(held)
    else:
        held = made.schema.empty_table()
        lines = write_tables(made.schema, (pa.Table.from_batches([batch]) for batch in made), out)
    beyond = () if outside is None else outside.notes
    said = (*beyond, *leak_notes(artifact, predictor.units.targets), *notes(predictor, intervals))
    return Prediction(held, headline, said, unit=predictor.unit, lines=lines)


def notes(predictor: Predictor, intervals: "OutcomePredictor | None" = None) -> tuple[str, ...]:
    """What should be known of the numbers, and one line of where they come from."""
    found = [] if intervals is None else [*intervals.notes, intervals.title]
    if predictor.dropped:
        found.append(f"left out, since it does not vary: {', '.join(predictor.dropped)}")
    found += [known.note(target) for target, known in predictor.reliability.items()]
    return (*found, f"{predictor.scale}; protocol {predictor.protocol.name}")


def few_units(counts: Mapping[str, int]) -> list[str]:
    """What is to be known of intervals over the units of targets that have few."""
    few = ", ".join(f"{target} {n}" for target, n in counts.items() if n < FEW)
    return [f"few questions ({few}): an interval over fewer than {FEW} is too narrow"] if few else []


def share(rows: int, of: int) -> str:
    """`900 of 9,468 rows (9.5 %)`."""
    return f"{rows:,} of {of:,} rows ({100 * rows / of:.1f} %)"


# ----------------------------------------------------------------------------------------------- questions


def _listed(artifact: ArtifactReader, subsets: Any, omitted: bool) -> Iterable[SubsetBlock]:
    """Subsets of a file, a table, a DataFrame, or name -> row_ids."""
    if isinstance(subsets, Mapping):
        lists = {str(name): [str(row_id) for row_id in row_ids] for name, row_ids in subsets.items()}
        empty = [name for name, row_ids in lists.items() if not row_ids]
        if empty:
            raise SettingsError(f"subsets: {', '.join(empty)}: names no rows; a subset has one at least")
        names = [name for name, row_ids in lists.items() for _ in row_ids]
        row_ids = [row_id for row_ids in lists.values() for row_id in row_ids]
        subsets = pa.table({"subset_id": pa.array(names, pa.string()), "row_id": pa.array(row_ids, pa.string())})
    elif not isinstance(subsets, Path | str | pa.Table):
        subsets = pa.Table.from_pandas(subsets, preserve_index=False)
    index = RowIndex.from_parquet(artifact.rows_path)
    corpus = artifact.manifest.fingerprints.get("corpus")
    return read_subsets(subsets, index, side="omitted" if omitted else "retained", corpus=corpus)


def _weighted(labels: LabelTable, weight: Mapping[str, float]) -> tuple[Iterable[SubsetBlock], str]:
    weight_N, changed_N = np.ones(labels.n_rows), np.zeros(labels.n_rows, dtype=np.bool_)
    for expression, value in weight.items():
        if not 0 <= value < np.inf:
            raise SettingsError(f"weight: got {value} for {expression!r}, expected a number of 0 or more")
        mask_N = labels.matching(expression).mask_N
        weight_N[mask_N] *= value
        changed_N |= mask_N
    kept_N = weight_N > 0
    if not kept_N.any():
        raise SettingsError(f"weight: leaves none of {labels.n_rows:,} rows, expected at least one above 0")
    dropped = int((~kept_N).sum())
    said = f"gives {share(int(changed_N.sum()), labels.n_rows)} another weight"
    said += f", drops {dropped:,} of them" if dropped else ""
    return [one_subset("weighted", kept_N, weight_N[kept_N])], said


def parse_weights(texts: Sequence[str], where: str) -> dict[str, float]:
    """Expressions and their weights, from EXPR:NUMBER; an expression may hold colons, the last one counts."""
    weights: dict[str, float] = {}
    for text in texts:
        expression, _, number = text.rpartition(":")
        try:
            weight = float(number)
        except ValueError:
            weight = -1.0
        if not expression.strip() or not 0 <= weight < np.inf:
            raise SettingsError(
                f"{where}: got {text!r}, expected EXPR:NUMBER with 0 or more, e.g. \"topic = 'Games': 0.3\""
            )
        if expression in weights:
            raise SettingsError(f"{where}: got one expression twice; give it one weight")
        weights[expression] = weight
    return weights


# --------------------------------------------------------------------------------------------------- slices


def _by(
    artifact: ArtifactReader,
    predictor: Predictor,
    column: LabelColumn,
    intervals: "OutcomePredictor | None",
    outside: "Outside | None",
    out: Path | None,
) -> SlicePrediction:
    """Every value of a label; a file has room for all of them, a screen for the largest."""
    tokens_N = row_tokens(artifact)
    slices = label_slices(column, tokens_N)
    many = out is not None and slices.n_grouped > 0
    if many:
        slices = label_slices(column, tokens_N, most=len(column.values))
    effects = slice_effects(predictor, slices)
    # one kind of interval a table: with runs it is theirs, of nine in ten runs
    bounds = None if many or intervals is not None else dropped_intervals(artifact, predictor, effects, slices)
    numbers: dict[str, F64] = {"effect": effects.effect_GT, "if_dropped": effects.dropped_GT}
    if bounds is not None:
        numbers |= dict(zip(("if_dropped_low", "if_dropped_high"), bounds, strict=True))
    numbers["if_doubled"] = effects.doubled_GT
    if effects.redundancy_G is not None:
        numbers["redundancy"] = np.repeat(effects.redundancy_G[:, None], len(predictor.units.targets), axis=1)
    beyond: tuple[str, ...] = ()
    if intervals is not None and outside is not None:
        nats = intervals.predict(slices.weights(1.0 - np.eye(len(slices.slices))))
        numbers |= nats.columns
        outside.add([f"without {name}" for name in slices.names], nats)
        beyond = outside.notes
    g, t = (index.reshape(-1) for index in np.indices(effects.effect_GT.shape))
    order = np.lexsort((np.nan_to_num(effects.dropped_GT).reshape(-1), t))  # the most useful first for each target
    columns: dict[str, pa.Array] = {
        "value": pa.array([one.name for one in slices.slices], pa.string()).take(pa.array(g[order])),
        "target": pa.array(predictor.units.targets, pa.string()).take(pa.array(t[order])),
        "rows": pa.array([one.rows for one in slices.slices], pa.int64()).take(pa.array(g[order])),
        "tokens": pa.array([one.tokens for one in slices.slices], pa.int64()).take(pa.array(g[order])),
    }
    for name, value_GT in numbers.items():
        columns[name] = pa.array(value_GT.reshape(-1)[order], pa.float64(), from_pandas=True)
    table = pa.table(columns, metadata=_metadata(predictor))
    said = [f"{slices.n_grouped:,} of the values are small and share one slice"] if slices.n_grouped else []
    said.append("effect: mean of the rows, above 0 they help more than the corpus does on average")
    if bounds is not None:
        said.append("low, high: 95 % interval of if dropped over other units of the target")
        said += few_units(dict(zip(predictor.units.targets, predictor.units.counts_T.tolist(), strict=True)))
    if effects.redundancy_G is not None:
        alike = "how alike the slice is to all other rows; near 1 they can stand in for it, below 0 they cannot"
        said.append(f"redundancy: {alike}")
    result = SlicePrediction(
        table,
        f"what dropping, or doubling, each {column.name} does",
        (*said, *beyond, *leak_notes(artifact, predictor.units.targets), *notes(predictor, intervals)),
        unit=predictor.unit,
        lines=len(table),
        label=column.name,
    )
    if out is None:
        return result
    result.write(out)
    return replace(result, table=table.slice(0, 0))


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return signed(value, 3 if name.startswith(OURS) else 4)  # realized utilities differ little
    return f"{value:,}" if isinstance(value, int) else str(value)


# ---------------------------------------------------------------------------------------------------- block by block


def prediction_table(
    predictor: Predictor,
    artifact: ArtifactReader,
    blocks: Iterable[SubsetBlock],
    *,
    components: bool = False,
    intervals: "OutcomePredictor | None" = None,
    outside: "Outside | None" = None,
) -> pa.RecordBatchReader:
    """Predict any number of subsets in bounded memory: lines are made while they are read, so read once.

    Args:
        predictor: with units, a line for every unit stands below that of its task.
        blocks: the retained sides, drawn or read lazily; one block is held at a time.
        components: columns `level`, `part_*` (what each kernel and component adds; they add up to the change) and
            `value_*` (geometry in natural units, if there is any); the predictor was made with `components`.
        intervals: columns nats, nats_low and nats_high, or by the metric of the runs; null for units.
        outside: told of the subsets beyond what the runs covered.
    Returns:
        Columns subset_id, target[, unit_id], change and those asked for.
    Raises:
        ShapeError: subsets of a corpus with another number of rows.
    """
    expected = [] if intervals is None else [f"{intervals.unit}{end}" for end in ("", "_low", "_high")]
    names = ["subset_id", "target"] + (["unit_id"] if predictor.unit_level is not None else [])
    columns = ["change", *expected, *(["level", *predictor.part_names] if components else [])]
    fields = [(name, pa.string()) for name in names] + [(name, pa.float64()) for name in columns]
    schema, units = pa.schema(fields, _metadata(predictor)), predictor.units

    def batches() -> Iterator[pa.RecordBatch]:
        for block in blocks:
            if block.n_rows != predictor.n_rows:
                raise ShapeError(f"subsets over {block.n_rows} rows for an artifact of {predictor.n_rows}")
            sums = predictor.sums(block.weights)
            change_BT = predictor.change_of(sums)
            parts = predictor.parts(block.weights, sums) if components else {}
            shared = {name: part_B[:, None] for name, part_B in parts.items() if part_B.ndim == 1}
            numbers = parts | shared | {"change": change_BT, "level": predictor.task.whole_C + change_BT}
            if intervals is not None:
                nats = intervals.predict(block.weights)
                numbers |= nats.columns
                if outside is not None:
                    outside.add(block.subset_ids, nats)
            names = {"target": np.array(units.targets, dtype=object)}
            yield _lines(schema, block.subset_ids, names, numbers)
            if predictor.unit_level is not None:
                change_BE = predictor.unit_change(block.weights, sums)
                names = {
                    "target": np.repeat(np.array(units.targets, dtype=object), units.counts_T),
                    "unit_id": artifact.units.column("unit_id").to_numpy(zero_copy_only=False)[units.columns_E],
                }
                numbers = shared | {"change": change_BE, "level": predictor.unit_level.whole_C + change_BE}
                yield _lines(schema, block.subset_ids, names, numbers)

    return pa.RecordBatchReader.from_batches(schema, batches())


def _metadata(predictor: Predictor) -> dict[str, str]:
    """What a file of predictions says of itself."""
    provenance = f"{predictor.scale}; {predictor.protocol.in_words}"
    return {"grasp.protocol": predictor.protocol.name, "grasp.provenance": provenance}


def _lines(
    schema: pa.Schema, subset_ids: Sequence[str], names: Mapping[str, Any], numbers: Mapping[str, F64]
) -> pa.RecordBatch:
    """Lines at one level: subsets by columns, subsets slowest; what is not known there is null."""
    shape = numbers["change"].shape
    texts: dict[str, Any] = {"unit_id": np.full(shape[1], None), **names}
    columns = {name: np.tile(values, shape[0]) for name, values in texts.items()}
    columns["subset_id"] = np.repeat(np.array(subset_ids, dtype=object), shape[1])
    arrays = [
        pa.array(columns[field.name], field.type)
        if field.name in columns
        else pa.array(np.broadcast_to(numbers.get(field.name, np.float64(np.nan)), shape).reshape(-1), from_pandas=True)
        for field in schema
    ]
    return pa.record_batch(arrays, schema=schema)
