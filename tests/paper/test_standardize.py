"""Closed forms against enumeration of every subset; sampled moments against numpy; merging in any blocks."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from grasp.errors import SubsetError
from grasp.paper.standardize import (
    MeanStd,
    PairSums,
    StreamingMoments,
    pair_moments,
    relevance_moments,
    sampled_moments,
    self_moments,
)
from grasp.paper.subset_sums import subset_relevance
from grasp.predict.families import Family, parse_family
from tests.predict.reference import components, summed

N = 6


def every_subset(family):
    """All subsets the family can draw, with their probabilities."""
    masks = np.array(list(itertools.product([0.0, 1.0], repeat=N)))[1:]
    size = masks.sum(axis=1)
    if family.kind == "uniform":
        chance = (size == max(1, round(family.fraction * N))) + 0.0
    else:
        chance = family.fraction**size * (1 - family.fraction) ** (N - size)
    return masks, chance / chance.sum()


@pytest.mark.parametrize("family", ["uniform:0.5", "uniform:0.2", "uniform:0.95", "bernoulli:0.3", "bernoulli:0.8"])
@pytest.mark.parametrize("side", ["retained", "omitted"])
@pytest.mark.parametrize("weighting", ["count", "mean"])
def test_closed_forms_are_the_moments_over_every_subset(family, side, weighting):
    how = parse_family(family), side, weighting
    rng = np.random.default_rng(0)
    relevance_NE, sketch_ND = rng.standard_normal((N, 2)) + 1, rng.standard_normal((N, 3)) + np.array([1.0, 0.0, -0.5])
    norm_N1 = (sketch_ND**2).sum(axis=1)[:, None]
    masks, chance = every_subset(how[0])
    sums, totals, weight_sums = summed(masks, sketch_ND)
    every = sums.geometry(weight_sums, totals, side, weighting)
    pairs = PairSums.of([sketch_ND[:2], sketch_ND[2:]], sketch_ND.mean(axis=0))
    wanted = [
        (
            relevance_moments(StreamingMoments.from_blocks([(0, relevance_NE)]), *how),
            subset_relevance(masks @ relevance_NE, relevance_NE.sum(axis=0), weight_sums, side, weighting),
        ),
        (self_moments(StreamingMoments.from_blocks([(0, norm_N1)]), *how), every["self"][:, None]),
        *((pair_moments(pairs, kind, *how), every[kind][:, None]) for kind in ("raw", "self", "pair", "cent")),
    ]
    for got, values_BE in wanted:
        mean_E = chance @ values_BE
        np.testing.assert_allclose(got.mean_C, mean_E, rtol=0, atol=1e-9)
        np.testing.assert_allclose(
            got.std_C, np.sqrt(chance @ (values_BE - mean_E) ** 2), rtol=0, atol=1e-6
        )  # a root of rounding


@pytest.mark.parametrize("n_rows", [1, 2, 3])
def test_closed_forms_of_pairs_need_no_four_rows(n_rows):
    sketch_ND = np.random.default_rng(1).standard_normal((n_rows, 2))
    got = pair_moments(
        PairSums.of([sketch_ND], sketch_ND.mean(axis=0)), "raw", parse_family("uniform:0.4"), "retained", "mean"
    )
    raw_B = (sketch_ND**2).sum(axis=1)  # round(0.4 n) is 1 at most: every subset is one row
    assert got.mean_C[0] == pytest.approx(raw_B.mean())
    assert got.std_C[0] == pytest.approx(raw_B.std(), abs=1e-9)


@pytest.mark.parametrize("spelling", ["uniform:0.4", "bernoulli:0.4"])
def test_sampled_moments_agree_with_closed_forms(spelling):
    family, n_rows = parse_family(spelling), 80
    relevance_NE = np.random.default_rng(1).standard_normal((n_rows, 3)) + 0.5
    blocks = family.draw(3000, n_rows=n_rows, seed=0, purpose="calibration")
    sampled = sampled_moments({"output_layer": block.weights_BN @ relevance_NE} for block in blocks)
    want = relevance_moments(StreamingMoments.from_blocks([(0, relevance_NE)]), family, "retained", "count")
    got = sampled["output_layer"]
    assert np.allclose(got.mean_C, want.mean_C, atol=5 * want.std_C / np.sqrt(3000))
    assert np.allclose(got.std_C, want.std_C, rtol=0.08)


@given(seed=st.integers(0, 1000))
def test_expected_geometry_of_a_bernoulli_draw(seed):
    """eq:ratio-scaling, exactly: the self term scales with q, the pair term with q^2."""
    rng = np.random.default_rng(seed)
    sketch_ND, w_N, q = rng.standard_normal((N, 3)), rng.random(N) + 0.2, 0.3
    masks = np.array(list(itertools.product([0.0, 1.0], repeat=N)))
    chance = q ** masks.sum(axis=1) * (1 - q) ** (N - masks.sum(axis=1))
    expected = chance @ components(csr_array(masks * w_N), sketch_ND, np.zeros(3))["raw"]
    whole = components(csr_array(w_N[None]), sketch_ND, np.zeros(3))
    assert expected == pytest.approx(q * whole["self"][0] + q**2 * whole["pair"][0], rel=1e-9, abs=1e-9)


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(1, 29), max_size=4))
def test_blocks_merge_to_the_moments_of_the_whole(seed, cuts):
    values_BE = np.random.default_rng(seed).standard_normal((30, 2)) * 3 + 1e4
    parts = [values_BE[start:stop] for start, stop in itertools.pairwise(sorted({0, 30, *cuts}))]
    got = sampled_moments({"a": part_BE, "k": part_BE[:, 0]} for part_BE in parts)
    rows = StreamingMoments.from_blocks(enumerate(parts))
    np.testing.assert_allclose(got["a"].mean_C, values_BE.mean(axis=0), rtol=1e-13)
    np.testing.assert_allclose(got["a"].std_C, values_BE.std(axis=0), rtol=1e-9)
    assert got["k"].std_C == pytest.approx(values_BE[:, 0].std(), rel=1e-9)
    np.testing.assert_allclose(np.sqrt(rows.scatter / 30), values_BE.std(axis=0), rtol=1e-9)
    np.testing.assert_allclose(rows.mean_C * rows.n_rows, values_BE.sum(axis=0), rtol=1e-12)


def test_constant_components_standardise_to_zero_and_are_marked():
    moments = MeanStd(np.array([3.0, 1e6, 0.0]), np.array([0.0, 1e-6, 0.0]))
    assert not moments.inverse_std_C.any()
    assert moments.z_scores(np.array([[3.0, 2e6, 1.0]])).tolist() == [[0.0, 0.0, 0.0]]
    assert MeanStd(np.array([1.0]), np.array([2.0])).z_scores(np.array([[5.0]])).tolist() == [[2.0]]


def test_one_subset_cannot_standardise():
    with pytest.raises(SubsetError, match=r"\b1 subsets.*\b2\b"):
        sampled_moments([{"a": np.ones((1, 2))}])


def test_large_bernoulli_families_stay_cheap_and_exact():
    rows = StreamingMoments(5_000_000, np.array([0.1]), np.array([5_000_000.0]))
    got = relevance_moments(rows, Family("bernoulli", fraction=0.3), "retained", "count")
    assert got.mean_C[0] == pytest.approx(0.3 * 0.1 * 5_000_000, rel=1e-9)
    second_moment = 1.0 + 0.1**2
    assert got.std_C[0] == pytest.approx(math.sqrt(0.3 * 0.7 * 5_000_000 * second_moment), rel=1e-5)
