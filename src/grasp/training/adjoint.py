r"""The adjoint of one step of AdamW with clipping, in closed form.

A step goes from weights and moments (theta, m, v) by the gradient g of its batch to (theta', m', v'):

    c   = min(1, clip / (|g| + e))                      e: what clipping adds to the norm
    m'  = b1 m + (1 - b1) c g
    v'  = b2 v + (1 - b2) (c g)^2
    D   = 1 / (r + eps),  r = sqrt(v' / c2 + root)      c1 = 1 - b1^t, c2 = 1 - b2^t, t from 1
    theta' = (1 - lr decay) theta - lr D m' / c1

An adjoint is the derivative (a, am, av) of a utility after the training by (theta', m', v'). Backward, elementwise:

    am += -lr D a / c1
    av += lr S a / c2,          S = (m' / c1) D^2 / (2 r), from dD/dv' = -D^2 / (2 r c2)
    u   = (1 - b1) am + 2 (1 - b2) c g av               the derivative by c g
    u   = c u - clip / (|g| + e)^2 / |g| <g, u> g       where c < 1: the derivative by g
    a   = (1 - lr decay) a + H u                        H: Hessian of the batch's loss, see `hessian_products`
    am *= b1;  av *= b2

and the derivative by the weight of a row in the batch is the derivative of the row's part of the loss along u.

AdamW itself has root = 0: there D has no bound, and no derivative where v' = 0. A root bounds it, at the price that the
derivative is that of a slightly smoother training. What is still beyond a cap is left out: as if held fixed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from grasp.training.recipe import OptimizerRecipe

PIECE = 1 << 20  # coordinates that are in float64 at once


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConstants:
    """What decides one update beside weights, moments and gradient."""

    step: int  # from 0
    recipe: OptimizerRecipe
    clip_epsilon: float
    root: float = 0.0  # squared gradient
    largest_scale: float = math.inf  # of D, 1 / gradient

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of this step."""
        return self.recipe.learning_rate_at(self.step)


@dataclass(frozen=True, slots=True)
class Adjoint:
    """Derivatives of one utility by weights and both moments, a tensor a parameter; changed in place."""

    weights: list[Tensor]
    first: list[Tensor]
    second: list[Tensor]

    @classmethod
    def of_weights(cls, gradient: Sequence[Tensor]) -> "Adjoint":
        """Begin at the end of a training, whose utility depends on the weights alone."""
        flat = torch.contiguous_format  # changed through flat views
        zeros = [[torch.zeros_like(tensor, memory_format=flat) for tensor in gradient] for _ in range(2)]
        return cls([tensor.clone(memory_format=flat) for tensor in gradient], *zeros)

    @property
    def norm(self) -> float:
        """Return the Euclidean norm of the derivative by the weights."""
        return norm_of(self.weights)


def norm_of(tensors: Sequence[Tensor]) -> float:
    """Return the Euclidean norm of several tensors together, computed in float64."""
    pieces = (piece for tensor in tensors for piece in torch.split(tensor.detach().reshape(-1), PIECE))
    return math.sqrt(sum(float(torch.linalg.vector_norm(piece, dtype=torch.float64)) ** 2 for piece in pieces))


def through_update(
    adjoint: Adjoint,
    constants: UpdateConstants,
    gradient: Sequence[Tensor],
    first_after: Sequence[Tensor],
    second_after: Sequence[Tensor],
) -> tuple[list[Tensor], int]:
    """Go back through one update, as far as the gradient of its batch.

    The adjoint of the moments becomes that before the step. That of the weights is left as it is after the step, since
    the rest of it needs the Hessian: see `add_curvature`.

    Args:
        gradient: of the batch, before clipping.
        first_after: m'; `second_after`: v'.
    Returns:
        u, the derivative of the utility by the gradient; and the number of coordinates that were left out.
    """
    recipe, rate, steps = constants.recipe, constants.learning_rate, constants.step + 1
    b1, b2 = recipe.betas
    c1, c2 = 1.0 - b1**steps, 1.0 - b2**steps
    norm = norm_of(gradient)
    limit = math.inf if recipe.clip_norm is None else recipe.clip_norm
    clip = min(1.0, limit / (norm + constants.clip_epsilon)) if norm else 1.0
    directions, left_out, along = [], 0, 0.0
    parts = zip(adjoint.weights, adjoint.first, adjoint.second, gradient, first_after, second_after, strict=True)
    for a_X, am_X, av_X, g_X, m_X, v_X in parts:
        u_X = torch.empty_like(g_X, memory_format=torch.contiguous_format)
        for a, am, av, g, m, v, u in _pieces(a_X, am_X, av_X, g_X, m_X, v_X, u_X):
            g64, a64 = g.double(), a.double()
            r = (v.double() / c2).add_(constants.root).sqrt_()
            scale = 1.0 / (r + recipe.epsilon)
            excluded = (r == 0) | (scale > constants.largest_scale)
            left_out += int(excluded.sum())
            scale.masked_fill_(excluded, 0.0)
            bend = (m.double() / c1) * scale.square() / (2.0 * r)
            bend.masked_fill_(excluded, 0.0)
            am64 = am.double() - (rate / c1) * scale * a64
            av64 = av.double() + (rate / c2) * bend * a64
            u64 = (1.0 - b1) * am64 + (2.0 * (1.0 - b2) * clip) * g64 * av64
            along += float((g64 * u64).sum())
            u.copy_(u64)
            am.copy_(b1 * am64)
            av.copy_(b2 * av64)
        directions.append(u_X)
    if clip < 1.0:
        bent = limit / (norm + constants.clip_epsilon) ** 2 / norm * along
        for u, g in zip(directions, gradient, strict=True):
            u.mul_(clip).sub_(g, alpha=bent)
    return directions, left_out


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some coordinates of tensors of one shape at a time, as views: what is computed in float64 stays small."""
    return zip(*(torch.split(tensor.reshape(-1), PIECE) for tensor in tensors), strict=True)


def add_curvature(
    adjoint: Adjoint, constants: UpdateConstants, weight_decays: Sequence[float], product: Sequence[Tensor]
) -> None:
    """Bring the adjoint of the weights to before the step: ``a = (1 - lr decay) a + H u``."""
    for a, decay, hu in zip(adjoint.weights, weight_decays, product, strict=True):
        a.mul_(1.0 - constants.learning_rate * decay).add_(hu)
