"""The command line: parse, call one function, print, exit code. Nothing here computes."""

import sys

from grasp.cli import build as _build  # noqa: F401  (a command registers itself)
from grasp.cli import demo as _demo  # noqa: F401
from grasp.cli import inspect as _inspect  # noqa: F401
from grasp.cli import predict as _predict  # noqa: F401
from grasp.cli import score as _score  # noqa: F401
from grasp.cli.app import app
from grasp.errors import GraspError

USER_ERROR = 2


def main() -> None:
    """Entry point: a mistake of the user is one line and exit code 2; a bug keeps its traceback."""
    try:
        app()
    except GraspError as err:
        print(f"error: {err}", file=sys.stderr)
        sys.exit(USER_ERROR)
