"""Shapley values of a game with any utility function: exact for few players, sampled for many.

The Shapley value of a player is the utility that it adds to the players before it, averaged over all orders of the
players. Start with `exact_shapley` or `permutation_shapley`.

The utility is called with a block of subsets, boolean (B, P), and returns (B,) or (B, E): E games over the same players
are solved together. Among prefixes of one length, no subset is evaluated twice.

Shape letters: P players, B subsets, M permutations, E games.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import factorial

import numpy as np

from grasp.arrays import F64, Bool
from grasp.seeds import stream

Masks = Bool
Utility = Callable[[Masks], F64]

BLOCK = 1024  # subsets per call of the utility


@dataclass(frozen=True, slots=True)
class SampledShapley:
    """Permutation estimates; positive: the player raises the utility."""

    value_PE: F64
    standard_error_PE: F64  # of the mean over permutations; nan for a single permutation
    evaluations: int  # subsets that the utility was evaluated on


def exact_shapley(utility: Utility, n_players: int) -> F64:
    r"""Compute Shapley values (P, E) by enumeration of all 2^P subsets, each evaluated once.

    phi_i = sum_{S without i} |S|! (P - |S| - 1)! / P! (U(S + i) - U(S))

    Args:
        utility: boolean (B, P) -> (B,) or (B, E).
    """
    weight = np.array([factorial(s) * factorial(n_players - s - 1) / factorial(n_players) for s in range(n_players)])
    parts: list[F64] = []
    for first in range(0, 2**n_players, BLOCK):
        codes = np.arange(first, min(first + BLOCK, 2**n_players))
        masks_BP = (codes[:, None] >> np.arange(n_players) & 1).astype(bool)
        # U(S) enters phi_i with a plus sign if i is in S (weight of size |S| - 1), else with a minus sign (size |S|).
        size_B = masks_BP.sum(axis=1)
        joins, leaves = weight[np.maximum(size_B - 1, 0)], weight[np.minimum(size_B, n_players - 1)]
        parts.append(np.where(masks_BP, joins[:, None], -leaves[:, None]).T @ _evaluate(utility, masks_BP))
    return np.asarray(sum(parts))


def permutation_shapley(utility: Utility, n_players: int, *, permutations: int, seed: int) -> SampledShapley:
    """Estimate Shapley values by the mean marginal contribution of each player over random permutations.

    Permutation m depends only on `seed` and m, so more permutations extend a run. All permutations advance together,
    one player at a time, so that the utility is evaluated on blocks of distinct subsets.

    Args:
        utility: boolean (B, P) -> (B,) or (B, E), the empty and the full subset included.
    Source: Castro et al. 2009.
    """
    ends = np.stack([np.zeros(n_players, dtype=bool), np.ones(n_players, dtype=bool)])
    empty_E, full_E = _evaluate(utility, ends)
    order_MP = np.stack([stream(seed, "shapley", m).permutation(n_players) for m in range(permutations)])
    total_PE, square_PE = np.zeros((n_players, len(full_E))), np.zeros((n_players, len(full_E)))
    masks_MP = np.zeros((permutations, n_players), dtype=bool)
    before_ME, evaluations = np.tile(empty_E, (permutations, 1)), 2
    for n_before, player_M in enumerate(order_MP.T):  # every permutation adds the player with n_before before it
        masks_MP[np.arange(permutations), player_M] = True
        if n_before == n_players - 1:
            after_ME = np.tile(full_E, (permutations, 1))
        else:
            distinct_BP, inverse_M = np.unique(masks_MP, axis=0, return_inverse=True)
            parts = [_evaluate(utility, distinct_BP[i : i + BLOCK]) for i in range(0, len(distinct_BP), BLOCK)]
            after_ME = np.concatenate(parts)[inverse_M.ravel()]
            evaluations += len(distinct_BP)
        np.add.at(total_PE, player_M, after_ME - before_ME)
        np.add.at(square_PE, player_M, (after_ME - before_ME) ** 2)
        before_ME = after_ME
    mean_PE = total_PE / permutations
    if permutations == 1:
        return SampledShapley(mean_PE, np.full_like(mean_PE, np.nan), evaluations)
    variance_PE = np.maximum(square_PE / permutations - mean_PE**2, 0.0) / (permutations - 1)
    return SampledShapley(mean_PE, np.sqrt(variance_PE), evaluations)


def _evaluate(utility: Utility, masks_BP: Masks) -> F64:
    """Return the utilities of subsets, (B, E)."""
    utilities = np.asarray(utility(masks_BP), dtype=np.float64)
    utilities_BE = utilities[:, None] if utilities.ndim == 1 else utilities
    assert utilities_BE.shape[0] == len(masks_BP)
    assert np.isfinite(utilities_BE).all()
    return utilities_BE
