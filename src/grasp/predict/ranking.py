"""Which rows teach a target most? The verb `score`: rows in the order that `select` takes them.

A row's effect is its relevance to the target as the protocol counts it, mean 0 and standard deviation 1 over the rows:
above 0 it helps more than the corpus does on average. Ordered once, whatever is asked.
Shape letters: N rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.errors import ProtocolError, SettingsError
from grasp.files import written_aside
from grasp.predict.predictor import Predictor
from grasp.predict.protocol import ScoringProtocol, as_protocol
from grasp.predict.relevance import UnitSelection
from grasp.predict.row_arrays import RowArrays, only_target, row_tokens
from grasp.predict.slices import LabelTable
from grasp.results import Result, write_table
from grasp.text import several

ScoreRows = Callable[[str], tuple[str, NDArray[np.floating[Any]]]]  # target -> what the scores are called, and (N,)

ROWS_AT_ONCE = 1 << 18  # of the row table, while all rows are written in order
PRINTED = 100
SHORT = 32  # tokens: the relevance of shorter rows is noisy


@dataclass(frozen=True, eq=False, repr=False)
class RankedRows(Result):
    """The answer of `score`: rows in order, with their labels and the beginning of their text."""

    by: str = "effect"  # what they are ordered by
    shown: tuple[str, ...] = ()  # columns that are printed, in this order
    lines: int = 0  # rows in all; `table` has none where they were written to a file

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        rows = self.table.slice(0, PRINTED).to_pylist()
        names = ["text" if name == "snippet" else name for name in self.shown]
        most = max((abs(row[self.by]) for row in rows), default=0.0)
        spelled = "{:+z.3f}" if self.by == "effect" or 0.1 <= most < 1e6 else "{:+.3e}"  # one for the whole column

        def cell(name: str, value: Any) -> str:
            if value is None:
                return "-"
            return spelled.format(value) if name == self.by else str(value)

        return names, [[cell(name, row[name]) for name in self.shown] for row in rows]

    def _below(self) -> Sequence[str]:
        more = len(self) - PRINTED
        return [*([f"... and {more:,} more"] if more > 0 else []), *self.notes]


def score(
    artifact: ArtifactReader,
    target: str | None = None,
    *,
    protocol: ScoringProtocol | Path | str | None = None,
    match: str | None = None,
    unit: str | None = None,
    top: int | None = None,
    bottom: int = 0,
    where: str | None = None,
    min_tokens: int = 0,
    labels: str | Sequence[str] | None = None,
    method: ScoreRows | None = None,
    out: Path | None = None,
) -> RankedRows:
    """Rows by what they teach a target: the most helpful, the most harmful, or both.

    Args:
        target: None: the only one.
        protocol: None: the one that ships.
        match: token, input, neighbour, shift or pooled: rank by one kernel.
        unit: unit_id: rank for one unit of the target.
        top, bottom: how many; neither: all rows, best first.
        where: label expression: rank these rows only.
        min_tokens: pass over shorter rows: their relevance is noisy.
        labels: label columns that are shown; None: the first two.
        method: scores rows by a published method, in place of relevance.
        out: file that the rows are written to, Parquet in bounded memory; the result then shows none.
    Raises:
        ProtocolError: no such target, unit or kernel.
        SettingsError: no such label, or no row that is as long.
    """
    target = only_target(artifact, target)
    if match is not None:
        artifact.relevance_name(match)  # or it says what there is
    if idle := [name for name, given in (("match", match), ("unit", unit)) if given is not None and method is not None]:
        raise SettingsError(f"{idle[0]}: no meaning with method; leave one of them out")
    known = LabelTable(artifact.rows_path)
    shown = _label_columns(artifact, known, labels)
    among_N = _among(artifact, known, where, min_tokens)
    if method is not None:
        by, values_N = method(target)
        said = f"{by}: score of the method, in its own unit"
    else:
        predictor = additive_predictor(artifact, target, protocol=protocol, match=match, unit=unit)
        by, values_N = "effect", predictor.effect_NT[:, 0]
        said = f"effect: relevance in standard deviations over the rows, 0 = the corpus average; {predictor.scored_by}"
    order = ranked(values_N, among_N=among_N)
    count = (0 if bottom else len(order)) if top is None else top
    chosen = np.concatenate([order[:count], ranked(-values_N, among_N=among_N)[:bottom]])
    kinds = [(min(count, len(order)), "helpful"), (min(bottom, len(order)), "harmful")]
    asked = " and ".join(f"the {n:,} most {kind}" for n, kind in kinds if n)
    if top is None and not bottom:
        asked = "all"
    if out is not None:
        write_ranked(artifact, values_N, chosen, out, by)
    notes = [said]
    first = min(PRINTED, len(chosen))
    if short := short_rows(row_tokens(artifact), chosen[:first]):
        notes.insert(
            0,
            f"{short:,} of {'these' if first == len(chosen) else f'the first {first:,}'} rows have fewer than {SHORT} "
            f"tokens, and their relevance is noisy: min_tokens {SHORT} passes over them",
        )
    return RankedRows(
        _rows(artifact, chosen if out is None else chosen[:0], values_N, by),
        f"{asked} of {len(order):,} rows for {target if unit is None else f'{unit} of {target}'}, by {by}",
        tuple(notes),
        by=by,
        shown=(by, "row_id", *shown, "snippet"),
        lines=len(chosen),
    )


def additive_predictor(
    artifact: RowArrays,
    target: str,
    *,
    protocol: ScoringProtocol | Path | str | None = None,
    match: str | None = None,
    unit: str | None = None,
) -> Predictor:
    """What `select` orders rows by: `effect_NT` has one column.

    Args:
        match: one kernel in the place of the protocol's.
        unit: one unit in the place of all those of the target.
    """
    chosen = as_protocol(protocol)
    if match is not None:
        chosen = ScoringProtocol.model_validate(
            chosen.model_dump() | {"name": f"{chosen.name}, {match} alone", "match": {match: 1.0}, "selected_on": None}
        )
    additive = chosen.model_copy(update={"components": {}})
    return Predictor.of(artifact, additive, [target], units=_one_unit(artifact, target, unit))


def ranked(values_N: NDArray[np.floating[Any]], *, among_N: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """Row indices, highest value first; equal ones in corpus order."""
    rows = np.arange(len(values_N)) if among_N is None else np.flatnonzero(among_N)
    return rows[np.argsort(-values_N[rows], kind="stable")]


def short_rows(tokens_N: NDArray[np.int64], row_index: NDArray[np.int64]) -> int:
    """How many of some rows are too short for their relevance to be trusted; 0 where all rows are, as images are."""
    return int((tokens_N[row_index] < SHORT).sum()) if tokens_N.max() >= SHORT else 0


def write_ranked(
    artifact: RowArrays, values_N: NDArray[np.floating[Any]], order: NDArray[np.int64], path: Path, by: str
) -> None:
    """Rows in order; Parquet some at a time. The file appears only when whole."""
    if path.suffix != ".parquet":
        write_table(_rows(artifact, order, values_N, by), path)
        return
    schema = _rows(artifact, order[:0], values_N, by).schema
    with written_aside(path) as part, pq.ParquetWriter(part, schema, compression="zstd") as writer:
        for start in range(0, len(order), ROWS_AT_ONCE):
            writer.write_table(_rows(artifact, order[start : start + ROWS_AT_ONCE], values_N, by).cast(schema))


def _among(
    artifact: ArtifactReader, labels: LabelTable, where: str | None, min_tokens: int
) -> NDArray[np.bool_] | None:
    among_N = None if where is None else labels.matching(where).mask_N
    if min_tokens:
        long_N = row_tokens(artifact) >= min_tokens
        among_N = long_N if among_N is None else among_N & long_N
    if among_N is not None and not among_N.any():
        raise SettingsError(f"min_tokens: got {min_tokens}, no row of {artifact.where} is as long")
    return among_N


def _rows(artifact: RowArrays, row_index: NDArray[np.int64], values_N: NDArray[np.floating[Any]], by: str) -> pa.Table:
    """Chosen rows of the row table, in the order given, with what they are ordered by."""
    table = artifact.rows(row_index)
    kept = [name for name in table.column_names if name not in ("row_index", by)]
    values = pa.array(np.asarray(values_N[row_index], dtype=np.float64))
    return table.select(kept).append_column(by, values)


def _one_unit(artifact: RowArrays, target: str, unit: str | None) -> UnitSelection | None:
    if unit is None:
        return None
    columns = artifact.unit_columns(target)
    names = artifact.units.column("unit_id").to_pylist()
    found = [int(e) for e in columns if names[e] == unit]
    if not found:
        some = ", ".join(names[e] for e in columns[:3])
        raise ProtocolError(f"unit: {target} has no unit {unit!r}; it has {len(columns):,}, e.g. {some}")
    return UnitSelection((target,), np.array(found[:1]), np.ones(1, dtype=np.int64))


def _label_columns(artifact: ArtifactReader, known: LabelTable, labels: str | Sequence[str] | None) -> list[str]:
    """Columns of the row table to show: those asked for, else the first two labels."""
    if labels is None:
        return list(artifact.manifest.details.get("labels", []))[:2]
    unknown = [name for name in several(labels) if name not in known.columns]
    if unknown:
        raise SettingsError(f"labels: got {', '.join(unknown)}; the artifact has {', '.join(known.columns)}")
    return list(several(labels))
