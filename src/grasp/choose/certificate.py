"""How good a selection is: its value, what no selection of as many rows can exceed, and the value of its beginnings.

Where every geometry is a penalty, the relaxation of V to weights between 0 and 1 is concave, so its tangent at any
point x bounds V of every subset of as many rows that keeps the floors and caps:

    V(T) <= V(x) + max over such T of <gradient(x), T - x> .

The bound needs no alignment of the sketches; it is improved by a few steps of Frank and Wolfe from the selection on.
Shape letters: N rows, T targets, D sketch width, B prefixes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.choose.limits import I64, Limits
from grasp.choose.objective import Objective
from grasp.predict.blocks import one_subset
from grasp.predict.geometry import SketchSums, SubsetMass
from grasp.predict.scorer import Scorer, SubsetSums
from grasp.predict.source import F64

STEPS = 8
ENOUGH = 1e-3  # of the distance to the value of taking rows at random: closer is not worth a pass
ALIGNED_ROWS = 8_192  # pairs of a larger pool are not looked at


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is known of a selection's value, in the unit of `grasp predict`."""

    value: float
    bound: float | None  # no selection of as many rows within the limits exceeds it; None: `bound_reason` says why
    bound_reason: str
    aligned: bool | None  # all pairs of the pool's rows have <phi_i, phi_j> >= 0; None: not looked at
    searched: bool  # every row was the best of all that could be taken

    @property
    def gap(self) -> float | None:
        """What an optimal selection of as many rows could gain at most; none without a bound."""
        return None if self.bound is None else max(0.0, self.bound - self.value)


@dataclass(frozen=True, slots=True)
class Curve:
    """Value of the first rows of a selection, as `grasp predict` would say of them."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    value: tuple[float, ...]  # weighted mean of the targets
    per_target: tuple[tuple[float, ...], ...]  # [place][target]

    @property
    def peak(self) -> int:
        """Place of the highest value."""
        return int(np.argmax(self.value))


def curve_of(
    scorer: Scorer, weights_T: F64, row_index: I64, tokens_N: I64, places: Sequence[int], whole: SubsetSums
) -> Curve:
    """Values of prefixes.

    Args:
        places: lengths of the prefixes, ascending; the last is the whole selection.
        whole: sums of the whole selection, as `predict` takes them.
    """
    n_rows = scorer.n_rows
    cuts = np.concatenate([[0], places])
    parts = [np.sort(row_index[a:b]) for a, b in itertools.pairwise(cuts)]
    indices = np.concatenate(parts)
    weights_BN = csr_array((np.ones(len(indices)), indices, cuts), shape=(len(parts), n_rows))
    sums = _cumulated(scorer.sums(weights_BN), n_rows)
    value_BT = scorer.score_tasks(sums)[1].utility_BE
    value_BT[-1] = scorer.score_tasks(whole)[1].utility_BE[0]
    tokens_B = np.cumsum([int(tokens_N[part].sum()) for part in parts])
    return Curve(
        rows=tuple(int(place) for place in places),
        tokens=tuple(int(tokens) for tokens in tokens_B),
        value=tuple(float(value) for value in value_BT @ weights_T),
        per_target=tuple(tuple(float(value) for value in row) for row in value_BT),
    )


def sums_of(scorer: Scorer, row_index: I64) -> SubsetSums:
    """Sums of one subset, as `grasp predict` takes them."""
    mask_N = np.zeros(scorer.n_rows, dtype=np.bool_)
    mask_N[row_index] = True
    return scorer.sums(one_subset("selection", mask_N).weights_BN)


def prefix_places(n_taken: int, count: int = 50) -> list[int]:
    """Up to `count` lengths of prefixes: evenly spaced, the last one being all."""
    places = np.unique(np.round(np.linspace(0, n_taken, count + 1)[1:]).astype(np.int64))
    return [int(place) for place in places if place]


def upper_bound(objective: Objective, limits: Limits, row_index: I64, steps: int = STEPS) -> tuple[float | None, str]:
    """The bound of the module's docstring, or None and why there is none.

    Floors and caps in tokens are left out of it, which can only raise the bound.
    """
    if not objective.is_concave:
        return None, "a part of the geometry is rewarded: V is not concave"
    choice = _Choice(limits, len(row_index))
    x = _Point.of(objective, row_index)
    if not objective.curvature:
        return _tangent(objective, choice, x)[0], ""
    start, bound = x, np.inf
    for _ in range(steps):
        at, best = _tangent(objective, choice, x)
        bound = min(bound, at)
        if bound - start.value <= ENOUGH * abs(start.value - objective.constant):
            break
        x = _towards(objective, x, _Point.of(objective, best))
    return float(max(bound, start.value)), ""


def is_aligned(objective: Objective, limits: Limits) -> bool | None:
    """Whether the pool is aligned, so that V is submodular on it. Source: prop:aligned-submodularity.

    None where the pool is larger than ALIGNED_ROWS. Without curvature every pool is.
    """
    if not objective.curvature:
        return True
    rows = np.flatnonzero(limits.allowed_N)
    if len(rows) > ALIGNED_ROWS:
        return None
    sketch_PD = objective.sketches.rows(rows) * np.sqrt(np.abs(objective.bends_D))
    floor = -1e-9 * float(np.einsum("pd,pd->p", sketch_PD, sketch_PD).max(initial=0.0))
    blocks = (sketch_PD[start : start + 1024] @ sketch_PD.T for start in range(0, len(rows), 1024))
    return objective.is_concave and all(bool((block >= floor).all()) for block in blocks)


@dataclass(frozen=True, slots=True)
class _Point:
    """A point of the relaxation by all that V depends on."""

    linear: float
    sketch_D: F64
    value: float

    @classmethod
    def of(cls, objective: Objective, row_index: I64) -> "_Point":
        linear = float(objective.linear_N[row_index].sum())
        sketch_D = _sketch_sum(objective, row_index)
        return cls(linear, sketch_D, objective.value(linear, sketch_D))


def _sketch_sum(objective: Objective, row_index: I64) -> F64:
    mask_N = np.zeros(len(objective.linear_N), dtype=np.bool_)
    mask_N[row_index] = True
    weights_BN = one_subset("point", mask_N).weights_BN
    scorer, sketches = objective.sketches.scorer, objective.sketches
    parts = {half: scorer.sketches[half].held.sums(weights_BN)[0, :-1] for half in sketches.halves}
    return sketches.joined(parts)


def _tangent(objective: Objective, choice: "_Choice", x: _Point) -> tuple[float, I64]:
    """The tangent's largest value over subsets, and where it is reached."""
    gradient_N = objective.linear_N
    if objective.curvature:
        gradient_N = gradient_N + objective.sketches.dot(2.0 * objective.bends_D * x.sketch_D)
    best = choice.best(gradient_N)
    at_x = x.linear + 2.0 * float(objective.bends_D @ x.sketch_D**2)
    return x.value + float(gradient_N[best].sum()) - at_x, best


def _towards(objective: Objective, x: _Point, y: _Point) -> _Point:
    """Best point between two: V is a parabola there."""
    linear, sketch_D = y.linear - x.linear, y.sketch_D - x.sketch_D
    slope = linear + 2.0 * float((objective.bends_D * x.sketch_D) @ sketch_D)
    bend = float(objective.bends_D @ sketch_D**2)
    step = 1.0 if bend >= 0.0 else min(1.0, max(0.0, -slope / (2.0 * bend)))
    linear, sketch_D = x.linear + step * linear, x.sketch_D + step * sketch_D
    return _Point(linear, sketch_D, objective.value(linear, sketch_D))


class _Choice:
    """The best subset of a fixed number of rows for a linear function, within floors and caps in rows."""

    def __init__(self, limits: Limits, size: int) -> None:
        self._rows = np.flatnonzero(limits.allowed_N)
        self._size = size
        self._codes = None if limits.codes_N is None or limits.unit == "tokens" else limits.codes_N[self._rows]
        self._floor_G, self._cap_G = limits.floor_G, limits.cap_G

    def best(self, worth_N: F64) -> I64:
        """Rows of the best subset: floors first, then the best of what the caps leave."""
        worth = worth_N[self._rows]
        if self._codes is None:
            cut = len(worth) - self._size
            return np.asarray(self._rows[np.argpartition(worth, cut)[cut:] if cut else np.arange(len(worth))])
        order = np.argsort(-worth, kind="stable")
        codes = self._codes[order]
        rank = _rank_within(codes)
        owed = rank < self._floor_G[codes]
        free = np.flatnonzero(~owed & (rank < self._cap_G[codes]))[: self._size - int(owed.sum())]
        return np.asarray(self._rows[order[np.concatenate([np.flatnonzero(owed), free])]])


def _rank_within(codes: NDArray[np.int32]) -> I64:
    """How many earlier entries have the same code."""
    by_code = np.argsort(codes, kind="stable")
    counts = np.bincount(codes)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    rank = np.empty(len(codes), dtype=np.int64)
    rank[by_code] = np.arange(len(codes)) - first
    return rank


def _cumulated(sums: SubsetSums, n_rows: int) -> SubsetSums:
    """Sums of growing prefixes from those of disjoint parts; weights 1."""
    kept_B = np.cumsum(sums.mass.retained_B)
    return SubsetSums(
        mass=SubsetMass(kept_B, n_rows - kept_B, n_rows),
        task={kernel: np.cumsum(part, axis=0) for kernel, part in sums.task.items()},
        unit={},
        sketch={
            half: SketchSums(np.cumsum(part.total_BD, axis=0), np.cumsum(part.norm_B), np.cumsum(part.square_norm_B))
            for half, part in sums.sketch.items()
        },
    )
