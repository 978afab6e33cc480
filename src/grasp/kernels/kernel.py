"""The interface of kernels: observe a sample of the corpus, fold its moments into the units, and score rows.

A build creates kernels by name and calls each of them in this order:

    for batch in a sample of the rows:  corpus.observe(batch), which has the moments of all kernels
    kernel.prepare(units)
    for batch in the rows:              kernel.score(batch)

The *relevance* of a row to a unit predicts how much training on the row lowers the loss of the unit. Kernels are entry
points of the group `grasp.kernels`, see `grasp.entry_points`. Labels `eq:` in "Source" are those of the paper;
docs/paper_map.md lists them.

Start with `Kernel` and `Batch`.
Shape letters: B rows of a batch, P positions, E units, C columns of a kernel, H hidden width, V vocabulary.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grasp.arrays import F64, I64
from grasp.artifact.writer import ArraySpec
from grasp.entry_points import load
from grasp.kernels.whitening import HiddenMoments, Moments
from grasp.models.head import OutputHead
from grasp.models.residuals import PooledFeatures, SparseResidual, hidden_gradient, pool
from grasp.settings import FeatureSettings

if TYPE_CHECKING:
    from grasp.kernels.coordinates import SampledGradients
    from grasp.kernels.gradient import Curvature

Needs = Literal["forward", "backward"]
GRADIENTS = "inner product of preconditioned gradients; unitless"
SIGN = "positive: training on the row should lower the unit's loss"
UNITS_PER_BLOCK = 64  # units that `self_relevance` scores at once
TYPICAL_ROW_TOKENS = 256.0  # assumed by kernels that sum over the tokens of a row, but average over those of a unit


# Preconditioned coordinates of units, (E, K), and the relevance of each to itself, (E,).
UnitGradients = Callable[["Curvature"], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Batch:
    """Features of some rows, or of all units, at the positions with loss: the only input of kernels.

    Attributes:
        hidden_PH: inputs of the output layer.
        residual: sparse residuals (probabilities minus one-hot label).
        row_P: row of each position, in [0, n_rows), ascending for rows.
        input_P: token at each position; its label is the next token.
        loss_B: mean loss of each row, nats per token.
        head: the output layer, with `vocab_size` outputs; None if it is not loaded, so that `delta_PH` is unavailable.
        gradient_BK: sampled coordinates of the gradient of each row's mean loss; of units those that are preconditioned
            already; None without a backward pass.
        weight_P: signed weight of each position, which residuals contain already; None: 1. See `combined`.
        sampled: layers and coordinates of `gradient_BK`.
        unit_gradients: of units, the function that computes their gradients in a geometry.
    """

    hidden_PH: Tensor
    residual: SparseResidual
    row_P: Tensor
    input_P: Tensor
    n_rows: int
    loss_B: Tensor
    head: OutputHead | None
    vocab_size: int
    gradient_BK: Tensor | None = None
    sampled: "SampledGradients | None" = None
    unit_gradients: "UnitGradients | None" = None
    weight_P: Tensor | None = None

    @cached_property
    def delta_PH(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Return the gradient of each position's loss with respect to its hidden state, (P, H)."""
        assert self.head is not None
        return hidden_gradient(self.head, self.residual)

    @cached_property
    def positions_B(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Return the number of positions of each row, at least 1, as a divisor."""
        return torch.bincount(self.row_P, minlength=self.n_rows).clamp(min=1)

    @cached_property
    def summary(self) -> PooledFeatures:
        """Return hidden states and residuals of each row, averaged over its positions."""
        return pool(self.hidden_PH, self.residual, self.row_P, self.n_rows, self.vocab_size)

    def at_positions(self, index_P: Tensor, row_P: Tensor, n_rows: int) -> Self:
        """Return the positions `index_P` with new row numbers, without gradients.

        Args:
            index_P: indices of positions.
            row_P: row of each of them in the new batch.
            n_rows: number of rows of the new batch.
        """
        return replace(
            self,
            hidden_PH=self.hidden_PH[index_P],
            residual=self.residual.select(index_P),
            row_P=row_P,
            input_P=self.input_P[index_P],
            n_rows=n_rows,
            gradient_BK=None,
            weight_P=None if self.weight_P is None else self.weight_P[index_P],
        )

    def combined(self, sum_B: I64, weight_B: F64, loss_S: Tensor) -> Self:
        """Return weighted sums of rows as the rows of a batch, without `gradient_BK`.

        A kernel averages over the positions of a row, and is linear in their residuals. If row b is a part of the sum
        s, the mean over the positions of s would count its residuals with 1 / |P_s| instead of w_b / |P_b|. They are
        therefore multiplied by w_b |P_s| / |P_b|.

        Args:
            sum_B: the sum that each row is a part of.
            weight_B: weight of the gradient of its mean loss.
            loss_S: the values that are reported as losses of the sums.
        """
        sum_of_B = torch.from_numpy(sum_B).to(self.row_P.device)
        row_P, n_sums = sum_of_B[self.row_P], len(loss_S)
        positions_S = torch.bincount(row_P, minlength=n_sums)
        weight_of_B = torch.from_numpy(weight_B).to(self.row_P.device) * positions_S[sum_of_B] / self.positions_B
        residual = self.residual
        weight_P = weight_of_B[self.row_P].to(residual.value_PK.dtype)
        return replace(
            self,
            residual=SparseResidual(
                residual.index_PK,
                residual.value_PK * weight_P[:, None],
                residual.loss_P,
                None if residual.truncated_P is None else residual.truncated_P * weight_P,
            ),
            row_P=row_P,
            n_rows=n_sums,
            loss_B=loss_S,
            gradient_BK=None,
            weight_P=weight_P,
        )

    def to(self, device: torch.device | str) -> Self:
        """Move to a device, all but `gradient_BK`, which kernels move by chunks."""
        residual = self.residual
        truncated_P = None if residual.truncated_P is None else residual.truncated_P.to(device)
        return replace(
            self,
            hidden_PH=self.hidden_PH.to(device),
            residual=SparseResidual(
                residual.index_PK.to(device), residual.value_PK.to(device), residual.loss_P.to(device), truncated_P
            ),
            row_P=self.row_P.to(device),
            input_P=self.input_P.to(device),
            loss_B=self.loss_B.to(device),
            weight_P=None if self.weight_P is None else self.weight_P.to(device),
        )

    def select_rows(self, index_B: NDArray[np.int64]) -> Self:
        """Return the rows `index_B`, renumbered in this order; the order of positions is kept."""
        new_row_B = torch.full((self.n_rows,), -1, dtype=torch.int64)  # -1: not selected
        new_row_B[torch.from_numpy(index_B)] = torch.arange(len(index_B))
        new_row_P = new_row_B.to(self.row_P.device)[self.row_P]
        selected_P = torch.nonzero(new_row_P >= 0)[:, 0]
        return replace(
            self.at_positions(selected_P, new_row_P[selected_P], len(index_B)),
            loss_B=self.loss_B[torch.from_numpy(index_B).to(self.loss_B.device)],
        )

    def rows(self, start: int, stop: int) -> Self:
        """Return the rows from `start` up to `stop`, with positions sorted by row."""
        selected_P = torch.nonzero((self.row_P >= start) & (self.row_P < stop))[:, 0]
        row_P, order_P = torch.sort(self.row_P[selected_P] - start, stable=True)
        return replace(
            self.at_positions(selected_P[order_P], row_P, stop - start),
            loss_B=self.loss_B[start:stop],
            gradient_BK=None if self.gradient_BK is None else self.gradient_BK[start:stop],
        )


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
