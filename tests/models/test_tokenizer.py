"""The trained tokenizer is lossless, reproducible, and survives a checkpoint."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from grasp.errors import ModelError
from grasp.models.tokenizer import END_OF_TEXT, HfTokenizer, train_tokenizer

TEXTS = ["the cat sat on the mat", "the dog sat on the log", "Straße, naïve café, 東京"] * 4


@pytest.fixture(scope="module")
def tokenizer():
    return HfTokenizer(train_tokenizer(iter(TEXTS), vocab_size=300), vocab_size=512)


@given(text=st.text(max_size=40))
def test_no_text_is_out_of_vocabulary(tokenizer, text):
    (ids,) = tokenizer.encode([text])
    assert tokenizer.tokenizer.decode(ids) == text
    assert all(0 <= token < 300 for token in ids)


def test_merges_are_learned_and_reproducible(tokenizer):
    assert len(tokenizer.encode(["the cat"])[0]) < len("the cat")
    retrained = HfTokenizer(train_tokenizer(iter(TEXTS), vocab_size=300), vocab_size=512)
    assert retrained.fingerprint == tokenizer.fingerprint
    other = HfTokenizer(train_tokenizer(iter(TEXTS), vocab_size=290), vocab_size=512)
    assert other.fingerprint != tokenizer.fingerprint


def test_end_of_text_is_token_zero_and_never_added(tokenizer):
    assert tokenizer.eos_id == 0
    assert tokenizer.encode([END_OF_TEXT, ""]) == [[0], []]
    assert tokenizer.encode([]) == []
    assert tokenizer.vocab_size == 512


def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    loaded = HfTokenizer(AutoTokenizer.from_pretrained(tmp_path), vocab_size=512)
    assert loaded.encode(TEXTS) == tokenizer.encode(TEXTS)
    assert loaded.eos_id == 0
    assert loaded.fingerprint == tokenizer.fingerprint


def test_long_texts_are_neither_truncated_nor_warned_about(tokenizer):
    assert len(tokenizer.encode(["z" * 5000])[0]) == 5000


def test_a_vocabulary_smaller_than_the_bytes_is_refused():
    with pytest.raises(ModelError, match=r"vocab_size:.*\b256\b.*\b257\b"):
        train_tokenizer(iter(TEXTS), vocab_size=256)
