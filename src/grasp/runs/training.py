"""The training loop: K models of one recipe, step by step, from the same code whether K is one or many.

Shape letters: K models, B rows of a batch, L tokens, T = B L, H hidden width.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grasp.errors import ModelError
from grasp.runs.head_loss import head_loss
from grasp.runs.llama import StackedLlama
from grasp.runs.recipe import TrainingRecipe
from grasp.runs.training_rows import Share, TokenBatch


class Trainer:
    """Weights, optimizer and step counter of K models that are trained together.

    Every model has its own loss, gradient norm and updates: nothing passes from one to another.
    """

    def __init__(self, recipe: TrainingRecipe, seeds: Sequence[int], device: str | torch.device) -> None:
        self.recipe = recipe
        self.device = torch.device(device)
        self.model = StackedLlama(recipe.shape, len(seeds), self.device)
        self.model.initialise(seeds)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [self.model.matrices], "weight_decay": recipe.weight_decay},
                {"params": [self.model.vectors], "weight_decay": 0.0},
            ],
            betas=recipe.betas,
            fused=True,
        )
        self.step = 0
        self._losses_SK = torch.full((recipe.steps, len(seeds)), math.nan, device=self.device)

    @property
    def losses(self) -> NDArray[np.float32]:
        """Training loss of every step so far, (step, K): weighted mean over the batch's labels, nats."""
        losses: NDArray[np.float32] = self._losses_SK[: self.step].cpu().numpy()
        return losses

    def advance(self, batch: TokenBatch, shares: Sequence[Share]) -> None:
        """One optimizer step; model k reads ``batch.ids_KBL[k]``, its rows weighted by ``shares[k]``."""
        weight_KBL = torch.from_numpy(label_weights(batch, shares)).to(self.device, non_blocking=True)
        ids_KBL = torch.from_numpy(batch.ids_KBL).to(self.device, non_blocking=True)
        loss_K = torch.zeros(self.model.n_models, device=self.device)
        pieces = self.recipe.micro_rows or ids_KBL.shape[1]
        for ids, weight in zip(torch.split(ids_KBL, pieces, 1), torch.split(weight_KBL, pieces, 1), strict=True):
            loss_K += self._accumulate(ids, weight)
        self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate_at(self.step)
        self.optimizer.step()
        for buffer in (self.model.matrices, self.model.vectors):
            _grad(buffer).zero_()
        self._losses_SK[self.step] = loss_K
        self.step += 1

    def check(self) -> None:
        """Refuse weights that came out of a loss that is not a number.

        Raises:
            ModelError: names the model and the step.
        """
        bad = np.argwhere(~np.isfinite(self.losses))
        if bad.size:
            raise ModelError(
                f"training: model {bad[0][1]} had loss {self.losses[tuple(bad[0])]} at step {bad[0][0]};"
                " lower the recipe's learning_rate"
            )

    def optimizer_state(self) -> dict[str, Tensor]:
        """First and second moments of both buffers, on the CPU."""
        return {
            f"{name}.{moment}": self.optimizer.state[buffer][moment].cpu()
            for name, buffer in self._buffers()
            for moment in ("exp_avg", "exp_avg_sq")
        }

    def restore(self, step: int, optimizer_state: Mapping[str, Tensor], losses_SK: NDArray[np.float32]) -> None:
        """Go on after `step` steps; the weights must have been loaded into `model`."""
        for name, buffer in self._buffers():
            self.optimizer.state[buffer] = {
                "step": torch.tensor(float(step), device=self.device),
                "exp_avg": optimizer_state[f"{name}.exp_avg"].to(self.device),
                "exp_avg_sq": optimizer_state[f"{name}.exp_avg_sq"].to(self.device),
            }
        self.step = step
        self._losses_SK[:step] = torch.from_numpy(losses_SK).to(self.device)

    def _buffers(self) -> tuple[tuple[str, Tensor], tuple[str, Tensor]]:
        return ("matrices", self.model.matrices), ("vectors", self.model.vectors)

    def _accumulate(self, ids_KBL: Tensor, weight_KBL: Tensor) -> Tensor:
        """Add the gradient of one piece of the batch; its share of the loss, (K,)."""
        with self._autocast():
            hidden = self.model.hidden(ids_KBL).flatten(1, 2)
            # position t predicts token t + 1; the last position has weight 0, so what it is paired with is idle
            labels = ids_KBL.roll(-1, dims=2).flatten(1)
            loss_K = head_loss(hidden, self.model.head, labels, weight_KBL.flatten(1))
        loss_K.sum().backward()  # type: ignore[no-untyped-call]
        return loss_K.detach()

    def _autocast(self) -> AbstractContextManager[object]:
        if self.device.type == "cuda" and self.recipe.cuda_autocast:
            return torch.autocast("cuda", dtype=torch.bfloat16)
        return nullcontext()

    def _clip(self) -> None:
        """Scale the gradient of every model to a norm of at most `clip_norm`."""
        gradients = [_grad(weight) for weight in self.model.weights.values()]
        norms = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients])
        scale_K = (self.recipe.clip_norm / torch.linalg.vector_norm(norms, dim=0)).clamp_(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale_K.view(-1, *(1,) * (gradient.ndim - 1)))


def label_weights(batch: TokenBatch, shares: Sequence[Share]) -> NDArray[np.float32]:
    """Weight of every position's label in the loss, (K, B, L); sums to 1 for each model, 0 on padding."""
    row_KB = np.stack([share.weight(index) for share, index in zip(shares, batch.row_index_KB, strict=True)])
    has_label_KBL = np.zeros_like(batch.labelled_KBL)
    has_label_KBL[..., :-1] = batch.labelled_KBL[..., 1:]  # position t predicts token t + 1
    labels_KB = has_label_KBL.sum(axis=2)
    row_KB /= np.maximum((row_KB * labels_KB).sum(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    return np.where(has_label_KBL, row_KB[..., None], 0.0).astype(np.float32)


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad
