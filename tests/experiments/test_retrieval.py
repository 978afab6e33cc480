"""Fusions and recall against loops and enumeration; intervals cover."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.weborganizer.retrieval import fuse, lift, mean_over_queries

few = st.lists(st.integers(0, 3), min_size=2, max_size=6)


def slow_lift(score, related, k):
    """Return the mean over all orders of equal scores."""
    orders = [
        order
        for order in itertools.permutations(range(len(score)))
        if all(score[a] >= score[b] for a, b in itertools.pairwise(order))
    ]
    recalls = [sum(related[i] for i in order[:k]) / sum(related) for order in orders]
    return sum(recalls) / len(recalls) / (k / len(score))


@given(few, st.data())
def test_the_lift_is_the_mean_over_all_orders_of_equal_scores(score, data):
    related = data.draw(st.lists(st.booleans(), min_size=len(score), max_size=len(score)).filter(any))
    k = data.draw(st.integers(1, len(score)))
    (result,) = lift(np.array(score, dtype=np.float32), k, [np.array(related)])
    np.testing.assert_allclose(result, slow_lift(score, related, k))


def slow_fused(scores, rule):
    out = np.zeros(len(scores[0]))
    for score in scores:
        for i, value in enumerate(score):
            if rule == "rrf":
                rank = 1 + sum(other > value for other in score) + (sum(other == value for other in score) - 1) / 2
                out[i] += 1 / (60 + rank)
            elif np.std(score):
                out[i] += (value - np.mean(score)) / np.std(score)
    return out


@pytest.mark.parametrize("rule", ["rrf", "z"])
@given(
    scores=st.integers(2, 6).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 4), min_size=n, max_size=n), min_size=1, max_size=3)
    )
)
def test_fusions_are_the_formulas(rule, scores):
    arrays = [np.array(score, dtype=np.float32) for score in scores]
    np.testing.assert_allclose(fuse(arrays, rule), slow_fused(scores, rule), atol=1e-9)


def test_an_interval_has_its_coverage():
    rng = np.random.default_rng(0)
    spans = [mean_over_queries(rng.exponential(size=60)) for _ in range(200)]
    assert 0.88 <= np.mean([span.low <= 1.0 <= span.high for span in spans]) <= 0.99
    assert mean_over_queries(np.ones(3)).low == mean_over_queries(np.ones(3)).high == 1.0
