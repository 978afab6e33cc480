"""Find the segments of a training batch, their losses in the training's own forward pass, and their sources.

A segment is one row of the dataset. A batch has one per line, or several in a line without padding, which position ids
separate. The collator drops the label of a row, so a segment is recognised by a hash of its token ids. This changes
nothing that the model receives, and is independent of shuffling, padding and the order of packed rows.
Start with `segments`. Shape letters: B lines of a batch, L tokens, P scored tokens, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import nan
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from grasp.arrays import I64, Bool

IGNORED = -100  # label of a token without loss
UNLABELLED = "(unlabelled)"  # value of a row without one, and of a segment that is no row of the dataset
Label = str | Callable[[Any], Any]  # column of a dataset, or function of its rows


@dataclass(frozen=True, slots=True)
class Segment:
    """Token ids of one row in a batch and which of them carry loss, (L,) each, and the sum of the losses in nats."""

    ids: I64
    has_loss: Bool
    loss: float = nan  # unknown


def hash_ids(*sides: Any) -> int:
    """Return a hash of the token ids of a row, or of both sides of a preference pair."""
    return xxhash.xxh3_64_intdigest(b"end".join(np.asarray(ids, dtype=np.int64).tobytes() for ids in sides))


@torch.no_grad()
def segments(inputs: Mapping[str, Any], outputs: Any = None) -> list[Segment]:
    """Return the segments of a batch in order, without padding, on the CPU.

    Losses are those of TRL's fused head (`log_probs`), or are computed from logits, line by line, without another
    forward pass; NaN if the outputs have neither. Without labels no token carries loss.
    """
    ids, labels = inputs["input_ids"], inputs.get("labels")
    log_probs, logits = (getattr(outputs, name, None) for name in ("log_probs", "logits"))
    has_loss_BL, losses_BL = torch.zeros_like(ids, dtype=torch.bool), torch.full(ids.shape, torch.nan).double()
    if labels is not None:
        has_loss_BL[:, 1:] = labels[:, 1:] != IGNORED  # the first token has no context
    n_scored = ids.shape[1] - 1  # prompt learning adds virtual tokens on the left
    if log_probs is not None:
        losses_BL[:, 1:] = -log_probs[:, -n_scored:].cpu()
    elif logits is not None and labels is not None:
        for b, mask in enumerate(has_loss_BL):
            scored_PV = logits[b, -n_scored - 1 : -1][mask[1:]]
            losses_BL[b, mask.cpu()] = token_losses(scored_PV, labels[b, mask]).cpu().double()
    ids, has_loss, losses = (part.cpu().numpy() for part in (ids, has_loss_BL, losses_BL))
    present_BL, positions_BL = (
        part.cpu().numpy() if isinstance(part, Tensor) and part.shape == ids.shape else np.ones(ids.shape)
        for part in (inputs.get("attention_mask"), inputs.get("position_ids"))
    )
    parts = []
    for b, present_L in enumerate(present_BL):
        places = np.flatnonzero(present_L)
        if not len(places):
            continue
        first, end = places[0], places[-1] + 1
        starts = first + np.flatnonzero(positions_BL[b, first:end] == 0)
        for bounds in pairwise(np.unique([first, *starts, end]).tolist()):
            place = slice(*bounds)
            mask_L = has_loss[b, place] & (np.arange(place.stop - place.start) > 0)
            parts.append(Segment(ids[b, place], mask_L, float(losses[b, place][mask_L].sum())))
    return parts


def token_losses(logits_PV: Tensor, ids_P: Tensor) -> Tensor:
    """Return the losses of tokens in nats, (P,), float32 or wider."""
    logits_PV = logits_PV.to(torch.promote_types(logits_PV.dtype, torch.float32))
    return F.cross_entropy(logits_PV, ids_P, reduction="none")
