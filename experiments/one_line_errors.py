"""What an experiment's command does with a user's mistake: one line and exit code 2, as `grasp` itself."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from grasp.errors import GraspError


@contextmanager
def in_one_line() -> Iterator[None]:
    """Around a `main`, or above it as a decorator; a bug keeps its traceback."""
    try:
        yield
    except GraspError as err:
        print(f"error: {err}", file=sys.stderr)
        raise SystemExit(2) from err
