"""Laws: a training command of the user runs once per subset; failures are named and other runs continue."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import grasp
from grasp.errors import ModelError, RunsError, SettingsError
from grasp.models.tokenizer import train_tokenizer

EXAMPLE = Path(__file__).parents[2] / "docs/examples/finetune.py"
WORDS = "the river runs into the sea and iron is a metal that burns in the furnace with coal and light"
# copies the corpus next to `seen`, then fails on request, or writes the base model
TRAINER = """
import pathlib, shutil, sys
base, seen, corpus, checkpoint, seed = sys.argv[1:]
seen = pathlib.Path(seen)
lines = pathlib.Path(corpus).read_text()
name = f"{len(lines.splitlines())}-{seed}"
with (seen / "calls").open("a") as file:
    file.write(name + "\\n")
(seen / f"{name}.jsonl").write_text(lines)
if (seen / "fail").exists() and name in (seen / "fail").read_text():
    print("first line", file=sys.stderr)
    sys.exit("no memory for this one")
if (seen / "nothing").exists():
    sys.exit(0)
shutil.copytree(base, checkpoint)
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A corpus of 40 rows, a target of two units, three subsets (one with weights), and a model without training."""
    directory = tmp_path_factory.mktemp("world")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS.split(), 12)) for _ in range(40)]
    lines = [json.dumps({"text": text, "row_id": f"r{i}", "topic": "ab"[i % 2]}) for i, text in enumerate(texts)]
    (directory / "corpus.jsonl").write_text("\n".join(lines) + "\n")
    units = [("the river runs into the", " sea"), ("iron is a", " metal")]
    (directory / "water.jsonl").write_text(
        "".join(json.dumps({"task": "water", "prompt": p, "completion": c}) + "\n" for p, c in units)
    )
    rows = [*range(10), *range(20), *range(4), *range(4, 10)]
    table = {
        "subset_id": ["ten"] * 10 + ["twenty"] * 20 + ["twelve"] * 10,
        "row_id": [f"r{i}" for i in rows],
        "weight": [1.0] * 30 + [1.5] * 4 + [1.0] * 6,
    }
    pq.write_table(pa.table(table), directory / "subsets.parquet")
    for name, vocab in (("base", 300), ("other", 280)):
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(vocab_size=vocab, max_position_embeddings=64, **shape)
        LlamaForCausalLM(config).save_pretrained(directory / name)
        train_tokenizer(texts, vocab_size=vocab).save_pretrained(directory / name)
    (directory / "trainer.py").write_text(TRAINER)
    return directory


def retrain(world, out, command, **more):
    environment_variables = {
        "corpus": {"max_length": 32},
        "tokenizer": str(world / "base"),
        "subsets": str(world / "subsets.parquet"),
        "device": "cpu",
        "threads": 1,
    }
    settings = environment_variables | more.pop("settings", {})
    return grasp.retrain(
        world / "corpus.jsonl",
        str(world / "water.jsonl"),
        out=out,
        seeds=1,
        train_command=command,
        settings=settings,
        **more,
    )


def command(world, seen, base="base"):
    seen.mkdir(exist_ok=True)
    words = [sys.executable, world / "trainer.py", world / base, seen]
    return f"{shlex.join(map(str, words))} {{corpus}} {{checkpoint}} {{seed}}"


def test_each_subset_is_written_trained_on_and_scored_once(world, tmp_path):
    seen = tmp_path / "seen"
    env = retrain(world, tmp_path / "env", command(world, seen))
    calls = (seen / "calls").read_text().split()
    assert calls[:3] == ["40-0", "10-0", "20-0"]
    assert len(calls) == 4
    twenty = [json.loads(line) for line in (seen / "20-0.jsonl").read_text().splitlines()]
    whole = [json.loads(line) for line in (world / "corpus.jsonl").read_text().splitlines()]
    assert twenty == [{key: line[key] for key in ("text", "row_id", "topic")} for line in whole[:20]]
    weighted = [json.loads(line)["row_id"] for line in (seen / f"{calls[3]}.jsonl").read_text().splitlines()]
    assert set(weighted) == {f"r{i}" for i in range(10)}
    assert [weighted.count(f"r{i}") for i in range(4, 10)] == [1] * 6
    assert all(weighted.count(f"r{i}") in (1, 2) for i in range(4))
    utilities = env.utilities().values_BSE
    assert utilities.shape == (3, 1, 2)
    np.testing.assert_array_equal(utilities[:, 0], np.repeat(env.reference_utilities(), 3, axis=0))  # one model
    assert not list((tmp_path / "env/work").iterdir())
    assert (tmp_path / "env/reference/seed-0/config.json").exists()
    assert retrain(world, tmp_path / "env", command(world, seen)).pending() == ()
    assert (seen / "calls").read_text().split() == calls


@pytest.fixture(scope="module")
def example(world, tmp_path_factory):
    """Run the command of the documented example and return its runs."""
    words = [sys.executable, EXAMPLE, "--model", world / "base", "--steps", 30, "--learning-rate", 0.01]
    trained = f"{shlex.join(map(str, words))} --data {{corpus}} --seed {{seed}} --out {{checkpoint}}"
    return trained, retrain(world, tmp_path_factory.mktemp("here") / "env", trained)


def test_the_example_trains_with_the_requested_settings(example):
    utilities = example[1].utilities().values_BSE
    assert (utilities > -np.log(300) + 0.5).all()  # the base model has drawn weights, and knows nothing
    assert len(np.unique(utilities[:, 0, 0])) == 3


def test_a_failed_run_is_named_and_repeated_and_other_runs_continue(world, tmp_path):
    seen, out = tmp_path / "seen", tmp_path / "env"
    trained = command(world, seen)
    (seen / "fail").write_text("20-0")
    env = retrain(world, out, trained)
    assert [run.subset_id for run in env.pending()] == ["twenty"]
    assert env.utilities(partial=True).subset_ids == ("ten", "twelve")
    assert re.search(r"1 of 4 runs.*twenty-0: .*exit status 1: no memory for this one", str(env.summary()))
    assert (out / "logs/twenty-0.stderr.txt").read_text() == "first line\nno memory for this one\n"
    (seen / "fail").unlink()
    repeated = retrain(world, out, trained)
    assert repeated.pending() == ()
    assert "failed" not in str(repeated.summary()).replace(str(tmp_path), "")
    assert (seen / "calls").read_text().split().count("10-0") == 1


def test_jobs_of_a_scheduler_give_the_same_runs_as_local_training(world, example, tmp_path):
    """Lines run in any order, one of them failing at first; what they left is scored by the same call."""
    trained, example_dir = example
    out, lines = tmp_path / "a place" / "env", []
    out.parent.mkdir()
    assert len(retrain(world, out, trained, jobs=lines.append).pending()) == len(lines) == 4
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    for line in lines[:0:-1]:
        subprocess.run(["sh", "-c", line], check=True, cwd=tmp_path, env=environ)
    left = []
    assert [run.subset_id for run in retrain(world, out, trained, jobs=left.append).pending()] == ["full"]
    assert left == lines[:1]
    half_done = out / "jobs/full-0/checkpoint.part"
    half_done.mkdir()
    (half_done / "junk").touch()
    subprocess.run(["sh", "-c", left[0]], check=True, cwd=tmp_path, env=environ)
    env = retrain(world, out, trained)
    assert env.pending() == ()
    np.testing.assert_allclose(env.utilities().values_BSE, example_dir.utilities().values_BSE, atol=1e-5)
    assert (out / "reference/seed-0/config.json").exists()
    assert not list((out / "jobs").iterdir())


def test_a_job_with_an_invalid_result_is_named_and_repeated(world, tmp_path):
    seen, out, lines, repeated = tmp_path / "seen", tmp_path / "env", [], []
    trained = command(world, seen)
    retrain(world, out, trained, jobs=lines.append)
    (out / "jobs/ten-0/checkpoint").mkdir()
    env = retrain(world, out, trained, jobs=repeated.append)
    assert repeated == lines
    assert re.search(r"1 of 4 runs.*ten-0: .*checkpoint", str(env.summary()))
    assert not (seen / "calls").exists()
    with pytest.raises(SettingsError, match=r"print_jobs: .*train command"):
        retrain(world, tmp_path / "other", None, jobs=repeated.append)


def test_the_checkpoint_of_a_job_survives_an_interrupted_scoring(world, tmp_path, monkeypatch):
    trained, out, lines = command(world, tmp_path / "seen"), tmp_path / "env", []
    retrain(world, out, trained, jobs=lines.append)
    for line in lines:
        subprocess.run(["sh", "-c", line], check=True, cwd=tmp_path)
    calls = (tmp_path / "seen/calls").read_text()
    subprocess.run(["sh", "-c", lines[0]], check=True, cwd=tmp_path)  # requeued
    assert (tmp_path / "seen/calls").read_text() == calls

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("grasp.retraining.train_command.evaluate_units", interrupt)
        with pytest.raises(KeyboardInterrupt):
            retrain(world, out, trained)
    assert len(list((out / "jobs").glob("*/checkpoint"))) == len(lines)
    assert retrain(world, out, trained).pending() == ()
    assert (tmp_path / "seen/calls").read_text() == calls  # nothing was trained again
    assert not list((out / "jobs").iterdir())


def test_the_output_of_a_trainer_is_not_limited(world, tmp_path):
    code = "import sys; sys.stderr.write('x' * 100_000 + chr(10) + 'out of memory'); sys.exit(3)"
    with pytest.raises(ModelError, match="exit status 3: out of memory"):
        retrain(world, tmp_path / "env", f"{shlex.join([sys.executable, '-c', code])} {{corpus}} {{checkpoint}}")


def test_failure_of_all_runs_is_an_error(world, tmp_path):
    seen = tmp_path / "seen"
    trained = command(world, seen)
    (seen / "nothing").touch()
    with pytest.raises(ModelError, match=r"4 of 4 runs.*full-0: .*checkpoint"):
        retrain(world, tmp_path / "env", trained)
    with pytest.raises(ModelError, match=r"full-0: '/nowhere/train'"):
        retrain(world, tmp_path / "absent", "/nowhere/train {corpus} {checkpoint}")


def test_a_checkpoint_with_another_tokenizer_is_refused(world, tmp_path):
    with pytest.raises(ModelError, match=r"full-0: .*tokenizer"):
        retrain(world, tmp_path / "env", command(world, tmp_path / "seen", base="other"))


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("train {corpus} {checkpoint} {sed}", {}, r"unknown.*\['sed'\]"),
        ("train {corpus}", {}, r"\['checkpoint'\].*missing"),
        ("train '{corpus} {checkpoint}", {}, "quotation"),
        ("train {corpus} {checkpoint}", {"tokenizer": None}, "tokenizer"),
        (
            "train {corpus} {checkpoint}",
            {"recipe": "small", "overrides": {"steps": 3}},
            r"recipe, overrides\.steps: .*train_command",
        ),
    ],
)
def test_an_invalid_command_is_refused(world, tmp_path, text, settings, message):
    with pytest.raises(SettingsError, match=message):
        retrain(world, tmp_path / "env", text, settings=settings)
    assert not list(tmp_path.glob("env/runs/*"))


def test_a_stored_command_is_not_run_unless_it_is_passed_again(world, tmp_path):
    seen, out = tmp_path / "seen", tmp_path / "env"
    trained = command(world, seen)
    (seen / "fail").write_text("20-0")
    retrain(world, out, trained)
    before = (seen / "calls").read_text()
    with pytest.raises(SettingsError, match=r"run\.yaml: train_command .*code"):
        grasp.retrain(out=out, resume=True)
    assert (seen / "calls").read_text() == before
    (seen / "fail").unlink()
    assert grasp.retrain(out=out, resume=True, train_command=trained).pending() == ()
    with pytest.raises(RunsError, match="recipe_settings"):
        retrain(world, out, trained + " --more")
