"""Training recipes: everything that is fixed about a retrain, and the training of one model.

The budget is a number of steps, whatever the size of the subset; the initialisation depends on the seed
alone; the order of the rows is one permutation of the whole corpus per seed and epoch, from which dropped
rows are skipped; the learning rate ends at zero. An independent shuffle per subset, or a learning rate that
does not decay to zero, makes the noise between seeds as large as the effect of dropping rows.

The second moment decays slowly (0.99): at 0.95 a `tiny` run amplifies rounding errors a hundred times more
(after 100 steps 6e-4 nats between two orders of summation, against 1e-5) for 0.01 nats of training loss.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM
from transformers.utils import logging as hf_logging

from grasp.errors import ModelError
from grasp.models.tokenizer import HfTokenizer
from grasp.runs.llama import LlamaShape, Size
from grasp.runs.training import Trainer
from grasp.runs.training_rows import RowSource, Share, batch_order, token_batches

RECORD = "training.json"
WEIGHTS = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"


class TrainingRecipe(BaseModel):
    """Architecture, budget and optimizer of a retrain, frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Name of the recipe.")
    shape: LlamaShape = Field(description="Sizes of the model; its context is the longest row, in tokens.")
    steps: Size = Field(description="Optimizer steps, whatever the size of the subset.")
    batch_rows: Size = Field(description="Rows in a step.")
    micro_rows: Size | None = Field(None, description="Rows in one forward pass; none: the whole batch.")
    learning_rate: float = Field(gt=0, description="Peak of AdamW's learning rate.")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(description="Steps of linear warm-up; then to zero.")
    betas: tuple[float, float] = Field((0.9, 0.99), description="Decay of AdamW's moments.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay of matrices; gains have none.")
    clip_norm: float = Field(1.0, gt=0, description="Largest norm of a gradient.")
    cuda_autocast: bool = Field(True, description="bfloat16 products on a GPU; weights, softmax float32.")

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps: got {self.warmup_steps}, expected fewer than the {self.steps} steps")
        return self

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of a step, from 0: linear to the peak, then linear to exactly zero after the last
        step."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        return self.learning_rate * (self.steps - step) / (self.steps - self.warmup_steps)


def _recipes() -> dict[str, TrainingRecipe]:
    tiny = TrainingRecipe(
        name="tiny",
        shape=LlamaShape(vocab_size=1536, hidden=64, intermediate=192, layers=3, heads=2, context=128),
        steps=320,
        batch_rows=32,
        learning_rate=4e-3,
        warmup_steps=20,
        cuda_autocast=False,  # so that a GPU gives the utilities that a CPU gives
    )
    small = TrainingRecipe(
        name="small",
        shape=LlamaShape(vocab_size=6144, hidden=192, intermediate=512, layers=6, heads=6, context=256),
        steps=2000,
        batch_rows=32,
        learning_rate=2e-3,
        warmup_steps=100,
    )
    # The paper: 50 M parameters, ten blocks, rows of 2,048 tokens, checkpoints up to step 8,000; the rest is ours.
    paper = TrainingRecipe(
        name="paper-50m",
        shape=LlamaShape(vocab_size=50_304, hidden=512, intermediate=896, layers=10, heads=8, context=2048, tied=True),
        steps=8000,
        batch_rows=512,
        micro_rows=16,
        learning_rate=1e-3,
        warmup_steps=200,
    )
    return {recipe.name: recipe for recipe in (tiny, small, paper)}


RECIPES = _recipes()


def named_recipe(name: str) -> TrainingRecipe:
    """A recipe by name.

    Raises:
        ModelError: no such recipe; the message lists those that there are.
    """
    if name not in RECIPES:
        close = get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ModelError(f"recipe: got {name!r}; {hint}there are {', '.join(RECIPES)}")
    return RECIPES[name]


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A finished training run."""

    model: LlamaForCausalLM  # on the CPU, float32, eval mode
    recipe: TrainingRecipe
    seed: int
    n_retained: int
    losses: NDArray[np.float32]  # (steps,), nats a label
    path: Path | None
    checkpoints: tuple[Path, ...]  # intermediate ones, by step


def train(
    recipe: TrainingRecipe,
    rows: RowSource,
    *,
    seed: int,
    retained: NDArray[np.bool_] | None = None,
    weights: NDArray[np.float64] | None = None,
    tokenizer: HfTokenizer | None = None,
    out: Path | None = None,
    checkpoints: tuple[int, ...] = (),
    device: str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> TrainedModel:
    """Train a model from scratch on a subset of a corpus.

    Deterministic: on a CPU, the same arguments and number of threads give the same weights bit for bit, also
        when a run was killed and went on from its last checkpoint. On a GPU they agree within rounding.

    Args:
        retained: (N,) rows that are trained on; none: all.
        weights: (N,) weight of each row in the loss, relative to the other rows of its batch; none: 1.
        tokenizer: saved with the model.
        out: directory of the finished Hugging Face checkpoint; `training.json` in it, written last, says
            that it is whole. A finished one of the same arguments is loaded, an unfinished one goes on.
        checkpoints: numbers of steps after which ``<out>/checkpoint-<step>``, a Hugging Face checkpoint with
            the optimizer's state, is kept.
        progress: called with the number of steps done, after each.
    Raises:
        ShapeError: `retained` or `weights` has not one entry a row.
        ModelError: fewer rows than a batch; a row too long or outside the vocabulary; a loss that is not a
            number; `out` holds a run of other arguments.
    """
    share = Share.of(rows.n_rows, recipe.batch_rows, retained, weights)
    _check_checkpoints(recipe, checkpoints, out)
    identity = {
        "recipe": recipe.model_dump(mode="json"),
        "seed": seed,
        "rows": rows.fingerprint,
        "subset": share.fingerprint,
    }
    run = None if out is None else _Run(out, identity, tokenizer)
    trainer = Trainer(recipe, [seed], device)
    if run is not None:
        run.resume(trainer)
    order = batch_order(
        share.kept_N, seed=seed, batch_rows=recipe.batch_rows, first_step=trainer.step, last_step=recipe.steps
    )
    batches = token_batches(
        rows,
        [order],
        steps=recipe.steps - trainer.step,
        context=recipe.shape.context,
        vocab_size=recipe.shape.vocab_size,
    )
    for batch in batches:
        trainer.advance(batch, [share])
        if run is not None and trainer.step in checkpoints:
            run.save_checkpoint(trainer)
        if progress is not None:
            progress(trainer.step)
    trainer.check()
    model = trainer.model.to_hf(0, tokenizer.eos_id if tokenizer is not None else None)
    if run is not None:
        run.finish(trainer, model)
    return TrainedModel(
        model=model,
        recipe=recipe,
        seed=seed,
        n_retained=share.n_kept,
        losses=trainer.losses[:, 0],
        path=out,
        checkpoints=() if run is None else run.checkpoints(),
    )


def _check_checkpoints(recipe: TrainingRecipe, checkpoints: tuple[int, ...], out: Path | None) -> None:
    outside = [step for step in checkpoints if not 1 <= step <= recipe.steps]
    if outside:
        raise ModelError(f"checkpoints: got step {outside[0]}, expected 1 to {recipe.steps}")
    if checkpoints and out is None:
        raise ModelError("checkpoints: got steps without `out`, expected a directory to keep them in")


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing on the terminal, which belongs to the command line."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


class _Run:
    """The directory of a training run. What is written is written aside and renamed: what exists is whole."""

    def __init__(self, out: Path, identity: dict[str, Any], tokenizer: HfTokenizer | None) -> None:
        self._out = out
        self._identity = identity
        self._tokenizer = tokenizer
        out.mkdir(parents=True, exist_ok=True)
        for leftover in out.glob("*.part"):
            shutil.rmtree(leftover)

    def checkpoints(self) -> tuple[Path, ...]:
        found = {int(path.name.removeprefix("checkpoint-")): path for path in self._out.glob("checkpoint-*")}
        return tuple(found[step] for step in sorted(found))

    def resume(self, trainer: Trainer) -> None:
        """Load the finished model, else the last checkpoint, else nothing."""
        places = [*self.checkpoints(), *([self._out] if (self._out / RECORD).exists() else [])]
        if not places:
            return
        record = json.loads((places[-1] / RECORD).read_text(encoding="utf-8"))
        if record["identity"] != self._identity:
            other = [key for key, value in self._identity.items() if record["identity"].get(key) != value]
            raise ModelError(
                f"{places[-1]}: trained with another {', '.join(other)}, expected the same; give another directory"
                " or remove it"
            )
        trainer.model.load(0, load_file(places[-1] / WEIGHTS))
        state = load_file(places[-1] / OPTIMIZER)
        trainer.restore(record["step"], state, np.asarray(record["losses"], dtype=np.float32)[:, None])

    def save_checkpoint(self, trainer: Trainer) -> None:
        trainer.check()
        target = self._out / f"checkpoint-{trainer.step}"
        if not target.exists():
            model = trainer.model.to_hf(0, self._eos_id)
            self._write(trainer, model, target.with_name(target.name + ".part")).replace(target)

    def finish(self, trainer: Trainer, model: LlamaForCausalLM) -> None:
        if (self._out / RECORD).exists():
            return
        part = self._write(trainer, model, self._out / "final.part")
        # the record goes last: a kill in between leaves files that the next run writes again
        for path in sorted(part.iterdir(), key=lambda path: path.name == RECORD):
            path.replace(self._out / path.name)
        part.rmdir()

    @property
    def _eos_id(self) -> int | None:
        return None if self._tokenizer is None else self._tokenizer.eos_id

    def _write(self, trainer: Trainer, model: LlamaForCausalLM, part: Path) -> Path:
        with _no_progress_bar():
            model.save_pretrained(part)
        if self._tokenizer is not None:
            self._tokenizer.save(part)
        save_file(trainer.optimizer_state(), part / OPTIMIZER)
        record = {
            "identity": self._identity,
            "step": trainer.step,
            "losses": [float(loss) for loss in trainer.losses[:, 0]],
        }
        (part / RECORD).write_text(json.dumps(record, indent=1), encoding="utf-8")
        return part
