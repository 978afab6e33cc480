"""Rows that contain questions of the targets are found in whatever spelling, and other rows are not."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grasp
from grasp.artifact.reader import ArtifactReader
from grasp.corpus.conversations import Conversation
from grasp.extract.build import add_targets
from grasp.extract.leaks import GRAM, QuestionIndex, find_leaks, question_words
from grasp.extract.local import build_artifact
from grasp.extract.merge import merge
from grasp.extract.progress import Silent
from grasp.targets import Unit
from tests.extract.test_merge import write_lines
from tests.extract.world import texts, world

QUESTION = "Which part of a green plant makes sugar out of light, water and air during the day"
OTHER = "How many wooden boats crossed the wide river before the old bridge fell into it"
WORDS = st.sampled_from(OTHER.lower().split())


def unit(question, answer=" the leaf", target="t", unit_id="u"):
    return Unit(unit_id, target, f"Question: {question}?\nAnswer:", answer)


def slow(question, text):
    """Whether the words of a question stand in a text, one after the other."""
    words, asked = text.lower().split(), question.lower().replace(",", "").split()
    return any(words[k : k + len(asked)] == asked for k in range(len(words)))


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
    assert index.questions_in(text) == sorted([0] * (OTHER in text) + [1] * expected)


@settings(max_examples=200)
@given(st.lists(WORDS, min_size=8, max_size=12), st.lists(WORDS, max_size=60), st.integers(0, 60), st.booleans())
def test_what_is_there_to_the_letter_is_found(asked, around, place, put):
    text = " ".join([*around[:place], *(asked if put else []), *around[place:]])
    index = QuestionIndex([Unit("u", "t", " ".join(asked), " x")])
    if slow(" ".join(asked), text):
        assert index.questions_in(text) == [0]
    if not any(" ".join(asked[k : k + GRAM]) in text for k in range(len(asked) - GRAM + 1)):
        assert index.questions_in(text) == []


def test_what_all_prompts_have_in_common_is_no_part_of_a_question():
    shots = "Question: What is wet?\nAnswer: water\n\n"
    units = [Unit(f"u{i}", "t", f"{shots}Question: {text}\nAnswer:", " x") for i, text in enumerate((QUESTION, OTHER))]
    assert question_words(units) == [QUESTION.lower().replace(",", "").split(), OTHER.lower().split()]
    alone = question_words([unit(OTHER)])
    assert alone == [OTHER.lower().split()]


def test_a_short_question_is_looked_for_with_its_answer_or_not_at_all():
    units = [unit("Who is wet", " the sea is wet whatever they say of it"), unit("What is hot", " fire", unit_id="v")]
    index = QuestionIndex(units)
    assert index.n_questions == 1
    assert index.questions_in("who is wet? what is hot? fire") == []
    assert index.questions_in("who is wet? the sea is wet whatever they say of it, what is hot? fire") == [0]


def test_of_a_conversation_what_the_user_said_last_is_the_question():
    turns = ({"role": "user", "content": "hi " * 20}, {"role": "assistant", "content": "hello"})
    asked = Conversation((*turns, {"role": "user", "content": QUESTION}, {"role": "assistant", "content": "leaf"}))
    index = QuestionIndex([Unit("u", "t", "<|system|> You help. " * 9, "leaf", conversation=asked)])
    assert index.questions_in(f"well: {QUESTION}") == [0]
    assert index.questions_in("<|system|> You help. " * 9) == []


def decoded(rows):
    return ["".join(map(chr, row)) for row in rows]


class Shards:
    """Rows whose token ids are the codes of their characters."""

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
def test_rows_are_found_wherever_shards_begin(size):
    texts = ["none of it", QUESTION, OTHER, "nothing", f"{OTHER}? {QUESTION}?"]
    units = [unit(QUESTION), unit(OTHER, target="s", unit_id="o"), unit("x", " y", target="s", unit_id="short")]
    found = find_leaks(Shards(texts, size), units, decoded)
    assert [rows.tolist() for rows in found] == [[1, 4], [2, 4], []]


@pytest.mark.parametrize("size", [1, 2, 100])
def test_a_question_across_a_cut_is_in_both_rows_of_its_document(size, monkeypatch):
    cut = len(QUESTION) // 2
    shards = Shards(["none", f"well: {QUESTION[:cut]}", f"{QUESTION[cut:]}?", "none"], size)
    found = find_leaks(shards, [unit(QUESTION)], decoded)[0]
    assert found.tolist() == []  # they are documents of their own
    monkeypatch.setattr(Shards, "documents", "same")
    assert find_leaks(shards, [unit(QUESTION)], decoded)[0].tolist() == [1, 2]


@pytest.fixture(scope="module")
def leaky(tmp_path_factory):
    """Settings whose corpus holds a question of `facts` in row-2 and one of `more` in row-5, and its lines."""
    root = tmp_path_factory.mktemp("leaky")
    settings = world(root)
    for name, question in (("facts", QUESTION), ("more", OTHER)):
        asked = [question, f"{question.split()[0]} has nobody asked the stone about its heart of iron and salt"]
        write_lines(root / f"{name}.jsonl", 0, [])
        lines = [{"task": name, "unit_id": f"{name}-{i}", "question": q, "answer": "salt"} for i, q in enumerate(asked)]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = texts(12, seed=3)
    lines[2] = f"{lines[2]} {QUESTION}? {lines[3]}"
    lines[5] = f"He said: {OTHER.upper()}!"
    place = write_lines(root / "leaky.jsonl", 0, lines)
    corpus = settings.corpus.model_copy(update={"path": place, "max_length": 128})  # a question is in one row
    return root, settings.model_copy(update={"corpus": corpus}), lines


def leaked(artifact, target):
    rows = artifact.rows(artifact.leaked_rows(target))
    return {name.split("#")[0] for name in rows["row_id"].to_pylist()}


def test_build_notices_leaks_and_the_verbs_repeat_them(leaky):
    root, settings, _ = leaky
    heard = []

    class Notes(Silent):
        def note(self, line):
            heard.append(line)

    build_artifact(settings, root / "art", progress=Notes())
    assert "2 rows contain questions of facts" in heard
    add_targets(root / "art", str(root / "more.jsonl"))
    artifact = grasp.open(root / "art")
    reader = ArtifactReader.open(root / "art")
    assert (leaked(reader, "facts"), leaked(reader, "more")) == ({"row-2"}, {"row-5"})
    for result in (artifact.predict(drop="n_tokens > 40"), artifact.select("50%", "facts")):
        assert any("rows contain questions of facts" in note for note in result.notes)
    whole, clean = artifact.select("100%", "more"), artifact.select("90%", "more", drop_leaks=True)
    assert "row-5" in whole.row_ids
    assert "row-5" not in clean.row_ids
    assert "row-2" in artifact.select("100%", "more", drop_leaks=False).row_ids


def test_leaks_of_parts_are_those_of_one_build(leaky):
    root, settings, lines = leaky
    places = []
    for k, part in enumerate((slice(0, 4), slice(4, 12))):
        path = write_lines(root / f"part-{k}.jsonl", part.start, lines[part])
        corpus = settings.corpus.model_copy(update={"path": path})
        own = settings.model_copy(update={"corpus": corpus, "like": str(places[0]) if places else None})
        names = {"names": (str(root / "facts.jsonl"), str(root / "more.jsonl"))}
        own = own.model_copy(update={"targets": own.targets.model_copy(update=names)})
        places.append(build_artifact(own, root / f"art-{k}"))
    merge([str(place) for place in places], root / "merged")
    merged = ArtifactReader.open(root / "merged")
    assert (leaked(merged, "facts"), leaked(merged, "more")) == ({"row-2"}, {"row-5"})
