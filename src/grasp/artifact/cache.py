"""Keep values that are computed from an opened artifact, up to a total size. Start with `cached`."""

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from grasp.artifact.reader import ArtifactReader

T = TypeVar("T")

CACHED_BYTES = 512 << 20  # limit of the cache of one opened artifact

_lock = Lock()  # not held while a value is computed, which two threads may do twice
_cached: WeakKeyDictionary[ArtifactReader, dict[Hashable, tuple[Any, int]]] = WeakKeyDictionary()


def cached(artifact: ArtifactReader, key: Hashable, n_bytes: int, make: Callable[[], T]) -> T:
    """Return a cached value of an opened artifact, or compute it; arrays are made read-only.

    The oldest values are evicted beyond CACHED_BYTES, before the new value is computed. A larger value is not stored.
    """
    with _lock:
        values = _cached.setdefault(artifact, {})
        if key in values:
            stored: T = values[key][0]
            return stored
        while n_bytes <= CACHED_BYTES and values and sum(size for _, size in values.values()) + n_bytes > CACHED_BYTES:
            values.pop(next(iter(values)))
    value = make()
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    with _lock:
        if n_bytes <= CACHED_BYTES:
            values[key] = value, n_bytes
    return value
