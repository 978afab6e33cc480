"""Check output paths, write files atomically, verify them, and claim output directories.

check_outputs                    before a command begins: check that its output files can be written
write_atomically, atomic_path    write to a temporary file and rename it, so that no reader sees half a file
FileEntry, fault                 size and checksum of a file when it was written, and what is wrong with it now
check_directory, claim_directory check that an output directory is new, empty, or written by GRASP
differences                      list the settings that differ from those of an earlier run

`store/locks.py` decides which process may write. "Part" files are temporary files: `.NAME.<hex>.part`.
"""

import errno
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

TABLE_SUFFIXES = (".parquet", ".csv")  # of files that hold a table
STANDARD_OUTPUTS = (Path("-"), Path("/dev/stdout"))  # names of standard output
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)  # a full disk, or an exhausted quota
PART_SUFFIX = ".part"
MAX_NAME_BYTES = 200  # bytes of a name that its temporary file repeats: file systems accept 255
UNSIGNED = "0" * 32  # in place of the checksum that JSON contains of itself, when the checksum is computed
# In JSON with an indent of 1 only a top-level field can match this, since JSON strings hold no line breaks.
_SIGNATURE = re.compile(rb'^ "checksum": "([0-9a-f]{32})"', re.MULTILINE)
_PART_NAME = re.compile(r"\..*\.[0-9a-f]{32}\.part", re.DOTALL)


InputPaths = Path | str | Iterable[Path | str] | None


def check_outputs(
    outputs: Mapping[str, Path | None],
    inputs: Mapping[str, InputPaths] | None = None,
    *,
    streamed: Collection[str] = (),
    tables: Collection[str] = (),
) -> None:
    """Check before a command starts that every output can be written and overwrites none of its inputs.

    Args:
        outputs: path by the option that names it, e.g. `--out`; None: the option is not used.
        inputs: files or directories that outputs must not replace, by a phrase for the message "would write PATH,
            which PHRASE", such as "is the artifact". Names that do not exist locally (a URL, a repository) are ignored.
        streamed: options for which `-` means standard output.
        tables: options whose file is Parquet or CSV, by its suffix.
    Raises:
        SettingsError: the directory does not exist; the path is a directory, a device, a pipe or a symbolic link; two
            outputs have the same name; the output is an input; the suffix is not that of a table.
    """
    written: dict[Path, str] = {}
    for flag, path in outputs.items():
        if path is None or (flag in streamed and path in STANDARD_OUTPUTS):
            continue
        kind, fault = kind_of(path), ""
        if not path.parent.is_dir():
            fault = f"but the directory {path.parent} does not exist; create it first"
        elif path == Path("-") or kind is None:
            fault = "which is not a valid file name"
        elif kind not in ("file", "nothing"):
            fault = f"which is a {kind}; expected the name of a file"
        if not fault:
            written[_check_apart(path, flag, inputs, written)] = f"{flag} writes"
            if flag in tables and path.suffix not in TABLE_SUFFIXES:
                fault = f"expected a name that ends in {' or '.join(TABLE_SUFFIXES)}"
        if fault:
            raise SettingsError(f"{flag}: got {path}, {fault}")


def _check_apart(
    path: Path, flag: str, inputs: Mapping[str, InputPaths] | None, written: Mapping[Path, str] | None = None
) -> Path:
    """Check that an output has a UTF-8 name and is neither an input, another output, nor inside one of them."""
    fault = ""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        fault = f"got {path}, which is not a valid file name: not UTF-8"
    occupied: dict[Path, str] = {}
    for phrase, paths in (inputs or {}).items():
        path_list = [paths] if isinstance(paths, Path | str) else paths or ()
        occupied |= {Path(input_path).resolve(): phrase for input_path in path_list if os.path.exists(input_path)}
    resolved = path.parent.resolve() / path.name
    for other, phrase in (occupied | dict(written or {})).items():
        if resolved == other or (resolved.is_relative_to(other) and other.is_dir()):
            inside = "" if resolved == other else f" inside of {other}"
            fault = fault or f"would write {path}{inside}, which {phrase}"
    if fault:
        raise SettingsError(f"{flag}: {fault}; choose another name")
    return resolved


_KINDS = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket",
}


def kind_of(path: Path) -> str | None:
    """Return what `path` is, without following links: file, directory, symbolic link, pipe, socket, device or nothing.

    Return None for a name that no file system can have.
    """
    try:
        return _KINDS.get(stat.S_IFMT(path.lstat().st_mode), "device")
    except (FileNotFoundError, NotADirectoryError):
        return "nothing"
    except ValueError:  # a NUL, or a lone surrogate
        return None


def temporary_path(path: Path) -> Path:
    """Return a unique temporary name in the directory of `path`, so that two processes never share one."""
    name = path.name.encode()[:MAX_NAME_BYTES].decode(errors="ignore")
    return path.with_name(f".{name}.{uuid.uuid4().hex}{PART_SUFFIX}")


def write_atomically(path: Path, data: bytes | memoryview) -> "FileEntry":
    """Write a file by writing a temporary file, flushing it, and renaming it; return its size and checksum.

    Readers and other writers see the old file or the new one, never a part of it.

    Raises:
        SettingsError: `path` is a device, a pipe or a link, which the rename would replace.
    """
    with atomic_path(path) as part:
        part.write_bytes(data)
    return FileEntry(bytes=memoryview(data).nbytes, checksum=checksum(data))


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path, for a file or a directory, that is flushed and renamed to `path` at the end.

    If the block fails or is interrupted, the temporary file is removed. If the process is killed, it stays until
    `remove_parts`.

    Args:
        path: file or directory to create or replace.
    Raises:
        SettingsError: `path` is a device, a pipe or a link, which the rename would replace.
        OSError: the disk is full; the message names `path`, whichever library wrote.
    """
    part = temporary_path(path)
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
            raise SettingsError(f"{path}: was written by another command in the meantime; choose another path") from err
        _flush(path.parent)
    except BaseException as err:
        discard(part)
        if isinstance(err, OSError):
            number = err.errno if err.errno in (*DISK_FULL_ERRORS, errno.EFBIG) else None
        else:  # libraries in Rust report the number in the message only
            os_error = re.search(r"\(os error (\d+)\)|Os \{ code: (\d+)", str(err))
            number = None if os_error is None else int(os_error[1] or os_error[2])
        if number is not None:
            raise OSError(number, os.strerror(number), str(path)) from err
        raise


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_parts(*directories: Path) -> None:
    """Remove the temporary files of killed processes from directories that no other process writes to."""
    for directory in directories:
        for part in directory.iterdir():
            if is_part(part):
                discard(part)


def is_part(path: Path) -> bool:
    """Return whether this is the temporary file of a writer that is still running or was killed."""
    return _PART_NAME.fullmatch(path.name) is not None


def remove_if_stale(part: Path, *, older_than: float) -> None:
    """Remove a temporary file of at least this age in seconds; a recent one may belong to a process that still runs."""
    try:
        if time.time() - part.lstat().st_mtime > older_than:
            discard(part)
    except FileNotFoundError:
        return


def discard(path: Path) -> None:
    """Remove a file or a directory, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def report_full_disk(message: str, progress: Callable[[], str]) -> Iterator[None]:
    """Turn the OSError of a full disk or quota into an ArtifactError of one line.

    Args:
        message: begin of the error message: the path, and what was not written.
        progress: returns what is saved, for the message.
    """
    try:
        yield
    except OSError as err:
        if err.errno not in (*DISK_FULL_ERRORS, errno.EFBIG):
            raise
        reason = "file too large for the file system" if err.errno == errno.EFBIG else "no space left on the device"
        raise ArtifactError(f"{message}: {reason}; {progress()}; free space and run again with --resume") from err


class FileEntry(BaseModel):
    """Size in bytes and XXH3-128 checksum of a file. Detects accidental damage, not forgery."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    bytes: int
    checksum: str


def checksum(data: bytes | memoryview) -> str:
    """Return the XXH3-128 checksum in hex; 17 times as fast as BLAKE2b, so that every read can be verified."""
    return xxhash.xxh3_128_hexdigest(data)


def with_checksum(data: bytes) -> bytes:
    """Put the checksum of JSON (indent 1, field `checksum` set to UNSIGNED) into its field `checksum`."""
    return _SIGNATURE.sub(b' "checksum": "' + checksum(data).encode() + b'"', data, count=1)


def is_signed(data: bytes) -> bool:
    """Return whether JSON matches the checksum that it contains."""
    signature = _SIGNATURE.search(data)
    if signature is None:
        return False
    unsigned = data[: signature.start(1)] + UNSIGNED.encode() + data[signature.end(1) :]
    return checksum(unsigned) == signature.group(1).decode()


def entry_of(path: Path) -> FileEntry:
    """Return size and checksum of a file, read as a stream."""
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, xxhash.xxh3_128)
        return FileEntry(bytes=handle.tell(), checksum=digest.hexdigest())


def fault(root: Path, name: str, expected: FileEntry) -> str | None:
    """Describe what is wrong with the file `name` below `root`; return None if it is unchanged since it was written.

    Only a regular file of the expected size that lies below `root`, not behind a link, is opened.
    """
    components = Path(name).parts
    for i in range(1, len(components) + 1):
        expected_kind = "file" if i == len(components) else "directory"
        kind = kind_of(root.joinpath(*components[:i]))
        if kind == "nothing":
            return "missing"
        if kind != expected_kind:
            expected_text = "regular file" if expected_kind == "file" else expected_kind
            return f"{Path(*components[:i])} is a {kind}, expected a {expected_text}"
    path = root / name
    try:
        size = path.stat().st_size
        return mismatch(entry_of(path) if size == expected.bytes else FileEntry(bytes=size, checksum=""), expected)
    except FileNotFoundError:
        return "missing"
    except OSError as err:
        return f"cannot be read: {err.strerror}"


def mismatch(actual: FileEntry, expected: FileEntry) -> str | None:
    """Describe how size or checksum of a file differ from those expected; return None if they are equal."""
    if actual.bytes != expected.bytes:
        problem = "truncated" if actual.bytes < expected.bytes else "too long"
        return f"{problem}: {actual.bytes} of {expected.bytes} bytes"
    is_same = actual.checksum == expected.checksum
    return None if is_same else f"damaged: checksum {actual.checksum}, expected {expected.checksum}"


def check_directory(path: Path, inputs: Mapping[str, InputPaths] | None = None) -> None:
    """Check that a directory can be created.

    Args:
        path: the directory.
        inputs: files or directories that must not contain it, as in `check_outputs`.
    Raises:
        SettingsError: it exists, its parent does not exist, or it is part of an input.
    """
    fault = "already exists; choose another name, or remove it" if os.path.lexists(path) else ""
    if not path.absolute().parent.is_dir():
        fault = f"the directory {path.parent} does not exist; create it first"
    if fault:
        raise SettingsError(f"{path}: {fault}")
    _check_apart(path, "out", inputs)


def claim_directory(
    path: Path, marker: str, is_ours: Callable[[Path], bool], inputs: Mapping[str, InputPaths] | None = None
) -> None:
    """Create an output directory, or check that an existing one is empty or was written by GRASP.

    Args:
        path: the directory.
        marker: name of an empty file that marks directories written by GRASP; it is created if it is missing.
        is_ours: returns whether GRASP wrote a directory that has other files but no marker.
        inputs: files or directories that must not contain it, as in `check_outputs`.
    Raises:
        SettingsError: the directory holds other files, or cannot be created.
    """
    if path == Path() or path.parts[0].endswith(":"):  # Path("s3://a") is s3:/a
        raise SettingsError("out: expected a new local directory; got the current directory, an empty name or a URL")
    _check_apart(path, "out", inputs)
    fault = ""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not (path / marker).exists():
            if any(path.iterdir()) and not is_ours(path):
                fault = "is not empty and was not written by grasp; choose a new or an empty directory"
            else:
                (path / marker).touch()
    except FileExistsError:
        fault = "is a file, expected a directory; choose another path"
    except OSError as err:
        fault = f"cannot be written to ({err.strerror}: {err.filename}); choose another directory"
    if fault:
        raise SettingsError(f"{path}: {fault}")


def differences(then: Any, now: Any, field: str = "", *, ignore_unset: bool = False) -> Iterator[str]:
    """Yield each value in which two nested JSON objects differ, as `field.subfield: was X, now Y`; null equals absent.

    Args:
        then: earlier value.
        now: present value.
        field: path of the field that holds the values.
        ignore_unset: skip fields that are null now, e.g. settings that a build resolved.
    """
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted(key for key in then.keys() | now.keys() if (then.get(key), now.get(key)) != (None, None)):
            subfield = f"{field}.{key}" if field else str(key)
            values = then.get(key, _ABSENT), now.get(key, _ABSENT)
            yield from differences(*values, subfield, ignore_unset=ignore_unset)
    elif then != now and not (ignore_unset and now is None):
        was, is_now = ("absent" if value is _ABSENT else json.dumps(value) for value in (then, now))
        yield f"{field}: was {was}, now {is_now}"


_ABSENT = object()
