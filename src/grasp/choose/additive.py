"""The choice without geometry: a row is worth the same whatever else is kept, so the best come first.

Shape letters: N rows, G values of the label, P rows of the pool.
"""

import numpy as np
from numpy.typing import NDArray

from grasp.choose.limits import I64, Ledger, Limits
from grasp.predict.ranking import ranked

F64 = NDArray[np.float64]


def best_rows(worth_N: F64, limits: Limits) -> I64:
    """The rows with the highest worth that the limits allow, best first; ties go to the earlier row."""
    return within(ranked(worth_N, among_N=limits.allowed_N), limits)


def within(order_P: I64, limits: Limits) -> I64:
    """Go down the rows in the order of their worth and keep those that the limits allow.

    In rows the choice has the largest worth of all that the limits allow. In tokens a row that does not fit any more is
    passed over, until none fits.
    """
    if limits.cost_N is None:
        return _in_rows(order_P, limits)
    if limits.has_label_limits:
        return _by_ledger(order_P, limits)
    return _in_tokens(order_P, limits.cost_N, limits.budget)


def _in_rows(order_P: I64, limits: Limits) -> I64:
    """Floors first, then the best of what the caps leave."""
    if limits.codes_N is None or not limits.has_label_limits:
        return order_P[: limits.budget]
    codes_P = limits.codes_N[order_P]
    rank_P = _rank_within(codes_P)
    owed_P = rank_P < limits.floor_G[codes_P]
    free = np.flatnonzero(~owed_P & (rank_P < limits.cap_G[codes_P]))[: limits.budget - int(owed_P.sum())]
    owed_P[free] = True
    return np.asarray(order_P[owed_P])


def _rank_within(codes_P: NDArray[np.int32]) -> I64:
    """How many earlier entries have the same code."""
    by_code = np.argsort(codes_P, kind="stable")
    counts = np.bincount(codes_P)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    rank_P = np.empty(len(codes_P), dtype=np.int64)
    rank_P[by_code] = np.arange(len(codes_P)) - first
    return rank_P


def _in_tokens(order_P: I64, cost_N: I64, budget: int) -> I64:
    """Runs of rows that fit, passing over those that do not."""
    cost_P = cost_N[order_P]
    taken: list[I64] = []
    start, room = 0, budget
    while start < len(order_P):
        fits = cost_P[start:] <= room
        if not fits.any():
            break
        start += int(fits.argmax())
        used = np.cumsum(cost_P[start:])
        stop = start + int(np.searchsorted(used, room, side="right"))
        taken.append(order_P[start:stop])
        room -= int(used[stop - start - 1])
        start = stop
    return np.concatenate(taken) if taken else order_P[:0]


def _by_ledger(order_P: I64, limits: Limits) -> I64:
    """Row by row: what a floor in tokens had set aside and did not need comes free at the end."""
    ledger, taken = Ledger(limits), np.zeros(len(limits.allowed_N), dtype=np.bool_)
    rows: list[int] = []
    while order_P.size:
        for row in order_P.tolist():
            code, cost = limits.code(row), limits.cost(row)
            if cost <= ledger.room(code):
                ledger.take(code, cost)
                taken[row] = True
                rows.append(row)
        order_P = order_P[~taken[order_P] & ledger.fits(order_P)]
    return np.array(rows, dtype=np.int64)
