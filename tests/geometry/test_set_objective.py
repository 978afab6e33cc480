"""The quadratic form equals the predictor for every side, weighting and component."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grasp.geometry.set_objective import Objective
from tests.select.world import World, changes, predictor_of, protocol

EVERY = {
    "joint.pair": -0.25,
    "hidden.cent": 0.5,
    "product.raw": -0.1,
    "residual.self": 0.2,
    "residual.cent": -0.3,
    "hidden.raw": -0.2,
}


def value(objective, rows) -> float:
    linear = float(objective.linear_N[rows].sum())
    sketch_D = objective.rows(rows).sum(axis=0) if objective.curvature else np.empty(0)
    return objective.value(linear, sketch_D)


@settings(max_examples=50)
@given(
    omegas=st.dictionaries(st.sampled_from(sorted(EVERY)), st.floats(-1, 1), min_size=1),
    side=st.sampled_from(["retained", "omitted"]),
    weighting=st.sampled_from(["count", "mean"]),
    task=st.sampled_from(["mean_relevance", "mean_of_standardised"]),
    negative=st.sampled_from([0.5, 1.0]),
    size=st.integers(1, 40),
    seed=st.integers(0, 99),
)
@example(EVERY, "omitted", "mean", "mean_of_standardised", 0.5, 13, 0)
def test_the_quadratic_equals_the_prediction(omegas, side, weighting, task, negative, size, seed):
    source, match = World(seed=seed), {"output_layer": 1.0, "pooled": 0.5}
    chosen = protocol(
        side=side, weighting=weighting, match=match, negative=negative, components=omegas, standardize={"task": task}
    )
    weights_T = np.array([0.7, 0.3])
    objective = Objective.from_predictor(predictor_of(source, chosen), weights_T, size)
    rows = np.random.default_rng(seed).choice(40, size, replace=False)
    want = changes(source, chosen, [rows], source.targets)[0] @ weights_T
    assert value(objective, rows) == pytest.approx(want, rel=1e-5, abs=2e-5)


def test_components_that_cancel_leave_a_linear_objective():
    """K_raw against K_cent: their squares of the sketch sum cancel, what is left is linear."""
    source, chosen = World(), protocol(components={"hidden.raw": 0.0, "joint.self": -0.5})
    objective = Objective.from_predictor(predictor_of(source, chosen), np.array([1.0, 0.0]), 10)
    assert dict(objective.curvature) == {}
    assert objective.is_concave
    assert objective.curvature_D.size == 0


@pytest.mark.parametrize(("omega", "concave"), [(-0.5, True), (0.5, False)])
def test_a_penalty_is_concave_and_a_reward_is_not(omega, concave):
    source, chosen = World(), protocol(components={"joint.raw": omega})
    assert Objective.from_predictor(predictor_of(source, chosen), np.array([1.0, 0.0]), 10).is_concave is concave


def test_products_with_a_vector_are_the_same_for_all_rows_and_for_chosen_ones(monkeypatch):
    rng = np.random.default_rng(0)
    for held in (256 << 20, 4 * 40 * 4, 0):  # in memory; without its norms; on disk
        monkeypatch.setattr("grasp.predict.weights.IN_MEMORY_BYTES", held)
        source = World()
        objective = Objective.from_predictor(
            predictor_of(source, protocol(components={"joint.raw": -1.0})), np.array([1.0, 0.0]), 10
        )
        vector_D, rows = rng.standard_normal(len(objective.curvature_D)), np.array([7, 3, 39, 0])
        whole = np.concatenate([source.arrays["hidden_sketch"], source.arrays["residual_sketch"]], axis=1)
        np.testing.assert_allclose(objective.dot(vector_D), whole.astype(float) @ vector_D, rtol=1e-12)
        np.testing.assert_array_equal(objective.rows(rows), whole[rows])
        norms_N = objective.sketches["hidden"].squared_norms()
        np.testing.assert_allclose(norms_N, (whole[:, :4].astype(float) ** 2).sum(axis=1), rtol=1e-12)
        assert (source.chosen_rows > 0) == (held == 0)
