"""Units come in the forms that people have; a file names its target; what fits no form is named by file and line."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grasp.corpus.sources import IN_MEMORY
from grasp.errors import TargetError
from grasp.settings import TargetSettings
from grasp.targets import load_units
from grasp.targets.load import target_name, unread_files_notes
from grasp.targets.unit_records import units_from_records
from tests.corpus.chats import CHATML, DROPS, MARKED, chat_tokenizer, turns

QUESTION, ANSWER, FOLLOW_UP, LAST = "what is water?", "water is wet.", "and fire?", "fire is hot. it burns."
TURNS = turns(QUESTION, ANSWER, FOLLOW_UP, LAST)
END = "<|im_end|>"
PLAIN = {"task": "t", "prompt": "p", "completion": "c"}


def load(place, *records, name="exam.jsonl", **settings):
    if records:
        (place / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return load_units(TargetSettings(names=(str(place / name),), **settings))


def plain(unit_set):
    return {unit.unit_id: (unit.target, unit.prompt, unit.completion) for unit in unit_set.units}


def test_lines_become_units_of_their_tasks(tmp_path):
    lines = [
        {"task": "math", "prompt": "1+1=", "completion": "2", "note": "ignored"},
        {"task": "math", "prompt": "1+2=", "completion": "3", "unit_id": "m-two"},
        {"task": "geo", "prompt": "", "completion": "Rome", "loss_on": "all", "choices": ["Rome", "Bonn"], "gold": 0},
    ]
    units = load(tmp_path, *lines)
    assert units.targets == ("math", "geo")
    by_id = {unit.unit_id: unit for unit in units.units}
    assert set(by_id) == {"math:0", "m-two", "geo:0"}
    two, rome = by_id["m-two"], by_id["geo:0"]
    assert (two.prompt, two.completion, two.loss_on) == ("1+2=", "3", "completion")
    assert (rome.loss_on, rome.choices, rome.gold) == ("all", ("Rome", "Bonn"), 0)
    assert {unit.loss_on for unit in load(tmp_path, *lines, loss_on="all").units} == {"all"}
    assert len(load(tmp_path, *lines, units_per_target=1).units) == 2  # drawn per task
    data = (tmp_path / "exam.jsonl").read_bytes()
    for ending, pack in (("gz", gzip.compress), ("zst", lambda d: pa.compress(d, codec="zstd", asbytes=True))):
        (tmp_path / f"exam.jsonl.{ending}").write_bytes(pack(data))
        assert load(tmp_path, name=f"exam.jsonl.{ending}").fingerprint == units.fingerprint


def test_questions_and_answers_of_a_file_are_a_target_named_after_it(tmp_path, monkeypatch):
    questions = [{"question": "1+1?", "answer": "2"}, {"question": "1+2?", "answer": "3"}]
    expected = {f"exam:{k}": ("exam", f"Question: 1+{k + 1}?\nAnswer:", f" {k + 2}") for k in range(2)}
    pq.write_table(pa.Table.from_pylist(questions), tmp_path / "exam.parquet")
    assert plain(load(tmp_path, *questions)) == plain(load(tmp_path, name="exam.parquet")) == expected
    monkeypatch.chdir(tmp_path)
    assert plain(load_units(TargetSettings(names=("exam.jsonl",)))) == expected


@pytest.mark.parametrize("answer", ["2", 2, ["2", "two"], {"value": "2", "aliases": ["two"]}])
def test_of_several_right_answers_the_first_is_scored(tmp_path, answer):
    assert plain(load(tmp_path, {"question": "1+1?", "answer": answer}))["exam:0"][2] == " 2"


def test_the_header_of_a_csv_file_may_have_capitals_but_must_exist(tmp_path):
    (tmp_path / "mmlu.csv").write_text("Question,A,B,C,D,Answer\n1+1?,3,2,4,5,B\n")
    assert plain(load(tmp_path, name="mmlu.csv")) == {"mmlu:0": ("mmlu", "Question: 1+1?\nAnswer:", " 2")}
    (tmp_path / "bare.csv").write_text("1+1?,3,2,4,5,B\n1+2?,3,2,4,5,A\n")
    with pytest.raises(TargetError, match=r"bare\.csv:2: has the fields .*the first line has the names"):
        load(tmp_path, name="bare.csv")


def test_an_unknown_metric_is_named(tmp_path):
    load(tmp_path, {"question": "1+1?", "answer": "2"})
    with pytest.raises(TargetError, match=r"exam\.jsonl@acurracy: no such file, and no metric .*mean 'accuracy'"):
        load_units(TargetSettings(names=(str(tmp_path / "exam.jsonl@acurracy"),)))
    with pytest.raises(TargetError, match=r"sciq@acc: no such file, and no metric 'acc'"):
        load_units(TargetSettings(names=("sciq@acc",)))


def test_weights_of_a_csv_file_have_a_decimal_point(tmp_path):
    load(tmp_path, {"question": "1+1?", "answer": "2"})
    names = (str(tmp_path / "exam.jsonl"), str(tmp_path / "w.csv"))
    (tmp_path / "w.csv").write_text("unit_id,weight\nexam:0,-0.5\n")
    assert load_units(TargetSettings(names=names)).units[1].weight == -0.5
    (tmp_path / "w.csv").write_text('unit_id,weight\nexam:0,"0,5"\n')
    with pytest.raises(TargetError, match=r"w\.csv:2: weight: got '0,5', expected a number .*decimal point"):
        load_units(TargetSettings(names=names))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("a/exam.v2.jsonl.gz", "exam.v2"),
        ("samples_arc_easy_2024-05-01T10-11-12.3.jsonl", "arc_easy"),
        ("samples_gsm8k.jsonl", "gsm8k"),
        ("samples_news_2024-05-01_2024-06-01T10-11-12.jsonl.gz", "news_2024-05-01"),
        ("zip://samples_gsm8k.jsonl::logs.zip", "gsm8k"),
        ("out/task-003-arc_easy:mc-requests.jsonl", "arc_easy:mc"),
        ("data/exam/", "exam"),
    ],
)
def test_a_target_is_named_after_its_file(path, name):
    assert target_name(path) == name


def test_units_in_memory_stand_behind_their_name():
    units = units_from_records([("unit 0", {"prompt": "p", "completion": "c"})], "units", "completion")
    settings = TargetSettings(names=(IN_MEMORY + "x",))
    assert load_units(settings, units).targets == ("units",)
    with pytest.raises(TargetError, match="in memory, x"):
        load_units(settings)


def test_the_last_answer_is_the_completion_and_the_rest_the_prompt(tmp_path):
    (unit,) = load(tmp_path, {"messages": TURNS}).rendered(chat_tokenizer()).units
    assert unit.completion == LAST + END
    assert unit.prompt.endswith(f"{FOLLOW_UP}{END}\n<|im_start|>assistant\n")
    assert (unit.unit_id, unit.target, unit.loss_on) == ("exam:0", "exam", "completion")
    with pytest.raises(TargetError, match=r"'exam:0' of exam .*answer.*turn 3"):
        load(tmp_path).rendered(chat_tokenizer(DROPS))


def test_an_answer_that_is_marked_in_parts_is_one_unit_or_refused(tmp_path):
    words = "{% generation %}{{ m.content }}"
    template = MARKED.replace(words, "{% generation %}-{% endgeneration %}" + words)
    (unit,) = load(tmp_path, {"messages": TURNS}).rendered(chat_tokenizer(template)).units
    assert unit.completion == "-" + LAST + END
    apart = MARKED.replace(words, "{% generation %}-{% endgeneration %} " + words)
    with pytest.raises(TargetError, match=r"'exam:0' of exam.*answer.*2 spans"):
        load(tmp_path).rendered(chat_tokenizer(apart))


def test_a_unit_that_is_written_in_part_is_counted(tmp_path):
    units = load(tmp_path, {"messages": turns(QUESTION, f"<think>hm</think>{ANSWER}")})
    written = units.rendered(chat_tokenizer(CHATML.replace("m.content", "m.content.split('</think>')[-1]")))
    assert written.units[0].completion == ANSWER + END
    assert written.unwritten.ids == {"cut_answer": ["exam:0"]}


def test_every_answer_is_a_unit_when_asked(tmp_path):
    units = load(tmp_path, {"messages": TURNS, "unit_id": "a"}, {"messages": TURNS[:2]}, loss_on="assistant")
    by_name = {unit.unit_id: unit.completion for unit in units.rendered(chat_tokenizer()).units}
    assert by_name == {"a#0": ANSWER + END, "a#1": LAST + END, "exam:1": ANSWER + END}


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]},
        {"instruction": QUESTION, "input": "", "output": ANSWER},
        {"prompt": TURNS[:1], "completion": TURNS[1:2]},
    ],
)
def test_the_forms_of_a_corpus_are_forms_of_a_target(tmp_path, record):
    (unit,) = load(tmp_path, record).rendered(chat_tokenizer()).units
    assert unit.completion == ANSWER + END


def test_an_answer_may_be_reasoning_or_a_call_alone(tmp_path):
    template = CHATML.replace("{{ m.content }}", "{{ m.content }}{{ m.reasoning_content }}{{ m.tool_calls }}")
    for part in ({"reasoning_content": "hm"}, {"tool_calls": [{"name": "f", "arguments": {}}], "content": " "}):
        answer = {"role": "assistant", "content": "", **part}
        (unit,) = load(tmp_path, {"messages": [TURNS[0], answer]}).rendered(chat_tokenizer(template)).units
        assert unit.prompt.endswith(f"{QUESTION}{END}\n<|im_start|>assistant\n")
        assert "hm" in unit.completion or "'f'" in unit.completion


REFUSED = [
    ({"text": "x", "label": 1}, r"exam\.jsonl:1: .*text, label.*`prompt`"),
    ({"question": "x", "answer": None}, r"exam\.jsonl:1: .*question, answer \(null\)"),
    ({"doc": {}, "arguments": [3]}, r"exam\.jsonl:1: arguments: .*\[3\]"),
    ({"request": {}, "doc_id": 0, "doc": {}, "idx": 0, "label": 0}, r"exam\.jsonl:1: loglikelihood: .*continuation"),
    ({"question": "x", "answer": []}, r"exam\.jsonl:1: answer: .*\[\].*text"),
    ({"question": "x", "answer": {"start": [3]}}, r"exam\.jsonl:1: answer: .*\{'start'"),
    ({"question": "x", "answer": ""}, r"exam\.jsonl:1: completion: .*' '"),
    ({"task": "t", "prompt": "p"}, r"exam\.jsonl:1: completion: missing"),
    ({"task": "t", "prompt": 3}, r"exam\.jsonl:1: prompt: .*\b3\b.*completion: missing"),
    ({**PLAIN, "task": ""}, r"exam\.jsonl:1: task: .*''"),
    ({**PLAIN, "label": False}, r"exam\.jsonl:1: label: got false.*undesirable"),
    ({"prompt": TURNS[:1], "completion": TURNS[1:], "label": False}, r"exam\.jsonl:1: label: got false"),
    ({**PLAIN, "gold": 2, "choices": ["c"]}, r"gold: .*\b2\b.*\b1 choices"),
    ({"messages": turns(QUESTION, " ")}, r"exam\.jsonl:1: .*answer.*empty"),
    ({"messages": TURNS[:1]}, r"exam\.jsonl:1: .*assistant.*answer"),
    ({"messages": TURNS[1:]}, r"exam\.jsonl:1: .*turns.*order"),
    ({"messages": [{"role": "boss", "content": "x"}]}, r"exam\.jsonl:1: turn 0: .*'boss'"),
    # half a surrogate pair, before anything runs
    ({"messages": turns("a\ud800", "b")}, "prompt: .*surrogate"),
    ({**PLAIN, "prompt": "x\ud800"}, r"prompt: .*surrogate.*\b1\b"),
    ({**PLAIN, "completion": "x\ud800"}, r"completion: .*surrogate.*\b1\b"),
    ({**PLAIN, "unit_id": "x\ud800"}, r"unit_id: .*surrogate.*\b1\b"),
    ({**PLAIN, "task": "x\ud800"}, r"task:.*unicode"),
    (b"{bad", r"exam\.jsonl:1: .*JSON"),
    (b'["list"]', r"exam\.jsonl, record 1: got str"),
    (b'{"task": "\xff"}', r"exam\.jsonl:1: .*JSON"),
    (b"\n", r"exam\.jsonl: .*units"),
    (b'{"prompt": "p", "completion": "c", "unit_id": "two"}\n' * 2, r"'two'.*twice"),
]


@pytest.mark.parametrize(("content", "message"), REFUSED)
def test_a_record_that_is_no_unit_is_named(tmp_path, content, message):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (tmp_path / "exam.jsonl").write_bytes(data)
    with pytest.raises(TargetError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_and_damaged_files(tmp_path):
    (tmp_path / "bad.jsonl.gz").write_bytes(b"no gzip")
    for name, message in (("gone.jsonl", "no such"), ("bad.jsonl.gz", "damaged")):
        with pytest.raises(TargetError, match=f"{name}: {message}"):
            load(tmp_path, name=name)


def test_units_of_parquet_are_those_of_json_lines(tmp_path):
    """Members that a struct has for other records only are not there, and names keep all their digits."""
    calls = [
        {"function": {"name": "f", "arguments": arguments}} for arguments in ({"city": "Rome"}, {"to": "Ann", "n": 1})
    ]
    chats = [
        {
            "unit_id": 2**60 + k,
            "messages": [
                {"role": "user", "content": QUESTION},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ],
        }
        for k, call in enumerate(calls)
    ]
    two = {f"gen_args_{k}": {"arg_0": "Q:", "arg_1": text} for k, text in enumerate((" a", " b"))}
    command = {"doc": {"q": "Sky?"}, "target": "1", "resps": []}
    logs = [
        {"doc_id": 7, **command, "arguments": two},
        {"doc_id": 8, **command, "arguments": two | {"gen_args_2": {"arg_0": "Q:", "arg_1": " c"}}},
    ]
    for name, records in (("chats", chats), ("logs", logs)):
        expected = load(tmp_path, *records, name=f"{name}.jsonl")
        table = pa.Table.from_pylist(records)
        if name == "chats":
            ids = pa.chunked_array([pa.array([record["unit_id"] for record in records])]).cast(pa.decimal128(20, 0))
            table = table.set_column(0, "unit_id", ids)
        pq.write_table(table, tmp_path / f"{name}.parquet")
        assert load(tmp_path, name=f"{name}.parquet").units == expected.units


def test_files_of_a_directory_of_questions_that_are_not_read_are_noted(tmp_path):
    (tmp_path / "exam").mkdir()
    (tmp_path / "exam" / "a.JSONL").write_text(json.dumps({"prompt": "Q", "completion": " a"}) + "\n")
    (tmp_path / "exam" / "b.jsonl.lz4").write_text("x")
    settings = TargetSettings(names=(f"{tmp_path}/exam", f"{tmp_path}/exam/a.JSONL"), units_per_target=1)
    assert unread_files_notes(settings) == [f"{tmp_path}/exam: 1 file not read: b.jsonl.lz4"]
    (unit,) = load_units(TargetSettings(names=(f"{tmp_path}/exam/a.JSONL",))).units
    assert (unit.target, unit.prompt) == ("a", "Q")
