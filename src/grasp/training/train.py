"""Train a model from scratch on a subset of a corpus, in memory or with checkpoints.

Start with `train`; `row_order` defines the order of rows and the batches.

Shape letters: S steps, N rows.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.utils import logging as hf_logging

from grasp.arrays import F32, F64, Bool
from grasp.corpus.row_store import RowStore
from grasp.errors import ModelError
from grasp.files import atomic_path, discard, remove_parts
from grasp.models.tokenizer import HfTokenizer
from grasp.training.adamw import STATE, AdamWTraining
from grasp.training.llama import new_llama
from grasp.training.recipe import TrainingRecipe
from grasp.training.row_order import batch_order, relative_weights, token_batches

# Files of a checkpoint
RECORD = "training.json"
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A finished training run."""

    model: PreTrainedModel  # float32, in eval mode, on the device that it was trained on
    losses: F32  # (S,), nats per label


def start_training(
    recipe: TrainingRecipe, seed: int, device: str | torch.device = "cpu", eos_id: int | None = None
) -> AdamWTraining:
    """Return the training of a new model before its first step."""
    model: PreTrainedModel = new_llama(recipe.shape, seed, eos_id).to(device)
    autocast = {"cuda": recipe.cuda_autocast, "cpu": recipe.cpu_autocast}
    return AdamWTraining(model, recipe, bfloat16=autocast.get(torch.device(device).type, False))


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
            written last. A finished run with the same arguments is loaded, an unfinished one is resumed. Default:
            nothing is written.
        checkpoints: steps after which ``<out>/checkpoint-<step>``, a Hugging Face checkpoint with the state of the
            optimizer, is saved.
        device: device to train on.
        progress: callback that receives the number of finished steps after each step.
    Raises:
        ModelError: there are fewer rows than in a batch; a loss is not finite; or `out` has a run with other arguments.
    """
    frequency_N = relative_weights(rows.n_rows, recipe.batch_rows, retained)
    assert all(1 <= step <= recipe.steps for step in checkpoints)
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
    training = start_training(recipe, seed, device, None if tokenizer is None else tokenizer.eos_id)
    losses: list[float] = []
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        remove_parts(out)  # temporary files of a killed run
        losses = _resume(training, out, identity)
    order = batch_order(
        frequency_N, seed=seed, batch_rows=recipe.batch_rows, first_step=training.step, last_step=recipe.steps
    )
    for batch in token_batches(rows, order, context=recipe.shape.context, vocab_size=recipe.shape.vocab_size):
        losses.append(float(training.backward(batch.ids_BL, batch.weight_BL).sum()))
        training.check_loss(losses[-1])
        training.update()
        if out is not None and training.step in checkpoints:
            _save(training, losses, out / f"checkpoint-{training.step}", identity, tokenizer)
        if progress is not None:
            progress(training.step)
    if out is not None and not (out / RECORD).exists():
        discard(out / "final")
        final = _save(training, losses, out / "final", identity, tokenizer)
        # the record is moved last: files of an interrupted move are written again by the next run
        for path in sorted(final.iterdir(), key=lambda path: path.name == RECORD):
            path.replace(out / path.name)
        final.rmdir()
    return TrainedModel(training.model, np.array(losses, dtype=np.float32))


def _resume(training: AdamWTraining, out: Path, identity: Mapping[str, Any]) -> list[float]:
    """Load the finished model or the last checkpoint, if there is one, and return the losses of its steps."""
    path_of_step = {path.name.removeprefix("checkpoint-"): path for path in out.glob("checkpoint-*")}
    steps = sorted(filter(str.isdigit, path_of_step), key=int)
    if not steps and not (out / RECORD).exists():
        return []
    last = out if (out / RECORD).exists() else path_of_step[steps[-1]]
    record = json.loads((last / RECORD).read_text(encoding="utf-8"))
    if differing := [key for key, value in identity.items() if record["identity"].get(key) != value]:
        raise ModelError(
            f"{last}: trained with another {', '.join(differing)}, expected the same; pass another directory"
            " or remove it"
        )
    weights, moments = load_file(last / WEIGHTS), load_file(last / OPTIMIZER)
    state = {f"{k}.weight": weights[name] for k, name in enumerate(training.names)}
    for k, name in enumerate(training.names):
        state |= {f"{k}.{moment}": moments[f"{name}.{moment}"] for moment in STATE[1:]}
    training.set_state(record["step"], state)
    losses: list[float] = record["losses"]
    return losses


def _save(
    training: AdamWTraining,
    losses: Sequence[float],
    path: Path,
    identity: Mapping[str, Any],
    tokenizer: HfTokenizer | None,
) -> Path:
    """Save a Hugging Face checkpoint atomically, with the state of the optimizer and a record of its arguments."""
    if path.exists():
        return path
    with atomic_path(path) as temporary:
        hf_logging.disable_progress_bar()  # the command line has its own progress display
        training.model.save_pretrained(temporary)
        if tokenizer is not None:
            tokenizer.save(temporary)
        state = training.state()
        moments = {f"{name}.{m}": state[f"{k}.{m}"].cpu() for k, name in enumerate(training.names) for m in STATE[1:]}
        save_file(moments, temporary / OPTIMIZER)
        record = {"identity": identity, "step": training.step, "losses": list(losses)}
        (temporary / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
    return path
