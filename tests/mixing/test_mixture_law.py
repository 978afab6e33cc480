"""The law of mixtures: planted laws, a slow reference, and when the process takes it as its prior mean."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from grasp.mixing.mixture_law import EXPONENTS, MARGINS, MAX_FOLDS, PENALTIES, MixtureLaw, fit_process
from grasp.runs.gaussian_process import GaussianProcess
from grasp.runs.marginal_likelihood import JITTER
from grasp.runs.subset_features import SubsetFeatures

N_VALUES, N_METRICS = 5, 3


def planted(n: int, noise: float = 0.0, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Utilities by a law with another exponent for each metric."""
    rng = np.random.default_rng(seed)
    share_RG = rng.dirichlet(np.full(N_VALUES, 0.6), n)
    worth_GT = np.random.default_rng(3).gamma(0.6, 1.0, (N_VALUES, N_METRICS))
    z_RT = np.stack([0.3 + share_RG**g @ worth_GT[:, t] for t, g in enumerate((0.35, 0.5, 0.7))], axis=1)
    return share_RG, -2.0 - 1.0 / z_RT + noise * rng.standard_normal(z_RT.shape)


def reference(share_RG, utility_RT):
    """Every setting by bounded least squares in a double loop, as the module describes it."""
    n, n_metrics = utility_RT.shape
    results, coefficients = {}, {}
    for t in range(n_metrics):
        utility = utility_RT[:, t]
        for gamma in EXPONENTS:
            for margin in MARGINS:
                for penalty in PENALTIES:
                    ceiling = utility.max() + margin * (utility.max() - utility.min())
                    powers = np.array([[*(h**gamma for h in shares), 1.0] for shares in share_RG])
                    rows = powers * ((ceiling - utility) ** 2)[:, None]
                    equal = (ceiling - utility).sum() / rows.sum()
                    root = np.sqrt(penalty * (rows**2).sum() / (N_VALUES + 1)) * np.eye(N_VALUES + 1)

                    def solve(fitted, rows=rows, root=root, goal=ceiling - utility, equal=equal):
                        system = np.concatenate([rows[fitted], root])
                        target = np.concatenate([goal[fitted], np.full(N_VALUES + 1, root[0, 0] * equal)])
                        return lsq_linear(system, target, bounds=(0, np.inf), method="bvls", tol=1e-14).x

                    held_out = np.empty(n)
                    for fold in range(min(n, MAX_FOLDS)):
                        test = np.arange(n) % MAX_FOLDS == fold
                        held_out[test] = ceiling - 1.0 / (powers[test] @ solve(~test))
                    floor = utility.min() - (utility.max() - utility.min())
                    results[t, gamma, margin, penalty] = np.maximum(held_out, floor)
                    coefficients[t, gamma, margin, penalty] = solve(np.ones(n, bool))
    keys = [key[1:] for key in results if key[0] == 0]
    error = {
        key: [((results[t, *key] - utility_RT[:, t]) ** 2).mean() / utility_RT[:, t].var() for t in range(n_metrics)]
        for key in keys
    }
    best = [min(keys, key=lambda key, t=t: error[key][t] + np.mean(error[key])) for t in range(n_metrics)]
    held_out_RT = np.stack([results[t, *key] for t, key in enumerate(best)], axis=1)
    return best, held_out_RT, np.stack([coefficients[t, *key] for t, key in enumerate(best)])


def test_the_fit_equals_bounded_least_squares_in_a_loop():
    share_RG, utility_RT = planted(14, noise=0.01)
    law, held_out_RT = MixtureLaw.fit(share_RG, utility_RT)
    best, expected_RT, coefficient_TJ = reference(share_RG, utility_RT)
    assert [law.exponent for law in law.laws] == [gamma for gamma, *_ in best]
    np.testing.assert_allclose(held_out_RT + law.mean_T, expected_RT, rtol=1e-6)
    np.testing.assert_allclose([law.coefficient_J for law in law.laws], coefficient_TJ, rtol=1e-5, atol=1e-8)


def test_a_planted_law_predicts_other_mixtures():
    share_RG, utility_RT = planted(24, noise=0.002)
    law, _ = MixtureLaw.fit(share_RG, utility_RT)
    test_BG, truth_BT = planted(200, seed=1)
    error_BT = law.predict(test_BG) + law.mean_T - truth_BT
    assert np.abs(error_BT).mean() < 0.1 * truth_BT.std(axis=0).mean()


@settings(max_examples=10, deadline=None)
@given(scale=st.floats(0.01, 100), offset=st.floats(-5, 5), seed=st.integers(0, 20))
def test_predictions_follow_the_unit_of_a_metric_and_the_order_of_values(scale, offset, seed):
    share_RG, utility_RT = planted(12, noise=0.01, seed=seed)
    order = np.random.default_rng(seed).permutation(N_VALUES)
    law, held_out_RT = MixtureLaw.fit(share_RG, utility_RT)
    other, other_held_out_RT = MixtureLaw.fit(share_RG[:, order], scale * utility_RT + offset)
    np.testing.assert_allclose(other_held_out_RT, scale * held_out_RT, rtol=1e-6, atol=1e-6 * scale)
    predicted_RT = other.predict(share_RG[:, order])
    np.testing.assert_allclose(predicted_RT, scale * law.predict(share_RG), rtol=1e-6, atol=1e-6 * scale)


def test_predictions_of_the_process_with_the_law_follow_the_offset_of_a_metric():
    share_RG, utility_RT = planted(12, noise=0.01, seed=10)
    features = SubsetFeatures.from_shares(np.eye(N_VALUES), N_METRICS)
    predictions = []
    for offset in (0.0, 100.0):
        law, process = fit_process(share_RG, utility_RT[:, None] + offset)
        assert law is not None
        mean_BT, _ = process.predict(replace(features, relevance_BT=law.predict(features.share_BG)))
        predictions.append(mean_BT - offset)
    np.testing.assert_allclose(*predictions, atol=1e-4)


def test_a_mixture_without_any_value_that_helps_has_a_finite_utility():
    share_RG, utility_RT = planted(12)
    law, _ = MixtureLaw.fit(share_RG, utility_RT)
    lowest_T = utility_RT.min(axis=0) - np.ptp(utility_RT, axis=0)
    assert (law.predict(np.eye(N_VALUES)) + law.mean_T >= lowest_T - 1e-12).all()


def test_held_out_residuals_of_the_process_equal_kriging_from_the_other_runs():
    share_RG, utility_RT = planted(9, noise=0.05)
    process = GaussianProcess.fit(SubsetFeatures.from_shares(share_RG, N_METRICS), utility_RT[:, None])
    hyperparameters = process.hyperparameters
    noise = hyperparameters["noise"] + hyperparameters["seed noise"] + JITTER
    covariance_nn = process._covariance.between(process.runs, process.runs)[0] + noise * np.eye(9)
    for i in range(9):
        others = np.arange(9) != i
        unbiased = np.block([[covariance_nn[np.ix_(others, others)], np.ones((8, 1))], [np.ones((1, 8)), 0]])
        weights = np.linalg.solve(unbiased, np.append(covariance_nn[others, i], 1.0))[:-1]
        residual_T = utility_RT[i] - weights @ utility_RT[others]
        np.testing.assert_allclose(process.held_out_residuals()[i], residual_T, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("n", [12, 24])
def test_the_process_takes_the_law_where_it_holds_and_predicts_better_with_it(n):
    share_RG, utility_RT = planted(n, noise=0.01, seed=10)
    law, process = fit_process(share_RG, utility_RT[:, None])
    assert law is not None
    test_BG, truth_BT = planted(200, seed=1)
    features = SubsetFeatures.from_shares(test_BG, N_METRICS)
    predicted_BT, std_BT = process.predict(replace(features, relevance_BT=law.predict(test_BG)))
    by_process_BT, _ = GaussianProcess.fit(
        SubsetFeatures.from_shares(share_RG, N_METRICS), utility_RT[:, None]
    ).predict(features)
    assert np.abs(predicted_BT - truth_BT).mean() < 0.8 * np.abs(by_process_BT - truth_BT).mean()
    covered = np.abs(predicted_BT - truth_BT) < process.quantile(0.9) * std_BT
    assert covered.mean() > 0.8


def test_the_process_goes_without_the_law_where_it_does_not_hold_or_runs_are_few():
    rng = np.random.default_rng(0)
    share_RG = rng.dirichlet(np.ones(N_VALUES), 30)
    utility_RT = -((share_RG - 0.2) ** 2).sum(axis=1, keepdims=True) * np.ones((1, 2))  # best in the interior
    utility_RT = utility_RT + rng.normal(0, 1e-4, utility_RT.shape)
    log_RT = -np.log(share_RG + 0.01) @ rng.normal(size=(N_VALUES, 2))  # some values do harm
    assert fit_process(share_RG, log_RT[:, None])[0] is None
    assert fit_process(share_RG[:7], utility_RT[:7, None])[0] is None
