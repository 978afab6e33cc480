"""Predicted utilities of subsets, read from tables, arrays, or scores of single rows. Start with `read_predictions`.

Supported files:

    table (Parquet)      subset_id, target, utility[, unit_id]; lines without a unit_id predict the mean of the task
    array (.npy)         (B, E), with `<name>.ids.json`: {"subset_ids": [...], "units": [[target, unit_id], ...]}
    row scores (.npy)    (N, E), with `<name>.ids.json`: {"units": [...]}; rows in corpus order
    row scores (Parquet) row_id and one column `target/unit_id` per unit, or one column `target` for the whole task

Higher is better. Shape letters: B subsets, E units, N rows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tokenize import TokenError
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from grasp.arrays import F64, I64, ratio
from grasp.errors import RunsError
from grasp.predict.predictor import downweight_negative
from grasp.predict.subset_tables import RowIndex
from grasp.predict.weights import SubsetBlock, sums_over
from grasp.store.checksummed_parquet import read_checksummed
from grasp.store.contents import readable_table
from grasp.yaml_files import describe

Unit = tuple[str, str]
Weighting = Literal["count", "mean"]  # sum, or weighted mean, of the scores of the rows of a subset
# predictor: uses none of the utilities it is evaluated on; oracle-selected: its configuration was selected on them;
# supervised oracle: fitted to other subsets of the same runs. The latter two are reported separately.
MethodRole = Literal["predictor", "oracle-selected", "supervised oracle"]

MAX_EXAMPLES = 3
WHOLE_TASK = ""  # unit_id of results for a whole task
MAX_PREDICTION = 1e100  # largest prediction, so that sums and squares do not overflow
BLOCK_ROWS = 16_384


class _Ids(BaseModel):
    """Contents of the .ids.json file that describes the axes of a .npy file."""

    units: tuple[Unit, ...]
    subset_ids: tuple[str, ...] | None = None  # None: the first axis are the rows of the corpus


@dataclass(frozen=True, slots=True)
class Cost:
    """Storage per row and build time of a method; None: unknown."""

    features: int | None  # floats per row from which new units can be scored
    scores: int | None  # floats per row: one per unit, or one for all units
    wall_seconds: float | None = None
    cpu_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of a method for named subsets: utilities of units, of tasks, or of both."""

    method: str
    subset_ids: tuple[str, ...]
    units: tuple[Unit, ...]
    values_BE: F64
    task_B: Mapping[str, F64] = field(default_factory=dict)  # by target; default: mean over its units
    method_role: MethodRole = "predictor"
    cost: Cost | None = None
    notes: tuple[str, ...] = ()  # notes for reports

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([target for target, _ in self.units] + list(self.task_B)))

    def aligned(self, subset_ids: Sequence[str], target: str, unit_ids: Sequence[str]) -> tuple[F64 | None, F64 | None]:
        """Return the predictions of one target in the given order: units (B, E) and task (B,), or None if missing.

        Additional subsets and units are ignored.

        Raises:
            RunsError: a subset or unit has no prediction, or one that is not finite.
        """
        b = _positions(self.subset_ids, subset_ids, f"{self.method}: subsets")
        column_of = {unit: e for e, (name, unit) in enumerate(self.units) if name == target}
        task_B = self.task_B[target][b] if target in self.task_B else None
        if not column_of and task_B is None:
            raise RunsError(f"{self.method}: has no predictions for {target!r}, only for {self.targets}")
        if not column_of or list(unit_ids) == [WHOLE_TASK]:
            task_B = self.values_BE[b][:, list(column_of.values())].mean(axis=1) if task_B is None else task_B
            return None, _require_finite(task_B, f"{self.method}: {target}")
        e = _positions(list(column_of), unit_ids, f"{self.method}: units of {target}")
        values_BE = self.values_BE[b][:, np.array(list(column_of.values()), dtype=np.int64)[e]]
        return (
            _require_finite(values_BE, f"{self.method}: {target}"),
            None if task_B is None else _require_finite(task_B, f"{self.method}: {target}"),
        )


@dataclass(frozen=True, slots=True)
class RowScores:
    """Scores of single rows in corpus order, in blocks (first row, (n, E))."""

    method: str
    columns: tuple[tuple[str, str | None], ...]  # (target, unit_id); unit_id None: the whole task
    n_rows: int
    blocks: Iterable[tuple[int, NDArray[Any]]]

    def sum_over(
        self,
        subsets: Iterable[SubsetBlock],
        *,
        weighting: Weighting = "mean",
        negative: float = 1.0,
    ) -> Predictions:
        """Predict each subset additively, by the sum (count) or the weighted mean of the scores of its rows.

        Args:
            subsets: retained sides, over the same rows.
            weighting: count or mean.
            negative: factor of negative scores.
        Raises:
            RunsError: wrong number of rows, or a score that is not finite; the message names row and unit.
        Source: eq:grasp-subset-relevance, eq:additive-utility. Memory: the subsets and one block of rows.
        """
        blocks = list(subsets)
        ids = tuple(name for block in blocks for name in block.subset_ids)
        wrong = [block.n_rows for block in blocks if block.n_rows != self.n_rows]
        if wrong or not blocks:
            reason = f"the subsets are drawn from {wrong[0]}" if wrong else "there are no subsets"
            raise RunsError(f"{self.method}: scores {self.n_rows} rows, {reason}")

        def downweighted_blocks() -> Iterator[tuple[int, F64]]:
            for start, scores_NE in self.blocks:
                values_NE = scores_NE.astype(np.float64)
                for row, column in np.argwhere(bad_NE := ~(np.abs(values_NE) <= MAX_PREDICTION))[:1]:
                    target, unit = self.columns[column]
                    raise RunsError(
                        f"{self.method}: score of row {start + row} for {target} unit {unit!r} is "
                        f"{scores_NE[row, column]} ({bad_NE.sum()} such in this block); scores must be finite, and at "
                        f"most {MAX_PREDICTION:g}"
                    )
                yield start, downweight_negative(values_NE, negative)

        sum_BE = sums_over(downweighted_blocks(), [block.weights for block in blocks], len(self.columns))
        if weighting == "mean":
            weight_sums = [block.weights.sums for block in blocks]
            sum_BE = [
                ratio(1.0, total_B)[:, None] * part_BE for total_B, part_BE in zip(weight_sums, sum_BE, strict=True)
            ]
        return _separate_tasks(self.method, ids, self.columns, np.concatenate(sum_BE))


def read_predictions(
    path: Path, rows: RowIndex, subsets: Iterable[SubsetBlock], method: str | None = None
) -> Predictions:
    """Read a file of predictions; row scores are averaged over the retained rows of each subset.

    Args:
        rows: names of the rows of the corpus.
        subsets: subsets to predict from row scores.
        method: name of the method; default: the name of the file.
    Raises:
        RunsError: unknown kind of file, or it does not match rows or subsets, or lines are duplicate or missing. The
            message names the first.
    """
    method = method or path.stem
    table = None if path.suffix == ".npy" else _read_table(path)
    if table is None and (ids := _read_ids(path)).subset_ids is not None:
        shape = len(ids.subset_ids), len(ids.units)
        values_BE = np.asarray(_load_npy(path, shape, "(B, E) subsets and units that its ids name"), np.float64)
        return Predictions(method, ids.subset_ids, ids.units, values_BE)
    if table is not None and "subset_id" in table.column_names:
        return _parse_table(path, table, method)
    return read_row_scores(path, rows, method, table).sum_over(subsets)


def read_row_scores(path: Path, rows: RowIndex, method: str | None = None, table: pa.Table | None = None) -> RowScores:
    """Open scores of rows; .npy files are read block by block when they are summed.

    Args:
        rows: names of the rows of the corpus; a Parquet file must contain all of them, in any order.
        table: contents of the Parquet file, if it was read already.
    Raises:
        RunsError: rows are missing or repeated, or shapes do not match.
    """
    if path.suffix == ".npy":
        units = _read_ids(path).units
        scores = _load_npy(path, (rows.n_rows, len(units)), "(N, E) rows and units")
        return RowScores(method or path.stem, units, rows.n_rows, _blocks(scores))
    table = _read_table(path) if table is None else table
    if "row_id" not in table.column_names:
        raise RunsError(
            f"{path}: has columns {table.column_names}, expected subset_id, target, utility, or row_id and one column "
            "per unit"
        )
    names = [name for name in table.column_names if name != "row_id"]
    if not names:
        raise RunsError(f"{path}: has no scores, expected columns `target/unit_id` or `target`")
    if pa.types.is_nested(table.schema.field("row_id").type):
        raise RunsError(f"{path}: row_id: got {table.schema.field('row_id').type}, expected names")
    order = _positions(table.column("row_id").to_pylist(), rows.ids().to_pylist(), f"{path}: rows")
    columns = tuple((head, tail if mark else None) for head, mark, tail in (name.partition("/") for name in names))
    scores = np.stack([_float_column(table, name, path) for name in names], axis=1)
    return RowScores(method or path.stem, columns, rows.n_rows, _blocks(scores[order]))


def _parse_table(path: Path, table: pa.Table, method: str) -> Predictions:
    """Parse a table `subset_id, target, utility[, unit_id]` with lines in any order."""
    missing = [name for name in ("target", "utility") if name not in table.column_names]
    if missing:
        raise RunsError(f"{path}: has columns {table.column_names}, lacks {missing}")
    if nested := [field for field in table.schema if field.name != "utility" and pa.types.is_nested(field.type)]:
        raise RunsError(f"{path}: {nested[0].name}: got {nested[0].type}, expected names")
    units = table.column("unit_id").to_pylist() if "unit_id" in table.column_names else [None] * len(table)
    columns = list(zip(table.column("target").to_pylist(), units, strict=True))
    lines = [str(name) for name in table.column("subset_id").to_pylist()]
    b_of = {name: b for b, name in enumerate(dict.fromkeys(lines))}
    e_of = {column: e for e, column in enumerate(dict.fromkeys(columns))}
    b, e = np.array([b_of[name] for name in lines], dtype=int), np.array([e_of[name] for name in columns], dtype=int)
    counts_BE = np.zeros((len(b_of), len(e_of)), dtype=np.int64)
    np.add.at(counts_BE, (b, e), 1)
    wrong = np.argwhere(counts_BE != 1)
    if len(wrong):
        row, column = wrong[0]
        raise RunsError(
            f"{path}: subset {list(b_of)[row]!r}, target and unit {list(e_of)[column]} occurs {counts_BE[row, column]} "
            f"times ({len(wrong)} such); expected each once"
        )
    values_BE = np.full(counts_BE.shape, np.nan)
    values_BE[b, e] = _float_column(table, "utility", path)
    return _separate_tasks(method, tuple(b_of), tuple(e_of), values_BE)


def _float_column(table: pa.Table, name: str, path: Path) -> F64:
    """Return a column as float64."""
    try:
        return np.asarray(table.column(name).cast(pa.float64()).to_numpy(zero_copy_only=False))
    except pa.ArrowException as err:
        raise RunsError(f"{path}: {name}: {' '.join(str(err).split())}; expected numbers") from err


def _blocks(array: NDArray[Any]) -> list[tuple[int, NDArray[Any]]]:
    """Split an array, in memory or on disk, into views of blocks."""
    return [(start, array[start : start + BLOCK_ROWS]) for start in range(0, len(array), BLOCK_ROWS)]


def _separate_tasks(
    method: str, ids: tuple[str, ...], columns: Sequence[tuple[str, str | None]], values_BE: F64
) -> Predictions:
    """Separate the columns of units from those of whole tasks."""
    of_units = [e for e, (_, unit) in enumerate(columns) if unit is not None]
    units = tuple((target, unit) for target, unit in columns if unit is not None)
    task_B = {target: values_BE[:, e] for e, (target, unit) in enumerate(columns) if unit is None}
    return Predictions(method, ids, units, values_BE[:, of_units], task_B)


def _positions(available: Sequence[str], requested: Sequence[str], where: str) -> I64:
    """Return the position in `available` of each requested name."""
    position = {name: i for i, name in enumerate(available)}
    if len(position) < len(available):
        duplicate = next(name for i, name in enumerate(available) if position[name] != i)
        raise RunsError(f"{where}: {duplicate!r} occurs twice, expected each once")
    missing = [name for name in requested if name not in position]
    if missing:
        raise RunsError(
            f"{where}: {len(missing)} of {len(requested)} have no prediction, e.g. {missing[:MAX_EXAMPLES]}; expected "
            "all"
        )
    return np.array([position[name] for name in requested], dtype=np.int64)


def _require_finite(values: F64, where: str) -> F64:
    """Return the values, or raise an error that names the first one that is not finite or too large."""
    bad = np.argwhere(~(np.abs(values) <= MAX_PREDICTION))
    if len(bad):
        raise RunsError(
            f"{where}: prediction at {tuple(bad[0].tolist())} is {values[tuple(bad[0])]} ({len(bad)} such); "
            f"predictions must be finite, and at most {MAX_PREDICTION:g}"
        )
    return values


def _read_ids(path: Path) -> _Ids:
    """Read the .ids.json file next to a .npy file."""
    ids_path = path.with_suffix(".ids.json")
    try:
        return _Ids.model_validate_json(ids_path.read_bytes())
    except FileNotFoundError as err:
        raise RunsError(f"{ids_path}: no such file; it must describe the axes of {path.name}") from err
    except ValidationError as err:
        raise RunsError(describe(err, str(ids_path))) from err


def _load_npy(path: Path, shape: tuple[int, int], axes: str) -> NDArray[Any]:
    """Map a .npy file of numbers with this shape into memory; `axes` describes the shape for messages."""
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as err:
        raise RunsError(f"{path}: no such file") from err
    except (ValueError, EOFError, OSError, OverflowError, SyntaxError, TokenError) as err:
        # SyntaxError and TokenError: a malformed header
        raise RunsError(f"{path}: cannot be read as .npy: {err}") from err
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biuf":
        content = array.dtype if isinstance(array, np.ndarray) else "an archive"
        raise RunsError(f"{path}: contains {content}, expected an array of numbers")
    if array.shape != shape:
        raise RunsError(f"{path}: shape {array.shape}, expected {shape}: {axes}")
    return array


def _read_table(path: Path) -> pa.Table:
    """Read a Parquet file whose columns have different names."""
    with readable_table(path, RunsError, "Parquet"):
        table = read_checksummed(path)
    duplicate = [name for name in table.column_names if table.column_names.count(name) > 1]
    if duplicate:
        raise RunsError(f"{path}: has {duplicate[0]!r} as the name of {len(duplicate)} columns, expected it once")
    return table
