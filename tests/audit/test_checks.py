"""The measurements behind the diagnostics equal their definitions, written out in loops."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from grasp.audit import checks

SEEDS = st.integers(0, 2**32 - 1)


def features(seed, n=9, h=5, v=6):
    generator = np.random.default_rng(seed)
    residual = generator.normal(size=(n, v)) * (generator.random((n, v)) < 0.6)
    return generator.normal(size=(n, h)), residual


@settings(deadline=None)
@given(SEEDS)
def test_subset_norms_are_the_norms_of_weighted_sums(seed):
    hidden, residual = features(seed)
    weight = np.random.default_rng(seed).random((4, 9))
    hidden_NN, residual_NN = checks.gram(hidden, csr_array(residual))
    np.testing.assert_allclose(checks.subset_norms(weight, hidden_NN), ((weight @ hidden) ** 2).sum(1), rtol=1e-9)
    product = np.einsum("nh,nv->nhv", hidden, residual).reshape(9, -1)
    found = checks.subset_norms(weight, hidden_NN * residual_NN)
    np.testing.assert_allclose(found, ((weight @ product) ** 2).sum(1), rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(SEEDS)
def test_the_direct_sum_bound_holds_on_any_features_and_is_reached_by_two_rows(seed):
    hidden, residual = features(seed)
    found = checks.direct_sum(*checks.gram(hidden, csr_array(residual)), np.random.default_rng(0).random((5, 9)))
    assert found.satisfied
    assert 0 <= found.mean_share <= 1 + 1e-9
    two = checks.direct_sum(*checks.gram(hidden[:2], csr_array(residual[:2] + 0.1)), np.eye(2))
    assert two.largest == pytest.approx(two.bound)  # of one pair the largest distances are its own


def test_the_direct_sum_ranks_as_the_product_only_where_rows_are_close():
    generator = np.random.default_rng(1)
    weight = (generator.random((40, 60)) < 0.5) / 30
    near_h, near_r = 1 + 0.05 * generator.normal(size=(60, 8)), 1 + 0.05 * generator.normal(size=(60, 8))
    assert checks.direct_sum(*checks.gram(near_h, csr_array(near_r)), weight).ranks > 0.99
    far_h, far_r = generator.normal(size=(60, 8)), generator.normal(size=(60, 8))
    assert checks.direct_sum(*checks.gram(far_h, csr_array(far_r)), weight).ranks < 0.8


def test_effective_rank_counts_directions():
    generator = np.random.default_rng(0)
    wide = generator.normal(size=(4000, 8))
    assert checks.effective_rank(wide) == pytest.approx(8, abs=0.1)
    assert checks.effective_rank(wide[:, :1] @ np.ones((1, 8))) == pytest.approx(1)
    assert checks.effective_rank(np.ones((5, 3))) == 0.0


def test_mass_outside_is_what_top_k_cut_off():
    generator = np.random.default_rng(2)
    probability = generator.dirichlet(np.full(20, 0.3), size=7)
    residual = probability - np.eye(20)[3]
    kept = np.argsort(-probability, axis=1)[:, :4]
    cut = np.zeros_like(residual)
    for i, line in enumerate(kept):
        cut[i, [*line, 3]] = residual[i, [*line, 3]]
    expected = np.mean((abs(residual).sum(1) - abs(cut).sum(1)) / abs(residual).sum(1))
    assert checks.mass_outside(csr_array(cut)) == pytest.approx(expected)
    assert checks.mass_outside(csr_array(residual)) == pytest.approx(0, abs=1e-12)


def test_negative_pairs():
    assert checks.negative_pairs(np.array([[1.0, -3.0, 1.0], [-3.0, 1.0, 2.0], [1.0, 2.0, 1.0]])) == (1 / 3, 0.5)


@settings(deadline=None)
@given(SEEDS)
def test_rank_one_share_is_the_squared_cosine(seed):
    hidden, residual = features(seed)
    row = np.array([0, 0, 0, 1, 1, 2, 4, 4, 4])
    shares = []
    for i in range(5):
        mine = row == i
        if not mine.any():
            continue
        mean = np.einsum("th,tv->hv", hidden[mine], residual[mine]) / mine.sum()
        pooled = np.outer(hidden[mine].mean(0), residual[mine].mean(0))
        if mean.any() and pooled.any():
            shares.append((mean * pooled).sum() ** 2 / ((mean**2).sum() * (pooled**2).sum()))
    assert checks.rank_one_share(hidden, csr_array(residual), row, 5) == pytest.approx(np.mean(shares))


@settings(deadline=None)
@given(SEEDS)
def test_accuracy_is_never_below_what_the_bound_promises(seed):
    generator = np.random.default_rng(seed)
    realized = generator.normal(size=12)
    found = checks.stability(3 * realized + generator.normal(size=12) * generator.random(), realized)
    assert found.bound <= found.certain <= found.accuracy + 1e-12
    perfect = checks.stability(5 * realized - 2, realized)
    assert (perfect.bound, perfect.accuracy) == (1.0, 1.0)
    assert checks.stability(-realized, realized).accuracy == 0.0  # a wrong prediction is not turned round
