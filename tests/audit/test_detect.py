"""grasp detect finds planted mistakes in images and in texts, and refuses what would make it look good."""

import base64
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grasp.artifact.reader import Artifact
from grasp.audit import detect as detecting
from grasp.audit.detect import contamination, detect
from grasp.build.fit_head import fit_head
from grasp.build.local import build
from grasp.corpus.image_store import ImageStore
from grasp.corpus.images import decode_image
from grasp.errors import ArtifactError, SettingsError
from grasp.settings import build_settings
from tests.build.world import texts, world, write_targets
from tests.cli.grasp_command import refused, succeed
from tests.models.images_world import pictures, settings, write_parquet


@pytest.fixture(scope="module")
def noisy(tmp_path_factory):
    """60 pictures, every tenth with a wrong label, under a head fitted to the labels as they are."""
    root = tmp_path_factory.mktemp("noisy")
    data = settings(root)
    classes = pictures(60, seed=4)[1]
    changed = [i % 10 == 3 for i in range(60)]
    labels = [(c + 1) % 3 if bad else c for c, bad in zip(classes, changed, strict=True)]
    write_parquet(root / "train.parquet", 60, seed=4, label=labels, changed=changed, one=[True] * 60)
    fitting = build_settings(data)
    fit_head(fitting.model, fitting.corpus, root / "head.safetensors", decay=0.3)
    data["model"]["classifier"] |= {"fitted_head": str(root / "head.safetensors")}
    return build(build_settings(data), root / "art")


def test_wrong_labels_come_first(noisy):
    found = detect(Artifact.open(noisy), "trusted", truth="changed")
    assert list(found.scores) == ["relevance", "geometry", "fused"]
    assert found.detections["fused"].n_planted == 6
    assert found.detections["relevance"].auroc > 0.95
    assert found.detections["geometry"].auroc > 0.95
    assert found.detections["fused"].at_k.recall >= 5 / 6


def test_the_command_and_its_table(noisy, tmp_path):
    out = tmp_path / "suspects.parquet"
    said = succeed("detect", noisy, "--target", "trusted", "--truth", "changed", "--top", 3, "--out", out).out
    assert "against the truth: 6 of 60 rows planted" in said
    assert "12 x 12 pixels" in said
    rows = pq.read_table(out).to_pylist()
    assert len(rows) == 60
    assert [row["rank"] for row in rows] == list(range(1, 61))
    assert [row["fused"] for row in rows] == sorted((row["fused"] for row in rows), reverse=True)


def test_the_report_shows_the_pictures_that_the_artifact_keeps(noisy, tmp_path):
    out, page = tmp_path / "suspects.parquet", tmp_path / "report.html"
    succeed("detect", noisy, "--target", "trusted", "--truth", "changed", "--out", out, "--top", 0)
    succeed("report", noisy, "--detect", out, "--out", page)
    section = page.read_text().partition('<section id="suspects"')[2].partition("</section>")[0]
    encoded = re.findall(r'<img src="data:image/png;base64,([^"]+)"', section)
    assert len(encoded) == 12
    shown = [decode_image(base64.b64decode(one)) for one in encoded]
    first = pq.read_table(out)["row_id"].to_pylist()[0]
    index = detecting.column(Artifact.open(noisy), "row_id").index(first)
    own = decode_image(ImageStore.open(noisy / "tokens").rows(np.array([index])).encoded[0])
    assert shown[0].tobytes() == own.tobytes()
    assert "6 rows planted" in section


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--truth", "one"], "truth: 60 of 60 rows are planted, expected some and not all"),
        (["--truth", "image_class"], "--truth image_class: holds str, expected true and false"),
        (["--truth", "nothing"], "no columns ['nothing']"),
        (["--neighbours", 0], "neighbours: got 0, expected at least 1"),
        (["--truth", "changed", "-k", 61], "k: got 61, expected 1 to 60"),
        (["--false-positives", 0.7], "false-positive rate: got 0.7"),
        (["--against", "bm25"], "--against: no meaning without --contamination"),
        (["--contamination", "--against", ","], "--against: got ',', expected names separated by commas"),
        (["--contamination", "--label", "x"], "--label: no meaning with --contamination"),
        (["--match", "input"], "has no 'input' relevance"),
    ],
)
def test_mistakes_are_told(noisy, options, said):
    assert said in refused("detect", noisy, "--target", "trusted", *options)


def test_a_class_with_one_example_is_told_and_has_no_opinion(tmp_path):
    data = settings(tmp_path)
    write_parquet(tmp_path / "train.parquet", 20, label=[0, 1] * 9 + [0, 2])
    found = detect(Artifact.open(build(build_settings(data), tmp_path / "art")), "trusted")
    assert "1 rows are alone with their image_class: geometry says nothing of them" in found.notes


def test_trusted_images_that_are_rows_are_refused_whatever_they_are_called(tmp_path):
    data = settings(tmp_path)
    images, classes = pictures(30)
    table = {"row_id": [f"t{i}" for i in range(3)], "image": images[3:6], "label": classes[3:6]}
    pq.write_table(pa.table(table), tmp_path / "trusted.parquet")
    artifact = Artifact.open(build(build_settings(data), tmp_path / "art"))
    with pytest.raises(ArtifactError) as caught:
        detect(artifact, "trusted")
    assert "3 of 3 trusted units of trusted are rows of the corpus: " in str(caught.value)
    assert "trusted:t1 = train-4" in str(caught.value)


@pytest.fixture(scope="module")
def leaked(tmp_path_factory):
    """Texts of which two hold the text of a unit, word for word."""
    root = tmp_path_factory.mktemp("leaked")
    base = world(root)
    units = [json.loads(line) for line in write_targets(root / "facts.jsonl").read_text().splitlines()]
    lines = [{"row_id": f"row-{i}", "text": text, "leak": False} for i, text in enumerate(texts(40))]
    for i, unit in ((7, units[1]), (21, units[4])):
        lines[i] = {"row_id": f"row-{i}", "text": unit["prompt"] + unit["completion"], "leak": True}
    (root / "corpus.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return Artifact.open(build(base, root / "art")), units


def test_trusted_texts_that_are_rows_are_refused(leaked):
    artifact, units = leaked
    with pytest.raises(ArtifactError, match="2 of 6 trusted units of facts are rows of the corpus") as caught:
        detect(artifact, "facts")
    assert f"{units[1]['unit_id']} = row-7" in str(caught.value)


def test_leaked_text_is_what_contamination_looks_for(leaked):
    artifact, units = leaked
    found = contamination(artifact, "facts", truth="leak", k=4)
    assert found.detections["contamination"].auroc > 0.9
    said = succeed(
        "detect",
        artifact.path,
        "--target",
        "facts",
        "--contamination",
        "--against",
        "bm25",
        "--truth",
        "leak",
        "-k",
        2,
        "--quiet",
    ).out
    assert "bm25" in said
    assert "R@2" in said
    matched = artifact.units["unit_id"].to_pylist()
    names = artifact.rows(np.arange(artifact.n_rows))["row_id"].to_pylist()
    assert matched[found.match_E[names.index("row-7")]] == units[1]["unit_id"]


def test_texts_without_a_label_are_ranked_by_relevance_alone(tmp_path):
    artifact = Artifact.open(build(world(tmp_path), tmp_path / "art"))
    assert list(detect(artifact, "facts").scores) == ["relevance"]
    assert list(detect(artifact, "facts", label="topic").scores) == ["relevance", "geometry", "fused"]
    with pytest.raises(SettingsError, match="neighbours: got 0"):
        detect(artifact, "facts", neighbours=0)
