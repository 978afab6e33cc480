"""Pages on runs, mixtures and data in docs/howto: every block is run in order, in an empty directory."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import yaml

import grasp
from grasp.runs.retrained import RetrainedRuns
from tests.cli.grasp_command import succeed
from tests.pipeline.world import write_checkpoint, write_corpus, write_targets
from tests.runs.environments import write_artifact

HOWTO = Path(__file__).parents[1] / "docs" / "howto"
BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_page(name: str) -> str:
    """Run every block and return the output of the commands."""
    printed, scope = [], {"__name__": "page"}
    for kind, text in BLOCK.findall((HOWTO / name).read_text(encoding="utf-8")):
        if kind == "python":
            exec(compile(text, name, "exec"), scope)
        else:
            outcomes = [succeed(*shlex.split(line)[1:]) for line in text.splitlines()]
            printed += [outcome.out + outcome.err for outcome in outcomes]
    return "\n".join(printed)


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_the_page_on_mixtures_outside_of_the_runs():
    printed = run_page("outside_runs.md")
    page = (HOWTO / "outside_runs.md").read_text(encoding="utf-8")
    table = re.compile(r"^(inside|outside|far) +sciq/loss +(\S+) +(\S+) +(\S+)$", re.MULTILINE)
    shown, got = ({name: values for name, *values in table.findall(text)} for text in (page, printed))
    assert shown.keys() == got.keys() == {"inside", "outside", "far"}
    assert shown["far"] == got["far"] == ["-", "-", "-"]
    for name in ("inside", "outside"):  # the search for hyperparameters ends within a part of its tolerance
        assert [float(value) for value in got[name]] == pytest.approx(list(map(float, shown[name])), abs=0.01)
    assert "a run that would allow a prediction of far: sciq" in printed
    proposed = pacsv.read_csv("next.csv")
    assert max(proposed["sciq"].to_pylist()) <= 0.5
    assert min(min(proposed[name].to_pylist()) for name in ("sciq", "arc", "web", "code")) >= 0.05 - 1e-9


@pytest.mark.parametrize("name", ["larger_model.md", "wandb_mixture.md"])
def test_the_pages_from_runs_to_a_mixture(name):
    printed = run_page(name)
    page = (HOWTO / name).read_text(encoding="utf-8")
    line_pattern = re.compile(r"^(\S+: proposed mixture), predicted (\S+) \((\S+) to (\S+)\)", re.MULTILINE)
    shown, got = ({metric: values for metric, *values in line_pattern.findall(text)} for text in (page, printed))
    assert shown.keys() == got.keys() > set()
    for metric, values in shown.items():  # the search for hyperparameters ends within a part of its tolerance
        assert list(map(float, got[metric])) == pytest.approx(list(map(float, values)), abs=0.02)
    assert {"best.csv", "next.csv"} <= {path.name for path in Path().iterdir()}
    shares = pacsv.read_csv("next.csv").drop_columns(["mixture", "gain"]).to_pandas()
    np.testing.assert_allclose(shares.sum(axis=1), 1.0, atol=1e-6)
    if name == "larger_model.md":
        planned = {"web": 2e12, "code": 60e9, "papers": 30e9, "books": 20e9}
        assert all((shares[source] <= 4 * tokens / 300e9 + 1e-9).all() for source, tokens in planned.items())
    else:
        assert list(shares.columns) == ["web", "code", "books"]  # without data/mix/


def test_the_page_on_guards():
    printed = run_page("not_worse.md")
    page = (HOWTO / "not_worse.md").read_text(encoding="utf-8")
    guard = re.compile(r"^guard (\S+): predicted change (\S+), with 90% at least (\S+), .* gains (\S+)$", re.MULTILINE)
    shown, got = ({metric: values for metric, *values in guard.findall(text)} for text in (page, printed))
    assert shown.keys() == got.keys() == {"mmlu/acc", "arc/acc"}
    for metric, values in shown.items():
        assert list(map(float, got[metric])) == pytest.approx(list(map(float, values)), abs=0.004)
        assert float(got[metric][1]) >= -0.0105
    unguarded, guarded = re.findall(r"^code +\S+ +\S+ +(\S+)$", printed, re.MULTILINE)
    assert float(guarded) < float(unguarded) - 0.1


def test_the_page_on_nanochat():
    run_page("nanochat.md")
    shards = sorted(Path("selected_climbmix").iterdir())  # as nanochat lists them; the last one is for validation
    assert [path.name for path in shards] == ["shard_00000.parquet", "shard_00002.parquet"]
    assert [pq.read_metadata(path).num_rows for path in shards] == [64, 64]
    assert all(pq.read_schema(path).names == ["text"] for path in shards)
    texts = {text for k in (0, 1) for text in pq.read_table(f"base_data_climbmix/shard_{k:05d}.parquet")["text"]}
    assert set(pq.read_table(shards[0])["text"]) <= texts


def test_the_page_on_files_of_training_tools():
    write_artifact(Path("art"))
    printed = run_page("mixture_files.md")
    assert "mixture.yaml: olmo-core, target_ratio is a share of tokens; set paths" in printed.splitlines()
    assert yaml.safe_load(Path("mixture.yaml").read_text())["sources"]
    assert "intervals of the change over units and rows" in printed
    written = {"mixture.txt", "probabilities.yaml", "datasets.yaml", "domains.yaml", "weights.py", "mixture.py"}
    assert written <= {path.name for path in Path().iterdir()}


@pytest.mark.slow  # it retrains; margins have tests in tests/pipeline
def test_the_page_on_multiple_choice():
    write_checkpoint(Path("model"))
    write_corpus(Path("corpus.jsonl"), 40)
    printed = run_page("multiple_choice.md")
    page = (HOWTO / "multiple_choice.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^quiz@margin .*$", page, re.MULTILINE)
    assert line.split() in [row.split() for row in printed.splitlines()]
    (example,) = re.findall(r"^example 3: (.*)$", page, re.MULTILINE)
    assert example in printed
    assert list(grasp.open("art").targets) == ["quiz", "quiz@margin"]
    assert RetrainedRuns.open(Path("env")).targets == ("quiz", "quiz@margin", "quiz@accuracy")


def test_the_page_on_preference_data():
    write_checkpoint(Path("model"))
    printed = run_page("preference.md")
    assert "margin of a preference pair" in printed
    assert "[rejected]" in printed
    assert "loss dpo" not in printed
    (exported,) = Path("chosen").glob("*.jsonl")
    records = [json.loads(line) for line in exported.read_text().splitlines()]
    assert len(records) == 16
    assert all({"id", "source", "prompt", "chosen", "rejected"} <= record.keys() for record in records)
    runs = RetrainedRuns.open(Path("env"))
    assert runs.info.recipe_settings["loss"] == "dpo"
    assert np.ptp(runs.utilities().values_BSE.mean(axis=2)) > 0
    assert len(list(Path("env/reference/seed-0").glob("*.safetensors"))) == 1


def test_the_page_on_nested_metadata():
    write_checkpoint(Path("model"))
    write_targets(Path("questions.jsonl"))
    printed = run_page("nested_metadata.md")
    page = (HOWTO / "nested_metadata.md").read_text(encoding="utf-8")
    (labels,) = re.findall(r"^(labels: .*)$", page, re.MULTILINE)
    assert labels in printed
    for value in ("news.bbc.co.uk", "example.github.io", "0.7 to 0.9", "2014", "sport"):
        assert re.search(rf"^{re.escape(value)} ", printed, re.MULTILINE), value
    assert "slices overlap" in printed
    assert "grouped as bins(metadata.language_score, 5)" in printed
