"""Predicted utilities of subsets, read from tables, arrays, or scores of single rows. Start with `read_predictions`.

Supported files:

    table (Parquet)      subset_id, target, utility[, unit_id]; lines without a unit_id predict the mean of the task
    array (.npy)         (B, E), with `<name>.ids.json`: {"subset_ids": [...], "units": [[target, unit_id], ...]}
    row scores (.npy)    (N, E), with `<name>.ids.json`: {"units": [...]}; rows in corpus order
    row scores (Parquet) row_id and one column `target/unit_id` per unit, or one column `target` for the whole task

Higher is better. A column of row scores predicts either one unit of a target or the mean over all its units (the
task). Shape letters: B subsets, E units, or columns of row scores, N rows.
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
Column = tuple[str, str | None]  # (target, unit_id); unit_id None: the whole task
# predictor: uses none of the utilities it is evaluated on; oracle-selected: its configuration was selected on them;
# supervised oracle: fitted to other subsets of the same runs. The latter two are reported separately.
MethodRole = Literal["predictor", "oracle-selected", "supervised oracle"]

MAX_EXAMPLES = 3
WHOLE_TASK = ""  # unit_id of results for a whole task
MAX_PREDICTION = 1e100  # largest prediction, so that sums and squares do not overflow
BLOCK_ROWS = 16_384
NAME_COLUMNS = ("row_id", "subset_id", "target", "unit_id")


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
    """Predictions of a method for named subsets: utilities of units, of tasks, or of both.

    Attributes:
        method: name of the method.
        subset_ids: names of the subsets.
        units: (target, unit_id) of each predicted unit.
        values_BE: predicted utility of each unit.
        task_B: predicted mean utility of a task, by target. Default: the mean over its units.
        method_role: whether the method was selected on, or fitted to, the utilities that it is evaluated on.
        cost: storage and build time of the method; None: unknown.
        notes: notes for reports.
    """

    method: str
    subset_ids: tuple[str, ...]
    units: tuple[Unit, ...]
    values_BE: F64
    task_B: Mapping[str, F64] = field(default_factory=dict)
    method_role: MethodRole = "predictor"
    cost: Cost | None = None
    notes: tuple[str, ...] = ()

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys([target for target, _ in self.units] + list(self.task_B)))

    def aligned(self, subset_ids: Sequence[str], target: str, unit_ids: Sequence[str]) -> tuple[F64 | None, F64 | None]:
        """Return the predictions of one target in the given order: units (B, E) and task (B,), or None if missing.

        Additional subsets and units are ignored.

        Raises:
            RunsError: a subset or unit has no prediction, or one that is not finite.
        """
        location = f"{self.method}: {target}"
        b = _positions(self.subset_ids, subset_ids, f"{self.method}: subsets")
        column_of = {unit_id: e for e, (name, unit_id) in enumerate(self.units) if name == target}
        columns = np.array(list(column_of.values()), dtype=np.int64)
        task_B = self.task_B[target][b] if target in self.task_B else None
        if not column_of and task_B is None:
            raise RunsError(f"{self.method}: has no predictions for {target!r}, only for {self.targets}")
        if not column_of or list(unit_ids) == [WHOLE_TASK]:
            task_B = self.values_BE[b][:, columns].mean(axis=1) if task_B is None else task_B
            return None, _require_finite(task_B, location)
        e = _positions(list(column_of), unit_ids, f"{self.method}: units of {target}")
        return (
            _require_finite(self.values_BE[b][:, columns[e]], location),
            None if task_B is None else _require_finite(task_B, location),
        )


@dataclass(frozen=True, slots=True)
class RowScores:
    """Scores of all rows of a corpus for units or tasks.

    Attributes:
        method: name of the method.
        columns: (target, unit_id) of each column of scores.
        n_rows: number of rows of the corpus.
        blocks: (index of the first row, scores (rows, E)) of consecutive blocks of rows, in corpus order.
    """

    method: str
    columns: tuple[Column, ...]
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
            negative: factor by which negative scores are multiplied.
        Raises:
            RunsError: wrong number of rows, or a score that is not finite; the message names row and unit.
        Source: eq:grasp-subset-relevance, eq:additive-utility. Memory: the subsets and one block of rows.
        """
        blocks = list(subsets)
        subset_ids = tuple(name for block in blocks for name in block.subset_ids)

        def downweighted_blocks() -> Iterator[tuple[int, F64]]:
            for start, scores_NE in self.blocks:
                values_NE = scores_NE.astype(np.float64)
                invalid_NE = ~(np.abs(values_NE) <= MAX_PREDICTION)  # nan compares false
                if invalid_NE.any():
                    row, column = np.argwhere(invalid_NE)[0]
                    target, unit_id = self.columns[column]
                    raise RunsError(
                        f"{self.method}: score of row {start + row} for {target} unit {unit_id!r} is "
                        f"{scores_NE[row, column]} ({invalid_NE.sum()} such in this block); scores must be finite, and "
                        f"at most {MAX_PREDICTION:g}"
                    )
                yield start, downweight_negative(values_NE, negative)

        # One array (subsets of the block, E) per block of subsets.
        sums = sums_over(downweighted_blocks(), [block.weights for block in blocks], len(self.columns))
        if weighting == "mean":
            sums = [
                ratio(1.0, block.weights.sums)[:, None] * sum_BE for block, sum_BE in zip(blocks, sums, strict=True)
            ]
        return _separate_tasks(self.method, subset_ids, self.columns, np.concatenate(sums))


def read_predictions(
    path: Path, rows: RowIndex, subsets: Iterable[SubsetBlock], method: str | None = None
) -> Predictions:
    """Read a file of predictions; row scores are averaged over the retained rows of each subset.

    Args:
        rows: names of the rows of the corpus.
        subsets: subsets to predict from row scores.
        method: name of the method; default: the name of the file.
    Raises:
        RunsError: the file has none of the supported formats, or does not match rows or subsets, or lines are duplicate
            or missing. The message names the first.
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
    names = [name for name in table.column_names if name != "row_id"]
    if "row_id" not in table.column_names or not names:
        raise RunsError(
            f"{path}: has columns {table.column_names}, expected subset_id, target, utility, or row_id and one column "
            "per unit, `target/unit_id`, or per `target`"
        )
    order = _positions(table.column("row_id").to_pylist(), rows.ids().to_pylist(), f"{path}: rows")
    # `target/unit_id`, or `target` for the whole task
    split_names = (name.partition("/") for name in names)
    columns = tuple((target, unit_id if slash else None) for target, slash, unit_id in split_names)
    scores = np.stack([_float_column(table, name, path) for name in names], axis=1)
    return RowScores(method or path.stem, columns, rows.n_rows, _blocks(scores[order]))


def _parse_table(path: Path, table: pa.Table, method: str) -> Predictions:
    """Parse a table `subset_id, target, utility[, unit_id]` with lines in any order."""
    missing = [name for name in ("target", "utility") if name not in table.column_names]
    if missing:
        raise RunsError(f"{path}: has columns {table.column_names}, lacks {missing}")
    unit_ids = table.column("unit_id").to_pylist() if "unit_id" in table.column_names else [None] * len(table)
    columns = list(zip(table.column("target").to_pylist(), unit_ids, strict=True))
    subset_ids = [str(name) for name in table.column("subset_id").to_pylist()]
    position_of_subset = {name: b for b, name in enumerate(dict.fromkeys(subset_ids))}
    position_of_column = {column: e for e, column in enumerate(dict.fromkeys(columns))}
    b = np.array([position_of_subset[name] for name in subset_ids], dtype=int)
    e = np.array([position_of_column[column] for column in columns], dtype=int)
    counts_BE = np.zeros((len(position_of_subset), len(position_of_column)), dtype=np.int64)
    np.add.at(counts_BE, (b, e), 1)
    wrong = np.argwhere(counts_BE != 1)
    if len(wrong):
        row, column = wrong[0]
        raise RunsError(
            f"{path}: subset {list(position_of_subset)[row]!r}, target and unit {list(position_of_column)[column]} "
            f"occurs {counts_BE[row, column]} times ({len(wrong)} such); expected each once"
        )
    values_BE = np.full(counts_BE.shape, np.nan)
    values_BE[b, e] = _float_column(table, "utility", path)
    return _separate_tasks(method, tuple(position_of_subset), tuple(position_of_column), values_BE)


def _float_column(table: pa.Table, name: str, path: Path) -> F64:
    """Return a column as float64."""
    try:
        return np.asarray(table.column(name).cast(pa.float64()).to_numpy(zero_copy_only=False))
    except pa.ArrowException as err:
        raise RunsError(f"{path}: {name}: {' '.join(str(err).split())}; expected numbers") from err


def _blocks(array: NDArray[Any]) -> list[tuple[int, NDArray[Any]]]:
    """Split an array, in memory or on disk, into views of blocks."""
    return [(start, array[start : start + BLOCK_ROWS]) for start in range(0, len(array), BLOCK_ROWS)]


def _separate_tasks(method: str, subset_ids: tuple[str, ...], columns: Sequence[Column], values_BE: F64) -> Predictions:
    """Return predictions, with the columns of units separated from those of whole tasks."""
    unit_columns = [e for e, (_, unit_id) in enumerate(columns) if unit_id is not None]
    units = tuple((target, unit_id) for target, unit_id in columns if unit_id is not None)
    task_B = {target: values_BE[:, e] for e, (target, unit_id) in enumerate(columns) if unit_id is None}
    return Predictions(method, subset_ids, units, values_BE[:, unit_columns], task_B)


def _positions(available: Sequence[str], requested: Sequence[str], location: str) -> I64:
    """Return the position in `available` of each requested name."""
    position = {name: i for i, name in enumerate(available)}
    if len(position) < len(available):
        duplicate = next(name for i, name in enumerate(available) if position[name] != i)
        raise RunsError(f"{location}: {duplicate!r} occurs twice, expected each once")
    missing = [name for name in requested if name not in position]
    if missing:
        raise RunsError(
            f"{location}: {len(missing)} of {len(requested)} have no prediction, e.g. {missing[:MAX_EXAMPLES]}; "
            "expected all"
        )
    return np.array([position[name] for name in requested], dtype=np.int64)


def _require_finite(values: F64, location: str) -> F64:
    """Return the values, or raise an error that names the first one that is not finite or too large."""
    invalid = np.argwhere(~(np.abs(values) <= MAX_PREDICTION))  # nan compares false
    if len(invalid):
        index = tuple(invalid[0].tolist())
        raise RunsError(
            f"{location}: prediction at {index} is {values[index]} ({len(invalid)} such); predictions must be finite, "
            f"and at most {MAX_PREDICTION:g}"
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
    """Read a Parquet file whose columns have different names, and check that names of rows and subsets are values."""
    with readable_table(path, RunsError, "Parquet"):
        table = read_checksummed(path)
    duplicate = [name for name in table.column_names if table.column_names.count(name) > 1]
    if duplicate:
        raise RunsError(f"{path}: has {duplicate[0]!r} as the name of {len(duplicate)} columns, expected it once")
    if nested := [field for field in table.schema if field.name in NAME_COLUMNS and pa.types.is_nested(field.type)]:
        raise RunsError(f"{path}: {nested[0].name}: got {nested[0].type}, expected names")
    return table
