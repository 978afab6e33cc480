"""Every row knows its text: the rows of a document put together are the document, and the rows are those of a store."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.corpus import RowStore, read_documents
from grasp.corpus.packing import pack, row_bytes
from grasp.models.tokenizer import HfTokenizer, train_tokenizer
from tests.corpus.world import Words, rows_of, settings_for, write_jsonl

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


def rows_with_texts(asked, tokenizer):
    return list(pack(read_documents(asked), asked, tokenizer, with_texts=True))


def write(directory, texts, **changes):
    lines = [{"text": text, "row_id": f"d{i}"} for i, text in enumerate(texts)]
    return settings_for(write_jsonl(directory / "c.jsonl", lines), **changes)


@pytest.mark.parametrize("packing", ["document", "concat"])
@settings(max_examples=20)
@given(texts=st.lists(st.one_of(st.sampled_from(TEXTS), st.text(max_size=60)), min_size=1, max_size=8))
def test_rows_and_texts_are_those_of_the_store(packing, texts, bytes_tokenizer, tmp_path_factory):
    place = tmp_path_factory.mktemp("texts")
    asked = write(place, [*texts, "there is one at least"], packing=packing)
    store = RowStore.write(place / "rows", asked, bytes_tokenizer, shard_rows=5)
    found = rows_with_texts(asked, bytes_tokenizer)
    digest = hashlib.blake2b(RowStore.seed, digest_size=16)
    for row in found:
        digest.update(row_bytes(row.row_id, row.input_ids, row.labelled))
    assert [(row.row_id, row.input_ids.tolist()) for row in found] == [(r["row_id"], ids) for r, ids in rows_of(store)]
    assert digest.hexdigest() == store.fingerprint


@pytest.mark.parametrize("tokenizer", ["words", "bytes"])
def test_the_rows_of_a_document_put_together_are_the_document(tokenizer, bytes_tokenizer, tmp_path):
    chosen = Words(eos_id=None) if tokenizer == "words" else bytes_tokenizer
    found = rows_with_texts(write(tmp_path, TEXTS), chosen)
    for i, text in enumerate(TEXTS):
        parts = [row for row in found if row.document == i]
        skipped = tokenizer == "words" and len(text.split()) < 2  # a row of one token is none
        assert "".join(row.text for row in parts) in ("" if skipped else text, text.rstrip())
    assert any(len([row for row in found if row.document == i]) >= 2 for i in range(len(TEXTS)))


def test_a_row_of_a_stream_holds_the_spans_of_its_documents(tmp_path):
    texts = ["one two three", "four five", "six seven eight nine ten"]
    found = rows_with_texts(write(tmp_path, texts, packing="concat", max_length=5), Words())
    assert [row.text for row in found] == ["one two three\n\nfour", " five\n\nsix seven eight", " nine ten"]


def test_a_text_is_unknown_where_nobody_says_where_tokens_end(tmp_path):
    asked = write(tmp_path, ["one two three four five six seven eight nine ten"])

    class Silent(Words):
        def encode_with_spans(self, texts):
            return [(ids, None) for ids in self.encode(texts)]

    assert [row.text for row in rows_with_texts(asked, Silent())] == [None, None]
    lines = [{"text": "as it is", "input_ids": np.arange(1, 5).tolist()}, {"input_ids": [1, 2, 3]}]
    given_ids = settings_for(write_jsonl(tmp_path / "ids.jsonl", lines))
    assert [row.text for row in rows_with_texts(given_ids, Words())] == ["as it is", None]
