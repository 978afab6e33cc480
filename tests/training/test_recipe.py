"""A retrain is deterministic for a seed, also if resumed, and ends with an ordinary checkpoint."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grasp.corpus.row_store import RowStore
from grasp.errors import ModelError
from grasp.models.tokenizer import HfTokenizer, train_tokenizer
from grasp.models.unit_loss import evaluate_units
from grasp.settings import CorpusSettings
from grasp.training.recipe import RECIPES, TrainingRecipe, named_recipe
from grasp.training.train import train
from tests.faults import Killed, kill_at
from tests.models.toy import RECIPE, corpus, units
from tests.rounding import rounding

ROWS = corpus()


def weights(trained):
    return {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}


def assert_same(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def test_a_run_is_reproducible_bit_for_bit_and_lowers_the_loss():
    first = train(RECIPE, ROWS, seed=5)
    assert_same(weights(first), weights(train(RECIPE, ROWS, seed=5)))
    assert first.losses[-1] < first.losses[0] - 0.1
    assert first.losses.shape == (12,)
    assert abs(first.losses[0] - np.log(32)) < 0.2


def test_seed_subset_and_weights_change_the_result():
    plain = weights(train(RECIPE, ROWS, seed=5))
    half = np.arange(40) % 2 == 0
    for change in ({"seed": 6}, {"retained": half}, {"retained": 1.0 + half}):
        changed = weights(train(RECIPE, ROWS, **{"seed": 5, **change}))
        assert not torch.equal(changed["lm_head.weight"], plain["lm_head.weight"])


def test_a_row_of_weight_zero_is_omitted():
    half = np.arange(40) % 2 == 0
    left_out = train(RECIPE, ROWS, seed=5, retained=half)
    assert_same(weights(left_out), weights(train(RECIPE, ROWS, seed=5, retained=3.0 * half)))


def test_micro_batches_give_the_same_model_within_rounding():
    pieces = RECIPE.model_copy(update={"micro_rows": 4})
    whole = weights(train(RECIPE, ROWS, seed=5))
    for name, tensor in weights(train(pieces, ROWS, seed=5)).items():
        # forward and back through two layers and a vocabulary of 32, and 12 steps that round the weights
        terms = 2 * (2 * (4 * 16 + 24 + 12) + 32) + 12
        torch.testing.assert_close(tensor, whole[name], rtol=0, atol=rounding(terms, whole[name]))


def test_the_learning_rate_rises_and_ends_at_exactly_zero():
    rates = [RECIPE.learning_rate_at(step) for step in range(RECIPE.steps + 1)]
    assert rates[0] == pytest.approx(5e-3)
    assert rates[1] == rates[2] == max(rates) == RECIPE.learning_rate
    assert rates[-1] == 0.0
    np.testing.assert_allclose(np.diff(rates[2:]), -RECIPE.learning_rate / 10)


@pytest.mark.parametrize("killed_at", [1, 5, 8, 11])
def test_a_killed_run_resumes_to_the_same_weights_bit_for_bit(tmp_path, killed_at):
    marks = {"seed": 5, "retained": np.arange(40) % 4 > 0, "checkpoints": (4, 8)}
    with pytest.raises(Killed):
        train(RECIPE, ROWS, **marks, out=tmp_path / "run", progress=kill_at(killed_at))
    steps = []
    resumed = train(RECIPE, ROWS, **marks, out=tmp_path / "run", progress=steps.append)
    assert steps[0] == killed_at // 4 * 4 + 1
    whole = train(RECIPE, ROWS, **marks, out=tmp_path / "whole")
    assert_same(weights(resumed), weights(whole))
    np.testing.assert_array_equal(resumed.losses, whole.losses)
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]
    left = (tmp_path / "run" / "checkpoint-8" / "model.safetensors").read_bytes()
    assert left == (tmp_path / "whole" / "checkpoint-8" / "model.safetensors").read_bytes()


def test_only_incomplete_checkpoints_are_deleted(tmp_path):
    for name in (f".checkpoint-8.{'0' * 32}.part", "theirs.part", "checkpoint-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "training.json").write_text("{")
    trained = train(RECIPE, ROWS, seed=5, out=tmp_path, checkpoints=(4,))
    assert_same(weights(trained), weights(train(RECIPE, ROWS, seed=5)))
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-best"]
    assert [path.name for path in tmp_path.glob("*.part")] == ["theirs.part"]
    assert not list(tmp_path.glob(".*"))


def test_a_finished_run_is_loaded_and_not_trained_again(tmp_path):
    first = train(RECIPE, ROWS, seed=5, out=tmp_path)
    loaded = train(RECIPE, ROWS, seed=5, out=tmp_path, progress=kill_at(1))
    assert_same(weights(loaded), weights(first))
    np.testing.assert_array_equal(loaded.losses, first.losses)


def test_a_directory_of_another_run_is_refused(tmp_path):
    train(RECIPE, ROWS, seed=5, out=tmp_path)
    with pytest.raises(ModelError, match="seed, subset"):
        train(RECIPE, ROWS, seed=6, retained=np.arange(40) > 3, out=tmp_path)
    with pytest.raises(ModelError, match="recipe, rows"):
        train(RECIPE.model_copy(update={"learning_rate": 1e-3}), corpus(41), seed=5, out=tmp_path)


def test_training_from_a_row_store_equals_training_from_its_rows(tmp_path):
    table = pa.table({"input_ids": [ROWS.rows(np.array([i])).flat_ids.tolist() for i in range(40)]})
    pq.write_table(table, tmp_path / "corpus.parquet")
    settings = CorpusSettings(path=str(tmp_path / "corpus.parquet"), max_length=12)
    tokenizer = HfTokenizer(train_tokenizer(["unused"], vocab_size=257), vocab_size=257)
    store = RowStore.write(tmp_path / "rows", settings, tokenizer, shard_rows=7)
    half = np.arange(40) % 2 == 0
    from_store = train(RECIPE, store, seed=5, retained=half)
    assert_same(weights(from_store), weights(train(RECIPE, ROWS, seed=5, retained=half)))


def test_the_result_is_an_ordinary_checkpoint_with_its_tokenizer(tmp_path, capfd):
    tokenizer = HfTokenizer(train_tokenizer(["counting up"], vocab_size=257), vocab_size=300)
    shape = RECIPE.shape.model_copy(update={"vocab_size": 300})
    recipe = RECIPE.model_copy(update={"shape": shape})
    trained = train(recipe, ROWS, seed=5, tokenizer=tokenizer, out=tmp_path, checkpoints=(6,))
    assert capfd.readouterr() == ("", "")
    for place in (tmp_path, tmp_path / "checkpoint-6"):
        loaded = AutoModelForCausalLM.from_pretrained(place)
        assert loaded.dtype == torch.float32
        assert loaded.config.eos_token_id == 0
        assert AutoTokenizer.from_pretrained(place)("counting")["input_ids"] == tokenizer.encode(["counting"])[0]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    np.testing.assert_array_equal(evaluate_units(loaded, units()), evaluate_units(trained.model, units()))
    assert json.loads((tmp_path / "training.json").read_text())["step"] == 12
    assert not list(tmp_path.rglob("*.bin")) + list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retained": np.arange(40) < 5}, "retained: 5 of 40 rows"),
    ],
)
def test_invalid_recipes_and_rows_are_refused(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message):
        train(RECIPE, ROWS, seed=0, **options)
    with pytest.raises(ModelError, match=r"step \d+ had loss nan"):
        train(RECIPE.model_copy(update={"learning_rate": 1e30}), ROWS, seed=0)


def test_named_recipes_have_the_documented_sizes():
    sizes = {name: recipe.shape.n_parameters for name, recipe in RECIPES.items()}
    assert 0.3e6 < sizes["tiny"] < 0.4e6
    assert 4.5e6 < sizes["small"] < 5.5e6
    assert 49e6 < sizes["paper-50m"] < 51e6
    assert named_recipe("tiny") is RECIPES["tiny"]
    with pytest.raises(ModelError, match=r"recipe: .*'tinny'.*\btiny\b"):
        named_recipe("tinny")


def test_a_recipe_survives_json_and_is_validated():
    assert TrainingRecipe.model_validate_json(RECIPE.model_dump_json()) == RECIPE
    with pytest.raises(ValueError, match=r"warmup_steps: .*\b12\b.*\b12 steps"):
        TrainingRecipe.model_validate(RECIPE.model_dump() | {"warmup_steps": 12})


def test_half_precision_on_a_cpu_agrees_within_its_rounding():
    exact = train(RECIPE, ROWS, seed=1)
    half = train(RECIPE.model_copy(update={"cpu_autocast": True}), ROWS, seed=1)
    np.testing.assert_allclose(half.losses, exact.losses, atol=0.02)
    assert not np.array_equal(half.losses, exact.losses)
    assert "cpu_autocast" not in RECIPE.model_dump()  # what was begun before there was this setting goes on
