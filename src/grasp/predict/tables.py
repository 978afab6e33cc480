"""Predicted changes of subsets, as a table that is made block by block.

Higher is better, 0 is the whole corpus; lines without a `unit_id` are the task as a whole.
Shape letters: B subsets, E units, T tasks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.errors import ShapeError
from grasp.files import written_aside
from grasp.predict.blocks import SubsetBlock
from grasp.predict.intervals import Intervals
from grasp.predict.predictor import Predictor, SubsetSums, kernel_weights
from grasp.predict.row_arrays import F64, RowArrays

NATS = ("expected", "low", "high")
NAMED = 3


@dataclass(frozen=True, slots=True)
class PredictionTable:
    """Predictions as Arrow tables, one a block of subsets, made while they are read: iterate once."""

    schema: pa.Schema
    tables: Iterator[pa.Table]

    def read(self) -> pa.Table:
        """All of it in memory."""
        return pa.concat_tables([self.schema.empty_table(), *self.tables])

    def write(self, path: Path | str) -> int:
        """Stream to Parquet; it appears only when whole. Returns the lines."""
        lines = 0
        with written_aside(Path(path)) as part, pq.ParquetWriter(part, self.schema, compression="zstd") as writer:
            for table in self.tables:
                writer.write_table(table)
                lines += table.num_rows
        return lines


class Outside:
    """Counts, while predictions are made, the subsets that lie beyond what the runs covered."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._count = 0

    def add(self, names: Sequence[str], outside: Sequence[str]) -> None:
        """One block of subsets."""
        found = [f"{name} ({words})" for name, words in zip(names, outside, strict=True) if words]
        self._count += len(found)
        self._first += found[: NAMED - len(self._first)]

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence, if there is anything to say."""
        if not self._count:
            return ()
        more = f" and {self._count - len(self._first):,} more" if self._count > len(self._first) else ""
        return (f"outside of what the runs covered, so the interval is wider: {'; '.join(self._first)}{more}",)


def prediction_table(
    predictor: Predictor,
    artifact: RowArrays,
    blocks: Iterable[SubsetBlock],
    *,
    components: bool = False,
    intervals: Intervals | None = None,
    outside: Outside | None = None,
) -> PredictionTable:
    """Predict subsets.

    Args:
        predictor: with units, a line for every unit stands below that of its task.
        blocks: the retained sides, drawn or read lazily; one block is held at a time.
        components: columns `level`, `part_*` (what each kernel and component adds; they add up to the change) and
            `value_*` (geometry in natural units); the predictor was made with `components`.
        intervals: columns expected, low and high, in nats a token; null for units.
        outside: told of the subsets beyond what the runs covered.
    Returns:
        Columns subset_id, target[, unit_id], change and those asked for.
    Raises:
        ShapeError: subsets of a corpus with another number of rows.
    """
    schema = _schema(predictor, components=components, nats=intervals is not None)
    maker = _Lines(predictor, artifact, schema, components, intervals, outside or Outside())
    return PredictionTable(schema, (table for block in blocks for table in maker.of(block)))


def _schema(predictor: Predictor, *, components: bool, nats: bool) -> pa.Schema:
    names = ["subset_id", "target"] + (["unit_id"] if predictor.unit_level is not None else [])
    numbers = ["change", *(NATS if nats else ())]
    if components:
        geometry = list(predictor.protocol.components)
        numbers += ["level", *(f"part_{name}" for name in (*predictor.task_kernels, *geometry))]
        numbers += [f"value_{name}" for name in geometry]
    schema = pa.schema([(name, pa.string()) for name in names] + [(name, pa.float64()) for name in numbers])
    return schema.with_metadata({"grasp.protocol": predictor.protocol.name, "grasp.provenance": provenance(predictor)})


def provenance(predictor: Predictor) -> str:
    """Unit and protocol in one line."""
    protocol = predictor.protocol
    kernels = " + ".join(
        kernel if weight == 1 else f"{weight:g} {kernel}" for kernel, weight in kernel_weights(protocol).items()
    )
    negative = f", negative relevance times {protocol.negative:g}" if protocol.negative != 1 else ""
    geometry = "".join(f", {omega:+g} {name}" for name, omega in protocol.components.items())
    results = len(protocol.selected_on or ())
    chosen = f"selected on {results} development results" if results else "not selected on development results"
    return (
        f"change against the whole corpus in {predictor.unit}: 0 = the corpus, higher is better; protocol "
        f"{protocol.name} ({kernels}{negative}{geometry}; {chosen})"
    )


@dataclass(frozen=True, slots=True)
class _Lines:
    """Makes the lines of a block."""

    predictor: Predictor
    artifact: RowArrays
    schema: pa.Schema
    components: bool
    intervals: Intervals | None
    outside: Outside

    def of(self, block: SubsetBlock) -> Iterator[pa.Table]:
        predictor, units = self.predictor, self.predictor.units
        if block.n_rows != predictor.n_rows:
            raise ShapeError(f"subsets over {block.n_rows} rows for an artifact of {predictor.n_rows}")
        sums = predictor.sums(block.weights)
        change_BT = predictor.change_of(sums)
        numbers = {"change": change_BT, "level": predictor.whole_T + change_BT}
        if self.intervals is not None:
            nats = self.intervals.of(predictor, sums, change_BT)
            numbers |= dict(zip(NATS, (nats.expected_BT, nats.low_BT, nats.high_BT), strict=True))
            self.outside.add(block.subset_ids, nats.outside)
        geometry = self._geometry(sums) if self.components else {}
        kernels = predictor.kernel_parts(block.weights, sums.mass) if self.components else {}
        numbers |= {f"part_{name}": part_BT for name, part_BT in kernels.items()}
        yield self._table(block, units.targets, None, numbers | geometry, change_BT.shape)
        if predictor.unit_level is not None:
            change_BE = predictor.unit_change(block.weights, sums)
            unit_ids = self.artifact.units.column("unit_id").to_numpy(zero_copy_only=False)[units.columns_E]
            of_units = np.repeat(np.array(units.targets, dtype=object), units.counts_T)
            numbers = {"change": change_BE, "level": predictor.whole_E + change_BE}
            yield self._table(block, of_units, unit_ids, numbers | geometry, change_BE.shape)

    def _geometry(self, sums: SubsetSums) -> dict[str, F64]:
        terms = self.predictor.geometry
        if terms is None:
            return {}
        parts, values = terms.parts(sums.sketch, sums.mass), terms.values(sums.sketch, sums.mass)
        return {f"part_{name}": part_B[:, None] for name, part_B in parts.items()} | {
            f"value_{name}": value_B[:, None] for name, value_B in values.items()
        }

    def _table(
        self,
        block: SubsetBlock,
        targets: Sequence[str] | NDArray[np.object_],
        unit_ids: NDArray[np.object_] | None,
        numbers: Mapping[str, F64],
        shape: tuple[int, ...],
    ) -> pa.Table:
        """Lines at one level: subsets by columns, subsets slowest; what is not known there is null."""
        columns = {
            "subset_id": np.repeat(np.array(block.subset_ids, dtype=object), shape[1]),
            "target": np.tile(np.array(targets, dtype=object), shape[0]),
            "unit_id": np.tile(np.full(shape[1], None) if unit_ids is None else unit_ids, shape[0]),
        }
        arrays = [
            pa.array(columns[field.name], field.type)
            if field.name in columns
            else pa.array(
                np.broadcast_to(numbers.get(field.name, np.float64(np.nan)), shape).reshape(-1), from_pandas=True
            )
            for field in self.schema
        ]
        return pa.table(arrays, schema=self.schema)
