"""Weighted sums of gradients, inner products with given matrices, and parameters as matrices of blocks.

Start with `run_over`, which passes the gradients of examples to collectors. Everything has the layout of the engine,
one matrix (X, Y) per block, so that parameters, gradients and optimizer state have the same shapes. The gradient of a
single example is formed only if necessary: a sum over examples is one matrix product, and
<G_b, M> = sum_t left_t^T M right_t is another.

Shape letters: N examples, B examples of a batch, T positions, K sums or matrices, X left width, Y right width.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from grasp.arrays import F64, I64
from grasp.models.gradient_factors import BLOCK_ELEMENTS, materialise, select_examples
from grasp.models.gradients import Consumer, Example, GradientFactors, LayerSet, PerExample


class Collector(Protocol):
    """Collects the factors of many examples."""

    def consumer_for(self, index_B: I64, /) -> Consumer:
        """Return the consumer of a batch with examples `index_B`."""


def run_over(engine: PerExample, examples: Sequence[Example], collectors: Sequence[Collector]) -> F64:
    """Run one pass over the examples, batched by length, for all collectors; return mean losses (N,), nats."""
    loss_N = np.zeros(len(examples))
    for index_B in engine.batches(examples):
        consumers = [collector.consumer_for(index_B) for collector in collectors]
        result = engine.run([examples[int(i)] for i in index_B], _call_all(consumers))
        loss_N[index_B] = result.loss_B.cpu().numpy()
    return loss_N


def _call_all(consumers: Sequence[Consumer]) -> Consumer:
    """Return a consumer that passes its arguments to each of several consumers."""

    def consume(number: int, factors: GradientFactors, rows: slice) -> None:
        for consumer in consumers:
            consumer(number, factors, rows)

    return consume


def zero_matrices(engine: PerExample, count: int) -> list[Tensor]:
    """Return zeros, (K, X, Y) per block, with K = `count`."""
    device, work = engine.model.device, engine.work
    return [torch.zeros(count, b.left, b.right, dtype=work, device=device) for b in engine.layers.blocks]


class WeightedSums:
    """K weighted sums of gradients: ``matrices[block][k] = sum_i weight_KN[k, i] G_i``."""

    def __init__(self, engine: PerExample, weight_KN: F64) -> None:
        self.matrices = zero_matrices(engine, len(weight_KN))
        self._weight_KN = torch.from_numpy(weight_KN).to(engine.model.device, engine.work)

    def consumer_for(self, index_B: I64) -> Consumer:
        weight_KB = self._weight_KN[:, torch.from_numpy(index_B).to(self._weight_KN.device)]

        def consume(number: int, factors: GradientFactors, rows: slice) -> None:
            for total_XY, weight_B in zip(self.matrices[number], weight_KB[:, rows], strict=True):
                _add_sum(factors, weight_B, total_XY)

        return consume


def _add_sum(factors: GradientFactors, weight_B: Tensor, total_XY: Tensor) -> None:
    nonzero = weight_B.nonzero()[:, 0]
    if not len(nonzero):
        return
    left, right = factors.left[nonzero], factors.right[nonzero] * weight_B[nonzero, None, None]
    if factors.one_hot:
        total_XY.index_add_(0, left.flatten(), right.flatten(0, 1))
    else:
        total_XY.addmm_(left.flatten(0, 1).T, right.flatten(0, 1))


class EachGradient:
    """The whole gradient of each example, ``matrices[block][i]``; all of them must fit in memory."""

    def __init__(self, engine: PerExample, n_examples: int) -> None:
        self.matrices = zero_matrices(engine, n_examples)

    def consumer_for(self, index_B: I64) -> Consumer:
        def consume(number: int, factors: GradientFactors, rows: slice) -> None:
            for start, chunk in _chunks(factors, self.matrices[number][0].numel()):
                matrix = materialise(chunk, self.matrices[number].shape[1])
                rows_index = index_B[rows][start : start + len(chunk.right)]
                self.matrices[number].index_add_(0, torch.from_numpy(rows_index).to(matrix.device), matrix)

        return consume


class InnerProducts:
    """``products[i, k] = <G_i, matrices_k>``, summed over the blocks."""

    def __init__(self, engine: PerExample, matrices: Sequence[Tensor], n_examples: int) -> None:
        count = len(matrices[0])
        self._matrices = matrices
        self._product_NK = torch.zeros(n_examples, count, dtype=engine.work, device=engine.model.device)

    @property
    def products(self) -> F64:
        """Products so far, (N, K)."""
        return np.asarray(self._product_NK.cpu().numpy(), dtype=np.float64)

    def consumer_for(self, index_B: I64) -> Consumer:
        index = torch.from_numpy(index_B).to(self._product_NK.device)

        def consume(number: int, factors: GradientFactors, rows: slice) -> None:
            self._product_NK.index_add_(0, index[rows], _products(factors, self._matrices[number]))

        return consume


def _products(factors: GradientFactors, matrices_KXY: Tensor) -> Tensor:
    """Return (B, K): by look-up for one-hot factors, else by the cheaper of matrix-vector products and forming G."""
    count = len(matrices_KXY)
    if factors.one_hot:
        return torch.stack([(matrix[factors.left] * factors.right).sum(dim=(1, 2)) for matrix in matrices_KXY], dim=1)
    if factors.right.shape[1] * count <= factors.right.shape[1] + count:
        left_products = [torch.matmul(factors.left, matrix) for matrix in matrices_KXY]
        return torch.stack([(left_product * factors.right).sum(dim=(1, 2)) for left_product in left_products], dim=1)
    flat_KD = matrices_KXY.flatten(1)
    chunks = _chunks(factors, flat_KD.shape[1])
    return torch.cat([torch.bmm(chunk.left.mT, chunk.right).flatten(1) @ flat_KD.T for _, chunk in chunks])


def _chunks(factors: GradientFactors, size: int) -> Iterator[tuple[int, GradientFactors]]:
    """Yield (offset, a few examples), so that their matrices of `size` elements fit in a temporary tensor."""
    step = max(1, BLOCK_ELEMENTS // size)
    for start in range(0, len(factors.right), step):
        yield start, select_examples(factors, start, start + step)


class BlockParameters:
    """The parameters of a layer set, read and written as one matrix (X, Y) per block."""

    def __init__(self, model: nn.Module, layers: LayerSet, work: torch.dtype) -> None:
        self._layers = layers
        self._work = work
        self._parameters = dict(model.named_parameters())
        owner = {number: module for module, number in layers.modules}
        self._transposed = [isinstance(owner[number], Conv1D) for number in range(len(layers.blocks))]

    def read(self) -> list[Tensor]:
        """Return copies of the parameters in the precision of the engine."""
        matrices = []
        for number, block in enumerate(self._layers.blocks):
            device = self._parameters[block.parameters[0]].device
            matrix = torch.zeros(block.left, block.right, dtype=self._work, device=device)
            for name, view in self.parameter_views(number, matrix):
                view.copy_(self._parameters[name])
            matrices.append(matrix)
        return matrices

    @torch.no_grad()
    def write(self, matrices: Sequence[Tensor]) -> None:
        """Set the parameters."""
        for number, matrix in enumerate(matrices):
            for name, view in self.parameter_views(number, matrix):
                self._parameters[name].copy_(view)

    def parameter_views(self, number: int, matrix_XY: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield views of a block's matrix in the shapes of its parameters."""
        block = self._layers.blocks[number]
        if "vector" in block.kinds:
            sizes = [self._parameters[name].numel() for name in block.parameters]
            for name, vector in zip(block.parameters, torch.split(matrix_XY[0], sizes), strict=True):
                yield name, vector.view(self._parameters[name].shape)
            return
        weight = matrix_XY[:, : block.right - block.bias]
        for name in block.parameters:
            if self._parameters[name].ndim == 1:
                yield name, matrix_XY[:, -1]
            else:
                yield name, weight.T if self._transposed[number] else weight


Matrices = Sequence[Tensor]


def total_norm(matrices: Matrices) -> float:
    """Return the Euclidean norm over all blocks."""
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(matrix) for matrix in matrices])))


def map_blocks(function: Callable[..., Tensor], *operands: Matrices) -> list[Tensor]:
    """Apply `function` to corresponding blocks of the operands."""
    return [function(*blocks) for blocks in zip(*operands, strict=True)]
