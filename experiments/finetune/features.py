"""What one forward pass over rows and units gives, kept on disk once: every forward-only score is made of it.

Shape letters: P positions with loss, H hidden width, K kept residual coordinates, N rows or units, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from experiments.worlds.training import padded
from grasp.arrays import F32
from grasp.models.causal_lm import batches
from grasp.models.residuals import SparseResidual, sparse_residual

TOP_K = 64
BATCH_TOKENS = 1024


@dataclass(frozen=True)
class Features:
    """Of all sequences, one after the other; positions are those whose next token carries loss."""

    hidden_PH: F32  # after the final norm, as the head sees it
    delta_PH: F32  # W^T (p - onehot(label)), with all of p
    index_PK: NDArray[np.int32]
    value_PK: F32  # p - onehot(label) on its 64 largest coordinates and the label; K = 0 where they are not asked for
    loss_P: F32
    token_P: NDArray[np.int32]  # the input token
    label_P: NDArray[np.int32]  # the next token
    owner_P: NDArray[np.int64]  # which sequence; each has a position

    @property
    def n(self) -> int:
        return int(self.owner_P[-1]) + 1

    @property
    def count_N(self) -> NDArray[np.int64]:  # noqa: N802 - a shape suffix
        return np.bincount(self.owner_P)

    @property
    def residual(self) -> SparseResidual:
        return SparseResidual(
            torch.from_numpy(self.index_PK.astype(np.int64)),
            torch.from_numpy(self.value_PK),
            torch.from_numpy(self.loss_P),
        )

    @classmethod
    def load(cls, path: Path) -> Self:
        with np.load(path) as arrays:
            return cls(**{field.name: arrays[field.name] for field in fields(cls)})

    def save(self, path: Path) -> None:
        part = path.with_name(f"{path.stem}.part.npz")
        np.savez(part, **{field.name: getattr(self, field.name) for field in fields(self)})
        part.replace(path)


@torch.inference_mode()
def features_of(
    model: LlamaForCausalLM,
    sequences: Sequence[NDArray[np.int32]],
    firsts: Sequence[int] | NDArray[np.int64],
    *,
    residuals: bool = True,
    bfloat16: bool = True,
) -> Features:
    """One forward pass, and the head at the positions with loss; sequences in the order given.

    Args:
        residuals: keep sparse residuals, which only the token and the pooled kernel read.
        bfloat16: products in it; states, softmax and what is kept are float32.
    """
    model.eval()
    parts: list[tuple[NDArray[np.generic], ...]] = []
    for index_B in batches(np.array([len(ids) for ids in sequences], dtype=np.int64), BATCH_TOKENS):
        rows = [sequences[int(i)] for i in index_B]
        ids_BL, labels_BL = padded(rows, [int(firsts[int(i)]) for i in index_B])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
            hidden_BLH = model.model(input_ids=ids_BL, use_cache=False).last_hidden_state.float()
        has_loss_BL = labels_BL[:, 1:] >= 0
        owner_P = index_B[has_loss_BL.nonzero()[:, 0].numpy()]
        at_loss = (hidden_BLH[:, :-1], ids_BL[:, :-1], labels_BL[:, 1:])
        parts.append((*_at(model, *(values[has_loss_BL] for values in at_loss), residuals, bfloat16), owner_P))
    concatenated = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(concatenated[-1], kind="stable")
    hidden, delta, index, value, loss, token, label, owner = (column[order] for column in concatenated)
    return Features(hidden, delta, index, value, loss, token, label, owner)


def _at(
    model: LlamaForCausalLM,
    hidden_PH: torch.Tensor,
    token_P: torch.Tensor,
    label_P: torch.Tensor,
    residuals: bool,
    bfloat16: bool,
) -> tuple[NDArray[np.generic], ...]:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        logits_PV = model.lm_head(hidden_PH).float()
    sparse = sparse_residual(logits_PV, label_P, TOP_K if residuals else 1)
    rows_kept = slice(None) if residuals else slice(0)
    residual_PV = torch.softmax(logits_PV, dim=1)
    residual_PV[torch.arange(len(label_P)), label_P] -= 1.0
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        delta_PH = (residual_PV @ model.lm_head.weight).float()
    return (
        hidden_PH.numpy(),
        delta_PH.numpy(),
        sparse.index_PK[:, rows_kept].numpy().astype(np.int32),
        sparse.value_PK[:, rows_kept].numpy(),
        sparse.loss_P.numpy(),
        token_P.numpy().astype(np.int32),
        label_P.numpy().astype(np.int32),
    )
