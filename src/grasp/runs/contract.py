"""What a method must be to stand beside GRASP: settings, what it looks at, and scores of rows or values of subsets.

A `RowMethod` scores rows: (N, E) for the units of the artifact, or (N, 1) where the score does not depend on the unit.
A `SubsetMethod` predicts subsets, (B, E), itself. Sign, always: positive means that training on the row should lower
the unit's loss. A method is found by name through the entry point group `grasp.methods`; see docs/baselines.md.

Shape letters: N rows, n rows of a block, E units, B subsets.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from grasp.errors import SettingsError, ShapeError
from grasp.predict.blocks import SubsetBlock
from grasp.runs.material import Material
from grasp.runs.predictions import Predictions
from grasp.settings import Settings

Scores = NDArray[np.floating[Any]]

# What a method may need beside the artifact's own tables; each is checked before work begins.
Looks = Literal["tokens", "model", "checkpoints", "environment"]


class NoSettings(Settings):
    """A method without settings."""


S = TypeVar("S", bound=Settings)


@dataclass(frozen=True, slots=True)
class Seconds:
    """Time spent; CPU seconds are of this process with all of its threads."""

    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)


@dataclass(frozen=True, slots=True)
class Account:
    """What a method says of itself when it has scored every row.

    Attributes:
        features: floats a row from which a unit that comes later could be scored without reading the corpus again
            (TRAK: projection x checkpoints); 0 where there are none. The scores are counted beside them.
        covers: what was looked at: names of layers, "all tokens", "units' prompts and completions".
        notes: what a reader of the numbers must know; one sentence each.
        counts: rows or units that were passed over, by reason.
        ready: seconds that were spent earlier on what was found ready and used again.
    """

    features: int = 0
    covers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    ready: Seconds = Seconds()


@dataclass(frozen=True)
class MethodScores:
    """Scores of every row, and what they took.

    Attributes:
        blocks: (first row, (n, E) or (n, 1)) from first row to last; can be gone through more than once.
        shape: (N, E) or (N, 1).
        seconds: None: not measured.
    """

    blocks: Iterable[tuple[int, Scores]]
    shape: tuple[int, ...]
    account: Account = Account()
    seconds: Seconds | None = None

    @classmethod
    def of(cls, scores: ArrayLike, account: Account = Account()) -> "MethodScores":
        """Scores that are in memory: (N, E), (N, 1), or (N,) for the same score for every unit."""
        array = np.asarray(scores, dtype=np.float64)
        array = array[:, None] if array.ndim == 1 else array
        return cls(((0, array),), array.shape, account)

    def __iter__(self) -> Iterator[tuple[int, Scores]]:
        return iter(self.blocks)

    def checked(self, label: str, material: Material) -> "MethodScores":
        """The same.

        Raises:
            ShapeError: not a score for every row, and for every unit or for all together.
        """
        expected = [(material.n_rows, material.n_units), (material.n_rows, 1)]
        if self.shape not in expected:
            raise ShapeError(
                f"method {label}: got scores of shape {self.shape}, expected {expected[0]} or {expected[1]}"
            )
        return self


class Method(ABC, Generic[S]):
    """What row and subset methods have in common. The first line of its docstring is what `grasp methods` shows."""

    settings_type: ClassVar[type[Settings]] = NoSettings
    looks_at: ClassVar[frozenset[Looks]] = frozenset()
    needs_modules: ClassVar[Mapping[str, str]] = {}  # module -> extra of grasp-attribution that brings it
    supervised: ClassVar[bool] = False  # fitted on the utilities it is judged by: an oracle

    def __init__(self, settings: S, *, name: str = "", seed: int = 0) -> None:
        self.settings = settings
        self.name = name
        self.seed = seed

    def check(self, material: Material) -> None:
        """See that what it looks at is there, before any work begins.

        Raises:
            GraspError: the artifact keeps no tokens, or no environment was named.
        """
        if "environment" in self.looks_at and material.retrained is None:
            raise SettingsError(
                f"method {self.name}: is made from retrained subsets; name their directory (--environment)"
            )
        if "tokens" in self.looks_at:
            material.require_tokens()


class RowMethod(Method[S]):
    """Scores rows."""

    weighting: ClassVar[Literal["mean", "count"]] = "mean"  # over a subset's rows, unless the user says otherwise

    @abstractmethod
    def scores(self, material: Material, cache: Path) -> MethodScores:
        """Scores of every row for every unit, in the order of `material.units`.

        Args:
            cache: a directory, which may not be there yet, for what takes long and can be used again.
        """


class SubsetMethod(Method[S]):
    """Predicts subsets."""

    @abstractmethod
    def predict(self, material: Material, subsets: Sequence[SubsetBlock]) -> tuple[Predictions, Account]:
        """Utilities of every subset and unit, with targets by the artifact's names; higher is better."""
