"""Final hidden states of rows and units, as the output head sees them.

Shape letters: n rows of a block, B rows of a batch, L tokens, P positions, H hidden width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from grasp.arrays import F32, I32, I64, Bool
from grasp.errors import ModelError
from grasp.models.causal_lm import ReferenceModel, pad_rows
from grasp.models.forward_pass import position_mask

First = int | Bool


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states at the positions that predict a token, sequence after sequence."""

    hidden_PH: F32
    label_P: I32  # the token that comes next
    sequence_P: I64


def hidden_at(model: ReferenceModel, sequences: Sequence[I32], first: Sequence[First], spec: str) -> HiddenStates:
    """Hidden states at chosen positions of every sequence.

    Args:
        first: first position of each sequence that may be used, position t predicts token t + 1; or a mask of the
            tokens that carry loss.
        spec: which of them: all, tail:n or stride:n.
    Raises:
        ModelError: a hidden state is not a number.
    """
    parts: list[HiddenStates] = []
    for index_B, hidden_BLH, mask_BL, ids_BL in _passes(model, sequences, first, spec):
        row_P, t_P = mask_BL.nonzero(as_tuple=True)
        parts.append(
            HiddenStates(
                hidden_BLH[row_P, t_P].float().cpu().numpy(),
                ids_BL[row_P, t_P + 1].cpu().numpy().astype(np.int32),
                index_B[row_P.cpu().numpy()],
            )
        )
    joined = HiddenStates(
        np.concatenate([part.hidden_PH for part in parts]),
        np.concatenate([part.label_P for part in parts]),
        np.concatenate([part.sequence_P for part in parts]),
    )
    _refuse_bad(model, joined.hidden_PH, joined.sequence_P)
    order_P = np.argsort(joined.sequence_P, kind="stable")
    return HiddenStates(joined.hidden_PH[order_P], joined.label_P[order_P], joined.sequence_P[order_P])


def pooled_hidden(model: ReferenceModel, sequences: Sequence[I32], first: Sequence[First], spec: str) -> F32:
    """Mean hidden state of each sequence over chosen positions, (n, H); see `hidden_at`."""
    out_nH = np.empty((len(sequences), model.hidden_size), dtype=np.float32)
    for index_B, hidden_BLH, mask_BL, _ in _passes(model, sequences, first, spec):
        share_BL = mask_BL / mask_BL.sum(dim=1, keepdim=True)
        pooled_BH = torch.bmm(share_BL[:, None, :], hidden_BLH.float() * mask_BL[:, :, None])[:, 0]
        out_nH[index_B] = pooled_BH.cpu().numpy()
    _refuse_bad(model, out_nH, np.arange(len(sequences)))
    return out_nH


def _passes(
    model: ReferenceModel, sequences: Sequence[I32], first: Sequence[First], spec: str
) -> Iterator[tuple[I64, Tensor, Tensor, Tensor]]:
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    for index_B in model.batches(lengths):
        own_B = [first[i] for i in index_B]
        labels_B = [own if isinstance(own, np.ndarray) else own + 1 for own in own_B]
        ids_BL, labelled_BL = (part.to(model.device) for part in pad_rows([sequences[i] for i in index_B], labels_B))
        mask_BL = position_mask(spec, labelled_BL)
        yield index_B, model.hidden(ids_BL), mask_BL, ids_BL


def _refuse_bad(model: ReferenceModel, hidden_PH: F32, sequence_P: I64) -> None:
    bad = np.flatnonzero(~np.isfinite(hidden_PH).all(axis=1))
    if bad.size:
        raise ModelError(
            f"hidden states: {bad.size} are not numbers in {model.dtype}, the first in sequence "
            f"{sequence_P[bad[0]]} of the block; build with model.dtype: float32"
        )
