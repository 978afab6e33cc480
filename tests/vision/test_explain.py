"""Explain an image by the trusted images that it affects most, from the artifact alone, with the pictures."""

import base64
import json
import re
import shutil

import fsspec
import numpy as np
import pytest

import grasp
from grasp.api.score import score
from grasp.artifact.manifest import MANIFEST
from grasp.artifact.reader import ArtifactReader
from grasp.errors import ProtocolError, SettingsError
from grasp.files import UNSIGNED, with_checksum
from grasp.pipeline.pipeline import build_artifact
from grasp.serving.serve import QueryService
from grasp.settings import build_settings
from grasp.vision.images import decode_image
from tests.cli.grasp_command import refused, succeed
from tests.vision.images_world import pictures, settings


@pytest.fixture(scope="module")
def art(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    return ArtifactReader.open(build_artifact(build_settings(settings(root)), root / "art"))


def of_url(url):
    return base64.b64decode(url.partition(",")[2])


def test_what_the_trusted_images_add_is_the_effect_by_which_rows_are_ordered(art):
    ordered = score(art, "trusted").to_pandas().set_index("row_id")["effect"]
    for row in ("train-0", "train-29"):
        explanation = grasp.open(art.path).explain("trusted", row)
        frame = explanation.to_pandas()
        assert len(frame) == 9
        assert explanation.effect == pytest.approx(ordered[row])
        assert frame["contribution"].sum() + explanation.average == pytest.approx(explanation.effect, abs=1e-6)
        assert (np.diff(frame["contribution"].abs()) <= 0).all()


def test_pictures_are_those_of_the_rows_and_of_the_trusted_set(art):
    explanation = grasp.open(art.path).explain("trusted", "train-4")
    assert len(explanation.figures) == 9  # its own, and the eight nearest
    image, trusted = pictures(30)[0][4], pictures(9, seed=1)[0]
    (caption, url), (first_caption, first_url) = explanation.figures[:2]
    assert caption.startswith("train-4: ")
    assert decode_image(of_url(url)).tobytes() == decode_image(image).tobytes()
    name = explanation.to_pandas()["unit_id"][0]
    assert f" {name}: " in first_caption
    label = trusted[int(name.rpartition("-")[2])]
    assert decode_image(of_url(first_url)).tobytes() == decode_image(label).tobytes()
    assert explanation._repr_html_().count('<img src="data:image/png;base64,') == 9


@pytest.mark.parametrize("change", ["gone", "device", "url", "column", "name", "kind"])
def test_a_strangers_artifact_reads_no_device_and_fetches_nothing(art, tmp_path, change):
    path = shutil.copytree(art.path, tmp_path / "art")
    picture = pictures(9, seed=1)[0][0]
    fsspec.filesystem("memory").pipe("/trusted.png", picture)  # stands for another machine
    image = {"device": "/dev/zero", "url": "memory://trusted.png"}.get(change, "none")
    trusted_file = tmp_path / "trusted.jsonl"
    trusted_file.write_text(json.dumps({"image": image, "label": 0}) + "\n")
    raw = json.loads((path / MANIFEST).read_text())
    raw["settings"]["targets"]["names"] = [
        {"name": "x" * 5000 + "/trusted.parquet", "kind": 3}.get(change, str(trusted_file))
    ]
    if change == "gone":
        trusted_file.unlink()
    if change == "column":
        raw["settings"]["model"]["classifier"]["image_column"] = 3
    (path / MANIFEST).write_bytes(with_checksum((json.dumps(raw | {"checksum": UNSIGNED}, indent=1) + "\n").encode()))
    explanation = grasp.open(path).explain("trusted", "train-4")
    assert [caption for caption, url in explanation.figures if url] == [explanation.figures[0][0]]
    (note,) = [note for note in explanation.notes if note.startswith("8 of ")]
    assert (str(trusted_file) in note) is (change not in ("name", "kind"))
    assert explanation.to_pandas()["unit_id"][0] in repr(explanation)


def test_the_command_and_what_is_not_there(art, tmp_path):
    shown = succeed(
        "explain", art.path, "--row", "train-4", "--out", tmp_path / "why.html", "--json", tmp_path / "w.json"
    )
    assert shown.out.startswith("row train-4: effect ")
    assert "its class" in shown.out
    assert "<img src=" in (tmp_path / "why.html").read_text()
    assert len(json.loads((tmp_path / "w.json").read_text())["rows"]) == 9
    assert "train-4 " not in refused("explain", art.path, "--row", "nope")
    with pytest.raises(SettingsError, match=r"row: .*'nope'.*train-0"):
        grasp.open(art.path).explain("trusted", "nope")
    with pytest.raises(ProtocolError, match=r"unit: trusted .*'x'"):
        grasp.open(art.path).explain("trusted", "train-4", unit="x")


def test_a_report_and_a_server_show_them(art, tmp_path):
    for count, shown in ((1, 1), (2, 3)):  # so many of the best, and half as many of the worst
        succeed("report", art.path, "--explain", count, "--out", tmp_path / "r.html")
        data = re.search(r'id="data">(.*?)</script>', (tmp_path / "r.html").read_text())[1]
        with_pictures = [row["figures"]["t0"] for row in json.loads(data)["rows"]["rows"] if "figures" in row]
        assert len(with_pictures) == shown
    assert all(len(with_picture) == 5 for with_picture in with_pictures)
    caption, url = with_pictures[0][1]
    assert re.match(r"[+-]\S+ trusted:", caption)
    assert decode_image(of_url(url)).size == (12, 12)
    answer = QueryService(art).answer("explain", row="train-4")
    assert len(answer["figures"]) == 9
    assert answer["columns"] == ["unit_id", "image_class", "contribution"]
