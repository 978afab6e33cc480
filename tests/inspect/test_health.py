"""grasp info --check on small artifacts: measurements from stored features or the model, verdicts, and advice."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from grasp.artifact.reader import ArtifactReader
from grasp.errors import GraspError, RunsError, SettingsError
from grasp.inspect import health as checking
from grasp.inspect.health import SampledArtifact, check
from grasp.inspect.rescoring import (
    features_one_by_one,
    reopen_source,
    sample_features,
    sample_rows,
)
from grasp.kernels.whitening import Whitener, second_moments
from grasp.paper.sketch_checks import (
    MIN_RANK_CORRELATION,
    WIDTH_SETTINGS,
    ExactKernels,
    residuals_of,
    sample_weights,
)
from grasp.pipeline.pipeline import build_artifact
from grasp.runs.alignment import Alignment
from grasp.settings import build_settings
from tests.cli.grasp_command import refused, succeed
from tests.pipeline.world import EVERY, SKETCHES, world
from tests.rules import rule
from tests.runs import environments
from tests.runs.environments import UNITS, write_artifact, write_environment
from tests.vision.images_world import settings as image_settings


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checks")


KERNELS = ("output_layer", "embedding", "knn", "pooled", *SKETCHES)
PAPER_TOO = {"kernels": KERNELS, "positions": "tail:32", "summary_positions": "tail:32"}


@pytest.fixture(scope="module")
def plain(root):
    return ArtifactReader.open(build_artifact(world(root / "world", features=PAPER_TOO), root / "plain"))


@pytest.fixture(scope="module")
def with_features(root, plain):
    settings = world(root / "world", features=PAPER_TOO, keep_features=True)
    return ArtifactReader.open(build_artifact(settings, root / "kept"))


def by_name(report):
    return {finding.name: finding for finding in report.checks}


def test_stored_features_equal_those_of_the_model(plain, with_features):
    index = sample_rows(plain, 20, seed=0)
    ours = sample_features(with_features, index, GraspError("unused"))
    theirs = sample_features(plain, index, reopen_source(plain))
    assert (ours.source, theirs.source) == ("kept features", "the model")
    np.testing.assert_array_equal(ours.batch.row_P, theirs.batch.row_P)
    np.testing.assert_array_equal(ours.batch.input_P, theirs.batch.input_P)
    half = 2**-11  # the digits of float16
    np.testing.assert_allclose(ours.batch.hidden_PH, theirs.batch.hidden_PH, rtol=2 * half, atol=1e-5)
    assert abs(residuals_of(ours.batch) - residuals_of(theirs.batch)).max() < 2 * half
    np.testing.assert_allclose(
        ours.batch.summary.hidden_NH,
        theirs.batch.summary.hidden_NH,
        atol=half * float(theirs.batch.hidden_PH.abs().max()),
    )
    np.testing.assert_allclose(
        ours.batch.summary.residual_NV.toarray(), theirs.batch.summary.residual_NV.toarray(), atol=half
    )


ALL = rule(name="all", match={"output_layer": 1.0, "pooled": 0.3}, components={"joint.pair": -0.1})
PLAIN = {
    *(f"tail, {kernel}" for kernel in ("output_layer", "embedding", "knn")),
    "residual beyond top-k",
    "batch invariance",
    "ranking stability",
}
POOLED = {"pooled summaries", "pooled and output_layer"}
GEOMETRY = {f"{half} sketch" for half in ("hidden", "residual", "product")}


@pytest.fixture(scope="module")
def of_plain(plain):
    return check(plain, rows=32, subsets=20)


@pytest.fixture(scope="module")
def all_of_plain(plain):
    return check(plain, rows=32, subsets=20, protocol=ALL)


def has_healthy_range(finding):
    """Return whether a finding has a reference value, which is not a dash."""
    return len(finding.healthy) > 8 and any(letter.isdigit() for letter in finding.healthy)


def test_checks_cover_the_protocol_and_state_the_healthy_range(of_plain, all_of_plain):
    assert {finding.name for finding in of_plain.checks} == PLAIN
    tails = {name for name in PLAIN if name.startswith("tail")} - {"tail, output_layer"}
    assert {finding.name for finding in all_of_plain.checks} == PLAIN - tails | {"tail, pooled"} | POOLED | GEOMETRY
    for report in (of_plain, all_of_plain):
        named = by_name(report)
        assert report.source == "the model"
        assert len(named) == len(report.checks)
        for finding in report.checks:
            assert has_healthy_range(finding), finding
            assert bool(finding.advice) == (finding.verdict != "healthy")
        assert f" of {len(report.checks)} checks" in report.headline
        assert named["batch invariance"].verdict == "healthy"
        assert named["ranking stability"].verdict == "not measured"
        rows = report.to_arrow().to_pylist()
        assert [(row["check"], row["verdict"]) for row in rows] == [
            (finding.name, finding.verdict) for finding in report.checks
        ]
        numbers = {row["check"]: row["number"] for row in rows}
        assert numbers["residual beyond top-k"] == named["residual beyond top-k"].numbers["share"]
        assert numbers["ranking stability"] is None
        assert [finding.name for finding in report.checks if finding.verdict == "not measured"] == ["ranking stability"]


def test_rankings_that_depend_on_one_row_are_reported(plain, of_plain):
    named = by_name(of_plain)
    for kernel in ("output_layer", "embedding", "knn"):
        square_NE = plain.array_rows(f"relevance_{kernel}", np.arange(plain.n_rows)).astype(np.float64) ** 2
        share_E = square_NE.max(axis=0) / np.maximum(square_NE.sum(axis=0), 1e-300)
        assert named[f"tail, {kernel}"].numbers["median"] == pytest.approx(np.median(share_E))
        assert named[f"tail, {kernel}"].verdict == ("healthy" if np.median(share_E) <= 0.2 else "look")


@pytest.fixture(scope="module")
def widest(root):
    """Build with all probabilities and sketches of maximum width."""
    features = PAPER_TOO | {"hidden_width": 16, "residual_width": 4096, "top_k": 300}
    return ArtifactReader.open(build_artifact(world(root / "world", features=features), root / "widest"))


@pytest.fixture(scope="module")
def of_widest(widest):
    return by_name(check(widest, rows=40, subsets=40, protocol=ALL))


def test_a_sketch_as_wide_as_the_features_has_no_error(of_widest):
    named = of_widest
    assert named["hidden sketch"].numbers["error"] < 1e-4  # the projection is the identity
    assert named["hidden sketch"].numbers["ranks"] == pytest.approx(1.0)
    assert named["hidden sketch"].verdict == "healthy"
    assert 1e-4 < named["residual sketch"].numbers["error"] < 0.1


@pytest.fixture(scope="module")
def narrow(root):
    """Build with sketches of width 4, which approximate norms but not their order."""
    features = PAPER_TOO | {"hidden_width": 4, "residual_width": 4, "top_k": 300}
    return ArtifactReader.open(build_artifact(world(root / "world", features=features), root / "narrow"))


def test_a_sketch_that_loses_the_order_is_reported_and_a_wider_one_is_healthy(narrow, of_widest):
    named = by_name(check(narrow, rows=40, subsets=40, protocol=ALL))
    for half in ("hidden", "residual", "product"):
        numbers = named[f"{half} sketch"].numbers
        assert numbers["error"] < 2 * np.sqrt(2 / 4)  # which alone would have passed
        assert numbers["ranks"] < MIN_RANK_CORRELATION
        assert named[f"{half} sketch"].verdict == "look"
        assert f"a larger features.{WIDTH_SETTINGS[half]}" in named[f"{half} sketch"].advice
        assert of_widest[f"{half} sketch"].verdict == "healthy"


def test_both_sources_of_features_agree_if_not_all_positions_are_used(root):
    features, answers = PAPER_TOO | {"positions": "stride:3", "summary_positions": "stride:3"}, []
    for keep in (False, True):
        settings = world(root / "world", features=features, keep_features=keep)
        art = ArtifactReader.open(build_artifact(settings, root / f"strided-{keep}"))
        answers.append(by_name(check(art, rows=32, subsets=20, protocol=ALL)))
    for name in ("pooled summaries", "product sketch"):
        assert answers[1][name].numbers == pytest.approx(answers[0][name].numbers, abs=0.05)


def test_a_summary_of_the_only_gradient_position_has_share_one(root, all_of_plain):
    """Measure the share of the stored summary over the positions of the gradient."""
    features = PAPER_TOO | {"summary_positions": "tail:1", "positions": "tail:1"}
    art = ArtifactReader.open(build_artifact(world(root / "world", features=features), root / "last"))
    last_position = by_name(check(art, rows=32, subsets=5, protocol=ALL))["pooled summaries"]
    assert last_position.numbers["share"] == pytest.approx(1.0)
    assert last_position.verdict == "healthy"
    last_32 = by_name(all_of_plain)["pooled summaries"]
    assert last_32.numbers["share"] < 0.5  # the last 32 positions of up to 47
    assert last_32.verdict == "look"


def test_the_share_is_measured_in_the_coordinates_of_the_token_kernel(plain):
    index = sample_rows(plain, 20, seed=0)
    features = sample_features(plain, index, reopen_source(plain))
    whitener = Whitener.fit(second_moments(plain.moments, "hidden"), tau=0.01, alpha=1.0, epsilon=0.3)
    at, root = features.batch, np.sqrt(whitener.precondition_V)
    hidden = (at.hidden_PH.numpy() - whitener.mean_H) @ whitener.map_HH
    residual = residuals_of(features.batch).toarray() * root
    shares = []
    for i in range(len(index)):
        mine = at.row_P.numpy() == i
        whole = np.einsum("th,tv->hv", hidden[mine], residual[mine]) / mine.sum()
        summary_hidden = (features.batch.summary.hidden_NH[i] - whitener.mean_H) @ whitener.map_HH
        summary = np.outer(summary_hidden, features.batch.summary.residual_NV[[i]].toarray()[0] * root)
        shares.append((whole * summary).sum() ** 2 / ((whole**2).sum() * (summary**2).sum()))
    assert ExactKernels.from_artifact(plain, features).summary_share == pytest.approx(np.mean(shares), rel=1e-5)


def test_an_artifact_with_only_the_pooled_kernel_is_measured_in_its_coordinates(root):
    art = ArtifactReader.open(
        build_artifact(world(root / "world", features={"rule": "paper", "sample_rows": 20}), root / "pooled")
    )
    pooled_rule = rule(name="p", match={"pooled": 1.0}, components={"joint.pair": -0.1})
    named = by_name(check(art, rows=32, subsets=10, protocol=pooled_rule))
    assert re.search(r"features\.kernels.*product_sketch", named["product sketch"].advice)
    for name in ("hidden sketch", "residual sketch", "pooled summaries"):
        assert named[name].verdict != "not measured"


def test_missing_tokens_or_model_give_advice_and_stored_features_need_neither(root, plain, with_features, tmp_path):
    def without(artifact, part):
        place = shutil.copytree(artifact.path, tmp_path / f"{artifact.path.name}-without-{part}")
        shutil.rmtree(place / part)
        return check(ArtifactReader.open(place), rows=16, subsets=5, protocol=ALL)

    named = by_name(without(plain, "tokens"))
    for name in GEOMETRY | {"residual beyond top-k", "pooled summaries"}:
        assert named[name].verdict == "not measured"
        assert "keep_tokens: true" in named[name].advice
    assert all(has_healthy_range(finding) for finding in named.values())
    result = without(with_features, "tokens")
    named = by_name(result)
    assert result.source == "kept features"
    assert named["product sketch"].verdict != "not measured"
    assert named["batch invariance"].verdict == "not measured"
    settings = world(root / "gone", features={"kernels": EVERY})
    art = ArtifactReader.open(build_artifact(settings, tmp_path / "art"))
    shutil.rmtree(settings.model.path)  # it is not looked up on a hub
    named = by_name(check(art, rows=16, subsets=5, protocol=ALL))
    assert "no such local model" in named["batch invariance"].advice
    assert named["batch invariance"].advice == named["product sketch"].advice


def test_a_model_that_mixes_rows_of_a_batch_is_detected(plain, monkeypatch):
    def shifted(origin, index):
        pooled = features_one_by_one(origin, index)
        return replace(pooled, hidden_NH=pooled.hidden_NH + 0.01)

    monkeypatch.setattr(checking, "features_one_by_one", shifted)
    finding = by_name(check(plain, rows=16, subsets=5))["batch invariance"]
    assert finding.verdict == "look"
    assert "model.dtype: float32" in finding.advice


def test_subsets_and_ranking_of_retraining_runs_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "UNITS", {"sciq": UNITS["sciq"], "pooled": UNITS["boolq"]})
    art = write_artifact(tmp_path / "art")
    env = write_environment(tmp_path / "env", art, lambda b, seed, target: float(b))
    health = check(art, rows=60, subsets=12, runs=env)
    stable = [finding for finding in health.checks if finding.name.startswith("ranking stability, ")]
    assert {finding.name for finding in stable} == {"ranking stability, sciq", "ranking stability, pooled"}
    assert all(0 <= finding.numbers["accuracy"] <= 1 for finding in stable)

    index = sample_rows(art, 60, seed=0)

    def weights_of(rows, subsets):
        return sample_weights(SampledArtifact(art, rows, GraspError(""), GraspError(""), env, subsets, seed=0))

    weights = weights_of(index, 12)
    masks = np.concatenate([block.weights_BN.toarray() for block in Alignment.from_runs(env, art).blocks])
    for mine, mask in zip(weights, masks, strict=False):
        np.testing.assert_allclose(mine, mask[index] / mask[index].sum())
    with pytest.raises(RunsError, match=r"\b1 of the sample"):
        weights_of(np.flatnonzero(masks[:3].sum(axis=0) < 2)[:1], 3)


def test_an_image_classifier_is_checked_in_the_same_way(tmp_path):
    settings = image_settings(tmp_path / "w", features__kernels=["output_layer", "pooled", *SKETCHES])
    art = ArtifactReader.open(build_artifact(build_settings(settings), tmp_path / "art"))
    refused_code = by_name(check(art, rows=30, subsets=10))["batch invariance"]
    assert "run only at your own request" in refused_code.advice
    overrides = {"model": {"classifier": {"factory": art.manifest.settings["model"]["classifier"]["factory"]}}}
    named = by_name(check(art, rows=30, subsets=10, overrides=overrides, protocol=ALL))
    assert named["pooled summaries"].numbers["share"] == pytest.approx(1.0)  # one position per image
    assert named["product sketch"].verdict != "not measured"
    assert named["residual beyond top-k"].numbers["share"] == pytest.approx(0.0, abs=1e-6)
    assert named["batch invariance"].verdict == "healthy"


def test_the_command(plain, root):
    out = succeed("info", plain.path, "--check").out
    assert "model" in out
    assert " checks " in out
    assert out.count("    healthy: ") == len(PLAIN)
    assert len(json.loads(succeed("info", plain.path, "--check", "--json").out)["checks"]) == len(PLAIN)
    assert "--runs: requires --check" in refused("info", plain.path, "--runs", plain.path)
    few = build_artifact(world(root / "small", n_rows=3), root / "tiny")
    assert re.search(r"check: .*\b8\b", refused("info", few, "--check"))
    with pytest.raises(SettingsError, match=r"\b3 rows.*64 subsets.*\b8\b.*\b3\b"):
        check(plain, rows=3)
