"""What a build tells whoever watches it. Nothing here prints."""

from collections.abc import Callable, Mapping
from typing import Protocol

Advance = Callable[[int, int], None]  # so many more rows and tokens are done


class Progress(Protocol):
    """Receives the stages of a build in order, one at a time."""

    def stage(self, name: str, *, rows: int | None, tokens: int | None) -> None:
        """A stage begins; totals where they are known."""

    def advance(self, rows: int, tokens: int) -> None:
        """So many more rows and tokens of the current stage are done."""

    def plan(self, tokens: Mapping[str, int]) -> None:
        """Tokens that the model reads in each of the stages ahead, in order: by them the time left in all is told."""

    def note(self, line: str) -> None:
        """Something worth knowing, a sentence."""


class Silent:
    """Watches nothing."""

    def stage(self, name: str, *, rows: int | None, tokens: int | None) -> None:
        pass

    def advance(self, rows: int, tokens: int) -> None:
        pass

    def plan(self, tokens: Mapping[str, int]) -> None:
        pass

    def note(self, line: str) -> None:
        pass


def ignore(rows: int, tokens: int) -> None:
    """An `Advance` that nobody watches."""
