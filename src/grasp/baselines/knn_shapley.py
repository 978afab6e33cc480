r"""KNN-Shapley: exact Shapley values of a nearest-neighbour classifier, applied to a model's hidden states.

Start with `knn_shapley` (the game for any embeddings) or `KnnShapley` (the method for rows of text). In the game of a
test point the players are training points, and the value of a set is the share of its K nearest that have the test
point's label, v(S) = 1/K sum_{k <= min(K, |S|)} [label of the k-th nearest in S is right].

Shape letters: N training points (rows), n rows of a block, E test points (units), S supervised positions of all units,
P positions of a block of rows, M nearest positions that are stored, H width, B sequences of a batch, L tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator
from safetensors.numpy import load_file

from grasp.arrays import F32, F64, I32, I64, Bool
from grasp.baselines.stored import BlockMethod, RowScorer, cached
from grasp.errors import ModelError, SettingsError, ShapeError
from grasp.methods.contract import Account, MethodInputs, Scores
from grasp.models.causal_lm import ReferenceModel, pad_rows
from grasp.models.forward_pass import position_mask
from grasp.settings import Settings

# Distances are rounded to this fraction of their scale: equal contexts have equal hidden states only up to rounding,
# and such ties must go to the first row, in whatever batch they were computed.
GRAIN = 1e-5
# A position is packed into one int64 key, from high to low bits: distance in grains | row | offset in the row | whether
# its label is right. So the nearest positions have the smallest keys, and a partial sort of integers finds them.
# Distances and offsets beyond the largest value are clipped to it.
ROW_BITS, OFFSET_BITS = 26, 13
GRAIN_SHIFT = ROW_BITS + OFFSET_BITS + 1
MAX_GRAINS = (1 << (63 - GRAIN_SHIFT)) - 1
PAIRS_AT_ONCE = 1 << 22  # distances in memory


def knn_shapley(
    embedding_NH: NDArray[np.floating],
    label_N: NDArray[Any],
    test_EH: NDArray[np.floating],
    test_label_E: NDArray[Any],
    k: int,
) -> F64:
    """Return the exact Shapley value of each training point for each test point, (N, E); O(E N log N).

    Ties in distance go to the first point. The values for a test point sum to v(all): the number of its K nearest that
    have its label, divided by K.

    Args:
        embedding_NH: compared with `test_EH` by squared Euclidean distance, in float64.
        label_N: compared with `test_label_E` by equality.
        k: number of neighbours that vote, at least 1.
    Raises:
        ShapeError: numbers of points and labels differ, or widths differ.
        SettingsError: k is below 1.
    Source: Jia et al. 2019 (arXiv 1908.08619), theorem 1. Deviation: min(K, N) / (K N) instead of 1 / N for the
        farthest point, which is also exact for fewer points than K.
    """
    if k < 1:
        raise SettingsError(f"knn_shapley: k: got {k}, expected at least 1")
    train_NH, test_EH = np.asarray(embedding_NH, np.float64), np.asarray(test_EH, np.float64)
    label_N, test_label_E = np.asarray(label_N), np.asarray(test_label_E)
    if train_NH.shape != (len(label_N), test_EH.shape[1]) or len(test_EH) != len(test_label_E) or not len(label_N):
        raise ShapeError(
            f"knn_shapley: got embeddings {train_NH.shape} with {len(label_N)} labels, test points {test_EH.shape} "
            f"with {len(test_label_E)}; expected one label per point, equal widths and at least one training point"
        )
    out_NE = np.empty((len(train_NH), len(test_EH)))
    for e, (test_H, label) in enumerate(zip(test_EH, test_label_E, strict=True)):
        order_N = np.argsort(((train_NH - test_H) ** 2).sum(axis=1), kind="stable")
        out_NE[order_N, e] = values_by_rank(label_N[order_N] == label, k, n_points=len(train_NH))
    return out_NE


def values_by_rank(right_M: Bool, k: int, *, n_points: int) -> F64:
    r"""Return the Shapley values of the M nearest points, nearest first, (M,), or (S, M) for S test points.

    s_N = [right_N] min(K, N) / (K N),  s_i = s_{i+1} + ([right_i] - [right_{i+1}]) / K * min(K, i) / i

    Args:
        right_M: whether the i-th nearest point has the right label.
        n_points: N, the total number of points. If M < N the recursion starts from 0 at rank M, whose true value is at
            most 1 / max(K, M) in size; all values are off by the same amount.
    """
    right = np.asarray(right_M, dtype=np.float64)
    n_ranks = right.shape[-1]
    rank = np.arange(1, n_ranks + 1)
    share = np.minimum(k, rank) / (k * rank)
    # The recursion runs from the farthest point to the nearest: a reversed cumulative sum of its increments.
    steps = np.zeros_like(right)
    steps[..., :-1] = (right[..., :-1] - right[..., 1:]) * share[:-1]
    steps[..., -1] = right[..., -1] * share[-1] if n_ranks == n_points else 0.0
    return np.asarray(np.cumsum(steps[..., ::-1], axis=-1)[..., ::-1])


class KnnShapleySettings(Settings):
    """The nearest-neighbour game over hidden states."""

    k: int = Field(10, ge=1, description="Number of neighbours that vote. Source: 5 to 10 for classification.")
    nearest: int = Field(
        1024,
        ge=1,
        description="Nearest positions stored per position of a unit, more than k; values are exact to 1 / nearest.",
    )

    @model_validator(mode="after")
    def _keeps_more_than_vote(self) -> Self:
        if self.nearest <= self.k:
            raise ValueError(f"nearest: got {self.nearest}, expected more than k, {self.k}")
        return self


class KnnShapley(BlockMethod[KnnShapleySettings]):
    """Shapley values in a nearest-neighbour language model over hidden states.

    A row of text has no label, so the game of the source is played between positions: training points are the rows'
    positions, each with its final hidden state and the next token; test points are the supervised positions of a unit;
    the classifier is a nearest-neighbour language model (Khandelwal et al. 2020). The value of a row is the sum of its
    positions' values, averaged over the unit's positions.

    Source: Jia et al. 2019 (arXiv 1908.08619), theorem 1.
    As published: players are labelled examples, compared by features of a trained classifier; 5 to 10 neighbours vote.
    Deviation: players are positions, so the value of a row is a sum of Shapley values and not the Shapley value of the
    row; the recursion starts at the `nearest`-th position.
    """

    settings_type = KnnShapleySettings
    requires = frozenset({"tokens", "model"})

    def prepare(self, inputs: MethodInputs, work: Path, part: int) -> RowScorer:
        del part
        if inputs.n_rows > 1 << ROW_BITS:
            raise SettingsError(f"knn_shapley: got {inputs.n_rows:,} rows, expected at most {1 << ROW_BITS:,}")
        values = cached(work / "values.safetensors", lambda: self._values(inputs, work))

        def score(start: int, stop: int) -> Scores:
            block = slice(*np.searchsorted(values["row"], (start, stop)))
            out = np.zeros((stop - start, inputs.n_units))
            out[values["row"][block] - start, values["unit"][block]] = values["value"][block]
            return out

        account = Account(
            covers=("final hidden states and the tokens after them",),
            notes=(
                "players are positions, not rows: the value of a row is the sum of its positions' Shapley values",
                f"exact to 1 / {self.settings.nearest:,} where the corpus has more positions",
            ),
        )
        return RowScorer(score, account)

    def _values(self, inputs: MethodInputs, work: Path) -> dict[str, NDArray[Any]]:
        """Return the values that are not zero, sorted by row and unit."""
        units, n_nearest = inputs.unit_tokens, self.settings.nearest
        queries = hidden_at(inputs.model, [unit.input_ids for unit in units], [unit.first - 1 for unit in units])
        query_SH, unit_S = queries.hidden_PH.astype(np.float64), queries.sequence_P
        # The nearest positions of the rows so far, in a file named after the next row and the number of positions.
        saved = sorted(work.glob("nearest-*-*.safetensors"), key=lambda path: int(path.stem.split("-")[1]))
        first, n_points, key_SM = 0, 0, np.empty((len(unit_S), 0), dtype=np.int64)
        if saved:
            first, n_points = (int(number) for number in saved[-1].stem.split("-")[1:])
            key_SM = load_file(saved[-1])["key_SM"]
        at_once = max(n_nearest, PAIRS_AT_ONCE // len(unit_S))
        inputs.progress.stage("nearest positions", rows=inputs.n_rows - first, tokens=None)
        for start, stop in inputs.blocks(first):
            rows = inputs.rows(start, stop)
            masks = [rows.mask(i) for i in range(len(rows))]
            firsts = [0 if mask is None else mask for mask in masks]
            states = hidden_at(inputs.model, [rows.ids(i) for i in range(len(rows))], firsts)
            first_n = np.searchsorted(states.sequence_P, np.arange(stop - start))
            offset_P = np.minimum(np.arange(len(states.label_P)) - first_n[states.sequence_P], (1 << OFFSET_BITS) - 1)
            position_P = ((start + states.sequence_P) << OFFSET_BITS) + offset_P
            for low in range(0, len(position_P), at_once):
                chunk = slice(low, low + at_once)
                grains_SP = np.minimum(distance_grains(query_SH, states.hidden_PH[chunk]), MAX_GRAINS)
                is_right_SP = states.label_P[chunk] == queries.label_P[:, None]
                new_SP = (grains_SP.astype(np.int64) << GRAIN_SHIFT) + (position_P[chunk] << 1) + is_right_SP
                key_SM = np.concatenate([key_SM, new_SP], axis=1)
                if key_SM.shape[1] > n_nearest:
                    key_SM = np.ascontiguousarray(np.partition(key_SM, n_nearest - 1, axis=1)[:, :n_nearest])
            n_points += len(position_P)
            path = work / f"nearest-{stop}-{n_points}.safetensors"
            cached(path, lambda: {"key_SM": key_SM})  # noqa: B023 - called at once
            for old in saved:
                old.unlink()
            saved = [path]
            inputs.progress.advance(stop - start, 0)
        key_SM = np.sort(key_SM, axis=1)
        # the lowest bit of a key is whether the label is right, the row stands above the offset
        value_SM = values_by_rank((key_SM & 1).astype(bool), self.settings.k, n_points=n_points)
        row_SM = (key_SM >> (OFFSET_BITS + 1)) & ((1 << ROW_BITS) - 1)
        # sum over a row's positions, average over a unit's
        count_E = np.bincount(unit_S)
        unit_SM = np.broadcast_to(unit_S[:, None], row_SM.shape)
        key, inverse = np.unique(row_SM * len(count_E) + unit_SM, return_inverse=True)
        weights = (value_SM / count_E[unit_SM]).ravel()
        row, unit = np.divmod(key, len(count_E))
        return {"row": row, "unit": unit, "value": np.bincount(inverse.ravel(), weights=weights, minlength=len(key))}


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states at the positions that predict a token, ordered by sequence."""

    hidden_PH: F32
    label_P: I32  # id of the next token
    sequence_P: I64  # index of the sequence


def hidden_at(model: ReferenceModel, sequences: Sequence[I32], first: Sequence[int | Bool]) -> HiddenStates:
    """Return hidden states at the positions of each sequence that predict a token.

    Args:
        first: first position of each sequence (position t predicts token t + 1), or a mask of its labelled tokens.
    Raises:
        ModelError: a hidden state is not finite.
    """
    parts = []
    lengths = np.array([len(ids) for ids in sequences], dtype=np.int64)
    for index_B in model.batches(lengths):
        first_B = [first[i] for i in index_B]
        # pad_rows expects labelled tokens: a mask of them, or the first, which is one after the position before it
        labels_B = [eligible if isinstance(eligible, np.ndarray) else eligible + 1 for eligible in first_B]
        ids_BL, loss_mask_BL = (part.to(model.device) for part in pad_rows([sequences[i] for i in index_B], labels_B))
        row_P, t_P = position_mask("all", loss_mask_BL).nonzero(as_tuple=True)
        hidden_PH = model.hidden(ids_BL)[row_P, t_P].float().cpu().numpy()
        parts.append((hidden_PH, ids_BL[row_P, t_P + 1].cpu().numpy().astype(np.int32), index_B[row_P.cpu().numpy()]))
    hidden_PH, label_P, sequence_P = (np.concatenate(part) for part in zip(*parts, strict=True))
    bad_P = np.flatnonzero(~np.isfinite(hidden_PH).all(axis=1))
    if bad_P.size:
        raise ModelError(
            f"hidden states: {bad_P.size} are not finite in {model.dtype}, the first in sequence "
            f"{sequence_P[bad_P[0]]} of the block; build with model.dtype: float32"
        )
    order_P = np.argsort(sequence_P, kind="stable")
    return HiddenStates(hidden_PH[order_P], label_P[order_P], sequence_P[order_P])


def distance_grains(query_SH: F64, hidden_PH: F32) -> F64:
    """Return squared distances, (S, P), in whole units of GRAIN x the mean squared norm of the queries."""
    square_S = np.einsum("sh,sh->s", query_SH, query_SH)
    grain = GRAIN * square_S.mean()
    wide_PH = hidden_PH.astype(np.float64)
    square_P = np.einsum("ph,ph->p", wide_PH, wide_PH) / grain
    # ||q - h||^2 = ||q||^2 - 2 <q, h> + ||h||^2, in float64: the difference cancels for near neighbours.
    grains_SP = (query_SH * (-2.0 / grain)) @ wide_PH.T
    grains_SP += square_S[:, None] / grain
    grains_SP += square_P
    return np.asarray(np.rint(np.maximum(grains_SP, 0.0, out=grains_SP), out=grains_SP))
