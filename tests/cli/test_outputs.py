"""No command replaces what it reads, or anything but a regular file."""

import os
from pathlib import Path

import pytest

from tests.artifact.artifact_world import contents
from tests.cli.grasp_command import refused

COMMANDS = {
    "score": ("score", "ART", "--target", "facts", "--out"),
    "predict": ("predict", "ART", "--by", "topic", "--out"),
    "select": ("select", "ART", "--budget", "20%", "--target", "facts", "--ids-out"),
    "mix": ("mix", "ART", "--by", "topic", "--target", "facts", "--weights"),
    "report": ("report", "ART", "--out"),
    "detect": ("detect", "ART", "--target", "facts", "--label", "topic", "--out"),
    "diagnose": ("diagnose", "ART", "--json"),
}


@pytest.fixture
def reads(root, art) -> dict[str, bytes]:
    return contents(root)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_replaces_nothing_that_was_read(command, root, art, reads, tmp_path):
    words = [str(art) if word == "ART" else word for word in COMMANDS[command]]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(root / "corpus.jsonl")
    for path, why in {
        root / "corpus.jsonl": "which is the corpus of the artifact",
        root / "facts.jsonl": "which is a target of the artifact",
        root / "model" / "config.json": "which is the model of the artifact",
        art / "manifest.json": "which is the artifact",
        art / "new.parquet": "which is the artifact",
        tmp_path / "pipe": "which is a pipe",
        tmp_path / "link": "which is a symbolic link",
        Path("/dev/null"): "which is a device",
        tmp_path: "which is a directory",
    }.items():
        message = refused(*words, path)
        assert message.startswith(f"{words[-1]}: ")
        assert why in message
    assert contents(root) == reads
    assert Path("/dev/null").is_char_device()
