"""JSONL targets: a line is a unit, and a bad line is named by file and number."""

import gzip
import json

import pyarrow as pa
import pytest

from grasp.errors import TargetError
from grasp.settings import TargetSettings
from grasp.targets import load_units

LINES = [
    {"task": "math", "prompt": "1+1=", "completion": "2", "note": "ignored"},
    {"task": "math", "prompt": "1+2=", "completion": "3", "unit_id": "m-two"},
    {"task": "geo", "prompt": "", "completion": "Rome", "loss_on": "all", "choices": ["Rome", "Bonn"], "gold": 0},
]


def load(path, **settings):
    return load_units(TargetSettings(names=(str(path),), **settings))


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "units.jsonl", "\n".join(json.dumps(line) for line in LINES) + "\n\n")


def test_lines_become_units_of_their_tasks(file):
    units = load(file)
    assert units.targets == ("math", "geo")
    by_id = {unit.unit_id: unit for unit in units.units}
    assert set(by_id) == {"math:0", "m-two", "geo:0"}
    two, rome = by_id["m-two"], by_id["geo:0"]
    assert (two.prompt, two.completion, two.loss_on) == ("1+2=", "3", "completion")
    assert (rome.loss_on, rome.choices, rome.gold) == ("all", ("Rome", "Bonn"), 0)
    assert {unit.loss_on for unit in load(file, loss_on="all").units} == {"all"}
    assert len(load(file, units_per_target=1).units) == 2  # drawn per task


@pytest.mark.parametrize(
    ("ending", "pack"), [("gz", gzip.compress), ("zst", lambda data: pa.compress(data, codec="zstd", asbytes=True))]
)
def test_compressed_files_read_the_same(file, ending, pack):
    packed = file.with_name(f"units.jsonl.{ending}")
    packed.write_bytes(pack(file.read_bytes()))
    assert load(packed).fingerprint == load(file).fingerprint


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{bad", "units.jsonl:2: not JSON"),
        ('["list"]', "units.jsonl:2: got list"),
        ('{"task": "t", "prompt": "p"}', "units.jsonl:2: completion: missing"),
        ('{"task": "t", "prompt": 3}', "units.jsonl:2: prompt: .* got 3; completion: missing"),
        ('{"task": "", "prompt": "p", "completion": "c"}', "units.jsonl:2: task: .* got ''"),
        ('{"task": "t", "prompt": "p", "completion": " "}', "units.jsonl:2: completion: got ' '"),
        ('{"task": "t", "prompt": "p", "completion": "c", "gold": 2, "choices": ["c"]}', "gold: got 2, .* 1 choices"),
        (json.dumps(LINES[0]) + "\n" + json.dumps(LINES[1]) + "\n" + json.dumps(LINES[1]), "'m-two' occurs twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "units.jsonl", json.dumps(LINES[0]) + "\n" + line + "\n")
    with pytest.raises(TargetError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"\n", "empty.jsonl: no units"),
        ("gone.jsonl", None, "gone.jsonl: no such file"),
        ("bad.jsonl.gz", b"no gzip", "bad.jsonl.gz: damaged or cut short"),
        ("units.jsonl", b'{"task": "\xff"}\n', "units.jsonl:1: not JSON"),
    ],
)
def test_empty_missing_and_damaged_files(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TargetError, match=message):
        load(tmp_path / name)
