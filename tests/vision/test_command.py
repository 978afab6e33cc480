"""Images from the command line: fit a head, build, score, predict, with the commands of texts."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from grasp.settings import build_settings
from tests.cli.grasp_command import refused, succeed
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
    selection = succeed("select", art, "--budget", "50%", "--target", "trusted", "--out", world / "kept.parquet")
    assert "15" in selection.out
    assert "rows are images, but the method reads tokens" in refused(
        "score", art, "--target", "trusted", "--method", "bm25"
    )


def test_invalid_input_is_reported(world, tmp_path):
    config, head = world / "vision.yaml", tmp_path / "h.safetensors"
    single_class = write_parquet(tmp_path / "one.parquet", 6, label=["red"] * 6)
    mixed = write_parquet(tmp_path / "mixed.parquet", 3, label=[-1, 0, 2])
    for arguments, output in (
        (["fit-head", "--config", config, "--out", tmp_path / "h.pt"], "--out: got "),
        (["fit-head", "--out", head], "fit-head: missing --model (model.path)"),
        (["fit-head", "--config", config, "--out", head, "--corpus", single_class], "its images have 1 class"),
        (["fit-head", "--config", config, "--out", head, "--corpus", mixed], "got the number -1"),
        (["build", "--config", config, "--targets", "sciq", "--out", tmp_path / "a"], "sciq"),
    ):
        assert output in refused(*arguments)


def test_what_fit_head_leaves_out_is_named_and_counted(world, tmp_path):
    path, folder = tmp_path / "mixed.parquet", tmp_path / "photos"
    table = pq.read_table(write_parquet(path, 12)).to_pylist()
    table[4]["image"], table[7]["image"], table[9]["label"] = b"no picture", None, None
    pq.write_table(pa.Table.from_pylist(table), path)
    arguments = ["--config", world / "vision.yaml", "--out", tmp_path / "h.safetensors", "--quiet"]
    output = succeed("fit-head", *arguments, "--corpus", path).lines
    assert "3 classes, fitted to 9 images:" in output[0]
    assert output[1:4] == [
        "left out: 1 broken images: mixed-4",
        "left out: 1 records without an image: mixed-7",
        "left out: 1 images without a class: mixed-9",
    ]
    for i, content in enumerate(pictures(25)[0]):
        (folder / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        (folder / "ab"[i % 2] / f"{i:02}.png").write_bytes(content if i < 2 else b"")
    output = succeed("fit-head", *arguments, "--corpus", folder).lines
    assert "fitted to 2 images:" in output[0]
    assert output[1].startswith("left out: 23 broken images: a/02.png, a/04.png, ")
    assert output[1].endswith(" and 3 more")
    for place in folder.rglob("0[01].png"):
        place.write_bytes(b"")
    assert "none of its 25 images can be used (25 broken_image)" in refused("fit-head", *arguments, "--corpus", folder)


def test_an_image_classifier_without_its_head_is_told_which_setting_it_lacks(world, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["ViTForImageClassification"], "model_type": "vit"}')
    arguments = ["build", "--corpus", world / "train.parquet", "--targets", world / "trusted.parquet", "--out"]
    output = refused(*arguments, tmp_path / "a", "--model", tmp_path)
    assert "is an image classifier (ViTForImageClassification), not a causal LM" in output
    assert "--set model.classifier.head=classifier" in output
    output = refused(*arguments, tmp_path / "a", "--model", world / "weights.safetensors")
    assert "weights of an image classifier need model.classifier.factory" in output
    assert "model.classifier.head=classifier" in succeed("build", "--help").out


def test_settings_of_texts_are_refused_with_a_classifier(tmp_path):
    data = settings(tmp_path)
    assert build_settings(data).features.tau == 100.0
    data["features"]["kernels"] = ["output_layer", "embedding", "gradient", "knn"]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(data))
    output = refused("build", "--config", tmp_path / "c.yaml", "--out", tmp_path / "a")
    assert "features.kernels: got embedding, gradient, knn, which are of texts; leave them out" in output
