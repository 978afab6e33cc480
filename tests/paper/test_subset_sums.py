"""Geometry against double loops, and the laws of the paper's Section 3 and its appendix."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from grasp.kernels.sketch import CountSketch, gaussian_projection
from grasp.paper import subset_sums as geo
from grasp.paper.subset_sums import WeightSums, subset_relevance
from grasp.predict.weights import Weights
from tests.predict import reference
from tests.predict.reference import additive, components, interaction_surrogate

seeds = st.integers(0, 10_000)
KINDS = ("raw", "self", "pair", "cent")


def world(seed, n=12, d=4, b=5, *, plain=False):
    rng = np.random.default_rng(seed)
    weights_BN = (rng.random((b, n)) < 0.5) * (1.0 if plain else rng.random((b, n)) * 3)
    weights_BN[np.arange(b), rng.integers(0, n, b)] = 1.0
    return csr_array(weights_BN), rng.standard_normal((n, d)) + 0.5, rng


@settings(max_examples=25)
@given(seed=seeds)
def test_components_equal_double_loops(seed):
    weights_BN, sketch_ND, _ = world(seed)
    mean_D = sketch_ND.mean(axis=0)
    got = components(weights_BN, sketch_ND, mean_D)
    for b, weights in enumerate(weights_BN.toarray()):
        for kind, value in reference.geometry(weights, sketch_ND, mean_D).items():
            assert got[kind][b] == pytest.approx(value, rel=1e-10, abs=1e-10)


@settings(max_examples=25)
@given(
    seed=seeds,
    side=st.sampled_from(["retained", "omitted"]),
    weighting=st.sampled_from(["count", "mean"]),
    plain=st.booleans(),
)
def test_sides_and_weightings_do_not_need_the_complement(seed, side, weighting, plain):
    weights_BN, sketch_ND, rng = world(seed, plain=plain)
    relevance_NE = rng.standard_normal((12, 3))
    sums, corpus, weight_sums = reference.summed(weights_BN, sketch_ND)
    got = sums.geometry(weight_sums, corpus, side, weighting)
    a = subset_relevance(weights_BN @ relevance_NE, relevance_NE.sum(axis=0), weight_sums, side, weighting)
    for b, weights in enumerate(weights_BN.toarray()):
        effective = reference.side_weights(weights, side, weighting)
        for kind, value in reference.geometry(effective, sketch_ND, corpus.mean_D).items():
            assert got[kind][b] == pytest.approx(value, rel=1e-8, abs=1e-8), kind
        sign = 1.0 if side == "retained" else -1.0
        for e in range(3):
            assert a[b, e] == pytest.approx(sign * reference.dot(effective, relevance_NE[:, e]), abs=1e-9)


@given(seed=seeds)
def test_raw_is_self_plus_pair_and_the_expansion_of_the_square(seed):
    weights_BN, sketch_ND, _ = world(seed)
    got = components(weights_BN, sketch_ND, sketch_ND.mean(axis=0))
    np.testing.assert_allclose(got["raw"], got["self"] + got["pair"], rtol=1e-12)
    gram = sketch_ND @ sketch_ND.T
    w = weights_BN.toarray()
    off = np.einsum("bi,bj,ij->b", w, w, np.triu(gram, 1))
    np.testing.assert_allclose(got["pair"], 2 * off, rtol=1e-9, atol=1e-9)


@given(seed=seeds)
def test_centred_is_the_squared_deviation_of_the_subset_mean(seed):
    weights_BN, sketch_ND, _ = world(seed)
    mean_D = sketch_ND.mean(axis=0)
    total_B = np.asarray(weights_BN.sum(axis=1)).ravel()
    subset_mean_BD = (weights_BN @ sketch_ND) / total_B[:, None]
    mmd_B = ((subset_mean_BD - mean_D) ** 2).sum(axis=1)
    np.testing.assert_allclose(components(weights_BN, sketch_ND, mean_D)["cent"], total_B**2 * mmd_B, rtol=1e-9)


@given(seed=seeds, penalty=st.floats(0.01, 10))
def test_second_difference_is_the_pair_interaction(seed, penalty):
    rng = np.random.default_rng(seed)
    update_ND, relevance_N, w_N = rng.standard_normal((6, 4)), rng.standard_normal(6), rng.random(6) + 0.1
    i, j, rest = 4, 5, np.array([1, 1, 0, 1, 0, 0])

    def value(*extra):
        mask = rest.copy()
        mask[list(extra)] = 1
        weights_BN = csr_array((mask * w_N)[None])
        raw_B = components(weights_BN, update_ND, np.zeros(4))["raw"]
        return interaction_surrogate(weights_BN @ relevance_N, raw_B, step=0.7, penalty=penalty)[0]

    second = value(i, j) - value(i) - value(j) + value()
    assert second == pytest.approx(-2 * penalty * w_N[i] * w_N[j] * (update_ND[i] @ update_ND[j]), abs=1e-9)


def _marginal(update_ND, relevance_N, members, k):
    rows = [*members, k]
    matrix = np.zeros((2, len(update_ND)))
    matrix[0, members], matrix[1, rows] = 1.0, 1.0
    weights_BN = csr_array(matrix)
    raw_B = components(weights_BN, update_ND, np.zeros(update_ND.shape[1]))["raw"]
    value_B = interaction_surrogate(weights_BN @ relevance_N, raw_B, step=1.0, penalty=0.3)
    return value_B[1] - value_B[0]


@given(seed=seeds)
def test_submodular_on_aligned_pools(seed):
    rng = np.random.default_rng(seed)
    update_ND, relevance_N = rng.random((7, 3)), rng.standard_normal(7)  # all inner products >= 0
    small, large, k = [0, 1], [0, 1, 2, 3, 4], 6
    difference = _marginal(update_ND, relevance_N, small, k) - _marginal(update_ND, relevance_N, large, k)
    assert difference == pytest.approx(0.6 * (update_ND[k] @ update_ND[[2, 3, 4]].sum(axis=0)), abs=1e-9)
    assert difference > 0


def test_not_submodular_off_aligned_pools():
    update_ND, relevance_N = np.array([[1.0, 0.0], [-1.0, 0.2], [0.9, 0.1]]), np.zeros(3)
    assert update_ND[1] @ update_ND[2] < 0
    assert _marginal(update_ND, relevance_N, [0, 1], 2) > _marginal(update_ND, relevance_N, [0], 2)


@given(seed=seeds)
def test_smoothness_lower_bound_holds_on_a_quadratic(seed):
    rng = np.random.default_rng(seed)
    root = rng.standard_normal((4, 4))
    hessian, theta = root @ root.T, rng.standard_normal(4)
    beta = float(np.linalg.eigvalsh(hessian)[-1])
    weights_BN, update_ND, _ = world(seed)

    def loss(x):
        return 0.5 * x @ hessian @ x

    gradient, eta = hessian @ theta, 0.1
    raw_B = components(weights_BN, update_ND, np.zeros(4))["raw"]
    bound_B = interaction_surrogate(weights_BN @ (update_ND @ gradient), raw_B, step=eta, penalty=beta * eta**2 / 2)
    gain_B = np.array([loss(theta) - loss(theta - eta * step) for step in weights_BN @ update_ND])
    assert (gain_B >= bound_B - 1e-9 * (1 + abs(bound_B))).all()


def endpoint(seed, mismatch, hessian, *, worst=False):
    """Gain of B endpoints that lie `mismatch` off the proxies eta D_T, and the bound by the project's A and K_raw."""
    rng = np.random.default_rng(seed)
    theta, eta = rng.standard_normal(4), 0.3
    weights_BN, update_ND, _ = world(seed)
    beta, gradient = float(np.linalg.eigvalsh(hessian)[-1]), hessian @ theta
    proxy_BD = eta * (weights_BN @ update_ND)
    away_BD = gradient - beta * proxy_BD
    direction_BD = -away_BD if worst else rng.standard_normal(proxy_BD.shape)
    moved_BD = proxy_BD + mismatch * direction_BD / np.linalg.norm(direction_BD, axis=1, keepdims=True)
    end_BD = theta - moved_BD
    gain_B = 0.5 * theta @ hessian @ theta - 0.5 * np.einsum("bd,de,be->b", end_BD, hessian, end_BD)
    raw_B = components(weights_BN, update_ND, np.zeros(4))["raw"]
    relevance_B = additive((update_ND @ gradient)[:, None], weights_BN)[:, 0]
    bound_B = interaction_surrogate(relevance_B, raw_B, step=eta, penalty=beta * eta**2 / 2)
    bound_B -= mismatch * np.linalg.norm(away_BD, axis=1) + beta / 2 * mismatch**2
    return gain_B, bound_B


@given(seed=seeds, mismatch=st.floats(0, 0.5))
def test_endpoint_bound_with_trajectory_mismatch(seed, mismatch):
    root = np.random.default_rng(seed).standard_normal((4, 4))
    gain_B, bound_B = endpoint(seed, mismatch, root @ root.T)
    assert (gain_B >= bound_B - 1e-9 * (1 + abs(bound_B))).all()


@given(seed=seeds, mismatch=st.floats(0, 0.5), beta=st.floats(0.1, 3))
def test_endpoint_bound_is_tight_for_constant_curvature(seed, mismatch, beta):
    """With the Hessian beta I and the worst mismatch there is no slack: any other A or K_raw is seen."""
    gain_B, bound_B = endpoint(seed, mismatch, beta * np.eye(4), worst=True)
    np.testing.assert_allclose(gain_B, bound_B, rtol=1e-8, atol=1e-8)


@given(seed=seeds)
def test_direct_sum_agrees_with_the_product_near_and_within_its_bound(seed):
    rng = np.random.default_rng(seed)
    x, y = (v / np.linalg.norm(v) for v in rng.standard_normal((2, 5)))
    r, s = (v / np.linalg.norm(v) for v in rng.standard_normal((2, 5)))
    rows = csr_array(np.ones((1, 2)))
    pair = {
        name: components(rows, np.array(vectors), np.zeros(len(vectors[0])))
        for name, vectors in {"h": (x, y), "r": (r, s), "product": (np.kron(x, r), np.kron(y, s))}.items()
    }
    direct = geo.direct_sum(pair["h"], pair["r"])["pair"][0] / 2
    product = pair["product"]["pair"][0] / 2
    cross = ((x - y) @ (x - y)) * ((r - s) @ (r - s)) / 4
    assert direct == pytest.approx(product + 1 - cross, abs=1e-12)
    assert abs(direct - 1 - product) <= cross + 1e-12


def test_the_joint_sketch_is_the_concatenation():
    weights_BN, hidden_ND, rng = world(0)
    residual_ND = rng.standard_normal((12, 3))
    both = np.concatenate([hidden_ND, residual_ND], axis=1)
    want = components(weights_BN, both, both.mean(axis=0))
    hidden = components(weights_BN, hidden_ND, hidden_ND.mean(axis=0))
    residual = components(weights_BN, residual_ND, residual_ND.mean(axis=0))
    for kind in KINDS:
        np.testing.assert_allclose(geo.direct_sum(hidden, residual)[kind], want[kind], rtol=1e-10)


EPS, SIZE, SUBSETS = 0.5, 600, 6


def gaussian_width(vectors, failure):
    """Of the classical lemma: P(| ||Px||^2 / ||x||^2 - 1 | > eps) <= 2 exp(-D (eps^2 / 2 - eps^3 / 3) / 2)."""
    return math.ceil(2 * math.log(2 * vectors / failure) / (EPS**2 / 2 - EPS**3 / 3))


def count_width(vectors, failure):
    """Of Chebyshev's inequality: Var ||Px||^2 <= 2 ||x||^4 / D. Not the logarithm of a JL map."""
    return math.ceil(2 * vectors / (EPS**2 * failure))


def gaussian_map(width, seed):
    return gaussian_projection(width, SIZE, seed).T


def count_map(width, seed):
    return CountSketch.draw(SIZE, width, seed, "residual").matrix().toarray()


def off_by(vectors_XV, project_VD):
    """Return the largest relative error of a squared norm."""
    norms_X = (vectors_XV**2).sum(axis=1)
    return float(abs(((vectors_XV @ project_VD) ** 2).sum(axis=1) / norms_X - 1).max())


@pytest.mark.parametrize(
    ("draw", "width_for", "failure"), [(gaussian_map, gaussian_width, 0.01), (count_map, count_width, 0.5)]
)
def test_projection_keeps_geometry_within_the_jl_bound(draw, width_for, failure):
    """At the width that the condition asks for every norm of the finite set is kept, and with them A, K and V.

    The width is computed from eps, the number of vectors and the chance of failure; a sixteenth of it fails.
    """
    rng = np.random.default_rng(0)
    heavy = (rng.random((10, SIZE)) < 0.02) * rng.standard_normal((10, SIZE)) * 5  # few coordinates, as residuals have
    update_ND, gradient_D = rng.standard_normal((10, SIZE)) / 5 + heavy, rng.standard_normal(SIZE) + 1
    weights_BN = csr_array(np.vstack([np.eye(10)[:2], (rng.random((SUBSETS - 2, 10)) < 0.5) + 0.0]))
    total_BD = weights_BN @ update_ND
    vectors = np.concatenate([total_BD, gradient_D + total_BD, gradient_D - total_BD])
    width = width_for(len(vectors), failure)
    assert width < SIZE  # as wide as the features, a Gaussian map is the identity
    passed = [off_by(vectors, draw(width, seed)) <= EPS for seed in range(40)]
    assert np.mean(passed) >= 1 - failure
    assert np.mean([off_by(vectors, draw(width // 16, seed)) <= EPS for seed in range(40)]) < 0.5

    exact_B = components(weights_BN, update_ND, np.zeros(SIZE))["raw"]
    relevance_B = additive((update_ND @ gradient_D)[:, None], weights_BN)[:, 0]
    error_k, error_a = EPS * exact_B, EPS / 2 * (gradient_D @ gradient_D + exact_B)
    for seed in np.flatnonzero(passed)[:10]:
        project = draw(width, int(seed))
        sketched_B = components(weights_BN, update_ND @ project, np.zeros(width))["raw"]
        sketched_relevance_B = additive(((update_ND @ project) @ (gradient_D @ project))[:, None], weights_BN)[:, 0]
        assert (abs(sketched_B - exact_B) <= error_k).all()
        assert (abs(sketched_relevance_B - relevance_B) <= error_a).all()
        for step, penalty in [(1.0, 0.0), (0.5, 2.0)]:
            difference_B = interaction_surrogate(relevance_B, exact_B, step=step, penalty=penalty)
            difference_B -= interaction_surrogate(sketched_relevance_B, sketched_B, step=step, penalty=penalty)
            assert (abs(difference_B) <= step * error_a + penalty * error_k).all()


@given(seed=seeds)
def test_additive_retained_is_a_constant_minus_omitted(seed):
    weights_BN, _, rng = world(seed, plain=True)
    relevance_NE = rng.standard_normal((12, 2))
    weight_sums, total_E = WeightSums.from_weights(Weights(weights_BN)), relevance_NE.sum(axis=0)
    sums_BE = additive(relevance_NE, weights_BN)
    retained = subset_relevance(sums_BE, total_E, weight_sums, "retained", "count")
    omitted = subset_relevance(sums_BE, total_E, weight_sums, "omitted", "count")  # sign flipped: higher is better
    np.testing.assert_allclose(retained, total_E + omitted, atol=1e-10)


def test_an_empty_omitted_side_is_zero_not_nan():
    weights_BN, sketch_ND = csr_array(np.ones((1, 4))), np.eye(4)
    sums, corpus, weight_sums = reference.summed(weights_BN, sketch_ND)
    got = sums.geometry(weight_sums, corpus, "omitted", "mean")
    assert [float(got[kind][0]) for kind in KINDS] == [0.0] * 4


def test_float32_sketches_are_summed_in_float64():
    """pair = raw - self: two numbers of 1e8 whose difference is exactly 0."""
    sketch_ND = np.zeros((20_000, 2), dtype=np.float32)
    sketch_ND[:10_000, 0] = np.linspace(99.0, 101.0, 10_000)
    sketch_ND[10_000:, 0] = -sketch_ND[:10_000, 0]
    got = components(csr_array(np.ones((1, 20_000))), sketch_ND, np.zeros(2))
    assert got["raw"][0] == pytest.approx(0.0, abs=1e-6)
    assert got["pair"][0] == pytest.approx(-got["self"][0], rel=1e-12)
