"""Fine-tuning of a pretrained model: the pure parts, against laws and slow versions."""

import numpy as np
import pytest

from experiments.finetune.evaluate import Method
from experiments.finetune.setting import SUBSET_ROWS, draw_subsets, group_of, row_order
from experiments.finetune.training import BATCH_ROWS, STEPS, batches, learning_rate_at, padded
from grasp.predict.labels import LabelColumn


def label(n_sources: int = 16, rows: int = 24) -> LabelColumn:
    return LabelColumn.of([f"source {k}" for k in range(n_sources) for _ in range(rows)], "source")


def test_every_subset_names_exactly_the_rows_that_are_trained_on():
    block = draw_subsets(label(), 6)
    assert block.sizes_B.tolist() == [SUBSET_ROWS] * 6
    assert set(block.weights_BN.data) == {1.0}
    assert len(batches(block.weights_BN[[0]].indices.tolist())) == STEPS
    # sources keep fractions that differ: some nearly none, some nearly all
    kept_BG = block.weights_BN.toarray().reshape(6, 16, 24).mean(axis=2)
    assert kept_BG.std() > 0.15


def test_more_subsets_leave_the_first_as_they_are():
    few, many = draw_subsets(label(), 3), draw_subsets(label(), 8)
    assert np.array_equal(few.weights_BN.toarray(), many.weights_BN.toarray()[:3])


def test_an_order_is_of_its_seed_alone():
    assert sorted(row_order(0, 50)) == list(range(50))
    assert np.array_equal(row_order(0, 50), row_order(0, 50))
    assert not np.array_equal(row_order(0, 50), row_order(1, 50))


def test_too_few_rows_come_again_from_the_beginning():
    rows = [row for batch in batches(range(50)) for row in batch]
    assert len(rows) == STEPS * BATCH_ROWS
    assert rows == [k % 50 for k in range(len(rows))]


def test_the_learning_rate_rises_and_ends_at_zero():
    rates = [learning_rate_at(step) for step in range(STEPS)]
    assert max(rates) == pytest.approx(1e-4)
    assert learning_rate_at(STEPS) == 0.0
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_labels_begin_where_loss_begins():
    ids_BL, labels_BL = padded([np.array([5, 6, 7, 8], np.int32), np.array([9, 3], np.int32)], [2, 1])
    assert ids_BL.tolist() == [[5, 6, 7, 8], [9, 3, 0, 0]]
    assert labels_BL.tolist() == [[-1, -1, 7, 8], [-1, 3, -1, -1]]


def test_medical_questions_are_told_apart_by_collection():
    assert group_of({"source": "gsm8k:train", "id": "gsm8k:train:3"}) == "gsm8k:train"
    assert group_of({"source": "MedQuAD", "id": "MedQuAD:3_GHR_QA/0000198-4"}) == "MedQuAD:3_GHR_QA"
    assert group_of({"source": "MedQuAD", "id": "MedQuAD:9_CDC_QA/1"}) == "MedQuAD:other"


def test_a_method_adds_up_standardised_kernels():
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=(2, 30, 4))
    share_BN = (generator.random((5, 30)) < 0.5).astype(float)
    share_BN /= share_BN.sum(axis=1, keepdims=True)
    units_BE, tasks_BT = Method((first, 100.0 * second)).predict(share_BN, ["a", "a", "b", "b"])
    for e in range(4):
        expected = sum((kernel[:, e] - kernel[:, e].mean()) / kernel[:, e].std() for kernel in (first, second))
        assert units_BE[:, e] == pytest.approx(share_BN @ expected)
    of_a = [kernel[:, :2].mean(axis=1) for kernel in (first, second)]
    assert tasks_BT[:, 0] == pytest.approx(share_BN @ sum((a - a.mean()) / a.std() for a in of_a))


def test_negative_scores_can_count_less():
    kernel = np.array([[-4.0], [0.0], [2.0]])
    share = np.eye(3)
    units_BE, _ = Method((kernel,), negative=0.25).predict(share, ["a"])
    expected = np.array([-1.0, 0.0, 2.0])
    assert units_BE[:, 0] == pytest.approx((expected - expected.mean()) / expected.std())
