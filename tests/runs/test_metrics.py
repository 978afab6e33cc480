"""Laws: ranks are scipy's, intervals cover, the ceiling is what the truth reaches, undefined is no number."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from grasp.runs import metrics as m
from grasp.seeds import bootstrap_weights


def scipy_rho(x, y):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.ConstantInputWarning)
        return stats.spearmanr(x, y).statistic


@st.composite
def tied_columns(draw):
    n_subsets, n_units = draw(st.integers(3, 12)), draw(st.integers(1, 4))
    levels = st.integers(0, draw(st.sampled_from([1, 3, 100])))
    cells = st.lists(levels, min_size=n_subsets * n_units, max_size=n_subsets * n_units)
    x, y = (np.array(draw(cells), dtype=float).reshape(n_subsets, n_units) for _ in range(2))
    return x, y


@settings(max_examples=40)
@given(tied_columns())
def test_rho_is_that_of_scipy_with_ties_and_constants(columns):
    x, y = columns
    expected = [scipy_rho(x[:, e], y[:, e]) for e in range(x.shape[1])]
    np.testing.assert_allclose(m.spearman(x, y), expected, atol=1e-12)


@settings(max_examples=30)
@given(tied_columns(), st.integers(0, 10_000))
def test_a_resample_is_the_rho_of_the_subsets_it_drew(columns, seed):
    x, y = columns
    draws = np.random.default_rng(seed).integers(0, len(x), size=(5, len(x)))
    weights = np.stack([np.bincount(row, minlength=len(x)) for row in draws]).astype(float)
    got = m.rank_correlations([x, y], [(0, 1)], weights)[0]
    expected = [[scipy_rho(x[row, e], y[row, e]) for row in draws] for e in range(x.shape[1])]
    np.testing.assert_allclose(got, expected, atol=1e-12)
    single = m.rank_correlations([x, y], [(0, 1)], weights.astype(np.float32))[0]
    np.testing.assert_allclose(single, expected, atol=2e-6)


def test_rho_does_not_depend_on_the_blocks(monkeypatch):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 20, 7))
    weights = bootstrap_weights(20, resamples=31)
    whole = m.rank_correlations([x, y, x], [(0, 1), (1, 2)], weights)
    monkeypatch.setattr(m, "_BLOCK_NUMBERS", 1_300)
    np.testing.assert_allclose(m.rank_correlations([x, y, x], [(0, 1), (1, 2)], weights), whole, atol=1e-6)


@given(tied_columns())
def test_pairwise_accuracy_counts_pairs(columns):
    x, y = columns[0][:, 0], columns[1][:, 0]
    right, total = 0.0, 0
    for a in range(len(x)):
        for b in range(a):
            if y[a] != y[b]:
                total += 1
                right += 0.5 if x[a] == x[b] else float((x[a] > x[b]) == (y[a] > y[b]))
    got = m.pairwise_accuracy(x, y, np.ones((1, len(x))))[0]
    assert np.isnan(got) if total == 0 else got == pytest.approx(right / total)


def test_resampled_pairwise_accuracy_is_that_of_the_subsets_drawn():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 9))
    weights = bootstrap_weights(9, resamples=6)
    for row, got in zip(weights, m.pairwise_accuracy(x, y, weights), strict=True):
        drawn = np.repeat(np.arange(9), row.astype(int))
        assert got == pytest.approx(m.pairwise_accuracy(x[drawn], y[drawn], np.ones((1, 9)))[0])


def test_bootstrap_weights_are_draws_with_replacement_and_named():
    weights = bootstrap_weights(40, resamples=500, seed=3)
    assert (weights.sum(axis=1) == 40).all()
    np.testing.assert_allclose(weights.mean(axis=0), 1, atol=0.2)
    np.testing.assert_array_equal(weights, bootstrap_weights(40, resamples=500, seed=3))
    assert (weights != bootstrap_weights(40, resamples=500, seed=4)).any()


def test_intervals_cover_the_truth_of_a_planted_world():
    """Bivariate normal: Spearman = 6/pi asin(r/2), pairwise accuracy = 1/2 + asin(r)/pi."""
    rng, r, worlds = np.random.default_rng(7), 0.6, 150
    rho, accuracy = 6 / np.pi * np.arcsin(r / 2), 0.5 + np.arcsin(r) / np.pi
    weights = bootstrap_weights(64, resamples=300)
    hits = np.zeros(2)
    for _ in range(worlds):
        x = rng.normal(size=64)
        y = r * x + np.sqrt(1 - r * r) * rng.normal(size=64)
        got = m.target_metrics("t", x[:, None], y[:, None, None], weights)
        hits += [
            got["task_rho"].low <= rho <= got["task_rho"].high,
            got["pairwise"].low <= accuracy <= got["pairwise"].high,
        ]
    share = hits / worlds
    assert (share > 0.90).all(), share
    assert (share < 0.99).all(), share


def test_interval_of_the_positive_fraction_covers_its_expectation():
    rng, worlds = np.random.default_rng(8), 60
    strength = np.linspace(-0.1, 0.5, 40)
    weights = bootstrap_weights(48, resamples=200)
    got = []
    for _ in range(worlds):
        shared = rng.normal(size=(48, 1))
        x = 0.6 * shared + 0.8 * rng.normal(size=(48, 40))
        y = strength * x + np.sqrt(1 - strength**2) * rng.normal(size=(48, 40))
        got.append(m.target_metrics("t", x, y[:, None], weights)["positive"])
    truth = np.mean([estimate.value for estimate in got])
    assert np.mean([estimate.low <= truth <= estimate.high for estimate in got]) > 0.88


@pytest.mark.parametrize("n_seeds", [2, 3, 5])
def test_the_ceiling_is_the_rho_that_the_truth_reaches(n_seeds):
    rng = np.random.default_rng(n_seeds)
    truth = rng.normal(size=(100, 3, 600))
    noise = rng.normal(size=(100, n_seeds, 3, 600)) * np.array([0.5, 1.0, 2.0])[:, None]
    realized = (truth[:, None] + noise).reshape(100, n_seeds, -1)
    reached = m.spearman(truth.reshape(100, -1), realized.mean(axis=1)).reshape(3, -1).mean(axis=1)
    agreement = m.seed_agreement(realized, np.ones((1, 100))).reshape(3, -1).mean(axis=1)
    np.testing.assert_allclose(m.ceiling_from_correlation(agreement, n_seeds), reached, atol=0.02)
    assert m.ceiling_from_correlation(np.array([0.5]), 2)[0] == pytest.approx(np.sqrt(2 / 3))


def test_the_truth_scores_at_its_ceiling_on_task_and_units():
    rng = np.random.default_rng(5)
    truth = rng.normal(size=(200, 1)) + 0.5 * rng.normal(size=(200, 30))
    realized = truth[:, None] + rng.normal(size=(200, 2, 30)) + 0.5 * rng.normal(size=(200, 2, 1))
    got = m.target_metrics("t", truth, realized, bootstrap_weights(200, resamples=50))
    assert got["task_rho"].value == pytest.approx(got["task_ceiling"].value, abs=0.04)
    assert got["mean_lds"].value == pytest.approx(got["lds_ceiling"].value, abs=0.04)
    assert got["task_ceiling"].low < got["task_ceiling"].value < got["task_ceiling"].high


def test_one_seed_has_no_ceiling():
    rng = np.random.default_rng(2)
    got = m.target_metrics("t", rng.normal(size=(9, 2)), rng.normal(size=(9, 1, 2)), bootstrap_weights(9, resamples=9))
    assert got["task_ceiling"] == m.Estimate(None, reason=m.SINGLE_SEED)


def test_seeds_that_contradict_each_other_have_no_ceiling():
    x = np.arange(10.0)
    realized = np.stack([x, -x + 0.1 * x**2], axis=1)[:, :, None]
    ceilings = m.noise_ceilings(realized, bootstrap_weights(10, resamples=20))
    assert ceilings["task_ceiling"].value is None
    assert "do not agree" in ceilings["task_ceiling"].reason


def test_constant_predictions_are_undefined_and_say_so():
    rng = np.random.default_rng(4)
    got = m.target_metrics("t", np.ones((8, 3)), rng.normal(size=(8, 2, 3)), bootstrap_weights(8, resamples=9))
    for estimate in (got["task_rho"], got["pairwise"]):
        assert estimate == m.Estimate(None, reason="predictions are constant")
    assert got["mean_lds"] == m.Estimate(None, reason="no unit has a defined rho")
    assert got.undefined_units == {"predictions are constant": 3}
    assert str(got["task_rho"]) == "undefined"
    assert m.average([got])["task_rho"].reason == "undefined on t"


def test_constant_units_are_counted_and_left_out():
    rng = np.random.default_rng(6)
    predicted, realized = rng.normal(size=(10, 4)), rng.normal(size=(10, 2, 4))
    predicted[:, 1], realized[:, :, 2] = 3.0, -1.5
    got = m.target_metrics("t", predicted, realized, bootstrap_weights(10, resamples=9))
    assert got.undefined_units == {"predictions are constant": 1, "utilities are constant": 1}
    rho_E = m.spearman(predicted, realized.mean(axis=1))
    np.testing.assert_array_equal(np.isnan(rho_E), [False, True, True, False])
    assert got["mean_lds"].value == pytest.approx(np.mean(rho_E[[0, 3]]))
    assert got["positive"].value == pytest.approx(np.mean(rho_E[[0, 3]] > 0))


def test_two_subsets_are_too_few():
    got = m.target_metrics("t", np.eye(2), np.eye(2)[:, None], bootstrap_weights(2, resamples=4))
    assert got["task_rho"].reason == got["task_ceiling"].reason.replace(m.SINGLE_SEED, m.TOO_FEW_SUBSETS)
    assert got.undefined_units == {m.TOO_FEW_SUBSETS: 2}


def test_a_task_prediction_of_its_own_moves_task_metrics_only():
    rng = np.random.default_rng(9)
    predicted, realized = rng.normal(size=(20, 3)), rng.normal(size=(20, 2, 3))
    utility = realized.mean(axis=(1, 2))
    weights = bootstrap_weights(20, resamples=9)
    plain = m.target_metrics("t", predicted, realized, weights)
    got = m.target_metrics("t", predicted, realized, weights, task_predicted_B=utility)
    assert got["task_rho"].value == pytest.approx(1) == got["pairwise"].value
    assert got["mean_lds"] == plain["mean_lds"]


def test_average_over_targets_resamples_them_together():
    rng = np.random.default_rng(11)
    predicted, realized = rng.normal(size=(30, 5)), rng.normal(size=(30, 2, 5))
    realized += predicted[:, None]
    row = m.target_metrics("a", predicted, realized, bootstrap_weights(30, resamples=200))
    mean = m.average([row, row])
    both, single = mean["task_rho"], row["task_rho"]
    assert (both.value, both.low, both.high) == pytest.approx((single.value, single.low, single.high))
    assert mean["task_ceiling"].value == pytest.approx(row["task_ceiling"].value)
    assert m.average([row, replace(row, target="average")]).target == "average #2"
