"""Which metrics can be decided: planted signals and noise, with seeds and without."""

import numpy as np
import pyarrow as pa
import pytest

import grasp
from grasp.mixing.metric_quality import DECIDABLE, NOISE, UNCLEAR
from tests.cli.grasp_command import succeed
from tests.runs.environments import TOPICS


def planted(n_runs, n_seeds, noise, seed=0):
    """`strong` and `weak` depend on the mixture alike, with little and much noise; `none` does not."""
    rng = np.random.default_rng(seed)
    share_RG = rng.dirichlet(np.ones(3), n_runs)
    signal_R = np.sqrt(share_RG[:, 0])
    names = [f"run-{r}" for r in range(n_runs)]
    shares = pa.table({"run": names} | {value: share_RG[:, g] for g, value in enumerate(TOPICS)})
    columns = {"run": np.repeat(names, n_seeds).tolist(), "seed": np.tile(np.arange(n_seeds), n_runs)}
    for metric, size, std in (("strong", 1.0, 0.02), ("weak", 1.0, noise), ("none", 0.0, 0.1)):
        error_R = std * rng.standard_normal(n_runs * n_seeds)
        columns[f"{metric}/loss"] = 3 - size * np.repeat(signal_R, n_seeds) + error_R
    return grasp.import_runs(shares, pa.table(columns), label="topic")


def verdicts(runs):
    table = grasp.assess_metrics(runs).to_pandas().set_index("metric")
    return table, dict(table["verdict"])


def test_seeds_tell_noise_from_signals():
    runs = planted(24, 3, noise=0.3)
    table, verdict = verdicts(runs)
    assert verdict["strong/loss"] == DECIDABLE
    assert verdict["none/loss"] == NOISE
    np.testing.assert_allclose(table.loc["strong/loss", "noise"], 0.02, rtol=0.3)
    np.testing.assert_allclose(table.loc["weak/loss", "noise"], 0.3, rtol=0.3)
    spread = np.sqrt(np.random.default_rng(0).dirichlet(np.ones(3), 24)[:, 0]).std(ddof=1)
    np.testing.assert_allclose(table.loc["strong/loss", "spread"], spread, rtol=0.05)
    assert table["runs_needed"].isna().sum() == 1


@pytest.mark.parametrize("seed", range(3))
def test_without_seeds_pure_noise_is_never_decidable(seed):
    table, verdict = verdicts(planted(30, 1, noise=0.05, seed=seed))
    assert verdict["strong/loss"] == verdict["weak/loss"] == DECIDABLE
    assert verdict["none/loss"] == UNCLEAR or verdict["none/loss"].startswith("needs about")
    assert table.loc["strong/loss", "correlation"] > 0.95 > table.loc["none/loss", "correlation"]


def test_the_number_of_runs_that_a_metric_needs_suffices():
    few, verdict = verdicts(planted(10, 2, noise=0.5, seed=1))
    many, later = verdicts(planted(200, 2, noise=0.5, seed=1))
    assert later["weak/loss"] == DECIDABLE
    needed = few.loc["weak/loss", "runs_needed"]
    assert verdict["weak/loss"] in (NOISE, DECIDABLE, f"needs about {needed:.0f} runs")
    assert many.loc["weak/loss", "runs_needed"] <= 200


def test_the_command_prints_a_line_for_each_metric_and_its_notes(tmp_path):
    planted(12, 2, noise=0.05).save(tmp_path / "runs")
    lines = succeed("runs", "metrics", tmp_path / "runs").lines
    assert lines[0] == "2 of 3 metrics can be decided with 12 runs; 1 are noise"
    assert {line.split()[0] for line in lines[2:5]} == {"strong/loss", "weak/loss", "none/loss"}
