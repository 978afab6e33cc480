"""Faults on request: a kill or a full disk at the nth use of a call of the system."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the package may catch it."""


@contextmanager
def raising(monkeypatch, call: str, nth: int, error: BaseException) -> Iterator[list[int]]:
    """os.<call> raises at its nth use, before it does anything; gives how often it was used."""
    real, used = getattr(os, call), [0]

    def counted(*arguments, **named):
        used[0] += 1
        if used[0] == nth:
            raise error
        return real(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, counted)
        yield used
