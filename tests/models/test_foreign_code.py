"""Untrusted code is never run: neither code of a checkpoint nor the model factory named in an artifact."""

import json
import shutil

import pytest

from grasp.artifact.reader import ArtifactReader
from grasp.errors import ModelError, SettingsError
from grasp.models.causal_lm import ReferenceModel
from grasp.pipeline.add_targets import add_targets
from grasp.pipeline.pipeline import build_artifact
from grasp.settings import ModelSettings, TargetSettings, build_settings, without_foreign_code
from tests.cli.grasp_command import refused, succeed
from tests.pipeline.world import world
from tests.vision.images_world import settings as images_settings
from tests.vision.images_world import write_parquet

CODE = "from pathlib import Path\nPath({!r}).write_text('ran')\n"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    build_artifact(build_settings(images_settings(root)), root / "art")
    write_parquet(root / "more.parquet", 5, seed=3)
    return root


@pytest.mark.parametrize("of", ["model", "tokenizer"])
def test_code_of_a_checkpoint_runs_only_if_the_user_allows_it(of, tmp_path, monkeypatch):
    settings = world(tmp_path, 8).model
    place, ran = tmp_path / "model", tmp_path / "ran"
    (place / "own.py").write_text(CODE.format(str(ran)) + "class Own:\n    pass\n")
    name = {"model": "config.json", "tokenizer": "tokenizer_config.json"}[of]
    record = json.loads((place / name).read_text())
    if of == "model":
        record |= {"model_type": "strange", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    else:
        record |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (place / name).write_text(json.dumps(record))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a prompt"))
    with pytest.raises(ModelError, match=r"trust_remote_code=true"):
        ReferenceModel.load(settings)
    assert not ran.exists()


def test_settings_stored_with_data_cannot_name_code(tmp_path):
    data = images_settings(tmp_path)
    with pytest.raises(SettingsError, match=r"^m: .*factory .*TinyNet'.*code"):
        without_foreign_code(data, "m")
    user_settings = {"model": {"classifier": {"factory": "mine.py:Net"}}}
    assert build_settings(without_foreign_code(data, "m", user_settings)).model.classifier.factory == "mine.py:Net"
    text = {"model": {"path": "m", "trust_remote_code": True}, "corpus": {"path": "c"}, "targets": {"names": ["t"]}}
    with pytest.raises(SettingsError, match=r"^m: .*trust_remote_code .*True"):
        without_foreign_code(text, "m")
    trusted_settings = without_foreign_code(text, "m", {"model": {"trust_remote_code": True}})
    assert build_settings(trusted_settings).model.trust_remote_code
    assert not ModelSettings(path="m").trust_remote_code


def test_a_target_is_added_with_the_code_that_the_user_names(images, tmp_path):
    art = shutil.copytree(images / "art", tmp_path / "art")
    command = ("build", "--out", art, "--add-target", images / "more.parquet")
    with pytest.raises(SettingsError, match=r"--set model\.classifier\.factory="):
        add_targets(art, TargetSettings(names=(str(images / "more.parquet"),)))
    assert "art/manifest.json: model.classifier.factory" in refused(*command)
    assert "corpus" in refused(*command, "--set", "corpus.limit=3")
    succeed(*command, "--set", "model.classifier.factory=tests.vision.images_world:TinyNet")
    assert ArtifactReader.open(art).targets == ("trusted", "more")


def test_a_build_resumes_with_the_code_that_the_user_names(images, tmp_path):
    art = shutil.copytree(images / "art", tmp_path / "art")
    assert "run.yaml: model.classifier.factory" in refused("build", "--out", art, "--resume")
    config = ("--config", art / "run.yaml")
    for named in (("--set", "model.classifier.factory=tests.vision.images_world:TinyNet"), config):
        assert "finished" in succeed("build", "--out", art, "--resume", *named).err
