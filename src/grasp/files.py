"""Files that appear only when they are whole: written aside, then renamed.

`aside` and `write_whole` are for files that several processes may write at once.
"""

import glob
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART = ".part"
NAME_BYTES = 200  # of a name that go into its part's: file systems take 255
STALE_SECONDS = 86_400.0


def aside(path: Path) -> Path:
    """A name of our own beside `path`, so that two processes never write into one part file."""
    return path.with_name(f"{_beginning(path)}{uuid.uuid4().hex}{PART}")


def _beginning(path: Path) -> str:
    """What the names of all its parts begin with."""
    return f".{path.name.encode()[:NAME_BYTES].decode(errors='ignore')}."


def write_whole(path: Path, data: bytes) -> None:
    """Write aside, flush, rename: a reader, or another writer, never sees half a file."""
    part = aside(path)
    try:
        with part.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def remove_stale(part: Path, *, older_than: float) -> None:
    """Remove what a killed writer left aside; a young part may belong to one that is alive."""
    try:
        if time.time() - part.stat().st_mtime > older_than:
            discard(part)
    except FileNotFoundError:
        return


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A place beside `path` to write to, a file or a directory, which gets its name at the end.

    Where the writing fails or is interrupted, nothing is left; of a process that was killed, until the next writer of
    the same name a day later.
    """
    for left in path.parent.glob(f"{glob.escape(_beginning(path))}*{PART}"):
        remove_stale(left, older_than=STALE_SECONDS)
    part = aside(path)
    try:
        yield part
        part.replace(path)
    except BaseException:
        discard(part)
        raise


def discard(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
