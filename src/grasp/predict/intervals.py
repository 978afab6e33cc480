"""The change that runs lead to expect of subsets, with an interval, as every verb has it.

What learns it from runs is made by `grasp.runs.learning.learn`. Shape letters: B subsets, T targets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from grasp.predict.predictor import Predictor
from grasp.predict.row_arrays import F64
from grasp.predict.weights import Weights

COVERAGE = 0.9
OUTSIDE = "outside of what the runs covered"
NAMED = 3  # subsets in a sentence


@dataclass(frozen=True, slots=True)
class NatsTable:
    """Change of realized utility of B subsets in nats a token, (B, T); nan where a target has no line."""

    nats_BT: F64
    low_BT: F64
    high_BT: F64
    outside: tuple[str, ...]  # for each subset: in which way it lies beyond the runs; empty: it does not
    unit: str = "nats"  # nats a token, or the metric of the runs

    @property
    def columns(self) -> dict[str, F64]:
        """By the names that they have in every table."""
        return dict(zip(columns_of(self.unit), (self.nats_BT, self.low_BT, self.high_BT), strict=True))


def columns_of(unit: str) -> tuple[str, str, str]:
    """Columns of the expected change and its interval."""
    return unit, f"{unit}_low", f"{unit}_high"


class Outside:
    """Counts, while predictions are made, the subsets that lie beyond what the runs covered."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._count = 0

    def add(self, names: Sequence[str], nats: NatsTable) -> None:
        """One block of subsets."""
        found = [f"{name} ({words})" for name, words in zip(names, nats.outside, strict=True) if words]
        self._count += len(found)
        self._first += found[: NAMED - len(self._first)]

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence, if there is anything to say."""
        if not self._count:
            return ()
        more = f" and {self._count - len(self._first):,} more" if self._count > len(self._first) else ""
        return (f"{OUTSIDE}, so the interval is wider: {'; '.join(self._first)}{more}",)


class Expectation(Protocol):
    """What runs say of the predictions of one predictor: made by `grasp.runs.learning.learn`."""

    @property
    def unit(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def notes(self) -> tuple[str, ...]: ...
    def of(self, weights: Weights) -> NatsTable:
        """Of one block of subsets."""

    def rise(self, weights: Weights, weights_T: F64, *, cautious: bool = False) -> F64:
        """How fast the weighted change, or its lower end, rises as one subset takes in a row, (N,)."""


FitIntervals = Callable[[Predictor], Expectation]


def measures(array_names: tuple[str, ...]) -> tuple[str, ...]:
    """Sketches that a predictor should be prepared with, so that distances can be told."""
    return tuple(half for half in ("hidden", "residual") if f"{half}_sketch" in array_names)
