"""One writer at a time (`locked`), and work that several processes share out: a part of it is one process's (`Lease`,
`acquire_lease`, `held`), and a dead one's part is taken over.
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

TTL_SECONDS = 300.0  # after which a lease that was not renewed counts as abandoned


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold an exclusive `flock` on the file `path`, which the kernel releases when its holder dies.

    The file says who holds it, and stays: removing it would race.

    Args:
        wait: until no other process or thread holds it; else that is an error.
    Raises:
        ArtifactError: another process (or another holder in this one) has it, the message says which; the file
            system cannot lock, or not be written to.
    """
    place = path.parent
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as err:
        raise ArtifactError(
            f"{place}: cannot be written to ({err.strerror}: {err.filename}); choose another directory"
        ) from err
    with open(descriptor, "rb+", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as err:
            holder = file.read(1000).decode(errors="replace").strip() or "another process"
            raise ArtifactError(
                f"{place}: locked by {holder}; two writers cannot share one directory: wait for it or stop it"
            ) from err
        except OSError as err:
            raise ArtifactError(
                f"{place}: this file system cannot lock files ({err.strerror}); write to a local disk"
            ) from err
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
    """One generation of the claim on one run, held by one of several processes.

    A lease is a file `<run>.<generation>`. The highest generation holds the run for as long as its modification time,
    which the holder renews, is younger than the time to live. Taking a run means creating the next generation with
    O_EXCL: of all who find a lease too old exactly one can create its successor, so there is no moment in which
    two hold one run by mistake. Files are never removed while runs are left (a name that came free could be created
    twice): giving a lease back sets its time to zero.

    A holder that was only slow, not dead, may finish after it was superseded. That costs work, never data: a run is a
    function of its settings, and it is written aside and renamed. Clocks of machines that share a file system
    must agree to well within the time to live.
    """

    run: str
    path: Path

    def renew(self) -> None:
        """Make the lease young again; a lease whose file is gone has nothing left to protect."""
        _touch(self.path, None)

    def release(self) -> None:
        """Let anyone take the run from now on."""
        _touch(self.path, (0.0, 0.0))


def generations(directory: Path) -> dict[str, int]:
    """The highest generation of every run that was taken; a file is called `run.7`, where run itself may have dots."""
    found: dict[str, int] = {}
    for entry in os.scandir(directory) if directory.exists() else ():
        run, _, generation = entry.name.rpartition(".")
        if generation.isdigit():
            found[run] = max(int(generation), found.get(run, 0))
    return found


def acquire_lease(
    directory: Path, run: str, *, ttl: float = TTL_SECONDS, known: Mapping[str, int] | None = None
) -> Lease | None:
    """The lease on `run`, or None while somebody else holds it.

    Args:
        directory: where the leases of the environment lie.
        run: a file name without a path.
        ttl: seconds after which a lease that was not renewed counts as abandoned.
        known: `generations(directory)`, so that it is read once for many runs. Where it is old, a generation that
            somebody took since cannot be created again: then there is no lease.
    """
    directory.mkdir(parents=True, exist_ok=True)
    latest = (generations(directory) if known is None else known).get(run)
    if latest is not None and _age(directory / f"{run}.{latest}") < ttl:
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
def held(leases: Sequence[Lease], *, ttl: float = TTL_SECONDS) -> Iterator[None]:
    """Renew the leases from a thread while the block runs, and give them back when it ends."""
    stop = threading.Event()

    def renew() -> None:
        while not stop.wait(ttl / 5):
            for lease in leases:
                with suppress(OSError):  # a share that fails for a moment: it is tried again long before the end
                    lease.renew()

    thread = threading.Thread(target=renew, name="grasp-leases", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        for lease in leases:
            lease.release()


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0  # removed a moment ago: the runs are complete, nothing is to be taken


def _touch(path: Path, times: tuple[float, float] | None) -> None:
    try:
        os.utime(path, times)
    except FileNotFoundError:
        return
