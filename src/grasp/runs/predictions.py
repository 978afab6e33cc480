"""Predicted utilities of subsets: `Predictions` of a method, and sums of the scores of rows, `sum_row_scores`.

Higher is better. Shape letters: B subsets, E units, N rows.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F64, ratio
from grasp.errors import RunsError
from grasp.predict.predictor import downweight_negative
from grasp.predict.weights import SubsetBlock, sums_over

Unit = tuple[str, str]
Weighting = Literal["count", "mean"]  # sum, or weighted mean, of the scores of the rows of a subset
# predictor: uses none of the utilities it is evaluated on; oracle-selected: its configuration was selected on them;
# supervised oracle: fitted to other subsets of the same runs. The latter two are reported separately.
MethodRole = Literal["predictor", "oracle-selected", "supervised oracle"]

MAX_EXAMPLES = 3
WHOLE_TASK = ""  # unit_id of results for a whole task
MAX_PREDICTION = 1e100  # largest prediction, so that sums and squares do not overflow


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
        row_of = {name: b for b, name in enumerate(self.subset_ids)}
        column_of = {unit_id: e for e, (name, unit_id) in enumerate(self.units) if name == target}
        if not column_of and target not in self.task_B:
            raise RunsError(f"{self.method}: has no predictions for {target!r}, only for {self.targets}")
        only_task = not column_of or list(unit_ids) == [WHOLE_TASK]
        requested_units = list(column_of) if only_task else unit_ids
        for kind, known, requested in (
            ("subsets", row_of, subset_ids),
            (f"units of {target}", column_of, requested_units),
        ):
            if missing := [name for name in requested if name not in known]:
                raise RunsError(
                    f"{self.method}: {kind}: {len(missing)} of {len(requested)} have no prediction, e.g. "
                    f"{missing[:MAX_EXAMPLES]}; expected all"
                )
        b = [row_of[name] for name in subset_ids]
        unit_BE = self.values_BE[np.ix_(b, [column_of[name] for name in requested_units])]
        task_B = self.task_B[target][b] if target in self.task_B else None
        if only_task and task_B is None:
            task_B = unit_BE.mean(axis=1)
        values_BE = None if only_task else unit_BE
        for values in (values_BE, task_B):
            if values is None:
                continue
            invalid = np.argwhere(~(np.abs(values) <= MAX_PREDICTION))  # nan compares false
            if len(invalid):
                index = tuple(invalid[0].tolist())
                raise RunsError(
                    f"{self.method}: {target}: prediction at {index} is {values[index]} ({len(invalid)} such); "
                    f"predictions must be finite, and at most {MAX_PREDICTION:g}"
                )
        return values_BE, task_B


def sum_row_scores(
    method: str,
    units: Sequence[Unit],
    scores: Iterable[tuple[int, NDArray[Any]]],
    subsets: Sequence[SubsetBlock],
    *,
    weighting: Weighting = "mean",
    negative: float = 1.0,
) -> Predictions:
    """Predict each subset additively, by the sum (count) or the weighted mean of the scores of its rows.

    Args:
        method: name of the method.
        units: (target, unit_id) of each column of scores.
        scores: (index of the first row, scores (rows, E)) of consecutive blocks of all rows of the corpus, in order.
        subsets: retained sides, over the same rows.
        weighting: count or mean.
        negative: factor by which negative scores are multiplied.
    Raises:
        RunsError: a score is not finite; the message names row and unit.
    Source: eq:grasp-subset-relevance, eq:additive-utility. Memory: the subsets and one block of rows.
    """

    def downweighted_blocks() -> Iterator[tuple[int, F64]]:
        for start, scores_NE in scores:
            values_NE = scores_NE.astype(np.float64)
            invalid_NE = ~(np.abs(values_NE) <= MAX_PREDICTION)  # nan compares false
            if invalid_NE.any():
                row, column = np.argwhere(invalid_NE)[0]
                target, unit_id = units[column]
                raise RunsError(
                    f"{method}: score of row {start + row} for {target} unit {unit_id!r} is {scores_NE[row, column]} "
                    f"({invalid_NE.sum()} such in this block); scores must be finite, and at most {MAX_PREDICTION:g}"
                )
            yield start, downweight_negative(values_NE, negative)

    # One array (subsets of the block, E) per block of subsets.
    sums = sums_over(downweighted_blocks(), [block.weights for block in subsets], len(units))
    if weighting == "mean":
        sums = [ratio(1.0, block.weights.sums)[:, None] * sum_BE for block, sum_BE in zip(subsets, sums, strict=True)]
    subset_ids = tuple(name for block in subsets for name in block.subset_ids)
    return Predictions(method, subset_ids, tuple(units), np.concatenate(sums))
