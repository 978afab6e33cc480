"""Products of the curvature of a batch loss with a direction u, and derivatives of row losses along u.

    one-sided      (g(theta + s u) - g(theta)) / s with s |u| = 3e-4 |theta|: one gradient, since a replay has
                   g(theta); the sign of s alternates, so that its errors, which are linear in s, cancel over steps
    difference     (g(theta + s u) - g(theta - s u)) / 2 s with s |u| = 1e-3 |theta|: two gradients, any attention
    exact          forward-over-reverse differentiation; requires eager attention; the reference
    gauss-newton   J^T B J u with J the Jacobian of the logits and B the Hessian of the loss with respect to the logits;
                   positive semidefinite; J u by differences of the logits: two forward passes and one gradient

All methods restore the parameters. Start with `curvature_product`.

Shape letters: B rows of a batch, L tokens, P positions with loss, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from grasp.arrays import F64, I64
from grasp.errors import ModelError
from grasp.training.adamw import AdamWTraining, LabelLogits
from grasp.training.adjoint import norm_of
from grasp.training.fine_tuning import FineTuning

Curvature = Literal["one-sided", "difference", "exact", "gauss-newton"]
# Step relative to the norm of the weights. In float32 the product is within 1e-4 of the exact one on small models; with
# a tenth of this step, the rounding error is ten times as large.
RELATIVE_STEP = 1e-3
ONE_SIDED_SHARE = 0.3  # of that step, in one-sided differences, whose error is linear in the step


@dataclass(frozen=True, slots=True)
class BatchGradient:
    """Gradient of a batch loss at the current weights, with the contribution of each row to the loss, (B,), nats."""

    gradient: Sequence[Tensor]
    loss_B: F64


def curvature_product(
    training: AdamWTraining,
    ids_BL: I64,
    weight_BL: F64,
    direction: Sequence[Tensor],
    curvature: Curvature = "difference",
    relative_step: float = RELATIVE_STEP,
    at_weights: BatchGradient | None = None,
) -> tuple[list[Tensor], F64]:
    """Multiply the curvature of the batch loss with a direction.

    Args:
        relative_step: finite-difference step, in norms of the weights; a negative one reverses one-sided differences.
        at_weights: gradient and losses at the current weights, which one-sided differences need.

    Returns:
        The product, one tensor per parameter, and the derivative of the loss of each row along u, (B,), nats.

    Raises:
        ModelError: the method is `exact` and the model is not a Transformers model with eager attention.
    """
    if curvature == "exact":
        return _exact(training, ids_BL, weight_BL, direction)
    if curvature == "gauss-newton":
        return _gauss_newton(training, ids_BL, weight_BL, direction, relative_step)
    product = [torch.zeros_like(u) for u in direction]
    along_B = np.zeros(len(ids_BL))
    if curvature == "one-sided":
        assert at_weights is not None
        for step in moved(training, direction, (ONE_SIDED_SHARE * relative_step,)):
            along_B = (training.backward(ids_BL, weight_BL) - at_weights.loss_B) / step
            pairs = zip(product, training.gradients(), at_weights.gradient, strict=True)
            for total, gradient, before in pairs:
                total.copy_(gradient).sub_(before).div_(step)
            training.zero_gradients()
        return product, along_B
    for step in both_sides(training, direction, relative_step):
        along_B += training.backward(ids_BL, weight_BL) / step
        for total, gradient in zip(product, training.gradients(), strict=True):
            total.add_(gradient, alpha=1.0 / step)
        training.zero_gradients()
    return product, along_B


def both_sides(training: AdamWTraining, direction: Sequence[Tensor], relative_step: float) -> Iterator[float]:
    """Set the parameters to theta + s u and to theta - s u, yielding 2 s and -2 s, then restore them.

    Yields nothing if u is 0.
    """
    return (2.0 * step for step in moved(training, direction, (relative_step, -relative_step)))


def moved(training: AdamWTraining, direction: Sequence[Tensor], relative_steps: Sequence[float]) -> Iterator[float]:
    """Set the parameters to theta + s u for some steps, yielding s, then restore them; nothing if u is 0.

    Args:
        relative_steps: steps s |u| in norms of theta.
    """
    length = norm_of(direction)
    if not length:
        return
    weights = [parameter.detach().clone() for parameter in training.parameters]
    size = norm_of(weights) / length
    for relative_step in relative_steps:
        step = relative_step * size
        training.set_weights(weight + step * u for weight, u in zip(weights, direction, strict=True))
        yield step
    training.set_weights(weights)


def _exact(
    training: AdamWTraining, ids_BL: I64, weight_BL: F64, direction: Sequence[Tensor]
) -> tuple[list[Tensor], F64]:
    if not isinstance(training, FineTuning) or training.model.config._attn_implementation != "eager":
        raise ModelError(
            "curvature: exact requires a Transformers model with eager attention; load it with "
            "attn_implementation='eager', or set curvature to 'difference'"
        )
    point = tuple(parameter.detach() for parameter in training.parameters)
    total = [torch.zeros_like(weight) for weight in point]
    rows = []
    for ids, weight in training.pieces(ids_BL, weight_BL):

        def losses(values: tuple[Tensor, ...], ids: I64 = ids, weight: F64 = weight) -> tuple[Tensor, Tensor]:
            loss_B = training.label_logits_at(values, ids, weight).row_losses()
            return loss_B.sum(), loss_B

        tangents = torch.func.jvp(torch.func.grad(losses, has_aux=True), (point,), (tuple(direction),))[1]
        product, along_B = tangents
        total = [sum_ + part for sum_, part in zip(total, product, strict=True)]
        rows.append(along_B)
    return total, torch.cat(rows).cpu().numpy()


def _gauss_newton(
    training: AdamWTraining, ids_BL: I64, weight_BL: F64, direction: Sequence[Tensor], relative_step: float
) -> tuple[list[Tensor], F64]:
    pieces = list(training.pieces(ids_BL, weight_BL))
    slopes: list[Tensor | float] = [0.0] * len(pieces)
    along = [np.zeros(len(ids)) for ids, _ in pieces]
    for step in both_sides(training, direction, relative_step):
        with torch.no_grad():
            for k, (ids, weight) in enumerate(pieces):
                outputs = training.label_logits(ids, weight)
                slopes[k] = slopes[k] + outputs.logits_PV / step
                along[k] += outputs.row_losses().cpu().numpy() / step
    if isinstance(slopes[0], Tensor):  # otherwise u is 0
        for (ids, weight), slope_PV in zip(pieces, slopes, strict=True):
            with torch.enable_grad():
                outputs = training.label_logits(ids, weight)
                torch.autograd.backward(outputs.logits_PV, _loss_hessian(outputs, slope_PV))
    product = [gradient.clone() for gradient in training.gradients()]
    training.zero_gradients()
    return product, np.concatenate(along)


def _loss_hessian(outputs: LabelLogits, slope_PV: Tensor | float) -> Tensor:
    """Multiply the Hessian of the loss with respect to the logits: ``w (diag(p) - p p^T) z`` at each position."""
    p_PV = torch.softmax(outputs.logits_PV.detach(), dim=-1)
    weighed_PV = p_PV * slope_PV
    hessian_PV = weighed_PV - p_PV * weighed_PV.sum(dim=-1, keepdim=True)
    return hessian_PV * outputs.weight_P[:, None].to(hessian_PV.dtype)
