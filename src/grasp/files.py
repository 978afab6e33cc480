"""Files that appear only when they are whole, and never in the place of something else.

A command asks `check_outputs` before it begins; what it writes is written aside, then renamed. `aside` and
`write_whole` are for files that several processes may write at once.
"""

import glob
import os
import shutil
import stat
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from grasp.errors import SettingsError

STREAMS = (Path("-"), Path("/dev/stdout"))  # what a user means by the terminal, or the next command of a pipe
PART = ".part"
NAME_BYTES = 200  # of a name that go into its part's: file systems take 255
STALE_SECONDS = 86_400.0


Reads = Path | str | Iterable[Path | str] | None


def check_outputs(
    outputs: Mapping[str, Path | None], reads: Mapping[str, Reads] | None = None, *, streamed: Collection[str] = ()
) -> None:
    """See, before the work begins, that every output can be written and takes the place of nothing that is needed.

    Args:
        outputs: by what writes them, e.g. `--out` and `the summary of --out`; None: not asked for.
        reads: what is read, by how a message goes on after "which": a file, a directory with all that is in it, or
            several. A name that is not there (a URL, a repository) is in nobody's way.
        streamed: those outputs for which `-` means standard output.
    Raises:
        SettingsError: no such directory; a directory, a device, a pipe or a symbolic link; two outputs of one name;
            something that is read.
    """
    known: dict[Path, str] = {}
    for phrase, places in (reads or {}).items():
        several = [places] if isinstance(places, Path | str) else places or ()
        known |= {Path(place).resolve(): phrase for place in several if os.path.exists(place)}
    for flag, path in outputs.items():
        if path is None or (flag in streamed and path in STREAMS):
            continue
        _check_replaceable(path, flag)
        place = path.parent.resolve() / path.name
        for taken, phrase in known.items():
            if place == taken or (place.is_relative_to(taken) and taken.is_dir()):
                inside = "" if place == taken else f" inside of {taken}"
                raise SettingsError(f"{flag}: would write {path}{inside}, which {phrase}; give it a name of its own")
        known[place] = f"{flag} writes"


def _check_replaceable(path: Path, flag: str) -> None:
    """See that `path` is a new name in a directory that is there, or a regular file."""
    if not path.parent.is_dir():
        raise SettingsError(f"{flag}: got {path}, but there is no directory {path.parent}; make it first")
    if path == Path("-") or (kind := kind_of(path)) is None:
        raise SettingsError(f"{flag}: got {path}, which is no name for a file; expected one")
    if kind not in ("file", "nothing"):
        raise SettingsError(f"{flag}: got {path}, which is a {kind}; expected the name of a file")


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


def _refuse_special(path: Path) -> None:
    if (kind := kind_of(path)) not in ("nothing", "file", "directory"):
        raise SettingsError(f"{path}: is a {kind}; expected the name of a file")


def aside(path: Path) -> Path:
    """A name of our own beside `path`, so that two processes never write into one part file."""
    return path.with_name(f"{_beginning(path)}{uuid.uuid4().hex}{PART}")


def _beginning(path: Path) -> str:
    """What the names of all its parts begin with."""
    return f".{path.name.encode()[:NAME_BYTES].decode(errors='ignore')}."


def write_whole(path: Path, data: bytes) -> None:
    """Write aside, flush, rename: a reader, or another writer, never sees half a file.

    Raises:
        SettingsError: a device, a pipe or a link has this name, which a rename would replace.
    """
    _refuse_special(path)
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

    Raises:
        SettingsError: a device, a pipe or a link has this name, which a rename would replace.
    """
    _refuse_special(path)
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
