"""The table of all methods: oracles stand apart, what is not known is a dash, sweeps are measured."""

import pytest

from experiments.baselines.table import BLOCK, HEADINGS, cells, sweep_seconds, table, together, widths

METRICS = ("task_rho", "positive", "mean_lds", "pairwise")


def record(method, standing="predictor", features=0, scores=640):
    about = {"feature_floats": features, "score_floats": scores, "build_cpu_seconds": 12.34, "standing": standing}
    figures = {name: value for m in METRICS for name, value in ((m, 0.5), (f"{m}_low", 0.25), (f"{m}_high", 0.75))}
    return {"method": method, "target": "sciq", "task_ceiling": 0.9, "lds_ceiling": None} | figures | about


def report(*results):
    head = {"environment": "cc", "family": "mixture:topic", "n_subsets": 64, "seeds": [0, 1], "notes": ["said"]}
    return head | {"results": list(results)}


def test_a_line_has_what_is_known_and_dashes_for_the_rest():
    known = cells(record("trak", features=128), {640: 3.0, 128: 1.5})
    unknown = record("theirs", scores=None) | {"feature_floats": None, "build_cpu_seconds": None, "task_rho": None}
    dashes = cells(unknown, {})
    assert len(known) == len(dashes) == len(HEADINGS)
    assert known[-4:] == ["128 + 640", "12.3", "3.00", "1.50"]
    assert (dashes[1], dashes[-4:]) == ("-", ["-"] * 4)


def test_oracles_come_after_predictors_under_their_own_headings():
    (whole,) = together(
        [report(record("ridge", "supervised oracle"), record("best", "oracle-selected"), record("bm25"))]
    )
    found = table(whole, {1: 0.1, 640: 3.0})
    assert "Ceilings: task rho 0.900, mean LDS undefined." in found
    order = [found.index(text) for text in ("| bm25", "### oracle-selected", "| best", "### supervised", "| ridge")]
    assert order == sorted(order)
    assert found.endswith("- said\n")


def test_reports_of_one_environment_are_one_table_of_averages():
    tasks = [record("bm25"), record("bm25") | {"target": "openbookqa"}]
    first = report(*tasks, record("bm25") | {"target": "average", "task_rho": 0.1})
    second = report(*tasks, *(record(name) | {"target": "average", "task_rho": 0.2} for name in ("bm25", "lasso")))
    alone = report(record("bm25") | {"task_rho": 0.3})
    whole, of_one = together([first, second | {"notes": ["said", "more"]}, alone])
    assert (whole["over"], of_one["over"]) == ("average of 2 tasks", "sciq")
    assert [(one["method"], one["task_rho"]) for one in whole["results"]] == [("bm25", 0.1), ("lasso", 0.2)]
    assert whole["notes"] == ["said", "more"]
    assert [(one["target"], one["task_rho"]) for one in of_one["results"]] == [("sciq", 0.3)]
    of_one_too = report(record("searched"), record("searched") | {"target": "average"})
    assert len(together([first, of_one_too])) == 2  # its average is not over the same tasks


def test_every_kept_width_is_swept_and_more_floats_take_longer():
    assert widths([record("a", features=128), record("b", scores=1), record("c", scores=None)]) == {1, 128, 640}
    one, many = (sweep_seconds(width, 2000) for width in (1, 256))
    assert 0 < one < many


@pytest.mark.parametrize("width", [1, 8])
def test_the_time_is_of_100_000_subsets(width, monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr("experiments.baselines.table.time.process_time", lambda: next(clock))
    assert sweep_seconds(width, 50) == pytest.approx(100_000 / BLOCK)
