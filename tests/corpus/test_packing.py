"""Laws: packing neither loses nor adds tokens, and resumes from the cursor of any row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grasp.corpus import packing as corpus_packing
from grasp.corpus.packing import START, Skipped
from grasp.errors import CorpusError
from tests.corpus.world import TEXTS, Words, cut_slowly, document, settings_for, tokens_of


def pack(documents, tokenizer, log=None, cursor=START, **changes):
    yield from corpus_packing.pack(
        documents[cursor.document :], settings_for("none", **changes), tokenizer, cursor, log
    )


def texts_as_documents(texts):
    return [document(i, text) for i, text in enumerate(texts)]


def ids_of(rows):
    return [row.input_ids.tolist() for row in rows]


@given(TEXTS, st.integers(2, 6), st.sampled_from([0, None]), st.sampled_from([None, 1, 2]))
def test_document_packing_cuts_each_document_separately(texts, length, eos_id, most):
    tokenizer, log = Words(eos_id=eos_id), Skipped()
    changes = {"max_length": length, "max_rows_per_document": most}
    rows = ids_of(pack(texts_as_documents(texts), tokenizer, log, **changes))
    cut = [cut_slowly(ids, length) for ids in tokens_of(texts, tokenizer)]
    expected_rows = [row for parts in cut for row in parts[:most]]
    assert rows == [row for row in expected_rows if len(row) > 1]
    assert log.counts.get("one_token", 0) == sum(len(row) == 1 for row in expected_rows)
    assert log.counts.get("cut", 0) == sum(most is not None and len(parts) > most for parts in cut)
    assert log.counts.get("empty", 0) == sum(text == "" for text in texts)
    assert log.counts.get("whitespace", 0) == sum(text != "" and not text.strip() for text in texts)


@st.composite
def mixed_documents(draw):
    ids = st.lists(st.integers(0, 499), max_size=9)
    drawn = draw(st.lists(st.one_of(st.text("ab  ", max_size=30), ids), min_size=1, max_size=8))
    return [document(i, *((x, None) if isinstance(x, str) else (None, x))) for i, x in enumerate(drawn)]


@given(mixed_documents(), st.integers(2, 5), st.sampled_from([None, 2]), st.sampled_from([(), (499,)]))
def test_packing_resumes_from_any_row(documents, length, most, prefix):
    changes = {"max_length": length, "max_rows_per_document": most}
    log = Skipped()
    # a shard stores the cursor of the row, and the counts of records skipped before it
    tokenizer = Words(prefix_ids=prefix)
    states = [(row, log.drain()) for row in pack(documents, tokenizer, log, **changes)]
    rows, tail = [row for row, _ in states], log.drain()
    for k, row in enumerate(rows):
        resumed = Skipped()
        for _, skipped in states[: k + 1]:
            resumed.extend(skipped.counts, skipped.ids, skipped.examples)
        rest = list(pack(documents, tokenizer, resumed, cursor=row.next_cursor, **changes))
        assert [(r.row_id, r.next_cursor, r.snippet) for r in rest] == [
            (r.row_id, r.next_cursor, r.snippet) for r in rows[k + 1 :]
        ]
        assert ids_of(rest) == ids_of(rows[k + 1 :])
        whole = Skipped()
        for skipped in (*(skipped for _, skipped in states), tail):
            whole.extend(skipped.counts, skipped.ids, skipped.examples)
        assert resumed == whole


@given(mixed_documents(), st.integers(2, 5))
def test_names_are_unique_and_count_from_the_document(documents, length):
    rows = list(pack(documents, Words(), max_length=length))
    assert len({row.row_id for row in rows}) == len(rows)
    for row in rows:
        stem, _, ordinal = row.row_id.partition("#")
        assert stem == row.doc_id
        assert not ordinal or f"{stem}#{int(ordinal)}" == row.row_id


def test_rows_of_a_document_are_numbered_after_the_first():
    rows = list(pack([document(0, "a b c d e f g", topic="x")], Words(), max_length=3))
    assert [row.row_id for row in rows] == ["d0", "d0#1", "d0#2"]
    assert [row.labels for row in rows] == [{"topic": "x"}] * 3


@pytest.mark.parametrize(("tokens", "n_rows"), [(3, 1), (32, 1), (35, 1), (36, 2), (67, 2), (68, 3)])
@pytest.mark.parametrize("kind", ["text", "ids"])
def test_short_ends_of_split_documents_are_skipped_and_named(kind, tokens, n_rows):
    words, log = " ".join(f"w{i}" for i in range(tokens)), Skipped()
    documents = [document(0, words) if kind == "text" else document(0, ids=range(tokens))]
    rows = list(pack(documents, Words(eos_id=None), log, max_length=32))
    assert len(rows) == n_rows
    left = tokens - sum(len(row.input_ids) for row in rows)
    assert left < 4
    assert log.ids == ({"short_end": [f"d0#{n_rows}"]} if left else {})
    assert not list(pack(documents, Words(eos_id=None), log, cursor=rows[-1].next_cursor, max_length=32))
    every = pack(documents, Words(eos_id=None), max_length=32, shortest_end=1)
    assert sum(len(row.input_ids) for row in every) == tokens


def test_token_ids_are_used_unchanged_and_split_like_texts():
    documents = [document(0, "a b"), document(1, ids=range(1, 9)), document(2, ids=[7]), document(3, "c d")]
    log = Skipped()
    rows = list(pack(documents, Words(), log, max_length=5))
    words = Words().encode(["a b", "c d"])
    assert ids_of(rows) == [[*words[0], 0], [1, 2, 3, 4, 5], [6, 7, 8], [*words[1], 0]]
    assert [row.row_id for row in rows] == ["d0", "d1", "d1#1", "d3"]
    assert log.ids == {"one_token": ["d2"]}


class NoOffsets(Words):
    def encode_with_spans(self, texts):
        return [(ids, None) for ids in self.encode(texts)]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=60), st.integers(2, 9))
def test_the_snippet_is_the_text_of_the_row(sizes, length):
    words = [f"{i}".ljust(size, "x") for i, size in enumerate(sizes)]
    tokens = Words(eos_id=None)
    changes = {"max_length": length, "shortest_end": 1, "snippet_chars": 10_000}
    for row in pack([document(0, "  ".join(words))], tokens, **changes):
        assert tokens.encode([row.snippet]) == [row.input_ids.tolist()]
    for row in pack([document(0, "  ".join(words))], NoOffsets(eos_id=None), **changes):
        if row.n_tokens < len(words):
            assert [row.snippet] == tokens.decode([row.input_ids.tolist()])


@pytest.mark.parametrize("bad", [500, 501, -1, 2**32 + 5])
def test_ids_outside_the_vocabulary_are_refused(bad):
    class Wrong(Words):
        def encode(self, texts):
            return [[3, bad, 4] for _ in texts]

    message = rf"'d0' .*{bad} at position 1"
    with pytest.raises(CorpusError, match=message):
        list(pack([document(0, "a b c")], Wrong()))
    if bad < 2**31:
        with pytest.raises(CorpusError, match=message):
            list(pack([document(0, ids=[3, bad])], Words()))
