"""Mergeable first and second moments of one dense and one sparse feature, in float64, and the whitening they give.

Output layer: hidden states and residuals. Input embedding: gradients at it and one-hot input tokens.
Shape letters: P positions or rows, H hidden width, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F32, F64, I64


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments over `count` positions (token and input kernel) or rows (pooled kernel) of the training corpus."""

    count: int
    mean_H: F64
    covariance_HH: F64  # population covariance
    gamma_V: F64  # second moment of each sparse coordinate; of one-hot tokens the share of each

    @property
    def second_moment(self) -> F64:
        """Uncentred second moment of the dense feature."""
        return self.covariance_HH + np.outer(self.mean_H, self.mean_H)


@dataclass(frozen=True, slots=True)
class LabelledStates:
    """Hidden states at M sampled positions, and the token that follows each."""

    hidden_MH: F32
    label_M: I64


@dataclass(frozen=True, slots=True)
class PositionMoments:
    """What the position kernels need of the corpus: moments of outputs, inputs and neighbours over one sample."""

    token: Moments  # hidden states and residuals
    input: Moments | None = None  # hidden gradients and input tokens, where the input kernel is built
    states: LabelledStates | None = None  # some of the positions themselves, where the neighbour kernel is built
    gradient_K: F64 | None = None  # second moments of the coordinates taken of gradients, where that kernel is built
    loss: float = math.nan  # mean over the positions, nats a token


class MomentAccumulator:
    """Welford/Chan accumulation, so that batches, shards and workers merge without losing digits."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        self.count = 0
        self.mean_H: F64 = np.zeros(hidden_size)
        self.scatter_HH: F64 = np.zeros((hidden_size, hidden_size))
        self.square_V: F64 = np.zeros(vocab_size)

    def add(self, hidden_PH: NDArray[np.floating], index: NDArray[np.integer], value: NDArray[np.floating]) -> None:
        """Add P samples: hidden states (P, H) and the coordinates and values of all their sparse residuals.

        A coordinate may occur once per sample, as SparseResidual and pooled residuals guarantee.
        """
        if len(hidden_PH) == 0:
            return
        hidden = np.asarray(hidden_PH, dtype=np.float64)
        mean_H = hidden.mean(axis=0)
        centred = hidden - mean_H
        self._merge(len(hidden), mean_H, centred.T @ centred)
        square = np.asarray(value, dtype=np.float64).ravel() ** 2
        self.square_V += np.bincount(index.ravel(), weights=square, minlength=len(self.square_V))

    def merge(self, other: "MomentAccumulator") -> Self:
        """Fold another accumulator into this one."""
        if other.count:
            self._merge(other.count, other.mean_H, other.scatter_HH)
            self.square_V += other.square_V
        return self

    def _merge(self, count: int, mean_H: F64, scatter_HH: F64) -> None:
        total = self.count + count
        shift_H = mean_H - self.mean_H
        self.scatter_HH += scatter_HH + np.outer(shift_H, shift_H) * (self.count * count / total)
        self.mean_H = self.mean_H + shift_H * (count / total)
        self.count = total

    def moments(self) -> Moments:
        """The moments so far; at least one sample."""
        assert self.count > 0
        return Moments(
            count=self.count,
            mean_H=self.mean_H.copy(),
            covariance_HH=self.scatter_HH / self.count,
            gamma_V=self.square_V / self.count,
        )


def whitening_map(covariance_HH: F64, tau: float) -> F64:
    """Symmetric inverse square root of Sigma + tau * tr(Sigma) / H * I, (H, H), float64.

    Source: eq:grasp-hidden-whiten. Deviation: none; the paper leaves the Tikhonov term open.
    A constant hidden state (trace 0) is left unscaled.
    """
    width = len(covariance_HH)
    ridge = tau * float(np.trace(covariance_HH)) / width
    if ridge <= 0.0:
        return np.eye(width)
    value_H, vector_HH = np.linalg.eigh(covariance_HH)
    scale_H = 1.0 / np.sqrt(np.maximum(value_H, 0.0) + ridge)
    return np.asarray((vector_HH * scale_H) @ vector_HH.T, dtype=np.float64)


def preconditioner(gamma_V: F64, alpha: float, epsilon: float) -> F64:
    """D = (gamma + eps)^-alpha, (V,), with eps relative to the mean gamma of coordinates that occur.

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
    def fit(cls, moments: Moments, *, tau: float, alpha: float, epsilon: float, centred: bool = True) -> Self:
        """Gradients are not `centred`: W is then of their second moment, and the mean 0."""
        return cls(
            mean_H=moments.mean_H if centred else np.zeros_like(moments.mean_H),
            map_HH=whitening_map(moments.covariance_HH if centred else moments.second_moment, tau),
            precondition_V=preconditioner(moments.gamma_V, alpha, epsilon),
        )

    def whiten(self, hidden_NH: NDArray[np.floating]) -> F64:
        """h~ = W (h - mean), (N, H), float64. Source: eq:grasp-hidden-whiten."""
        return np.asarray((hidden_NH - self.mean_H) @ self.map_HH, dtype=np.float64)
