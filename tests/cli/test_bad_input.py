"""Every mistake gives exit code 2 and one line with location, value, expectation and remedy."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grasp.artifact.writer import lock_artifact
from tests.cli.grasp_command import assert_same_arrays, refused, succeed
from tests.mentions import assert_mentions
from tests.pipeline.world import write_corpus


@pytest.fixture
def build(root, tmp_path):
    """Return a function that gives the arguments of a build of the world with changed settings."""

    def arguments(*changes: object) -> list[object]:
        return ["build", "--config", root / "settings.yaml", "--out", tmp_path / "new", *changes]

    return arguments


# corpus


def test_empty_documents_and_rows_of_one_token_are_skipped_counted_and_listed(build, tmp_path):
    records = [{"doc_id": "hole", "text": ""}, {"doc_id": "blank", "text": " \n\t"}, {"doc_id": "void", "text": ""}]
    records += [{"doc_id": "short", "input_ids": [3]}, {"doc_id": "none", "input_ids": []}]
    records += [{"row_id": "a", "text": "water light"}, {"row_id": "b", "text": "cell river energy"}]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    built = succeed(*build("--corpus", tmp_path / "corpus.jsonl"))
    note = "left out: 3 empty documents, 1 documents of white space, 1 rows of one token"
    assert built.lines[1].startswith(note)
    command = built.lines[-1].removeprefix("next: grasp ")  # no row has 32 tokens
    assert "--min-tokens" not in command
    succeed(*shlex.split(command))
    message = refused(*shlex.split(command), "--min-tokens", 32)
    assert message.endswith("has as many tokens; the longest has 8")
    assert note in succeed("info", tmp_path / "new").lines
    skipped = json.loads((tmp_path / "new/manifest.json").read_text())["skipped"]["rows"]
    assert skipped["counts"] == {"empty": 3, "whitespace": 1, "one_token": 1}
    assert skipped["ids"] == {"empty": ["hole", "void", "none"], "whitespace": ["blank"], "one_token": ["short"]}


# model


LACKS = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        ({"model.norm.weight": None}, LACKS),
        ({"model.norm.weight": torch.ones(7)}, LACKS),
        ("cut short", "causal LM"),
        ({"num_attention_heads": 0}, ""),
        ({"vocab_size": -1}, ""),
        ({"intermediate_size": 10**15}, ""),
        ("[1, 2]", ""),
        ("[" * 100_000, ""),
    ],
)
def test_a_damaged_checkpoint(build, root, tmp_path, damage, word):
    model = Path(shutil.copytree(root / "model", tmp_path / "model"))
    config, weights = model / "config.json", model / "model.safetensors"
    if damage == "cut short":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif isinstance(damage, str):
        config.write_text(damage)
    elif word:
        changed = {name: tensor for name, tensor in (load_file(weights) | damage).items() if tensor is not None}
        save_file(changed, weights, metadata={"format": "pt"})
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | damage))
    message = refused(*build("--model", model))
    assert message.startswith(f"model.path: `{model}` ")
    assert word in message


# settings


@pytest.mark.parametrize(
    ("assignment", "word"),
    [
        ("features.tua=1", "features.tua: no such field, got 1 (did you mean tau?)"),
        ("features.tau.x=1", "`tau` holds a value, expected a group of settings"),
        ("features.tau=.nan", "features.tau: Input should be a finite number"),
        ("features.alpha=2", "features.alpha: expected 1 or 0.5"),
        ("features.summary_positions=tail:4", "features.summary_positions: expected all as `positions`"),
        ("targets.names=sciq", "targets.names: expected a list"),
        ("corpus.prompt=Q: {question}", ": or {}"),
        ("features.tau", "--set: got `features.tau`, expected name=value"),
        ("a=!!python/name:os.kill", "--set a: not YAML: could not determine a constructor"),
        ("model.path=a\nb", "model.path: `a b`: no such file or directory"),
        (f"features.tau={'[' * 3000}{']' * 3000}", "--set features.tau: not YAML: maximum recursion depth"),
    ],
)
def test_a_wrong_setting(build, assignment, word):
    assert word in refused(*build("--set", assignment))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"- 1", "got list, expected a mapping of settings"),
        (b"a: [", "not YAML: while parsing a flow node"),
        (b"a: 1\nb: {x: 1}\n\na: 2\n", "line 4: duplicate key 'a', first in line 1"),
        (b"\xff", "not YAML: "),
        (b"a: " + b"x" * (5 << 20), "more than 4,194,304 bytes"),
        (None, "no such settings file"),
    ],
)
def test_an_invalid_settings_file_is_refused(tmp_path, content, word):
    path = tmp_path / "settings.yaml"
    if content is not None:
        path.write_bytes(content)
    assert refused("build", "--config", path, "--out", tmp_path / "art").startswith(f"{path}: {word}")


# what is written


def test_an_artifact_at_an_unusable_path_is_refused(root, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file/art"):
        message = refused("build", "--config", root / "settings.yaml", "--out", out)
        assert re.match(rf"{re.escape(str(out))}: (is a file|cannot be written to)", message)


def test_a_second_build_on_a_locked_artifact(root, tmp_path):
    arguments = ("build", "--config", root / "settings.yaml", "--out", tmp_path / "art")
    with lock_artifact(tmp_path / "art"):
        assert f"{tmp_path / 'art'}: locked by process {os.getpid()} on " in refused(*arguments)
    succeed(*arguments)


# damaged artifacts


# full disks and kills


def test_a_disk_that_is_full(root, tmp_path, small_disk):
    """Fill the disk in the middle of a shard; tests/store has the laws of every kind of store."""
    changes = ["--set", "features.residual_width=1024", "--set", "shard_rows=8"]
    arguments = ["build", "--config", root / "settings.yaml", *changes, "--out"]
    out = small_disk(500) / "art"
    message = refused(*arguments, out)
    match = re.match(rf"{out}: shards/0000([1-9]) .*; \1 of 9 shards are finished", message)
    assert match, message
    assert_mentions(message, "no space left", "--resume")
    assert f"{match[1]} of 9 shards" in refused("info", out)
    small_disk(20_000)
    succeed("build", "--resume", "--out", out)
    succeed(*arguments, tmp_path / "whole")
    assert_same_arrays(out, tmp_path / "whole")


@pytest.mark.slow  # a second interpreter loads torch and transformers
@pytest.mark.parametrize(
    ("positions", "written"), [(200, "shards/*.json"), (10**6, "work/*/batches/shard-*.json"), (10**6, "shards/*.json")]
)
def test_a_killed_build_continues_with_resume(root, tmp_path, positions, written):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 120)
    changes = ["--set", "shard_rows=4", "--set", f"features.sample_positions={positions}"]
    arguments = ["build", "--config", root / "settings.yaml", "--corpus", corpus, *changes, "--out"]
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "grasp", *map(str, arguments), str(out), "--untrained"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as child:
        deadline = time.monotonic() + 300
        while len(list(out.glob(written))) < 3:
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert not (out / "manifest.json").exists()
    resumed = succeed("build", "--resume", "--out", out)
    assert "tokenizing" not in resumed.err  # tokens are stored already
    succeed(*arguments, tmp_path / "whole")
    assert_same_arrays(out, tmp_path / "whole")
