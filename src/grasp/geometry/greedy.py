"""Greedy selection of rows by exact marginal gains, with an upper bound. Start with `select_rows`.

    gain of row k at S = linear_k + sum_h curvature_h (||phi_kh||^2 + 2 <phi_kh, s_h>),   s the sketch sum of S

In a small corpus, every pick compares all rows. A larger corpus is processed in rounds: the gains of all rows are
updated, the best few thousand rows form a pool, and a block of rows is selected from the pool, one by one by exact
gain. Sentinels are rows from the ranks below the pool whose gains are updated together with it; the round ends as soon
as one of them exceeds the best row of the pool. Duplicates therefore reduce each other's gain inside a block too, and
the cost is nearly linear in the number of rows.
Shape letters: N rows, P rows of a pool, D total sketch width, K selected rows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F64, I64
from grasp.geometry.geometry_predictor import InteractionPredictor
from grasp.geometry.set_objective import Objective, best_rows, is_aligned, upper_bound
from grasp.predict.predictor import Predictor
from grasp.progress import Progress
from grasp.select.budget import OPTIMAL_NOTE, Constraints, Ledger, SelectedRows

SIZES_TRIED = 4  # iterations: with a token budget, the number of rows is only known after selection
SIZE_SHARE = 0.005
SEARCHED_ROWS = 8_192  # up to this many rows, every pick compares all rows
INNER_ROWS = 1_024  # rows of a pool that are compared for every pick
INNER_BLOCK = 128
SENTINELS = 128
ROUNDS = 128  # approximate number of rounds, which determines the block size
POOL_BLOCKS = 4  # minimum size of a pool, in blocks
SENTINEL_RANKS = 2  # sentinels are drawn from the ranks down to this multiple of the pool size
EXCLUDED = -np.inf


@dataclass(frozen=True, slots=True)
class Picks:
    """Selected rows in order of selection."""

    row_index: I64  # (K,)
    gain: F64  # (K,) exact marginal gain when selected
    used: int  # total cost
    rounds: int
    searched: bool  # every pick compared all rows that were available


@dataclass(frozen=True, slots=True)
class _Pool:
    """Candidate rows of a round, held in memory, followed by sentinels.

    Sentinels are rows from the ranks below the pool; their gains are updated but they are not selected. They represent
    all rows outside the pool: once a sentinel exceeds the best candidate, a row outside may too, and the round ends.
    """

    row_P: I64
    base_P: F64  # gain of the row for the empty selection
    sketch_PD: F64
    sentinel_P: NDArray[np.bool_]

    def part(self, where: I64, sentinels: I64) -> "_Pool":
        both = np.concatenate([where, sentinels])
        watched = np.concatenate([self.sentinel_P[where], np.ones(len(sentinels), dtype=np.bool_)])
        return _Pool(self.row_P[both], self.base_P[both], self.sketch_PD[both], watched)


class _Greedy:
    """State of a greedy selection: selected rows, remaining budget, and gains of the other rows."""

    def __init__(self, objective: Objective, constraints: Constraints, progress: Progress | None) -> None:
        self.objective = objective
        self.constraints = constraints
        self.ledger = Ledger(constraints)
        self.curvature_D = objective.curvature_D
        self.vector_D = np.zeros(len(self.curvature_D))  # 2 C s: the gain of row k is base_k + <phi_k, 2 C s>
        self.alive_N = constraints.allowed_N.copy()
        self.base_N = objective.linear_N.copy()
        for half, sketch in objective.sketches.items():
            self.base_N += objective.curvature[half] * sketch.norms_of_rows()
        self.rows: list[int] = []
        self.gains: list[float] = []
        self.rounds = 0
        self._progress = progress

    # ------------------------------------------------------------------------------------------- selection

    def search(self) -> None:
        """Select from a small corpus: the gains of all rows are exact before each pick."""
        while self.alive_N.any():
            rows = np.flatnonzero(self.alive_N)
            self.rounds += 1
            self._from(
                _Pool(rows, self.base_N[rows], self.objective.rows(rows), np.zeros(len(rows), np.bool_)), len(rows)
            )
            self._revive()

    def by_rounds(self) -> None:
        """Select from a large corpus: one block of rows at a time, from a pool of the best few thousand rows."""
        constraints = self.constraints
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
                self.alive_N[pool.row_P[~pool.sentinel_P]] = False  # none of them fits the remaining budget
            if not self.alive_N.any():
                self._revive()

    def _in_pool(self, pool: _Pool, quota: int) -> int:
        """Select up to `quota` rows from a pool that may be too large to compare all of its rows; return the count."""
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
            best, beyond = _ranked(np.where(open_P, key_P, EXCLUDED), pool.row_P, INNER_ROWS)
            watch = np.concatenate([beyond, np.flatnonzero(watched)])
            got = self._from(pool.part(best, watch), min(INNER_BLOCK, quota - n_taken))
            n_taken += got
            if not got:
                alive_P[best] = False
        return n_taken

    def _from(self, pool: _Pool, quota: int) -> int:
        """Select up to `quota` rows, always the best of the pool, until a sentinel exceeds it; return the count."""
        gain_P = pool.base_P + np.einsum("pd,d->p", pool.sketch_PD, self.vector_D)
        rate_P = self._keys(pool.row_P, np.ones(len(gain_P)))
        dead_P = pool.sentinel_P.copy()
        watched = np.flatnonzero(pool.sentinel_P)
        n_taken = 0
        while n_taken < quota:
            key_P = np.where(dead_P, EXCLUDED, gain_P * rate_P)
            j = int(key_P.argmax())
            if key_P[j] == EXCLUDED or (n_taken and len(watched) and (gain_P * rate_P)[watched].max() > key_P[j]):
                break
            row = int(pool.row_P[j])
            code, cost = int(self.constraints.codes_N[row]), int(self.constraints.cost_N[row])
            if cost > self.ledger.remaining(code):
                dead_P |= self._refused(pool.row_P, code, cost)
                continue
            self.ledger.take(code, cost)
            self.alive_N[row] = False
            self.rows.append(row)
            self.gains.append(float(gain_P[j]))
            dead_P[j] = True
            n_taken += 1
            step_D = 2.0 * self.curvature_D * pool.sketch_PD[j]
            self.vector_D += step_D
            gain_P += pool.sketch_PD @ step_D
        return n_taken

    # ------------------------------------------------------------------------------------------ accounting

    def _refused(self, row_P: I64, code: int, cost: int) -> NDArray[np.bool_]:
        """Return the rows of a pool that are infeasible because a row was: same label value, equal or higher cost."""
        infeasible_P: NDArray[np.bool_] = (self.constraints.codes_N[row_P] == code) & (
            self.constraints.cost_N[row_P] >= cost
        )
        self.alive_N[row_P[infeasible_P]] = False
        return infeasible_P

    def _close(self) -> None:
        """Drop the rows that no longer fit the remaining budget."""
        alive = np.flatnonzero(self.alive_N)
        self.alive_N[alive] = self.ledger.fits(alive)

    def _revive(self) -> None:
        """Reconsider rejected rows at the end: meeting the floors may have released budget that was reserved."""
        self.alive_N = self.constraints.allowed_N.copy()
        self.alive_N[np.array(self.rows, dtype=np.int64)] = False
        self._close()

    def _keys(self, row_P: I64, gain_P: F64) -> F64:
        """Return the ranking keys: the gain, or for weighting `count` the gain per unit of cost."""
        return gain_P if self.objective.weighting == "mean" else gain_P / self.constraints.cost_N[row_P]

    def _pool(self, count: int) -> _Pool:
        """Return the `count` rows with the highest gains, and sentinels from the ranks below."""
        alive = np.flatnonzero(self.alive_N)
        gain_N = self.base_N + self.objective.dot(self.vector_D)
        best, beyond = _ranked(self._keys(alive, gain_N[alive]), alive, count)
        rows = alive[np.concatenate([best, beyond])]
        watched = np.zeros(len(rows), dtype=np.bool_)
        watched[len(best) :] = True
        return _Pool(rows, self.base_N[rows], self.objective.rows(rows), watched)


def choose(objective: Objective, constraints: Constraints, progress: Progress | None = None) -> Picks:
    """Select rows by highest exact marginal gain until the budget is used up; ties go to the earlier row.

    Under a token budget, rows are ranked by gain if the weighting is `mean` (all rows then have the same weight), and
    by gain per token if it is `count`.

    Args:
        progress: optional callback that receives the number of selected rows.
    Source: prop:aligned-submodularity (the marginal gain). Cost: nearly linear in the number of rows. Memory: about 60
        bytes per row, and a pool.
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
    """Return positions of the `count` highest keys, sorted, and of SENTINELS spread over the ranks below."""
    order = np.flatnonzero(key_P > EXCLUDED)
    if len(order) <= count:
        return order, np.empty(0, dtype=np.int64)
    far = min(len(order), SENTINEL_RANKS * count)
    ranked = order[np.argpartition(-key_P[order], far - 1)[:far]] if far < len(order) else order
    ranked = ranked[np.lexsort((row_P[ranked], -key_P[ranked]))]
    spread = np.unique(np.linspace(count, far - 1, SENTINELS).astype(np.int64))
    return np.sort(ranked[:count]), ranked[spread]


def _top(key_P: F64, where_P: NDArray[np.bool_]) -> float:
    return float(key_P[where_P].max(initial=EXCLUDED))


def select_rows(
    predictor: Predictor, weights_T: F64, constraints: Constraints, progress: Progress | None = None
) -> SelectedRows:
    """Select rows that maximize the predicted change of a protocol with interactions, including redundancy.

    Args:
        weights_T: weights of the targets of the predictor, adding up to 1.
        constraints: budget, floors, caps and candidate rows.
        progress: optional callback that receives the number of selected rows.
    """
    assert isinstance(predictor, InteractionPredictor)
    objective, picks = _sized(predictor, weights_T, constraints, progress)
    if picks is None:
        guarantee = (
            OPTIMAL_NOTE if constraints.unit != "tokens" else "greedy by effect until no row fits the remaining tokens"
        )
        return SelectedRows(best_rows(objective.linear_N, constraints), guarantee)
    bound, reason = upper_bound(objective, constraints, picks.row_index)
    rewards = any(weight > 0 for weight in objective.curvature.values())
    note = "the protocol has a positive geometry weight: selecting a row favours similar rows"
    proven = f"no upper bound: {reason}" if bound is None else _guarantee(objective, constraints, picks)
    return SelectedRows(picks.row_index, proven, picks.gain, bound, (note,) if rewards else ())


def _sized(
    predictor: InteractionPredictor, weights_T: F64, constraints: Constraints, progress: Progress | None
) -> tuple[Objective, Picks | None]:
    """Select rows; under a token budget, repeat until the number of rows equals the assumed one (fixed point)."""
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


def _guarantee(objective: Objective, constraints: Constraints, picks: Picks) -> str:
    """Describe the proven guarantee."""
    searched = picks.searched and constraints.unit == "rows" and bool(np.all(picks.gain >= 0))
    if searched and is_aligned(objective, constraints):
        return "at least 1 - 1/e of the best gain: the pool is aligned, hence V is submodular, and no gain is negative"
    return (
        "no selection of as many rows exceeds the bound: every geometry is a penalty, hence the relaxation is concave"
    )
