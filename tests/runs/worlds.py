"""Small environments made by hand."""

import numpy as np

from grasp.predict.families import parse_family
from grasp.predict.subset_tables import RowIndex
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import FamilyInfo, RunsInfo, TargetInfo

ROWS = RowIndex.from_ids([f"row-{i}" for i in range(30)])
FAMILY = FamilyInfo(spec="uniform:0.5", seed=3, purpose="evaluation")


def blocks(n_subsets=4, n_rows=30):
    return parse_family(FAMILY.spec).draw(n_subsets, n_rows=n_rows, seed=FAMILY.seed, purpose=FAMILY.purpose, block=3)


def info(**changes):
    plain = RunsInfo(
        role="dev",
        recipe="tiny",
        recipe_settings={"steps": 3},
        seeds=(0, 1),
        corpus_fingerprint="c0ffee",
        n_rows=30,
        targets={
            "sciq": TargetInfo(fingerprint="f-sciq", loss_on="completion", unit_ids=("u0", "u1", "u2")),
            "sciq@all": TargetInfo(fingerprint="f-all", loss_on="all", unit_ids=("u0", "u1")),
        },
        family=FAMILY,
        subset_ids=(),
        masks_checksum="",
    )
    return plain.model_copy(update=changes)


def create(path, n_subsets=4, **changes):
    return RetrainedRuns.create(path, info(**changes), blocks(n_subsets), ROWS)


def result(env, run):
    """What 'training' gives: a function of the run alone, exact in float32."""
    b = -1 if run.subset_id == "full" else env.subset_ids.index(run.subset_id)
    return -(np.arange(len(env.units)) + 8 * b + 64 * run.seed) / 16.0


def fill(env, limit=None):
    for run in env.pending()[:limit]:
        env.write_run(run, result(env, run))
    return env


def filled(path, **changes):
    env = fill(create(path, **changes))
    env.compact()
    return env
