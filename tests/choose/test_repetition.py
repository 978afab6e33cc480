"""Rows that are seen again are worth less: the law of exposure, and what follows from it for a budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

from grasp.choose.repetition import Training
from grasp.predict.geometry import SubsetMass
from grasp.predict.weights import EachSlice, Exposure, OmittedRows, PackedMasks, SliceShares


@given(times=st.floats(1e-6, 1e6), epochs=st.floats(0.01, 1e4))
def test_more_of_the_same_is_worth_less_and_never_nothing(times, epochs):
    exposure = Exposure(epochs)
    assert float(exposure(0.0)) == 0.0
    assert float(exposure(1.0)) == pytest.approx(1.0)
    assert exposure(times) < exposure(2 * times) < 2 * exposure(times)
    assert exposure(2 * times) - exposure(times) == pytest.approx(
        np.log((1 + 2 * times / exposure.c) / (1 + times / exposure.c)) / np.log(1 + 1 / exposure.c)
    )


def test_a_corpus_that_is_read_often_anyway_gains_less_by_more():
    for tokens in (5.0, 100.0):
        assert Training(tokens).of_corpus(100).exposure.c == Training().exposure.c
    often = Training(400.0).of_corpus(100).exposure
    assert float(often(2.0)) < float(Training().exposure(2.0)) < 2.0


def test_every_form_of_weights_counts_alike_and_plain_ones_stay():
    rng = np.random.default_rng(0)
    codes_N = np.arange(12) % 3
    share_BG = np.array([[0.5, 0.0, 2.0], [3.0, 1.0, 1.0]])
    dense_BN = share_BG[:, codes_N]
    times_BN = dense_BN / dense_BN.mean(axis=1, keepdims=True)
    exposure = Exposure()
    want_BN = exposure(times_BN) / exposure(1 / dense_BN.mean(axis=1, keepdims=True))
    forms = SliceShares(share_BG, codes_N), csr_array(dense_BN), OmittedRows(csr_array(1.0 - dense_BN))
    for weights in forms:
        counted = exposure.of(weights)
        assert type(counted) is type(weights)
        found_BN = (counted if isinstance(counted, csr_array) else counted.csr()).toarray()
        np.testing.assert_allclose(found_BN, want_BN, atol=1e-12)
    plain_BN = (rng.random((2, 12)) < 0.5).astype(float)
    plain = PackedMasks(np.packbits(plain_BN.astype(bool), axis=1), 12), csr_array(plain_BN), EachSlice(codes_N, 3)
    for weights in plain:
        assert exposure.of(weights) is weights


def test_what_is_left_of_a_change():
    """A fifth of the rows is seen five times as often, and counts as exposure(5) / 5 of them."""
    exposure = Exposure()
    mass = SubsetMass.plain(np.array([20.0, 100.0]), 100)
    np.testing.assert_allclose(mass.worth(exposure), [float(exposure(5.0)) / 5, 1.0])
    np.testing.assert_array_equal(mass.worth(None), 1.0)
