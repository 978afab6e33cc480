"""Named random streams: adding a consumer never shifts the draws of another one."""

import hashlib

import numpy as np
from numpy.typing import NDArray


def stream(seed: int, *purpose: str | int) -> np.random.Generator:
    """Return the generator of one purpose, e.g. ``stream(0, "family", "sciq", 3)``; identical on every platform."""
    digest = hashlib.blake2b(repr(purpose).encode(), digest_size=8).digest()
    return np.random.default_rng([seed, int.from_bytes(digest, "little")])


def bootstrap_weights(n: int, *, resamples: int = 1_000, seed: int = 0) -> NDArray[np.float32]:
    """Return how often each of n items is drawn in each bootstrap resample, (R, n); depends on (seed, n, R) only."""
    draws = stream(seed, "fidelity", "bootstrap", n).integers(0, n, size=(resamples, n))
    weights_RB = np.zeros((resamples, n), dtype=np.float32)
    np.add.at(weights_RB, (np.arange(resamples)[:, None], draws), 1)
    return weights_RB
