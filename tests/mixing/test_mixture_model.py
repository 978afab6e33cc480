"""Runs without an artifact: prediction of mixtures, the planted optimum, and proposals of further runs."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pytest

import grasp
from grasp.artifact.rows import label_column, row_tokens
from grasp.errors import RunsError, SettingsError
from grasp.mixing.mixture_model import MixtureModel
from grasp.mixing.proposals import most_informative
from grasp.predict.subset_tables import RowIndex, read_subsets
from grasp.runs.gaussian_process import GaussianProcess
from grasp.runs.subset_features import SubsetFeatures
from tests.cli.grasp_command import cells, refused, succeed
from tests.runs.environments import TOPICS, write_artifact

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


def test_the_best_mixture_is_in_the_interior_and_a_cautious_one_closer_to_the_runs(runs):
    best = grasp.mix_runs(runs, "sciq/loss").to_pandas().set_index("value")
    np.testing.assert_allclose(best.loc[list(TOPICS), "proposed"], PEAK, atol=0.05)
    few = runs_of(np.random.default_rng(8).dirichlet(np.full(3, 0.5), 6), noise=0.05)
    model = MixtureModel.from_runs(few, "sciq/loss")
    results = {
        k: grasp.mix_runs(few, "sciq/loss", cautious=k).to_pandas().set_index("value")["proposed"].loc[list(TOPICS)]
        for k in (0.0, 3.0)
    }
    spread = {
        k: model.gaussian_process.predict(model.features(p.to_numpy()[None]))[1][0, -1] for k, p in results.items()
    }
    assert spread[3.0] <= spread[0.0] + 1e-9
    assert (
        model.predict_objective(results[3.0].to_numpy()[None], 3.0)
        >= model.predict_objective(results[0.0].to_numpy()[None], 3.0) - 1e-6
    )


def test_the_joint_posterior_agrees_with_single_predictions():
    model = MixtureModel.from_runs(
        runs_of(np.random.default_rng(0).dirichlet(np.ones(3), N_RUNS), noise=0.05), "sciq/loss"
    )
    features = model.features(np.random.default_rng(2).dirichlet(np.ones(3), 7))
    mean_B, cover_BB, noise = model.gaussian_process.joint_posterior(features, -1)
    expected_BT, spread_BT = model.gaussian_process.predict(features)
    np.testing.assert_allclose(mean_B, expected_BT[:, -1], atol=1e-9)
    noise_variance = model.gaussian_process.hyperparameters["noise"] * model.gaussian_process.scale_T[-1] ** 2
    np.testing.assert_allclose(np.diag(cover_BB) + noise_variance, spread_BT[:, -1] ** 2, rtol=1e-4)
    np.testing.assert_allclose(cover_BB, cover_BB.T, atol=1e-7)
    assert np.linalg.eigvalsh(cover_BB).min() > -1e-7
    assert noise >= noise_variance


def test_proposals_differ(runs):
    model = MixtureModel.from_runs(runs, "sciq/loss")
    share_BG = np.concatenate([model.share_RG[:5], np.random.default_rng(4).dirichlet(np.full(3, 0.3), 20)])
    picked, gains, _ = most_informative(model.gaussian_process, model.features(share_BG), 6, np.random.default_rng(0))
    assert len(set(picked)) == len(picked) <= 6
    assert min(gains[1:], default=1.0) > 0  # no run that is not expected to change the result
    noisy = MixtureModel.from_runs(runs_of(model.share_RG, noise=0.5), "sciq/loss")
    picked, gains, _ = most_informative(noisy.gaussian_process, noisy.features(share_BG), 6, np.random.default_rng(0))
    assert len(set(picked)) == 6
    assert min(gains) > 0
    assert gains == sorted(gains, reverse=True)


def test_commands_predict_mix_and_propose(runs, tmp_path):
    runs.save(tmp_path / "runs")
    artifact = write_artifact(tmp_path / "art")
    pacsv.write_csv(mixtures(PEAK[None], mixture=["planted"]), tmp_path / "m.csv")
    assert "planted" in succeed("runs", "predict", tmp_path / "runs", tmp_path / "m.csv", "--metric", "sciq/loss").out
    output = succeed("runs", "mix", tmp_path / "runs", "--metric", "sciq/loss").out
    assert re.search(r"sciq/loss: proposed mixture, predicted (2\.99|3\.0)", output)
    assert re.search(r"sciq/loss: best run run-\d+, predicted \S+ \(\S+ to \S+\), measured [23]\.\d+$", output, re.M)
    command = ("runs", "propose", tmp_path / "runs", "--count", 2, "--out", tmp_path / "next.csv")
    succeed(*command, "--art", artifact.path, "--subsets", tmp_path / "next.parquet")
    (block,) = read_subsets(tmp_path / "next.parquet", RowIndex.from_parquet(artifact.rows_path))
    assert block.subset_ids == ("next-1", "next-2")
    next_runs = grasp.predict_runs(runs, tmp_path / "next.csv").to_pandas()
    assert set(next_runs["mixture"]) == {"next-1", "next-2"}
    printed = succeed("runs", "propose", tmp_path / "runs", "--count", 2).lines
    assert [cells(line)[0] for line in printed[1:6]] == ["next-1", "gain", *TOPICS]
    assert printed[6].startswith("gain: expected increase of the optimum")
    assert max(map(len, printed)) <= 140
    assert "--art" in refused("runs", "propose", tmp_path / "runs", "--subsets", tmp_path / "x.parquet")


def test_a_value_without_a_column_has_share_zero_and_uncovered_values_are_reported():
    narrow = runs_of(0.05 + 0.85 * np.random.default_rng(0).dirichlet(np.ones(3), N_RUNS))
    prediction = grasp.predict_runs(narrow, pa.table({"mixture": ["bold"], "games": [0.5], "science": [0.5]}))
    full = grasp.predict_runs(narrow, mixtures(np.array([[0.5, 0.5, 0.0]])))
    assert prediction.to_pandas()["expected"].to_list() == full.to_pandas()["expected"].to_list()
    assert re.search(
        r"outside the range of the runs, so the interval is wider: bold \(travel 0%, in the runs \d% to",
        str(prediction),
    )


def few_linear_runs(seed=0, n_runs=12, top=0.22):
    """Loss falls along a straight line with the first share, which no run has more than 22 % of."""
    rng = np.random.default_rng(seed)
    first_R = rng.uniform(0, top, n_runs)
    share_RG = np.column_stack([first_R, rng.dirichlet(np.full(2, 5.0), n_runs) * (1 - first_R[:, None])])
    names = [f"run-{r}" for r in range(n_runs)]
    loss_R = 5.5 - 1.85 * first_R + 0.003 * rng.standard_normal(n_runs)
    return grasp.import_runs(
        mixtures(share_RG, run=names), pa.table({"run": names, "sciq/loss": loss_R}), label="topic"
    )


@pytest.mark.parametrize("seed", range(4))
def test_mixtures_far_outside_have_no_prediction_but_a_proposed_run(seed):
    first_B = np.array([0.1, 0.3, 0.4, 1.0])
    requested = mixtures(
        np.column_stack([first_B, (1 - first_B) / 2, (1 - first_B) / 2]), mixture=["a", "b", "c", "far"]
    )
    prediction = grasp.predict_runs(few_linear_runs(seed), requested)
    table = prediction.to_pandas().set_index("mixture")
    for name, first in zip("abc", first_B, strict=False):
        truth = 5.5 - 1.85 * first
        assert table.loc[name, "low"] <= truth <= table.loc[name, "high"]
    assert (np.diff(table["expected"][:3]) < 0).all()
    assert prediction.to_arrow()["expected"].to_pylist()[-1] is None
    assert re.search(
        r"no prediction, too far outside the range of the runs: far \(games 100%, in the runs \d%", str(prediction)
    )
    (share,) = re.findall(r"a run that would allow a prediction of far: games (\d+)%", str(prediction))
    assert 22 < int(share) < 100


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pa.table({"games": [0.5], "science": [0.3]}), r"\b0\.8\b.*travel"),
        (pa.table({"games": [1.0], "scence": [0.0]}), "'scence'.*'science'"),
        (pa.table({"value": ["games"], "rows": [1]}), "`value`.*shares"),
        (mixtures(np.array([[0.5, 0.2, 0.2]])), r"'mixture-1': .*\b0\.9\b"),
        (mixtures(np.array([[1.5, -0.5, 0.0]])), r"numbers.*\b0\b"),
        (mixtures(PEAK[None], more=[1.0]), "'more'"),
        (mixtures(np.empty((0, 3))), "no mixture"),
    ],
)
def test_invalid_mixtures_are_refused(runs, table, message):
    with pytest.raises(RunsError, match=message):
        grasp.predict_runs(runs, table)


def with_metrics(**metrics):
    """Return runs on three topics with these metrics."""
    share_RG = np.random.default_rng(0).dirichlet(np.ones(3), N_RUNS)
    names = [f"run-{r}" for r in range(N_RUNS)]
    values = {name.replace("_", "/", 1): value(share_RG) for name, value in metrics.items()}
    return grasp.import_runs(mixtures(share_RG, run=names), pa.table({"run": names} | values), label="topic")


def test_a_metric_that_never_changes_is_left_out():
    acc = {"sciq_acc": lambda share_RG: 0.3 + 0.3 * share_RG[:, 0]}
    runs = with_metrics(gsm8k_exact_match=lambda share_RG: np.zeros(N_RUNS), **acc)
    for answer in (grasp.mix_runs, lambda runs, *args: grasp.predict_runs(runs, mixtures(PEAK[None]), *args)):
        for metric in ((), ("sciq/acc",)):
            result = answer(runs, *metric)
            assert result.table == answer(with_metrics(**acc), "sciq/acc").table
            assert "left out 1 metric, the same in all runs: gsm8k/exact_match" in result.notes
        with pytest.raises(RunsError, match="runs: gsm8k/exact_match: the same in all runs"):
            answer(runs, "gsm8k/exact_match")
    assert len(grasp.propose_runs(runs, count=1).table) == 1


def test_metrics_of_different_kinds_are_standardised_before_they_are_averaged():
    """The optimum is that of the loss if raw numbers are averaged, since its range is a hundred times as large."""
    acc = {"sciq_acc": lambda share_RG: 0.3 - 0.01 * ((share_RG - PEAK) ** 2).sum(axis=1)}
    far = np.array([0.1, 0.3, 0.6])
    runs = with_metrics(arc_ppl=lambda share_RG: 10 + ((share_RG - far) ** 2).sum(axis=1), **acc)
    result = grasp.mix_runs(runs)
    proposed = result.to_pandas().set_index("value").loc[list(TOPICS), "proposed"]
    np.testing.assert_allclose(proposed, (PEAK + far) / 2, atol=0.06)
    assert any("standard deviations over the runs, since ppl, share are averaged" in note for note in result.notes)
    one_kind = with_metrics(arc_acc=lambda share_RG: 0.1 - ((share_RG - far) ** 2).sum(axis=1), **acc)
    proposed = grasp.mix_runs(one_kind).to_pandas().set_index("value").loc[list(TOPICS), "proposed"]
    np.testing.assert_allclose(proposed, far, atol=0.06)


def test_shares_of_rows_are_no_shares_of_tokens(runs):
    shares = {"value": list(TOPICS), "now": [0.2, 0.3, 0.5], "times_as_often": [1.0, 1.0, 1.0]}
    with pytest.raises(RunsError, match=r"no shares of tokens; expected share_of_tokens$"):
        grasp.predict_runs(runs, pa.table(shares))
    both = pa.table(shares | {"share_of_tokens": [0.5, 0.3, 0.2]})
    expected = grasp.predict_runs(runs, mixtures(PEAK[None])).table["expected"]
    assert grasp.predict_runs(runs, both).table["expected"].to_pylist() == pytest.approx(expected.to_pylist())


def test_questions_that_runs_cannot_answer_are_refused(runs):
    with pytest.raises(RunsError, match=r"'sciq/los': 1.0} \(did you mean 'sciq/loss'\?\), expected some of"):
        grasp.mix_runs(runs, "sciq/los")
    with pytest.raises(RunsError, match=r"got the metrics .*'boolq'"):
        grasp.mix_runs(runs, "boolq")
    results = pa.table({"run": ["a", "b"], "sciq/acc": [0.1, 0.2]})
    rows = grasp.import_runs(pa.table({"run": ["a", "b"], "row_id": ["1", "2"]}), results)
    with pytest.raises(RunsError, match="expected runs with shares"):
        grasp.mix_runs(rows)
    with pytest.raises(SettingsError, match=r"\b1 to 125\b"):
        grasp.propose_runs(runs, count=100_000_000)
    with pytest.raises(RunsError, match="all 4 runs have the same mixture"):
        runs_of(np.tile(PEAK, (4, 1)))
    with pytest.raises(RunsError, match=r"\b1 .*subset.* 4 run"):
        GaussianProcess.fit(SubsetFeatures.from_shares(np.tile(PEAK, (4, 1)), 1), np.arange(4.0)[:, None, None])


def shares_in(result) -> np.ndarray:
    return np.column_stack([result.to_arrow()[value].to_numpy() for value in TOPICS])


def test_proposals_respect_floors_caps_and_the_limit_of_repetition(runs, tmp_path):
    art = grasp.Artifact(write_artifact(tmp_path / "art"))
    free = shares_in(grasp.propose_runs(runs, "sciq/loss", count=8))
    bounded = grasp.propose_runs(runs, "sciq/loss", count=8, floor="10%", cap=["games:40%", "travel:30%"])
    share_BG = shares_in(bounded)
    np.testing.assert_allclose(share_BG.sum(axis=1), 1.0)
    assert (share_BG >= 0.1 - 1e-9).all()
    assert (share_BG <= np.array([0.4 if v == "games" else 0.3 if v == "travel" else 1 for v in TOPICS]) + 1e-9).all()
    assert free.max() > 0.5
    assert "repetition is not limited" in str(bounded)
    rows = art.rows.to_pandas()
    tokens_G = rows.groupby("topic")["n_tokens"].sum().loc[list(TOPICS)].to_numpy()
    for most in (1.5, 4.0):
        once = grasp.propose_runs(runs, "sciq/loss", count=8, max_repeat=most, artifact=art)
        assert (shares_in(once) <= most * tokens_G / tokens_G.sum() + 1e-9).all()
        assert f"no value is seen more than {most:g} times" in str(once)


def test_proposals_repeat_each_value_as_often_as_the_planned_run(runs, tmp_path):
    artifact = write_artifact(tmp_path / "art", 3000)
    runs.save(tmp_path / "runs")
    column, tokens_N = label_column(artifact, "topic"), row_tokens(artifact)
    size_G = np.bincount(column.codes_N, tokens_N)
    planned_G = 1e12 * np.array([0.5, 0.2, 0.1])
    lines = [f"{name},{size:.0f}" for name, size in zip(column.names(), planned_G, strict=True)]
    (tmp_path / "sizes.csv").write_text("\n".join(["value,tokens", *lines]))
    command = (
        "runs",
        "propose",
        tmp_path / "runs",
        "--planned-tokens",
        "1T",
        "--source-tokens",
        tmp_path / "sizes.csv",
    )
    train_tokens = round(0.4 * tokens_N.sum())
    more = ("--art", artifact.path, "--train-tokens", train_tokens, "--subsets", tmp_path / "next.parquet")
    printed = succeed(*command, *more, "--out", tmp_path / "next.csv").out
    assert "no value is seen more than 4 times in the planned run (--max-repeat)" in printed
    shares = pacsv.read_csv(tmp_path / "next.csv").to_pandas()[list(column.names())].to_numpy()
    assert (shares <= 4 * planned_G / 1e12 + 1e-9).all()
    (block,) = read_subsets(tmp_path / "next.parquet", RowIndex.from_parquet(artifact.rows_path))
    weight_BN, of_value_NG = block.weights_BN.toarray(), np.eye(3)[column.codes_N]
    seen_BG = (weight_BN * tokens_N) @ of_value_NG
    np.testing.assert_allclose(seen_BG / seen_BG.sum(axis=1, keepdims=True), shares, atol=1e-6)
    distinct_BG = ((weight_BN > 0) * tokens_N) @ of_value_NG
    wanted_G = np.minimum(planned_G * train_tokens / 1e12, size_G)  # repeated h 1T / S times
    assert (np.abs(distinct_BG - wanted_G)[shares > 0] <= 30).all()  # half of the longest row
    assert ("the corpus is too small: " in printed) == bool((planned_G * train_tokens / 1e12 > 1.01 * size_G).any())
    without = succeed(*command).out  # neither needs the artifact
    assert "in the planned run" in without
    assert "expected both" in refused("runs", "propose", tmp_path / "runs", "--planned-tokens", "1T")


@pytest.mark.parametrize(
    ("requested", "message"),
    [
        ({"cap": "10%"}, r"the floors add up to 0.0%, the caps \(with --max-repeat\) to 30.0%"),
        ({"floor": "games:50%", "cap": "40%"}, r"games has a floor of 50.0% and at most 40.0%"),
        ({"floor": "games:500"}, r"floor games: got a number, expected a share"),
        ({"cap": "geams:5%"}, r"cap: topic has no value 'geams' \(did you mean 'games'\?\); it has"),
    ],
)
def test_bounds_of_proposals_that_cannot_be_met_are_refused(runs, requested, message):
    with pytest.raises(SettingsError, match=message):
        grasp.propose_runs(runs, **requested)


# ------------------------------------------------------------------------------------------------ sizes and lengths

COST_GX = np.array([[0.6, 0.1], [0.1, 0.1], [0.3, 0.5]])  # of small and of short runs, by value


def scaled_loss(share_BG, params, tokens):
    """Return a planted joint law, in which the first value costs small models most."""
    shrinking = np.stack([(params / 1e7) ** -0.34, (tokens / 1e9) ** -0.28])
    return 1.5 + 1 / (0.5 + np.sqrt(share_BG) @ np.array([2.0, 1.0, 0.5])) + share_BG @ COST_GX @ shrinking


def scaled_runs(noise=0.002):
    """24 mixtures of 1 M parameters, 12 of them of 10 M as well, and 6 of 100 M with more tokens."""
    rng = np.random.default_rng(7)
    share_BG = rng.dirichlet(np.full(3, 0.8), 24)
    rows = [(b, 10.0**e, n) for e, count, n in ((6, 24, 1e9), (7, 12, 1e9), (8, 6, 1e10)) for b in range(count)]
    loss = [scaled_loss(share_BG[b], params, tokens) + noise * rng.standard_normal() for b, params, tokens in rows]
    shares = pa.table({"run": [f"m{b}" for b in range(24)]} | {value: share_BG[:, g] for g, value in enumerate(TOPICS)})
    results = {"run": [f"m{b}" for b, *_ in rows], "n_params": [f"{p / 1e6:.0f}M" for _, p, _ in rows]}
    results |= {"tokens_seen": [tokens for *_, tokens in rows], "sciq/loss": loss, "arc/loss": [x + 1 for x in loss]}
    return grasp.import_runs(shares, pa.table(results), label="topic")


@pytest.fixture(scope="module")
def scaled():
    return scaled_runs()


def test_runs_of_several_sizes_predict_a_larger_and_longer_one(scaled):
    assert {"params of the runs: from the column 'n_params'", "tokens of the runs: from the column 'tokens_seen'"} <= {
        *scaled.notes
    }
    share_BG = np.random.default_rng(5).dirichlet(np.ones(3), 100)
    small_B = scaled_loss(share_BG, 1e6, 1e9)
    for params, tokens, least in ((1e8, 1e10, 0.85), (1e9, 3e10, 0.6)):  # beyond the runs all mixtures share an error
        result = grasp.predict_runs(scaled, mixtures(share_BG), "sciq/loss", params=params, tokens=tokens)
        table, truth_B = result.to_pandas(), scaled_loss(share_BG, params, tokens)
        rho = np.corrcoef(table["expected"], truth_B)[0, 1]
        assert rho > 0.9 > np.corrcoef(small_B, truth_B)[0, 1]
        assert ((table["low"] < truth_B) & (truth_B < table["high"])).mean() > least
    assert "mean of many seeds of 1B parameters, 30B tokens" in str(result)
    assert any("rank correlation between mixtures of 1M parameters, 1B tokens and of 1B" in n for n in result.notes)


def test_intervals_grow_with_the_distance_from_the_runs(scaled):
    share_BG = np.random.default_rng(6).dirichlet(np.ones(3), 20)
    models = [MixtureModel.from_runs(scaled, "sciq/loss", params) for params in ("10M", "100M", "1B", "10B")]
    widths = [float(model.predict(share_BG)[1].mean()) for model in models]
    assert widths[1] < widths[2] < widths[3]
    best = [grasp.mix_runs(scaled, "sciq/loss", params=params).to_pandas() for params in ("1M", "10B")]
    first = [table.set_index("value").loc[TOPICS[0], "proposed"] for table in best]
    assert first[1] > first[0]  # its cost is that of a small model


def test_a_size_that_no_run_supports_is_refused_with_the_runs_that_would_settle_it(scaled, runs):
    with pytest.raises(RunsError, match=r"--params: got .*the runs have 1M to 100M"):
        grasp.mix_runs(scaled, params="1000000T")
    with pytest.raises(RunsError, match=r"--params: got 70B, the runs have 1M to 100M: .*six or more, at 265M"):
        grasp.mix_runs(scaled, params="70B")
    with pytest.raises(RunsError, match=r"--tokens: all runs have one size and length.*six or more, at another"):
        grasp.mix_runs(runs, tokens="1T")
    with pytest.raises(SettingsError, match=r"params: got 'big'"):
        grasp.mix_runs(scaled, params="big")


def test_one_size_of_several_is_predicted_as_if_it_were_alone(scaled):
    """The order of runs and their names do not matter, nor do results in another unit."""
    single, scale_RX = scaled.select_size("1M").by_scale()
    assert scale_RX is None
    assert len(single) == 24
    table, scale_RX = scaled.by_scale()
    assert len(table) == 42
    assert sorted({name.partition(" (")[2] for name in table.runs}) == [
        "100M, 10B tokens)",
        "10M, 1B tokens)",
        "1M, 1B tokens)",
    ]
    for r, name in enumerate(table.runs):
        b = int(name.partition(" ")[0][1:])
        np.testing.assert_array_equal(table.weights_RG()[r], single.weights_RG()[b])
    np.testing.assert_allclose(np.exp(scale_RX).max(axis=0), [1e8, 1e10])


# ---------------------------------------------------------------------------------------------------------- guards


@pytest.fixture(scope="module")
def rivals():
    """Three tasks, each of which one value helps most."""
    share_RG = np.random.default_rng(0).dirichlet(np.ones(3), N_RUNS)
    noise_R3 = 0.01 * np.random.default_rng(1).standard_normal((N_RUNS, 3))
    losses = 3 - np.sqrt(share_RG) * np.array([1.0, 0.9, 0.8]) + noise_R3
    names = [f"run-{r}" for r in range(N_RUNS)]
    results = {"run": names} | {f"{name}/loss": losses[:, t] for t, name in enumerate(("code", "mmlu", "arc"))}
    shares = {"run": names} | {value: share_RG[:, g] for g, value in enumerate(TOPICS)}
    return grasp.import_runs(pa.table(shares), pa.table(results), label="topic")


@pytest.mark.parametrize("tolerance", [0.0, 0.1])
def test_a_guarded_mixture_meets_its_guards_and_no_other_one_that_does_is_better(rivals, tolerance):
    result = grasp.mix_runs(rivals, "code/loss", not_worse=["mmlu/loss", "arc/loss"], tolerance=tolerance)
    share_G = result.to_pandas().set_index("value").loc[list(TOPICS), "proposed"].to_numpy()
    model = MixtureModel.from_runs(rivals, "code/loss")
    mean_G, n_std = model.share_RG.mean(axis=0), model.gaussian_process.quantile(0.8)
    inside_BG = np.random.default_rng(2).dirichlet(np.ones(3), 20_000)
    is_inside_B = ((inside_BG >= model.share_RG.min(axis=0)) & (inside_BG <= model.share_RG.max(axis=0))).all(axis=1)
    inside_BG = np.concatenate([share_G[None], inside_BG[is_inside_B]])
    change_BJ, std_BJ = model.change(inside_BG, mean_G)
    lower_BK = (change_BJ - n_std * std_BJ)[:, [model.table.metrics.index(name) for name in ("mmlu/loss", "arc/loss")]]
    objective_B = model.predict_objective(inside_BG)
    assert (lower_BK[0] >= -tolerance - 1e-5).all()
    meets_B = (lower_BK >= -tolerance).all(axis=1)
    assert meets_B.sum() > 20
    assert objective_B[0] >= objective_B[meets_B].max() - 0.005
    assert objective_B[0] < objective_B.max() - 0.02  # the guards have a price
    assert sum("without it the objective gains 0." in note for note in result.notes) == 2


def test_guards_that_nothing_meets_are_relaxed_by_the_least_amount_and_named(rivals):
    result = grasp.mix_runs(rivals, "code/loss", not_worse="code/loss,mmlu/loss,arc/loss", tolerance=0.0)
    narrow = runs_of(np.random.default_rng(0).dirichlet(np.ones(3), 8), noise=0.3)  # so noisy that nothing is certain
    relaxed = grasp.mix_runs(narrow, "arc/acc", not_worse="sciq/loss")
    assert not any("relaxed" in note for note in result.notes)  # the mean mixture meets all of them
    assert any("guard sciq/loss: predicted change" in note for note in relaxed.notes)
    with pytest.raises(
        SettingsError, match=r"not_worse: got 'mmlu' \(did you mean 'mmlu/loss'\?\)|not_worse: got 'mmlu'"
    ):
        grasp.mix_runs(rivals, "code/loss", not_worse="mmlu")
    with pytest.raises(SettingsError, match=r"tolerance: got 0\.1, expected 0 or more, and targets"):
        grasp.mix_runs(rivals, "code/loss", tolerance=0.1)
