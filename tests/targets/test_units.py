"""Units as tokens: prompt and completion are encoded apart; what does not fit is cut in front or refused."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grasp.errors import TargetError
from grasp.targets import Unit, UnitSet

UNIT = Unit(unit_id="t:0", target="t", prompt="abc", completion=" d")


@dataclass(frozen=True)
class CharTokenizer:
    eos_id: int | None = 0
    vocab_size: int = 128
    prefix_ids: tuple[int, ...] = ()

    @property
    def context_ids(self) -> tuple[int, ...]:
        return self.prefix_ids or (() if self.eos_id is None else (self.eos_id,))

    def encode_with_spans(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        return [(ids, [(k, k + 1) for k in range(len(ids))]) for ids in self.encode(texts)]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[ord(char) for char in text] for text in texts]


def tokens(unit: Unit, max_length: int = 16, tokenizer: CharTokenizer = CharTokenizer()) -> tuple[str, int]:
    (unit_tokens,) = UnitSet((unit,)).tokenize(tokenizer, max_length)
    assert unit_tokens.input_ids.dtype == np.int32
    return "".join(map(chr, unit_tokens.input_ids)), unit_tokens.first


@pytest.mark.parametrize(
    ("changes", "text", "first"),
    [({}, "abc d", 3), ({"loss_on": "all"}, "abc d", 1), ({"prompt": ""}, "\0 d", 1)],  # the end of text is a prompt
)
def test_labels_begin_at_the_completion_or_cover_all(changes, text, first):
    assert tokens(replace(UNIT, **changes)) == (text, first)


def test_both_sides_of_a_pair_keep_the_same_prompt():
    unit = replace(UNIT, prompt="abcdefgh", completion="XY", others=(replace(UNIT, prompt="abcdefgh", completion="Z"),))
    (both,) = UnitSet((unit,)).tokenize(CharTokenizer(), 5)
    sides = ["".join(map(chr, side.input_ids)) for side in (both, *both.others)]
    assert sides == ["fghXY", "fghZ"]
    assert [side.first for side in (both, *both.others)] == [3, 3]
    unit = replace(unit, others=(replace(unit, completion="123456", others=()),))
    with pytest.raises(TargetError, match="has 6 tokens, expected at most 4"):
        UnitSet((unit,)).tokenize(CharTokenizer(), 5)


@pytest.mark.parametrize(
    ("max_length", "context", "remedy"),
    [
        (8, None, "expected at most 7 .*; increase targets.max_length, shorten"),
        (8, 9, "expected at most 7 .*; increase targets.max_length, shorten"),
        (512, 8, "expected at most 7 .*; the context of the model is 8 tokens; use a model with a longer one, shorten"),
    ],
)
def test_long_completions_are_refused_with_the_limit_that_they_exceed(max_length, context, remedy):
    units = UnitSet((replace(UNIT, completion=10 * "x"),))
    with pytest.raises(TargetError, match=f"unit 't:0' of t: the completion has 10 tokens, {remedy}"):
        units.tokenize(CharTokenizer(), max_length, context)


@given(
    prompt=st.text("abc", max_size=30),
    completion=st.text("xyz", min_size=1, max_size=10),
    max_tokens=st.integers(1, 20),
)
def test_a_long_prompt_loses_its_beginning_only(prompt, completion, max_tokens):
    text, first = tokens(replace(UNIT, prompt=prompt, completion=completion), len(completion) + max_tokens)
    assert text == ((prompt or "\0")[-max_tokens:] + completion)
    assert text[first:] == completion


@pytest.mark.parametrize(
    ("changes", "tokenizer", "message"),
    [
        ({"completion": ""}, CharTokenizer(), "'t:0'.*completion ''.*tokens"),
        ({"completion": "x" * 16}, CharTokenizer(), r"completion.*\b16 tokens.*\b15\b"),
        ({"prompt": ""}, CharTokenizer(eos_id=None), "prompt.*empty"),
        ({"prompt": "z"}, CharTokenizer(vocab_size=50), "token id 122"),
    ],
)
def test_units_that_cannot_be_scored_are_refused(changes, tokenizer, message):
    with pytest.raises(TargetError, match=message):
        tokens(replace(UNIT, **changes), 16, tokenizer)


def test_fingerprint_follows_what_is_scored():
    changes = [{}, {"completion": " e"}, {"prompt": "ab"}, {"unit_id": "t:1"}, {"target": "u"}, {"loss_on": "all"}]
    assert len({UnitSet((replace(UNIT, **change),)).fingerprint for change in changes}) == len(changes)
    assert UnitSet((UNIT,)).fingerprint == UnitSet((replace(UNIT, support="elsewhere"),)).fingerprint


def test_targets_are_listed_in_order():
    units = tuple(replace(UNIT, unit_id=f"{t}:{k}", target=t) for t in ("z", "a") for k in range(2))
    assert UnitSet(units).targets == ("z", "a")
