"""Laws: predictions and utilities are matched by name; missing values are refused."""

import json

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from grasp.errors import RunsError
from grasp.runs.alignment import match_targets
from grasp.runs.evaluation import evaluate_predictions
from grasp.runs.predictions import Predictions, sum_row_scores
from grasp.runs.retrained import RetrainedRuns
from grasp.targets.units import Unit, UnitSet
from tests.runs.worlds import ROWS, create, filled, result

UNITS = (("sciq", "u0"), ("sciq", "u1"), ("sciq", "u2"), ("sciq@all", "u0"), ("sciq@all", "u1"))


@pytest.fixture
def env(tmp_path):
    """Ten subsets, two seeds; the utilities of `sciq` are noisy, those of `sciq@all` rise with the subset."""
    env = create(tmp_path / "env", n_subsets=10)
    rng = np.random.default_rng(0)
    for run in env.pending():
        env.write_run(run, result(env, run) + np.array([6.0, 6.0, 6.0, 0.0, 0.0]) * rng.normal(size=5))
    env.compact()
    return env


def truth(env, method="truth"):
    utilities = env.utilities()
    return Predictions(method, utilities.subset_ids, UNITS, utilities.values_BSE.mean(axis=1))


def test_metrics_are_those_of_mean_utilities(env):
    noisy = truth(env)
    noisy = Predictions("m", noisy.subset_ids, UNITS, noisy.values_BE + np.random.default_rng(2).normal(size=(10, 5)))
    row = evaluate_predictions(env, [noisy], resamples=50).methods[0].targets[0]
    realized = env.utilities("sciq").values_BSE.mean(axis=(1, 2))
    expected = stats.spearmanr(noisy.values_BE[:, :3].mean(axis=1), realized).statistic
    assert row["task_rho"].value == pytest.approx(expected)


def test_subsets_and_units_are_matched_by_name(env):
    right = truth(env)
    b, e = np.random.default_rng(3).permutation(10), np.random.default_rng(4).permutation(5)
    mixed = Predictions(
        "truth",
        (*(right.subset_ids[i] for i in b), "another"),
        tuple(UNITS[i] for i in e),
        np.concatenate([right.values_BE[b][:, e], np.zeros((1, 5))]),
    )
    assert (
        evaluate_predictions(env, [mixed], resamples=20).records()
        == evaluate_predictions(env, [right], resamples=20).records()
    )
    assert mixed.aligned(right.subset_ids, "sciq", ("u0", "u1", "u2"))[0] == pytest.approx(right.values_BE[:, :3])


def test_predictions_of_tasks_have_task_metrics_only(env):
    right = truth(env)
    tasks = {"sciq": right.values_BE[:, :3].mean(axis=1), "sciq@all": right.values_BE[:, 3:].mean(axis=1)}
    predicted = Predictions("t", right.subset_ids, (), np.empty((10, 0)), tasks)
    report = evaluate_predictions(env, [predicted], resamples=20)
    row = report.methods[0].targets[1]
    assert row["task_rho"].value == pytest.approx(1)
    assert row["mean_lds"].value is None
    assert row["mean_lds"].reason == "no predictions for units"
    assert "no predictions for units: 2" in report.records()[1]["undefined_why"]


@pytest.mark.parametrize("weighting", ["count", "mean"])
def test_row_scores_are_summed_over_the_subset(env, weighting):
    scores = np.random.default_rng(5).normal(size=(30, 5)).astype(np.float32)
    retained = np.concatenate([block.weights_BN.toarray() for block in env.subset_blocks(ROWS)])
    expected = retained @ scores / (retained.sum(axis=1, keepdims=True) if weighting == "mean" else 1)
    blocks = [(0, scores[:5]), (5, scores[5:])]
    got = sum_row_scores("m", UNITS, blocks, list(env.subset_blocks(ROWS)), weighting=weighting)
    assert (got.subset_ids, got.units) == (env.subset_ids, UNITS)
    np.testing.assert_allclose(got.values_BE, expected, rtol=1e-6)
    assert evaluate_predictions(env, [got], resamples=9).methods[0].targets[0]["task_rho"].value is not None


def test_row_scores_that_are_not_finite_are_refused(env):
    scores = np.ones((30, 5))
    scores[7, 3] = np.nan
    with pytest.raises(RunsError, match="row 7 for sciq@all unit 'u0' is nan"):
        sum_row_scores("m", UNITS, [(0, scores[:5]), (5, scores[5:])], list(env.subset_blocks(ROWS)))


@pytest.mark.parametrize(
    ("b", "e", "value", "message"),
    [
        (slice(9), slice(None), 1.0, "1 of 10 have no prediction"),
        (slice(None), [0, 1, 3, 4], 1.0, "units of sciq: 1 of 3 have no prediction"),
        (slice(None), slice(None), np.nan, r"m: sciq: prediction at \(0, 0\) is nan"),
        (slice(None), slice(None), 1e308, r"must be finite, and at most 1e\+100"),
    ],
)
def test_incomplete_predictions_are_refused(env, b, e, value, message):
    values_BE = np.ones((10, 5))
    values_BE[0, 0] = value
    units = tuple(map(tuple, np.array(UNITS)[e].tolist()))
    predicted = Predictions("m", env.subset_ids[b], units, values_BE[b][:, e])
    with pytest.raises(RunsError, match=message):
        evaluate_predictions(env, [predicted], resamples=9)


def test_constant_predictions_and_utilities_are_reported_as_undefined(env, tmp_path):
    flat = Predictions("flat", env.subset_ids, UNITS, np.ones((10, 5)))
    report = evaluate_predictions(env, [flat], resamples=9)
    table = repr(report)
    assert "undefined: task_rho of flat on sciq, sciq@all: predictions are constant" in table
    assert "excluded: 3 of 3 units of sciq for flat: predictions are constant" in table
    assert "nan" not in table
    record = json.loads(report.to_json())["results"][0]
    assert (record["task_rho"], record["task_rho_reason"]) == (None, "predictions are constant")
    assert report.records()[0]["task_rho"] is None
    same = create(tmp_path / "same", n_subsets=4)
    for run in same.pending():
        same.write_run(run, np.full(5, -1.0))
    ordered = Predictions("m", same.subset_ids, UNITS, np.arange(20.0).reshape(4, 5))
    table = repr(evaluate_predictions(same, [ordered], resamples=9))
    assert "task_rho of m on sciq, sciq@all: utilities are constant" in table


def test_the_report_is_the_same_as_text_and_json(env):
    other = Predictions("noise", env.subset_ids, UNITS, np.random.default_rng(7).normal(size=(10, 5)))
    report = evaluate_predictions(env, [truth(env), other], resamples=50)
    records = json.loads(report.to_json())["results"]
    assert [(r["method"], r["target"]) for r in records] == [
        (method, target) for method in ("truth", "noise") for target in ("sciq", "sciq@all", "average")
    ]
    for record in records:
        assert f"{record['task_rho']:.3f} [{record['task_rho_low']:.3f}, {record['task_rho_high']:.3f}]" in repr(report)
    assert records[0]["task_rho"] == pytest.approx(1)
    assert records[2]["task_rho"] == pytest.approx((records[0]["task_rho"] + records[1]["task_rho"]) / 2)
    assert "10 subsets, seeds 0, 1" in repr(report)


def test_one_seed_and_held_out_targets_are_marked(tmp_path):
    env = filled(tmp_path, seeds=(0,), held_out_targets=("sciq@all",))
    report = evaluate_predictions(env, [truth(env)], resamples=9)
    assert "sciq@all (held-out)" in repr(report)
    assert "undefined: task_ceiling on sciq, sciq@all: one seed" in repr(report)
    assert report.records()[0]["task_ceiling"] is None


def test_unfinished_runs_are_evaluated_as_such_and_unknown_targets_never(env, tmp_path):
    begun = create(tmp_path / "begun", n_subsets=6)
    for run in begun.pending()[:6]:
        begun.write_run(run, result(begun, run))
    predicted = Predictions("m", begun.subset_ids, UNITS, np.random.default_rng(8).normal(size=(6, 5)))
    report = evaluate_predictions(begun, [predicted], seeds=[0], resamples=9)
    assert report.n_subsets == 5
    assert repr(report).startswith("unfinished: 6 of 14 runs have a result")
    assert "unfinished" in json.loads(report.to_json())["headline"]
    wrong = Predictions("m", env.subset_ids, (("boolq", "u0"),), np.ones((10, 1)))
    for runs, predictions, options, message in (
        (begun, [predicted], {}, "no subset has a result for every seed"),
        (env, [wrong], {}, "none is common to all"),
        (env, [wrong], {"targets": ["sciq"]}, "m: has no predictions for 'sciq'"),
    ):
        with pytest.raises(RunsError, match=message):
            evaluate_predictions(runs, predictions, **options)


class FakeArtifact:
    """A substitute with the attributes of an artifact that `match_targets` reads."""

    path = "art"

    def __init__(self, units, corpus="c0ffee", loss_on="completion"):
        self.targets = tuple(dict.fromkeys(unit.target for unit in units))
        fields = ("unit_id", "target", "prompt", "completion")
        self.units = pa.Table.from_pylist([{name: getattr(unit, name) for name in fields} for unit in units])
        self.manifest = type(
            "Manifest", (), {"fingerprints": {"corpus": corpus}, "settings": {"targets": {"loss_on": loss_on}}}
        )


def test_an_artifact_of_another_corpus_or_of_other_units_is_refused(tmp_path):
    units = [Unit("u0", "sciq", "Q", " a"), Unit("u1", "sciq", "Q2", " b"), Unit("v", "boolq", "Q", " c")]
    everywhere = [Unit(u.unit_id, u.target, u.prompt, u.completion, "all") for u in units]
    plain = create(tmp_path / "plain").info
    targets = {
        "sciq": plain.targets["sciq"].model_copy(update={"fingerprint": UnitSet(tuple(units[:2])).fingerprint}),
        "sciq@all": plain.targets["sciq@all"].model_copy(
            update={"fingerprint": UnitSet(tuple(everywhere[:2])).fingerprint}
        ),
    }
    env = create(tmp_path / "env", targets=targets)
    assert match_targets(env, FakeArtifact(units)) == {"sciq": "sciq"}
    assert match_targets(env, FakeArtifact(everywhere, loss_on="all")) == {"sciq@all": "sciq"}
    with pytest.raises(RunsError, match=r"art: .*beef, .* c0ffee"):
        match_targets(env, FakeArtifact(units, corpus="beef"))
    with pytest.raises(RunsError, match="art: units of sciq have fingerprint"):
        match_targets(env, FakeArtifact(units[::-1]))
    with pytest.raises(RunsError, match="none is common to both"):
        match_targets(env, FakeArtifact(units[2:]))
    assert RetrainedRuns.open(tmp_path / "env").role_of("sciq@all") == "dev"
