"""Every mistake gets exit code 2 and one line that says where, what was found, what was expected and what to do."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import lock_artifact
from grasp.cli.console import program
from grasp.models.tokenizer import train_tokenizer
from tests.cli.grasp_command import assert_same_arrays, refused, run, succeed
from tests.extract.world import texts, write_corpus

TWO_ROWS = [{"row_id": "a", "text": "water light"}, {"row_id": "b", "text": "cell river energy"}]


def write_lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def build(root, tmp_path):
    """A build over the world with some settings changed, into a new artifact; gives its arguments."""

    def arguments(*changes: object) -> list[object]:
        return ["build", "--config", root / "settings.yaml", "--out", tmp_path / "new", *changes]

    return arguments


# corpus


def test_once_the_corpus_is_mended_the_same_command_works(build, tmp_path):
    corpus = write_lines(tmp_path / "corpus.jsonl", [*TWO_ROWS, {"row_id": "c", "input_ids": [3, 999]}])
    refused(*build("--corpus", corpus))
    refused(*build("--corpus", corpus, "--targets", "/no/such/units.jsonl"))
    write_lines(corpus, TWO_ROWS)
    succeed(*build("--corpus", corpus))


def test_empty_documents_and_rows_of_one_token_are_skipped_counted_and_listed(build, tmp_path):
    records = [{"doc_id": "hole", "text": ""}, {"doc_id": "blank", "text": " \n\t"}, {"doc_id": "void", "text": ""}]
    records += [{"doc_id": "short", "input_ids": [3]}, {"doc_id": "none", "input_ids": []}, *TWO_ROWS]
    outcome = succeed(*build("--corpus", write_lines(tmp_path / "corpus.jsonl", records)))
    assert outcome.lines[1] == (
        "left out: 3 empty documents, 1 documents of white space, 1 rows of one token "
        f"(listed in {tmp_path / 'new/manifest.json'})"
    )
    skipped = json.loads((tmp_path / "new/manifest.json").read_text())["skipped"]["rows"]
    assert skipped["counts"] == {"empty": 3, "whitespace": 1, "one_token": 1}
    assert skipped["ids"] == {"empty": ["hole", "void", "none"], "whitespace": ["blank"], "one_token": ["short"]}
    assert ArtifactReader.open(tmp_path / "new").n_rows == 2
    assert (
        "left out: 3 empty documents, 1 documents of white space, 1 rows of one token"
        in succeed("info", tmp_path / "new").lines
    )


# model


@pytest.fixture
def broken_model(root, tmp_path) -> Path:
    return Path(shutil.copytree(root / "model", tmp_path / "model"))


def changed_weights(model: Path, change) -> None:
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def test_a_tokenizer_larger_than_the_models_vocabulary(build, tmp_path):
    tokenizer = train_tokenizer(texts(50), vocab_size=320)
    assert len(tokenizer) == 320
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert refused(*build("--set", f"model.tokenizer={tmp_path / 'tokenizer'}")) == (
        f"{tmp_path / 'tokenizer'}: the tokenizer has 320 tokens, the model's head 300; they do not belong together: "
        "pass the model's own tokenizer"
    )


def cut_short(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def configured(**changes):
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | changes))

    return change


LACKS = "lacks 1 weights of its LlamaForCausalLM, or has them in another shape: model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda model: changed_weights(model, lambda held: held.pop("model.norm.weight")), LACKS),
        (lambda model: changed_weights(model, lambda held: held.update({"model.norm.weight": torch.ones(7)})), LACKS),
        (cut_short, "is not a causal LM that transformers can load"),
        (configured(num_attention_heads=0), ""),
        (configured(model_type=["a"]), ""),
        (configured(vocab_size=-1), ""),
        (configured(num_hidden_layers=10**7), ""),
        (configured(intermediate_size=10**15), ""),
        (lambda model: (model / "config.json").write_text("[1, 2]"), ""),
        (lambda model: (model / "config.json").write_text("[" * 100_000), ""),
    ],
)
def test_a_damaged_checkpoint(build, broken_model, damage, word):
    damage(broken_model)
    found = refused(*build("--model", broken_model))
    assert found.startswith(f"model.path: `{broken_model}` ")
    assert word in found


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (["--model", "small.gguf"], "model.path: `small.gguf`: no such file or directory; expected a checkpoint"),
        (["--model", __file__], "is a file; expected a directory, a GGUF file or the name"),
        (["--set", "model.tokenizer=/no/tok"], "model.tokenizer: `/no/tok`: no such file or directory; expected"),
        (["--set", "model.device=gpu"], "model.device: got `gpu`, expected auto, cpu, cuda or cuda:N"),
        (["--set", "model.device=cuda:99"], "model.device: got `cuda:99`, but torch sees"),
        (["--max-length", "512"], "rows of 512 tokens, the model has 128 positions; set 128 or less"),
    ],
)
def test_a_model_that_cannot_be_used(build, changes, word):
    assert word in refused(*build(*changes))


# settings


def test_what_is_missing_is_named_with_its_flag(tmp_path):
    advice = "; give it as an argument, or in the settings (--set, --config)"
    out = tmp_path / "art"
    missing = "missing --model (model.path), --corpus (corpus.path), --targets (targets.names)"
    assert refused("build", "--out", out) == f"build: {missing}{advice}"
    assert refused("build", "--out", out, "--resume") == (
        f"build --resume: there is no {out / 'run.yaml'}: {missing}{advice}"
    )
    assert refused("build", "--out", out, "--corpus", "c", "--targets", "sciq") == (
        f"build: missing --model (model.path){advice}"
    )
    assert refused("build", "--out", out, "--set", "model.path=m", "--corpus", "c", "--targets", " , ") == (
        f"build: missing --targets (targets.names){advice}"
    )
    assert not out.exists()


NINE = [", ".join([f"*a{i - 1}" if i else "x"] * 9) for i in range(9)]
BOMB = "model.path=[" + ", ".join(f"&a{i} [{nine}]" for i, nine in enumerate(NINE)) + "]"


@pytest.mark.parametrize(
    ("assignment", "word"),
    [
        ("features.tua=1", "features.tua: no such field, got 1 (did you mean tau?)"),
        ("features.tau.x=1", "`tau` holds a value, expected a group of settings"),
        ("features.tau=.nan", "features.tau: Input should be a finite number"),
        ("features=3", "features: expected fields with names"),
        ("features.pooling=tail:0", "features.pooling: expected all, tail:N or stride:N"),
        ("features.alpha=2", "features.alpha: expected 1 or 0.5"),
        ("features.seed=-1", "features.seed: Input should be greater than or equal to 0"),
        ("targets.names=sciq", "targets.names: expected a list"),
        ("corpus.prompt=Q: {question}", "a text with : or {}"),
        ("features.tau", "--set: got `features.tau`, expected name=value"),
        ("features.tau={", "--set features.tau: not YAML"),
        ("a=!!python/name:os.kill", "--set a: not YAML: could not determine a constructor"),
        ("model.path=a\nb", "model.path: `a b`: no such file or directory"),
        ("features.tau=2024-13-45", "--set features.tau: not YAML: month must be in 1..12"),
        (f"targets.seed={'9' * 5000}", "--set targets.seed: not YAML: Exceeds the limit"),
        (f"features.tau={'[' * 3000}{']' * 3000}", "--set features.tau: line 1: nested deeper than 50"),
        ("model.path=&a [*a]", "--set model.path: line 1: a value that holds itself"),
        (BOMB, "--set model.path: line 1: more than 100,000 values"),
    ],
)
def test_a_wrong_setting(build, assignment, word):
    assert word in refused(*build("--set", assignment))


def test_every_wrong_setting_is_in_one_message(build):
    found = refused(*build("--set", "features.tau=0", "--set", "shard_rows=x", "--dtype", "int4", "--match", "most"))
    assert found.count("; ") == 3
    assert all(name in found for name in ("features.tau", "shard_rows", "model.dtype", "features.match"))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"- 1", "got list, expected a mapping of settings"),
        (b"a: [", "not YAML: while parsing a flow node"),
        (b"a: 1\nb: {x: 1}\n\na: 2\n", "line 4: 'a' is there already, in line 1"),
        (b"a:\n  b: {x: 1, y: [{z: 1, z: 1}]}\n", "line 2: 'z' is there already, in line 2"),
        (b"\xff", "not YAML: "),
        (b"a: " + b"x" * (5 << 20), "more than 4,194,304 bytes"),
        (None, "no such settings file"),
    ],
)
def test_a_settings_file_that_is_none(tmp_path, content, word):
    path = tmp_path / "settings.yaml"
    if content is not None:
        path.write_bytes(content)
    assert refused("build", "--config", path, "--out", tmp_path / "art").startswith(f"{path}: {word}")


# what is written


def test_an_artifact_where_none_can_be(root, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file/art"):
        assert re.fullmatch(
            rf"{re.escape(str(out))}: (is a file, expected a directory|cannot be written to \(.*\)); choose another .*",
            refused("build", "--config", root / "settings.yaml", "--out", out),
        )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_place_that_refuses_is_told_without_a_traceback(art, tmp_path, monkeypatch):
    monkeypatch.setattr("grasp.files.temporary_path", lambda path: path.with_name(f"{path.name}.part"))
    (tmp_path / "out.parquet.part").symlink_to("/dev/full")
    assert "No space left on device" in refused("predict", art, "--by", "topic", "--out", tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


def test_a_second_build_on_a_locked_artifact(root, tmp_path):
    with lock_artifact(tmp_path / "art"):
        assert re.fullmatch(
            rf"{re.escape(str(tmp_path / 'art'))}: locked by process {os.getpid()} on \S+; two writers cannot share "
            "one directory: wait for it or stop it",
            refused("build", "--config", root / "settings.yaml", "--out", tmp_path / "art"),
        )
    succeed("build", "--config", root / "settings.yaml", "--out", tmp_path / "art")


def test_a_second_build_and_what_add_target_does_not_take(root, art):
    assert refused("build", "--config", root / "settings.yaml", "--out", art, "--max-length", 9) == (
        f"{art}: holds a finished artifact, built with other settings: corpus.max_length: was 48, now 9; choose "
        f"another --out, give the old settings, or delete {art}"
    )
    assert refused("build", "--out", art, "--add-target", root / "facts.jsonl") == (
        f"{art}: has targets ['facts'] already; add only targets that it does not have, or build a new artifact"
    )
    assert "--add-target: got corpus as well; a target is added with the artifact's own settings" in refused(
        "build", "--out", art, "--add-target", "sciq", "--max-length", 9
    )
    assert refused("build", "--out", art, "--add-target", "sciq", "--set", "targets.sed=1") == (
        "targets: sed: no such field, got 1 (did you mean seed?)"
    )
    assert refused("build", "--out", art, "--add-target", "sciq", "--set", "targets=1").startswith("--add-target: got")
    assert "no such artifact" in refused("build", "--out", root / "none", "--add-target", "sciq")
    assert not (root / "none").exists()


# damaged artifacts


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_verify_names_every_broken_file(own_art):
    flip(own_art / "arrays/relevance_token/00003.npy")
    (own_art / "arrays/relevance_token/00005.npy").unlink()
    os.truncate(own_art / "rows.parquet", 100)
    found = run("verify", own_art).lines
    assert re.match(r"broken: arrays/relevance_token/00003.npy: damaged: checksum \w+, expected \w+", found[0])
    assert found[1] == "broken: arrays/relevance_token/00005.npy: missing"
    assert re.match(r"broken: rows.parquet: truncated: 100 of \d+ bytes", found[2])
    assert found[3].endswith(": 3 broken")


ADVICE = "`grasp verify` names everything that is broken"


def test_reading_a_truncated_or_missing_chunk_says_so(own_art):
    chunk = own_art / "arrays/relevance_token/00003.npy"
    size = chunk.stat().st_size
    os.truncate(chunk, size - 7)
    for asked in (["score", own_art, "--target", "facts"], ["predict", own_art, "--by", "topic"]):
        assert refused(*asked) == f"{chunk}: truncated: {size - 7} of {size} bytes; {ADVICE}"
    chunk.unlink()
    assert refused("score", own_art, "--target", "facts") == f"{chunk}: missing; {ADVICE}"


@pytest.mark.parametrize(
    "command", [["info"], ["verify"], ["score", "--target", "facts"], ["predict", "--by", "topic"]]
)
def test_what_is_no_artifact(art, tmp_path, command):
    name, *flags = command
    hint = "make one with `grasp build --out"
    scorer = "; a scorer is there once `grasp distil` has ended" if name == "info" else ""
    said = f"{tmp_path / 'no'}: no such artifact; {hint} {tmp_path / 'no'}`{scorer}"
    assert refused(name, tmp_path / "no", *flags) == said
    assert refused(name, tmp_path, *flags) == f"{tmp_path}: not an artifact (no build.json); {hint} {tmp_path}`"
    assert f"{art / 'manifest.json'}: not an artifact" in refused(name, art / "manifest.json", *flags)


# full disks and kills


@pytest.fixture
def small_disk(tmp_path):
    """A disk of so many kilobytes; call it again to enlarge it."""
    place = tmp_path / "disk"
    place.mkdir()

    def sized(kilobytes: int) -> Path:
        options = f"size={kilobytes}k" + (",remount" if place.is_mount() else "")
        mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
            pytest.skip("mounting a small disk needs root")
        return place

    yield sized
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)


FULL = "no space left on the device"
GO_ON = "free space and run again with --resume"


def test_a_disk_that_is_full_in_the_middle_of_a_shard(root, tmp_path, small_disk):
    wide = ["--set", "features.product_width=1024", "--set", "features.moment_rows=2"]
    asked = ["build", "--config", root / "settings.yaml", *wide, "--out"]
    out = small_disk(500) / "art"
    message = refused(*asked, out)
    full = rf"{out}: shards/0000(\d) was not written: {FULL}; \1 of 9 shards are finished; {GO_ON}"
    found = re.fullmatch(full, message)
    assert found
    assert int(found[1]) > 0
    assert f"{found[1]} of 9 shards finished" in succeed("info", out).lines[0]
    assert succeed("verify", out).lines[-1].endswith("all whole")
    small_disk(20_000)
    succeed("build", "--resume", "--out", out)
    succeed(*asked, tmp_path / "whole")
    assert_same_arrays(out, tmp_path / "whole")


def test_a_disk_that_is_full_during_the_forward_pass(root, art, small_disk):
    out = small_disk(140) / "art"
    found = refused("build", "--config", root / "settings.yaml", "--out", out)
    assert re.fullmatch(
        rf"{out}/work/\w+/features: shard-0000(\d) was not written: {FULL}; \1 parts are whole; "
        f"{GO_ON}",
        found,
    )
    small_disk(20_000)
    succeed("build", "--resume", "--out", out)
    assert_same_arrays(out, art)


def test_a_disk_without_room_for_the_rows(root, art, small_disk):
    out = small_disk(60) / "art"
    found = refused("build", "--config", root / "settings.yaml", "--out", out)
    assert re.fullmatch(
        rf"{out}/tokens: shard-0000(\d) was not written: {FULL}; \1 parts are whole; {GO_ON}",
        found,
    )
    small_disk(20_000)
    succeed("build", "--resume", "--out", out)
    assert_same_arrays(out, art)


@pytest.mark.parametrize(
    ("verb", "place", "asked", "left"),
    [
        (
            "build",
            "grasp.extract.build.build",
            ("--out", "new", "--model", "m"),
            "what was finished is kept; the same command goes on from there",
        ),
        ("score", "grasp.open", ("art",), "a result is written when it is whole, so this one was not"),
    ],
)
def test_ctrl_c_says_what_is_left(verb, place, asked, left, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(place, stop, raising=False)  # grasp loads its names when they are asked for
    outcome = run(verb, *asked)
    assert (outcome.code, outcome.complaints) == (130, [f"stopped: {left}"])


@pytest.mark.parametrize(
    ("found", "called", "expected"),
    [
        ("/usr/bin/grasp", "/a b/.venv/bin/grasp", "grasp"),
        (None, ".venv/bin/grasp", ".venv/bin/grasp"),
        (None, "/a b/.venv/bin/grasp", "'/a b/.venv/bin/grasp'"),
        (None, "src/grasp/__main__.py", f"{sys.executable} -m grasp"),
    ],
)
def test_what_is_to_be_typed_next_is_there_to_be_typed(found, called, expected, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _: found)
    monkeypatch.setattr(sys, "argv", [called])
    assert program() == expected


@pytest.mark.slow  # a second interpreter loads torch and transformers
def test_a_build_that_is_killed_goes_on_with_resume(root, tmp_path):
    corpus = write_corpus(tmp_path / "corpus.jsonl", 120)
    asked = ["build", "--config", root / "settings.yaml", "--corpus", corpus, "--set", "shard_rows=4", "--out"]
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "grasp", *map(str, asked), str(out), "--untrained"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as child:
        deadline = time.monotonic() + 60
        while len(list(out.glob("work/*/features/shard-*.json"))) < 3:
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    assert not (out / "manifest.json").exists()
    resumed = succeed("build", "--resume", "--out", out)
    assert "cutting into rows" not in resumed.err  # tokenised already
    succeed(*asked, tmp_path / "whole")
    assert_same_arrays(out, tmp_path / "whole")
