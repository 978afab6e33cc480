"""One forward pass over one batch: hidden states and sparse residuals at the positions that are used.

Position t predicts token t + 1: a row of L has at most L - 1 supervised positions.
Shape letters: B rows of the batch, L tokens, P used positions, H hidden width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from grasp.features.residuals import SparseResidual, head_residual
from grasp.models.causal_lm import ReferenceModel
from grasp.models.classifier import ImageClassifier


@dataclass(frozen=True, slots=True)
class BatchFeatures:
    """What the model gave for a batch: hidden state and mistake at every position asked for, row by row."""

    hidden_PH: Tensor
    residual: SparseResidual
    row_P: Tensor  # row of the batch
    input_P: Tensor  # token at the position; its label is the next one
    chosen: tuple[Tensor, ...]  # one boolean (P,) per position specification

    def row_loss(self, n_rows: int) -> Tensor:
        """Mean loss of each row over the positions used, nats a token."""
        count_B = torch.bincount(self.row_P, minlength=n_rows).clamp(min=1)
        total_B = self.residual.loss_P.new_zeros(n_rows).index_add_(0, self.row_P, self.residual.loss_P)
        return total_B / count_B

    def take(self, which: int) -> tuple[Tensor, SparseResidual, Tensor]:
        """Hidden states, residuals and rows at the positions of one specification."""
        mask_P = self.chosen[which]
        if bool(mask_P.all()):
            return self.hidden_PH, self.residual, self.row_P
        return self.hidden_PH[mask_P], self.residual.at(mask_P), self.row_P[mask_P]

    def inputs(self, which: int) -> Tensor:
        """Input tokens at the positions of one specification."""
        return self.input_P[self.chosen[which]]


@torch.inference_mode()
def extract(
    model: ReferenceModel,
    ids_BL: Tensor,
    labelled_BL: Tensor,
    specs: tuple[str, ...],
    top_k: int,
    hidden_BLH: Tensor | None = None,
) -> BatchFeatures:
    """Run the body once and the head at the union of the positions that `specs` name.

    Args:
        labelled_BL: tokens that carry loss; never the first of a row, which nothing predicts.
        specs: position specifications, see `position_mask`.
        hidden_BLH: what the body gave, where it has run.
    """
    ids_BL = ids_BL.to(model.device)
    supervised_BL = supervised_positions(labelled_BL.to(model.device))
    masks = [position_mask(spec, supervised_BL) for spec in specs]
    union_BL = torch.stack(masks).any(dim=0)
    row_P, t_P = union_BL.nonzero(as_tuple=True)
    hidden_PH = (model.hidden(ids_BL) if hidden_BLH is None else hidden_BLH)[row_P, t_P]
    label_P = ids_BL[row_P, t_P + 1]
    residual = head_residual(model.head, hidden_PH, label_P, top_k, model.vocab_size)
    return BatchFeatures(
        hidden_PH=hidden_PH.float(),
        residual=residual,
        row_P=row_P,
        input_P=ids_BL[row_P, t_P],
        chosen=tuple(mask[row_P, t_P] for mask in masks),
    )


@torch.inference_mode()
def extract_images(
    model: ImageClassifier, pixels_BCHW: Tensor, class_B: Tensor, n_specs: int, top_k: int
) -> BatchFeatures:
    """Features of one batch of images: one position each, whatever the specifications of positions say.

    Args:
        class_B: the true class of each image.
        n_specs: specifications that the caller will ask for.
    Source: eq:token-residual, with classes for tokens. Deviation: an image has one supervised position.
    """
    hidden_BH = model.hidden(pixels_BCHW)
    class_B = class_B.to(model.device)
    residual = head_residual(model.head, hidden_BH, class_B, top_k, model.vocab_size)
    every = torch.ones(len(hidden_BH), dtype=torch.bool, device=model.device)
    return BatchFeatures(
        hidden_PH=hidden_BH.float(),
        residual=residual,
        row_P=torch.arange(len(hidden_BH), device=model.device),
        input_P=torch.zeros_like(class_B),
        chosen=(every,) * n_specs,
    )


def bad_rows(features: BatchFeatures, n_rows: int) -> list[int]:
    """Rows of the batch in which the model computed a NaN or an infinity."""
    finite_P = features.hidden_PH.isfinite().all(dim=1) & features.residual.loss_P.isfinite()
    finite_P &= features.residual.value_PK.isfinite().all(dim=1)
    bad = torch.zeros(n_rows, dtype=torch.bool, device=finite_P.device)
    bad[features.row_P[~finite_P]] = True
    return [int(row) for row in bad.nonzero()[:, 0]]


def supervised_positions(labelled_BL: Tensor) -> Tensor:
    """Boolean (B, L): position t predicts a token that carries loss."""
    return F.pad(labelled_BL[:, 1:], (0, 1))


def position_mask(spec: str, supervised_BL: Tensor) -> Tensor:
    """Boolean (B, L): supervised position t of row b is used.

    Args:
        spec: `all`, `tail:n` (the last n supervised positions) or `stride:n` (every n-th, the last one included).
    Source: eq:sequence-pooling (tail:32). Deviation: `all` and `stride` are ours.
    """
    kind, _, number = spec.partition(":")
    if kind == "all":
        return supervised_BL
    place_BL = supervised_BL.flip(1).cumsum(1).flip(1)  # 1 for the last supervised position, 2 for the one before it
    return supervised_BL & (place_BL <= int(number) if kind == "tail" else (place_BL - 1) % int(number) == 0)
