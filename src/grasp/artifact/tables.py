"""The row table of an artifact: what its columns are called, and how tables of shards become one."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grasp.errors import ArtifactError
from grasp.files import written_aside

ROW_COLUMNS = ("row_id", "doc_id", "n_tokens", "loss", "snippet")
LOSS_TOKENS = "n_loss"  # a column beside them where not every token of a row carries loss
_GROUP_ROWS = 65_536  # rows of one Parquet row group: enough to scan fast, little to hold


def assemble_rows(tables: Sequence[Path], out: Path) -> None:
    """Stream the row tables of all shards, in order, into one Parquet file, written aside and renamed."""
    try:
        schema = pa.unify_schemas([pq.read_schema(path) for path in tables], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as err:
        what = " ".join(str(err).split())
        raise ArtifactError(f"{tables[0].parent}: a label column changes its type: {what}") from err
    with written_aside(out) as part, pq.ParquetWriter(part, schema, compression="zstd") as writer:
        pending = schema.empty_table()
        for path in tables:
            with pq.ParquetFile(path) as file:
                pending = pa.concat_tables([pending, conform(file.read(), schema)])
            full = pending.num_rows - pending.num_rows % _GROUP_ROWS
            if full:
                writer.write_table(pending.slice(0, full), row_group_size=_GROUP_ROWS)
                pending = pending.slice(full)
        if pending.num_rows:
            writer.write_table(pending, row_group_size=_GROUP_ROWS)


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the columns of a schema; one that it lacks is null."""
    columns = [
        table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)
