"""Inner products of the gradients of examples with given matrices, and parameters as matrices of blocks.

Start with `run_over`, which passes the gradients of examples to collectors. Everything has the layout of the engine,
one matrix (X, Y) per block. The gradient of a single example is formed only if necessary:
<G_b, M> = sum_t left_t^T M right_t is a matrix product.

Shape letters: N examples, B examples of a batch, T positions, K matrices, X left width, Y right width.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from grasp.arrays import F64
from grasp.models.gradients import Example, GradientFactors, LayerSet, PerExample

BLOCK_ELEMENTS = 1 << 25  # elements of a temporary tensor: 128 MB of float32


class Collector(Protocol):
    """Collects the factors of many examples."""

    def add(self, number: int, factors: GradientFactors, index_B: Tensor, /) -> None:
        """Add the factors of the block `number` of the examples `index_B`."""


def run_over(engine: PerExample, examples: Sequence[Example], collectors: Sequence[Collector]) -> None:
    """Run one pass over the examples, batched by length, for all collectors."""
    for batch in engine.batches(examples):
        index_B = torch.from_numpy(batch).to(engine.model.device)

        def consume(number: int, factors: GradientFactors, rows: slice, index_B: Tensor = index_B) -> None:
            for collector in collectors:
                collector.add(number, factors, index_B[rows])

        engine.run([examples[int(i)] for i in batch], consume)


class InnerProducts:
    """``products[i, k] = <G_i, matrices_k>``, summed over the blocks."""

    def __init__(self, engine: PerExample, matrices: Sequence[Tensor], n_examples: int) -> None:
        self._matrices = matrices
        self._product_NK = torch.zeros(n_examples, len(matrices[0]), dtype=engine.work, device=engine.model.device)

    @property
    def products(self) -> F64:
        """Products so far, (N, K)."""
        return np.asarray(self._product_NK.cpu().numpy(), dtype=np.float64)

    def add(self, number: int, factors: GradientFactors, index_B: Tensor) -> None:
        """Add products: by look-up for one-hot factors, else by the cheaper of matrix products and forming G."""
        matrices_KXY, (left, right) = self._matrices[number], (factors.left, factors.right)
        count, n_positions = len(matrices_KXY), right.shape[1]
        if factors.one_hot or n_positions * count <= n_positions + count:
            looked_up = (matrix[left] if factors.one_hot else torch.matmul(left, matrix) for matrix in matrices_KXY)
            product_BK = torch.stack([(left_product * right).sum(dim=(1, 2)) for left_product in looked_up], dim=1)
        else:
            flat_KD = matrices_KXY.flatten(1)
            step = max(1, BLOCK_ELEMENTS // flat_KD.shape[1])
            chunks = zip(torch.split(left, step), torch.split(right, step), strict=True)
            product_BK = torch.cat([torch.bmm(a.mT, b).flatten(1) @ flat_KD.T for a, b in chunks])
        self._product_NK.index_add_(0, index_B, product_BK)


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
