"""Rows that are seen again are worth less: the law, and what follows from it for a budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

from grasp.predict.predictor import REPEAT_WORTH, RepetitionLaw, SubsetSums
from grasp.predict.weights import PackedMasks, Weights
from grasp.select.objective import repetition_law


@given(times=st.floats(1e-6, 1e3), epochs=st.floats(0.01, 100))
def test_more_of_the_same_is_worth_less_and_never_nothing(times, epochs):
    law = RepetitionLaw(epochs)
    assert float(law(0.0)) == 0.0
    assert float(law(1.0)) == pytest.approx(1.0)
    once, twice = float(law(times)), float(law(2 * times))
    assert once <= twice * (1 + 1e-12)
    assert twice <= 2 * once * (1 + 1e-12)
    if 2 * times * epochs <= 1 and epochs <= 1:
        assert twice == pytest.approx(2 * times)  # nothing is seen twice


@pytest.mark.parametrize(("times", "want"), [(1, 1.0), (2, 1.968), (4, 3.726), (16, 10.584), (1e6, 16.4)])
def test_the_published_numbers(times, want):
    """1 + R* (1 - exp(-(x - 1) / R*)) with R* = 15.4, by hand."""
    assert REPEAT_WORTH == 15.4
    assert float(RepetitionLaw()(times)) == pytest.approx(want, abs=2e-3)


def test_a_corpus_that_is_read_often_anyway_gains_less_by_more():
    tokens_N = np.array([40, 60])
    assert repetition_law(None, tokens_N) == RepetitionLaw()
    gains = [float(repetition_law(tokens, tokens_N)(2.0)) for tokens in (10.0, 100.0, 400.0, 4000.0)]
    assert gains[0] == 2.0
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] < 1.1


def test_every_form_of_weights_counts_alike_and_plain_ones_stay():
    rng = np.random.default_rng(0)
    codes_N = np.arange(12) % 3
    share_BG = np.array([[0.5, 0.0, 2.0], [3.0, 1.0, 1.0]])
    dense_BN = share_BG[:, codes_N]
    size_B1 = (dense_BN > 0).sum(axis=1, keepdims=True)
    for law, rows_B1 in ((RepetitionLaw(), size_B1), (RepetitionLaw(3.0), 12)):
        times_B1 = rows_B1 / dense_BN.sum(axis=1, keepdims=True)
        check_forms(law, dense_BN, share_BG, codes_N, law(dense_BN * times_B1) / law(times_B1))
    plain_BN = (rng.random((2, 12)) < 0.5).astype(float)
    plain = (
        Weights(PackedMasks(np.packbits(plain_BN.astype(bool), axis=1), 12)),
        Weights(csr_array(plain_BN)),
        Weights.from_slices(codes_N, 3),
    )
    for weights in plain:
        assert RepetitionLaw(3.0).effective_weights(weights) is weights


def check_forms(law, dense_BN, share_BG, codes_N, want_BN):
    for weights in (
        Weights.from_slices(codes_N, 3).mixed(share_BG),
        Weights(csr_array(dense_BN)),
        Weights(csr_array(dense_BN - 1.0), base=1.0),
    ):
        effective = law.effective_weights(weights)
        assert type(effective) is type(weights)
        actual_BN = effective.csr().toarray()
        np.testing.assert_allclose(actual_BN, want_BN, atol=1e-12)


def test_what_is_left_of_rows_that_are_repeated():
    """Under a budget a fifth of the rows is seen five times as often, and counts as law(5) / 5 of them."""
    rows_B = np.array([20.0, 100.0])
    sums = SubsetSums(100, rows_B, rows_B, rows_B, np.zeros((2, 1)), {})
    np.testing.assert_allclose(sums.repetition_factor(RepetitionLaw(1.0)), [float(RepetitionLaw(1.0)(5.0)) / 5, 1.0])
    for law in (RepetitionLaw(), RepetitionLaw(0.2)):  # no budget, or nothing is seen twice
        np.testing.assert_allclose(sums.repetition_factor(law), 1.0)


def test_of_weights_that_differ_repetition_takes_a_part_whatever_is_dropped():
    """Half of the rows three times as often as the other half: seen(1.5) + seen(.5), of 2."""
    weights = Weights(csr_array(np.array([[3.0, 1.0, 0.0, 0.0], [3.0, 1.0, 3.0, 1.0], [2.0, 2.0, 0.0, 2.0]])))
    law, rows_B = RepetitionLaw(), np.array([2.0, 4.0, 3.0])
    effective_B = law.effective_weights(weights).sums
    worth_B = SubsetSums(4, weights.sums, rows_B, effective_B, np.zeros((3, 1)), {}).repetition_factor(law)
    want = (float(law(1.5)) + 0.5) / 2
    np.testing.assert_allclose(worth_B, [want, want, 1.0])
    assert 0.98 < want < 1
