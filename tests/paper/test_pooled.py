"""Relevance against a double loop; damping is odd and monotone; a row's relevance does not depend on its block."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array

from grasp.paper.pooled import damp, pooled_relevance, prepare_units
from grasp.predict.predictor import downweight_negative
from tests.predict import reference
from tests.rounding import rounding

finite = st.floats(-1e12, 1e12)


def world(seed=0, n=7, e=9, h=5, v=40, share=0.2):
    rng = np.random.default_rng(seed)
    residual_NV = rng.standard_normal((n, v)) * (rng.random((n, v)) < share)
    unit_residual_EV = rng.standard_normal((e, v)) * (rng.random((e, v)) < share)
    unit_residual_EV[:, :3] = rng.standard_normal((e, 3))  # coordinates that every unit has
    return (
        rng.standard_normal((n, h)),
        rng.standard_normal((e, h)),
        residual_NV,
        unit_residual_EV,
        rng.random(v) + 0.1,
    )


@pytest.mark.parametrize(("seed", "e", "share"), [(0, 9, 0.2), (1, 1, 0.2), (2, 12, 1.0), (3, 30, 0.02)])
def test_pooled_relevance_is_the_double_loop(seed, e, share):
    hidden, unit_hidden, residual, unit_residual, d = world(seed, e=e, share=share)
    units = prepare_units(unit_hidden, csr_array(unit_residual), d)
    got = pooled_relevance(hidden, csr_array(residual), units)
    want = reference.relevance(hidden, unit_hidden, residual, unit_residual, d)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-13)


def test_a_row_does_not_depend_on_its_block():
    hidden, unit_hidden, residual, unit_residual, d = world(n=20)
    units = prepare_units(unit_hidden, csr_array(unit_residual), d)
    sparse = csr_array(residual)
    whole = pooled_relevance(hidden, sparse, units)
    single = [pooled_relevance(hidden[i : i + 1], sparse[i : i + 1], units) for i in range(20)]
    # each is a product of two sums in float64, added up in another order
    close = rounding(hidden.shape[1] + residual.shape[1], whole, np.float64)
    np.testing.assert_allclose(np.concatenate(single), whole, rtol=0, atol=close)


def test_float32_in_gives_float32_close_to_float64():
    hidden, unit_hidden, residual, unit_residual, d = world(4, h=64, v=400)
    units = prepare_units(unit_hidden, csr_array(unit_residual), d)
    single = prepare_units(unit_hidden.astype("f4"), csr_array(unit_residual).astype("f4"), d.astype("f4"))
    got = pooled_relevance(hidden.astype("f4"), csr_array(residual).astype("f4"), single)
    assert got.dtype == np.float32
    want = pooled_relevance(hidden, csr_array(residual), units)
    np.testing.assert_allclose(got, want, rtol=0, atol=rounding(64 + 400, want))


@given(finite, finite)
def test_damping_is_odd_and_strictly_increasing(x, y):
    assert damp(np.array(-x)) == -damp(np.array(x))
    if x < y:
        assert damp(np.array(x)) <= damp(np.array(y))
    if x + 1e-9 * max(1.0, abs(x)) < y:
        assert damp(np.array(x)) < damp(np.array(y))


@given(finite)
def test_damping_never_grows_and_keeps_small_matches(x):
    assert abs(damp(np.array(x))) <= abs(x)
    assert damp(np.array(1e-12)) == pytest.approx(1e-12, rel=1e-9)


@given(st.lists(finite, min_size=1), st.floats(0, 1))
def test_the_weight_of_negative_relevance(values, negative):
    relevance = np.array(values)
    np.testing.assert_allclose(
        downweight_negative(relevance, negative), np.where(relevance < 0, negative * relevance, relevance)
    )
    assert (downweight_negative(relevance, 1.0) == relevance).all()
    assert (downweight_negative(relevance, 0.0) >= 0).all()
    assert downweight_negative(relevance.astype(np.float32), 0.5).dtype == np.float32
