"""Fusions and recall against loops and enumeration; retrieval on planted domains; refusal of invalid scores."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.weborganizer.retrieval import fuse, lift, mean_over_queries, parse_scores
from grasp.errors import SettingsError

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


@given(few, st.data())
def test_equal_scores_and_all_rows_are_chance(score, data):
    related = np.array(data.draw(st.lists(st.booleans(), min_size=len(score), max_size=len(score)).filter(any)))
    k = data.draw(st.integers(1, len(score)))
    np.testing.assert_allclose(lift(np.ones(len(score)), k, [related, related]), [1.0, 1.0])
    np.testing.assert_allclose(lift(np.array(score, float), len(score), [related]), 1.0)


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


@pytest.mark.parametrize("rule", ["rrf", "z"])
def test_a_fusion_is_invariant_to_scale_order_and_constant_scores(rule):
    first, second = np.random.default_rng(0).normal(size=(2, 50))
    base = fuse([first, second], rule)
    np.testing.assert_allclose(fuse([3 * second + 1, 0.1 * first], rule), base, atol=1e-9)
    assert (np.argsort(fuse([first, np.full(50, 0.1)], rule)) == np.argsort(first)).all()


def test_an_interval_has_its_coverage():
    rng = np.random.default_rng(0)
    spans = [mean_over_queries(rng.exponential(size=60)) for _ in range(200)]
    assert 0.88 <= np.mean([span.low <= 1.0 <= span.high for span in spans]) <= 0.99
    assert mean_over_queries(np.ones(3)).low == mean_over_queries(np.ones(3)).high == 1.0


@pytest.mark.parametrize("names", [[], ["bm25", "bm25"], ["bm25+bm25"], ["bm25+"]])
def test_scores_that_cannot_be_read_are_refused(names):
    with pytest.raises(SettingsError, match="methods: "):
        parse_scores(names)
