"""Files that are whole or not there: written aside, flushed, renamed; each with its size and checksum."""

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from grasp.errors import ArtifactError

PART = ".part"
_DIGEST_BYTES = 16


class FileEntry(BaseModel):
    """Size in bytes and BLAKE2b-128 checksum of one file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int
    blake2b: str


def checksum(data: bytes | memoryview) -> str:
    """BLAKE2b-128 in hex."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()


def entry_of(path: Path) -> FileEntry:
    """Size and checksum of a file on disk, read as a stream."""
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES))
        return FileEntry(bytes=handle.tell(), blake2b=digest.hexdigest())


def part_of(path: Path) -> Path:
    """Where `path` is written aside until it is whole."""
    return path.with_name(path.name + PART)


def write_part(path: Path, data: bytes | memoryview) -> FileEntry:
    """Write `data` aside and flush it to the disk; `path` itself does not exist until `publish`."""
    with part_of(path).open("wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    return FileEntry(bytes=memoryview(data).nbytes, blake2b=checksum(data))


def sync_part(path: Path) -> None:
    """Flush a part file that another library wrote."""
    handle = os.open(part_of(path), os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(*paths: Path) -> None:
    """Rename finished part files to their names, then flush the directories that hold them."""
    for path in paths:
        os.replace(part_of(path), path)
    for directory in sorted({path.parent for path in paths}):
        _sync_directory(directory)


def write_whole(path: Path, data: bytes | memoryview) -> FileEntry:
    """Write one file so that a reader sees all of it or nothing, whatever happens meanwhile."""
    entry = write_part(path, data)
    publish(path)
    return entry


def remove_parts(*directories: Path) -> None:
    """Remove what a killed writer left aside."""
    for directory in directories:
        for part in directory.glob("*" + PART):
            part.unlink()


@contextmanager
def out_of_space(where: str, progress: Callable[[], str]) -> Iterator[None]:
    """Turn a full disk (or quota) into one clear line; `progress` says how much is safe already."""
    try:
        yield
    except OSError as err:
        if err.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ArtifactError(
            f"{where}: no space left on the device; {progress()}; free space and run again with --resume"
        ) from err


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
