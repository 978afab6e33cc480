"""Recipes of other trainers, translated to the fields of `FineTuningRecipe`.

Those are the names of `TrainingArguments` of Transformers and `SFTConfig` of TRL; names of Axolotl and LLaMA-Factory
are translated. Files are saved training arguments, or configurations, and may also contain the fields of
`adapter_config.json` of a LoRA adapter. `recipe_fields.yaml` lists the fields that are refused, noted, or without
influence on the result; a field in no list is noted. Start with `read`.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from grasp.errors import ModelError, SettingsError
from grasp.formats.dataset_entries import unknown_names
from grasp.training.fine_tuning_recipe import FineTuningRecipe
from grasp.yaml_files import read_yaml

RECIPE_FIELDS = FineTuningRecipe.model_fields.keys() - {"notes"}
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
TRL_ADAPTER_DEFAULTS = {"lora_r": 16, "lora_alpha": 32}  # of `ModelConfig`
LLAMA_FACTORY_NAMES = ("stage", "finetuning_type", "lora_rank", "lora_target")
LLAMA_FACTORY_ADAPTER = {"lora_r": 8, "lora_target_modules": "all"}  # its `lora_alpha` is twice the rank
HALF_PRECISION = ("bfloat16", "float16", "fp8", "pure_bf16")  # Axolotl, LLaMA-Factory
SWITCHES = (  # fields of no recipe of GRASP, which are read here
    *HALF_PRECISION,
    "assistant_only_loss",
    "bf16",
    "completion_only_loss",
    "fp16",
    "load_in_4bit",
    "load_in_8bit",
    "lora_dropout",
    "lora_target_linear",
    "quantization_bit",
    "train_on_inputs",
    "use_peft",
    "val_set_size",
    "weight_dtype",
)
DISABLED: tuple[Any, ...] = (None, False, 0, "", "no", [], {})  # values that switch a setting off
SFT_LOSSES = ("dft",)  # of `SFTConfig`, besides nll; all others are losses of preference pairs
NOT_DISABLED_BY_0 = ("init_lora_weights", "layers_to_transform", "enable_thinking")  # a random adapter, the first layer


@cache
def known_fields() -> dict[str, Any]:
    """Return the lists of `recipe_fields.yaml`, whose comments describe them."""
    return read_yaml(Path(__file__).with_name("recipe_fields.yaml"))


def claims(fields: Mapping[str, Any]) -> str:
    """Claim every recipe that no other package claims: fields in no list are refused or noted."""
    return "it has fields of Transformers, TRL, PEFT, Axolotl or LLaMA-Factory"


def read(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `FineTuningRecipe` that fields under any of their known names stand for.

    Raises:
        SettingsError: a field is a typing error, has two values, or is missing.
        ModelError: a setting cannot be differentiated.
    """
    if isinstance(trl := data.get("trl"), Mapping) and trl.get("beta") is not None:  # Axolotl reads it first
        data = {name: value for name, value in data.items() if name not in ("rl_beta", "dpo_beta")}
    fields, known = _flatten(data), known_fields()
    problems = []
    for name in _changed(fields, known["refused"]):
        supported = known["refused"][name]
        if name == "loss_type" and fields[name] in SFT_LOSSES:
            supported = ("nll",)
        advice = f"set it to {supported[0]!r}" if supported else "remove it, to replay a training without it"
        problems.append(f"{name} is set to {fields[name]!r}, which a replay does not support; {advice}")
    if problems:
        raise ModelError("; ".join(problems))
    fields = _with_trainer_defaults(fields, data)
    used = {*RECIPE_FIELDS, *known["aliases"], *known["refused"], *SWITCHES}
    neutral = {*known["noted"], *chain.from_iterable(known["neutral"].values())}
    unknown = unknown_names(_changed(fields, dict.fromkeys(fields, ())), used, neutral, MISTAKEN_NAMES)
    if fields and not fields.keys() & used:
        raise SettingsError(
            f"has no field of a training, got {', '.join(list(fields)[:5])}; expected the names of TrainingArguments, "
            "Axolotl or LLaMA-Factory at the top level, such as learning_rate"
        )
    fields = _with_adapter_defaults(fields)
    if fields.get("lora_target_linear"):
        fields["lora_target_modules"] = "all-linear"
    notes = _notes(fields, [*_changed(fields, known["noted"]), *unknown])
    recipe = {name: value for name, value in fields.items() if value is not None and name in RECIPE_FIELDS}
    return recipe | {"notes": notes}


def _flatten(data: Mapping[str, Any]) -> dict[str, Any]:
    """Rename fields to those of Transformers, and merge the groups of adapter and training arguments into them."""
    entries: list[tuple[str, Any]] = []
    for key, value in data.items():
        name = str(key)
        if name in ("lora", "peft", "peft_config") and isinstance(value, Mapping):
            group = {"lora_alpha" if key == "alpha" else key: entry for key, entry in value.items()}
            entries += _flatten(group).items()
        elif name in ("training_args", "training_arguments", "args", "trl") and isinstance(value, Mapping):
            entries += _flatten(value).items()
        else:
            if name not in ("peft_type", "peft_version"):
                name = name.removeprefix("peft_")  # Axolotl
            entries.append((known_fields()["aliases"].get(name, name), value))
    fields: dict[str, Any] = {}
    for name, value in entries:
        previous = fields.get(name)
        if value is None and previous is not None:  # saved arguments contain obsolete names, without a value
            continue
        if previous is not None and previous != value:
            raise SettingsError(f"{name}: got both {previous!r} and {value!r}; remove one of them")
        fields[name] = value
    return fields


def _with_adapter_defaults(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Add what TRL adds to an adapter, or remove the fields of an adapter that is switched off."""
    names = ("lora_r", "lora_alpha", "lora_target_modules")
    unused = (*names, "lora_target_linear", "lora_dropout")
    is_off = fields.get("use_peft") is False or ("adapter" in fields and not fields["adapter"])
    if is_off:  # TRL saves the fields of an adapter in any case
        return {name: value for name, value in fields.items() if name not in unused}
    if fields.get("use_peft"):
        if not fields.get("lora_target_modules"):
            raise SettingsError(
                "lora_target_modules is missing, and PEFT would choose layers by the type of the model; list them, "
                "e.g. [q_proj, v_proj]"
            )
        return TRL_ADAPTER_DEFAULTS | {name: value for name, value in fields.items() if value is not None}
    if not fields.get("lora_r") and any(fields.get(name) for name in (*names, "adapter", "peft_type")):
        raise SettingsError("lora_r is missing: the adapter has no rank; set it, or remove the adapter")
    return dict(fields)


def _with_trainer_defaults(fields: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Add what Axolotl or LLaMA-Factory, whose names `data` has, add to a recipe, where Transformers does not."""
    fields = dict(fields)
    if any(name in data for name in AXOLOTL_NAMES):
        fields = AXOLOTL_DEFAULTS | {name: value for name, value in fields.items() if value is not None}
        if fields.get("warmup_steps") == 0:  # no warm-up, instead of the default one
            fields["warmup_ratio"] = 0.0
        batch_rows = fields.pop("batch_size", None)  # of a step; its forward passes are the other way to set it
        if batch_rows and "gradient_accumulation_steps" not in fields:
            per_pass = int(fields["per_device_train_batch_size"])
            fields["gradient_accumulation_steps"] = max(1, int(batch_rows) // per_pass)
        fields["joined_epochs"] = True
    if not any(name in data for name in LLAMA_FACTORY_NAMES):
        return fields
    if fields.get("finetuning_type") == "full":
        return {**fields, "use_peft": False}
    fields = LLAMA_FACTORY_ADAPTER | {name: value for name, value in fields.items() if value is not None}
    modules, rank = fields["lora_target_modules"], str(fields["lora_r"])
    if "lora_alpha" not in fields and rank.isdecimal():
        fields["lora_alpha"] = 2 * int(rank)
    if isinstance(modules, str):  # names separated by commas
        fields["lora_target_modules"] = "all-linear" if modules == "all" else modules.replace(" ", "").split(",")
    return fields


def _notes(fields: Mapping[str, Any], not_used: Sequence[str]) -> list[str]:
    """Return one sentence for each difference between the training of a trainer and one by GRASP."""
    notes = []
    if any(fields.get(name) not in DISABLED for name in ("bf16", "fp16", *HALF_PRECISION)):
        notes.append("the recipe computes in half precision, here in float32: rounding exceeds its differences")
    quantizes = any(fields.get(name) for name in ("load_in_4bit", "load_in_8bit", "weight_dtype", "quantization_bit"))
    if quantizes or fields.get("adapter") == "qlora":
        notes.append("the recipe quantizes the base model, which is not done here")
    if fields.get("lora_dropout"):
        notes.append("dropout of the adapter is switched off: a random mask cannot be replayed")
    assistant_only, completion_only = fields.get("assistant_only_loss"), fields.get("completion_only_loss")
    on_prompts = fields.get("train_on_inputs") or (completion_only is False and not assistant_only)
    # by default, TRL trains on the prompts of conversations, not on those of other rows
    if on_prompts or (assistant_only is False and completion_only is None):
        prompts = "prompts" if on_prompts else "prompts of conversations"
        notes.append(f"the recipe trains on {prompts} too, here only if the build had corpus.loss_on=all")
    if fields.get("val_set_size"):
        notes.append(
            f"val_set_size: the recipe keeps rows for validation ({fields['val_set_size']:g}), which are trained on "
            "here, in more steps"
        )
    if not_used:
        notes.append(f"not used: {', '.join(not_used)}")
    return notes


def _changed(fields: Mapping[str, Any], harmless: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the names of `harmless` that are set to another value than those, and than values that switch them off."""
    return [
        name
        for name, values in harmless.items()
        if (value := fields.get(name)) not in (*DISABLED, *values) or (value == 0 and name in NOT_DISABLED_BY_0)
    ]
