"""The interface through which long operations report progress. Nothing here prints."""

from collections.abc import Callable, Mapping

Advance = Callable[[int, int], None]  # receives the numbers of rows and tokens that were processed since the last call


class Progress:
    """Receives the stages of a build, in order; this class ignores them."""

    def stage(self, name: str, *, rows: int | None, tokens: int | None) -> None:
        """Begin a stage; totals are None if they are unknown."""

    def advance(self, rows: int, tokens: int) -> None:
        """Add to the rows and tokens of the current stage that were processed."""

    def plan(self, tokens: Mapping[str, int]) -> None:
        """Announce the tokens that the model reads in each later stage, in order, to estimate the remaining time."""

    def note(self, line: str) -> None:
        """Report a sentence that the user should read."""


ignore: Advance = Progress().advance  # the default
