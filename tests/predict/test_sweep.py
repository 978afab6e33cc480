"""Every way to sum W @ X gives the same result within its tolerance, without torch."""

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from grasp.predict.weights import PackedMasks, RowSums, Weights, sums_over
from tests.predict.test_weights import forms
from tests.rounding import rounding


def job(seed, n=300, width=40, b=7, share=0.1, *, plain=True):
    rng = np.random.default_rng(seed)
    weights_BN = (rng.random((b, n)) < share) * (1.0 if plain else rng.random((b, n)) * 2)
    return csr_array(weights_BN), (rng.standard_normal((n, width)) * 10.0 ** rng.integers(-3, 4, width)).astype("f4")


@settings(max_examples=20)
@given(
    seed=st.integers(0, 1000),
    plain=st.booleans(),
    width=st.sampled_from([1, 30, 129]),
    share=st.sampled_from([0.0, 0.005, 0.1]),  # no entries, fewer than rows, and more
    half=st.booleans(),
)
def test_entries_agree_with_a_loop(seed, plain, width, share, half):
    weights_BN, values_NC = job(seed, width=width, plain=plain, share=share)
    values_NC = values_NC.astype(np.float16) if half else values_NC  # is widened before it is added up
    want = np.array([sum(w * values_NC[i].astype(float) for i, w in enumerate(row)) for row in weights_BN.toarray()])
    got = RowSums.over(values_NC).sums(Weights(weights_BN))
    assert got.dtype == np.float64
    bound = rounding(len(values_NC), dtype=np.float64) * (abs(weights_BN) @ abs(values_NC.astype(float)))
    assert (abs(got - want) <= bound + 1e-300).all()


@settings(max_examples=8)
@given(seed=st.integers(0, 1000), cut=st.integers(1, 900))
def test_every_form_sums_to_the_float64_reference(seed, cut):
    """In memory, block by block whatever the cuts, and through what prediction uses for both."""
    n, rng = 1500, np.random.default_rng(seed)
    values_NC = (rng.standard_normal((n, 6)) * 10.0 ** rng.integers(-3, 4, 6) + 1.0).astype(np.float32)
    edges = [0, cut, min(cut + 13, n), n]
    blocks = [(start, values_NC[start:stop]) for start, stop in itertools.pairwise(edges) if stop > start]
    streamed = RowSums(lambda: iter(blocks), n, 6, array_NC=None)
    streamed.array_NC = None
    for weights, matrix in forms(seed, 9, n):
        want, size = matrix @ values_NC.astype(float), abs(matrix) @ abs(values_NC.astype(float))
        if weights.base:  # what is taken off the total is rounded as the total is
            size = abs(values_NC.astype(float)).sum(axis=0) + 0 * want
        bound = rounding(n, dtype=np.float32 if isinstance(weights.matrix, PackedMasks) else np.float64) * size
        results = [
            *sums_over(blocks, [weights, weights], 6),
            RowSums.over(values_NC).sums(weights),
            streamed.sums(weights),
            streamed.sums(weights),  # slices: what the first call kept
        ]
        for got in results:
            assert got.dtype == np.float64
            assert (abs(got - want) <= bound).all()


def test_unions_of_slices_read_the_values_once():
    values_NC, codes = np.ones((60, 2), dtype=np.float32), np.arange(60) % 3
    passes = []

    def blocks():
        passes.append(1)
        return iter([(0, values_NC)])

    sums, slices = RowSums(blocks, 60, 2), Weights.from_slices(codes, 3)
    sums.array_NC = None
    passes.clear()
    for _ in range(4):
        np.testing.assert_array_equal(sums.sums(slices.mixed(np.eye(3))), np.full((3, 2), 20.0))
    assert len(passes) == 1
    sums.sums(Weights.from_slices(codes, 3))
    assert len(passes) == 2
