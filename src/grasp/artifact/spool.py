"""Arrays kept shard by shard outside of the artifact's own: kept features, and the work area of a build."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from grasp.store.contents import read_tensors, tensor_bytes
from grasp.store.directory import Schema, Store
from grasp.store.records import Mark

SPOOL = Schema(mark=Mark, marks="shard-*.json", ours=("shard-*.safetensors",))


class FeatureSpool(Store[Mark]):
    """A directory of shards of named arrays."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, SPOOL)

    def write(self, k: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Keep the arrays of shard k (any shapes); replaces what was kept of it.

        Raises:
            ArtifactError: the disk is full (nothing of this shard is left).
        """
        self.put(f"shard-{k:05d}", {f"shard-{k:05d}.safetensors": tensor_bytes(arrays)})

    def read(self, k: int) -> dict[str, NDArray[Any]]:
        """The arrays of shard k.

        Raises:
            ArtifactError: shard k is not here, or damaged.
        """
        return read_tensors(self.file(f"shard-{k:05d}"), self.schema.again)

    def has(self, k: int) -> bool:
        """Whether shard k is whole."""
        return f"shard-{k:05d}" in self.parts
