"""Repeated tokens are worth less: the published formula, and what follows from it for a budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grasp.choose.repetition import Training, effective_tokens


@given(unique=st.floats(1, 1e12), epochs=st.floats(0.01, 1e4), worth=st.floats(0.5, 100))
def test_repeated_tokens_are_worth_less_and_never_nothing(unique, epochs, worth):
    effective = float(effective_tokens(unique, epochs * unique, worth))
    more = float(effective_tokens(unique, 2 * epochs * unique, worth))
    assert effective <= epochs * unique * (1 + 1e-9)
    assert effective <= unique * (1 + worth) * (1 + 1e-9)
    assert more >= effective * (1 - 1e-12)
    if epochs <= 1:
        assert effective == epochs * unique


@pytest.mark.parametrize(("epochs", "want"), [(1, 1.0), (2, 1.968), (4, 3.726), (16, 10.584), (1e6, 16.4)])
def test_the_published_numbers(epochs, want):
    """U + U R* (1 - exp(-R / R*)) with R* = 15.4, by hand."""
    assert float(effective_tokens(1.0, epochs)) == pytest.approx(want, abs=2e-3)


def test_the_share_counts_the_repetition_of_the_corpus_too():
    unique = np.array([10.0, 50.0, 100.0])
    np.testing.assert_array_equal(Training().of_corpus(100).share(unique), 1.0)
    np.testing.assert_array_equal(Training(5.0).of_corpus(100).share(unique), 1.0)  # nothing is repeated
    found = Training(400.0).of_corpus(100).share(unique)
    assert found[-1] == 1.0
    assert (np.diff(found) > 0).all()
    assert found[0] == pytest.approx(float(effective_tokens(10, 400) / effective_tokens(100, 400)))
