"""No command replaces its inputs, or anything other than a regular file."""

import os
import re
from pathlib import Path

import pytest

import grasp
import grasp.vision.detect
from grasp.errors import SettingsError
from tests.artifact.artifact_world import contents
from tests.cli.grasp_command import refused, succeed
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


def test_the_extension_of_an_output_is_checked_before_the_work(art, tmp_path, monkeypatch):
    for command, owner in (("score", grasp.Artifact), ("predict", grasp.Artifact), ("detect", grasp.vision.detect)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, command, None)  # who begins to work fails
            words = [str(art) if word == "ART" else word for word in COMMANDS[command]]
            assert_mentions(refused(*words, tmp_path / "x.txt"), "x.txt", ".parquet", ".csv")
    monkeypatch.setattr("grasp.predict.predictor.Predictor.from_artifact", None)
    for verb in (lambda out: grasp.open(art).score("facts", out=out), lambda out: grasp.open(art).predict(out=out)):
        with pytest.raises(SettingsError, match=r"out: .*x\.txt.*\.parquet"):
            verb(tmp_path / "x.txt")
        with pytest.raises(SettingsError, match=r"out: .*facts\.jsonl.*target"):
            verb(art.parent / "facts.jsonl")


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


def test_a_page_does_not_replace_runs(art, tmp_path):
    (tmp_path / "m.csv").write_text("run,earth,life,sky\na,0.5,0.3,0.2\nb,0.2,0.5,0.3\nc,0.3,0.2,0.5\n")
    (tmp_path / "r.csv").write_text("run,facts/loss\na,3\nb,2.5\nc,2\n")
    command = ["runs", "import", tmp_path / "m.csv", tmp_path / "r.csv", "--label", "topic", "--out"]
    succeed(*command, tmp_path / "runs")
    assert "already" in refused(*command, tmp_path / "runs")
    assert "already" in refused(*command, tmp_path / "m.csv")
    place = tmp_path / "runs"
    assert re.search(f"out: .*{place}", refused("report", art, "--runs", place, "--out", place / "new.html"))
