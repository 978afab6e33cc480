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

DIGESTS_KEY = b"grasp.seal"  # key of the checksums in the metadata of a file, as in version 0.2
BATCH_ROWS = 1 << 16


class ChecksumMismatchError(pa.ArrowInvalid):  # type: ignore[misc]
    """The content of a table does not match its digests."""


class _Digests:
    """Running digests of columns, independent of how the rows are split into batches, and a digest of the metadata.

    A digest covers values, not types: int32 and int64 columns with equal values have equal digests.
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[str]) -> None:
        metadata = {key: value for key, value in (schema.metadata or {}).items() if key != DIGESTS_KEY}
        self._metadata = xxhash.xxh3_128_hexdigest(
            b"\0".join(text for item in sorted(metadata.items()) for text in item)
        )
        unique_names = [name for name in columns if schema.names.count(name) == 1]
        # Two hashes per column: `sizes`, the byte length of each value, or -1 for null (of numbers: 1 if valid, 0 if
        # null), and `values`, the bytes of all values that are not null.
        self._columns = {name: (xxhash.xxh3_128(), xxhash.xxh3_128()) for name in unique_names}

    def update(self, table: pa.Table | pa.RecordBatch) -> None:
        """Add rows to the digests."""
        for name, (sizes, values) in self._columns.items():
            column = table.column(name)
            for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
                cells = chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk
                if pa.types.is_dictionary(cells.type):
                    cells = cells.cast(cells.type.value_type)
                if pa.types.is_boolean(cells.type):
                    cells = cells.cast(pa.int64())
                if pa.types.is_integer(cells.type) or pa.types.is_floating(cells.type):
                    sizes.update(cells.is_valid().cast(pa.uint8()).to_numpy(zero_copy_only=False).tobytes())
                    # the widest type: a digest does not depend on the width
                    wide = pa.float64() if pa.types.is_floating(cells.type) else cells.type
                    wide = pa.int64() if pa.types.is_integer(wide) and not pa.types.is_uint64(wide) else wide
                    values.update(cells.drop_null().cast(wide).to_numpy(zero_copy_only=False).tobytes())
                    continue
                # all other types (nested, dates, decimals, bytes) are hashed as JSON text
                if not (pa.types.is_string(cells.type) or pa.types.is_large_string(cells.type)):
                    cells = pa.array([json.dumps(value, default=str) for value in cells.to_pylist()], pa.large_string())
                lengths = pc.fill_null(pc.binary_length(cells).cast(pa.int64()), -1)
                sizes.update(lengths.to_numpy(zero_copy_only=False).tobytes())
                texts = cells.drop_null().cast(pa.large_binary())
                if len(texts):
                    _, offsets, data = texts.buffers()
                    ends = np.frombuffer(offsets, np.int64)[[texts.offset, texts.offset + len(texts)]]
                    values.update(memoryview(data)[ends[0] : ends[1]] if data is not None else b"")

    def to_dict(self) -> dict[str, Any]:
        """Return the hexadecimal digests as JSON values."""
        columns = {name: sizes.hexdigest() + values.hexdigest() for name, (sizes, values) in self._columns.items()}
        return {"columns": columns, "metadata": self._metadata}


class ChecksummedParquetWriter:
    """Writer of a Parquet file in several tables of one schema; adds the digests on closing."""

    def __init__(self, path: Any, schema: pa.Schema, **options: Any) -> None:
        self._digests = _Digests(schema, schema.names)
        self._writer = pq.ParquetWriter(path, schema, **({"compression": "zstd"} | options))

    def write(self, table: pa.Table, **options: Any) -> None:
        self._digests.update(table)
        self._writer.write_table(table, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is None:
            self._writer.add_key_value_metadata({DIGESTS_KEY: json.dumps(self._digests.to_dict()).encode()})
        self._writer.close()


def write_checksummed(table: pa.Table, path: Path, *, group_rows: int | None = None) -> None:
    """Write a table and the digests of its columns; `group_rows` is the size of a row group."""
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
        schema, digests_json = file.schema_arrow, (file.metadata.metadata or {}).get(DIGESTS_KEY)
        expected = None
        if digests_json is not None:
            try:
                expected = json.loads(digests_json)
                expected = {"columns": dict(expected["columns"]), "metadata": expected["metadata"]}
            except (ValueError, TypeError, KeyError) as err:
                raise ChecksumMismatchError(f"its metadata {DIGESTS_KEY.decode()} is damaged; restore a copy") from err
        digests = _Digests(schema, [] if expected is None else schema.names if columns is None else columns)
        for batch in file.iter_batches(BATCH_ROWS, columns=columns):
            digests.update(batch)
            yield batch
    if expected is None:
        return
    actual = digests.to_dict()
    mismatches = [name for name, digest in actual["columns"].items() if expected["columns"].get(name) != digest]
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
