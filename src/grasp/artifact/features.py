"""Arrays spooled shard by shard: the features an artifact keeps, and the work area of a build."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from grasp.artifact.manifest import dump_json, read_record
from grasp.errors import ArtifactError
from grasp.files import FileEntry, entry_of, fault, out_of_space, write_whole


def tensor_bytes(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Named arrays as the bytes of a safetensors file; the same arrays give the same bytes."""
    content: bytes = safetensors.numpy.save({name: np.asarray(arrays[name], order="C") for name in sorted(arrays)})
    return content


class FeatureSpool:
    """A directory of `shard-00000.safetensors`, each with a mark beside it that says it is whole."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def write(self, k: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep the arrays of shard k (any shapes); replaces what was kept of it.

        Raises:
            ArtifactError: the disk is full (nothing of this shard is left).
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        data, mark = self._data(k), self._mark(k)
        contents = tensor_bytes(arrays)
        mark.unlink(missing_ok=True)
        with out_of_space(f"{data}: not written", lambda: f"{len(self.finished)} shards are finished here"):
            try:
                write_whole(mark, dump_json(write_whole(data, contents)))
            except OSError:
                for path in (mark, data):
                    path.unlink(missing_ok=True)
                raise

    def read(self, k: int) -> dict[str, NDArray[Any]]:
        """The arrays of shard k.

        Raises:
            ArtifactError: shard k is not here, or damaged.
        """
        if not self.has(k):
            raise ArtifactError(f"{self._data(k)}: shard {k} is not kept here")
        if what := fault(self.directory, self._data(k).name, read_record(self._mark(k), FileEntry)):
            raise ArtifactError(f"{self._data(k)}: {what}; build it again")
        try:
            arrays: dict[str, NDArray[Any]] = safetensors.numpy.load_file(self._data(k))
        except SafetensorError as err:
            raise ArtifactError(f"{self._data(k)}: damaged: {err}; build it again") from err
        return arrays

    def has(self, k: int) -> bool:
        """Whether shard k is whole."""
        mark, data = self._mark(k), self._data(k)
        return mark.is_file() and data.is_file() and data.stat().st_size == read_record(mark, FileEntry).bytes

    @property
    def finished(self) -> frozenset[int]:
        """Numbers of the shards that are whole."""
        found = (int(path.stem.removeprefix("shard-")) for path in self.directory.glob("shard-*.json"))
        return frozenset(k for k in found if self.has(k))

    def files(self, root: Path) -> dict[str, FileEntry]:
        """Size and checksum of everything here, by path relative to `root`."""
        entries: dict[str, FileEntry] = {}
        for k in sorted(self.finished):
            data, mark = self._data(k), self._mark(k)
            entries[data.relative_to(root).as_posix()] = read_record(mark, FileEntry)
            entries[mark.relative_to(root).as_posix()] = entry_of(mark)
        return entries

    def clear(self) -> None:
        """Remove the directory and all that is in it."""
        if self.directory.exists():
            shutil.rmtree(self.directory)

    def _data(self, k: int) -> Path:
        return self.directory / f"shard-{k:05d}.safetensors"

    def _mark(self, k: int) -> Path:
        return self.directory / f"shard-{k:05d}.json"
