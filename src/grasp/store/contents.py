"""Convert tables and arrays to the bytes of Parquet, .npy and safetensors files, and read them.

Equal content gives equal bytes. `readable` converts errors of our own files, which are then damaged; `readable_table`
converts errors of files that a user passes. Start with `parquet_bytes` and `read_table`.
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from grasp.errors import ArtifactError, GraspError
from grasp.text import plain


def npy_bytes(array: NDArray[Any]) -> bytes:
    """Return the bytes of a .npy file of an array."""
    buffer = io.BytesIO()
    # Always in C order: the order is in the header, and bytes are compared.
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()


def parquet_bytes(table: pa.Table) -> bytes:
    """Return the bytes of a Parquet file of a table."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def tensor_bytes(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the bytes of a safetensors file of named arrays."""
    content: bytes = safetensors.numpy.save({name: np.asarray(arrays[name], order="C") for name in sorted(arrays)})
    return content


@contextmanager
def readable(path: Path, recovery_hint: str, error_type: type[GraspError] = ArtifactError) -> Iterator[None]:
    """Convert the exceptions of a damaged file to one line that ends with the recovery hint `recovery_hint`."""
    try:
        yield
    except (pa.ArrowException, SafetensorError, OSError, ValueError, EOFError, TypeError, KeyError, TokenError) as err:
        # numpy has no bfloat16: TypeError; it tokenises the header of an array file: TokenError
        problem = "missing" if isinstance(err, FileNotFoundError) else f"damaged: {plain(err)}"
        raise error_type(f"{path}: {problem}; {recovery_hint}") from err


def read_table(
    path: Path, recovery_hint: str, error_type: type[GraspError] = ArtifactError, columns: list[str] | None = None
) -> pa.Table:
    """Read a Parquet table, or those of `columns` that it has."""
    with readable(path, recovery_hint, error_type), pq.ParquetFile(path) as file:
        return file.read(columns)


def read_tensors(path: Path, recovery_hint: str) -> dict[str, NDArray[Any]]:
    """Read the arrays of a safetensors file."""
    with readable(path, recovery_hint):
        arrays: dict[str, NDArray[Any]] = safetensors.numpy.load_file(path)
    return arrays


@contextmanager
def readable_table(location: Path | str, error_type: type[GraspError], expected: str) -> Iterator[None]:
    """Convert the exceptions of reading a user's table to one line.

    Args:
        location: beginning of the message: the option or setting, and the path.
        error_type: type of the error.
        expected: what the message says is expected.
    """
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as err:
        is_missing = isinstance(err, FileNotFoundError)
        problem = "no such file" if is_missing else f"cannot be read: {' '.join(str(err).split())}"
        raise error_type(f"{location}: {problem}; expected {expected}") from err
