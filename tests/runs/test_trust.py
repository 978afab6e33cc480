"""Intervals cover what they claim in a planted world, warn beyond what was covered, and refuse what is held out."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_array

from grasp.errors import EnvironmentDataError, ProtocolLeakError
from grasp.predict.blocks import SubsetBlock
from grasp.predict.families import parse_family
from grasp.predict.predictions import predict_with
from grasp.predict.protocol import ScoringProtocol
from grasp.predict.row_tables import slice_table
from grasp.predict.scorer import CalibrationFamily, Scorer
from grasp.predict.slices import LabelTable
from grasp.runs.trust import (
    Reach,
    Trust,
    UtilityLine,
    Watcher,
    sketches_for,
    slice_intervals,
    slice_warnings,
    with_intervals,
)
from tests.runs.environments import write_artifact, write_environment

PROTOCOL = ScoringProtocol(name="p", components={"hidden.raw": -0.2}, calibration={"family": "mixture:topic"})
SLOPE = {"sciq": 0.02, "boolq": 0.005}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return write_artifact(tmp_path_factory.mktemp("trust") / "art")


def bind(artifact, protocol=PROTOCOL, **fields) -> Scorer:
    labels = LabelTable(artifact.rows_path).column("topic")
    family = CalibrationFamily(parse_family("mixture:topic"), 32, 0, labels)
    halves = sketches_for(artifact.array_names)
    return Scorer.prepare(artifact, protocol, calibration=family, halves=halves, **fields)


@pytest.fixture(scope="module")
def scorer(artifact) -> Scorer:
    return bind(artifact)


def draw(artifact, n, purpose="evaluation", spec="mixture:topic", seed=3):
    family = parse_family(spec)
    labels = None if family.label is None else LabelTable(artifact.rows_path).column(family.label)
    return list(family.draw(n, n_rows=artifact.n_rows, labels=labels, seed=seed, purpose=purpose))


def predictions(artifact, scorer, blocks) -> np.ndarray:
    return np.concatenate([scorer.score_tasks(scorer.sums(block.weights_BN))[1].utility_BE for block in blocks])


@pytest.fixture(scope="module")
def environment(artifact, scorer, tmp_path_factory):
    """U = -3 + slope V + noise."""
    value_BT = predictions(artifact, scorer, draw(artifact, 40))
    noise = 0.01 * np.random.default_rng(1).standard_normal((40, 2))
    column = {"sciq": 0, "boolq": 1}

    def utility(b, seed, target):
        return -3.0 + SLOPE[target] * value_BT[b, column[target]] + noise[b, seed]

    return write_environment(tmp_path_factory.mktemp("trust") / "env", artifact, utility)


@pytest.fixture(scope="module")
def trust(artifact, scorer, environment) -> Trust:
    return Trust.of(scorer, artifact, environment)


def test_the_line_is_that_of_least_squares_with_each_subset_left_out():
    rng = np.random.default_rng(0)
    v_B, u_B = rng.standard_normal(20), rng.standard_normal(20)
    line = UtilityLine.fit("sciq", v_B, u_B)
    assert [line.slope, line.intercept] == pytest.approx(np.polyfit(v_B, u_B, 1))
    for b in range(20):
        slope, intercept = np.polyfit(np.delete(v_B, b), np.delete(u_B, b), 1)
        assert (line.slope_B[b], line.intercept_B[b]) == pytest.approx((slope, intercept))
        assert line.residual_B[b] == pytest.approx(u_B[b] - slope * v_B[b] - intercept)


def test_the_interval_is_the_jackknife_plus_written_out():
    rng = np.random.default_rng(1)
    line = UtilityLine.fit("sciq", rng.standard_normal(30), rng.standard_normal(30), coverage=0.8)
    found = line.at(np.array([0.7]))
    ends = [line.intercept_B + 0.7 * line.slope_B + sign * np.abs(line.residual_B) for sign in (-1, 1)]
    rank = math.ceil(0.8 * 31)
    assert found.low[0] == sorted(ends[0])[30 - rank]
    assert found.high[0] == sorted(ends[1])[rank - 1]
    assert found.low[0] < found.expected[0] < found.high[0]


@pytest.mark.parametrize("coverage", [0.8, 0.9])
def test_intervals_cover_as_often_as_they_say(coverage):
    """New subsets from the same world, noise that is not normal; 300 worlds of 40 subsets."""
    rng = np.random.default_rng(2)
    hits, change_hits = [], []
    for _ in range(300):
        v_B = rng.standard_normal(60)
        u_B = 0.5 * v_B + rng.laplace(size=60)
        line = UtilityLine.fit("sciq", v_B[:40], u_B[:40], coverage)
        found = line.at(v_B[40:])
        hits.append(((found.low <= u_B[40:]) & (u_B[40:] <= found.high)).mean())
        change = line.change(v_B[40:50] - v_B[50:])
        true = u_B[40:50] - u_B[50:]
        change_hits.append(((change.low <= true) & (true <= change.high)).mean())
    assert np.mean(hits) == pytest.approx(coverage, abs=0.03)
    assert np.mean(change_hits) == pytest.approx(coverage, abs=0.03)


def test_intervals_cover_new_subsets_of_a_planted_artifact(artifact, scorer, trust):
    fresh = draw(artifact, 400, purpose="fresh")
    value_BT = predictions(artifact, scorer, fresh)
    rng = np.random.default_rng(5)
    for t, target in enumerate(("sciq", "boolq")):
        realized_B = -3.0 + SLOPE[target] * value_BT[:, t] + 0.01 * rng.standard_normal((400, 2)).mean(axis=1)
        found = trust.lines[target].at(value_BT[:, t])
        covered = ((found.low <= realized_B) & (realized_B <= found.high)).mean()
        assert 0.82 <= covered <= 0.98
        assert trust.lines[target].slope == pytest.approx(SLOPE[target], rel=0.35)


def test_predictions_get_the_columns(artifact, scorer, trust):
    both = bind(artifact, per_unit=True)
    plain = predict_with(both, artifact, draw(artifact, 5, purpose="fresh")).read()
    table = with_intervals(predict_with(both, artifact, draw(artifact, 5, purpose="fresh")), trust)
    found = table.read()
    assert found.column_names == [*plain.column_names, "expected", "low", "high"]
    assert found.select(plain.column_names).equals(plain)
    assert (
        "90% intervals for a model retrained as in env (recipe tiny, mean of 2 seeds)"
        in table.metadata["grasp.unit.expected"]
    )
    for line in found.to_pylist():
        if line["unit_id"] is None:
            own = trust.lines[line["target"]].at(np.array([line["utility"]]))
            assert (line["expected"], line["low"], line["high"]) == (own.expected[0], own.low[0], own.high[0])
        else:
            assert line["expected"] is line["low"] is line["high"] is None


def test_slices_get_the_change_if_they_are_dropped(artifact, trust):
    labels = LabelTable(artifact.rows_path).column("topic")
    table = slice_intervals(slice_table(artifact, PROTOCOL, labels, calibration=bind_family(labels)), trust)
    for line in table.to_pylist():
        own = trust.lines[line["target"]].change(np.array([line["if_dropped"]]))
        assert line["dropped_expected"] == pytest.approx(own.expected[0])
        assert line["dropped_low"] < line["dropped_expected"] < line["dropped_high"]


def bind_family(labels) -> CalibrationFamily:
    return CalibrationFamily(parse_family("mixture:topic"), 32, 0, labels)


def test_a_change_of_nothing_is_expected_to_change_nothing(trust):
    found = trust.lines["sciq"].change(np.zeros(1))
    assert found.expected[0] == 0
    assert found.low[0] == -found.high[0]


def test_subsets_beyond_what_was_covered_are_named(artifact, scorer, tmp_path):
    """The environment knows random halves: neither a tenth of the rows nor one topic alone is like them."""
    environment = write_environment(
        tmp_path / "env", artifact, lambda b, seed, _: -3.0 + 0.1 * b + seed, family="uniform:0.5", n_subsets=20
    )
    trust = Trust.of(scorer, artifact, environment)
    assert (trust.reach.least, trust.reach.most) == (0.5, 0.5)
    labels = LabelTable(artifact.rows_path).column("topic")
    one_topic = labels.codes_N == 0
    tenth = np.zeros(120, dtype=bool)
    tenth[::10] = True
    half = np.arange(120) % 2 == 0
    masks = np.array([one_topic, tenth, half], dtype=float)
    block = SubsetBlock(("topic", "tenth", "half"), csr_array(masks))
    words = trust.beyond(scorer, scorer.sums(block.weights_BN))
    share = one_topic.mean()
    assert words[0].startswith(f"keeps {share:.1%} of the rows, the environment's subsets 50.0% to 50.0%; its mean ")
    assert "hidden" in words[0].split(";")[1]
    assert words[0].split(";")[1].endswith("times as far from the corpus as any of them")
    assert words[1].startswith("keeps 10.0% of the rows")
    assert words[2] == ""
    assert trust.beyond(scorer, scorer.sums(block.weights_BN), sized=False)[2] == ""
    watcher = Watcher(trust, scorer)
    predict_with(scorer, artifact, [block], watch=watcher).read()
    assert watcher.n_outside == 2
    assert watcher.warnings[0].startswith("outside of what env covered: topic: keeps ")


def test_many_subsets_beyond_are_counted(artifact, scorer, trust):
    watcher = Watcher(trust, scorer)
    predict_with(scorer, artifact, draw(artifact, 9, spec="uniform:0.01"), watch=watcher).read()
    assert watcher.n_outside == 9
    assert len(watcher.warnings) == 4
    assert watcher.warnings[-1] == "... and 6 more subsets"


def test_reach_is_the_range_of_the_family():
    predicted = {name: np.array([-4.12, 4.58]) for name in "abcde"}
    reach = Reach.of(np.array([0.2, 0.6]), {"hidden": np.array([1.0, 4.0])}, predicted)
    assert reach.beyond(0.2, {"hidden": 4.0}, {"a": 4.58, "b": -4.12}) == ""
    assert reach.beyond(None, {"hidden": 16.0}, {}) == (
        "its mean hidden sketch is 2.0 times as far from the corpus as any of them"
    )
    assert (
        reach.beyond(0.61, {"hidden": 0.0}, {"a": 6.715})
        == "keeps 61.0% of the rows, the environment's subsets 20.0% to 60.0%; "
        "a is predicted +6.7, the environment's subsets -4.1 to +4.6"
    )
    assert reach.beyond(None, {"hidden": 0.0}, dict.fromkeys("abcde", -5.0)).endswith("; and 2 more targets")


def test_predictions_beyond_those_of_the_environment_are_named(artifact, scorer, trust):
    """The best mixture of the rows that the environment's subsets are of: no size and no geometry is beyond them."""
    low, high = trust.reach.predicted["sciq"]
    blocks = draw(artifact, 40)
    values = predictions(artifact, scorer, blocks)[:, 0]
    assert (low, high) == (values.min(), values.max())
    narrow = replace(trust, reach=replace(trust.reach, predicted={"sciq": (low, high - 1e-3), "boolq": (-99, 99)}))
    warned = [words for block in blocks for words in narrow.beyond(scorer, scorer.sums(block.weights))]
    assert [b for b, words in enumerate(warned) if words] == [int(values.argmax())]
    assert re.fullmatch(
        r"sciq is predicted [+-][\d.]+, the environment's subsets [+-][\d.]+ to [+-][\d.]+", max(warned)
    )
    labels = LabelTable(artifact.rows_path).column("topic")
    table = slice_table(artifact, PROTOCOL, labels, calibration=bind_family(labels))
    assert (
        slice_warnings(table, replace(trust, reach=replace(trust.reach, predicted={"sciq": (-99, 99)})), scorer) == ()
    )
    nothing = replace(trust, reach=replace(trust.reach, predicted={"sciq": (-99, -98)}))
    found = slice_warnings(table, nothing, scorer)
    values = [line for line in table.to_pylist() if line["target"] == "sciq"]
    whole = scorer.score_tasks(scorer.whole())[1].utility_BE[0, 0]
    first = values[0]
    assert found[0].startswith(f"outside of what env covered: without {first['value']}: sciq is predicted ")
    assert float(found[0].split(" is predicted ")[1].split(",")[0]) == pytest.approx(
        whole + first["if_dropped"], abs=0.06
    )
    assert len(found) == min(len(values), 3) + (len(values) > 3)


def test_what_is_held_out_is_refused(artifact, scorer, tmp_path):
    held = write_environment(tmp_path / "held", artifact, lambda b, s, _: 0.1 * b, role="held-out")
    with pytest.raises(ProtocolLeakError, match="held: is held out; intervals are fitted on development environments"):
        Trust.of(scorer, artifact, held)
    partly = write_environment(tmp_path / "partly", artifact, lambda b, s, _: 0.1 * b, held_out_targets=("boolq",))
    found = Trust.of(scorer, artifact, partly)
    assert list(found.lines) == ["sciq"]
    assert "no interval for boolq: no development target of partly" in found.notes
    with pytest.raises(ProtocolLeakError, match=r"\['boolq'\], which are held out"):
        Trust.of(bind(artifact, targets=["boolq"]), artifact, partly)


def test_too_few_subsets_give_no_interval(artifact, scorer, tmp_path):
    few = write_environment(tmp_path / "few", artifact, lambda b, s, _: 0.1 * b, n_subsets=8)
    with pytest.raises(EnvironmentDataError, match="got 8 subsets, expected at least 9 for a coverage of 90%"):
        Trust.of(scorer, artifact, few)
    with pytest.raises(EnvironmentDataError, match="predictions of all subsets are the same; no line fits"):
        UtilityLine.fit("sciq", np.ones(20), np.arange(20.0))


def test_what_else_should_be_known_is_noted(artifact, environment, tmp_path):
    selected = PROTOCOL.model_copy(update={"selected_on": ("env/sciq", "other/sciq")})
    notes = Trust.of(bind(artifact, selected), artifact, environment).notes
    assert notes == ("the protocol was selected on env: its intervals are somewhat too narrow",)
    value_BT = predictions(artifact, bind(artifact), draw(artifact, 40))
    order = {b: float(value_BT[b, 0]) for b in range(40)}
    down = write_environment(tmp_path / "falls", artifact, lambda b, s, _: -order[b])
    notes = Trust.of(bind(artifact, targets=["sciq"]), artifact, down).notes
    assert notes == ("sciq: realized utility does not rise with the prediction in falls: trust the interval alone",)


def test_an_environment_of_other_targets_is_refused(tmp_path, environment):
    other = write_artifact(tmp_path / "art", targets={"loss_on": "all"})
    with pytest.raises(EnvironmentDataError, match="with loss_on 'all'; none is common to both"):
        Trust.of(bind(other), other, environment)
