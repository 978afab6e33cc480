"""Loss of every unit under a causal LM: what retraining measures, before the sign is turned into a utility.

Shape letters: E units, B units of a batch, L tokens, P supervised positions, V vocabulary.
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
    """Mean cross-entropy over each unit's supervised labels.

    Units are batched by length and padded on the right, which causal attention cannot see: a unit's loss
    does not depend on the others beyond rounding (1e-6 in float32).

    Args:
        model: any Hugging Face causal LM; called in inference mode as it is (put it in eval mode first).
        batch_tokens: tokens of one forward pass, padding included; a longer unit goes alone.
    Returns:
        (E,) float64, nats a label, in the order of `unit_tokens`.
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
    """Token ids (B, L), padded on the right with 0, and which of them carry loss, (B, L)."""
    return pad_rows([unit.input_ids for unit in units], [unit.first for unit in units])


def supervised(states_BLX: Tensor, labelled_BL: Tensor) -> Tensor:
    """States (P, X) at the positions that predict labelled tokens, unit after unit."""
    return states_BLX[:, :-1][labelled_BL[:, 1:].to(states_BLX.device)]


def mean_losses(logits_PV: Tensor, ids_BL: Tensor, labelled_BL: Tensor) -> F64:
    """(B,) mean of ``logsumexp(z) - z[label]`` over the labelled tokens of each unit, in float64."""
    labels_P = ids_BL[labelled_BL].to(logits_PV.device)
    losses_P = F.cross_entropy(logits_PV.double(), labels_P, reduction="none").cpu()
    sums_B = torch.zeros(len(ids_BL), dtype=torch.float64)
    sums_B.index_add_(0, labelled_BL.nonzero()[:, 0], losses_P)
    means: F64 = (sums_B / labelled_BL.sum(dim=1)).numpy()
    return means


def refuse_non_finite(losses_E: F64) -> None:
    bad = np.flatnonzero(~np.isfinite(losses_E))
    if bad.size:
        raise ModelError(
            f"unit {bad[0]}: the model's loss is {losses_E[bad[0]]}, expected a number ({bad.size} such units)"
        )
