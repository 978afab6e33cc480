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
    {
        "task": "geo",
        "prompt": "",
        "completion": "Rome",
        "loss_on": "all",
        "choices": ["Rome", "Bonn"],
        "gold": 0,
    },
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
    assert (by_id["m-two"].prompt, by_id["m-two"].completion, by_id["m-two"].loss_on) == (
        "1+2=",
        "3",
        "completion",
    )
    assert (by_id["geo:0"].loss_on, by_id["geo:0"].choices, by_id["geo:0"].gold) == (
        "all",
        ("Rome", "Bonn"),
        0,
    )


def test_the_setting_decides_where_a_line_does_not(file):
    assert {unit.loss_on for unit in load(file, loss_on="all").units} == {"all"}


def test_units_are_drawn_per_task(file):
    assert len(load(file, units_per_target=1).units) == 2


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
        ("{bad", r"units.jsonl:2: not JSON"),
        ('["list"]', r"units.jsonl:2: got list, expected a JSON object"),
        ('{"task": "t", "prompt": "p"}', r"units.jsonl:2: completion: missing"),
        ('{"task": "t", "prompt": 3}', r"units.jsonl:2: prompt: .* got 3; completion: missing"),
        ('{"task": "", "prompt": "p", "completion": "c"}', r"units.jsonl:2: task: .* got ''"),
        (
            '{"task": "t", "prompt": "p", "completion": " "}',
            r"units.jsonl:2: completion: got ' ', expected text",
        ),
        (
            '{"task": "t", "prompt": "p", "completion": "c", "gold": 2, "choices": ["c"]}',
            r"gold: got 2, .* 1 choices",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = write(tmp_path / "units.jsonl", json.dumps(LINES[0]) + "\n" + line + "\n")
    with pytest.raises(TargetError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_bytes_that_are_not_utf8_are_named(tmp_path):
    path = tmp_path / "units.jsonl"
    path.write_bytes(b'{"task": "\xff"}\n')
    with pytest.raises(TargetError, match=r"units.jsonl:1: not JSON"):
        load(path)


def test_a_unit_id_that_occurs_twice_is_named(tmp_path):
    line = json.dumps({"task": "t", "prompt": "p", "completion": "c", "unit_id": "same"})
    with pytest.raises(TargetError, match=r"unit_id 'same' occurs twice \(in t and t\)"):
        load(write(tmp_path / "units.jsonl", f"{line}\n{line}\n"))


def test_empty_missing_and_damaged_files(tmp_path):
    with pytest.raises(TargetError, match=r"empty.jsonl: no units"):
        load(write(tmp_path / "empty.jsonl", "\n"))
    with pytest.raises(TargetError, match=r"targets.names: .*gone.jsonl: no such file"):
        load(tmp_path / "gone.jsonl")
    with pytest.raises(TargetError, match=r"bad.jsonl.gz: damaged or cut short"):
        load(write(tmp_path / "bad.jsonl.gz", "no gzip"))
