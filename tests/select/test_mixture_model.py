"""Runs without an artifact: mixtures are predicted, the best lies where it was planted, and what is next is told."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pytest

import grasp
from grasp.errors import RunsError, SettingsError
from grasp.predict.subset_tables import RowIndex, read_subsets
from grasp.runs.gaussian_process import Learned, SubsetFeatures
from grasp.select.mixture_model import Taught, most_telling
from tests.cli.grasp_command import cells, refused, succeed
from tests.runs.environments import TOPICS, write_artifact, write_environment

PEAK = np.array([0.5, 0.3, 0.2])
N_RUNS = 40


def runs_of(share_RG, noise=0.002, **fields):
    """Loss is least at PEAK; accuracy rises with the first share."""
    rng = np.random.default_rng(1)
    names = [f"run-{r}" for r in range(len(share_RG))]
    shares = pa.table({"run": names} | {value: share_RG[:, g] for g, value in enumerate(TOPICS)})
    loss = 3 + ((share_RG - PEAK) ** 2).sum(axis=1) + noise * rng.standard_normal(len(share_RG))
    results = pa.table({"run": names, "sciq/loss": loss, "arc/acc": 0.3 + 0.1 * share_RG[:, 0]})
    return grasp.import_runs(shares, results, label="topic", **fields)


@pytest.fixture(scope="module")
def runs():
    return runs_of(np.random.default_rng(0).dirichlet(np.ones(3), N_RUNS))


def mixtures(share_BG, **columns):
    return pa.table(columns | {value: share_BG[:, g] for g, value in enumerate(TOPICS)})


def test_mixtures_are_predicted_in_the_unit_of_the_metric(runs):
    share_BG = np.random.default_rng(5).dirichlet(np.ones(3), 200)
    table = grasp.predict_runs(runs, mixtures(share_BG)).to_pandas()
    loss = table[table["metric"] == "sciq/loss"]
    truth_B = 3 + ((share_BG - PEAK) ** 2).sum(axis=1)
    np.testing.assert_allclose(loss["expected"], truth_B, atol=0.03)
    assert ((loss["low"] < truth_B) & (truth_B < loss["high"])).mean() > 0.85
    accuracy = table[table["metric"] == "arc/acc"]["expected"]
    assert np.corrcoef(accuracy, share_BG[:, 0])[0, 1] > 0.99


def test_the_best_mixture_lies_inside_and_a_cautious_one_nearer_to_the_runs(runs):
    best = grasp.mix_runs(runs, "sciq/loss").to_pandas().set_index("value")
    np.testing.assert_allclose(best.loc[list(TOPICS), "proposed"], PEAK, atol=0.05)
    few = runs_of(np.random.default_rng(8).dirichlet(np.full(3, 0.5), 6), noise=0.05)
    taught = Taught.from_runs(few, "sciq/loss")
    found = {
        k: grasp.mix_runs(few, "sciq/loss", cautious=k).to_pandas().set_index("value")["proposed"].loc[list(TOPICS)]
        for k in (0.0, 3.0)
    }
    spread = {k: taught.learned.predict(taught.features(p.to_numpy()[None]))[1][0, -1] for k, p in found.items()}
    assert spread[3.0] <= spread[0.0] + 1e-9
    assert taught.aim(found[3.0].to_numpy()[None], 3.0) >= taught.aim(found[0.0].to_numpy()[None], 3.0) - 1e-6


def test_the_joint_posterior_is_that_of_single_predictions():
    taught = Taught.from_runs(runs_of(np.random.default_rng(0).dirichlet(np.ones(3), N_RUNS), noise=0.05), "sciq/loss")
    features = taught.features(np.random.default_rng(2).dirichlet(np.ones(3), 7))
    mean_B, cover_BB, noise = taught.learned.joint(features, -1)
    expected_BT, spread_BT = taught.learned.predict(features)
    np.testing.assert_allclose(mean_B, expected_BT[:, -1], atol=1e-9)
    own = taught.learned.numbers["noise"] * taught.learned.scale_T[-1] ** 2
    np.testing.assert_allclose(np.diag(cover_BB) + own, spread_BT[:, -1] ** 2, rtol=1e-4)
    np.testing.assert_allclose(cover_BB, cover_BB.T, atol=1e-7)
    assert np.linalg.eigvalsh(cover_BB).min() > -1e-7
    assert noise >= own


@pytest.mark.parametrize("decide", ["best", "values"])
def test_proposals_differ_and_those_for_values_are_new(runs, decide):
    taught = Taught.from_runs(runs, "sciq/loss")
    share_BG = np.concatenate([taught.share_RG[:5], np.random.default_rng(4).dirichlet(np.full(3, 0.3), 20)])
    picked, settles = most_telling(taught.learned, taught.features(share_BG), 6, decide, np.random.default_rng(0))
    assert len(set(picked)) == 6
    assert min(settles) >= 0
    if decide == "values":
        assert picked[0] >= 5
        assert settles == sorted(settles, reverse=True)


def test_commands_predict_mix_and_propose(runs, tmp_path):
    runs.save(tmp_path / "runs")
    artifact = write_artifact(tmp_path / "art")
    pacsv.write_csv(mixtures(PEAK[None], mixture=["planted"]), tmp_path / "m.csv")
    assert "planted" in succeed("runs", "predict", tmp_path / "runs", tmp_path / "m.csv", "--metric", "sciq/loss").out
    said = succeed("runs", "mix", tmp_path / "runs", "--metric", "sciq/loss").out
    assert re.search(r"sciq/loss: proposed (2\.99|3\.0)", said)
    asked = ("runs", "propose", tmp_path / "runs", "--count", 2, "--out", tmp_path / "next.csv")
    succeed(*asked, "--art", artifact.path, "--subsets", tmp_path / "next.parquet")
    (block,) = read_subsets(tmp_path / "next.parquet", RowIndex.from_parquet(artifact.rows_path))
    assert block.subset_ids == ("next-1", "next-2")
    next_runs = grasp.predict_runs(runs, tmp_path / "next.csv").to_pandas()
    assert set(next_runs["mixture"]) == {"next-1", "next-2"}
    printed = succeed("runs", "propose", tmp_path / "runs", "--count", 2).lines
    assert [cells(line)[0] for line in printed[1:6]] == ["next-1", "settles", *TOPICS]
    assert printed[6].startswith("settles: by how much the best mixture is expected to become better")
    assert max(map(len, printed)) <= 140
    assert "name it" in refused("runs", "propose", tmp_path / "runs", "--subsets", tmp_path / "x.parquet")


def test_what_mix_writes_is_what_predict_reads_and_losses_have_no_sign(runs, tmp_path):
    runs.save(tmp_path / "runs")
    succeed("runs", "mix", tmp_path / "runs", "--metric", "sciq/loss", "--out", tmp_path / "best.csv")
    said = succeed("runs", "predict", tmp_path / "runs", tmp_path / "best.csv", "--metric", "sciq/loss")
    shown = {cells(line)[0]: cells(line)[2] for line in said.lines[2:5]}
    assert shown.keys() == {"proposed", "best_run", "mean_of_runs"}
    assert float(shown["proposed"]) == pytest.approx(3.0, abs=0.02)
    assert "+" not in said.out
    assert "outside" not in said.out


def test_a_value_without_a_column_gets_nothing_and_what_no_run_covered_is_said():
    narrow = runs_of(0.2 + 0.4 * np.random.default_rng(0).dirichlet(np.ones(3), N_RUNS))
    found = grasp.predict_runs(narrow, pa.table({"mixture": ["bold"], "games": [0.9], "science": [0.1]}))
    full = grasp.predict_runs(narrow, mixtures(np.array([[0.9, 0.1, 0.0]])))
    assert found.to_pandas()["expected"].to_list() == full.to_pandas()["expected"].to_list()
    assert re.search(
        r"outside of what the runs covered, so trust it less: bold \(games 90%, in the runs 2\d% to 4\d%\)", str(found)
    )


def test_retrained_subsets_are_proposed_for_by_the_label_that_they_were_drawn_by(tmp_path):
    artifact = write_artifact(tmp_path / "art")
    environment = write_environment(tmp_path / "env", artifact, lambda b, s, t: -3.0 + 0.01 * ((7 * b) % 5) + 0.001 * s)
    table = grasp.propose_runs(environment, count=2, artifact=grasp.Artifact(artifact)).to_pandas()
    np.testing.assert_allclose(table[list(TOPICS)].sum(axis=1), 1.0)
    with pytest.raises(SettingsError, match="holds retrained subsets; name the artifact of their corpus"):
        grasp.propose_runs(environment)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"games": [0.5], "science": [0.3]}), r"add up to 0.8 \(no column, so nothing of: travel\)"),
        (pa.table({"games": [1.0], "scence": [0.0]}), r"'scence' is no value .* \(did you mean 'science'\?\)"),
        (pa.table({"value": ["games"], "rows": [1]}), "has a column `value` and no shares"),
        (mixtures(np.array([[0.5, 0.2, 0.2]])), "'mixture-1': its shares add up to 0.9"),
        (mixtures(np.array([[1.5, -0.5, 0.0]])), "expected numbers of 0 or more"),
        (mixtures(PEAK[None], more=[1.0]), "'more' is no value"),
        (mixtures(np.empty((0, 3))), "has no mixture"),
    ],
)
def test_mixtures_that_do_not_fit_are_refused(runs, table, message):
    with pytest.raises(RunsError, match=message):
        grasp.predict_runs(runs, table)


def test_questions_that_runs_cannot_answer_are_refused(runs):
    with pytest.raises(RunsError, match=r"got the metrics .*'boolq'"):
        grasp.mix_runs(runs, "boolq")
    results = pa.table({"run": ["a", "b"], "sciq/acc": [0.1, 0.2]})
    rows = grasp.import_runs(pa.table({"run": ["a", "b"], "row_id": ["1", "2"]}), results)
    with pytest.raises(RunsError, match="learned from runs by shares of a label"):
        grasp.mix_runs(rows)
    for question in ({"decide": "all"}, {"count": 100_000_000}):
        with pytest.raises(SettingsError, match="expected best or values, and 1 to 125 runs"):
            grasp.propose_runs(runs, **question)
    with pytest.raises(RunsError, match="its 4 runs were all trained on one mixture"):
        runs_of(np.tile(PEAK, (4, 1)))
    with pytest.raises(RunsError, match=r"got 1 different subset\(s\) in 4 run\(s\)"):
        Learned.fit(SubsetFeatures.from_shares(np.tile(PEAK, (4, 1)), 1), np.arange(4.0)[:, None, None])
