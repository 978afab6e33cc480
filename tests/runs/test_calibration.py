"""Runs with an artifact: all functions agree, for retrained and for imported runs."""

import dataclasses
import functools
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy.sparse import csr_array

import grasp
from grasp.api.predict import predict
from grasp.artifact.label_table import LabelTable
from grasp.artifact.rows import row_tokens
from grasp.errors import ProtocolLeakError, RunsError, SettingsError
from grasp.paper.calibrate import calibrate
from grasp.predict.families import parse_family
from grasp.predict.predictor import Predictor
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.predict.slices import label_slices
from grasp.predict.subset_tables import RowIndex
from grasp.predict.weights import Weights
from grasp.runs.alignment import Alignment
from grasp.runs.calibration import WITHIN_SLICE_WEIGHT, SubsetFeaturizer, fit_outcomes
from grasp.runs.imported_runs import bind_runs, row_weights
from grasp.runs.table import RunTable
from grasp.select.mix import mix
from grasp.select.ranking import MIN_RELATIVE_GAIN
from grasp.select.select import select
from tests.runs.environments import TOPICS, write_artifact, write_environment

PROTOCOL = ScoringProtocol(name="p")
SLOPE = {"sciq": 0.02, "boolq": 0.005}
N_RUNS = 40


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    return write_artifact(tmp_path_factory.mktemp("learning") / "art")


@pytest.fixture(scope="module")
def environment(artifact, tmp_path_factory):
    """U = -3 + slope x change + noise."""
    labels = LabelTable(artifact.rows_path).column("topic")
    family = parse_family("mixture:topic")
    blocks = family.draw(N_RUNS, n_rows=artifact.n_rows, labels=labels, seed=3, purpose="evaluation")
    predictor = Predictor.from_artifact(artifact, PROTOCOL)
    change_BT = np.concatenate([predictor.change(block.weights) for block in blocks])
    noise = 0.002 * np.random.default_rng(1).standard_normal((N_RUNS, 2))

    def utility(b, seed, target):
        return -3.0 + SLOPE[target] * change_BT[b, ("sciq", "boolq").index(target)] + noise[b, seed]

    return write_environment(tmp_path_factory.mktemp("learning") / "env", artifact, utility)


@pytest.fixture
def ask(artifact, environment):
    return functools.partial(predict, artifact, protocol=PROTOCOL, runs=environment)


def runs_of(share_RG, value_R, values=TOPICS, metric="sciq/acc", **fields):
    """Return runs trained on shares of topics."""
    names = [f"run-{r}" for r in range(len(share_RG))]
    shares = pa.table({"run": names} | {value: share_RG[:, g] for g, value in enumerate(values)})
    return grasp.import_runs(shares, pa.table({"run": names, metric: value_R}), label="topic", **fields)


def imported(values=TOPICS, n=30, **fields):
    """Import runs in which the second value helps with decreasing returns."""
    share_RG = np.random.default_rng(2).dirichlet(np.ones(len(values)), n)
    return runs_of(share_RG, 0.2 + 0.1 * np.log(share_RG[:, 1] + 0.02), values, **fields), share_RG


def test_all_functions_agree_and_the_corpus_has_no_uncertainty(artifact, environment, ask):
    topic = next(artifact.row_batches(["topic"])).column(0)[0].as_py()
    dropped = ask(drop=f"topic = '{topic}'").to_pandas()
    by = ask(by="topic").to_pandas().set_index(["value", "target"])
    for _, line in dropped.iterrows():
        same = by.loc[(topic, line["target"])]
        for name in ("nats", "nats_low", "nats_high"):
            assert line[name] == pytest.approx(same[name], abs=1e-5)
        assert line["nats_low"] < line["nats"] < line["nats_high"]
        assert line["nats"] == pytest.approx(SLOPE[line["target"]] * line["change"], abs=0.004)
    everything = {"all": next(artifact.row_batches(["row_id"])).column(0).to_pylist()}
    whole = ask(subsets=everything).to_pandas()
    np.testing.assert_allclose(whole[["nats", "nats_low", "nats_high"]], 0.0, atol=1e-4)
    assert any(note.startswith("nats, nats_low, nats_high: change in nats per token") for note in ask(by="topic").notes)


def random_subsets(artifact, share, count):
    """Return the row ids of random subsets with a share of the rows, by name."""
    ids, rng = next(artifact.row_batches(["row_id"])).column(0).to_pylist(), np.random.default_rng(0)
    return {f"s{k}": rng.choice(ids, round(share * len(ids)), replace=False).tolist() for k in range(count)}


def test_only_mixtures_far_from_the_runs_give_a_warning(artifact, ask):
    assert not [note for note in ask(subsets=random_subsets(artifact, 0.95, 50)).notes if note.startswith("outside")]
    ids = next(artifact.row_batches(["row_id"])).column(0).to_pylist()
    (note,) = [note for note in ask(subsets={"one row": ids[:1]}).notes if note.startswith("outside")]
    pattern = r"outside the range of the runs, .*: one row \(\d+\.\d times as far"
    assert re.match(pattern, note)


def test_units_have_no_interval(artifact, ask):
    table = ask(subsets=random_subsets(artifact, 0.5, 2), units=True).to_pandas()
    assert table["nats"].notna().tolist() == table["unit_id"].isna().tolist()


def test_held_out_runs_are_refused(artifact, tmp_path):
    held = write_environment(tmp_path / "held", artifact, lambda b, s, _: 0.1 * b, role="held-out")
    predictor = Predictor.from_artifact(artifact, PROTOCOL)
    with pytest.raises(ProtocolLeakError, match="held: is held out"):
        fit_outcomes(predictor, artifact, held)
    partly = write_environment(tmp_path / "partly", artifact, lambda b, s, _: 0.1 * b, held_out_targets=("boolq",))
    bound = fit_outcomes(predictor, artifact, partly)
    assert list(bound.task_by_target) == ["sciq"]
    assert any("no runs for boolq" in note for note in bound.notes)


def test_runs_that_contradict_relevance_give_a_note(artifact, environment, tmp_path):
    predictor = Predictor.from_artifact(artifact, PROTOCOL, ["sciq"])
    values = environment.utilities("sciq").values_BSE.mean(axis=(1, 2))
    down = write_environment(tmp_path / "falls", artifact, lambda b, s, _: -values[b])
    assert any("sciq: utilities do not increase" in note for note in fit_outcomes(predictor, artifact, down).notes)


def test_imported_runs_are_matched_by_label_in_their_own_unit(artifact):
    runs, _ = imported()
    ask = functools.partial(predict, artifact, protocol=PROTOCOL, target="sciq")
    answer = ask(by="topic", runs=runs)
    table = answer.to_pandas().set_index("value")
    assert table.loc[TOPICS[1], "acc"] < -0.02 < table.loc[TOPICS[0], "acc"]
    assert list(table.columns)[-3:] == ["acc", "acc_low", "acc_high"]
    assert any(
        note.startswith("acc, acc_low, acc_high: increase of sciq/acc (above 0 is better), 90% interval, by the 30")
        for note in answer.notes
    )
    mixture = mix(artifact, "topic", "sciq", protocol=PROTOCOL, runs=runs)
    assert mixture.targets.column_names == ["target", "weight", "change", "acc", "acc_low", "acc_high"]
    assert mixture.summary()["runs_unit"] == "acc"


@pytest.mark.parametrize(
    ("metric", "options", "unit"),
    [
        ("sciq/loss", {}, "nats"),
        ("sciq/perplexity", {}, "less_perplexity"),
        ("sciq", {"higher": ["sciq"]}, "metric"),
        ("sciq/acc_norm,none", {}, "acc_norm_none"),
    ],
)
def test_columns_are_named_after_the_metric(artifact, metric, options, unit):
    runs, _ = imported(metric=metric, **options)
    table = predict(artifact, by="topic", protocol=PROTOCOL, target="sciq", runs=runs).table
    assert table.column_names[-3:] == [unit, f"{unit}_low", f"{unit}_high"]


def test_imported_runs_are_evaluated_calibrated_on_and_reported(artifact, environment, tmp_path):
    """What was retrained, once more as a table of row ids and metrics: the same figures of tasks."""
    utilities = environment.utilities()
    ids = np.concatenate([batch.column(0).to_pylist() for batch in artifact.row_batches(["row_id"])])
    labels = LabelTable(artifact.rows_path).column("topic")
    blocks = list(environment.subset_blocks(RowIndex.from_parquet(artifact.rows_path), labels))
    weights_BN = blocks[0].weights_BN
    names = np.repeat(utilities.subset_ids, np.diff(weights_BN.indptr))
    trained = pa.table({"run": names, "row_id": ids[weights_BN.indices]})
    loss = {f"{t}/loss": -utilities.select(t).values_BSE.mean(axis=2).T.ravel() for t in ("sciq", "boolq")}
    seeds = np.repeat(utilities.seeds, len(utilities.subset_ids))
    results = pa.table({"run": np.tile(utilities.subset_ids, 2), "seed": seeds} | loss)
    runs = grasp.import_runs(trained, results, out=tmp_path / "runs")
    art = grasp.Artifact(artifact)
    same, imported_ones = grasp.evaluate(art, environment), grasp.evaluate(art, tmp_path / "runs")
    for result, other in zip(same.records(), imported_ones.records(), strict=True):
        assert (result["method"], result["target"]) == (other["method"], other["target"])
        for metric in ("task_rho", "task_ceiling", "pairwise"):
            assert other[metric] == pytest.approx(result[metric], abs=1e-6)
    assert "undefined: mean_lds of output_layer additive on sciq, boolq: no predictions for units" in repr(
        imported_ones
    )
    assert "single units are undefined" in repr(imported_ones)
    assert calibrate(art, runs).protocol.match == calibrate(art, environment).protocol.match
    page = art.report(tmp_path / "page.html", runs=tmp_path / "runs").read_text()
    assert "recipe imported" in page


def test_evaluated_predictions_equal_those_of_predict(tmp_path):
    artifact = write_artifact(tmp_path / "art", kernel="output_layer+embedding")
    protocol = ScoringProtocol(name="p", match={"output_layer": 1.0, "embedding": 0.25}, negative=0.5)
    alignment = Alignment.from_runs(bind_runs(artifact, imported(weights="times")[0]), artifact)
    (bound,) = alignment.predict({"p": protocol}, alignment.runs.targets)
    predictor = Predictor.from_artifact(artifact, protocol, ["sciq"])
    (block,) = alignment.blocks
    assert np.ptp(block.weights_BN.toarray()) > 0  # rows that are seen often count as less than so many
    np.testing.assert_allclose(bound.task_B[alignment.runs.targets[0]], predictor.change(block.weights)[:, 0])


def test_runs_that_lack_seeds_are_averaged(artifact):
    runs, _ = imported()
    extra = runs.results.slice(0, 1).set_column(1, "seed", pa.array([1], pa.int64()))
    results = pa.concat_tables([runs.results, extra.set_column(7, "utility", pa.array([0.3]))])
    predictor = bind_runs(artifact, RunTable.from_results("uneven", runs.info, runs.trained, results))
    assert predictor.utilities().values_BSE.shape == (30, 1, 1)
    assert np.isnan(predictor.task_utilities(["sciq"])).sum() == 29
    assert (
        fit_outcomes(
            Predictor.from_artifact(artifact, PROTOCOL, ["sciq"]), artifact, predictor
        ).gaussian_process.hyperparameters["seed noise"]
        > 0
    )


def test_shares_and_times_become_weights_of_rows(artifact):
    column = LabelTable(artifact.rows_path).column("topic")
    runs, share_RG = imported(
        tuple(f"train_{name}" for name in TOPICS), measure="rows"
    )  # the common prefix is optional
    (block,), pattern = row_weights(runs, artifact)
    dense_RN = block.weights.mix[:, column.codes_N]
    per_topic = np.stack([dense_RN[:, column.codes_N == column.values.index(name)].sum(axis=1) for name in TOPICS], 1)
    np.testing.assert_allclose(per_topic / dense_RN.sum(axis=1, keepdims=True), share_RG, atol=1e-9)
    assert pattern == []
    (block,), _ = row_weights(imported(measure="tokens")[0], artifact)
    tokens_RN = block.weights.mix[:, column.codes_N] * row_tokens(artifact)
    per_topic = np.stack([tokens_RN[:, column.codes_N == column.values.index(name)].sum(axis=1) for name in TOPICS], 1)
    np.testing.assert_allclose(per_topic / tokens_RN.sum(axis=1, keepdims=True), share_RG, atol=1e-9)
    twice, _ = imported(weights="times")
    (block,), _ = row_weights(twice, artifact)
    np.testing.assert_allclose(block.weights.mix[:, column.values.index(TOPICS[0])], share_RG[:, 0], atol=1e-9)


def test_changes_follow_what_shares_are_shares_of(artifact):
    """A loss that is linear in a topic's share of tokens, and in its share of rows."""
    column, share_RG = LabelTable(artifact.rows_path).column("topic"), imported()[1]
    predictor = Predictor.from_artifact(artifact, PROTOCOL, ["sciq"])
    slices = label_slices(column, row_tokens(artifact))
    for measure, amount_N in (("tokens", row_tokens(artifact)), ("rows", np.ones(artifact.n_rows))):
        runs = runs_of(share_RG, 3 - share_RG[:, 1], metric="sciq/loss", measure=measure)
        is_topic_N = column.codes_N == column.values.index(TOPICS[1])
        share = (amount_N * is_topic_N).sum() / amount_N.sum()
        outcomes = fit_outcomes(predictor, artifact, runs)
        change_G = dict(zip(slices.names, outcomes.predict(slices.dropped).change_BT[:, 0], strict=True))
        assert change_G[TOPICS[1]] == pytest.approx(-share, abs=0.01)
        gradient_N = outcomes.row_gradients(Weights(csr_array((1, artifact.n_rows)), base=1.0), np.ones(1))
        np.testing.assert_allclose(np.corrcoef(gradient_N, amount_N * (is_topic_N - share))[0, 1], 1.0, atol=0.02)


def test_a_metric_that_never_changes_is_left_out(artifact):
    share_RG = imported()[1]
    names = [f"run-{r}" for r in range(len(share_RG))]
    shares = pa.table({"run": names} | {value: share_RG[:, g] for g, value in enumerate(TOPICS)})
    acc = 0.3 + 0.3 * share_RG[:, 1]
    metrics = {"sciq/loss": np.full(30, 2.0), "sciq/acc": acc, "boolq/exact_match": np.zeros(30)}
    runs = grasp.import_runs(shares, pa.table({"run": names} | metrics), label="topic")
    outcomes = fit_outcomes(Predictor.from_artifact(artifact, PROTOCOL), artifact, runs)
    assert outcomes.task_by_target == {"sciq": 0}
    assert "left out 1 metric, the same in all runs: boolq/exact_match" in outcomes.notes
    single_metric = fit_outcomes(
        Predictor.from_artifact(artifact, PROTOCOL, ["sciq"]), artifact, runs_of(share_RG, acc)
    )
    np.testing.assert_array_equal(outcomes.utility_RST, single_metric.utility_RST)
    with pytest.raises(RunsError, match=r"runs: boolq/exact_match: the same in all runs"):
        fit_outcomes(Predictor.from_artifact(artifact, PROTOCOL, ["boolq"]), artifact, runs)


def test_changes_of_metrics_of_different_kinds_are_not_averaged(artifact):
    share_RG = imported()[1]
    names = [f"run-{r}" for r in range(len(share_RG))]
    shares = pa.table({"run": names} | {value: share_RG[:, g] for g, value in enumerate(TOPICS)})
    results = {"run": names, "sciq/loss": 3 - share_RG[:, 1], "boolq/acc": 0.3 + 0.3 * share_RG[:, 1]}
    runs = grasp.import_runs(shares, pa.table(results), label="topic")
    with pytest.raises(SettingsError, match="got loss of sciq, share of boolq; different metrics cannot be averaged"):
        select(artifact, "25%", "sciq,boolq", protocol=PROTOCOL, runs=runs)
    noise_RT = np.random.default_rng(0).standard_normal((len(names), 2))
    noise = pa.table({"run": names, "sciq/loss": 3 + noise_RT[:, 0], "boolq/acc": 0.5 + 0.1 * noise_RT[:, 1]})
    options = {"protocol": PROTOCOL, "runs": grasp.import_runs(shares, noise, label="topic")}
    headlines = [
        select(artifact, "25%", names, train_tokens=1e6, **options).headline for names in ("boolq", "sciq,boolq")
    ]
    assert re.match(r"not distinguishable .* metric, 90% interval\)", headlines[0])
    assert "not distinguishable" not in headlines[1]
    percent = pa.table({"run": names, "sciq/acc": 100 * share_RG[:, 1], "boolq/acc": share_RG[:, 1]})
    with pytest.raises(SettingsError, match="percent of sciq, share of boolq"):
        mix(artifact, "topic", "sciq,boolq", protocol=PROTOCOL, runs=grasp.import_runs(shares, percent, label="topic"))


def test_runs_of_documents(artifact):
    results = pa.table({"run": ["a", "b"], "sciq": [0.1, 0.2]})
    documents = pa.table({"run": ["a", "b", "b"], "doc_id": ["doc-3", "doc-5", "doc-4"], "weight": [1.0, 1.0, 2.0]})
    (block,), _ = row_weights(grasp.import_runs(documents, results, higher=["sciq"]), artifact)
    dense = block.weights_BN.toarray()
    assert (dense[0, 3], dense[1, 4], dense[1, 5], dense.sum()) == (1.0, 2.0, 1.0, 4.0)


def test_runs_of_another_corpus_are_refused_with_the_missing_values(artifact):
    rows = pa.table({"run": ["a", "b"], "row_id": ["row-1", "nowhere"]})
    strange = grasp.import_runs(rows, pa.table({"run": ["a", "b"], "sciq/acc": [0.1, 0.2]}))
    runs, _ = imported()
    misspelled = dataclasses.replace(runs, info=runs.info.model_copy(update={"label": "opic"}))
    for runs, pattern in (
        (imported(("games", "news", "code"))[0], "2 values of topic are not in the artifact: news, code"),
        (imported(metric="arc/acc")[0], "metrics arc/acc.*targets sciq, boolq"),
        (misspelled, r"unknown column 'opic' \(did you mean 'topic'\?\).*again with --label"),
        (imported(n=1)[0], r"got 1 different subset\(s\) in 1 run\(s\)"),
        (strange, r"subset 'b' names 1 rows that the corpus does not have, e\.g\. \['nowhere'\]"),
    ):
        with pytest.raises(RunsError, match=pattern):
            fit_outcomes(Predictor.from_artifact(artifact, PROTOCOL), artifact, runs)


def test_the_best_mixture_of_saturating_runs_is_in_the_interior(artifact):
    share_RG = np.random.default_rng(4).dirichlet(np.ones(3), 60)
    peak_G = np.array([0.5, 0.3, 0.2])
    runs = runs_of(share_RG, -((share_RG - peak_G) ** 2).sum(axis=1))
    plain = mix(artifact, "topic", "sciq", protocol=PROTOCOL, max_repeat=50, runs=runs)
    table = plain.to_pandas().set_index("value")
    np.testing.assert_allclose(table.loc[list(TOPICS), "proposed"], peak_G, atol=0.05)
    careful = mix(artifact, "topic", "sciq", protocol=PROTOCOL, max_repeat=50, runs=runs, cautious=True)
    lower = [result.targets["acc_low"][0].as_py() for result in (careful, plain)]
    assert lower[0] >= lower[1] - 1e-6
    with pytest.raises(SettingsError, match="cautious: requires `runs`"):
        mix(artifact, "topic", "sciq", protocol=PROTOCOL, cautious=True)
    baseline = mix(artifact, "topic", "sciq", protocol=PROTOCOL, max_repeat=50).to_pandas().set_index("value")
    assert np.abs(baseline.loc[list(TOPICS), "proposed"] - peak_G).max() > 0.1  # relevance alone ends elsewhere
    bounded = mix(artifact, "topic", "sciq", protocol=PROTOCOL, max_repeat=50, runs=runs, cap=["games:20%"])
    assert bounded.to_pandas().set_index("value").loc["games", "proposed"] <= 0.2 + 1e-6


def test_a_mixture_stays_within_the_shares_of_rows_of_runs_with_shares_of_tokens(tmp_path):
    artifact = write_artifact(tmp_path / "art")
    column = LabelTable(artifact.rows_path).column("topic")
    tokens_N = np.where(column.codes_N == column.values.index(TOPICS[1]), 40, 10)
    rows = pq.read_table(artifact.rows_path)
    place, counts = rows.column_names.index("n_tokens"), pa.array(tokens_N, pa.int32())
    pq.write_table(rows.set_column(place, rows.schema.field("n_tokens"), counts), artifact.rows_path)
    first = np.linspace(0.2, 0.5, 30)
    share_RG = np.stack([(1 - first) / 2, first, (1 - first) / 2], axis=1)
    runs = runs_of(share_RG, first, measure="tokens")
    best = functools.partial(mix, artifact, "topic", "sciq", protocol=PROTOCOL, max_repeat=50, runs=runs)
    plain = best().to_pandas().set_index("value")["proposed"]
    # half of the tokens are a fifth of the rows, as each has four times as many tokens
    np.testing.assert_allclose(plain[list(TOPICS)], [0.4, 0.2, 0.4], atol=1e-3)
    notes = best(floor=["games:50%"]).notes
    assert any(note.endswith("range of their shares of rows") for note in best().notes)
    assert any(note.endswith("range of their shares of rows, except games") for note in notes)
    wide = best(distance="1%")
    assert any("the distance exclude the range of their shares" in note for note in wide.notes)


def test_rows_are_selected_by_the_prediction_of_the_runs(artifact):
    """Runs that say the opposite of relevance: where they are given, what they say is taken."""
    predictor = Predictor.from_artifact(artifact, PROTOCOL, ["sciq"])
    column = LabelTable(artifact.rows_path).column("topic")
    effect_G = [predictor.effect_NT[column.codes_N == column.values.index(name), 0].mean() for name in TOPICS]
    worst = TOPICS[int(np.argmin(effect_G))]
    share_RG = np.random.default_rng(4).dirichlet(np.ones(3), 60)
    runs = runs_of(share_RG, share_RG[:, TOPICS.index(worst)])
    choose = functools.partial(select, artifact, "25%", "sciq", protocol=PROTOCOL)
    baseline, plain, careful = choose(), choose(runs=runs), choose(runs=runs, cautious=True)

    def share(selection):
        return np.mean(column.codes_N[selection.row_index] == column.values.index(worst))

    assert share(plain) > 0.7 > 0.3 > share(baseline)
    assert len(plain) == len(baseline) == len(careful)
    best, low = ([result.targets[name][0].as_py() for result in (plain, careful)] for name in ("acc", "acc_low"))
    assert best[0] >= best[1]
    assert low[1] > low[0] - MIN_RELATIVE_GAIN * abs(low[0])  # the climb ends where a round gains less
    assert f"{best[0]:+.4f} acc" in plain.guarantee  # printed with --notes
    with pytest.raises(SettingsError, match="cautious: requires `runs`"):
        choose(cautious=True)


def test_runs_that_agree_with_relevance_do_not_change_the_selection(artifact, environment):
    plain = select(artifact, "25%", "sciq", protocol=PROTOCOL, runs=environment)
    baseline = select(artifact, "25%", "sciq", protocol=PROTOCOL)
    overlap = len(set(plain.row_ids) & set(baseline.row_ids)) / len(baseline)
    assert overlap >= 0.75  # what rows are chosen by within their topic counts less beside runs


@pytest.mark.parametrize(("kernel", "weight"), [("output_layer", WITHIN_SLICE_WEIGHT), ("gradient", 1.0)])
def test_rows_chosen_within_slices_count_less_beside_runs_but_by_gradients_whole(tmp_path, kernel, weight):
    artifact = write_artifact(tmp_path / "art", kernel=kernel)
    predictor = Predictor.from_artifact(artifact, ScoringProtocol(name="p", match={kernel: 1.0}))
    column = LabelTable(artifact.rows_path).column("topic")
    known = SubsetFeaturizer.from_predictor(predictor, artifact, (label_slices(column, row_tokens(artifact)),))
    weight_BG = np.array([[2.0, 0.5, 1.0], [1.0, 0.0, 3.0]])
    mixtures = Weights.from_slices(column.codes_N, weight_BG.shape[1]).mixed(weight_BG)
    whole = known.features(mixtures)
    np.testing.assert_allclose(whole.within_slice_BT, 0.0, atol=1e-6)
    np.testing.assert_allclose(whole.relevance_BT, predictor.change(mixtures), atol=1e-6)
    best_N = np.zeros(predictor.n_rows)
    for g in range(3):  # the better half of each topic
        rows = np.flatnonzero(column.codes_N == g)
        best_N[rows[np.argsort(-predictor.effect_NT[rows, 0])[: len(rows) // 2]]] = 1.0
    chosen = Weights(csr_array(best_N[None]))
    features = known.features(chosen)
    assert features.within_slice_BT[0, 0] > 0
    np.testing.assert_allclose(
        features.relevance_BT, predictor.change(chosen) - (1 - weight) * features.within_slice_BT, atol=1e-6
    )
