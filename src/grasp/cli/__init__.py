"""The command line. Each command parses its options, calls one function of the package, and prints the result.

Start with `main`, the entry point; the commands are in the modules `*_commands`.
"""

import errno
import os
import sys
from contextlib import redirect_stdout
from typing import NoReturn, TextIO, cast

from grasp.cli import artifact_commands, prediction_commands, selection_commands, validation_commands  # noqa: F401
from grasp.cli.app import app
from grasp.cli.console import PlainStream
from grasp.entry_points import entries, load
from grasp.errors import GraspError
from grasp.files import DISK_FULL_ERRORS
from grasp.text import plain

# Commands of optional subpackages, then those of other packages: a broken package must not break those of GRASP.
try:
    for _point in sorted(entries("grasp.commands").values(), key=lambda point: not point.value.startswith("grasp.")):
        app.add_typer(load("grasp.commands", _point.name))
except GraspError as _error:
    print(f"note: {plain(str(_error))}", file=sys.stderr)

USER_ERROR = 2
# Errors of the operating system that are not bugs: they are printed in one line, without a traceback.
SYSTEM_ERRORS = (*DISK_FULL_ERRORS, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG, errno.ENAMETOOLONG, errno.EIO)


def main() -> None:
    """Run a command. A user error is printed in one line, with exit code 2; a bug keeps its traceback."""
    # By default, waiting OpenMP threads of torch spin. If other processes use the cores, this takes five times the CPU
    # time of one thread, and more wall time. torch reads the variable when it is loaded; the user's own value wins.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with redirect_stdout(cast(TextIO, PlainStream(sys.stdout))):
            app(prog_name="grasp")
    except GraspError as err:
        _fail(str(err))
    except OSError as err:
        if err.errno not in SYSTEM_ERRORS:
            raise
        message = f"{err.filename}: {err.strerror}" if err.filename else str(err)
        if err.errno in DISK_FULL_ERRORS:
            message += "; finished parts are kept: free disk space and run the same command again"
        _fail(message)


def _fail(message: str) -> NoReturn:
    """Print an error as one line without control characters, and exit."""
    print(f"error: {plain(message)}", file=sys.stderr)
    sys.exit(USER_ERROR)
