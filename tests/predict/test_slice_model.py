"""G and G x G numbers say of weighted slices what `predict` says of the rows one by one."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
from grasp.predict.slice_model import SliceModel
from grasp.report.effects import slice_effects
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.errors import SubsetError
from grasp.predict.blocks import SubsetBlock
from grasp.predict.families import parse_family
from grasp.predict.label_slices import Slice, label_slices, sensible_labels
from grasp.predict.labels import LabelColumn
from grasp.predict.predictions import predict
from grasp.predict.protocol import ScoringProtocol
from grasp.predict.row_tables import slice_table
from grasp.predict.scorer import CalibrationFamily, Scorer
from tests.predict.source import FakeSource, counted

COLUMN = LabelColumn.of([["games", "law", None, "art", "games"][i * 7 % 13 % 5] for i in range(40)], "topic")
TOKENS = np.arange(40) + 2
SLICES = label_slices(COLUMN, TOKENS)
COMPONENTS = {f"{half}.{kind}": 0.3 for half in ("hidden", "joint", "product") for kind in ("raw", "self", "cent")}
COMPONENTS |= {"residual.pair": -0.5, "joint.pair": -0.25}
HALVES = ("hidden", "residual", "product")


def protocol(**changes):
    chosen = {"name": "p", "match": {"token": 1.0, "pooled": 0.5}, "components": COMPONENTS, "negative": 0.5}
    return ScoringProtocol.model_validate(chosen | changes)


def scorer(source, chosen, **arguments):
    calibration = CalibrationFamily(parse_family("mixture:topic"), 32, 0, COLUMN)
    return Scorer.prepare(source, chosen, calibration=calibration, halves=HALVES, **arguments)


def predicted(source, chosen, share_BG, column):
    """What the command says, (B, T)."""
    weights_BN = SLICES.weights(share_BG)
    block = SubsetBlock(tuple(f"s{b}" for b in range(len(share_BG))), weights_BN)
    calibration = CalibrationFamily(parse_family("mixture:topic"), 32, 0, COLUMN)
    table = predict(source, chosen, [block], calibration=calibration).read()
    return table.column(column).to_numpy().reshape(len(share_BG), -1)


@pytest.mark.parametrize("side", ["retained", "omitted"])
@pytest.mark.parametrize("weighting", ["count", "mean"])
@pytest.mark.parametrize("task", ["mean_relevance", "mean_of_standardised"])
def test_switches_and_sliders_are_weighted_subsets(side, weighting, task):
    source, chosen = FakeSource(), protocol(side=side, weighting=weighting, standardize={"task": task})
    model = SliceModel.of(scorer(source, chosen), SLICES)
    switches = np.array(list(itertools.product((0.0, 1.0), repeat=len(SLICES.slices))))[1:]
    sliders = np.random.default_rng(0).uniform(size=(20, len(SLICES.slices))).round(2)
    for share_BG in (switches, sliders, 2.0 * sliders):
        np.testing.assert_allclose(
            model.utilities(share_BG), predicted(source, chosen, share_BG, "utility"), rtol=1e-6, atol=1e-6
        )
        np.testing.assert_allclose(
            model.changes(share_BG), predicted(source, chosen, share_BG, "change"), rtol=1e-6, atol=1e-6
        )


def test_keeping_everything_changes_nothing():
    model = SliceModel.of(scorer(FakeSource(), protocol()), SLICES)
    np.testing.assert_allclose(model.changes(np.ones((1, len(SLICES.slices)))), 0.0, atol=1e-6)


def test_a_slider_gives_the_mean_relevance_of_random_parts_of_the_slice():
    source, chosen = FakeSource(), protocol(components={})
    model = SliceModel.of(scorer(source, chosen), SLICES)
    share_G = np.ones(len(SLICES.slices))
    half = int(np.argmin(SLICES.rows_G))
    rows = np.flatnonzero(SLICES.codes_N == half)
    size = len(rows) // 2
    share_G[half] = size / len(rows)
    picks = [np.setdiff1d(np.arange(40), left_out) for left_out in itertools.combinations(rows, len(rows) - size)]
    weights_BN = np.zeros((len(picks), 40))
    for b, pick in enumerate(picks):
        weights_BN[b, pick] = 1.0
    a_BE = weights_BN @ counted(source.arrays["relevance_token"], chosen) / weights_BN.sum(axis=1, keepdims=True)
    ours_T = share_G @ model.relevance_GT["token"] / (share_G @ model.rows_G)
    sciq = source.unit_columns("sciq")
    assert ours_T[model.targets.index("sciq")] == pytest.approx(a_BE[:, sciq].mean(), rel=1e-6)


@pytest.mark.parametrize("half", ["hidden", "joint"])
@pytest.mark.parametrize("centred", [True, False])
def test_cosines_are_those_of_the_sketch_sums(half, centred):
    source = FakeSource()
    model = SliceModel.of(scorer(source, protocol()), SLICES)
    names = ["hidden_sketch", "residual_sketch"] if half == "joint" else ["hidden_sketch"]
    sketch_ND = np.concatenate([source.arrays[name] for name in names], axis=1).astype(float)
    if centred:
        sketch_ND = sketch_ND - sketch_ND.mean(axis=0)
    sum_GD = np.stack([sketch_ND[SLICES.codes_N == g].sum(axis=0) for g in range(len(SLICES.slices))])
    unit_GD = sum_GD / np.linalg.norm(sum_GD, axis=1, keepdims=True)
    np.testing.assert_allclose(model.cosines(half, centred=centred), unit_GD @ unit_GD.T, atol=1e-5)


@pytest.mark.parametrize("task", ["mean_relevance", "mean_of_standardised"])
@pytest.mark.parametrize("side", ["retained", "omitted"])
def test_effects_are_those_of_the_slice_table_and_lie_in_their_intervals(task, side):
    source, chosen = FakeSource(), protocol(side=side, standardize={"task": task})
    bound = scorer(source, chosen, per_unit=task == "mean_of_standardised")
    effects = slice_effects(source, bound, SliceModel.of(bound, SLICES), SLICES)
    calibration = CalibrationFamily(parse_family("mixture:topic"), 32, 0, COLUMN)
    lines = slice_table(source, chosen, COLUMN, calibration=calibration).to_pylist()
    for line in lines:
        g, t = [one.name for one in SLICES.slices].index(line["value"]), source.targets.index(line["target"])
        assert effects.dropped_GT[g, t] == pytest.approx(line["if_dropped"], rel=1e-6, abs=1e-6)
        assert effects.doubled_GT[g, t] == pytest.approx(line["if_doubled"], rel=1e-6, abs=1e-6)
        assert effects.relevance_GT[g, t] == pytest.approx(line["relevance_token"], rel=1e-6)
    assert (effects.low_GT <= effects.dropped_GT).all()
    assert (effects.dropped_GT <= effects.high_GT).all()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 50))
def test_intervals_are_as_wide_as_the_units_differ(seed):
    """40 units that differ by a known amount: the interval is that of their mean, and geometry only shifts it."""
    rng = np.random.default_rng(seed)
    source = FakeSource(seed=seed, unit_targets=("sciq",) * 40)
    relevance = rng.standard_normal((40, 40)).astype("f4")
    source.arrays["relevance_token"] = relevance
    chosen = protocol(match={"token": 1.0})
    bound = scorer(source, chosen)
    model = SliceModel.of(bound, SLICES)
    effects = slice_effects(source, bound, model, SLICES)
    relevance = counted(relevance, chosen)
    std = bound.task.moments["token"].std_E[0]
    for g in range(len(SLICES.slices)):
        kept = SLICES.codes_N != g
        change_E = (relevance[kept].mean(axis=0, dtype=float) - relevance.mean(axis=0, dtype=float)) / std
        width = effects.high_GT[g, 0] - effects.low_GT[g, 0]
        assert width == pytest.approx(2 * 1.96 * change_E.std() / np.sqrt(40), rel=0.15)
        centre = change_E.mean() + model.geometry_change(1.0 - np.eye(len(SLICES.slices))[[g]])[0]
        assert effects.dropped_GT[g, 0] == pytest.approx(centre, rel=1e-4, abs=1e-4)


def test_one_unit_has_no_interval():
    source = FakeSource(unit_targets=("sciq", "boolq", "sciq", "sciq", "sciq"))
    bound = scorer(source, protocol())
    effects = slice_effects(source, bound, SliceModel.of(bound, SLICES), SLICES)
    assert np.isnan(effects.low_GT[:, source.targets.index("boolq")]).all()
    assert np.isfinite(effects.low_GT[:, source.targets.index("sciq")]).all()


# label columns as slices


def test_every_row_is_in_one_slice_largest_first():
    assert [one.name for one in SLICES.slices] == ["games", "(no label)", "law", "art"]
    assert SLICES.slices[0] == Slice("games", "topic = 'games'", 16, int(TOKENS[SLICES.codes_N == 0].sum()))
    assert SLICES.rows_G.sum() == 40
    np.testing.assert_array_equal(SLICES.indicators().sum(axis=1), SLICES.rows_G)


def test_a_label_of_many_values_keeps_the_largest_and_says_how_many_share_the_rest():
    values = ["a"] * 9 + ["b"] * 5 + [f"v{i}" for i in range(20)] + [None]
    slices = label_slices(LabelColumn.of(values, "host"), np.ones(35), most=3)
    assert [one.name for one in slices.slices] == ["a", "b", "21 other values"]
    assert slices.n_grouped == 21
    assert slices.slices[-1].expression == "host IS NULL OR host NOT IN ('a', 'b')"
    assert slices.slices[-1].rows == slices.slices[-1].tokens == 21


def test_names_are_told_apart():
    values = [None, "(no label)", "1 other values", "x", "y", "(no label)", "1 other values", None]
    slices = label_slices(LabelColumn.of(values, "t"), np.ones(8), most=4)
    assert [one.name for one in slices.slices] == ["(no label) #2", "(no label)", "1 other values", "2 other values"]


def test_a_label_of_one_value_tells_nothing_apart():
    with pytest.raises(SubsetError, match="--by topic: has the single value 'x'; expected a label with two values"):
        label_slices(LabelColumn.of(["x", "x"], "topic"), np.ones(2))


def test_labels_are_chosen_by_their_number_of_values(art_of):
    columns = {
        "url": [f"u{i}" for i in range(12)],
        "topic": ["a", "b", None] * 4,
        "one": ["x"] * 12,
        "score": [0.1, 0.2] * 6,
        "flag": [True, False] * 6,
    }
    assert sensible_labels(art_of(columns), most=5) == ("topic",)
    assert sensible_labels(art_of({"flag": columns["flag"], "score": columns["score"]})) == ("flag",)
    assert sensible_labels(art_of({"url": columns["url"], "one": columns["one"]}), most=5) == ()


@pytest.fixture
def art_of():
    """Something with the row table of an artifact."""

    class Rows:
        def __init__(self, columns):
            self.table = pa.table({"row_id": ["r"] * len(next(iter(columns.values())))} | columns)

        def rows(self, row_index):
            return self.table.take(row_index)

        def row_batches(self, columns=None):
            yield from self.table.select(columns or self.table.column_names).to_batches(max_chunksize=5)

    return Rows
