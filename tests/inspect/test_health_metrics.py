"""The measurements of health checks equal their definitions in loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

from grasp.inspect import health_metrics as measures
from grasp.paper import sketch_checks as geometric

SEEDS = st.integers(0, 2**32 - 1)


def features(seed, n=9, h=5, v=6):
    generator = np.random.default_rng(seed)
    residual = generator.normal(size=(n, v)) * (generator.random((n, v)) < 0.6)
    return generator.normal(size=(n, h)), residual


@given(SEEDS)
def test_subset_norms_are_the_norms_of_weighted_sums(seed):
    hidden, residual = features(seed)
    weight = np.random.default_rng(seed).random((4, 9))
    hidden_NN, residual_NN = geometric.gram_matrices(hidden, csr_array(residual))
    np.testing.assert_allclose(geometric.raw_geometry(weight, hidden_NN), ((weight @ hidden) ** 2).sum(1), rtol=1e-9)
    product = np.einsum("nh,nv->nhv", hidden, residual).reshape(9, -1)
    actual = geometric.raw_geometry(weight, hidden_NN * residual_NN)
    np.testing.assert_allclose(actual, ((weight @ product) ** 2).sum(1), rtol=1e-9, atol=1e-12)


def positions(seed, n=5):
    """Return positions of rows 0, 0, 0, 1, 1, 2, 4, 4, 4 and the dense gradients G_i; row 3 has none."""
    hidden, residual = features(seed)
    row = np.array([0, 0, 0, 1, 1, 2, 4, 4, 4])
    gradient = [
        np.einsum("th,tv->hv", hidden[row == i], residual[row == i]) / max(1, (row == i).sum()) for i in range(n)
    ]
    return hidden, residual, row, np.stack(gradient)


@given(SEEDS, st.sampled_from([1, 60, 10**6]))
def test_position_gram_equals_that_of_the_gradients_for_any_block_size(seed, block):
    hidden, residual, row, gradient = positions(seed)
    flat = gradient.reshape(5, -1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometric, "BLOCK_ELEMENTS", block)
        actual = geometric.position_gram(hidden, csr_array(residual), row, 5)
    np.testing.assert_allclose(actual, flat @ flat.T, atol=1e-10)


def test_mass_outside_equals_the_mass_beyond_top_k():
    generator = np.random.default_rng(2)
    probability = generator.dirichlet(np.full(20, 0.3), size=7)
    residual = probability - np.eye(20)[3]
    top_k = np.argsort(-probability, axis=1)[:, :4]
    cut = np.zeros_like(residual)
    for i, line in enumerate(top_k):
        cut[i, [*line, 3]] = residual[i, [*line, 3]]
    expected = np.mean((abs(residual).sum(1) - abs(cut).sum(1)) / abs(residual).sum(1))
    assert measures.truncated_mass(csr_array(cut)) == pytest.approx(expected)
    assert measures.truncated_mass(csr_array(residual)) == pytest.approx(0, abs=1e-12)


def test_a_relative_error_is_the_median_over_subsets_that_differ_from_zero():
    true = np.array([1.0, 2.0, 0.0])
    assert geometric.relative_error(np.array([7.0, 14.0, 3.0]), true) == pytest.approx(6)
    assert geometric.relative_error(true, 0 * true) == 0.0


@given(SEEDS)
def test_accuracy_is_never_below_the_bound(seed):
    generator = np.random.default_rng(seed)
    realized = generator.normal(size=12)
    result = measures.stability(3 * realized + generator.normal(size=12) * generator.random(), realized)
    assert result.bound <= result.certain <= result.accuracy + 1e-12
    perfect = measures.stability(5 * realized - 2, realized)
    assert (perfect.bound, perfect.accuracy) == (1.0, 1.0)
    assert measures.stability(-realized, realized).accuracy == 0.0  # a reversed prediction is not inverted
