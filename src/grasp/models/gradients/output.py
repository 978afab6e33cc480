"""From final hidden states to the gradient of the logits, a chunk of positions at a time.

Three functions of a position's logits z with label y, each to be lowered by training:

    loss     -log p_y                      gradient  p - onehot_y
    margin   -log(p_y / (1 - p_y))         gradient  p without y - onehot_y
    sampled  -log p_y', y' drawn from p    gradient  p - onehot_y'         (the Fisher of the model itself)

Shape letters: B examples, S supervised positions (padded), P = B S, H hidden width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from grasp.models.head import OutputHead

Output = Literal["loss", "margin", "sampled"]


TINY = torch.finfo(torch.float32).tiny  # a loss beyond 87 nats reads 87; its gradient is exact all the same


@dataclass(frozen=True, slots=True)
class Residual:
    """Gradient of a function with respect to the linear logits W h + b, times the weight of its position."""

    value_BSV: Tensor
    loss_BS: Tensor  # -log p of the true label, nats; 0 where there is none
    probability_BS: Tensor  # p of the true label


def residual(
    head: OutputHead,
    hidden_BSH: Tensor,
    label_BS: Tensor,
    weight_BS: Tensor,
    output: Output,
    uniform_BS: Tensor | None = None,
) -> Residual:
    """Residuals of a chunk.

    Args:
        weight_BS: factor of each position, 0 where there is no label; its type, float32 or float64, is that of
            softmax and result.
        uniform_BS: for `sampled`: numbers in [0, 1) that pick the label by the inverse of the cumulative p.
    """
    linear = head.linear_logits(hidden_BSH).to(weight_BS.dtype)
    logits = head.link(linear)
    label = label_BS[..., None]
    value = torch.softmax(logits, dim=-1)
    probability = value.gather(-1, label).squeeze(-1)
    has_label = weight_BS > 0
    loss = torch.where(has_label, -probability.clamp(min=TINY).log(), 0.0)
    if output == "margin":
        value = torch.softmax(logits.scatter(-1, label, -torch.inf), dim=-1)
    if output == "sampled":
        assert uniform_BS is not None
        label = _draw(value, uniform_BS)[..., None]
    value.scatter_add_(-1, label, -torch.ones_like(label, dtype=value.dtype))
    slope = head.slope(logits)
    if isinstance(slope, Tensor):
        value *= slope
        value *= weight_BS[..., None]
    else:
        value *= (weight_BS * slope)[..., None]
    return Residual(value, loss, torch.where(has_label, probability, 0.0))


def _draw(probability_BSV: Tensor, uniform_BS: Tensor) -> Tensor:
    """Labels by inverse transform, (B, S): the same for the same uniform number, whatever else is in the batch."""
    cumulative = torch.cumsum(probability_BSV, dim=-1)
    scaled = (uniform_BS.to(cumulative) * cumulative[..., -1])[..., None]
    drawn = torch.searchsorted(cumulative, scaled, right=True).squeeze(-1)
    return drawn.clamp_(max=probability_BSV.shape[-1] - 1)
