"""Weighted sums of gradients, as a collector of `grasp.models.gradient_sums.run_over`.

Optimizer state and gradients have the layout of the engine, one matrix (X, Y) per block. A sum over examples is one
matrix product, so that the gradient of a single example is not formed.

Shape letters: N examples, K sums, X left width, Y right width.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grasp.arrays import F64
from grasp.models.gradients import GradientFactors, PerExample

Matrices = Sequence[Tensor]


class WeightedSums:
    """K weighted sums of gradients: ``matrices[block][k] = sum_i weight_KN[k, i] G_i``."""

    def __init__(self, engine: PerExample, weight_KN: F64) -> None:
        self._weight_KN = torch.from_numpy(weight_KN).to(engine.model.device, engine.work)
        self.matrices = [self._weight_KN.new_zeros(len(weight_KN), b.left, b.right) for b in engine.layers.blocks]

    def add(self, number: int, factors: GradientFactors, index_B: Tensor) -> None:
        """Add the gradients of some examples, without those of weight 0."""
        for total_XY, weight_B in zip(self.matrices[number], self._weight_KN[:, index_B], strict=True):
            nonzero = weight_B.nonzero()[:, 0]
            left, right = factors.left[nonzero], factors.right[nonzero] * weight_B[nonzero, None, None]
            if factors.one_hot:
                total_XY.index_add_(0, left.flatten(), right.flatten(0, 1))
            else:
                total_XY.addmm_(left.flatten(0, 1).T, right.flatten(0, 1))


def total_norm(matrices: Matrices) -> float:
    """Return the Euclidean norm over all blocks."""
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(matrix) for matrix in matrices])))


def map_blocks(function: Callable[..., Tensor], *operands: Matrices) -> list[Tensor]:
    """Apply `function` to corresponding blocks of the operands."""
    return [function(*blocks) for blocks in zip(*operands, strict=True)]
