"""Shapley values: the axioms, games with closed forms, and sampling against enumeration."""

from itertools import permutations as orders

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.one_step.shapley import exact_shapley, permutation_shapley


def table_game(n_players, seed, games=1):
    """Return a game with an arbitrary utility for each subset."""
    table = np.random.default_rng(seed).normal(size=(2**n_players, games))
    return lambda masks: table[masks @ (1 << np.arange(n_players))]


def slow_shapley(utility, n_players):
    """Compute the mean marginal contribution over all P! orders, one subset at a time."""
    total = np.zeros(n_players)
    for order in orders(range(n_players)):
        mask = np.zeros(n_players, dtype=bool)
        before = utility(mask[None])[0, 0]
        for player in order:
            mask[player] = True
            after = utility(mask[None])[0, 0]
            total[player] += after - before
            before = after
    return total / len(list(orders(range(n_players))))


def glove(masks):
    """Two left gloves, one right: a pair is worth 1. Shapley values 1/6, 1/6, 2/3."""
    return np.minimum(masks[:, :2].sum(axis=1), masks[:, 2]).astype(float)


def airport(cost):
    """A coalition pays for the longest runway; values are known in closed form."""
    return lambda masks: np.where(masks, cost, 0.0).max(axis=1)


@given(n_players=st.integers(1, 5), seed=st.integers(0, 99))
@settings(max_examples=20)
def test_enumeration_equals_the_mean_over_all_orders(n_players, seed):
    game = table_game(n_players, seed)
    np.testing.assert_allclose(exact_shapley(game, n_players)[:, 0], slow_shapley(game, n_players))


def test_glove_game():
    np.testing.assert_allclose(exact_shapley(glove, 3)[:, 0], [1 / 6, 1 / 6, 2 / 3])


def test_sixteen_players_of_the_airport_game():
    cost = np.sort(np.random.default_rng(0).uniform(1, 9, 16))
    steps = np.diff(cost, prepend=0.0) / np.arange(16, 0, -1)
    np.testing.assert_allclose(exact_shapley(airport(cost), 16)[:, 0], np.cumsum(steps))


@given(seed=st.integers(0, 99), players=st.integers(2, 7))
@settings(max_examples=20)
def test_values_sum_to_the_gain_of_the_full_set_in_both_estimates(seed, players):
    game = table_game(players, seed, games=3)
    gain = game(np.ones((1, players), bool))[0] - game(np.zeros((1, players), bool))[0]
    sampled = permutation_shapley(game, players, permutations=7, seed=seed)
    np.testing.assert_allclose(exact_shapley(game, players).sum(axis=0), gain)
    np.testing.assert_allclose(sampled.value_PE.sum(axis=0), gain)


def test_an_additive_game_is_solved_by_one_permutation():
    worth = np.array([[1.0, -2.0], [0.5, 0.0], [-3.0, 4.0]])
    sampled = permutation_shapley(lambda masks: masks @ worth, 3, permutations=1, seed=0)
    np.testing.assert_allclose(sampled.value_PE, worth)
    assert np.isnan(sampled.standard_error_PE).all()


def test_sampling_agrees_with_enumeration_within_its_own_standard_error():
    game = table_game(10, 3, games=4)
    exact = exact_shapley(game, 10)
    sampled = permutation_shapley(game, 10, permutations=2000, seed=1)
    score = (sampled.value_PE - exact) / sampled.standard_error_PE
    assert np.abs(score).max() < 4
    assert 0.6 < np.sqrt((score**2).mean()) < 1.4


def test_standard_error_is_that_of_marginals_over_permutations():
    game = table_game(4, 5)
    marginals = []
    for m in range(6):  # permutation m is the same however many are drawn, so differences of sums isolate it
        now = permutation_shapley(game, 4, permutations=m + 1, seed=2).value_PE[:, 0] * (m + 1)
        marginals.append(now - sum(marginals, np.zeros(4)))
    expected = np.std(marginals, axis=0, ddof=1) / np.sqrt(6)
    sampled = permutation_shapley(game, 4, permutations=6, seed=2)
    np.testing.assert_allclose(sampled.standard_error_PE[:, 0], expected, atol=1e-12)


def test_no_subset_is_evaluated_twice_and_the_count_is_correct():
    evaluated = []

    def game(masks):
        evaluated.extend(map(bytes, np.packbits(masks, axis=1)))
        return masks.sum(axis=1).astype(float)

    sampled = permutation_shapley(game, 8, permutations=50, seed=0)
    assert len(evaluated) == len(set(evaluated)) == sampled.evaluations
