"""Whole gradients of examples, formed a few rows at a time, and their inner products with those of units.

Start with `run_whole`, then `UnitGradients.collect` and `inner_products`. The gradients of units are matrices. If they
do not fit in memory, those of an output layer, which may have a hundred million numbers each, are the factors of the
units' S labelled positions: sum_{t,s} <l_t, l_s> <r_t, r_s>. Both are exact. A method may need whole gradients.

Shape letters: B examples of a batch, b a few of them, T positions of a row, N rows, E units, S positions of all units,
X left width, Y right width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

from grasp.arrays import F64
from grasp.baselines.gradients.factors import materialise_uses, select_examples, squared_norm
from grasp.models.gradient_sums import BLOCK_ELEMENTS
from grasp.models.gradients import Block, Consumer, Example, ForwardResult, GradientFactors, Output, PerExample

TakeMatrix = Callable[[int, Tensor, slice], None]  # block, gradients (b, X, Y), their places in the batch
Transform = Callable[[int, Tensor], Tensor]  # block, gradients (b, X, Y) -> their replacement


def run_whole(
    engine: PerExample,
    examples: Sequence[Example],
    take: TakeMatrix,
    output: Output = "loss",
    uniforms: Sequence[F64] | None = None,
    *,
    rotate: Callable[[int, GradientFactors], GradientFactors] | None = None,
    take_head: Consumer | None = None,
) -> ForwardResult:
    """Run a batch, and pass the whole gradients of every block to `take`, a few rows at a time.

    Args:
        output: as for `PerExample.run`.
        uniforms: as for `PerExample.run`.
        rotate: changes the factors of a block before gradients are formed.
        take_head: receives the factors of a separate output layer, whose gradients are then not formed.
    """
    blocks = engine.layers.blocks
    pending: dict[int, list[tuple[GradientFactors, slice]]] = {}  # uses of tied weights, whose sum is the gradient

    def form(number: int, uses: list[GradientFactors], rows: slice) -> None:
        step = max(1, BLOCK_ELEMENTS // blocks[number].size)
        for begin in range(0, rows.stop - rows.start, step):
            end = min(begin + step, rows.stop - rows.start)
            matrix = materialise_uses([select_examples(use, begin, end) for use in uses], blocks[number].left)
            take(number, matrix, slice(rows.start + begin, rows.start + end))

    def consume(number: int, use: GradientFactors, rows: slice) -> None:
        use = use if rotate is None else rotate(number, use)
        if take_head is not None and is_separate_head(blocks[number]):
            take_head(number, use, rows)
        elif engine.calls[number] == 1:
            form(number, [use], rows)
        else:
            pending.setdefault(number, []).append((use, rows))

    result = engine.run(examples, consume, output, uniforms)
    for number, uses in pending.items():  # split at the boundaries of all uses, so that each piece has every use
        for begin, end in pairwise(sorted({edge for _, rows in uses for edge in (rows.start, rows.stop)})):
            present = [(use, rows.start) for use, rows in uses if rows.start <= begin and end <= rows.stop]
            form(number, [select_examples(use, begin - at, end - at) for use, at in present], slice(begin, end))
    return result


def is_separate_head(block: Block) -> bool:
    """Return whether a block is the output layer, with a weight of its own."""
    return block.head and block.kinds == ("linear",)


@dataclass(frozen=True, slots=True)
class HeadFactors:
    """Factors of the output layer at the labelled positions of all units."""

    left_SX: Tensor
    right_SY: Tensor
    unit_S: Tensor


@dataclass
class UnitGradients:
    """Gradients of units, (E, X, Y) per block; those of a separate output layer are empty if `head` has its factors."""

    engine: PerExample
    matrices: list[Tensor]
    head: HeadFactors | None
    n_units: int

    @classmethod
    def collect(cls, engine: PerExample, units: Sequence[Example], *, whole: bool = True) -> Self:
        """Compute the gradients of units; unless `whole`, those of a separate output layer are factors."""
        device = engine.model.device
        by_factors = [not whole and is_separate_head(block) for block in engine.layers.blocks]
        matrices = [
            torch.zeros(0 if factors else len(units), block.left, block.right, dtype=engine.work, device=device)
            for block, factors in zip(engine.layers.blocks, by_factors, strict=True)
        ]
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        unit_B = torch.zeros(0)

        def take(number: int, matrix: Tensor, at: slice) -> None:
            matrices[number][unit_B[at]] = matrix

        def take_head(_: int, use: GradientFactors, at: slice) -> None:
            has_label = use.left.abs().amax(dim=2) > 0
            parts.append((use.left[has_label], use.right[has_label], unit_B[at, None].expand_as(has_label)[has_label]))

        for index_B in engine.batches(units):
            unit_B = torch.from_numpy(index_B).to(device)
            batch = [units[int(i)] for i in index_B]
            run_whole(engine, batch, take, take_head=take_head if any(by_factors) else None)
        head = HeadFactors(*map(torch.cat, zip(*parts, strict=True))) if parts else None
        return cls(engine, matrices, head, len(units))

    def squared_norms(self) -> F64:
        """Return ||g_e||^2 over all blocks, (E,)."""
        total_E = torch.zeros(self.n_units, dtype=self.engine.work, device=self.engine.model.device)
        for matrix in self.matrices:
            if len(matrix):
                total_E += matrix.flatten(1).square().sum(dim=1)
        if self.head is not None:
            for e in range(self.n_units):
                left, right = (side[self.head.unit_S == e][None] for side in (self.head.left_SX, self.head.right_SY))
                total_E[e] += squared_norm([GradientFactors(left, right)], left.shape[2])[0]
        return total_E.cpu().numpy().astype(np.float64)


def inner_products(
    units: UnitGradients, rows: Sequence[Example], *, norms: bool = False, transform: Transform | None = None
) -> tuple[F64, F64]:
    """Return inner products (N, E) of rows with units, and squared norms (N,) of the rows (0 unless `norms`).

    Args:
        transform: replaces the gradients of rows; requires whole gradients of units.
    """
    engine = units.engine
    product_NE, square_N = np.zeros((len(rows), units.n_units)), np.zeros(len(rows))

    product_BE, square_B = torch.zeros(0), torch.zeros(0)

    def take(number: int, matrix: Tensor, at: slice) -> None:
        flat = (matrix if transform is None else transform(number, matrix)).flatten(1)
        product_BE[at].addmm_(flat, units.matrices[number].flatten(1).T)
        if norms:
            square_B[at] += flat.square_().sum(dim=1)

    def take_head(_: int, use: GradientFactors, at: slice) -> None:
        head = units.head
        assert head is not None
        examples, positions = use.right.shape[:2]
        left, right = use.left.flatten(0, 1), use.right.flatten(0, 1)
        step = max(1, BLOCK_ELEMENTS // max(1, len(left)))
        for begin in range(0, len(head.unit_S), step):  # a chunk of the units' positions at a time
            chunk = slice(begin, begin + step)
            pairs = (left @ head.left_SX[chunk].T) * (right @ head.right_SY[chunk].T)
            product_BE[at].index_add_(1, head.unit_S[chunk], pairs.view(examples, positions, -1).sum(dim=1))
        if norms:
            square_B[at] += squared_norm([use], use.left.shape[2])

    for index_B in engine.batches(rows):
        product_BE = torch.zeros(len(index_B), units.n_units, dtype=engine.work, device=engine.model.device)
        square_B = torch.zeros_like(product_BE[:, 0])
        examples = [rows[int(i)] for i in index_B]
        run_whole(engine, examples, take, take_head=None if units.head is None else take_head)
        product_NE[index_B], square_N[index_B] = product_BE.cpu().numpy(), square_B.cpu().numpy()
    return product_NE, square_N


def unit_groups(
    blocks: Sequence[Block], units: Sequence[Example], memory_mb: int, *, whole: bool, copies: int = 1
) -> tuple[list[slice], bool]:
    """Return groups of units whose gradients fit in memory together, and whether all of the gradients are whole.

    Each group takes a pass over the rows. The output layer has factors if whole gradients take several passes.

    Args:
        memory_mb: memory in MB.
        whole: require whole gradients.
        copies: number of copies of the gradients in memory at once.
    """
    labels = -(-sum(unit.labels for unit in units) // len(units))  # of a unit, in the mean
    for is_whole in (True, False):
        factors = [not is_whole and is_separate_head(block) for block in blocks]
        numbers = sum(labels * (b.left + b.right) if head else b.size for b, head in zip(blocks, factors, strict=True))
        fit = max(1, (memory_mb << 20) // (4 * copies * numbers))
        groups = [slice(e, min(e + fit, len(units))) for e in range(0, len(units), fit)]
        if whole or len(groups) == 1:
            break
    return groups, is_whole
