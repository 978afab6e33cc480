"""Fine-tuning recipes in the formats of other trainers: how a training that is replayed uses its rows.

Fields are those of `TrainingArguments` of Transformers and `SFTConfig` of TRL; names of Axolotl and LLaMA-Factory are
translated. Files are YAML or JSON, e.g. saved training arguments, and may also contain the fields of
`adapter_config.json` of a LoRA adapter. `recipe_fields.yaml` lists the fields that are refused, noted, or without
influence on the result; a field in no list is noted. Start with `FineTuningRecipe.read`; `default_recipe` is replayed
without a file, and `default_proxy_recipe` trains the *proxy*, a small model from scratch in place of one that does not
exist yet. `FineTuningRecipe.optimizer` translates a recipe into the `OptimizerRecipe` of `grasp.training.recipe`, by
which every training of this package runs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from grasp.arrays import I64
from grasp.errors import ModelError, SettingsError
from grasp.field_names import unknown_names
from grasp.seeds import stream
from grasp.settings import Settings
from grasp.training.recipe import RECIPES, OptimizerRecipe, TrainingRecipe
from grasp.yaml_files import read_yaml, validated

MISTAKEN_NAMES = {  # names of no trainer, too different from the right ones for `difflib`
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "epochs": "num_train_epochs",
    "lr": "learning_rate",
    "rank": "lora_r",
}
AXOLOTL_NAMES = ("micro_batch_size", "num_epochs", "lr_scheduler", "sequence_len")
AXOLOTL_DEFAULTS: dict[str, Any] = {  # where they differ from those of Transformers
    "per_device_train_batch_size": 1,
    "num_train_epochs": 1,
    "lr_scheduler_type": "cosine",
}
AXOLOTL_WARMUP_RATIO, AXOLOTL_MAX_WARMUP_STEPS = 0.03, 100  # without a warm-up in the configuration
TRL_ADAPTER_DEFAULTS = {"lora_r": 16, "lora_alpha": 32}  # of `ModelConfig`
LLAMA_FACTORY_NAMES = ("stage", "finetuning_type", "lora_rank", "lora_target")
LLAMA_FACTORY_ADAPTER = {"lora_r": 8, "lora_target_modules": "all"}  # its `lora_alpha` is twice the rank
HALF_PRECISION = ("bfloat16", "float16", "fp8", "pure_bf16")  # Axolotl, LLaMA-Factory
SWITCHES = (  # read by `from_mapping`
    *HALF_PRECISION,
    "assistant_only_loss",
    "completion_only_loss",
    "lora_target_linear",
    "quantization_bit",
    "use_peft",
    "weight_dtype",
)
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
DISABLED: tuple[Any, ...] = (None, False, 0, "", "no", [], {})  # values that switch a setting off
NOT_DISABLED_BY_0 = ("init_lora_weights", "layers_to_transform", "enable_thinking")  # a random adapter, the first layer


@cache
def _known_fields() -> dict[str, Any]:
    """Return the lists of `recipe_fields.yaml`, whose comments describe them."""
    return read_yaml(Path(__file__).with_name("recipe_fields.yaml"))


class FineTuningRecipe(Settings):
    """A fine-tuning recipe with the field names of Transformers' `TrainingArguments`; other fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

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
    axolotl_rounding: bool = Field(
        False,
        description="Whether steps and warm-up are rounded as by Axolotl.",
        exclude_if=lambda value: not value,  # recorded replays that predate this setting lack it
    )
    # A replay ignores the following settings and says so in `notes`; they are not part of its record.
    lora_dropout: float = Field(0.0, ge=0, description="Dropout of the adapter; disabled in a replay.", exclude=True)
    bf16: bool | str = Field(False, description="Mixed precision; a replay computes in float32.", exclude=True)
    fp16: bool | str = Field(False, description="Mixed precision; a replay computes in float32.", exclude=True)
    load_in_4bit: bool = Field(False, description="Quantized base model; a replay does not quantize.", exclude=True)
    load_in_8bit: bool = Field(False, description="Quantized base model; a replay does not quantize.", exclude=True)
    train_on_inputs: bool | Literal["conversations"] = Field(
        False, description="Whether prompts carry loss; the corpus settings decide that.", exclude=True
    )
    val_set_size: float = Field(0.0, ge=0, description="Rows kept for validation; trained on here.", exclude=True)
    not_used: tuple[str, ...] = Field((), description="Fields that are not followed, or not known.", exclude=True)

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
        """Build the recipe from fields under any of their known names; see `read`.

        Args:
            data: fields of the recipe.
            location: beginning of error messages, e.g. the path of the file.
        """
        if isinstance(trl := data.get("trl"), Mapping) and trl.get("beta") is not None:  # Axolotl reads it first
            data = {name: value for name, value in data.items() if name not in ("rl_beta", "dpo_beta")}
        fields = _flatten(data, location)
        _refuse_unsupported(fields, location)
        if any(name in data for name in AXOLOTL_NAMES):
            fields = _with_axolotl_defaults(fields)
        by_llama_factory = any(name in data for name in LLAMA_FACTORY_NAMES)
        if by_llama_factory:
            fields = _with_llama_factory_adapter(fields)
        known = _known_fields()
        used = {*cls.model_fields, *known["aliases"], *known["refused"], *SWITCHES}
        neutral = {*known["noted"], *chain.from_iterable(known["neutral"].values())}
        set_names = [name for name, value in fields.items() if _is_set(name, value)]
        unknown = unknown_names(set_names, used, neutral, location, mistaken=MISTAKEN_NAMES)
        if fields and not fields.keys() & used:
            raise SettingsError(
                f"{location}: has no field of a training, got {', '.join(list(fields)[:5])}; expected the names of "
                "TrainingArguments, Axolotl or LLaMA-Factory at the top level, such as learning_rate"
            )
        fields = _with_switches(_with_adapter_defaults(fields, location))
        fields["not_used"] = [*_effective(fields, known["noted"]), *unknown]
        recipe = validated(cls, {name: value for name, value in fields.items() if value is not None}, location)
        if by_llama_factory and recipe.lora_r is not None and recipe.lora_alpha is None:
            return recipe.model_copy(update={"lora_alpha": 2.0 * recipe.lora_r})
        return recipe

    @property
    def notes(self) -> list[str]:
        """Return one sentence for each difference between the recipe and its replay."""
        notes = []
        if any(value not in DISABLED for value in (self.bf16, self.fp16)):
            notes.append("the recipe computes in half precision, here in float32: rounding exceeds its differences")
        if self.load_in_4bit or self.load_in_8bit:
            notes.append("the recipe quantizes the base model, which is not done here")
        if self.lora_dropout:
            notes.append("dropout of the adapter is switched off: a random mask cannot be replayed")
        if self.train_on_inputs:
            prompts = "prompts of conversations" if self.train_on_inputs == "conversations" else "prompts"
            notes.append(f"the recipe trains on {prompts} too, here only if the build had corpus.loss_on=all")
        if self.val_set_size:
            notes.append(
                f"val_set_size: the recipe keeps rows for validation ({self.val_set_size:g}), which are trained on "
                "here, in more steps"
            )
        if self.not_used:
            notes.append(f"not used: {', '.join(self.not_used)}")
        return notes

    @property
    def batch_rows(self) -> int:
        """Return the number of rows per optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    def steps(self, n_rows: int) -> int:
        """Return the number of optimizer steps on `n_rows` rows; the last step of an epoch may have fewer rows."""
        if self.max_steps > 0:
            return self.max_steps
        if self.axolotl_rounding:  # the last epoch ends early, for the rows by which batches of epochs were short
            return math.ceil(self.num_train_epochs * n_rows / self.batch_rows)
        return math.ceil(self.num_train_epochs * math.ceil(self._epoch_rows(n_rows) / self.batch_rows))

    def _epoch_rows(self, n_rows: int) -> int:
        """Return the number of rows of an epoch, of `n_rows` rows.

        Raises:
            SettingsError: no row is left, because incomplete forward passes are left out.
        """
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
        data = {
            "steps": steps,
            "batch_rows": self.batch_rows,
            "micro_rows": self.per_device_train_batch_size if self.gradient_accumulation_steps > 1 else None,
            "learning_rate": self.learning_rate,
            "warmup_steps": self._warmup_steps(steps),
            "warmup_from_zero": True,
            "schedule": SCHEDULES[self.lr_scheduler_type],
            "betas": (self.adam_beta1, self.adam_beta2),
            "epsilon": self.adam_epsilon,
            "weight_decay": self.weight_decay,
            "clip_norm": self.max_grad_norm or None,
        }
        return validated(OptimizerRecipe, data, "recipe")

    def _warmup_steps(self, steps: int) -> int:
        """Return the number of warm-up steps of a training of `steps` steps."""
        if self.lr_scheduler_type == "constant":  # Transformers ignores the warm-up of this schedule
            return 0
        if self.warmup_steps >= 1:
            count = int(self.warmup_steps)
        elif not self.axolotl_rounding:  # a share of all steps, in newer versions of Transformers also `warmup_steps`
            return math.ceil(steps * (self.warmup_steps or self.warmup_ratio or 0.0))
        elif self.warmup_ratio is not None:
            count = int(steps * self.warmup_ratio)
        else:
            count = min(int(steps * AXOLOTL_WARMUP_RATIO), AXOLOTL_MAX_WARMUP_STEPS)
        return 2 if self.axolotl_rounding and count == 1 else count

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
    return FineTuningRecipe(
        per_device_train_batch_size=batch_rows,
        max_steps=min(math.ceil(n_rows / batch_rows), max_steps),
        warmup_ratio=0.03,
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
        SettingsError: the recipe has an adapter, or does not clip gradients.
    """
    if recipe.lora_r is not None:
        raise SettingsError(f"recipe: lora_r: got {recipe.lora_r}, but a new model has no adapter; remove it")
    if not recipe.max_grad_norm:
        raise SettingsError("recipe: max_grad_norm: got no limit, expected a number above 0 for a new model")
    shape = RECIPES["tiny"].shape.model_copy(update={"vocab_size": vocab_size, "context": context})
    settings = {"name": "proxy", "shape": shape, "cuda_autocast": False}
    return TrainingRecipe(**recipe.optimizer(n_rows).model_dump(), **settings)


def _flatten(data: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Rename fields to those of Transformers, and merge the groups of adapter and training arguments into them.

    Raises:
        SettingsError: a field has two different values, under two of its names.
    """
    entries: list[tuple[str, Any]] = []
    for key, value in data.items():
        name = str(key)
        if name in ("lora", "peft", "peft_config") and isinstance(value, Mapping):
            group = {"lora_alpha" if key == "alpha" else key: entry for key, entry in value.items()}
            entries += _flatten(group, location).items()
        elif name in ("training_args", "training_arguments", "args", "trl") and isinstance(value, Mapping):
            entries += _flatten(value, location).items()
        else:
            if name not in ("peft_type", "peft_version"):
                name = name.removeprefix("peft_")  # Axolotl
            entries.append((_known_fields()["aliases"].get(name, name), value))
    fields: dict[str, Any] = {}
    for name, value in entries:
        previous = fields.get(name)
        if value is None and previous is not None:  # saved arguments contain obsolete names, without a value
            continue
        if previous is not None and previous != value:
            raise SettingsError(f"{location}: {name}: got both {previous!r} and {value!r}; remove one of them")
        fields[name] = value
    return fields


def _with_adapter_defaults(fields: Mapping[str, Any], location: str) -> dict[str, Any]:
    """Add what TRL adds to an adapter, or remove the fields of an adapter that is switched off.

    Raises:
        SettingsError: the adapter has no rank, or TRL would choose its layers.
    """
    names = ("lora_r", "lora_alpha", "lora_target_modules")
    unused = (*names, "lora_target_linear", "lora_dropout")
    is_off = fields.get("use_peft") is False or ("adapter" in fields and not fields["adapter"])
    if is_off:  # TRL saves the fields of an adapter in any case
        return {name: value for name, value in fields.items() if name not in unused}
    if fields.get("use_peft"):
        if not fields.get("lora_target_modules"):
            raise SettingsError(
                f"{location}: lora_target_modules is missing, and PEFT would choose layers by the type of the model; "
                "list them, e.g. [q_proj, v_proj]"
            )
        return TRL_ADAPTER_DEFAULTS | {name: value for name, value in fields.items() if value is not None}
    if not fields.get("lora_r") and any(fields.get(name) for name in (*names, "adapter", "peft_type")):
        raise SettingsError(f"{location}: lora_r is missing: the adapter has no rank; set it, or remove the adapter")
    return dict(fields)


def _with_axolotl_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Add the defaults of Axolotl that differ from those of Transformers."""
    fields = AXOLOTL_DEFAULTS | {name: value for name, value in fields.items() if value is not None}
    if fields.get("warmup_steps") == 0:  # no warm-up, instead of the default one
        fields["warmup_ratio"] = 0.0
    batch_rows = fields.pop("batch_size", None)  # of a step; its forward passes are the other way to set it
    if batch_rows and "gradient_accumulation_steps" not in fields:
        fields["gradient_accumulation_steps"] = max(1, int(batch_rows) // int(fields["per_device_train_batch_size"]))
    return fields | {"axolotl_rounding": True}


def _with_llama_factory_adapter(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Add the adapter of LLaMA-Factory, whose layers are `all` or names separated by commas, or switch it off."""
    if fields.get("finetuning_type") == "full":
        return {**fields, "use_peft": False}
    fields = LLAMA_FACTORY_ADAPTER | {name: value for name, value in fields.items() if value is not None}
    modules = fields["lora_target_modules"]
    if isinstance(modules, str):
        fields["lora_target_modules"] = "all-linear" if modules == "all" else modules.replace(" ", "").split(",")
    return fields


def _with_switches(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Add the fields of a recipe that other fields of Axolotl, TRL and LLaMA-Factory stand for."""
    added: dict[str, Any] = {}
    assistant_only, completion_only = fields.get("assistant_only_loss"), fields.get("completion_only_loss")
    if completion_only is False and not assistant_only:
        added["train_on_inputs"] = True
    elif assistant_only is False and completion_only is None:  # prompts of other rows carry no loss by default
        added["train_on_inputs"] = "conversations"
    if fields.get("lora_target_linear"):
        added["lora_target_modules"] = "all-linear"
    if fields.get("adapter") == "qlora" or fields.get("weight_dtype") or fields.get("quantization_bit"):
        added["load_in_4bit"] = True
    if any(fields.get(name) for name in HALF_PRECISION):
        added["bf16"] = True
    return {**fields, **added}


def _is_set(name: str, value: Any) -> bool:
    """Return whether a field has a value that does not switch it off."""
    return value not in DISABLED or (name in NOT_DISABLED_BY_0 and value == 0)


def _effective(fields: Mapping[str, Any], harmless: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the names of `harmless` that are set to another value than those."""
    names = [name for name in harmless if _is_set(name, fields.get(name))]
    return [name for name in names if fields[name] not in harmless[name]]


def _refuse_unsupported(fields: Mapping[str, Any], location: str) -> None:
    """Raise ModelError if settings of the recipe cannot be replayed; the message lists all of them."""
    problems, refused = [], _known_fields()["refused"]
    for name in _effective(fields, refused):
        expected = f"set it to {refused[name][0]!r}" if refused[name] else "remove it, to replay a training without it"
        problems.append(f"{name} is set to {fields[name]!r}, which a replay does not support; {expected}")
    if problems:
        raise ModelError(f"{location}: {'; '.join(problems)}")
