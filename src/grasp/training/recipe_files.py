"""Recipes of a fine-tuning as people have them: `TrainingArguments` of Transformers, `SFTConfig` of TRL, Axolotl.

YAML or JSON; the JSON of saved training arguments and the `adapter_config.json` fields of a LoRA adapter may stand in
the same file. Fields that change nothing in the mathematics are passed over; what is not AdamW is refused.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, model_validator

from grasp.arrays import I64
from grasp.errors import ModelError
from grasp.seeds import stream
from grasp.settings import Settings
from grasp.training.recipe import OptimizerRecipe
from grasp.yaml_files import read_yaml, validated

AXOLOTL = {  # and other names of the same things
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "lr_scheduler": "lr_scheduler_type",
    "sequence_len": "max_length",
    "max_seq_length": "max_length",
    "optimizer": "optim",
    "r": "lora_r",
    "target_modules": "lora_target_modules",
}
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
NEUTRAL = (None, False, 0, "", "no")
# Each changes what a step is in a way that is not differentiated here.
UNSUPPORTED = (
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "use_liger_kernel",
    "sample_packing",
    "packing",
    "use_dora",
)


class FineTuningRecipe(Settings):
    """A fine-tuning in the names of Transformers' `TrainingArguments`; fields without a meaning here are dropped."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    learning_rate: float = Field(5e-5, gt=0, description="Peak of AdamW's learning rate.")
    num_train_epochs: float = Field(3.0, gt=0, description="Passes over the rows.")
    max_steps: int = Field(-1, description="Optimizer steps in the place of epochs; below 1: epochs count.")
    per_device_train_batch_size: int = Field(8, ge=1, description="Rows of a forward pass.")
    gradient_accumulation_steps: int = Field(1, ge=1, description="Forward passes of a step.")
    warmup_steps: Annotated[float, Field(ge=0)] = Field(0.0, description="Steps of warm-up; below 1: a share of all.")
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] | None = Field(None, description="The same as a share.")
    lr_scheduler_type: str = Field("linear", description="linear, cosine, constant or constant_with_warmup.")
    weight_decay: float = Field(0.0, ge=0, description="Decoupled weight decay of matrices.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's first moment.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Decay of AdamW's second moment.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    max_grad_norm: float | None = Field(1.0, ge=0, description="Largest norm of a gradient; 0: any.")
    max_length: int | None = Field(None, ge=2, description="Longest row, in tokens; longer ones are cut.")
    lora_r: int | None = Field(None, ge=1, description="Rank of a LoRA adapter, which alone is trained; none: all is.")
    lora_alpha: float | None = Field(None, gt=0, description="Scale of the adapter times its rank; none: the rank.")
    lora_target_modules: tuple[str, ...] | str = Field("all-linear", description="Layers that get an adapter.")
    # What a replay does otherwise, and says so; not part of its record.
    lora_dropout: float = Field(0.0, ge=0, description="Dropout of the adapter; it is switched off.", exclude=True)
    bf16: bool | str = Field(False, description="Products in bfloat16; a replay has float32.", exclude=True)
    fp16: bool | str = Field(False, description="Products in float16; a replay has float32.", exclude=True)
    optim: str = Field("adamw_torch", description="An AdamW of torch.")

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.lr_scheduler_type not in SCHEDULES:
            raise ValueError(f"lr_scheduler_type: got {self.lr_scheduler_type!r}, expected {', '.join(SCHEDULES)}")
        if not self.optim.startswith("adamw") or "8bit" in self.optim or "4bit" in self.optim:
            raise ValueError(f"optim: got {self.optim!r}, expected AdamW in full precision, such as adamw_torch")
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a recipe.

        Raises:
            SettingsError: no file, no YAML or JSON, or a value that is not of its field.
            ModelError: something that is not differentiated.
        """
        return cls.from_mapping(read_yaml(path), str(path))

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any], where: str = "recipe") -> Self:
        """Take the recipe from fields under any of the names that are known; see `read`."""
        data = _flat(data)
        if unsupported := [name for name in UNSUPPORTED if data.get(name) not in NEUTRAL]:
            raise ModelError(
                f"{where}: {unsupported[0]} is set to {data[unsupported[0]]!r}, which a replay does not differentiate; "
                "leave it out"
            )
        if data.get("lora_target_linear"):
            data["lora_target_modules"] = "all-linear"
        if data.get("adapter") not in (None, "lora"):
            raise ModelError(f"{where}: adapter: got {data['adapter']!r}, expected lora")
        return validated(cls, {name: value for name, value in data.items() if value is not None}, where)

    @property
    def notes(self) -> list[str]:
        """Return what a replay does otherwise than the recipe, a sentence each."""
        notes = []
        if any(value not in NEUTRAL for value in (self.bf16, self.fp16)):
            notes.append("the recipe computes in half precision, a replay in float32: rounding exceeds its differences")
        if self.lora_dropout:
            notes.append("dropout of the adapter is switched off: a random mask cannot be replayed")
        return notes

    @property
    def batch_rows(self) -> int:
        """Return the rows of a step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def steps(self, n_rows: int) -> int:
        """Return the optimizer steps of a training on so many rows; the last step of an epoch may have fewer rows."""
        if self.max_steps > 0:
            return self.max_steps
        return math.ceil(self.num_train_epochs * math.ceil(n_rows / self.batch_rows))

    def optimizer(self, n_rows: int) -> OptimizerRecipe:
        """Return budget and optimizer of a training on so many rows.

        Raises:
            SettingsError: the warm-up is as long as the training.
        """
        steps, warmup = self.steps(n_rows), self.warmup_steps
        if self.warmup_ratio and not warmup:
            warmup = self.warmup_ratio
        data = {
            "steps": steps,
            "batch_rows": self.batch_rows,
            "micro_rows": self.per_device_train_batch_size if self.gradient_accumulation_steps > 1 else None,
            "learning_rate": self.learning_rate,
            "warmup_steps": 0
            if self.lr_scheduler_type == "constant"
            else math.ceil(steps * warmup)
            if warmup < 1
            else int(warmup),
            "warmup_from_zero": True,
            "schedule": SCHEDULES[self.lr_scheduler_type],
            "betas": (self.adam_beta1, self.adam_beta2),
            "epsilon": self.adam_epsilon,
            "weight_decay": self.weight_decay,
            "clip_norm": self.max_grad_norm or None,
        }
        return validated(OptimizerRecipe, data, "recipe")

    def order(self, n_rows: int, seed: int) -> list[I64]:
        """Return the rows of every step: each epoch is a permutation of its own, cut into batches."""
        steps, epoch = self.steps(n_rows), 0
        batches: list[I64] = []
        while len(batches) < steps:
            drawn = stream(seed, "replay", "order", epoch).permutation(n_rows)
            batches += [drawn[k : k + self.batch_rows] for k in range(0, n_rows, self.batch_rows)]
            epoch += 1
        return batches[:steps]


def default_recipe(n_rows: int) -> FineTuningRecipe:
    """Return the recipe that is replayed without one: an epoch in batches of 16, but at most 192 steps."""
    batch_rows, most_steps = 16, 192
    return FineTuningRecipe(
        per_device_train_batch_size=batch_rows,
        num_train_epochs=1.0,
        max_steps=min(math.ceil(n_rows / batch_rows), most_steps),
        warmup_ratio=0.03,
    )


def _flat(data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields under the names of Transformers, those of a group `lora` or `training_args` among them."""
    fields: dict[str, Any] = {}
    for name, value in data.items():
        if name in ("lora", "peft_config") and isinstance(value, Mapping):
            inner = {AXOLOTL.get(key, f"lora_{key}" if key == "alpha" else key): entry for key, entry in value.items()}
            fields |= {key: entry for key, entry in inner.items() if key.startswith("lora_")}
        elif name in ("training_args", "training_arguments", "args") and isinstance(value, Mapping):
            fields |= _flat(value)
        else:
            fields[AXOLOTL.get(name, name)] = value
    return fields
