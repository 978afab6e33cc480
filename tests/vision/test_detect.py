"""grasp detect finds planted mistakes in images, and refuses inputs that would inflate its figures."""

import base64
import re
from math import nan

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.detection import evaluate_scores
from experiments.vision.fit_head import fit_head
from grasp.artifact.reader import ArtifactReader
from grasp.errors import GraspError
from grasp.pipeline.pipeline import build_artifact
from grasp.progress import Progress
from grasp.settings import build_settings
from grasp.vision.detect import detect, standardised_blocks
from grasp.vision.images import ImageStore, decode_image
from tests.cli.grasp_command import succeed
from tests.mentions import assert_mentions
from tests.report.world import HOSTILE, write_artifact
from tests.rounding import rounding
from tests.vision.images_world import TinyNet, pictures, settings, write_parquet, write_weights


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """Build 60 images, every tenth with a wrong label, under a head fitted to these labels."""
    root = tmp_path_factory.mktemp("noisy")
    data = settings(root)
    classes = pictures(60, seed=4)[1]
    changed = [i % 10 == 3 for i in range(60)]
    labels = [(c + 1) % 3 if bad else c for c, bad in zip(classes, changed, strict=True)]
    marks = {"one": [True] * 60, "checked": [i < 30 for i in range(60)]}
    marks["part"] = [None if i == 4 else True for i in range(60)]
    marks |= {"minus": [-1 if i == 5 else 0 for i in range(60)], "nan": [nan if i == 6 else 1.0 for i in range(60)]}
    write_parquet(root / "train.parquet", 60, seed=4, label=labels, changed=changed, **marks)
    fitting = build_settings(data)
    fit_head(fitting.model, fitting.corpus, root / "head.safetensors", decay=0.3)
    data["model"]["classifier"] |= {"fitted_head": str(root / "head.safetensors")}
    return ArtifactReader.open(build_artifact(build_settings(data), root / "art"))


def artifact_of(root, n_rows=0, **columns):
    """Build the small world, if `n_rows` with other rows."""
    data = settings(root)
    if n_rows:
        write_parquet(root / "train.parquet", n_rows, **columns)
    return ArtifactReader.open(build_artifact(build_settings(data), root / "art"))


@pytest.fixture
def few(tmp_path):
    return artifact_of(tmp_path, 9)


@pytest.fixture
def texts(tmp_path):
    return ArtifactReader.open(write_artifact(tmp_path / "art").path)


@pytest.fixture
def trusted_rows(tmp_path):
    """Build an artifact whose trusted images are rows under other names."""
    settings(tmp_path)
    images, classes = pictures(30)
    table = {"row_id": [f"t{i}" for i in range(3)], "image": images[3:6], "label": classes[3:6]}
    pq.write_table(pa.table(table), tmp_path / "trusted.parquet")
    return artifact_of(tmp_path)


def test_rows_with_wrong_labels_rank_first(noisy):
    suspects = detect(noisy, "trusted")
    assert list(suspects.scores) == ["low_relevance", "neighbour_disagreement", "fused"]
    changed_N = np.arange(60) % 10 == 3
    detections = {name: evaluate_scores(score_N, changed_N) for name, score_N in suspects.scores.items()}
    assert detections["fused"].n_planted == 6
    assert detections["low_relevance"].auroc > 0.95
    assert detections["neighbour_disagreement"].auroc > 0.95
    assert detections["fused"].at_k.recall >= 5 / 6


def test_a_note_names_the_kernel(noisy):
    (kernel,) = [note for note in detect(noisy, "trusted").notes if note.startswith("low_relevance: minus")]
    assert_mentions(kernel, "output_layer", "--match")


def test_the_command_writes_a_table_and_a_page_with_the_images_of_the_artifact(noisy, tmp_path):
    out, page = tmp_path / "suspects.parquet", tmp_path / "suspects.html"
    printed = succeed("detect", noisy.path, "--target", "trusted", "--out", out, "--top", 3).out
    assert "12 x 12 pixels" in printed
    table = pq.read_table(out)
    assert table["rank"].to_pylist() == list(range(1, 61))
    assert table["fused"].to_pylist() == sorted(table["fused"].to_pylist(), reverse=True)
    succeed("detect", noisy.path, "--target", "trusted", "--out", page, "--top", 3)
    encoded = re.findall(r'<img src="data:image/png;base64,([^"]+)"', page.read_text())
    assert len(encoded) == 3
    shown = [decode_image(base64.b64decode(image)) for image in encoded]
    first = table["row_id"].to_pylist()[0]
    index = pq.read_table(noisy.path / "rows.parquet")["row_id"].to_pylist().index(first)
    row_image = decode_image(ImageStore.open(noisy.path / "tokens").rows(np.array([index])).encoded[0])
    assert shown[0].tobytes() == row_image.tobytes()
    assert table["row_id"][2].as_py() in page.read_text()


def test_a_class_with_one_example_is_reported_and_not_judged(tmp_path):
    suspects = detect(artifact_of(tmp_path, 20, label=[0, 1] * 9 + [0, 2]), "trusted")
    assert_mentions(suspects.notes, "1 rows", "unique class")


@pytest.mark.parametrize(("n_rows", "classes", "why"), [(12, ["x"], "same"), (10, list("abcdefghij"), "of its own")])
def test_uninformative_classes_are_not_used_for_ranking(tmp_path, n_rows, classes, why):
    data = settings(tmp_path)
    data["model"]["classifier"]["classes"] = []
    write_parquet(tmp_path / "train.parquet", n_rows, label=[classes[i % len(classes)] for i in range(n_rows)])
    write_parquet(tmp_path / "trusted.parquet", 3, seed=1, label=["x" if "x" in classes else "a"] * 3)
    if len(classes) == 1:
        classes = [*classes, "y"]
        trusted = {"label": ["x", "x", "y"]}
        write_parquet(tmp_path / "trusted.parquet", 3, seed=1, **trusted)
    data["model"]["classifier"] |= {"classes": classes, "arguments": {"classes": len(classes)}}
    write_weights(tmp_path / "weights.safetensors", TinyNet(classes=len(classes)))
    suspects = detect(ArtifactReader.open(build_artifact(build_settings(data), tmp_path / "art")), "trusted")
    assert list(suspects.scores) == ["low_relevance"]
    (note,) = [note for note in suspects.notes if "low_relevance alone" in note]
    assert why in note


def test_rows_verified_as_correct_are_the_null_distribution(noisy):
    suspects = detect(noisy, "trusted", clean="checked", false_positives=0.1)
    assert suspects.threshold.value == np.sort(suspects.scores["fused"][:30])[27]
    flags = "--clean", "checked", "--false-positives", 0.1, "--top", 0
    assert "average" in succeed("detect", noisy.path, "--target", "trusted", *flags).out


def test_flags_explained_by_chance_are_not_suspects(tmp_path):
    suspects = detect(artifact_of(tmp_path), false_positives=0.3)
    assert suspects.threshold.n_flagged <= 9 + 2 * 9**0.5
    assert_mentions(suspects.headline, "No suspects", "9 of 30 rows")
    assert all(len(sentence.split()) < 25 for sentence in suspects.headline.split(". "))


def test_a_result_displays_the_first_rows_and_contains_all(noisy):
    suspects = detect(noisy, "trusted", top=3)
    lines = repr(suspects).splitlines()
    assert lines[0] == suspects.headline
    assert [line.split()[3] for line in lines[2:5]] == suspects.table["row_id"].to_pylist()[:3]
    assert lines[5] == suspects.notes[0]
    assert ">train-" in suspects._repr_html_()
    frame = suspects.to_pandas()
    assert len(frame) == 60
    assert frame["fused"].is_monotonic_decreasing


def test_hostile_rows_are_text_on_a_page(tmp_path):
    artifact = artifact_of(tmp_path, 30, row_id=[f"{i}{HOSTILE[i % len(HOSTILE)]}" for i in range(30)])
    page = detect(artifact, "trusted", top=30).write(tmp_path / "s.html").read_text()
    assert "<img src=x" not in page
    assert "<script" not in page
    assert "&lt;img src=x" in page


def test_identical_rows_are_reported_and_not_flagged(tmp_path):
    shown = detect(artifact_of(tmp_path, 12, image=pictures(1)[0] * 12, label=[0] * 12), "trusted")
    assert any("threshold is not informative" in note for note in shown.notes)
    assert shown.table["flagged"].to_pylist() == [False] * 12


def test_scores_do_not_depend_on_block_size(tmp_path):
    small_shards, other = artifact_of(tmp_path), build_settings(settings(tmp_path, shard_rows=30))
    default_shards = ArtifactReader.open(build_artifact(other, tmp_path / "other"))
    blocks = [block for _, block in default_shards.array_blocks("relevance_output_layer")]
    score_NE = np.concatenate(blocks, dtype=float)
    score_NE = (score_NE - score_NE.mean(axis=0)) / score_NE.std(axis=0)
    terms = 2 * (27 * 8 + 72 * 10 + 10 + 3) + 30  # the layers of the model in float32, and the rows
    for artifact in (default_shards, small_shards):
        blocks = list(standardised_blocks(artifact, "relevance_output_layer", "trusted", Progress()))
        assert [start for start, _ in blocks] == [0, *np.cumsum([len(block) for _, block in blocks])[:-1]]
        actual_NE = np.concatenate([block for _, block in blocks])
        np.testing.assert_allclose(actual_NE, score_NE, rtol=0, atol=rounding(terms, score_NE))
        detected_N = detect(artifact, "trusted").scores["low_relevance"]
        np.testing.assert_allclose(detected_N, -score_NE.mean(axis=1), rtol=0, atol=rounding(terms, score_NE))


REFUSED = [
    ("noisy", {"clean": "image_class"}, "clean image_class: .*train-0.*'blue'"),
    ("noisy", {"clean": "changed"}, "clean changed: .*6 rows"),
    ("noisy", {"clean": "nothing"}, r"\['nothing'\]"),
    ("noisy", {"false_positives": 0.7}, r"got 0\.7"),
    ("noisy", {"match": "embedding"}, "relevance.*'embedding'"),
    ("noisy", {"top": -1}, r"top:.*-1\b"),
    ("noisy", {"clean": "part"}, "clean part: .*train-4"),
    ("noisy", {"clean": "minus"}, r"clean minus: .*train-5.*-1\b"),
    ("noisy", {"clean": "nan"}, "clean nan: .*train-6"),
    ("few", {}, r"\b9 rows.*\b10\b"),
    ("texts", {"target": "sciq"}, "texts, expected images"),
    ("trusted_rows", {"target": "trusted"}, r"(?s)\b3 of 3 trusted units.*trusted:t1 = train-4"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_invalid_arguments_are_refused(request, name, changes, message):
    artifact = request.getfixturevalue(name)
    with pytest.raises(GraspError, match=message):
        detect(artifact, **changes)
