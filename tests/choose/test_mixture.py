"""Mixtures: the quadratic is the prediction, the solver's answer is optimal by linear programmes and by brute force."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import csr_array

from grasp.choose.amounts import Amount, parse_bounds, parse_targets
from grasp.choose.mixture import MixRequest, _coefficients, mix_with, write_weights
from grasp.choose.objective import Slopes
from grasp.choose.quadratic_program import Programme, solve
from grasp.errors import ProtocolError, SettingsError
from grasp.predict.blocks import SubsetBlock
from grasp.predict.label_slices import label_slices
from grasp.predict.labels import LabelColumn
from grasp.predict.predictions import predict
from grasp.predict.subset_tables import RowIndex, read_subsets
from tests.choose.world import World, protocol, scorer_of

GEOMETRY = {"joint.raw": -0.4, "product.self": 0.2, "hidden.cent": -0.1, "residual.pair": -0.2}


def slices_of(source, **fields):
    return label_slices(source.labels, source.tokens, **fields)


def request(source, targets="sciq", floors=(), caps=(), distance=None, **fields) -> MixRequest:
    return MixRequest(
        slices_of(source, **fields),
        parse_targets(targets),
        parse_bounds(floors, "--floor"),
        parse_bounds(caps, "--cap"),
        None if distance is None else Amount(distance, True),
    )


def predicted(source, chosen, slices, p_BG, targets) -> np.ndarray:
    """What `predict` says of mixtures as weighted subsets, (B, T)."""
    weights_BN = (source.n_rows * np.asarray(p_BG) / slices.rows_G)[:, slices.codes_N]
    block = SubsetBlock(tuple(f"m{b}" for b in range(len(p_BG))), csr_array(weights_BN))
    table = predict(source, chosen, [block], targets=list(targets)).read()
    return table.column("utility").to_numpy().reshape(len(p_BG), -1)


@pytest.mark.parametrize(("side", "weighting"), [("retained", "mean"), ("retained", "count"), ("omitted", "count")])
def test_the_quadratic_is_the_prediction(side, weighting):
    source = World()
    chosen = protocol(side=side, weighting=weighting, components=GEOMETRY, match={"token": 1.0, "pooled": 0.5})
    scorer, slices = scorer_of(source, chosen), slices_of(source)
    parts = scorer.sums(slices.indicators())
    weights_T = np.array([0.7, 0.3])
    linear_G, quadratic_GG = _coefficients(scorer, Slopes.of(scorer, weights_T), parts, slices.rows_G.astype(float))
    p_BG = np.random.default_rng(0).dirichlet(np.ones(4), 6)
    own_B = p_BG @ linear_G + np.einsum("bg,gh,bh->b", p_BG, quadratic_GG, p_BG)
    want_B = predicted(source, chosen, slices, p_BG, source.targets) @ weights_T
    np.testing.assert_allclose(own_B - own_B[0], want_B - want_B[0], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("side", "weighting"), [("retained", "mean"), ("retained", "count"), ("omitted", "count")])
def test_the_gain_is_that_of_predict_and_nothing_feasible_is_better(side, weighting):
    source = World()
    chosen = protocol(side=side, weighting=weighting, components={"joint.raw": -0.4, "product.cent": -0.2})
    asked = request(source, "sciq=2,boolq=1", floors=["5%"], caps=["games:40%"])
    got = mix_with(scorer_of(source, chosen), asked)
    assert got.is_global
    assert got.proposed_G.sum() == pytest.approx(1.0, abs=1e-12)
    assert got.proposed_G.min() >= 0.05
    assert got.proposed_G[got.names.index("games")] <= 0.4
    want = predicted(source, chosen, asked.slices, [got.proposed_G, got.current_G], ["sciq", "boolq"])
    assert list(got.utility.values()) == pytest.approx(want[0], rel=1e-5, abs=1e-5)
    assert list(got.current_utility.values()) == pytest.approx(want[1], rel=1e-5, abs=1e-5)
    assert got.gain == pytest.approx((want[0] - want[1]) @ [2 / 3, 1 / 3], rel=1e-5, abs=1e-4)
    p_BG = np.random.default_rng(1).dirichlet(np.ones(4), 3000)
    p_BG = p_BG[(p_BG >= 0.05).all(axis=1) & (p_BG[:, got.names.index("games")] <= 0.4)]
    assert len(p_BG) > 100
    others = predicted(source, chosen, asked.slices, p_BG, ["sciq", "boolq"]) @ [2 / 3, 1 / 3]
    assert got.value >= others.max() - 1e-6
    assert got.value - others.max() < 0.2 * (others.max() - np.median(others))  # many tries come near


def feasible(seed, n, *, distance):
    rng = np.random.default_rng(seed)
    current_G = rng.dirichlet(np.ones(n))
    low_G = np.minimum(current_G, rng.random(n) * 0.3 / n)
    high_G = np.minimum(1.0, np.maximum(current_G, rng.random(n)))
    return rng, current_G, low_G, high_G, (float(rng.random()) * 0.5 + 0.01 if distance else None)


def best_linear(programme, worth_G) -> float:
    """max worth'y over what is feasible, by scipy's simplex."""
    n = len(worth_G)
    eye = np.eye(n)
    rows, right = np.empty((0, 2 * n)), np.empty(0)
    if programme.distance is not None:
        rows = np.block([[eye, -eye], [-eye, -eye], [np.zeros((1, n)), np.ones((1, n))]])
        right = np.concatenate([programme.current_G, -programme.current_G, [2 * programme.distance]])
    bounds = [*zip(programme.low_G, programme.high_G, strict=True), *[(0, None)] * n]
    equal = np.concatenate([np.ones((1, n)), np.zeros((1, n))], axis=1)
    found = linprog(
        np.concatenate([-worth_G, np.zeros(n)]),
        A_ub=rows if len(rows) else None,
        b_ub=right if len(rows) else None,
        A_eq=equal,
        b_eq=[1.0],
        bounds=bounds,
    )
    assert found.status == 0
    return -float(found.fun)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(2, 24),
    rank=st.integers(0, 30),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    distance=st.booleans(),
)
def test_at_the_solution_no_feasible_direction_leads_up(seed, n, rank, scale, distance):
    """The first-order condition, which is sufficient for a concave function: max over y of gradient'(y - p) is 0."""
    rng, current_G, low_G, high_G, far = feasible(seed, n, distance=distance)
    root = rng.standard_normal((n, rank))
    programme = Programme(scale * rng.standard_normal(n), -scale * (root @ root.T), low_G, high_G, current_G, far)
    found = solve(programme)
    assert found.is_global
    p_G = found.p_G
    assert p_G.sum() == pytest.approx(1.0, abs=1e-9)
    assert (p_G >= low_G).all()
    assert (p_G <= high_G).all()
    if far is not None:
        assert 0.5 * np.abs(p_G - current_G).sum() <= far + 1e-6
    gradient_G = programme.linear_G + 2 * programme.quadratic_GG @ p_G
    slack = best_linear(programme, gradient_G) - gradient_G @ p_G
    assert slack <= 1e-5 * scale * (1 + rank)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), up=st.floats(0.5, 5.0))
def test_where_the_geometry_is_rewarded_the_best_of_many_starts_is_found(seed, up):
    """Three values, against a fine grid; said to be local."""
    rng, current_G, low_G, high_G, _ = feasible(seed, 3, distance=False)
    root = rng.standard_normal((3, 3))
    quadratic_GG = up * np.outer(root[0], root[0]) - np.outer(root[1], root[1])
    programme = Programme(rng.standard_normal(3), quadratic_GG, low_G, high_G, current_G)
    found = solve(programme)
    assume(np.linalg.eigvalsh(quadratic_GG).max() > 1e-3)
    assert not found.is_global
    steps = np.linspace(0, 1, 101)
    grid = np.array([(a, b, 1 - a - b) for a in steps for b in steps])
    grid = grid[(grid >= low_G).all(axis=1) & (grid <= high_G).all(axis=1)]
    assume(len(grid) > 0)
    best = max(programme.value(p_G) for p_G in grid)
    assert found.value >= best - 1e-6
    assert (found.p_G >= low_G).all()
    assert (found.p_G <= high_G).all()


def test_a_rewarded_geometry_is_said_to_be_solved_locally():
    got = mix_with(scorer_of(World(), protocol(components={"joint.raw": 0.5})), request(World()))
    assert not got.is_global
    assert "the problem is not convex: the best of 38 local searches is shown" in got.notes[0]
    assert got.summary()["optimum"] == "local, best of 38 starts"


def test_without_geometry_the_best_mixture_is_a_corner_and_this_is_said():
    source = World()
    got = mix_with(scorer_of(source, protocol()), request(source))
    relevance_N = source.arrays["relevance_token"][:, [0, 2, 4]].mean(axis=1)
    means = [relevance_N[slices_of(source).codes_N == g].mean() for g in range(4)]
    assert got.proposed_G[int(np.argmax(means))] == 1.0
    assert np.count_nonzero(got.proposed_G) == 1
    assert any(
        note.startswith("the protocol is additive: V is linear and its best mixture a corner") for note in got.notes
    )
    assert any("seen far more often than now" in note for note in got.notes)


@settings(max_examples=25, deadline=None)
@given(distance=st.floats(0.01, 0.9), floor=st.integers(0, 8))
def test_the_distance_and_the_floors_hold(distance, floor):
    source = World()
    got = mix_with(scorer_of(source, protocol()), request(source, floors=[f"{floor}%"], distance=distance))
    assert got.distance <= distance + 1e-6
    assert got.distance == pytest.approx(0.5 * np.abs(got.proposed_G - got.current_G).sum())
    assert got.proposed_G.min() >= floor / 100
    assert got.gain >= -1e-9


def test_the_tail_of_a_label_is_grouped_and_this_is_said():
    source = World(n_rows=300)
    source.topics = [f"host{i % 7 if i < 240 else i}" for i in range(300)]
    got = mix_with(scorer_of(source, protocol()), request(source, most=8, caps=["30%"]))
    assert len(got.names) == 8
    assert got.names[-1] == "60 other values"
    assert got.n_grouped == 60
    assert "60 of the values are small and share one slice" in got.notes[0]
    with pytest.raises(SettingsError, match=r"no value 'host250' here; .* its 60 smallest values share one slice"):
        mix_with(scorer_of(source, protocol()), request(source, most=8, caps=["host250:30%"]))


def test_the_weights_that_are_written_predict_the_same(tmp_path):
    source, chosen = World(), protocol(components=GEOMETRY)
    asked = request(source, floors=["travel:10%"], caps=["60%"])
    got = mix_with(scorer_of(source, chosen), asked)
    index = RowIndex.from_ids([f"r{i}" for i in range(40)])
    write_weights(got, asked.slices, index, tmp_path / "weights.parquet")
    assert pq.read_table(tmp_path / "weights.parquet").column_names == ["subset_id", "row_id", "weight"]
    table = predict(source, chosen, read_subsets(tmp_path / "weights.parquet", index), targets=["sciq"]).read()
    assert table.column("utility")[0].as_py() == pytest.approx(got.utility["sciq"], rel=1e-5)
    assert json.loads(json.dumps(got.summary(), allow_nan=False))["gain"] == got.gain


def test_a_mean_over_what_is_left_out_is_refused():
    with pytest.raises(ProtocolError, match="scores the mean of what is left out, which has no size for a mixture"):
        mix_with(scorer_of(World(), protocol(side="omitted")), request(World()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"floors": ["30%"]}, r"--floor, --cap: cannot be met: the floors add up to 120.0%"),
        ({"caps": ["20%"]}, "the caps add up to 80.0%, expected 100% at least"),
        ({"floors": ["games:30%"], "caps": ["games:20%"]}, "games has a floor of 30.0% and a cap of 20.0%"),
        (
            {"floors": ["games:90%"], "distance": 0.1},
            r"they move \d+\.\d% of the data, games most of it, and --distance allows 10.0%",
        ),
        ({"floors": ["sport:3%"]}, "--floor: topic has no value 'sport'; it has "),
        ({"floors": ["games:300"]}, "--floor games: got a number, a mixture has shares; expected e.g. Games:5%"),
    ],
)
def test_what_cannot_be_met_is_told_in_one_line(change, said):
    source = World()
    with pytest.raises(SettingsError, match=said) as caught:
        mix_with(scorer_of(source, protocol()), request(source, **change))
    assert "\n" not in str(caught.value)


def test_bounds_that_only_the_solver_sees_to_be_infeasible():
    """Each bound can be met, all of them together with the distance cannot."""
    half = np.full(2, 0.5)
    with pytest.raises(SettingsError, match="--floor, --cap, --distance: no mixture satisfies all of them"):
        solve(Programme(np.ones(2), np.zeros((2, 2)), np.array([0.9, 0.0]), np.ones(2), half, 0.1))


def test_a_label_of_one_value_is_refused():
    with pytest.raises(Exception, match="has the single value"):
        label_slices(LabelColumn.of(["x"] * 4, "topic"), np.ones(4, dtype=int))
