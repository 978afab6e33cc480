"""The interface through which long operations report progress. Nothing here prints."""

from collections.abc import Callable, Mapping
from typing import Protocol

Advance = Callable[[int, int], None]  # receives the numbers of rows and tokens that were processed since the last call


class Progress(Protocol):
    """Receives the stages of a build, in order."""

    def stage(self, name: str, *, rows: int | None, tokens: int | None) -> None:
        """Begin a stage; totals are None if they are unknown."""

    def advance(self, rows: int, tokens: int) -> None:
        """Add to the rows and tokens of the current stage that were processed."""

    def plan(self, tokens: Mapping[str, int]) -> None:
        """Announce the tokens that the model reads in each later stage, in order, to estimate the remaining time."""

    def note(self, line: str) -> None:
        """Report a sentence that the user should read."""


class Silent:
    """Ignores all progress."""

    def stage(self, name: str, *, rows: int | None, tokens: int | None) -> None:
        pass

    def advance(self, rows: int, tokens: int) -> None:
        pass

    def plan(self, tokens: Mapping[str, int]) -> None:
        pass

    def note(self, line: str) -> None:
        pass


def ignore(rows: int, tokens: int) -> None:
    """Ignore progress: the default `Advance`."""
