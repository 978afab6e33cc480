"""The right choice of a record is known by label, text, letter or position; what fits several is refused."""

import json

import pytest

from grasp.errors import TargetError
from grasp.settings import TargetSettings
from grasp.targets.load import load_units
from grasp.targets.margins import with_metric
from grasp.targets.units import Unit, UnitSet

TEXTS = ["bird", "stone", "iron", "wind"]
QUESTION = {"question": "Which is a metal?"}
LABELLED = [{"text": text, "label": label} for text, label in zip(TEXTS, "ABCD", strict=True)]


def units(tmp_path, *records) -> list[Unit]:
    file = tmp_path / "quiz.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    read = load_units(TargetSettings(names=[str(file)], units_per_target=None)).units
    return sorted(read, key=lambda unit: int(unit.unit_id.rpartition(":")[2]))


@pytest.mark.parametrize(
    "record",
    [
        {"choices": TEXTS, "answer": 2},
        {"choices": TEXTS, "answer": 2.0},
        {"choices": TEXTS, "answer": [2]},
        {"choices": TEXTS, "answer": "2"},
        {"choices": TEXTS, "answer": "iron"},
        {"choices": TEXTS, "answer": "C"},
        {"choices": TEXTS, "answer": "(C)"},
        {"choices": TEXTS, "answer": "C."},
        {"choices": {"text": TEXTS, "label": ["1", "2", "3", "4"]}, "answerKey": "3"},
        {"choices": {"text": TEXTS, "label": ["1", "2", "3", "4"]}, "answerKey": 3},
        {"choices": LABELLED, "answerKey": "C"},
        {"question": {"stem": QUESTION["question"], "choices": LABELLED}, "answerKey": "C"},  # ARC as released
        {"options": TEXTS, "answer": "C", "answer_index": 2},  # MMLU-Pro
        {"options": dict(zip("ABCD", TEXTS, strict=True)), "answer": "iron", "answer_idx": "C"},  # MedQA
        {"options": TEXTS, "answer": "It is iron, so C.", "answer_idx": "C"},
        {**dict(zip("ABCD", TEXTS, strict=True)), "answer": "C"},  # C-Eval, CMMLU
    ],
    ids=repr,
)
def test_the_right_choice_is_scored(tmp_path, record):
    (unit,) = units(tmp_path, QUESTION | record)
    assert (unit.prompt, unit.completion) == ("Question: Which is a metal?\nAnswer:", " iron")
    assert (unit.choices, unit.gold) == (tuple(f" {text}" for text in TEXTS), 2)


@pytest.mark.parametrize("name", ["context", "passage", "article"])
@pytest.mark.parametrize("record", [{"answer": "iron"}, {"options": TEXTS, "answer": "C"}], ids=["text", "choices"])
def test_the_passage_is_part_of_the_prompt(tmp_path, name, record):
    (unit,) = units(tmp_path, QUESTION | record | {name: "Iron is a metal."})
    assert unit.prompt == "Iron is a metal.\nQuestion: Which is a metal?\nAnswer:"
    assert unit.completion == " iron"
    with pytest.raises(TargetError, match=rf"{name}: got dict, expected the text"):
        units(tmp_path, QUESTION | record | {name: {"sentences": ["Iron is a metal."]}})


def test_the_records_of_a_file_have_one_encoding(tmp_path):
    numbers = {"question": "1 + 1?", "choices": ["3", "2", "1", "0"], "answer": "2"}
    with pytest.raises(TargetError, match=r"quiz\.jsonl:1: answer: got '2', which is the text .* or the position"):
        units(tmp_path, numbers)
    assert [unit.gold for unit in units(tmp_path, numbers, QUESTION | {"choices": TEXTS, "answer": "iron"})] == [1, 2]
    assert [unit.gold for unit in units(tmp_path, numbers, QUESTION | {"choices": TEXTS, "answer": "2"})] == [2, 2]
    mixed = [QUESTION | {"choices": TEXTS, "answer": answer} for answer in ("iron", 1, "D")]
    assert [unit.gold for unit in units(tmp_path, *mixed)] == [2, 1, 3]


def test_positions_that_count_from_1_are_refused(tmp_path):
    records = [QUESTION | {"choices": TEXTS, "answer": 1 + k % 3} for k in range(30)]
    with pytest.raises(TargetError, match=r"none of the 30 answers is 0; .* count from 1"):
        units(tmp_path, *records)
    assert len(units(tmp_path, *records, QUESTION | {"choices": TEXTS, "answer": 0})) == 31
    assert len(units(tmp_path, *records[:20])) == 20  # may be chance


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"choices": TEXTS, "answer": 4}, r"answer: got 4, expected .*position \(from 0\) of one of the 4"),
        ({"choices": TEXTS, "answer": True}, "got True"),
        ({"choices": TEXTS, "answer": "gold"}, "got 'gold'"),
        ({"choices": TEXTS}, "none of the fields"),
        ({"choices": ["iron"], "answer": 0}, "at least two texts"),
        ({"question": None, "choices": TEXTS, "answer": 0}, "no text `prompt` or `question`"),
    ],
)
def test_a_record_without_a_right_choice_is_refused(tmp_path, record, message):
    with pytest.raises(TargetError, match=message):
        units(tmp_path, QUESTION | record)


def test_columns_that_only_look_like_choices_are_ignored(tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (unit,) = units(tmp_path, {"messages": chat, "options": TEXTS, "A": "x", "B": "y"})
    assert (unit.completion, unit.choices) == ("Ho", ())


@pytest.mark.parametrize(
    ("choices", "prompt", "expected", "n_changed"),
    [
        (["fish", " iron"], "A:", [" fish", " iron"], 1),
        ([" fish", "iron"], "A:", [" fish", " iron"], 1),
        (["fish\n", "iron "], "A:", [" fish", " iron"], 2),
        ([" fish", "  iron"], "A:", [" fish", " iron"], 1),
        (["fish", " iron"], "A: ", ["fish", "iron"], 1),
        (["fish", " iron"], "A:\n", ["fish", "iron"], 1),
        ([" fish", " iron"], "A:", [" fish", " iron"], 0),
        (["\nfish", "\niron"], "A:", ["\nfish", "\niron"], 0),  # all have it: it is meant
        (["    x\n", "    y\n"], "f():\n", ["    x\n", "    y\n"], 0),
    ],
    ids=repr,
)
def test_white_space_around_single_choices_is_removed_and_counted(tmp_path, choices, prompt, expected, n_changed):
    (unit,) = units(tmp_path, {"prompt": prompt, "choices": choices, "answer": 1})
    assert (list(unit.choices), unit.completion) == (expected, expected[1])
    counts = UnitSet((with_metric(unit, "margin"),)).rendered(None).unwritten.counts
    assert counts == ({"choice_space": n_changed} if n_changed else {})


def test_choices_do_not_follow_a_system_turn(tmp_path):
    with pytest.raises(TargetError, match=r"quiz\.jsonl:1: system: got 'Be short\.', but choices follow a text"):
        units(tmp_path, QUESTION | {"choices": TEXTS, "answer": 1, "system": "Be short."})
