"""Detection figures equal those of scikit-learn; the interval of the AUROC has its coverage."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.detection import auroc, average_precision, evaluate_scores

metrics = pytest.importorskip("sklearn.metrics")

SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS)
def test_figures_are_those_of_scikit_learn_with_ties(seed):
    generator = np.random.default_rng(seed)
    score, planted = generator.integers(0, 8, size=40).astype(float), generator.random(40) < 0.3
    if planted.all() or not planted.any():
        return
    assert auroc(score, planted) == pytest.approx(metrics.roc_auc_score(planted, score))
    assert average_precision(score, planted) == pytest.approx(metrics.average_precision_score(planted, score))


def test_precision_and_recall_of_a_small_example():
    score = np.array([0.9, 0.8, 0.7, 0.6, 0.5])
    figures = evaluate_scores(score, np.array([True, False, True, False, False]))
    assert (figures.at_k.k, figures.at_k.precision, figures.at_k.recall, figures.at_k.f1) == (2, 0.5, 0.5, 0.5)
    assert (figures.best.k, figures.best.f1) == (3, 0.8)
    assert figures.auroc_low <= figures.auroc <= figures.auroc_high
    perfect = evaluate_scores(score, np.array([True, True, False, False, False]), k=1)
    assert (perfect.auroc, perfect.average_precision, perfect.at_k.recall) == (1.0, 1.0, 0.5)


def test_the_interval_of_the_auroc_has_its_coverage():
    draw = np.random.default_rng(9)
    planted = np.arange(300) < 40
    true = 0.7602  # of two normal scores one deviation apart: the normal law at 1 / sqrt(2)
    results = [evaluate_scores(draw.normal(size=300) + planted, planted) for _ in range(300)]
    assert 0.91 <= np.mean([result.auroc_low <= true <= result.auroc_high for result in results]) <= 0.98
