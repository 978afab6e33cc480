"""Files of the release before, and of this one, are read and say what they said; older ones are refused in one line."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

import grasp
from grasp.artifact.manifest import FORMAT_VERSION
from grasp.artifact.writer import ArraySpec, ArtifactWriter
from grasp.errors import ArtifactError, RunsError, SettingsError
from grasp.models.build_source import BuildSource
from grasp.predict.scoring_rule import load_protocol
from grasp.runs.retrained import RetrainedRuns
from grasp.select.summaries import MixtureSummary, SelectionSummary, read_summary
from tests.formats.make import numbers, unpacked

RELEASES = sorted(path for path in Path(__file__).parent.iterdir() if (path / "numbers.json").exists())
FILES = {
    "artifact": "artifact/manifest.json",
    "retrained": "retrained/environment.json",
    "runs": "runs/runs.json",
    "selection": "kept.json",
    "mixture": "mixture.json",
}


def versions(directory: Path) -> dict[str, int]:
    card = next((directory / "scorer").glob("*.json"))
    results = {name: json.loads((directory / file).read_text())["format_version"] for name, file in FILES.items()}
    return results | {"scorer": json.loads(card.read_text())["format_version"]}


def test_one_of_each_is_kept_as_this_version_writes_it():
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text()
    (now,) = [recorded for recorded in map(versions, RELEASES) if recorded["artifact"] == FORMAT_VERSION]
    for name, what in (("artifact", "artifact"), ("retrained", "retrained runs"), ("runs", "imported runs")):
        assert f"| {what} |" in page
        assert f"| {now[name]} | `format_version`" in next(line for line in page.splitlines() if f"| {what} |" in line)
    assert set(now.values()) == {FORMAT_VERSION, 1}


@pytest.mark.parametrize("release_dir", RELEASES, ids=lambda path: path.name)
def test_files_of_a_release_are_read_with_the_same_content(release_dir, tmp_path):
    release, release_dir = release_dir.name, unpacked(release_dir, tmp_path / "kept")
    record = json.loads((release_dir / "numbers.json").read_text())
    result = numbers(release_dir)
    assert result.pop("best") == record.pop("best")
    for name, value in result.items():
        assert value == pytest.approx(record[name], rel=1e-5, abs=1e-6)
    assert grasp.open(release_dir / "artifact").verify().ok
    art = grasp.open(release_dir / "artifact").files
    settings = BuildSource(art).settings  # what explain, --add-target and --export read
    assert settings.corpus.max_length == 48
    assert settings.model.add_bos_token is (False if release == "0.2.0" else None)  # that version added none
    assert settings.features.kernels == tuple(name.removeprefix("relevance_") for name in art.array_names)
    assert (settings.features.positions, settings.features.summary_positions) == ("all", "tail:32")
    assert set(art.kernels) == {"output_layer", "embedding", "knn", "pooled"}
    assert {"hidden.mean", "delta.gamma", "summary.count", "states.label", "loss"} <= set(art.moments)
    assert {f"{name}.total" for name in art.array_names} <= set(art.sums)
    for protocol in ("kept", "mixture"):
        rule = load_protocol(release_dir / f"{protocol}.protocol.yaml")
        assert rule.match == {"output_layer": 1.0, "embedding": 1.0, "knn": 1.0}
        assert rule.resolved_for(art.array_names, art.feature_settings).match == rule.match
    assert read_summary(SelectionSummary, release_dir / "kept.json", art).rows == 20
    assert len(read_summary(MixtureSummary, release_dir / "mixture.json", art).slices) == 3


@pytest.mark.parametrize("release_dir", RELEASES, ids=lambda path: path.name)
def test_targets_are_not_added_under_other_names(release_dir, tmp_path):
    """A refusal, since what is there would be damaged."""
    artifact = unpacked(release_dir, tmp_path / "kept") / "artifact"
    before = {path: path.read_bytes() for path in artifact.rglob("*") if path.is_file()}
    spec = {name: ArraySpec(2, "1", "none") for name in ("relevance_output_layer", "relevance_pooled")}
    units = pa.table({"unit_id": ["a", "b"], "target": ["more", "more"]})
    with pytest.raises(ArtifactError, match="added"):
        ArtifactWriter.extend(artifact, identity={}, units=units, arrays=spec, dtype="float32")
    assert {path: path.read_bytes() for path in artifact.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("name", "opened", "error", "remedy"),
    [
        ("artifact", lambda at: grasp.open(at / "artifact"), ArtifactError, r"version 99.*\b2\b"),
        ("retrained", lambda at: RetrainedRuns.open(at / "retrained"), RunsError, "version 99"),
        (
            "runs",
            lambda at: grasp.open_runs(at / "runs"),
            RunsError,
            r"version 99.*\b1\b",
        ),
        (
            "selection",
            lambda at: read_summary(SelectionSummary, at / "kept.json", grasp.open(at / "artifact").files),
            SettingsError,
            r"version 99.*\b2\b.*grasp select",
        ),
    ],
)
def test_a_number_that_is_not_read_is_refused_in_one_line(name, opened, error, remedy, tmp_path):
    unpacked(RELEASES[-1], tmp_path / "kept")
    path = tmp_path / "kept" / FILES[name]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}, indent=1) + "\n")
    with pytest.raises(error, match=remedy):
        opened(tmp_path / "kept")
