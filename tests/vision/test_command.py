"""Images from the command line: fit a head, build, score, predict, with the commands of texts."""

import re

import pytest
import yaml

from experiments.vision import fit_head
from grasp.settings import build_settings
from tests.cli.grasp_command import refused, succeed
from tests.mentions import assert_mentions
from tests.vision.images_world import settings, write_parquet


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("vision")
    data = settings(root)
    data["model"]["classifier"].pop("classes")
    (root / "vision.yaml").write_text(yaml.safe_dump(data))
    return root


def test_from_a_backbone_to_predictions(world, capsys):
    config, head, art = world / "vision.yaml", world / "head.safetensors", world / "art"
    names = [["blue", "green", "red"][i % 3] for i in range(30)]
    named = write_parquet(world / "named.parquet", 30, label=names)
    fit_head.main(["--settings", str(config), "--corpus", str(named), "--out", str(head)])
    assert_mentions(capsys.readouterr().out.splitlines(), f"{head}: 3 classes", "30 images", "100.0%")
    use = f"model.classifier.fitted_head={head}"
    built = succeed("build", "--config", config, "--set", use, "--out", art)
    assert_mentions(built.lines, f"{art}: 30 rows", "9 units", "trusted")
    assert "image_class" in succeed("info", art, "--json").out
    shown = succeed("score", art, "--target", "trusted", "--top", 3)
    assert "12 x 12 pixels" in shown.out
    dropped = succeed("predict", art, "--by", "image_class")
    assert all(colour in dropped.out for colour in ("blue", "green", "red"))
    outcome = succeed("select", art, "--budget", "50%", "--target", "trusted", "--out", world / "kept.parquet")
    assert "15" in outcome.out
    message = refused("score", art, "--target", "trusted", "--method", "bm25")
    assert re.search("no texts, but read by `classifier`.*score texts only", message)


def test_invalid_input_is_reported(world, tmp_path):
    command = ["build", "--config", world / "vision.yaml", "--targets", "sciq", "--out", tmp_path / "a"]
    assert "sciq" in refused(*command)


def test_an_image_classifier_without_its_head_is_told_which_setting_it_lacks(world, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["ViTForImageClassification"], "model_type": "vit"}')
    command = ["build", "--corpus", world / "train.parquet", "--targets", world / "trusted.parquet", "--out"]
    message = refused(*command, tmp_path / "a", "--model", tmp_path)
    assert re.search("ViTForImageClassification.*causal LM", message)
    assert "model.classifier" in message
    message = refused(*command, tmp_path / "a", "--model", world / "weights.safetensors")
    assert "model.classifier" in message


def test_settings_of_texts_are_refused_with_a_classifier(tmp_path):
    data = settings(tmp_path)
    assert build_settings(data).features.tau == 100.0
    data["features"]["kernels"] = ["output_layer", "embedding", "gradient", "knn"]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(data))
    message = refused("build", "--config", tmp_path / "c.yaml", "--out", tmp_path / "a")
    assert re.search(r"features\.kernels: .*embedding, gradient, knn", message)
