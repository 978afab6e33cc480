"""Parquet tables with a checksum of every column in the file metadata, verified on reading.

A flipped bit can turn one valid row name into another, and Parquet does not detect that. Tables without checksums, e.g.
of other programs, are read without verification. Start with `write_checksummed` and `read_checksummed`.
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

CHECKSUMS_KEY = b"grasp.seal"  # key of the checksums in the metadata of a file, as in version 0.2
BATCH_ROWS = 1 << 16


class ChecksumMismatchError(pa.ArrowInvalid):  # type: ignore[misc]
    """The content of a table does not match its checksums: an error of Arrow, like those of other damaged files."""


class _Checksums:
    """Running checksums of columns, independent of how the rows are split into batches, and one of the metadata.

    A checksum covers values, not types: int32 and int64 columns with equal values have equal checksums.
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[str]) -> None:
        metadata = {key: value for key, value in (schema.metadata or {}).items() if key != CHECKSUMS_KEY}
        self._metadata = xxhash.xxh3_128_hexdigest(
            b"\0".join(text for item in sorted(metadata.items()) for text in item)
        )
        unique_names = [name for name in columns if schema.names.count(name) == 1]
        # Two hashes per column: `lengths`, the byte length of each value, or -1 for null (of numbers: 1 if valid, 0 if
        # null), and `values`, the bytes of all values that are not null.
        self._columns = {name: (xxhash.xxh3_128(), xxhash.xxh3_128()) for name in unique_names}

    def update(self, table: pa.Table | pa.RecordBatch) -> None:
        """Add rows to the checksums."""
        for name, (lengths, values) in self._columns.items():
            column = table.column(name)
            for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
                array = chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk
                if pa.types.is_dictionary(array.type):
                    array = array.cast(array.type.value_type)
                if (wide := _widest_type(array.type)) is not None:
                    lengths.update(array.is_valid().cast(pa.uint8()).to_numpy(zero_copy_only=False).tobytes())
                    values.update(array.drop_null().cast(wide).to_numpy(zero_copy_only=False).tobytes())
                else:
                    text = _as_text(array)
                    lengths_of_text = pc.fill_null(pc.binary_length(text).cast(pa.int64()), -1)
                    lengths.update(lengths_of_text.to_numpy(zero_copy_only=False).tobytes())
                    values.update(_bytes_of(text.drop_null().cast(pa.large_binary())))

    def to_dict(self) -> dict[str, Any]:
        """Return the checksums in hexadecimal, as JSON values."""
        columns = {name: lengths.hexdigest() + values.hexdigest() for name, (lengths, values) in self._columns.items()}
        return {"columns": columns, "metadata": self._metadata}


def _widest_type(data_type: pa.DataType) -> pa.DataType | None:
    """Return the widest type of numbers of a kind, so that checksums do not depend on the width; None: not numbers."""
    if pa.types.is_floating(data_type):
        return pa.float64()
    if pa.types.is_uint64(data_type):
        return pa.uint64()
    return pa.int64() if pa.types.is_integer(data_type) or pa.types.is_boolean(data_type) else None


def _as_text(array: pa.Array) -> pa.Array:
    """Return text unchanged, and values of all other types (nested, dates, decimals, bytes) as JSON."""
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        return array
    return pa.array([json.dumps(value, default=str) for value in array.to_pylist()], pa.large_string())


def _bytes_of(binary: pa.LargeBinaryArray) -> bytes | memoryview:
    """Return the concatenated bytes of an array without nulls, without copying them."""
    if not len(binary):
        return b""
    _, offsets, data = binary.buffers()
    first, last = np.frombuffer(offsets, np.int64)[[binary.offset, binary.offset + len(binary)]]
    return b"" if data is None else memoryview(data)[first:last]


class ChecksummedParquetWriter:
    """Writer of a Parquet file in several tables of one schema; adds the checksums on closing."""

    def __init__(self, path: Any, schema: pa.Schema, **options: Any) -> None:
        self._checksums = _Checksums(schema, schema.names)
        self._writer = pq.ParquetWriter(path, schema, **({"compression": "zstd"} | options))

    def write(self, table: pa.Table, **options: Any) -> None:
        self._checksums.update(table)
        self._writer.write_table(table, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is None:
            self._writer.add_key_value_metadata({CHECKSUMS_KEY: json.dumps(self._checksums.to_dict()).encode()})
        self._writer.close()


def write_checksummed(table: pa.Table, path: Path, *, group_rows: int | None = None) -> None:
    """Write a table and the checksums of its columns; `group_rows` is the size of a row group."""
    with ChecksummedParquetWriter(path, table.schema) as writer:
        writer.write(table, row_group_size=group_rows)


def read_checksummed_batches(path: Path | str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield batches of a table; the checksums of the columns that are read are verified after the last batch.

    Columns whose name occurs twice have no checksum.

    Args:
        columns: columns to read. Default: all.
    Raises:
        ChecksumMismatchError: a column or the metadata differ from what was written.
    """
    with pq.ParquetFile(path) as file:
        schema, checksums_json = file.schema_arrow, (file.metadata.metadata or {}).get(CHECKSUMS_KEY)
        expected = None
        if checksums_json is not None:
            try:
                expected = json.loads(checksums_json)
                expected = {"columns": dict(expected["columns"]), "metadata": expected["metadata"]}
            except (ValueError, TypeError, KeyError):
                expected = {"columns": {}, "metadata": None}  # damaged: no column matches
        verified_columns = schema.names if columns is None else columns
        checksums = _Checksums(schema, [] if expected is None else verified_columns)
        for batch in file.iter_batches(BATCH_ROWS, columns=columns):
            checksums.update(batch)
            yield batch
    if expected is None:
        return
    actual = checksums.to_dict()
    mismatches = [name for name, checksum in actual["columns"].items() if expected["columns"].get(name) != checksum]
    mismatches += sorted(expected["columns"].keys() - set(schema.names))
    mismatches += [] if actual["metadata"] == expected["metadata"] else ["the metadata of the file"]
    if mismatches:
        raise ChecksumMismatchError(
            f"{mismatches[0]!r} is not as it was written: the file is damaged; restore a copy, or write it again"
        )


def read_checksummed(path: Path | str, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a table; arguments and errors as `read_checksummed_batches`."""
    batches = list(read_checksummed_batches(path, columns))
    if batches:
        return pa.Table.from_batches(batches)
    schema = pq.read_schema(path)
    return (schema if columns is None else pa.schema([schema.field(name) for name in columns])).empty_table()
