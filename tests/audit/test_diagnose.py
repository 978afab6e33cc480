"""grasp diagnose on real small artifacts: measured from kept features or the model, told apart, mended as advised."""

import json
import shutil

import numpy as np
import pytest

from grasp.artifact.reader import Artifact
from grasp.audit import diagnose as diagnosing
from grasp.audit.diagnose import diagnose
from grasp.audit.sample import Rerun, sample_features, sample_rows
from grasp.build.local import build
from grasp.errors import ArtifactError, GraspError
from grasp.settings import build_settings
from tests.build.world import world
from tests.cli.grasp_command import refused, succeed
from tests.models.images_world import settings as image_settings


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("diagnose")


@pytest.fixture(scope="module")
def plain(root):
    return Artifact.open(build(world(root / "world"), root / "plain"))


@pytest.fixture(scope="module")
def kept(root, plain):
    return Artifact.open(build(world(root / "world", keep_features=True), root / "kept"))


def by_name(found):
    return {finding.name: finding for finding in found.findings}


def test_kept_features_are_those_of_the_model(plain, kept):
    index = sample_rows(plain, 20, seed=0)
    ours = sample_features(kept, index, GraspError("unused"))
    theirs = sample_features(plain, index, Rerun.of(plain))
    assert (ours.source, theirs.source) == ("kept features", "the model")
    np.testing.assert_allclose(ours.hidden_NH, theirs.hidden_NH, atol=1e-5)
    np.testing.assert_allclose(ours.residual_NV.toarray(), theirs.residual_NV.toarray(), atol=1e-6)
    np.testing.assert_array_equal(ours.positions.row_P, theirs.positions.row_P)
    np.testing.assert_allclose(ours.positions.hidden_PH, theirs.positions.hidden_PH, atol=2e-2)
    gap = abs(ours.positions.residual_PV - theirs.positions.residual_PV).max()
    assert gap < 2e-3


def test_everything_is_measured_and_every_line_says_what_is_healthy(plain):
    found = diagnose(plain, rows=32, subsets=20)
    assert found.source == "the model"
    named = by_name(found)
    assert len(named) == 11
    for finding in found.findings:
        assert finding.healthy
        assert bool(finding.advice) == (finding.verdict != "healthy")
    assert named["batch invariance"].verdict == "healthy"
    assert named["ranking stability"].verdict == "not measured"
    assert {f.verdict for f in found.findings if f.name not in ("ranking stability",)} <= {"healthy", "look"}


def test_a_sketch_as_wide_as_the_features_has_no_error(root):
    wide = {"hidden_width": 16, "residual_width": 8}
    art = Artifact.open(build(world(root / "world", features=wide), root / "wide"))
    numbers = by_name(diagnose(art, rows=32, subsets=20))["sketch of K"].numbers
    assert numbers["hidden_error"] < 1e-4  # the projection is the identity
    assert numbers["hidden_ranks"] == pytest.approx(1.0)
    assert numbers["residual_error"] > 0.01


def test_more_top_k_leaves_less_outside(root, plain):
    few = by_name(diagnose(plain, rows=32, subsets=5))["residual beyond top-k"].numbers["share"]
    more = Artifact.open(build(world(root / "world", features={"top_k": 300}), root / "more"))
    assert few > 0.0
    assert by_name(diagnose(more, rows=32, subsets=5))["residual beyond top-k"].numbers["share"] < 1e-4


def test_without_features_or_model_it_says_how_to_build(root, plain, tmp_path):
    shutil.copytree(plain.path, tmp_path / "art")
    shutil.rmtree(tmp_path / "art" / "tokens")
    named = by_name(diagnose(Artifact.open(tmp_path / "art"), rows=16, subsets=5))
    for name in ("sketch of K", "direct sum for product", "residual beyond top-k", "pooled for tokens"):
        assert named[name].verdict == "not measured"
        assert "keeps no rows; build it with `grasp build --keep-features`" in named[name].advice
    assert named["pairs that complement"].verdict in ("healthy", "look")


def test_a_model_that_is_not_at_hand_is_not_asked_of_a_hub(root, tmp_path):
    settings = world(root / "gone")
    art = Artifact.open(build(settings, tmp_path / "art"))
    shutil.rmtree(settings.model.path)
    named = by_name(diagnose(art, rows=16, subsets=5))
    assert "not on this disk, seen from here; build it with" in named["batch invariance"].advice
    assert named["batch invariance"].advice == named["sketch of K"].advice


def test_kept_features_need_neither_model_nor_rows(kept, tmp_path):
    shutil.copytree(kept.path, tmp_path / "art")
    shutil.rmtree(tmp_path / "art" / "tokens")
    found = diagnose(Artifact.open(tmp_path / "art"), rows=16, subsets=5)
    named = by_name(found)
    assert found.source == "kept features"
    assert named["sketch of K"].verdict != "not measured"
    assert named["batch invariance"].verdict == "not measured"


def test_a_model_that_mixes_rows_is_found_out(plain, monkeypatch):
    alone = Rerun.alone

    def shifted(self, index):
        hidden, residual = alone(self, index)
        return hidden + 0.01, residual

    monkeypatch.setattr(Rerun, "alone", shifted)
    finding = by_name(diagnose(plain, rows=16, subsets=5))["batch invariance"]
    assert finding.verdict == "look"
    assert "model.dtype: float32" in finding.advice


def test_an_image_classifier_is_diagnosed_alike(tmp_path):
    art = Artifact.open(build(build_settings(image_settings(tmp_path / "w")), tmp_path / "art"))
    named = by_name(diagnose(art, rows=30, subsets=10))
    assert named["pooled for tokens"].numbers["share"] == pytest.approx(1.0)  # one position an image
    assert named["residual beyond top-k"].numbers["share"] == pytest.approx(0.0, abs=1e-6)
    assert named["batch invariance"].verdict == "healthy"


def test_the_command(plain, tmp_path):
    out = succeed("diagnose", plain.path, "--rows", 16, "--subsets", 5, "--json", tmp_path / "d.json").out
    assert f"{plain.path}: 16 rows, 5 subsets of half of them, full features from the model" in out
    assert out.count("    healthy: ") == 11
    assert len(json.loads((tmp_path / "d.json").read_text())["findings"]) == 11
    assert refused("diagnose", plain.path, "--rows", 3).startswith("diagnose: got 3 rows and 64 subsets, expected")
    assert "no such artifact" in refused("diagnose", tmp_path / "nothing")


def test_too_few_rows_are_refused(root):
    small = Artifact.open(build(world(root / "small", n_rows=3), root / "tiny"))
    with pytest.raises(ArtifactError, match=r"has \d rows, diagnostics need at least 8"):
        diagnose(small)
    assert diagnosing.MIN_ROWS == 8
