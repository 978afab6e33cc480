"""How far numbers may lie apart: tolerances that follow from the arithmetic, not from the machine that ran the test."""

import numpy as np
from numpy.typing import DTypeLike


def rounding(terms: int, magnitude: object = 1.0, dtype: DTypeLike = np.float32) -> float:
    """The difference that rounding makes between two sums of `terms` numbers that are added up in other orders.

    An addition is off by at most half an eps of what it gives. The signs are as good as random, so that errors grow
    as the square root of their number; eight standard errors are beyond any machine's luck.

    Args:
        terms: additions and products one after the other, over all steps of the computation.
        magnitude: the largest number that is added up; of an array its largest entry counts. Where terms cancel
            this is larger than the result.
        dtype: in which the computation is made, or what it makes is kept.
    """
    return 8 * float(np.finfo(dtype).eps) / 2 * terms**0.5 * float(np.max(np.abs(np.asarray(magnitude))))
