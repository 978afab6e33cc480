"""Slices of the corpus by a label, and single rows by relevance. Shape letters: G values, N rows, T tasks, D width."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.errors import ProtocolError, ShapeError
from grasp.files import written_aside
from grasp.predict.geometry import SketchSums, SubsetMass
from grasp.predict.held import UnitSelection, relevance_sums
from grasp.predict.labels import LabelColumn
from grasp.predict.predictions import describe
from grasp.predict.protocol import ScoringProtocol
from grasp.predict.scorer import CalibrationFamily, Scorer, SubsetSums
from grasp.predict.source import F64, FeatureSource, checked_targets


class RowSource(FeatureSource, Protocol):
    """An artifact whose row table can be read as well."""

    def rows(self, row_index: NDArray[np.integer[Any]]) -> pa.Table: ...
    def row_batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]: ...


def slice_table(
    source: FeatureSource,
    protocol: ScoringProtocol,
    labels: LabelColumn,
    *,
    tokens_N: NDArray[np.integer] | None = None,
    targets: Sequence[str] | None = None,
    calibration: CalibrationFamily | None = None,
) -> pa.Table:
    """What each value of a label is worth, one line a value and target.

    Columns: value (as `LabelColumn.names` has it), target, rows, tokens (if given), relevance_<kernel> (mean over the
    rows of what `top_rows` ranks, whatever a protocol makes of it), if_dropped and if_doubled (change of utility
    against the whole corpus, in standard deviations of A over the calibration family), redundancy (cosine of the
    value's sketch sum to the mean sketch of all other rows; hidden and residual sketch together). A value that is the
    whole corpus cannot be dropped: null. The metadata say what `predict` says.

    Raises:
        ProtocolError: the artifact does not fit the protocol.
        ShapeError: labels or tokens of another number of rows.
    """
    _one_a_row(source, labels, tokens_N)
    halves = [half for half in ("hidden", "residual") if f"{half}_sketch" in source.array_names]
    scorer = Scorer.prepare(source, protocol, targets=targets, calibration=calibration, halves=halves)
    indicators = _indicators(labels)
    slices = scorer.sums(indicators)
    whole = scorer.whole()
    base_1T = scorer.score_tasks(whole)[1].utility_BE
    dropped = scorer.score_tasks(_whole_plus(scorer, whole, slices, -1.0))[1].utility_BE - base_1T
    doubled = scorer.score_tasks(_whole_plus(scorer, whole, slices, 1.0))[1].utility_BE - base_1T
    rows_G = labels.counts
    dropped[rows_G == scorer.n_rows] = np.nan
    n_targets = len(scorer.units.targets)

    def per_value(values_G: NDArray[np.generic]) -> NDArray[np.generic]:
        return np.repeat(values_G, n_targets)

    names = np.array(labels.names(), dtype=object)
    columns = {
        "value": pa.array(per_value(names), pa.string()),
        "target": pa.array(list(scorer.units.targets) * len(names), pa.string()),
        "rows": pa.array(per_value(rows_G), pa.int64()),
    }
    if tokens_N is not None:
        tokens_G = np.bincount(labels.codes_N, weights=tokens_N, minlength=len(names)).astype(np.int64)
        columns["tokens"] = pa.array(per_value(tokens_G), pa.int64())
    for kernel in slices.task:
        (sum_GT,) = relevance_sums(source, kernel, scorer.units, [indicators])
        columns[f"relevance_{kernel}"] = pa.array((sum_GT / rows_G[:, None]).reshape(-1))
    columns["if_dropped"] = pa.array(dropped.reshape(-1), from_pandas=True)
    columns["if_doubled"] = pa.array(doubled.reshape(-1))
    if halves:
        redundancy_G = _redundancy([slices.sketch[half] for half in halves], [whole.sketch[half] for half in halves])
        columns["redundancy"] = pa.array(per_value(redundancy_G), from_pandas=True)
    return pa.table(columns, metadata=describe(scorer))


@dataclass(frozen=True, slots=True)
class RankedRows:
    """Rows by mean relevance to a target, best (or worst) first."""

    row_index: NDArray[np.int64]
    relevance: F64


def top_rows(
    source: FeatureSource,
    target: str,
    k: int,
    *,
    bottom: bool = False,
    kernel: str | None = None,
    among_N: NDArray[np.bool_] | None = None,
) -> RankedRows:
    """The k rows with the highest (or lowest) mean relevance to the units of a target; equal ones in corpus order.

    Args:
        kernel: `token`, `input` or `pooled`; none: token where the artifact has it.
        among_N: rows that may be chosen; none: all.
    Memory: one block of rows and k.
    Raises:
        ProtocolError: no such target or kernel, or k below 1.
    """
    if k < 1:
        raise ProtocolError(f"top_rows: got k={k}, expected at least 1")
    units = UnitSelection.of(source, checked_targets(source, [target]))
    name = f"relevance_{kernel}" if kernel else kernel_array(source)
    if name not in source.array_names:
        built = [array.removeprefix("relevance_") for array in source.array_names if array.startswith("relevance_")]
        raise ProtocolError(f"kernel: got {kernel!r}, the artifact has {' and '.join(built)}")
    sign = 1.0 if bottom else -1.0
    index, key = np.empty(0, dtype=np.int64), np.empty(0)
    for start, block in source.array_blocks(name, columns=units.columns_E):
        chosen = np.arange(len(block)) if among_N is None else np.flatnonzero(among_N[start : start + len(block)])
        index = np.concatenate([index, start + chosen])
        key = np.concatenate([key, sign * units.mean_per_task(block)[chosen, 0]])
        best = np.lexsort((index, key))[:k]
        index, key = index[best], key[best]
    return RankedRows(index, sign * key)


def kernel_array(source: FeatureSource) -> str:
    """The relevance that ranks where none is named: token, or pooled where there is no token."""
    return "relevance_token" if "relevance_token" in source.array_names else "relevance_pooled"


def _one_a_row(source: FeatureSource, labels: LabelColumn, tokens_N: NDArray[np.integer] | None) -> None:
    for what, length in (("labels", labels.n_rows), ("tokens", source.n_rows if tokens_N is None else len(tokens_N))):
        if length != source.n_rows:
            raise ShapeError(f"slice_table: {length} {what} for an artifact of {source.n_rows} rows; one a row")


def _indicators(labels: LabelColumn) -> csr_array:
    """(G, N), 1 where a row has the value."""
    order = np.argsort(labels.codes_N, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(labels.counts)])
    return csr_array((np.ones(len(order)), order, indptr), shape=(len(labels.values), len(order)))


def _whole_plus(scorer: Scorer, whole: SubsetSums, slices: SubsetSums, step: float) -> SubsetSums:
    """The corpus with the weight of one slice changed by `step`: -1 drops it, +1 doubles it.

    Weights are 1 + step inside the slice, so squared norms change by (1 + step)^2 - 1.
    """
    size_G = slices.mass.retained_B
    square_step = (1.0 + step) ** 2 - 1.0
    return SubsetSums(
        mass=SubsetMass(scorer.n_rows + step * size_G, abs(step) * size_G, scorer.n_rows),
        task={kernel: whole.task[kernel] + step * part for kernel, part in slices.task.items()},
        unit={},
        sketch={
            half: SketchSums(
                whole.sketch[half].total_BD + step * part.total_BD,
                whole.sketch[half].norm_B + step * part.norm_B,
                whole.sketch[half].square_norm_B + square_step * part.norm_B,
            )
            for half, part in slices.sketch.items()
        },
    )


def _redundancy(slices: Sequence[SketchSums], whole: Sequence[SketchSums]) -> F64:
    """Cosine of each slice's sketch sum to the sum of all other rows, (G,); NaN where either is zero."""
    slice_GD = np.concatenate([part.total_BD for part in slices], axis=1)
    rest_GD = np.concatenate([part.total_BD for part in whole], axis=1) - slice_GD
    norm_G = np.linalg.norm(slice_GD, axis=1) * np.linalg.norm(rest_GD, axis=1)
    floor = 1e-12 * np.linalg.norm(slice_GD, axis=1) ** 2
    product_G = np.einsum("gd,gd->g", slice_GD, rest_GD)
    return np.asarray(np.divide(product_G, norm_G, out=np.full_like(norm_G, np.nan), where=norm_G > floor))


def ranked_rows(
    source: RowSource,
    target: str,
    k: int,
    *,
    bottom: bool = False,
    kernel: str | None = None,
    min_tokens: int = 0,
) -> pa.Table:
    """`top_rows` with what is known of each row: row_id, labels, snippet, relevance; best (or worst) first.

    Args:
        min_tokens: pass over shorter rows. Relevance is a mean over a row's positions, so short rows lie far out.
    """
    long_N = row_tokens(source) >= min_tokens if min_tokens else None
    ranked = top_rows(source, target, k, bottom=bottom, kernel=kernel, among_N=long_N)
    return source.rows(ranked.row_index).append_column("relevance", pa.array(ranked.relevance))


def write_ranking(
    source: RowSource,
    target: str,
    path: Path,
    parts: Sequence[tuple[int, bool]],
    *,
    kernel: str | None = None,
    min_tokens: int = 0,
) -> int:
    """Rows by relevance as Parquet: for each part so many, from the bottom or not. Returns the lines."""
    tables = [ranked_rows(source, target, k, bottom=worst, kernel=kernel, min_tokens=min_tokens) for k, worst in parts]
    write_table(pa.concat_tables(tables), path)
    return sum(table.num_rows for table in tables)


def row_tokens(source: RowSource) -> NDArray[np.int64]:
    """Tokens of every row, (N,)."""
    return np.concatenate(
        [np.asarray(batch.column("n_tokens"), dtype=np.int64) for batch in source.row_batches(["n_tokens"])]
    )


def write_table(table: pa.Table, path: Path) -> None:
    """Parquet, written aside, then renamed."""
    with written_aside(path) as part:
        pq.write_table(table, part, compression="zstd")
