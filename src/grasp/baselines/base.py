"""The one interface of all methods: what a method declares, what it may look at, what it gives back.

A `RowMethod` scores rows, block after block: (n, E) for the units of the artifact, or (n, 1) where the score does not
depend on the unit. Scores are summed over subsets elsewhere, stored, and never computed twice. A `SubsetMethod`
predicts subsets, (B, E), itself. Sign, always: positive means that training on the row should lower the unit's loss.

A method is one file and one line in `grasp.baselines.registry`. Importing its file must not need an optional
dependency: those that it declares in `needs_modules` are checked before any work begins.

Shape letters: N rows, n rows of a block, E units, B subsets.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from grasp.settings import Settings

if TYPE_CHECKING:
    from grasp.baselines.material import Material
    from grasp.baselines.work import WorkArea
    from grasp.predict.blocks import SubsetBlock
    from grasp.runs.predictions import Predictions

F64 = NDArray[np.float64]
Scores = NDArray[np.floating[Any]]

# What a method may need beside the artifact's own tables. Each is checked before work begins, and its fingerprint is
# part of what a stored result is found by.
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
            (TRAK: projection x checkpoints); 0 where there are none. The stored scores are counted beside them.
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


class Method(ABC, Generic[S]):
    """What row and subset methods have in common."""

    settings_type: ClassVar[type[Settings]] = NoSettings
    looks_at: ClassVar[frozenset[Looks]] = frozenset()
    needs_modules: ClassVar[Mapping[str, str]] = {}  # module -> extra that brings it
    version: ClassVar[int] = 1  # raised when the numbers change: stored results of an older one are not used
    targeted: ClassVar[bool] = True  # whether scores depend on the unit
    supervised: ClassVar[bool] = False  # fitted on the utilities it is judged by: an oracle

    def __init__(self, settings: S, *, seed: int = 0) -> None:
        self.settings = settings
        self.seed = seed

    def decided_by(self, material: "Material") -> Mapping[str, Any]:
        """What of the material decides the numbers beside what `looks_at` names; part of what a result is found by."""
        del material
        return {}


class RowMethod(Method[S]):
    """Scores rows. The sum over all parts is the result; most methods have one part."""

    dtype: ClassVar[Literal["float16", "float32"]] = "float32"  # of the stored scores
    weighting: ClassVar[Literal["mean", "count"]] = "mean"  # over a subset's rows, unless the user says otherwise

    def parts(self, material: "Material") -> int:
        """How many passes over the rows are added up: one a checkpoint, say, so that one model is in memory."""
        del material
        return 1

    @abstractmethod
    def prepare(self, material: "Material", work: "WorkArea", part: int) -> "RowScorer":
        """Everything before the first block of a part: models, units, statistics over all rows.

        Called again when a killed run goes on; what takes long is kept in `work` and found there.
        """


class RowScorer(ABC):
    """A part of a row method, ready to score."""

    @abstractmethod
    def score(self, start: int, stop: int) -> Scores:
        """Rows [start, stop): (n, E) in the order of `material.units`, or (n, 1).

        Every row's score is the same, up to rounding, whatever the block and the batches it is in.
        """

    @abstractmethod
    def account(self) -> Account:
        """Asked of the last part after its last block; also when all blocks were found ready."""


class SubsetMethod(Method[S]):
    """Predicts subsets."""

    @abstractmethod
    def predict(self, material: "Material", subsets: Sequence["SubsetBlock"]) -> tuple["Predictions", Account]:
        """Utilities of every subset and unit, with targets by the artifact's names; higher is better."""
