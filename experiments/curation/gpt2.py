"""The same recipe for a model of the GPT-2 kind: what is chosen with one architecture is trained with another.

Steps, batches, row order, schedule and optimizer are the recipe's; sizes are its sizes. Learned positions, LayerNorm,
GELU and tied embeddings are GPT-2's own, so the numbers of parameters differ a little.

Shape letters: B rows of a batch, L tokens, V vocabulary.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F  # noqa: N812
from transformers import GPT2Config, GPT2LMHeadModel

from grasp.corpus.row_store import RowStore
from grasp.errors import ModelError
from grasp.models.tokenizer import HfTokenizer
from grasp.models.unit_loss import evaluate_units
from grasp.predict.subset_tables import read_subsets
from grasp.predict.weights import SubsetBlock
from grasp.retraining.plan import row_names
from grasp.retraining.settings import RetrainSettings
from grasp.retraining.worker import POLL_SECONDS, Worker
from grasp.runs.retrained import RetrainedRuns
from grasp.store.locks import keep_renewed
from grasp.training.recipe import TrainingRecipe
from grasp.training.row_order import batch_order, relative_weights, token_batches

NAME = "gpt2"


def gpt2_config(recipe: TrainingRecipe, eos_id: int | None) -> GPT2Config:
    """A GPT-2 of the recipe's sizes, without dropout."""
    shape = recipe.shape
    return GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.context,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=eos_id,
        eos_token_id=eos_id,
        use_cache=False,
    )


def train_gpt2(
    recipe: TrainingRecipe, rows: RowStore, *, seed: int, retained: NDArray[np.bool_] | None, eos_id: int | None = None
) -> GPT2LMHeadModel:
    """Train from scratch on the CPU; the same arguments give the same weights.

    Raises:
        ModelError: too few rows, rows too long, or a loss that is not a number.
    """
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(gpt2_config(recipe, eos_id)).train()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=recipe.betas)
    frequency_N = relative_weights(rows.n_rows, recipe.batch_rows, retained)
    order = batch_order(frequency_N, seed=seed, batch_rows=recipe.batch_rows, first_step=0, last_step=recipe.steps)
    shape = recipe.shape
    batches = token_batches(rows, order, context=shape.context, vocab_size=shape.vocab_size)
    for step, batch in enumerate(batches):
        ids_BL = torch.from_numpy(batch.ids_BL)
        weight_BL = torch.from_numpy(batch.weight_BL).float()
        logits_BLV = model(input_ids=ids_BL).logits
        # position t predicts token t + 1; the last position has weight 0, so what it is paired with is idle
        losses = F.cross_entropy(logits_BLV.flatten(0, 1), ids_BL.roll(-1, dims=1).flatten(), reduction="none")
        loss = losses @ weight_BL.flatten()
        if not torch.isfinite(loss):
            raise ModelError(f"training: {NAME} had loss {loss.item()} at step {step}; lower the learning_rate")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        optimizer.step()
    return model.eval()


def reference(recipe: TrainingRecipe, rows: RowStore, tokenizer: HfTokenizer, out: Path, *, seed: int = 0) -> Path:
    """The checkpoint of a model of all rows, trained unless it is there."""
    if not out.exists():
        part = out.with_name(out.name + ".part")
        train_gpt2(recipe, rows, seed=seed, retained=None, eos_id=tokenizer.eos_id).save_pretrained(part)
        tokenizer.save(part)
        part.replace(out)
    return out


def fill_gpt2(settings: RetrainSettings, llama: Path, out: Path, say: Callable[[str], None]) -> RetrainedRuns:
    """Train on every subset of the table with every seed; what is there already is not trained again.

    Args:
        llama: the environment of the recipe's own architecture, whose rows, units and tokenizer are used.
    """
    worker = Worker(settings, RetrainedRuns.open(llama))
    rows = row_names(worker.store)
    assert settings.subsets is not None
    info = worker.retrained.info.model_copy(
        update={
            "recipe": f"{worker.recipe.name}-{NAME}",
            "recipe_settings": worker.recipe.model_dump(mode="json")
            | {"architecture": gpt2_config(worker.recipe, worker.tokenizer.eos_id).to_diff_dict()},
            "seeds": settings.seeds,
            "reference": False,
        }
    )
    environment = RetrainedRuns.create(out, info, read_subsets(settings.subsets, rows), rows)
    masks = dict(_masks(environment.subset_blocks(rows)))
    while environment.pending():
        claim = environment.claim(ttl=settings.lease_seconds)
        if claim is None:
            time.sleep(POLL_SECONDS)  # others hold the rest
            continue
        run, lease = claim
        with keep_renewed([lease], ttl=settings.lease_seconds):
            model = train_gpt2(worker.recipe, worker.store, seed=run.seed, retained=masks[run.subset_id])
            environment.write_run(run, -evaluate_units(model, worker.tokens))
        say(f"{NAME}: {len(environment.pending())} of {len(environment.runs())} runs left")
    environment.compact()
    return environment


def _masks(blocks: Iterable[SubsetBlock]) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    for block in blocks:
        for b, name in enumerate(block.subset_ids):
            mask_N = np.zeros(block.weights_BN.shape[1], dtype=bool)
            mask_N[block.weights_BN[[b]].indices] = True
            yield name, mask_N
