"""What one question of an artifact leaves for the next, whoever asks at the same time."""

import threading

import pytest

from grasp.predict import rows as row_arrays


class Opened:
    """Stands for an opened artifact: what is kept of it is kept by it."""


def test_threads_share_what_is_kept_and_stay_within_the_bytes(monkeypatch):
    monkeypatch.setattr(row_arrays, "CACHED_BYTES", 100)
    opened, failed = Opened(), []

    def ask(start):
        try:
            for i in range(3_000):
                key = (start + i) % 40
                assert row_arrays.cached(opened, key, 10, lambda key=key: -key) == -key
        except Exception as err:  # noqa: BLE001 - whatever a race makes
            failed.append(err)

    threads = [threading.Thread(target=ask, args=(7 * k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert sum(size for _, size in row_arrays._cached[opened].values()) <= 100


def test_what_is_too_large_is_made_and_not_kept(monkeypatch):
    monkeypatch.setattr(row_arrays, "CACHED_BYTES", 100)
    opened, made = Opened(), []
    for _ in range(2):
        row_arrays.cached(opened, "large", 101, lambda: made.append(1))
    assert len(made) == 2
    with pytest.raises(ZeroDivisionError):
        row_arrays.cached(opened, "fails", 1, lambda: 1 / 0)
    assert row_arrays.cached(opened, "fails", 1, lambda: 2) == 2
