"""A causal LM of Transformers that is trained further: all parameters, or those that ask for a gradient (an adapter).

Shape letters: B rows of a batch, L tokens, P positions with loss, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grasp.arrays import F64, I64
from grasp.errors import ModelError
from grasp.models.causal_lm import context_of, dynamic_ropes, reset_ropes
from grasp.training.adamw import AdamWTraining, LabelLogits
from grasp.training.recipe import OptimizerRecipe

EXACT = (torch.float32, torch.float64)  # of weights: rounding of narrower ones is larger than what is differentiated


class FineTuning(AdamWTraining):
    """Train a causal LM in place; matrices are decayed, vectors are not.

    The model is in eval mode, so that dropout is off; layers that recompute their activations go on doing so.
    """

    def __init__(self, model: PreTrainedModel, recipe: OptimizerRecipe) -> None:
        """Prepare a model whose trained parameters ask for a gradient.

        Raises:
            ModelError: a compiled model, batch norm, weights in half precision, or nothing to train.
        """
        self.model = model
        self.notes = check_differentiable(model)
        named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
        decayed = [value for _, value in named if value.ndim > 1]
        undecayed = [value for _, value in named if value.ndim < 2]
        self.names = tuple(
            name for parameter in (*decayed, *undecayed) for name, value in named if value is parameter
        )  # in the order of `parameters`
        self._ropes = dynamic_ropes(model)
        super().__init__(recipe, decayed, undecayed)

    @property
    def context(self) -> int:
        return context_of(self.model.config) or 1 << 30

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    def causal_lm(self) -> PreTrainedModel:
        return self.model

    def by_name(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        return dict(zip(self.names, tensors, strict=True))

    def label_logits(self, ids_BL: I64, weight_BL: F64) -> LabelLogits:
        return self.label_logits_at(None, ids_BL, weight_BL)

    def label_logits_at(self, weights: Sequence[Tensor] | None, ids_BL: I64, weight_BL: F64) -> LabelLogits:
        """Run the model as it is, or with other weights in the place of its parameters."""
        reset_ropes(self._ropes)
        ids = torch.from_numpy(ids_BL).to(self.device)
        inputs = {"input_ids": ids, "use_cache": False}
        if weights is None:
            logits_BLV = self.model(**inputs).logits
        else:
            replaced = dict(zip(self.names, weights, strict=True))
            logits_BLV = torch.func.functional_call(self.model, replaced, kwargs=inputs).logits
        row_P, at_P = (index.to(self.device) for index in torch.from_numpy(weight_BL).nonzero(as_tuple=True))
        weight_P = torch.from_numpy(weight_BL).to(self.device)[row_P, at_P]
        return LabelLogits(logits_BLV[row_P, at_P], ids[row_P, at_P + 1], weight_P, row_P, len(ids_BL))


def check_differentiable(model: nn.Module) -> list[str]:
    """Prepare a model so that a step of its training is a smooth function of the weights.

    Returns:
        What was switched off, a sentence each.
    Raises:
        ModelError: what cannot be switched off.
    """
    name = type(model).__name__
    modules = list(model.modules())
    if hasattr(model, "_orig_mod") or any(getattr(module, "_compiled_call_impl", None) for module in modules):
        raise ModelError(
            f"{name}: is compiled, which recompiles for every shape; expected the model before torch.compile"
        )
    if norms := [type(module).__name__ for module in modules if isinstance(module, nn.modules.batchnorm._BatchNorm)]:
        raise ModelError(
            f"{name}: has {norms[0]}, by which rows change one another; expected a model without batch norm"
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ModelError(f"{name}: no parameter asks for a gradient, expected some; call requires_grad_() first")
    if narrow := {
        str(parameter.dtype).split(".")[1] for parameter in model.parameters() if parameter.dtype not in EXACT
    }:
        raise ModelError(
            f"{name}: has weights in {', '.join(sorted(narrow))}, whose rounding exceeds the differences that are "
            "taken; expected float32, set dtype to float32"
        )
    active = [module for module in modules if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0]
    rates = [value for module in modules for key, value in vars(module).items() if "dropout" in key]
    model.eval()
    for module in modules:
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # of this module alone: it recomputes its activations in training mode only
    if active or any(isinstance(rate, float) and rate > 0 for rate in rates):
        return ["Dropout is switched off: a random mask would be drawn anew each time a step is computed."]
    return []
