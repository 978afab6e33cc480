r"""The adjoint of one step of AdamW with clipping, in closed form.

The adjoint method differentiates the final utility of a training with respect to the state before each step, from the
last step to the first. Start with `through_update`.

A step maps weights and moments (theta, m, v) to (theta', m', v') with the gradient g of its batch:

    c   = min(1, clip / (|g| + e))                      e: `CLIP_EPSILON`
    m'  = b1 m + (1 - b1) c g
    v'  = b2 v + (1 - b2) (c g)^2
    D   = 1 / (r + eps),  r = sqrt(v' / c2 + root)      c1 = 1 - b1^t, c2 = 1 - b2^t, t from 1
    theta' = (1 - lr decay) theta - lr D m' / c1

An adjoint is the derivative (a, am, av) of the final utility with respect to (theta', m', v'). Backward, elementwise:

    am += -lr D a / c1
    av += lr S a / c2,          S = (m' / c1) D^2 / (2 r), from dD/dv' = -D^2 / (2 r c2)
    u   = (1 - b1) am + 2 (1 - b2) c g av               derivative with respect to c g
    u   = c u - clip / (|g| + e)^2 / |g| <g, u> g       derivative with respect to g; second term only if c < 1
    a   = (1 - lr decay) a + H u                        H: Hessian of the batch loss, see `hessian_products`
    am *= b1;  av *= b2

The derivative with respect to the weight of a row in the batch is the derivative of the row's loss along u.

AdamW has root = 0. Then D is unbounded, and not differentiable if v' = 0. A positive root bounds D; the derivative is
then that of a slightly smoother optimizer. Coordinates with r = 0 are held fixed: they get no derivative.

Suffix X: all coordinates of one parameter; names without it are blocks of these coordinates.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grasp.training.adamw import CLIP_EPSILON
from grasp.training.recipe import OptimizerRecipe

BLOCK_COORDINATES = 1 << 20  # coordinates converted to float64 at once


@dataclass(frozen=True, slots=True)
class Adjoint:
    """Derivatives of a utility with respect to weights and moments, one tensor per parameter; modified in place."""

    weights: list[Tensor]  # a
    first: list[Tensor]  # am
    second: list[Tensor]  # av

    @classmethod
    def of_weights(cls, gradient: Sequence[Tensor]) -> "Adjoint":
        """Return the adjoint at the end of training, where the utility depends on the weights only."""
        flat = torch.contiguous_format  # `through_update` modifies the tensors through flat views
        zeros = [[torch.zeros_like(tensor, memory_format=flat) for tensor in gradient] for _ in range(2)]
        return cls([tensor.clone(memory_format=flat) for tensor in gradient], *zeros)

    @property
    def norm(self) -> float:
        """Return the Euclidean norm of the derivative with respect to the weights."""
        return norm_of(self.weights)


def norm_of(tensors: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of the concatenation of tensors, computed in float64."""
    blocks = (block for tensor in tensors for block in torch.split(tensor.detach().reshape(-1), BLOCK_COORDINATES))
    return math.sqrt(sum(float(torch.linalg.vector_norm(block, dtype=torch.float64)) ** 2 for block in blocks))


def through_update(
    adjoint: Adjoint,
    gradient: Sequence[Tensor],
    first_after: Sequence[Tensor],
    second_after: Sequence[Tensor],
    *,
    recipe: OptimizerRecipe,
    step: int,
    root: float = 0.0,
) -> list[Tensor]:
    """Backpropagate through an update to the gradient of its batch.

    The adjoint of the moments becomes the one before the step. The adjoint of the weights is not changed, because its
    update needs a Hessian product: see `add_curvature`. The names follow the module docstring.

    Args:
        adjoint: derivatives with respect to the state after the step.
        gradient: gradient of the batch before clipping.
        first_after: first moments m' after the step.
        second_after: second moments v' after the step.
        recipe: the optimizer.
        step: number of the step, from 0.
        root: constant inside the square root, in units of a squared gradient.

    Returns:
        u, the derivative of the utility with respect to the gradient.
    """
    rate, steps = recipe.learning_rate_at(step), step + 1
    b1, b2 = recipe.betas
    c1, c2 = 1.0 - b1**steps, 1.0 - b2**steps
    norm = norm_of(gradient)
    limit = math.inf if recipe.clip_norm is None else recipe.clip_norm
    clip = min(1.0, limit / (norm + CLIP_EPSILON)) if norm else 1.0
    directions, gradient_dot_u = [], 0.0
    tensors = zip(adjoint.weights, adjoint.first, adjoint.second, gradient, first_after, second_after, strict=True)
    for a_X, am_X, av_X, g_X, m_X, v_X in tensors:
        u_X = torch.empty_like(g_X, memory_format=torch.contiguous_format)
        for a, am, av, g, m, v, u in _blocks(a_X, am_X, av_X, g_X, m_X, v_X, u_X):
            g64, a64 = g.double(), a.double()
            # D of the module docstring is `scale`, S is `slope`
            r = (v.double() / c2).add_(root).sqrt_()
            scale = 1.0 / (r + recipe.epsilon)
            is_fixed = r == 0
            scale.masked_fill_(is_fixed, 0.0)
            slope = (m.double() / c1) * scale.square() / (2.0 * r)
            slope.masked_fill_(is_fixed, 0.0)
            am64 = am.double() - (rate / c1) * scale * a64
            av64 = av.double() + (rate / c2) * slope * a64
            u64 = (1.0 - b1) * am64 + (2.0 * (1.0 - b2) * clip) * g64 * av64
            gradient_dot_u += float((g64 * u64).sum())
            u.copy_(u64)
            am.copy_(b1 * am64)
            av.copy_(b2 * av64)
        directions.append(u_X)
    if clip < 1.0:
        factor = limit / (norm + CLIP_EPSILON) ** 2 / norm * gradient_dot_u
        for u, g in zip(directions, gradient, strict=True):
            u.mul_(clip).sub_(g, alpha=factor)
    return directions


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield views of some coordinates of tensors of the same shape at a time, to limit the memory of float64 copies."""
    return zip(*(torch.split(tensor.reshape(-1), BLOCK_COORDINATES) for tensor in tensors), strict=True)


def add_curvature(
    adjoint: Adjoint, learning_rate: float, weight_decays: Sequence[float], product: Sequence[Tensor]
) -> None:
    """Update the adjoint of the weights to the one before the step: ``a = (1 - lr decay) a + H u``.

    Args:
        adjoint: adjoint after `through_update`.
        learning_rate: learning rate of the step.
        weight_decays: weight decay of each parameter.
        product: H u, one tensor per parameter.
    """
    for a, decay, hu in zip(adjoint.weights, weight_decays, product, strict=True):
        a.mul_(1.0 - learning_rate * decay).add_(hu)
