"""Texts of rows: the concatenated rows of a document equal the document."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.corpus import RowStore, read_documents
from grasp.corpus.documents import Corpus
from grasp.corpus.packing import pack
from grasp.corpus.sources import open_source
from grasp.models.tokenizer import HfTokenizer, train_tokenizer
from tests.corpus.world import Words, settings_for, write_jsonl

TEXTS = (
    " ".join(f"w{i}" for i in range(20)),
    "Fire  is hot. ",
    "naïve café — 日本語のテキスト 🎉🎉 end",
    "  one\n\ntwo\tthree  ",
    "a" * 40,
    "",
    "x",
)


@pytest.fixture(scope="module")
def bytes_tokenizer() -> HfTokenizer:
    return HfTokenizer(train_tokenizer(["fire is hot, and so on"] * 4, vocab_size=270), vocab_size=270)


def texts_of(store, corpus_settings, tokenizer, row_index):
    corpus = Corpus(open_source(corpus_settings.path), corpus_settings)
    return list(store.texts(np.asarray(row_index, dtype=np.int64), corpus, lambda: tokenizer))


def rows_with_texts(corpus_settings, tokenizer, directory):
    store = RowStore.write(directory, corpus_settings, tokenizer, shard_rows=5)
    texts = texts_of(store, corpus_settings, tokenizer, range(store.n_rows))
    documents = [row.document for row in pack(read_documents(corpus_settings), corpus_settings, tokenizer)]
    return [SimpleNamespace(text=text, document=d) for text, d in zip(texts, documents, strict=True)]


def write(directory, texts, **changes):
    lines = [{"text": text, "row_id": f"d{i}"} for i, text in enumerate(texts)]
    return settings_for(write_jsonl(directory / "c.jsonl", lines), **changes)


@settings(max_examples=20)
@given(texts=st.lists(st.one_of(st.sampled_from(TEXTS), st.text(max_size=60)), min_size=1, max_size=8))
def test_texts_do_not_depend_on_shards_or_on_the_requested_rows(texts, bytes_tokenizer, tmp_path_factory):
    place = tmp_path_factory.mktemp("texts")
    corpus_settings = write(place, [*texts, "there is one at least"])
    store = RowStore.write(place / "rows", corpus_settings, bytes_tokenizer, shard_rows=5)
    every = texts_of(store, corpus_settings, bytes_tokenizer, range(store.n_rows))
    other = RowStore.write(place / "other", corpus_settings, bytes_tokenizer, shard_rows=2)
    assert texts_of(other, corpus_settings, bytes_tokenizer, range(other.n_rows)) == every
    assert texts_of(store, corpus_settings, bytes_tokenizer, range(0, store.n_rows, 3)) == every[::3]


def test_a_changed_corpus_is_recognised_by_its_documents(tmp_path):
    corpus_settings = write(tmp_path, ["one two three", "four five six"])
    store = RowStore.write(tmp_path / "rows", corpus_settings, Words(), shard_rows=5)
    assert store.was_built_from(open_source(corpus_settings.path))
    write(tmp_path, ["one two three"])
    assert not store.was_built_from(open_source(corpus_settings.path))


@pytest.mark.parametrize("tokenizer", ["words", "bytes"])
def test_the_concatenated_rows_of_a_document_equal_the_document(tokenizer, bytes_tokenizer, tmp_path):
    chosen = Words(eos_id=None) if tokenizer == "words" else bytes_tokenizer
    rows = rows_with_texts(write(tmp_path, TEXTS), chosen, tmp_path / "rows")
    for i, text in enumerate(TEXTS):
        parts = [row for row in rows if row.document == i]
        skipped = tokenizer == "words" and len(text.split()) < 2  # a row of one token is skipped
        assert "".join(row.text for row in parts) in ("" if skipped else text, text.rstrip())
    assert any(len([row for row in rows if row.document == i]) >= 2 for i in range(len(TEXTS)))


def test_texts_are_unknown_without_offsets_of_tokens(tmp_path):
    corpus_settings = write(tmp_path, ["one two three four five six seven eight nine ten"])

    class WithoutSpans(Words):
        def encode_with_spans(self, texts):
            return [(ids, None) for ids in self.encode(texts)]

    assert [row.text for row in rows_with_texts(corpus_settings, WithoutSpans(), tmp_path / "rows")] == [None, None]
    lines = [{"text": "as it is", "input_ids": np.arange(1, 5).tolist()}, {"input_ids": [1, 2, 3]}]
    given_ids = settings_for(write_jsonl(tmp_path / "ids.jsonl", lines))
    assert [row.text for row in rows_with_texts(given_ids, Words(), tmp_path / "others")] == ["as it is", None]
