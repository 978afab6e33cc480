"""retrain -> evaluate -> calibrate on a small world: tables equal results of the library, errors are one line."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats

from grasp.artifact.reader import ArtifactReader
from grasp.paper.candidate_predictor import CandidatePredictor
from grasp.predict.default_protocol import DEFAULT_PROTOCOL, resolve_protocol
from grasp.predict.scoring_rule import load_protocol
from grasp.runs.retrained import RetrainedRuns
from grasp.yaml_files import write_yaml
from tests.cli.grasp_command import arrays, cells, refused, succeed
from tests.mentions import assert_mentions
from tests.resigned import resign
from tests.rules import candidate_of

FAMILY = {
    "sides": ["retained"],
    "standardize": ["mean_relevance"],
    "components": [[], ["joint.pair"], ["joint.self"]],
    "omegas": [-1.0, 1.0],
    "calibration_subsets": 32,
}
PLANTED = {
    "name": "planted",
    "side": "retained",
    "weighting": "mean",
    "match": {"pooled": 1.0},
    "components": {"joint.pair": -1.0},
    "calibration": {"family": "mixture:topic", "n_subsets": 32},
}


@pytest.fixture(scope="module")
def settings(root) -> Path:
    """Write settings of a retraining that takes seconds, on the rows and units of `art`."""
    shape = {"vocab_size": 300, "hidden": 16, "intermediate": 32, "layers": 1, "heads": 2, "context": 64}
    data = {
        "tokenizer": str(root / "model"),
        "overrides": {"steps": 4, "warmup_steps": 1, "batch_rows": 4, "shape": shape},
        "corpus": {"path": str(root / "corpus.jsonl"), "max_length": 48, "shortest_end": 1},
        "targets": {"names": [str(root / "facts.jsonl")]},
        "lease_seconds": 1.0,
        "device": "cpu",
        "threads": 1,
    }
    write_yaml(data, root / "retrain.yaml")
    return root / "retrain.yaml"


def retrain(settings, out, *arguments):
    return "retrain", "--config", settings, "--family", "mixture:topic", "-B", 8, "--seeds", 2, "--out", out, *arguments


@pytest.fixture(scope="module")
def trained(root, settings):
    """Return the runs that the command wrote, and its output."""
    return root / "env", succeed(*retrain(settings, root / "env"))


@pytest.fixture(scope="module")
def env(trained):
    return trained[0]


@pytest.fixture
def own_env(env, tmp_path):
    """Return a copy of the runs that a test may change."""
    return Path(shutil.copytree(env, tmp_path / "env"))


def scored(art, env):
    return CandidatePredictor.from_runs(RetrainedRuns.open(env), ArtifactReader.open(art))


def rewrite(env: Path, change) -> None:
    """Apply `change` to the lines of utilities.parquet, without a checksum, as other programs write it."""
    table = pq.read_table(env / "utilities.parquet")
    lines = change(table.to_pylist())
    pq.write_table(pa.Table.from_pylist(lines, table.schema.remove_metadata()), env / "utilities.parquet")


def plant(env: Path, value) -> None:
    """Set utilities to `value(subset, unit)`, with small noise between seeds."""
    rng = np.random.default_rng(0)
    noise = {seed: 1e-3 * rng.normal(size=100) for seed in (0, 1)}

    def change(lines):
        for i, line in enumerate(lines):
            line["utility"] = value(line["subset_id"], line["unit_id"]) + noise[line["seed"]][i % 100]
        return lines

    rewrite(env, change)


def plant_protocol(env: Path, art: Path) -> None:
    """Set utilities to the predictions of PLANTED, equally for every unit."""
    place = env.parent / "planted.yaml"
    write_yaml(PLANTED, place)
    source = ArtifactReader.open(art)
    (result,) = scored(art, env).predict_candidates({"planted": candidate_of(load_protocol(place), source)}, ["facts"])
    truth = dict(zip(result.subset_ids, result.task_B["facts"], strict=True))
    plant(env, lambda subset, _: float(truth[subset]))


def set_info(env: Path, **fields: str) -> None:
    resign(env, lambda info: info.update(fields), "environment.json")


def lines_of(out: str) -> dict[str, list[str]]:
    """Return the cells of the printed table by method."""
    body = out.splitlines()[2:]
    return {cells(line)[0]: cells(line) for line in body if len(cells(line)) == 11}


# retrain


def test_retrain_reports_its_result_and_the_printed_commands_run(trained, tmp_path):
    env, outcome = trained
    first, heading, line, build, then = outcome.lines
    assert first == f"{env}: dev, recipe tiny, 8 subsets x 2 seeds of 65 rows"
    assert cells(heading) == ["target", "units", "utility", "against the corpus", "sd over subsets"]
    realized_B = RetrainedRuns.open(env).utilities().values_BSE.mean(axis=(1, 2))
    against = realized_B.mean() - RetrainedRuns.open(env).reference_utilities().mean()
    assert cells(line)[:2] == ["facts", "6"]
    printed_values = [float(cell) for cell in cells(line)[2:]]
    assert printed_values == pytest.approx([realized_B.mean(), against, realized_B.std(ddof=1)], rel=0.02, abs=6e-4)
    assert outcome.err.splitlines()[-1].startswith("runs: 18 runs in ")
    arguments = shlex.split(build.removeprefix("next: grasp "))
    assert (arguments[0], arguments[-1]) == ("build", "art")
    succeed(*arguments[:-1], tmp_path / "art", "--set", "model.threads=1")
    arguments = shlex.split(then.removeprefix("then: grasp "))
    assert arguments[:2] == ["evaluate", "art"]
    assert "output_layer additive" in succeed("evaluate", tmp_path / "art", *arguments[2:]).out


@pytest.mark.parametrize("apart", [False, True])
def test_runs_like_an_artifact_can_be_compared_with_it(art, root, tmp_path, apart):
    env = tmp_path / "env"
    if apart:  # its tokenizer does not lie with its model
        bare = shutil.copytree(root / "model", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
        named = "--model", bare, "--tokenizer", root / "model", "--out", tmp_path / "art"
        succeed("build", "--config", root / "settings.yaml", *named)
        art = tmp_path / "art"
    recipe = "overrides.steps=4 overrides.warmup_steps=1 overrides.batch_rows=4 overrides.shape.hidden=16 threads=1"
    changes = [part for change in recipe.split() for part in ("--set", change)]
    command = "retrain", "--like", art, "--out", env, "-B", 1, "--seeds", 1, "--family"
    assert re.search(
        r"art: family: unknown column 'topics' \(did you mean 'topic'", refused(*command, "mixture:topics")
    )
    assert not env.exists()
    like = *command, "mixture:topic"
    succeed(*like, *changes)
    assert "1 subsets x 1 seeds" in succeed(*like, *changes).out
    assert "undefined: mean_lds" in succeed("evaluate", art, "--runs", env).out


@pytest.mark.slow  # a kill of a build is in tests/pipeline
def test_two_processes_share_the_runs_also_if_one_is_killed(settings, env, tmp_path):
    out = tmp_path / "env"
    command = [sys.executable, "-m", "grasp", *map(str, retrain(settings, out))]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **quiet)
    deadline = time.time() + 120
    while not list(out.glob("runs/*.parquet")) and child.poll() is None and time.time() < deadline:
        time.sleep(0.002)
    kill = threading.Timer(0.2, child.send_signal, [signal.SIGKILL])
    kill.start()
    succeed("retrain", "--out", out, "--resume")
    kill.join()
    assert child.wait() == -signal.SIGKILL
    for name in ("utilities.parquet", "reference.parquet", "subsets.parquet", "environment.json"):
        assert (out / name).read_bytes() == (env / name).read_bytes(), name


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--family", "uniform:0.03"], "retains 2 rows, fewer than the 4"),
        (["--family", "mixture:colour"], "unknown column 'colour'"),
        (["--recipe", "tinny"], "did you mean 'tiny'"),
        (["--role", "test"], "role: Input should be 'dev' or 'held-out'"),
        (["--set", "overrides.stepz=3"], "overrides: stepz: no such field"),
        (["--set", "overrides.shape=3"], "overrides.shape: got 3, expected a group of settings"),
        (["--corpus", "nowhere.parquet"], "nowhere.parquet"),
        (["--set", "corpus.max_length=65"], "the context length of recipe tiny is 64 tokens"),
        (["--set", "tokenizer=/"], "`/` has no tokenizer"),
    ],
)
def test_retrain_refuses_before_anything_is_trained(settings, env, tmp_path, arguments, pattern):
    out = tmp_path / "env"
    assert re.search(pattern, refused("retrain", "--config", settings, "--out", out, *arguments))
    assert not (out / "environment.json").exists()
    assert "--corpus (corpus.path), --targets" in refused("retrain", "--out", out)
    assert f"{out / 'run.yaml'}" in refused("retrain", "--out", out, "--resume")
    assert re.search(f"{settings}.*directory", refused(*retrain(settings, settings)))
    assert re.search(r"family\.seed: .*\b0\b.*\b1\b", refused(*retrain(settings, env, "--set", "family_seed=1")))


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (["--target", "facts,sums"], r"target: .*\['facts', 'sums'\]"),
        (["--method-settings", "forest.yaml"], "forest: penalty: .*'lasso' or 'ridge', got 'forest'"),
        (["--method-settings", "colour.yaml"], "colour"),
        (["--protocol", "nowhere.yaml"], "nowhere.yaml: no such settings file"),
        (["--json", "nowhere/r.json"], "directory nowhere"),
        (["--runs", "nowhere"], "nowhere: no such file or directory"),
        (["--runs", __file__], "is not an environment"),
    ],
)
def test_evaluate_refuses_in_one_line(art, env, tmp_path, monkeypatch, arguments, pattern):
    monkeypatch.chdir(tmp_path)
    write_yaml({"forest": {"method": "datamodels", "penalty": "forest"}}, tmp_path / "forest.yaml")
    write_yaml({"oracle": {"method": "datamodels", "penalty": "ridge", "sees": "colour"}}, tmp_path / "colour.yaml")
    assert re.search(pattern, refused("evaluate", art, "--runs", env, *arguments))


# evaluate


def test_evaluate_prints_the_results_of_the_library_and_scipy(art, env):
    out = succeed("evaluate", art, "--runs", env).out
    printed = lines_of(out)
    kernels = ("output_layer", "pooled", "embedding", "knn")
    several = {
        f"{names} additive"
        for names in (
            "output_layer+embedding",
            "output_layer+embedding+knn",
        )
    }
    assert set(printed) == {f"{kernel} additive" for kernel in kernels} | several | {"default"}
    assert f"protocol default: {DEFAULT_PROTOCOL.selection_summary}" in out
    realized_B = RetrainedRuns.open(env).utilities().values_BSE.mean(axis=(1, 2))
    masks_BN = np.concatenate([block.weights_BN.toarray() for block in scored(art, env).blocks])
    relevance = arrays(art)
    files = ArtifactReader.open(art)
    protocol = resolve_protocol(None, files, known_questions=True)
    protocol = protocol.resolved_for(files)
    (prediction,) = scored(art, env).predict({"default": protocol}, ["facts"])
    predicted = {"default": prediction.task_B["facts"]} | {
        f"{kernel} additive": masks_BN @ relevance[f"relevance_{kernel}"].mean(axis=1) / masks_BN.sum(axis=1)
        for kernel in kernels
    }
    for name, predicted_B in predicted.items():
        assert printed[name][3].startswith(f"{stats.spearmanr(predicted_B, realized_B).statistic:.3f} [")


def test_a_planted_protocol_reaches_the_ceiling_and_the_file_agrees(art, own_env, tmp_path):
    plant_protocol(own_env, art)
    oracles = {f"by {sees}": {"method": "datamodels", "penalty": "ridge", "sees": sees} for sees in ("topic", "masks")}
    write_yaml(oracles, tmp_path / "oracles.yaml")
    outcome = succeed(
        *("evaluate", art, "--runs", own_env, "--protocol", tmp_path / "planted.yaml", "--target", "facts"),
        *("--json", tmp_path / "r.json", "--method-settings", tmp_path / "oracles.yaml"),
    )
    printed = lines_of(outcome.out)
    assert float(printed["planted"][3].split()[0]) > 0.95
    assert float(printed["planted"][4]) > 0.95
    assert float(printed["output_layer additive"][3].split()[0]) < float(printed["planted"][3].split()[0])
    assert set(oracles) <= set(printed)
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["notes"][0] == f"protocol default: {DEFAULT_PROTOCOL.selection_summary}"
    assert report["notes"][1].startswith("protocol planted: ")
    assert "default" in printed
    for record in report["results"]:
        assert printed[record["method"]][3].startswith(f"{record['task_rho']:.3f} [{record['task_rho_low']:.3f}, ")


def test_controls_are_selected_on_development_and_shown_side_by_side(art, env, own_env, settings, tmp_path):
    write_yaml(FAMILY, tmp_path / "family.yaml")
    plant_protocol(own_env, art)
    set_info(own_env, role="held-out")
    other = Path(shutil.copytree(env, tmp_path / "other"))
    plant_protocol(other, art)
    copy = Path(shutil.copytree(other, tmp_path / "copy"))
    command = ["controls", art, "--runs", own_env, "--family", tmp_path / "family.yaml"]
    assert_mentions(refused(*command), "held out", "development")
    leak = refused(*command, "--development", own_env, "--development", other)
    assert_mentions(leak, "selection", "held-out")
    out = succeed(*command, "--development", other, "--development", copy).out
    printed = lines_of(out)
    assert {"full", "additive", "additive-self-norm", "pair-only", "pair-shuffled", "without-self"} <= set(printed)
    assert {"full-retained", "full-omitted", "without-residual-alignment"} <= set(printed)
    assert float(printed["full"][3].split()[0]) > 0.95
    assert re.search("control.*other/facts, copy/facts", out)
    assert "control full: retained | mean | pooled | -1 joint.pair | mean_relevance" in out
    assert printed["full"][1] == "facts (in sample)"  # the same runs in another directory, whatever their role there
    assert printed["output_layer additive"][1] == "facts (held-out)"
    assert "in sample: " in out


def test_an_artifact_of_another_corpus_is_refused_with_the_command_to_build_it(art, env, tmp_path):
    out, chosen = tmp_path / "art", ("--runs", env, "--out", tmp_path / "p.yaml")
    succeed("build", "--config", art / "run.yaml", "--set", "corpus.limit=39", "--out", out)
    message = refused("evaluate", out, "--runs", env)
    assert "fingerprint" in message
    arguments = shlex.split(message.split(": grasp ")[1])
    assert arguments[0] == "build"
    succeed(*arguments[:-1], tmp_path / "right", "--set", "model.threads=1")
    succeed("evaluate", tmp_path / "right", "--runs", env)
    assert "fingerprint" in refused("calibrate", out, *chosen)
    assert re.search(f"{out}: .*corpus", refused("calibrate", art, out, *chosen))


# calibrate


def test_calibrate_selects_the_planted_protocol_and_writes_it(art, env, tmp_path):
    write_yaml(FAMILY, tmp_path / "family.yaml")
    first, second = (Path(shutil.copytree(env, tmp_path / name)) for name in ("one", "two"))
    for place in (first, second):
        plant_protocol(place, art)
    out, result = tmp_path / "chosen.yaml", tmp_path / "r.json"
    text = succeed(
        *("calibrate", art, "--runs", first, "--runs", second),
        *("--family", tmp_path / "family.yaml", "--out", out),
    ).out
    lines = text.splitlines()
    best = "retained | mean | pooled | -1 joint.pair | mean_relevance"
    assert_mentions(lines[0], f"protocol chosen: {best}", "one/facts, two/facts")
    assert cells(lines[2])[0] == best
    provenance = tmp_path / "chosen.provenance.json"
    assert_mentions(lines, "15 protocols", "one/facts, two/facts", "mean task_rho - ")
    assert_mentions(lines[-1], f"{out}: ", str(provenance))
    record = json.loads(provenance.read_text())
    assert cells(lines[2])[1:3] == [f"{record['best'][0]['lcb']:+.3f}", f"{record['best'][0]['mean']:+.3f}"]
    protocol = load_protocol(out)
    assert (protocol.match, protocol.components) == ({"pooled": 1.0}, {"joint.pair": -1.0})
    assert protocol.calibration.family == "mixture:topic"
    predicted = succeed("predict", art, "--keep", "topic = 'sky'", "--protocol", out).out
    assert predicted.rstrip().endswith("protocol chosen")

    def evaluated(runs, protocol=out):
        command = ("evaluate", art, "--runs", runs, "--protocol", protocol, "--json", result)
        return lines_of(succeed(*command).out)

    by_method = evaluated(first)
    assert float(by_method["chosen"][3].split()[0]) > 0.95
    assert (by_method["chosen"][1], by_method["default"][1]) == ("facts (in sample)", "facts")
    assert evaluated(shutil.copytree(first, tmp_path / "elsewhere"))["chosen"][1] == "facts (in sample)"
    assert {line["method"] for line in json.loads(result.read_text())["results"] if line["in_sample"]} == {"chosen"}
    other = Path(shutil.copytree(first, tmp_path / "more" / "one"))  # other runs in a directory of the same name
    set_info(other, recipe="small")
    assert evaluated(other)["chosen"][1] == "facts"
    assert not any(line["in_sample"] for line in json.loads(result.read_text())["results"])


def test_calibrate_refuses_a_single_result_and_held_out_runs(art, env, own_env, tmp_path):
    command = ["calibrate", art, "--runs", own_env, "--out", tmp_path / "p.yaml"]
    assert re.search(r"\b1 .*\['env/facts'\].*\b2\b", refused(*command))
    assert re.search(r"\['env/facts', 'env/facts'\].*duplicates", refused(*command, "--runs", env))
    two = Path(shutil.copytree(env, tmp_path / "two"))
    set_info(two, role="held-out")
    assert_mentions(refused(*command, "--runs", two), "selection", "held-out")
    assert not (tmp_path / "p.yaml").exists()
