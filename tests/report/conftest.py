"""One report of everything, hostile text and all, made by the command itself, for all tests that only look at it."""

from pathlib import Path

import pytest

from grasp.yaml_files import write_yaml
from tests.cli.grasp_command import succeed
from tests.report.world import HOSTILE, LINE, write_artifact, write_environment

PROTOCOL = {
    "name": "with <weights>",
    "match": {"output_layer": 1.0, "pooled": 0.3},
    "negative": 0.5,
}


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """art, env, protocol.yaml and report.html: everything that a report can hold, of hostile text."""
    place = tmp_path_factory.mktemp("report")
    artifact = write_artifact(place / "art", topics=HOSTILE, text=[*(text or "" for text in HOSTILE), LINE])
    write_environment(place / "env", artifact)
    write_yaml(PROTOCOL, place / "protocol.yaml")
    flags = ["--runs", place / "env", "--protocol", place / "protocol.yaml"]
    succeed("report", place / "art", *flags, "--by", "topic,format", "--out", place / "report.html")
    return place


@pytest.fixture(scope="session")
def page(place) -> Path:
    return place / "report.html"
