"""Training of a causal LM of Transformers with AdamW: the gradient of a batch, clipping, and the update.

Start with `AdamWTraining`. It trains all parameters, or those that require a gradient, e.g. an adapter. To train, call
`backward` and `update` alternately. To replay a training run, also set the weights and moments, and compute losses and
gradients at other weights; then a step must be a deterministic and smooth function of the weights, because replays
differentiate it by finite differences.

The loss of a batch is ``sum_i sum_t weight_it loss_it`` over rows i and positions t. The default weight of a token is 1
over the number of labels in the whole batch, also if the batch is processed in micro-batches.

Shape letters: B rows of a batch, L tokens, P positions with loss, H hidden width, V vocabulary.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import get_parameter_names

from grasp.arrays import F64, I64
from grasp.errors import ModelError
from grasp.models.causal_lm import context_of, dynamic_ropes, reset_ropes, run_body
from grasp.models.head import output_head
from grasp.training.recipe import OptimizerRecipe

STATE = ("weight", "exp_avg", "exp_avg_sq")  # state of each parameter, with the names of torch.optim.AdamW
CLIP_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_: gradients are scaled by min(1, clip_norm / (norm + epsilon))
# As in `Trainer.get_decay_parameter_names` of Transformers; 1-D state-space parameters, for example, are decayed.
UNDECAYED_LAYERS = [nn.LayerNorm]
UNDECAYED_NAMES = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
CHUNK_POSITIONS = 512  # positions whose logits are computed together on a CPU, so that they stay in the cache
CHUNK_ELEMENTS = 1 << 27  # logits that are computed together on a GPU: 512 MB in float32
EXACT_DTYPES = (torch.float32, torch.float64)  # the rounding error of narrower types exceeds the finite differences


@dataclass(frozen=True, slots=True)
class Labels:
    """The tokens of a batch that have a loss."""

    label_P: Tensor  # token ids
    weight_P: Tensor  # of their losses, float64
    row_P: Tensor  # row of the batch that contains each
    n_rows: int  # B

    def row_losses(self, logits_PV: Tensor) -> Tensor:
        """Return the contribution of each row to the loss, (B,), float64, nats, with its autograd graph."""
        return self.sum_rows(F.cross_entropy(logits_PV, self.label_P, reduction="none"))

    def sum_rows(self, loss_P: Tensor) -> Tensor:
        """Return the weighted sum of the losses of each row, (B,), float64."""
        loss_P = loss_P.double() * self.weight_P
        return torch.zeros(self.n_rows, dtype=torch.float64, device=loss_P.device).index_add(0, self.row_P, loss_P)


class AdamWTraining:
    """Weights, optimizer and step counter of a training run of a causal LM, in place.

    Biases and norms have no weight decay. The model is in eval mode, which disables dropout; layers with gradient
    checkpointing still recompute activations.

    Attributes:
        recipe: budget and settings of the optimizer.
        names: names of the parameters.
        parameters: leaf tensors that the optimizer updates, each with a gradient buffer.
        notes: what was disabled or left out.
    """

    def __init__(self, model: PreTrainedModel, recipe: OptimizerRecipe, *, bfloat16: bool = False) -> None:
        """Prepare a model.

        Args:
            model: causal LM; its parameters with `requires_grad` are trained, in place.
            recipe: budget and settings of the optimizer.
            bfloat16: products in bfloat16, while weights and losses stay as they are; not smooth enough for a replay.
        Raises:
            ModelError: the model is compiled, has batch norm or weights in half precision, has no trainable parameter,
                or has an output head that is not supported.
        """
        self.model, self.recipe, self.bfloat16 = model, recipe, bfloat16
        self.notes = check_differentiable(model)
        self._ropes = dynamic_ropes(model)
        self.head = output_head(model)
        decayed_names = set(get_parameter_names(model, UNDECAYED_LAYERS, UNDECAYED_NAMES))
        named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
        decayed = [(name, value) for name, value in named if name in decayed_names]
        undecayed = [(name, value) for name, value in named if name not in decayed_names]
        self.names = tuple(name for name, _ in decayed + undecayed)
        self.parameters = tuple(value for _, value in decayed + undecayed)
        self.weight_decays = (recipe.weight_decay,) * len(decayed) + (0.0,) * len(undecayed)
        groups = [(decayed, recipe.weight_decay), (undecayed, 0.0)]
        self.optimizer = torch.optim.AdamW(
            [{"params": [value for _, value in group], "weight_decay": decay} for group, decay in groups if group],
            lr=recipe.learning_rate,
            betas=recipe.betas,
            eps=recipe.epsilon,
            fused=True,
        )
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.step = 0

    @property
    def n_parameters(self) -> int:
        """Return the number of weights that are trained."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        """Return the bytes of the weights that are trained."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        device: torch.device = self.parameters[0].device
        return device

    @property
    def context(self) -> int:
        """Return the maximum number of tokens of a row."""
        return context_of(self.model.config) or 1 << 30  # no limit, e.g. a recurrent model

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary of the model."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)

    def label_states(self, ids_BL: I64, weight_BL: F64) -> tuple[Tensor, Labels]:
        """Run the model up to its head; return the states that predict a label, (P, H), and the labels.

        Args:
            ids_BL: token ids, padded on the right.
            weight_BL: weight of the loss of the token that follows each position; 0: not a label.
        """
        reset_ropes(self._ropes)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bfloat16):
            hidden_BLH = run_body(self.model, self.head, torch.from_numpy(ids_BL).to(self.device))
        position_P = np.flatnonzero(weight_BL)  # in the flattened batch
        arrays = (position_P, ids_BL.ravel()[position_P + 1], weight_BL.ravel()[position_P])
        position, label_P, weight_P = (torch.from_numpy(array).to(self.device) for array in arrays)
        labels = Labels(label_P, weight_P, position // ids_BL.shape[1], len(ids_BL))
        return hidden_BLH.flatten(0, 1).index_select(0, position), labels

    def logits(self, hidden_PH: Tensor) -> Tensor:
        """Return the logits of states, (P, V)."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bfloat16):
            logits_PV = self.head.link(self.head.linear_logits(hidden_PH))
        return logits_PV.float() if self.bfloat16 else logits_PV

    def label_logits(self, ids_BL: I64, weight_BL: F64) -> tuple[Tensor, Labels]:
        """Return the logits at the positions that predict a label, (P, V), and the labels; see `label_states`."""
        hidden_PH, labels = self.label_states(ids_BL, weight_BL)
        return self.logits(hidden_PH), labels

    # ------------------------------------------------------------------------------------------- losses and gradients

    def micro_batches(self, ids_BL: I64, weight_BL: F64) -> Iterator[tuple[I64, F64]]:
        """Split a batch into micro-batches."""
        rows = self.recipe.micro_rows or len(ids_BL)
        for start in range(0, len(ids_BL), rows):
            yield ids_BL[start : start + rows], weight_BL[start : start + rows]

    def backward(self, ids_BL: I64, weight_BL: F64) -> F64:
        """Add the gradient of the batch loss to the buffers; return the contribution of each row, (B,), nats."""
        losses_of_batches = []
        with torch.enable_grad():
            for ids, weight in self.micro_batches(ids_BL, weight_BL):
                states_PH, labels = self.label_states(ids, weight)
                leaf_PH = states_PH.detach().requires_grad_()
                losses_of_batches.append(labels.sum_rows(self._head_backward(leaf_PH, labels)))
                if states_PH.requires_grad:  # not if only the head is trained
                    states_PH.backward(leaf_PH.grad)  # type: ignore[no-untyped-call]
        losses: F64 = torch.cat(losses_of_batches).cpu().numpy()
        return losses

    def _head_backward(self, hidden_PH: Tensor, labels: Labels) -> Tensor:
        """Add the gradient of the loss to those of the head and of `hidden_PH`; return the losses, (P,), nats.

        The head runs on few positions at a time: new memory for all logits, their softmax and their gradients would
        take a fifth of a step of a tiny model. A loss above -log(tiny) (87 nats in float32) is reported as that.
        """
        chunk = max(CHUNK_POSITIONS, 0 if self.device.type == "cpu" else CHUNK_ELEMENTS // self.vocab_size)
        losses = []
        tensors = (hidden_PH, labels.label_P[:, None], labels.weight_P[:, None])
        for hidden, label, weight in zip(*(torch.split(tensor, chunk) for tensor in tensors), strict=True):
            logits = self.logits(hidden)
            # d loss / d logits = weight (p - onehot(label)), computed in the memory of p
            gradient = torch.softmax(logits.detach(), dim=1)
            losses.append(-gradient.gather(1, label).clamp_min_(torch.finfo(gradient.dtype).tiny).log_()[:, 0])
            gradient.scatter_add_(1, label, torch.full_like(label, -1, dtype=gradient.dtype))
            logits.backward(gradient.mul_(weight.to(gradient.dtype)))  # type: ignore[no-untyped-call]
        return torch.cat(losses)

    @torch.no_grad()
    def row_losses(self, ids_BL: I64, weight_BL: F64) -> F64:
        """Return the contribution of each row to the loss, (B,), nats, without computing gradients."""
        losses_of_batches = []
        for ids, weight in self.micro_batches(ids_BL, weight_BL):
            logits_PV, labels = self.label_logits(ids, weight)
            losses_of_batches.append(labels.row_losses(logits_PV))
        losses: F64 = torch.cat(losses_of_batches).cpu().numpy()
        return losses

    def gradients(self) -> list[Tensor]:
        """Return the gradient buffers, one per parameter."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def zero_gradients(self) -> None:
        """Set the gradient buffers to 0."""
        for gradient in self.gradients():
            gradient.zero_()

    # ------------------------------------------------------------------------------------------------------- the update

    def check_loss(self, loss: float) -> None:
        """Raise an error if the loss of the current step is not finite."""
        if not np.isfinite(loss):
            raise ModelError(f"training: step {self.step} had loss {loss}; lower the learning rate")

    def update(self) -> None:
        """Clip the gradient, take one step of AdamW, and set the gradient buffers to 0."""
        if self.recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate_at(self.step)
        self.optimizer.step()
        self.zero_gradients()
        self.step += 1

    # -------------------------------------------------------------------------------------------------------- the state

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """Return weights and moments without copying: ``<k>.weight``, ``<k>.exp_avg``, ``<k>.exp_avg_sq``."""
        tensors = {}
        for k, parameter in enumerate(self.parameters):
            moments = self.optimizer.state.get(parameter, {})
            tensors[f"{k}.weight"] = parameter.detach()
            for moment in STATE[1:]:
                tensors[f"{k}.{moment}"] = moments[moment] if moments else torch.zeros_like(parameter)
        return tensors

    def set_state(self, step: int, state: Mapping[str, Tensor]) -> None:
        """Restore a state that `state` returned after `step` steps, and set the gradient buffers to 0."""
        self.set_weights(state[f"{k}.weight"] for k in range(len(self.parameters)))
        for k, parameter in enumerate(self.parameters):
            self.optimizer.state[parameter] = {
                "step": torch.tensor(float(step), device=self.device),
                **{moment: state[f"{k}.{moment}"].to(self.device, copy=True) for moment in STATE[1:]},
            }
        self.step = step
        self.zero_gradients()

    @torch.no_grad()
    def set_weights(self, weights: Iterable[Tensor]) -> None:
        """Copy weights into the parameters."""
        for parameter, weight in zip(self.parameters, weights, strict=True):
            parameter.copy_(weight)


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
