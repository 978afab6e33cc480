"""Files that are whole or not there, and never in the place of something else. `store/locks.py` has who may write.

check_outputs                  before a command begins: may its results be written where it is told to?
write_whole, written_aside     a file appears when it is whole, whatever happens meanwhile
FileEntry, fault               what a file was when it was written, and what is wrong with it now
check_place, own_directory     a directory for many files is new, empty or ours
differences                    was it begun with the same settings?
"""

import errno
import glob
import hashlib
import json
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict

from grasp.errors import ArtifactError, SettingsError

TABLES = (".parquet", ".csv")  # how the name of a table ends
STREAMS = (Path("-"), Path("/dev/stdout"))  # what a user means by the terminal, or the next command of a pipe
FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk, or what a user may have of it
PART = ".part"
NAME_BYTES = 200  # of a name that go into its part's: file systems take 255
STALE_SECONDS = 86_400.0
UNSIGNED = "0" * 32
# Where JSON has an indent of 1, and no text of it can hold a line break, only a field of the whole stands so.
_SIGNATURE = re.compile(rb'^ "checksum": "([0-9a-f]{32})"', re.MULTILINE)
_PART_NAME = re.compile(r"\..*\.[0-9a-f]{32}\.part", re.DOTALL)

# -------------------------------------------------------------------------------------------------- what may be written

Reads = Path | str | Iterable[Path | str] | None


def check_outputs(
    outputs: Mapping[str, Path | None],
    reads: Mapping[str, Reads] | None = None,
    *,
    streamed: Collection[str] = (),
    tables: Collection[str] = (),
) -> None:
    """See, before the work begins, that every output can be written and takes the place of nothing that is needed.

    Args:
        outputs: by what writes them, e.g. `--out` and `the summary of --out`; None: not asked for.
        reads: what is read, by how a message goes on after "which": a file, a directory with all that is in it, or
            several. A name that is not there (a URL, a repository) is in nobody's way.
        streamed: those outputs for which `-` means standard output.
        tables: those outputs that are Parquet or CSV, by the ending of the name.
    Raises:
        SettingsError: no such directory; a directory, a device, a pipe or a symbolic link; two outputs of one name;
            something that is read; another ending than that of a table.
    """
    written: dict[Path, str] = {}
    for flag, path in outputs.items():
        if path is None or (flag in streamed and path in STREAMS):
            continue
        if not path.parent.is_dir():
            raise SettingsError(f"{flag}: got {path}, but there is no directory {path.parent}; make it first")
        if path == Path("-") or (kind := kind_of(path)) is None:
            raise SettingsError(f"{flag}: got {path}, which is no name for a file; expected one")
        if kind not in ("file", "nothing"):
            raise SettingsError(f"{flag}: got {path}, which is a {kind}; expected the name of a file")
        written[_check_apart(path, flag, reads, written)] = f"{flag} writes"
        if flag in tables and path.suffix not in TABLES:
            raise SettingsError(f"{flag}: got {path}, expected a name that ends in {' or '.join(TABLES)}")


def _check_apart(
    path: Path, flag: str, reads: Mapping[str, Reads] | None, written: Mapping[Path, str] | None = None
) -> Path:
    """See that an output is UTF-8, as libraries want it, and nothing that is needed, nor inside of it.

    Args:
        written: what else is written, and by what.
    Returns:
        Where it lies, links followed.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as err:
        raise SettingsError(
            f"{flag}: got {path}, which is no name for a file: it is not UTF-8; choose another"
        ) from err
    known: dict[Path, str] = {}
    for phrase, places in (reads or {}).items():
        several = [places] if isinstance(places, Path | str) else places or ()
        known |= {Path(place).resolve(): phrase for place in several if os.path.exists(place)}
    place = path.parent.resolve() / path.name
    for taken, phrase in (known | dict(written or {})).items():
        if place == taken or (place.is_relative_to(taken) and taken.is_dir()):
            inside = "" if place == taken else f" inside of {taken}"
            raise SettingsError(f"{flag}: would write {path}{inside}, which {phrase}; give it a name of its own")
    return place


_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
}


def kind_of(path: Path) -> str | None:
    """What lies at `path`, links not followed: file, directory, symbolic link, pipe, socket, device or nothing.

    None: no file system can have such a name.
    """
    try:
        return _KINDS.get(stat.S_IFMT(path.lstat().st_mode), "device")
    except (FileNotFoundError, NotADirectoryError):
        return "nothing"
    except ValueError:  # a NUL, or a lone surrogate
        return None


# --------------------------------------------------------------------------------------------------- whole or not there


def temporary_path(path: Path) -> Path:
    """A name of our own beside `path`, so that two processes never write into one part file."""
    return path.with_name(f"{_beginning(path)}{uuid.uuid4().hex}{PART}")


def _beginning(path: Path) -> str:
    """What the names of all its parts begin with."""
    return f".{path.name.encode()[:NAME_BYTES].decode(errors='ignore')}."


def write_whole(path: Path, data: bytes | memoryview) -> "FileEntry":
    """Write aside, flush, rename: a reader, or another writer, never sees half a file.

    Raises:
        SettingsError: a device, a pipe or a link has this name, which a rename would replace.
    """
    with written_aside(path, sweep=False) as part:
        part.write_bytes(data)
    return FileEntry(bytes=memoryview(data).nbytes, checksum=checksum(data))


@contextmanager
def written_aside(path: Path, *, sweep: bool = True) -> Iterator[Path]:
    """A place beside `path` to write to, a file or a directory, which is flushed and gets its name at the end.

    Where the writing fails or is interrupted, nothing is left; of a process that was killed, until the next writer of
    the same name a day later, or `remove_parts`.

    Args:
        sweep: remove what was left of this name; takes as long as the directory has names.
    Raises:
        SettingsError: a device, a pipe or a link has this name, which a rename would replace.
        OSError: the disk is full; the message names `path`, whatever library wrote.
    """
    part = temporary_path(path)
    if sweep:
        for left in path.parent.glob(f"{glob.escape(_beginning(path))}*{PART}"):
            remove_stale(left, older_than=STALE_SECONDS)
    if (kind := kind_of(path)) not in ("nothing", "file", "directory"):
        raise SettingsError(f"{path}: is a {kind}; expected the name of a file")
    try:
        yield part
        _flush(part)
        try:
            os.replace(part, path)
        except OSError as err:
            if err.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise SettingsError(f"{path}: another command has written there meanwhile; choose another place") from err
        _flush(path.parent)
    except BaseException as err:
        discard(part)
        if isinstance(err, OSError):
            number = err.errno if err.errno in (*FULL, errno.EFBIG) else None
        else:  # a library in Rust says it without a number
            found = re.search(r"\(os error (\d+)\)|Os \{ code: (\d+)", str(err))
            number = None if found is None else int(found[1] or found[2])
        if number is not None:
            raise OSError(number, os.strerror(number), str(path)) from err
        raise


def _flush(path: Path) -> None:
    """To the disk, with what a library wrote of it; a directory: the names in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_parts(*directories: Path) -> None:
    """Remove what killed writers left aside in directories that nobody else writes to now."""
    for directory in directories:
        for part in directory.iterdir():
            if is_part(part):
                discard(part)


def is_part(path: Path) -> bool:
    """Whether it is something that is still being written, or was when its writer was killed."""
    return _PART_NAME.fullmatch(path.name) is not None


def remove_stale(part: Path, *, older_than: float) -> None:
    """Remove what a killed writer left aside; a young part may belong to one that is alive."""
    try:
        if time.time() - part.lstat().st_mtime > older_than:
            discard(part)
    except FileNotFoundError:
        return


def discard(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def out_of_space(where: str, progress: Callable[[], str]) -> Iterator[None]:
    """Turn a full disk (or quota) into one clear line; `progress` says how much is safe already."""
    try:
        yield
    except OSError as err:
        if err.errno not in (*FULL, errno.EFBIG):
            raise
        what = "a file of this size may not be written" if err.errno == errno.EFBIG else "no space left on the device"
        raise ArtifactError(f"{where}: {what}; {progress()}; free space and run again with --resume") from err


# ----------------------------------------------------------------------------------------------- is it what was written


class FileEntry(BaseModel):
    """Size in bytes and XXH3-128 checksum of one file: against accidents, not against forgers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    bytes: int
    checksum: str


def checksum(data: bytes | memoryview) -> str:
    """XXH3-128 in hex; 17 times as fast as BLAKE2b, so that everything that is read can be checked."""
    return xxhash.xxh3_128_hexdigest(data)


def with_checksum(data: bytes) -> bytes:
    """JSON with an indent of 1, whose field `checksum` is UNSIGNED, with its own checksum in that field."""
    return _SIGNATURE.sub(b' "checksum": "' + checksum(data).encode() + b'"', data, count=1)


def is_signed(data: bytes) -> bool:
    """Whether JSON agrees with the checksum in it."""
    found = _SIGNATURE.search(data)
    if found is None:
        return False
    unsigned = data[: found.start(1)] + UNSIGNED.encode() + data[found.end(1) :]
    return checksum(unsigned) == found.group(1).decode()


def entry_of(path: Path) -> FileEntry:
    """Size and checksum of a file on disk, read as a stream."""
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, xxhash.xxh3_128)
        return FileEntry(bytes=handle.tell(), checksum=digest.hexdigest())


def fault(root: Path, name: str, expected: FileEntry) -> str | None:
    """What is wrong with the file `name` below `root`, in words; None: it is as it was written.

    Nothing is opened but a regular file of the right size that lies below `root` itself, not behind a link.
    """
    steps = Path(name).parts
    for i in range(1, len(steps) + 1):
        kind, wanted = kind_of(root.joinpath(*steps[:i])), "file" if i == len(steps) else "directory"
        if kind == "nothing":
            return "missing"
        if kind != wanted:
            return f"{Path(*steps[:i])} is a {kind}, expected a {'regular file' if wanted == 'file' else wanted}"
    path = root / name
    try:
        size = path.stat().st_size
        return mismatch(entry_of(path) if size == expected.bytes else FileEntry(bytes=size, checksum=""), expected)
    except FileNotFoundError:
        return "missing"
    except OSError as err:
        return f"cannot be read: {err.strerror}"


def mismatch(found: FileEntry, expected: FileEntry) -> str | None:
    """What is wrong with the size or the bytes of a file, in words; a size that differs needs no checksum."""
    if found.bytes != expected.bytes:
        cut = found.bytes < expected.bytes
        return f"{'truncated' if cut else 'too long'}: {found.bytes} of {expected.bytes} bytes"
    same = found.checksum == expected.checksum
    return None if same else f"damaged: checksum {found.checksum}, expected {expected.checksum}"


# --------------------------------------------------------------------------------------------------------- directories


def check_place(path: Path, reads: Mapping[str, Reads] | None = None) -> None:
    """See that a directory can be made.

    Args:
        reads: what it may not lie in, as in `check_outputs`.
    Raises:
        SettingsError: it is there already, or the directory that it is to lie in is not, or is something that is read.
    """
    if os.path.lexists(path):
        raise SettingsError(f"{path}: is there already; give another name, or remove it")
    if not path.absolute().parent.is_dir():
        raise SettingsError(f"{path}: there is no directory {path.parent}; make it first")
    _check_apart(path, "out", reads)


def own_directory(
    path: Path, marker: str, is_ours: Callable[[Path], bool], reads: Mapping[str, Reads] | None = None
) -> None:
    """Make a directory that is ours, or see that it is: new, empty, with our marker in it, or known as `is_ours`.

    Args:
        marker: name of the file that says so; made here where there is none.
        reads: what it may not lie in, as in `check_outputs`.
    Raises:
        SettingsError: something else is there, or no directory can be.
    """
    if path == Path():
        raise SettingsError("out: got the current directory, or no name at all; give the output one of its own")
    _check_apart(path, "out", reads)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not (path / marker).exists():
            if any(path.iterdir()) and not is_ours(path):
                raise SettingsError(
                    f"{path}: is not empty, and what is there is not ours; choose a new or an empty directory"
                )
            (path / marker).touch()
    except FileExistsError as err:
        raise SettingsError(f"{path}: is a file, expected a directory; choose another place") from err
    except OSError as err:
        raise SettingsError(
            f"{path}: cannot be written to ({err.strerror}: {err.filename}); choose another directory"
        ) from err


# --------------------------------------------------------------------------------------------------- the same settings?


def differences(then: Any, now: Any, where: str = "") -> Iterator[str]:
    """Every leaf in which two plain values of JSON differ, as `field: was X, now Y`; null is as good as absent."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(key for key in then.keys() | now.keys() if (then.get(key), now.get(key)) != (None, None)):
            yield from differences(
                then.get(key, _ABSENT), now.get(key, _ABSENT), f"{where}.{key}" if where else str(key)
            )
    elif then != now:
        was, is_now = ("absent" if value is _ABSENT else json.dumps(value) for value in (then, now))
        yield f"{where}: was {was}, now {is_now}"


_ABSENT = object()
