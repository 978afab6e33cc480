"""Evaluate the loss of units under a causal LM. The utility that retraining measures is the negative loss.

Start with `evaluate_units`. Shape letters: E units, A answers of units, B answers of a batch, L tokens, P supervised
positions, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from grasp.arrays import F64, I64
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
    tokens, distinct_index_A = deduplicate_answers(answers.tokens)
    losses_A = np.full(len(tokens), np.nan)
    with torch.inference_mode():
        lengths_A = np.array([len(answer.input_ids) for answer in tokens], dtype=np.int64)
        ropes = dynamic_ropes(model)
        for index_B in batches(lengths_A, batch_tokens, length_class(model.config, lengths_A)):
            units = [tokens[int(i)] for i in index_B]
            ids_BL, loss_mask_BL = pad_units(units)
            reset_ropes(ropes)
            logits_BLV = model(input_ids=ids_BL.to(device), use_cache=False).logits
            losses_A[index_B] = mean_losses(supervised_states(logits_BLV, loss_mask_BL), ids_BL, loss_mask_BL)
    check_finite_losses(losses_A)
    return -answers.utilities(losses_A[distinct_index_A])


def deduplicate_answers(tokens: Sequence[UnitTokens]) -> tuple[list[UnitTokens], I64]:
    """Return the distinct answers (some occur twice, e.g. in several metrics), and the index of each answer, (A,)."""
    index_of: dict[tuple[int, bytes], int] = {}
    index_A = [index_of.setdefault((answer.first, answer.input_ids.tobytes()), len(index_of)) for answer in tokens]
    first_occurrence = dict(zip(reversed(index_A), reversed(tokens), strict=True))
    return [first_occurrence[k] for k in range(len(index_of))], np.array(index_A, dtype=np.int64)


def pad_units(units: Sequence[UnitTokens]) -> tuple[Tensor, Tensor]:
    """Return token ids (B, L), padded on the right with 0, and a mask of the tokens that carry loss, (B, L)."""
    return pad_rows([unit.input_ids for unit in units], [unit.first for unit in units])


def supervised_states(states_BLX: Tensor, loss_mask_BL: Tensor) -> Tensor:
    """Return the states (P, X) at the positions whose next token carries loss, unit after unit."""
    return states_BLX[:, :-1][loss_mask_BL[:, 1:].to(states_BLX.device)]


def mean_losses(logits_PV: Tensor, ids_BL: Tensor, loss_mask_BL: Tensor) -> F64:
    """Return the mean of ``logsumexp(z) - z[label]`` over the labels of each unit, (B,) float64."""
    labels_P = ids_BL[loss_mask_BL].to(logits_PV.device)
    losses_P = F.cross_entropy(logits_PV.double(), labels_P, reduction="none").cpu()
    sums_B = torch.zeros(len(ids_BL), dtype=torch.float64)
    sums_B.index_add_(0, loss_mask_BL.nonzero()[:, 0], losses_P)
    means: F64 = (sums_B / loss_mask_BL.sum(dim=1)).numpy()
    return means


def check_finite_losses(losses_E: F64) -> None:
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
