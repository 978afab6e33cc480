"""Ranked rows with ties in corpus order; the cache of results is thread-safe and limited."""

import threading

import numpy as np
import pytest

from grasp.artifact import cache, rows


@pytest.mark.parametrize("levels", [1, 7, 10_000])
@pytest.mark.parametrize("count", [None, 1, 60, 300])
def test_equal_rows_stay_in_corpus_order(levels, count):
    generator = np.random.default_rng(levels)
    value_N = generator.integers(-levels, levels, size=300) / 8
    among_N = generator.random(300) < 0.7
    among = np.flatnonzero(among_N)
    in_order = sorted(among, key=lambda row: (-value_N[row], row))
    assert rows.ranked(value_N, among_N=among_N, count=count).tolist() == in_order[:count]


class Opened:
    """A substitute for an opened artifact, which owns the cache."""


def test_threads_share_the_cache_within_its_limit(monkeypatch):
    monkeypatch.setattr(cache, "CACHED_BYTES", 100)
    opened, failed = Opened(), []

    def ask(start):
        try:
            for i in range(3_000):
                key = (start + i) % 40
                assert cache.cached(opened, key, 10, lambda key=key: -key) == -key
        except Exception as err:  # noqa: BLE001 - whatever a race makes
            failed.append(err)

    threads = [threading.Thread(target=ask, args=(7 * k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sum(size for _, size in cache._cached[opened].values()) <= 100
