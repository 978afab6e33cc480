"""The threshold keeps its rate; neighbours are correct."""

import numpy as np
import pytest

from grasp.errors import SettingsError
from grasp.vision import neighbours
from grasp.vision.detection import (
    conformal_threshold,
    estimate_threshold,
    matching_threshold,
    mean_ranks,
)
from grasp.vision.neighbours import disagreement


def test_the_threshold_flags_its_rate_of_clean_rows_and_finds_planted_rows():
    generator = np.random.default_rng(0)
    clean = generator.normal(size=50_000)
    both = np.concatenate([clean, generator.normal(6, 1, size=1000)])
    cut = estimate_threshold(both, 0.01)
    assert 0.003 < (both[:50_000] > cut.value).mean() < 0.013
    assert (both[50_000:] > cut.value).mean() > 0.99
    assert cut.expected_false == pytest.approx(510)


CLEAN = {
    "normal": lambda draw, n: draw.standard_normal(n),
    "skewed to the right": lambda draw, n: draw.gamma(2, size=n),
    "long tails": lambda draw, n: draw.standard_t(5, n),
    "largest of 128 normal ones": lambda draw, n: draw.standard_normal((n, 128)).max(axis=1),
    "largest of 128 exponential ones": lambda draw, n: draw.standard_exponential((n, 128)).max(axis=1),
}


@pytest.mark.parametrize("rate", [0.01, 0.05])
@pytest.mark.parametrize("shape", CLEAN)
def test_the_rate_of_flagged_clean_rows_does_not_depend_on_skewness(shape, rate):
    draw = np.random.default_rng(3)
    for n_rows, repeats in ((1_000, 40), (10_000, 10)):
        rates = [estimate_threshold(CLEAN[shape](draw, n_rows), rate).n_flagged / n_rows for _ in range(repeats)]
        assert rate / 2.5 < np.mean(rates) < 2 * rate


LEFT = {
    "gamma": lambda draw, n: -draw.gamma(2, size=n),
    "exponential": lambda draw, n: -draw.standard_exponential(n),
    "chi-square": lambda draw, n: -draw.chisquare(1, n),
    "log-normal": lambda draw, n: -draw.lognormal(0, 1.5, n),
}


@pytest.mark.parametrize("shape", LEFT)
def test_scores_with_a_short_upper_tail_have_a_conservative_threshold(shape):
    draw = np.random.default_rng(6)
    for n_rows in (1_000, 10_000):
        for rate in (0.001, 0.01, 0.05):
            score_N = LEFT[shape](draw, n_rows)
            assert estimate_threshold(score_N, rate).n_flagged <= rate * n_rows


@pytest.mark.parametrize("shape", [*CLEAN, *(f"minus {name}" for name in LEFT)])
def test_a_lower_rate_never_flags_more(shape):
    draw = np.random.default_rng(7)
    score_N = LEFT[shape.removeprefix("minus ")](draw, 2_000) if "minus" in shape else CLEAN[shape](draw, 2_000)
    flagged = [estimate_threshold(score_N, rate).n_flagged for rate in (0.0005, 0.001, 0.01, 0.05, 0.2, 0.45)]
    assert flagged == sorted(flagged)


def test_fused_ranks_with_ties_flag_as_many_rows_as_their_relevance():
    draw = np.random.default_rng(4)
    for tied in (0.0, 0.6, 0.8):
        relevance = draw.standard_normal(5_000)
        other = 0.7 * relevance + draw.standard_normal(5_000)
        ranks = mean_ranks([relevance, np.maximum(other, np.quantile(other, tied))])
        cut = estimate_threshold(relevance, 0.01)
        assert 0 < matching_threshold(ranks, cut).n_flagged <= cut.n_flagged < 100
    assert matching_threshold(ranks, estimate_threshold(np.zeros(5_000), 0.01)).n_flagged == 0


def test_more_planted_rows_make_the_threshold_more_conservative():
    draw = np.random.default_rng(5)
    for share, found_least in ((0.02, 0.9), (0.05, 0.9), (0.1, 0.3)):
        planted = round(10_000 * share)
        score = np.concatenate([draw.standard_normal(10_000 - planted), draw.normal(6, 1, size=planted)])
        cut = estimate_threshold(score, 0.01).value
        assert (score[:-planted] > cut).mean() <= 0.011
        assert (score[-planted:] > cut).mean() > found_least


def test_verified_rows_keep_the_rate_if_the_centre_does_not_determine_the_tail():
    draw = np.random.default_rng(6)
    rates = []
    for _ in range(60):
        score = np.where(draw.random(3_000) < 0.1, draw.uniform(5, 9, 3_000), draw.random(3_000))
        known = np.zeros(3_000, bool)
        known[:300] = True
        rates.append((score[300:] > conformal_threshold(score, known, 0.05).value).mean())
    assert 0.04 < np.mean(rates) < 0.055
    known[99:] = False
    assert conformal_threshold(score, known, 0.01).value == score[:99].max()
    with pytest.raises(SettingsError, match=r"99 rows .*\b999\b.* 0\.001"):
        conformal_threshold(score, known, 0.001)


def test_equal_scores_flag_nothing():
    assert estimate_threshold(np.ones(9), 0.01).n_flagged == 0
    assert estimate_threshold(np.ones(9), 0.01).all_alike
    assert estimate_threshold(np.repeat([0.0, 1.0], [70, 30]), 0.01).n_flagged == 0
    for rate in (0.0, 0.5):
        with pytest.raises(SettingsError, match="more than 0 and less than 0"):
            estimate_threshold(np.arange(9.0), rate)


def test_disagreement_equals_the_double_loop_and_a_singleton_label_has_the_median():
    generator = np.random.default_rng(2)
    feature, label = generator.normal(size=(20, 4)), np.append(generator.integers(0, 2, size=19), 7)
    near = disagreement(feature, label, 5)
    shares, is_singleton = near.share_N, near.is_singleton_N
    unit = feature / np.linalg.norm(feature, axis=1, keepdims=True)
    for i in range(19):
        cosine = unit @ unit[i]
        cosine[i] = -np.inf
        near = np.argsort(-cosine)[:5]
        weight = np.maximum(cosine[near], 1e-6)
        assert shares[i] == pytest.approx((weight * (label[near] != label[i])).sum() / weight.sum())
    assert is_singleton.tolist() == [False] * 19 + [True]
    assert shares[19] == np.median(shares[:19])


def test_fusing_does_not_depend_on_units():
    first, second = np.array([1.0, 5.0, 3.0]), np.array([0.1, 0.2, 0.3])
    np.testing.assert_allclose(mean_ranks([first, second]), mean_ranks([1000 * first, np.exp(second)]))


def test_neighbours_do_not_depend_on_block_size(monkeypatch):
    generator = np.random.default_rng(7)
    feature, label = generator.normal(size=(50, 4)), generator.integers(0, 3, size=50)
    whole = disagreement(feature, label, 5).share_N
    monkeypatch.setattr(neighbours, "QUERIES", 7)
    np.testing.assert_allclose(disagreement(feature, label, 5).share_N, whole)


def test_neighbours_by_cells_equal_those_of_all_pairs(monkeypatch):
    generator = np.random.default_rng(8)
    label = generator.integers(0, 5, size=600)
    feature = generator.normal(size=(5, 8))[label] + 0.5 * generator.normal(size=(600, 8))
    feature[:60] = feature[0]  # copies of one row
    exact = disagreement(feature, label, 10)
    assert exact.recall == 1.0
    monkeypatch.setattr(neighbours, "MAX_CANDIDATES", 100)
    near = disagreement(feature, label, 10)
    assert near.recall > 0.95
    assert np.abs(near.share_N - exact.share_N)[60:].mean() < 0.01
    np.testing.assert_array_equal(disagreement(feature, label, 10).share_N, near.share_N)
