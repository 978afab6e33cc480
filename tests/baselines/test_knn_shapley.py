"""KNN-Shapley equals the Shapley value of its game: by enumeration, axioms, and loops over hidden states."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.one_step.shapley import exact_shapley
from grasp.baselines.knn_shapley import hidden_at, knn_shapley, values_by_rank
from grasp.methods.registry import score_rows
from tests.baselines.world import N_ROWS, N_UNITS, configured_method, matrix


def voting_game(distance_N, right_N, k):
    """Return v(S) for boolean (B, N): the share of correct points among the K nearest of S."""
    order = np.argsort(distance_N, kind="stable")

    def utility(masks_BN):
        return np.array([right_N[[i for i in order if mask[i]][:k]].sum() / k for mask in masks_BN])

    return utility


def points(n, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 3)), rng.integers(0, 3, n), rng.normal(size=(4, 3)), rng.integers(0, 3, 4)


@given(n=st.integers(1, 9), k=st.integers(1, 12), seed=st.integers(0, 999))
@settings(max_examples=40)
def test_the_recursion_equals_the_enumeration_of_all_coalitions(n, k, seed):
    train, labels, test, test_labels = points(n, seed)
    result = knn_shapley(train, labels, test, test_labels, k)
    for e in range(len(test)):
        game = voting_game(((train - test[e]) ** 2).sum(axis=1), labels == test_labels[e], k)
        np.testing.assert_allclose(result[:, e], exact_shapley(game, n)[:, 0], atol=1e-12)


@given(n=st.integers(1, 60), k=st.integers(1, 20), seed=st.integers(0, 999))
@settings(max_examples=40)
def test_values_sum_to_the_share_of_correct_neighbours(n, k, seed):
    train, labels, test, test_labels = points(n, seed)
    result = knn_shapley(train, labels, test, test_labels, k)
    for e in range(len(test)):
        nearest = np.argsort(((train - test[e]) ** 2).sum(axis=1), kind="stable")[:k]
        assert result[:, e].sum() == pytest.approx((labels[nearest] == test_labels[e]).sum() / k)


@given(n=st.integers(2, 80), n_kept=st.integers(1, 80), k=st.integers(1, 9), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_a_recursion_truncated_at_m_has_an_error_of_at_most_1_over_m(n, n_kept, k, seed):
    right = np.random.default_rng(seed).random(n) < 0.4
    m = min(n, n_kept)
    off = values_by_rank(right[:m], k, n_points=n) - values_by_rank(right, k, n_points=n)[:m]
    assert np.abs(off).max() <= 1 / max(k, m) + 1e-12
    assert np.ptp(off) <= 1e-12  # the same for all, so no rank changes
    if m == n:
        assert np.abs(off).max() == 0


def test_equal_distances_are_resolved_by_order():
    result = knn_shapley(np.zeros((2, 1)), [1, 0], np.zeros((1, 1)), [1], 1)
    np.testing.assert_allclose(result[:, 0], exact_shapley(voting_game(np.zeros(2), np.array([1, 0]), 1), 2)[:, 0])


@pytest.mark.parametrize("nearest", [10_000, 40])
def test_values_of_texts_are_sums_over_positions(nearest, world, tmp_path):
    inputs = world.inputs()
    result = matrix(score_rows(configured_method("knn_shapley", k=3, nearest=nearest), inputs, tmp_path))
    # float64 on either side but for the scores, which are kept as float32
    np.testing.assert_allclose(result, slow_text(inputs, 3, nearest), rtol=np.finfo(np.float32).eps, atol=1e-12)


def test_hidden_states_are_those_of_the_plain_model(world):
    inputs = world.inputs()
    units = states(inputs)
    for k, unit in enumerate(inputs.unit_tokens):
        with torch.inference_mode():
            ids = torch.tensor(unit.input_ids[None].astype(int))
            plain_LH = inputs.model.model.model(input_ids=ids).last_hidden_state[0].numpy()
        hidden_PH, label_P = units[k]
        # two layers and a norm in float32: some tens of roundings, one after the other
        close = 128 * np.finfo(np.float32).eps * np.abs(plain_LH).max()
        np.testing.assert_allclose(hidden_PH, plain_LH[unit.first - 1 : -1], rtol=0, atol=close)
        assert label_P.tolist() == unit.input_ids[unit.first :].tolist()


def states(inputs):
    """Return hidden states of the supervised positions of each unit, and the following tokens, in float64."""
    units = inputs.unit_tokens
    result = hidden_at(inputs.model, [unit.input_ids for unit in units], [unit.first - 1 for unit in units])
    return by_sequence(result, len(units))


def by_sequence(result, n_sequences):
    return [
        (result.hidden_PH[result.sequence_P == i].astype(np.float64), result.label_P[result.sequence_P == i])
        for i in range(n_sequences)
    ]


def slow_text(inputs, k, nearest):
    """All positions sorted at once.

    Hidden states are those of the method's own batches: in others they are rounded otherwise, and of positions that
    are equally far another would come first.
    """
    parts = []
    for start, stop in inputs.blocks():
        rows = inputs.rows(start, stop)
        ids = [rows.ids(i) for i in range(len(rows))]
        parts += by_sequence(hidden_at(inputs.model, ids, [0] * len(ids)), len(ids))
    hidden, labels = np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    row_of = np.repeat(np.arange(N_ROWS), [len(p[1]) for p in parts])
    out = np.zeros((N_ROWS, N_UNITS))
    units = states(inputs)
    scale = 1e-5 * np.mean([(h**2).sum() for hidden_states, _ in units for h in hidden_states])
    for e, (hidden_states, right) in enumerate(units):
        for h, label in zip(hidden_states, right, strict=True):
            order = np.argsort(np.round(((hidden - h) ** 2).sum(axis=1) / scale), kind="stable")[:nearest]
            value = values_by_rank(labels[order] == label, k, n_points=len(labels))
            np.add.at(out[:, e], row_of[order], value / len(right))
    return out
