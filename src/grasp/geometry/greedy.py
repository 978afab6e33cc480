"""Rows by exact marginal gains, and what is proven of the result.

    gain of row k at S = linear_k + sum_h curvature_h (||phi_kh||^2 + 2 <phi_kh, s_h>),   s the sketch sum of S

A small corpus is searched row by row. A larger one is searched in rounds: the gains of all rows are brought up to date,
the best few thousand become a pool, and a block of rows is taken from the pool, one by one, each by its exact gain.
Sentinels, rows spread over the ranks below the pool, are kept up to date with it: a round ends as soon as one of them
beats the pool. So duplicates thin each other out inside a block as well, and the cost is near-linear in the rows.
Shape letters: N rows, P rows of a pool, D sketch widths together, K rows taken.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F64, I64
from grasp.geometry.geometry_predictor import InteractionPredictor
from grasp.geometry.set_objective import Objective, best_rows, is_aligned, upper_bound
from grasp.predict.predictor import Predictor
from grasp.progress import Progress
from grasp.select.budget import OPTIMAL, BestRows, Ledger, Limits

SIZES_TRIED = 4  # a budget in tokens is a number of rows only once rows are chosen
SIZE_SHARE = 0.005
SEARCHED_ROWS = 8_192  # a corpus up to this size is searched row by row
INNER_ROWS = 1_024  # what is searched row by row inside a pool
INNER_BLOCK = 128
SENTINELS = 128
ROUNDS = 128  # blocks are as large as brings about so many rounds
POOL_BLOCKS = 4  # a pool holds so many blocks at least
RANKED = 2  # pool and sentinels reach down to the rank of so many pools
DEAD = -np.inf


@dataclass(frozen=True, slots=True)
class Picks:
    """Rows in the order in which they were taken."""

    row_index: I64  # (K,)
    gain: F64  # (K,) exact marginal gain at that moment
    used: int  # cost of all of them
    rounds: int
    searched: bool  # every row was the best of all rows that could be taken


@dataclass(frozen=True, slots=True)
class _Pool:
    """The rows that a round chooses from, held in memory.

    The last of them are sentinels: rows from the ranks below the pool, whose gains are kept up to date and which are
    never taken. They stand for all rows outside. Once a sentinel is worth more than the best candidate, so may be a row
    that was not read, and the round ends.
    """

    row_P: I64
    base_P: F64  # gain of the row on its own
    sketch_PD: F64
    sentinel_P: NDArray[np.bool_]

    def part(self, where: I64, sentinels: I64) -> "_Pool":
        both = np.concatenate([where, sentinels])
        watched = np.concatenate([self.sentinel_P[where], np.ones(len(sentinels), dtype=np.bool_)])
        return _Pool(self.row_P[both], self.base_P[both], self.sketch_PD[both], watched)


class _Greedy:
    """A selection while it is made: what was taken, what is left of the limits, and the gains of the other rows."""

    def __init__(self, objective: Objective, constraints: Limits, progress: Progress | None) -> None:
        self.objective = objective
        self.limits = constraints
        self.ledger = Ledger(constraints)
        self.bends_D = objective.bends_D
        self.vector_D = np.zeros(len(self.bends_D))  # 2 C s: what a gain's product is taken with
        self.alive_N = constraints.allowed_N.copy()
        self.base_N = objective.linear_N.copy()
        for half, sketch in objective.sketches.items():
            self.base_N += objective.curvature[half] * sketch.norms_of_rows()
        self.rows: list[int] = []
        self.gains: list[float] = []
        self.rounds = 0
        self._progress = progress

    # ------------------------------------------------------------------------------------------- choosing

    def search(self) -> None:
        """The plain way, for a small corpus: before each pick the gain of every row is exact."""
        while self.alive_N.any():
            rows = np.flatnonzero(self.alive_N)
            self.rounds += 1
            self._from(
                _Pool(rows, self.base_N[rows], self.objective.rows(rows), np.zeros(len(rows), np.bool_)), len(rows)
            )
            self._revive()

    def by_rounds(self) -> None:
        """The way for a large corpus: a block of rows at a time, out of a pool of the few thousand best."""
        constraints = self.limits
        expected = int(constraints.budget / max(float(constraints.cost_N[constraints.allowed_N].mean()), 1.0))
        block = max(1, -(-expected // ROUNDS))
        size = max(INNER_ROWS, POOL_BLOCKS * block)
        while self.alive_N.any():
            pool = self._pool(size)
            self.rounds += 1
            n_taken = self._in_pool(pool, block)
            if self._progress is not None:
                self._progress.advance(n_taken, 0)
            self._close()
            if not n_taken:
                self.alive_N[pool.row_P[~pool.sentinel_P]] = False  # none of them fits any more
            if not self.alive_N.any():
                self._revive()

    def _in_pool(self, pool: _Pool, quota: int) -> int:
        """Take up to `quota` rows of a pool that may be too large to search row by row."""
        if len(pool.row_P) <= INNER_ROWS + 2 * SENTINELS:
            return self._from(pool, quota)
        n_taken = 0
        alive_P = np.ones(len(pool.row_P), dtype=np.bool_)
        while n_taken < quota:
            key_P = self._keys(pool.row_P, pool.base_P + np.einsum("pd,d->p", pool.sketch_PD, self.vector_D))
            watched = pool.sentinel_P
            open_P = alive_P & ~watched & self.alive_N[pool.row_P]
            if not open_P.any() or (n_taken and _top(key_P, watched) > _top(key_P, open_P)):
                break
            best, beyond = _ranked(np.where(open_P, key_P, DEAD), pool.row_P, INNER_ROWS)
            watch = np.concatenate([beyond, np.flatnonzero(watched)])
            got = self._from(pool.part(best, watch), min(INNER_BLOCK, quota - n_taken))
            n_taken += got
            if not got:
                alive_P[best] = False
        return n_taken

    def _from(self, pool: _Pool, quota: int) -> int:
        """Take up to `quota` rows, always the best of the pool, until a sentinel beats it. Returns how many."""
        gain_P = pool.base_P + np.einsum("pd,d->p", pool.sketch_PD, self.vector_D)
        rate_P = self._keys(pool.row_P, np.ones(len(gain_P)))
        dead_P = pool.sentinel_P.copy()
        watched = np.flatnonzero(pool.sentinel_P)
        n_taken = 0
        while n_taken < quota:
            key_P = np.where(dead_P, DEAD, gain_P * rate_P)
            j = int(key_P.argmax())
            if key_P[j] == DEAD or (n_taken and len(watched) and (gain_P * rate_P)[watched].max() > key_P[j]):
                break
            row = int(pool.row_P[j])
            code, cost = int(self.limits.codes_N[row]), int(self.limits.cost_N[row])
            if cost > self.ledger.room(code):
                dead_P |= self._refused(pool.row_P, code, cost)
                continue
            self.ledger.take(code, cost)
            self.alive_N[row] = False
            self.rows.append(row)
            self.gains.append(float(gain_P[j]))
            dead_P[j] = True
            n_taken += 1
            step_D = 2.0 * self.bends_D * pool.sketch_PD[j]
            self.vector_D += step_D
            gain_P += pool.sketch_PD @ step_D
        return n_taken

    # ------------------------------------------------------------------------------------------ accounting

    def _refused(self, row_P: I64, code: int, cost: int) -> NDArray[np.bool_]:
        """Rows of a pool that fit no more than the one that was refused: same value, as dear or dearer."""
        out_P: NDArray[np.bool_] = (self.limits.codes_N[row_P] == code) & (self.limits.cost_N[row_P] >= cost)
        self.alive_N[row_P[out_P]] = False
        return out_P

    def _close(self) -> None:
        """Drop the rows that there is no room for any more."""
        alive = np.flatnonzero(self.alive_N)
        self.alive_N[alive] = self.ledger.fits(alive)

    def _revive(self) -> None:
        """At the end: what was set aside for floors may have made room again for rows that were refused."""
        self.alive_N = self.limits.allowed_N.copy()
        self.alive_N[np.array(self.rows, dtype=np.int64)] = False
        self._close()

    def _keys(self, row_P: I64, gain_P: F64) -> F64:
        """What rows are ranked by: the gain, or under `count` and a budget in tokens the gain a token."""
        return gain_P if self.objective.weighting == "mean" else gain_P / self.limits.cost_N[row_P]

    def _pool(self, count: int) -> _Pool:
        """The rows with the highest gains, and sentinels from the ranks below."""
        alive = np.flatnonzero(self.alive_N)
        gain_N = self.base_N + self.objective.dot(self.vector_D)
        best, beyond = _ranked(self._keys(alive, gain_N[alive]), alive, count)
        rows = alive[np.concatenate([best, beyond])]
        watched = np.zeros(len(rows), dtype=np.bool_)
        watched[len(best) :] = True
        return _Pool(rows, self.base_N[rows], self.objective.rows(rows), watched)


def choose(objective: Objective, constraints: Limits, progress: Progress | None = None) -> Picks:
    """Take rows until the budget is used up, best exact marginal gain first; ties go to the earlier row.

    Under a budget in tokens, rows are ranked by gain where the weighting is `mean` (every row then counts alike), and
    by gain a token where it is `count`.

    Args:
        progress: told of the rows taken.
    Source: prop:aligned-submodularity (the marginal gain). Cost: near-linear in the rows; memory: some 60 bytes a row,
        and a pool.
    """
    state = _Greedy(objective, constraints, progress)
    searched = int(constraints.allowed_N.sum()) <= SEARCHED_ROWS
    if searched:
        state.search()
    else:
        state.by_rounds()
    return Picks(
        row_index=np.array(state.rows, dtype=np.int64),
        gain=np.array(state.gains),
        used=state.ledger.used,
        rounds=state.rounds,
        searched=searched,
    )


def _ranked(key_P: F64, row_P: I64, count: int) -> tuple[I64, I64]:
    """Positions of the `count` highest keys, by row; and of SENTINELS that are spread over the next ranks."""
    order = np.flatnonzero(key_P > DEAD)
    if len(order) <= count:
        return order, np.empty(0, dtype=np.int64)
    far = min(len(order), RANKED * count)
    ranked = order[np.argpartition(-key_P[order], far - 1)[:far]] if far < len(order) else order
    ranked = ranked[np.lexsort((row_P[ranked], -key_P[ranked]))]
    spread = np.unique(np.linspace(count, far - 1, SENTINELS).astype(np.int64))
    return np.sort(ranked[:count]), ranked[spread]


def _top(key_P: F64, where_P: NDArray[np.bool_]) -> float:
    return float(key_P[where_P].max(initial=DEAD))


def select_rows(
    predictor: Predictor, weights_T: F64, constraints: Limits, progress: Progress | None = None
) -> BestRows:
    """Rows of high predicted change, redundancy and all.

    Args:
        weights_T: weights of the predictor's targets, adding up to 1.
        progress: told of the rows taken.
    """
    assert isinstance(predictor, InteractionPredictor)
    objective, picks = _sized(predictor, weights_T, constraints, progress)
    if picks is None:
        guarantee = (
            OPTIMAL
            if constraints.unit != "tokens"
            else "rows by their worth, until no row fits the tokens that are left"
        )
        return BestRows(best_rows(objective.linear_N, constraints), guarantee)
    bound, reason = upper_bound(objective, constraints, picks.row_index)
    rewards = any(bend > 0 for bend in objective.curvature.values())
    note = "the protocol rewards a part of the geometry: rows that resemble one another attract one another"
    proven = f"no upper bound: {reason}" if bound is None else _guarantee(objective, constraints, picks)
    return BestRows(picks.row_index, proven, picks.gain, bound, (note,) if rewards else ())


def _sized(
    predictor: InteractionPredictor, weights_T: F64, constraints: Limits, progress: Progress | None
) -> tuple[Objective, Picks | None]:
    """Choose; under a budget in tokens, until the number of rows is the one that was assumed."""
    size = max(1, round(constraints.budget / float(constraints.cost_N[constraints.allowed_N].mean())))
    for _ in range(SIZES_TRIED):
        objective = Objective.from_predictor(predictor, weights_T, min(size, predictor.n_rows))
        if not objective.curvature:
            return objective, None
        picks = choose(objective, constraints, progress)
        n_selected = len(picks.row_index)
        if abs(n_selected - size) <= SIZE_SHARE * size:
            break
        size = n_selected
    return (objective if n_selected == size else Objective.from_predictor(predictor, weights_T, n_selected)), picks


def _guarantee(objective: Objective, constraints: Limits, picks: Picks) -> str:
    """What is proven, in words."""
    searched = picks.searched and constraints.unit == "rows" and bool(np.all(picks.gain >= 0))
    if searched and is_aligned(objective, constraints):
        return "at least 1 - 1/e of the best gain: the pool is aligned, hence V submodular, and no gain is negative"
    return "no selection of as many rows exceeds the bound: every geometry is a penalty, hence the relaxation concave"
