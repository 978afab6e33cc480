"""Long-form tables: round trip in any order; errors name the subset and rows."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.errors import SubsetError
from grasp.predict.families import parse_family
from grasp.predict.subset_tables import RowIndex, read_subsets, write_subsets
from grasp.predict.weights import WeightedRows, in_blocks, single_subset

IDS = [f"doc-{i:03d}" for i in range(30)]
INDEX = RowIndex.from_ids(IDS)


def save(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def dense(blocks):
    blocks = list(blocks)
    return [name for item in blocks for name in item.subset_ids], np.concatenate(
        [item.weights_BN.toarray() for item in blocks]
    )


def test_written_subsets_are_read_back(tmp_path):
    family = parse_family("uniform:0.4")
    write_subsets(tmp_path / "s.parquet", family.draw(9, n_rows=30, seed=0, purpose="t", block=4), INDEX)
    names, weights_BN = dense(read_subsets(tmp_path / "s.parquet", INDEX, block=2))
    expected_names, expected_BN = dense(family.draw(9, n_rows=30, seed=0, purpose="t"))
    assert names == expected_names
    assert np.array_equal(weights_BN, expected_BN)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), block=st.integers(1, 7))
def test_subsets_do_not_depend_on_order_or_blocks(tmp_path_factory, seed, block):
    path = tmp_path_factory.mktemp("tables") / "s.parquet"
    rng = np.random.default_rng(seed)
    weights_BN = rng.random((6, 30)) * (rng.random((6, 30)) < 0.3)
    weights_BN[:, 0] = 1.0
    b, n = weights_BN.nonzero()
    order = rng.permutation(len(b))
    save(
        path,
        subset_id=[f"s{i}" for i in b[order]],
        row_id=[IDS[i] for i in n[order]],
        weight=weights_BN[b[order], n[order]],
    )
    names, read_BN = dense(read_subsets(path, INDEX, block=block))
    assert names == list(dict.fromkeys(f"s{i}" for i in b[order]))  # first appearance
    assert np.array_equal(read_BN, weights_BN[[int(name[1:]) for name in names]])


def test_weights_and_whole_numbers_as_names(tmp_path):
    path = save(tmp_path / "s.parquet", subset_id=[7, 7, 3], row_id=["1", "0", "1"], weight=[2, 0, 1])
    (block,) = read_subsets(path, RowIndex.from_ids(["0", "1"]))
    names, weights_BN = dense([block])
    assert names == ["7", "3"]
    assert block.sizes_B.tolist() == [1, 1]  # a row of weight 0 is not in the subset
    assert weights_BN.tolist() == [[0.0, 2.0], [0.0, 1.0]]


def test_a_list_of_rows_is_one_subset(tmp_path):
    names, weights_BN = dense(read_subsets(save(tmp_path / "s.parquet", row_id=[IDS[4], IDS[2]]), INDEX))
    assert names == ["subset"]
    assert np.flatnonzero(weights_BN[0]).tolist() == [2, 4]


def test_weights_are_written_on_request(tmp_path):
    blocks = in_blocks([WeightedRows("w", np.array([1, 4]), np.array([0.5, 2.0]))], 30)
    write_subsets(tmp_path / "s.parquet", blocks, INDEX, weights=True)
    assert pq.read_table(tmp_path / "s.parquet").to_pylist() == [
        {"subset_id": "w", "row_id": IDS[1], "weight": 0.5},
        {"subset_id": "w", "row_id": IDS[4], "weight": 2.0},
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([["a", "b", "b"], [IDS[0], "nowhere", "gone"]], r"'b'.*\b2 rows.*\['nowhere', 'gone'\]"),
        ([["a", "b"], [IDS[0], None]], r"\['b'\].*no rows"),
        ([pa.array([], pa.string()), pa.array([], pa.string())], "lines"),
        ([["a", "a"], [IDS[3], IDS[3]]], r"twice.*\['a: doc-003'\]"),
        ([["a"], [IDS[0]], [-1.0]], r"weights \['a: doc-000: -1.0'\]"),
        ([["a"], [IDS[0]], [float("nan")]], r"weights \['a: doc-000: nan'\]"),
        ([["a"], [IDS[0]], [float("inf")]], r"weights \['a: doc-000: inf'\]"),
        ([["a"], [IDS[0]], [1e308]], r"weights \['a: doc-000: 1e\+308'\]"),
        ([["a"], [IDS[0]], [1e-320]], r"weights \['a: doc-000: 1e-320'\]"),
        ([["a"], [IDS[0]], [0.0]], r"\['a'\].*weights.*\b0\b"),
        ([["a", "a"], [IDS[0], None]], r"\b1 .*row_id"),
        ([pa.array([None], pa.string()), [IDS[0]]], r"\b1 .*subset_id"),
        ([["a"], [[1, 2]]], "read"),
        ([["a", "b"], ["gone", IDS[0]], [1.0, -2.0]], r"'a'.*\b1 rows.*\['b: doc-000: -2\.0'\]"),
        ({"subset": ["a"], "row_id": [IDS[0]]}, "'subset'"),
        ({"subset_id": ["a"], "name": [IDS[0]]}, r"lacks \['row_id'\]"),
        ({"subset_id": ["a"], "row_id": [IDS[0]], "weights": [2.0]}, "'weights'"),
    ],
)
def test_errors_name_subset_and_rows(tmp_path, columns, message):
    if isinstance(columns, list):
        columns = dict(zip(("subset_id", "row_id", "weight"), columns, strict=False))
    with pytest.raises(SubsetError, match=message):
        list(read_subsets(save(tmp_path / "s.parquet", **columns), INDEX))


def test_subsets_with_the_fingerprint_of_another_corpus_are_refused(tmp_path):
    path, block = tmp_path / "s.parquet", single_subset("kept", np.arange(len(IDS)) < 3)
    write_subsets(path, [block], INDEX, corpus="theirs")
    for source in (path, pq.read_table(path)):
        with pytest.raises(SubsetError, match=r"corpus 'theirs'.*'ours'"):
            read_subsets(source, INDEX, corpus="ours")
        (read,) = read_subsets(source, INDEX, corpus="theirs")
        assert read.sizes_B.tolist() == [3]
    write_subsets(path, [block], INDEX)  # says nothing of its corpus
    assert len(list(read_subsets(path, INDEX, corpus="ours"))) == 1


def test_files_that_are_not_tables(tmp_path):
    with pytest.raises(SubsetError, match="no such"):
        list(read_subsets(tmp_path / "none.parquet", INDEX))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 half a file")
    with pytest.raises(SubsetError, match=r"read.*Parquet"):
        list(read_subsets(tmp_path / "broken.parquet", INDEX))


def test_blocks_refuse_what_is_not_a_subset():
    with pytest.raises(SubsetError, match=r"row 2 .*nan.*\b1\b"):
        list(in_blocks([WeightedRows("s", np.array([1, 2]), np.array([1.0, np.nan]))], 3))
    with pytest.raises(SubsetError, match=r"'s'.*no rows"):
        single_subset("s", np.zeros(3, dtype=bool))
