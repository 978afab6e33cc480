"""A reader of another package is chosen by its settings, recorded in the artifact, and used by all that read it."""

import re

import pytest

from grasp.artifact.reader import ArtifactReader
from grasp.errors import SettingsError
from grasp.models.build_source import BuildSource
from grasp.pipeline.pipeline import build_artifact
from grasp.settings import build_settings, model_readers
from tests.cli.grasp_command import refused, succeed
from tests.vision.images_world import settings

SOURCE = """
from grasp.vision.reader import ImageReader
from grasp.vision.settings import ClassifierSettings

class CameraSettings(ClassifierSettings):
    features = {"tau": 7.0}

class Camera(ImageReader):
    settings = CameraSettings

camera = Camera()
"""


@pytest.fixture
def camera(tmp_path, monkeypatch):
    """Install a package with a reader in the layout of pip."""
    site = tmp_path / "site"
    record = site / "camera-1.0.dist-info"
    record.mkdir(parents=True)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: camera\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text("[grasp.readers]\ncamera = camera_package:camera\n")
    (site / "camera_package.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(site)


def of_camera(root):
    data = settings(root)
    data["model"]["camera"] = data["model"].pop("classifier")
    return data


def test_a_reader_of_another_package_reads_rows(camera, tmp_path):
    built = build_settings(of_camera(tmp_path))
    assert built.features.tau == 7.0
    artifact = ArtifactReader.open(build_artifact(built, tmp_path / "art"))
    assert artifact.manifest.details["reader"] == "camera"
    assert type(artifact.reader).__name__ == "Camera"
    assert artifact.open_rows().n_rows == 30
    assert re.search("read by `camera`", refused("explain", artifact.path, "--row", "train-4"))
    succeed("report", artifact.path, "--out", tmp_path / "report.html")
    assert re.search("read by `camera`", refused("score", artifact.path, "--method", "bm25"))
    message = refused("retrain", "--like", artifact.path, "--targets", "sciq", "--out", tmp_path / "runs")
    assert re.search("read by `camera`", message)
    with pytest.raises(SettingsError, match=r"model\.camera\.factory .*code"):  # an artifact may not run code
        _ = BuildSource(artifact).settings


def test_settings_of_no_reader_and_of_two_are_refused(camera, tmp_path):
    data = settings(tmp_path)
    both = data["model"] | {"camera": data["model"]["classifier"]}
    for model, message in (
        (data["model"] | {"kamera": {"head": "fc"}}, r"model\.kamera: no such field"),
        (both, "camera.*classifier.*|classifier, camera.*one reader"),
        (data["model"] | {"classifier": {"hed": "fc"}}, r"model\.classifier\.hed: no such field"),
    ):
        with pytest.raises(SettingsError, match=message):
            build_settings(data | {"model": model})


def test_readers_of_files_are_no_settings_of_a_model(tmp_path):
    assert model_readers() == ["classifier"]
    data = settings(tmp_path)
    with pytest.raises(SettingsError, match=r"model\.task\.olmes: no such field"):
        build_settings(data | {"model": data["model"] | {"task.olmes": {}}})
