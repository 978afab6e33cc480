"""Laws of families: a subset depends only on (seed, purpose, number), is not empty, and has the requested size."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.artifact.label_table import LabelColumn
from grasp.errors import SubsetError
from grasp.predict import families
from grasp.predict.families import Family, parse_family

PINNED = [[20, 21, 26, 35], [0, 3, 6, 7, 10, 13, 14, 17, 20, 21, 25, 27, 28, 31, 34], [6, 9, 14, 16, 17, 20, 23, 38]]
SPELLINGS = ["uniform:0.5", "bernoulli:0.3", "mixture:topic", "groups:topic", "dirichlet:topic"]
LABELS = ["a", "b", "b", None, "c", "a", "c", "c", "d", "d"] * 4


def drawn(family: Family, n: int = 24, *, block: int = 256, seed: int = 0, purpose: str = "evaluation") -> np.ndarray:
    blocks = family.draw(n, n_rows=len(LABELS), labels=LABELS, seed=seed, purpose=purpose, block=block)
    return np.concatenate([item.weights_BN.toarray() for item in blocks])


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_subset_depends_only_on_seed_purpose_and_number(spelling):
    family = parse_family(spelling)
    assert np.array_equal(drawn(family, block=1), drawn(family, block=7))
    assert np.array_equal(drawn(family, 24), drawn(family, 40)[:24])
    assert not np.array_equal(drawn(family), drawn(family, seed=1))
    assert not np.array_equal(drawn(family), drawn(family, purpose="calibration"))


@settings(max_examples=30)
@given(n_rows=st.integers(1, 60), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 99))
def test_uniform_subsets_all_have_the_rounded_size(n_rows, fraction, seed):
    (block,) = Family("uniform", fraction=fraction).draw(5, n_rows=n_rows, seed=seed, purpose="t")
    assert block.sizes_B.tolist() == [max(1, round(fraction * n_rows))] * 5
    assert set(block.weights_BN.data) == {1.0}


def test_bernoulli_keeps_rows_with_its_probability():
    (block,) = Family("bernoulli", fraction=0.3).draw(200, n_rows=500, seed=0, purpose="t")
    assert abs(block.sizes_B.mean() / 500 - 0.3) < 0.005


def test_empty_draws_are_repeated():
    blocks = list(Family("bernoulli", fraction=0.05).draw(50, n_rows=4, seed=0, purpose="t", block=10))
    assert min(int(block.sizes_B.min()) for block in blocks) >= 1  # 4 in 5 draws of 4 rows at 5 % are empty


def test_groups_keep_values_whole_and_never_all_or_none():
    weights_BN = drawn(parse_family("groups:topic"), 200)
    column = LabelColumn.from_values(LABELS)
    for code in range(len(column.values)):
        assert np.isin(weights_BN[:, column.codes_N == code].mean(axis=1), [0.0, 1.0]).all()
    assert weights_BN.sum(axis=1).min() > 0
    assert weights_BN.sum(axis=1).max() < len(LABELS)
    (block,) = parse_family("groups:topic").draw(3, n_rows=len(LABELS), labels=LABELS, seed=0, purpose="t")
    assert block.weights.mix.shape == (3, len(column.values))  # a number a value is kept


def test_dirichlet_shares_lie_over_decades_around_the_corpus_and_some_are_none():
    labels = ["large"] * 600 + [f"small {i % 10}" for i in range(200)]
    (block,) = parse_family("dirichlet:l").draw(400, n_rows=800, labels=labels, seed=0, purpose="t", block=400)
    weights_BN = block.weights_BN.toarray()
    share_BN = weights_BN / weights_BN.sum(axis=1, keepdims=True)
    large_B, small_B = share_BN[:, :600].sum(axis=1), 20 * share_BN[:, 600]
    assert np.ptp(share_BN[:, :600], axis=1).max() < 1e-12  # rows of a value come alike
    assert abs(large_B.mean() - 0.75) < 0.03
    assert 0.05 < (small_B == 0).mean() < 0.6
    assert np.quantile(small_B[small_B > 0], 0.02) < 0.005
    assert small_B.max() > 0.2
    np.testing.assert_allclose(weights_BN.mean(axis=1), 1.0)


def test_mixture_fractions_are_beta_one_half():
    labels = ["x"] * 400 + ["y"] * 400
    (block,) = parse_family("mixture:l").draw(256, n_rows=800, labels=labels, seed=0, purpose="t")
    retained = block.weights_BN.toarray()[:, :400].mean(axis=1)
    assert abs(retained.mean() - 0.5) < 0.05
    assert abs(retained.var() - 0.125) < 0.02  # Beta(1/2, 1/2) has variance 1/8


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("uniform:0.5", Family("uniform", fraction=0.5)),
        (" bernoulli: 0.9", Family("bernoulli", fraction=0.9)),
        ("mixture:topic", Family("mixture", label="topic")),
        ("dirichlet:source", Family("dirichlet", label="source")),
        ("mixture:host(url)", Family("mixture", label="host(url)")),
        ("groups:bins(a, [1, 2])", Family("groups", label="bins(a, [1, 2])")),
    ],
)
def test_spellings(text, family):
    assert parse_family(text) == family
    assert parse_family(str(family)) == family


@pytest.mark.parametrize(
    ("family", "n_rows", "labels", "message"),
    [
        ("uniform:1.5", 3, None, r"'1\.5'.*fraction"),
        ("uniform", 3, None, r"''.*fraction"),
        ("bernoulli:x", 3, None, "fraction"),
        ("mixture:", 3, None, "label"),
        ("dirichlet", 3, None, "label"),
        ("halves:0.5", 3, None, "'halves'"),
        ("groups:topic", 2, ["a", "a"], "single value 'a'"),
        ("bernoulli:0.000000001", 2, None, r"\b10000\b.*draws"),
    ],
)
def test_invalid_families_are_refused(family, n_rows, labels, message):
    with pytest.raises(SubsetError, match=message):
        list(parse_family(family).draw(1, n_rows=n_rows, labels=labels, seed=0, purpose="t"))


def test_large_subsets_come_in_smaller_blocks(monkeypatch):
    monkeypatch.setattr("grasp.predict.weights.MAX_BLOCK_ENTRIES", 100)
    blocks = list(Family("uniform", fraction=0.5).draw(9, n_rows=80, seed=0, purpose="t"))
    assert [len(block.subset_ids) for block in blocks] == [2, 2, 2, 2, 1]


def test_a_mixture_draws_the_same_subsets_as_earlier_versions():
    """Environments name their subsets by the draw alone: a change would put other rows behind their results."""
    labels = [i % 7 % 3 for i in range(40)]
    (block,) = parse_family("mixture:topic").draw(3, n_rows=40, labels=labels, seed=5, purpose="pinned")
    results = [np.flatnonzero(row).tolist() for row in block.weights_BN.toarray()]
    assert results == PINNED


def test_a_mixture_over_thousands_of_values_is_drawn_at_once():
    """256 subsets of 20,000 values: minutes with one draw a value."""
    n_values, column = 20_000, LabelColumn.from_values([i // 2 for i in range(40_000)])
    blocks = parse_family("mixture:url").draw(256, n_rows=40_000, labels=column, seed=0, purpose="t")
    begun = time.process_time()
    first = next(blocks)
    assert time.process_time() - begun < 20
    per_value_BG = first.weights_BN[:50].toarray().reshape(50, n_values, 2).sum(axis=2)
    assert np.abs(per_value_BG.mean(axis=0) - 1).max() < 1  # no value is always whole, or never there
    assert abs(per_value_BG.mean() - 1) < 0.01
    # round(2 x) for x of Beta(1/2, 1/2): 0 below 1/4, 2 above 3/4, each with probability 1/3
    assert [abs(float((per_value_BG == retained).mean()) - 1 / 3) < 0.01 for retained in (0, 1, 2)] == [True] * 3


def test_draws_for_many_values_keep_within_each_value_what_was_drawn_for_it(monkeypatch):
    monkeypatch.setattr(families, "MANY_VALUES", 1)
    rows_BN = drawn(parse_family("mixture:topic"), 400)
    column = LabelColumn.from_values(LABELS)
    one_by_one_BN = (monkeypatch.undo(), drawn(parse_family("mixture:topic"), 400))[1]
    for code in range(len(column.values)):  # the same numbers of rows, since fractions are drawn first; other rows
        rows = column.codes_N == code
        np.testing.assert_array_equal(rows_BN[:, rows].sum(axis=1), one_by_one_BN[:, rows].sum(axis=1))
        assert np.ptp(rows_BN[:, rows].mean(axis=0)) < 0.15
