"""K models of one recipe trained at once, as one batched program.

Every model has its own seed, subset, data order and weights; only the work is shared: one batched matrix
product instead of K, one optimizer call. What is learned is what `grasp.runs.recipe.train` learns, up to
the rounding of batched kernels.

It is meant for a GPU, where a small model is bound by the number of kernels started. On a CPU one small model
already fills a core: K of them take K times as long, and separate processes use several cores better.

Tolerance: 1e-5 nats while training has not yet amplified rounding (tens of steps). A whole `tiny` run
    amplifies it as it would for one model under another order of summation: single units then differ by up
    to 0.1 nats and means over 200 units by 1e-3 to 4e-3, where two subsets and seeds differ by 0.2.

Shape letters: K models, E units, B rows of a batch, L tokens, P supervised positions, H hidden width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from grasp.errors import ShapeError
from grasp.models.unit_loss import length_batches, mean_losses, padded, refuse_non_finite, supervised
from grasp.runs.llama import StackedLlama
from grasp.runs.recipe import TrainingRecipe
from grasp.runs.training import Trainer
from grasp.runs.training_rows import RowSource, Share, batch_order, token_batches
from grasp.targets.units import UnitTokens


@dataclass(frozen=True, slots=True)
class StackedModels:
    """K trained models."""

    recipe: TrainingRecipe
    seeds: tuple[int, ...]
    losses: NDArray[np.float32]  # (steps, K), nats a label
    llama: StackedLlama

    def __len__(self) -> int:
        return len(self.seeds)

    def model(self, k: int, eos_id: int | None = None) -> LlamaForCausalLM:
        """Model k as an ordinary Hugging Face model on the CPU."""
        return self.llama.to_hf(k, eos_id)

    def unit_losses(self, unit_tokens: Sequence[UnitTokens], batch_tokens: int = 8192) -> NDArray[np.float64]:
        """`grasp.models.unit_loss.evaluate_units` of every model, (K, E) float64, nats a label.

        Args:
            batch_tokens: tokens of one forward pass: of all models together on a CPU, of each of them on a GPU.
        """
        if self.llama.device.type == "cpu":
            batch_tokens = max(1, batch_tokens // len(self))
        losses_KE = np.full((len(self), len(unit_tokens)), np.nan)
        lengths = [len(unit.input_ids) for unit in unit_tokens]
        with torch.inference_mode():
            for index_B in length_batches(lengths, batch_tokens):
                losses_KE[:, index_B] = self._losses([unit_tokens[int(i)] for i in index_B])
        for losses_E in losses_KE:
            refuse_non_finite(losses_E)
        return losses_KE

    def _losses(self, units: Sequence[UnitTokens]) -> NDArray[np.float64]:
        ids_BL, labelled_BL = padded(units)
        ids_KBL = ids_BL.to(self.llama.device).expand(len(self), -1, -1)
        hidden_KBLH = self.llama.hidden(ids_KBL)
        hidden_KPH = [supervised(hidden_BLH, labelled_BL) for hidden_BLH in hidden_KBLH]
        pairs = zip(hidden_KPH, self.llama.head, strict=True)
        return np.stack([mean_losses(hidden @ head.T, ids_BL, labelled_BL) for hidden, head in pairs])


def _in_cache(recipe: TrainingRecipe, n_models: int, device: str) -> TrainingRecipe:
    """On a CPU, K models read a K-th of the batch at a time: more activations at once would only leave the
    cache."""
    if torch.device(device).type != "cpu" or recipe.micro_rows is not None:
        return recipe
    return recipe.model_copy(update={"micro_rows": -(-recipe.batch_rows // n_models)})


def train_stacked(
    recipe: TrainingRecipe,
    rows: RowSource,
    *,
    seeds: Sequence[int],
    retained: Sequence[NDArray[np.bool_] | None],
    weights: Sequence[NDArray[np.float64] | None] | None = None,
    device: str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> StackedModels:
    """Train K models from scratch, model k from ``seeds[k]`` on the rows ``retained[k]``.

    Args:
        retained: K subsets, (N,) each; none: all rows.
        weights: K row weights, (N,) each; none: 1.
        progress: called with the number of steps done, after each.
    Raises:
        ShapeError: not as many subsets as seeds, or a subset that is not of the corpus.
        ModelError: as `grasp.runs.recipe.train`.
    """
    weights = [None] * len(seeds) if weights is None else weights
    if not len(seeds) == len(retained) == len(weights) or not seeds:
        raise ShapeError(
            f"train_stacked: got {len(seeds)} seeds, {len(retained)} subsets, {len(weights)} weights, expected as"
            " many of each, and at least one"
        )
    shares = [
        Share.of(rows.n_rows, recipe.batch_rows, kept, weight) for kept, weight in zip(retained, weights, strict=True)
    ]
    orders = [
        batch_order(share.kept_N, seed=seed, batch_rows=recipe.batch_rows, first_step=0, last_step=recipe.steps)
        for share, seed in zip(shares, seeds, strict=True)
    ]
    trainer = Trainer(_in_cache(recipe, len(seeds), device), seeds, device)
    shape = recipe.shape
    for batch in token_batches(rows, orders, steps=recipe.steps, context=shape.context, vocab_size=shape.vocab_size):
        trainer.advance(batch, shares)
        if progress is not None:
            progress(trainer.step)
    trainer.check()
    return StackedModels(recipe, tuple(seeds), trainer.losses, trainer.model)
