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

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import lock_artifact
from grasp.cli.console import program
from grasp.models.tokenizer import train_tokenizer
from tests.cli.grasp_command import assert_same_arrays, refused, run, succeed
from tests.extract.world import texts, write_corpus
from tests.resigned import resign

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


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_for_which_the_model_computes_no_number_is_named(build, root, tmp_path, broken_model, value):
    (rare,) = AutoTokenizer.from_pretrained(broken_model)("Z")["input_ids"]  # a byte in no unit and in no other row
    changed_weights(broken_model, lambda weights: weights["model.embed_tokens.weight"][rare].fill_(value))
    lines = (root / "corpus.jsonl").read_text()
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(lines + json.dumps({"row_id": "culprit", "text": "water Z light"}) + "\n")
    found = refused(*build("--model", broken_model, "--corpus", corpus))
    assert re.match(r"row 'culprit'.*: the model computed NaN or infinity", found)
    assert not (tmp_path / "new/manifest.json").exists()


def test_a_tokenizer_larger_than_the_models_vocabulary(build, tmp_path):
    tokenizer = train_tokenizer(texts(50), vocab_size=320)
    assert len(tokenizer) == 320
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    assert refused(*build("--set", f"model.tokenizer={tmp_path / 'tokenizer'}")) == (
        f"{tmp_path / 'tokenizer'}: the tokenizer has 320 tokens, the model's head 300; they do not belong together: "
        "pass the model's own tokenizer"
    )


def test_a_checkpoint_that_lacks_weights_is_not_filled_with_random_numbers(build, broken_model):
    changed_weights(broken_model, lambda weights: weights.pop("model.norm.weight"))
    assert refused(*build("--model", broken_model)) == (
        f"model.path: `{broken_model}` lacks 1 weights of its LlamaForCausalLM, or has them in another shape: "
        "model.norm.weight; save the whole checkpoint again"
    )


def test_a_checkpoint_with_weights_of_another_shape(build, broken_model):
    changed_weights(broken_model, lambda weights: weights.update({"model.norm.weight": torch.ones(7)}))
    assert "lacks 1 weights of its LlamaForCausalLM, or has them in another shape: model.norm.weight" in refused(
        *build("--model", broken_model)
    )


def test_a_truncated_checkpoint(build, broken_model):
    weights = broken_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert re.fullmatch(
        f"model.path: `{re.escape(str(broken_model))}` is not a causal LM that transformers can load: .*",
        refused(*build("--model", broken_model)),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["--model", "/no/such/model"],
            "model.path: `/no/such/model`: no such file or directory; expected a checkpoint",
        ),
        (["--model", "./ckpt"], "model.path: `./ckpt`: no such file or directory; expected a checkpoint"),
        (["--model", "small.gguf"], "model.path: `small.gguf`: no such file or directory; expected a checkpoint"),
        (
            ["--model", __file__],
            f"model.path: `{__file__}` is a file; expected a directory, a GGUF file or the name .*",
        ),
        (["--set", "model.tokenizer=/no/tok"], "model.tokenizer: `/no/tok`: no such file or directory; expected .*"),
        (["--set", "model.device=gpu"], "model.device: got `gpu`, expected auto, cpu, cuda or cuda:N"),
        (["--set", "model.device=cuda:99"], r"model.device: got `cuda:99`, but torch sees \d+ CUDA devices; use .*"),
        (
            ["--max-length", "512"],
            "corpus.max_length: rows of 512 tokens, the model has 128 positions; set 128 or less",
        ),
    ],
)
def test_a_model_that_cannot_be_used(build, changes, message):
    assert re.fullmatch(message, refused(*build(*changes)))


@pytest.mark.parametrize(
    "change",
    [
        {"max_position_embeddings": "x"},
        {"num_attention_heads": 0},
        {"model_type": ["a"]},
        {"vocab_size": -1},
        {"num_hidden_layers": 10**7},
        {"hidden_size": 10**7},
        {"intermediate_size": 10**15},
    ],
    ids=str,
)
def test_a_checkpoint_whose_config_cannot_be_meant(build, broken_model, change):
    config = json.loads((broken_model / "config.json").read_text())
    (broken_model / "config.json").write_text(json.dumps(config | change))
    assert refused(*build("--model", broken_model)).startswith(f"model.path: `{broken_model}` ")


@pytest.mark.parametrize("text", ["[1, 2]", "[" * 100_000, "null"], ids=["list", "deep", "null"])
def test_a_checkpoint_whose_config_is_none(build, broken_model, text):
    (broken_model / "config.json").write_text(text)
    assert refused(*build("--model", broken_model)).startswith(f"model.path: `{broken_model}` ")


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
    ("assignment", "message"),
    [
        ("features.tua=1", "settings: features.tua: no such field, got 1 (did you mean tau?)"),
        ("feature.tau=1", "settings: feature: no such field, got {'tau': 1} (did you mean features?)"),
        (
            "features.tau.x=1",
            "features.tau.x: `tau` holds a value, expected a group of settings",
        ),
        ("features.tau=0", "settings: features.tau: Input should be greater than 0, got 0"),
        ("features.tau=.nan", "settings: features.tau: Input should be a finite number, got nan"),
        ("features.epsilon=.inf", "settings: features.epsilon: Input should be a finite number, got inf"),
        ("features=3", "settings: features: expected fields with names, got 3"),
        ("features.pooling=tail:0", "settings: features.pooling: expected all, tail:N or stride:N with N from 1, got "
         "'tail:0'"),
        ("features.alpha=2", "settings: features.alpha: expected 1 or 0.5, got 2.0"),
        ("features.seed=-1", "settings: features.seed: Input should be greater than or equal to 0, got -1"),
        ("targets.seed=-1", "settings: targets.seed: Input should be greater than or equal to 0, got -1"),
        ("targets.names=sciq", "settings: targets.names: expected a list, got 'sciq'"),
        ("array_dtype=int8", "settings: array_dtype: Input should be 'float16' or 'float32', got 'int8'"),
        ("shard_rows=0", "settings: shard_rows: Input should be greater than or equal to 1, got 0"),
        ("features.tau", "--set: got `features.tau`, expected name=value, e.g. features.tau=0.02"),
        ("=3", "--set: got `=3`, expected name=value, e.g. features.tau=0.02"),
        ("features.tau={", "--set features.tau: not YAML: while parsing a flow node"),
        ("a=!!python/name:os.kill", "--set a: not YAML: could not determine a constructor"),
        ("model.path=a\nb", "model.path: `a b`: no such file or directory; expected a checkpoint"),
        ("model.threads=100000", "settings: model.threads: Input should be less than or equal to 1024, got 100000"),
        ("features.tau=2024-13-45", "--set features.tau: not YAML: month must be in 1..12"),
        (f"targets.seed={'9' * 5000}", "--set targets.seed: not YAML: Exceeds the limit (4300 digits)"),
        (f"features.tau={'[' * 3000}{']' * 3000}", "--set features.tau: line 1: nested deeper than 50"),
        ("model.path=&a [*a]", "--set model.path: line 1: a value that holds itself"),
        (BOMB, "--set model.path: line 1: more than 100,000 values, aliases written out"),
    ],
)  # fmt: skip
def test_a_wrong_setting(build, assignment, message):
    found = refused(*build("--set", assignment))
    assert found.startswith(message) if "not YAML" in message else found == message


def test_every_wrong_setting_is_in_one_message(build):
    found = refused(*build("--set", "features.tau=0", "--set", "shard_rows=x", "--dtype", "int4", "--match", "most"))
    assert found.count("; ") == 3
    assert all(name in found for name in ("features.tau", "shard_rows", "model.dtype", "features.match"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- 1", "got list, expected a mapping of settings"),
        ("a: [", "not YAML: while parsing a flow node .*"),
        ("a: 2020-13-45", "not YAML: month must be in 1..12"),
        ("a: 1\nb: {x: 1}\n\na: 2\n", "line 4: 'a' is there already, in line 1; leave one out"),
        ("a:\n  b: {x: 1, y: [{z: 1, z: 1}]}\n", "line 2: 'z' is there already, in line 2; leave one out"),
        (b"\xff", "not YAML: .*"),
        (b"a: " + b"x" * (5 << 20), "more than 4,194,304 bytes; expected a YAML file of settings"),
    ],
)
def test_a_settings_file_that_is_none(tmp_path, content, message):
    path = tmp_path / "settings.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = refused("build", "--config", path, "--out", tmp_path / "art")
    assert re.fullmatch(f"{re.escape(str(path))}: {message}", found)


def test_a_settings_file_that_cannot_be_read(tmp_path):
    for path, message in (
        (tmp_path / "no.yaml", "no such settings file"),
        (tmp_path, "cannot be read: Is a directory"),
    ):
        assert f"{path}: {message}" in refused("build", "--config", path, "--out", tmp_path / "art")


# what is written


def test_an_artifact_where_none_can_be(root, tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file/art"):
        assert re.fullmatch(
            rf"{re.escape(str(out))}: (is a file, expected a directory|cannot be written to \(.*\)); choose another .*",
            refused("build", "--config", root / "settings.yaml", "--out", out),
        )


@pytest.mark.parametrize("command", [["predict", "--keep", "true"], ["predict", "--by", "topic"], ["score"]])
def test_an_output_file_is_checked_before_the_work(art, tmp_path, command):
    name, *flags = command
    asked = [name, art, *flags, *(["--target", "facts"] if name == "score" else [])]
    assert refused(*asked, "--out", tmp_path / "no/out.parquet") == (
        f"--out: got {tmp_path / 'no/out.parquet'}, but there is no directory {tmp_path / 'no'}; make it first"
    )
    assert refused(*asked, "--out", tmp_path) == (
        f"--out: got {tmp_path}, which is a directory; expected the name of a file"
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


# label expressions

SECRET = "/etc/passwd"


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("topic = 'sky", "unterminated string literal (character 9: ...topic = >>>'sky)"),
        ("topic = = 'sky'", "syntax error"),
        ("topik = 'sky'", "unknown column 'topik' (did you mean 'topic'?); the columns are ['row_index', 'row_id'"),
        ('topic = "sky"', "unknown column 'sky'; the columns are"),
        (f"read_csv('{SECRET}')", "function 'read_csv' is refused; allowed are "),
        (f"(SELECT count(*) FROM read_csv('{SECRET}')) > 0", "subquery is refused; a condition uses columns"),
        (f"topic IN (SELECT * FROM '{SECRET}')", "subquery is refused; a condition uses columns"),
        (
            "COPY rows TO 'OWNED'",
            "statements are refused; expected a condition on the columns, such as topic = 'Games'",
        ),
        ("ATTACH 'OWNED'", "statements are refused; expected a condition on the columns, such as topic = 'Games'"),
        ("true; COPY rows TO 'OWNED'", 'syntax error at or near ";"'),
        ("true) FROM read_csv('x') --", "syntax error"),
        ("getenv('HOME') = 'x'", "function 'getenv' is refused"),
        ("replace(replace(topic, 'a', 'bb'), 'b', 'cc') = 'x'", "replace may not make text longer, or a few of them"),
        ("replace(topic, 'a', topic) = 'x'", "replace may not make text longer"),
        ("topic", "gives string, expected a condition that is true or false"),
        ("n_tokens > 'x'", "Could not convert string 'x' to INT32"),
        (" ", "is empty; expected a condition such as topic = 'Games'"),
    ],
)
def test_a_label_expression_that_is_none(art, tmp_path, monkeypatch, expression, message):
    monkeypatch.chdir(tmp_path)
    found = refused("predict", art, "--drop", expression)
    assert found.startswith(f"expression {expression!r}: ")
    assert message in found
    assert "root:" not in found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--drop", "--keep"])
def test_an_expression_that_tells_no_rows_apart_says_what_there_is(art, flag):
    columns = "row_index, row_id, doc_id, n_tokens, loss, snippet, topic"
    for expression, how_many in (("true", "every row"), ("'doc type' = 'FAQs'", "no row")):
        assert refused("predict", art, flag, expression) == (
            f"expression {expression!r}: matches {how_many}; it names no column: 'single quotes' are for values, "
            f'"double quotes" for a column with blanks, as in "doc type" = \'FAQs\'; the columns are {columns}'
        )
    assert refused("predict", art, flag, "topic = 'nowhere'") == (
        "expression \"topic = 'nowhere'\": matches no row; topic has 'earth' (23 rows), 'life' (22 rows), 'sky' (20 "
        "rows)"
    )
    assert refused("predict", art, flag, "topic = 'erth'").endswith("'sky' (20 rows) (did you mean 'earth'?)")


# subsets, families, protocols


def test_subsets_that_leave_no_rows_or_cannot_be_read(art, tmp_path):
    row_ids = pq.read_table(art / "rows.parquet")["row_id"].to_pylist()
    path = tmp_path / "subsets.parquet"
    pq.write_table(pa.table({"subset_id": ["all"] * len(row_ids), "row_id": row_ids}), path)
    assert refused("predict", art, "--subsets", path, "--omitted") == (
        "subset 'all': names no rows; a subset retains at least one"
    )
    path.write_bytes(path.read_bytes()[:-10])
    assert re.match(f"{path}: cannot be read: ", refused("predict", art, "--subsets", path))
    assert re.match(f"{tmp_path}: cannot be read: ", refused("predict", art, "--subsets", tmp_path))
    assert refused("predict", art, "--subsets", tmp_path / "no.parquet") == (
        f"{tmp_path / 'no.parquet'}: no such file; expected Parquet with columns row_id[, subset_id, weight]"
    )


# damaged artifacts


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name",
    [
        "arrays/relevance_token/00003.npy",
        "arrays/hidden_sketch/scale.npy",
        "shards/00003.parquet",
        "shards/00003.json",
        "rows.parquet",
        "units.parquet",
        "moments.safetensors",
        "build.json",
        "manifest.json",
    ],
)
def test_verify_names_a_file_with_a_flipped_byte(own_art, name):
    flip(own_art / name)
    outcome = run("verify", own_art)
    assert (outcome.code, outcome.err) == (1, "")
    assert outcome.lines[0].startswith(f"broken: {name}: damaged: ")
    assert outcome.lines[1].endswith(": 1 broken")
    assert len(outcome.lines) == 2


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


@pytest.mark.parametrize("name", ["rows.parquet", "units.parquet", "shards/00003.parquet"])
@pytest.mark.parametrize("gone", [True, False])
def test_reading_a_damaged_table_says_so(own_art, name, gone):
    path = own_art / name
    if gone:
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 7)
    found = refused("score", own_art, "--target", "facts", "--top", 100)
    assert re.fullmatch(f"{re.escape(str(path))}: {'missing' if gone else 'truncated: .*'}; {ADVICE}", found)
    if name != "shards/00003.parquet":
        assert str(path) in refused("predict", own_art, "--by", "topic")


def test_an_artifact_of_another_format_version(own_art):
    path = own_art / "manifest.json"
    resign(own_art, lambda raw: raw.update(format_version=7))
    for asked in (["info"], ["verify"], ["score", "--target", "facts"], ["predict", "--by", "topic"]):
        assert refused(asked[0], own_art, *asked[1:]) == (
            f"{path}: format version 7, this program reads 2; build the artifact again, or use the version of grasp "
            "that wrote it"
        )


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


def test_a_template_without_quotes_of_its_own_is_told_how_to_quote_it(build):
    found = refused(*build("--set", "corpus.prompt=Q: {question}"))
    assert "corpus.prompt: Input should be a valid string, got {'Q': {'question': None}}; a text with : or {}" in found
