"""The Parquet tables of an artifact: its rows, and its units."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grasp.errors import ArtifactError, ShapeError
from grasp.files import written_aside

ROW_COLUMNS = ("row_id", "doc_id", "n_tokens", "loss", "snippet")
LOSS_TOKENS = "n_loss"  # a column beside them where not every token of a row carries loss
UNIT_COLUMNS = ("unit_id", "target")
_GROUP_ROWS = 65_536  # rows of one Parquet row group: enough to scan fast, little to hold


def shard_table(rows: pa.Table, start: int, stop: int) -> pa.Table:
    """The row table of a shard as it is kept: row_index first, our own columns, then the labels.

    Raises:
        ShapeError: not one row for each row of the shard.
        ArtifactError: a column is missing, `row_index` is given, or a loss is not a finite number.
    """
    missing = [name for name in ROW_COLUMNS if name not in rows.column_names]
    if missing or "row_index" in rows.column_names:
        raise ArtifactError(
            f"row table: columns {rows.column_names}: missing {missing}; row_index is added here, give none"
        )
    if rows.num_rows != stop - start:
        raise ShapeError(f"row table: got {rows.num_rows} rows, expected {stop - start} ({start} to {stop})")
    loss_N = rows["loss"].to_numpy().astype(np.float64)  # a null becomes NaN
    if not np.isfinite(loss_N).all():
        first = int(np.flatnonzero(~np.isfinite(loss_N))[0])
        raise ArtifactError(
            f"loss: {row_name(rows, start, first)}: got {rows['loss'][first].as_py()}, expected a finite "
            "number; the model or its precision is at fault: try model.dtype: float32, or leave the row out"
        )
    labels = [name for name in rows.column_names if name not in ROW_COLUMNS]
    ordered = rows.select([*ROW_COLUMNS, *labels]).replace_schema_metadata(None)
    return ordered.add_column(0, "row_index", pa.array(np.arange(start, stop, dtype=np.int64)))


def row_name(rows: pa.Table, start: int, i: int) -> str:
    """How a message names the i-th row of a shard."""
    return f"row {start + i} (row_id {rows['row_id'][i].as_py()!r})"


def assemble_rows(tables: Sequence[Path], out: Path) -> None:
    """Stream the row tables of all shards, in order, into one Parquet file, written aside and renamed."""
    try:
        schema = pa.unify_schemas([pq.read_schema(path) for path in tables], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as err:
        said = " ".join(str(err).split())
        raise ArtifactError(f"{tables[0].parent}: a label column changes its type: {said}") from err
    with written_aside(out) as part, pq.ParquetWriter(part, schema, compression="zstd") as writer:
        for batch in _grouped(tables, schema):
            writer.write_table(batch, row_group_size=_GROUP_ROWS)


def check_units(units: pa.Table, n_columns: int | None) -> None:
    """Units have an id and a target, no (target, unit_id) comes twice, and there is one for each column."""
    missing = [name for name in UNIT_COLUMNS if name not in units.column_names]
    if missing:
        raise ArtifactError(f"units: columns {units.column_names}: missing {missing}")
    if n_columns is not None and units.num_rows != n_columns:
        raise ShapeError(f"units: got {units.num_rows}, expected {n_columns}: one for each relevance column")
    if not units.num_rows:
        raise ArtifactError("units: got none, expected at least one")
    counts = units.group_by(list(UNIT_COLUMNS)).aggregate([([], "count_all")])
    twice = counts.filter(pc.greater(counts["count_all"], 1))
    if twice.num_rows:
        first = twice.slice(0, 1).to_pylist()[0]
        raise ArtifactError(
            f"units: {first['target']}/{first['unit_id']} comes {first['count_all']} times; ids must differ "
            "within a target"
        )


def _grouped(tables: Sequence[Path], schema: pa.Schema) -> Iterable[pa.Table]:
    pending: list[pa.Table] = []
    n_pending = 0
    for path in tables:
        with pq.ParquetFile(path) as file:
            pending.append(conform(file.read(), schema))
        n_pending += pending[-1].num_rows
        if n_pending >= _GROUP_ROWS:
            whole = pa.concat_tables(pending)
            full = n_pending - n_pending % _GROUP_ROWS
            yield whole.slice(0, full)
            pending, n_pending = [whole.slice(full)], n_pending - full
    if n_pending:
        yield pa.concat_tables(pending)


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the columns of a schema; one that it lacks is null."""
    columns = [
        table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)
