"""Intervals cover what they claim, and are nothing at the corpus; they widen with the distance."""

import numpy as np
import pytest
from scipy import stats

from grasp.errors import EnvironmentDataError, ProtocolLeakError
from grasp.predict.families import parse_family
from grasp.predict.intervals import Intervals, NatsLine, Reach, distances, measures, relative
from grasp.predict.predictor import Predictor
from grasp.predict.protocol import ScoringProtocol
from grasp.predict.slices import LabelTable
from grasp.runs.scored import Scored
from grasp.runs.trust import fit_intervals
from tests.predict.source import FakeSource
from tests.runs.environments import write_artifact, write_environment

PROTOCOL = ScoringProtocol(name="p")
SLOPE = {"sciq": 0.02, "boolq": 0.005}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return write_artifact(tmp_path_factory.mktemp("trust") / "art")


def bind(artifact, protocol=PROTOCOL, **fields) -> Predictor:
    return Predictor.of(artifact, protocol, sketches=measures(artifact.array_names), **fields)


@pytest.fixture(scope="module")
def predictor(artifact) -> Predictor:
    return bind(artifact)


def draw(artifact, n, purpose="evaluation", spec="mixture:topic", seed=3):
    family = parse_family(spec)
    labels = None if family.label is None else LabelTable(artifact.rows_path).column(family.label)
    return list(family.draw(n, n_rows=artifact.n_rows, labels=labels, seed=seed, purpose=purpose))


def changes(predictor, blocks) -> np.ndarray:
    return np.concatenate([predictor.change(block.weights) for block in blocks])


@pytest.fixture(scope="module")
def environment(artifact, predictor, tmp_path_factory):
    """U = -3 + slope x change + noise."""
    change_BT = changes(predictor, draw(artifact, 40))
    noise = 0.002 * np.random.default_rng(1).standard_normal((40, 2))
    column = {"sciq": 0, "boolq": 1}

    def utility(b, seed, target):
        return -3.0 + SLOPE[target] * change_BT[b, column[target]] + noise[b, seed]

    return write_environment(tmp_path_factory.mktemp("trust") / "env", artifact, utility)


@pytest.fixture(scope="module")
def intervals(artifact, predictor, environment) -> Intervals:
    return fit_intervals(predictor, artifact, environment)


def test_the_line_is_least_squares_and_the_interval_that_of_its_docstring():
    rng = np.random.default_rng(0)
    v_B, u_B = rng.standard_normal(20), rng.standard_normal(20)
    line = NatsLine.fit("sciq", v_B, u_B, np.ones(20), coverage=0.9)
    fit = stats.linregress(v_B, u_B)
    assert line.slope == pytest.approx(fit.slope)
    t = stats.t.ppf(0.95, 18)
    assert line.half(np.array([1.0]), np.zeros(1))[0] == pytest.approx(t * fit.stderr)  # the error of the slope alone
    rest_B = u_B - fit.intercept - fit.slope * v_B
    assert line.half(np.zeros(1), np.ones(1))[0] == pytest.approx(t * np.sqrt(rest_B @ rest_B / 18))


@pytest.mark.parametrize("question", ["uniform:0.95", "uniform:0.5", "uniform:0.1", "groups:topic"])
def test_intervals_cover_as_often_as_they_say(question):
    """Worlds in which every row has an error of its own: what the prediction misses grows with the distance."""
    codes = [["a", "b", "c", "d"][i % 4] for i in range(200)]
    hits, rng = [], np.random.default_rng(2)
    predictor = Predictor.of(wide_world(), ScoringProtocol(name="p", match={"token": 1.0}))
    runs = next(parse_family("mixture:topic").draw(40, n_rows=200, labels=codes, seed=1, purpose="runs"))
    asked = next(parse_family(question).draw(30, n_rows=200, labels=codes, seed=2, purpose="asked"))
    sums, new = predictor.sums(runs.weights), predictor.sums(asked.weights)
    change_B, new_BT = predictor.change_of(sums)[:, 0], predictor.change_of(new)
    known = distances(predictor, sums)
    reach = {name: Reach(float(d.mean()), float(d.max())) for name, d in known.items()}
    for _ in range(200):
        truth_N = 0.5 * predictor.effect_NT[:, 0] + rng.laplace(size=200)
        realized = [
            weights.toarray() @ truth_N / weights.sum(axis=1) for weights in (runs.weights_BN, asked.weights_BN)
        ]
        line = NatsLine.fit("t", change_B, realized[0] - 3.0, relative(known, reach), coverage=0.9)
        found = Intervals("", {"t": line}, reach, ()).of(predictor, new, new_BT)
        true_B = realized[1] - truth_N.mean()
        hits.append(((found.low_BT[:, 0] <= true_B) & (true_B <= found.high_BT[:, 0])).mean())
    assert 0.85 <= np.mean(hits) <= 0.99


def wide_world() -> FakeSource:
    relevance_N = np.random.default_rng(7).standard_normal((200, 1)).astype("f4")
    return FakeSource(n_rows=200, arrays={"relevance_token": relevance_N}, unit_targets=("t",))


def test_the_corpus_is_certain_and_intervals_widen_with_the_distance(artifact, predictor, intervals):
    found = intervals.of(predictor, predictor.whole(), np.zeros((1, 2)))
    np.testing.assert_allclose([found.low_BT, found.high_BT], 0.0, atol=1e-9)
    width = []
    for share in (0.95, 0.5, 0.1):
        (block,) = draw(artifact, 50, purpose="fresh", spec=f"uniform:{share}")
        sums = predictor.sums(block.weights)
        table = intervals.of(predictor, sums, predictor.change_of(sums))
        width.append((table.high_BT - table.low_BT).mean())
    assert width[0] < width[1] < width[2]


def test_what_is_held_out_is_refused(artifact, predictor, tmp_path):
    held = write_environment(tmp_path / "held", artifact, lambda b, s, _: 0.1 * b, role="held-out")
    with pytest.raises(ProtocolLeakError, match="held: is held out; intervals are fitted on development environments"):
        fit_intervals(predictor, artifact, held)
    partly = write_environment(tmp_path / "partly", artifact, lambda b, s, _: 0.1 * b, held_out_targets=("boolq",))
    found = fit_intervals(predictor, artifact, partly)
    assert list(found.lines) == ["sciq"]
    assert "no interval for boolq: no development target of partly" in found.notes
    with pytest.raises(ProtocolLeakError, match=r"\['boolq'\], which are held out"):
        fit_intervals(bind(artifact, targets=["boolq"]), artifact, partly)


def test_too_few_subsets_give_no_interval(artifact, predictor, tmp_path):
    few = write_environment(tmp_path / "few", artifact, lambda b, s, _: 0.1 * b, n_subsets=4)
    with pytest.raises(EnvironmentDataError, match="got 4 runs, expected at least 5; retrain on more subsets"):
        fit_intervals(predictor, artifact, few)
    with pytest.raises(EnvironmentDataError, match="predictions of all runs are the same; no line fits"):
        NatsLine.fit("sciq", np.ones(20), np.arange(20.0), np.ones(20))


def test_what_else_should_be_known_is_noted(artifact, environment, tmp_path):
    runs = Scored.of(environment, artifact).runs_fingerprint
    selected = PROTOCOL.model_copy(
        update={"selected_on": ("before/sciq", "env/sciq"), "selected_runs": {"before/sciq": runs, "env/sciq": "other"}}
    )
    notes = fit_intervals(bind(artifact, selected), artifact, environment).notes
    assert notes == ("the protocol was selected on env: its intervals are somewhat too narrow",)
    selected = selected.model_copy(update={"selected_on": ("env/sciq",)})
    assert fit_intervals(bind(artifact, selected), artifact, environment).notes == ()
    value_BT = changes(bind(artifact), draw(artifact, 40))
    order = {b: float(value_BT[b, 0]) for b in range(40)}
    down = write_environment(tmp_path / "falls", artifact, lambda b, s, _: -order[b])
    notes = fit_intervals(bind(artifact, targets=["sciq"]), artifact, down).notes
    assert notes == ("sciq: realized utility does not rise with the prediction in falls: trust the interval alone",)


def test_an_environment_of_other_targets_is_refused(tmp_path, environment):
    other = write_artifact(tmp_path / "art", targets={"loss_on": "all"})
    with pytest.raises(EnvironmentDataError, match=r"with loss_on 'all'; .* none is common to both"):
        fit_intervals(bind(other), other, environment)
