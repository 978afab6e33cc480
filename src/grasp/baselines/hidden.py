"""Final hidden states of rows and units, at the input of the output head.

Start with `hidden_at`. Shape letters: B rows of a batch, L tokens, P positions, H hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from grasp.arrays import F32, I32, I64, Bool
from grasp.errors import ModelError
from grasp.models.causal_lm import ReferenceModel, pad_rows
from grasp.models.forward_pass import position_mask


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states at the positions that predict a token, ordered by sequence."""

    hidden_PH: F32
    label_P: I32  # id of the next token
    sequence_P: I64  # index of the sequence


def hidden_at(model: ReferenceModel, sequences: Sequence[I32], first: Sequence[int | Bool]) -> HiddenStates:
    """Return hidden states at the positions of each sequence that predict a token.

    Args:
        first: first position of each sequence (position t predicts token t + 1), or a mask of its labelled tokens.
    Raises:
        ModelError: a hidden state is not finite.
    """
    parts = []
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    for index_B in model.batches(lengths):
        first_B = [first[i] for i in index_B]
        # pad_rows expects labelled tokens: a mask of them, or the first, which is one after the position before it
        labels_B = [eligible if isinstance(eligible, np.ndarray) else eligible + 1 for eligible in first_B]
        ids_BL, loss_mask_BL = (part.to(model.device) for part in pad_rows([sequences[i] for i in index_B], labels_B))
        row_P, t_P = position_mask("all", loss_mask_BL).nonzero(as_tuple=True)
        hidden_PH = model.hidden(ids_BL)[row_P, t_P].float().cpu().numpy()
        parts.append((hidden_PH, ids_BL[row_P, t_P + 1].cpu().numpy().astype(np.int32), index_B[row_P.cpu().numpy()]))
    hidden_PH, label_P, sequence_P = (np.concatenate(part) for part in zip(*parts, strict=True))
    bad_P = np.flatnonzero(~np.isfinite(hidden_PH).all(axis=1))
    if bad_P.size:
        raise ModelError(
            f"hidden states: {bad_P.size} are not finite in {model.dtype}, the first in sequence "
            f"{sequence_P[bad_P[0]]} of the block; build with model.dtype: float32"
        )
    order_P = np.argsort(sequence_P, kind="stable")
    return HiddenStates(hidden_PH[order_P], label_P[order_P], sequence_P[order_P])
