"""Names of numpy arrays by the type of their elements."""

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
