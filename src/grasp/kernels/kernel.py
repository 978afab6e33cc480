"""What a kernel is: an object that learns of a sample of the corpus, folds it into the units, and scores rows.

A build makes its kernels by name and calls them in this order, and knows none of them:

    for batch in a sample of the rows:  kernel.observe(batch)
    kernel.prepare(units)
    for batch in the rows:              kernel.score(batch)

The kernel called NAME is the class `KERNEL` of the module `grasp.kernels.NAME`: who adds one adds a file.
Shape letters: B rows of a batch, P positions, E units, C columns of a kernel, H hidden width, V vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import grasp.kernels
from grasp.arrays import F64, I64
from grasp.artifact.writer import ArraySpec
from grasp.errors import SettingsError
from grasp.kernels.whitening import HiddenMoments, Moments
from grasp.models.head import OutputHead
from grasp.models.residuals import PooledFeatures, SparseResidual, hidden_gradient, pool
from grasp.settings import FeatureSettings

if TYPE_CHECKING:
    from grasp.kernels.gradient import SampledGradients

Needs = Literal["forward", "backward"]
GRADIENTS = "inner product of preconditioned gradients; unitless"
SIGN = "positive: training on the row should lower the unit's loss"
ROWS_AT_ONCE = 64  # units that are scored together with themselves
TYPICAL_ROW_TOKENS = 256.0  # of a row that counts with all of its loss, where a unit counts with the mean of its own


@dataclass(frozen=True)
class Batch:
    """What the model gave for some rows, or for all units, at the positions with loss: all that kernels read.

    Attributes:
        hidden_PH: hidden states that the output layer reads.
        residual: mistakes there.
        row_P: row of each position, in [0, n_rows); of rows in order.
        input_P: token at each position; its label is the next one.
        loss_B: mean loss of each row, nats a token.
        head: the output layer, of `vocab_size` outputs; None: it is not at hand, so `delta_PH` cannot be had.
        tail: the positions that a summary averages; None: all of these.
        gradient_BK: the coordinates taken of the gradient of each row's mean loss; None: there was no backward pass.
        sampled: how they were taken.
    """

    hidden_PH: Tensor
    residual: SparseResidual
    row_P: Tensor
    input_P: Tensor
    n_rows: int
    loss_B: Tensor
    head: OutputHead | None
    vocab_size: int
    tail: "Batch | None" = None
    gradient_BK: Tensor | None = None
    sampled: "SampledGradients | None" = None

    @cached_property
    def delta_PH(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Gradient of each position's loss by its hidden state, (P, H)."""
        assert self.head is not None
        return hidden_gradient(self.head, self.residual)

    @cached_property
    def positions_B(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Positions of each row, at least 1."""
        return torch.bincount(self.row_P, minlength=self.n_rows).clamp(min=1)

    @cached_property
    def summary(self) -> PooledFeatures:
        """Hidden states and mistakes of each row, averaged over the positions of `tail`."""
        at = self.tail or self
        return pool(at.hidden_PH, at.residual, at.row_P, at.n_rows, self.vocab_size)

    def at_positions(self, chosen_P: Tensor, row_P: Tensor, n_rows: int) -> Self:
        """Return some of the positions, as if they were of other rows; without summaries and gradients."""
        return replace(
            self,
            hidden_PH=self.hidden_PH[chosen_P],
            residual=self.residual.at(chosen_P),
            row_P=row_P,
            input_P=self.input_P[chosen_P],
            n_rows=n_rows,
            tail=None,
            gradient_BK=None,
        )

    def to(self, device: torch.device | str, *, copy: bool = False) -> Self:
        """Return the same on another device; the coordinates of gradients as a copy, if one is asked for."""
        at, gradient_BK = self.residual, self.gradient_BK
        rest_P = None if at.rest_P is None else at.rest_P.to(device)
        return replace(
            self,
            hidden_PH=self.hidden_PH.to(device),
            residual=SparseResidual(at.index_PK.to(device), at.value_PK.to(device), at.loss_P.to(device), rest_P),
            row_P=self.row_P.to(device),
            input_P=self.input_P.to(device),
            loss_B=self.loss_B.to(device),
            tail=None if self.tail is None else self.tail.to(device),
            gradient_BK=gradient_BK.to(device, copy=True) if copy and gradient_BK is not None else gradient_BK,
        )

    def only(self, chosen_B: NDArray[np.int64]) -> Self:
        """Return some of the rows, numbered anew in the order of `chosen_B`; positions stay in their order."""
        place_B = torch.full((self.n_rows,), -1, dtype=torch.int64)
        place_B[torch.from_numpy(chosen_B)] = torch.arange(len(chosen_B))
        place_P = place_B.to(self.row_P.device)[self.row_P]
        among_P = torch.nonzero(place_P >= 0)[:, 0]
        return replace(
            self.at_positions(among_P, place_P[among_P], len(chosen_B)),
            loss_B=self.loss_B[torch.from_numpy(chosen_B).to(self.loss_B.device)],
            tail=None if self.tail is None else self.tail.only(chosen_B),
        )

    def rows(self, start: int, stop: int) -> Self:
        """Return the rows from `start` up to `stop`, positions in order of row."""
        among_P = torch.nonzero((self.row_P >= start) & (self.row_P < stop))[:, 0]
        row_P, order_P = torch.sort(self.row_P[among_P] - start, stable=True)
        return replace(
            self.at_positions(among_P[order_P], row_P, stop - start),
            loss_B=self.loss_B[start:stop],
            tail=None if self.tail is None else self.tail.rows(start, stop),
            gradient_BK=None if self.gradient_BK is None else self.gradient_BK[start:stop],
        )


M = TypeVar("M", bound=Moments)


class ModelSizes(Protocol):
    """What a kernel knows of the model: the rest is in the batches."""

    hidden_size: int
    vocab_size: int
    device: torch.device


class CorpusMoments:
    """Moments of the corpus, by kind: kernels that need the same ones share them."""

    def __init__(self, model: ModelSizes, states_every: int = 1) -> None:
        self.size = model.hidden_size, model.vocab_size
        self.states_every = states_every
        self.by_kind: dict[type[Moments], Moments] = {}
        self._losses: list[float] = []  # sums over some of the positions
        self.n_positions = 0
        self._loss = math.nan

    def observe_loss(self, batch: Batch) -> None:
        """Take the losses of a batch of the sample."""
        self._losses.append(float(batch.residual.loss_P.double().sum()))
        self.n_positions += len(batch.row_P)

    @property
    def loss(self) -> float:
        """Return the mean loss over the sample, nats a token; NaN: an older artifact does not know it."""
        return math.fsum(self._losses) / self.n_positions if self.n_positions else self._loss

    def merge(self, other: "CorpusMoments") -> None:
        """Add what another part of the sample has; the order of merges decides the last digits."""
        for kind, moments in other.by_kind.items():
            self.by_kind[kind].merge(moments)
        self._losses += other._losses
        self.n_positions += other.n_positions

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return all of them as named arrays, as an artifact keeps them."""
        arrays = {name: array for moments in self.by_kind.values() for name, array in moments.arrays().items()}
        return arrays | {"loss": np.array([self.loss])}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Take the numbers of `arrays` in the place of what was observed."""
        for moments in self.by_kind.values():
            moments.load(arrays)
        self._loss = float(arrays["loss"][0]) if "loss" in arrays else math.nan


class Kernel(ABC):
    """One array of an artifact: a number for every row and unit, or a sketch of every row.

    Args:
        model: its sizes and device.
        corpus: where its moments are, which it may share.
    """

    name: ClassVar[str]
    needs: ClassVar[Needs] = "forward"
    kinds: ClassVar[tuple[type[Moments], ...]] = (HiddenMoments,)  # moments that it reads
    unit: ClassVar[str] = GRADIENTS

    def __init__(self, model: ModelSizes, settings: FeatureSettings, corpus: CorpusMoments) -> None:
        self.model, self.settings, self.corpus = model, settings, corpus
        # of shared moments the first kernel that names them is the one that observes
        self._observed = [kind(corpus) for kind in self.kinds_of(settings) if kind not in corpus.by_kind]
        corpus.by_kind |= {type(moments): moments for moments in self._observed}

    @classmethod
    def kinds_of(cls, settings: FeatureSettings) -> tuple[type[Moments], ...]:
        """Return the moments that it reads, if settings decide."""
        return cls.kinds

    @property
    def array(self) -> str:
        """Return the name of its array."""
        return f"relevance_{self.name}"

    def moments(self, kind: type[M]) -> M:
        """Return moments of the corpus, one of `kinds`."""
        moments = self.corpus.by_kind[kind]
        assert isinstance(moments, kind)
        return moments

    def observe(self, batch: Batch) -> None:
        """Take what it needs to know of the corpus from a batch of the sample."""
        for moments in self._observed:
            moments.observe(batch)

    @abstractmethod
    def prepare(self, units: Batch) -> None:
        """Fold the moments into the units; the sample was observed, or loaded."""

    @abstractmethod
    def score(self, batch: Batch) -> Tensor:
        """Return its numbers of the rows of a batch, (B, C), float32."""

    def self_relevance(self, units: Batch) -> F64:
        """Return the relevance of each unit to itself, (E,), which says how large its numbers are."""
        blocks = []
        for start in range(0, units.n_rows, ROWS_AT_ONCE):
            stop = min(start + ROWS_AT_ONCE, units.n_rows)
            blocks.append(self.score(units.rows(start, stop))[:, start:stop].diagonal().double().cpu().numpy())
        return np.concatenate(blocks)

    def unit_means(self, columns_E: I64) -> dict[str, NDArray[Any]]:
        """Return means over some units that `explain` needs in the place of their backward passes; mostly none."""
        return {}

    def scale(self, units: Batch) -> F64:
        """Return what the columns are divided by in the artifact, (E,), powers of two."""
        return relevance_scale(self.self_relevance(units))

    def spec(self, units: Batch) -> ArraySpec:
        """Return how its array is stored; it was prepared."""
        return ArraySpec(units.n_rows, self.unit, SIGN, scale_E=self.scale(units))


def relevance_scale(self_relevance_E: F64) -> F64:
    """Return a power of two per unit that brings its relevance well inside float16, (E,).

    From each unit's relevance to itself: for inner products |a_ie|^2 <= a_ii a_ee, and the typical a_ii is taken
    to be that of the units. 2^-6 leaves room for rows a thousand times as strong.
    """
    self_relevance_E = np.abs(self_relevance_E)
    positive = self_relevance_E > 0
    typical = float(np.median(self_relevance_E[positive])) if positive.any() else 1.0
    size_E = np.sqrt(np.where(positive, self_relevance_E, typical) * typical)
    return np.asarray(np.exp2(np.clip(np.round(np.log2(size_E)) - 6.0, -100, 100)), dtype=np.float64)


def kernel_class(name: str) -> type[Kernel]:
    """Return the kernel of a name.

    Raises:
        SettingsError: there is none; the message lists those that exist.
    """
    kernel = _kernel_in(name)
    if kernel is None:
        names = [module.name for module in iter_modules(grasp.kernels.__path__) if _kernel_in(module.name)]
        raise SettingsError(f"features.kernels: got {name!r}, expected names out of {', '.join(names)}")
    return kernel


def _kernel_in(name: str) -> type[Kernel] | None:
    """Return the kernel that the module of a name defines; None: there is no such module, or it defines none."""
    if not name.isidentifier():
        return None
    try:
        module = import_module(f"grasp.kernels.{name}")
    except ModuleNotFoundError:
        return None
    kernel: type[Kernel] | None = getattr(module, "KERNEL", None)
    return kernel


def make_kernels(
    names: Iterable[str], model: ModelSizes, settings: FeatureSettings, corpus: CorpusMoments
) -> list[Kernel]:
    """Return kernels by name, which share the moments of `corpus`."""
    return [kernel_class(name)(model, settings, corpus) for name in names]


def counts_rows(settings: FeatureSettings) -> bool:
    """Return whether moments of a kernel are over rows: then the sample needs many, however long they are."""
    return any(kind.of_rows for name in settings.kernels for kind in kernel_class(name).kinds_of(settings))


def needs_backward(names: Sequence[str]) -> bool:
    """Return whether a kernel among these takes a backward pass."""
    return any(kernel_class(name).needs == "backward" for name in names)
