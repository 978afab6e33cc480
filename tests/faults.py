"""Injected faults: a kill or a full disk at the nth use of a system call."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Killed(BaseException):
    """A substitute for SIGKILL, which nothing in the package may catch."""


def kill_at(step: int) -> Callable[[int], None]:
    """Return progress that is killed when this number of steps is done."""

    def progress(done: int) -> None:
        if done == step:
            raise Killed

    return progress


@contextmanager
def raising(monkeypatch, call: str, nth: int, error: BaseException) -> Iterator[list[int]]:
    """Make os.<call> raise at its nth use before it has an effect, and yield the number of uses."""
    real, used = getattr(os, call), [0]

    def count_and_call(*arguments, **named):
        used[0] += 1
        if used[0] == nth:
            raise error
        return real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, count_and_call)
        yield used
