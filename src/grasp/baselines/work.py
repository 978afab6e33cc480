"""Where a method keeps what takes long to make, so that a killed run goes on: every file is whole or not there."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grasp.files import write_whole, written_aside
from grasp.methods.contract import Seconds

SECONDS = "seconds.json"


class WorkArea:
    """Arrays and records by name, in a directory of one artifact: of one method and setting, or what methods share."""

    def __init__(self, directory: Path, shared: Path | None = None) -> None:
        self.directory = directory
        self._shared = shared
        directory.mkdir(parents=True, exist_ok=True)

    def load(self, name: str) -> NDArray[Any] | None:
        """An array that was saved, mapped from disk; None: not there."""
        path = self.directory / f"{name}.npy"
        return np.load(path, mmap_mode="r", allow_pickle=False) if path.exists() else None

    def save(self, name: str, array: NDArray[Any]) -> None:
        """Keep an array; it appears when it is whole."""
        with written_aside(self.directory / f"{name}.npy") as part, part.open("wb") as handle:
            np.save(handle, array, allow_pickle=False)

    def loaded(self, name: str) -> NDArray[Any]:
        """An array that is known to be there, mapped from disk."""
        array = self.load(name)
        assert array is not None, f"{self.directory / name} was saved before"
        return array

    def kept(self, name: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """An array by name, made and saved the first time it is asked for; mapped from disk."""
        if self.load(name) is None:
            self.save(name, make())
        return self.loaded(name)

    def read(self, name: str) -> dict[str, Any] | None:
        """A record that was written; None: not there."""
        path = self.directory / f"{name}.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def write(self, name: str, record: Mapping[str, Any]) -> None:
        """Keep a record; it appears when it is whole."""
        write_whole(self.directory / f"{name}.json", (json.dumps(dict(record), indent=1) + "\n").encode())

    def shared(self, name: str) -> "WorkArea":
        """An area that other methods, and other settings of this one, find as well; it outlives the run.

        Args:
            name: must hold everything that decides what is kept in it, e.g. a digest of layers, projection, seed,
                units and `checkpoint.fingerprint`; but model, tokenizer, corpus and the method's version decide the
                directory that it lies in.
        """
        base = self._shared if self._shared is not None else self.directory
        return WorkArea(base / name)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block to `seconds`, for what is kept here; see `Account.ready`."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            spent = self.seconds + Seconds(time.perf_counter() - wall, time.process_time() - cpu)
            self.write(SECONDS.removesuffix(".json"), {"wall": spent.wall, "cpu": spent.cpu})

    @property
    def seconds(self) -> Seconds:
        """Time that was spent under `timed`."""
        found = self.read(SECONDS.removesuffix(".json"))
        return Seconds() if found is None else Seconds(**found)
