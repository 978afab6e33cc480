"""The linear output layer (head) of a classifier: look-up by name, and replacement by one from a file.

Start with `FittedHead`. Shape letters: H hidden width, V classes.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from grasp.errors import ModelError


def linear_head(model: nn.Module, name: str) -> nn.Linear:
    """Return the output layer by its dotted name.

    Raises:
        ModelError: no such module (the message lists linear layers), or not a linear layer.
    """
    modules = dict(model.named_modules())
    head = modules.get(name) if name else None
    if not isinstance(head, nn.Linear):
        linear = [module_name for module_name, module in modules.items() if isinstance(module, nn.Linear)]
        raise ModelError(
            f"model.classifier.head: `{name}` of {type(model).__name__} is "
            f"{'no module' if head is None else f'a {type(head).__name__}'}, expected a linear layer; its linear "
            f"layers: {', '.join(linear[-5:]) or 'none'}"
        )
    return head


@dataclass(frozen=True, slots=True)
class FittedHead:
    """A linear output layer fitted to a corpus, with the names of its classes."""

    weight_VH: Tensor
    bias_V: Tensor
    classes: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a safetensors file with tensors `weight`, (V, H), and `bias`, (V,), and metadata `classes`, a JSON list.

        Raises:
            ModelError: no such file, or other content.
        """
        try:
            with safe_open(path, framework="pt") as file:
                classes = tuple(map(str, json.loads((file.metadata() or {})["classes"])))
                weight_VH, bias_V = file.get_tensor("weight"), file.get_tensor("bias")
                if weight_VH.ndim != 2 or not weight_VH.shape[:1] == bias_V.shape == (len(classes),):
                    shapes = f"`weight` {tuple(weight_VH.shape)}, `bias` {tuple(bias_V.shape)}"
                    raise ValueError(f"got {shapes} and {len(classes)} classes")
                return cls(weight_VH, bias_V, classes)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as err:
            raise ModelError(
                f"model.classifier.fitted_head: {path}: not a fitted head: {' '.join(str(err).split())}; expected a "
                "safetensors file with `weight` (classes x inputs), `bias`, and the JSON list `classes` in its metadata"
            ) from err

    def install(self, model: nn.Module, name: str) -> None:
        """Replace the output layer of `model`.

        Raises:
            ModelError: no such layer, or it has another number of inputs.
        """
        old = linear_head(model, name)
        if self.weight_VH.shape[1] != old.in_features:
            raise ModelError(
                f"model.classifier.fitted_head: it has {self.weight_VH.shape[1]} inputs, but `{name}` of the model has "
                f"{old.in_features}; fit a head to the inputs of this layer"
            )
        new = nn.Linear(old.in_features, len(self.weight_VH))
        with torch.no_grad():
            new.weight.copy_(self.weight_VH)
            new.bias.copy_(self.bias_V)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new)
