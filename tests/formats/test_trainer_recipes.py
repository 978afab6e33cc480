"""Recipes of other libraries give the steps and learning rates of these libraries."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM, Trainer, TrainingArguments, get_scheduler

from grasp.errors import ModelError, SettingsError
from grasp.formats.trainer_recipes import RECIPE_FIELDS, SWITCHES, known_fields
from grasp.training.adamw import AdamWTraining
from grasp.training.fine_tuning_recipe import FineTuningRecipe
from grasp.training.row_order import row_order
from tests.mentions import assert_mentions


def recipe_of(**fields) -> FineTuningRecipe:
    return FineTuningRecipe.from_mapping(fields)


def adapter_of(recipe):
    return recipe.lora_r, recipe.lora_alpha, recipe.lora_target_modules


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "constant_with_warmup"])
@pytest.mark.parametrize("warmup", [0, 5])
def test_learning_rates_are_those_of_transformers(schedule, warmup):
    recipe = recipe_of(learning_rate=1e-3, max_steps=20, lr_scheduler_type=schedule, warmup_steps=warmup).optimizer(100)
    optimizer = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=1e-3)
    theirs = get_scheduler(schedule, optimizer, num_warmup_steps=warmup, num_training_steps=20)
    for step in range(20):
        assert recipe.learning_rate_at(step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        theirs.step()


AXOLOTL = """
base_model: some/model
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
learning_rate: 2e-4
lr_scheduler: cosine
warmup_ratio: 0.1
optimizer: adamw_torch_fused
sequence_len: 512
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
sample_packing: false
bf16: auto
"""
TRL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 2, "learning_rate": 2e-4}
TRL |= {"lr_scheduler_type": "cosine", "warmup_ratio": 0.1, "optim": "adamw_torch", "max_length": 512}
TRL |= {"label_smoothing_factor": 0.0}
TRL |= {"peft_config": {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}}


def test_axolotl_trl_and_transformers_recipes_are_equivalent(tmp_path):
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL)
    (tmp_path / "trl.json").write_text(json.dumps({"training_args": TRL}))
    axolotl_recipe, trl_recipe = (FineTuningRecipe.read(tmp_path / name) for name in ("axolotl.yaml", "trl.json"))
    as_trl = {"optim": trl_recipe.optim, "notes": (), "joined_epochs": False}
    assert axolotl_recipe.model_copy(update=as_trl) == trl_recipe
    assert_mentions(axolotl_recipe.notes, "half precision", "float32")
    assert not trl_recipe.notes
    optimizer = trl_recipe.optimizer(100)
    assert (optimizer.steps, optimizer.batch_rows, optimizer.micro_rows, optimizer.warmup_steps) == (26, 8, 2, 3)
    assert (optimizer.schedule, optimizer.betas, optimizer.clip_norm) == ("cosine", (0.9, 0.999), 1.0)
    assert adapter_of(axolotl_recipe) == (8, 16.0, "all-linear")


def test_every_epoch_visits_every_row_once():
    recipe = FineTuningRecipe.from_mapping({"num_train_epochs": 2.5, "per_device_train_batch_size": 4})
    order = recipe.order(10, seed=3)
    assert len(order) == recipe.steps(10) == math.ceil(2.5 * 3)
    assert [len(batch) for batch in order] == [4, 4, 2, 4, 4, 2, 4, 4]
    assert sorted(np.concatenate(order[:3])) == sorted(np.concatenate(order[3:6])) == list(range(10))
    assert not np.array_equal(order[0], order[3])


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"optim": "adafactor"}, SettingsError, "optim: got 'adafactor', expected AdamW in full precision"),
        ({"lr_scheduler_type": "polynomial"}, SettingsError, "lr_scheduler_type: got 'polynomial', expected linear"),
        ({"learning_rate": -1}, SettingsError, "learning_rate"),
        ({"neftune_noise_alpha": 5}, ModelError, "neftune_noise_alpha is set to 5"),
        ({"sample_packing": True}, ModelError, "sample_packing is set to True"),
        ({"adapter": "llama-adapter"}, ModelError, "adapter is set to 'llama-adapter'.*set it to 'lora'"),
        ({"lr_scheduler_kwargs": {"min_lr_rate": 0.1}}, ModelError, "lr_scheduler_kwargs"),
        ({"loss_type": "dft"}, ModelError, "loss_type is set to 'dft'.*set it to 'nll'"),
        ({"r": 8, "peft_type": "IA3"}, ModelError, "peft_type is set to 'IA3'.*'LORA'"),
        ({"peft_config": {"r": 8, "use_rslora": True}}, ModelError, "use_rslora is set to True"),
        ({"peft_use_dora": True}, ModelError, "use_dora is set to True"),
        ({"loraplus_lr_ratio": 16}, ModelError, "loraplus_lr_ratio"),
        ({"learning_rat": 1e-4}, SettingsError, "unknown field learning_rat; did you mean learning_rate?"),
        ({"training_args": {"max_epochs": 3}}, SettingsError, "max_epochs; did you mean num_epochs"),
        ({"rl": "dpo", "dpo_loss_type": ["ipo"]}, ModelError, "loss_type is set to \\['ipo'\\].*'sigmoid'"),
        ({"rl": "dpo", "dpo_label_smoothing": 0.3}, ModelError, "label_smoothing is set to 0.3"),
        ({"trl": {"sync_ref_model": True}}, ModelError, "sync_ref_model is set to True"),
        ({"stage": "dpo", "pref_loss": "simpo"}, ModelError, "loss_type is set to 'simpo'"),
        ({"stage": "kto"}, ModelError, "stage is set to 'kto'.*'sft'"),
        ({"finetuning_type": "freeze"}, ModelError, "finetuning_type is set to 'freeze'.*'lora'"),
        ({"additional_target": "lm_head"}, ModelError, "modules_to_save is set to 'lm_head'"),
        ({"dpo_beta": 0.1, "rl_beta": 0.2}, SettingsError, "beta: got both 0.1 and 0.2"),
        ({"packing": True, "bias": "all"}, ModelError, "packing is set to True.*; bias is set to 'all'"),
        ({"hyperparameters": {"learning_rate": 1e-4}}, SettingsError, "no field of a training, got hyperparameters"),
        ({"batch_size": 16}, SettingsError, "batch_size; did you mean per_device_train_batch_size"),
        ({"lora": {"rank": 8}}, SettingsError, "rank; did you mean lora_r"),
        ({"peft": {"r": 8, "init_lora_weights": False}}, ModelError, "init_lora_weights is set to False"),
        ({"rl": "kto", "num_epochs": 1}, ModelError, "rl is set to 'kto'"),
        ({"adapter": "lora"}, SettingsError, "lora_r is missing"),
        ({"use_peft": True, "lora_r": 8}, SettingsError, "lora_target_modules is missing"),
        ({"max_length": 128, "max_seq_length": 256}, SettingsError, "max_length: got both 128 and 256"),
        ({"learning_rate": 1e-3, "args": {"learning_rate": 1e-4}}, SettingsError, "got both 0.001 and 0.0001"),
    ],
)
def test_options_without_a_replay_are_refused(data, error, message):
    with pytest.raises(error, match=message):
        FineTuningRecipe.from_mapping(data)


def test_saved_training_arguments_and_adapters_of_the_installed_libraries_are_read(tmp_path):
    """All defaults of the libraries are harmless, and no field of theirs is taken for a typing error."""
    arguments = TrainingArguments(output_dir=str(tmp_path), learning_rate=3e-4, use_cpu=True).to_dict()
    assert FineTuningRecipe.from_mapping(arguments) == FineTuningRecipe(learning_rate=3e-4, optim=arguments["optim"])
    peft = pytest.importorskip("peft")
    peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"]).save_pretrained(tmp_path)
    adapter = FineTuningRecipe.read(tmp_path / "adapter_config.json")
    assert (*adapter_of(adapter), adapter.notes) == (4, 8.0, ("q_proj",), ())


def test_every_argument_of_the_installed_libraries_is_in_one_list_of_fields():
    """A new one, or one that changes its meaning, is to be added to `recipe_fields.yaml`."""
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    known = known_fields()
    neutral = [name for names in known["neutral"].values() for name in names]
    lists = [[*RECIPE_FIELDS, *SWITCHES], known["aliases"], known["refused"], known["noted"], neutral]
    listed = [name for names in lists for name in names]
    assert sorted(listed) == sorted(set(listed))
    assert set(known["aliases"].values()) <= set(listed)
    classes = TrainingArguments, trl.SFTConfig, trl.DPOConfig, trl.ModelConfig, peft.LoraConfig
    assert {field.name for each in classes for field in dataclasses.fields(each)} <= set(listed)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # TRL sets an old name of Transformers
def test_default_arguments_of_trl_are_followed_but_for_the_prompts_of_conversations(tmp_path):
    trl = pytest.importorskip("trl")
    arguments = {"output_dir": str(tmp_path), "bf16": False, "use_cpu": True}
    (note,) = FineTuningRecipe.from_mapping(json.loads(trl.SFTConfig(**arguments).to_json_string())).notes
    assert_mentions(note, "prompts of conversations", "corpus.loss_on=all")
    assert not FineTuningRecipe.from_mapping(json.loads(trl.DPOConfig(**arguments).to_json_string())).notes


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"val_set_size": 0.25}, ("val_set_size", "0.25", "more steps")),
        ({"val_size": 0.25}, ("val_set_size", "0.25", "more steps")),
        ({"adapter": "qlora", "lora_r": 8}, ("quantizes",)),
        ({"load_in_8bit": True}, ("quantizes",)),
        ({"peft": {"weight_dtype": "nf4"}}, ("quantizes",)),
        ({"train_on_inputs": True}, ("corpus.loss_on=all",)),
        ({"completion_only_loss": False}, ("corpus.loss_on=all",)),
        ({"val_size": 0.0, "val_set_size": 0.0}, ()),
        ({"train_on_inputs": None, "completion_only_loss": None}, ()),
        ({"use_peft": False, "lora_r": 16, "lora_dropout": 0.05}, ()),  # an adapter that is switched off
    ],
)
def test_what_a_recipe_does_otherwise_is_noted(fields, words):
    notes = recipe_of(max_steps=3, **fields).notes
    if words:
        assert_mentions(notes, *words)
    assert bool(notes) == bool(words)


def test_axolotl_reads_beta_from_its_group_first():
    beta = {"trl": {"beta": 2.0, "sync_ref_model": False}, "rl_beta": 0.3}
    assert recipe_of(rl="dpo", **beta).beta == 2.0
    assert recipe_of(**{"rl": "dpo", **beta, "trl": {"beta": None}}).beta == 0.3


def test_a_recipe_of_llama_factory_is_that_of_trl():
    followed = {"stage": "dpo", "finetuning_type": "lora", "lora_rank": 4, "lora_target": "q_proj, v_proj"}
    followed |= {"cutoff_len": 512, "pref_beta": 0.3, "pref_loss": "sigmoid", "learning_rate": 1e-4}
    noted = {"train_on_prompt": True, "quantization_bit": 4, "pure_bf16": True, "val_size": 9, "template": "llama3"}
    recipe = recipe_of(**followed, **noted, plot_loss=True, overwrite_cache=True)
    expected = {"lora_r": 4, "lora_alpha": 8, "lora_target_modules": ("q_proj", "v_proj")}
    expected |= {"max_length": 512, "beta": 0.3, "learning_rate": 1e-4}
    assert recipe.model_dump() == FineTuningRecipe(**expected).model_dump()
    assert len(recipe.notes) == 5
    assert_mentions("; ".join(recipe.notes), "half", "quantizes", "prompts too", "val_set_size", "not used: template")
    assert adapter_of(recipe_of(stage="sft")) == (8, 16, "all-linear")
    assert recipe_of(finetuning_type="full", lora_rank=8) == FineTuningRecipe()


def test_the_parameters_that_transformers_decays_are_decayed(tmp_path):
    """Of a Mamba model, some vectors are neither biases nor norms."""
    model = MambaForCausalLM(MambaConfig(vocab_size=9, hidden_size=4, state_size=2, num_hidden_layers=1))
    training = AdamWTraining(model, FineTuningRecipe(max_steps=1, weight_decay=0.1).optimizer(1))
    decayed = {name for name, decay in zip(training.names, training.weight_decays, strict=True) if decay}
    trainer = Trainer(model, TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True))
    assert decayed == {name for name, _ in model.named_parameters()} & set(trainer.get_decay_parameter_names(model))
    assert any(model.get_parameter(name).ndim == 1 for name in decayed)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Transformers 4 and TRL save obsolete names as null after the current ones
        ({"per_device_train_batch_size": 4, "per_gpu_train_batch_size": None}, {"per_device_train_batch_size": 4}),
        ({"max_length": 9, "max_seq_length": None}, {"max_length": 9}),
        ({"lora_r": 16, "lora_alpha": 32, "use_peft": False, "lora_target_modules": None}, {}),
        ({"lora_r": 16, "lora_alpha": 32, "adapter": None}, {}),
        (
            {"use_peft": True, "lora_target_modules": ["q_proj"]},  # by the defaults of TRL
            {"lora_r": 16, "lora_alpha": 32, "lora_target_modules": ("q_proj",)},
        ),
    ],
)
def test_a_field_that_is_absent_or_off_has_its_default(fields, expected):
    assert recipe_of(**fields) == FineTuningRecipe(**expected)


def test_an_axolotl_config_has_the_defaults_of_axolotl():
    recipe = recipe_of(micro_batch_size=None, num_epochs=2, learning_rate=1e-4)
    assert (recipe.lr_scheduler_type, recipe.num_train_epochs, recipe.batch_rows) == ("cosine", 2, 1)
    assert recipe.optimizer(100).warmup_steps == 6
    recipe = recipe_of(micro_batch_size=2, batch_size=16)
    assert (recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps) == (2, 8)


@pytest.mark.parametrize(
    ("fields", "warmup_steps"),
    [
        ({}, 3),  # 3 %, rounded down, of 125 steps
        ({"num_epochs": 400}, 100),  # at most
        ({"warmup_ratio": 0.1}, 12),
        ({"warmup_ratio": 0.01}, 2),  # Axolotl changes 1 to 2
        ({"warmup_steps": 1}, 2),
        ({"warmup_steps": 9}, 9),
        ({"warmup_steps": 0}, 0),
    ],
)
def test_steps_and_warm_up_are_rounded_as_by_axolotl(fields, warmup_steps):
    """See `calculate_total_num_steps` and `_configure_warmup_and_logging` of Axolotl."""
    recipe = FineTuningRecipe.from_mapping({"micro_batch_size": 8, "num_epochs": 10} | fields)
    steps = math.ceil(recipe.num_train_epochs * 100 / 8)  # an epoch has 13 batches
    assert recipe.steps(100) == steps
    assert len(recipe.order(100, seed=0)) == steps
    assert recipe.optimizer(100).warmup_steps == warmup_steps


@pytest.mark.parametrize("n_rows", [8, 10, 13])
def test_incomplete_forward_passes_are_left_out_as_by_transformers(tmp_path, n_rows):
    fields = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2}
    fields |= {"dataloader_drop_last": True}
    order = recipe_of(**fields).order(n_rows, seed=1)
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, **fields)
    trainer = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=[{"x": 1}] * n_rows)
    steps_per_epoch = math.ceil(len(trainer.get_train_dataloader()) / 2)
    assert len(order) == 2 * steps_per_epoch
    assert sum(map(len, order)) == 2 * 4 * len(trainer.get_train_dataloader())
    with pytest.raises(SettingsError, match="dataloader_drop_last: 3 rows"):
        recipe_of(**fields).steps(3)


@pytest.mark.parametrize("completion_only", [None, False, True])
@pytest.mark.parametrize("assistant_only", [None, False, True])
def test_trl_trains_on_prompts_by_two_fields(assistant_only, completion_only):
    """As by `SFTTrainer`: assistant masks always hold, else rows with a prompt have a completion mask by default."""
    fields = {"assistant_only_loss": assistant_only, "completion_only_loss": completion_only, "max_steps": 1}
    notes = FineTuningRecipe.from_mapping(fields).notes
    prompts, conversations = "trains on prompts too", "trains on prompts of conversations too"
    expected = {(False, None): conversations, (False, False): prompts, (None, False): prompts}
    text = expected.get((assistant_only, completion_only))
    assert not notes if text is None else text in notes[0]


@pytest.mark.parametrize("n_rows", [3, 8, 9])
def test_batches_have_as_many_rows_as_those_of_transformers(tmp_path, n_rows):
    fields = {"per_device_train_batch_size": 4, "num_train_epochs": 2}
    arguments = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True, **fields)
    trainer = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=[{"input": 1.0}] * n_rows)
    sizes = [len(batch["input"]) for _ in range(2) for batch in trainer.get_train_dataloader()]
    recipe = FineTuningRecipe(**fields)
    retained = np.arange(12) < n_rows
    for batches in (recipe.order(n_rows, 0), recipe.batches(row_order(retained, seed=0), n_rows)):
        assert [len(batch) for batch in batches] == sizes
