"""What a build tells whoever watches it. Nothing here prints."""

from typing import Protocol


class Progress(Protocol):
    """Receives the stages of a build in order, one at a time."""

    def stage(self, name: str, *, rows: int | None, tokens: int | None) -> None:
        """A stage begins; totals where they are known."""

    def advance(self, rows: int, tokens: int) -> None:
        """So many more rows and tokens of the current stage are done."""


class Silent:
    """Watches nothing."""

    def stage(self, name: str, *, rows: int | None, tokens: int | None) -> None:
        pass

    def advance(self, rows: int, tokens: int) -> None:
        pass
