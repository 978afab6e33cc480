"""Checkpoints: ordered by step, with their learning rate and Adam's moments by parameter."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from grasp.baselines.checkpoints import find_checkpoints, training_checkpoints
from grasp.errors import ModelError
from grasp.training.recipe import TrainingRecipe
from grasp.training.row_order import batch_order, relative_weights, token_batches
from grasp.training.train import start_training
from tests.pipeline.world import write_checkpoint


def run_of(world):
    return world.root / "env/reference/seed-0"


def recipe_of(world):
    return TrainingRecipe.model_validate(world.environment.info.recipe_settings)


def test_checkpoints_of_a_run_are_ordered_by_step_and_end_with_the_final_model(world):
    result = find_checkpoints([run_of(world)])
    assert [checkpoint.step for checkpoint in result] == [8, 16, 24]
    assert [checkpoint.path.name for checkpoint in result] == ["checkpoint-8", "checkpoint-16", "seed-0"]
    assert len({checkpoint.fingerprint for checkpoint in result}) == 3
    recipe = recipe_of(world)
    rates = [recipe.learning_rate_at(step) for step in (7, 15, 23)]
    assert [checkpoint.learning_rate for checkpoint in result] == rates
    assert rates[-1] > 0
    run = run_of(world)  # or they are named one by one, in any order
    named = find_checkpoints([run / "checkpoint-16", run / "checkpoint-8", run / "checkpoint-16"])
    assert [checkpoint.step for checkpoint in named] == [8, 16]


def test_a_checkpoint_loads_with_the_tokenizer_of_the_reference(world):
    inputs = world.inputs()
    first = training_checkpoints(inputs)[0]
    loaded = first.load(inputs)
    assert loaded.tokenizer.fingerprint == inputs.tokenizer.fingerprint
    expected_model = LlamaForCausalLM.from_pretrained(first.path)
    for name, tensor in expected_model.state_dict().items():
        torch.testing.assert_close(loaded.model.state_dict()[name], tensor)
    last = training_checkpoints(inputs)[-1].load(inputs)
    assert last.fingerprint() == inputs.artifact.manifest.fingerprints["model"]


def test_moments_are_those_of_the_optimizer_by_parameter(world):
    """Repeat the same eight steps in this process."""
    inputs, recipe = world.inputs(), recipe_of(world)
    training = start_training(recipe, 0)
    frequency_N = relative_weights(inputs.n_rows, recipe.batch_rows, None)
    order = batch_order(frequency_N, seed=0, batch_rows=recipe.batch_rows, first_step=0, last_step=8)
    for batch in token_batches(inputs.store, order, context=64, vocab_size=300):
        training.backward(batch.ids_BL, batch.weight_BL)
        training.update()
    result = training_checkpoints(inputs)[0].moments()
    assert set(result) == set(
        dict(LlamaForCausalLM.from_pretrained(training_checkpoints(inputs)[0].path).named_parameters())
    )
    for name, parameter in zip(training.names, training.parameters, strict=True):
        state = training.optimizer.state[parameter]
        torch.testing.assert_close(result[name], (state["exp_avg"], state["exp_avg_sq"]))


def test_moments_stored_by_parameter_name_are_read_directly(tmp_path):
    path = write_checkpoint(tmp_path / "checkpoint-40")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": 40, "log_history": []}))
    first, second = torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)
    save_file({"a.weight.exp_avg": first, "a.weight.exp_avg_sq": second}, path / "optimizer.safetensors")
    (checkpoint,) = find_checkpoints([path])
    (result,) = checkpoint.moments().values()
    torch.testing.assert_close(result, (first, second))
    assert checkpoint.moments_fingerprint
    save_file({"a.weight.exp_avg": first}, path / "optimizer.safetensors")
    with pytest.raises(ModelError, match=r"optimizer.safetensors: .*moments"):
        checkpoint.moments()
    (path / "optimizer.safetensors").unlink()
    (checkpoint,) = find_checkpoints([path])
    assert not checkpoint.has_moments


def test_the_learning_rate_is_read_from_the_trainer_state_of_transformers(tmp_path):
    path = write_checkpoint(tmp_path / "checkpoint-40")
    (checkpoint,) = find_checkpoints([path])
    assert (checkpoint.step, checkpoint.learning_rate) == (40, None)
    state = {"global_step": 40, "log_history": [{"learning_rate": 2e-4, "step": 20}, {"learning_rate": 1e-4}, {}]}
    (path / "trainer_state.json").write_text(json.dumps(state))
    (checkpoint,) = find_checkpoints([path])
    assert (checkpoint.step, checkpoint.learning_rate) == (40, 1e-4)


def test_another_architecture_is_refused_with_the_first_weight_that_differs(world, tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2, eos_token_id=0
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "deep")
    inputs = world.inputs(checkpoint_paths=(tmp_path / "deep",))
    (checkpoint,) = training_checkpoints(inputs)
    with pytest.raises(ModelError, match=r"e\.g\. model\.layers\.2\."):
        checkpoint.load(inputs)
