"""Parquet tables that say what they hold: a digest of every column in the metadata, compared by whoever reads it.

A flipped bit may turn one name into another that is there as well, and Parquet would not notice. Tables of others have
no digests, and are read as they are.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

DIGESTS_KEY = b"grasp.seal"  # key of the digests in the metadata of a file
BATCH = 1 << 16


class ChecksumMismatchError(pa.ArrowInvalid):  # type: ignore[misc]
    """A table is not what was written."""


class _Digests:
    """Digests of the columns that pass, however they are cut into parts, and of what the metadata say.

    Of numbers the value counts, not the type.
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[str]) -> None:
        told = {key: value for key, value in (schema.metadata or {}).items() if key != DIGESTS_KEY}
        self._metadata = xxhash.xxh3_128_hexdigest(b"\0".join(part for item in sorted(told.items()) for part in item))
        once = [name for name in columns if schema.names.count(name) == 1]
        self._columns = {name: (xxhash.xxh3_128(), xxhash.xxh3_128()) for name in once}  # of sizes, and of values

    def add(self, part: pa.Table | pa.RecordBatch) -> None:
        for name, (sizes, values) in self._columns.items():
            column = part.column(name)
            for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
                cells = chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk
                if pa.types.is_dictionary(cells.type):
                    cells = cells.cast(cells.type.value_type)
                if pa.types.is_boolean(cells.type):
                    cells = cells.cast(pa.int64())
                if pa.types.is_integer(cells.type) or pa.types.is_floating(cells.type):
                    sizes.update(cells.is_valid().cast(pa.uint8()).to_numpy(zero_copy_only=False).tobytes())
                    wide = pa.float64() if pa.types.is_floating(cells.type) else cells.type
                    wide = pa.int64() if pa.types.is_integer(wide) and not pa.types.is_uint64(wide) else wide
                    values.update(cells.drop_null().cast(wide).to_numpy(zero_copy_only=False).tobytes())
                    continue
                if not (pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)):
                    cells = pa.array([json.dumps(value, default=str) for value in cells.to_pylist()], pa.large_string())
                lengths = pc.fill_null(pc.binary_length(cells).cast(pa.int64()), -1)
                sizes.update(lengths.to_numpy(zero_copy_only=False).tobytes())
                texts = cells.drop_null().cast(pa.large_binary())
                if len(texts):
                    _, offsets, data = texts.buffers()
                    ends = np.frombuffer(offsets, np.int64)[[texts.offset, texts.offset + len(texts)]]
                    values.update(memoryview(data)[ends[0] : ends[1]] if data is not None else b"")

    def record(self) -> dict[str, Any]:
        columns = {name: sizes.hexdigest() + values.hexdigest() for name, (sizes, values) in self._columns.items()}
        return {"columns": columns, "metadata": self._metadata}


class ChecksummedParquetWriter:
    """Writes tables of one schema one after the other; what they hold is said when it is closed."""

    def __init__(self, path: Any, schema: pa.Schema, **how: Any) -> None:
        self._digests = _Digests(schema, schema.names)
        self._writer = pq.ParquetWriter(path, schema, **({"compression": "zstd"} | how))

    def write(self, table: pa.Table, **how: Any) -> None:
        self._digests.add(table)
        self._writer.write_table(table, **how)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is None:
            self._writer.add_key_value_metadata({DIGESTS_KEY: json.dumps(self._digests.record()).encode()})
        self._writer.close()


def write_checksummed(table: pa.Table, path: Path, *, group_rows: int | None = None) -> None:
    """Write a table with the digests of its columns."""
    with ChecksummedParquetWriter(path, table.schema) as writer:
        writer.write(table, row_group_size=group_rows)


def read_checksummed_batches(path: Path | str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Batches of some columns; what is wrong with them is known when the last one has come.

    Raises:
        ChecksumMismatchError: a column, or the metadata, are not those that were written.
    """
    with pq.ParquetFile(path) as file:
        schema, digests_json = file.schema_arrow, (file.metadata.metadata or {}).get(DIGESTS_KEY)
        known = None
        if digests_json is not None:
            try:
                known = json.loads(digests_json)
                known = {"columns": dict(known["columns"]), "metadata": known["metadata"]}
            except (ValueError, TypeError, KeyError) as err:
                raise ChecksumMismatchError(f"its metadata {DIGESTS_KEY.decode()} is damaged; restore a copy") from err
        digests = _Digests(schema, [] if known is None else schema.names if columns is None else columns)
        for batch in file.iter_batches(BATCH, columns=columns):
            digests.add(batch)
            yield batch
    if known is None:
        return
    found = digests.record()
    wrong = [name for name, digest in found["columns"].items() if known["columns"].get(name) != digest]
    wrong += sorted(known["columns"].keys() - set(schema.names))
    wrong += [] if found["metadata"] == known["metadata"] else ["its metadata"]
    if wrong:
        raise ChecksumMismatchError(
            f"{wrong[0]!r} is not as it was written: the file is damaged; restore a copy, or write it again"
        )


def read_checksummed(path: Path | str, columns: Sequence[str] | None = None) -> pa.Table:
    """A whole table; arguments and errors as in `read_checksummed_batches`."""
    batches = list(read_checksummed_batches(path, columns))
    if batches:
        return pa.Table.from_batches(batches)
    schema = pq.read_schema(path)
    return (schema if columns is None else pa.schema([schema.field(name) for name in columns])).empty_table()
