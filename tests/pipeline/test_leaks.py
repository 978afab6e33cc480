"""Rows that contain questions of the targets are found in every spelling, and other rows are not."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grasp
from grasp.artifact.reader import ArtifactReader
from grasp.corpus.conversations import Conversation
from grasp.merging.merge import merge
from grasp.pipeline import leaks
from grasp.pipeline.add_targets import add_targets
from grasp.pipeline.leaks import GRAM_WORDS, QuestionIndex, find_leaks, question_words
from grasp.pipeline.pipeline import build_artifact
from grasp.targets import Unit
from tests.corpus.world import write_jsonl
from tests.mentions import assert_mentions
from tests.merging.test_merge import write_lines
from tests.pipeline.test_pipeline import Notes
from tests.pipeline.world import changed, texts, world

QUESTION = "Which part of a green plant makes sugar out of light, water and air during the day"
OTHER = "How many wooden boats crossed the wide river before the old bridge fell into it"
WORDS = st.sampled_from(OTHER.lower().split())


def unit(question, answer=" the leaf", target="t", unit_id="u"):
    return Unit(unit_id, target, f"Question: {question}?\nAnswer:", answer)


def found_in(index, text):
    return sorted({e for e, _, _ in index.questions_in(text)})


def slow(question, text):
    words, query_words = text.lower().split(), question.lower().replace(",", "").split()
    return any(words[k : k + len(query_words)] == query_words for k in range(len(words)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (QUESTION, True),
        (f"Quiz! {QUESTION.upper().replace(' ', '  ')}... and so on", True),
        (QUESTION.replace(",", " --").replace("light", "light\n"), True),
        (QUESTION.replace("light", "lamps"), True),  # one word of sixteen
        (QUESTION.replace("light", "lamps").replace("plant", "tree").replace("day", "night"), False),
        (" ".join(QUESTION.split()[::-1]), False),
        (QUESTION.replace("makes", "makes " + "and then again " * 30), False),
        (OTHER, False),
        ("", False),
        ("a " * 500 + QUESTION + " b" * 500, True),
    ],
)
def test_a_question_is_found_in_other_spelling_and_with_a_word_changed(text, expected):
    units = [unit(OTHER, unit_id="o"), unit(QUESTION)]
    index = QuestionIndex(units)
    assert found_in(index, text) == [0] * (OTHER in text) + [1] * expected


@settings(max_examples=200)
@given(st.lists(WORDS, min_size=8, max_size=12), st.lists(WORDS, max_size=60), st.integers(0, 60), st.booleans())
def test_verbatim_questions_are_found(query_words, around, place, put):
    text = " ".join([*around[:place], *(query_words if put else []), *around[place:]])
    index = QuestionIndex([Unit("u", "t", " ".join(query_words), " x")])
    if slow(" ".join(query_words), text):
        assert found_in(index, text) == [0]
    if not any(" ".join(query_words[k : k + GRAM_WORDS]) in text for k in range(len(query_words) - GRAM_WORDS + 1)):
        assert index.questions_in(text) == []


SHOTS = (
    "Question: What is wet, says the child to the old man by the sea?\nAnswer: water\n\n",
    "Question: What is hot, says the man to the young child by the fire?\nAnswer: coal\n\n",
)
SPLIT = tuple(QUESTION.lower().replace(",", "").split()), tuple(OTHER.lower().split())


@pytest.mark.parametrize("shots", [("", ""), (SHOTS[0], SHOTS[0]), SHOTS, (SHOTS[0], SHOTS[1] + SHOTS[0])])
def test_examples_in_the_prompt_are_no_part_of_a_question(shots):
    prompts = [f"{shot}Question: {text}?\nAnswer:" for shot, text in zip(shots, (QUESTION, OTHER), strict=True)]
    units = [Unit(f"u{i}", "t", prompt, " x") for i, prompt in enumerate(prompts)]
    index = QuestionIndex(units)
    assert found_in(index, f"so: {QUESTION}") == [0]
    assert found_in(index, f"so: {OTHER}") == [1]
    assert found_in(index, "what is wet says the child to the old man by the sea") == []
    for sequences, words in zip(question_words(units), SPLIT, strict=True):
        assert words in sequences


def test_a_question_is_found_without_its_passage_unless_many_units_share_it():
    story = "The ship lay still on the flat sea and the crew had nothing to drink but rain from the sails"
    ask = "What can be said about the people in this passage"
    units = [Unit("a", "t", f"{story}\n\n{QUESTION}?", " x"), Unit("b", "t", f"{story[::-1]} so\n\n{ask}?", " y")]
    units.append(Unit("c", "t", f"Other words than those: {story.upper()} again\n\n{ask}?", " z"))
    index = QuestionIndex(units)
    assert found_in(index, f"- {QUESTION}") == [0]
    assert found_in(index, ask) == []


def test_a_short_question_is_found_only_verbatim_with_its_answer():
    units = [unit("Who is wet", " the sea"), unit("What", " fire", unit_id="v"), unit("How old", " 9", unit_id="w")]
    index = QuestionIndex([unit(ask.prompt[10:-9], ask.completion, unit_id=ask.unit_id) for ask in units])
    assert index.compared == {0, 2}
    assert found_in(index, "Question: who is wet? fire") == []
    assert found_in(index, "... Question: Who is wet? Answer: the sea. Yes") == [0]
    assert found_in(index, "Question: who was wet? Answer: the sea") == []


def test_scripts_without_spaces_are_compared_by_characters():
    question = "\u6c34\u306e\u6cb8\u70b9\u306f\u4f55\u5ea6\u3067\u3059\u304b"
    index = QuestionIndex([Unit("u", "t", question, " 100")])
    assert found_in(index, f"\u554f\u984c: {question} \u7b54\u3048") == [0]
    assert found_in(index, question[::-1]) == []


def test_a_text_that_repeats_a_question_is_searched_in_linear_time():
    index = QuestionIndex([unit(" ".join(["to be or not to be"] * 60)), unit(QUESTION, unit_id="v")])
    text = "to be or not to be " * 3000 + QUESTION
    assert found_in(index, text) == [0, 1]
    assert len(index.questions_in(text)) < 200


def test_the_question_of_a_conversation_is_the_last_user_message():
    turns = ({"role": "user", "content": "hi " * 20}, {"role": "assistant", "content": "hello"})
    last_turns = ({"role": "user", "content": QUESTION}, {"role": "assistant", "content": "leaf"})
    conversation = Conversation((*turns, *last_turns))
    index = QuestionIndex([Unit("u", "t", "<|system|> You help. " * 9, "leaf", conversation=conversation)])
    assert found_in(index, f"well: {QUESTION}") == [0]
    assert found_in(index, "<|system|> You help. " * 9) == []


def decoded(rows):
    return ["".join(map(chr, row)) for row in rows]


class Shards:
    documents = ""

    def __init__(self, texts, size):
        self.texts, self.size = texts, size
        self.n_shards = -(-len(texts) // size)

    def shard(self, k):
        class Shard:
            start = k * self.size
            table = {"doc_id": pa.array([self.documents or f"d{i}" for i in range(k * self.size, len(self.texts))])}
            texts = self.texts[k * self.size : (k + 1) * self.size]

            def __len__(self):
                return len(self.texts)

            def ids(self, i):
                return np.array([ord(c) for c in self.texts[i]])

        return Shard()


@pytest.mark.parametrize("size", [1, 2, 100])
def test_rows_are_found_independently_of_shard_boundaries(size):
    texts = ["none of it", QUESTION, OTHER, "nothing", f"{OTHER}? {QUESTION}?"]
    units = [unit(QUESTION), unit(OTHER, target="s", unit_id="o"), unit("x", " y", target="s", unit_id="short")]
    result = find_leaks(Shards(texts, size), units, decoded)
    assert {target: leaks.row_index.tolist() for target, leaks in result.items()} == {"t": [1, 4], "s": [2, 4]}
    assert (result["s"].n_compared, result["s"].n_questions) == (1, 2)


@pytest.mark.parametrize("size", [1, 2, 100])
@pytest.mark.parametrize("chars", [1, 60, 10_000])
def test_a_question_across_cuts_is_found_in_every_row_with_a_part_of_it(size, chars, monkeypatch):
    monkeypatch.setattr(leaks, "CHUNK_CHARS", chars)
    monkeypatch.setattr(Shards, "documents", "same")
    third = len(QUESTION) // 3
    pieces = [f"well: {QUESTION[:third]}", QUESTION[third : 2 * third], f"{QUESTION[2 * third :]}?"]
    shards = Shards(["none " * 40, *pieces, "none " * 50, "none"], size)
    assert find_leaks(shards, [unit(QUESTION)], decoded)["t"].row_index.tolist() == [1, 2, 3]


@pytest.fixture(scope="module")
def leaky(tmp_path_factory):
    root = tmp_path_factory.mktemp("leaky")
    settings = world(root)
    for name, question in (("facts", QUESTION), ("more", OTHER)):
        questions = [question, f"{question.split()[0]} has never asked the stone about its heart of iron and salt"]
        units = [{"unit_id": f"{name}-{i}", "question": text, "answer": "salt"} for i, text in enumerate(questions)]
        write_jsonl(root / f"{name}.jsonl", [{"task": name} | unit for unit in units])
    lines = texts(12, seed=3)
    lines[2] = f"{lines[2]} {QUESTION}? {lines[3]}"
    lines[5] = f"He said: {OTHER.upper()}!"
    place = write_lines(root / "leaky.jsonl", 0, lines)
    return root, changed(settings, corpus={"path": place, "max_length": 128}), lines  # a question is in one row


def leaked(artifact, target):
    rows = artifact.rows(artifact.leaks(target).row_index)
    return {name.split("#")[0] for name in rows["row_id"].to_pylist()}


def test_build_notices_leaks_and_other_functions_report_them_again(leaky):
    root, settings, _ = leaky
    notes = Notes()
    build_artifact(settings, root / "art", progress=notes)
    assert_mentions(notes.lines, "facts: 2 rows")  # it lies across the cut between two rows of row-2
    add_targets(root / "art", str(root / "more.jsonl"))
    artifact = grasp.open(root / "art")
    reader = ArtifactReader.open(root / "art")
    assert (leaked(reader, "facts"), leaked(reader, "more")) == ({"row-2"}, {"row-5"})
    for result in (artifact.predict(drop="n_tokens > 40"), artifact.select("50%", "facts")):
        assert_mentions(result.notes, "facts: 2 rows")
    whole, clean = artifact.select("100%", "more"), artifact.select("90%", "more", drop_leaks=True)
    assert "row-5" in whole.row_ids
    assert "row-5" not in clean.row_ids
    assert "row-2" in artifact.select("100%", "more", drop_leaks=False).row_ids


def test_leaks_of_parts_are_those_of_one_build(leaky):
    root, settings, lines = leaky
    places = []
    targets = {"names": (str(root / "facts.jsonl"), str(root / "more.jsonl"))}
    for k, part in enumerate((slice(0, 4), slice(4, 12))):
        path = write_lines(root / f"part-{k}.jsonl", part.start, lines[part])
        like = str(places[0]) if places else None
        part_settings = changed(settings, corpus={"path": path}, targets=targets, like=like)
        places.append(build_artifact(part_settings, root / f"art-{k}"))
    merge([str(place) for place in places], root / "merged")
    merged = ArtifactReader.open(root / "merged")
    assert (leaked(merged, "facts"), leaked(merged, "more")) == ({"row-2"}, {"row-5"})
