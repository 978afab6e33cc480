"""Train a model from scratch on a subset of a corpus: with checkpoints (`train`), or in memory (`train_in_memory`).

Start with `train`; `row_order` defines the order of rows and the batches.

Shape letters: K models, S steps, B rows of a batch, L tokens, T = B L, P positions with loss, N rows, H hidden
width. A label is a token with a loss, as in torch.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils import logging as hf_logging

from grasp.arrays import F32, F64, I64, Bool
from grasp.corpus.row_store import RowStore
from grasp.errors import ModelError
from grasp.files import atomic_path, discard, remove_parts
from grasp.models.tokenizer import HfTokenizer
from grasp.training.adamw import STATE, AdamWTraining, LabelLogits, grad_of
from grasp.training.llama import StackedLlama, head_loss
from grasp.training.recipe import TrainingRecipe
from grasp.training.row_order import TokenBatch, batch_order, label_weights, relative_weights, token_batches

# Files of a checkpoint
RECORD = "training.json"
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"


# -------------------------------------------------------------------------------------------------------- one step


class Trainer(AdamWTraining):
    """Weights, optimizer and step counter of K models that are trained together.

    Every model has its own loss, gradient norm and updates: nothing passes from one to another. `advance` takes a step
    of all of them. A trainer of one model is also an `AdamWTraining`, whose steps can be replayed: it inherits
    `update`, which clips with `clip`, takes the optimizer's step and counts it.
    """

    recipe: TrainingRecipe
    clip_epsilon = 0.0  # `clip` divides by the norm itself

    def __init__(self, recipe: TrainingRecipe, seeds: Sequence[int], device: str | torch.device) -> None:
        self.model = StackedLlama(recipe.shape, len(seeds), torch.device(device))
        self.model.initialise(seeds)
        super().__init__(recipe, [self.model.matrices], [self.model.vectors])
        self._losses_SK = torch.full((recipe.steps, len(seeds)), math.nan, device=self.device)

    @property
    def losses(self) -> F32:
        """Training loss of every step so far, (step, K): mean over the batch's labels, nats."""
        losses: F32 = self._losses_SK[: self.step].cpu().numpy()
        return losses

    @property
    def uses_bfloat16(self) -> bool:
        """Return whether products are taken in bfloat16."""
        return {"cuda": self.recipe.cuda_autocast, "cpu": self.recipe.cpu_autocast}.get(self.device.type, False)

    def advance(self, batch: TokenBatch) -> None:
        """Take one optimizer step; model k reads ``batch.ids_KBL[k]``."""
        loss_K, _ = self._backward(batch.ids_KBL, label_weights(batch))
        self._losses_SK[self.step] = loss_K
        self.update()

    def _backward(self, ids_KBL: I64, weight_KBL: F32) -> tuple[Tensor, Tensor]:
        """Add every model's gradient to its buffers; return losses (K,) and their terms by position, (K, B, L)."""
        model, device = self.model, self.device
        weights = torch.from_numpy(weight_KBL).to(device, non_blocking=True)
        all_ids = torch.from_numpy(ids_KBL).to(device, non_blocking=True)
        loss_K = torch.zeros(model.n_models, device=device)
        loss_KBL = torch.zeros_like(weights)
        micro_rows = self.recipe.micro_rows or all_ids.shape[1]
        micro_batches = (torch.split(tensor, micro_rows, dim=1) for tensor in (all_ids, weights))
        start = 0
        for ids, weight in zip(*micro_batches, strict=True):
            with torch.autocast(device.type, dtype=torch.bfloat16) if self.uses_bfloat16 else nullcontext():
                hidden = model.hidden(ids).flatten(1, 2)
                # position t predicts token t + 1; the label of the last position is arbitrary, as its weight is 0
                labels = ids.roll(-1, dims=2).flatten(1)
                loss_KT = torch.zeros_like(labels, dtype=torch.float32)
                # writes the terms of the sum to loss_KT
                micro_loss_K = head_loss(hidden, model.head, labels, weight.flatten(1), loss_KT)
            micro_loss_K.sum().backward()  # type: ignore[no-untyped-call]
            loss_K += micro_loss_K.detach()
            loss_KBL[:, start : start + ids.shape[1]] = loss_KT.view_as(ids)
            start += ids.shape[1]
        return loss_K, loss_KBL

    def clip(self) -> None:
        """Scale the gradient of every model to a norm of at most `clip_norm`."""
        gradients = [grad_of(weight) for weight in self.model.weights.values()]
        norms = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients])
        scale_K = (self.recipe.clip_norm / torch.linalg.vector_norm(norms, dim=0)).clamp_(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale_K.view(-1, *(1,) * (gradient.ndim - 1)))

    def check_losses(self) -> None:
        """Raise an error if a loss was not finite, with the model and the step."""
        not_finite = np.argwhere(~np.isfinite(self.losses))
        if not_finite.size:
            step, k = not_finite[0]
            raise ModelError(
                f"training: model {k} had loss {self.losses[step, k]} at step {step}; lower the recipe's learning_rate"
            )

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the first and second moments of both buffers, on the CPU."""
        state, buffers = self.state(), enumerate(("matrices", "vectors"))
        return {f"{name}.{moment}": state[f"{k}.{moment}"].cpu() for k, name in buffers for moment in STATE[1:]}

    def restore(self, step: int, optimizer_state: Mapping[str, Tensor], losses_SK: F32) -> None:
        """Restore the optimizer after `step` steps; the weights must already be loaded into `model`."""
        moments = {
            f"{k}.{moment}": optimizer_state[f"{name}.{moment}"]
            for k, name in enumerate(("matrices", "vectors"))
            for moment in STATE[1:]
        }
        self.set_state(step, self.state() | moments)
        self._losses_SK[:step] = torch.from_numpy(losses_SK).to(self.device)

    # ------------------------------------------------------------------------------- one model, to be replayed

    @property
    def context(self) -> int:
        return self.recipe.shape.context

    @property
    def vocab_size(self) -> int:
        return self.recipe.shape.vocab_size

    def label_logits(self, ids_BL: I64, weight_BL: F64) -> LabelLogits:
        ids = torch.from_numpy(ids_BL).to(self.device)
        row_P, position_P = (index.to(self.device) for index in torch.from_numpy(weight_BL).nonzero(as_tuple=True))
        hidden_PH = self.model.hidden(ids[None])[0, row_P, position_P]
        weight_P = torch.from_numpy(weight_BL).to(self.device)[row_P, position_P]
        return LabelLogits(hidden_PH @ self.model.head[0].T, ids[row_P, position_P + 1], weight_P, row_P, len(ids_BL))

    def backward(self, ids_BL: I64, weight_BL: F64) -> F64:
        """Add the gradient of the loss of one model to the buffers; return the contribution of each row, (B,), nats."""
        _, loss_KBL = self._backward(ids_BL[None], weight_BL[None].astype(np.float32))
        losses: F64 = loss_KBL[0].double().sum(dim=1).cpu().numpy()
        return losses


# ------------------------------------------------------------------------------------------------- one whole model


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A finished training run."""

    model: LlamaForCausalLM  # on the CPU, float32, eval mode
    losses: F32  # (steps,), nats per label


def train(
    recipe: TrainingRecipe,
    rows: RowStore,
    *,
    seed: int,
    retained: Bool | F64 | None = None,
    tokenizer: HfTokenizer | None = None,
    out: Path | None = None,
    checkpoints: tuple[int, ...] = (),
    device: str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> TrainedModel:
    """Train a model from scratch on a subset of a corpus.

    Training is deterministic: on a CPU, the same arguments and number of threads give identical weights, also if
    a killed run is resumed from its last checkpoint. On a GPU they agree up to rounding.

    Args:
        recipe: architecture, budget and optimizer.
        rows: the corpus.
        seed: seed of the initialisation and of the order of rows.
        retained: mask of the rows, or their relative frequencies, (N,). Default: all rows.
        tokenizer: saved with the model.
        out: directory of the finished Hugging Face checkpoint. It is complete if it contains `training.json`, which is
            written last. A finished run with the same arguments is loaded, an unfinished one is resumed.
        checkpoints: steps after which ``<out>/checkpoint-<step>``, a Hugging Face checkpoint with the state of the
            optimizer, is saved.
        device: device to train on.
        progress: callback that receives the number of finished steps after each step.
    Raises:
        ModelError: there are fewer rows than in a batch; a row is too long or has a token outside the vocabulary; a
            loss is not finite; or `out` has a run with other arguments.
    """
    frequency_N = relative_weights(rows.n_rows, recipe.batch_rows, retained)
    outside = [step for step in checkpoints if not 1 <= step <= recipe.steps]
    if outside:
        raise ModelError(f"checkpoints: got step {outside[0]}, expected 1 to {recipe.steps}")
    assert out is not None or not checkpoints
    subset = hashlib.blake2b(np.packbits(frequency_N > 0).tobytes(), digest_size=16)
    # the most frequent row has frequency 1, so that a mask and equal weights are the same subset
    if (frequency_N[frequency_N > 0] < 1).any():
        subset.update(frequency_N.tobytes())
    identity = {
        "recipe": recipe.model_dump(mode="json"),
        "seed": seed,
        "rows": rows.fingerprint,
        "subset": subset.hexdigest(),
    }
    trainer = Trainer(recipe, [seed], device)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        remove_parts(out)  # temporary files of a killed run
        _resume(trainer, out, identity)
    for step in _run_steps(trainer, rows, frequency_N, seed):
        if out is not None and step in checkpoints:
            _save(trainer, out / f"checkpoint-{step}", identity, tokenizer)
        if progress is not None:
            progress(step)
    if out is not None and not (out / RECORD).exists():
        discard(out / "final")
        final = _save(trainer, out / "final", identity, tokenizer)
        # the record is moved last: files of an interrupted move are written again by the next run
        for path in sorted(final.iterdir(), key=lambda path: path.name == RECORD):
            path.replace(out / path.name)
        final.rmdir()
    model = trainer.model.to_hf(0, None if tokenizer is None else tokenizer.eos_id)
    return TrainedModel(model, trainer.losses[:, 0])


def _run_steps(trainer: Trainer, rows: RowStore, frequency_N: F64, seed: int) -> Iterator[int]:
    """Train one model to the end on rows with these frequencies; yield the number of finished steps."""
    recipe, first, shape = trainer.recipe, trainer.step, trainer.recipe.shape
    order = batch_order(frequency_N, seed=seed, batch_rows=recipe.batch_rows, first_step=first, last_step=recipe.steps)
    steps = recipe.steps - first
    for batch in token_batches(rows, [order], steps=steps, context=shape.context, vocab_size=shape.vocab_size):
        trainer.advance(batch)
        yield trainer.step
    trainer.check_losses()


def _resume(trainer: Trainer, out: Path, identity: Mapping[str, Any]) -> None:
    """Load the finished model or the last checkpoint, if there is one."""
    path_of_step = {path.name.removeprefix("checkpoint-"): path for path in out.glob("checkpoint-*")}
    steps = sorted(filter(str.isdigit, path_of_step), key=int)
    if not steps and not (out / RECORD).exists():
        return
    last = out if (out / RECORD).exists() else path_of_step[steps[-1]]
    record = json.loads((last / RECORD).read_text(encoding="utf-8"))
    if differing := [key for key, value in identity.items() if record["identity"].get(key) != value]:
        raise ModelError(
            f"{last}: trained with another {', '.join(differing)}, expected the same; pass another directory"
            " or remove it"
        )
    trainer.model.load(0, load_file(last / WEIGHTS))
    trainer.restore(record["step"], load_file(last / OPTIMIZER), np.asarray(record["losses"], np.float32)[:, None])


def _save(trainer: Trainer, path: Path, identity: Mapping[str, Any], tokenizer: HfTokenizer | None) -> Path:
    """Save a Hugging Face checkpoint atomically, with the state of the optimizer and a record of its arguments."""
    trainer.check_losses()
    if path.exists():
        return path
    with atomic_path(path) as temporary:
        hf_logging.disable_progress_bar()  # the command line has its own progress display
        trainer.model.to_hf(0, None if tokenizer is None else tokenizer.eos_id).save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save(temporary)
        save_file(trainer.optimizer_state(), temporary / OPTIMIZER)
        losses = [float(loss) for loss in trainer.losses[:, 0]]
        record = {"identity": identity, "step": trainer.step, "losses": losses}
        (temporary / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
    return path


def train_in_memory(
    recipe: TrainingRecipe,
    rows: RowStore,
    *,
    seed: int,
    retained: Bool | F64 | None = None,
    device: str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Trainer:
    """Train a model from scratch as `train` does, and return its trainer; nothing is written.

    Raises:
        ModelError: as `train`.
    """
    frequency_N = relative_weights(rows.n_rows, recipe.batch_rows, retained)
    trainer = Trainer(recipe, [seed], device)
    for step in _run_steps(trainer, rows, frequency_N, seed):
        if progress is not None:
            progress(step)
    return trainer
