"""Train models from scratch on subsets of a corpus: one with checkpoints (`train`), or K at once (`train_stacked`).

K models of the same recipe are one batched program. Every model has its own seed, subset, data order and weights; only
computation is shared, in batched matrix products and one optimizer call. The models are those of `train` up to the
rounding of batched kernels.

`train_stacked` is for GPUs, on which the training time of a small model is determined by the number of kernel launches.
On a CPU, one small model already uses a core: K models take K times as long, and separate processes use several cores
better.

Tolerance: 1e-5 nats for tens of steps, before training amplifies rounding errors. A whole `tiny` run amplifies them as
    much as another order of summation would for one model: single units then differ by up to 0.1 nats, and means over
    200 units by 1e-3 to 4e-3, compared with 0.2 between subsets and seeds.

The first functions define the order of rows and padded batches. Start with `train`.

Shape letters: K models, S steps of a window, B rows of a batch, L tokens, T = B L, N rows, H hidden width.
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
from grasp.errors import ModelError, ShapeError
from grasp.files import atomic_path, discard, remove_parts
from grasp.models.tokenizer import HfTokenizer
from grasp.seeds import stream
from grasp.training.adamw import AdamWTraining, LabelLogits, grad_of
from grasp.training.llama import StackedLlama, head_loss
from grasp.training.recipe import TrainingRecipe

WINDOW_ROWS = 16_384  # rows read at once, so that a shard on disk is read a few times instead of once per batch
RECORD = "training.json"
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"


def relative_weights(n_rows: int, batch_rows: int, retained: Bool | F64 | None) -> F64:
    """Return the frequency of each row relative to the most frequent row, (N,), from 0 (dropped) to 1.

    Args:
        retained: mask of the retained rows, or one weight per row; a row of weight 2 is seen twice as often as one of
            weight 1.
    Raises:
        ShapeError: `retained` has a wrong shape.
        ModelError: a weight is negative or not finite, or there are fewer rows than in a batch.
    """
    weight_N = np.ones(n_rows) if retained is None else np.asarray(retained, dtype=np.float64)
    if weight_N.shape != (n_rows,):
        raise ShapeError(f"retained: got shape {weight_N.shape}, expected ({n_rows},): one entry per row")
    invalid = np.flatnonzero(~(np.isfinite(weight_N) & (weight_N >= 0)))
    if invalid.size:
        raise ModelError(f"retained: row {invalid[0]} has weight {weight_N[invalid[0]]}, expected a finite number >= 0")
    if (n_retained := np.count_nonzero(weight_N)) < batch_rows:
        raise ModelError(
            f"retained: {n_retained} of {n_rows} rows, expected at least the {batch_rows} of one batch; retain"
            " more rows or lower the recipe's batch_rows"
        )
    frequency_N: F64 = weight_N / weight_N.max()
    return frequency_N


def row_order(frequency_N: Bool | F64, *, seed: int, start: int = 0) -> Iterator[I64]:
    """Yield the rows in training order from position `start`, endlessly, in chunks of at most one epoch.

    Every epoch is a permutation of the whole corpus, which is the same for all subsets of a seed; dropped rows are
    skipped. Therefore two subsets see their common rows in the same order. A row with frequency a < 1 is skipped in
    some epochs: it is seen in epoch e if an integer lies in (e a + u, (e + 1) a + u], with a random phase u per row.
    """
    phase_N = stream(seed, "order", "phase").random(len(frequency_N))
    epoch = 0
    while True:
        seen_N = np.floor((epoch + 1) * frequency_N + phase_N) > np.floor(epoch * frequency_N + phase_N)
        if (n_seen := int(np.count_nonzero(seen_N))) > start:
            order = stream(seed, "order", epoch).permutation(len(frequency_N))
            yield order[seen_N[order]][start:]
        epoch, start = epoch + 1, max(start - n_seen, 0)


def batch_order(
    frequency_N: Bool | F64, *, seed: int, batch_rows: int, first_step: int, last_step: int
) -> Iterator[I64]:
    """Yield the rows of each step in [`first_step`, `last_step`), (B,) each; a batch may span two epochs."""
    pieces = row_order(frequency_N, seed=seed, start=first_step * batch_rows)
    pending = np.zeros(0, dtype=np.int64)
    for _ in range(first_step, last_step):
        while len(pending) < batch_rows:
            pending = np.concatenate([pending, next(pieces)])
        yield pending[:batch_rows]
        pending = pending[batch_rows:]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """The rows of one step for K models: `ids_KBL`, padded on the right with 0, and a mask of the labels."""

    row_index_KB: I64
    ids_KBL: I64
    labelled_KBL: Bool


def token_batches(
    rows: RowStore, orders: Sequence[Iterator[I64]], *, steps: int, context: int, vocab_size: int
) -> Iterator[TokenBatch]:
    """Yield the batches of `steps` steps; model k reads the rows of ``orders[k]``. Many steps are read at once.

    Raises:
        ModelError: a row is longer than `context`, or has a token outside the vocabulary.
    """
    window: list[I64] = []
    for step in range(steps):
        window.append(np.stack([next(order) for order in orders]))
        if (len(window) + 1) * window[0].size > WINDOW_ROWS or step == steps - 1:
            yield from _fetched(rows, np.stack(window), context, vocab_size)
            window = []


def _fetched(rows: RowStore, index_SKB: I64, context: int, vocab_size: int) -> Iterator[TokenBatch]:
    """Yield the batches of a window of steps, whose rows are read at once."""
    unique, position = np.unique(index_SKB, return_inverse=True)
    fetched = rows.rows(unique)
    starts, lengths = fetched.offsets[:-1], np.diff(fetched.offsets)
    if (long := np.flatnonzero(lengths > context)).size:
        raise ModelError(
            f"row {unique[long[0]]} has {lengths[long[0]]} tokens, the recipe reads at most {context}: set"
            f" corpus.max_length to {context}, or increase the recipe's context"
        )
    if (outside := np.flatnonzero((fetched.flat_ids < 0) | (fetched.flat_ids >= vocab_size))).size:
        row = np.searchsorted(fetched.offsets, outside[0], side="right") - 1
        raise ModelError(
            f"row {unique[row]} has token id {fetched.flat_ids[outside[0]]}, the recipe's vocabulary ends at"
            f" {vocab_size - 1}: use the tokenizer that the recipe's vocab_size belongs to"
        )
    flat = np.append(fetched.flat_ids, 0)  # index -1 is padding
    flat_labelled = np.ones(len(flat), np.bool_)
    if fetched.loss_mask is not None:
        flat_labelled[:-1] = fetched.loss_mask
    flat_labelled[[*starts, -1]] = False  # the first token of a row is not predicted, and padding has no labels
    for index_KB, place_KB in zip(index_SKB, position.reshape(index_SKB.shape), strict=True):
        lengths_KB = lengths[place_KB]
        reach_L = np.arange(lengths_KB.max())
        at_KBL = np.where(reach_L < lengths_KB[..., None], starts[place_KB][..., None] + reach_L, -1)
        yield TokenBatch(index_KB, flat[at_KBL].astype(np.int64), flat_labelled[at_KBL])


# -------------------------------------------------------------------------------------------------------- one step


class Trainer(AdamWTraining):
    """Weights, optimizer and step counter of K models that are trained together.

    Every model has its own loss, gradient norm and updates: nothing passes from one to another.
    """

    recipe: TrainingRecipe
    clip_epsilon = 0.0

    def __init__(self, recipe: TrainingRecipe, seeds: Sequence[int], device: str | torch.device) -> None:
        self.model = StackedLlama(recipe.shape, len(seeds), torch.device(device))
        self.model.initialise(seeds)
        super().__init__(recipe, [self.model.matrices], [self.model.vectors])
        self._buffers = {"matrices": self.model.matrices, "vectors": self.model.vectors}
        self._losses_SK = torch.full((recipe.steps, len(seeds)), math.nan, device=self.device)

    @property
    def losses(self) -> F32:
        """Training loss of every step so far, (step, K): mean over the batch's labels, nats."""
        losses: F32 = self._losses_SK[: self.step].cpu().numpy()
        return losses

    @property
    def narrow(self) -> bool:
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
        every_id = torch.from_numpy(ids_KBL).to(device, non_blocking=True)
        loss_K = torch.zeros(model.n_models, device=device)
        loss_KBL = torch.zeros_like(weights)
        pieces = (torch.split(tensor, self.recipe.micro_rows or every_id.shape[1], 1) for tensor in (every_id, weights))
        start = 0
        for ids, weight in zip(*pieces, strict=True):
            with torch.autocast(device.type, dtype=torch.bfloat16) if self.narrow else nullcontext():
                hidden = model.hidden(ids).flatten(1, 2)
                # position t predicts token t + 1; the label of the last position is arbitrary, as its weight is 0
                labels = ids.roll(-1, dims=2).flatten(1)
                loss_KT = torch.zeros_like(labels, dtype=torch.float32)
                piece_K = head_loss(hidden, model.head, labels, weight.flatten(1), loss_KT)
            piece_K.sum().backward()  # type: ignore[no-untyped-call]
            loss_K += piece_K.detach()
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

    # ------------------------------------------------------------------------------- one model, for trajectories

    @property
    def context(self) -> int:
        return self.recipe.shape.context

    @property
    def vocab_size(self) -> int:
        return self.recipe.shape.vocab_size

    def causal_lm(self) -> LlamaForCausalLM:
        return self.model.to_hf(0)

    def by_name(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        weights = [parameter.detach().clone() for parameter in self.parameters]
        self.set_weights(tensors)
        named = {name: tensor.clone() for name, tensor in self.model.tensors(0)}
        self.set_weights(weights)
        return named

    def label_logits(self, ids_BL: I64, weight_BL: F64) -> LabelLogits:
        ids = torch.from_numpy(ids_BL).to(self.device)
        row_P, at_P = (index.to(self.device) for index in torch.from_numpy(weight_BL).nonzero(as_tuple=True))
        hidden_PH = self.model.hidden(ids[None])[0, row_P, at_P]
        weight_P = torch.from_numpy(weight_BL).to(self.device)[row_P, at_P]
        return LabelLogits(hidden_PH @ self.model.head[0].T, ids[row_P, at_P + 1], weight_P, row_P, len(ids_BL))

    def backward(self, ids_BL: I64, weight_BL: F64) -> F64:
        """Add the gradient of the loss of one model to the buffers; return the contribution of each row, (B,), nats."""
        _, loss_KBL = self._backward(ids_BL[None], weight_BL[None].astype(np.float32))
        losses: F64 = loss_KBL[0].double().sum(dim=1).cpu().numpy()
        return losses

    def check_losses(self) -> None:
        """Raise an error if a loss was not finite, with the model and the step."""
        bad = np.argwhere(~np.isfinite(self.losses))
        if bad.size:
            raise ModelError(
                f"training: model {bad[0][1]} had loss {self.losses[tuple(bad[0])]} at step {bad[0][0]};"
                " lower the recipe's learning_rate"
            )

    def optimizer_state(self) -> dict[str, Tensor]:
        """Return the first and second moments of both buffers, on the CPU."""
        return {
            f"{name}.{moment}": self.optimizer.state[buffer][moment].cpu()
            for name, buffer in self._buffers.items()
            for moment in ("exp_avg", "exp_avg_sq")
        }

    def restore(self, step: int, optimizer_state: Mapping[str, Tensor], losses_SK: F32) -> None:
        """Restore the optimizer after `step` steps; the weights must already be loaded into `model`."""
        for name, buffer in self._buffers.items():
            self.optimizer.state[buffer] = {
                "step": torch.tensor(float(step), device=self.device),
                "exp_avg": optimizer_state[f"{name}.exp_avg"].to(self.device),
                "exp_avg_sq": optimizer_state[f"{name}.exp_avg_sq"].to(self.device),
            }
        self.step = step
        self._losses_SK[:step] = torch.from_numpy(losses_SK).to(self.device)


def label_weights(batch: TokenBatch) -> F32:
    """Return the weight of the label of each position in the loss, (K, B, L); sums to 1 per model, 0 on padding."""
    has_label_KBL = np.zeros_like(batch.labelled_KBL)
    has_label_KBL[..., :-1] = batch.labelled_KBL[..., 1:]  # position t predicts token t + 1
    labels_K11 = np.maximum(has_label_KBL.sum(axis=(1, 2), keepdims=True), 1)
    return np.asarray(has_label_KBL / labels_K11, dtype=np.float32)


# ------------------------------------------------------------------------------------------------- one whole model


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A finished training run."""

    model: LlamaForCausalLM  # on the CPU, float32, eval mode
    losses: F32  # (steps,), nats per label
    checkpoints: tuple[Path, ...]  # intermediate ones, by step


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
        retained: mask of the rows, or their relative frequencies, (N,). Default: all rows.
        tokenizer: saved with the model.
        out: directory of the finished Hugging Face checkpoint. It is complete if it contains `training.json`, which is
            written last. A finished run with the same arguments is loaded, an unfinished one is resumed.
        checkpoints: steps after which ``<out>/checkpoint-<step>``, a Hugging Face checkpoint with the state of the
            optimizer, is saved.
        progress: callback that receives the number of finished steps after each step.
    Raises:
        ShapeError: `retained` has a wrong shape.
        ModelError: there are fewer rows than in a batch; a row is too long or has a token outside the vocabulary; a
            loss is not finite; or `out` has a run with other arguments.
    """
    frequency_N = relative_weights(rows.n_rows, recipe.batch_rows, retained)
    outside = [step for step in checkpoints if not 1 <= step <= recipe.steps]
    if outside:
        raise ModelError(f"checkpoints: got step {outside[0]}, expected 1 to {recipe.steps}")
    if checkpoints and out is None:
        raise ModelError("checkpoints: got steps without `out`, expected a directory for them")
    subset = hashlib.blake2b(np.packbits(frequency_N > 0).tobytes(), digest_size=16)
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
    for step in _steps(trainer, rows, [frequency_N], [seed]):
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
    return TrainedModel(model, trainer.losses[:, 0], () if out is None else _checkpoints(out))


def _steps(trainer: Trainer, rows: RowStore, frequency_KN: Sequence[F64], seeds: Sequence[int]) -> Iterator[int]:
    """Train to the end, model k with the row frequencies ``frequency_KN[k]``; yield the number of finished steps."""
    recipe, first = trainer.recipe, trainer.step
    orders = [
        batch_order(frequency_N, seed=seed, batch_rows=recipe.batch_rows, first_step=first, last_step=recipe.steps)
        for frequency_N, seed in zip(frequency_KN, seeds, strict=True)
    ]
    shape, steps = recipe.shape, recipe.steps - first
    for batch in token_batches(rows, orders, steps=steps, context=shape.context, vocab_size=shape.vocab_size):
        trainer.advance(batch)
        yield trainer.step
    trainer.check_losses()


def _checkpoints(out: Path) -> tuple[Path, ...]:
    path_of_step = {path.name.removeprefix("checkpoint-"): path for path in out.glob("checkpoint-*")}
    return tuple(path_of_step[step] for step in sorted(filter(str.isdigit, path_of_step), key=int))


def _resume(trainer: Trainer, out: Path, identity: Mapping[str, Any]) -> None:
    """Load the finished model or the last checkpoint, if there is one."""
    places = [*_checkpoints(out), *([out] if (out / RECORD).exists() else [])]
    if not places:
        return
    record = json.loads((places[-1] / RECORD).read_text(encoding="utf-8"))
    if other := [key for key, value in identity.items() if record["identity"].get(key) != value]:
        raise ModelError(
            f"{places[-1]}: trained with another {', '.join(other)}, expected the same; pass another directory"
            " or remove it"
        )
    trainer.model.load(0, load_file(places[-1] / WEIGHTS))
    trainer.restore(
        record["step"], load_file(places[-1] / OPTIMIZER), np.asarray(record["losses"], np.float32)[:, None]
    )


def _save(trainer: Trainer, place: Path, identity: Mapping[str, Any], tokenizer: HfTokenizer | None) -> Path:
    """Save a Hugging Face checkpoint atomically, with the state of the optimizer and a record of its arguments."""
    trainer.check_losses()
    if place.exists():
        return place
    with atomic_path(place) as part:
        hf_logging.disable_progress_bar()  # the command line has its own progress display
        trainer.model.to_hf(0, None if tokenizer is None else tokenizer.eos_id).save_pretrained(part)
        if tokenizer is not None:
            tokenizer.save(part)
        save_file(trainer.optimizer_state(), part / OPTIMIZER)
        losses = [float(loss) for loss in trainer.losses[:, 0]]
        record = {"identity": identity, "step": trainer.step, "losses": losses}
        (part / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
    return place


# ------------------------------------------------------------------------------------------------------- K at once


def train_stacked(
    recipe: TrainingRecipe,
    rows: RowStore,
    *,
    seeds: Sequence[int],
    retained: Sequence[Bool | F64 | None],
    device: str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Trainer:
    """Train K models from scratch, model k with ``seeds[k]`` on the rows ``retained[k]``, and return their trainer.

    Args:
        retained: K subsets, as in `train`.
        progress: callback that receives the number of finished steps after each step.
    Raises:
        ShapeError: the numbers of subsets and seeds differ, or a subset has a wrong shape.
        ModelError: as `train`.
    """
    if len(seeds) != len(retained) or not seeds:
        raise ShapeError(
            f"train_stacked: got {len(seeds)} seeds and {len(retained)} subsets, expected equal numbers, and at least"
            " one of each"
        )
    frequency_KN = [relative_weights(rows.n_rows, recipe.batch_rows, subset) for subset in retained]
    if torch.device(device).type == "cpu" and recipe.micro_rows is None:
        # process a K-th of the batch at a time, so that the activations of all models fit the cache
        recipe = recipe.model_copy(update={"micro_rows": -(-recipe.batch_rows // len(seeds))})
    trainer = Trainer(recipe, seeds, device)
    for step in _steps(trainer, rows, frequency_KN, seeds):
        if progress is not None:
            progress(step)
    return trainer
