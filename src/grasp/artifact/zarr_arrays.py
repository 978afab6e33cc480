"""The metadata files that make the chunk files of an artifact a Zarr v3 array."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.core.buffer import Buffer
from zarr.storage import MemoryStore

from grasp.artifact.files import write_whole
from grasp.artifact.layout import array_dir


def describe_array(
    root: Path,
    group: str,
    *,
    shape: tuple[int, int],
    chunk_rows: int,
    dtype: str,
    scale_E: NDArray[np.float32],
    attributes: Mapping[str, str],
) -> tuple[Path, ...]:
    """Write zarr.json of a group and the small array of its scales; returns the files, relative to `root`.

    Uncompressed with one chunk file per shard, so that a shard can be mapped into memory as it lies on disk.
    """
    data, scale = array_dir(group), array_dir(group + ".scale")
    files = {
        data / "zarr.json": _metadata(shape, (chunk_rows, shape[1]), dtype, attributes),
        scale / "zarr.json": _metadata(scale_E.shape, scale_E.shape, "float32", {"multiplies": group}),
        scale / "c.0": scale_E.astype("<f4").tobytes(),
    }
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != content:
            write_whole(path, content)
    return tuple(files)


def _metadata(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str, attributes: Mapping[str, str]) -> bytes:
    kept: dict[str, Buffer] = {}
    zarr.create_array(
        MemoryStore(kept),
        shape=shape,
        chunks=chunks,
        dtype=np.dtype(dtype).newbyteorder("<"),
        compressors=None,
        filters=None,
        fill_value=0,
        attributes=dict(attributes),
        chunk_key_encoding={"name": "default", "separator": "."},
        zarr_format=3,
    )
    content: bytes = kept["zarr.json"].to_bytes()
    return content
