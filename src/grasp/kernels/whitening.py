"""Mergeable first and second moments of one dense and one sparse feature, in float64, and whitening by them.

For the output layer these are hidden states and residuals; for the input embedding they are gradients with respect to
hidden states, and one-hot input tokens. Kernels share moments by class. Start with `Moments` and `Whitener`. Labels
`eq:` in "Source" are those of the paper; docs/paper_map.md lists them.

Shape letters: P positions or rows, H hidden width, V vocabulary, M sampled positions.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F32, F64, I64
from grasp.moments import StreamingMoments
from grasp.settings import FeatureSettings

if TYPE_CHECKING:
    from grasp.kernels.kernel import CorpusMoments
    from grasp.models.batch import Batch

STATES = 8_192  # approximate number of positions whose hidden states are stored, for the kernel `knn`


@dataclass(frozen=True, slots=True)
class SecondMoments:
    """Moments over `count` positions, or rows (of summaries), of the corpus."""

    count: int
    mean_H: F64
    covariance_HH: F64  # population covariance
    gamma_V: F64  # second moment of each sparse coordinate; for one-hot tokens their frequency

    @property
    def second_moment(self) -> F64:
        """Return the uncentred second moment of the dense feature, (H, H)."""
        return self.covariance_HH + np.outer(self.mean_H, self.mean_H)


def whitening_map(covariance_HH: F64, tau: float) -> F64:
    """Return the symmetric inverse square root of Sigma + tau tr(Sigma) / H I, (H, H), float64.

    Source: eq:grasp-hidden-whiten. Deviation: none; the paper leaves the Tikhonov term open.
    A constant hidden state (trace 0) is left unscaled.

    Args:
        covariance_HH: covariance, or second moment of gradients.
        tau: ridge relative to the mean eigenvalue tr(Sigma) / H; without a unit.
    """
    width = len(covariance_HH)
    ridge = tau * float(np.trace(covariance_HH)) / width
    if ridge <= 0.0:
        return np.eye(width)
    # W = Q (Lambda + ridge)^-1/2 Q^T. The symmetric root by eigh, not the triangular one by Cholesky, since it does not
    # depend on the order of the coordinates. Rounding may make eigenvalues of a singular covariance slightly negative;
    # they are clipped, so that the ridge bounds every factor by 1 / sqrt(ridge).
    value_H, vector_HH = np.linalg.eigh(covariance_HH)
    scale_H = 1.0 / np.sqrt(np.maximum(value_H, 0.0) + ridge)
    return np.asarray((vector_HH * scale_H) @ vector_HH.T, dtype=np.float64)


def preconditioner(gamma_V: F64, alpha: float, epsilon: float) -> F64:
    """Return D = (gamma + eps)^-alpha, (V,), with eps relative to the mean gamma of coordinates that occur.

    The mean is over coordinates that occur because most of a vocabulary does not: over all of them it would be near 0,
    and a coordinate that the sample lacks would get a huge weight.

    Source: eq:grasp-components. Deviation: the paper does not say what eps is relative to.
    """
    occurs = gamma_V > 0
    mean = float(gamma_V[occurs].mean()) if occurs.any() else 1.0
    return np.asarray((gamma_V + epsilon * mean) ** -alpha, dtype=np.float64)


@dataclass(frozen=True, slots=True)
class Whitener:
    """The maps that turn raw features into h~ = W (h - mean) and D xi."""

    mean_H: F64
    map_HH: F64
    precondition_V: F64

    @classmethod
    def fit(cls, moments: SecondMoments, *, tau: float, alpha: float, epsilon: float, centred: bool = True) -> Self:
        """Compute the maps; unless `centred` (gradients), W is of the uncentred second moment, and the mean is 0."""
        return cls(
            mean_H=moments.mean_H if centred else np.zeros_like(moments.mean_H),
            map_HH=whitening_map(moments.covariance_HH if centred else moments.second_moment, tau),
            precondition_V=preconditioner(moments.gamma_V, alpha, epsilon),
        )

    @classmethod
    def from_settings(cls, moments: SecondMoments, settings: FeatureSettings, *, centred: bool = True) -> Self:
        """Compute the maps with the parameters of the build's settings."""
        return cls.fit(moments, tau=settings.tau, alpha=settings.alpha, epsilon=settings.epsilon, centred=centred)

    def whiten(self, hidden_NH: NDArray[np.floating]) -> F64:
        """Return h~ = W (h - mean), (N, H), float64. Source: eq:grasp-hidden-whiten."""
        return np.asarray((hidden_NH - self.mean_H) @ self.map_HH, dtype=np.float64)


class Moments(ABC):
    """Statistics of the corpus that kernels need, estimated on a sample of rows; parts of the sample are merged."""

    of_rows: ClassVar[bool] = False  # moments over rows, not over positions

    @abstractmethod
    def __init__(self, corpus: "CorpusMoments") -> None: ...

    @abstractmethod
    def observe(self, batch: "Batch") -> None:
        """Add the rows of a batch."""

    @abstractmethod
    def merge(self, other: Any) -> None:
        """Add the moments of another part of the sample."""

    @abstractmethod
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the moments as named arrays, as an artifact stores them; requires at least one row."""

    @abstractmethod
    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Load the moments from named arrays."""


class FeatureMoments(Moments):
    """Second moments of one dense and one sparse feature; see its subclasses."""

    prefix: str
    _loaded: SecondMoments | None = None

    def __init__(self, corpus: "CorpusMoments") -> None:
        self._dense = StreamingMoments(products=True)
        self._square_V: F64 = np.zeros(corpus.vocab_size)

    def add(self, hidden_PH: NDArray[np.floating], index: NDArray[np.integer], value: NDArray[np.floating]) -> None:
        """Add P samples: hidden states (P, H) and the coordinates and values of all their sparse residuals.

        A coordinate may occur once per sample, as SparseResidual and pooled residuals guarantee.
        """
        self._dense.add(hidden_PH)
        square = np.asarray(value, dtype=np.float64).ravel() ** 2
        self._square_V += np.bincount(index.ravel(), weights=square, minlength=len(self._square_V))

    def merge(self, other: Self) -> None:
        self._dense.merge(other._dense)
        self._square_V += other._square_V

    @property
    def value(self) -> SecondMoments:
        """Return the moments that were observed, of at least one sample, or loaded."""
        if self._loaded is not None:
            return self._loaded
        count = self._dense.n_rows
        assert count > 0
        return SecondMoments(count, self._dense.mean_C, self._dense.scatter / count, self._square_V / count)

    def arrays(self) -> dict[str, NDArray[Any]]:
        moments = self.value
        return {
            f"{self.prefix}.count": np.array([moments.count], dtype=np.int64),
            f"{self.prefix}.mean": moments.mean_H,
            f"{self.prefix}.covariance": moments.covariance_HH,
            f"{self.prefix}.gamma": moments.gamma_V,
        }

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._loaded = second_moments(arrays, self.prefix)


def second_moments(arrays: Mapping[str, NDArray[Any]], prefix: str) -> SecondMoments:
    """Return the moments of named arrays."""
    return SecondMoments(
        count=int(arrays[f"{prefix}.count"][0]),
        mean_H=np.asarray(arrays[f"{prefix}.mean"], dtype=np.float64),
        covariance_HH=np.asarray(arrays[f"{prefix}.covariance"], dtype=np.float64),
        gamma_V=np.asarray(arrays[f"{prefix}.gamma"], dtype=np.float64),
    )


class HiddenMoments(FeatureMoments):
    """Moments of hidden states and residuals over positions."""

    prefix = "hidden"

    def observe(self, batch: "Batch") -> None:
        index_PK, value_PK = batch.residual.index_PK.cpu().numpy(), batch.residual.value_PK.cpu().numpy()
        self.add(batch.hidden_PH.cpu().numpy(), index_PK, value_PK)


class DeltaMoments(FeatureMoments):
    """Moments of gradients with respect to hidden states, and frequencies of input tokens, over positions."""

    prefix = "delta"

    def observe(self, batch: "Batch") -> None:
        token_P = batch.input_P.cpu().numpy()
        self.add(batch.delta_PH.cpu().numpy(), token_P, np.ones(len(token_P), dtype=np.float32))


class SummaryMoments(FeatureMoments):
    """Moments of hidden states and residuals averaged over each row. Source: eq:sequence-pooling."""

    prefix = "summary"
    of_rows = True

    def observe(self, batch: "Batch") -> None:
        summary = batch.summary
        self.add(summary.hidden_NH, summary.residual_NV.indices, summary.residual_NV.data)


class SampledStates(Moments):
    """Hidden states at every `states_every`-th position of the sample, and the next tokens."""

    def __init__(self, corpus: "CorpusMoments") -> None:
        self._every = corpus.states_every
        self._hidden: list[F32] = []
        self._label: list[I64] = []

    def observe(self, batch: "Batch") -> None:
        every_nth = slice(self._every // 2, None, self._every)
        self._hidden.append(batch.hidden_PH[every_nth].float().cpu().numpy())
        self._label.append(batch.residual.label_P[every_nth].cpu().numpy())

    def merge(self, other: Self) -> None:
        self._hidden += other._hidden
        self._label += other._label

    @property
    def value(self) -> tuple[F32, I64]:
        """Return hidden states, (M, H), and labels, (M,)."""
        return np.concatenate(self._hidden), np.concatenate(self._label)

    def arrays(self) -> dict[str, NDArray[Any]]:
        hidden_MH, label_M = self.value
        return {"states.hidden": hidden_MH, "states.label": label_M}

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._hidden, self._label = [np.asarray(arrays["states.hidden"])], [np.asarray(arrays["states.label"])]
