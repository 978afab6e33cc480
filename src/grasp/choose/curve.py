"""What would another budget have brought? The first rows of a selection, row by row and all together.

Shape letters: N rows, B prefixes.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from grasp.choose.choice import Aim
from grasp.choose.limits import I64

PLACES = 50
SEARCHED = 200  # lengths that are compared at once for the best one


@dataclass(frozen=True, slots=True)
class Curve:
    """The first rows of a choice."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    effect: tuple[float, ...]  # of the last row of each beginning
    value: tuple[float, ...]  # of all its rows: change against the corpus, repetition counted


def curve_of(aim: Aim, row_index: I64, places: Sequence[int]) -> Curve:
    """The beginnings of a choice that have so many rows; `places` ascend."""
    cuts = np.concatenate([[0], places])
    parts = [np.sort(row_index[a:b]) for a, b in itertools.pairwise(cuts)]
    indices = np.concatenate(parts)
    weights_BN = csr_array((np.ones(len(indices)), indices, cuts), shape=(len(parts), aim.predictor.n_rows))
    sums = aim.predictor.sums(weights_BN).cumulated()
    tokens_B = np.cumsum([int(aim.tokens_N[part].sum()) for part in parts])
    last_B = aim.effect_N[row_index[np.asarray(places) - 1]]
    columns = (np.asarray(places), tokens_B, last_B, aim.value(sums, tokens_B))
    return Curve(*(tuple(column.tolist()) for column in columns))


def best_length(aim: Aim, row_index: I64) -> int:
    """How many of the first rows have the highest value."""
    return searched(len(row_index), lambda places: curve_of(aim, row_index, places.tolist()).value)


def searched(most: int, values: Callable[[I64], Sequence[float]], at_once: int = SEARCHED, near: float = 0.0) -> int:
    """The length up to `most` with the highest value; on a grid, then between its neighbours.

    Args:
        at_once: lengths that are compared at once.
        near: stop where neighbours are this share of the length apart; 0: at single rows.
    """
    places = np.unique(np.geomspace(1, most, at_once).round().astype(np.int64))
    while True:
        at = int(np.argmax(values(places)))
        low, high = int(places[max(at - 1, 0)]), int(places[min(at + 1, len(places) - 1)])
        if len(places) == places[-1] - places[0] + 1 or high - low <= near * places[at]:
            return int(places[at])
        places = np.unique(np.linspace(low, high, at_once).round().astype(np.int64))


def even_places(n_rows: int, also: int = 0) -> list[int]:
    """Up to PLACES lengths, evenly spaced, the last one being all; and one more, if it is asked for."""
    places = np.unique(np.round(np.linspace(0, n_rows, PLACES + 1)[1:]).astype(np.int64))
    return sorted({int(place) for place in (*places, also) if place})
