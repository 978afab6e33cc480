"""Coordinate processes: an exclusive lock for writers, and leases for work that several processes share.

A process holds a lease on each of its runs and renews it; runs of a process that died are taken over by others. Start
with `locked`, or with `acquire_lease` and `keep_renewed`.
"""

import fcntl
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from grasp.errors import ArtifactError

TTL_SECONDS = 300.0  # time to live of a lease that is not renewed


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive `flock` on the file `path`. The kernel releases the lock if the process dies.

    The file contains the name of the holder. It is never removed, since that would be a race.

    Args:
        path: lock file; created if it does not exist.
        wait: whether to wait for other holders (processes or threads); without it, a held lock is an error.
    Raises:
        ArtifactError: the lock is held (the message names the holder), or the file system is read-only or has no
            locks.
    """
    directory = path.parent
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as err:
        raise ArtifactError(
            f"{directory}: not writable ({err.strerror}: {err.filename}); choose another directory"
        ) from err
    with open(descriptor, "rb+", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as err:
            problem = f"the file system does not support locks ({err.strerror}); use a local disk"
            if isinstance(err, BlockingIOError):
                holder = file.read(1000).decode(errors="replace").strip() or "another process"
                problem = f"locked by {holder}; a directory can have one writer: wait for that process or stop it"
            raise ArtifactError(f"{directory}: {problem}") from err
        file.truncate(0)
        file.write(f"{_this_process()}\n".encode())
        try:
            yield
        finally:
            file.truncate(0)


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


@dataclass(frozen=True, slots=True)
class Lease:
    """The exclusive right of a process to work on a run, for a limited time.

    A lease is a file `<run>.<generation>`. The highest generation is valid while its modification time, which the
    holder renews, is younger than the time to live. A process takes over a run by creating the next generation with
    O_EXCL: if several processes find an expired lease, exactly one of them can create its successor, so a run never
    has two valid leases. Files are never removed while runs remain, since a name could otherwise be created twice:
    `release` sets the modification time to zero.

    A holder that was only slow may finish after its lease expired. This wastes work but loses no data: the result of a
    run is determined by its settings, and files are written to a temporary name and renamed. Clocks of machines that
    share a file system must agree to well within the time to live.
    """

    run: str
    path: Path

    def renew(self) -> None:
        """Renew the lease; do nothing if its file was removed."""
        with suppress(FileNotFoundError):
            os.utime(self.path, None)

    def release(self) -> None:
        """End the lease, so that other processes can take the run."""
        with suppress(FileNotFoundError):
            os.utime(self.path, (0.0, 0.0))


def generations(directory: Path) -> dict[str, int]:
    """Return the highest generation of every run; files are named e.g. `run.7`, and `run` may contain dots."""
    highest: dict[str, int] = {}
    for entry in os.scandir(directory) if directory.exists() else ():
        run, _, generation = entry.name.rpartition(".")
        if generation.isdigit():
            highest[run] = max(int(generation), highest.get(run, 0))
    return highest


def acquire_lease(
    directory: Path, run: str, *, ttl: float = TTL_SECONDS, known: Mapping[str, int] | None = None
) -> Lease | None:
    """Acquire the lease on a run; return None if another process holds it.

    Args:
        directory: directory of the leases.
        run: name of the run, which becomes a file name.
        ttl: seconds after which a lease that is not renewed expires.
        known: `generations(directory)`, to read it once for many runs. If it is outdated, the next generation may
            already exist; then None is returned.
    """
    directory.mkdir(parents=True, exist_ok=True)
    latest = (generations(directory) if known is None else known).get(run)
    if latest is not None:
        try:
            age = time.time() - (directory / f"{run}.{latest}").stat().st_mtime
        except FileNotFoundError:
            return None  # removed meanwhile, which means that all runs are complete
        if age < ttl:
            return None
    path = directory / f"{run}.{0 if latest is None else latest + 1}"
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return None
    with os.fdopen(handle, "w", encoding="ascii", errors="replace") as file:
        file.write(f"{_this_process()}\n")
    return Lease(run, path)


@contextmanager
def keep_renewed(leases: Sequence[Lease], *, ttl: float = TTL_SECONDS) -> Iterator[None]:
    """Renew leases in a thread while the block runs, and release them at its end."""
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(ttl / 5):
            for lease in leases:
                with suppress(OSError):  # a temporary failure of a network share: retried well before the expiry
                    lease.renew()

    thread = threading.Thread(target=renew, name="grasp-leases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        for lease in leases:
            with suppress(OSError):  # it then expires; the error must not hide one of the block
                lease.release()
