"""Values of training images under a linear head, by published methods, in closed form where a head has one.

Each returns (N,): higher is better for the trusted images. Shape letters: N training and E trusted images, H features,
V classes, D width of a projection.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import RidgeCV

from grasp.arrays import F64
from grasp.baselines.knn_shapley import knn_shapley
from grasp.seeds import stream

BIAS_RIDGE = 1e-6  # one shift of all biases changes nothing: the Hessian has no inverse without it
NEIGHBOURS, PROJECTED, RATE, PASSES, BATCH = 10, 128, 0.05, 5, 32


@dataclass(frozen=True, slots=True)
class Head:
    """A fitted head, and the images that it was fitted to and is judged by."""

    weight_VH: F64
    bias_V: F64
    decay: float
    hidden_NH: F64
    label_N: NDArray[np.int64]
    trusted_EH: F64
    trusted_label_E: NDArray[np.int64]

    def residual(
        self, hidden: F64, label: NDArray[np.int64], weight: F64 | None = None, bias: F64 | None = None
    ) -> F64:
        logits = hidden @ (self.weight_VH if weight is None else weight).T + (self.bias_V if bias is None else bias)
        exp = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(exp / exp.sum(axis=1, keepdims=True) - np.eye(len(self.bias_V))[label])


def random(head: Head, seed: int) -> F64:
    return stream(seed, "vision", "random").random(len(head.hidden_NH))


def knn(head: Head, seed: int) -> F64:
    del seed
    values = knn_shapley(head.hidden_NH, head.label_N, head.trusted_EH, head.trusted_label_E, NEIGHBOURS)
    return np.asarray(values.mean(axis=1))


def influence(head: Head, seed: int) -> F64:
    """Gradients through the exact inverse Hessian of the head's own objective."""
    del seed
    augmented_NH = np.column_stack([head.hidden_NH, np.ones(len(head.hidden_NH))])
    probability = head.residual(head.hidden_NH, head.label_N) + np.eye(len(head.bias_V))[head.label_N]
    width, n_classes = augmented_NH.shape[1], len(head.bias_V)
    hessian = np.zeros((n_classes, width, n_classes, width))
    for a in range(n_classes):
        for b in range(n_classes):
            curve = probability[:, a] * ((a == b) - probability[:, b])
            hessian[a, :, b] = (augmented_NH * curve[:, None]).T @ augmented_NH / len(augmented_NH)
    decay = np.tile(np.append(np.full(width - 1, head.decay), BIAS_RIDGE), n_classes)  # the bias is fitted without
    square = hessian.reshape(n_classes * width, -1) + np.diag(decay)
    target = _outer(head.residual(head.trusted_EH, head.trusted_label_E), head.trusted_EH).mean(axis=0)
    gradients = _outer(head.residual(head.hidden_NH, head.label_N), head.hidden_NH)
    return np.asarray(gradients @ np.linalg.solve(square, target))


def trak(head: Head, seed: int) -> F64:
    """One model, gradients of the margin projected to 128 numbers."""
    draw = stream(seed, "vision", "trak")
    xi_N = head.residual(head.hidden_NH, head.label_N)
    xi_E = head.residual(head.trusted_EH, head.trusted_label_E)
    miss_N = -xi_N[np.arange(len(xi_N)), head.label_N]  # 1 - p of the label
    miss_E = -xi_E[np.arange(len(xi_E)), head.trusted_label_E]
    width = (head.hidden_NH.shape[1] + 1) * len(head.bias_V)
    project = draw.standard_normal((width, PROJECTED)) / np.sqrt(PROJECTED)
    phi_ND = _outer(-xi_N / np.maximum(miss_N, 1e-6)[:, None], head.hidden_NH) @ project
    phi_ED = _outer(-xi_E / np.maximum(miss_E, 1e-6)[:, None], head.trusted_EH) @ project
    gram = phi_ND.T @ phi_ND
    score_NE = phi_ND @ np.linalg.solve(gram + 1e-6 * np.trace(gram) / PROJECTED * np.eye(PROJECTED), phi_ED.T)
    return np.asarray((score_NE * miss_N[:, None]).mean(axis=1))


def in_run(head: Head, seed: int, order: int) -> F64:
    """Shapley values of each step of SGD in the trusted loss, added up. Source: Wang et al. 2025."""
    draw = stream(seed, "vision", "in-run")
    n_rows, width = head.hidden_NH.shape
    weight, bias = np.zeros((len(head.bias_V), width)), np.zeros(len(head.bias_V))
    value_N = np.zeros(n_rows)
    for _ in range(PASSES):
        for batch in np.array_split(draw.permutation(n_rows), -(-n_rows // BATCH)):
            gradients = _outer(
                head.residual(head.hidden_NH[batch], head.label_N[batch], weight, bias), head.hidden_NH[batch]
            )
            step = gradients.mean(axis=0)
            slope = _target_slope(head, weight, bias)
            if order == 2:
                moved = step.reshape(len(bias), width + 1) * RATE
                after = _target_slope(head, weight - moved[:, :-1], bias - moved[:, -1])
                slope = 0.5 * (slope + after)  # the mean slope along the step carries the second order
            value_N[batch] += RATE / len(batch) * (gradients @ slope)
            update = step.reshape(len(bias), width + 1) * RATE
            weight, bias = weight - update[:, :-1], bias - update[:, -1]
    return value_N


def _target_slope(head: Head, weight: F64, bias: F64) -> F64:
    xi = head.residual(head.trusted_EH, head.trusted_label_E, weight, bias)
    return np.column_stack([xi.T @ head.trusted_EH, xi.sum(axis=0)]).ravel() / len(xi)


def datamodels(halves: Sequence[NDArray[np.int64]], realized_B: F64, n_rows: int) -> F64:
    """Coefficients of a ridge on which rows a half holds, penalty by leave-one-out. A supervised oracle.

    Source: Ilyas et al. 2022. Deviation: ridge in place of lasso.
    """
    mask_BN = np.zeros((len(halves), n_rows))
    for b, rows in enumerate(halves):
        mask_BN[b, rows] = 1.0
    fitted = RidgeCV(alphas=np.geomspace(1.0, 1e5, 21)).fit(mask_BN, realized_B)
    return np.asarray(fitted.coef_)


def _outer(xi: F64, hidden: F64) -> F64:
    """Gradients of the head, (N, V (H + 1)), the bias last in each class."""
    augmented = np.column_stack([hidden, np.ones(len(hidden))])
    return np.asarray((xi[:, :, None] * augmented[:, None, :]).reshape(len(xi), -1))
