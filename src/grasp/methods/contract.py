"""Interface of an attribution method: settings, required inputs, and scores of rows or predictions of subsets.

To add a method, subclass `RowMethod` or `SubsetMethod`. A `RowMethod` scores rows: (N, E) for the units of the artifact
(scored elements of its targets, such as questions), or (N, 1) if the score does not depend on the unit. Positive means
that training on the row should lower the unit's loss. A `SubsetMethod` predicts subsets of the rows directly, (B, E).
Besides the numbers both return an `Account`: cost, coverage and notes. Packages register methods under the entry point
group `grasp.methods`; see docs/baselines.md.

`MethodInputs` gives a method access to the artifact's rows and units, its reference model, checkpoints and retrained
runs. Data is loaded lazily, per block if it is as long as the corpus, and verified against the fingerprints of
tokens, tokenizer, model and units that the artifact was built from.

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
from grasp.corpus.row_store import RowStore, TokenRows
from grasp.errors import SettingsError
from grasp.models.build_source import BuildSource
from grasp.predict.weights import SubsetBlock
from grasp.progress import Progress
from grasp.runs.alignment import Alignment
from grasp.runs.predictions import Predictions
from grasp.runs.training_runs import TrainingRuns, Utilities
from grasp.settings import BuildSettings, Settings
from grasp.targets.units import UnitSet, UnitTokens

if TYPE_CHECKING:
    from grasp.models.causal_lm import ReferenceModel
    from grasp.models.tokenizer import HfTokenizer

Scores = Floats  # of a block: (n, E), or (n, 1)
# Inputs that a method may require besides the artifact's tables; each is checked before the method runs.
Requirement = Literal["tokens", "model", "checkpoints", "runs"]


@dataclass(frozen=True, slots=True)
class AlignedRuns:
    """Retrained runs in terms of the artifact: its rows, and its names of the targets; other targets are dropped.

    Attributes:
        runs: the runs.
        utilities: utility of each run and unit.
        subsets: blocks of the subsets that were trained on, as weights over the artifact's rows.
    """

    runs: TrainingRuns
    utilities: Utilities
    subsets: tuple[SubsetBlock, ...]

    @classmethod
    def from_alignment(cls, alignment: Alignment, utilities: Utilities) -> "AlignedRuns":
        """Rename the targets of `utilities` from the names in the runs to the artifact's names."""
        renamed = replace(utilities, targets=alignment.artifact_targets_of(utilities.targets))
        return cls(alignment.runs, renamed, alignment.blocks)


@dataclass(frozen=True, eq=False)
class MethodInputs:
    """Everything that a method may read: an artifact, its model, checkpoints and retrained runs.

    Args:
        artifact: artifact whose rows are scored.
        block_rows: rows per block. Default: rows per shard.
        batch_tokens: tokens per forward pass, padding included. Default: the setting of the build.
        checkpoint_paths: directories of checkpoints. Default: the directory of the artifact's model.
        runs: retrained runs, for methods that require them.
        progress: receives stages, notes and numbers of rows.
    """

    artifact: ArtifactReader
    block_rows: int | None = None
    batch_tokens: int | None = None
    checkpoint_paths: tuple[Path, ...] = ()
    runs: AlignedRuns | None = None
    progress: Progress = Progress()  # noqa: RUF009 - it has no state

    # ------------------------------------------------------------------------------------------- rows

    @property
    def n_rows(self) -> int:
        return self.artifact.n_rows

    def blocks(self, start: int = 0) -> Iterator[tuple[int, int]]:
        """Yield (first row, row after the last) of each block, from row `start` on."""
        size = self.block_rows or self.artifact.grid.shard_rows
        while start < self.n_rows:
            stop = min(self.n_rows, start - start % size + size)
            yield start, stop
            start = stop

    def rows(self, start: int, stop: int) -> TokenRows:
        """Return token ids and labels of rows [start, stop).

        Raises:
            ArtifactError: the artifact has no tokens, or their fingerprint differs from the recorded one.
        """
        return self.store.rows(np.arange(start, stop))

    def rows_at(self, row_index: I64) -> TokenRows:
        """Return rows by index, in the given order; reads only the shards that contain them. Raises as `rows`."""
        return self.store.rows(row_index)

    def texts(self, start: int, stop: int) -> list[str]:
        """Decode rows [start, stop) to text: what the model read, truncated where the row is."""
        rows = self.rows(start, stop)
        return self.tokenizer.decode([rows.ids(i).tolist() for i in range(len(rows))])

    def column(self, name: str) -> F64:
        """Return a numeric column of the row table, (N,): `loss` (nats per token) or `n_tokens`."""
        return np.concatenate(
            [np.asarray(batch.column(name), dtype=np.float64) for batch in self.artifact.row_batches([name])]
        )

    @cached_property
    def store(self) -> RowStore:
        """All rows, as training reads them.

        Raises:
            ArtifactError: rows are no texts; the artifact has no tokens, or their fingerprint differs.
        """
        self.artifact.require_texts("published methods score texts only")
        return self.source.rows

    def refuse_pairs(self) -> None:
        """Refuse preference pairs, for methods that need the loss of a text.

        Raises:
            SettingsError: rows are preference pairs.
        """
        if self.settings.corpus.form == "preference":
            raise SettingsError(
                f"{self.artifact.location}: rows are preference pairs, and the method computes gradients of the loss "
                "of texts; choose another method, or build on the chosen answers"
            )

    # ------------------------------------------------------------------------------------------- units

    @property
    def units(self) -> UnitSet:
        """All units of the artifact, in column order."""
        return self.source.units

    @property
    def n_units(self) -> int:
        return len(self.units.units)

    @property
    def unit_tokens(self) -> list[UnitTokens]:
        """Tokens of each unit; the loss is taken on the labels `input_ids[first:]`."""
        return self.source.unit_tokens

    # ------------------------------------------------------------------------------------------- model

    @cached_property
    def source(self) -> BuildSource:
        """The corpus, units and model that the artifact was built from."""
        return BuildSource(self.artifact)

    @property
    def settings(self) -> BuildSettings:
        """Settings of the build, with the dtype resolved then, so that every machine loads the same weights."""
        return self.source.settings

    @property
    def tokenizer(self) -> "HfTokenizer":
        """The reference model's tokenizer; does not load the model's weights."""
        return self.source.tokenizer

    @cached_property
    def model(self) -> "ReferenceModel":
        """The reference model, in the dtype and on the device of the build's settings; frozen, in eval mode.

        Raises:
            ModelError: the model cannot be loaded.
            ArtifactError: the artifact was built with another model.
        """
        from grasp.models.causal_lm import ReferenceModel  # noqa: PLC0415 - imports torch

        model = self.source.model
        assert isinstance(model, ReferenceModel)
        if self.batch_tokens is not None:
            model.batch_tokens = self.batch_tokens
        return model

    # -------------------------------------------------------------------------------------------- runs

    @property
    def required_runs(self) -> AlignedRuns:
        """The retrained runs of a method that requires them."""
        assert self.runs is not None  # see `Method.check`
        return self.runs


class NoSettings(Settings):
    """Settings of a method that has none."""


S = TypeVar("S", bound=Settings)  # settings of a method


@dataclass(frozen=True, slots=True)
class Seconds:
    """Elapsed time in seconds; `cpu` sums over all threads of this process."""

    wall: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.wall + other.wall, self.cpu + other.cpu)


@dataclass(frozen=True, slots=True)
class Account:
    """What a method reports about its scores: cost, coverage and notes, for tables of results. It is stored with them.

    Attributes:
        features: stored floats per row from which a new unit could be scored without reading the corpus again
            (TRAK: projection width x checkpoints), not including the scores; 0 if the method stores none.
        covers: parameters or text that the scores depend on: names of layers, "all tokens", ...
        notes: remarks needed to interpret the scores, one phrase each.
        counts: number of skipped rows or units, by reason.
    """

    features: int = 0
    covers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class MethodScores:
    """Scores of all rows, with the cost of computing them.

    Attributes:
        blocks: first row and scores of each block, in corpus order; can be iterated more than once.
        shape: (N, E) or (N, 1).
        account: cost, coverage and notes.
        seconds: time of the computation; None if it was not measured.
    """

    blocks: Iterable[tuple[int, Scores]]
    shape: tuple[int, ...]
    account: Account = Account()
    seconds: Seconds | None = None

    @classmethod
    def from_array(cls, scores: ArrayLike, account: Account = Account()) -> "MethodScores":
        """Wrap scores in memory: (N, E), (N, 1), or (N,) if the score is the same for every unit."""
        array = np.asarray(scores, dtype=np.float64)
        array = array[:, None] if array.ndim == 1 else array
        return cls(((0, array),), array.shape, account)

    def __iter__(self) -> Iterator[tuple[int, Scores]]:
        return iter(self.blocks)


class Method(ABC, Generic[S]):
    """Base of row and subset methods. `grasp methods` prints the first line of a subclass's docstring.

    Attributes:
        settings_type: class of the settings.
        requires: inputs that it reads besides the artifact's tables.
        required_modules: optional modules that it imports, each with the extra of grasp-attribution that installs it.
        is_oracle: whether it is fitted to utilities of the runs that it is evaluated on; its results are then a
            ceiling, not a prediction.
    """

    settings_type: ClassVar[type[Settings]] = NoSettings
    requires: ClassVar[frozenset[Requirement]] = frozenset()
    required_modules: ClassVar[Mapping[str, str]] = {}
    is_oracle: ClassVar[bool] = False

    def __init__(self, settings: S, *, name: str = "", seed: int = 0) -> None:
        self.settings = settings
        self.name = name
        self.seed = seed

    def check(self, inputs: MethodInputs) -> None:
        """Check that every required input is available, before the method runs.

        Raises:
            GraspError: the artifact has no tokens, or no runs were passed.
        """
        if "runs" in self.requires and inputs.runs is None:
            raise SettingsError(f"method {self.name}: requires retrained subsets; pass their directory with --runs")
        if "tokens" in self.requires:
            _ = inputs.store  # opens the rows and verifies their fingerprint


class RowMethod(Method[S]):
    """A method that scores rows."""

    @abstractmethod
    def scores(self, inputs: MethodInputs, cache: Path) -> MethodScores:
        """Return the score of each row for each unit, in the order of `inputs.units`.

        Args:
            inputs: rows, units and what else the method requires.
            cache: directory for intermediate results and scores; it may not exist yet.
        """


class SubsetMethod(Method[S]):
    """A method that predicts subsets directly."""

    @abstractmethod
    def predict(self, inputs: MethodInputs, subsets: Sequence[SubsetBlock]) -> tuple[Predictions, Account]:
        """Predict the utility of each subset for each unit, targets by the artifact's names; higher is better."""
