"""One report of everything, hostile text and all, made by the command itself, for all tests that only look at it."""

from pathlib import Path

import pytest

from grasp.monitor.record import MonitorRecord
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
    """art, env, trained, protocol.yaml and report.html: everything that a report can hold, of hostile text."""
    place = tmp_path_factory.mktemp("report")
    artifact = write_artifact(place / "art", topics=HOSTILE, text=[*(text or "" for text in HOSTILE), LINE])
    write_environment(place / "env", artifact)
    write_yaml(PROTOCOL, place / "protocol.yaml")
    write_training(place / "trained")
    flags = ["--runs", place / "env", "--protocol", place / "protocol.yaml", "--monitor", place / "trained"]
    succeed("report", place / "art", *flags, "--by", "topic,format", "--out", place / "report.html")
    return place


def write_training(path: Path) -> None:
    """Sources of hostile names: the first one helps, and the others hurt."""
    record = MonitorRecord(["source", HOSTILE[0]], path)
    for step in (10, 20):
        for k, source in enumerate(HOSTILE[:-1]):
            for measure in ("loss", f"loss/{HOSTILE[0]}"):
                record.add(step, measure, 3.0 - step / 100, source=source, rows=5, tokens=100)
            record.add(step, "effect", 0.001 if k else -0.001, 0.0005, source=source, target=HOSTILE[1])
        record.add(step, "target_loss", 2.0, target=HOSTILE[1])
    record.notes.append(HOSTILE[2])
    record.write()


@pytest.fixture(scope="session")
def page(place) -> Path:
    return place / "report.html"
