"""The output head: what happens between the last hidden state and the softmax.

Shape letters: P positions, H hidden width, V vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from grasp.errors import ModelError

READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ADDED_ROWS = 4_096  # of W at once: on a CPU torch copies what it adds up to float32, and all of W may be gigabytes


@dataclass(frozen=True)
class OutputHead:
    """What happens between the last hidden state and the softmax: z = W h + b, then scale, then soft cap."""

    linear: nn.Module
    scale: float = 1.0
    cap: float | None = None

    def linear_logits(self, hidden_PH: Tensor, out: Tensor | None = None) -> Tensor:
        """z = W h + b, (P, V), in the model's dtype; written to `out` where the head is a plain matrix."""
        weight = getattr(self.linear, "weight", None)
        bias = getattr(self.linear, "bias", None)
        if out is None or type(self.linear) is not nn.Linear or weight is None:
            return self.linear(hidden_PH)  # type: ignore[no-any-return]
        torch.mm(hidden_PH, weight.T, out=out)
        return out if bias is None else out.add_(bias)

    def matrix(self) -> Tensor:
        """W, (V, H), in the model's dtype.

        Raises:
            ModelError: it is quantised: its numbers are not the weights.
        """
        weight: Tensor = self.linear.weight  # type: ignore[assignment]
        if weight.dtype not in READABLE:
            raise ModelError(
                f"{type(self.linear).__name__}: the output head is quantised to {weight.dtype}, expected float; build "
                "with features.input_match: false"
            )
        return weight.detach()

    @cached_property
    def mean_H(self) -> Tensor:  # noqa: N802 - a shape suffix
        """Mean of the rows of W, (H,), float32."""
        weight_VH = self.matrix()
        parts = [some.sum(dim=0, dtype=torch.float32) for some in torch.split(weight_VH, ADDED_ROWS)]
        return torch.stack(parts).sum(dim=0) / len(weight_VH)

    def link(self, z_PV: Tensor) -> Tensor:
        """Logits as the softmax sees them."""
        if self.scale != 1.0:
            z_PV = z_PV * self.scale
        return z_PV if self.cap is None else self.cap * torch.tanh(z_PV / self.cap)

    def slope(self, logits: Tensor) -> Tensor | float:
        """d logits / d z, elementwise, from the logits themselves; 1 for an ordinary head."""
        if self.cap is None:
            return self.scale
        return self.scale * (1.0 - (logits / self.cap) ** 2)


def output_head(model: nn.Module) -> OutputHead:
    """Head, scale and soft cap of a Hugging Face causal LM, read from its modules and configuration."""
    find = getattr(model, "get_output_embeddings", None)
    linear = find() if find is not None else None
    if linear is None:
        raise ModelError(f"{type(model).__name__}: no output embeddings; expected a causal LM with a linear head")
    weight = getattr(linear, "weight", None)
    if weight is None or weight.ndim != 2:
        raise ModelError(f"{type(linear).__name__}: the output head has no (V, H) weight")
    config: Any = model.config
    multiplied = getattr(config, "logit_scale", None)  # Cohere
    divided = getattr(config, "logits_scaling", None)  # Granite
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2
    scale = 1.0 if multiplied is None else float(multiplied)
    if divided is not None:
        scale /= float(divided)
    return OutputHead(linear=linear, scale=scale, cap=None if cap is None else float(cap))
