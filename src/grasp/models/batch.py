"""What the model computed for some rows or units at the positions that are used. Start with `Batch`.

Shape letters: B rows of a batch, P positions, S sums of rows, E units, K sampled coordinates, H hidden width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grasp.arrays import F64, I64
from grasp.models.head import OutputHead
from grasp.models.residuals import PooledFeatures, SparseResidual, hidden_gradient, pool

# Of a geometry (`grasp.kernels.gradient.Curvature`): preconditioned coordinates of units, (E, K), and the relevance of
# each to itself, (E,).
UnitGradients = Callable[[Any], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Batch:
    """Features of some rows, or of all units, at the positions with loss that are used: the only input of kernels.

    Attributes:
        hidden_PH: inputs of the output layer.
        residual: sparse residuals (probabilities minus one-hot label).
        row_P: row of each position, in [0, n_rows), ascending for rows.
        input_P: token at each position; its label is the next token.
        loss_B: mean loss of each row, nats per token.
        head: the output layer, with `vocab_size` outputs; None if it is not loaded, so that `delta_PH` is unavailable.
        gradient_BK: sampled coordinates of the gradient of each row's mean loss; of units those that are preconditioned
            already; None without a backward pass.
        weight_P: signed weight of each position, which residuals contain already; None: 1. See `combined`.
        sampled: layers and coordinates of `gradient_BK`.
        unit_gradients: of units, the function that computes their gradients in a geometry.
    """

    hidden_PH: Tensor
    residual: SparseResidual
    row_P: Tensor
    input_P: Tensor
    n_rows: int
    loss_B: Tensor
    head: OutputHead | None
    vocab_size: int
    gradient_BK: Tensor | None = None
    sampled: Any = None  # grasp.kernels.coordinates.SampledGradients
    unit_gradients: UnitGradients | None = None
    weight_P: Tensor | None = None

    @classmethod
    def of_positions(
        cls,
        hidden_PH: Tensor,
        residual: SparseResidual,
        row_P: Tensor,
        input_P: Tensor,
        n_rows: int,
        head: OutputHead,
        vocab_size: int,
    ) -> Self:
        """Return a batch of rows with the mean loss of their positions; see the attributes."""
        count_B = torch.bincount(row_P, minlength=n_rows).clamp(min=1)
        total_B = residual.loss_P.new_zeros(n_rows).index_add_(0, row_P, residual.loss_P)
        return cls(hidden_PH, residual, row_P, input_P, n_rows, total_B / count_B, head, vocab_size)

    @cached_property
    def delta_PH(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Return the gradient of each position's loss with respect to its hidden state, (P, H)."""
        assert self.head is not None
        return hidden_gradient(self.head, self.residual)

    @cached_property
    def positions_B(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Return the number of positions of each row, at least 1, as a divisor."""
        return torch.bincount(self.row_P, minlength=self.n_rows).clamp(min=1)

    @cached_property
    def summary(self) -> PooledFeatures:
        """Return hidden states and residuals of each row, averaged over its positions."""
        return pool(self.hidden_PH, self.residual, self.row_P, self.n_rows, self.vocab_size)

    def at_positions(self, index_P: Tensor, row_P: Tensor, n_rows: int) -> Self:
        """Return the positions `index_P` with new row numbers, without gradients.

        Args:
            index_P: indices of positions.
            row_P: row of each of them in the new batch.
            n_rows: number of rows of the new batch.
        """
        return replace(
            self,
            hidden_PH=self.hidden_PH[index_P],
            residual=self.residual.select(index_P),
            row_P=row_P,
            input_P=self.input_P[index_P],
            n_rows=n_rows,
            gradient_BK=None,
            weight_P=None if self.weight_P is None else self.weight_P[index_P],
        )

    def combined(self, sum_B: I64, weight_B: F64, loss_S: Tensor) -> Self:
        """Return weighted sums of rows as the rows of a batch, without `gradient_BK`.

        A kernel averages over the positions of a row, and is linear in their residuals. If row b is a part of the sum
        s, the mean over the positions of s would count its residuals with 1 / |P_s| instead of w_b / |P_b|. They are
        therefore multiplied by w_b |P_s| / |P_b|.

        Args:
            sum_B: the sum that each row is a part of.
            weight_B: weight of the gradient of its mean loss.
            loss_S: the values that are reported as losses of the sums.
        """
        sum_of_B = torch.from_numpy(sum_B).to(self.row_P.device)
        row_P, n_sums = sum_of_B[self.row_P], len(loss_S)
        positions_S = torch.bincount(row_P, minlength=n_sums)
        weight_of_B = torch.from_numpy(weight_B).to(self.row_P.device) * positions_S[sum_of_B] / self.positions_B
        residual = self.residual
        weight_P = weight_of_B[self.row_P].to(residual.value_PK.dtype)
        return replace(
            self,
            residual=SparseResidual(
                residual.index_PK,
                residual.value_PK * weight_P[:, None],
                residual.loss_P,
                None if residual.truncated_P is None else residual.truncated_P * weight_P,
            ),
            row_P=row_P,
            n_rows=n_sums,
            loss_B=loss_S,
            gradient_BK=None,
            weight_P=weight_P,
        )

    def to(self, device: torch.device | str) -> Self:
        """Move to a device, all but `gradient_BK`, which kernels move by chunks."""
        residual = self.residual
        truncated_P = None if residual.truncated_P is None else residual.truncated_P.to(device)
        return replace(
            self,
            hidden_PH=self.hidden_PH.to(device),
            residual=SparseResidual(
                residual.index_PK.to(device), residual.value_PK.to(device), residual.loss_P.to(device), truncated_P
            ),
            row_P=self.row_P.to(device),
            input_P=self.input_P.to(device),
            loss_B=self.loss_B.to(device),
            weight_P=None if self.weight_P is None else self.weight_P.to(device),
        )

    def select_rows(self, index_B: NDArray[np.int64]) -> Self:
        """Return the rows `index_B`, renumbered in this order; the order of positions is kept."""
        new_row_B = torch.full((self.n_rows,), -1, dtype=torch.int64)  # -1: not selected
        new_row_B[torch.from_numpy(index_B)] = torch.arange(len(index_B))
        new_row_P = new_row_B.to(self.row_P.device)[self.row_P]
        selected_P = torch.nonzero(new_row_P >= 0)[:, 0]
        return replace(
            self.at_positions(selected_P, new_row_P[selected_P], len(index_B)),
            loss_B=self.loss_B[torch.from_numpy(index_B).to(self.loss_B.device)],
        )

    def rows(self, start: int, stop: int) -> Self:
        """Return the rows from `start` up to `stop`, with positions sorted by row."""
        selected_P = torch.nonzero((self.row_P >= start) & (self.row_P < stop))[:, 0]
        row_P, order_P = torch.sort(self.row_P[selected_P] - start, stable=True)
        return replace(
            self.at_positions(selected_P[order_P], row_P, stop - start),
            loss_B=self.loss_B[start:stop],
            gradient_BK=None if self.gradient_BK is None else self.gradient_BK[start:stop],
        )
