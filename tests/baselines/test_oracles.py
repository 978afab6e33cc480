"""Laws: predictions are out of fold; the closed form equals the direct one; oracles find only planted effects."""

import numpy as np
import pytest
from scipy import stats

from grasp.artifact.label_table import LabelColumn
from grasp.baselines import oracles
from grasp.predict.families import parse_family
from grasp.runs.training_runs import Utilities

LABELS = LabelColumn.from_values([f"v{i % 6}" for i in range(300)], "topic")


def world(n_subsets=40, noise=0.1, seed=0, n_units=4):
    """Return utilities that are linear in the share of each label value, plus noise."""
    rng = np.random.default_rng(seed)
    blocks = list(
        parse_family("mixture:topic").draw(n_subsets, n_rows=300, labels=LABELS, seed=seed, purpose="evaluation")
    )
    features = oracles.fraction_features(blocks, LABELS)
    clean = features.values_BF @ rng.normal(size=(6, n_units))
    values = clean[:, None] + noise * clean.std() * rng.normal(size=(n_subsets, 2, n_units))
    return blocks, Utilities(
        values, features.subset_ids, (0, 1), ("t",) * n_units, tuple(f"u{e}" for e in range(n_units))
    )


def rho(predictions, utilities):
    return stats.spearmanr(predictions.task_B["t"], utilities.values_BSE.mean(axis=(1, 2))).statistic


def test_features_count_retained_rows():
    blocks, _ = world(5)
    masks = oracles.mask_features(blocks).values_BF
    share = oracles.fraction_features(blocks, LABELS).values_BF
    for b in range(5):
        for f in range(6):
            mask = masks[b, np.arange(300) % 6 == f]
            assert share[b, f] == pytest.approx(mask.sum() / masks[b].sum())
    np.testing.assert_allclose(share.sum(axis=1), 1)


def test_the_closed_form_equals_ridge_with_intercept_and_its_leave_one_out_error():
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(12, 5)), rng.normal(size=(12, 3))
    fit = oracles.RidgeFit(x, y)

    def plain(x, y, penalty, new):
        centred = x - x.mean(axis=0)
        weights = np.linalg.solve(centred.T @ centred + penalty * np.eye(5), centred.T @ (y - y.mean(axis=0)))
        return (new - x.mean(axis=0)) @ weights

    new = rng.normal(size=(4, 5))
    errors = np.array([fit.left_out_error(penalty) for penalty in fit.penalties])
    best = fit.penalties[errors.argmin(axis=0)]
    expected = np.stack([plain(x, y[:, [e]], best[e], new)[:, 0] for e in range(3)], axis=1)
    np.testing.assert_allclose(fit.predict(new), expected, atol=1e-9)
    # the mean is left out as well: the smoother has the intercept in it
    for penalty in fit.penalties[[3, 9]]:
        ones = np.eye(12) - 1 / 12
        kernel = ones @ x @ x.T @ ones
        hat = 1 / 12 + kernel @ np.linalg.inv(kernel + penalty * np.eye(12))
        by_hand = np.mean(((y - hat @ y) / (1 - np.diag(hat))[:, None]) ** 2, axis=0)
        np.testing.assert_allclose(fit.left_out_error(penalty), by_hand, rtol=1e-6)


@pytest.mark.parametrize("kind", ["ridge", "lasso"])
def test_an_oracle_finds_a_planted_linear_world(kind):
    if kind == "lasso":
        pytest.importorskip("sklearn")
    blocks, utilities = world()
    assert rho(oracles.oracle(kind, oracles.fraction_features(blocks, LABELS), utilities), utilities) > 0.9


def test_masks_explain_less_than_the_labels_of_their_family():
    blocks, utilities = world()
    on_masks = rho(oracles.oracle("ridge", oracles.mask_features(blocks), utilities), utilities)
    on_labels = rho(oracles.oracle("ridge", oracles.fraction_features(blocks, LABELS), utilities), utilities)
    assert 0.3 < on_masks < on_labels


def test_an_oracle_of_noise_is_not_better_than_chance():
    got = []
    for seed in range(30):
        blocks, utilities = world(seed=seed)
        noise = np.random.default_rng(seed).normal(size=utilities.values_BSE.shape)
        null = Utilities(noise, utilities.subset_ids, (0, 1), utilities.targets, utilities.unit_ids)
        got.append(rho(oracles.oracle("ridge", oracles.fraction_features(blocks, LABELS), null), null))
    assert abs(np.mean(got)) < 0.15


def test_a_held_out_subset_does_not_affect_its_prediction():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(20, 3)), rng.normal(size=(20, 2))
    before = oracles.cross_fit(oracles.ridge_out, x, y, folds=5, seed=0)
    changed = y.copy()
    changed[7] += 1e6
    after = oracles.cross_fit(oracles.ridge_out, x, changed, folds=5, seed=0)
    np.testing.assert_array_equal(after[7], before[7])
    assert np.abs(after - before).max() > 1
    np.testing.assert_array_equal(before, oracles.cross_fit(oracles.ridge_out, x, y, folds=5, seed=0))


@pytest.mark.parametrize("fit", ["ridge_out", "lasso_out"])
def test_uninformative_features_predict_zero(fit):
    """A leave-one-out mean falls as the omitted value rises, so that it would rank subsets with rho = -1."""
    if fit == "lasso_out":
        pytest.importorskip("sklearn")
    got = oracles.cross_fit(getattr(oracles, fit), np.ones((8, 3)), np.arange(8.0)[:, None], folds=8, seed=0)
    np.testing.assert_array_equal(got, np.zeros((8, 1)))
