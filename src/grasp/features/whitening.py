"""Hidden whitening and residual preconditioning from moments. Shape letters: H hidden width, V vocabulary."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from grasp.features.moments import F64, Moments


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
    def fit(cls, moments: Moments, *, tau: float, alpha: float, epsilon: float) -> Self:
        return cls(
            mean_H=moments.mean_H,
            map_HH=whitening_map(moments.covariance_HH, tau),
            precondition_V=preconditioner(moments.gamma_V, alpha, epsilon),
        )
