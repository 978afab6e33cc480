"""Laws: moments do not depend on how samples are cut or merged; whitening whitens; sketches are unbiased."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grasp.kernels.kernel import CorpusMoments
from grasp.kernels.sketch import CountSketch, gaussian_projection
from grasp.kernels.whitening import HiddenMoments, preconditioner, whitening_map


def samples(seed: int, count: int):
    generator = np.random.default_rng(seed)
    hidden = generator.normal(size=(count, 4)) @ generator.normal(size=(4, 4)) + 100.0
    index = np.stack([generator.choice(11, size=3, replace=False) for _ in range(count)])
    return hidden, index, generator.normal(size=(count, 3))


@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(0, 30), max_size=4))
def test_merged_moments_equal_those_of_the_whole_sample(seed, cuts):
    hidden, index, value = samples(seed, 30)
    edges = [0, *sorted(cuts), 30]
    merged = HiddenMoments(CorpusMoments(11))
    for low, high in itertools.pairwise(edges):
        part = HiddenMoments(CorpusMoments(11))
        part.add(hidden[low:high], index[low:high], value[low:high])
        merged.merge(part)
    actual = merged.value
    gamma = np.zeros(11)
    for line_index, line_value in zip(index, value, strict=True):
        for k, v in zip(line_index, line_value, strict=True):
            gamma[k] += v * v / 30
    assert actual.count == 30
    np.testing.assert_allclose(actual.mean_H, hidden.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(actual.covariance_HH, np.cov(hidden.T, bias=True), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(actual.second_moment, hidden.T @ hidden / 30, rtol=1e-12)
    np.testing.assert_allclose(actual.gamma_V, gamma, rtol=1e-12)


def test_whitening_whitens_up_to_the_ridge():
    hidden, _, _ = samples(3, 500)
    covariance = np.cov(hidden.T, bias=True)
    white = whitening_map(covariance, 1e-12)
    np.testing.assert_allclose(white @ covariance @ white, np.eye(4), atol=1e-6)
    np.testing.assert_allclose(white, white.T, atol=1e-12)
    ridged = whitening_map(covariance, 0.01)
    ridge = 0.01 * np.trace(covariance) / 4
    np.testing.assert_allclose(np.linalg.inv(ridged @ ridged), covariance + ridge * np.eye(4), rtol=1e-9)


def test_a_constant_hidden_state_is_not_scaled():
    assert np.array_equal(whitening_map(np.zeros((3, 3)), 0.01), np.eye(3))


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_preconditioner_is_relative_to_the_coordinates_that_occur(alpha):
    gamma = np.array([0.0, 2.0, 4.0])
    np.testing.assert_allclose(preconditioner(gamma, alpha, 0.5), (gamma + 1.5) ** -alpha)
    assert np.all(np.isfinite(preconditioner(np.zeros(3), alpha, 0.5)))


def test_a_projection_as_wide_as_the_state_is_exact():
    assert np.array_equal(gaussian_projection(8, 8, 0), np.eye(8))


@pytest.mark.parametrize("kind", ["gaussian", "count"])
def test_sketches_keep_inner_products_on_average(kind):
    generator = np.random.default_rng(5)
    x, y = generator.normal(size=(2, 40))
    actual = []
    for seed in range(400):
        if kind == "gaussian":
            project = gaussian_projection(16, 40, seed)
            actual.append((project @ x) @ (project @ y))
        else:
            matrix = CountSketch.draw(40, 16, seed, "test").matrix().toarray()
            actual.append((x @ matrix) @ (y @ matrix))
    error = np.std(actual) / np.sqrt(len(actual))
    assert abs(np.mean(actual) - x @ y) < 4 * error


def test_count_sketch_matrix_is_its_dense_form_with_the_weights():
    sketch = CountSketch.draw(20, 6, 0, "test")
    weight = np.arange(1.0, 21.0)
    np.testing.assert_array_equal(sketch.matrix(weight).toarray(), weight[:, None] * sketch.matrix().toarray())
