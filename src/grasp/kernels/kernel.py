"""The interface of kernels: observe a sample of the corpus, fold its moments into the units, and score rows.

A build creates kernels by name and calls each of them in this order:

    for batch in a sample of the rows:  corpus.observe(batch), which has the moments of all kernels
    kernel.prepare(units)
    for batch in the rows:              kernel.score(batch)

The *relevance* of a row to a unit predicts how much training on the row lowers the loss of the unit. Kernels are entry
points of the group `grasp.kernels`, see `grasp.entry_points`. Labels `eq:` in "Source" are those of the paper;
docs/paper_map.md lists them.

Start with `Kernel`, and `grasp.models.batch.Batch`.
Shape letters: B rows of a batch, P positions, E units, C columns of a kernel, H hidden width, V vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grasp.arrays import F64, I64
from grasp.artifact.writer import ArraySpec
from grasp.entry_points import load
from grasp.kernels.whitening import HiddenMoments, Moments
from grasp.models.batch import Batch
from grasp.settings import FeatureSettings

Needs = Literal["forward", "backward"]
GRADIENTS = "inner product of preconditioned gradients; unitless"
SIGN = "positive: training on the row should lower the unit's loss"
UNITS_PER_BLOCK = 64  # units that `self_relevance` scores at once
TYPICAL_ROW_TOKENS = 256.0  # assumed by kernels that sum over the tokens of a row, but average over those of a unit

M = TypeVar("M", bound=Moments)


class ModelSizes(Protocol):
    """The sizes of the model that a kernel needs; all else is in the batches."""

    hidden_size: int
    vocab_size: int
    device: torch.device


class CorpusMoments:
    """Moments of the corpus, estimated on a sample of its rows: one object per class, shared between kernels."""

    def __init__(self, vocab_size: int, states_every: int = 1) -> None:
        self.vocab_size = vocab_size
        self.states_every = states_every
        self.by_type: dict[type[Moments], Moments] = {}
        self._losses: list[float] = []  # sums over the positions of a batch
        self.n_positions = 0
        self._loss = math.nan

    def observe(self, batch: Batch) -> None:
        """Add a batch of the sample to all moments."""
        for moments in self.by_type.values():
            moments.observe(batch)
        self._losses.append(float(batch.residual.loss_P.double().sum()))
        self.n_positions += len(batch.row_P)

    @property
    def loss(self) -> float:
        """Return the mean loss over the sample, nats per token."""
        return math.fsum(self._losses) / self.n_positions if self.n_positions else self._loss

    def merge(self, other: "CorpusMoments") -> None:
        """Merge another part of the sample; the order of merges determines the last digits."""
        for moment_type, moments in other.by_type.items():
            self.by_type[moment_type].merge(moments)
        self._losses += other._losses
        self.n_positions += other.n_positions

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return all moments as named arrays, as an artifact stores them."""
        arrays = {name: array for moments in self.by_type.values() for name, array in moments.arrays().items()}
        return arrays | {"loss": np.array([self.loss])}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Load the moments from `arrays`."""
        for moments in self.by_type.values():
            moments.load(arrays)
        self._loss = float(arrays["loss"][0])


class Kernel(ABC):
    """A kernel, which computes one array of an artifact: relevance of rows to units, or a sketch of rows.

    Args:
        model: sizes and device of the model.
        settings: settings of features, such as ridge and exponent of the preconditioners.
        corpus: moments, shared with other kernels.

    Attributes:
        name: name in settings, and of its entry point.
        prefix: begin of the name of the array, which `name` follows.
        array: name of the array.
        needs: passes of the model that it needs.
        moment_types: classes of moments that it reads.
        unit: unit of the array, for the manifest.
        is_linear: whether relevance is linear in the gradients of row and unit, so that it is a sum over positions;
            otherwise it is a function of their averages over positions (`Batch.summary`).
    """

    name: ClassVar[str]
    prefix: ClassVar[str] = "relevance_"
    needs: ClassVar[Needs] = "forward"
    moment_types: ClassVar[tuple[type[Moments], ...]] = (HiddenMoments,)
    unit: ClassVar[str] = GRADIENTS
    is_linear: ClassVar[bool] = True

    def __init__(self, model: ModelSizes, settings: FeatureSettings, corpus: CorpusMoments) -> None:
        self.model, self.settings, self.corpus = model, settings, corpus
        self.array = self.prefix + self.name
        for moment_type in self.moment_types_of(settings):  # kernels share them
            if moment_type not in corpus.by_type:
                corpus.by_type[moment_type] = moment_type(corpus)

    @classmethod
    def moment_types_of(cls, settings: FeatureSettings) -> tuple[type[Moments], ...]:
        """Return the classes of moments that it reads; override if they depend on settings."""
        return cls.moment_types

    def moments(self, moment_type: type[M]) -> M:
        """Return the moments of a class in `moment_types`."""
        moments = self.corpus.by_type[moment_type]
        assert isinstance(moments, moment_type)
        return moments

    @abstractmethod
    def prepare(self, units: Batch) -> None:
        """Compute the units' side of the kernel from their features and the moments, which are observed or loaded."""

    @abstractmethod
    def score(self, batch: Batch) -> Tensor:
        """Return the relevance of the rows of a batch to each unit, or their sketch, (B, C), float32."""

    def self_relevance(self, units: Batch) -> F64:
        """Return the relevance of each unit to itself, (E,), by which columns are scaled."""
        blocks = []
        for start in range(0, units.n_rows, UNITS_PER_BLOCK):
            stop = min(start + UNITS_PER_BLOCK, units.n_rows)
            blocks.append(self.score(units.rows(start, stop))[:, start:stop].diagonal().double().cpu().numpy())
        return np.concatenate(blocks)

    def unit_means(self, columns_E: I64) -> dict[str, NDArray[Any]]:
        """Return means over some units that `explain` uses instead of backward passes; none by default."""
        return {}

    def scale(self, units: Batch) -> F64:
        """Return the divisors of the stored columns, (E,), powers of two; see `relevance_scale`."""
        return relevance_scale(self.self_relevance(units))

    def spec(self, units: Batch) -> ArraySpec:
        """Return how the array is stored; requires `prepare`."""
        return ArraySpec(units.n_rows, self.unit, SIGN, scale_E=self.scale(units))


def relevance_scale(self_relevance_E: F64) -> F64:
    """Return a power of two per unit that scales its relevance into the range of float16, (E,).

    By Cauchy-Schwarz |a_ie|^2 <= a_ii a_ee; a_ii is assumed to be as large as the median a_ee. The factor 2^-6 leaves
    room for rows a thousand times as strong: relevance of typical size is stored near 2^6, float16 ends at 2^16. Powers
    of two are exact.
    """
    self_relevance_E = np.abs(self_relevance_E)
    is_positive_E = self_relevance_E > 0  # a unit whose gradient is 0 is scaled like a typical one
    typical = float(np.median(self_relevance_E[is_positive_E])) if is_positive_E.any() else 1.0
    bound_E = np.sqrt(np.where(is_positive_E, self_relevance_E, typical) * typical)
    return np.asarray(np.exp2(np.clip(np.round(np.log2(bound_E)) - 6.0, -100, 100)), dtype=np.float64)


def kernel_class(name: str) -> type[Kernel]:
    """Return the class of a kernel by name.

    Raises:
        SettingsError: unknown name; the message lists the existing kernels.
    """
    loaded: type[Kernel] = load("grasp.kernels", name, Kernel, "features.kernels")
    return loaded


def make_kernels(
    names: Iterable[str], model: ModelSizes, settings: FeatureSettings, corpus: CorpusMoments
) -> list[Kernel]:
    """Create kernels by name, which share the moments of `corpus`."""
    return [kernel_class(name)(model, settings, corpus) for name in names]


def counts_rows(settings: FeatureSettings) -> bool:
    """Return whether a kernel needs moments over rows, i.e. a sample of many rows, however long they are."""
    return any(
        moment_type.of_rows for name in settings.kernels for moment_type in kernel_class(name).moment_types_of(settings)
    )


def needs_backward(names: Sequence[str]) -> bool:
    """Return whether one of the kernels needs a backward pass."""
    return any(kernel_class(name).needs == "backward" for name in names)
