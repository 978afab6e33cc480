"""Methods receive the inputs of the artifact, or changed inputs are refused."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from grasp.artifact.reader import ArtifactReader
from grasp.baselines.checkpoints import training_checkpoints
from grasp.errors import ArtifactError
from grasp.methods.contract import MethodInputs
from grasp.methods.registry import load_method, score_rows
from grasp.models import checkpoint
from tests.baselines.test_contract import SMALL
from tests.baselines.world import METHODS, N_UNITS, configured_method, matrix


def test_rows_and_units_are_the_artifact_s(world):
    inputs = world.inputs()
    rows = inputs.rows(5, 9)
    assert len(rows) == 4
    assert rows.table["row_id"].to_pylist() == ["row-5", "row-6", "row-7", "row-8"]
    assert len(inputs.unit_tokens) == inputs.n_units == N_UNITS
    assert inputs.artifact.manifest.fingerprints["targets"] == inputs.units.fingerprint
    np.testing.assert_array_equal(inputs.column("n_tokens")[5:9], np.diff(rows.offsets))


@pytest.fixture
def copied(world, tmp_path):
    """Return a copy of the artifact that a test may change."""
    return CopiedArtifact(shutil.copytree(world.root / "art", tmp_path / "art"))


class CopiedArtifact:
    def __init__(self, path):
        self.path = path

    def inputs(self):
        return MethodInputs(ArtifactReader.open(self.path))


def test_rows_without_tokens_are_refused(copied):
    shutil.rmtree(copied.path / "tokens")
    with pytest.raises(ArtifactError, match=r"rebuild it with keep_tokens: true"):
        _ = copied.inputs().store


def test_a_changed_model_is_refused(world, copied, tmp_path):
    model = shutil.copytree(world.root / "env/reference/seed-0", tmp_path / "model")
    inputs = copied.inputs()
    moved = inputs.settings.model_copy(update={"model": inputs.settings.model.model_copy(update={"path": str(model)})})
    inputs.source.__dict__["settings"] = moved
    assert inputs.model.vocab_size == 300
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] += torch.ones_like(weights["model.norm.weight"])
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    del inputs.__dict__["model"], inputs.source.__dict__["model"]
    with pytest.raises(ArtifactError, match=r"model changed .*[0-9a-f]+, was [0-9a-f]+"):
        _ = inputs.model


@pytest.fixture
def on_a_hub(world, monkeypatch):
    """Return the world with an artifact built from the cached hub model `me/tiny`."""
    place = {"me/tiny": str(world.root / "env/reference/seed-0")}
    monkeypatch.setattr(checkpoint, "fetched_before", place.get)
    inputs = world.inputs()
    model = inputs.settings.model.model_copy(update={"path": "me/tiny"})
    inputs.source.__dict__["settings"] = inputs.settings.model_copy(update={"model": model})
    return inputs


@pytest.mark.parametrize("name", [name for name in METHODS if "checkpoints" in load_method(name).requires])
def test_a_model_without_a_directory_is_its_only_checkpoint(name, world, on_a_hub, tmp_path):
    settings = SMALL.get(name, {}) | ({"adam": "never"} if name == "less" else {})
    result = matrix(score_rows(configured_method(name, **settings), on_a_hub, tmp_path / "hub"))
    (checkpoint,) = training_checkpoints(on_a_hub)
    assert (checkpoint.fingerprint, checkpoint.has_moments) == (on_a_hub.artifact.manifest.fingerprints["model"], False)
    if "checkpoints" in load_method(name).settings_type.model_fields:
        settings = settings | {"checkpoints": "last"}
    inputs = world.inputs()
    expected = matrix(score_rows(configured_method(name, **settings), inputs, tmp_path / "disk"))
    np.testing.assert_array_equal(result, expected)
