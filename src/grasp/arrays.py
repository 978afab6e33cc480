"""Names of numpy arrays by the type of their elements, and a division that may have nothing below."""

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
Blocks = Iterator[tuple[int, F32]]  # of rows: the first one, and the values from there on


def ratio(top: Any, below: Any, *, least: Any = 0.0, undefined: float = 0.0) -> F64:
    """Return top / below in float64, and `undefined` where `below` is not above `least`; arrays are broadcast."""
    top, below = np.asarray(top, dtype=np.float64), np.asarray(below, dtype=np.float64)
    out = np.full(np.broadcast_shapes(top.shape, below.shape), undefined)
    np.divide(top, below, out=out, where=below > least)
    return out
