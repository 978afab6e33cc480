"""The predictor: equation by hand, marginal gains by difference, planted and null worlds, ranking stability."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from grasp.predict.families import parse_family
from grasp.predict.geometry import SubsetMass, geometry, subset_relevance
from grasp.predict.predictor import (
    ComponentTable,
    combine,
    dropped,
    marginal_gain,
    marginal_geometry,
    marginal_relevance,
)
from grasp.predict.standardize import ComponentMoments, MomentsAccumulator
from tests.predict.reference import summed

seeds = st.integers(0, 10_000)


def test_the_equation_by_hand():
    table = ComponentTable({"token": np.array([[3.0], [5.0]])}, {"joint.pair": np.array([10.0, 20.0])})
    moments = {
        "token": ComponentMoments(np.array([4.0]), np.array([2.0])),
        "joint.pair": ComponentMoments(np.array([10.0]), np.array([5.0])),
    }
    got = combine(table, moments, match_weights={"token": 1.0}, omega={"joint.pair": -0.25})
    assert got.utility_BE.tolist() == [[-0.5], [0.5 - 0.25 * 2]]
    assert got.parts["joint.pair"].tolist() == [[0.0], [-0.5]]


def test_kernels_are_summed_as_z_scores():
    table = ComponentTable({"token": np.array([[1.0]]), "pooled": np.array([[100.0]])}, {})
    moments = {
        "token": ComponentMoments(np.zeros(1), np.ones(1)),
        "pooled": ComponentMoments(np.zeros(1), np.array([50.0])),
    }
    assert combine(table, moments, match_weights={"token": 1, "pooled": 1}, omega={}).utility_BE.tolist() == [[3.0]]


def test_components_without_variance_are_dropped_and_named():
    moments = {
        "token": ComponentMoments(np.zeros(1), np.ones(1)),
        "joint.self": ComponentMoments(np.ones(1), np.zeros(1)),
    }
    table = ComponentTable({"token": np.array([[2.0]])}, {"joint.self": np.array([7.0])})
    assert dropped(moments) == ("joint.self",)
    assert combine(table, moments, match_weights={"token": 1.0}, omega={"joint.self": -9.0}).utility_BE == 2.0


@settings(max_examples=25, deadline=None)
@given(seed=seeds, weighting=st.sampled_from(["count", "mean"]))
def test_marginal_gain_is_the_difference_of_two_subsets(seed, weighting):
    rng = np.random.default_rng(seed)
    sketch_ND, relevance_NE = rng.standard_normal((9, 3)), rng.standard_normal((9, 2))
    mask = np.zeros(9)
    mask[rng.choice(8, 3, replace=False)] = 1.0
    candidates = np.flatnonzero(mask == 0)
    rows = np.concatenate([mask[None], mask + np.eye(9)[candidates]])
    sums, corpus, mass = summed(rows, sketch_ND)
    a_BE = subset_relevance(rows @ relevance_NE, relevance_NE.sum(axis=0), mass, "retained", weighting)
    k = sums.geometry(mass, corpus, "retained", weighting)
    omega = {f"hidden.{kind}": w for kind, w in [("raw", -0.3), ("self", 0.2), ("pair", 0.1), ("cent", -0.7)]}
    moments = {name: ComponentMoments(np.zeros(1), np.full(1, 2.0)) for name in omega}
    moments["token"] = ComponentMoments(np.zeros(2), np.array([1.0, 3.0]))

    def value(a, geometry_):
        table = ComponentTable({"token": a}, {name: geometry_[name.split(".")[1]] for name in omega})
        return combine(table, moments, match_weights={"token": 1.0}, omega=omega)

    whole = value(a_BE, k).utility_BE
    state, _, one = summed(mask[None], sketch_ND)
    with_row = value(
        marginal_relevance(mask @ relevance_NE, one, relevance_NE[candidates], weighting),
        marginal_geometry(state, one, corpus, sketch_ND[candidates], weighting),
    )
    a_one = subset_relevance((mask @ relevance_NE)[None], relevance_NE.sum(axis=0), one, "retained", weighting)
    without = value(a_one, state.geometry(one, corpus, "retained", weighting))
    np.testing.assert_allclose(marginal_gain(with_row, without), whole[1:] - whole[0], atol=1e-9)


class QuadraticWorld:
    """U(S) = <g, x_S> - lambda ||x_S||^2 with x_S the sum of the rows' updates: known, and not additive."""

    def __init__(self, seed=0, n_rows=60, width=6, *, redundancy=3.0):
        rng = np.random.default_rng(seed)
        centre_GD = rng.standard_normal((4, width)) * redundancy
        self.update_ND = centre_GD[rng.integers(0, 4, n_rows)] + rng.standard_normal((n_rows, width))
        self.gradient_D = rng.standard_normal(width)
        self.penalty = 0.02

    @property
    def relevance_N(self):
        return self.update_ND @ self.gradient_D

    def utility(self, weights_BN):
        total_BD = weights_BN @ self.update_ND
        return total_BD @ self.gradient_D - self.penalty * (total_BD**2).sum(axis=1)


def components(world, blocks):
    for block in blocks:
        raw_B = geometry(block.weights_BN, world.update_ND, world.update_ND.mean(axis=0)).raw_B
        yield block, ComponentTable({"token": (block.weights_BN @ world.relevance_N)[:, None]}, {"joint.raw": raw_B})


def calibrated(world, family):
    sampled = MomentsAccumulator()
    for _, table in components(world, family.draw(200, n_rows=60, seed=0, purpose="calibration")):
        sampled.add({**table.relevance, **table.geometry})
    return sampled.moments()


@pytest.mark.parametrize("family", ["uniform:0.5", "bernoulli:0.3"])
def test_planted_world_full_grasp_ranks_perfectly_and_the_additive_core_cannot(family):
    world, family = QuadraticWorld(), parse_family(family)
    moments = calibrated(world, family)
    # z(A) + omega z(K) is (A - lambda K) / sigma_A up to a constant when omega = -lambda sigma_K / sigma_A
    omega = -world.penalty * float(moments["joint.raw"].std_E[0] / moments["token"].std_E[0])
    truth, full, additive = [], [], []
    for block, table in components(world, family.draw(128, n_rows=60, seed=0, purpose="evaluation")):
        truth.extend(world.utility(block.weights_BN))
        full.extend(combine(table, moments, match_weights={"token": 1}, omega={"joint.raw": omega}).utility_BE[:, 0])
        additive.extend(combine(table, moments, match_weights={"token": 1}, omega={}).utility_BE[:, 0])
    assert spearmanr(full, truth).statistic == pytest.approx(1.0, abs=1e-12)
    assert spearmanr(additive, truth).statistic < 0.9


def test_null_world_stays_in_its_band():
    """Relevance that knows nothing: rho of 200 subsets is within 3.5 / sqrt(199) of 0, over 20 worlds its mean too."""
    rhos = []
    family = parse_family("uniform:0.5")
    for seed in range(20):
        rng = np.random.default_rng(seed)
        relevance_N, truth_N = rng.standard_normal((2, 300))
        (block,) = family.draw(200, n_rows=300, seed=seed, purpose="null")
        rhos.append(spearmanr(block.weights_BN @ relevance_N, block.weights_BN @ truth_N).statistic)
    # predicted and true sums share their subsets, so single worlds scatter as the rows' own correlation does
    assert max(abs(rho) for rho in rhos) < 3.5 * np.sqrt(1 / 199 + 1 / 299)
    assert abs(np.mean(rhos)) < 3.5 * np.sqrt((1 / 199 + 1 / 299) / 20)


@given(seed=seeds, error=st.floats(0.01, 1.0))
def test_pairs_are_ranked_right_where_the_gap_exceeds_the_error(seed, error):
    rng = np.random.default_rng(seed)
    truth_B = rng.standard_normal(12)
    predicted_B = truth_B + rng.uniform(-error, error, 12)
    i, j = np.triu_indices(12, 1)
    gap = abs(truth_B[i] - truth_B[j])
    right = (truth_B[i] - truth_B[j]) * (predicted_B[i] - predicted_B[j]) > 0
    stable = abs((predicted_B - truth_B)[i] - (predicted_B - truth_B)[j]) < gap
    assert right[stable].all()
    assert right.mean() >= (gap > 2 * error).mean()


def test_omitted_scores_rank_as_retained_ones_only_without_geometry():
    rng = np.random.default_rng(3)
    relevance_NE, sketch_ND = rng.standard_normal((40, 1)), rng.standard_normal((40, 3)) + 2
    (block,) = parse_family("bernoulli:0.5").draw(50, n_rows=40, seed=0, purpose="t")
    sums, totals, mass = summed(block.weights_BN, sketch_ND)
    a = {
        side: subset_relevance(
            block.weights_BN @ relevance_NE, relevance_NE.sum(axis=0), SubsetMass.of(block.weights_BN), side, "count"
        )[:, 0]
        for side in ("retained", "omitted")
    }
    k = {side: sums.geometry(mass, totals, side, "count").raw_B for side in a}
    assert spearmanr(a["retained"], a["omitted"]).statistic == pytest.approx(1.0)
    assert spearmanr(k["retained"], k["omitted"]).statistic < 0
