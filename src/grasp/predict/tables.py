"""Predicted changes of subsets, as a table that is made block by block.

Higher is better, 0 is the whole corpus; lines without a `unit_id` are the task as a whole.
Shape letters: B subsets, E units, T tasks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grasp.errors import ShapeError
from grasp.files import written_aside
from grasp.predict.blocks import SubsetBlock
from grasp.predict.intervals import Expectation, Outside, columns_of
from grasp.predict.predictor import Predictor, SubsetSums
from grasp.predict.row_arrays import F64, RowArrays
from grasp.results import write_table


@dataclass(frozen=True, slots=True)
class PredictionTable:
    """Predictions of any number of subsets in bounded memory: tables made while they are read, so iterate once."""

    schema: pa.Schema
    tables: Iterator[pa.Table]

    def read(self) -> pa.Table:
        """All of it in memory."""
        return pa.concat_tables([self.schema.empty_table(), *self.tables])

    def write(self, path: Path | str) -> int:
        """Write Parquet as it comes, or CSV; it appears only when whole. Returns the lines."""
        path, lines = Path(path), 0
        if path.suffix != ".parquet":
            table = self.read()
            write_table(table, path)
            return int(table.num_rows)
        with written_aside(path) as part, pq.ParquetWriter(part, self.schema, compression="zstd") as writer:
            for table in self.tables:
                writer.write_table(table)
                lines += table.num_rows
        return lines


def prediction_table(
    predictor: Predictor,
    artifact: RowArrays,
    blocks: Iterable[SubsetBlock],
    *,
    components: bool = False,
    intervals: Expectation | None = None,
    outside: Outside | None = None,
) -> PredictionTable:
    """Predict subsets.

    Args:
        predictor: with units, a line for every unit stands below that of its task.
        blocks: the retained sides, drawn or read lazily; one block is held at a time.
        components: columns `level`, `part_*` (what each kernel and component adds; they add up to the change) and
            `value_*` (geometry in natural units); the predictor was made with `components`.
        intervals: columns nats, nats_low and nats_high, or by the metric of the runs; null for units.
        outside: told of the subsets beyond what the runs covered.
    Returns:
        Columns subset_id, target[, unit_id], change and those asked for.
    Raises:
        ShapeError: subsets of a corpus with another number of rows.
    """
    expected = () if intervals is None else columns_of(intervals.unit)
    schema, units = _schema(predictor, components=components, expected=expected), predictor.units

    def tables() -> Iterator[pa.Table]:
        for block in blocks:
            if block.n_rows != predictor.n_rows:
                raise ShapeError(f"subsets over {block.n_rows} rows for an artifact of {predictor.n_rows}")
            sums = predictor.sums(block.weights)
            change_BT = predictor.change_of(sums)
            geometry = _geometry(predictor, sums) if components else {}
            numbers = geometry | {"change": change_BT, "level": predictor.task.whole_C + change_BT}
            if intervals is not None:
                nats = intervals.of(block.weights)
                numbers |= nats.columns
                if outside is not None:
                    outside.add(block.subset_ids, nats)
            if components:
                kernels = predictor.kernel_parts(block.weights, sums.mass)
                numbers |= {f"part_{name}": part_BT for name, part_BT in kernels.items()}
            names = {"target": np.array(units.targets, dtype=object)}
            yield _lines(schema, block.subset_ids, names, numbers)
            if predictor.unit_level is not None:
                change_BE = predictor.unit_change(block.weights, sums)
                names = {
                    "target": np.repeat(np.array(units.targets, dtype=object), units.counts_T),
                    "unit_id": artifact.units.column("unit_id").to_numpy(zero_copy_only=False)[units.columns_E],
                }
                numbers = geometry | {"change": change_BE, "level": predictor.unit_level.whole_C + change_BE}
                yield _lines(schema, block.subset_ids, names, numbers)

    return PredictionTable(schema, tables())


def _schema(predictor: Predictor, *, components: bool, expected: Sequence[str]) -> pa.Schema:
    names = ["subset_id", "target"] + (["unit_id"] if predictor.unit_level is not None else [])
    numbers = ["change", *expected]
    if components:
        geometry = list(predictor.protocol.components)
        numbers += ["level", *(f"part_{name}" for name in (*predictor.task_kernels, *geometry))]
        numbers += [f"value_{name}" for name in geometry]
    schema = pa.schema([(name, pa.string()) for name in names] + [(name, pa.float64()) for name in numbers])
    return schema.with_metadata(metadata_of(predictor))


def metadata_of(predictor: Predictor) -> dict[str, str]:
    """What a file of predictions says of itself."""
    return {"grasp.protocol": predictor.protocol.name, "grasp.provenance": predictor.provenance}


def _geometry(predictor: Predictor, sums: SubsetSums) -> dict[str, F64]:
    terms = predictor.geometry
    if terms is None:
        return {}
    parts, values = terms.parts(sums.sketch, sums.mass), terms.values(sums.sketch, sums.mass)
    return {f"part_{name}": part_B[:, None] for name, part_B in parts.items()} | {
        f"value_{name}": value_B[:, None] for name, value_B in values.items()
    }


def _lines(
    schema: pa.Schema, subset_ids: Sequence[str], names: Mapping[str, Any], numbers: Mapping[str, F64]
) -> pa.Table:
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
    return pa.table(arrays, schema=schema)
