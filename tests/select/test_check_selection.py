"""The check of a selection: three sets of equal size, other questions, and intervals over questions and seeds."""

from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq

import grasp
from grasp.api import check_selection as checked
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


def test_the_sets_have_equal_sizes_and_the_questions_are_others(art, tmp_path, monkeypatch):
    calls = []

    def retrain(**arguments):
        calls.append(arguments)
        return fake_runs([0.5, 0.0, 0.1])

    monkeypatch.setattr(checked, "retrain", retrain)
    succeed("select", art, "--budget", "30%", "--target", "facts", "--out", tmp_path / "kept.parquet")
    printed = succeed("check-selection", art, "--selection", tmp_path / "kept.json", "--out", tmp_path / "runs").out
    assert "selection" in printed
    sets = pq.read_table(tmp_path / "runs.parquet").to_pandas().groupby("subset_id")["row_id"].agg(set)
    assert {len(rows) for rows in sets} == {len(sets["selection"])}
    assert sets["selection"] == set(pq.read_table(tmp_path / "kept.parquet")["row_id"].to_pylist())
    (arguments,) = calls
    known = grasp.open(art).files.units["unit_id"].to_pylist()
    assert arguments["settings"]["targets"]["exclude_units"] == known
    assert "no such file" in refused(
        "check-selection", art, "--selection", tmp_path / "no.json", "--out", tmp_path / "r"
    )


def test_a_gain_is_within_its_interval_and_counts_the_noise_of_seeds():
    selection, random, bm25 = checked._compare(fake_runs([0.5, 0.0, 0.0]), "facts")
    assert selection["gain_low"] < 0.5 < selection["gain_high"]
    assert selection["gain_low"] > 0.2
    assert bm25["gain_low"] < 0 < bm25["gain_high"]
    assert random["gain"] is None
    few = next(checked._compare(fake_runs([0.5, 0.0, 0.0], questions=20_000), "facts"))
    assert few["gain_high"] - few["gain_low"] > 0.05  # more questions do not remove the noise of seeds
