"""Slices against subsets that drop or double them; top rows against a full sort."""

import numpy as np
import pytest
from scipy.sparse import csr_array

from grasp.errors import ProtocolError, ShapeError
from grasp.predict.blocks import SubsetBlock
from grasp.predict.labels import LabelColumn
from grasp.predict.predictions import predict
from grasp.predict.protocol import ScoringProtocol, default_protocol
from grasp.predict.row_tables import slice_table, top_rows
from tests.predict.source import FakeSource

LABELS = LabelColumn.of([["games", "law", None][i % 7 % 3] for i in range(40)])
TOKENS = np.arange(40) + 2


def protocol(**changes):
    settings = {"name": "p", "match": {"token": 1.0}, "components": {"joint.pair": -0.5, "hidden.cent": 0.2}}
    settings["negative"] = 0.25
    return ScoringProtocol(**(settings | changes))


@pytest.mark.parametrize("side", ["retained", "omitted"])
@pytest.mark.parametrize("weighting", ["count", "mean"])
def test_dropped_and_doubled_are_what_predict_says(side, weighting):
    source, chosen = FakeSource(), protocol(side=side, weighting=weighting)
    table = slice_table(source, chosen, LABELS, tokens_N=TOKENS).to_pylist()
    for line in table:
        rows = np.flatnonzero(LABELS.codes_N == LABELS.names().index(line["value"]))
        dropped, doubled = np.ones(40), np.ones(40)
        dropped[rows], doubled[rows] = 0.0, 2.0
        block = SubsetBlock(("dropped", "doubled"), csr_array(np.array([dropped, doubled])))
        change = predict(source, chosen, [block], targets=[line["target"]]).read().column("change").to_pylist()
        assert line["if_dropped"] == pytest.approx(change[0], rel=1e-3, abs=1e-4)
        assert line["if_doubled"] == pytest.approx(change[1], rel=1e-3, abs=1e-4)
        assert line["rows"] == len(rows)
        assert line["tokens"] == TOKENS[rows].sum()
        columns = source.unit_columns(line["target"])
        mean = source.arrays["relevance_token"][np.ix_(rows, columns)].astype(float).mean()
        assert line["relevance_token"] == pytest.approx(mean, rel=1e-5)
        both = np.concatenate([source.arrays["hidden_sketch"], source.arrays["residual_sketch"]], axis=1).astype(float)
        inside, rest = both[rows].sum(axis=0), np.delete(both, rows, axis=0).mean(axis=0)
        cosine = inside @ rest / np.linalg.norm(inside) / np.linalg.norm(rest)
        assert line["redundancy"] == pytest.approx(cosine, abs=1e-5)


def test_a_value_that_is_everything_cannot_be_dropped():
    (line,) = slice_table(FakeSource(), protocol(), LabelColumn.of(["x"] * 40), targets=["sciq"]).to_pylist()
    assert line["if_dropped"] is None
    assert line["redundancy"] is None
    assert line["rows"] == 40
    assert "tokens" not in line


def test_labels_of_other_rows_are_refused():
    with pytest.raises(ShapeError, match="slice_table: 3 labels for an artifact of 40 rows"):
        slice_table(FakeSource(), protocol(), LabelColumn.of(["x"] * 3))
    with pytest.raises(ShapeError, match="slice_table: 3 tokens for an artifact of 40 rows"):
        slice_table(FakeSource(), protocol(), LABELS, tokens_N=TOKENS[:3])


def test_the_default_protocol_gives_slices_their_redundancy_too():
    table = slice_table(FakeSource(), default_protocol(), LABELS)
    assert table.column("redundancy").null_count == 0
    assert "if_doubled" in table.column_names


@pytest.mark.parametrize("block_rows", [1, 6, 40])
@pytest.mark.parametrize("bottom", [False, True])
@pytest.mark.parametrize("k", [1, 5, 100])
def test_top_rows_are_a_full_sort(block_rows, bottom, k):
    source = FakeSource(block_rows=block_rows)
    source.arrays["relevance_token"][20:] = source.arrays["relevance_token"][:20]  # ties
    got = top_rows(source, "sciq", k, bottom=bottom)
    mean = source.arrays["relevance_token"][:, source.unit_columns("sciq")].astype(float).mean(axis=1)
    order = np.lexsort((np.arange(40), mean if bottom else -mean))[:k]
    assert got.row_index.tolist() == order.tolist()
    np.testing.assert_allclose(got.relevance, mean[order])


def test_top_rows_of_the_other_kernel_and_refusals():
    source = FakeSource()
    mean = source.arrays["relevance_pooled"][:, source.unit_columns("boolq")].mean(axis=1)
    assert top_rows(source, "boolq", 1, kernel="pooled").row_index[0] == mean.argmax()
    with pytest.raises(ProtocolError, match="got k=0"):
        top_rows(source, "boolq", 0)
    with pytest.raises(ProtocolError, match=r"targets: got \['boo'\]"):
        top_rows(source, "boo", 1)
    del source.arrays["relevance_token"]
    with pytest.raises(ProtocolError, match="kernel: got 'token', the artifact has pooled"):
        top_rows(source, "boolq", 1, kernel="token")
    assert top_rows(source, "boolq", 1).row_index[0] == mean.argmax()
