"""Results of harnesses: all files of a run are merged, differences are named, incomparable results are refused."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import grasp
from grasp.errors import RunsError
from tests.mentions import assert_mentions

RUNS = ("a", "b", "c")
MIXTURES = pa.table({"run": RUNS, "wiki": [0.5, 0.2, 0.1], "code": [0.5, 0.8, 0.9]})
OLD, NEW = "2025-01-01T01-00-00.000001", "2025-01-01T02-00-00"


def harness(**tasks):
    return {"results": tasks, "higher_is_better": {task: {"acc": True} for task in tasks}}


def place_all(root, data, name="results.json"):
    """The same file for every run."""
    for run in RUNS:
        place(root, run, name, data)


def olmes(task="sciq", date="2025-05-19 19:41:53 UTC", alias=None, primary="acc_raw", **metrics):
    config = {"primary_metric": primary, "num_shots": 5, "version": 0, "metadata": {"alias": alias or task}}
    data = {"task_name": task, "task_config": config, "current_date": date, "num_instances": 10, "metrics": metrics}
    return data | {"model_config": {"model": "m"}}


def place(root, run, name, data):
    path = root / run / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = data if isinstance(data, list) else [data]
    path.write_text("\n".join(json.dumps(line) for line in lines))


def read(root, **options):
    return grasp.import_runs(MIXTURES, root, label="source", **options)


def of(runs, metric):
    lines = runs.results.to_pylist()
    return {line["subset_id"]: line["utility"] for line in lines if line["target"] == metric}


TASKS = {"sciq": 0.25, "arc_easy": 0.5, "piqa": 0.75}


@given(st.permutations(list(TASKS)), st.lists(st.booleans(), min_size=2, max_size=2))
def test_tasks_in_one_file_or_in_several_are_the_same_results(tmp_path_factory, order, cuts):
    root = tmp_path_factory.mktemp("res")
    for run in RUNS:
        groups = [[order[0]]]
        for task, cut in zip(order[1:], cuts, strict=True):
            groups.append([task]) if cut else groups[-1].append(task)
        for hour, group in enumerate(groups):
            results = {task: {"alias": task, "acc,none": TASKS[task], "acc_stderr,none": "N/A"} for task in group}
            place(root, f"{run}/my__model", f"results_2025-01-01T0{hour}-00-00.json", harness(**results))
    runs = read(root)
    for task, value in TASKS.items():
        assert of(runs, f"{task}/acc") == dict.fromkeys(RUNS, value)
    assert runs.notes == ()


@pytest.mark.parametrize("folders", [("x", "y"), ("y", "x")])  # the date of the file counts, not that of its folder
def test_the_newest_of_two_values_is_used_and_both_are_named(tmp_path, folders):
    files = [f"{folders[0]}/results_{OLD}.json", f"{folders[1]}/results_{NEW}.json"]
    place_all(tmp_path, harness(sciq={"acc,none": 0.25, "f1,none": 0.5}), files[0])
    place_all(tmp_path, harness(sciq={"acc,none": 0.5}), files[1])
    runs = read(tmp_path)
    assert of(runs, "sciq/acc") == of(runs, "sciq/f1") == dict.fromkeys(RUNS, 0.5)
    (note,) = runs.notes
    assert_mentions(note, "a: sciq: acc 0.5 and 0.25", f"a/{files[1]}, a/{files[0]}")
    assert read(tmp_path, metrics=["sciq/f1"]).notes == ()


CONDITIONS = [("n-shot", 0, 5), ("versions", 1.0, 2.0), ("n-samples", {"effective": 10}, {"effective": 500})]


@pytest.mark.parametrize(("field", "first", "other"), CONDITIONS)
def test_a_run_has_a_task_under_the_conditions_of_the_newest_file(tmp_path, field, first, other):
    older = harness(sciq={"acc,none": 0.25, "f1,none": 1}) | {field: {"sciq": first}}
    place_all(tmp_path, older, f"results_{OLD}.json")
    place_all(tmp_path, harness(sciq={"acc,none": 0.5}) | {field: {"sciq": other}}, f"results_{NEW}.json")
    runs = read(tmp_path)
    assert runs.metrics == ("sciq/acc",)
    (note,) = runs.notes
    assert_mentions(note, f"results_{OLD}.json", "conditions")


@pytest.mark.parametrize(("field", "first", "other"), CONDITIONS)
def test_runs_under_different_conditions_are_refused(tmp_path, field, first, other):
    for run, value in zip(RUNS, (first, first, other), strict=True):
        table = harness(sciq={"acc,none": 0.25}, piqa={"acc,none": 0.5})
        place(tmp_path, run, f"results_{NEW}.json", table | {field: {"sciq": value}})
    with pytest.raises(RunsError, match=r"sciq: runs 'a' and 'c' .*'!sciq/\*'"):
        read(tmp_path)
    assert read(tmp_path, metrics=["!sciq/*"]).metrics == ("piqa/acc",)


@pytest.mark.parametrize("unknown", [{}, {"sciq": None}, {"sciq": "N/A"}, {"sciq": "Yaml"}])
def test_unknown_conditions_are_compatible_with_any(tmp_path, unknown):
    for run, versions in zip(RUNS, (unknown, {"sciq": 1.0}, unknown), strict=True):
        place(tmp_path, run, "results.json", harness(sciq={"acc,none": 0.25}) | {"versions": versions})
    assert len(read(tmp_path)) == 3
    place(tmp_path, "c", f"results_{OLD}.json", harness(sciq={"f1,none": 0.25}) | {"versions": {"sciq": 2.0}})
    with pytest.raises(RunsError, match=r"'b' and 'c' .*1\.0 and 2\.0"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("data", "metrics"),
    [
        (  # every filter is a metric, and counts are not
            {
                "results": {
                    "gsm8k": {
                        "name": "gsm8k",
                        "alias": "- gsm8k",
                        "sample_len": 10,
                        "sample_count": {"exact_match": 10},
                    }
                    | {"exact_match,strict-match": 0.25, "exact_match_stderr,strict-match": 0.01}
                    | {"exact_match,flexible-extract": 0.5, "exact_match_stderr,flexible-extract": "N/A"}
                    | {"bypass,none": 999}
                }
            },
            ("gsm8k/exact_match,strict-match", "gsm8k/exact_match,flexible-extract"),
        ),
        (harness(sciq={"acc,none": "N/A"}, piqa={"acc,none": 0.5}), ("piqa/acc",)),
        (  # the mean of a group is a metric like its tasks
            harness(mmlu={"acc,none": 0.5, " ": " "}, mmlu_law={"acc,none": 0.25}, mmlu_art={"acc,none": 0.75})
            | {"group_subtasks": {"mmlu": ["mmlu_law", "mmlu_art"]}},
            ("mmlu/acc", "mmlu_law/acc", "mmlu_art/acc"),
        ),
    ],
)
def test_metrics_of_a_file(tmp_path, data, metrics):
    place_all(tmp_path, data, f"results_{OLD}.json")
    runs = read(tmp_path)
    assert runs.metrics == metrics
    for metric in metrics:
        task, _, name = metric.partition("/")
        (value,) = {value for key, value in data["results"][task].items() if key in (name, f"{name},none")}
        assert of(runs, metric) == dict.fromkeys(RUNS, value)


def test_plain_names_of_version_0_3_are_the_same_metrics(tmp_path):
    old = {"results": {"sciq": {"acc": 0.25, "acc_stderr": 0.01, "acc_norm": 0.5}}, "versions": {"sciq": 0}}
    place_all(tmp_path, old | {"config": {"num_fewshot": 5}})
    assert read(tmp_path).metrics == ("sciq/acc", "sciq/acc_norm")
    place(tmp_path, "b", "results.json", old | {"config": {"num_fewshot": 0}})
    with pytest.raises(RunsError, match="n-shot 5 and 0"):
        read(tmp_path)


def test_a_direction_that_the_harness_does_not_know_is_not_lower(tmp_path):
    directions = {"higher_is_better": {"g": {"acc": None, "odd": None}}}  # as where the tasks of a group differ
    place_all(tmp_path, {"results": {"g": {"acc,none": 0.5, "odd,none": 1.0}}} | directions)
    assert read(tmp_path, metrics=["g/acc"]).info.metrics == {"g/acc": "higher"}
    with pytest.raises(RunsError, match=r"'g/odd'.*unknown direction"):
        read(tmp_path)


def test_metrics_of_olmes(tmp_path):
    """A task's own file and the file of all tasks say the same; means of tasks stand in the latter alone."""
    for k, run in enumerate(RUNS):
        sciq = olmes(
            acc_raw=0.25 + k / 8, bits_per_byte_corr=1.0, primary_score=0.25 + k / 8, extra_metrics={"price": 1}
        )
        bpb = olmes("gsm8k", primary="bits_per_byte_corr", primary_score=2.0)
        mean = olmes("core", primary=None, acc_raw_macro=0.5)
        place(tmp_path, run, "task-000-sciq-metrics.json", sciq)
        place(tmp_path, run, "task-001-gsm8k-metrics.json", bpb)
        place(tmp_path, run, "metrics-all.jsonl", [mean, sciq, bpb])
        place(tmp_path, run, "metrics.json", {"all_primary_scores": []})
        place(tmp_path, run, "task-002-x-metrics.json", {"task_name": "x", "task_config": {}})  # without a model
    runs = read(tmp_path)
    assert runs.notes == ()
    assert runs.info.metrics == {
        "core/acc_raw_macro": "higher",
        "sciq/acc_raw": "higher",
        "sciq/bits_per_byte_corr": "lower",
        "sciq/primary_score": "higher",
        "gsm8k/primary_score": "lower",
    }
    np.testing.assert_array_equal([of(runs, "sciq/acc_raw")[run] for run in RUNS], [0.25, 0.375, 0.5])


def test_variants_of_a_task_are_distinguished_by_their_aliases(tmp_path):
    for k, style in enumerate(("rc", "mc")):
        data = olmes(alias=f"sciq:{style}::olmes", acc_raw=0.25 + k)
        place_all(tmp_path, data, f"task-00{k}-sciq-metrics.json")
    runs = read(tmp_path)
    assert [of(runs, f"sciq:{style}::olmes/acc_raw")["a"] for style in ("rc", "mc")] == [0.25, 1.25]
