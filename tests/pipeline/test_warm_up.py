"""A build after some training steps: that of the trained model, resumable, and refused where it makes no sense."""

import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from grasp.artifact.inspection import verify
from grasp.artifact.reader import ArtifactReader
from grasp.corpus import RowStore
from grasp.errors import ArtifactError, SettingsError
from grasp.pipeline.build import add_replay, build
from grasp.pipeline.build_plan import output_location, plan_build
from grasp.pipeline.forecast import forecast
from grasp.retraining.retrain import _settings_of_artifact
from grasp.training.fine_tuning_recipe import FineTuningRecipe
from tests.faults import Killed, raising
from tests.pipeline.test_pipeline import Notes
from tests.pipeline.world import world

STEPS = 3
RECIPE = {"learning_rate": 1e-2, "per_device_train_batch_size": 4, "lr_scheduler_type": "constant"}


@pytest.fixture(scope="module")
def settings(root):
    return world(root, n_rows=12, train="further", features={"sample_positions": 10**6}).model_dump(mode="json")


def warm(settings, out, **options):
    return build(out=out, **{"settings": settings, "recipe": RECIPE, "untrained": True, "warm_up": STEPS} | options)


@pytest.fixture(scope="module")
def warmed(settings, root):
    return warm(settings, root / "warmed").path


def relevance(out, kernel="gradient"):
    return next(ArtifactReader.open(out).array_blocks(f"relevance_{kernel}", block_rows=1_000))[1]


def test_kernels_read_the_model_after_the_steps(settings, warmed, tmp_path):
    assert ArtifactReader.open(warmed).manifest.settings["model"]["path"] == str(warmed / "model")
    assert not (warmed / "warm-up").exists()
    assert verify(warmed).ok
    direct = settings | {"model": settings["model"] | {"path": str(warmed / "model")}}
    other = build(out=tmp_path / "direct", settings=direct, recipe=RECIPE, untrained=True, warm_up=0).path
    np.testing.assert_array_equal(relevance(warmed), relevance(other))
    plain = build(out=tmp_path / "plain", settings=settings, untrained=True).path
    assert (relevance(warmed) != relevance(plain)).any()


def test_a_forecast_contains_the_steps(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(import_module("grasp.pipeline.forecast"), "time_step", lambda *_: 3600.0)
    for steps, hours in ((None, "7 h"), (2, "2 h"), (0, " s ")):  # by default half of 15 steps
        line = forecast(tmp_path / "art", settings, untrained=True, recipe=RECIPE, warm_up=steps).splitlines()[1]
        assert hours in line


def test_the_steps_are_those_of_torch(settings, warmed):
    rows = RowStore.open(warmed / "tokens")
    recipe = FineTuningRecipe.from_mapping(RECIPE)
    assert recipe.steps(rows.n_rows) > STEPS
    model = AutoModelForCausalLM.from_pretrained(settings["model"]["path"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8)
    for index_B in recipe.order(rows.n_rows, seed=settings["features"]["seed"])[:STEPS]:
        batch = rows.rows(index_B)
        losses = []
        for i in range(len(batch)):
            ids = torch.from_numpy(batch.ids(i)[None].astype(np.int64))
            losses.append(torch.log_softmax(model(ids).logits[0, :-1], -1)[range(ids.shape[1] - 1), ids[0, 1:]])
        (-torch.cat(losses).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    trained = AutoModelForCausalLM.from_pretrained(warmed / "model").state_dict()
    for name, expected in model.state_dict().items():
        # AdamW divides by the root of a second moment: a rounding error in a tiny gradient may move a whole step
        difference = (trained[name] - expected).abs()
        assert difference.median() < 1e-5, name
        assert difference.max() < STEPS * 1e-2, name


def test_killed_at_any_moment_it_goes_on_to_the_same_bytes(settings, warmed, tmp_path, monkeypatch):
    with raising(monkeypatch, "replace", 10**9, Killed()) as used:
        warm(settings, tmp_path / "whole")
    for nth in (2, used[0] // 4, used[0] // 2, used[0] - 1):
        out = tmp_path / f"killed-{nth}"
        with pytest.raises(Killed), raising(monkeypatch, "replace", nth, Killed()):
            warm(settings, out)
        warm(settings, out)
        np.testing.assert_array_equal(relevance(out), relevance(warmed))
        weights = "model/model.safetensors"
        assert (out / weights).read_bytes() == (warmed / weights).read_bytes()


def test_the_same_command_has_nothing_to_do_and_another_number_of_steps_is_refused(settings, warmed):
    notes = Notes()
    warm(settings, warmed, progress=notes)
    assert any("nothing to do" in line for line in notes.lines)
    with pytest.raises(ArtifactError, match="steps: was 3, now 4"):
        warm(settings, warmed, warm_up=4)


@pytest.mark.parametrize(
    ("changes", "options", "keyword"),
    [
        ({"train": "new"}, {"recipe": None}, "--train new"),
        ({}, {"warm_up": -1}, "got -1"),
        ({}, {"warm_up": 1000}, "expected 1 to"),
        ({}, {"recipe": RECIPE | {"lora_r": 2}}, "adapter"),
        ({}, {"recipe": RECIPE | {"max_length": 4}}, "max_length: got 4"),
        ({"features": {"kernels": ["output_layer"]}}, {"warm_up": None}, "--recipe: no effect"),
        ({"corpus": {"form": "preference"}}, {}, "preference pairs"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, changes, options, keyword, tmp_path):
    changed = {**settings, **changes}
    if "corpus" in changes:
        changed["corpus"] = settings["corpus"] | changes["corpus"]
    with pytest.raises(SettingsError, match=keyword):
        warm(changed, tmp_path / "art", **options)


def test_a_recipe_takes_half_of_its_steps_unless_it_trains_an_adapter(settings, tmp_path):
    recipe = RECIPE | {"num_train_epochs": 2}
    half = warm(settings, tmp_path / "half", warm_up=None, recipe=recipe).path
    steps = FineTuningRecipe.from_mapping(recipe).steps(RowStore.open(half / "tokens").n_rows) // 2
    by_number = warm(settings, tmp_path / "counted", warm_up=steps, recipe=recipe).path
    np.testing.assert_array_equal(relevance(half), relevance(by_number))
    for name, options in (
        ("lora", {"recipe": RECIPE | {"lora_r": 2}, "warm_up": None}),
        ("none", {"warm_up": 0}),
        ("default", {"recipe": None, "warm_up": None}),
    ):
        plan = plan_build(dict(settings), output_location(tmp_path / name), **{"recipe": RECIPE} | options)
        assert plan.warm_up == 0, name
    assert plan_build(dict(settings), output_location(tmp_path / "art"), recipe=RECIPE).warm_up is None


def test_replays_and_retrainings_begin_with_the_model_before_the_warm_up(settings, warmed, tmp_path):
    out = Path(shutil.copytree(warmed, tmp_path / "art"))
    assert _settings_of_artifact(out, {"train": "further"})["model"]["path"] == settings["model"]["path"]
    recipe = RECIPE | {"max_steps": 2}
    add_replay(out, recipe=recipe)
    plain = build(out=tmp_path / "plain", settings=settings, recipe=recipe, untrained=True, replay=True, warm_up=0).path
    replays = [
        next(ArtifactReader.open(path).array_blocks("relevance_replay", block_rows=1_000))[1] for path in (out, plain)
    ]
    np.testing.assert_array_equal(*replays)
