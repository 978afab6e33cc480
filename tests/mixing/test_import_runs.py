"""Import of runs from common file formats, and refusals."""

import csv
import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import grasp
from grasp.errors import RunsError
from grasp.files import UNSIGNED, entry_of, with_checksum
from grasp.runs.table import RunTable

SHARES = [["run", "wiki", "code", "books"], ["a", 0.5, 0.3, 0.2], ["b", 0.1, 0.1, 0.8], ["c", 0.0, 1.0, 0.0]]
LOSSES = [["run", "val_loss/sciq", "acc"], ["a", 3.5, 0.4], ["b", 3.25, 0.5], ["c", 4.0, 0.25]]


def write(path, lines):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    return path


def changed(lines, row, column, value):
    copy = [list(line) for line in lines]
    copy[row][column] = value
    return copy


def read(tmp_path, shares=SHARES, losses=LOSSES, **options) -> RunTable:
    options = {"label": "source"} | options
    return grasp.import_runs(write(tmp_path / "m.csv", shares), write(tmp_path / "r.csv", losses), **options)


def test_a_pair_of_tables_is_read_stored_and_opened_again(tmp_path):
    runs = read(tmp_path, out=tmp_path / "runs")
    reopened = grasp.open_runs(tmp_path / "runs")
    for table in (runs, reopened):
        assert table.runs == ("a", "b", "c")
        assert table.values == ("wiki", "code", "books")
        np.testing.assert_allclose(table.weights_RG()[1], [0.1, 0.1, 0.8])
        np.testing.assert_allclose(table.utility_RST()[:, 0], [[-3.5, 0.4], [-3.25, 0.5], [-4.0, 0.25]])
        assert table.info.metrics == {"val_loss/sciq": "lower", "acc": "higher"}


def test_one_wide_table_with_seeds_and_sizes(tmp_path):
    head = ["name", "seed", "size", "tokens", "w_x", "w_y", "loss"]
    lines = [
        head,
        ["a", 0, "1M", 1e9, 0.4, 0.6, 2.0],
        ["a", 1, "1M", 1e9, 0.4, 0.6, 3.0],
        ["b", 0, "60M", 1e9, 1, 0, 1.0],
    ]
    runs = grasp.import_runs(write(tmp_path / "w.csv", lines), label="topic", metrics=["loss"], columns=["w_*"])
    with pytest.raises(RunsError, match="has runs of sizes"):
        runs.utility_RST()
    small = runs.select_size("1M")
    np.testing.assert_allclose(small.utility_RST()[:, :, 0], [[-2.0, -3.0]])
    table = pa.table({name: [line[k] for line in lines[1:]] for k, name in enumerate(head)})
    pq.write_table(table, tmp_path / "w.parquet")
    assert runs.results["tokens"].to_pylist() == [1e9] * 3
    assert runs.results["params"].to_pylist() == [1e6, 1e6, 6e7]  # of the size
    reopened = grasp.import_runs(tmp_path / "w.parquet", label="topic", metrics=["loss"], columns=["w_*"])
    assert reopened.trained.equals(runs.trained)
    assert reopened.results.equals(runs.results)


def test_parameters_and_tokens_of_a_run_are_stored(tmp_path):
    lines = [[*line, f"{k}e6", 2e9 * k] for k, line in enumerate(LOSSES)]
    lines[0][-2:] = ["params", "train_tokens"]
    read(tmp_path, losses=lines, out=tmp_path / "runs")
    runs = grasp.open_runs(tmp_path / "runs")
    of_run = {line["subset_id"]: (line["params"], line["tokens"]) for line in runs.results.to_pylist()}
    assert of_run == {"a": (1e6, 2e9), "b": (2e6, 4e9), "c": (3e6, 6e9)}
    assert len(runs.sizes) == 3  # without another column, the parameters are the size


def test_sizes_are_compared_by_their_ranking_of_common_runs():
    shares = pa.table({"run": list("abcde"), "x": [0.1, 0.2, 0.3, 0.4, 0.5], "y": [0.9, 0.8, 0.7, 0.6, 0.5]})
    results = pa.table(
        {"run": list("abcde") + list("abcd"), "size": ["1M"] * 5 + ["60M"] * 4}
        | {"loss": [5.0, 4.0, 3.0, 2.0, 1.0, 2.5, 2.4, 2.2, 2.3], "acc": [0.1, 0.2, 0.3, 0.4, 0.5, 0.1, 0.2, 0.3, 0.4]}
    )
    runs = grasp.import_runs(shares, results, label="source")
    ((table, other, n, rho),) = runs.agreement_of_sizes()
    assert (table, other, n) == ("1M", "60M", 4)
    assert rho == pytest.approx((0.8 + 1.0) / 2)
    assert re.search(r"1M +60M +4 +0.900", repr(runs))


def test_metric_directions_are_read_from_a_directory_of_the_harness(tmp_path):
    for run, acc in (("a", 0.4), ("b", 0.5), ("c", 0.25)):
        results = {"sciq": {"alias": "sciq", "acc,none": acc, "acc_stderr,none": 0.01, "odd,none": 1 - acc}}
        place = tmp_path / "harness" / run / "model"
        place.mkdir(parents=True)
        better = {"sciq": {"acc": True, "odd": False}}
        (place / "results_1.json").write_text(json.dumps({"results": results, "higher_is_better": better}))
    runs = grasp.import_runs(write(tmp_path / "m.csv", SHARES), tmp_path / "harness", label="source")
    assert runs.info.metrics == {"sciq/acc": "higher", "sciq/odd": "lower"}
    np.testing.assert_allclose(runs.utility_RST()[:, 0], [[0.4, -0.6], [0.5, -0.5], [0.25, -0.75]])


def test_both_exports_of_wandb(tmp_path):
    table = [
        ["Name", "State", "User", "eval/loss"],
        ["a", "finished", "x", 3],
        ["b", "crashed", "x", ""],
        ["c", "finished", "x", 1],
    ]
    runs = read(tmp_path, losses=table, metrics=["eval/*"], skip_failed=True)
    assert runs.runs == ("a", "c")
    assert "skipped as failed: 1 result, e.g. of run b" in runs.notes
    panel = [
        ["Step", "a - eval/loss", "a - eval/loss__MIN", "b - eval/loss", "c - eval/loss"],
        [1, 9, 9, 8, 7],
        [2, 3, 3, 2, ""],
    ]
    np.testing.assert_allclose(read(tmp_path, losses=panel).utility_RST()[:, 0, 0], [-3, -2, -7])


def test_long_tables_of_rows(tmp_path):
    rows = [["run", "row_id", "weight"], ["a", "r1", 1], ["a", "r2", 3], ["b", "r1", 1], ["c", "r2", 1]]
    assert read(tmp_path, shares=rows).info.kind == "rows"


def test_a_folder_before_the_names_of_values_is_removed(tmp_path):
    source = write(
        tmp_path / "w.csv", [["run", "data/mix/web", "data/mix/code", "eval/sciq/acc"], ["a", 0.3, 0.7, 0.4]]
    )
    assert grasp.import_runs(source, label="source", columns=["data/mix/*"], metrics=["eval/*"]).values == (
        "web",
        "code",
    )


def test_names_of_one_wide_table_are_those_of_the_artifact_and_percent_become_shares(tmp_path):
    lines = [["run", "train_wiki", "train_code", "eval/sciq/acc", "eval/arc/loss"]]
    lines += [["a", 25, 75, 0.4, 3], ["b", 100, 0, 0.5, 2]]
    source = write(tmp_path / "w.csv", lines)
    runs = grasp.import_runs(source, label="source", columns=["train_*"], metrics=["eval/*"])
    assert runs.values == ("wiki", "code")
    assert runs.info.metrics == {"sciq/acc": "higher", "arc/loss": "lower"}
    np.testing.assert_allclose(runs.weights_RG(), [[0.25, 0.75], [1, 0]])
    np.testing.assert_allclose(runs.utility_RST()[:, 0], [[0.4, -3], [0.5, -2]])
    assert runs.notes == (
        "shares add up to 100 in every run: percent, divided by 100",
        "names are without 'train_', with which the patterns begin",
        "names are without 'eval/', with which the patterns begin",
    )
    for patterns, names in ((["eval/sciq/*"], ("sciq/acc",)), (["eval/sciq/acc", "*loss"], tuple(lines[0][3:]))):
        few = grasp.import_runs(source, label="source", columns=["train_*"], metrics=patterns)
        assert few.metrics == names
    with pytest.raises(RunsError, match=r"103 .* its 3 columns are train_code 75, train_wiki 25, eval/arc/loss 3;"):
        grasp.import_runs(source, label="source", metrics=["*acc"])


def test_a_prefix_that_belongs_to_the_names_remains(tmp_path):
    lines = [["run", "cc_web", "cc_books", "sciq/acc", "sciq/loss"], ["a", 0.5, 0.5, 0.4, 3], ["b", 1, 0, 0.5, 2]]
    source = write(tmp_path / "w.csv", lines)
    runs = grasp.import_runs(source, label="source", columns=["cc_*"], metrics=["sciq/*"])
    assert (runs.values, runs.metrics) == (("cc_web", "cc_books"), ("sciq/acc", "sciq/loss"))


def test_shares_with_a_sum_close_to_one_are_normalised(tmp_path):
    near = changed(SHARES, 1, 1, 0.505)
    np.testing.assert_allclose(read(tmp_path, shares=near).weights_RG().sum(axis=1), 1.0)
    assert read(tmp_path, shares=changed(SHARES, 1, 1, 4.0), weights="times").weights_RG()[0, 0] == 4.0


@pytest.mark.parametrize("shares", [[33, 33, 33], [34, 33, 34], [0.33, 0.33, 0.33], [0.34, 0.33, 0.34]])
def test_rounded_shares_of_99_or_101_percent_are_normalised(tmp_path, shares):
    whole = 100 if shares[0] > 1 else 1
    table = [["run", "wiki", "code", "web"], ["a", *shares], ["b", whole, 0, 0]]
    source = write(tmp_path / "w.csv", table)
    runs = grasp.import_runs(source, write(tmp_path / "m.csv", LOSSES[:3]), label="source")
    np.testing.assert_allclose(runs.weights_RG()[0], np.array(shares) / sum(shares))


def with_column(name, value):
    """Return the results with a further column that is equal for all runs."""
    return [[*line, value if i else name] for i, line in enumerate(LOSSES)]


@pytest.mark.parametrize(
    ("shares", "losses", "message"),
    [
        (changed(SHARES, 1, 1, -0.5), LOSSES, "m.csv: run 'a': weight of 'wiki' is -0.5"),
        (changed(SHARES, 1, 1, 1e308), LOSSES, "weight of 'wiki' is 1e+308"),
        (changed(SHARES, 1, 1, 0.9), LOSSES, "m.csv: run 'a': shares add up to 1.4"),
        (SHARES, changed(LOSSES, 2, 1, "nan"), "r.csv: run 'b': val_loss/sciq is nan"),
        (SHARES, changed(LOSSES, 2, 1, ""), "run 'b': val_loss/sciq is nan"),
        (SHARES, changed(LOSSES, 1, 1, -1e308), "val_loss/sciq is -1e+308"),
        (SHARES, changed(LOSSES, 2, 0, "a"), "r.csv: run 'a' has val_loss/sciq 2 times"),
        (changed(SHARES, 2, 0, "a"), LOSSES, "run 'a' occurs twice"),
        (SHARES, changed(LOSSES, 2, 0, "z"), "r.csv: 1 run(s) have no results: b"),
        (SHARES[:3], LOSSES, "m.csv: 1 run(s) have results, but no weights: c"),
        (SHARES, changed(LOSSES, 0, 2, "wobble"), "pass --higher 'wobble'"),
        (SHARES, changed(LOSSES, 0, 2, "toxicity_score"), "pass --higher 'toxicity_score'"),
        (SHARES, changed(LOSSES, 0, 0, "what"), "has no column with run names"),
        (changed(SHARES, 0, 2, "wiki"), LOSSES, "has the column 'wiki' more than once"),
        (SHARES, changed(LOSSES, 0, 2, "val_loss/sciq"), "has the column 'val_loss/sciq' more than once"),
        (SHARES, with_column("seed", "inf"), "seed is inf"),
        (SHARES, with_column("seed", 1e300), "seed is 1e+300"),
        (SHARES, with_column("seed", -1), "seed is -1"),
        (SHARES, with_column("seed", "many"), "seed is 'many'"),
    ],
)
def test_invalid_tables_are_refused_with_the_name_of_the_run(tmp_path, shares, losses, message):
    with pytest.raises(RunsError, match=re.escape(message)):
        read(tmp_path, shares=shares, losses=losses)


def test_shares_and_percent_of_one_metric_are_refused(tmp_path):
    mixed = changed(LOSSES, 2, 2, 50)
    with pytest.raises(RunsError, match=r"r\.csv: acc is 0\.4 of run 'a' and 50 of run 'b': shares and percent"):
        read(tmp_path, losses=mixed)
    percent = [
        LOSSES[0],
        *([run, loss, value] for (run, loss, _), value in zip(LOSSES[1:], (0.9, 1.5, 3.4), strict=True)),
    ]
    assert len(read(tmp_path, losses=percent)) == 3  # a hard task, all in percent
    assert len(read(tmp_path, losses=changed(mixed, 0, 2, "reward"))) == 3  # no share


@pytest.mark.parametrize(
    "columns",
    [
        {"run": [["a"]], "row_id": ["x"]},
        {"run": [b"\xff"], "row_id": ["x"]},
        {"run": pa.array([None], pa.string()), "row_id": ["x"]},
        {"run": ["a"], "row_id": [["x"]]},
        {"run": ["a"], "row_id": ["x"], "weight": ["much"]},
        {"run": ["a"], "row_id": ["x"], "weight": [[1.0]]},
    ],
    ids=["run: list", "run: bytes", "run: null", "row_id: list", "weight: text", "weight: list"],
)
def test_columns_of_another_type_are_refused(tmp_path, columns):
    pq.write_table(pa.table(columns), tmp_path / "subsets.parquet")
    with pytest.raises(RunsError, match=r"(column|cells) .*(names|type)"):
        grasp.import_runs(tmp_path / "subsets.parquet", pa.table({"run": ["a"], "loss": [1.0]}))


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", '{"results": {"sciq": {"acc": 1%s}}}' % ("0" * 400)])
def test_invalid_harness_results_are_refused(tmp_path, text):
    (tmp_path / "harness" / "a").mkdir(parents=True)
    (tmp_path / "harness" / "a" / "results.json").write_text(text)
    with pytest.raises(RunsError, match=r"results\.json: not a results file"):
        grasp.import_runs(write(tmp_path / "m.csv", SHARES), tmp_path / "harness", label="source")


def signed_again(path, **changes):
    """Rewrite environment.json with a valid checksum, as its owner could."""
    raw = json.loads((path / "environment.json").read_text()) | {"checksum": UNSIGNED}
    raw["files"] = {name: entry_of(path / name).model_dump() for name in raw["files"]}
    (path / "environment.json").write_bytes(with_checksum(json.dumps(raw | changes, indent=1).encode()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": {"acc": "higher"}}, "metric 'val_loss/sciq' is missing"),
        ({"label": None}, "label: missing, expected one for shares"),
        ({"files": {}}, "lists no subsets.parquet"),
        ({"files": {"../../x": {"bytes": 1, "checksum": ""}}}, "files.../../x"),
        ({"kind": "code"}, "kind: Input should be"),
        ({}, "cannot be read as Parquet: "),
    ],
)
def test_untrusted_runs_are_validated(tmp_path, changes, message):
    read(tmp_path, out=tmp_path / "runs")
    if not changes:
        pq.write_table(pa.table({"run": ["a"]}), tmp_path / "runs" / "utilities.parquet")
    signed_again(tmp_path / "runs", **changes)
    with pytest.raises(RunsError, match=re.escape(message)):
        grasp.open_runs(tmp_path / "runs")


@pytest.mark.parametrize("name", ["environment.json", "subsets.parquet", "utilities.parquet"])
def test_a_flipped_bit_in_stored_runs_is_found(tmp_path, name):
    read(tmp_path, out=tmp_path / "runs")
    whole = (tmp_path / "runs" / name).read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 40)):
        (tmp_path / "runs" / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(RunsError):
            grasp.open_runs(tmp_path / "runs")


def test_directions_and_patterns_can_be_set(tmp_path):
    odd = changed(LOSSES, 0, 2, "wobble")
    assert read(tmp_path, losses=odd, lower=["wob*"]).info.metrics["wobble"] == "lower"
    assert read(tmp_path, losses=odd, metrics=["val*"]).metrics == ("val_loss/sciq",)
    with pytest.raises(RunsError, match=r"no numeric column matches 'eval/"):
        read(tmp_path, metrics=["eval/*"])
    with pytest.raises(RunsError, match=r"label .*columns"):
        read(tmp_path, label=None)


def test_standard_errors_are_left_out_with_a_note(tmp_path):
    names = ["run", "exam/acc_stderr", "exam/acc", "quiz/acc_stderr,none"]
    lines = [names, *([run, 0.01, 0.5 + k / 8, "N/A"] for k, run in enumerate("abc"))]
    runs = read(tmp_path, losses=lines)
    assert runs.metrics == ("exam/acc",)
    assert "left out 2 columns of standard errors: exam/acc_stderr, quiz/acc_stderr,none" in runs.notes
    with pytest.raises(RunsError, match="no numeric columns with results; standard errors are no results"):
        read(tmp_path, losses=[[line[0], line[1]] for line in lines])
    wide = [[*shares, *line[1:]] for shares, line in zip(SHARES, lines, strict=True)]
    imported = grasp.import_runs(write(tmp_path / "wide.csv", wide), label="source", metrics=["exam/acc"])
    assert imported.values == ("wiki", "code", "books")


def test_the_name_of_a_task_is_no_metric(tmp_path):
    names = ["run", "translation_error_detection/acc", "accounting/loss"]
    runs = read(tmp_path, losses=[names, ["a", 0.4, 0.9], ["b", 0.5, 80.0], ["c", 0.6, 70.0]])
    assert runs.info.metrics == {names[1]: "higher", names[2]: "lower"}


def test_what_shares_are_shares_of_is_stored(tmp_path):
    assert read(tmp_path, out=tmp_path / "tokens").info.measure == "tokens"
    assert "shares of tokens" in str(grasp.open_runs(tmp_path / "tokens"))
    read(tmp_path, measure="rows", out=tmp_path / "rows")
    assert grasp.open_runs(tmp_path / "rows").info.measure == "rows"
    with pytest.raises(RunsError, match="measure: got 'bytes', expected one of rows, tokens, documents"):
        read(tmp_path, measure="bytes")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(RunsError, match="none: no such file or directory"):
        grasp.open_runs(tmp_path / "none")
    with pytest.raises(RunsError, match="no such file"):
        grasp.import_runs(tmp_path / "none.csv", label="x")
    (tmp_path / "wide.csv").write_bytes("run,gr\xf6\xdfe\nfirst,2.5\n".encode("latin-1"))  # as a spreadsheet may
    with pytest.raises(RunsError, match="column names are not UTF-8"):
        grasp.import_runs(tmp_path / "wide.csv", label="x")
    (tmp_path / "bad.parquet").write_bytes(b"no parquet")
    with pytest.raises(RunsError, match="cannot be read as a table"):
        grasp.import_runs(tmp_path / "bad.parquet", label="x")


def test_a_run_keeps_the_results_of_its_seeds_that_did_not_fail(tmp_path):
    weights = pa.table({"run": list("abcd"), "web": [0.1, 0.4, 0.6, 0.9], "code": [0.9, 0.6, 0.4, 0.1]})
    results = pa.table(
        {
            "run": list("aabbccdd"),
            "seed": [0, 1] * 4,
            "state": ["finished", "finished", "finished", "crashed", "finished", "finished", "failed", "failed"],
            "loss": [3.0, 3.1, 3.2, 3.3, 3.4, 3.5, 3.6, 3.7],
        }
    )
    runs = grasp.import_runs(weights, results, label="source", skip_failed=True)
    assert runs.runs == ("a", "b", "c")
    assert np.isfinite(runs.utility_RST()[:, :, 0]).tolist() == [[True, True], [True, False], [True, True]]
    assert "skipped as failed: 3 results, e.g. of run b, d" in runs.notes
