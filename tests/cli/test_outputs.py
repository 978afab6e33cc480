"""No command replaces its inputs, or anything other than a regular file."""

import os
import re
from pathlib import Path

import pytest

from tests.artifact.artifact_world import contents
from tests.cli.grasp_command import refused
from tests.mentions import assert_mentions

COMMANDS = {
    "score": ("score", "ART", "--target", "facts", "--out"),
    "predict": ("predict", "ART", "--by", "topic", "--out"),
    "select": ("select", "ART", "--budget", "20%", "--target", "facts", "--ids-out"),
    "mix": ("mix", "ART", "--by", "topic", "--target", "facts", "--weights"),
    "report": ("report", "ART", "--out"),
    "detect": ("detect", "ART", "--target", "facts", "--out"),
}


@pytest.fixture
def reads(root, art) -> dict[str, bytes]:
    return contents(root)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_does_not_replace_an_input(command, root, art, reads, tmp_path):
    words = [str(art) if word == "ART" else word for word in COMMANDS[command]]
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(root / "corpus.jsonl")
    for path, keywords in {
        root / "corpus.jsonl": ("corpus", "artifact"),
        root / "facts.jsonl": ("target", "artifact"),
        root / "model" / "config.json": ("model", "artifact"),
        art / "manifest.json": ("the artifact",),
        art / "new.parquet": ("the artifact",),
        tmp_path / "pipe": ("pipe",),
        tmp_path / "link": ("symbolic link",),
        Path("/dev/null"): ("device",),
        tmp_path: ("directory",),
    }.items():
        message = refused(*words, path)
        assert message.startswith(f"{words[-1]}: ")
        assert_mentions(message, *keywords)
    assert contents(root) == reads
    assert Path("/dev/null").is_char_device()


def test_files_passed_as_options_are_not_replaced(art, tmp_path):
    mine = tmp_path / "mine.parquet"
    mine.write_text("mine")
    for command, flag in (
        ("predict", "--subsets"),
        ("predict", "--protocol"),
        ("score", "--method-settings"),
        ("select", "--exclude"),
        ("report", "--mixture"),
    ):
        message = refused(command, art, flag, mine, "--out", mine)
        assert re.search(f"--out: .*{mine}.*{flag}", message), message
    assert mine.read_text() == "mine"


def test_an_output_directory_is_not_inside_an_input(art, root, reads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "rows.parquet").write_text("mine")
    for words in (("distil", art, "--out"), ("merge", art, art, "--out")):
        for place in (art, art / "new", tmp_path / "theirs", "", "/dev/null"):
            assert re.search(
                "the artifact|a part|already|not written by grasp|is a file|current directory",
                refused(*words, place),
            )
    assert contents(root) == reads
    assert contents(tmp_path) == {"theirs/rows.parquet": b"mine"}
