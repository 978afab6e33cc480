"""Training recipes: architecture, budget and optimizer of a retraining.

The budget is a number of steps, independent of the size of the subset. The initialisation depends on the seed only. The
order of the rows is one permutation of the whole corpus per seed and epoch, from which dropped rows are skipped. The
learning rate ends at zero. With an independent shuffle per subset, or a learning rate that does not decay to zero, the
noise between seeds would be as large as the effect of dropping rows.

The second moment decays slowly (0.99): at 0.95 a `tiny` run amplifies rounding errors a hundred times more
(after 100 steps 6e-4 nats between two orders of summation, against 1e-5) for 0.01 nats of training loss.
"""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from grasp.errors import ModelError
from grasp.settings import Settings
from grasp.text import did_you_mean
from grasp.training.llama import LlamaShape, Size


class OptimizerRecipe(Settings):
    """Budget and optimizer of a training run."""

    steps: Size = Field(description="Optimizer steps, independent of the size of the subset.")
    batch_rows: Size = Field(description="Rows per step.")
    micro_rows: Size | None = Field(None, description="Rows per forward pass; none: the whole batch.")
    learning_rate: float = Field(gt=0, description="Peak learning rate of AdamW.")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(0, description="Steps of linear warm-up before the schedule.")
    betas: tuple[float, float] = Field((0.9, 0.999), description="Decay of AdamW's moments.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay; biases and norms have none.")
    clip_norm: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="Maximum norm of the gradient; none: unlimited."
    )
    # The following settings are omitted at their defaults, because recorded runs that predate them lack them.
    schedule: Literal["linear", "cosine", "constant"] = Field(
        "linear",
        description="Learning rate after the warm-up: linear or cosine decay to zero, or constant.",
        exclude_if=lambda schedule: schedule == "linear",
    )
    warmup_from_zero: bool = Field(
        False,
        description="The first step of the warm-up has learning rate zero, as in Transformers.",
        exclude_if=lambda wanted: not wanted,
    )
    epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon.", exclude_if=lambda epsilon: epsilon == 1e-8)

    @model_validator(mode="after")
    def _warmup_fits(self) -> Self:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps: got {self.warmup_steps}, expected fewer than the {self.steps} steps")
        return self

    def __str__(self) -> str:
        plural = "s" if self.warmup_steps > 1 else ""
        warmup = f"{self.warmup_steps} warm-up step{plural}, then " if self.warmup_steps else ""
        return (
            f"{self.steps:,} steps of {self.batch_rows:,} rows at learning rate {self.learning_rate:g} "
            f"({warmup}{self.schedule})"
        )

    @property
    def learning(self) -> float:
        """Return the sum of the learning rates of all steps."""
        return math.fsum(self.learning_rate_at(step) for step in range(self.steps))

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of a step, from 0: linear to the peak, then by the schedule.

        The linear and the cosine schedule are at exactly zero after the last step.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + (not self.warmup_from_zero)) / self.warmup_steps
        if self.schedule == "constant":
            return self.learning_rate
        if self.schedule == "cosine":
            done = (step - self.warmup_steps) / (self.steps - self.warmup_steps)
            return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
        return self.learning_rate * (self.steps - step) / (self.steps - self.warmup_steps)


class TrainingRecipe(OptimizerRecipe):
    """Architecture, budget and optimizer of a retraining run."""

    name: str = Field(description="Name of the recipe.")
    shape: LlamaShape = Field(description="Sizes of the model; its context is the longest row, in tokens.")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(description="Steps of linear warm-up; then decay to zero.")
    betas: tuple[float, float] = Field((0.9, 0.99), description="Decay of AdamW's moments.")
    weight_decay: float = Field(0.1, ge=0, description="Decoupled weight decay of matrices; gains have none.")
    cuda_autocast: bool = Field(True, description="bfloat16 products on a GPU; weights, softmax float32.")
    cpu_autocast: bool = Field(
        False,
        description="The same on a CPU: faster on CPUs with AMX for models of 1 M parameters and more.",
        exclude_if=lambda wanted: not wanted,  # recorded runs that predate this setting lack it
    )


_TINY = TrainingRecipe(
    name="tiny",
    shape=LlamaShape(vocab_size=1536, hidden=64, intermediate=192, layers=3, heads=2, context=128),
    steps=320,
    batch_rows=32,
    learning_rate=4e-3,
    warmup_steps=20,
    cuda_autocast=False,  # so that utilities are the same on GPU and CPU
)
_SMALL = TrainingRecipe(
    name="small",
    shape=LlamaShape(vocab_size=6144, hidden=192, intermediate=512, layers=6, heads=6, context=256),
    steps=2000,
    batch_rows=32,
    learning_rate=2e-3,
    warmup_steps=100,
)
# The paper: 50 M parameters, ten blocks, rows of 2,048 tokens, checkpoints up to step 8,000; the rest is ours.
_PAPER = TrainingRecipe(
    name="paper-50m",
    shape=LlamaShape(vocab_size=50_304, hidden=512, intermediate=896, layers=10, heads=8, context=2048, tied=True),
    steps=8000,
    batch_rows=512,
    micro_rows=16,
    learning_rate=1e-3,
    warmup_steps=200,
)
RECIPES = {recipe.name: recipe for recipe in (_TINY, _SMALL, _PAPER)}


def named_recipe(name: str) -> TrainingRecipe:
    """Return a built-in recipe by name.

    Raises:
        ModelError: unknown recipe; the message lists the built-in ones.
    """
    if name not in RECIPES:
        raise ModelError(f"recipe: got {name!r}{did_you_mean(name, RECIPES)}, expected one of {', '.join(RECIPES)}")
    return RECIPES[name]
