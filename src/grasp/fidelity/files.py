"""Files that several processes may write at once: each aside under a name of its own, then renamed."""

import os
import time
import uuid
from pathlib import Path

PART = ".part"


def aside(path: Path) -> Path:
    """A name of our own beside `path`, so that two processes never write into one part file."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}{PART}")


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
            part.unlink()
    except FileNotFoundError:
        return
