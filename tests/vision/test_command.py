"""Images from the command line: fit a head, build, score, predict, with the commands of texts."""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from grasp.settings import build_settings
from tests.cli.grasp_command import refused, succeed
from tests.mentions import assert_mentions
from tests.vision.images_world import pictures, settings, write_parquet


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
    fitted = succeed("fit-head", "--config", config, "--corpus", named, "--out", head)
    assert_mentions(fitted.lines, f"{head}: 3 classes", "30 images", "100.0%")
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
    config, head = world / "vision.yaml", tmp_path / "h.safetensors"
    single = write_parquet(tmp_path / "one.parquet", 6, label=["red"] * 6)
    mixed = write_parquet(tmp_path / "mixed.parquet", 3, label=[-1, 0, 2])
    for command, pattern in (
        (["fit-head", "--config", config, "--out", tmp_path / "h.pt"], "--out: "),
        (["fit-head", "--out", head], r"fit-head: .*--model \(model\.path\)"),
        (["fit-head", "--config", config, "--out", head, "--corpus", single], r"\b1 class"),
        (["fit-head", "--config", config, "--out", head, "--corpus", mixed], r"-1\b"),
        (["build", "--config", config, "--targets", "sciq", "--out", tmp_path / "a"], "sciq"),
    ):
        assert re.search(pattern, refused(*command))


def test_what_fit_head_leaves_out_is_named_and_counted(world, tmp_path):
    path, folder = tmp_path / "mixed.parquet", tmp_path / "photos"
    table = pq.read_table(write_parquet(path, 12)).to_pylist()
    table[4]["image"], table[7]["image"], table[9]["label"] = b"no picture", None, None
    pq.write_table(pa.Table.from_pylist(table), path)
    flags = ["--config", world / "vision.yaml", "--out", tmp_path / "h.safetensors"]
    lines = succeed("fit-head", *flags, "--corpus", path).lines
    assert re.search("3 classes.*9 images", lines[0])
    for line, name in zip(lines[1:4], ("mixed-4", "mixed-7", "mixed-9"), strict=True):
        assert re.fullmatch(f"left out: 1 .*: {name}", line)
    for i, content in enumerate(pictures(25)[0]):
        (folder / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        (folder / "ab"[i % 2] / f"{i:02}.png").write_bytes(content if i < 2 else b"")
    lines = succeed("fit-head", *flags, "--corpus", folder).lines
    assert "2 images" in lines[0]
    assert_mentions(lines[1], "left out: 23 broken images: a/02.png, a/04.png, ", " 3 more")
    for place in folder.rglob("0[01].png"):
        place.write_bytes(b"")
    assert re.search(r"\b25 images.*\(25 broken images\)", refused("fit-head", *flags, "--corpus", folder))


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
