"""Select items by rank: order them by a score, and take the best within the budget, floors and caps.

An item is a row or a whole document. Its score is its effect. With runs it is the gradient of the predicted change at a
selection that is improved step by step.

Start with `select_by_rank`; `best_budget` computes the size that is best for a training run, `value_curve` the value of
others.

Shape letters: N rows, M items (rows or documents), P items in ranked order, all or some, B subsets,
n swaps.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from grasp.arrays import F64, I64, Bool
from grasp.artifact.rows import ranked
from grasp.errors import SettingsError
from grasp.predict.weights import Weights, mask_of, single_subset
from grasp.select.budget import OPTIMAL_NOTE, Amount, Bounds, Constraints, take_within_budget
from grasp.select.items import Items
from grasp.select.objective import SelectionObjective
from grasp.select.selection import Curve
from grasp.text import signed

MIN_CURVE_STEP = 0.002  # share of the rows; points nearer to the selected size would repeat it
CURVE_POINTS = 50  # points of the curve of value against budget
# The search for the optimal budget refines a grid of sizes. Without floors and caps all sizes of a grid are prefixes of
# one ranking, which are cheap, and the search is exact; otherwise each size is selected anew.
PREFIX_GRID, PREFIX_TOLERANCE = 200, 0.0
CONSTRAINED_GRID, CONSTRAINED_TOLERANCE = 16, 0.005  # tolerance: share of the best size
SWAP_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # step sizes of the line search: shares of the possible swaps
MAX_ASCENT_STEPS = 20
MIN_RELATIVE_GAIN = 0.01  # stop the ascent if a step gains less than this share of the gain so far


@dataclass(frozen=True, slots=True)
class SelectedItems:
    """Selected rows or whole documents.

    Attributes:
        item_index_P: indices of the selected items, best first.
        row_index: indices of the selected rows, best first.
        ranked_rows: the selected rows, followed by those that a larger budget would add; without these if there are
            floors or caps.
        guarantee: what is known of the optimality.
    """

    item_index_P: I64
    row_index: I64
    ranked_rows: I64
    guarantee: str


def select_by_rank(objective: SelectionObjective, items: Items, constraints: Constraints) -> SelectedItems:
    """Select the items with the highest scores, subject to the constraints."""
    score_M, guarantee = items.effect_M, OPTIMAL_NOTE
    if objective.by_runs:
        score_M, guarantee = _scores_by_runs(objective, items, constraints)
    all_P = ranked(score_M, among_N=items.allowed_M)
    selected_P = order_P = take_within_budget(all_P, constraints)
    if not constraints.has_label_constraints:
        order_P = np.concatenate([selected_P, all_P[~mask_of(selected_P, len(score_M))[all_P]]])
    if not objective.by_runs and items.kind == "documents":
        until = ", until no further one fits" if constraints.costs_differ else ""
        guarantee = f"whole documents, by the mean effect of their rows{until}"
    elif not objective.by_runs and constraints.unit == "tokens":
        guarantee = token_guarantee(score_M, selected_P, constraints)
    rows, ranked_rows = items.ranked_rows(selected_P), items.ranked_rows(order_P)
    return SelectedItems(selected_P, rows, ranked_rows, guarantee)


def token_guarantee(effect_M: F64, selected_P: I64, constraints: Constraints) -> str:
    """Describe a selection with a budget in tokens: the mean effect of its tokens, and the highest possible mean.

    A token has the effect of its row. The highest mean for as many tokens is that of the fractional knapsack: rows
    sorted by score, the last one cut to fit.
    """
    text = "rows by effect until none fits the remaining tokens"
    text += "; the predicted change weighs all rows alike, whatever their length"
    if constraints.has_label_constraints:
        return f"{text}; within floors and caps"
    used = int(constraints.cost_M[selected_P].sum())
    order_P = ranked(effect_M, among_N=constraints.allowed_M)
    cost_P = constraints.cost_M[order_P]
    used_P = np.clip(used - (np.cumsum(cost_P) - cost_P), 0, cost_P)  # tokens of each row that fit; the last is cut
    mean = float(constraints.cost_M[selected_P] @ effect_M[selected_P]) / used
    bound = float(used_P @ effect_M[order_P]) / used
    means = f"mean effect, weighted by tokens, {signed(mean)}, at most {signed(bound)}"
    return f"{text}; {means} for any selection of as many tokens"


def _scores_by_runs(objective: SelectionObjective, items: Items, constraints: Constraints) -> tuple[F64, str]:
    """Score items by the change that a model fitted to runs predicts, and describe the gain over relevance.

    The predicted change is not additive over rows, so this is a local search that starts from the best items by
    relevance, by the algorithm of Frank and Wolfe. Each step linearises the objective at the current selection. The
    best selection for this linear objective is called a corner. The step then makes some of the swaps that lead from
    the current selection to the corner: as many as increase the objective most, of a few numbers that are tried.
    """
    model = objective.run_model
    assert model is not None
    best_score_M = items.effect_M
    selected_M = _best_masks(best_score_M[None], constraints)[0]
    value_by_relevance = best_value = float(objective.predicted_by_runs(items.subsets(selected_M[None]))[0])
    for _ in range(MAX_ASCENT_STEPS):
        gradient_N = model.row_gradients(
            items.subsets(selected_M[None]), objective.weights_T, cautious=objective.cautious
        )
        gradient_M = np.bincount(items.item_N, gradient_N) / items.rows_M
        score_BM = _scores_towards_corner(gradient_M, selected_M, _best_masks(gradient_M[None], constraints)[0])
        mask_BM = _best_masks(score_BM, constraints)
        value_B = objective.predicted_by_runs(items.subsets(mask_BM))
        k = int(np.argmax(value_B))
        if value_B[k] - best_value <= MIN_RELATIVE_GAIN * (best_value - value_by_relevance):
            break
        best_score_M, selected_M, best_value = score_BM[k], mask_BM[k], float(value_B[k])
    bound = "lower bound of the change" if objective.cautious else "change"
    return best_score_M, (
        f"rows are ranked by the {bound} predicted by the runs: {best_value:+.4f} {model.unit}, "
        f"{value_by_relevance:+.4f} for the best rows by relevance alone"
    )


def _best_masks(score_BM: F64, constraints: Constraints) -> Bool:
    """Return the items with the highest scores that satisfy the constraints, (B, M)."""
    ranked_BP = (ranked(score_M, among_N=constraints.allowed_M) for score_M in score_BM)
    return np.stack([mask_of(take_within_budget(order_P, constraints), score_BM.shape[1]) for order_P in ranked_BP])


def _scores_towards_corner(gradient_M: F64, selected_M: Bool, corner_M: Bool) -> F64:
    """Return scores whose best items lie between a selection and the corner of its gradient, (B, M).

    The k-th swap, from 0, replaces the selected item with the k-th lowest gradient by the new item with the k-th
    highest; it gains the difference of their gradients, which decreases with k. If all selected items get a bonus of
    the gain of swap k, the k swaps before it still pay and no others. With gains 5, 3, 1 and k = 1 the bonus is 3, and
    only the first swap is made. The first score has no bonus and leads to the corner. With caps or costs that differ
    the number of swaps is approximate.
    """
    removed_n = np.sort(gradient_M[selected_M & ~corner_M])
    added_n = -np.sort(-gradient_M[corner_M & ~selected_M])
    n_swaps = min(len(removed_n), len(added_n))
    gain_n = added_n[:n_swaps] - removed_n[:n_swaps]
    steps = sorted({int(n_swaps * share) for share in SWAP_SHARES} - {0})
    bonus_B = np.array([0.0, *(max(float(gain_n[k]), 0.0) for k in steps)])
    return np.asarray(gradient_M + bonus_B[:, None] * selected_M)


def value_curve(objective: SelectionObjective, items: Items, ranked_rows: I64, n_selected: int) -> Curve:
    """Return the value of the first rows of a ranking, for CURVE_POINTS sizes and the selected size.

    Args:
        ranked_rows: rows, best first.
        n_selected: number of selected rows.
    """
    n_rows = len(ranked_rows)
    even = np.unique(np.round(np.linspace(0, n_rows, CURVE_POINTS + 1)[1:]).astype(np.int64))
    even = even[(np.abs(even - n_selected) > MIN_CURVE_STEP * n_rows) | (even == n_rows)]
    return _values_of_prefixes(objective, items, ranked_rows, sorted({*even.tolist(), n_selected} - {0}))


def _values_of_prefixes(objective: SelectionObjective, items: Items, ranked_rows: I64, sizes: Sequence[int]) -> Curve:
    """Return the value of the first rows of a ranking, for several numbers of rows in ascending order."""
    start_B = np.concatenate([[0], sizes])
    parts = [np.sort(ranked_rows[first:stop]) for first, stop in itertools.pairwise(start_B)]
    indices = np.concatenate(parts)
    added_BN = csr_array((np.ones(len(indices)), indices, start_B), shape=(len(parts), len(items.item_N)))
    sums = objective.predictor.sums(Weights(added_BN)).cumulative()
    tokens_B = np.cumsum([int(objective.tokens_N[part].sum()) for part in parts])
    last_B = items.effect_M[items.item_N[ranked_rows[np.asarray(sizes) - 1]]]
    columns = (np.asarray(sizes), tokens_B, last_B, objective.value(sums))
    return Curve(*(tuple(column.tolist()) for column in columns))


def best_budget(objective: SelectionObjective, items: Items, floors: Bounds, caps: Bounds) -> int:
    """Return the number of rows with the highest value for the training budget.

    The search refines a grid of numbers of items around its best point until it is exact, or accurate to 0.5 % with
    floors and caps.

    Raises:
        SettingsError: no budget satisfies the floors and caps.
    """
    order_P = ranked(items.effect_M, among_N=items.allowed_M)
    ranked_rows, infeasible = items.ranked_rows(order_P), SettingsError("")
    n_rows_P = np.cumsum(items.rows_M[order_P])
    n_sizes, tolerance = PREFIX_GRID, PREFIX_TOLERANCE
    if floors or caps:
        n_sizes, tolerance = CONSTRAINED_GRID, CONSTRAINED_TOLERANCE
    sizes = np.unique(np.geomspace(1, len(order_P), n_sizes).round().astype(np.int64))
    while True:
        sizes_in_rows = n_rows_P[sizes - 1].tolist()
        values: list[float] = []
        if not (floors or caps):
            values += _values_of_prefixes(objective, items, ranked_rows, sizes_in_rows).value
        for n_rows in sizes_in_rows[len(values) :]:
            try:
                constraints = Constraints.from_budget(Amount(float(n_rows), False), items, floors, caps)
            except SettingsError as err:
                infeasible = err
                values.append(-np.inf)
                continue
            rows = items.ranked_rows(take_within_budget(order_P, constraints))
            weights = single_subset("budget", mask_of(rows, len(items.item_N))).weights
            values.append(float(objective.value(objective.predictor.sums(weights))[0]))
        best = int(np.argmax(values))
        low, high = int(sizes[max(best - 1, 0)]), int(sizes[min(best + 1, len(sizes) - 1)])
        is_exact = len(sizes) == sizes[-1] - sizes[0] + 1  # every size of the interval was tried
        if is_exact or high - low <= tolerance * sizes[best]:
            break
        sizes = np.unique(np.linspace(low, high, n_sizes).round().astype(np.int64))
    if values[best] == -np.inf:
        raise infeasible
    return int(sizes_in_rows[best])
