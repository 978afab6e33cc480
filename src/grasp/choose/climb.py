"""The mixture that runs say is best: uphill within the same bounds, from the corpus and from the best by relevance.

What runs teach saturates, so the best mixture lies inside, where no linear programme ends. Each step solves a linear
programme for the corner to which the value rises most, and goes as far towards it as the value rises (Frank and Wolfe).
Shape letters: B mixtures, G slices.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from grasp.choose.quadratic_program import Programme, solve

F64 = NDArray[np.float64]

STEPS = 60
REACH = np.linspace(0.0, 1.0, 33) ** 2  # parts of the way to a corner that are tried
NUDGE = 1e-3  # of a slice's share and an even share, for difference quotients
STILL = 1e-6


def climb(programme: Programme, value: Callable[[F64], F64], starts: Sequence[F64]) -> F64:
    """The best mixture found, (G,).

    Args:
        programme: its bounds and distance hold; what it maximises does not count.
        value: of mixtures (B, G), however large their sum, (B,).
        starts: mixtures; those outside of the bounds are passed over, one at least is within.
    """
    n_slices = len(programme.low_G)
    linear = replace(programme, quadratic_GG=np.zeros((n_slices, n_slices)), segments=None)
    low_G, high_G = programme.low_G - STILL, programme.high_G + STILL
    ends = [_from(linear, value, p_G) for p_G in starts if ((low_G <= p_G) & (p_G <= high_G)).all()]
    return ends[int(np.argmax(value(np.stack(ends))))]


def _from(linear: Programme, value: Callable[[F64], F64], p_G: F64) -> F64:
    for _ in range(STEPS):
        nudge_G = NUDGE * (p_G + 1.0 / len(p_G))
        values = value(np.concatenate([p_G[None], p_G + np.diag(nudge_G)]))
        slope_G = (values[1:] - values[0]) / nudge_G
        corner_G = solve(replace(linear, linear_G=slope_G)).p_G
        path_BG = p_G + REACH[:, None] * (corner_G - p_G)
        along_B = value(path_BG)
        best = int(np.argmax(along_B))
        if along_B[best] - values[0] <= STILL * np.ptp(along_B):
            break
        p_G = path_BG[best]
    return p_G
