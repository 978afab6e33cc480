"""The check of a selection: three sets of equal size, other questions, and intervals over questions and seeds."""

from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

import grasp
from grasp.retraining import check_selection as checked
from grasp.runs.training_runs import Utilities
from tests.cli.grasp_command import refused, succeed


def fake_runs(gains, questions=200, seeds=3):
    """Runs of `checked.SETS` with these gains over random rows, noise per question and per seed."""
    rng = np.random.default_rng(0)
    noise = 0.3 * rng.standard_normal((3, seeds, questions)) + 0.05 * rng.standard_normal((3, seeds, 1))
    values = np.array(gains)[:, None, None] + noise - 4.0
    ids = tuple(str(q) for q in range(questions))
    utilities = Utilities(values, checked.SETS, tuple(range(seeds)), ("facts",) * questions, ids)
    return SimpleNamespace(utilities=lambda target: utilities)


@pytest.fixture
def calls(monkeypatch):
    """Return the arguments of each call of `retrain`, which trains nothing."""
    calls = []

    def retrain(**arguments):
        calls.append(arguments)
        return fake_runs([0.5, 0.0, 0.1])

    monkeypatch.setattr(checked, "retrain", retrain)
    return calls


def test_the_sets_have_equal_sizes_and_the_questions_are_others(art, tmp_path, calls):
    excluded = ("--exclude-where", "topic = 'sky'")
    succeed("select", art, "--budget", "30%", "--target", "facts", "--out", tmp_path / "kept.parquet", *excluded)
    kept_ids = set(pq.read_table(tmp_path / "kept.parquet")["row_id"].to_pylist())
    # a directory beside the selection with its name: the selection stays
    printed = succeed("check-selection", art, "--selection", tmp_path / "kept.json", "--out", tmp_path / "kept").out
    assert "questions and seeds" in printed
    assert set(pq.read_table(tmp_path / "kept.parquet")["row_id"].to_pylist()) == kept_ids
    sets = pq.read_table(tmp_path / "kept" / "sets.parquet").to_pandas().groupby("subset_id")["row_id"].agg(set)
    assert {len(rows) for rows in sets} == {len(kept_ids)}
    assert sets["selection"] == kept_ids
    rows = pq.read_table(grasp.open(art).files.rows_path, columns=["row_id", "topic"]).to_pandas()
    sky = set(rows["row_id"][rows["topic"] == "sky"])
    assert sky
    assert not any(sky & rows for rows in sets)
    (arguments,) = calls
    known = grasp.open(art).files.units["unit_id"].to_pylist()
    assert arguments["settings"]["targets"]["exclude_units"] == known
    for selection, out, message in (
        ("no.json", tmp_path / "r", "no such file"),
        ("kept.json", "s3://bucket/runs", "local directory"),
        ("kept.json", tmp_path, "was not written by grasp"),
        ("kept/sets.parquet", tmp_path / "kept", "no such file"),
    ):
        assert message in refused("check-selection", art, "--selection", tmp_path / selection, "--out", out)


def test_models_are_trained_as_the_artifact_predicts(art, tmp_path, calls):
    succeed("select", art, "--budget", "30%", "--target", "facts", "--out", tmp_path / "kept.parquet")
    artifact = grasp.open(art).files
    artifact.manifest.settings.update(
        train="further", recipe={"num_train_epochs": 2.0, "lora_r": None, "lora_target_modules": "all-linear"}
    )
    checked.check_selection(artifact, tmp_path / "kept.json", out=tmp_path / "runs")
    assert calls[0]["settings"]["train"] == "further"
    assert calls[0]["settings"]["fine_tuning"] == {"num_train_epochs": 2.0}


def test_a_gain_is_within_its_interval_and_counts_the_noise_of_seeds():
    selection, random, bm25 = checked._compare(fake_runs([0.5, 0.0, 0.0]), "facts")
    assert selection["gain_low"] < 0.5 < selection["gain_high"]
    assert selection["gain_low"] > 0.2
    assert bm25["gain_low"] < 0 < bm25["gain_high"]
    assert random["gain"] is None
    few = next(checked._compare(fake_runs([0.5, 0.0, 0.0], questions=20_000), "facts"))
    assert few["gain_high"] - few["gain_low"] > 0.05  # more questions do not remove the noise of seeds


def test_one_question_has_no_interval_and_equal_values_one_of_width_0():
    single = next(checked._compare(fake_runs([0.5, 0.0, 0.0], questions=1), "facts"))
    assert single["gain"] is not None
    assert single["gain_low"] is None
    runs = fake_runs([0.5, 0.0, 0.0])
    runs.utilities("facts").values_BSE[:] = 1.0
    assert [next(checked._compare(runs, "facts"))[f"gain{end}"] for end in ("", "_low", "_high")] == [0.0, 0.0, 0.0]
