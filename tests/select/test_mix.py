"""Mixtures: the value is the prediction, the solver's answer is optimal by linear programmes and by brute force."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.sparse import csr_array

from grasp.errors import SettingsError
from grasp.predict.predictor import NEW_ROW_VALUE, REPEAT_WORTH, RepetitionLaw
from grasp.predict.slices import label_slices
from grasp.predict.subset_tables import RowIndex, read_subsets
from grasp.predict.weights import Weights
from grasp.select.linear_program import MixtureProblem, Segments, solve
from grasp.select.mix import mix
from tests.mentions import assert_mentions
from tests.select.world import World, predictor_of, protocol

GEOMETRY = {"joint.raw": -0.4, "product.self": 0.2, "hidden.cent": -0.1, "residual.pair": -0.2}
FREE = ["0%"]  # a floor that lets every value go


def slices_of(source, **fields):
    return label_slices(source.labels, source.tokens, **fields)


def mixed(source, chosen, target="sciq", floors=FREE, caps=(), **options):
    """Without the usual bounds, unless they are asked for."""
    options = {"max_repeat": 1e6} | options
    return mix(source, "topic", target, floor=floors, cap=caps, protocol=chosen, **options)


def proposed(got) -> np.ndarray:
    return got.table["proposed"].to_numpy()


def predicted(source, chosen, slices, p_BG, targets) -> np.ndarray:
    """What the predictor says of mixtures as weighted subsets, (B, T)."""
    weights_BN = (source.n_rows * np.asarray(p_BG) / slices.rows_G)[:, slices.codes_N]
    return predictor_of(source, chosen, list(targets)).change(Weights(csr_array(weights_BN)))


@pytest.mark.parametrize("components", [{}, GEOMETRY])
def test_the_gain_is_that_of_predict_and_nothing_feasible_is_better(components):
    source = World()
    requested = protocol(components=components)
    chosen = requested.additive
    got = mixed(source, requested, "sciq=2,boolq=1", ["5%"], ["games:40%"])
    games = got.table["value"].to_pylist().index("games")
    assert "reallocated; optimal within" in got.headline
    assert proposed(got).sum() == pytest.approx(1.0, abs=1e-12)
    assert proposed(got).min() >= 0.05
    assert proposed(got)[games] <= 0.4
    slices = slices_of(source)
    want = predicted(source, chosen, slices, [proposed(got)], ["sciq", "boolq"])
    assert got.targets["change"].to_pylist() == pytest.approx(want[0], rel=1e-5, abs=1e-5)
    assert got.value == pytest.approx(want[0] @ [2 / 3, 1 / 3], rel=1e-5, abs=1e-4)
    p_BG = np.random.default_rng(1).dirichlet(np.ones(4), 3000)
    p_BG = p_BG[(p_BG >= 0.05).all(axis=1) & (p_BG[:, games] <= 0.4)]
    assert len(p_BG) > 100
    others = predicted(source, chosen, slices, p_BG, ["sciq", "boolq"]) @ [2 / 3, 1 / 3]
    assert got.value >= others.max() - 1e-5
    assert got.value - others.max() < 0.2 * (others.max() - np.median(others))  # many tries come near


def test_a_training_budget_counts_repetition_and_nothing_feasible_is_better():
    """The formula by hand, against many mixtures."""
    source, slices = World(n_rows=200, seed=2), None
    source.tokens = np.full(200, 10)
    slices = slices_of(source)
    trained = 3 * 2000.0
    got = mixed(source, protocol(), train_tokens=trained, max_repeat=20)
    parts = predictor_of(source, protocol(), ["sciq"]).sums(slices.each)
    mean_G = parts.effect_BT[:, 0] / slices.rows_G

    def value(p_G):
        return (
            float(((mean_G + NEW_ROW_VALUE) * slices.rows_G / 200) @ RepetitionLaw(3.0)(p_G * 200 / slices.rows_G))
            - NEW_ROW_VALUE
        )

    assert got.value == pytest.approx(value(proposed(got)), abs=0.01 * abs(got.value))
    assert got.value < got.targets["change"][0].as_py()  # which is that of predict, for no budget
    high_G = 20 * slices.rows_G / 200
    tries = np.random.default_rng(0).dirichlet(np.ones(4) * 0.4, 4000)
    best = max(value(p_G) for p_G in tries if (p_G <= high_G).all())
    assert value(proposed(got)) >= best - 0.005 * abs(best)
    assert any("no row is seen" in note and note.startswith("value ") for note in got.notes)


@pytest.mark.parametrize("target", ["sciq", "boolq"])
def test_without_being_asked_no_slice_is_all_there_is_and_no_row_is_seen_five_times(target):
    source = World(n_rows=200)
    source.topics = ["rare"] * 5 + ["common"] * 195
    for more in ({}, {"train_tokens": source.tokens.sum() / 10}, {"train_tokens": 1e9}):
        got = mix(source, "topic", target, protocol=protocol(), **more)
        factor_G = got.table["times_as_often"].to_numpy()
        epochs = min(1.0, more.get("train_tokens", 1e9) / source.tokens.sum())
        assert (factor_G * epochs <= 4 + 1e-6).all()
        assert (factor_G >= 0.25 - 1e-6).all()
        assert r"no row is seen more than 4 times" in " ".join(got.notes)
    mixture = mix(source, "topic", target, protocol=protocol(), floor=["rare:50%"])
    assert proposed(mixture)[mixture.table["value"].to_pylist().index("rare")] >= 0.5 - 1e-9  # twenty times: asked for


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), n=st.integers(2, 8), distance=st.booleans())
def test_concave_pieces_are_filled_as_a_linear_programme_says(seed, n, distance):
    """Without pieces, the same straight lines give the same optimum; with them, the value is that of the pieces."""
    rng, current_G, low_G, high_G, far = feasible(seed, n, distance=distance)
    worth_G = rng.standard_normal(n)
    knots_GK = np.linspace(low_G, high_G, 5, axis=1)
    lines = Segments(knots_GK, worth_G[:, None] * knots_GK)
    flat = MixtureProblem(low_G, high_G, current_G, far, lines)
    assert lines.value(solve(flat)) == pytest.approx(best_linear(flat, worth_G), abs=1e-6)
    bent = Segments(knots_GK, np.abs(worth_G)[:, None] * np.sqrt(knots_GK))
    problem = MixtureProblem(low_G, high_G, current_G, far, bent)
    assert bent.value(solve(problem)) >= bent.value(current_G) - 1e-7


def feasible(seed, n, *, distance):
    rng = np.random.default_rng(seed)
    current_G = rng.dirichlet(np.ones(n))
    low_G = np.minimum(current_G, rng.random(n) * 0.3 / n)
    high_G = np.minimum(1.0, np.maximum(current_G, rng.random(n)))
    return rng, current_G, low_G, high_G, (float(rng.random()) * 0.5 + 0.01 if distance else None)


def best_linear(problem, worth_G) -> float:
    """max worth'y over what is feasible, by scipy's simplex."""
    n = len(worth_G)
    eye = np.eye(n)
    rows, right = np.empty((0, 2 * n)), np.empty(0)
    if problem.distance is not None:
        rows = np.block([[eye, -eye], [-eye, -eye], [np.zeros((1, n)), np.ones((1, n))]])
        right = np.concatenate([problem.current_G, -problem.current_G, [2 * problem.distance]])
    bounds = [*zip(problem.low_G, problem.high_G, strict=True), *[(0, None)] * n]
    equal = np.concatenate([np.ones((1, n)), np.zeros((1, n))], axis=1)
    result = linprog(
        np.concatenate([-worth_G, np.zeros(n)]),
        A_ub=rows if len(rows) else None,
        b_ub=right if len(rows) else None,
        A_eq=equal,
        b_eq=[1.0],
        bounds=bounds,
    )
    assert result.status == 0
    return -float(result.fun)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(2, 24),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    distance=st.booleans(),
)
def test_no_feasible_direction_improves_the_solution(seed, n, scale, distance):
    rng, current_G, low_G, high_G, far = feasible(seed, n, distance=distance)
    linear_G = scale * rng.standard_normal(n)
    problem = MixtureProblem(low_G, high_G, current_G, far)
    p_G = solve(problem, linear_G)
    assert p_G.sum() == pytest.approx(1.0, abs=1e-9)
    assert (p_G >= low_G).all()
    assert (p_G <= high_G).all()
    if far is not None:
        assert 0.5 * np.abs(p_G - current_G).sum() <= far + 1e-6
    assert best_linear(problem, linear_G) - linear_G @ p_G <= 1e-5 * scale


def test_without_bounds_the_last_row_of_every_slice_that_helps_is_worth_the_same():
    """exposure'(times) (m + b) is alike where slices lie inside, and less at 0; what hurts most goes."""
    source = World()
    tokens = float(source.tokens.sum())
    got, slices = mixed(source, protocol(), train_tokens=30 * tokens), slices_of(source)
    effect_N = predictor_of(source, protocol(), ["sciq"]).effect_NT[:, 0]
    mean_G = np.array([effect_N[slices.codes_N == g].mean() for g in range(4)])
    times_G = got.table["times_as_often"].to_numpy()
    slope_G = (mean_G + NEW_ROW_VALUE) * np.exp(-30 * times_G / REPEAT_WORTH)
    inside_G = times_G > 0
    assert inside_G.sum() > 1
    assert (times_G[mean_G < -NEW_ROW_VALUE] == 0).all()
    np.testing.assert_allclose(slope_G[inside_G], slope_G[inside_G].mean(), rtol=0.3)  # straight pieces
    assert "reallocated; optimal within" in got.headline


@settings(max_examples=25)
@given(distance=st.integers(1, 90), floor=st.integers(0, 8))
def test_the_distance_and_the_floors_hold(distance, floor):
    source = World()
    got = mixed(source, protocol(), floors=[f"{floor}%"], distance=f"{distance}%")
    moved = 0.5 * np.abs(proposed(got) - got.table["now"].to_numpy()).sum()
    assert moved <= distance / 100 + 1e-6
    assert f"{100 * moved:.1f} % of the data are reallocated" in got.headline
    assert proposed(got).min() >= floor / 100
    assert got.value >= -1e-6


def test_rare_values_of_a_label_are_grouped_with_a_note():
    source = World(n_rows=600)
    source.topics = [f"host{i % 99 if i < 500 else i}" for i in range(600)]
    got = mixed(source, protocol(), caps=["30%"])
    assert len(got) == 100
    assert got.table["value"].to_pylist()[-1] == "100 other values"
    assert_mentions(got.notes, "100 ", "slice")
    with pytest.raises(SettingsError, match=r"'host550'.*\b100\b.*slice"):
        mixed(source, protocol(), caps=["host550:30%"])


def test_the_weights_that_are_written_predict_the_same(tmp_path):
    source, chosen = World(), protocol()
    got = mixed(source, chosen, floors=["travel:10%"], caps=["60%"])
    got.write_weights(tmp_path / "weights.parquet")
    assert pq.read_table(tmp_path / "weights.parquet").column_names == ["subset_id", "row_id", "weight"]
    (block,) = read_subsets(tmp_path / "weights.parquet", RowIndex.from_ids([f"r{i}" for i in range(40)]))
    change = predictor_of(source, chosen, ["sciq"]).change(block.weights)[0, 0]
    assert change == pytest.approx(got.targets["change"][0].as_py(), rel=1e-5)
    assert json.loads(json.dumps(got.summary(), allow_nan=False))["value"] == got.value
    assert got.write(tmp_path / "shares.csv").read_text().startswith('"value","expression","rows","now","proposed"')


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"floors": ["30%"]}, "the floors add up to 120.0%"),
        ({"caps": ["20%"]}, r"the caps \(with --max-repeat\) to 80.0%"),
        ({"floors": ["games:30%"], "caps": ["games:20%"]}, "games has a floor of 30.0% and at most 20.0%"),
        (
            {"floors": ["games:90%"], "distance": "10%"},
            r"games.*distance.*10\.0%",
        ),
        ({"floors": ["sport:3%"]}, "'sport'"),
        ({"floors": ["games:300"]}, "floor games: .*number.*share"),
        ({"distance": "3"}, r"distance:.*'3'"),
        ({"max_repeat": 0.5}, "max_repeat: got 0.5"),
    ],
)
def test_infeasible_constraints_are_refused_in_one_line(options, message):
    with pytest.raises(SettingsError, match=message) as caught:
        mixed(World(), protocol(), **options)
    assert "\n" not in str(caught.value)
