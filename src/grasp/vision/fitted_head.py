"""The linear output layer (head) of a classifier: look-up by name, fit to features, file format, installation.

`fit_linear` fits weights and bias to the inputs of the layer; a `FittedHead` writes them to a file, reads it, and
replaces the layer of a model. Start with `FittedHead`.

Shape letters: N images, H hidden width, V classes.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from grasp.errors import ModelError
from grasp.files import atomic_path


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
        """Read a file that `write` created.

        Raises:
            ModelError: no such file, or not a fitted head.
        """
        try:
            with safe_open(path, framework="pt") as file:
                classes = tuple(json.loads((file.metadata() or {})["classes"]))
                return cls(file.get_tensor("weight"), file.get_tensor("bias"), classes)
        except (OSError, SafetensorError, KeyError, ValueError) as err:
            raise ModelError(
                f"model.classifier.fitted_head: {path}: not a fitted head: {' '.join(str(err).split())}; create one "
                "with `grasp fit-head`"
            ) from err

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        tensors = {"weight": self.weight_VH.float().contiguous(), "bias": self.bias_V.float().contiguous()}
        with atomic_path(path) as part:
            save_file(tensors, part, metadata={"classes": json.dumps(self.classes)})

    def install(self, model: nn.Module, name: str) -> None:
        """Replace the output layer of `model`.

        Raises:
            ModelError: no such layer, or it has another number of inputs.
        """
        old = linear_head(model, name)
        if self.weight_VH.shape[1] != old.in_features:
            raise ModelError(
                f"model.classifier.fitted_head: it has {self.weight_VH.shape[1]} inputs, but `{name}` of the model has "
                f"{old.in_features}; fit a head for this model with `grasp fit-head`"
            )
        new = nn.Linear(old.in_features, len(self.weight_VH))
        with torch.no_grad():
            new.weight.copy_(self.weight_VH)
            new.bias.copy_(self.bias_V)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, new)


def fit_linear(
    hidden_NH: NDArray[np.floating[Any]],
    class_N: NDArray[np.integer[Any]],
    n_classes: int,
    *,
    decay: float,
    weight_N: NDArray[np.floating[Any]] | None = None,
    steps: int = 200,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Fit multinomial logistic regression; return weights (V, H) and bias (V,), float64.

    Minimises the weighted mean loss plus decay / 2 times the squared weights (not the bias) with L-BFGS from zero. The
    objective is convex, so the result depends only on the data.

    Args:
        hidden_NH: features of the examples.
        class_N: class of each example, 0 to n_classes - 1.
        n_classes: number of classes.
        decay: strength of the penalty.
        weight_N: weights of the examples. Default: equal weights.
        steps: maximum number of iterations.
    """
    hidden = torch.from_numpy(np.asarray(hidden_NH, dtype=np.float64))
    label = torch.from_numpy(np.asarray(class_N, dtype=np.int64))
    share = np.ones(len(hidden)) if weight_N is None else np.asarray(weight_N, dtype=np.float64)
    share_N = torch.from_numpy(share / share.sum())
    weight = torch.zeros(n_classes, hidden.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(n_classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=steps, tolerance_grad=1e-7, tolerance_change=1e-12, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        losses = nn.functional.cross_entropy(hidden @ weight.T + bias, label, reduction="none")
        loss = (share_N * losses).sum() + 0.5 * decay * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(objective)  # type: ignore[no-untyped-call]
    return weight.detach().numpy(), bias.detach().numpy()
