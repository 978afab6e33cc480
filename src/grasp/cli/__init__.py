"""The command line: parse, call one function, print, exit code. Nothing here computes."""

import errno
import os
import sys
from contextlib import redirect_stdout
from importlib import import_module
from typing import NoReturn, TextIO, cast

from grasp.cli import ask, choose, find, runs, start, trust  # noqa: F401 - commands register themselves
from grasp.cli.app import app
from grasp.cli.console import PlainStream
from grasp.errors import GraspError
from grasp.files import FULL
from grasp.text import plain

BESIDE = (
    "grasp.geometry.calibrate_command",
    "grasp.vision.fit_head_command",
)  # commands of rooms that nothing here imports
for _room in BESIDE:
    import_module(_room)

USER_ERROR = 2
# What the machine refuses, whoever asks: no bug of ours, so it gets a line and no traceback.
REFUSALS = (*FULL, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG, errno.ENAMETOOLONG, errno.EIO)


def main() -> None:
    """Entry point: a mistake of the user is one line and exit code 2; a bug keeps its traceback."""
    # Threads of torch that wait for each other would otherwise spin: where others use the cores as well, that takes
    # five times the CPU time of one thread, and longer. It is read when torch is loaded; who has set it is obeyed.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        with redirect_stdout(cast(TextIO, PlainStream(sys.stdout))):
            app(prog_name="grasp")
    except GraspError as err:
        _fail(str(err))
    except OSError as err:
        if err.errno not in REFUSALS:
            raise
        what = f"{err.filename}: {err.strerror}" if err.filename else str(err)
        more = "; what was finished is kept: make room and run the same command again" if err.errno in FULL else ""
        _fail(what + more)


def _fail(message: str) -> NoReturn:
    """One line, whatever a file name, a label or an expression in the message holds."""
    print(f"error: {plain(message)}", file=sys.stderr)
    sys.exit(USER_ERROR)
