"""Curation experiment on a small world: selections, held-out documents, and the table of results."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from experiments.curation.run import Experiment
from experiments.curation.setting import HELD_OUT, Settings, choice_id
from grasp.pipeline.pipeline import build_artifact
from grasp.runs.retrained import RetrainedRuns
from grasp.settings import build_settings
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


# ------------------------------------------------------------------------------------------------- kernels
