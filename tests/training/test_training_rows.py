"""The order of rows is one permutation of the corpus per seed and epoch, without the dropped rows."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grasp.errors import ModelError
from grasp.training.row_order import batch_order, relative_weights, token_batches
from tests.models.toy import InMemoryRows

ROWS = InMemoryRows.from_rows([[i, i + 1, *range(i % 4)] for i in range(20)])


def order(weights, *, seed=0, first=0, steps=12, batch=4):
    steps = batch_order(np.asarray(weights), seed=seed, batch_rows=batch, first_step=first, last_step=steps)
    return list(chain.from_iterable(steps))


@given(
    retained=st.lists(st.booleans(), min_size=20, max_size=20).filter(lambda retained: sum(retained) >= 4),
    seed=st.integers(0, 3),
)
def test_retained_rows_keep_their_order_of_the_whole_corpus(retained, seed):
    whole = order([True] * 20, seed=seed, steps=20, batch=20)
    expected = [row for row in whole if retained[row]]
    assert order(retained, seed=seed) == expected[: 12 * 4]


def test_an_epoch_visits_every_retained_row_once():
    retained = np.arange(20) % 3 == 0
    visits = order(retained, steps=7, batch=4)  # 28 visits of 7 rows: four epochs
    for epoch in range(4):
        assert sorted(visits[7 * epoch : 7 * epoch + 7]) == list(np.flatnonzero(retained))
    assert visits[:7] != visits[7:14]


@given(first=st.integers(0, 12))
def test_resuming_at_a_step_gives_the_same_batches(first):
    retained = np.arange(20) % 3 > 0
    assert order(retained, first=first) == order(retained)[first * 4 :]


@pytest.mark.parametrize("window", [1, 9, 10_000])
def test_batches_hold_the_rows_padded_on_the_right(window, monkeypatch):
    monkeypatch.setattr("grasp.training.row_order.WINDOW_ROWS", window)
    retained = np.arange(20) > 4
    steps = [*batch_order(retained, seed=0, batch_rows=3, first_step=0, last_step=5), np.array([7, 2])]
    batches = list(token_batches(ROWS, steps, context=8, vocab_size=30))
    assert [batch.row_index_B.tolist() for batch in batches] == [rows.tolist() for rows in steps]
    for batch in batches:
        for ids, weights, row in zip(batch.ids_BL, batch.weight_BL, batch.row_index_B, strict=True):
            length = 2 + row % 4
            assert ids[:length].tolist() == [row, row + 1, *range(row % 4)]
            assert not ids[length:].any()
            assert weights.nonzero()[0].tolist() == list(range(length - 1))


def test_a_row_is_repeated_by_its_weight_in_the_order_of_the_corpus():
    weight = np.where(np.arange(20) == 3, 2.5, np.arange(20) % 2)
    often = relative_weights(20, 4, weight)
    visits = order(often, steps=1300)
    count = np.bincount(visits, minlength=20)
    np.testing.assert_allclose(count / count[3], weight / 2.5, atol=0.01)
    whole = order([True] * 20, steps=1, batch=20)
    first = visits[: visits.index(3) + 1]  # of the first epoch: row 3 comes in every one
    assert [row for row in whole if row in first] == first
    assert order(often, first=7, steps=12) == visits[28:48]


def test_equal_weights_are_a_plain_subset():
    retained = np.arange(20) % 3 > 0
    assert order(relative_weights(20, 4, 7.0 * retained)) == order(retained)
    np.testing.assert_array_equal(relative_weights(20, 4, 7.0 * retained), retained)


def test_labels_of_padding_have_no_weight_and_rows_share_one_batch():
    weight_N = np.arange(20.0)
    for factor_N in (None, weight_N):
        (batch,) = token_batches(ROWS, [np.array([0, 2, 3])], context=8, vocab_size=30, weight_N=factor_N)
        factor_B1 = np.ones((3, 1)) if factor_N is None else factor_N[[0, 2, 3], None]
        expected = factor_B1 * [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
        np.testing.assert_allclose(batch.weight_BL * batch.n_labels, expected, rtol=1e-12)
        assert batch.n_labels == 1 + 3 + 4


def test_only_tokens_that_carry_loss_have_weight_in_a_batch():
    masks = [np.arange(2 + n % 4) == 1 + n % 2 for n in range(20)]
    rows = InMemoryRows.from_rows([[n, n + 1, *range(n % 4)] for n in range(20)], masks)
    (batch,) = token_batches(rows, [np.array([2, 3])], context=8, vocab_size=30)
    np.testing.assert_allclose(batch.weight_BL * 2, [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0]])
    assert rows.fingerprint != ROWS.fingerprint


@pytest.mark.parametrize(
    ("retained", "message"),
    [
        (np.arange(20) < 3, r"retained: 3 of 20 rows.*\b4\b"),
        (np.zeros(20), "retained: 0 of 20 rows"),
    ],
)
def test_fewer_rows_than_in_a_batch_are_refused(retained, message):
    with pytest.raises(ModelError, match=message):
        relative_weights(20, 4, retained)
