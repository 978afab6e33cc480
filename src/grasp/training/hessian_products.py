"""Products of the Hessian of a batch loss with a direction u, and derivatives of row losses along u.

g is the gradient of the batch loss, theta are the current weights. The product is the one-sided difference
(g(theta + s u) - g(theta)) / s with s |u| = 3e-4 |theta|, which costs one gradient, since a replay has g(theta). Its
error is linear in s; a caller alternates the sign of s, so that errors cancel over steps. Start with
`hessian_product`.

Shape letters: B rows of a batch, L tokens.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from grasp.arrays import F64, I64
from grasp.training.adamw import AdamWTraining
from grasp.training.adjoint import norm_of

# Step relative to the norm of the weights. In float32 a central difference is within 1e-4 of the exact product on small
# models; with a tenth of this step, the rounding error is ten times as large.
RELATIVE_STEP = 1e-3
ONE_SIDED_FRACTION = 0.3  # of that step, for one-sided differences, whose error is linear in the step


def hessian_product(
    training: AdamWTraining,
    ids_BL: I64,
    weight_BL: F64,
    direction: Sequence[Tensor],
    gradient: Sequence[Tensor],
    loss_B: F64,
    relative_step: float = RELATIVE_STEP,
) -> tuple[list[Tensor], F64]:
    """Multiply the Hessian of the batch loss with a direction.

    Args:
        training: model and weights, which are restored.
        ids_BL: token ids of the batch, padded on the right.
        weight_BL: weight of the loss of the token that follows each position.
        direction: u, one tensor per parameter.
        gradient: gradient of the batch loss at the current weights.
        loss_B: contribution of each row to the loss at the current weights.
        relative_step: finite-difference step, in norms of the weights; a negative one reverses the difference.

    Returns:
        The product, one tensor per parameter, and the derivative of the loss of each row along u, (B,), nats.
    """
    product, along_B = [torch.zeros_like(u) for u in direction], np.zeros(len(ids_BL))
    for step in displaced_weights(training, direction, (ONE_SIDED_FRACTION * relative_step,)):
        along_B = (training.backward(ids_BL, weight_BL) - loss_B) / step
        for total, after, before in zip(product, training.gradients(), gradient, strict=True):
            total.copy_(after).sub_(before).div_(step)
        training.zero_gradients()
    return product, along_B


def displaced_weights(
    training: AdamWTraining, direction: Sequence[Tensor], relative_steps: Sequence[float]
) -> Iterator[float]:
    """Set the parameters to theta + s u for some steps, yielding s, then restore them; nothing if u is 0.

    The central difference of f along u is the sum of f / (2 s) over the steps s and -s.

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
