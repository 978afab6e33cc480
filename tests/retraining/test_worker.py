"""Laws: stored runs equal manual training; a kill loses only the current run; invalid input is refused first."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from grasp.artifact.reader import ArtifactReader
from grasp.corpus import RowStore
from grasp.errors import CorpusError, GraspError, ModelError, RunsError, SettingsError, SubsetError
from grasp.models.causal_lm import ReferenceModel
from grasp.models.unit_loss import evaluate_units
from grasp.pipeline.pipeline import build_artifact
from grasp.pipeline.ray_cluster import ClusterSpec
from grasp.retraining import worker as module
from grasp.retraining.plan import fine_tuning_recipe, resolved_recipe, row_names
from grasp.retraining.settings import retrain_settings
from grasp.retraining.worker import Worker, retrain
from grasp.runs.alignment import match_targets
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import Run
from grasp.settings import ModelSettings, build_settings
from grasp.training.adamw import AdamWTraining
from grasp.training.train import train
from grasp.yaml_files import read_yaml, set_settings
from tests.faults import Killed
from tests.pipeline.test_chat_build import chat_settings

TOPICS = {
    "water": "rain falls on the river and the river runs into the sea and the fish swim in the water",
    "light": "the sun gives light and the light of the moon is the light of the sun seen at night",
    "iron": "iron is a metal and steel is made of iron in a furnace where coal burns and air is blown",
}
UNITS = [
    ("water", "the river runs into the sea"),
    ("water", "fish swim in the water"),
    ("water", "rain falls on the river"),
    ("iron", "steel is made of iron"),
    ("iron", "coal burns in a furnace"),
    ("iron", "iron is a metal"),
]
CHILD = """
import sys
from pathlib import Path
from grasp.retraining.worker import retrain
from grasp.retraining.settings import retrain_settings
from grasp.yaml_files import read_yaml
if __name__ == "__main__":
    retrain(retrain_settings(read_yaml(Path(sys.argv[1]))), Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A corpus of 150 rows with a topic, and two targets of three units."""
    directory = tmp_path_factory.mktemp("inputs")
    rng = np.random.default_rng(0)
    with (directory / "corpus.jsonl").open("w") as file:
        for i in range(150):
            topic = list(TOPICS)[i % 3]
            words = TOPICS[topic].split()
            text = " ".join(words[k] for k in rng.integers(0, len(words), size=12))
            file.write(json.dumps({"text": text, "topic": topic, "row_id": f"r{i}"}) + "\n")
    with (directory / "targets.jsonl").open("w") as file:
        for i, (task, sentence) in enumerate(UNITS):
            prompt, _, word = sentence.rpartition(" ")
            line = {"task": task, "prompt": prompt, "completion": f" {word}", "unit_id": f"u{i}"}
            file.write(json.dumps(line) + "\n")
    return directory


def settings(inputs, **changes):
    plain = {
        "overrides": {
            "steps": 5,
            "warmup_steps": 1,
            "batch_rows": 8,
            "shape": {"vocab_size": 300, "hidden": 16, "intermediate": 32, "layers": 1, "heads": 2, "context": 64},
        },
        "corpus": {"path": str(inputs / "corpus.jsonl"), "max_length": 64},
        "targets": {"names": [str(inputs / "targets.jsonl")], "max_length": 64},
        "losses": ["completion", "all"],
        "n_subsets": 3,
        "threads": 1,
        "device": "cpu",
    }
    return retrain_settings(plain | changes)


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """Train all runs without interruption."""
    out = tmp_path_factory.mktemp("whole") / "env"
    return retrain(settings(inputs), out)


def test_mixtures_repeat_each_value_as_often_as_a_planned_run(inputs, tmp_path):
    (tmp_path / "sizes.json").write_text('{"water": "10k", "light": "20M", "iron": "20M"}')
    planned = {"planned_tokens": "1M", "source_tokens": str(tmp_path / "sizes.json"), "family": "dirichlet:topic"}
    notes = []
    runs = retrain(settings(inputs, **planned), tmp_path / "env", lambda status: notes.append(status.note))
    store = RowStore.open(runs.path / "tokens")
    tokens_N, topics = store.lengths(), store.table(0)["topic"].to_pylist()
    run_tokens = 5 * 8 * tokens_N.mean()
    (block,) = runs.subset_blocks(row_names(store))
    for weight_N in block.weights_BN.toarray():
        rows = [i for i in np.flatnonzero(weight_N) if topics[i] == "water"]
        assert not rows or abs(tokens_N[rows].sum() - 10e3 * run_tokens / 1e6) <= tokens_N.max() / 2
    (note,) = [note for note in notes if note and note.startswith("repeated more often")]
    assert "light" in note
    assert "water" not in note
    assert runs.info.family is None
    with pytest.raises(SettingsError, match="mixtures of a new model only"):
        settings(inputs, **planned | {"family": "mixture:topic"})


def test_utilities_equal_those_of_manual_training(inputs, whole):
    store = RowStore.open(whole.path / "tokens")
    worker = Worker(settings(inputs), whole)
    masks = [block.weights_BN.toarray() > 0 for block in whole.subset_blocks(row_names(store))]
    got = whole.utilities()
    assert got.targets == ("water",) * 3 + ("iron",) * 3 + ("water@all",) * 3 + ("iron@all",) * 3
    for seed, b in ((0, 0), (1, 2)):
        model = train(resolved_recipe(settings(inputs)), store, seed=seed, retained=np.concatenate(masks)[b]).model
        by_hand = -evaluate_units(model, worker.tokens)
        np.testing.assert_allclose(got.values_BSE[b, seed], by_hand, atol=1e-4)
    assert (got.values_BSE < 0).all()
    assert np.abs(got.select("water").values_BSE - got.select("water@all").values_BSE).max() > 0.01
    assert len(np.unique(got.values_BSE[:, :, 0])) == 6


def test_margins_and_accuracies_are_those_of_the_retrained_model_and_align_with_a_build(inputs, tmp_path):
    path = tmp_path / "quiz.jsonl"
    lines = [
        {"prompt": "the river runs into the", "choices": ["sea", "moon", "coal"], "answer": 0},
        {"prompt": "steel is made of", "choices": ["water", "iron"], "answer": 1},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    names = [str(path), f"{path}@margin", f"{path}@accuracy_per_char"]
    changes = {"targets": {"names": names, "max_length": 64}, "seeds": [0], "n_subsets": 2}
    runs = retrain(settings(inputs, **changes), tmp_path / "env")
    assert runs.targets == ("quiz", "quiz@margin", "quiz@accuracy_per_char", "quiz@all")
    reference = str(runs.path / "reference" / "seed-0")
    model = ReferenceModel.load(ModelSettings(path=reference, check=False))
    utility_of = dict(zip(runs.units, runs.reference_utilities()[0], strict=True))
    for k, line in enumerate(lines):
        logp = []
        for text in line["choices"]:
            prompt, ids = (model.tokenizer.encode([line["prompt"] + part])[0] for part in ("", f" {text}"))
            logits = model.model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
            logp.append(sum(logits[t - 1, ids[t]].item() for t in range(len(prompt), len(ids))))
        right, letters = logp.pop(line["answer"]), [len(text) for text in line["choices"]]
        per_char = right / letters.pop(line["answer"]) > max(p / n for p, n in zip(logp, letters, strict=True))
        margin = right - np.logaddexp.reduce(logp)
        assert utility_of["quiz@margin", f"quiz:{k}@margin"] == pytest.approx(margin, abs=1e-4)
        assert utility_of["quiz@accuracy_per_char", f"quiz:{k}@accuracy_per_char"] == per_char
    corpus = {"path": str(inputs / "corpus.jsonl"), "max_length": 64}
    targets = {"names": names[:2], "max_length": 64}
    built = build_settings({"model": {"path": reference}, "corpus": corpus, "targets": targets})
    artifact = ArtifactReader.open(build_artifact(built, tmp_path / "art"))
    assert match_targets(runs, artifact) == {name: name for name in ("quiz", "quiz@margin")}


def test_a_model_is_trained_further_on_every_subset(inputs, whole, tmp_path):
    reference = str(whole.path / "reference" / "seed-0")
    fine_tuning = {"max_steps": 3, "per_device_train_batch_size": 120, "learning_rate": 1e-2, "val_set_size": 0.1}
    changes = {"train": "further", "model": {"path": reference}, "fine_tuning": fine_tuning, "overrides": {}}
    changes |= {"seeds": [0], "n_subsets": 2, "losses": ["completion"]}
    seen = []
    runs = retrain(settings(inputs, **changes), tmp_path / "env", seen.append)
    assert runs.info.recipe_settings["loss"] == "tokens"
    assert (
        tuple(status.note for status in seen if status.stage == "recipe")
        == fine_tuning_recipe(settings(inputs, **changes)).notes
    )
    changes["fine_tuning"] = fine_tuning | {"dataloader_drop_last": True}
    with pytest.raises(SubsetError, match="fewer than the 120 of one batch"):  # and a run would have no step
        retrain(settings(inputs, **changes), tmp_path / "no-step")
    changes["fine_tuning"] = fine_tuning
    before = -evaluate_units(
        ReferenceModel.load(ModelSettings(path=reference)).model, Worker(settings(inputs, **changes), runs).tokens
    )
    got = runs.utilities().values_BSE[:, 0]
    assert np.abs(got - before).max(axis=1).min() > 1e-3
    trained = ReferenceModel.load(ModelSettings(path=str(runs.path / "reference" / "seed-0"))).model
    by_hand = -evaluate_units(trained, Worker(settings(inputs, **changes), runs).tokens)
    np.testing.assert_allclose(runs.reference_utilities()[0], by_hand, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": "further"}, "further needs a model; add --model or --like"),
        ({"train": "further", "model": {"path": "m"}}, "overrides: no effect with train: further"),
        ({"model": {"path": "m"}}, "model, fine_tuning: no effect with train: new"),
        ({"corpus": {"path": "pairs.jsonl", "form": "preference"}}, "preference pairs train a model further"),
    ],
)
def test_settings_of_another_kind_of_training_are_refused(inputs, changes, message):
    with pytest.raises(SettingsError, match=message):
        settings(inputs, **changes)


def test_answers_of_conversations_are_trained_on(inputs, tmp_path):
    chat = chat_settings(tmp_path)
    changes = {"tokenizer": chat.model.path, "corpus": chat.corpus.model_dump(), "seeds": [0], "losses": ["completion"]}
    shape = {"vocab_size": 300, "hidden": 16, "intermediate": 32, "layers": 1, "heads": 2, "context": 128}
    changes["overrides"] = {"steps": 3, "warmup_steps": 1, "batch_rows": 4, "shape": shape}
    result = retrain(settings(inputs, **changes), tmp_path / "env")
    store = RowStore.open(result.path / "tokens")
    assert store.loss_counts().sum() < store.lengths().sum() / 2
    (mask_N, *_) = [block.weights_BN.toarray()[0] > 0 for block in result.subset_blocks(row_names(store))]
    model = train(resolved_recipe(settings(inputs, **changes)), store, seed=0, retained=mask_N).model
    by_hand = -evaluate_units(model, Worker(settings(inputs, **changes), result).tokens)
    np.testing.assert_allclose(result.utilities().values_BSE[0, 0], by_hand, atol=1e-4)
    # the same words with loss on all of them are another training
    changes["corpus"] |= {"loss_on": "all"}
    other = retrain(settings(inputs, **changes), tmp_path / "all")
    assert np.abs(other.utilities().values_BSE[0, 0] - by_hand).max() > 1e-4


def test_the_reference_run_is_stored_with_its_checkpoints(inputs, whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    for seed in (0, 1):
        directory = whole.path / "reference" / f"seed-{seed}"
        checkpoints = sorted(path.name for path in directory.glob("checkpoint-*"))
        assert checkpoints == ["checkpoint-1", "checkpoint-3", "checkpoint-4"]
        model = AutoModelForCausalLM.from_pretrained(directory)
        tokens = Worker(settings(inputs), whole).tokens
        np.testing.assert_allclose(whole.reference_utilities()[seed], -evaluate_units(model, tokens), atol=1e-4)
    assert whole.info.checkpoint == "reference/seed-0"
    assert len(AutoTokenizer.from_pretrained(whole.path / "reference" / "seed-0")) <= 300


def test_finished_runs_are_not_repeated(inputs, whole):
    before = (whole.path / "utilities.parquet").stat()
    seen = []
    retrain(settings(inputs), whole.path, seen.append)
    assert (whole.path / "utilities.parquet").stat() == before
    assert [status.step for status in seen if status.stage == "runs"] == [0]
    assert settings(inputs) == retrain_settings(read_yaml(whole.path / "run.yaml"))


def test_interrupted_training_resumes_to_the_same_bytes(inputs, whole, tmp_path):
    for _ in range(3):
        steps = []

        def stop(status, steps=steps):
            steps.append(status.step)
            if len([step for step in steps if step == 3]) == 3:
                raise Killed

        with pytest.raises(Killed):
            retrain(settings(inputs), tmp_path / "env", stop)
    env = retrain(settings(inputs), tmp_path / "env")
    for name in ("utilities.parquet", "reference.parquet", "subsets.parquet", "environment.json"):
        assert (env.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_killed_in_the_middle_another_worker_takes_over(inputs, whole, tmp_path):
    from grasp.yaml_files import write_yaml  # noqa: PLC0415

    out, slow = tmp_path / "env", settings(inputs, lease_seconds=1.0, n_subsets=3)
    write_yaml(slow.model_dump(mode="json"), tmp_path / "settings.yaml")
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path / "settings.yaml"), str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline = time.time() + 120
    while not any((out / "runs").glob("*.parquet")) and child.poll() is None and time.time() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    env = RetrainedRuns.open(out)
    assert 0 < len(env.pending()) < len(env.runs())
    np.testing.assert_array_equal(retrain(slow, out).utilities().values_BSE, whole.utilities().values_BSE)


def test_a_worker_trains_free_runs_and_waits_for_locked_ones(inputs, whole, tmp_path, monkeypatch):
    env = module.prepare(settings(inputs), tmp_path / "env", lambda _: None)
    _, lease = env.claim()
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)

    def let_go(status):
        if not status.running and status.done == len(env.runs()) - 1:
            lease.release()

    retrain(settings(inputs), tmp_path / "env", let_go)
    np.testing.assert_array_equal(env.utilities().values_BSE, whole.utilities().values_BSE)


def test_progress_reports_finished_runs_and_remaining_time(inputs, tmp_path, monkeypatch):
    seen, steps, update = [], [], AdamWTraining.update
    monkeypatch.setattr(AdamWTraining, "update", lambda self: steps.append(self.step) or update(self))
    retrain(settings(inputs, n_subsets=1, seeds=[0]), tmp_path / "env", seen.append)
    assert [status.stage for status in seen[:2]] == ["tokenizer", "rows"]
    runs = [status for status in seen if status.stage == "runs"]
    assert [status.step for status in runs] == [1, 2, 3, 4, 5] * 2 + [0]
    assert runs[0].running == "full-0"
    assert runs[5].running == "evaluation-000000-0"
    assert [status.done for status in runs] == [0] * 5 + [1] * 5 + [2]
    assert all(status.seconds_left > 0 for status in runs[:9])
    assert runs[-1].seconds_left == 0
    (cost,) = [status.note for status in seen if status.stage == "cost"]
    assert cost.startswith("2 runs of 5 steps")
    assert steps == [0, 1, 2, 3, 4] * 2  # no step is trained only to tell the time


def test_seeds_can_be_added_later(inputs, tmp_path):
    retrain(settings(inputs, seeds=[0]), tmp_path / "env")
    env = retrain(settings(inputs, seeds=[0, 2]), tmp_path / "env")
    assert env.utilities().values_BSE.shape == (3, 2, 12)


def test_subsets_of_a_table_are_trained_on(inputs, tmp_path):
    table = pa.table({"subset_id": ["a"] * 30 + ["b"] * 40, "row_id": [f"r{i}" for i in [*range(30), *range(40)]]})
    pq.write_table(table, tmp_path / "s.parquet")
    env = retrain(settings(inputs, subsets=str(tmp_path / "s.parquet"), seeds=[0]), tmp_path / "env")
    assert env.subset_ids == ("a", "b")
    assert env.info.family is None
    sizes = [block.sizes_B.tolist() for block in env.subset_blocks(row_names(RowStore.open(env.path / "tokens")))]
    assert sizes == [[30, 40]]


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"held_out_targets": ["sciq"]}, RunsError, r"held_out_targets: got \['sciq'\]"),
        ({"tokenizer": "/nowhere"}, SettingsError, r"tokenizer:.*'/nowhere'"),
        ({"corpus.max_length": 65}, SettingsError, r"corpus.max_length:.*\b65\b"),
        ({"overrides.shape.context": 4, "corpus.max_length": 4}, SettingsError, r"\b4 tokens .*'u0'"),
        ({"overrides.shape.vocab_size": 260, "tokenizer": "TRAINED"}, SettingsError, r"\b300 tokens.*\b260\b"),
    ],
)
def test_invalid_settings_are_refused_before_training(inputs, whole, tmp_path, changes, error, word):
    if changes.get("tokenizer") == "TRAINED":
        changes = changes | {"tokenizer": str(whole.path / "tokenizer")}
    fields = set_settings(settings(inputs).model_dump(mode="json"), changes)
    with pytest.raises(error, match=word):
        retrain(retrain_settings(fields), tmp_path / "env")
    assert not (tmp_path / "env" / "environment.json").exists()


def test_another_corpus_replaces_runs_that_have_not_begun(inputs, whole, tmp_path):
    lines = (inputs / "corpus.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "wrong.jsonl").write_text("".join(lines[:60]).replace("river", "mountain"))
    wrong = {"path": str(tmp_path / "wrong.jsonl"), "max_length": 64}
    with pytest.raises(SubsetError, match="3 rows"):
        retrain(settings(inputs, corpus=wrong, family="uniform:0.05"), tmp_path / "env")
    before = (tmp_path / "env/tokenizer/tokenizer.json").read_bytes()
    seen = []
    env = retrain(settings(inputs), tmp_path / "env", lambda status: seen.append(status.stage))
    assert seen[:2] == ["tokenizer", "rows"]
    assert (env.path / "tokenizer/tokenizer.json").read_bytes() != before
    for name in ("utilities.parquet", "environment.json", "tokenizer/tokenizer.json"):
        assert (env.path / name).read_bytes() == (whole.path / name).read_bytes()
    with pytest.raises(CorpusError, match="begun"):  # from now on it is the environment's own
        retrain(settings(inputs, corpus=wrong), env.path)
    assert (env.path / "tokenizer/tokenizer.json").read_bytes() == (
        whole.path / "tokenizer/tokenizer.json"
    ).read_bytes()


def test_other_settings_in_the_same_directory_are_refused(inputs, whole):
    with pytest.raises(RunsError, match=r"settings\.steps:.*\b5\b.*\b6\b"):
        retrain(settings(inputs, overrides=settings(inputs).overrides | {"steps": 6}), whole.path)
    with pytest.raises(RunsError, match=r"subsets: .*\b3\b.*checksum"):
        retrain(settings(inputs, family_seed=1), whole.path)


def test_a_diverging_run_is_named_and_not_stored(inputs, tmp_path):
    wild = settings(inputs).overrides | {"learning_rate": 1e30, "clip_norm": 1e30}
    with pytest.raises(ModelError, match="run full-0: "):
        retrain(settings(inputs, overrides=wild), tmp_path / "env")
    assert not (tmp_path / "env" / "runs").exists()
    run, _ = RetrainedRuns.open(tmp_path / "env").claim()
    assert run == Run(0, "full")


@pytest.mark.slow
def test_several_workers_share_the_runs(inputs, whole, tmp_path):
    env = retrain(settings(inputs, workers=2), tmp_path / "env")
    np.testing.assert_allclose(env.utilities().values_BSE, whole.utilities().values_BSE, atol=1e-4)
    wild = settings(inputs).overrides | {"learning_rate": 1e30, "clip_norm": 1e30}
    with pytest.raises(GraspError, match="run "):
        retrain(settings(inputs, workers=2, overrides=wild), tmp_path / "wild")
    assert Path(tmp_path / "wild" / "environment.json").exists()


@pytest.mark.slow
def test_training_killed_at_twenty_random_moments_gives_the_same_bytes(inputs, whole, tmp_path):
    plain, out = settings(inputs, lease_seconds=0.5), tmp_path / "env"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["grasp.retraining.worker"])
    rng = np.random.default_rng(0)
    killed = 0
    while killed < 20:
        child = context.Process(target=retrain, args=(plain, out))
        child.start()
        child.join(rng.uniform(0.05, 1.2))
        if child.exitcode == 0:
            shutil.rmtree(out)  # it was done before the kill: begin again
        else:
            child.kill()
            killed += 1
        child.join()
    retrain(plain, out)
    for name in ("utilities.parquet", "reference.parquet", "subsets.parquet", "environment.json"):
        assert (out / name).read_bytes() == (whole.path / name).read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # ray leaves sockets to the interpreter's end
def test_a_cluster_gives_the_same_runs(inputs, whole, tmp_path, monkeypatch):
    """All of it, since no number of workers is given; from paths that are relative to where the user is."""
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    monkeypatch.chdir(inputs)
    seen = []
    try:
        spread = retrain(
            settings(Path()), tmp_path / "env", lambda status: seen.append(status.done), cluster=ClusterSpec()
        )
    finally:
        ray.shutdown()
    np.testing.assert_array_equal(spread.utilities().values_BSE, whole.utilities().values_BSE)
    np.testing.assert_array_equal(spread.reference_utilities(), whole.reference_utilities())
    assert seen[-1] == 8
