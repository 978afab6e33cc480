"""What a method must be to stand beside GRASP: settings, what it looks at, and scores of rows or values of subsets.

A `RowMethod` scores rows: (N, E) for the units of the artifact, or (N, 1) where the score does not depend on the unit.
A `SubsetMethod` predicts subsets, (B, E), itself. Sign, always: positive means that training on the row should lower
the unit's loss. A method is found by name through the entry point group `grasp.methods`; see docs/baselines.md.

`MethodInputs` is what a method may look at: the artifact's rows and units, its reference model, checkpoints, retrained
subsets. Everything is read when it is asked for, in blocks where it is as long as the corpus, and proved to be what the
artifact was made from: fingerprints of tokens, tokenizer, model and units.

Shape letters: N rows, n rows of a block, E units, B subsets.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from grasp.arrays import F64, I64, Floats
from grasp.artifact.reader import ArtifactReader
from grasp.build.provenance import BuildSource
from grasp.corpus.row_store import RowShard, RowStore
from grasp.errors import ArtifactError, SettingsError
from grasp.predict.weights import SubsetBlock
from grasp.progress import Progress, Silent
from grasp.runs.alignment import Joined
from grasp.runs.predictions import Predictions
from grasp.runs.retrained import Environment, Utilities
from grasp.settings import BuildSettings, Settings
from grasp.targets.units import UnitSet, UnitTokens

if TYPE_CHECKING:
    from grasp.models.causal_lm import ReferenceModel
    from grasp.models.tokenizer import HfTokenizer
Scores = Floats
# What a method may need beside the artifact's own tables; each is checked before work begins.
Looks = Literal["tokens", "model", "checkpoints", "environment"]


@dataclass(frozen=True, slots=True)
class Retrained:
    """An environment seen from the artifact: targets have the artifact's names, those not in common are left out."""

    environment: Environment
    utilities: Utilities
    subsets: tuple[SubsetBlock, ...]

    @classmethod
    def from_joined(cls, joined: Joined, utilities: Utilities) -> "Retrained":
        """Of utilities whose targets have the environment's names."""
        renamed = replace(utilities, targets=joined.own_names(utilities.targets))
        return cls(joined.environment, renamed, joined.blocks)


@dataclass(frozen=True, eq=False)
class MethodInputs:
    """One artifact, opened for methods.

    Args:
        block_rows: rows of one block; none: those of a shard.
        batch_tokens: tokens of one forward pass, padding included; none: as the build had them.
        checkpoint_places: directories of checkpoints given by the user; none: beside the artifact's model.
        retrained: what is known of the environment, for methods that need one.
    """

    artifact: ArtifactReader
    block_rows: int | None = None
    batch_tokens: int | None = None
    checkpoint_places: tuple[Path, ...] = ()
    retrained: Retrained | None = None
    progress: Progress = Silent()  # noqa: RUF009 - it has no state

    # ------------------------------------------------------------------------------------------- rows

    @property
    def n_rows(self) -> int:
        return self.artifact.n_rows

    def blocks(self, start: int = 0) -> Iterator[tuple[int, int]]:
        """(first row, row after the last) of every block from row `start` on."""
        size = self.block_rows or self.artifact.grid.shard_rows
        while start < self.n_rows:
            stop = min(self.n_rows, start - start % size + size)
            yield start, stop
            start = stop

    def rows(self, start: int, stop: int) -> RowShard:
        """Token ids and labels of rows [start, stop); `.start` is `start`.

        Raises:
            ArtifactError: the artifact did not keep its tokens, or they are not its own.
        """
        return replace(self.store.rows(np.arange(start, stop)), start=start)

    def rows_at(self, row_index: I64) -> RowShard:
        """Rows by index, in the order given; only the shards they lie in are read. Raises as `rows`."""
        return self.store.rows(row_index)

    def texts(self, start: int, stop: int) -> list[str]:
        """Text of rows [start, stop), decoded from their tokens: what the model read, cut where the row was cut."""
        rows = self.rows(start, stop)
        return self.tokenizer.decode([rows.ids(i).tolist() for i in range(len(rows))])

    def column(self, name: str) -> F64:
        """A numeric column of the row table, (N,): `loss` (nats a token) or `n_tokens`."""
        return np.concatenate(
            [np.asarray(batch.column(name), dtype=np.float64) for batch in self.artifact.row_batches([name])]
        )

    @cached_property
    def store(self) -> RowStore:
        """All rows, as training reads them.

        Raises:
            ArtifactError: rows are images; the artifact did not keep its tokens, or they are not its own.
        """
        if self.origin.has_images:
            raise ArtifactError(
                f"{self.artifact.where}: rows are images, and the method reads tokens; its scores can be handed to "
                "`grasp evaluate --predictions`"
            )
        rows = self.origin.rows
        assert isinstance(rows, RowStore)
        return rows

    # ------------------------------------------------------------------------------------------- units

    @property
    def units(self) -> UnitSet:
        """All units of the artifact, in the order of its columns."""
        return self.origin.units

    @property
    def n_units(self) -> int:
        return len(self.units.units)

    @property
    def unit_tokens(self) -> list[UnitTokens]:
        """Tokens of every unit; the labels that carry loss are `input_ids[first:]`."""
        return self.origin.unit_tokens

    # ------------------------------------------------------------------------------------------- model

    @cached_property
    def origin(self) -> BuildSource:
        """What the artifact was built from."""
        return BuildSource(self.artifact)

    @property
    def settings(self) -> BuildSettings:
        """Settings of the build; dtype as it was resolved then, so that the same weights are loaded anywhere."""
        return self.origin.settings

    @property
    def tokenizer(self) -> "HfTokenizer":
        """The reference model's tokenizer; the model's weights are not read for it."""
        return self.origin.tokenizer

    @cached_property
    def model(self) -> "ReferenceModel":
        """The reference model, in the dtype and on the device of the build's settings; frozen, in eval mode.

        Raises:
            ModelError: it cannot be loaded.
            ArtifactError: it is not the one that the artifact was built with.
        """
        from grasp.models.causal_lm import ReferenceModel  # noqa: PLC0415 - brings torch

        model = self.origin.model
        assert isinstance(model, ReferenceModel)
        if self.batch_tokens is not None:
            model.batch_tokens = self.batch_tokens
        return model

    # ------------------------------------------------------------------------------------- environment

    @property
    def environment(self) -> Retrained:
        """The environment, for methods that look at one.

        Raises:
            SettingsError: none was given.
        """
        if self.retrained is None:
            raise SettingsError("this method is fitted on retrained subsets; name their directory (--runs)")
        return self.retrained


# ----------------------------------------------------------------------------------------------------- what a method is


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
    def from_array(cls, scores: ArrayLike, account: Account = Account()) -> "MethodScores":
        """Scores that are in memory: (N, E), (N, 1), or (N,) for the same score for every unit."""
        array = np.asarray(scores, dtype=np.float64)
        array = array[:, None] if array.ndim == 1 else array
        return cls(((0, array),), array.shape, account)

    def __iter__(self) -> Iterator[tuple[int, Scores]]:
        return iter(self.blocks)


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

    def check(self, material: MethodInputs) -> None:
        """See that what it looks at is there, before any work begins.

        Raises:
            GraspError: the artifact keeps no tokens, or no environment was named.
        """
        if "environment" in self.looks_at and material.retrained is None:
            raise SettingsError(f"method {self.name}: is made from retrained subsets; name their directory (--runs)")
        if "tokens" in self.looks_at:
            _ = material.store


class RowMethod(Method[S]):
    """Scores rows."""

    weighting: ClassVar[Literal["mean", "count"]] = "mean"  # over a subset's rows, unless the user says otherwise

    @abstractmethod
    def scores(self, material: MethodInputs, cache: Path) -> MethodScores:
        """Scores of every row for every unit, in the order of `material.units`.

        Args:
            cache: a directory, which may not be there yet, for what takes long and can be used again.
        """


class SubsetMethod(Method[S]):
    """Predicts subsets."""

    @abstractmethod
    def predict(self, material: MethodInputs, subsets: Sequence[SubsetBlock]) -> tuple[Predictions, Account]:
        """Utilities of every subset and unit, with targets by the artifact's names; higher is better."""
