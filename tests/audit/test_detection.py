"""Detection figures equal those of scikit-learn; the threshold keeps its rate; neighbours are counted right."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.audit.detection import auroc, average_precision, disagreement, fused, measure, threshold
from grasp.errors import SettingsError

metrics = pytest.importorskip("sklearn.metrics")

SEEDS = st.integers(0, 2**32 - 1)


@settings(deadline=None)
@given(SEEDS)
def test_figures_are_those_of_scikit_learn_with_ties(seed):
    generator = np.random.default_rng(seed)
    score, planted = generator.integers(0, 8, size=40).astype(float), generator.random(40) < 0.3
    if planted.all() or not planted.any():
        return
    assert auroc(score, planted) == pytest.approx(metrics.roc_auc_score(planted, score))
    assert average_precision(score, planted) == pytest.approx(metrics.average_precision_score(planted, score))


def test_cuts_by_hand():
    score = np.array([0.9, 0.8, 0.7, 0.6, 0.5])
    found = measure(score, np.array([True, False, True, False, False]))
    assert (found.at_k.k, found.at_k.precision, found.at_k.recall, found.at_k.f1) == (2, 0.5, 0.5, 0.5)
    assert (found.best.k, found.best.f1) == (3, 0.8)
    assert found.auroc_low <= found.auroc <= found.auroc_high
    perfect = measure(score, np.array([True, True, False, False, False]), k=1)
    assert (perfect.auroc, perfect.average_precision, perfect.at_k.recall) == (1.0, 1.0, 0.5)


@pytest.mark.parametrize("planted", [np.zeros(5, bool), np.ones(5, bool)])
def test_a_truth_without_both_sorts_is_refused(planted):
    with pytest.raises(SettingsError, match=f"truth: {planted.sum()} of 5 rows are planted, expected some and not all"):
        measure(np.arange(5.0), planted)


def test_the_threshold_flags_its_rate_of_clean_rows_and_finds_what_is_planted():
    generator = np.random.default_rng(0)
    clean = generator.normal(size=50_000)
    assert (clean > threshold(clean, 0.01).value).mean() == pytest.approx(0.01, abs=0.003)
    both = np.concatenate([clean, generator.normal(6, 1, size=1000)])
    cut = threshold(both, 0.01)
    assert (both[:50_000] > cut.value).mean() == pytest.approx(0.01, abs=0.003)
    assert (both[50_000:] > cut.value).mean() > 0.99
    assert cut.expected_false == pytest.approx(510)


@pytest.mark.parametrize("draw", ["standard_normal", "standard_exponential"])
def test_the_largest_of_many_leans_and_its_threshold_knows(draw):
    clean_NE = getattr(np.random.default_rng(0), draw)((5_000, 128))
    largest = ((clean_NE - clean_NE.mean(axis=0)) / clean_NE.std(axis=0)).max(axis=1)
    assert (largest > threshold(largest, 0.01).value).mean() > 0.05
    assert 0.01 < (largest > threshold(largest, 0.01, largest=True).value).mean() < 0.04
    assert not (np.zeros(9) > threshold(np.zeros(9), 0.1, largest=True).value).any()
    low = np.concatenate([np.full(5, -1.0), np.full(95, 2.0)])
    assert threshold(low, 0.01, largest=True).value == pytest.approx(2_000)


def test_equal_scores_flag_nothing_and_no_score_can_flag_more_than_half():
    assert threshold(np.ones(9), 0.01).n_flagged == 0
    assert threshold(np.ones(9), 0.01).all_alike
    generator = np.random.default_rng(1)
    for _ in range(20):
        score = generator.exponential(size=31) ** 3
        assert threshold(score, 0.49).n_flagged <= 15
    with pytest.raises(SettingsError, match=r"got 0\.5, expected more than 0 and less"):
        threshold(score, 0.5)


def test_disagreement_is_the_double_loop_and_a_lone_label_has_no_opinion():
    generator = np.random.default_rng(2)
    feature, label = generator.normal(size=(20, 4)), np.append(generator.integers(0, 2, size=19), 7)
    found, alone = disagreement(feature, label, 5)
    unit = feature / np.linalg.norm(feature, axis=1, keepdims=True)
    for i in range(19):
        cosine = unit @ unit[i]
        cosine[i] = -np.inf
        near = np.argsort(-cosine)[:5]
        weight = np.maximum(cosine[near], 1e-6)
        assert found[i] == pytest.approx((weight * (label[near] != label[i])).sum() / weight.sum())
    assert alone.tolist() == [False] * 19 + [True]
    assert found[19] == np.median(found[:19])


def test_fusing_does_not_depend_on_units():
    one, other = np.array([1.0, 5.0, 3.0]), np.array([0.1, 0.2, 0.3])
    np.testing.assert_allclose(fused([one, other]), fused([1000 * one, np.exp(other)]))
