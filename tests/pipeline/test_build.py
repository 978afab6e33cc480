"""`grasp.build` gives the same artifact from objects in memory as from files, and recognises a finished build."""

import json
import shutil

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from grasp.artifact.inspection import verify
from grasp.errors import ArtifactError, CorpusError, ModelError, SettingsError, TargetError
from grasp.pipeline.add_targets import add_targets
from grasp.pipeline.build import build
from grasp.pipeline.build_plan import output_location, plan_build
from grasp.pipeline.inputs import ON_DISK
from grasp.settings import ReplaySettings
from grasp.targets.load import split_names
from tests.mentions import assert_mentions
from tests.pipeline.test_pipeline import Notes
from tests.pipeline.world import world

UNTRAINED = {"untrained": True}  # the models here are random


@pytest.fixture(scope="module")
def settings(root):
    plain = world(root).model_dump(mode="json")
    return {
        **{name: plain[name] for name in ("features", "shard_rows", "array_dtype")},
        "model": {name: plain["model"][name] for name in ("batch_tokens", "threads")},
        "targets": {"max_length": 64},
    }


@pytest.fixture(scope="module")
def by_path(root, settings):
    paths = [str(root / name) for name in ("model", "corpus.jsonl", "facts.jsonl")]
    return build(*paths, root / "by-path", settings=settings, **UNTRAINED)


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def assert_same_arrays(actual, expected):
    assert actual.array_names == expected.array_names
    for name in expected.array_names:
        ours, theirs = (
            np.concatenate([block for _, block in artifact.array_blocks(name)]) for artifact in (actual, expected)
        )
        np.testing.assert_array_equal(ours, theirs, err_msg=name)


@pytest.mark.parametrize("table", [pa.Table.from_pylist, pd.DataFrame, datasets.Dataset.from_list])
@pytest.mark.parametrize("units", [list, pd.DataFrame])
def test_objects_give_the_artifact_that_their_files_give(root, tmp_path, settings, by_path, table, units):
    model = AutoModelForCausalLM.from_pretrained(root / "model").train()
    tokenizer = AutoTokenizer.from_pretrained(root / "model")
    corpus, targets = table(records(root / "corpus.jsonl")), units(records(root / "facts.jsonl"))
    artifact = build((model, tokenizer), corpus, targets, tmp_path / "art", settings=settings, **UNTRAINED)
    assert_same_arrays(artifact, by_path)
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    recorded = yaml.safe_load((tmp_path / "art/run.yaml").read_text())
    assert recorded["corpus"]["path"].startswith("in memory, ")
    assert recorded["model"]["path"] == f"in memory, {by_path.manifest.fingerprints['model']}"
    notes = Notes()
    build(model, corpus, targets, tmp_path / "art", tokenizer=tokenizer, settings=settings, progress=notes, **UNTRAINED)
    assert len(notes.lines) == 1
    assert_mentions(notes.lines, f"{tmp_path / 'art'}: finished")


@pytest.mark.parametrize("published", [False, True])  # a published copy has no run.yaml
def test_a_finished_artifact_is_not_built_with_other_settings(root, tmp_path, settings, by_path, published):
    place = shutil.copytree(by_path.location, tmp_path / "art")
    if published:
        (place / "run.yaml").unlink()
    inputs = str(root / "model"), str(root / "corpus.jsonl"), str(root / "facts.jsonl"), place
    notes = Notes()
    build(*inputs, settings=settings, progress=notes, **UNTRAINED)
    assert_mentions(notes.lines, "finished with these settings")
    changed = {**settings, "corpus": {"label_paths": ["meta.source"]}}
    with pytest.raises(ArtifactError, match=r"corpus\.label_paths"):
        build(*inputs, settings=changed, **UNTRAINED)


def test_paths_and_objects_may_be_mixed_and_another_object_is_another_build(root, tmp_path, settings, by_path):
    arguments = str(root / "model"), pd.DataFrame(records(root / "corpus.jsonl")), [root / "facts.jsonl"]
    assert_same_arrays(build(*arguments, tmp_path / "art", settings=settings, **UNTRAINED), by_path)
    other = arguments[1].assign(topic="x")
    with pytest.raises(Exception, match=r"path: .*in memory.*in memory"):
        build(arguments[0], other, arguments[2], tmp_path / "art", settings=settings, **UNTRAINED)


def test_arguments_name_columns_and_splits(root, tmp_path, settings):
    frame = pd.DataFrame(records(root / "corpus.jsonl")).rename(columns={"text": "body", "row_id": "key"})
    splits = datasets.DatasetDict({name: datasets.Dataset.from_pandas(frame) for name in ("train", "test")})
    rest = {"settings": settings, "text_column": "body", "id_column": "key", "max_length": 32, **UNTRAINED}
    arguments = str(root / "model"), splits, str(root / "facts.jsonl"), tmp_path / "art"
    with pytest.raises(CorpusError, match=r"corpus: .*test, train.*--split"):
        build(*arguments, **rest)
    artifact = build(*arguments, split="train", limit=20, **rest)
    assert artifact.manifest.details["columns"] == {"text": "body", "row_id": "key"}
    assert artifact.manifest.settings["corpus"]["max_length"] == 32
    names = artifact.rows(np.arange(artifact.n_rows)).column("doc_id").unique().to_pylist()
    assert len(names) == 20


def test_settings_derived_from_the_model_are_in_the_manifest(root, tmp_path, settings):
    unset = {**settings, "targets": {}}
    artifact = build(
        str(root / "model"),
        str(root / "corpus.jsonl"),
        str(root / "facts.jsonl"),
        tmp_path,
        settings=unset,
        **UNTRAINED,
    )
    recorded = artifact.manifest.settings
    assert (recorded["corpus"]["max_length"], recorded["targets"]["max_length"]) == (128, 128)
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["corpus"]["max_length"] is None
    assert verify(tmp_path).ok


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"corpus": pd.DataFrame({"body": ["x"], "topic": ["a"]})}, CorpusError, "columns.*body, topic"),
        ({"corpus": 3}, CorpusError, "corpus:.*int"),
        ({"targets": 3}, TargetError, "targets:.*int"),
        ({"targets": [{"text": "x"}]}, TargetError, "targets, unit 0: .*text"),
        ({"model": object()}, SettingsError, "model.path:.*object"),
        ({"model": None, "train": "further"}, SettingsError, "missing --model"),
        ({"model": None, "targets": None}, SettingsError, r"missing --targets \(targets.names\);"),
        ({"out": ""}, SettingsError, "missing --out|--out: missing"),
    ],
)
def test_invalid_inputs_are_refused_in_one_line(root, tmp_path, changes, error, message):
    inputs = {"model": str(root / "model"), "corpus": str(root / "corpus.jsonl"), "targets": str(root / "facts.jsonl")}
    world(root)
    with pytest.raises(error, match=message) as caught:
        build(**{**inputs, "out": tmp_path / "art", **changes})
    assert "\n" not in str(caught.value)


def test_a_plan_has_typed_settings_and_says_whether_a_model_is_trained_first(root, tmp_path):
    world(root)
    inputs = {"corpus": {"path": str(root / "corpus.jsonl")}, "targets": {"names": [str(root / "facts.jsonl")]}}
    output = output_location(tmp_path / "art")
    plan = plan_build(dict(inputs), output)
    assert plan.trains_proxy
    assert plan.settings.model.path == str(tmp_path / "art" / "model")
    assert (plan.settings.train, plan.replay, plan.in_memory) == ("new", None, ON_DISK)
    plan = plan_build(dict(inputs), output, root / "model", targets=records(root / "facts.jsonl"), replay=True)
    assert not plan.trains_proxy
    assert plan.replay == ReplaySettings()
    assert len(plan.in_memory.units) == 6
    (name,) = plan.settings.targets.names
    assert name.startswith("in memory, ")
    assert not (tmp_path / "art").exists()


def test_a_model_without_its_tokenizer(root, tmp_path, settings):
    world(root)
    (tmp_path / "bare").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "bare" / file).write_bytes((root / "model" / file).read_bytes())
    rest = str(root / "corpus.jsonl"), str(root / "facts.jsonl"), tmp_path / "art"
    with pytest.raises(ModelError, match=r"bare`.*--tokenizer"):
        build(str(tmp_path / "bare"), *rest)
    with pytest.raises(SettingsError, match=r"tokenizer:.*None"):
        build(AutoModelForCausalLM.from_pretrained(root / "model"), *rest)
    build(str(tmp_path / "bare"), *rest, tokenizer=str(root / "model"), settings=settings, **UNTRAINED)


def test_commas_separate_target_names_unless_a_file_has_one_in_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b.jsonl").write_text("")
    assert split_names("sciq, openbookqa ,") == ["sciq", "openbookqa"]
    assert split_names("a,b.jsonl") == ["a,b.jsonl"]


def test_added_targets_use_the_settings_of_the_artifact(root, by_path, settings):
    with pytest.raises(SettingsError, match=r"--add-target:.*shard_rows"):
        add_targets(by_path.path, "sciq", settings={"shard_rows": 3})
    with pytest.raises(ArtifactError, match=r"targets \['facts'\]"):
        add_targets(by_path.path, str(root / "facts.jsonl"))
