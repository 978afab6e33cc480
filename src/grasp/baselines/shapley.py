"""Shapley values of a game with any utility function: exact for few players, sampled for many.

The Shapley value of a player is the utility that it adds to the players before it, averaged over all orders of the
players. Start with `exact_shapley` or `permutation_shapley`.

The utility is called with a block of subsets, boolean (B, P), and returns (B,) or (B, E): E games over the same players
are solved together. Within a block, and among prefixes of one length, no subset is evaluated twice.
An expensive utility should cache its results; a repeated run evaluates the same subsets in the same order.

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
BLOCK = 1024  # default number of subsets per call of the utility


@dataclass(frozen=True, slots=True)
class SampledShapley:
    """Permutation estimates; positive: the player raises the utility."""

    value_PE: F64
    standard_error_PE: F64  # of the mean over permutations; nan for a single permutation
    permutations: int
    evaluations: int  # subsets that the utility was evaluated on
    truncated: int  # marginal contributions set to 0, out of permutations x P


def exact_shapley(utility: Utility, n_players: int, *, block: int = BLOCK) -> F64:
    r"""Compute Shapley values (P, E) by enumeration of all 2^P subsets, each evaluated once.

    phi_i = sum_{S without i} |S|! (P - |S| - 1)! / P! (U(S + i) - U(S))

    Args:
        utility: boolean (B, P) -> (B,) or (B, E).
        block: subsets per call of the utility.
    Raises:
        SettingsError: fewer than 1 or more than 16 players.
        ShapeError, ModelError: the utility returns a wrong shape, or a value that is not finite.
    """
    if not 1 <= n_players <= MAX_EXACT_PLAYERS:
        raise SettingsError(
            f"players: got {n_players}, expected 1 to {MAX_EXACT_PLAYERS}, as 2^players subsets are evaluated; sample "
            "permutations instead"
        )
    weight = _size_weights(n_players)
    value: F64 | None = None
    for masks_BP in _all_masks(n_players, block):
        utility_BE = _evaluate(utility, masks_BP)
        # U(S) enters phi_i with a plus sign if i is in S (weight of size |S| - 1), else with a minus sign (size |S|).
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
    """Estimate Shapley values by the mean marginal contribution of each player over random permutations.

    Permutation m depends only on `seed` and m, so more permutations extend a run. All permutations advance together,
    one player at a time, so that the utility is evaluated on blocks of distinct subsets.

    Args:
        utility: boolean (B, P) -> (B,) or (B, E), the empty and the full subset included.
        truncation: once a permutation's utility is within this distance of the full set's in every game, the
            contributions of its remaining players are set to 0. Default: evaluate every contribution.
        block: subsets per call of the utility.
    Raises:
        ShapeError, ModelError: the utility returns a wrong shape, or a value that is not finite.
    Source: Castro et al. 2009; truncation: Ghorbani and Zou 2019. Deviation: with E games, a permutation is
        truncated only if all of them are within the tolerance.
    """
    ends = np.stack([np.zeros(n_players, dtype=bool), np.ones(n_players, dtype=bool)])
    empty_E, full_E = _evaluate(utility, ends)
    order_MP = np.stack([stream(seed, "shapley", m).permutation(n_players) for m in range(permutations)])
    sums = _MarginalSums(np.zeros((n_players, len(full_E))), np.zeros((n_players, len(full_E))))
    before_ME = np.tile(empty_E, (permutations, 1))
    active_M = np.arange(permutations)
    evaluations, truncated = 2, 0
    for n_before in range(n_players):  # every active permutation adds the player that has n_before players before it
        still_active = (
            active_M if truncation is None else active_M[np.abs(full_E - before_ME[active_M]).max(axis=1) > truncation]
        )
        truncated += permutations - len(still_active)
        active_M = still_active
        if n_before == n_players - 1:
            after_ME, n_evaluated = np.tile(full_E, (len(active_M), 1)), 0
        else:
            after_ME, n_evaluated = _evaluate_prefixes(utility, order_MP[active_M, : n_before + 1], n_players, block)
        evaluations += n_evaluated
        sums.add(order_MP[active_M, n_before], after_ME - before_ME[active_M])
        before_ME[active_M] = after_ME
    return SampledShapley(*sums.means(permutations), permutations, evaluations, truncated)


@dataclass(frozen=True, slots=True)
class _MarginalSums:
    """Sums of marginal contributions, and of their squares, by player and game."""

    total_PE: F64
    square_PE: F64

    def add(self, player_M: I64, marginal_ME: F64) -> None:
        np.add.at(self.total_PE, player_M, marginal_ME)
        np.add.at(self.square_PE, player_M, marginal_ME**2)

    def means(self, permutations: int) -> tuple[F64, F64]:
        """Return the mean marginal contribution and its standard error; truncated contributions count as 0."""
        mean_PE = self.total_PE / permutations
        if permutations == 1:
            return mean_PE, np.full_like(mean_PE, np.nan)
        variance_PE = np.maximum(self.square_PE / permutations - mean_PE**2, 0.0) / (permutations - 1)
        return mean_PE, np.sqrt(variance_PE)


def _evaluate_prefixes(utility: Utility, prefix_MK: I64, n_players: int, block: int) -> tuple[F64, int]:
    """Return the utilities (M, E) of M prefixes of equal length, and the number of distinct sets evaluated."""
    if not len(prefix_MK):
        return np.zeros((0, 1)), 0
    masks_MP = np.zeros((len(prefix_MK), n_players), dtype=bool)
    np.put_along_axis(masks_MP, prefix_MK, True, axis=1)
    distinct_BP, inverse_M = np.unique(masks_MP, axis=0, return_inverse=True)
    parts = [_evaluate(utility, distinct_BP[i : i + block]) for i in range(0, len(distinct_BP), block)]
    return np.concatenate(parts)[inverse_M.ravel()], len(distinct_BP)


def _evaluate(utility: Utility, masks_BP: Masks) -> F64:
    """Return the utilities of subsets, (B, E), and check their shape and that they are finite."""
    utilities = np.asarray(utility(masks_BP), dtype=np.float64)
    utilities_BE = utilities[:, None] if utilities.ndim == 1 else utilities
    if utilities_BE.ndim != 2 or len(utilities_BE) != len(masks_BP):
        raise ShapeError(
            f"utility: got shape {utilities.shape} for {len(masks_BP)} subsets, expected (B,) or (B, E) for B subsets"
        )
    bad = np.argwhere(~np.isfinite(utilities_BE))
    if len(bad):
        players = np.flatnonzero(masks_BP[bad[0, 0]]).tolist()
        raise ModelError(f"utility: got {utilities_BE[tuple(bad[0])]} for players {players}, expected a finite number")
    return utilities_BE


def _all_masks(n_players: int, block: int) -> Iterator[Masks]:
    """Yield all 2^P subsets as masks (B, P): player k is in subset number b if bit k of b is set."""
    bits = np.arange(n_players)
    for first in range(0, 2**n_players, block):
        codes = np.arange(first, min(first + block, 2**n_players))
        yield (codes[:, None] >> bits & 1).astype(bool)


def _size_weights(n_players: int) -> F64:
    """Return |S|! (P - |S| - 1)! / P! for |S| = 0 .. P - 1."""
    return np.array([factorial(s) * factorial(n_players - s - 1) / factorial(n_players) for s in range(n_players)])
