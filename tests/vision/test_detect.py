"""grasp detect finds planted mistakes in images and texts, and refuses inputs that would inflate its figures."""

import base64
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grasp.artifact.reader import ArtifactReader
from grasp.errors import ArtifactError, GraspError
from grasp.pipeline.pipeline import build_artifact
from grasp.progress import Silent
from grasp.settings import build_settings
from grasp.vision.detect import _inverted_score_notes, detect, standardised_blocks
from grasp.vision.detection import evaluate_scores
from grasp.vision.fit_head import fit_head
from grasp.vision.images import ImageStore, decode_image
from tests.cli.grasp_command import succeed
from tests.mentions import assert_mentions
from tests.pipeline.world import texts, world
from tests.report.world import HOSTILE, write_artifact
from tests.rounding import rounding
from tests.vision.images_world import pictures, settings, write_parquet


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """Build 60 images, every tenth with a wrong label, under a head fitted to these labels."""
    root = tmp_path_factory.mktemp("noisy")
    data = settings(root)
    classes = pictures(60, seed=4)[1]
    changed = [i % 10 == 3 for i in range(60)]
    labels = [(c + 1) % 3 if bad else c for c, bad in zip(classes, changed, strict=True)]
    write_parquet(root / "train.parquet", 60, seed=4, label=labels, changed=changed, one=[True] * 60)
    fitting = build_settings(data)
    fit_head(fitting.model, fitting.corpus, root / "head.safetensors", decay=0.3)
    data["model"]["classifier"] |= {"fitted_head": str(root / "head.safetensors")}
    return ArtifactReader.open(build_artifact(build_settings(data), root / "art"))


def test_rows_with_wrong_labels_rank_first(noisy):
    suspects = detect(noisy, "trusted", truth="changed")
    assert list(suspects.scores) == ["low_relevance", "neighbour_disagreement", "fused"]
    detections = suspects.detections
    assert detections["fused"].n_planted == 6
    assert detections["low_relevance"].auroc > 0.95
    assert detections["neighbour_disagreement"].auroc > 0.95
    assert detections["fused"].at_k.recall >= 5 / 6


def test_planted_rows_that_look_helpful_are_reported_as_such(noisy):
    rng = np.random.default_rng(0)
    planted_N = np.arange(60) < 20
    bad, good = rng.normal(1, 1, 60), rng.normal(-1, 1, 60)
    detections = {
        name: evaluate_scores(np.where(planted_N, good, bad), planted_N) for name in ("low_relevance", "fused")
    }
    assert _inverted_score_notes(detections, "trusted") == [
        "low_relevance: planted rows look more helpful to trusted than the others (AUROC below 0.5)",
        "fused: planted rows look less suspicious than the others (AUROC below 0.5)",
    ]
    assert not _inverted_score_notes({"fused": evaluate_scores(bad, planted_N)}, "trusted")
    (kernel,) = [note for note in detect(noisy, "trusted").notes if note.startswith("low_relevance: minus")]
    assert_mentions(kernel, "output_layer", "--match")


def test_the_command_writes_a_table_and_a_page_with_the_images_of_the_artifact(noisy, tmp_path):
    out, page = tmp_path / "suspects.parquet", tmp_path / "suspects.html"
    printed = succeed("detect", noisy.path, "--target", "trusted", "--truth", "changed", "--out", out, "--top", 3).out
    assert re.search(r"truth.*\b6 of 60 rows", printed)
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
    data = settings(tmp_path)
    write_parquet(tmp_path / "train.parquet", 20, label=[0, 1] * 9 + [0, 2])
    suspects = detect(ArtifactReader.open(build_artifact(build_settings(data), tmp_path / "art")), "trusted")
    assert_mentions(suspects.notes, "1 rows", "image_class")


def test_trusted_images_that_are_rows_are_refused_under_any_name(tmp_path):
    data = settings(tmp_path)
    images, classes = pictures(30)
    table = {"row_id": [f"t{i}" for i in range(3)], "image": images[3:6], "label": classes[3:6]}
    pq.write_table(pa.table(table), tmp_path / "trusted.parquet")
    artifact = ArtifactReader.open(build_artifact(build_settings(data), tmp_path / "art"))
    with pytest.raises(ArtifactError) as caught:
        detect(artifact, "trusted")
    assert re.search(r"\b3 of 3 trusted units", str(caught.value))
    assert "trusted:t1 = train-4" in str(caught.value)


def _with(settings, **corpus):
    """Return build settings with one row per document."""
    return settings.model_copy(
        update={"corpus": settings.corpus.model_copy(update={"max_rows_per_document": 1} | corpus)}
    )


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """Build texts with columns that are not a ground truth, and with uninformative labels."""
    root = tmp_path_factory.mktemp("marked")
    base = world(root)
    lines = [
        {"row_id": f"row-{i}", "text": text, "one": "x", "own": str(i), "checked": i < 30}
        | {"part": None if i == 4 else True, "minus": -1 if i == 5 else 0, "nan": float("nan") if i == 6 else 1.0}
        for i, text in enumerate(texts(40))
    ]
    pq.write_table(pa.Table.from_pylist(lines), root / "marked.parquet")
    return ArtifactReader.open(build_artifact(_with(base, path=str(root / "marked.parquet")), root / "art"))


@pytest.mark.parametrize(("name", "why"), [("one", "same"), ("own", "alone")])
def test_uninformative_labels_are_not_used_for_ranking(marked, name, why):
    suspects = detect(marked, "facts", label=name)
    assert list(suspects.scores) == ["low_relevance"]
    assert why in suspects.notes[0]
    assert "relevance alone" in suspects.notes[0]


def test_rows_verified_as_correct_are_the_null_distribution(marked):
    suspects = detect(marked, "facts", clean="checked", false_positives=0.1)
    assert list(suspects.scores) == ["low_relevance"]  # nothing is said of labels
    assert suspects.threshold.value == np.sort(suspects.scores["low_relevance"][:30])[27]
    printed = succeed(
        "detect", marked.path, "--target", "facts", "--clean", "checked", "--false-positives", 0.1, "--top", 0
    ).out
    assert "average" in printed


def test_flags_explained_by_chance_are_not_suspects(marked):
    suspects = detect(marked, "facts", false_positives=0.2)
    assert suspects.threshold.n_flagged <= 8 + 2 * 8**0.5
    assert_mentions(suspects.headline, "low_relevance", "8 of 40 rows")
    assert all(len(sentence.split()) < 25 for sentence in suspects.headline.split(". "))


def test_a_result_displays_the_first_rows_and_contains_all(marked):
    suspects = detect(marked, "facts", top=3)
    lines = repr(suspects).splitlines()
    assert lines[0] == suspects.headline
    assert [line.split()[3] for line in lines[2:5]] == suspects.table["row_id"].to_pylist()[:3]
    assert lines[5] == suspects.notes[0]
    assert ">row-" in suspects._repr_html_()
    frame = suspects.to_pandas()
    assert len(frame) == 40
    assert frame["low_relevance"].is_monotonic_decreasing


def test_hostile_rows_are_text_on_a_page(tmp_path):
    artifact = write_artifact(tmp_path / "art", topics=HOSTILE, text=[text or "" for text in HOSTILE])
    page = detect(artifact, "sciq", label="format").write(tmp_path / "s.html").read_text()
    assert "<img" not in page
    assert "<script" not in page
    assert "&lt;img src=x" in page


def test_identical_rows_are_reported_and_written(tmp_path):
    base = world(tmp_path)
    lines = [{"row_id": f"row-{i}", "text": "The same words again.", "topic": "x"} for i in range(12)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, lines)))
    artifact = build_artifact(_with(base), tmp_path / "art")
    shown = succeed("detect", artifact, "--target", "facts", "--label", "topic", "--out", tmp_path / "s.parquet")
    assert "threshold" in shown.out
    assert pq.read_table(tmp_path / "s.parquet")["flagged"].to_pylist() == [False] * 12


def test_scores_do_not_depend_on_block_size(tmp_path):
    default_shards = ArtifactReader.open(build_artifact(_with(world(tmp_path)), tmp_path / "one"))
    small_shards = ArtifactReader.open(
        build_artifact(_with(world(tmp_path)).model_copy(update={"shard_rows": 7}), tmp_path / "other")
    )
    score_NE = np.concatenate([block for _, block in default_shards.array_blocks("relevance_output_layer")]).astype(
        float
    )
    score_NE = (score_NE - score_NE.mean(axis=0)) / score_NE.std(axis=0)
    terms = 2 * (4 * 16 + 32 + 48) + 40  # two layers of the model in float32, and the rows
    for artifact in (default_shards, small_shards):
        blocks = list(standardised_blocks(artifact, "relevance_output_layer", "facts", Silent()))
        assert [start for start, _ in blocks] == [0, *np.cumsum([len(block) for _, block in blocks])[:-1]]
        actual_NE = np.concatenate([block for _, block in blocks])
        np.testing.assert_allclose(actual_NE, score_NE, rtol=0, atol=rounding(terms, score_NE))
        detected_N = detect(artifact, "facts").scores["low_relevance"]
        np.testing.assert_allclose(detected_N, -score_NE.mean(axis=1), rtol=0, atol=rounding(terms, score_NE))


REFUSED = [
    ("noisy", {"truth": "one"}, r"\b60 of 60 rows"),
    ("noisy", {"truth": "image_class"}, "truth image_class: .*train-0.*'blue'"),
    ("noisy", {"clean": "changed"}, "clean changed: .*6 rows"),
    ("noisy", {"clean": "nothing"}, r"\['nothing'\]"),
    ("noisy", {"truth": "nothing"}, r"\['nothing'\]"),
    ("noisy", {"truth": "changed", "k": 61}, r"k:.*\b61\b.*\b1\b.*\b60\b"),
    ("noisy", {"false_positives": 0.7}, r"got 0\.7"),
    ("noisy", {"match": "embedding"}, "relevance.*'embedding'"),
    ("marked", {"k": 5}, "k: .*truth"),
    ("marked", {"top": -1}, r"top:.*-1\b"),
    ("marked", {"truth": "part"}, "truth part: .*row-4"),
    ("marked", {"truth": "minus"}, r"truth minus: .*row-5.*-1\b"),
    ("marked", {"truth": "nan"}, "truth nan: .*row-6"),
    ("few", {}, r"\b9 rows.*\b10\b"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_invalid_arguments_are_refused(request, tmp_path, name, changes, message):
    if name == "few":
        artifact = ArtifactReader.open(build_artifact(_with(world(tmp_path, n_rows=9)), tmp_path / "art"))
    else:
        artifact = request.getfixturevalue(name)
    with pytest.raises(GraspError, match=message):
        detect(artifact, **changes)
