"""Relevance as a protocol counts it."""

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", bound=np.floating[Any])


def counted(relevance_NE: NDArray[T], negative: float) -> NDArray[T]:
    """Relevance, with what is negative multiplied by `negative`, between 0 and 1.

    Source: ours; a sum over rows of eq:grasp-score counts both alike, which is negative = 1.
    """
    if negative == 1.0:
        return relevance_NE
    zero, factor = relevance_NE.dtype.type(0.0), relevance_NE.dtype.type(negative)
    less_NE = relevance_NE * factor if negative else zero  # 0 times infinity is no number
    return np.where(relevance_NE < zero, less_NE, relevance_NE)
