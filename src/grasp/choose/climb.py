"""The mixture, or the rows, that runs say are best: uphill within the same bounds, from the best by relevance.

What runs teach saturates, so the best mixture lies inside, where no linear programme ends. Each step solves a linear
programme for the corner to which the value rises most, and goes as far towards it as the value rises (Frank and Wolfe).
For rows the corner is the best rows by how fast the value rises with each, and on the way some of them are swapped.
Shape letters: B mixtures or subsets, G slices, N rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F64
from grasp.choose.quadratic_program import Programme, solve

Mask = NDArray[np.bool_]

STEPS = 60
REACH = np.linspace(0.0, 1.0, 33) ** 2  # parts of the way to a corner that are tried
NUDGE = 1e-3  # of a slice's share and an even share, for difference quotients
STILL = 1e-6
PARTS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the rows that are swapped at once, besides all
ROUNDS = 20
SLOW = 0.01  # of what the rounds before have gained


def climb(programme: Programme, value: Callable[[F64], F64], starts: Sequence[F64]) -> F64:
    """The best mixture found, (G,).

    Args:
        programme: its bounds and distance hold; what it maximises does not count.
        value: of mixtures (B, G), however large their sum, (B,).
        starts: mixtures; those outside of the bounds are passed over, one at least is within.
    """
    linear = replace(programme, segments=None)
    low_G, high_G = programme.low_G - STILL, programme.high_G + STILL
    ends = [_from(linear, value, p_G) for p_G in starts if ((low_G <= p_G) & (p_G <= high_G)).all()]
    return ends[int(np.argmax(value(np.stack(ends))))]


def climb_rows(
    worth_N: F64, masks: Callable[[F64], Mask], value: Callable[[Mask], F64], rise: Callable[[Mask], F64]
) -> F64:
    """What to rank rows by so that the best of them have the highest value found, (N,).

    Args:
        worth_N: to begin with; the result is no worse.
        masks: what is taken, (B, N), by what rows are ranked by, (B, N).
        value: of what is taken, (B,).
        rise: how fast it rises as (1, N) takes in a row, (N,).
    """
    kept_1N = masks(worth_N[None])
    first = best = float(value(kept_1N)[0])
    for _ in range(ROUNDS):
        rise_N = rise(kept_1N)
        stay_B1 = np.array(_stays(rise_N, kept_1N[0], masks(rise_N[None])[0]))[:, None]
        by_BN = rise_N + stay_B1 * kept_1N
        mask_BN = masks(by_BN)
        value_B = value(mask_BN)
        k = int(np.argmax(value_B))
        if value_B[k] - best <= SLOW * (best - first):
            break
        worth_N, kept_1N, best = by_BN[k], mask_BN[[k]], float(value_B[k])
    return worth_N


def _stays(rise_N: F64, kept_N: Mask, corner_N: Mask) -> list[float]:
    """What rows that are kept have to their credit, so that all, half, ... of the swaps towards the corner are made."""
    leaving, coming = np.sort(rise_N[kept_N & ~corner_N]), -np.sort(-rise_N[corner_N & ~kept_N])
    n = min(len(leaving), len(coming))
    gain_n = coming[:n] - leaving[:n]  # of each swap, best first
    return [0.0, *(max(float(gain_n[k]), 0.0) for k in sorted({int(n * part) for part in PARTS}) if k)]


def _from(linear: Programme, value: Callable[[F64], F64], p_G: F64) -> F64:
    for _ in range(STEPS):
        nudge_G = NUDGE * (p_G + 1.0 / len(p_G))
        values = value(np.concatenate([p_G[None], p_G + np.diag(nudge_G)]))
        slope_G = (values[1:] - values[0]) / nudge_G
        corner_G = solve(replace(linear, linear_G=slope_G))
        path_BG = p_G + REACH[:, None] * (corner_G - p_G)
        along_B = value(path_BG)
        best = int(np.argmax(along_B))
        if along_B[best] - values[0] <= STILL * np.ptp(along_B):
            break
        p_G = path_BG[best]
    return p_G
