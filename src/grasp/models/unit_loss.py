"""Evaluate the loss of units under a causal LM. The utility that retraining measures is the negative loss.

Start with `evaluate_units`. Shape letters: E units, A answers of units, B answers of a batch, L tokens, P supervised
positions, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from grasp.arrays import F64
from grasp.errors import ModelError
from grasp.models.causal_lm import batches, dynamic_ropes, length_class, pad_rows, reset_ropes
from grasp.targets.margins import Answers
from grasp.targets.units import UnitTokens


def evaluate_units(model: nn.Module, unit_tokens: Sequence[UnitTokens], batch_tokens: int = 8192) -> F64:
    """Return the mean cross-entropy over the labels of each unit, or its negative margin or accuracy.

    Units are batched by length and padded on the right, which causal attention does not see, so the loss of a unit does
    not depend on the other units of its batch beyond rounding (1e-6 in float32).

    Args:
        model: any Hugging Face causal LM, in eval mode.
        unit_tokens: units with their token ids.
        batch_tokens: tokens per forward pass, including padding; a longer unit is a batch of its own.
    Returns:
        (E,) float64, in the order of `unit_tokens`; nats per label if the unit has one answer.
    Raises:
        ModelError: a loss is not finite.
    """
    device = next(model.parameters()).device
    answers = Answers.of(unit_tokens)
    index_of: dict[tuple[int, bytes], int] = {}  # some answers occur twice, e.g. in several metrics
    keys = [(answer.first, answer.input_ids.tobytes()) for answer in answers.tokens]
    index_A = [index_of.setdefault(key, len(index_of)) for key in keys]
    first_occurrence = dict(zip(reversed(index_A), reversed(answers.tokens), strict=True))
    distinct = [first_occurrence[k] for k in range(len(index_of))]
    lengths_A = np.array([len(answer.input_ids) for answer in distinct], dtype=np.int64)
    losses_A, ropes = np.full(len(distinct), np.nan), dynamic_ropes(model)
    with torch.inference_mode():
        for index_B in batches(lengths_A, batch_tokens, length_class(model.config, lengths_A)):
            batch = [distinct[int(i)] for i in index_B]
            ids_BL, loss_mask_BL = pad_rows([answer.input_ids for answer in batch], [answer.first for answer in batch])
            reset_ropes(ropes)
            logits_BLV = model(input_ids=ids_BL.to(device), use_cache=False).logits
            # at the positions whose next token carries loss, answer after answer
            logits_PV = logits_BLV[:, :-1][loss_mask_BL[:, 1:].to(device)]
            labels_P = ids_BL[loss_mask_BL].to(device)
            losses_P = F.cross_entropy(logits_PV.double(), labels_P, reduction="none").cpu()
            sums_B = torch.zeros(len(batch), dtype=torch.float64)
            sums_B.index_add_(0, loss_mask_BL.nonzero()[:, 0], losses_P)
            losses_A[index_B] = (sums_B / loss_mask_BL.sum(dim=1)).numpy()
    if (invalid := np.flatnonzero(~np.isfinite(losses_A))).size:
        raise ModelError(
            f"unit {invalid[0]}: the loss of the model is {losses_A[invalid[0]]}, expected a finite number "
            f"({invalid.size} such units)"
        )
    return -answers.utilities(losses_A[index_A])
