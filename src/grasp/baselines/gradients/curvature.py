r"""Kronecker-factored Fisher matrices of blocks, and products of their inverses with gradients.

Start with `second_moments`, then `apply_kfac` or `apply_ekfac`. For a block with per-example gradient
G_i = sum_t l_t (x) r_t of the mean loss of n_i labels, so that n_i l_t is the gradient of one label's loss:

    K-FAC    F ~ S (x) A,  S = E_t[n^2 l l^T],  A = E_t[r r^T]
    EK-FAC   the same eigenvectors, eigenvalues corrected:  Lambda = E_i[n_i (Q_S^T G_i Q_A)^2]

The factor of an embedding's one-hot side is diagonal, which is exact; that of an output wider than `full_width` is
approximated by its diagonal. The vectors of a norm have their full Fisher matrix. Labels are drawn from the model (the
Fisher matrix) or taken from the corpus (the empirical Fisher matrix).

Source: Martens and Grosse 2015; George et al. 2018; Grosse et al. 2023 for language models. Deviation: examples
are weighted by n_i in Lambda, so that all factors are on the scale of one label.

Shape letters: B examples, T positions, X left width, Y right width, E units, M Fisher rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grasp.arrays import F64, I64
from grasp.baselines.gradients.whole import HeadFactors, UnitGradients, is_separate_head, run_whole
from grasp.errors import ModelError, SettingsError
from grasp.models.gradients import Block, Example, GradientFactors, Output, PerExample


@dataclass(frozen=True, slots=True)
class Factors:
    """Second moments of a block; `left` is (X,) if it is diagonal, else (X, X)."""

    left: Tensor
    right_YY: Tensor

    @property
    def diagonal(self) -> bool:
        return self.left.ndim == 1


@dataclass(frozen=True, slots=True)
class Fisher:
    """Rows of the expectation, with uniform numbers that sample their labels; None: true labels."""

    rows: Sequence[Example]
    uniforms: Sequence[F64] | None

    @property
    def output(self) -> Output:
        return "loss" if self.uniforms is None else "sampled"

    def batch(self, index_B: I64) -> tuple[list[Example], list[F64] | None]:
        chosen = [int(i) for i in index_B]
        return [self.rows[i] for i in chosen], None if self.uniforms is None else [self.uniforms[i] for i in chosen]


class _Sums:
    """Accumulates second moments."""

    def __init__(self, engine: PerExample, full_width: int) -> None:
        self._engine = engine
        device, work = engine.model.device, engine.work
        self._left, self._right = [], []
        self._left_count = torch.zeros(len(engine.layers.blocks), dtype=work, device=device)
        self._right_count = torch.zeros_like(self._left_count)
        for block in engine.layers.blocks:
            narrow = "embedding" in block.kinds or block.left > full_width
            shape = (block.left,) if narrow else (block.left, block.left)
            self._left.append(torch.zeros(shape, dtype=work, device=device))
            self._right.append(torch.zeros(block.right, block.right, dtype=work, device=device))
        self._labels_B = self._positions_B = torch.zeros(0)
        self._tokens = 0

    def begin(self, examples: Sequence[Example]) -> None:
        """Set the rows of the next batch."""
        work, device = self._engine.work, self._engine.model.device
        self._tokens = max(len(example.input_ids) for example in examples)
        self._labels_B = torch.tensor([example.labels for example in examples], dtype=work, device=device)
        # positions that influence the loss: all before the last loss_mask token, prompts included
        last = [
            len(example.input_ids) - 1 if example.loss_mask is None else int(np.flatnonzero(example.loss_mask)[-1])
            for example in examples
        ]
        self._positions_B = torch.tensor(last, device=device)

    def __call__(self, number: int, use: GradientFactors, rows: slice) -> None:
        block, labels_B = self._engine.layers.blocks[number], self._labels_B[rows]
        left, right = use.left, use.right
        if "vector" in block.kinds:
            mask_BT = torch.ones_like(right[:, :, 0], dtype=torch.bool)
            right = right * labels_B.sqrt()[:, None, None]
        else:
            mask_BT = self._loss_positions(use.right.shape[1], rows)
            if use.one_hot:
                right = right * labels_B[:, None, None]
            else:
                left = left * labels_B[:, None, None]
        self._add(number, left[mask_BT], right[mask_BT])

    def _add(self, number: int, left: Tensor, right_PY: Tensor) -> None:
        total = self._left[number]
        if left.ndim == 1:
            total += torch.bincount(left, minlength=len(total))
        elif total.ndim == 1:
            total += left.square().sum(dim=0)
        else:
            total.addmm_(left.T, left)
        self._right[number].addmm_(right_PY.T, right_PY)
        self._left_count[number] += len(left)
        self._right_count[number] += len(right_PY)

    def _loss_positions(self, positions: int, rows: slice) -> Tensor:
        """Return a mask of positions that influence the loss, (B, T): for the head, those of the labels, left-aligned.

        A layer that processes the attention heads of a token separately has several positions per token.
        """
        at_labels = positions < self._tokens
        size = positions if at_labels else self._tokens
        mask = (
            torch.arange(size, device=self._labels_B.device)
            < (self._labels_B if at_labels else self._positions_B)[rows, None]
        )
        return mask.repeat_interleave(positions // size, dim=1)

    def factors(self) -> list[Factors]:
        return [
            Factors(left / self._left_count[k], right / self._right_count[k])
            for k, (left, right) in enumerate(zip(self._left, self._right, strict=True))
        ]


def second_moments(engine: PerExample, fisher: Fisher, full_width: int) -> list[Factors]:
    """Compute the K-FAC factors of each block, in one pass over the Fisher rows.

    Raises:
        ModelError: a factor is not finite.
    """
    sums = _Sums(engine, full_width)
    for index_B in engine.batches(fisher.rows):
        examples, uniforms = fisher.batch(index_B)
        sums.begin(examples)
        engine.run(examples, sums, fisher.output, uniforms)
    all_factors = sums.factors()
    for block, factors in zip(engine.layers.blocks, all_factors, strict=True):
        if not (factors.left.isfinite().all() and factors.right_YY.isfinite().all()):
            raise ModelError(
                f"influence: the Fisher factors of {block.name} are not finite in {engine.model.dtype}; use "
                "model.dtype bfloat16 or float32"
            )
    return all_factors


@dataclass(frozen=True, slots=True)
class Basis:
    """Eigenvectors of both factors; `left_XX` is None if the left factor is diagonal."""

    left_XX: Tensor | None
    right_YY: Tensor

    @classmethod
    def from_factors(cls, factors: Factors) -> "Basis":
        left = None if factors.diagonal else torch.linalg.eigh(factors.left.double())[1].to(factors.left.dtype)
        return cls(left, torch.linalg.eigh(factors.right_YY.double())[1].to(factors.right_YY.dtype))

    def rotate_use(self, use: GradientFactors) -> GradientFactors:
        """Rotate the factors of G, so that their product is Q_S^T G Q_A; cheaper than rotating the matrix."""
        left = use.left if self.left_XX is None else use.left @ self.left_XX
        return GradientFactors(left, use.right @ self.right_YY)

    def rotate(self, matrix_BXY: Tensor) -> Tensor:
        """Return Q_S^T G Q_A."""
        rotated = matrix_BXY @ self.right_YY
        return rotated if self.left_XX is None else self.left_XX.T @ rotated

    def rotate_back(self, matrix_BXY: Tensor) -> Tensor:
        """Return Q_S G Q_A^T."""
        rotated = matrix_BXY @ self.right_YY.T
        return rotated if self.left_XX is None else self.left_XX @ rotated


def corrected_eigenvalues(engine: PerExample, fisher: Fisher, bases: Sequence[Basis]) -> list[Tensor]:
    """Compute Lambda (X, Y) of each block: second moments of gradients in the eigenbasis, in one pass."""
    blocks, device = engine.layers.blocks, engine.model.device
    total = [torch.zeros(block.left, block.right, dtype=engine.work, device=device) for block in blocks]
    labels_B = torch.zeros(0)

    def add_squares(number: int, matrix_BXY: Tensor, rows: slice) -> None:
        total[number] += torch.einsum("b,bxy->xy", labels_B[rows], matrix_BXY.square_())

    for index_B in engine.batches(fisher.rows):
        examples, uniforms = fisher.batch(index_B)
        labels_B = torch.tensor([example.labels for example in examples], dtype=engine.work, device=device)
        run_whole(
            engine,
            examples,
            add_squares,
            fisher.output,
            uniforms,
            rotate=lambda number, use: bases[number].rotate_use(use),
        )
    return [matrix / len(fisher.rows) for matrix in total]


def apply_ekfac(units: UnitGradients, bases: Sequence[Basis], eigenvalues: Sequence[Tensor], damping: float) -> None:
    """Replace g of each unit by (F + lambda I)^{-1} g; lambda is `damping` times the block's mean eigenvalue."""
    for matrix_EXY, basis, value_XY in zip(units.matrices, bases, eigenvalues, strict=True):
        scale_XY = 1.0 / (value_XY + damping * value_XY.mean())
        for matrix_XY in matrix_EXY:
            matrix_XY.copy_(basis.rotate_back(basis.rotate(matrix_XY) * scale_XY))


def check_untied(blocks: Sequence[Block]) -> None:
    """Check that K-FAC applies to every block, before factors are computed.

    Raises:
        SettingsError: a block is a tied weight, whose Fisher matrix is not a Kronecker product.
    """
    for block in blocks:
        if len(block.kinds) > 1:
            raise SettingsError(
                f"influence.curvature: {block.name} is both embedding and head, which K-FAC does not support; set "
                f"curvature: ekfac, or exclude it with !{block.name}"
            )


def apply_kfac(units: UnitGradients, factors: Sequence[Factors], damping: float) -> None:
    """Replace G of each unit by S^{-1} G A^{-1}; factors are damped by sqrt(`damping`) of their mean eigenvalue.

    Raises:
        SettingsError: see `check_untied`.
    """
    check_untied(units.engine.layers.blocks)
    for number, (matrix_EXY, factor) in enumerate(zip(units.matrices, factors, strict=True)):
        right_YY = _damped_inverse(factor.right_YY, damping**0.5)
        if factor.diagonal:
            left = 1.0 / (factor.left + damping**0.5 * factor.left.mean())
        else:
            left = _damped_inverse(factor.left, damping**0.5)
        if units.head is not None and is_separate_head(units.engine.layers.blocks[number]):
            head = units.head
            left_SX = head.left_SX * left if factor.diagonal else head.left_SX @ left
            units.head = HeadFactors(left_SX, head.right_SY @ right_YY, head.unit_S)
        else:
            solved_EXY = matrix_EXY @ right_YY
            units.matrices[number] = solved_EXY * left[:, None] if factor.diagonal else left @ solved_EXY


def _damped_inverse(moment: Tensor, damping: float) -> Tensor:
    shift = damping * float(moment.diagonal().mean())
    wide = moment.double() + shift * torch.eye(len(moment), dtype=torch.float64, device=moment.device)
    return torch.cholesky_inverse(torch.linalg.cholesky(wide)).to(moment.dtype)
