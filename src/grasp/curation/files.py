"""Files that appear only when they are whole."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A place beside `path` to write to, a file or a directory, which gets its name at the end.

    Where the writing fails or is interrupted, nothing is left.
    """
    part = path.with_name(path.name + ".part")
    discard(part)
    try:
        yield part
        part.replace(path)
    except BaseException:
        discard(part)
        raise


def discard(path: Path) -> None:
    """Remove a file or a directory, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
