"""The mixture, or the rows, that runs say are best: uphill within the same bounds, from the best by relevance.

What runs teach saturates, so the best mixture lies inside, where no linear programme ends. Each step solves a linear
programme for the corner to which the value rises most, and goes as far towards it as the value rises (Frank and Wolfe).
For rows the corner is the best rows by how fast the value rises with each, and on the way some of them are swapped.
Shape letters: B mixtures or subsets, G slices, M rows or documents that are picked.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from grasp.arrays import F64, Bool
from grasp.choose.quadratic_program import Programme, solve

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
    ends = []
    for start_G in starts:
        if not ((low_G <= start_G) & (start_G <= high_G)).all():
            continue
        p_G = start_G
        for _ in range(STEPS):
            nudge_G = NUDGE * (p_G + 1.0 / len(p_G))
            values = value(np.concatenate([p_G[None], p_G + np.diag(nudge_G)]))
            slope_G = (values[1:] - values[0]) / nudge_G
            corner_G = solve(linear, slope_G)
            path_BG = p_G + REACH[:, None] * (corner_G - p_G)
            along_B = value(path_BG)
            best = int(np.argmax(along_B))
            if along_B[best] - values[0] <= STILL * np.ptp(along_B):
                break
            p_G = path_BG[best]
        ends.append(p_G)
    return ends[int(np.argmax(value(np.stack(ends))))]


def climb_rows(
    worth_M: F64, masks: Callable[[F64], Bool], value: Callable[[Bool], F64], rise: Callable[[Bool], F64]
) -> F64:
    """What to rank rows by so that the best of them have the highest value found, (M,).

    Args:
        worth_M: to begin with; the result is no worse.
        masks: what is taken, (B, M), by what rows are ranked by, (B, M).
        value: of what is taken, (B,).
        rise: how fast it rises as (1, M) takes in a row, (M,).
    """
    kept_1M = masks(worth_M[None])
    first = best = float(value(kept_1M)[0])
    for _ in range(ROUNDS):
        rise_M = rise(kept_1M)
        kept_M, corner_M = kept_1M[0], masks(rise_M[None])[0]
        leaving, coming = np.sort(rise_M[kept_M & ~corner_M]), -np.sort(-rise_M[corner_M & ~kept_M])
        n = min(len(leaving), len(coming))
        gain_n = coming[:n] - leaving[:n]  # of each swap towards the corner, best first
        # so much kept rows have to their credit that all, half, ... of the swaps are made
        credit_B = [0.0, *(max(float(gain_n[k]), 0.0) for k in sorted({int(n * part) for part in PARTS}) if k)]
        by_BM = rise_M + np.array(credit_B)[:, None] * kept_1M
        mask_BM = masks(by_BM)
        value_B = value(mask_BM)
        k = int(np.argmax(value_B))
        if value_B[k] - best <= SLOW * (best - first):
            break
        worth_M, kept_1M, best = by_BM[k], mask_BM[[k]], float(value_B[k])
    return worth_M
