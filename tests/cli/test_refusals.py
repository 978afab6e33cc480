"""Refused commands exit with code 2 and one line with the relevant values, and write nothing.

The rules themselves are tested with their modules; one case of each shows that the command applies them.
"""

import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grasp.models.tokenizer import train_tokenizer
from tests.cli.grasp_command import refused
from tests.mentions import assert_mentions
from tests.pipeline.world import texts

FILES = {
    "empty.yaml": "{}",
    "ids.jsonl": '{"text": "water light"}\n{"row_id": "c", "input_ids": [3, 999]}\n',
    "column.jsonl": '{"body": "water", "topic": "sky"}\n',
    "component.yaml": "name: x\ncomponents: {joint.pear: 1}",
    "settings.yaml": "name: x\nrequires: {tau: 0.5, alpha: 0.5}",
    "match.yaml": "name: x\nmatch: {output_layer: 0}",
}
PLAIN = {
    "build": ("--config", "SETTINGS", "--out", "made"),
    "predict": ("ART",),
    "score": ("ART", "--target", "facts"),
    "select": ("ART", "--budget", "20%", "--target", "facts"),
    "mix": ("ART", "--by", "topic", "--target", "facts"),
}
REFUSALS = {
    "build": [
        (("--config", "empty.yaml"), r"missing --corpus .*--targets"),
        (("--config", "empty.yaml", "--corpus", "corpus.jsonl"), r"missing --targets"),
        (("--config", "empty.yaml", "--targets", " , "), r"missing .*--targets"),
        (("--out", "ART", "--max-length", 9), "built with other settings: corpus.max_length: was 48, now 9"),
        (("--model", "small.gguf"), "model.path: `small.gguf`: no such file"),
        (("--model", "ids.jsonl"), "is a file; expected a directory, a GGUF file or the name"),
        (("--set", "model.tokenizer=/no/tok"), "model.tokenizer: `/no/tok`: no such file"),
        (("--set", "model.tokenizer=large"), "outside the model's vocabulary of 300"),
        (("--set", "model.device=gpu"), "model.device: got `gpu`, expected auto, cpu, cuda or cuda:N"),
        (("--set", "model.device=cuda:99"), "model.device: got `cuda:99`, expected .*; torch sees"),
        (("--max-length", "512"), "512 tokens, the model has 128 positions"),
        (("--corpus", "ids.jsonl"), "ids.jsonl:2: row 'c' has the token id 999 at position 1"),
        (("--corpus", "column.jsonl"), "columns found: body, topic"),
        (("--corpus", "torn.parquet"), "Parquet file"),
        (("--targets", "/no/such.jsonl"), "targets.names: /no/such.jsonl: no such file or directory"),
        (("--set", "targets.max_length=2"), "increase targets.max_length"),
    ],
    "predict": [
        ((), r"drop, keep, weight"),
        (("--by", "topic", "--keep", "true"), r"predict: .*keep, by\b"),
        (("--by", "topic", "--units"), r"units .*by\b"),
        (("--by", "topci"), r"column 'topci'.*'topic'"),
        (("--by", "topic", "--out", "no/p.parquet"), r"--out: .*no/p\.parquet.*directory no\b"),
        (("--drop", "row_id IN (SELECT * FROM '/etc/passwd')"), r"subquery"),
        (("--drop", "'doc type' = 'FAQs'"), r"no row.*column"),
        (("--drop", "replace(replace(topic, 'a', 'bb'), 'b', 'cc') = 'x'"), r"replace .*longer"),
        (("--drop", "replace(topic, 'a', topic) = 'x'"), r"replace .*longer"),
        (("--keep", "topic = 'erth'"), r"'sky' \(20 rows\).*'earth'"),
        (("--keep", "true", "--target", "sciq"), r"\['sciq'\].*\['facts'\]"),
        (("--weight", "true: -1"), r"weight: .*'true: -1'"),
        (("--weight", "true"), r"weight: .*'true'.*EXPR:NUMBER"),
        (("--weight", "true:0"), r"every row.*column"),
        (("--weight", "topic = 'sky':0", "--weight", "topic != 'sky':0"), r"all 65 rows"),
        (("--by", "topic", "--protocol", "component.yaml"), r"components: .*\['joint\.pear'\]"),
        (("--by", "topic", "--protocol", "settings.yaml"), r"features\.tau: .*\b0\.5\b"),
        (("--by", "topic", "--protocol", "match.yaml"), r"match: .*auto"),
        (("--by", "topic", "--protocol", "."), r"\.: .*Is a directory"),
        (("--subsets", "torn.parquet"), r"torn\.parquet: .*read"),
    ],
    "score": [
        (("--min-tokens", "49"), r"min_tokens: .*\b49\b"),
        (("--top", "0"), r"top: .*\b0\b.*bottom"),
    ],
    "select": [
        (("--budget", "0.5"), r"budget: .*whole number or a share"),
        (("--by", "topic", "--floor", "sky:90%", "--floor", "life:20%"), r"floor: "),
        (("--by", "topic", "--budget", "50%tokens", "--cap", "5%"), r" tokens.*budget"),
        (("--documents", "some"), r"any, half or all"),
        (("--documents", "half"), r"--export DIR"),
        (("--format", "jsonl"), r"--export DIR"),
        (("--left-out", "gone", "--documents", "any", "--ids-out", "i"), r"--export DIR"),
        (("--left-out", "gone", "--budget", "100%"), r"left out: "),
        (("--left-out", "gone", "--budget", "100%", "--documents", "all"), r"left out: "),
        (("--left-out", "."), r"\.: .*already"),
        (("--left-out", "gone.txt"), r"\.parquet or \.csv"),
        (("--export", "kept", "--ids-out", "i"), r"ids: .*documents"),
        (("--out", "kept.csv"), r"\.parquet\b"),
        (("--export", "."), r"\.: .*already"),
        (("--runs", "nothing"), r"nothing: no such file or directory; pass one written by grasp retrain"),
        (("--out", "k.parquet", "--ids-out", "k.parquet"), r"--ids-out: .*k\.parquet.*--out"),
        (("--out", "k.parquet", "--ids-out", "./k.json"), r"--ids-out: .*k\.json.*summary of --out"),
        (("--out", "k.parquet", "--ids-out", "k.protocol.yaml"), r"--ids-out: .*protocol of --out"),
        (("--out", "k.parquet", "--export", "k.json"), r"--export: .*k\.json.*summary of"),
        (("--exclude", "ids.jsonl", "--ids-out", "ids.jsonl"), r"--ids-out: .*ids\.jsonl.*--exclude"),
    ],
    "mix": [
        (("--floor", "40%"), r"floor, cap: "),
        (("--out", "m.json"), r"\.parquet\b"),
        (("--out", "m.parquet", "--weights", "m.parquet"), r"--weights: .*m\.parquet.*--out"),
        (("--out", "m.parquet", "--weights", "m.json"), r"--weights: .*m\.json.*summary of"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Write files that every command refuses."""
    place = tmp_path_factory.mktemp("refusals")
    for name, content in FILES.items():
        (place / name).write_text(content)
    pq.write_table(pa.table({"text": texts(200)}), place / "whole.parquet")
    (place / "torn.parquet").write_bytes((place / "whole.parquet").read_bytes()[:-100])
    train_tokenizer(texts(50), vocab_size=320).save_pretrained(place / "large")
    return place


@pytest.mark.parametrize(
    ("command", "arguments", "pattern"), [(name, *line) for name, lines in REFUSALS.items() for line in lines]
)
def test_a_command_refuses_in_one_line(command, arguments, pattern, root, art, place, monkeypatch):
    monkeypatch.chdir(place)
    before = sorted(path.name for path in place.iterdir() if path.name != "made")
    named = {"ART": art, "SETTINGS": root / "settings.yaml"}
    message = refused(command, *(named.get(part, part) for part in (*PLAIN[command], *arguments)))
    assert re.search(pattern, message), message
    assert sorted(path.name for path in place.iterdir() if path.name != "made") == before


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        (("--add-target", "facts.jsonl"), r"targets \['facts'\]"),
        (("--add-target", "sciq", "--max-length", 9), r"--add-target: .*corpus"),
        (("--add-target", "sciq", "--set", "targets.sed=1"), r"targets: sed: .*\b1\b.*\bseed\b"),
        (("--add-target", "sciq", "--set", "targets=1"), r"--add-target: "),
        (("--resume", "--set", "features.tau=0.02"), r"features\.tau: .*0\.01.*0\.02.*--out"),
    ],
)
def test_an_artifact_is_resumed_only_with_its_settings(changes, pattern, root, art, monkeypatch):
    monkeypatch.chdir(root)
    assert re.search(pattern, refused("build", "--out", art, *changes))
    assert "no such artifact" in refused("build", "--out", "none", "--add-target", "sciq")
    assert re.search("--resume: .*none/run.yaml: missing", refused("build", "--out", "none", "--resume"))
    assert not (root / "none").exists()


@pytest.mark.parametrize("command", ["info", "verify", "score --target facts", "predict --by topic"])
def test_paths_without_an_artifact_are_refused(art, tmp_path, command):
    name, *flags = command.split()
    assert_mentions(refused(name, tmp_path / "no", *flags), f"{tmp_path / 'no'}: no such artifact", "grasp build --out")
    assert_mentions(refused(name, tmp_path, *flags), f"{tmp_path}: ", "build.json", f"grasp build --out {tmp_path}`")
    assert_mentions(refused(name, art / "manifest.json", *flags), f"{art / 'manifest.json'}: ", "artifact")
