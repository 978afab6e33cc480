"""What a selection is worth at other budgets: its first rows, row by row and all together.

Shape letters: N rows, T targets, B prefixes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from grasp.choose.additive import F64
from grasp.choose.limits import I64
from grasp.choose.repetition import repeated_share
from grasp.predict.geometry import SketchSums, SubsetMass
from grasp.predict.predictor import Predictor, SubsetSums

PLACES = 50
SEARCHED = 200  # lengths that are compared at once for the best one


@dataclass(frozen=True, slots=True)
class Training:
    """A training budget, and what repetition is worth."""

    tokens: float | None  # None: not said; every row counts as if seen once
    repeat_worth: float
    corpus_tokens: int

    def share(self, unique_B: F64 | I64) -> F64:
        """What changes of subsets with so many tokens are multiplied by."""
        return repeated_share(unique_B, self.corpus_tokens, self.tokens, self.repeat_worth)

    def seen(self, unique: float) -> float | None:
        """How often each of so many tokens is seen."""
        return None if self.tokens is None else self.tokens / unique


@dataclass(frozen=True, slots=True)
class Curve:
    """The first rows of a choice."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    effect: tuple[float, ...]  # of the last row of each beginning
    value: tuple[float, ...]  # of all its rows: change against the corpus, repetition counted

    @property
    def peak(self) -> int:
        """Place of the highest value."""
        return int(np.argmax(self.value))


def curve_of(
    predictor: Predictor,
    weights_T: F64,
    row_index: I64,
    effect_N: F64,
    tokens_N: I64,
    training: Training,
    places: Sequence[int],
) -> Curve:
    """The beginnings of a choice that have so many rows; `places` ascend."""
    cuts = np.concatenate([[0], places])
    parts = [np.sort(row_index[a:b]) for a, b in itertools.pairwise(cuts)]
    indices = np.concatenate(parts)
    weights_BN = csr_array((np.ones(len(indices)), indices, cuts), shape=(len(parts), predictor.n_rows))
    sums = _cumulated(predictor.sums(weights_BN), predictor.n_rows)
    tokens_B = np.cumsum([int(tokens_N[part].sum()) for part in parts])
    value_B = (predictor.change_of(sums) @ weights_T) * training.share(tokens_B)
    last_B = effect_N[row_index[np.asarray(places) - 1]]
    return Curve(*(tuple(column.tolist()) for column in (np.asarray(places), tokens_B, last_B, value_B)))


def best_length(
    predictor: Predictor, weights_T: F64, row_index: I64, effect_N: F64, tokens_N: I64, training: Training
) -> int:
    """How many of the first rows have the highest value; searched on a grid, then between its neighbours."""
    n_rows = len(row_index)
    places = np.unique(np.geomspace(1, n_rows, SEARCHED).round().astype(np.int64))
    while True:
        curve = curve_of(predictor, weights_T, row_index, effect_N, tokens_N, training, places.tolist())
        at = curve.peak
        low, high = int(places[max(at - 1, 0)]), int(places[min(at + 1, len(places) - 1)])
        finer = np.unique(np.linspace(low, high, SEARCHED).round().astype(np.int64))
        if len(finer) == high - low + 1 <= SEARCHED:
            best = curve_of(predictor, weights_T, row_index, effect_N, tokens_N, training, finer.tolist())
            return best.rows[best.peak]
        places = finer


def even_places(n_rows: int, also: int = 0) -> list[int]:
    """Up to PLACES lengths, evenly spaced, the last one being all; and one more, if it is asked for."""
    places = np.unique(np.round(np.linspace(0, n_rows, PLACES + 1)[1:]).astype(np.int64))
    return sorted({int(place) for place in (*places, also) if place})


def _cumulated(sums: SubsetSums, n_rows: int) -> SubsetSums:
    """Sums of growing prefixes from those of disjoint parts; weights 1."""
    kept_B = np.cumsum(sums.mass.retained_B)
    return SubsetSums(
        mass=SubsetMass(kept_B, n_rows - kept_B, n_rows),
        square_B=np.cumsum(sums.square_B),
        effect_BT=np.cumsum(sums.effect_BT, axis=0),
        sketch={
            half: SketchSums(np.cumsum(part.total_BD, axis=0), np.cumsum(part.norm_B), np.cumsum(part.square_norm_B))
            for half, part in sums.sketch.items()
        },
    )
