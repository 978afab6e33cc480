"""Parquet tables that contain the checksum of their own bytes, verified on reading.

A flipped bit can turn one valid row name into another, and Parquet does not detect that. Tables without it, e.g.
of other programs, are read without verification. Start with `write_checksummed` and `read_checksummed`.
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from grasp.files import UNSIGNED

CHECKSUM_KEY = b"grasp.file_checksum"  # key of the checksum in the metadata of the file
BATCH_ROWS = 1 << 16
_SIGNATURE = re.compile(re.escape(CHECKSUM_KEY) + rb"..([0-9a-f]{32})", re.DOTALL)  # as Parquet stores it in the footer


@contextmanager
def checksummed_writer(file: Path | io.BytesIO, schema: pa.Schema, **options: Any) -> Iterator[pq.ParquetWriter]:
    """Yield a writer of tables of one schema; the checksum is written at the end."""
    with pq.ParquetWriter(file, schema, **({"compression": "zstd"} | options)) as writer:
        yield writer
        writer.add_key_value_metadata({CHECKSUM_KEY: UNSIGNED})
    with pa.memory_map(str(file)) if isinstance(file, Path) else pa.BufferReader(file.getvalue()) as written:
        start, _, actual = _checksums(memoryview(written.read_buffer()))
    with file.open("r+b") if isinstance(file, Path) else nullcontext(file) as content:
        content.seek(start)
        content.write(actual)


def _checksums(content: memoryview) -> tuple[int, bytes, bytes]:
    """Return the position of the stored checksum, the checksum, and that of all bytes with zeros in its place.

    Without a checksum both are empty.
    """
    footer_start = max(0, len(content) - 8 - int.from_bytes(content[-8:-4], "little"))
    footer = bytes(content[footer_start:])
    if CHECKSUM_KEY not in footer:
        return 0, b"", b""
    signature = _SIGNATURE.search(footer)
    if signature is None:
        return 0, b"", b"damaged"
    start, stop = (footer_start + end for end in signature.span(1))
    digest = xxhash.xxh3_128(content[:start])
    digest.update(UNSIGNED.encode())
    digest.update(content[stop:])
    return start, signature[1], digest.hexdigest().encode()


def write_checksummed(table: pa.Table, path: Path, *, group_rows: int | None = None) -> None:
    """Write a table with its checksum; `group_rows` is the size of a row group."""
    with checksummed_writer(path, table.schema) as writer:
        writer.write_table(table, row_group_size=group_rows)


@contextmanager
def _opened(path: Path | str) -> Iterator[pq.ParquetFile]:
    with pa.memory_map(str(path)) as content:
        _, stored, actual = _checksums(memoryview(content.read_buffer()))
    if stored != actual:
        raise pa.ArrowInvalid("its content is not as it was written: the file is damaged; restore a copy")
    with pq.ParquetFile(path) as file:
        yield file


def read_checksummed_batches(path: Path | str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield batches of a table; Arrow errors and OSError mean that the file is damaged."""
    with _opened(path) as file:
        yield from file.iter_batches(BATCH_ROWS, columns=columns)


def read_checksummed(path: Path | str, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a table; arguments and errors as `read_checksummed_batches`."""
    with _opened(path) as file:
        return file.read(columns)
