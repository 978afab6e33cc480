"""Evaluate the loss of units under a causal LM. The utility that retraining measures is the negative loss.

Start with `evaluate_units`. Shape letters: E units, B units of a batch, L tokens, P supervised positions, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from grasp.arrays import F64
from grasp.errors import ModelError
from grasp.models.causal_lm import batches, dynamic_ropes, length_class, pad_rows, reset_ropes
from grasp.targets.units import UnitTokens


def evaluate_units(model: nn.Module, unit_tokens: Sequence[UnitTokens], batch_tokens: int = 8192) -> F64:
    """Return the mean cross-entropy over the labels of each unit.

    Units are batched by length and padded on the right, which causal attention does not see, so the loss of a unit does
    not depend on the other units of its batch beyond rounding (1e-6 in float32).

    Args:
        model: any Hugging Face causal LM, in eval mode.
        batch_tokens: tokens per forward pass, including padding; a longer unit is a batch of its own.
    Returns:
        (E,) float64, nats per label, in the order of `unit_tokens`.
    Raises:
        ModelError: a loss is not finite.
    """
    device = next(model.parameters()).device
    losses_E = np.full(len(unit_tokens), np.nan)
    with torch.inference_mode():
        lengths_E = np.array([len(unit.input_ids) for unit in unit_tokens], dtype=np.int64)
        ropes = dynamic_ropes(model)
        for index_B in batches(lengths_E, batch_tokens, length_class(model.config, lengths_E)):
            units = [unit_tokens[int(i)] for i in index_B]
            ids_BL, labelled_BL = padded(units)
            reset_ropes(ropes)
            logits_BLV = model(input_ids=ids_BL.to(device), use_cache=False).logits
            losses_E[index_B] = mean_losses(supervised(logits_BLV, labelled_BL), ids_BL, labelled_BL)
    refuse_non_finite(losses_E)
    return losses_E


def padded(units: Sequence[UnitTokens]) -> tuple[Tensor, Tensor]:
    """Return token ids (B, L), padded on the right with 0, and a mask of the tokens that carry loss, (B, L)."""
    return pad_rows([unit.input_ids for unit in units], [unit.first for unit in units])


def supervised(states_BLX: Tensor, labelled_BL: Tensor) -> Tensor:
    """Return the states (P, X) at the positions that predict labelled tokens, unit after unit."""
    return states_BLX[:, :-1][labelled_BL[:, 1:].to(states_BLX.device)]


def mean_losses(logits_PV: Tensor, ids_BL: Tensor, labelled_BL: Tensor) -> F64:
    """Return the mean of ``logsumexp(z) - z[label]`` over the labels of each unit, (B,) float64."""
    labels_P = ids_BL[labelled_BL].to(logits_PV.device)
    losses_P = F.cross_entropy(logits_PV.double(), labels_P, reduction="none").cpu()
    sums_B = torch.zeros(len(ids_BL), dtype=torch.float64)
    sums_B.index_add_(0, labelled_BL.nonzero()[:, 0], losses_P)
    means: F64 = (sums_B / labelled_BL.sum(dim=1)).numpy()
    return means


def refuse_non_finite(losses_E: F64) -> None:
    """Check that all losses are finite.

    Raises:
        ModelError: some are not; the message has the position of the first unit.
    """
    invalid = np.flatnonzero(~np.isfinite(losses_E))
    if invalid.size:
        raise ModelError(
            f"unit {invalid[0]}: the loss of the model is {losses_E[invalid[0]]}, expected a finite number "
            f"({invalid.size} such units)"
        )
