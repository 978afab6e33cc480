"""Fine-tune a causal LM of Transformers: all parameters, or those that require a gradient, e.g. an adapter.

Start with `FineTuning`; its base class `AdamWTraining` has the optimizer. A training step must be a deterministic and
smooth function of the weights, because replays differentiate it by finite differences.

Shape letters: B rows of a batch, L tokens, P positions with loss, V vocabulary.
"""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import get_parameter_names

from grasp.arrays import F64, I64
from grasp.errors import ModelError
from grasp.models.causal_lm import context_of, dynamic_ropes, reset_ropes
from grasp.training.adamw import AdamWTraining, LabelLogits
from grasp.training.recipe import OptimizerRecipe

# As in `Trainer.get_decay_parameter_names` of Transformers; 1-D state-space parameters, for example, are decayed.
UNDECAYED_LAYERS = [nn.LayerNorm]
UNDECAYED_NAMES = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
EXACT_DTYPES = (torch.float32, torch.float64)  # the rounding error of narrower types exceeds the finite differences


class FineTuning(AdamWTraining):
    """Fine-tune a causal LM in place, with weight decay of all parameters but biases and norms.

    The model is in eval mode, which disables dropout; layers with gradient checkpointing still recompute activations.
    """

    def __init__(self, model: PreTrainedModel, recipe: OptimizerRecipe) -> None:
        """Prepare a model.

        Args:
            model: causal LM; its parameters with `requires_grad` are trained, in place.
            recipe: budget and settings of the optimizer.
        Raises:
            ModelError: the model is compiled, has batch norm or weights in half precision, or has no trainable
                parameter.
        """
        self.model = model
        self.notes = check_differentiable(model)
        named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
        decayed_names = set(get_parameter_names(model, UNDECAYED_LAYERS, UNDECAYED_NAMES))
        decayed = {name: value for name, value in named if name in decayed_names}
        undecayed = {name: value for name, value in named if name not in decayed_names}
        self.names = (*decayed, *undecayed)  # in the order of `parameters`
        self._ropes = dynamic_ropes(model)
        super().__init__(recipe, list(decayed.values()), list(undecayed.values()))

    @property
    def context(self) -> int:
        return context_of(self.model.config) or 1 << 30  # no limit, e.g. a recurrent model

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    def label_logits(self, ids_BL: I64, weight_BL: F64) -> LabelLogits:
        reset_ropes(self._ropes)
        ids = torch.from_numpy(ids_BL).to(self.device)
        logits_BLV = self.model(input_ids=ids, use_cache=False).logits
        row_P, position_P = (index.to(self.device) for index in torch.from_numpy(weight_BL).nonzero(as_tuple=True))
        weight_P = torch.from_numpy(weight_BL).to(self.device)[row_P, position_P]
        return LabelLogits(logits_BLV[row_P, position_P], ids[row_P, position_P + 1], weight_P, row_P, len(ids_BL))


def check_differentiable(model: nn.Module) -> list[str]:
    """Set a model up so that a training step is a deterministic, smooth function of the weights.

    Returns:
        Notes on what was disabled or left out.

    Raises:
        ModelError: the model has a property that prevents this and cannot be disabled.
    """
    name = type(model).__name__
    modules = list(model.modules())
    norms = {type(module).__name__ for module in modules if isinstance(module, nn.modules.batchnorm._BatchNorm)}
    inexact = {str(tensor.dtype).split(".")[1] for tensor in model.parameters() if tensor.dtype not in EXACT_DTYPES}
    problems = {
        "is compiled, and would be compiled again for every shape; pass the model before torch.compile": (
            hasattr(model, "_orig_mod") or any(getattr(module, "_compiled_call_impl", None) for module in modules)
        ),
        f"has {', '.join(norms)}, which makes rows of a batch depend on each other; expected no batch norm": norms,
        "no parameter requires a gradient; call requires_grad_() on those to train": (
            not any(parameter.requires_grad for parameter in model.parameters())
        ),
        f"has weights in {', '.join(sorted(inexact))}, whose rounding error exceeds the finite differences; set dtype "
        "to float32": inexact,
    }
    if problem := next((problem for problem, is_present in problems.items() if is_present), ""):
        raise ModelError(f"{name}: {problem}")
    active_dropouts = [
        module for module in modules if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    ]
    rates = [value for module in modules for key, value in vars(module).items() if "dropout" in key]
    model.eval()
    for module in modules:
        if getattr(module, "gradient_checkpointing", False):
            module.training = True  # not recursively: checkpointing is only active in training mode
    notes = []
    if active_dropouts or any(isinstance(rate, float) and rate > 0 for rate in rates):
        notes.append("dropout is disabled, because a replayed step would draw another random mask")
    if getattr(getattr(model, "config", None), "output_router_logits", False):
        notes.append("the auxiliary loss that balances the routers is left out: it is not a sum over rows")
    return notes
