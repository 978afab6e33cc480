"""Selections: numbers equal those of the predictor, the bound holds, invalid input is refused in one line."""

import contextlib
import itertools
import json
import re

import numpy as np
import pytest

from grasp.api.score import score
from grasp.artifact.rows import ranked
from grasp.errors import SettingsError
from grasp.predict.predictor import NEW_ROW_VALUE, RepetitionLaw
from grasp.select.budget import Amount, Constraints, parse_budget, parse_tokens, take_within_budget
from grasp.select.items import Items
from grasp.select.objective import weighted_targets
from grasp.select.ranking import token_guarantee
from grasp.select.select import select
from tests.select.world import World, best_subset, changes, predictor_of, protocol

GEOMETRY = {"joint.pair": -0.25, "hidden.cent": -0.1, "product.raw": -0.1}


def selected(source, chosen, budget="20%", target="sciq", **options):
    return select(source, budget, target, protocol=chosen, **options)


def repeated(change, share, epochs):
    """A change of plain rows, less what repetition takes where so much is kept and read so often."""
    left = share * RepetitionLaw(epochs)(1 / share)
    return left * (change + NEW_ROW_VALUE) - NEW_ROW_VALUE


@pytest.mark.parametrize("components", [{}, GEOMETRY])
@pytest.mark.parametrize("budget", ["20%", "40", "700tokens"])
def test_the_change_equals_that_of_predict_by_the_additive_part(components, budget):
    source = World()
    chosen = protocol(components=components, match={"output_layer": 1.0, "pooled": 0.5})
    got = selected(source, chosen, budget, "sciq=2,boolq=1")
    assert any("selected by its additive part" in note for note in got.notes) == bool(components)
    want = changes(source, chosen.additive, [got.row_index], ["sciq", "boolq"])[0]
    np.testing.assert_allclose(got.targets["change"].to_pylist(), want, rtol=1e-6, atol=1e-6)
    assert got.targets["weight"].to_pylist() == [2 / 3, 1 / 3]
    assert got.value == pytest.approx(want @ [2 / 3, 1 / 3], rel=1e-6, abs=1e-6)
    assert got.n_tokens == source.tokens[got.row_index].sum()
    assert got.row_ids == [f"r{i}" for i in got.row_index]
    place = got.curve.rows.index(len(got))
    assert got.curve.value[place] == pytest.approx(got.value, rel=1e-6, abs=1e-6)
    assert got.curve.tokens[place] == got.n_tokens


def test_rows_are_in_the_order_of_score():
    source, chosen = World(), protocol(match={"output_layer": 1.0, "embedding": 1.0}, negative=0.25)
    got = selected(source, chosen, "15")
    assert got.row_ids == score(source, "sciq", protocol=chosen).table["row_id"].to_pylist()[:15]


def test_the_curve_shows_the_last_row_and_all_rows_at_every_budget():
    source, chosen = World(), protocol()
    got = selected(source, chosen, "10", "sciq=1,boolq=3")
    effect_N = predictor_of(source, chosen, ["sciq", "boolq"]).effect_NT @ [0.25, 0.75]
    order = np.argsort(-effect_N, kind="stable")
    assert got.curve.rows == tuple(range(1, 41))
    np.testing.assert_allclose(got.curve.effect, effect_N[order], rtol=1e-6)
    means = np.cumsum(effect_N[order]) / np.arange(1, 41)
    np.testing.assert_allclose(got.curve.value, means, rtol=1e-5, atol=1e-6)
    above = int((effect_N > 0).sum())
    assert f"{above:,} of the 40 candidate rows are above the corpus average" in got.notes
    assert "last row" in got._shown_curve()
    assert got.table.column_names[3:5] == ["order", "effect"]


@pytest.mark.parametrize("epochs", [0.05, 0.5, 3.0])
def test_the_proposed_budget_has_the_highest_value_of_all(epochs):
    """Every number of rows tried; the formula by hand."""
    source, chosen = World(n_rows=300), protocol()
    source.tokens = np.full(300, 20)
    trained = epochs * 6000
    got = selected(source, chosen, None, train_tokens=f"{trained:.0f}")
    effect_N = predictor_of(source, chosen, ["sciq"]).effect_NT[:, 0].astype(float)
    means = np.cumsum(np.sort(effect_N)[::-1]) / np.arange(1, 301)
    values = repeated(means, np.arange(1, 301) / 300, epochs)
    assert len(got) == int(np.argmax(values)) + 1
    assert got.value == pytest.approx(float(values.max()), rel=1e-5)
    assert any(f"budget: {len(got)} rows" in note for note in got.notes)
    assert f"{trained / got.n_tokens:.2g} epochs in" in got.headline
    half, repeats = (selected(source, chosen, "50%", train_tokens=t).value for t in (None, int(trained)))
    assert repeats < half if epochs > 0.5 else repeats == pytest.approx(half)


def test_a_budget_is_proposed_within_floors_and_caps():
    """Every number of rows tried."""
    source, chosen = World(n_rows=200), protocol()
    limits = {"by": "topic", "floor": ["travel:5%"], "cap": ["games:20%", "science:50%"], "train_tokens": "2k"}
    got = selected(source, chosen, None, **limits)
    values = {}
    for size in range(1, 201):
        with contextlib.suppress(SettingsError):  # few rows cannot meet the floor, many not the caps
            values[size] = selected(source, chosen, str(size), **limits).value
    assert got.value >= 0.999 * max(values.values())
    assert got.value == pytest.approx(values[len(got)])
    assert any(f"budget: {len(got)} rows" in note for note in got.notes)


def test_the_selection_is_proven_optimal():
    source, chosen = World(), protocol()
    got = selected(source, chosen, "4")
    rows = np.argsort(-source.arrays["relevance_output_layer"][:, [0, 2, 4]].mean(axis=1))[:9]
    assert got.value == pytest.approx(best_subset(source, chosen, 4, rows), rel=1e-5)
    assert got.guarantee.startswith("optimal: ")


@pytest.mark.parametrize("seed", range(5))
def test_a_budget_in_tokens_reports_the_gap_to_the_highest_mean_effect_of_tokens(seed):
    rng = np.random.default_rng(seed)
    cost_N, worth_N = rng.integers(1, 20, 12), rng.standard_normal(12)
    items = Items.of_rows(worth_N, np.ones(12, dtype=bool), cost_N, None)
    limits = Constraints.from_budget(Amount(40, False, "tokens"), items, {}, {})
    picked = take_within_budget(ranked(worth_N), limits)
    guarantee = token_guarantee(worth_N, picked, limits)
    mean, most = (float(number) for number in re.findall(r"[-+][\d.]+(?=, at most| for any)", guarantee))
    used = int(cost_N[picked].sum())
    assert mean == pytest.approx(cost_N[picked] @ worth_N[picked] / used, abs=1e-3)
    every = (np.array(combination) for size in range(1, 13) for combination in itertools.combinations(range(12), size))
    best = max(
        cost_N[combination] @ worth_N[combination] / used for combination in every if cost_N[combination].sum() == used
    )
    assert mean <= best + 1e-3
    assert best <= most + 1e-3
    assert "by effect until" in guarantee
    assert "optimal" not in guarantee


def test_floors_caps_and_exclusions_are_respected_and_reported():
    source = World()
    seen = [f"r{i}" for i in range(6)]
    got = selected(
        source,
        protocol(),
        "50%",
        by="topic",
        floor=["games:25%", "travel:1"],
        cap=["science:2"],
        exclude=seen,
    )
    topics = [source.topics[i] for i in got.row_index]
    share = {label["value"]: label for label in got.labels.to_pylist()}
    assert not set(got.row_ids) & set(seen)
    assert got.params["excluded_rows"] == 6
    named = {"games": "games", "science": "science", "(no label)": None, "travel": "travel"}
    assert {name: label["selected"] for name, label in share.items()} == {n: topics.count(t) for n, t in named.items()}
    assert topics.count("games") >= 5
    assert topics.count("science") <= 2
    summary = json.loads(json.dumps(got.summary(), allow_nan=False))
    assert (summary["value"], summary["rows"], len(summary["labels"])) == (got.value, 20, 4)
    assert (share["games"]["floor"], share["science"]["cap"], share["travel"]["cap"]) == (5, 2, None)


@pytest.mark.parametrize(
    ("budget", "options", "message"),
    [
        ("41", {}, r"\b41 rows.*\b40\b"),
        (0, {}, "more than"),
        (float("nan"), {}, "share.*int"),
        (2.0, {}, "share.*int"),
        (None, {}, "or train_tokens"),
        (None, {"train_tokens": "1k", "floor": ["games:1", "science:30"]}, r"science.*\b30\b"),
        ("20%", {"train_tokens": "0"}, "train_tokens: got '0'"),
        ("20%", {"train_tokens": "20%"}, "train_tokens: got '20%'"),
        ("1%", {}, r"\b0 of 40 rows"),
        ("3tokens", {}, r"\b3 of "),
        ("1Mtokens", {}, r"\b1,000,000 tokens"),
        ("36", {"exclude": [f"r{i}" for i in range(5)]}, r"\b35 of 40\b"),
        ("8", {"floor": ["games:3", "travel:3", "science:3"]}, r"\b9 rows"),
        ("8", {"floor": ["games:3"], "cap": ["2"]}, r"games.*floor.*\b3\b.*cap.*\b2\b"),
        ("8", {"cap": ["1"]}, r"cap: .*\b4 rows"),
        ("8", {"floor": ["sport:1"]}, "floor: .*topic.*'sport'"),
        ("8", {"floor": ["games:10tokens"]}, "floor games: .*tokens"),
        ("8", {"floor": ["games:1"], "by": None}, "label"),
        ("8", {"floor": ["games:1", "games:2"]}, "games.*once"),
        ("8", {"floor": [f"{name}:30" for name in ("games", "travel")]}, r"games.*\b30.*travel.*\b30"),
        ("500tokens", {"floor": ["games:100"], "cap": ["games:110"]}, "longest row"),
        ("8", {"documents": "some"}, r"documents:.*'some'"),
    ],
)
def test_infeasible_constraints_are_refused_in_one_line(budget, options, message):
    with pytest.raises(SettingsError, match=message) as caught:
        selected(World(), protocol(), budget, **{"by": "topic"} | options)
    assert "\n" not in str(caught.value)


KNOWN = ("sciq", "boolq", "a,b", "a", "x=2", "a=1e308")


@pytest.mark.parametrize(
    ("targets", "want"),
    [
        ("sciq", {"sciq": 1.0}),
        ("sciq=2, boolq = 1", {"sciq": 2 / 3, "boolq": 1 / 3}),
        ("a,b", {"a,b": 1.0}),
        ("a,b=3,sciq", {"a,b": 0.75, "sciq": 0.25}),
        ("a,sciq", {"a": 0.5, "sciq": 0.5}),
        ("x=2=3,sciq=1", {"x=2": 0.75, "sciq": 0.25}),
        ("sciq=1e308,boolq=1e308", {"sciq": 0.5, "boolq": 0.5}),
        (["a,b", "sciq"], {"a,b": 0.5, "sciq": 0.5}),
        ({"sciq": 1e308, "boolq": 1e308}, {"sciq": 0.5, "boolq": 0.5}),
    ],
)
def test_targets_have_their_names_and_weights_sum_to_1(targets, want):
    assert weighted_targets(targets, KNOWN) == want
    assert weighted_targets(None, ["sciq"]) == {"sciq": 1.0}  # the only one need not be named


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arc", "'arc'.*sciq"),
        ("sciq=-1", r"sciq.*weight.*-1\b"),
        ("sciq=nan", "sciq.*weight.*nan"),
        ("sciq=inf", "sciq.*weight.*inf"),
        ("sciq=x", "'sciq=x'"),
        ("sciq,sciq", "sciq.*once"),
        ("", "missing"),
        (None, "missing.*artifact"),
        ("=2", "'=2'"),
    ],
)
def test_invalid_targets_are_refused(text, message):
    with pytest.raises(SettingsError, match=f"^target: .*{message}"):
        weighted_targets(text, KNOWN)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("20%", Amount(0.2, True)),
        ("5000", Amount(5000, False)),
        ("5krows", Amount(5000, False, "rows")),
        ("2Mtokens", Amount(2_000_000, False, "tokens")),
        ("20% tokens", Amount(0.2, True, "tokens")),
        ("300documents", Amount(300, False, "documents")),
        (0.2, Amount(0.2, True)),
        (1.0, Amount(1.0, True)),
        (1, Amount(1, False)),
        (12, Amount(12, False)),
    ],
)
def test_budgets(text, want):
    assert parse_budget(text) == want
    assert [parse_tokens(amount) for amount in ("100B", "2.5T", "3k tokens", 5e9)] == [1e11, 2.5e12, 3000.0, 5e9]


@pytest.mark.parametrize("text", ["", "x", "-5", "1e3", "20%%", "5 apples", "120%", "0.5", "0%", "0", "nan", "1" * 400])
def test_invalid_budgets_are_refused(text):
    with pytest.raises(SettingsError, match=r"^budget: "):
        parse_budget(text)


def test_a_budget_in_documents_takes_the_documents_with_the_best_rows_on_average():
    source = World()
    got = selected(source, protocol(), "5documents", by="topic", exclude=["r0"])
    effect_N = got.effect_N
    mean = {d: effect_N[2 * d : 2 * d + 2].mean() for d in range(1, 20)}  # d0 has an excluded row
    best = sorted(mean, key=lambda d: -mean[d])[:5]
    assert got.row_ids == [f"r{i}" for d in best for i in (2 * d, 2 * d + 1)]
    assert got.params["unit"] == "documents"
    assert sum(label["selected"] for label in got.labels.to_pylist()) == 5
    assert got.guarantee == "whole documents, by the mean effect of their rows"
    assert list(got.curve.effect) == sorted(got.curve.effect, reverse=True)  # of whole documents
    assert "last document" in got._shown_curve()
    assert any("19 candidate documents" in note for note in got.notes)
    assert re.match(
        r"not distinguishable from the whole corpus \(-.*\); keeps 5 documents: 10 of 40 rows", got.headline
    )
    assert not any("in part" in note for note in got.notes)
    assert got.curve.rows[-1] == 38


@pytest.mark.parametrize("budget", ["20%tokens", "50%tokens", "25%", "9", "300tokens"])
def test_whole_documents_fill_a_budget_in_tokens_or_rows(budget):
    source = World()
    got = selected(source, protocol(), budget, documents="all")
    documents = {row_id: int(row_id[1:]) // 2 for row_id in (f"r{i}" for i in range(40))}
    retained = {documents[row_id] for row_id in got.row_ids}
    assert sorted(got.row_ids) == sorted(row_id for row_id, d in documents.items() if d in retained)  # whole ones
    cost = source.tokens if "tokens" in budget else np.ones(40, dtype=int)
    of = np.bincount(np.arange(40) // 2, cost)
    amount = parse_budget(budget).resolve(int(cost.sum()))
    used = sum(of[d] for d in retained)
    assert used <= amount
    assert all(used + of[d] > amount for d in set(range(20)) - retained)  # no other one fits
    assert ("only" in got.headline) == (used < 0.98 * amount)


def test_a_budget_that_looks_like_a_share_gives_a_note():
    source = World(n_rows=2_000)
    first = {budget: selected(source, protocol(), budget).notes[0] for budget in ("20", 20, "20%", "20rows", "21")}
    assert first["20"] == first[20] == "budget: 20 is read as rows, 1.00% of the corpus; for 20 %, pass 20%"
    assert not any(first[budget].startswith("budget:") for budget in ("20%", "20rows", "21"))


@pytest.mark.parametrize("documents", [None, "all"])
def test_a_selection_beyond_the_rows_above_average_recommends_a_smaller_one(documents):
    source, kind = World(), "documents" if documents else "rows"
    got = selected(source, protocol(), "80%", documents=documents)
    above = got.facts.above_average
    count = "16" if documents else "32"
    assert 0 < above < int(count)
    assert got.notes[0] == (
        f"only {above} of the {got.facts.candidates} candidate {kind} are above the corpus average, but {count} are "
        f"selected: --budget {above}{kind} leaves out the others"
    )
    smaller = selected(source, protocol(), f"{above}{kind}", documents=documents)
    assert not any(note.startswith("only") for note in smaller.notes)
    assert smaller.row_ids == got.row_ids[: len(smaller)]
    assert smaller.value > got.value
