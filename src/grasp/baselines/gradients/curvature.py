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
from functools import partial

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


def second_moments(engine: PerExample, fisher: Fisher, full_width: int) -> list[Factors]:
    """Compute the K-FAC factors of each block, in one pass over the Fisher rows.

    Raises:
        ModelError: a factor is not finite.
    """
    blocks, device = engine.layers.blocks, engine.model.device
    narrow = ["embedding" in block.kinds or block.left > full_width for block in blocks]
    zeros = partial(torch.zeros, dtype=engine.work, device=device)
    left_sums = [
        zeros(block.left) if diagonal else zeros(block.left, block.left)
        for block, diagonal in zip(blocks, narrow, strict=True)
    ]
    right_sums = [zeros(block.right, block.right) for block in blocks]
    left_count, right_count = zeros(len(blocks)), zeros(len(blocks))
    n_tokens, labels_B, last_B = 0, torch.zeros(0), torch.zeros(0)

    def add(number: int, use: GradientFactors, rows: slice) -> None:
        left, right, total = use.left, use.right, left_sums[number]
        n_positions = right.shape[1]
        if "vector" in blocks[number].kinds:
            mask_BT = torch.ones_like(right[:, :, 0], dtype=torch.bool)
            right = right * labels_B[rows].sqrt()[:, None, None]
        else:
            # Positions that influence the loss: for the head, those of the labels, left-aligned. A layer that processes
            # the attention heads of a token separately has several positions per token.
            at_labels = n_positions < n_tokens
            size = n_positions if at_labels else n_tokens
            mask_BT = torch.arange(size, device=device) < (labels_B if at_labels else last_B)[rows, None]
            mask_BT = mask_BT.repeat_interleave(n_positions // size, dim=1)
            if use.one_hot:
                right = right * labels_B[rows, None, None]
            else:
                left = left * labels_B[rows, None, None]
        left, right_PY = left[mask_BT], right[mask_BT]
        if left.ndim == 1:
            total += torch.bincount(left, minlength=len(total))
        elif total.ndim == 1:
            total += left.square().sum(dim=0)
        else:
            total.addmm_(left.T, left)
        right_sums[number].addmm_(right_PY.T, right_PY)
        left_count[number] += len(left)
        right_count[number] += len(right_PY)

    for index_B in engine.batches(fisher.rows):
        examples, uniforms = fisher.batch(index_B)
        n_tokens = max(len(example.input_ids) for example in examples)
        labels_B = torch.tensor([example.labels for example in examples], dtype=engine.work, device=device)
        # all positions before the last labelled token influence the loss, prompts included
        last = [
            len(example.input_ids) - 1 if example.loss_mask is None else int(np.flatnonzero(example.loss_mask)[-1])
            for example in examples
        ]
        last_B = torch.tensor(last, device=device)
        engine.run(examples, add, fisher.output, uniforms)
    all_factors = [
        Factors(left / left_count[k], right / right_count[k])
        for k, (left, right) in enumerate(zip(left_sums, right_sums, strict=True))
    ]
    for block, factors in zip(blocks, all_factors, strict=True):
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
