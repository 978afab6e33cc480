"""Gradients materialised from their factors (see `grasp.models.gradients`), and gradient norms.

Start with `materialise` or `squared_norm`. A block is *used* several times if several modules share its weight.

Shape letters: B examples, T positions, X left width, Y right width, P and S positions of two sides.
"""

import torch
from torch import Tensor

from grasp.models.gradient_sums import BLOCK_ELEMENTS
from grasp.models.gradients import GradientFactors


def select_examples(factors: GradientFactors, begin: int, end: int) -> GradientFactors:
    """Return the factors of the examples [begin, end)."""
    return GradientFactors(factors.left[begin:end], factors.right[begin:end])


def materialise(factors: GradientFactors, width: int) -> Tensor:
    """Return G = sum_t left_t (x) right_t of each example, (B, X, Y); `width` is X."""
    if not factors.one_hot:
        return torch.bmm(factors.left.mT, factors.right)
    examples, _, right = factors.right.shape
    flat = factors.right.new_zeros(examples * width, right)
    begin = torch.arange(examples, device=factors.left.device)[:, None] * width
    flat.index_add_(0, (factors.left + begin).reshape(-1), factors.right.reshape(-1, right))
    return flat.view(examples, width, right)


def materialise_uses(uses: list[GradientFactors], width: int) -> Tensor:
    """Return G of each example, (B, X, Y), for the sum of several uses of one block."""
    gradient = materialise(uses[0], width)
    for factors in uses[1:]:
        gradient += materialise(factors, width)
    return gradient


def left_products(left: Tensor, other: Tensor) -> Tensor:
    """Return <left_p, other_s> for all pairs, (P, S); either side may be int64 coordinates of one-hot vectors."""
    if left.ndim == 1 and other.ndim == 1:
        return left[:, None] == other[None, :]
    if left.ndim == 1:
        return other.T[left]
    return left[:, other] if other.ndim == 1 else left @ other.T


def squared_norm(uses: list[GradientFactors], width: int) -> Tensor:
    """Return ||G||^2 of each example, (B,), for the sum of several uses of one block.

    Chooses the cheaper of two exact forms: pairs of positions (the ghost norm), or the materialised matrix.
    """
    n_positions = sum(factors.right.shape[1] for factors in uses)
    right = uses[0].right.shape[2]
    ghost_cost = n_positions * n_positions * (width + right)
    plain_cost = n_positions * width * right
    if ghost_cost < plain_cost or (all(factors.one_hot for factors in uses) and width > n_positions):
        return _ghost_norm(uses)
    step = max(1, BLOCK_ELEMENTS // (width * right))
    examples = len(uses[0].right)
    norms = []
    for i in range(0, examples, step):
        gradient = materialise_uses([select_examples(factors, i, i + step) for factors in uses], width)
        norms.append(gradient.flatten(1).square_().sum(dim=1))
    return torch.cat(norms)


def _ghost_norm(uses: list[GradientFactors]) -> Tensor:
    """Sum over pairs of positions instead of forming G: sum_{t,s} <left_t, left_s> <right_t, right_s>."""
    norms = []
    for b in range(len(uses[0].right)):
        norm = uses[0].right.new_zeros(())
        for i, factors in enumerate(uses):
            for j, other in enumerate(uses[: i + 1]):
                pairs = left_products(factors.left[b], other.left[b]) * (factors.right[b] @ other.right[b].T)
                norm = norm + (1 if i == j else 2) * pairs.sum()
        norms.append(norm)
    return torch.stack(norms)
