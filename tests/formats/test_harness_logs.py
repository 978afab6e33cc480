"""A sample log gives, for every document, the text that the harness scored as right, or one line says why not."""

import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from grasp.errors import TargetError
from grasp.settings import TargetSettings
from grasp.targets import load_units
from grasp.targets.margins import with_metric
from grasp.targets.unit_records import units_from_records

UNTIL = {"until": ["\n"], "do_sample": False}
WORDS = ("red", "l'été", 'a "b"')


def records(*samples):
    return [(f"log:{k}", sample) for k, sample in enumerate(samples, start=1)]


def read(*samples, task="t", loss_on="completion"):
    return units_from_records(records(*samples), task, loss_on)


def named(requests):
    return {f"gen_args_{k}": {f"arg_{j}": part for j, part in enumerate(request)} for k, request in enumerate(requests)}


def choice_record(doc_id, texts, target, *, context="Q?", delimiter=" ", likelihoods=None, gold=None, **more):
    """A document with a request for each text, as the harness logs it; with likelihoods also its accuracy."""
    sample = {"doc_id": doc_id, "doc": {"q": context}, "target": target}
    sample["arguments"] = [[context, delimiter + text] for text in texts]
    if likelihoods is not None:
        sample["filtered_resps"] = [[str(value), "False"] for value in likelihoods]
        sample["acc"] = float(likelihoods.index(max(likelihoods)) == gold)
    return sample | more


def generated(doc_id, target, doc=None, *, context="Q: x?\nA:", **more):
    sample = {"doc_id": doc_id, "doc": doc or {"question": "x"}, "target": target, "arguments": [[context, UNTIL]]}
    return sample | {"resps": [["y"]], "filtered_resps": ["y"], "exact_match": 0.0} | more


def as_table(requests):
    """As a table holds them: every cell is there, in the order of the alphabet."""
    cells = named(requests) | {f"gen_args_{k}": None for k in range(len(requests), 12)}
    return {name: cells[name] for name in sorted(cells)}


@pytest.mark.parametrize("write", [list, named, as_table, lambda requests: [tuple(request) for request in requests]])
@pytest.mark.parametrize("count", [2, 11])
def test_all_forms_of_arguments_give_the_same_units(write, count):
    requests = [["Q:", f" {k}th"] for k in range(count)]
    (unit,) = read({"doc_id": "9", "doc": {}, "target": count - 1, "arguments": write(requests)})
    assert (unit.unit_id, unit.prompt, unit.completion) == ("t:9", "Q:", f" {count - 1}th")
    assert unit.choices == tuple(text for _, text in requests)


@pytest.mark.parametrize("target", [1, "1", True, "True", "l'été", " l'été", "[1]", [1, 2], "[1, 0]", ["l'été", "red"]])
def test_a_target_is_a_position_or_a_text_or_a_list_of_either(target):
    (unit,) = read(choice_record(0, WORDS, target))
    assert (unit.completion, unit.choices[unit.gold]) == (" l'été", " l'été")


@pytest.mark.parametrize("target", ["[1, 0]", [1, 0, 1], ["l'été", "red"]])
def test_other_right_choices_are_no_wrong_answers(target):
    (unit,) = read(choice_record(0, ["red", "l'été", "blue"], target))
    assert unit.choices == (" l'été", " blue")
    assert [other.completion for other in with_metric(unit, "margin").others] == [" blue"]


def test_a_margin_needs_a_choice_that_is_wrong():
    (unit,) = read(choice_record(0, ["red", "l'été"], [0, 1]))
    with pytest.raises(TargetError, match="needs the wrong answers"):
        with_metric(unit, "margin")


@given(st.lists(st.text(min_size=1), min_size=2, max_size=4, unique_by=str.strip), st.data())
def test_the_text_of_a_choice_is_matched_after_any_delimiter(texts, data):
    gold = data.draw(st.integers(0, len(texts) - 1))
    assume(texts[gold].strip() and not texts[gold].isdecimal() and texts[gold] not in ("True", "False"))
    assume(not texts[gold].startswith("["))
    delimiter = data.draw(st.sampled_from(["", " ", "\n", " -> "]))
    (unit,) = read(choice_record(0, texts, texts[gold], delimiter=delimiter))
    assert (unit.completion, unit.gold) == (delimiter + texts[gold], gold)


DIGITS = st.permutations(["0", "1", "2"])
LIKELIHOODS = st.lists(st.integers(-9, -1), min_size=3, max_size=3, unique=True)


@given(st.lists(st.tuples(DIGITS, LIKELIHOODS, st.integers(0, 2)), min_size=1, max_size=8), st.booleans())
def test_numbers_among_numbers_are_read_as_scored_or_refused(documents, are_texts):
    """The accuracies of a log decide whether its targets are positions or texts; where they cannot, nothing is read."""
    samples = [
        choice_record(k, texts, texts[gold] if are_texts else str(gold), likelihoods=likelihoods, gold=gold)
        for k, (texts, likelihoods, gold) in enumerate(documents)
    ]
    fitting = set()
    for is_text in (True, False):
        right, agrees = [], []
        for (texts, likelihoods, _), sample in zip(documents, samples, strict=True):
            right.append(texts.index(sample["target"]) if is_text else int(sample["target"]))
            agrees.append((likelihoods.index(max(likelihoods)) == right[-1]) == sample["acc"])
        if all(agrees):
            fitting.add(tuple(right))
    if len(fitting) > 1:
        with pytest.raises(TargetError, match="number of"):
            read(*samples)
        return
    assert [unit.completion for unit in read(*samples)] == [f" {texts[gold]}" for texts, _, gold in documents]


def test_one_document_determines_the_encoding_of_the_whole_log():
    open_case = choice_record(0, "120", "1", likelihoods=[-2, -9, -1], gold=0)  # neither reading is the prediction
    telling = choice_record(1, "120", "1", likelihoods=[-1, -2, -3], gold=0)
    assert [unit.completion for unit in read(open_case, telling)] == [" 1", " 1"]
    with pytest.raises(TargetError, match=r"log:1.*number of"):
        read(open_case)


@given(st.lists(st.tuples(LIKELIHOODS, st.integers(0, 2)), min_size=1), st.integers(2, 3))
def test_contexts_that_are_the_choices_are_chosen_by_the_accuracy(documents, count):
    documents = [(likelihoods[:count], gold) for likelihoods, gold in documents if gold < count]
    samples = [
        choice_record(k, ["x"] * count, "x", likelihoods=likelihoods, gold=gold)
        | {"arguments": [[f"{k}{j} is", " x"] for j in range(count)]}
        for k, (likelihoods, gold) in enumerate(documents)
    ]
    undecided = count > 2 and any(not sample["acc"] for sample in samples)
    if undecided:
        with pytest.raises(TargetError, match="context"):
            read(*samples)
        return
    for unit, (k, (_, gold)) in zip(read(*samples) if samples else (), enumerate(documents), strict=True):
        assert (unit.prompt, unit.completion, unit.gold) == (f"{k}{gold} is", " x", gold)
        assert unit.choices[unit.gold] == unit.prompt


@pytest.mark.parametrize("in_turn", [True, False])
def test_requests_without_context_are_no_choices(in_turn):
    """acc_mutual_info scores every choice again after nothing, in turn with the others or after them."""
    scored = [["Q?", f" {word}"] for word in WORDS]
    bare = [["", word if in_turn else f" {word}"] for word in WORDS]
    requests = [request for pair in zip(scored, bare, strict=True) for request in pair] if in_turn else scored + bare
    sample = {"doc_id": 0, "doc": {}, "target": 2, "arguments": requests, "acc_mutual_info": 1.0}
    (unit,) = read(sample)
    assert (unit.completion, unit.choices) == (' a "b"', tuple(text for _, text in scored))


def test_a_scored_continuation_and_a_rolling_text_are_units_as_they_are():
    last_word = {"doc_id": 0, "doc": {"text": "the end of the road"}, "target": " road"}
    (unit,) = read(last_word | {"arguments": [["the end of the", " road"]]})
    assert (unit.prompt, unit.completion, unit.choices) == ("the end of the", " road", ())
    page = {"doc_id": 0, "doc": "= Page =\n text", "target": "= Page =\n text"}
    (unit,) = read(page | {"arguments": [["= Page =\n text"]]})
    assert (unit.prompt, unit.completion) == ("", "= Page =\n text")


ALIASES = st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=4)


@given(ALIASES, st.booleans(), st.booleans())
def test_the_first_of_several_right_answers_is_scored(aliases, as_text, in_doc):
    """The harness writes `str(list)`: whatever quotes, brackets or letters are in it."""
    assume(aliases[0].strip())
    doc = {"question": "x", "answer": aliases} if in_doc else {"question": "x"}
    assume(not any(str(aliases) in alias for alias in aliases))
    (unit,) = read(generated(0, str(aliases) if as_text else aliases, doc))
    assert unit.completion.removeprefix(" ") == aliases[0].removeprefix(" ")
    assert unit.completion[:1].isspace()


def test_a_text_that_looks_like_a_list_stays_a_text():
    code = [generated(k, f"['a{k}', 'b']", {"prompt": "print", "output": f"['a{k}', 'b']"}) for k in range(3)]
    assert [unit.completion for unit in read(*code)] == [f" ['a{k}', 'b']" for k in range(3)]
    # in a log of lists it is a list as well
    units = read(*code, generated(3, "['c', 'd']", {"answer": ["c", "d"]}))
    assert [unit.completion for unit in units] == [" a0", " a1", " a2", " c"]


@pytest.mark.parametrize("target", ["[1] is it", "[x]", "] )", "{'a': 1}"])
def test_brackets_are_text(target):
    (unit,) = read(generated(0, target))
    assert unit.completion == f" {target}"


@pytest.mark.parametrize(
    ("context", "target", "completion"), [("A:", "4", " 4"), ("A:\n", "4", "4"), ("A:", " 4", " 4"), ("A: ", "4", "4")]
)
def test_an_answer_follows_after_one_space_or_the_white_space_there_is(context, target, completion):
    (unit,) = read(generated(0, target, context=context))
    assert (unit.prompt, unit.completion) == (context, completion)


@pytest.mark.parametrize("pack", [lambda text: [text], lambda text: text, json.loads])
def test_messages_to_a_chat_model_are_a_conversation(pack):
    turns = [{"role": role, "content": text, "type": "text"} for role, text in (("system", "s"), ("user", "2+2?"))]
    (unit,) = read(generated(0, "4", context=pack(json.dumps(turns))), loss_on="assistant")
    assert [turn["role"] for turn in unit.conversation.turns] == ["system", "user", "assistant"]
    assert (unit.conversation.turns[-1]["content"], unit.loss_on) == ("4", "completion")


@pytest.mark.parametrize(
    "doc", [{"answer": 4}, {"answer": "4", "steps": list("abcdef")}, {"answer": "4", "choices": list("345678")}, {}]
)
def test_a_number_may_be_the_answer(doc):
    (unit,) = read(generated(0, "4", {"q": "2+2?"} | doc))
    assert unit.completion == " 4"


def test_a_document_that_is_logged_for_every_filter_is_one_unit():
    lines = [generated(k, "4", filter=name) for name in ("strict-match", "flexible-extract") for k in range(2)]
    assert [unit.unit_id for unit in read(*lines)] == ["t:0", "t:1"]
    with pytest.raises(TargetError, match=r"log:2: document 't:0' .*completion"):
        read(generated(0, "4", filter="a"), generated(0, "5", filter="b"))


PICTURE = named([["<image> what?", UNTIL, {"visual": ["x"]}]])
REFUSED = [
    (choice_record(0, WORDS, "blue"), r"target:.*'blue'.* 3"),
    (choice_record(0, WORDS, "-1"), r"target:.*'-1'"),
    (choice_record(0, WORDS, 3), r"target:.*'3'"),
    (choice_record(0, WORDS, None), r"target:.*'None'"),
    (choice_record(0, ("a", "  "), 1), "completion:"),
    ({**generated(0, "4"), "arguments": PICTURE}, "images"),
    ({**generated(0, "4"), "arguments": [[["a", "b"], UNTIL]]}, "text or messages"),
    ({**generated(0, "4"), "arguments": [["Q", " a"], ["Q", 3]]}, "arguments: .*context"),
    ({**generated(0, "4"), "arguments": []}, "arguments:"),
    ({**generated(0, "4"), "arguments": {"x": ["Q", " a"]}}, "arguments:"),
    ({**generated(0, "4"), "acc_mutual_info": 1, "arguments": [["", " a"], ["", " b"]]}, "acc_mutual_info"),
    (generated(0, None), r"target:.*missing"),
    (generated(0, "None"), r"target:.*missing"),
    (generated(0, "[]"), "empty"),
    (generated(0, "['a' 'b']"), "list"),  # as numpy writes it: Python would read 'ab'
    (generated(0, '["a", "b"]'), "list"),
    (generated(0, [["a"], ["b"]]), "list"),
    (generated(0, "1", {"q": "x", "label": 1}), "number of a choice"),
    (generated(0, "1", {"q": "x", "answer": 1, "choices": ["no", "yes"]}), "number of a choice"),
    (generated(0, "1", {"q": "x", "answer": "1", "options": "['no', 'yes']"}), "number of a choice"),
    (generated(0, "0", {"q": "x", "answerKey": "0", "choices": {"text": ["no", "yes"]}}), "number of a choice"),
    (generated(0, "number,spans", {"answer": {"number": "", "spans": []}}), "document"),
    (generated(0, "assert f(1) == 2", **{"pass@1": 0.0}), "tests or rules"),
    (generated(0, "0", prompt_level_strict_acc=True), "tests or rules"),
    (generated(0, "4", context='[{"role": "assistant", "content": "A:"}]'), "order"),
    (generated(0, " "), "completion:"),
]


@pytest.mark.parametrize(("sample", "message"), REFUSED)
def test_records_without_the_scored_text_are_refused(sample, message):
    with pytest.raises(TargetError, match=message) as caught:
        read(sample)
    assert str(caught.value).startswith("log:1: ")


def load(*paths, **settings):
    return load_units(TargetSettings(names=tuple(map(str, paths)), units_per_target=None, **settings))


def write(path, *samples, array=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(sample) for sample in samples]
    path.write_text("[\n" + ",\n".join(lines) + "\n]" if array else "\n".join(lines))
    return path


def test_logs_of_several_tasks_number_their_documents_alike(tmp_path):
    paths = [write(tmp_path / f"samples_{name}_2025-01-02T03-04-05.6.jsonl", generated(0, name)) for name in "ab"]
    units = load(*paths)
    assert {unit.unit_id: unit.completion for unit in units.units} == {"a:0": " a", "b:0": " b"}
    assert load(f"{tmp_path}/").fingerprint == units.fingerprint  # or the directory that holds them
    write(tmp_path / "other" / "samples_b_2025-02-02T03-04-05.6.jsonl", generated(0, "b"))
    with pytest.raises(TargetError, match="same task"):
        load(f"{tmp_path}/")


@pytest.mark.parametrize("name", ["pretrained__x_sciq.jsonl", "sciq.json"])
def test_a_file_may_be_one_list_of_samples(tmp_path, name):
    (unit,) = load(write(tmp_path / name, generated(0, ["4", "four"]), array=True)).units
    assert unit.completion == " 4"
