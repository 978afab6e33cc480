"""Fine-tuning recipes: how a training that is replayed uses its rows.

Files are YAML or JSON; recipes of other trainers are translated by readers (`grasp.file_readers`). Start with
`FineTuningRecipe.read`; `default_recipe` is replayed without a file, and `default_proxy_recipe` trains the *proxy*, a
small model from scratch in place of one that does not exist yet. `FineTuningRecipe.optimizer` translates a recipe into
the `OptimizerRecipe` of `grasp.training.recipe`, by which every training of this package runs.
"""

import math
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, model_validator

from grasp.arrays import I64
from grasp.errors import SettingsError, at
from grasp.file_readers import claimed
from grasp.seeds import stream
from grasp.settings import Settings
from grasp.training.recipe import RECIPES, OptimizerRecipe, TrainingRecipe
from grasp.yaml_files import read_yaml, validated

SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
JOINED_WARMUP_RATIO, JOINED_MAX_WARMUP_STEPS = 0.03, 100  # of `joined_epochs` without a warm-up


class FineTuningRecipe(Settings):
    """A fine-tuning recipe. Its fields have the names of Transformers' `TrainingArguments`."""

    learning_rate: float = Field(5e-5, gt=0, description="Peak learning rate of AdamW.")
    num_train_epochs: float = Field(3.0, gt=0, description="Passes over the rows.")
    max_steps: int = Field(-1, description="Optimizer steps, which override the number of epochs; below 1: unset.")
    per_device_train_batch_size: int = Field(8, ge=1, description="Rows per forward pass.")
    gradient_accumulation_steps: int = Field(1, ge=1, description="Forward passes per optimizer step.")
    warmup_steps: Annotated[float, Field(ge=0)] = Field(
        0.0, description="Warm-up steps; below 1: a share of all steps."
    )
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Warm-up as a share of all steps."
    )
    lr_scheduler_type: str = Field("linear", description="linear, cosine, constant or constant_with_warmup.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay; biases and norms have none.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's first moment.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Decay of AdamW's second moment.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    max_grad_norm: float | None = Field(1.0, ge=0, description="Maximum norm of the gradient; 0: no clipping.")
    max_length: int | None = Field(
        None, ge=2, description="Maximum tokens per row; longer rows of an artifact are refused."
    )
    dataloader_drop_last: bool = Field(
        False,
        description="Whether the rows of an epoch that do not fill a forward pass are left out.",
        exclude_if=lambda value: not value,  # recorded replays that predate this setting lack it
    )
    beta: float = Field(
        0.1,
        gt=0,
        description="DPO's beta, for preference pairs.",
        exclude_if=lambda beta: beta == 0.1,  # recorded replays that predate this setting lack it
    )
    lora_r: int | None = Field(
        None, ge=1, description="Rank of a LoRA adapter, the only trained part; none: train all."
    )
    lora_alpha: float | None = Field(None, gt=0, description="LoRA alpha; none: the rank.")
    lora_target_modules: tuple[str, ...] | str = Field("all-linear", description="Layers with an adapter.")
    optim: str = Field("adamw_torch", description="Optimizer; a variant of AdamW.")
    joined_epochs: bool = Field(
        False,
        description="Whether steps are rounded up once for all epochs, not for each, and warm-up steps down, but 1 to "
        "2; without a warm-up it is 3 % of the steps, at most 100.",
        exclude_if=lambda value: not value,  # recorded replays that predate this setting lack it
    )
    notes: tuple[str, ...] = Field(
        (), description="Differences from the training that the recipe is of, a sentence each.", exclude=True
    )

    @model_validator(mode="after")
    def _supported_schedule_and_optimizer(self) -> Self:
        if self.lr_scheduler_type not in SCHEDULES:
            raise ValueError(f"lr_scheduler_type: got {self.lr_scheduler_type!r}, expected {', '.join(SCHEDULES)}")
        low_precision = any(part in self.optim for part in ("8bit", "4bit", "anyprecision"))
        if not self.optim.removeprefix("paged_").startswith("adamw") or low_precision:
            raise ValueError(f"optim: got {self.optim!r}, expected AdamW in full precision, such as adamw_torch")
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a recipe from a YAML or JSON file.

        Raises:
            SettingsError: the file cannot be read, is not YAML or JSON, or has an invalid value.
            ModelError: a setting cannot be differentiated.
        """
        return cls.from_mapping(read_yaml(path), str(path))

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], location: str = "recipe") -> Self:
        """Build the recipe from its fields, or from those of another trainer, which a reader of recipes translates.

        Args:
            data: fields of the recipe.
            location: beginning of error messages, e.g. the path of the file.
        Raises:
            SettingsError: a value is invalid.
            ModelError: a setting cannot be differentiated.
        """
        claim = claimed("recipe", data)
        with at(location):
            fields = data if claim is None else claim.reader.read(data)
        return validated(cls, fields, location)

    @property
    def batch_rows(self) -> int:
        """Return the number of rows per optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def steps(self, n_rows: int) -> int:
        """Return the number of optimizer steps on `n_rows` rows; the last step of an epoch may have fewer rows."""
        if self.max_steps > 0:
            return self.max_steps
        if self.joined_epochs:  # the last epoch ends early, for the rows by which batches of epochs were short
            return math.ceil(self.num_train_epochs * n_rows / self.batch_rows)
        return math.ceil(self.num_train_epochs * math.ceil(self._epoch_rows(n_rows) / self.batch_rows))

    def _epoch_rows(self, n_rows: int) -> int:
        """Return the number of rows of an epoch, without those of incomplete forward passes that are left out."""
        left_out = n_rows % self.per_device_train_batch_size if self.dataloader_drop_last else 0
        if left_out == n_rows:
            raise SettingsError(
                f"recipe: dataloader_drop_last: {n_rows} rows do not fill a forward pass of "
                f"{self.per_device_train_batch_size}; lower per_device_train_batch_size"
            )
        return n_rows - left_out

    def optimizer(self, n_rows: int) -> OptimizerRecipe:
        """Return budget and optimizer of a training run on `n_rows` rows.

        Raises:
            SettingsError: the warm-up is as long as the training run.
        """
        steps = self.steps(n_rows)
        if self.lr_scheduler_type == "constant":  # Transformers ignores the warm-up of this schedule
            warmup_steps = 0
        elif self.warmup_steps >= 1:
            warmup_steps = int(self.warmup_steps)
        elif not self.joined_epochs:  # a share of all steps, in newer versions of Transformers also `warmup_steps`
            warmup_steps = math.ceil(steps * (self.warmup_steps or self.warmup_ratio or 0.0))
        elif self.warmup_ratio is not None:
            warmup_steps = int(steps * self.warmup_ratio)
        else:
            warmup_steps = min(int(steps * JOINED_WARMUP_RATIO), JOINED_MAX_WARMUP_STEPS)
        data = {
            "steps": steps,
            "batch_rows": self.batch_rows,
            "micro_rows": self.per_device_train_batch_size if self.gradient_accumulation_steps > 1 else None,
            "learning_rate": self.learning_rate,
            "warmup_steps": 2 if self.joined_epochs and warmup_steps == 1 else warmup_steps,
            "warmup_from_zero": True,
            "schedule": SCHEDULES[self.lr_scheduler_type],
            "betas": (self.adam_beta1, self.adam_beta2),
            "epsilon": self.adam_epsilon,
            "weight_decay": self.weight_decay,
            "clip_norm": self.max_grad_norm or None,
        }
        return validated(OptimizerRecipe, data, "recipe")

    def order(self, n_rows: int, seed: int) -> list[I64]:
        """Return the rows of every step: each epoch is a new permutation, split into batches."""
        epochs = (stream(seed, "replay", "order", epoch).permutation(n_rows) for epoch in count())
        return self.batches(epochs, n_rows)

    def batches(self, chunks: Iterator[I64], n_rows: int) -> list[I64]:
        """Split rows into the batches of every step, of which the last one of an epoch may have fewer rows.

        Args:
            chunks: rows in training order, endlessly.
            n_rows: rows of an epoch.
        """
        steps, epoch_rows = self.steps(n_rows), self._epoch_rows(n_rows)
        batches: list[I64] = []
        pending: I64 = np.zeros(0, dtype=np.int64)
        while len(batches) < steps:
            while len(pending) < n_rows:
                pending = np.concatenate([pending, next(chunks)])
            batches += [
                pending[k : min(k + self.batch_rows, epoch_rows)] for k in range(0, epoch_rows, self.batch_rows)
            ]
            pending = pending[n_rows:]
        return batches[:steps]


def default_recipe(n_rows: int) -> FineTuningRecipe:
    """Return the recipe that is replayed without one: an epoch in batches of 16, but at most 192 steps."""
    batch_rows, max_steps = 16, 192
    steps = min(math.ceil(n_rows / batch_rows), max_steps)
    # a warm-up has fewer steps than the training
    return FineTuningRecipe(
        per_device_train_batch_size=batch_rows, max_steps=steps, warmup_ratio=0.03 if steps > 1 else None
    )


def default_proxy_recipe(n_rows: int) -> FineTuningRecipe:
    """Return the recipe of a small model from scratch: the optimizer of `tiny`, four epochs, 60 to 320 steps."""
    tiny = RECIPES["tiny"]
    return FineTuningRecipe(
        learning_rate=tiny.learning_rate,
        per_device_train_batch_size=tiny.batch_rows,
        max_steps=min(tiny.steps, max(60, 4 * math.ceil(n_rows / tiny.batch_rows))),
        warmup_ratio=tiny.warmup_steps / tiny.steps,
        weight_decay=tiny.weight_decay,
        adam_beta1=tiny.betas[0],
        adam_beta2=tiny.betas[1],
        max_grad_norm=tiny.clip_norm,
    )


def proxy_training(recipe: FineTuningRecipe, n_rows: int, vocab_size: int, context: int) -> TrainingRecipe:
    """Return the training of a model from scratch by a recipe, of the size of `tiny`, in float32.

    Raises:
        SettingsError: the recipe has an adapter.
    """
    if recipe.lora_r is not None:
        raise SettingsError(f"recipe: lora_r: got {recipe.lora_r}, but a new model has no adapter; remove it")
    shape = RECIPES["tiny"].shape.model_copy(update={"vocab_size": vocab_size, "context": context})
    settings = {"name": "proxy", "shape": shape, "cuda_autocast": False}
    return TrainingRecipe(**recipe.optimizer(n_rows).model_dump(), **settings)
