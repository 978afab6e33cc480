"""Parquet tables that say what they hold: a digest of every column in the metadata, compared by whoever reads it.

A flipped bit may turn one name into another that is there as well, and Parquet would not notice. Tables of others have
no digests, and are read as they are.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
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
    """A table is not what was written."""


class _Column:
    """Digest of the values of one column, however it is cut into parts; of numbers the value counts, not the type."""

    def __init__(self) -> None:
        self._sizes, self._values = xxhash.xxh3_128(), xxhash.xxh3_128()

    def add(self, values: pa.Array) -> None:
        if isinstance(values, pa.ExtensionArray):
            values = values.storage
        if pa.types.is_dictionary(values.type):
            values = values.cast(values.type.value_type)
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.int64())
        if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
            self._sizes.update(values.is_valid().cast(pa.uint8()).to_numpy(zero_copy_only=False).tobytes())
            wide = pa.float64() if pa.types.is_floating(values.type) else values.type
            wide = pa.int64() if pa.types.is_integer(wide) and not pa.types.is_uint64(wide) else wide
            self._values.update(values.drop_null().cast(wide).to_numpy(zero_copy_only=False).tobytes())
            return
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
            values = pa.array([json.dumps(value, default=str) for value in values.to_pylist()], pa.large_string())
        sizes = pc.fill_null(pc.binary_length(values).cast(pa.int64()), -1)
        self._sizes.update(sizes.to_numpy(zero_copy_only=False).tobytes())
        held = values.drop_null().cast(pa.large_binary())
        if len(held):
            _, offsets, data = held.buffers()
            ends = np.frombuffer(offsets, np.int64)[[held.offset, held.offset + len(held)]]
            self._values.update(memoryview(data)[ends[0] : ends[1]] if data is not None else b"")

    def __str__(self) -> str:
        return self._sizes.hexdigest() + self._values.hexdigest()


class _Digests:
    """Digests of the columns that pass, and of what the metadata say."""

    def __init__(self, schema: pa.Schema, columns: Sequence[str]) -> None:
        told = {key: value for key, value in (schema.metadata or {}).items() if key != SEAL}
        self.metadata = xxhash.xxh3_128_hexdigest(b"\0".join(part for item in sorted(told.items()) for part in item))
        self._columns = {name: _Column() for name in columns if schema.names.count(name) == 1}

    def passed(self, parts: Iterable[Any]) -> Iterator[Any]:
        """The same tables or batches."""
        for part in parts:
            for name, column in self._columns.items():
                values = part.column(name)
                for chunk in values.chunks if isinstance(values, pa.ChunkedArray) else [values]:
                    column.add(chunk)
            yield part

    @property
    def columns(self) -> dict[str, str]:
        return {name: str(column) for name, column in self._columns.items()}


class SealedWriter:
    """Writes tables of one schema one after the other; what they hold is said when it is closed."""

    def __init__(self, path: Any, schema: pa.Schema, **how: Any) -> None:
        self._digests = _Digests(schema, schema.names)
        self._writer = pq.ParquetWriter(path, schema, **({"compression": "zstd"} | how))

    def write(self, table: pa.Table, **how: Any) -> None:
        for part in self._digests.passed([table]):
            self._writer.write_table(part, **how)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if kind is None:
            said = {"columns": self._digests.columns, "metadata": self._digests.metadata}
            self._writer.add_key_value_metadata({SEAL: json.dumps(said).encode()})
        self._writer.close()


def write_sealed(table: pa.Table, path: Path, *, group_rows: int | None = None) -> None:
    """Write a table with the digests of its columns."""
    with SealedWriter(path, table.schema) as writer:
        writer.write(table, row_group_size=group_rows)


def sealed_batches(path: Path | str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Batches of some columns; what is wrong with them is known when the last one has come.

    Raises:
        NotAsWrittenError: a column, or the metadata, are not those that were written.
    """
    with pq.ParquetFile(path) as file:
        schema = file.schema_arrow
        known = _said(file)
        digests = _Digests(schema, [] if known is None else schema.names if columns is None else columns)
        yield from digests.passed(file.iter_batches(BATCH, columns=columns))
    if known is None:
        return
    wrong = [name for name, digest in digests.columns.items() if known["columns"].get(name) != digest]
    wrong += sorted(known["columns"].keys() - set(schema.names))
    wrong += [] if digests.metadata == known["metadata"] else ["its metadata"]
    if wrong:
        raise NotAsWrittenError(
            f"{wrong[0]!r} is not as it was written: the file is damaged; restore a copy, or write it again"
        )


def read_sealed(path: Path | str, columns: Sequence[str] | None = None) -> pa.Table:
    """A whole table; arguments and errors as in `sealed_batches`."""
    batches = list(sealed_batches(path, columns))
    if batches:
        return pa.Table.from_batches(batches)
    schema = pq.read_schema(path)
    return (schema if columns is None else pa.schema([schema.field(name) for name in columns])).empty_table()


def _said(file: pq.ParquetFile) -> dict[str, Any] | None:
    """The digests that a file has; None: none."""
    text = (file.metadata.metadata or {}).get(SEAL)
    if text is None:
        return None
    try:
        said = json.loads(text)
        return {"columns": dict(said["columns"]), "metadata": said["metadata"]}
    except (ValueError, TypeError, KeyError) as err:
        raise NotAsWrittenError(f"its metadata {SEAL.decode()} is damaged; restore a copy") from err
