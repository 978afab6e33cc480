"""Greedy selection of rows by exact marginal gains, with an upper bound of the best possible selection.

Start with `select_rows`. The objective is that of `set_objective`; its gain by adding row k to the selected rows S is

    gain_k(S) = linear_k + sum_h curvature_h (||phi_kh||^2 + 2 <phi_kh, s_h>),    s_h the sum of sketches h over S.

In a small corpus, all rows are compared before each selection. A larger corpus is processed in rounds: the gains of
all rows are updated, the rows with the highest gains form a *pool*, and a block of rows is selected from the pool, one
by one by exact gain. *Sentinels* are rows from the ranks below the pool whose gains are updated together with it; the
round ends as soon as one of them exceeds the best row of the pool. Duplicates therefore reduce each other's gain inside
a block too, and the cost is nearly linear in the number of rows.

A pool that is large itself is processed in the same way: its best INNER_ROWS rows are an inner pool, whose sentinels
are those of the pool and some of its lower rows.

Rows are compared by a *key*: their gain, or their gain per token (`_Greedy._keys`). Floors and caps bound the rows or
tokens of label values, whose numbers are called codes. A `select.budget.Ledger` records what is left for each code; it
reserves the part of the budget that floors still need.

Shape letters: N rows (the M items of the constraints), P rows of a pool, D total width of the concatenated sketches, K
selected rows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grasp.arrays import F64, I64
from grasp.geometry.geometry_predictor import InteractionPredictor
from grasp.geometry.set_objective import Objective
from grasp.geometry.upper_bound import is_submodular, upper_bound
from grasp.predict.predictor import Predictor
from grasp.progress import Progress
from grasp.select.budget import OPTIMAL_NOTE, Constraints, Ledger, SelectedRows, best_items

# With a token budget, the number of rows, on which the objective depends, is only known after selection: repeat it.
MAX_SIZE_ITERATIONS = 4
SIZE_TOLERANCE = 0.005  # relative difference of the number of rows at which the iterations stop
EXHAUSTIVE_ROWS = 8_192  # up to this many rows, all rows are compared before each selection
INNER_ROWS = 1_024  # rows of a large pool that are compared before each selection
INNER_BLOCK = 128  # rows that are selected from these before the whole pool is ranked again
SENTINELS = 128  # number of sentinels of a pool
ROUNDS = 128  # approximate number of rounds, which determines the block size
POOL_BLOCKS = 4  # minimum size of a pool, in blocks
SENTINEL_RANKS = 2  # sentinels are drawn from the ranks down to this multiple of the pool size
EXCLUDED = -np.inf  # key of rows that cannot be selected


@dataclass(frozen=True, slots=True)
class GreedySelection:
    """Selected rows in order of selection."""

    row_index: I64  # (K,)
    gain: F64  # (K,) exact marginal gain when selected
    used: int  # total cost
    rounds: int
    is_exhaustive: bool  # all available rows were compared before each selection


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

    def subset(self, candidates: I64, sentinels: I64) -> "_Pool":
        """Return a smaller pool with these candidates and sentinels, given by their positions in this pool."""
        index = np.concatenate([candidates, sentinels])
        sentinel_P = np.concatenate([self.sentinel_P[candidates], np.ones(len(sentinels), dtype=np.bool_)])
        return _Pool(self.row_P[index], self.base_P[index], self.sketch_PD[index], sentinel_P)


class _Greedy:
    """State of a greedy selection: selected rows, remaining budget, and gains of the other rows."""

    def __init__(self, objective: Objective, constraints: Constraints, progress: Progress | None) -> None:
        self.objective = objective
        self.constraints = constraints
        self.ledger = Ledger(constraints)
        self.curvature_D = objective.curvature_D
        # The gain of row k is base_k + <phi_k, 2 C s>: base_k for the empty selection, C = diag(curvature), s the sum
        # of the sketches of the selected rows. 2 C s is updated after each selection.
        self.two_c_s_D = np.zeros(len(self.curvature_D))  # 2 C s
        self.available_N = constraints.allowed_M.copy()
        self.base_N = objective.linear_N.copy()
        for name, sketch in objective.sketches.items():
            self.base_N += objective.curvature[name] * sketch.squared_norms()
        self.rows: list[int] = []
        self.gains: list[float] = []
        self.rounds = 0
        self._progress = progress

    # ------------------------------------------------------------------------------------------- selection

    def select_exhaustively(self) -> None:
        """Select from a small corpus: the gains of all rows are exact before each pick."""
        while self.available_N.any():
            rows = np.flatnonzero(self.available_N)
            self.rounds += 1
            no_sentinels = np.zeros(len(rows), np.bool_)
            pool = _Pool(rows, self.base_N[rows], self.objective.rows(rows), no_sentinels)
            self._select_from(pool, max_rows=len(rows))
            self._reconsider()

    def select_in_rounds(self) -> None:
        """Select from a large corpus: one block of rows at a time, from a pool of the best few thousand rows."""
        constraints = self.constraints
        expected = int(constraints.budget / max(float(constraints.cost_M[constraints.allowed_M].mean()), 1.0))
        block_rows = max(1, -(-expected // ROUNDS))
        pool_rows = max(INNER_ROWS, POOL_BLOCKS * block_rows)
        while self.available_N.any():
            pool = self._best_pool(pool_rows)
            self.rounds += 1
            n_selected = self._select_from_large(pool, max_rows=block_rows)
            if self._progress is not None:
                self._progress.advance(n_selected, 0)
            self._drop_unaffordable()
            if not n_selected:
                self.available_N[pool.row_P[~pool.sentinel_P]] = False  # none of them fits the remaining budget
            if not self.available_N.any():
                self._reconsider()

    def _select_from_large(self, pool: _Pool, max_rows: int) -> int:
        """Select up to `max_rows` rows from a pool that may be too large to compare all its rows; return the count."""
        if len(pool.row_P) <= INNER_ROWS + 2 * SENTINELS:  # no larger than an inner pool with its sentinels
            return self._select_from(pool, max_rows)
        n_selected = 0
        available_P = np.ones(len(pool.row_P), dtype=np.bool_)
        while n_selected < max_rows:
            key_P = self._keys(pool.row_P, pool.base_P + np.einsum("pd,d->p", pool.sketch_PD, self.two_c_s_D))
            selectable_P = available_P & ~pool.sentinel_P & self.available_N[pool.row_P]
            # the pool was just ranked, so its best row is the best of all: sentinels matter from the second row on
            sentinel_leads = n_selected > 0 and _highest(key_P, pool.sentinel_P) > _highest(key_P, selectable_P)
            if not selectable_P.any() or sentinel_leads:
                break
            best, below = _best_and_sentinels(np.where(selectable_P, key_P, EXCLUDED), pool.row_P, INNER_ROWS)
            sentinels = np.concatenate([below, np.flatnonzero(pool.sentinel_P)])
            n_new = self._select_from(pool.subset(best, sentinels), min(INNER_BLOCK, max_rows - n_selected))
            n_selected += n_new
            if not n_new:
                available_P[best] = False
        return n_selected

    def _select_from(self, pool: _Pool, max_rows: int) -> int:
        """Select up to `max_rows` rows, always the best of the pool, until a sentinel exceeds it; return the count."""
        gain_P = pool.base_P + np.einsum("pd,d->p", pool.sketch_PD, self.two_c_s_D)
        key_per_gain_P = self._keys(pool.row_P, np.ones(len(gain_P)))  # keys are proportional to gains
        unavailable_P = pool.sentinel_P.copy()
        sentinels = np.flatnonzero(pool.sentinel_P)
        n_selected = 0
        while n_selected < max_rows:
            all_key_P = gain_P * key_per_gain_P
            key_P = np.where(unavailable_P, EXCLUDED, all_key_P)
            j = int(key_P.argmax())
            sentinel_leads = n_selected > 0 and all_key_P[sentinels].max(initial=EXCLUDED) > key_P[j]
            if key_P[j] == EXCLUDED or sentinel_leads:
                break
            row = int(pool.row_P[j])
            code, cost = int(self.constraints.codes_M[row]), int(self.constraints.cost_M[row])
            if cost > self.ledger.remaining(code):
                unavailable_P |= self._drop_infeasible(pool.row_P, code, cost)
                continue
            self.ledger.take(code, cost)
            self.available_N[row] = False
            self.rows.append(row)
            self.gains.append(float(gain_P[j]))
            unavailable_P[j] = True
            n_selected += 1
            # s grows by phi_j, so every gain base_k + <phi_k, 2 C s> grows by <phi_k, 2 C phi_j>
            step_D = 2.0 * self.curvature_D * pool.sketch_PD[j]
            self.two_c_s_D += step_D
            gain_P += pool.sketch_PD @ step_D
        return n_selected

    # ------------------------------------------------------------------------------------------ accounting

    def _drop_infeasible(self, row_P: I64, code: int, cost: int) -> NDArray[np.bool_]:
        """Drop the rows of a pool that are infeasible because a row was: same label value, equal or higher cost.

        Returns:
            Which rows of the pool were dropped.
        """
        infeasible_P: NDArray[np.bool_] = (self.constraints.codes_M[row_P] == code) & (
            self.constraints.cost_M[row_P] >= cost
        )
        self.available_N[row_P[infeasible_P]] = False
        return infeasible_P

    def _drop_unaffordable(self) -> None:
        """Drop the rows that no longer fit the remaining budget."""
        available = np.flatnonzero(self.available_N)
        self.available_N[available] = self.ledger.fits(available)

    def _reconsider(self) -> None:
        """Reconsider rejected rows at the end: meeting the floors may have released budget that was reserved."""
        self.available_N = self.constraints.allowed_M.copy()
        self.available_N[np.array(self.rows, dtype=np.int64)] = False
        self._drop_unaffordable()

    def _keys(self, row_P: I64, gain_P: F64) -> F64:
        """Return the ranking keys: the gain, or for weighting `count` the gain per unit of cost."""
        return gain_P if self.objective.weighting == "mean" else gain_P / self.constraints.cost_M[row_P]

    def _best_pool(self, count: int) -> _Pool:
        """Return the `count` rows with the highest gains, and sentinels from the ranks below."""
        available = np.flatnonzero(self.available_N)
        gain_N = self.base_N + self.objective.dot(self.two_c_s_D)
        best, below = _best_and_sentinels(self._keys(available, gain_N[available]), available, count)
        rows = available[np.concatenate([best, below])]
        sentinel_P = np.zeros(len(rows), dtype=np.bool_)
        sentinel_P[len(best) :] = True
        return _Pool(rows, self.base_N[rows], self.objective.rows(rows), sentinel_P)


def select_greedily(
    objective: Objective, constraints: Constraints, progress: Progress | None = None
) -> GreedySelection:
    """Select rows by highest exact marginal gain until the budget is used up; ties go to the earlier row.

    Under a token budget, rows are ranked by gain if the weighting is `mean` (all rows then have the same weight), and
    by gain per token if it is `count`.

    Args:
        objective: objective of the selection.
        constraints: budget, floors, caps and candidate rows.
        progress: optional callback that receives the number of selected rows.
    Source: prop:aligned-submodularity (the marginal gain). Cost: nearly linear in the number of rows. Memory: about 60
        bytes per row, and a pool.
    """
    state = _Greedy(objective, constraints, progress)
    is_exhaustive = int(constraints.allowed_M.sum()) <= EXHAUSTIVE_ROWS
    if is_exhaustive:
        state.select_exhaustively()
    else:
        state.select_in_rounds()
    return GreedySelection(
        row_index=np.array(state.rows, dtype=np.int64),
        gain=np.array(state.gains),
        used=state.ledger.used,
        rounds=state.rounds,
        is_exhaustive=is_exhaustive,
    )


def _best_and_sentinels(key_P: F64, row_P: I64, count: int) -> tuple[I64, I64]:
    """Return positions of the `count` highest keys, and of SENTINELS rows at evenly spaced ranks below.

    Ties go to the earlier row. The former positions ascend, so that argmax over their keys prefers the earlier row too.
    The ranks end at SENTINEL_RANKS * count.
    """
    order = np.flatnonzero(key_P > EXCLUDED)
    if len(order) <= count:
        return order, np.empty(0, dtype=np.int64)
    n_ranked = min(len(order), SENTINEL_RANKS * count)
    ranked = order[np.argpartition(-key_P[order], n_ranked - 1)[:n_ranked]] if n_ranked < len(order) else order
    ranked = ranked[np.lexsort((row_P[ranked], -key_P[ranked]))]
    sentinel_ranks = np.unique(np.linspace(count, n_ranked - 1, SENTINELS).astype(np.int64))
    return np.sort(ranked[:count]), ranked[sentinel_ranks]


def _highest(key_P: F64, mask_P: NDArray[np.bool_]) -> float:
    """Return the highest key within a mask."""
    return float(key_P[mask_P].max(initial=EXCLUDED))


def select_rows(
    predictor: Predictor, weights_T: F64, constraints: Constraints, progress: Progress | None = None
) -> SelectedRows:
    """Select rows that maximize the predicted change of a protocol with interactions, including redundancy.

    Args:
        predictor: an `InteractionPredictor`.
        weights_T: weights of the targets of the predictor, adding up to 1.
        constraints: budget, floors, caps and candidate rows.
        progress: optional callback that receives the number of selected rows.
    """
    assert isinstance(predictor, InteractionPredictor)
    objective, selection = _select_at_size(predictor, weights_T, constraints, progress)
    if selection is None:
        guarantee = (
            OPTIMAL_NOTE if constraints.unit != "tokens" else "rows by effect until none fits the remaining tokens"
        )
        return SelectedRows(best_items(objective.linear_N, constraints), guarantee)
    bound, reason = upper_bound(objective, constraints, selection.row_index)
    has_reward = any(weight > 0 for weight in objective.curvature.values())
    note = "the protocol has a positive geometry weight: selecting a row favours similar rows"
    guarantee = f"no upper bound: {reason}" if bound is None else _guarantee(objective, constraints, selection)
    return SelectedRows(selection.row_index, guarantee, selection.gain, bound, (note,) if has_reward else ())


def _select_at_size(
    predictor: InteractionPredictor, weights_T: F64, constraints: Constraints, progress: Progress | None
) -> tuple[Objective, GreedySelection | None]:
    """Select rows; under a token budget, repeat until the number of rows equals the assumed one (fixed point).

    Returns:
        The objective for the number of selected rows, and the selection, whose gains are those for the assumed number;
        None if the protocol has no pairwise terms.
    """
    size = max(1, round(constraints.budget / float(constraints.cost_M[constraints.allowed_M].mean())))
    for _ in range(MAX_SIZE_ITERATIONS):
        assumed_size = min(size, predictor.n_rows)
        objective = Objective.from_predictor(predictor, weights_T, assumed_size)
        if not objective.curvature:
            return objective, None
        selection = select_greedily(objective, constraints, progress)
        size = len(selection.row_index)
        if abs(size - assumed_size) <= SIZE_TOLERANCE * assumed_size:
            break
    if size != assumed_size:
        objective = Objective.from_predictor(predictor, weights_T, size)
    return objective, selection


def _guarantee(objective: Objective, constraints: Constraints, selection: GreedySelection) -> str:
    """Describe the proven guarantee."""
    is_exact = selection.is_exhaustive and constraints.unit == "rows" and bool(np.all(selection.gain >= 0))
    if is_exact and is_submodular(objective, constraints):
        return "at least 1 - 1/e of the best gain: the pool is aligned, hence V is submodular, and no gain is negative"
    return (
        "no selection of as many rows exceeds the bound: every geometry is a penalty, hence the relaxation is concave"
    )
