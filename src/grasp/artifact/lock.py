"""One writer per artifact, one process at a time: locks that the kernel releases when their holder dies."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from grasp.errors import ArtifactError


class ArtifactLock:
    """An exclusive `flock` on `<artifact>/lock`; the file's text says who holds it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, path: Path) -> Self:
        """Take the lock of the artifact at `path`, making the directory if it is not there.

        Raises:
            ArtifactError: another process (or another writer of this one) holds it, the message says which; the
                directory cannot be made or written to.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as err:
            raise ArtifactError(
                f"{path}: no artifact can be written here ({err.strerror}: {err.filename}); choose another directory"
            ) from err
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as err:
            holder = os.read(descriptor, 1000).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise ArtifactError(
                f"{path}: locked by {holder}; two writers cannot share one artifact: wait for it or stop it"
            ) from err
        except OSError as err:
            os.close(descriptor)
            raise ArtifactError(
                f"{path}: this file system cannot lock files ({err.strerror}); write to a local disk"
            ) from err
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        return cls(path, descriptor)

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def release(self) -> None:
        """Give the lock back; a second call does nothing. The file stays: removing it would race."""
        if self._descriptor is None:
            return
        os.ftruncate(self._descriptor, 0)
        os.close(self._descriptor)
        self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Wait until no other process or thread holds the lock at `path`, then hold it."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
