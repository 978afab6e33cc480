"""Type aliases of numpy arrays, and a division without warnings for denominators of 0."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Floats = NDArray[np.floating[Any]]  # of any precision
I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
Integers = NDArray[np.integer[Any]]
Bool = NDArray[np.bool_]
Blocks = Iterator[tuple[int, F32]]  # blocks of the rows of an array: the index of the first row, and the rows


def ratio(numerator: Any, denominator: Any, *, minimum: Any = 0.0, undefined: float = 0.0) -> F64:
    """Divide arrays in float64; the result is `undefined` if the denominator is not above `minimum`.

    Args:
        numerator: array, broadcast with the denominator.
        denominator: array.
        minimum: array or number; smaller denominators are treated as 0.
        undefined: result for these.
    """
    numerator, denominator = np.asarray(numerator, dtype=np.float64), np.asarray(denominator, dtype=np.float64)
    out = np.full(np.broadcast_shapes(numerator.shape, denominator.shape), undefined)
    np.divide(numerator, denominator, out=out, where=denominator > minimum)
    return out
