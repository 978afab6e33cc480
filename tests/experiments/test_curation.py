"""Curation experiment on a small world: selections, held-out documents, and the table of results."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.curation.choices import in_whole_rows
from experiments.curation.gpt2 import train_gpt2
from experiments.curation.run import Experiment
from experiments.curation.setting import HELD_OUT, Settings, choice_id
from experiments.curation.table import estimate
from grasp.pipeline.pipeline import build_artifact
from grasp.runs.retrained import RetrainedRuns
from grasp.settings import build_settings
from grasp.training.llama import LlamaShape
from grasp.training.recipe import named_recipe
from tests.models.toy import InMemoryRows
from tests.pipeline.world import WORDS, write_checkpoint, write_corpus

SHAPE = {"vocab_size": 300, "hidden": 8, "intermediate": 12, "layers": 1, "heads": 1, "context": 48}
RECIPE = {"shape": SHAPE, "steps": 3, "warmup_steps": 1, "batch_rows": 4}


def write_choices(path, task, n_units=7):
    """Write units with three choices each."""
    generator = np.random.default_rng(len(task))
    with path.open("w") as file:
        for i in range(n_units):
            choices = [" " + word for word in generator.choice(WORDS, size=3, replace=False)]
            line = {"task": task, "unit_id": f"{task}-{i}", "prompt": f"What is {WORDS[i]}?"}
            file.write(json.dumps(line | {"completion": choices[i % 3], "choices": choices, "gold": i % 3}) + "\n")
    return path


@pytest.fixture(scope="module")
def art(tmp_path_factory):
    place = tmp_path_factory.mktemp("curation")
    settings = build_settings(
        {
            "model": {"path": str(write_checkpoint(place / "model"))},
            "corpus": {
                "path": str(write_corpus(place / "corpus.jsonl", 60)),
                "max_length": 48,
                "max_rows_per_document": 1,
            },
            "targets": {
                "names": [str(write_choices(place / f"{task}.jsonl", task)) for task in ("facts", "sky")],
                "units_per_target": 4,
                "max_length": 48,
            },
        }
    )
    return build_artifact(settings, place / "art")


def small(art, **changed):
    settings = {
        "first_target": "facts",
        "seeds": (0, 1),
        "draws": 2,
        "budgets": (0.2,),
        "held_out": 10,
        "overrides": RECIPE,
    }
    return Settings(art, **settings | changed)


@pytest.fixture(scope="module")
def experiment(art, tmp_path_factory):
    """Run the complete experiment, including the transfer between architectures."""
    place = tmp_path_factory.mktemp("run")
    trial = Experiment(small(art), place / "work", place / "result.json")
    trial.run(cross=True)
    return trial


def subsets(world):
    table = pq.read_table(world.work / "subsets.parquet").to_pylist()
    results = {}
    for line in table:
        results.setdefault(line["subset_id"], []).append(line["row_id"])
    return results


def result(experiment):
    return json.loads(experiment.out.read_text())


def test_held_out_documents_are_neither_selected_nor_trained_on(experiment):
    world = experiment.world
    pool = set(np.array(world.row_ids.to_pylist())[world.pool_N])
    assert (~world.pool_N).sum() == 10
    assert all(set(rows) <= pool for rows in subsets(world).values())
    trained = RetrainedRuns.open(world.work / "llama")
    assert trained.info.n_rows == 50
    corpus = pq.read_table(world.work / "pool").column("row_id").to_pylist()
    assert set(corpus) == pool
    held_out = [unit_id for target, unit_id in trained.units if target == HELD_OUT]
    assert {unit_id.removeprefix(f"{HELD_OUT}:") for unit_id in held_out} == set(world.row_ids.to_pylist()) - pool


def test_every_selection_matches_the_budget_without_duplicates(experiment):
    rows = subsets(experiment.world)
    for selection in experiment.chosen["llama"]:
        assert len(rows[selection.subset_id]) == selection.rows == round(selection.asked.share * 50)
        assert len(set(rows[selection.subset_id])) == selection.rows


def test_the_table_equals_the_stored_runs(experiment):
    world, environment = experiment.world, RetrainedRuns.open(experiment.work / "llama")
    known = environment.utilities()
    place = {unit_id: e for e, unit_id in enumerate(known.unit_ids)}
    (line,) = [
        record for record in result(experiment)["trained"]["llama"]
        if (record["method"], record["targets"], record["share"]) == ("bm25", "facts", 0.2)
    ]  # fmt: skip
    utility_SE = known.values_BSE[known.subset_ids.index(line["subset_id"])]
    units = [unit for unit in world.scored_units if unit.target == "facts"]
    assert sum(unit.is_fresh for unit in units) == 3
    gold = {
        fresh: [place[choice_id(u.unit_id, u.gold)] for u in units if u.is_fresh == fresh] for fresh in (True, False)
    }
    assert line["selected_loss"]["mean"] == pytest.approx(-utility_SE[:, gold[False]].mean())
    assert line["fresh_loss"]["mean"] == pytest.approx(-utility_SE[:, gold[True]].mean())
    held_out = [e for e, target in enumerate(known.targets) if target == HELD_OUT]
    assert line["held_out_loss"]["mean"] == pytest.approx(-utility_SE[:, held_out].mean())
    right = []
    for unit in units:
        tokens = [len(ids) for ids in world.material.tokenizer.encode(list(unit.choices))]
        sums = [
            [-utility_SE[s, place[choice_id(unit.unit_id, k)]] * tokens[k] / len(unit.choices[k]) for k in range(3)]
            for s in range(2)
        ]
        right += [min(range(3), key=choice_losses.__getitem__) == unit.gold for choice_losses in sums]
    assert line["accuracy"]["mean"] == pytest.approx(np.mean(right))
    draws = [
        selection.subset_id
        for selection in experiment.chosen["llama"]
        if (selection.asked.method, selection.asked.share) == ("random", 0.2)
    ]
    random_DSE = known.values_BSE[[known.subset_ids.index(name) for name in dict.fromkeys(draws)]]
    assert len(random_DSE) == 2
    difference = -utility_SE[:, gold[True]].mean() + random_DSE[:, :, gold[True]].mean()
    assert line["fresh_loss_minus_random"]["mean"] == pytest.approx(difference)


def test_repeating_the_command_trains_nothing_and_gives_the_same_result(experiment, monkeypatch):
    first = experiment.out.read_bytes()
    monkeypatch.setattr("grasp.retraining.worker.train", None)
    monkeypatch.setattr("experiments.curation.gpt2.train_gpt2", None)
    monkeypatch.setattr("experiments.curation.choices.select", None)
    Experiment(experiment.settings, experiment.work, experiment.out).run(cross=True)
    assert experiment.out.read_bytes() == first


# ------------------------------------------------------------------------------------------------- kernels


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 40)), min_size=1, max_size=8))
def test_integer_counts_keep_the_sum_and_the_available_rows(pairs):
    held_G = np.array([max(held, int(np.ceil(wanted))) for wanted, held in pairs])
    wanted_G = np.array([wanted for wanted, _ in pairs])
    actual = in_whole_rows(wanted_G.copy(), held_G)
    assert actual.sum() == round(wanted_G.sum())
    assert (actual <= held_G).all()
    assert (np.abs(actual - wanted_G) <= 1 + 1e-6).all()


def test_intervals_over_seeds_and_units_cover_the_mean():
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(400):
        values_SU = rng.normal(size=(3, 1)) * 0.3 + rng.normal(size=(1, 40)) + 0.5 * rng.normal(size=(3, 40))
        actual = estimate(values_SU[None])
        covered.append(actual.low <= 0.0 <= actual.high)
    assert 0.9 <= np.mean(covered) <= 0.98


def test_an_interval_over_units_equals_student_t():
    values_U = np.random.default_rng(1).normal(size=20)
    actual = estimate(np.broadcast_to(values_U, (1, 2, 20)))
    half = 2.093024 * values_U.std(ddof=1) / 20**0.5  # Student's t, 19 degrees of freedom
    assert (actual.low, actual.high) == pytest.approx((values_U.mean() - half, values_U.mean() + half), rel=1e-5)
    assert estimate(values_U[None, None]).low is None


def gpt2_rows(seed=0, last=None):
    rows = [np.random.default_rng(seed + i).integers(0, 50, size=12) for i in range(9)]
    return InMemoryRows.from_rows([*rows, rows[0] if last is None else last])


def gpt2_recipe(**changed):
    shape = LlamaShape(vocab_size=50, hidden=8, intermediate=12, layers=1, heads=2, context=16)
    settings = {"shape": shape, "steps": 6, "warmup_steps": 1, "batch_rows": 4}
    return named_recipe("tiny").model_copy(update=settings | changed)


def test_a_gpt2_is_trained_only_on_retained_rows():
    retained = np.arange(10) < 9
    first = train_gpt2(gpt2_recipe(), gpt2_rows(), seed=0, retained=retained).state_dict()
    other = train_gpt2(gpt2_recipe(), gpt2_rows(last=np.arange(12)), seed=0, retained=retained).state_dict()
    assert all(torch.equal(weight, other[name]) for name, weight in first.items())
    everything = train_gpt2(gpt2_recipe(), gpt2_rows(last=np.arange(12)), seed=0, retained=None).state_dict()
    assert any(not torch.equal(weight, everything[name]) for name, weight in first.items())
