"""Tables and arrays as the bytes of files, and back: Parquet, .npy, safetensors. The same ones give the same bytes.

What we wrote is `readable`, or damaged; a table that a user names is a `readable_table`, or something else.
"""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
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
    """An array as the bytes of a .npy file."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)  # one order: its header is compared
    return buffer.getvalue()


def parquet_bytes(table: pa.Table) -> bytes:
    """A table as the bytes of a Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def tensor_bytes(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Named arrays as the bytes of a safetensors file."""
    content: bytes = safetensors.numpy.save({name: np.asarray(arrays[name], order="C") for name in sorted(arrays)})
    return content


@contextmanager
def readable(path: Path, recovery_hint: str, error_type: type[GraspError] = ArtifactError) -> Iterator[None]:
    """Turn what a damaged file makes its library say into one line, which `recovery_hint` ends."""
    try:
        yield
    except FileNotFoundError as err:
        raise error_type(f"{path}: missing; {recovery_hint}") from err
    except (pa.ArrowException, SafetensorError, OSError, ValueError, EOFError, TypeError, KeyError) as err:
        raise error_type(f"{path}: damaged: {plain(err)}; {recovery_hint}") from err  # TypeError: bfloat16


def read_table(
    path: Path, recovery_hint: str, error_type: type[GraspError] = ArtifactError, columns: list[str] | None = None
) -> pa.Table:
    """A Parquet table, or those of the columns that it has."""
    with readable(path, recovery_hint, error_type), pq.ParquetFile(path) as file:
        return file.read(columns)


def read_tensors(
    path: Path, recovery_hint: str, error_type: type[GraspError] = ArtifactError
) -> dict[str, NDArray[Any]]:
    """The arrays of a safetensors file."""
    with readable(path, recovery_hint, error_type):
        arrays: dict[str, NDArray[Any]] = safetensors.numpy.load_file(path)
    return arrays


@contextmanager
def readable_table(place: Path | str, error_type: type[GraspError], expected: str) -> Iterator[None]:
    """Say in one line why a table that a user names is none; `place`, with the flag or setting before it, begins it."""
    try:
        yield
    except FileNotFoundError as err:
        raise error_type(f"{place}: no such file; expected {expected}") from err
    except (pa.ArrowException, OSError, UnicodeDecodeError) as err:
        raise error_type(f"{place}: cannot be read: {' '.join(str(err).split())}; expected {expected}") from err
