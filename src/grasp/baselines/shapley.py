"""Shapley values of a game whose utility is any function of subsets: exact for a few players, sampled for many.

The utility is called with a block of subsets, boolean (B, P), and answers (B,) or (B, E): E games over the same
players are solved at once. It is asked about no subset twice within one block or level; a utility that costs a
retraining remembers its answers itself, and a killed run asks the same questions again in the same order.

Shape letters: P players, B subsets, M permutations, E games.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import factorial

import numpy as np

from grasp.arrays import F64, I64, Bool
from grasp.errors import ModelError, SettingsError, ShapeError
from grasp.seeds import stream

Masks = Bool
Utility = Callable[[Masks], F64]

MAX_EXACT_PLAYERS = 16
BLOCK = 1024


@dataclass(frozen=True, slots=True)
class SampledShapley:
    """Permutation estimates; positive: the player raises the utility."""

    value_PE: F64
    standard_error_PE: F64  # of the mean over permutations; nan for a single permutation
    permutations: int
    evaluations: int  # subsets the utility was asked about
    truncated: int  # marginal contributions taken as 0, of permutations x P


def exact_shapley(utility: Utility, n_players: int, *, block: int = BLOCK) -> F64:
    r"""Shapley values by enumeration of all 2^P subsets, (P, E); every subset is asked about once.

    phi_i = sum_{S without i} |S|! (P - |S| - 1)! / P! (U(S + i) - U(S))

    Args:
        utility: boolean (B, P) -> (B,) or (B, E).
        block: subsets of one call.
    Raises:
        SettingsError: fewer than 1 or more than 16 players.
        ShapeError, ModelError: the utility answers with another number of subsets, or with what is no number.
    """
    if not 1 <= n_players <= MAX_EXACT_PLAYERS:
        raise SettingsError(
            f"players: got {n_players}, expected 1 to {MAX_EXACT_PLAYERS}, as 2^players subsets are evaluated; sample"
            " permutations instead"
        )
    weight = _size_weights(n_players)
    value: F64 | None = None
    for masks_BP in _all_masks(n_players, block):
        utility_BE = _ask(utility, masks_BP)
        size_B = masks_BP.sum(axis=1)
        joins, leaves = weight[np.maximum(size_B - 1, 0)], weight[np.minimum(size_B, n_players - 1)]
        share_PE = np.where(masks_BP, joins[:, None], -leaves[:, None]).T @ utility_BE
        value = share_PE if value is None else value + share_PE
    assert value is not None
    return value


def permutation_shapley(
    utility: Utility,
    n_players: int,
    *,
    permutations: int,
    seed: int,
    truncation: float | None = None,
    block: int = BLOCK,
) -> SampledShapley:
    """Mean marginal contribution of every player over random permutations.

    Permutation m depends on `seed` and m alone, so that more permutations extend a run. All permutations
    advance together, one player at a time, so the utility is asked about blocks of distinct subsets.

    Args:
        utility: boolean (B, P) -> (B,) or (B, E), the empty and the full subset included.
        truncation: once a permutation's utility is within this of the full set's, in every game, its further
            players count as contributing 0; none: every marginal contribution is evaluated.
        block: subsets of one call.
    Raises:
        SettingsError: no players, no permutations, a negative truncation.
        ShapeError, ModelError: the utility answers with another number of subsets, or with what is no number.
    Source: Castro et al. 2009; truncation: Ghorbani and Zou 2019. Deviation: with E games, a permutation is cut
        short only where all of them are within the tolerance.
    """
    _check_sampling(n_players, permutations, truncation)
    ends = np.stack([np.zeros(n_players, dtype=bool), np.ones(n_players, dtype=bool)])
    empty_E, full_E = _ask(utility, ends)
    order_MP = np.stack([stream(seed, "shapley", m).permutation(n_players) for m in range(permutations)])
    sums = _MarginalSums(np.zeros((n_players, len(full_E))), np.zeros((n_players, len(full_E))))
    before_ME = np.tile(empty_E, (permutations, 1))
    alive = np.arange(permutations)
    evaluations, truncated = 2, 0
    for place in range(n_players):
        open_now = alive if truncation is None else alive[np.abs(full_E - before_ME[alive]).max(axis=1) > truncation]
        truncated += permutations - len(open_now)
        alive = open_now
        if place == n_players - 1:
            after_ME, asked = np.tile(full_E, (len(alive), 1)), 0
        else:
            after_ME, asked = _level(utility, order_MP[alive, : place + 1], n_players, block)
        evaluations += asked
        sums.add(order_MP[alive, place], after_ME - before_ME[alive])
        before_ME[alive] = after_ME
    return SampledShapley(*sums.means(permutations), permutations, evaluations, truncated)


@dataclass(frozen=True, slots=True)
class _MarginalSums:
    total_PE: F64
    square_PE: F64

    def add(self, player_M: I64, marginal_ME: F64) -> None:
        np.add.at(self.total_PE, player_M, marginal_ME)
        np.add.at(self.square_PE, player_M, marginal_ME**2)

    def means(self, permutations: int) -> tuple[F64, F64]:
        """Mean marginal contribution and its standard error; a truncated one is a 0."""
        mean_PE = self.total_PE / permutations
        if permutations == 1:
            return mean_PE, np.full_like(mean_PE, np.nan)
        variance_PE = np.maximum(self.square_PE / permutations - mean_PE**2, 0.0) / (permutations - 1)
        return mean_PE, np.sqrt(variance_PE)


def _level(utility: Utility, prefix_MK: I64, n_players: int, block: int) -> tuple[F64, int]:
    """Utilities (M, E) of the sets that M prefixes of one length hold, each distinct set asked about once."""
    if not len(prefix_MK):
        return np.zeros((0, 1)), 0
    masks_MP = np.zeros((len(prefix_MK), n_players), dtype=bool)
    np.put_along_axis(masks_MP, prefix_MK, True, axis=1)
    distinct_BP, inverse_M = np.unique(masks_MP, axis=0, return_inverse=True)
    parts = [_ask(utility, distinct_BP[i : i + block]) for i in range(0, len(distinct_BP), block)]
    return np.concatenate(parts)[inverse_M.ravel()], len(distinct_BP)


def _ask(utility: Utility, masks_BP: Masks) -> F64:
    answer = np.asarray(utility(masks_BP), dtype=np.float64)
    answer_BE = answer[:, None] if answer.ndim == 1 else answer
    if answer_BE.ndim != 2 or len(answer_BE) != len(masks_BP):
        raise ShapeError(
            f"utility: got shape {answer.shape} for {len(masks_BP)} subsets, expected one number, or one row of"
            " numbers, a subset"
        )
    bad = np.argwhere(~np.isfinite(answer_BE))
    if len(bad):
        players = np.flatnonzero(masks_BP[bad[0, 0]]).tolist()
        raise ModelError(f"utility: got {answer_BE[tuple(bad[0])]} for players {players}, expected a number")
    return answer_BE


def _all_masks(n_players: int, block: int) -> Iterator[Masks]:
    bits = np.arange(n_players)
    for first in range(0, 2**n_players, block):
        codes = np.arange(first, min(first + block, 2**n_players))
        yield (codes[:, None] >> bits & 1).astype(bool)


def _size_weights(n_players: int) -> F64:
    """|S|! (P - |S| - 1)! / P! for |S| = 0 .. P - 1."""
    return np.array([factorial(s) * factorial(n_players - s - 1) / factorial(n_players) for s in range(n_players)])


def _check_sampling(n_players: int, permutations: int, truncation: float | None) -> None:
    if n_players < 1:
        raise SettingsError(f"players: got {n_players}, expected at least 1")
    if permutations < 1:
        raise SettingsError(f"permutations: got {permutations}, expected at least 1")
    if truncation is not None and not (np.isfinite(truncation) and truncation >= 0):
        raise SettingsError(f"truncation: got {truncation}, expected a finite number >= 0, in units of the utility")
