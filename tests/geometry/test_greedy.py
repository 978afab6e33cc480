"""Greedy choice: optimal where gains are constant, within 1 - 1/e on aligned pools, exact gains, limits that hold."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grasp.artifact.label_table import LabelColumn
from grasp.geometry import greedy
from grasp.geometry.greedy import select_greedily
from grasp.geometry.set_objective import Objective
from grasp.select.budget import Amount, Constraints, best_items, parse_bounds, parse_budget
from grasp.select.select import select
from tests.select.world import World, planted, predictor_of, protocol

PENALTY = {"product.raw": -0.5}


def objective_of(source, size, chosen=None) -> Objective:
    predictor = predictor_of(source, chosen or protocol(components=PENALTY), source.targets[:1])
    return Objective.from_predictor(predictor, np.ones(1), size)


def limits_of(source, budget, *, floors=(), caps=(), labels=None, allowed_N=None) -> Constraints:
    return Constraints.from_budget(
        parse_budget(str(budget)),
        np.ones(source.n_rows, dtype=bool) if allowed_N is None else allowed_N,
        tokens_M=np.asarray(source.tokens),
        labels=labels or (source.labels if floors or caps else None),
        floors=parse_bounds(floors, "floor"),
        caps=parse_bounds(caps, "cap"),
    )


def gain_sum(objective, rows) -> float:
    """F(S) = V(S) - V(nothing), both with the factor of the size asked for."""
    linear = float(objective.linear_N[list(rows)].sum())
    if not objective.curvature:
        return linear
    sketch_D = objective.rows(np.asarray(rows, dtype=np.int64)).sum(axis=0)
    return objective.value(linear, sketch_D) - objective.constant


def taken_of(objective, limits) -> tuple[np.ndarray, int]:
    """Return the selected rows by the algorithm of the protocol, and their cost."""
    if objective.curvature:
        picks = select_greedily(objective, limits)
        return picks.row_index, picks.used
    rows = best_items(objective.linear_N, limits)
    return rows, int(limits.cost_M[rows].sum())


def slow_greedy(objective, size) -> list[int]:
    """Try every row at every step."""
    selected: list[int] = []
    for _ in range(size):
        left = [k for k in range(len(objective.linear_N)) if k not in selected]
        selected.append(max(left, key=lambda k: (round(gain_sum(objective, [*selected, k]), 10), -k)))
    return selected


@pytest.mark.parametrize("weighting", ["mean", "count"])
@pytest.mark.parametrize("side", ["retained", "omitted"])
def test_the_search_equals_the_slow_greedy_with_exact_gains(weighting, side):
    source = World()
    chosen = protocol(weighting=weighting, side=side, components={"joint.raw": -0.4, "product.cent": -0.2})
    objective = objective_of(source, 9, chosen)
    picks = select_greedily(objective, limits_of(source, 9))
    assert picks.row_index.tolist() == slow_greedy(objective, 9)
    assert picks.is_exhaustive
    sums = [gain_sum(objective, picks.row_index[:k]) for k in range(1, 10)]
    np.testing.assert_allclose(np.cumsum(picks.gain), sums, rtol=1e-9, atol=1e-12)


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), size=st.integers(1, 4), strength=st.floats(0.05, 3.0))
def test_greedy_reaches_1_minus_1_over_e_on_aligned_pools(seed, size, strength):
    rng = np.random.default_rng(seed)
    sketch_ND = np.abs(rng.standard_normal((9, 3)))
    source = planted(sketch_ND, rng.random(9) * 3.0 + 1.0)
    objective = objective_of(source, size, protocol(components={"product.raw": -strength}, weighting="count"))
    best = max(gain_sum(objective, rows) for rows in itertools.combinations(range(9), size))
    picks = select_greedily(objective, limits_of(source, size))
    assume((picks.gain >= 0).all())  # monotone as far as it goes
    assert gain_sum(objective, picks.row_index) >= (1 - 1 / math.e) * best - 1e-9


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(2, 6),
    floor=st.integers(0, 2),
    cap=st.integers(1, 4),
    side=st.sampled_from(["retained", "omitted"]),
)
def test_without_curvature_the_selection_is_optimal_within_floors_and_caps(seed, size, floor, cap, side):
    rng = np.random.default_rng(seed)
    source = World(n_rows=9, seed=seed)
    source.topics = [("a", "b", "c")[i] for i in np.append([0, 1, 2], rng.integers(0, 3, 6))]
    counts = {topic: source.topics.count(topic) for topic in "abc"}
    assume(floor <= min(cap, counts["a"]) and floor <= size and sum(min(cap, n) for n in counts.values()) >= size)
    objective = objective_of(source, size, protocol(components={"joint.self": -0.5}, side=side))
    rows = best_items(objective.linear_N, limits_of(source, size, floors=[f"a:{floor}"], caps=[str(cap)]))

    def is_feasible(rows):
        topics = [source.topics[i] for i in rows]
        return topics.count("a") >= floor and max(topics.count(topic) for topic in "abc") <= cap

    assert is_feasible(rows)
    best = max(gain_sum(objective, rows) for rows in itertools.combinations(range(9), size) if is_feasible(rows))
    assert float(objective.linear_N[rows].sum()) == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert (np.diff(objective.linear_N[rows]) <= 0).all()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(8, 30),
    floor=st.integers(0, 3),
    cap=st.integers(6, 12),
    excluded=st.integers(0, 3),
    omega=st.sampled_from([0.0, -0.5, 0.5]),
    weighting=st.sampled_from(["mean", "count"]),
)
def test_limits_in_rows_hold_exactly_and_the_budget_is_used_up(seed, budget, floor, cap, excluded, omega, weighting):
    source = World(seed=seed)
    allowed_N = np.arange(40) >= excluded
    counts = np.bincount(source.labels.codes_N[allowed_N], minlength=4)
    floors = [f"games:{floor}", f"(no label):{floor}"]
    assume(counts.min() >= floor and np.minimum(counts, cap).sum() >= budget)
    chosen = protocol(components={"joint.raw": omega}, weighting=weighting)
    objective = objective_of(source, budget, chosen)
    rows, used = taken_of(objective, limits_of(source, budget, floors=floors, caps=[str(cap)], allowed_N=allowed_N))
    assert allowed_N[rows].all()
    selected = [source.topics[i] for i in rows]
    assert len(set(rows.tolist())) == len(selected) == used == budget
    assert min(selected.count("games"), selected.count(None)) >= floor
    assert max(selected.count(topic) for topic in set(selected)) <= cap


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(400, 1000),
    floor=st.integers(0, 60),
    omega=st.sampled_from([0.0, -0.5]),
    weighting=st.sampled_from(["mean", "count"]),
)
def test_floors_and_caps_in_tokens_hold_exactly(seed, budget, floor, omega, weighting):
    source = World(seed=seed)
    held = {
        topic: sum(t for t, value in zip(source.tokens, source.topics, strict=True) if value == topic)
        for topic in ("games", "science")
    }
    limit = sum(source.tokens) - max(0, held["science"] - 150)  # a budget beyond it is refused
    assume(held["games"] >= floor and limit >= budget)
    chosen = protocol(components={"joint.raw": omega}, weighting=weighting)
    requested = f"{budget}tokens"
    limits = limits_of(source, requested, floors=[f"games:{floor}"], caps=["science:150tokens"])
    rows, spent = taken_of(objective_of(source, 20, chosen), limits)
    tokens = {topic: sum(int(source.tokens[i]) for i in rows if source.topics[i] == topic) for topic in held}
    used = int(source.tokens[rows].sum())
    assert spent == used <= budget
    assert tokens["games"] >= floor
    assert tokens["science"] <= 150
    left = np.setdiff1d(np.arange(40), rows)
    fits = [
        int(source.tokens[i]) <= budget - used
        and (source.topics[i] != "science" or tokens["science"] + int(source.tokens[i]) <= 150)
        for i in left
    ]
    assert not any(fits)  # no row that could be added was left out


def test_tokens_are_spent_by_gain_a_token_under_count_and_by_gain_under_mean():
    source = planted(np.zeros((4, 2)), [4.0, 3.0, 2.5, 2.0])
    source.tokens = np.array([40, 10, 10, 10])
    for weighting, want in (("count", [1, 2, 3]), ("mean", [0, 1])):
        result = select(source, "50tokens", "sciq", protocol=protocol(weighting=weighting))
        assert result.row_index.tolist() == want


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), budget=st.integers(1, 300))
def test_rows_that_do_not_fit_are_skipped(seed, budget):
    rng = np.random.default_rng(seed)
    worth_N, cost_N = rng.integers(0, 5, 30).astype(float), rng.integers(1, 40, 30)
    limits = Constraints.from_budget(
        Amount(max(budget, int(cost_N.min())), False, "tokens"), np.ones(30, dtype=bool), tokens_M=cost_N
    )
    limit, want = limits.budget, []
    for row in np.argsort(-worth_N, kind="stable").tolist():
        if cost_N[row] <= limit:
            limit -= cost_N[row]
            want.append(row)
    assert best_items(worth_N, limits).tolist() == want


def small_rounds(patch) -> None:
    """Rounds with small pools, so that a few hundred rows take many of them."""
    for name, value in (("EXHAUSTIVE_ROWS", 0), ("INNER_ROWS", 24), ("INNER_BLOCK", 4), ("SENTINELS", 6)):
        patch.setattr(greedy, name, value)


def clustered(seed, n_rows=400) -> World:
    rng = np.random.default_rng(seed)
    centre = rng.standard_normal((12, 6))
    of = rng.integers(0, 12, n_rows)
    sketch_ND = centre[of] + 0.4 * rng.standard_normal((n_rows, 6))
    return planted(sketch_ND, rng.standard_normal(12)[of] + rng.standard_normal(n_rows), seed=seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("omega", [-0.1, -1.0, 0.3])
def test_rounds_come_close_to_the_row_by_row_search(seed, omega, monkeypatch):
    small_rounds(monkeypatch)
    source = clustered(seed)
    objective = objective_of(source, 80, protocol(components={"product.raw": omega}))
    result = select_greedily(objective, limits_of(source, 80))
    assert not result.is_exhaustive
    assert result.rounds > 5
    monkeypatch.setattr(greedy, "EXHAUSTIVE_ROWS", 10_000)
    best = gain_sum(objective, select_greedily(objective, limits_of(source, 80)).row_index)
    plain = gain_sum(objective, np.argsort(-objective.linear_N)[:80])
    assert len(result.row_index) == 80
    assert gain_sum(objective, result.row_index) >= best - 0.02 * abs(best)
    assert gain_sum(objective, result.row_index) >= plain
    sums = [gain_sum(objective, result.row_index[:k]) for k in (1, 40, 80)]
    np.testing.assert_allclose(np.cumsum(result.gain)[[0, 39, 79]], sums, rtol=1e-9)


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), floor=st.integers(0, 9), budget=st.sampled_from(["90", "40%", "1500tokens"]))
def test_rounds_respect_the_limits(seed, floor, budget):
    source = clustered(seed, 200)
    unit_cap = "500" if "tokens" in budget else "30"
    floors, caps = [f"games:{floor}", "travel:1%"], [f"science:{unit_cap}"]
    with pytest.MonkeyPatch.context() as patch:
        small_rounds(patch)
        limits = limits_of(source, budget, floors=floors, caps=caps)
        picks = select_greedily(objective_of(source, 60), limits)
    cost_N = source.tokens if "tokens" in budget else np.ones(200, dtype=int)
    spent = {t: int(cost_N[[i for i in picks.row_index if source.topics[i] == t]].sum()) for t in source.labels.values}
    assert spent["games"] >= floor
    assert spent["science"] <= int(unit_cap)
    assert limits.budget - picks.used < cost_N.max()
    assert len(set(picks.row_index.tolist())) == len(picks.row_index)


@pytest.mark.parametrize("small", [True, False])
def test_a_penalty_on_geometry_removes_duplicates(small, monkeypatch):
    """Sixty copies of the most relevant row, and clusters: additive takes every copy, a penalty a few of them."""
    rng = np.random.default_rng(0)
    if not small:
        small_rounds(monkeypatch)
    sketch_ND = rng.standard_normal((300, 6)) / np.sqrt(6)
    sketch_ND[:60] = [1.5, 0, 0, 0, 0, 0]
    relevance_N = rng.random(300)
    relevance_N[:60] = 1.2
    source = planted(sketch_ND, relevance_N)
    copies = []
    for omega in (0.0, -0.3, -3.0):
        objective = objective_of(source, 75, protocol(components={"product.raw": omega}))
        rows, _ = taken_of(objective, limits_of(source, 75))
        copies.append(int((rows < 60).sum()))
    assert copies[0] == 60
    assert copies[0] > copies[1] > copies[2]
    assert copies[2] < 75 * 60 / 300  # fewer than a blind draw would take
    assert rows[rows < 60].tolist() == list(range(copies[2]))  # of equals the first ones


def test_ties_go_to_the_earlier_row_and_a_second_run_gives_the_same():
    source = planted(np.ones((50, 2)), np.ones(50))
    for omega in (0.0, -0.5):
        objective = objective_of(source, 10, protocol(components={"product.cent": omega, "product.self": omega}))
        assert taken_of(objective, limits_of(source, 10))[0].tolist() == list(range(10))
    source = clustered(3)
    objective = objective_of(source, 50)
    first, second = (select_greedily(objective, limits_of(source, 50)) for _ in range(2))
    np.testing.assert_array_equal(first.row_index, second.row_index)
    np.testing.assert_array_equal(first.gain, second.gain)


def test_a_label_with_one_value_is_one_group():
    source = World()
    limits = limits_of(source, 4, caps=["x:4"], labels=LabelColumn.from_values(["x"] * 40, "topic"))
    assert limits.values == ("x",)
    assert Amount(0.25, True).resolve(10) == 2
    assert Amount(0.25, True).resolve(10, up=True) == 3


@pytest.mark.parametrize("iterations", [1, 2, 4])
def test_the_bound_is_for_the_number_of_selected_rows_also_if_sizes_do_not_converge(iterations, monkeypatch):
    monkeypatch.setattr(greedy, "MAX_SIZE_ITERATIONS", iterations)
    source = World()
    source.tokens = np.r_[np.full(20, 5), np.full(len(source.tokens) - 20, 60)]  # far from their mean
    chosen = protocol(components={"joint.raw": -0.5})
    predictor = predictor_of(source, chosen, ["sciq"])
    limits = limits_of(source, "300tokens")
    weights_T = np.ones(1)
    objective, selection = greedy._select_at_size(predictor, weights_T, limits, None)
    expected = Objective.from_predictor(predictor, weights_T, len(selection.row_index))
    np.testing.assert_array_equal(objective.linear_N, expected.linear_N)
    assert objective.curvature == expected.curvature
