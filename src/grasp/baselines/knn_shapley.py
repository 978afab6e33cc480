r"""KNN-Shapley: exact Shapley values of a nearest-neighbour classifier, and of the same over a model's hidden states.

The game of one test point: the players are training points, and a set of them is worth the share of its K nearest that
have the test point's label, v(S) = 1/K sum_{k <= min(K, |S|)} [label of the k-th nearest in S is right].

Shape letters: N training points (rows), n rows of a block, E test points (units), S supervised positions of all units,
P positions of a block of rows, M nearest positions that are kept, H width.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from grasp.arrays import F32, F64, I32, I64, Bool
from grasp.baselines.hidden import hidden_at
from grasp.baselines.stored import BlockMethod, RowScorer
from grasp.baselines.work import WorkArea
from grasp.errors import SettingsError, ShapeError
from grasp.methods.contract import Account, MethodInputs, Scores
from grasp.settings import Positions, Settings

# Distances are compared to this part of their scale: equal contexts have equal hidden states only up to rounding, and
# such ties go to the row that comes first, in whatever batch they were computed.
GRAIN = 1e-5
# One number a position, so that the nearest are the smallest: distance in grains | row | place in the row | whether its
# label is right. What lies beyond the last grain, or beyond the last place, shares it.
ROW_BITS, PLACE_BITS = 26, 13
MOST_GRAINS = (1 << (62 - ROW_BITS - PLACE_BITS)) - 1
NOTHING = np.iinfo(np.int64).max
PAIRS_AT_ONCE = 1 << 22  # distances in memory


def knn_shapley(
    embedding_NH: NDArray[np.floating],
    label_N: NDArray[Any],
    test_EH: NDArray[np.floating],
    test_label_E: NDArray[Any],
    k: int,
) -> F64:
    """Shapley value of every training point for every test point, exactly, (N, E); O(E N log N).

    Equal distances go to the point that comes first. Values of a test point add up to v(all): the share of its K
    nearest that have its label (of K, where there are fewer points than K).

    Args:
        embedding_NH: compared with `test_EH` by squared Euclidean distance, in float64.
        label_N: compared with `test_label_E`; anything that can be.
        k: neighbours that vote, at least 1.
    Raises:
        ShapeError: points and labels, or widths, differ.
        SettingsError: k below 1.
    Source: Jia et al. 2019 (arXiv 1908.08619), theorem 1. Deviation: min(K, N) / (K N) instead of 1 / N for the
        farthest point, which is exact for fewer points than K as well.
    """
    if k < 1:
        raise SettingsError(f"knn_shapley: k: got {k}, expected at least 1")
    train_NH, test_EH = np.asarray(embedding_NH, np.float64), np.asarray(test_EH, np.float64)
    label_N, test_label_E = np.asarray(label_N), np.asarray(test_label_E)
    if train_NH.shape != (len(label_N), test_EH.shape[1]) or len(test_EH) != len(test_label_E) or not len(label_N):
        raise ShapeError(
            f"knn_shapley: got embeddings {train_NH.shape} with {len(label_N)} labels, test points {test_EH.shape} "
            f"with {len(test_label_E)}; expected one label a point, one width, and at least one training point"
        )
    out_NE = np.empty((len(train_NH), len(test_EH)))
    for e, (test_H, label) in enumerate(zip(test_EH, test_label_E, strict=True)):
        order_N = np.argsort(((train_NH - test_H) ** 2).sum(axis=1), kind="stable")
        out_NE[order_N, e] = values_by_rank(label_N[order_N] == label, k, n_points=len(train_NH))
    return out_NE


def values_by_rank(right_M: Bool, k: int, *, n_points: int) -> F64:
    r"""Shapley values of the M nearest points, nearest first, (M,), or (S, M) for S test points at once.

    s_N = [right_N] min(K, N) / (K N),  s_i = s_{i+1} + ([right_i] - [right_{i+1}]) / K * min(K, i) / i

    Args:
        right_M: whether the i-th nearest point has the right label.
        n_points: N, of which M are given. Where M < N the recursion starts from 0 at rank M, whose value is at most
            1 / max(K, M) in size; all values are off by that, the same for all of them.
    """
    right = np.asarray(right_M, dtype=np.float64)
    n_ranks = right.shape[-1]
    rank = np.arange(1, n_ranks + 1)
    share = np.minimum(k, rank) / (k * rank)
    steps = np.zeros_like(right)
    steps[..., :-1] = (right[..., :-1] - right[..., 1:]) * share[:-1]
    steps[..., -1] = right[..., -1] * share[-1] if n_ranks == n_points else 0.0
    return np.asarray(np.cumsum(steps[..., ::-1], axis=-1)[..., ::-1])


class KnnShapleySettings(Settings):
    """The nearest-neighbour game over hidden states."""

    k: int = Field(10, ge=1, description="Neighbours that vote. Source: 5 to 10 for classification.")
    nearest: int = Field(
        1024,
        ge=1,
        description="Nearest positions that are kept a unit's position, more than k: values are exact to 1 / nearest.",
    )
    positions: Positions = Field("all", description="Positions of a row that are players: all, tail:n or stride:n.")

    @model_validator(mode="after")
    def _keeps_more_than_vote(self) -> Self:
        if self.nearest <= self.k:
            raise ValueError(f"nearest: got {self.nearest}, expected more than k, {self.k}")
        return self


class KnnShapley(BlockMethod[KnnShapleySettings]):
    """Who is near a unit's hidden states and has its next token.

    Shapley values of positions in a nearest-neighbour language model, added up over each row.

    A row of text has no label, so the game of the source is played one level below: training points are the rows'
    positions, each with its final hidden state and the token that comes next; test points are the supervised
    positions of a unit; the classifier is a nearest-neighbour language model (Khandelwal et al. 2020). A row's value is
    the mean over the unit's positions of the sum of its positions' values.
    Source: Jia et al. 2019. Deviation: players are positions, so a row's value is a sum of Shapley values and not the
    Shapley value of the row; the recursion begins at the nearest so many positions.
    """

    settings_type = KnnShapleySettings
    looks_at = frozenset({"tokens", "model"})

    def prepare(self, material: MethodInputs, work: WorkArea, part: int) -> RowScorer:
        del part
        if material.n_rows > 1 << ROW_BITS:
            raise SettingsError(f"knn_shapley: got {material.n_rows:,} rows, expected at most {1 << ROW_BITS:,}")
        if (found := work.load("values")) is None:
            queries = _queries(material)
            nearest, n_points = self._nearest(material, work, queries)
            key_SM = np.sort(nearest.key_SM, axis=1)
            value_SM = values_by_rank((key_SM & 1).astype(bool), self.settings.k, n_points=n_points)
            row_SM = (key_SM >> (PLACE_BITS + 1)) & ((1 << ROW_BITS) - 1)
            found = _added_up(row_SM, value_SM, queries.unit_S)
            work.save("values", found)
        return _Sparse(found, material.n_units, self._account())

    def _nearest(self, material: MethodInputs, work: WorkArea, queries: "_Queries") -> tuple["_Nearest", int]:
        """The nearest positions of all rows to each unit position, and how many positions there are."""
        done = work.read("nearest-until") or {"stop": 0, "points": 0}
        nearest = _Nearest(len(queries.label_S), self.settings.nearest)
        if done["stop"]:
            nearest.key_SM = np.array(work.loaded(f"nearest-{done['stop']}"))
        n_points = int(done["points"])
        material.progress.stage("nearest positions", rows=material.n_rows - done["stop"], tokens=None)
        for start, stop in material.blocks(done["stop"]):
            n_points += self._add_block(material, queries, nearest, start, stop)
            work.save(f"nearest-{stop}", nearest.key_SM)
            work.write("nearest-until", {"stop": stop, "points": n_points})
            (work.directory / f"nearest-{start}.npy").unlink(missing_ok=True)
            material.progress.advance(stop - start, 0)
        return nearest, n_points

    def _add_block(
        self, material: MethodInputs, queries: "_Queries", nearest: "_Nearest", start: int, stop: int
    ) -> int:
        """Positions of rows [start, stop) among the nearest; how many they are."""
        rows = material.rows(start, stop)
        sequences = [rows.ids(i) for i in range(len(rows))]
        first = [0 if (mask := rows.mask(i)) is None else mask for i in range(len(rows))]
        found = hidden_at(material.model, sequences, first, self.settings.positions)
        first_n = np.searchsorted(found.sequence_P, np.arange(len(rows)))
        place_P = np.minimum(np.arange(len(found.label_P)) - first_n[found.sequence_P], (1 << PLACE_BITS) - 1)
        where_P = ((start + found.sequence_P) << PLACE_BITS) + place_P
        step = max(1, PAIRS_AT_ONCE // len(queries.label_S))
        for low in range(0, len(where_P), step):
            here = slice(low, low + step)
            grains_SP = queries.grains(found.hidden_PH[here])
            s, p = np.nonzero(grains_SP <= nearest.last()[:, None])
            right = found.label_P[here][p] == queries.label_S[s]
            nearest.add(s, grains_SP[s, p], where_P[here][p], right)
        nearest.merge()
        return len(where_P)

    def _account(self) -> Account:
        return Account(
            covers=(f"final hidden states at positions {self.settings.positions} and the tokens after them",),
            notes=(
                "players are positions, not rows: a row's value is the sum of its positions' Shapley values",
                f"exact to 1 / {self.settings.nearest:,} where the corpus has more positions",
            ),
        )


class _Nearest:
    """The smallest keys of every query; what comes is collected, and merged when there is much of it."""

    def __init__(self, n_queries: int, most: int) -> None:
        self.most = most
        self.key_SM = np.empty((n_queries, 0), dtype=np.int64)
        self._new: list[tuple[I64, I64]] = []
        self._n_new = 0

    def last(self) -> F64:
        """Grains beyond which nothing can be among the nearest, (S,)."""
        if self.key_SM.shape[1] < self.most:
            return np.full(len(self.key_SM), np.inf)
        return np.asarray(self.key_SM.max(axis=1) >> (ROW_BITS + PLACE_BITS + 1), dtype=np.float64)

    def add(self, query: I64, grains: F64, where: I64, right: Bool) -> None:
        """Positions `where`, each for one query."""
        near = np.clip(grains, 0, MOST_GRAINS).astype(np.int64) << (ROW_BITS + PLACE_BITS + 1)
        self._new.append((query, near + (where << 1) + right))
        self._n_new += len(query)
        if self._n_new > self.most * len(self.key_SM):
            self.merge()

    def merge(self) -> None:
        """Bring the collected keys among the kept ones."""
        if not self._n_new:
            return
        query, key = (np.concatenate(parts) for parts in zip(*self._new, strict=True))
        self._new, self._n_new = [], 0
        count_S = np.bincount(query, minlength=len(self.key_SM))
        order = np.argsort(query, kind="stable")
        place = np.arange(len(query)) - np.repeat(np.cumsum(count_S) - count_S, count_S)
        fresh = np.full((len(self.key_SM), int(count_S.max())), NOTHING)
        fresh[query[order], place] = key[order]
        both = np.concatenate([self.key_SM, fresh], axis=1)
        if both.shape[1] > self.most:
            both = np.partition(both, self.most - 1, axis=1)[:, : self.most]
        self.key_SM = np.ascontiguousarray(both)


@dataclass(frozen=True, slots=True)
class _Queries:
    """Supervised positions of all units."""

    hidden_SH: F64
    label_S: I32
    unit_S: I64

    def grains(self, hidden_PH: F32) -> F64:
        """Squared Euclidean distances, (S, P), in whole units of GRAIN x the mean squared norm of the queries."""
        own_S = np.einsum("sh,sh->s", self.hidden_SH, self.hidden_SH)
        unit = GRAIN * own_S.mean()
        wide_PH = hidden_PH.astype(np.float64)
        theirs_P = np.einsum("ph,ph->p", wide_PH, wide_PH) / unit
        grains_SP = (self.hidden_SH * (-2.0 / unit)) @ wide_PH.T
        grains_SP += own_S[:, None] / unit
        grains_SP += theirs_P
        return np.asarray(np.rint(grains_SP, out=grains_SP))


def _queries(material: MethodInputs) -> _Queries:
    units = material.unit_tokens
    found = hidden_at(material.model, [unit.input_ids for unit in units], [unit.first - 1 for unit in units], "all")
    return _Queries(found.hidden_PH.astype(np.float64), found.label_P, found.sequence_P)


VALUES = np.dtype([("row", "<i8"), ("unit", "<i4"), ("value", "<f8")])


def _added_up(row_SM: I64, value_SM: F64, unit_S: I64) -> NDArray[np.void]:
    """Mean over a unit's positions of the sum over a row's, as (row, unit, value) in order of row, then unit."""
    count_E = np.bincount(unit_S)
    unit_SM = np.broadcast_to(unit_S[:, None], row_SM.shape)
    key, inverse = np.unique(row_SM * len(count_E) + unit_SM, return_inverse=True)
    out = np.empty(len(key), dtype=VALUES)
    out["row"], out["unit"] = np.divmod(key, len(count_E))
    out["value"] = np.bincount(inverse.ravel(), weights=(value_SM / count_E[unit_SM]).ravel(), minlength=len(key))
    return out


class _Sparse(RowScorer):
    """Values of some rows; 0 for the others."""

    def __init__(self, values: NDArray[np.void], n_units: int, account: Account) -> None:
        self._values, self._n_units, self._account = values, n_units, account

    def score(self, start: int, stop: int) -> Scores:
        low, high = np.searchsorted(self._values["row"], (start, stop))
        here = self._values[low:high]
        out = np.zeros((stop - start, self._n_units))
        out[here["row"] - start, here["unit"]] = here["value"]
        return out

    def account(self) -> Account:
        return self._account
