"""Parquet tables with a digest of every column in their metadata, which is verified on reading.

A flipped bit can turn a name into another existing name, which Parquet does not detect. Tables of other programs have
no digests and are read without verification. Start with `write_sealed` and `read_sealed`.
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

SEAL = b"grasp.seal"  # key of the digests in the metadata of a file
BATCH = 1 << 16


class NotAsWrittenError(pa.ArrowInvalid):  # type: ignore[misc]
    """The content of a table differs from what was written."""


class _Digests:
    """Digests of columns and metadata, which do not depend on how the rows are divided into batches.

    Numbers are hashed by value: int32 and int64, or float32 and float64, have the same digest.
    """

    def __init__(self, schema: pa.Schema, columns: Sequence[str]) -> None:
        entries = {key: value for key, value in (schema.metadata or {}).items() if key != SEAL}
        parts = (part for item in sorted(entries.items()) for part in item)
        self._metadata = xxhash.xxh3_128_hexdigest(b"\0".join(parts))
        unique_names = [name for name in columns if schema.names.count(name) == 1]
        self._columns = {name: (xxhash.xxh3_128(), xxhash.xxh3_128()) for name in unique_names}  # lengths, values

    def add(self, part: pa.Table | pa.RecordBatch) -> None:
        """Update the digests with further rows."""
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
        """Return the digests as hexadecimal text, in JSON."""
        columns = {name: sizes.hexdigest() + values.hexdigest() for name, (sizes, values) in self._columns.items()}
        return {"columns": columns, "metadata": self._metadata}


class SealedWriter:
    """Write tables of the same schema to one Parquet file; the digests are written on closing."""

    def __init__(self, path: Any, schema: pa.Schema, **options: Any) -> None:
        self._digests = _Digests(schema, schema.names)
        self._writer = pq.ParquetWriter(path, schema, **({"compression": "zstd"} | options))

    def write(self, table: pa.Table, **options: Any) -> None:
        self._digests.add(table)
        self._writer.write_table(table, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is None:
            self._writer.add_key_value_metadata({SEAL: json.dumps(self._digests.record()).encode()})
        self._writer.close()


def write_sealed(table: pa.Table, path: Path, *, group_rows: int | None = None) -> None:
    """Write a table with digests of its columns."""
    with SealedWriter(path, table.schema) as writer:
        writer.write(table, row_group_size=group_rows)


def sealed_batches(path: Path | str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the batches of some columns, and verify the digests after the last one.

    Raises:
        NotAsWrittenError: the digest of a column or of the metadata differs.
    """
    with pq.ParquetFile(path) as file:
        schema, seal = file.schema_arrow, (file.metadata.metadata or {}).get(SEAL)
        expected = None
        if seal is not None:
            try:
                expected = json.loads(seal)
                expected = {"columns": dict(expected["columns"]), "metadata": expected["metadata"]}
            except (ValueError, TypeError, KeyError) as err:
                raise NotAsWrittenError(f"its metadata {SEAL.decode()} is damaged; restore a copy") from err
        digests = _Digests(schema, [] if expected is None else schema.names if columns is None else columns)
        for batch in file.iter_batches(BATCH, columns=columns):
            digests.add(batch)
            yield batch
    if expected is None:
        return
    actual = digests.record()
    damaged = [name for name, digest in actual["columns"].items() if expected["columns"].get(name) != digest]
    damaged += sorted(expected["columns"].keys() - set(schema.names))
    damaged += [] if actual["metadata"] == expected["metadata"] else ["its metadata"]
    if damaged:
        raise NotAsWrittenError(
            f"{damaged[0]!r} is not as it was written: the file is damaged; restore a copy or write it again"
        )


def read_sealed(path: Path | str, columns: Sequence[str] | None = None) -> pa.Table:
    """Read and verify a table; arguments and errors are those of `sealed_batches`."""
    batches = list(sealed_batches(path, columns))
    if batches:
        return pa.Table.from_batches(batches)
    schema = pq.read_schema(path)
    return (schema if columns is None else pa.schema([schema.field(name) for name in columns])).empty_table()
