"""The commands `evaluate --methods`, `score --method` and `methods`."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from grasp.methods.registry import score_rows
from tests.baselines.world import METHODS, N_ROWS, N_UNITS, configured_method, matrix
from tests.cli.grasp_command import cells, refused, succeed

FAST = "bm25,loss,random,length,tracin"


def evaluate(world, *arguments):
    return "evaluate", world.root / "art", "--runs", world.root / "env", *arguments


def records(path):
    return {line["method"]: line for line in json.loads(path.read_text())["results"] if line["target"] == "facts"}


def test_methods_are_listed_with_floats_and_seconds(world, tmp_path):
    out = tmp_path / "result.json"
    printed = succeed(*evaluate(world, "--methods", f"grasp,{FAST}", "--json", out)).lines
    assert cells(printed[1])[-2:] == ["floats a row", "build s"]
    lines = {cells(line)[0]: cells(line) for line in printed[2:] if not line.startswith(("undefined", "left out"))}
    assert set(FAST.split(",")) < set(lines)
    assert lines["bm25"][-2] == str(N_UNITS)
    assert lines["loss"][-2] == "1"
    assert lines["output_layer additive"][-2] == str(N_UNITS)
    assert float(lines["output_layer additive"][-1]) > 0
    result = records(out)
    for name in FAST.split(","):
        assert result[name]["build_wall_seconds"] > 0
        assert result[name]["standing"] == "predictor"
    assert result["loss"]["score_floats"] == 1
    assert any(line.startswith("bm25: covers text of the rows") for line in printed)


def test_configurations_have_labels_and_oracle_selected_ones_are_separate(world, tmp_path):
    file = tmp_path / "methods.yaml"
    configurations = {
        "bm25-other": {"method": "bm25", "k1": 0.9},
        "bm25-best": {"method": "bm25", "b": 0.0, "oracle_selected": True},
        "datamodels": {"penalty": "ridge", "sees": "topic"},
    }
    file.write_text(yaml.safe_dump(configurations))
    printed = succeed(*evaluate(world, "--method-settings", file)).lines
    names = [cells(line)[0] for line in printed]
    heading = [i for i, line in enumerate(printed) if line.startswith(("oracle-selected: ", "supervised oracles: "))]
    assert len(heading) == 2
    assert names.index("bm25-other") < heading[0] < names.index("bm25-best") < heading[1]
    assert heading[1] < names.index("datamodels")
    only = succeed(*evaluate(world, "--methods", "bm25-best", "--method-settings", file)).out
    assert "bm25-other" not in only


def test_rows_are_ranked_by_a_method(world):
    inputs = world.inputs()
    result = matrix(score_rows(configured_method("bm25"), inputs)).mean(axis=1)
    command = "score", world.root / "art", "--target", "facts", "--method", "bm25", "--top", 5
    printed = succeed(*command, "--bottom", 2).lines
    assert printed[0] == "the 5 most helpful and the 2 most harmful of 40 rows for facts, by bm25"
    best = np.lexsort((np.arange(N_ROWS), -result))[:5]
    assert [cells(line)[1] for line in printed[2:7]] == [f"row-{i}" for i in best]
    assert [float(cells(line)[0]) for line in printed[2:7]] == pytest.approx(result[best], abs=6e-4)
    assert float(cells(printed[7])[0]) == pytest.approx(result.min(), abs=6e-4)


def test_scores_are_stored_in_the_artifact_by_default_and_it_stays_valid(world, tmp_path):
    art = shutil.copytree(world.root / "art", tmp_path / "art", ignore=shutil.ignore_patterns("baselines"))
    succeed("score", art, "--target", "facts", "--method", "random")
    assert len(list((art / "baselines").glob("random-*"))) == 1
    succeed("verify", art)
    shutil.rmtree(art / "baselines")
    succeed("score", art, "--target", "facts", "--method", "random")


def test_methods_lists_all_methods_or_the_settings_of_one():
    listed = succeed("methods").out
    assert all(f"\n{name} " in listed for name in METHODS)
    assert "did you mean bm25?" in refused("methods", "bm52")
    description = succeed("methods", "bm25").out
    assert "inputs: rows and units, tokens" in description
    assert "pip install 'bm25s>=0.2' 'scikit-learn>=1.4'" in description
    assert "k1, default 1.2" in description


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--methods", "trakin"], "did you mean tracin?"),
        (["--checkpoints", "gone"], "checkpoints: no effect without a method that uses them"),
        (["--methods", ""], "--methods: got ''"),
        (["--methods", ","], "--methods: got ','"),
        (["--methods", "bm25,loss", "--checkpoints", "gone"], "checkpoints: no effect without a method that uses them"),
        (["--methods", "tracin", "--checkpoints", "gone"], "checkpoints: gone: no such directory"),
        (["--method-settings", "methods.yaml"], "'output_layer additive'"),
    ],
)
def test_invalid_method_options_of_evaluate_are_refused(flags, message, world, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("methods.yaml").write_text("output_layer additive: {method: bm25}\n")
    assert message in refused(*evaluate(world, *flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--checkpoints", "gone"], "checkpoints: requires method"),
        (["--method", "loss", "--match", "output_layer"], "match: cannot be combined with method"),
        (["--method", "datamodels", "--runs", "env"], "predicts subsets and scores no rows"),
        (["--method", "grasp"], "method: got grasp"),
        (["--method", "loss", "--checkpoints", "gone"], "checkpoints: not used by method loss"),
        (["--method", "loss", "--runs", "env"], "runs: not used by method loss"),
        (["--method", "bm25"], "pip install 'bm25s>=0.2' 'scikit-learn>=1.4'"),
    ],
)
def test_invalid_method_options_of_score_are_refused(flags, message, world, monkeypatch):
    monkeypatch.chdir(world.root)
    monkeypatch.setitem(sys.modules, "bm25s", None)
    assert message in refused("score", "art", "--target", "facts", *flags)
