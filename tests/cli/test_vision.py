"""Images from the command line: fit a head, build, score, predict, with the commands of texts."""

import pytest
import yaml

from grasp.settings import build_settings
from tests.cli.grasp_command import refused, succeed
from tests.models.images_world import settings, write_parquet


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("vision")
    data = settings(root)
    data["model"]["classifier"].pop("classes")
    (root / "vision.yaml").write_text(yaml.safe_dump(data))
    return root


def test_from_a_backbone_to_predictions(world):
    config, head, art = world / "vision.yaml", world / "head.safetensors", world / "art"
    names = [["blue", "green", "red"][i % 3] for i in range(30)]
    named = write_parquet(world / "named.parquet", 30, label=names)
    fitted = succeed("fit-head", "--config", config, "--corpus", named, "--decay", 0.001, "--out", head, "--quiet")
    assert f"{head}: 3 classes, fitted to 30 images: accuracy on them 100.0%" in fitted.out
    use = f"model.classifier.fitted_head={head}"
    built = succeed("build", "--config", config, "--set", use, "--out", art, "--quiet")
    assert f"{art}: 30 rows x 9 units (trusted)" in built.out
    assert "image_class" in succeed("info", art, "--json").out
    shown = succeed("score", art, "--target", "trusted", "--top", 3, "--labels", "image_class")
    assert "12 x 12 pixels" in shown.out
    dropped = succeed("predict", art, "--by", "image_class")
    assert all(colour in dropped.out for colour in ("blue", "green", "red"))
    kept = succeed("select", art, "--budget", "50%", "--target", "trusted", "--out", world / "kept.parquet")
    assert "15" in kept.out
    assert "rows are images, and the method reads tokens" in refused(
        "score", art, "--target", "trusted", "--method", "bm25"
    )


def test_mistakes_are_told(world, tmp_path):
    config = world / "vision.yaml"
    asked = ["fit-head", "--config", config, "--out", tmp_path / "h.safetensors", "--quiet"]
    assert "--out: got " in refused("fit-head", "--config", config, "--out", tmp_path / "h.pt")
    assert refused("fit-head", "--out", tmp_path / "h.safetensors").startswith("fit-head: missing --model (model.path)")
    one = write_parquet(tmp_path / "one.parquet", 6, label=["red"] * 6)
    assert "its images have 1 class, expected at least 2" in refused(*asked, "--corpus", one)
    mixed = write_parquet(tmp_path / "mixed.parquet", 3, label=[-1, 0, 2])
    assert "got the number -1" in refused(*asked, "--corpus", mixed)
    text = refused("build", "--config", config, "--targets", "sciq", "--out", tmp_path / "a", "--quiet")
    assert text.startswith("sciq: no such file or directory") or "sciq" in text


def test_settings_of_texts_are_refused_with_a_classifier(tmp_path):
    data = settings(tmp_path)
    assert build_settings(data).features.tau == 10.0
    data["features"]["input_match"] = True
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(data))
    assert "an image has no input tokens" in refused("build", "--config", tmp_path / "c.yaml", "--out", tmp_path / "a")
