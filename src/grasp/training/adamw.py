"""Training with AdamW, split into the gradient of a batch, clipping and the update.

Start with `AdamWTraining`; its subclasses are `fine_tuning.FineTuning` (Transformers models) and `train.Trainer`. To
train, call `backward` and `update` alternately. To replay a training run, also set the weights and moments, and
compute losses and gradients at other weights.

The loss of a batch is ``sum_i sum_t weight_it loss_it`` over rows i and positions t. The default weight of a token is 1
over the number of labels in the whole batch, also if the batch is processed in micro-batches.

Shape letters: B rows of a batch, L tokens, P positions with loss, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from grasp.arrays import F64, I64
from grasp.training.recipe import OptimizerRecipe

STATE = ("weight", "exp_avg", "exp_avg_sq")  # state of each parameter, with the names of torch.optim.AdamW


@dataclass(frozen=True, slots=True)
class LabelLogits:
    """Logits at the positions whose next token is a label, with their autograd graph."""

    logits_PV: Tensor
    label_P: Tensor  # id of the next token
    weight_P: Tensor  # of its loss, float64
    row_P: Tensor  # row of the batch that contains the position
    n_rows: int  # B

    def row_losses(self) -> Tensor:
        """Return the contribution of each row to the loss, (B,), float64, nats."""
        loss_P = F.cross_entropy(self.logits_PV, self.label_P, reduction="none").double() * self.weight_P
        return torch.zeros(self.n_rows, dtype=torch.float64, device=loss_P.device).index_add(0, self.row_P, loss_P)


class AdamWTraining(ABC):
    """Weights, optimizer and step counter of a training run.

    Attributes:
        recipe: budget and settings of the optimizer.
        parameters: leaf tensors that the optimizer updates, each with a gradient buffer.
        clip_epsilon: constant in gradient clipping: ``c = min(1, clip_norm / (norm + clip_epsilon))``.
    """

    recipe: OptimizerRecipe
    clip_epsilon = 1e-6  # of torch.nn.utils.clip_grad_norm_

    def __init__(self, recipe: OptimizerRecipe, decayed: Sequence[Tensor], undecayed: Sequence[Tensor]) -> None:
        self.recipe = recipe
        self.parameters = (*decayed, *undecayed)
        self.weight_decays = (recipe.weight_decay,) * len(decayed) + (0.0,) * len(undecayed)
        groups = [(decayed, recipe.weight_decay), (undecayed, 0.0)]
        self.optimizer = torch.optim.AdamW(
            [{"params": list(params), "weight_decay": decay} for params, decay in groups if params],
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
        return self.parameters[0].device

    @property
    @abstractmethod
    def context(self) -> int:
        """Return the maximum number of tokens of a row."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Return the size of the vocabulary of the model."""

    @abstractmethod
    def label_logits(self, ids_BL: I64, weight_BL: F64) -> LabelLogits:
        """Run the model on a micro-batch.

        Args:
            ids_BL: token ids, padded on the right.
            weight_BL: weight of the loss of the token that follows each position; 0: not a label.
        """

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
                loss_B = self.label_logits(ids, weight).row_losses()
                loss_B.sum().backward()  # type: ignore[no-untyped-call]
                losses_of_batches.append(loss_B.detach())
        losses: F64 = torch.cat(losses_of_batches).cpu().numpy()
        return losses

    @torch.no_grad()
    def row_losses(self, ids_BL: I64, weight_BL: F64) -> F64:
        """Return the contribution of each row to the loss, (B,), nats, without computing gradients."""
        micro_batches = self.micro_batches(ids_BL, weight_BL)
        losses_of_batches = [self.label_logits(ids, weight).row_losses() for ids, weight in micro_batches]
        losses: F64 = torch.cat(losses_of_batches).cpu().numpy()
        return losses

    def gradients(self) -> list[Tensor]:
        """Return the gradient buffers, one per parameter."""
        return [grad_of(parameter) for parameter in self.parameters]

    def zero_gradients(self) -> None:
        """Set the gradient buffers to 0."""
        for gradient in self.gradients():
            gradient.zero_()

    # ------------------------------------------------------------------------------------------------------- the update

    def clip(self) -> None:
        """Scale the gradient to a norm of at most `clip_norm`."""
        if self.recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.clip_norm)

    def update(self) -> None:
        """Clip the gradient, take one step of AdamW, and set the gradient buffers to 0."""
        self.clip()
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


def grad_of(tensor: Tensor) -> Tensor:
    """Return the gradient buffer of a leaf that has one."""
    assert tensor.grad is not None
    return tensor.grad
