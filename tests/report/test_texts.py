"""Untrusted text becomes one line that steers nothing."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grasp.report.texts import ending, interval, name, number, plain, plotted, signed, unique_names
from tests.report.world import HOSTILE, LINE


@given(st.text(max_size=80))
def test_nothing_that_steers_a_screen_is_left(text):
    for shown in (plain(text), name(text), ending(text)):
        assert not any(unicodedata.category(ch) in ("Cc", "Cs") for ch in shown)
        assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\ufeff")


def test_text_is_cut_and_its_end_can_be_had():
    assert len(plain(LINE)) == 600
    assert plain("a " * 10, 5) == "a a \N{HORIZONTAL ELLIPSIS}"
    assert ending("one two three", 7) == "\N{HORIZONTAL ELLIPSIS} three"
    assert ending("short") == plain("short") == "short"
    assert plain("family \U0001f468\u200d\U0001f469") == "family \U0001f468\u200d\U0001f469"


@given(st.lists(st.text(max_size=5) | st.just("x" * 70), max_size=8))
def test_names_stay_different_when_they_are_cut(texts):
    names = unique_names(texts)
    assert len(set(names)) == len(texts)
    assert all(len(one) <= 64 for one in names)


@pytest.mark.parametrize("text", HOSTILE)
def test_figures_get_no_markup(text):
    shown = plotted(text)
    assert "<" not in shown
    assert ">" not in shown


def test_numbers_have_a_true_minus_and_a_dash_where_there_is_none():
    assert signed(-0.12345) == "\N{MINUS SIGN}0.123"
    assert signed(0.5, 1) == "+0.5"
    assert signed(None) == signed(float("nan")) == number(None) == "\N{EN DASH}"
    assert number(-1.0, 1) == "\N{MINUS SIGN}1.0"
    assert interval(-1.0, 2.0) == "[\N{MINUS SIGN}1.000, +2.000]"
    assert interval(float("nan"), 2.0) == ""
