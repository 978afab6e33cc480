"""Directory for intermediate results of a method, so that a killed run can be resumed. Start with `WorkArea`.

Every file is written atomically: it is either complete or absent.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grasp.files import atomic_path, write_atomically
from grasp.methods.contract import Seconds

SECONDS = "seconds.json"


class WorkArea:
    """Named arrays and JSON records in a directory, of one method with its settings or shared between methods."""

    def __init__(self, directory: Path, shared: Path | None = None) -> None:
        self.directory = directory
        self._shared = shared
        directory.mkdir(parents=True, exist_ok=True)

    def load(self, name: str) -> NDArray[Any] | None:
        """Memory-map a saved array; return None if it does not exist."""
        path = self.directory / f"{name}.npy"
        return np.load(path, mmap_mode="r", allow_pickle=False) if path.exists() else None

    def save(self, name: str, array: NDArray[Any]) -> None:
        """Save an array atomically."""
        with atomic_path(self.directory / f"{name}.npy") as part, part.open("wb") as handle:
            np.save(handle, array, allow_pickle=False)

    def load_required(self, name: str) -> NDArray[Any]:
        """Memory-map an array that must exist."""
        array = self.load(name)
        assert array is not None, f"{self.directory / name} was saved before"
        return array

    def load_or_compute(self, name: str, compute: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Memory-map an array by name; compute and save it first if it does not exist."""
        if self.load(name) is None:
            self.save(name, compute())
        return self.load_required(name)

    def read(self, name: str) -> dict[str, Any] | None:
        """Read a record; return None if it does not exist."""
        path = self.directory / f"{name}.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def write(self, name: str, record: Mapping[str, Any]) -> None:
        """Write a record atomically."""
        write_atomically(self.directory / f"{name}.json", (json.dumps(dict(record), indent=1) + "\n").encode())

    def shared(self, name: str) -> "WorkArea":
        """Return an area that other methods and other settings of this one can use; it persists after the run.

        Args:
            name: must identify everything that determines the contents, e.g. by a digest of layers, projection, seed,
                units and `checkpoint.fingerprint`. Model, tokenizer, corpus and the version of the method are part of
                the parent directory.
        """
        base = self._shared if self._shared is not None else self.directory
        return WorkArea(base / name)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the `with` block to `seconds`; see `Account.ready`."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            spent = self.seconds + Seconds(time.perf_counter() - wall, time.process_time() - cpu)
            self.write(SECONDS.removesuffix(".json"), {"wall": spent.wall, "cpu": spent.cpu})

    @property
    def seconds(self) -> Seconds:
        """Total time spent under `timed`."""
        record = self.read(SECONDS.removesuffix(".json"))
        return Seconds() if record is None else Seconds(**record)
