"""Products of the curvature (Hessian) of a batch loss with a direction u, and derivatives of row losses along u.

g is the gradient of the batch loss, theta are the current weights. Methods:

    one-sided      (g(theta + s u) - g(theta)) / s with s |u| = 3e-4 |theta|: one gradient, since a replay has
                   g(theta); the sign of s alternates, so that its errors, which are linear in s, cancel over steps
    difference     (g(theta + s u) - g(theta - s u)) / 2 s with s |u| = 1e-3 |theta|: two gradients, any attention
    gauss-newton   J^T B J u with J the Jacobian of the logits and B the Hessian of the loss with respect to the logits;
                   positive semidefinite; J u by differences of the logits: two forward passes and one gradient

All methods restore the parameters. Start with `curvature_product`.

Shape letters: B rows of a batch, L tokens, P positions with loss, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from grasp.arrays import F64, I64
from grasp.training.adamw import AdamWTraining
from grasp.training.adjoint import norm_of

Curvature = Literal["one-sided", "difference", "gauss-newton"]
# Step relative to the norm of the weights. In float32 the product is within 1e-4 of the exact one on small models; with
# a tenth of this step, the rounding error is ten times as large.
RELATIVE_STEP = 1e-3
ONE_SIDED_FRACTION = 0.3  # of that step, for one-sided differences, whose error is linear in the step


def curvature_product(
    training: AdamWTraining,
    ids_BL: I64,
    weight_BL: F64,
    direction: Sequence[Tensor],
    curvature: Curvature = "difference",
    relative_step: float = RELATIVE_STEP,
    at_weights: tuple[Sequence[Tensor], F64] | None = None,
) -> tuple[list[Tensor], F64]:
    """Multiply the curvature of the batch loss with a direction.

    Args:
        training: model and weights, which are restored.
        ids_BL: token ids of the batch, padded on the right.
        weight_BL: weight of the loss of the token that follows each position.
        direction: u, one tensor per parameter.
        curvature: method, see the module docstring.
        relative_step: finite-difference step, in norms of the weights; a negative one reverses one-sided differences.
        at_weights: gradient and losses of the rows at the current weights, which one-sided differences need.

    Returns:
        The product, one tensor per parameter, and the derivative of the loss of each row along u, (B,), nats.
    """
    if curvature == "gauss-newton":
        return _gauss_newton(training, ids_BL, weight_BL, direction, relative_step)
    product = [torch.zeros_like(u) for u in direction]
    along_B = np.zeros(len(ids_BL))
    if curvature == "one-sided":
        assert at_weights is not None
        for step in displaced_weights(training, direction, (ONE_SIDED_FRACTION * relative_step,)):
            along_B = (training.backward(ids_BL, weight_BL) - at_weights[1]) / step
            for total, gradient, before in zip(product, training.gradients(), at_weights[0], strict=True):
                total.copy_(gradient).sub_(before).div_(step)
            training.zero_gradients()
        return product, along_B
    for step in central_steps(training, direction, relative_step):
        along_B += training.backward(ids_BL, weight_BL) / step
        for total, gradient in zip(product, training.gradients(), strict=True):
            total.add_(gradient, alpha=1.0 / step)
        training.zero_gradients()
    return product, along_B


def central_steps(training: AdamWTraining, direction: Sequence[Tensor], relative_step: float) -> Iterator[float]:
    """Set the parameters to theta + s u and to theta - s u, yielding 2 s and -2 s, then restore them.

    The central difference of f along u is the sum of f / (yielded value). Yields nothing if u is 0.
    """
    return (2.0 * step for step in displaced_weights(training, direction, (relative_step, -relative_step)))


def displaced_weights(
    training: AdamWTraining, direction: Sequence[Tensor], relative_steps: Sequence[float]
) -> Iterator[float]:
    """Set the parameters to theta + s u for some steps, yielding s, then restore them; nothing if u is 0.

    Args:
        relative_steps: steps s |u| in norms of theta.
    """
    length = norm_of(direction)
    if not length:
        return
    weights = [parameter.detach().clone() for parameter in training.parameters]
    unit_step = norm_of(weights) / length  # the step s whose displacement has the norm of the weights
    for relative_step in relative_steps:
        step = relative_step * unit_step
        training.set_weights(weight + step * u for weight, u in zip(weights, direction, strict=True))
        yield step
    training.set_weights(weights)


def _gauss_newton(
    training: AdamWTraining, ids_BL: I64, weight_BL: F64, direction: Sequence[Tensor], relative_step: float
) -> tuple[list[Tensor], F64]:
    """Return J^T B J u of the module docstring, and row derivatives along u."""
    micro_batches = list(training.micro_batches(ids_BL, weight_BL))
    slopes: list[Tensor | float] = [0.0] * len(micro_batches)  # J u of each micro-batch
    along_of_batches = [np.zeros(len(ids)) for ids, _ in micro_batches]
    for step in central_steps(training, direction, relative_step):
        with torch.no_grad():
            for k, (ids, weight) in enumerate(micro_batches):
                logits_PV, labels = training.label_logits(ids, weight)
                slopes[k] = slopes[k] + logits_PV / step
                along_of_batches[k] += labels.row_losses(logits_PV).cpu().numpy() / step
    if isinstance(slopes[0], Tensor):  # otherwise u is 0
        for (ids, weight), slope_PV in zip(micro_batches, slopes, strict=True):
            with torch.enable_grad():
                logits_PV, labels = training.label_logits(ids, weight)
                # the Hessian of the loss with respect to the logits is w (diag(p) - p p^T) at each position
                p_PV = torch.softmax(logits_PV.detach(), dim=-1)
                weighted_PV = p_PV * slope_PV
                hessian_PV = weighted_PV - p_PV * weighted_PV.sum(dim=-1, keepdim=True)
                torch.autograd.backward(logits_PV, hessian_PV * labels.weight_P[:, None].to(hessian_PV.dtype))
    product = [gradient.clone() for gradient in training.gradients()]
    training.zero_gradients()
    return product, np.concatenate(along_of_batches)
