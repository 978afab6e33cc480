"""Effects of slices with intervals over units; label columns as slices."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.artifact.label_table import LabelColumn
from grasp.artifact.rows import suggest_labels
from grasp.errors import SubsetError
from grasp.predict.predictor import Predictor
from grasp.predict.slice_intervals import dropped_errors
from grasp.predict.slices import (
    LabelSlices,
    Slice,
    label_slices,
    list_slices,
    slice_effects,
)
from grasp.predict.weights import Weights
from tests.predict.source import FakeSource, downweight_negative
from tests.rules import rule

TOPICS = [["games", "law", None, "art", "games"][i * 7 % 13 % 5] for i in range(40)]
COLUMN = LabelColumn.from_values(TOPICS, "topic")
TOKENS = np.arange(40) + 2
SLICES = label_slices(COLUMN, TOKENS)
COMPONENTS = {f"{half}.{kind}": 0.3 for half in ("hidden", "joint", "product") for kind in ("raw", "self", "cent")}
COMPONENTS |= {"residual.pair": -0.5, "joint.pair": -0.25}


def protocol(**changes):
    chosen = {"name": "p", "match": {"output_layer": 1.0, "pooled": 0.5}, "components": COMPONENTS, "negative": 0.5}
    return rule(**(chosen | changes))


def worth(source, chosen):
    predictor = Predictor.from_artifact(source, chosen)
    effects = slice_effects(predictor, SLICES)
    return predictor, effects, *dropped_errors(source, predictor, effects, SLICES).interval


@pytest.mark.parametrize("components", [{}, COMPONENTS])
@pytest.mark.parametrize("side", ["retained", "omitted"])
@pytest.mark.parametrize("weighting", ["count", "mean"])
@pytest.mark.parametrize("task", ["mean_relevance", "mean_of_standardised"])
def test_effects_equal_predictions_and_are_in_their_intervals(components, side, weighting, task):
    options = {"components": components, "side": side, "weighting": weighting, "standardize": {"task": task}}
    predictor, effects, low_GT, high_GT = worth(FakeSource(), protocol(**options))
    identity_GG = np.eye(len(SLICES.names))
    for step, actual_GT in ((-1.0, effects.dropped_GT), (1.0, effects.doubled_GT)):
        expected = predictor.change(SLICES.weights(1.0 + step * identity_GG))
        np.testing.assert_allclose(actual_GT, expected, atol=1e-5)
    mean_GT = np.stack([predictor.effect_NT[SLICES.codes_N == g].mean(axis=0) for g in range(len(SLICES.names))])
    np.testing.assert_allclose(effects.effect_GT, mean_GT, atol=1e-6)
    assert (low_GT <= effects.dropped_GT + 1e-9).all()
    assert (effects.dropped_GT <= high_GT + 1e-9).all()


@settings(max_examples=20)
@given(seed=st.integers(0, 50))
def test_intervals_are_as_wide_as_the_units_differ(seed):
    """40 units that see a slice differently, and rows of a slice that are alike: the interval is that of the units."""
    rng = np.random.default_rng(seed)
    relevance_NE = rng.standard_normal((len(SLICES.names), 40))[SLICES.codes_N].astype("f4")
    source = FakeSource(
        arrays={"relevance_output_layer": relevance_NE},
        unit_targets=("sciq",) * 40,
        columns={"doc_id": [f"d{i}" for i in range(40)]},
    )
    chosen = protocol(match={"output_layer": 1.0}, components={})
    _, effects, low_GT, high_GT = worth(source, chosen)
    relevance_NE = downweight_negative(relevance_NE, chosen)
    spread = relevance_NE.mean(axis=1).std()
    for g in range(len(SLICES.names)):
        retained_N = SLICES.codes_N != g
        change_E = (relevance_NE[retained_N].mean(axis=0) - relevance_NE.mean(axis=0)) / spread
        least = 2 * 1.96 * change_E.std() / np.sqrt(40)
        assert high_GT[g, 0] - low_GT[g, 0] > 0.8 * least
        assert effects.dropped_GT[g, 0] == pytest.approx(change_E.mean(), abs=1e-4)


def test_one_in_twenty_random_groups_of_documents_has_an_interval_without_zero():
    """Rows of a document are alike, and documents differ by question: 400 groups in 20 corpora, binomial bounds."""
    excluded, together = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        document_N = np.repeat(np.arange(200), rng.integers(1, 12, 200))
        n_rows = len(document_N)
        relevance_NE = rng.standard_normal((200, 1))[document_N] + 2.0 * rng.standard_normal((200, 24))[document_N]
        relevance_NE += rng.standard_normal(24) + rng.standard_normal((n_rows, 24))
        source = FakeSource(
            n_rows=n_rows,
            arrays={"relevance_output_layer": relevance_NE.astype("f4")},
            unit_targets=("sciq",) * 24,
            columns={"doc_id": [f"d{d}" for d in document_N]},
        )
        predictor = Predictor.from_artifact(source, protocol(match={"output_layer": 1.0}, components={}))
        groups = LabelColumn.from_values(rng.integers(0, 20, 200)[document_N].tolist(), "group")
        slices = label_slices(groups, np.ones(n_rows, np.int64))
        errors = dropped_errors(source, predictor, slice_effects(predictor, slices), slices)
        low_GT, high_GT = errors.interval
        excluded += ((low_GT > 0) | (high_GT < 0))[:, 0].tolist()
        together.append((np.abs(errors.value_GT) > errors.half_widths(compared=20)).any())
    assert len(excluded) == 400
    assert 9 <= sum(excluded) <= 32  # 99.5 % of binomial(400, 0.05)
    assert sum(together) <= 4  # 99.7 % of binomial(20, 0.05)


def test_a_document_counts_once_however_many_rows_it_has():
    """Copies of every row in the same document change no interval; as documents of their own they narrow it."""
    rng = np.random.default_rng(0)
    relevance_NE = rng.standard_normal((40, 30)).astype("f4")

    def width(copies, own_documents):
        names = [f"d{i}-{k * own_documents}" for i in range(40) for k in range(copies)]
        source = FakeSource(
            n_rows=40 * copies,
            arrays={"relevance_output_layer": np.repeat(relevance_NE, copies, axis=0)},
            unit_targets=("sciq",) * 30,
            columns={"doc_id": names},
        )
        predictor = Predictor.from_artifact(source, protocol(match={"output_layer": 1.0}, components={}))
        slices = label_slices(LabelColumn.from_values(np.repeat(TOPICS, copies).tolist(), "t"), np.ones(40 * copies))
        return dropped_errors(source, predictor, slice_effects(predictor, slices), slices).error_GT

    np.testing.assert_allclose(width(5, False), width(1, False), rtol=1e-4)
    assert (width(5, True) < width(1, False)).all()


def test_one_unit_has_no_interval():
    source = FakeSource(unit_targets=("sciq", "boolq", "sciq", "sciq", "sciq"))
    _, _, low_GT, _ = worth(source, protocol())
    assert np.isnan(low_GT[:, source.targets.index("boolq")]).all()
    assert np.isfinite(low_GT[:, source.targets.index("sciq")]).all()


def test_a_value_of_all_rows_cannot_be_dropped():
    predictor = Predictor.from_artifact(FakeSource(), protocol(components={}))
    whole = LabelSlices("topic", (Slice("all", "true", 40, 80),), np.zeros(40, dtype=np.int32), 0)
    effects = slice_effects(predictor, whole)
    assert np.isnan(effects.dropped_GT).all()
    np.testing.assert_allclose(effects.doubled_GT, 0.0, atol=1e-6)


@pytest.mark.parametrize("halves", [("hidden",), ("hidden", "residual")])
@pytest.mark.parametrize("components", [{}, COMPONENTS])
def test_redundancy_is_the_cosine_of_the_sketch_sums(halves, components):
    source = FakeSource()
    names = [f"{half}_sketch" for half in halves]
    if components and len(halves) == 1:
        components = {"hidden.raw": 0.3}
    predictor = Predictor.from_artifact(source, protocol(components=components), sketches=halves)
    effects = slice_effects(predictor, SLICES)
    sketch_ND = np.concatenate([source.arrays[name] for name in names], axis=1).astype(float)
    sum_GD = np.stack([sketch_ND[SLICES.codes_N == g].sum(axis=0) for g in range(len(SLICES.names))])
    rest_GD = sketch_ND.sum(axis=0) - sum_GD
    length_G = np.linalg.norm(sum_GD, axis=1) * np.linalg.norm(rest_GD, axis=1)
    np.testing.assert_allclose(effects.redundancy_G, (sum_GD * rest_GD).sum(axis=1) / length_G, atol=1e-5)


# label columns as slices


def test_every_row_is_in_one_slice_largest_first():
    assert list(SLICES.names) == ["games", "(no label)", "law", "art"]
    assert SLICES.slices[0] == Slice("games", "topic = 'games'", 16, int(TOKENS[SLICES.codes_N == 0].sum()))
    assert SLICES.rows_G.sum() == 40
    np.testing.assert_array_equal(SLICES.each.csr().sum(axis=1), SLICES.rows_G)


def test_a_label_of_many_values_has_slices_of_the_largest_and_one_of_the_rest():
    values = ["a"] * 9 + ["b"] * 5 + [f"v{i}" for i in range(20)] + [None]
    slices = label_slices(LabelColumn.from_values(values, "host"), np.ones(35), most=3)
    assert list(slices.names) == ["a", "b", "21 other values"]
    assert slices.n_grouped == 21
    assert slices.slices[-1].expression == "host IS NULL OR host NOT IN ('a', 'b')"
    assert slices.slices[-1].rows == slices.slices[-1].tokens == 21


def test_equal_names_are_disambiguated():
    values = [None, "(no label)", "1 other values", "x", "y", "(no label)", "1 other values", None]
    slices = label_slices(LabelColumn.from_values(values, "t"), np.ones(8), most=4)
    assert list(slices.names) == ["(no label) #2", "(no label)", "1 other values", "2 other values"]


def test_a_label_of_one_value_has_no_slices():
    with pytest.raises(SubsetError, match="single value 'x'"):
        label_slices(LabelColumn.from_values(["x", "x"], "topic"), np.ones(2))


def test_labels_are_chosen_by_their_number_of_values(art_of):
    columns = {
        "url": [f"u{i}" for i in range(12)],
        "topic": ["a", "b", None] * 4,
        "one": ["x"] * 12,
        "score": [0.1, 0.2] * 6,
        "flag": [True, False] * 6,
    }
    assert suggest_labels(art_of(columns)) == ("topic",)
    assert suggest_labels(art_of({"flag": columns["flag"], "score": columns["score"]})) == ("flag",)
    assert suggest_labels(art_of({"url": columns["url"], "one": columns["one"]})) == ()


@pytest.fixture
def art_of():
    """Something with the row table of an artifact."""

    class Rows:
        def __init__(self, columns):
            self.table = pa.table({"row_id": ["r"] * len(next(iter(columns.values())))} | columns)
            self.n_rows = len(self.table)

        def rows(self, row_index):
            return self.table.take(row_index)

        def row_batches(self, columns=None):
            yield from self.table.select(columns or self.table.column_names).to_batches(max_chunksize=5)

    return Rows


@pytest.mark.parametrize("components", [{}, COMPONENTS])
def test_a_label_that_is_a_list_gives_slices_that_overlap(components):
    lists = ['["a", "b"]', '["b"]', None, '["b", "it\'s"]', '["a", "a"]', "[]"]
    column = LabelColumn.from_values([lists[i % 6] for i in range(40)], "tags")
    slices = list_slices(column, TOKENS)
    assert [part.expression for part in slices.slices] == ["has(tags, 'b')", "has(tags, 'a')", "has(tags, 'it''s')"]
    assert [part.rows for part in slices.slices] == [21, 13, 7]
    source = FakeSource()
    predictor = Predictor.from_artifact(source, protocol(components=components))
    effects = slice_effects(predictor, slices)
    low_GT, high_GT = dropped_errors(source, predictor, effects, slices).interval
    np.testing.assert_allclose(effects.dropped_GT, predictor.change(slices.dropped), atol=1e-5)
    doubled = Weights(slices.membership_GN, base=1.0)
    np.testing.assert_allclose(effects.doubled_GT, predictor.change(doubled), atol=1e-5)
    assert (low_GT <= effects.dropped_GT + 1e-9).all()
    assert (effects.dropped_GT <= high_GT + 1e-9).all()
    if effects.redundancy_G is None:
        return
    # a slice and the rest of the corpus, as the two values of a label
    halves = LabelColumn.from_values(
        [value is not None and "b" in value for value in np.array(lists)[np.arange(40) % 6]]
    )
    pair = slice_effects(predictor, label_slices(halves, TOKENS))
    at = list(label_slices(halves, TOKENS).names).index("True")
    np.testing.assert_allclose(effects.redundancy_G[0], pair.redundancy_G[at], atol=1e-5)


def test_a_label_that_is_not_a_list_has_no_overlapping_slices():
    assert list_slices(COLUMN, TOKENS) is None
    assert list_slices(LabelColumn.from_values(["[1]", "[2]"]), TOKENS[:2]) is None
    assert list_slices(LabelColumn.from_values(['["a"]', '["a"]']), TOKENS[:2]) is None  # in every row
