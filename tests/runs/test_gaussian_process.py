"""Laws of the Gaussian process, and synthetic worlds whose structure it must recover."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import approx_fprime
from scipy.stats import spearmanr

from grasp.errors import RunsError
from grasp.runs.gaussian_process import GaussianProcess
from grasp.runs.marginal_likelihood import MarginalLikelihood, RunData
from grasp.runs.subset_features import WITHIN_SLICE_SD, FeatureScales, SubsetFeatures

N_TASKS, N_SLICES = 3, 6


def mixtures(n: int, rng: np.random.Generator) -> np.ndarray:
    return rng.dirichlet(np.full(N_SLICES, 0.4), size=n)


def saturating(share_BG: np.ndarray) -> np.ndarray:
    """Utilities of a world where every slice helps a task less and less."""
    worth_GT = np.random.default_rng(7).normal(size=(N_SLICES, N_TASKS))
    return np.log(share_BG + 0.01) @ worth_GT


def world(n: int, seed: int = 0) -> tuple[SubsetFeatures, np.ndarray]:
    """Relevance that is right but for a part that runs must teach."""
    rng = np.random.default_rng(seed)
    share_BG = mixtures(n, rng)
    relevance_BT, other_BT = (share_BG @ rng.normal(size=(N_SLICES, N_TASKS)) for _ in range(2))
    kernels = np.stack([relevance_BT, other_BT], axis=2)
    utility_BT = relevance_BT + 0.7 * other_BT + 0.01 * rng.normal(size=relevance_BT.shape)
    sketch_BD, within_slice_BT = rng.normal(size=(n, 4)), np.zeros((n, N_TASKS))
    return SubsetFeatures(share_BG, relevance_BT, kernels, sketch_BD, within_slice_BT), utility_BT


def rho(predicted_BT: np.ndarray, realized_BT: np.ndarray) -> float:
    pairs = zip(predicted_BT.T, realized_BT.T, strict=True)
    return float(np.mean([spearmanr(first, other).statistic for first, other in pairs]))


def test_the_gradient_of_the_evidence_is_that_of_its_value() -> None:
    features, utility_BT = world(15)
    rng = np.random.default_rng(1)
    within_slice_T = np.full(N_TASKS, 0.3)
    data = RunData(
        FeatureScales.from_runs(features).transform(features),
        utility_BT - utility_BT.mean(0),
        np.arange(15) % 3 + 1.0,
        within_slice_T,
        15.0,
    )
    evidence = MarginalLikelihood(data)
    theta = evidence.prior[:, 0] + 0.3 * rng.normal(size=len(evidence.names))
    numeric = approx_fprime(theta, lambda at: evidence.loss(at)[0], 1e-5)
    np.testing.assert_allclose(evidence.loss(theta)[1], numeric, rtol=2e-3, atol=2e-3)


def test_changes_are_differences_of_predictions_and_the_corpus_has_none() -> None:
    features, utility_BT = world(30)
    process = GaussianProcess.fit(features.take(np.arange(20)), utility_BT[:20, None])
    corpus, others = features.take(np.array([25])), features.take(np.arange(20, 30))
    change_BT, spread_BT = process.change(others, corpus)
    level_BT, _ = process.predict(others)
    np.testing.assert_allclose(change_BT, level_BT - process.predict(corpus)[0], atol=1e-8)
    np.testing.assert_allclose([change_BT[5], spread_BT[5]], 0.0, atol=1e-6)
    assert (spread_BT[:5] > 0).all()


def plain(process, subset: SubsetFeatures) -> dict[str, np.ndarray]:
    """Measured features in such units that inner products are covariances."""
    kernel_BTM = subset.kernel_BTM * np.sqrt(process.hyperparameters["kernels"] / subset.kernel_BTM.shape[2])
    sketch_BD = subset.sketch_BD * np.sqrt(process.hyperparameters["sketch"])
    return {"share": subset.share_BG, "sketch": sketch_BD, "kernel": kernel_BTM, "r": subset.relevance_BT}


def test_changes_are_those_of_the_dual_form_by_loops_over_runs_and_slices() -> None:
    features, utility_BT = world(30)
    seeds_BST = np.repeat(utility_BT[:20, None], 2, axis=1)
    seeds_BST[::2, 1] = np.nan  # every other run has one seed
    process = GaussianProcess.fit(features.take(np.arange(20)), seeds_BST)
    corpus, others = features.take(np.array([25])), features.take(np.arange(20, 30))
    numbers, curves, n_slices = process.hyperparameters, process._covariance.of_shares, features.share_BG.shape[1]
    unit = {name: numbers[name] * curves.factors[name] for name in ("straight", "linear", "additive", "joint")}
    short, long = curves.lengths[0], curves.lengths[1] * np.sqrt(n_slices)

    def points(subset: SubsetFeatures) -> list[dict[str, np.ndarray]]:
        parts = plain(process, subset)
        return [
            {name: part[b] for name, part in parts.items()}
            | {"seen": (np.log(parts["share"][b] + curves.offset) - curves.log_mean_G) / curves.log_std}
            for b in range(len(subset))
        ]

    def covariance(first: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> np.ndarray:
        z, z2, r, r2 = first["seen"], other["seen"], first["r"], other["r"]
        alike = (
            first["sketch"] @ other["sketch"] + numbers["tasks"] / N_TASKS * r @ r2 + unit["linear"] / n_slices * z @ z2
        )
        centred, centred2 = first["share"] - curves.mean_G, other["share"] - curves.mean_G
        alike += unit["straight"] * sum(a * b for a, b in zip(centred, centred2, strict=True))
        for a, b in zip(z, z2, strict=True):
            alike += unit["additive"] / n_slices * np.exp(-((a - b) ** 2) / (2 * short**2))
        alike += unit["joint"] * np.exp(-((z - z2) @ (z - z2)) / (2 * long**2))
        return alike + numbers["slope"] * r * r2 + (first["kernel"] * other["kernel"]).sum(axis=1)

    def apart(first: dict[str, np.ndarray]) -> np.ndarray:
        return covariance(first, first) + covariance(whole, whole) - 2 * covariance(first, whole)

    runs, (whole,) = points(process.runs), points(process._scales.transform(corpus))
    far_T = np.mean([apart(run) for run in runs], axis=0)
    expected_BT, spread_BT = process.change(others, corpus)
    for b, subset in enumerate(points(process._scales.transform(others))):
        d_nT = np.stack([covariance(subset, run) - covariance(whole, run) for run in runs])
        mean_T = process.scale_T * (subset["r"] - whole["r"] + (d_nT * process._run_weights_nT).sum(axis=0))
        inverse_Cnn = process._fit.inverse_Cnn
        explained_T = [d_n @ inverse @ d_n for d_n, inverse in zip(d_nT.T, inverse_Cnn, strict=True)]
        variance_T = np.maximum(apart(subset) - explained_T, 0.0) + 2 * numbers["noise"] * apart(subset) / far_T
        centre_G = process.runs.share_BG.mean(axis=0)
        square = np.mean([np.sum((run_G - centre_G) ** 2) for run_G in process.runs.share_BG])
        variance_T = variance_T * max(np.sum((subset["share"] - centre_G) ** 2) / square, 1.0)
        np.testing.assert_allclose(mean_T, expected_BT[b], atol=1e-9)
        np.testing.assert_allclose(process.scale_T * np.sqrt(variance_T), spread_BT[b], atol=1e-7)


def test_unit_and_level_of_the_metric_do_not_matter() -> None:
    features, utility_BT = world(24)
    runs, rest = features.take(np.arange(16)), features.take(np.arange(16, 24))
    plain = GaussianProcess.fit(runs, utility_BT[:16, None]).predict(rest)
    scaled = GaussianProcess.fit(runs, 5.0 + 100.0 * utility_BT[:16, None]).predict(rest)
    np.testing.assert_allclose(scaled[0], 5.0 + 100.0 * plain[0], rtol=1e-4)
    np.testing.assert_allclose(scaled[1], 100.0 * plain[1], rtol=1e-3)


def test_value_that_saturates_is_learned_from_shares_alone() -> None:
    rng = np.random.default_rng(3)
    runs, rest = mixtures(40, rng), mixtures(300, rng)
    noisy = saturating(runs) + 0.05 * rng.normal(size=(40, N_TASKS))
    process = GaussianProcess.fit(SubsetFeatures.from_shares(runs, N_TASKS), noisy[:, None])
    predicted, spread = process.predict(SubsetFeatures.from_shares(rest, N_TASKS))
    linear = np.linalg.lstsq(runs - runs.mean(0), noisy - noisy.mean(0), rcond=None)[0]
    assert rho(predicted, saturating(rest)) > 0.97 > rho(rest @ linear, saturating(rest)) + 0.03
    inside = np.abs(predicted - saturating(rest)) <= process.quantile(0.9) * spread
    assert 0.82 < inside.mean() <= 1.0


def test_runs_say_which_kernel_counts() -> None:
    features, utility_BT = world(140, seed=4)
    process = GaussianProcess.fit(features.take(np.arange(24)), utility_BT[:24, None])
    rest = features.take(np.arange(24, 140))
    assert rho(process.predict(rest)[0], utility_BT[24:]) > rho(rest.relevance_BT, utility_BT[24:]) + 0.05


def test_runs_that_are_noise_leave_relevance_as_it_is() -> None:
    rng = np.random.default_rng(5)
    features, utility_BT = world(104, seed=5)
    noisy = features.relevance_BT + 3.0 * rng.normal(size=utility_BT.shape)
    for k in (4, 12):
        process = GaussianProcess.fit(features.take(np.arange(k)), noisy[:k, None])
        rest = features.take(np.arange(20, 104))
        assert rho(process.predict(rest)[0], rest.relevance_BT) > 0.95


def test_seeds_of_a_subset_tell_noise_of_training_apart() -> None:
    rng = np.random.default_rng(6)
    features, utility_BT = world(40, seed=6)
    seeds = utility_BT[:, None] + 0.5 * rng.normal(size=(40, 3, N_TASKS))
    process = GaussianProcess.fit(features, seeds)
    noise_T = process.scale_T * np.sqrt(process.hyperparameters["seed noise"])
    np.testing.assert_allclose(noise_T.mean(), 0.5, rtol=0.25)
    averaged = GaussianProcess.fit(features, seeds.mean(axis=1, keepdims=True))
    assert (
        process.hyperparameters["noise"] * process.scale_T.mean() ** 2
        < averaged.hyperparameters["noise"] * averaged.scale_T.mean() ** 2
    )


def test_intervals_widen_away_from_the_runs() -> None:
    rng = np.random.default_rng(8)
    shares = 0.5 * mixtures(30, rng) + 0.5 / N_SLICES
    noisy = saturating(shares) + 0.05 * rng.normal(size=(30, N_TASKS))
    process = GaussianProcess.fit(SubsetFeatures.from_shares(shares, N_TASKS), noisy[:, None])
    corpus = SubsetFeatures.from_shares(np.full((1, N_SLICES), 1 / N_SLICES), N_TASKS)
    path = [np.eye(N_SLICES)[:1] * far + (1 - far) / N_SLICES for far in (0.1, 0.4, 0.7, 0.99)]
    _, spread = process.change(SubsetFeatures.from_shares(np.concatenate(path), N_TASKS), corpus)
    assert (np.diff(spread, axis=0) > 0).all()


def test_beyond_the_runs_a_prediction_counts_by_its_logarithm() -> None:
    """As it is among them; beyond, the larger the less of it, never falling, of its sign."""
    relevance_BT = np.linspace(-0.5, 2.0, 11)[:, None]
    nothing = np.zeros((11, 1, 0)), np.zeros((11, 0)), np.zeros((11, 1))
    scales = FeatureScales.from_runs(SubsetFeatures(np.zeros((11, 0)), relevance_BT, *nothing))
    requested_BT = np.array([[-8.0], [-2.0], [0.0], [1.0], [2.0], [4.0], [8.0]])
    near_B = scales.compress(requested_BT)[:, 0]
    np.testing.assert_allclose(near_B[1:5], requested_BT[1:5, 0])
    np.testing.assert_allclose(near_B[[0, 5, 6]], 2.0 * np.array([-(1 + np.log(4)), 1 + np.log(2), 1 + np.log(4)]))
    none = FeatureScales.from_runs(SubsetFeatures(np.zeros((11, 0)), np.zeros((11, 1)), *nothing))
    np.testing.assert_array_equal(none.compress(np.zeros((3, 1))), 0.0)


def test_rows_chosen_within_slices_widen_the_interval_by_what_no_run_had() -> None:
    """Of a choice w the part beyond the runs' own adds (sd of it)^2 to the variance; the mean stays."""
    features, utility_BT = world(20)
    features = replace(features, within_slice_BT=np.random.default_rng(3).uniform(-0.1, 0.1, size=(20, N_TASKS)))
    process = GaussianProcess.fit(features, utility_BT[:, None])
    corpus, requested = features.take(np.array([0])), features.take(np.array([5]))
    mean_BT, spread_BT = process.change(replace(requested, within_slice_BT=np.full((1, N_TASKS), 0.05)), corpus)
    more_BT, wide_BT = process.change(replace(requested, within_slice_BT=np.full((1, N_TASKS), 0.2)), corpus)
    beyond_T = WITHIN_SLICE_SD * (0.2 - np.abs(features.within_slice_BT).max(axis=0))
    relevance_T, farthest_T = requested.relevance_BT[0], np.abs(features.relevance_BT).max(axis=0)
    assert (np.abs(relevance_T) + beyond_T < farthest_T).all()
    added_T = (process.scale_T * beyond_T / features.relevance_BT.std(axis=0)) ** 2
    np.testing.assert_allclose(more_BT, mean_BT)
    np.testing.assert_allclose(wide_BT[0] ** 2 - spread_BT[0] ** 2, added_T)


def test_runs_that_came_out_alike_are_refused() -> None:
    features, utility_BT = world(5)
    with pytest.raises(RunsError, match="have the same utility"):
        GaussianProcess.fit(features, np.ones_like(utility_BT)[:, None])


STRAIGHT, LOGARITHMIC = (lambda share: 1.85 * share), (lambda share: 0.3 * np.log(share + 0.01))


@pytest.mark.parametrize("curve", [STRAIGHT, LOGARITHMIC], ids=["straight", "logarithmic"])
@pytest.mark.parametrize("seed", range(4))
def test_extrapolation_keeps_the_trend_and_its_interval_holds(curve, seed) -> None:
    """Twelve runs with at most 22 % of the value that counts, asked up to all of it."""
    rng = np.random.default_rng(seed)
    first_R = rng.uniform(0, 0.22, 12)
    share_RG = np.column_stack([first_R, rng.dirichlet(np.full(3, 5.0), 12) * (1 - first_R[:, None])])
    utility_R = curve(first_R) + 0.003 * rng.standard_normal(12)
    process = GaussianProcess.fit(SubsetFeatures.from_shares(share_RG, 1), utility_R[:, None, None])
    requested_B = np.array([0.1, 0.3, 0.4, 0.6, 0.8, 1.0])
    rest_G = share_RG[:, 1:].mean(axis=0) / share_RG[:, 1:].mean(axis=0).sum()
    share_BG = np.column_stack([requested_B, (1 - requested_B)[:, None] * rest_G])
    features = SubsetFeatures.from_shares(share_BG, 1)
    mean_B, spread_B = (values_BT[:, 0] for values_BT in process.predict(features))
    ignorance_B = process.relative_uncertainty(features, 0.9)[:, 0]
    assert (np.diff(mean_B[ignorance_B <= 1]) > 0).all()  # the direction of the runs, where a number is given
    assert (np.abs(mean_B - curve(requested_B)) <= process.quantile(0.9) * spread_B).all()
    assert (np.diff(ignorance_B) > 0).all()
    assert ignorance_B[2] < 0.6  # 40 % has a number
    assert ignorance_B[-1] > 1.0  # nothing but this value has none


def test_a_run_at_a_mixture_removes_what_was_unknown_of_it() -> None:
    features, utility_BT = world(20)
    process = GaussianProcess.fit(SubsetFeatures.from_shares(features.share_BG[:10], N_TASKS), utility_BT[:10, None])
    far = SubsetFeatures.from_shares(np.eye(N_SLICES)[:1], N_TASKS)
    away_BG = np.linspace(0.0, 1.0, 5)[:, None] * far.share_BG + np.linspace(1.0, 0.0, 5)[:, None] / N_SLICES
    before_T = process.relative_uncertainty(far, 0.9)[0]
    for task in range(N_TASKS):
        after_B = process.relative_uncertainty_after(far, SubsetFeatures.from_shares(away_BG, N_TASKS), task, 0.9)
        assert after_B[-1] == after_B.min()
        assert after_B[-1] < before_T[task]
