"""A selection as a whole: the value is that of `grasp predict`, the certificate holds, bad input is one line."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grasp.choose.amounts import Amount, parse_bounds, parse_budget, parse_targets
from grasp.choose.certificate import is_aligned, upper_bound
from grasp.choose.greedy import choose
from grasp.choose.limits import Limits
from grasp.choose.objective import Objective
from grasp.choose.select import Request, guarantee, select, with_diversity
from grasp.errors import ProtocolError, SettingsError
from grasp.predict.families import parse_family
from grasp.predict.labels import LabelColumn
from grasp.predict.scorer import CalibrationFamily
from tests.choose.world import World, best_subset, planted, protocol, scorer_of, utilities

GEOMETRY = {"joint.pair": -0.25, "hidden.cent": -0.1, "product.raw": -0.1}


def request(budget="20%", targets="sciq", **fields) -> Request:
    return Request(parse_budget(budget), parse_targets(targets), **fields)


@pytest.mark.parametrize("side", ["retained", "omitted"])
@pytest.mark.parametrize("weighting", ["count", "mean"])
@pytest.mark.parametrize("components", [{}, GEOMETRY])
@pytest.mark.parametrize("budget", ["20%", "40", "700tokens"])
def test_the_value_is_that_of_predict(side, weighting, components, budget):
    source = World()
    chosen = protocol(side=side, weighting=weighting, components=components, match={"token": 1.0, "pooled": 0.5})
    got = select(source, chosen, request(budget, "sciq=2,boolq=1"))
    want = utilities(source, chosen, [got.row_index], ["sciq", "boolq"])[0]
    np.testing.assert_allclose([got.utility["sciq"], got.utility["boolq"]], want, rtol=1e-6, atol=1e-9)
    assert got.value == pytest.approx(want @ [2 / 3, 1 / 3], rel=1e-6, abs=1e-9)
    assert got.curve.value[-1] == got.value
    assert got.curve.rows[-1] == len(got.row_index)
    assert got.n_tokens == got.curve.tokens[-1] == source.tokens[got.row_index].sum()


def test_the_curve_is_that_of_predict_at_every_place():
    source, chosen = World(), protocol(components=GEOMETRY)
    got = select(source, chosen, request("30", "sciq=1,boolq=3"))
    prefixes = [got.row_index[:rows] for rows in got.curve.rows]
    want_BT = utilities(source, chosen, prefixes, ["sciq", "boolq"])
    assert len(prefixes) == 30
    np.testing.assert_allclose(got.curve.per_target, want_BT, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(got.curve.value, want_BT @ [0.25, 0.75], rtol=1e-6, atol=1e-6)
    assert got.curve.peak == int(np.argmax(got.curve.value))


def test_the_calibration_that_is_given_standardises():
    source, chosen = World(), protocol(components=GEOMETRY)
    family = CalibrationFamily(parse_family("mixture:topic"), 12, 0, source.labels)
    got = select(source, chosen, request(), calibration=family)
    want = utilities(source, chosen, [got.row_index], ["sciq"], family)
    assert got.value == pytest.approx(want[0, 0], rel=1e-6)
    assert got.calibration == "mixture:topic, 12 subsets, seed 0"


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 5),
    omega=st.floats(-3.0, -0.05),
    cap=st.integers(2, 9),
    side=st.sampled_from(["retained", "omitted"]),
    kind=st.sampled_from(["raw", "pair", "cent"]),
)
def test_no_subset_of_as_many_rows_exceeds_the_bound(seed, size, omega, cap, side, kind):
    """Sketches of any direction: the bound needs no alignment."""
    rng = np.random.default_rng(seed)
    source = planted(rng.standard_normal((9, 3)), rng.standard_normal(9), seed=seed)
    source.topics = ["a", "b", "c"] * 3
    assume(3 * min(cap, 3) >= size)
    chosen = protocol(components={f"product.{kind}": omega}, side=side)
    got = select(source, chosen, request(str(size), labels=source.labels, caps=parse_bounds([str(cap)], "--cap")))
    best = best_subset(
        source, chosen, size, allowed=lambda rows: max(sum(i % 3 == t for i in rows) for t in range(3)) <= cap
    )
    assert got.certificate.bound is not None
    assert got.value - 1e-6 <= best <= got.certificate.bound + 1e-5 * (1 + abs(best))


def test_the_bound_is_close_where_there_are_many_rows():
    rng = np.random.default_rng(0)
    source = planted(rng.standard_normal((500, 4)) + 0.3, rng.standard_normal(500))
    got = select(source, protocol(components={"product.raw": -0.5}), request("100"))
    random = select(source, protocol(), request("500")).value
    assert got.certificate.gap is not None
    assert got.certificate.gap < 0.02 * (got.value - random)


def test_more_steps_never_loosen_the_bound():
    rng = np.random.default_rng(1)
    source = planted(rng.standard_normal((60, 3)), rng.standard_normal(60))
    objective = Objective.of(source, scorer_of(source, protocol(components={"product.raw": -4.0})), np.ones(1), 12)
    limits = Limits.of(Amount(12, False), np.ones(60, dtype=bool))
    rows = choose(objective, limits).row_index
    bounds = [upper_bound(objective, limits, rows, steps)[0] for steps in (1, 2, 8, 40)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] < bounds[0]


def test_without_geometry_the_selection_is_proven_optimal():
    source, chosen = World(), protocol()
    got = select(source, chosen, request("4"))
    rows = np.argsort(-source.arrays["relevance_token"][:, [0, 2, 4]].mean(axis=1))[:9]
    assert got.value == pytest.approx(best_subset(source, chosen, 4, rows), rel=1e-6)
    assert got.certificate.bound == pytest.approx(got.value, rel=1e-6)
    assert guarantee(got) == "optimal: the protocol is additive"


def test_what_is_proven_depends_on_the_pool():
    rng = np.random.default_rng(0)
    aligned = planted(np.abs(rng.standard_normal((12, 3))), rng.random(12) + 3)
    crossed = planted(rng.standard_normal((12, 3)), rng.random(12) + 3)
    penalty = protocol(components={"product.raw": -0.1}, weighting="count")
    assert guarantee(select(aligned, penalty, request("3"))).startswith("at least 1 - 1/e of the best gain")
    assert guarantee(select(crossed, penalty, request("3"))).startswith(
        "no selection of as many rows exceeds the bound"
    )
    reward = select(crossed, protocol(components={"product.raw": 0.1}), request("3"))
    assert reward.certificate.bound is None
    assert guarantee(reward) == "no upper bound: a part of the geometry is rewarded: V is not concave"
    assert "rewards a part of the geometry" in reward.notes[0]


@pytest.mark.parametrize("seed", range(5))
def test_aligned_is_what_the_proposition_asks_for(seed):
    rng = np.random.default_rng(seed)
    sketch_ND = np.abs(rng.standard_normal((30, 3))) - 0.12 * seed
    source = planted(sketch_ND, rng.random(30))
    objective = Objective.of(source, scorer_of(source, protocol(components={"product.raw": -1.0})), np.ones(1), 5)
    limits = Limits.of(Amount(5, False), np.arange(30) != 3)
    kept = np.delete(sketch_ND.astype("f4"), 3, axis=0)
    assert is_aligned(objective, limits) == bool((kept @ kept.T >= 0).all())


def test_floors_caps_exclusions_and_what_is_said_of_them():
    source = World()
    excluded_N = np.arange(40) < 6
    got = select(
        source,
        protocol(components=GEOMETRY),
        request(
            "50%",
            labels=source.labels,
            floors=parse_bounds(["games:25%", "travel:1"], "--floor"),
            caps=parse_bounds(["science:2"], "--cap"),
            excluded_N=excluded_N,
        ),
    )
    topics = [source.topics[i] for i in got.row_index]
    share = {one.value: one for one in got.labels}
    assert not excluded_N[got.row_index].any()
    assert got.n_excluded == 6
    assert {name: one.taken for name, one in share.items()} == {
        "games": topics.count("games"),
        "science": topics.count("science"),
        "(no label)": topics.count(None),
        "travel": topics.count("travel"),
    }
    assert topics.count("games") >= 5
    assert topics.count("science") <= 2
    assert (share["games"].floor, share["science"].cap, share["travel"].cap) == (5, 2, 20)


def test_under_count_the_curve_may_peak_before_the_budget():
    source = planted(np.zeros((6, 1)), [3.0, 2.0, 1.0, -1.0, -2.0, -3.0])
    got = select(source, protocol(weighting="count"), request("6"))
    assert got.curve.rows[got.curve.peak] == 3
    assert got.notes[-1].startswith("the value is highest at 3 rows and falls after them")
    assert not select(source, protocol(), request("6")).notes  # the mean falls from the first row on: nothing to say


def test_the_summary_is_plain_json():
    source = World()
    got = select(source, protocol(components=GEOMETRY), request("10", labels=source.labels))
    summary = json.loads(json.dumps(got.summary(), allow_nan=False))
    assert summary["value"] == got.value
    assert summary["curve"]["rows"] == list(range(1, 11))
    assert summary["rows"] == 10
    assert len(summary["labels"]) == 4


@pytest.mark.parametrize(
    ("names", "component"),
    [
        (["hidden_sketch", "residual_sketch", "product_sketch"], "joint.raw"),
        (["product_sketch", "hidden_sketch"], "product.raw"),
        (["hidden_sketch"], "hidden.raw"),
    ],
)
def test_diversity_is_a_penalty_on_the_sketches_that_are_there(names, component):
    chosen = with_diversity(protocol(components={"joint.cent": 0.2}, selected_on=("env/sciq",)), 0.5, names)
    assert dict(chosen.components) == {component: -0.5}
    assert chosen.selected_on is None
    assert dict(with_diversity(chosen, 0.0, names).components) == {}


def test_a_selection_in_tokens_is_scored_at_the_number_of_rows_it_has():
    source = World(n_rows=200, seed=3)
    chosen = protocol(components={"joint.raw": -0.3})
    got = select(source, chosen, request("2ktokens"))
    assert 2_000 - source.tokens.max() < got.n_tokens <= 2_000
    weights_T = np.ones(1)
    objective = Objective.of(source, scorer_of(source, chosen, ["sciq"]), weights_T, len(got.row_index))
    assert objective.constant + got.gain.sum() == pytest.approx(got.value, rel=0.02)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"budget": "41"}, "--budget: got 41 rows, the pool has 40; ask for less"),
        ({"budget": "1%"}, "--budget: comes to 0 of 40 rows, expected room for one row at least; ask for more"),
        ({"budget": "3tokens"}, "--budget: comes to 3 of "),
        ({"budget": "1Mtokens"}, r"--budget: got 1,000,000 tokens, the pool has [\d,]+; ask for less"),
        ({"budget": "36", "excluded": 5}, "--budget: got 36 rows, the pool has 35 of 40, the others being excluded"),
        ({"floors": ["games:99"], "budget": "100%"}, r"--floor: cannot be met: games needs 99 rows, the pool has \d+"),
        ({"floors": ["games:3", "travel:3", "science:3"]}, "together they take 9 rows, the budget is 8"),
        ({"floors": ["games:3"], "caps": ["2"]}, "games has a floor of 3 and a cap of 2 rows; lower them"),
        ({"caps": ["1"]}, "--cap: leaves room for 4 rows, the budget is 8; raise the caps, or lower the budget"),
        ({"floors": ["sport:1"]}, r"--floor: topic has no value 'sport'; it has games, science, \(no label\), travel"),
        ({"floors": ["games:10tokens"]}, "--floor games: is in tokens, the budget is in rows; use one unit"),
        ({"floors": ["games:1"], "labels": None}, "--floor, --cap: need a label; name it with --by"),
        (
            {"budget": "500tokens", "floors": ["games:100"], "caps": ["games:110"]},
            r"games has a floor of 100 and a cap of 110 tokens, closer than its longest row of \d+",
        ),
    ],
)
def test_what_cannot_be_met_is_told_in_one_line(change, said):
    source = World()
    excluded_N = np.arange(40) < change.get("excluded", 0)
    asked = request(
        change.get("budget", "20%"),
        labels=change.get("labels", source.labels),
        floors=parse_bounds(change.get("floors", ()), "--floor"),
        caps=parse_bounds(change.get("caps", ()), "--cap"),
        excluded_N=excluded_N,
    )
    with pytest.raises(SettingsError, match=said) as caught:
        select(source, protocol(), asked)
    assert "\n" not in str(caught.value)


def test_floors_that_cannot_be_met_are_all_named():
    source = World()
    floors = parse_bounds([f"{name}:30" for name in ("games", "science", "travel")], "--floor")
    with pytest.raises(SettingsError, match=r"games needs 30.*; science needs 30.*; travel needs 30.*; together"):
        select(source, protocol(), request(labels=source.labels, floors=floors))


def test_a_target_that_is_unknown_or_empty_is_refused():
    with pytest.raises(ProtocolError, match=r"targets: got \['arc'\], the artifact has \['sciq', 'boolq'\]"):
        select(World(), protocol(), request(targets="arc"))
    source = World()
    source.unit_columns = lambda target: np.empty(0, dtype=int)
    with pytest.raises(ProtocolError, match="targets: sciq: has no units, expected one at least; leave it out"):
        select(source, protocol(), request())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0", "--budget: got '0', expected more than nothing"),
        ("0%", "--budget: got '0%', expected more than nothing"),
        ("0.2", "--budget: got '0.2'; a share is written with a percent sign"),
        ("120%", "--budget: got 120%, expected at most 100%"),
        ("many", "--budget: got 'many', expected e.g. 20%, 5000, 5000rows, 2Mtokens or 20%tokens"),
        ("-5", "--budget: got '-5', expected e.g."),
    ],
)
def test_budgets_that_are_none(text, said):
    with pytest.raises(SettingsError, match=said):
        parse_budget(text)


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("20%", Amount(0.2, True)),
        ("5000", Amount(5000, False)),
        ("5k rows", Amount(5000, False, "rows")),
        ("1.5Mtokens", Amount(1_500_000, False, "tokens")),
        ("12.5% tokens", Amount(0.125, True, "tokens")),
        ("1row", Amount(1, False, "rows")),
    ],
)
def test_budgets(text, amount):
    assert parse_budget(text) == amount


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "--target: got '', expected targets"),
        ("sciq=0", "--target: got 'sciq=0', expected a target, or target=weight with a weight above 0"),
        ("sciq=-1", "weight above 0"),
        ("sciq=x", "weight above 0"),
        ("sciq=inf", "weight above 0"),
        ("sciq,sciq=2", "--target: got sciq more than once"),
    ],
)
def test_targets_that_are_none(text, said):
    with pytest.raises(SettingsError, match=said):
        parse_targets(text)


def test_targets_and_their_weights():
    assert parse_targets("sciq") == {"sciq": 1.0}
    assert parse_targets(" sciq=3, boolq ") == {"sciq": 0.75, "boolq": 0.25}


def test_floors_name_values_that_hold_colons():
    (bound,) = parse_bounds(["a: b:5%"], "--floor")
    assert (bound.value, bound.amount) == ("a: b", Amount(0.05, True))
    with pytest.raises(SettingsError, match="--floor: got games more than once; give every value one floor"):
        parse_bounds(["games:1", "games:2"], "--floor")
    with pytest.raises(SettingsError, match=r"--cap games:lots: got 'lots', expected e.g. 5%, 500, Games:5%"):
        parse_bounds(["games:lots"], "--cap")


@pytest.mark.parametrize(("weight", "names"), [(-1.0, ["hidden_sketch"]), (float("nan"), []), (0.5, [])])
def test_a_diversity_that_is_none(weight, names):
    with pytest.raises(SettingsError, match="--diversity: "):
        with_diversity(protocol(), weight, names)


def test_many_values_of_a_label_are_capped_at_once():
    source = World()
    labels = LabelColumn.of([f"host{i}" for i in range(40)], "host")
    got = select(source, protocol(), request("40", labels=labels, caps=parse_bounds(["1"], "--cap")))
    assert len(got.row_index) == 40
    assert all(one.taken == 1 for one in got.labels)
    assert list(itertools.islice((one.value for one in got.labels), 2)) == ["host0", "host1"]
