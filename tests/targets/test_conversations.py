"""A validation set of conversations is a target like any other."""

import json

import pytest

from grasp.errors import TargetError
from grasp.settings import DatasetTarget, TargetSettings
from grasp.targets import load_units
from tests.corpus.chats import DROPS, chat_tokenizer, turns

ASKED, ANSWERED, AGAIN, LAST = "what is water?", "water is wet.", "and fire?", "fire is hot. it burns."
TURNS = turns(ASKED, ANSWERED, AGAIN, LAST)
END = "<|im_end|>"


def units(tmp_path, *records, **settings):
    path = tmp_path / "held.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return load_units(TargetSettings(names=(str(path),), **settings))


def test_the_last_answer_is_the_completion_and_the_rest_the_prompt(tmp_path):
    (unit,) = units(tmp_path, {"messages": TURNS}).written_out(chat_tokenizer()).units
    assert unit.completion == LAST + END
    assert unit.prompt.endswith(f"{AGAIN}{END}\n<|im_start|>assistant\n")
    assert (unit.unit_id, unit.target, unit.loss_on) == ("held:0", "held", "completion")


def test_every_answer_is_a_unit_when_asked(tmp_path):
    found = units(tmp_path, {"messages": TURNS, "unit_id": "a"}, {"messages": TURNS[:2]}, loss_on="assistant")
    found = found.written_out(chat_tokenizer())
    by_name = {unit.unit_id: unit.completion for unit in found.units}
    assert by_name == {"a#0": ANSWERED + END, "a#1": LAST + END, "held:1": ANSWERED + END}


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "human", "value": ASKED}, {"from": "gpt", "value": ANSWERED}]},
        {"instruction": ASKED, "input": "", "output": ANSWERED},
        {"prompt": TURNS[:1], "completion": TURNS[1:2]},
    ],
)
def test_the_forms_of_a_corpus_are_forms_of_a_target(tmp_path, record):
    (unit,) = units(tmp_path, record).written_out(chat_tokenizer()).units
    assert unit.completion == ANSWERED + END


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": turns(ASKED, " ")}, "held.jsonl:1: an answer of the assistant is empty; mend it or take it out"),
        ({"messages": TURNS[:1]}, "held.jsonl:1: the assistant does not answer"),
        ({"messages": TURNS[1:]}, "held.jsonl:1: its turns are out of order: expected user and assistant in turn"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "held.jsonl:1: turn 0: got the role 'boss'"),
        ({"messages": turns("a\ud800", "b")}, "prompt: half of a surrogate pair at character"),
        ({"prompt": "a", "completion": "b\ud800"}, "completion: half of a surrogate pair at character 1"),
        ({"prompt": "a", "completion": "b", "unit_id": "\ud800"}, "unit_id: half of a surrogate pair at character 0"),
    ],
)
def test_a_conversation_that_cannot_be_scored_is_named(tmp_path, record, message):
    with pytest.raises(TargetError) as caught:
        units(tmp_path, record)
    assert message in str(caught.value)


def test_a_template_that_drops_the_answer_names_the_unit(tmp_path):
    with pytest.raises(TargetError, match="unit 'held:0' of held: turn 3: the chat template leaves out"):
        units(tmp_path, {"messages": TURNS}).written_out(chat_tokenizer(DROPS))


def test_a_jinja_template_over_columns(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"q": ["water?"], "a": "wet"}) + "\n")
    target = DatasetTarget(name="q", path=str(path), prompt="Q: {{ q | first }}\nA:", completion=" {a}")
    (unit,) = load_units(TargetSettings(datasets=(target,))).units
    assert (unit.prompt, unit.completion) == ("Q: water?\nA:", " wet")
