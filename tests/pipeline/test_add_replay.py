"""Replay during a build or added later: same bytes, resumable, and not used if training is not smooth."""

import json
import re
import shutil
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from grasp.api.artifact import Artifact
from grasp.api.predict import REPLAY_NOTE
from grasp.artifact.inspection import UNFINISHED_REPLAY, info, verify
from grasp.artifact.manifest import REPLAY
from grasp.artifact.reader import ArtifactReader
from grasp.errors import ArtifactError, GraspError, ModelError, SettingsError
from grasp.inspect.explain import explain
from grasp.kernel_table import NEW_MODEL_REPLAY_WEIGHT, REPLAY_WEIGHT
from grasp.merging.merge import merge
from grasp.pipeline.add_replay import NEW_MODEL_NOTE
from grasp.pipeline.add_targets import add_targets
from grasp.pipeline.build import add_replay, build
from grasp.pipeline.forecast import forecast
from grasp.pipeline.replay_plan import make_trainable
from grasp.predict.default_protocol import resolve_protocol
from grasp.predict.predictor import Predictor, UnitSelection
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.training.fine_tuning_recipe import FineTuningRecipe
from grasp.training.replay_checks import smoothness
from tests.faults import Killed, raising
from tests.mentions import assert_mentions
from tests.pipeline.test_pipeline import Notes
from tests.pipeline.world import changed, relevance, world, write_targets
from tests.training.unrolled import tiny_model

RECIPE = {"learning_rate": 1e-3, "max_steps": 4, "per_device_train_batch_size": 3}
HOW = {"replay": {"orders": 2, "probes": 1}}


@pytest.fixture(scope="module")
def settings(root):
    chosen = world(root, n_rows=6, train="further", shard_rows=8, features={"sample_positions": 10**6})
    more = write_targets(root / "more.jsonl", task="more", n_units=2, seed=5)
    names = (*chosen.targets.names, str(more))
    return changed(chosen, targets={"names": names}).model_dump(mode="json")


def trust(patch, largest=1e9):
    """Loosen the smoothness check, which rejects every training of a random model."""
    name = "grasp.training.replayed_rows.smoothness"
    patch.setattr(name, lambda replay, **how: smoothness(replay, largest, **how))


@pytest.fixture(autouse=True)
def trusted(monkeypatch):
    trust(monkeypatch)


def build_with(settings, out, **options):
    return build(out=out, settings={**settings, **HOW}, replay=True, recipe=RECIPE, untrained=True, **options)


@pytest.fixture(scope="module")
def plain(settings, root):
    return build(out=root / "plain", settings=settings, recipe=RECIPE, untrained=True).path


@pytest.fixture(scope="module")
def replayed(settings, root):
    with pytest.MonkeyPatch.context() as patch:
        trust(patch)
        return build_with(settings, root / "replayed").path


@pytest.fixture
def copied(plain, tmp_path):
    return Path(shutil.copytree(plain, tmp_path / "art"))


def stored(out) -> dict[str, bytes]:
    files = {path.relative_to(out).as_posix(): path.read_bytes() for path in out.glob("arrays/*/*.npy")}
    assert any(name.startswith("arrays/relevance_replay/") for name in files)
    return files


def columns(out):
    return relevance(out, "replay")


def effects(out, *how):
    return Predictor.from_artifact(ArtifactReader.open(out), *how).effect_NT


def test_a_replay_that_is_added_later_has_the_bytes_of_one_in_the_build(copied, replayed):
    record = add_replay(copied, recipe=RECIPE, settings=HOW)
    assert stored(copied) == stored(replayed)
    assert record == ArtifactReader.open(replayed).manifest.replays[0]
    assert record.passed
    assert record.targets == ("facts", "more")
    assert record.agreement.keys() == {"facts", "more"}
    assert not (copied / REPLAY).exists()
    assert verify(copied).ok
    (line,) = info(copied).replays
    assert_mentions(line, "2 x 4 steps", "facts, more", "rank correlation")
    array = next(array for array in info(copied).arrays if array.name == "relevance_replay")
    assert array.shape[1] == 2  # one column per target


def test_units_of_a_target_share_its_column(replayed):
    relevance_NE = columns(replayed)
    np.testing.assert_array_equal(relevance_NE, relevance_NE[:, [0] * 6 + [6] * 2])
    assert (relevance_NE[:, 0] != relevance_NE[:, 6]).any()
    assert relevance_NE.std() > 0.5


def test_replay_is_weighted_into_predictions_of_targets_but_not_of_units(plain, replayed):
    effects = {}
    for name, out in {"plain": plain, "replayed": replayed}.items():
        artifact = ArtifactReader.open(out)
        effects[name] = Predictor.from_artifact(artifact)
        single = UnitSelection(("one",), np.array([0]), np.array([1]))
        effects[f"{name}, unit"] = Predictor.from_artifact(artifact, units=single)
    before = effects["plain"]
    total_NT = before.effect_NT * before.task.raw_mean_std.std_C
    replay_NT = columns(replayed)[:, [0, 6]].astype(np.float64)
    total_NT = total_NT + REPLAY_WEIGHT * replay_NT / replay_NT.std(axis=0)
    expected_NT = (total_NT - total_NT.mean(axis=0)) / total_NT.std(axis=0)
    np.testing.assert_allclose(effects["replayed"].effect_NT, expected_NT, atol=1e-5)
    np.testing.assert_array_equal(effects["replayed, unit"].effect_NT, effects["plain, unit"].effect_NT)
    assert_mentions(effects["replayed"].protocol.description, "embedding + gradient + 4 replay, negative")


def test_a_forecast_of_a_finished_artifact_needs_no_inputs(plain, replayed):
    line = forecast(plain, HOW, replay=True, recipe=RECIPE)
    assert_mentions(line, "about ", "at the present load of", "of memory", "disk until it is finished")
    with pytest.raises(ArtifactError, match="nothing to forecast"):
        forecast(replayed, HOW, replay=True, recipe=RECIPE)


def test_predict_and_explain_report_the_contribution_of_the_replay(replayed, plain):
    artifact = Artifact.open(replayed)
    assert len(artifact.predict(drop="topic = 'sky'").table) == 2
    assert REPLAY_NOTE in artifact.predict(by="topic").notes
    assert REPLAY_NOTE not in Artifact.open(plain).predict(by="topic").notes
    row = artifact.files.rows(np.array([0]))["row_id"][0].as_py()
    explanation = explain(artifact.files, "facts", row)
    words = np.nansum(explanation.contributions)
    assert words + explanation.replay + explanation.average == pytest.approx(explanation.effect, abs=1e-2)
    assert explanation.replay != 0
    assert explanation.kernels["kernel"].to_pylist()[-1] == "replay"
    assert "the replayed training" in explanation.headline
    questions = explanation.questions["contribution"].to_pylist()
    assert sum(questions) == pytest.approx(words + explanation.replay, abs=1e-2)
    of_unit = explain(artifact.files, "facts", row, unit="facts-1")
    assert of_unit.replay == 0
    with pytest.raises(GraspError, match="no parts by word"):
        explain(artifact.files, "facts", row, match="replay")


def test_a_replay_killed_at_any_replace_resumes_to_the_same_bytes(copied, replayed, monkeypatch):
    with raising(monkeypatch, "replace", 10**9, Killed()) as used:
        add_replay(Path(shutil.copytree(copied, copied.parent / "whole")), recipe=RECIPE, settings=HOW)
    for nth in (2, used[0] // 4, used[0] // 2, used[0] - 2, used[0]):
        out = Path(shutil.copytree(copied, copied.parent / f"killed-{nth}"))
        with pytest.raises(Killed), raising(monkeypatch, "replace", nth, Killed()):
            add_replay(out, recipe=RECIPE, settings=HOW)
        assert "relevance_replay" not in ArtifactReader.open(out).array_names  # readable, and as it was
        assert (UNFINISHED_REPLAY in info(out).replays) == (out / REPLAY).exists()
        add_replay(out, recipe=RECIPE, settings=HOW)
        assert stored(out) == stored(replayed)
        assert verify(out).ok


def test_an_unfinished_replay_is_kept_beside_another_one(copied, monkeypatch):
    module = import_module("grasp.training.replayed_rows")
    run, other = module._replay_order, RECIPE | {"learning_rate": 2e-3}
    with monkeypatch.context() as patch:
        patch.setattr(module, "_replay_order", _killed_in_order(1, run))
        for recipe in (RECIPE, other):
            notes = Notes()
            with pytest.raises(Killed):
                add_replay(copied, recipe=recipe, settings=HOW, progress=notes)
            assert any("unfinished replay with another recipe" in line for line in notes.lines) == (recipe is other)
    monkeypatch.setattr(module, "_replay_order", _killed_in_order(0, run))  # order 0 of the first one is stored
    add_replay(copied, recipe=RECIPE, settings=HOW)
    assert not (copied / REPLAY).exists()


def _killed_in_order(w, run):
    def replay(trajectory, targets, settings, turn, *rest):
        if turn.startswith(f"{w + 1} of "):
            raise Killed
        return run(trajectory, targets, settings, turn, *rest)

    return replay


def test_a_replay_that_is_not_smooth_is_not_used_and_suggests_a_remedy(copied, monkeypatch):
    trust(monkeypatch, 1e-9)
    before = effects(copied)
    record = add_replay(copied, recipe=RECIPE, settings=HOW)
    assert not record.passed
    assert "relevance_replay" not in ArtifactReader.open(copied).array_names
    np.testing.assert_array_equal(effects(copied), before)
    (line,) = info(copied).replays
    assert_mentions(line, "2 x 4 steps", "facts, more: not used", "lower learning rate")
    with monkeypatch.context() as patch:
        patch.setattr(import_module("grasp.pipeline.add_replay"), "replay_rows", None)
        assert add_replay(copied, recipe=RECIPE, settings=HOW) == record  # it is not tried again
    trust(monkeypatch)
    assert add_replay(copied, recipe=RECIPE | {"learning_rate": 1e-4}, settings=HOW).passed
    assert len(info(copied).replays) == 2


def test_a_target_that_is_added_later_has_no_replay_until_it_is_replayed(replayed, root, tmp_path):
    out = Path(shutil.copytree(replayed, tmp_path / "art"))
    add_targets(out, str(write_targets(tmp_path / "third.jsonl", task="third", n_units=2, seed=6)))
    np.testing.assert_array_equal(columns(out)[:, 8:], 0.0)
    before = effects(out)
    match = ArtifactReader.open(out).rule.weights
    without_replay = ScoringProtocol(name="without", match=match).model_copy(update={"negative": 0.25})
    np.testing.assert_allclose(before[:, 2], effects(out, without_replay, ["third"])[:, 0], atol=1e-6)
    how = {"replay": {"memory_mb": 64}}  # the memory is no other setting of a training
    record = add_replay(out, settings=how)  # by the recipe and the other settings of the first
    assert (record.targets, record.settings["orders"]) == (("third",), HOW["replay"]["orders"])
    after = effects(out)
    np.testing.assert_array_equal(after[:, :2], before[:, :2])
    assert (after[:, 2] != before[:, 2]).any()
    assert ArtifactReader.open(out).manifest.arrays["relevance_replay"].targets == ("facts", "more", "third")
    assert verify(out).ok
    with pytest.raises(ArtifactError, match=r"orders: was 2, now 1"):
        add_replay(out, settings={"replay": {"orders": 1, "probes": 1}})


def test_merged_artifacts_have_no_replay(settings, replayed, tmp_path):
    corpus = tmp_path / "other.jsonl"
    corpus.write_text(
        "".join(json.dumps({"row_id": f"other-{i}", "text": "water light cell " * 9}) + "\n" for i in (0, 1))
    )
    other = {**settings, "corpus": settings["corpus"] | {"path": str(corpus)}, "like": str(replayed)}
    other["model"] = settings["model"] | {"path": str(replayed / "model")}  # the state after half of the training
    build(out=tmp_path / "other", settings=other, untrained=True)
    notes = Notes()
    merged = merge([replayed, tmp_path / "other"], tmp_path / "merged", progress=notes)
    assert "relevance_replay" not in merged.array_names
    assert merged.manifest.replays == ()
    assert any("replays of the parts are left out" in line for line in notes.lines)


def test_replay_for_a_new_model_trains_small_models_from_scratch(settings, tmp_path):
    data = {**settings, "train": "new", "features": settings["features"] | {"kernels": []}}
    how, notes = {"replay": {"orders": 2}}, Notes()
    recipe = RECIPE | {"max_steps": 6}
    out = build(
        out=tmp_path / "art", settings={**data, **how}, replay=True, recipe=recipe, untrained=True, progress=notes
    ).path
    artifact = ArtifactReader.open(out)
    (record,) = artifact.manifest.replays
    assert record.settings["orders"] == 2
    assert record.settings["probes"] == 0
    assert record.trainings == pytest.approx(2 * (1 + 4 / 6 + 2 * 4 / 6), abs=0.01)
    assert record.agreement.keys() == {"facts", "more"}
    assert "relevance_knn" in artifact.array_names
    relevance_NE = columns(out)
    assert relevance_NE[:, 0].std() == pytest.approx(1.0, abs=1e-2)
    assert_mentions("\n".join(notes.lines), "2 trainings of 6 steps", "the price of 6.0:")
    assert NEW_MODEL_NOTE in repr(info(out))
    of_subsets = resolve_protocol(None, artifact, subsets=True).resolved_for(artifact)
    assert of_subsets.match["replay"] == NEW_MODEL_REPLAY_WEIGHT
    of_rows = resolve_protocol(None, artifact).resolved_for(artifact)
    assert "replay" not in of_rows.match
    with pytest.raises(SettingsError, match="lora_r: got 2"):
        build(out=tmp_path / "other", settings=data, replay=True, recipe=RECIPE | {"lora_r": 2}, untrained=True)
    later = build(out=tmp_path / "later", settings=data, untrained=True).path
    add_replay(later, recipe=recipe, settings=how)
    assert stored(later) == stored(out)


def test_adapters_and_half_precision_of_a_recipe(copied):
    pytest.importorskip("peft")
    notes = Notes()
    recipe = RECIPE | {"lora_r": 2, "lora_dropout": 0.1, "bf16": True}
    assert add_replay(copied, recipe=recipe, settings=HOW, progress=notes).passed
    text = "\n".join(notes.lines)
    assert_mentions(text, "half precision", "dropout of the adapter is switched off", "2 trainings of")
    assert np.isfinite(columns(copied)).all()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # used by peft
def test_a_second_adapter_is_refused_instead_of_replacing_the_first():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, fan_in_fan_out=True)).get_base_model()
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    with pytest.raises(SettingsError, match="lora_r: got 3, but the model has an adapter already"):
        make_trainable(model, frozen, FineTuningRecipe(lora_r=3), 0)
    assert make_trainable(model, frozen, FineTuningRecipe(), 0)[0] is model


def test_a_model_passed_as_an_object_is_not_modified(settings, replayed, tmp_path):
    path = settings["model"]["path"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rest = {**settings, "model": {name: value for name, value in settings["model"].items() if name == "threads"}}
    out = build_with(rest, tmp_path / "art", model=(model, tokenizer)).path
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value.numpy(), before[name].numpy())
    np.testing.assert_allclose(columns(out), columns(replayed), atol=1e-2)


def test_a_window_differentiates_the_last_steps(copied, monkeypatch):
    """Its probe step is inside of it, and it is used although it begins after two thirds of the training."""
    monkeypatch.setattr("grasp.training.replayed_rows.smoothness", smoothness)
    notes = Notes()
    record = add_replay(copied, recipe=RECIPE, settings={"replay": {"probes": 1, "window": 1}}, progress=notes)
    assert (record.passed, record.settings["window"]) == (True, 1)
    assert_mentions("\n".join(notes.lines), "the price of 2.5:")
    assert np.isfinite(columns(copied)).all()


def test_the_forecast_contains_the_replay(settings, tmp_path):
    options = {**settings, **HOW}
    build_lines = forecast(tmp_path / "art", settings, untrained=True).splitlines()
    lines = forecast(tmp_path / "art", options, untrained=True, replay=True, recipe=RECIPE).splitlines()
    assert lines[0] == build_lines[0]
    disks = [re.search(r"([\d.]+) (.B) of disk", line).groups() for line in (build_lines[1], lines[1])]
    disk, more_disk = (float(number) * {"kB": 1e3, "MB": 1e6}[unit] for number, unit in disks)
    assert more_disk > disk
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": RECIPE, "replay": False, "rule": "paper"}, r"--recipe: no effect"),
        ({"recipe": {"label_smoothing_factor": 0.1}}, r"label_smoothing_factor is set to 0\.1"),
        ({"recipe": {"optim": "sgd"}}, r"optim: got 'sgd', expected AdamW"),
        ({"recipe": "none.yaml"}, r"none\.yaml"),
        ({"settings": {"replay": {"order": 1}}}, r"replay: order: .*orders"),
        ({"settings": {"replay": 3}}, r"replay: .*got 3"),
    ],
)
def test_a_build_with_wrong_options_is_refused_before_the_model_runs(settings, tmp_path, options, message):
    options = {"replay": True} | options | {"settings": settings | options.get("settings", {})}
    with pytest.raises(GraspError, match=message) as caught:
        build(out=tmp_path / "art", untrained=True, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "art" / "work").exists()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"recipe": RECIPE | {"max_length": 8}}, SettingsError, r"max_length: got 8.*--max-length 8"),
        ({"settings": {"corpus": {"limit": 3}}}, SettingsError, "--replay: got corpus"),
        (
            {"recipe": RECIPE | {"lora_r": 2, "lora_target_modules": ["nothing"]}},
            *(SettingsError, r"lora_target_modules: .*nothing"),
        ),
        (
            {"recipe": RECIPE | {"learning_rate": 1e30}, "settings": HOW},
            *(ModelError, r"step \d had loss .*learning rate"),
        ),
    ],
)
def test_a_finished_artifact_refuses_a_replay_that_does_not_match_it(copied, how, error, message):
    pytest.importorskip("peft")
    with pytest.raises(error, match=message):
        add_replay(copied, **how)
    assert "relevance_replay" not in ArtifactReader.open(copied).array_names
