"""Intervals of changes without runs: units are resampled, rows add what they vary by within their slice."""

import numpy as np
from scipy.sparse import csr_array

from grasp.predict.slices import label_slices
from grasp.predict.weights import Weights
from grasp.select.change_intervals import NORMAL, change_interval, changes_by_unit, row_errors
from tests.select.world import World, predictor_of, protocol

CHOSEN = protocol(match={"output_layer": 1.0, "pooled": 0.5})


def mixture(source, seed=0):
    slices = label_slices(source.labels, source.tokens)
    p_G = np.random.default_rng(seed).dirichlet(np.full(len(slices.slices), 3.0))
    return slices, slices.weights((p_G / (slices.rows_G / source.n_rows))[None])


def test_the_mean_over_units_is_the_change_of_the_task():
    source = World()
    predictor = predictor_of(source, CHOSEN, list(source.targets))
    weight_1N = np.random.default_rng(0).uniform(0, 3, source.n_rows)[None]
    for weights in (Weights(csr_array(weight_1N)), mixture(source)[1]):
        change_1E = changes_by_unit(source, predictor, weights)
        stops = np.cumsum(predictor.units.counts_T)[:-1]
        means_T = [part.mean() for part in np.split(change_1E[0], stops)]
        np.testing.assert_allclose(means_T, predictor.change(weights)[0], atol=1e-5)


def test_the_error_over_rows_is_that_of_redrawn_rows():
    source = World()
    predictor = predictor_of(source, CHOSEN, ["sciq"])
    slices, weights = mixture(source)
    (error,) = row_errors(predictor, weights, slices.codes_N, np.ones((1, 1)))
    effect_N = np.asarray(predictor.effect_NT[:, 0], np.float64)
    effective = predictor.effective_weights(weights)
    c_N = (effective.mix[0] / weights.sums[0])[slices.codes_N] - 1 / source.n_rows
    rng, drawn = np.random.default_rng(0), []
    for _ in range(4_000):
        redrawn_N = effect_N.copy()
        for g in range(len(slices.slices)):
            of_slice = np.flatnonzero(slices.codes_N == g)
            redrawn_N[of_slice] = effect_N[rng.choice(of_slice, len(of_slice))]
        drawn.append(c_N @ redrawn_N)
    least = slices.rows_G.min()
    np.testing.assert_allclose(error, np.std(drawn), rtol=1 / least + 0.05)  # n - 1 against n; 4,000 draws


def test_intervals_of_mixtures_hold_the_change_and_rows_widen_them():
    source = World()
    predictor = predictor_of(source, CHOSEN, list(source.targets))
    weights_T = np.full(len(source.targets), 1 / len(source.targets))
    slices, weights = mixture(source)
    change_T = predictor.change(weights)[0]
    interval = change_interval(source, predictor, weights, weights_T, slices.codes_N)
    error_T = row_errors(predictor, weights, slices.codes_N, np.eye(len(weights_T)))
    assert interval.over == "units and rows"
    assert (interval.low_T <= change_T - NORMAL * error_T + 1e-6).all()
    assert (change_T + NORMAL * error_T - 1e-6 <= interval.high_T).all()
    assert interval.weighted[0] <= change_T @ weights_T <= interval.weighted[1]


def test_selected_rows_are_expected_to_gain_less_on_other_questions():
    source = World()
    predictor = predictor_of(source, CHOSEN, ["sciq"])
    best = np.argsort(-predictor.effect_NT[:, 0])[:10]
    weights = Weights(csr_array((np.ones(10), (np.zeros(10, int), best)), shape=(1, source.n_rows)))
    change, (known,) = predictor.change(weights)[0, 0], predictor.reliability.values()
    interval = change_interval(source, predictor, weights, np.ones(1))
    assert interval.over == "questions"
    np.testing.assert_allclose(interval.expected_T, known.transfer * change)
    np.testing.assert_allclose(interval.high_T, known.transfer_high * change)
    assert interval.expected_T[0] < change
