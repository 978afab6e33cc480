"""Gradients materialised from their factors, and gradient norms.

Start with `materialise` or `squared_norm`.

Shape letters: B examples, T positions, X left width, Y right width, P and S positions of two sides.
"""

import torch
from torch import Tensor

from grasp.models.gradients import Use

BLOCK_ELEMENTS = 1 << 25  # elements of a temporary tensor: 128 MB of float32


def some_rows(use: Use, begin: int, end: int) -> Use:
    """Return examples [begin, end)."""
    return Use(use.left[begin:end], use.right[begin:end])


def materialise(use: Use, width: int) -> Tensor:
    """Return G, (B, X, Y); `width` is X."""
    if not use.one_hot:
        return torch.bmm(use.left.mT, use.right)
    examples, _, right = use.right.shape
    flat = use.right.new_zeros(examples * width, right)
    begin = torch.arange(examples, device=use.left.device)[:, None] * width
    flat.index_add_(0, (use.left + begin).reshape(-1), use.right.reshape(-1, right))
    return flat.view(examples, width, right)


def left_products(left: Tensor, other: Tensor) -> Tensor:
    """Return <left_p, other_s> for all pairs, (P, S); either side may be int64 coordinates of one-hot vectors."""
    if left.ndim == 1 and other.ndim == 1:
        return left[:, None] == other[None, :]
    if left.ndim == 1:
        return other.T[left]
    return left[:, other] if other.ndim == 1 else left @ other.T


def squared_norm(uses: list[Use], width: int) -> Tensor:
    """Return ||G||^2 of each example, (B,), for the sum of several uses of one block.

    Chooses the cheaper of two exact forms: pairs of positions (the ghost norm), or the materialised matrix.
    """
    total = sum(use.right.shape[1] for use in uses)
    right = uses[0].right.shape[2]
    ghost = total * total * (width + right)
    plain = total * width * right
    if ghost < plain or (all(use.one_hot for use in uses) and width > total):
        return _ghost_norm(uses)
    step = max(1, BLOCK_ELEMENTS // (width * right))
    examples = len(uses[0].right)
    parts = [_plain_norm([some_rows(use, i, i + step) for use in uses], width) for i in range(0, examples, step)]
    return torch.cat(parts)


def _plain_norm(uses: list[Use], width: int) -> Tensor:
    gradient = materialise(uses[0], width)
    for use in uses[1:]:
        gradient += materialise(use, width)
    return gradient.flatten(1).square_().sum(dim=1)


def _ghost_norm(uses: list[Use]) -> Tensor:
    """Sum over pairs of positions instead of forming G: sum_{t,s} <left_t, left_s> <right_t, right_s>."""
    parts = []
    for b in range(len(uses[0].right)):
        norm = uses[0].right.new_zeros(())
        for i, use in enumerate(uses):
            for j, other in enumerate(uses[: i + 1]):
                pairs = left_products(use.left[b], other.left[b]) * (use.right[b] @ other.right[b].T)
                norm = norm + (1 if i == j else 2) * pairs.sum()
        parts.append(norm)
    return torch.stack(parts)
