"""Mixtures in which shares and repetition vary apart, and how promises are counted."""

import numpy as np

from experiments.exposure.chosen import told
from experiments.exposure.repeated import drawn


def test_the_same_shares_come_from_all_rows_and_from_few():
    codes_N = np.repeat(np.arange(4), 60)
    subsets = drawn(codes_N, 4, 6)
    for large, small in zip(subsets[::2], subsets[1::2], strict=True):
        assert (large.subset_id[-2:], small.subset_id[-2:]) == (small.subset_id[-2:], large.subset_id[-2:])
        shares = [np.bincount(codes_N[one.row_index], one.weights, 4) / 240 for one in (large, small)]
        np.testing.assert_allclose(*shares)
        np.testing.assert_allclose(shares[0].sum(), 1.0)
        assert set(small.row_index) <= set(large.row_index)
    assert min(len(one.row_index) for one in subsets[1::2]) < 0.5 * max(len(one.row_index) for one in subsets[::2])


def test_promises_are_counted_on_either_side(capsys):
    pairs = [
        {"expected": 0.5, "low": 0.2, "high": 0.8, "came": 0.1},
        {"expected": 0.5, "low": 0.2, "high": 0.8, "came": 0.9},
        {"expected": 0.5, "low": 0.2, "high": 0.8, "came": 0.5},
        {"expected": 0.1, "low": 0.0, "high": 0.2, "came": 0.2},
    ]
    told(pairs, "all")
    assert "4 pairs, 50% inside (25% promised too much, 25% too little)" in capsys.readouterr().out
