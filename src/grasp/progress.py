"""The interface through which long operations report progress. Nothing here prints."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class RetrainStatus:
    """The state of a retraining.

    Attributes:
        stage: recipe, tokenizer, rows, runs or cost.
        done: number of runs with a result.
        total: number of runs.
        running: name of the current run of this worker; empty if there is none.
        step: finished steps of the current run.
        steps: steps of a run.
        seconds_left: extrapolated from the runs that finished during this call; None: unknown.
        note: what the recipe has that the training does not follow, at first; after the first steps, the estimated cost
            of the remaining training.
    """

    stage: str
    done: int = 0
    total: int = 0
    running: str = ""
    step: int = 0
    steps: int = 0
    seconds_left: float | None = None
    note: str | None = None
