"""The build of an image classifier: arrays equal a float64 reference, whatever the batches, shards and kills."""

import os

import numpy as np
import pytest
import torch

from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import ArtifactWriter
from grasp.errors import ArtifactError
from grasp.pipeline.add_targets import add_targets
from grasp.pipeline.pipeline import build_artifact
from grasp.settings import TargetSettings, build_settings
from grasp.vision.classifier import ImageClassifier
from grasp.vision.settings import ClassifierSettings
from tests.cli.grasp_command import arrays
from tests.pipeline.test_pipeline import assert_same
from tests.vision.images_world import TinyNet, pictures, settings, write_parquet, write_weights

TAU = ClassifierSettings.features["tau"]
USER_CODE = {"model": {"classifier": {"factory": "tests.vision.images_world:TinyNet"}}}  # the code that the user names


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def built(root):
    return build_artifact(build_settings(settings(root)), root / "artifact")


def reference(root):
    """Relevance by the formulas in float64: one position an image, so that tokens are images."""
    model = ImageClassifier.load(build_settings(settings(root)).model)

    def features(images, classes):
        with torch.inference_mode():
            hidden = model.hidden(model.pixels(images))
            probability = model.logits(hidden).double().softmax(1).numpy()
        return hidden.double().numpy(), probability - np.eye(3)[classes]

    rows, classes = pictures(30)
    trusted, trusted_classes = pictures(9, seed=1)
    h, xi = features(rows, classes)
    h_e, xi_e = features(trusted, trusted_classes)
    mean, covariance = h.mean(0), np.cov(h.T, bias=True)
    value, vector = np.linalg.eigh(covariance + TAU * np.trace(covariance) / len(covariance) * np.eye(len(covariance)))
    white = (vector / np.sqrt(value)) @ vector.T
    gamma = (xi**2).mean(0)
    scale = 1.0 / (gamma + 0.3 * gamma.mean())
    hidden_match = (h - mean) @ white @ ((h_e - mean) @ white).T
    return hidden_match, (xi * scale) @ xi_e.T


def test_relevance_is_the_formula(root, built):
    hidden_match, residual_match = reference(root)
    artifact = ArtifactReader.open(built)
    # units are drawn in an order of their own
    order = [int(name.rpartition("-")[2]) for name in artifact.units["unit_id"].to_pylist()]
    arrays_by_name = arrays(built)
    product = hidden_match * residual_match
    np.testing.assert_allclose(
        arrays_by_name["relevance_output_layer"], product[:, order], atol=2e-4 * abs(product).max()
    )
    assert set(arrays_by_name) == {"relevance_output_layer", "hidden_sketch", "residual_sketch"}


def test_the_kernel_of_the_paper_is_its_formula_too(root, tmp_path):
    hidden_match, residual_match = reference(root)
    kernels = ["pooled", "output_layer", "product_sketch"]
    built = build_artifact(build_settings(settings(root, features__kernels=kernels)), tmp_path / "art")
    order = [int(name.rpartition("-")[2]) for name in ArtifactReader.open(built).units["unit_id"].to_pylist()]
    pooled = residual_match * np.sign(hidden_match) * np.log1p(abs(hidden_match))
    np.testing.assert_allclose(arrays(built)["relevance_pooled"], pooled[:, order], atol=2e-4 * abs(pooled).max())


def test_what_is_on_disk(built):
    artifact = ArtifactReader.open(built)
    row = artifact.rows(np.array([4])).to_pylist()[0]
    assert (row["row_id"], row["label"], row["image_class"], row["n_tokens"]) == ("train-4", 1, "green", 1)
    assert artifact.manifest.details["classes"] == ["blue", "green", "red"]
    assert set(artifact.manifest.fingerprints) == {"model", "preprocessing", "corpus", "targets"}
    assert artifact.units["completion"].to_pylist()[0] in ("blue", "green", "red")
    assert "relevance_embedding" not in artifact.array_names


def test_batches_and_shards_change_nothing(root, built, tmp_path):
    other = settings(root, shard_rows=13, model__classifier__batch_images=4)
    other["model"]["classifier"] = settings(root)["model"]["classifier"] | {"batch_images": 4}
    ours, theirs = arrays(built), arrays(build_artifact(build_settings(other), tmp_path / "other"))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], atol=1e-5 * abs(array).max(), err_msg=name)


def test_a_build_that_was_killed_goes_on_bit_for_bit(root, built, tmp_path):
    out = tmp_path / "killed"
    child = os.fork()
    if child == 0:
        written = ArtifactWriter.write_shard

        def die_later(self, k, *rest):
            written(self, k, *rest)
            if k == 1:
                os._exit(9)

        ArtifactWriter.write_shard = die_later
        build_artifact(build_settings(settings(root)), out)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    build_artifact(build_settings(settings(root)), out)
    assert_same(arrays(built), arrays(out))


@pytest.mark.parametrize("keep", [True, False])
def test_a_target_is_added_as_if_it_had_been_there(root, tmp_path, keep):
    path = write_parquet(tmp_path / "late.parquet", 5, seed=9)
    out = build_artifact(build_settings(settings(root, keep_features=keep)), tmp_path / "artifact")
    source = add_targets(out, TargetSettings(names=(str(path),)), settings=USER_CODE)
    assert source == ("kept features" if keep else "pass")
    both = [str(root / "trusted.parquet"), str(path)]
    joint = arrays(build_artifact(build_settings(settings(root, targets__names=both)), tmp_path / "joint"))
    for name, array in arrays(out).items():
        np.testing.assert_allclose(array, joint[name], atol=2e-3 * abs(array).max(), err_msg=name)


def test_other_weights_are_another_model(root, tmp_path):
    weights = write_weights(tmp_path / "weights.safetensors")
    out = build_artifact(build_settings(settings(root, model__path=str(weights))), tmp_path / "artifact")
    write_weights(weights, TinyNet(seed=5))
    path = write_parquet(tmp_path / "late.parquet", 5, seed=9)
    with pytest.raises(ArtifactError, match="model"):
        add_targets(out, TargetSettings(names=(str(path),)), settings=USER_CODE)
