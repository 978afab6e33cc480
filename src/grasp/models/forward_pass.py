"""Run rows and units through the reference model: hidden states and sparse residuals at the positions that are used.

A *residual* is the gradient of a token's loss with respect to the logits (`residuals`). Position t
predicts token t + 1, so a row of L tokens has at most L - 1 supervised positions. Start with `forward_passes`.

Shape letters: B rows of the batch, L tokens, P used positions, H hidden width.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from grasp.arrays import I64
from grasp.corpus.row_store import TokenRows
from grasp.models.batch import Batch
from grasp.models.causal_lm import ReferenceModel, pad_rows
from grasp.models.head import OutputHead
from grasp.models.residuals import head_residual
from grasp.targets.units import UnitTokens

Pass = tuple[I64, Batch]  # indices of the rows of a batch, and their features
Units = Sequence[UnitTokens] | TokenRows  # the latter are units of a reader


class NonTextReference(Protocol):
    """A reference model of a reader (`grasp.readers`), which runs its rows itself."""

    model: nn.Module
    head: OutputHead
    device: torch.device
    dtype: torch.dtype
    hidden_size: int
    vocab_size: int
    details: Mapping[str, Any]  # further fields of the artifact's manifest

    @property
    def batching(self) -> dict[str, Any]:
        """Return the settings of a forward pass that can change its rounding errors."""

    @property
    def reader(self) -> tuple[str, str]:
        """Return the kind of preprocessing and its fingerprint."""

    def fingerprint(self) -> str:
        """Return a hash of the loaded weights."""

    def passes(self, rows: Any, top_k: int) -> Iterator[Pass]:
        """Yield batches of rows; all positions are used."""


Reference = ReferenceModel | NonTextReference


def forward_passes(model: Reference, items: TokenRows | Units, used: str, top_k: int) -> Iterator[Pass]:
    """Yield batches of rows or units: their indices, and their features at the used positions.

    Args:
        model: reference model.
        items: rows, or units with their token ids.
        used: positions that are used, see `position_mask`.
        top_k: number of probabilities per residual.
    """
    if not isinstance(model, ReferenceModel):
        yield from model.passes(items, top_k)
        return
    if isinstance(items, TokenRows):
        for index in model.batches(np.diff(items.offsets)):
            padded = pad_rows([items.ids(int(i)) for i in index], [items.mask(int(i)) for i in index])
            yield index, extract(model, *padded, used, top_k)
        return
    assert isinstance(items, Sequence)
    for index in model.batches(np.array([len(unit.input_ids) for unit in items], dtype=np.int64)):
        padded = pad_rows([items[e].input_ids for e in index], [items[e].first for e in index])
        yield index, extract(model, *padded, used, top_k)


@torch.inference_mode()
def extract(
    model: ReferenceModel,
    ids_BL: Tensor,
    loss_mask_BL: Tensor,
    used: str,
    top_k: int,
) -> Batch:
    """Run the body, and the head at the used positions.

    Args:
        model: reference model.
        ids_BL: token ids, padded on the right.
        loss_mask_BL: mask of the tokens that carry loss; never the first token of a row, which is not predicted.
        used: positions that are used, see `position_mask`.
        top_k: number of probabilities per residual.
    """
    ids_BL = ids_BL.to(model.device)
    loss_mask_BL = loss_mask_BL.to(model.device)
    row_P, position_P = position_mask(used, loss_mask_BL).nonzero(as_tuple=True)
    hidden_PH = model.hidden(ids_BL)[row_P, position_P]
    label_P = ids_BL[row_P, position_P + 1]
    residual = head_residual(model.head, hidden_PH, label_P, top_k, model.vocab_size)
    input_P, n_rows = ids_BL[row_P, position_P], len(ids_BL)
    return Batch.of_positions(hidden_PH.to(model.work), residual, row_P, input_P, n_rows, model.head, model.vocab_size)


def position_mask(spec: str, loss_mask_BL: Tensor) -> Tensor:
    """Return a mask (B, L) of the positions that predict a token that carries loss and are used.

    Args:
        spec: `all`, `tail:n` (the last n of them) or `stride:n` (every n-th, including the last one).
        loss_mask_BL: mask of the tokens that carry loss.
    Source: eq:sequence-pooling (tail:32). Deviation: `all` and `stride` are ours.
    """
    supervised_BL = F.pad(loss_mask_BL[:, 1:], (0, 1))
    rule, _, number = spec.partition(":")
    if rule == "all":
        return supervised_BL
    rank_BL = supervised_BL.flip(1).cumsum(1).flip(1)  # 1 for the last supervised position, 2 for the one before it
    return supervised_BL & (rank_BL <= int(number) if rule == "tail" else (rank_BL - 1) % int(number) == 0)
