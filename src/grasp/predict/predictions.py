"""Predicted utility of subsets, as a table that is made block by block.

Higher is better. `utility` is in standard deviations of A over the calibration family; `additive_<kernel>` is A
itself, in the unit of the relevance. Lines without a `unit_id` are the task as a whole.
Shape letters: B subsets, E units, T tasks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.errors import ShapeError
from grasp.files import written_aside
from grasp.predict.blocks import SubsetBlock
from grasp.predict.combine import ComponentTable, Prediction
from grasp.predict.protocol import ScoringProtocol
from grasp.predict.scorer import CalibrationFamily, Scorer, SubsetSums
from grasp.predict.source import F64, FeatureSource

Watch = Callable[[SubsetBlock, SubsetSums], None]
UTILITY_UNIT = "standard deviations of A over the calibration family; higher is better"
CHANGE_UNIT = "utility minus that of the whole corpus, same unit"


@dataclass(frozen=True, slots=True)
class PredictionTable:
    """Predictions as Arrow tables, one a block of subsets, made while they are read: iterate once."""

    schema: pa.Schema
    metadata: Mapping[str, str]
    tables: Iterator[pa.Table]

    def read(self) -> pa.Table:
        """All of it in memory."""
        return pa.concat_tables([self.schema.empty_table(), *self.tables])

    def write(self, path: Path | str) -> int:
        """Stream to Parquet, with the metadata in the file; it appears only when whole. Returns the lines."""
        lines = 0
        with written_aside(Path(path)) as part, pq.ParquetWriter(part, self.schema, compression="zstd") as writer:
            for table in self.tables:
                writer.write_table(table)
                lines += table.num_rows
        return lines


def predict(
    source: FeatureSource,
    protocol: ScoringProtocol,
    blocks: Iterable[SubsetBlock],
    *,
    targets: Sequence[str] | None = None,
    per_unit: bool = False,
    components: bool = False,
    calibration: CalibrationFamily | None = None,
) -> PredictionTable:
    """Predict the utility of subsets.

    Args:
        blocks: the retained sides, drawn or read lazily; one block is held at a time.
        targets: tasks to predict; none: all.
        per_unit: a line for every unit beside the line of its task.
        components: every component, as its part of the utility (`part_*`, they add up to it) and in natural units
            (`value_*`).
        calibration: what standardises; none: the protocol's own family, which must need no labels.
    Returns:
        Columns subset_id, target[, unit_id], utility, change (against the whole corpus), additive_<kernel>.
    Raises:
        ProtocolError: the artifact does not fit the protocol; all mismatches in one message.
        ShapeError: subsets of a corpus with another number of rows.
    """
    scorer = Scorer.prepare(source, protocol, targets=targets, per_unit=per_unit, calibration=calibration)
    return predict_with(scorer, source, blocks, components=components)


def predict_with(
    scorer: Scorer,
    source: FeatureSource,
    blocks: Iterable[SubsetBlock],
    *,
    components: bool = False,
    watch: Watch | None = None,
) -> PredictionTable:
    """Predict with a scorer that is bound already.

    Args:
        watch: called with every block and its sums, before its lines are made.
    """
    metadata = describe(scorer)
    schema = _schema(scorer, components=components).with_metadata(metadata)
    return PredictionTable(schema, metadata, _tables(scorer, source, blocks, schema, watch))


def describe(scorer: Scorer) -> dict[str, str]:
    """What the numbers of a prediction are, for its metadata."""
    protocol = scorer.protocol
    additive = "A in the unit of the relevance"
    if protocol.standardize.task == "mean_of_standardised":
        additive += "; for a task the mean over its units of A / std(A)"
    return {
        "grasp.protocol": protocol.name,
        "grasp.provenance": protocol.provenance,
        "grasp.side": protocol.side,
        "grasp.weighting": protocol.weighting,
        "grasp.match": str(protocol.match),
        "grasp.negative": f"{protocol.negative:g}",
        "grasp.components": str(protocol.components),
        "grasp.standardize": protocol.standardize.task,
        "grasp.calibration": scorer.calibration,
        "grasp.dropped": ", ".join(scorer.dropped),
        "grasp.unit.utility": UTILITY_UNIT,
        "grasp.unit.change": CHANGE_UNIT,
        "grasp.unit.additive": additive,
    }


def _schema(scorer: Scorer, *, components: bool) -> pa.Schema:
    names = ["subset_id", "target"] + (["unit_id"] if scorer.unit is not None else [])
    fields = [(name, pa.string()) for name in names]
    kernels = list(scorer.task.kernels)
    numbers = ["utility", "change", *(f"additive_{kernel}" for kernel in kernels)]
    if components:
        geometry = list(scorer.protocol.components)
        numbers += [f"part_{name}" for name in (*kernels, *geometry)] + [f"value_{name}" for name in geometry]
    return pa.schema(fields + [(name, pa.float64()) for name in numbers])


def _tables(
    scorer: Scorer,
    source: FeatureSource,
    blocks: Iterable[SubsetBlock],
    schema: pa.Schema,
    watch: Watch | None,
) -> Iterator[pa.Table]:
    whole = scorer.whole()
    task_whole = scorer.score_tasks(whole)[1].utility_BE
    unit_whole = None if scorer.unit is None else scorer.score_units(whole)[1].utility_BE
    unit_ids = source.units.column("unit_id").to_numpy(zero_copy_only=False)[scorer.units.columns_E]
    unit_targets = np.repeat(np.array(scorer.units.targets, dtype=object), scorer.units.counts_T)
    for block in blocks:
        if block.n_rows != scorer.n_rows:
            raise ShapeError(f"subsets over {block.n_rows} rows for an artifact of {scorer.n_rows}")
        sums = scorer.sums(block.weights)
        if watch is not None:
            watch(block, sums)
        yield _lines(block, scorer.units.targets, None, *scorer.score_tasks(sums), task_whole, schema)
        if unit_whole is not None:
            yield _lines(block, unit_targets, unit_ids, *scorer.score_units(sums), unit_whole, schema)


def _lines(
    block: SubsetBlock,
    targets: Sequence[str] | NDArray[np.object_],
    unit_ids: NDArray[np.object_] | None,
    table: ComponentTable,
    prediction: Prediction,
    whole_1E: F64,
    schema: pa.Schema,
) -> pa.Table:
    """Lines of one block at one level: subsets by columns, subsets slowest."""
    shape = prediction.utility_BE.shape
    columns: dict[str, NDArray[np.object_] | F64] = {
        "subset_id": np.repeat(np.array(block.subset_ids, dtype=object), shape[1]),
        "target": np.tile(np.array(targets, dtype=object), shape[0]),
        "unit_id": np.tile(np.full(shape[1], None) if unit_ids is None else unit_ids, shape[0]),
        "utility": prediction.utility_BE,
        "change": prediction.utility_BE - whole_1E,
    }
    columns |= {f"additive_{kernel}": value_BE for kernel, value_BE in table.relevance.items()}
    columns |= {f"part_{name}": np.broadcast_to(part, shape) for name, part in prediction.parts.items()}
    columns |= {f"value_{name}": np.broadcast_to(k_B[:, None], shape) for name, k_B in table.geometry.items()}
    return pa.table([pa.array(columns[field.name].reshape(-1), field.type) for field in schema], schema=schema)


__all__ = ["CalibrationFamily", "PredictionTable", "Scorer", "SubsetSums", "Watch", "predict", "predict_with"]
