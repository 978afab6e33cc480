"""Units come in the forms that people have; a file names its target; what fits no form says what was looked for."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grasp.corpus.sources import IN_MEMORY
from grasp.errors import TargetError
from grasp.settings import TargetSettings
from grasp.targets import load_units
from grasp.targets.records import target_name, units_of

QUESTIONS = [{"question": "1+1?", "answer": "2"}, {"question": "1+2?", "answer": "3"}]
CHOICE = {"doc_id": 7, "doc": {"q": "Sky?"}, "target": "1", "resps": []}
CHOICE |= {"arguments": [["Q: Sky?\nA:", " green"], ["Q: Sky?\nA:", " blue"]]}
TWO = {f"gen_args_{k}": {"arg_0": "Q:", "arg_1": text} for k, text in enumerate((" a", " b"))}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def load(path, **settings):
    units = load_units(TargetSettings(names=(str(path),), **settings)).units
    return {unit.unit_id: (unit.target, unit.prompt, unit.completion) for unit in units}


def test_questions_and_answers_of_a_file_are_a_target_named_after_it(tmp_path, monkeypatch):
    expected = {
        "exam:0": ("exam", "Question: 1+1?\nAnswer:", " 2"),
        "exam:1": ("exam", "Question: 1+2?\nAnswer:", " 3"),
    }
    pq.write_table(pa.Table.from_pylist(QUESTIONS), tmp_path / "exam.parquet")
    assert load(write(tmp_path / "exam.jsonl", QUESTIONS)) == expected
    assert load(tmp_path / "exam.parquet") == expected
    monkeypatch.chdir(tmp_path)
    assert load("exam.jsonl") == expected


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/exam.v2.jsonl.gz", "exam.v2"),
        ("samples_arc_easy_2024-05-01T10-11-12.3.jsonl", "arc_easy"),
        ("samples_gsm8k.jsonl", "gsm8k"),
        ("data/exam/", "exam"),
    ],
)
def test_a_target_is_named_after_its_file(path, name):
    assert target_name(path) == name


@pytest.mark.parametrize(
    ("changes", "prompt", "completion", "gold"),
    [
        ({}, "Q: Sky?\nA:", " blue", 1),
        ({"target": "blue"}, "Q: Sky?\nA:", " blue", 1),
        ({"arguments": TWO}, "Q:", " b", 1),
        ({"arguments": [["It is", " x"], ["He is", " x"]]}, "He is", " x", 1),
        ({"arguments": [["The end of the", " road"]], "target": " road"}, "The end of the", " road", None),
        ({"arguments": [["2+2=", {"until": ["\n"]}]], "target": "4"}, "2+2=", " 4", None),
        ({"arguments": {"gen_args_0": {"arg_0": "A:\n", "arg_1": {}}}, "target": "4"}, "A:\n", "4", None),
    ],
)
def test_sample_logs_of_the_harness(changes, prompt, completion, gold):
    (unit,) = units_of([("x:1", CHOICE | changes)], "sky", "completion")
    assert (unit.unit_id, unit.target) == ("7", "sky")
    assert (unit.prompt, unit.completion, unit.gold) == (prompt, completion, gold)
    if gold is not None:
        assert unit.choices[gold] in (completion, prompt)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x", "label": 1}, r"exam.jsonl:1: has the fields text, label; expected `prompt`"),
        ({"question": "x", "answer": None}, r"exam.jsonl:1: has the fields question, answer \(null\)"),
        ({**CHOICE, "target": "red"}, r"exam.jsonl:1: target: got 'red'"),
        ({**CHOICE, "arguments": [3]}, r"exam.jsonl:1: arguments: got \[3\]"),
        ({"question": "x", "answer": ""}, r"exam.jsonl:1: completion: got ' '"),
    ],
)
def test_what_fits_no_form_says_what_was_looked_for(tmp_path, record, message):
    with pytest.raises(TargetError, match=message):
        load(write(tmp_path / "exam.jsonl", [record]))


@pytest.mark.parametrize("field", ["prompt", "completion", "unit_id", "task"])
def test_half_a_surrogate_pair_is_refused_before_anything_runs(tmp_path, field):
    record = {"task": "t", "prompt": "p", "completion": "c", "unit_id": "u"} | {field: "x\ud800"}
    said = "task: .* unicode" if field == "task" else f"{field}: half of a surrogate pair at character 1"
    with pytest.raises(TargetError, match=said):
        load(write(tmp_path / "exam.jsonl", [record]))


def test_units_in_memory_stand_behind_their_name():
    units = units_of([("unit 0", {"prompt": "p", "completion": "c"})], "units", "completion")
    settings = TargetSettings(names=(IN_MEMORY + "x",))
    assert load_units(settings, units).targets == ("units",)
    with pytest.raises(TargetError, match="it was in memory, x: it is on no disk; pass the same object again"):
        load_units(settings)
