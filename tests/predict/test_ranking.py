"""Rows in order: the highest first, equal ones in corpus order, whether all are asked for or the first few."""

import numpy as np
import pytest

from grasp.predict.rows import ranked


@pytest.mark.parametrize("levels", [1, 7, 10_000])
@pytest.mark.parametrize("count", [None, 1, 60, 300])
def test_equal_rows_stay_in_corpus_order(levels: int, count: int | None):
    generator = np.random.default_rng(levels)
    value_N = generator.integers(-levels, levels, size=300) / 8
    among_N = generator.random(300) < 0.7
    rows = np.flatnonzero(among_N)
    in_order = sorted(rows, key=lambda row: (-value_N[row], row))
    assert ranked(value_N, among_N=among_N, count=count).tolist() == in_order[:count]
