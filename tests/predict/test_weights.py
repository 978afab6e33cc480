"""Every form of weights represents the same matrix; families and tables use the smallest form."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array

from grasp.predict import weights as blocks_module
from grasp.predict.families import parse_family
from grasp.predict.weights import PackedMasks, SubsetBlock, WeightedRows, Weights, in_blocks


def form(weights: Weights) -> str:
    if isinstance(weights.matrix, PackedMasks):
        return "bits"
    return "omitted" if weights.base else "entries"


def forms(seed: int, n_subsets: int = 5, n_rows: int = 37):
    """Weights of every form with the matrix that they stand for."""
    rng = np.random.default_rng(seed)
    mask = rng.random((n_subsets, n_rows)) < 0.6
    gone = (rng.random((n_subsets, n_rows)) < 0.05) * rng.choice([1.0, 0.3, -1.0], (n_subsets, n_rows))
    share, codes = rng.choice([0.0, 1.0, 0.25], (n_subsets, 3)), rng.integers(0, 3, n_rows)
    slices = Weights.from_slices(codes, 3)
    return [
        (Weights(csr_array(mask * 1.0)), mask * 1.0),
        (Weights(PackedMasks(np.packbits(mask, axis=1), n_rows)), mask * 1.0),
        (Weights(csr_array(-gone), base=1.0), 1.0 - gone),
        (slices.mixed(share), share[:, codes]),
        (slices.mixed(share > 0), (share[:, codes] > 0) * 1.0),
        (slices, np.eye(3)[:, codes]),
    ]


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), n_rows=st.integers(1, 40))
def test_all_forms_equal_their_matrix(seed, n_rows):
    for weights, matrix in forms(seed, n_rows=n_rows):
        assert weights.shape == matrix.shape
        as_entries = weights.csr()
        np.testing.assert_allclose(as_entries.toarray(), matrix, atol=1e-15)
        assert (as_entries.data != 0).all()
        np.testing.assert_array_equal(weights.sizes, (as_entries.toarray() != 0).sum(axis=1))
        np.testing.assert_allclose(weights.mapped(np.square).csr().toarray(), matrix**2, atol=1e-15)
        np.testing.assert_allclose(weights.sums, matrix.sum(axis=1), atol=1e-12)
        changed = weights.total(lambda weight: np.abs(1.0 - weight))
        np.testing.assert_allclose(changed, abs(1.0 - matrix).sum(axis=1), atol=1e-12)
        if weights.is_binary:
            np.testing.assert_array_equal(matrix, matrix**2)
        powers = np.arange(1.0, len(matrix) + 1)
        raised = weights.mapped(lambda weight, power: weight**power, powers)
        np.testing.assert_allclose(raised.csr().toarray(), matrix ** powers[:, None], atol=1e-12)


@pytest.mark.parametrize("family", ["uniform:0.5", "uniform:0.97", "mixture:topic", "bernoulli:0.3"])
def test_draws_do_not_depend_on_the_form(monkeypatch, family):
    labels = [("games", "science")[i % 2] for i in range(500)]
    draw = {"n_rows": 500, "labels": labels, "seed": 3, "purpose": "test"}
    plain = [block.weights_BN for block in parse_family(family).draw(9, **draw)]
    assert all(form(block.weights) == "entries" for block in parse_family(family).draw(9, **draw))
    monkeypatch.setattr(blocks_module, "PACKED_ROWS", 40)
    drawn = list(parse_family(family).draw(9, **draw))
    assert {form(block.weights) for block in drawn} & {"omitted", "bits"}
    together = np.concatenate([block.weights_BN.toarray() for block in drawn])
    np.testing.assert_array_equal(together, np.concatenate([matrix.toarray() for matrix in plain]))
    assert [name for block in drawn for name in block.subset_ids] == [f"test-{b:06d}" for b in range(9)]


def test_blocks_have_one_form_and_preserve_the_order(monkeypatch):
    monkeypatch.setattr(blocks_module, "PACKED_ROWS", 10)
    items = [
        WeightedRows("few", np.arange(3)),
        WeightedRows("half", np.arange(60)),
        WeightedRows("half too", np.arange(40, 100)),
        WeightedRows("nearly all", np.arange(2, 100)),
        WeightedRows("not so many", np.arange(50, 100)),
        WeightedRows("weighted", np.arange(99), np.full(99, 0.5)),
    ]
    drawn = list(in_blocks(items, 100, 8))
    assert [block.subset_ids for block in drawn] == [
        ("few",),
        ("half", "half too"),
        ("nearly all",),
        ("not so many",),
        ("weighted",),
    ]
    assert [form(block.weights) for block in drawn] == ["entries", "bits", "omitted", "bits", "entries"]
    assert [int(block.sizes_B[0]) for block in drawn] == [3, 60, 98, 50, 99]


def test_entries_given_twice_are_one_row():
    twice = csr_array((np.array([1.0, 0.5, 0.0, 2.0]), np.array([4, 4, 1, 0]), np.array([0, 3, 4])), shape=(2, 5))
    block = SubsetBlock(("a", "b"), Weights(twice))
    assert block.sizes_B.tolist() == [1, 1]
    assert block.weights_BN.toarray().tolist() == twice.toarray().tolist()
    assert block.weights.mapped(np.square).csr().toarray()[0, 4] == 1.5**2
    assert twice.nnz == 4, "what was given is left as it is"
