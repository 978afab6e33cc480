"""Tolerances derived from the arithmetic, not from the machine that ran the test."""

import numpy as np
from numpy.typing import DTypeLike


def rounding(terms: int, magnitude: object = 1.0, dtype: DTypeLike = np.float32) -> float:
    """Return a bound on the rounding difference between two sums of `terms` numbers in different orders.

    An addition has an error of at most half an eps of its result. The signs are practically random, so that errors
    grow as the square root of their number; eight standard errors are never exceeded by chance.

    Args:
        terms: number of consecutive additions and products over all steps of the computation.
        magnitude: the largest summand; for an array its largest entry. If terms cancel, this is larger than the
            result.
        dtype: the type in which the computation is made or its result is stored.
    """
    return 8 * float(np.finfo(dtype).eps) / 2 * terms**0.5 * float(np.max(np.abs(np.asarray(magnitude))))
