"""Gradients after a warm-up of several lengths, by the recipe of a world and by the default recipe of a build.

    python -m experiments.replay.warm_up small-12 small-48 small-192 --data ../shared/data --work WORK \\
        --out experiments/replay/warm_up.json

`grasp.pipeline.warm_up` trains the small model on random rows of the corpus; the artifact is built from the result. The
subsets are those of `experiments.replay.run`: trained from the model before the warm-up. Task rho is the rank
correlation of predicted and measured loss, mean over four tasks; LDS that of single questions, mean over questions.
Intervals are 95 %, over subsets.

Shape letters: B subsets, N rows, E units, T targets.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.finetune.further import forms
from experiments.replay.run import DEFAULT, Comparison, further_artifact, interval, parse_options
from experiments.replay.setting import World
from experiments.worlds.artifacts import FEATURES, FORWARD, artifact_of, relevance, shares
from experiments.worlds.run import FOLDER
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.files import write_atomically
from grasp.pipeline.warm_up import warm_up
from grasp.runs.metrics import rank_correlations
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import Utilities
from grasp.settings import build_settings
from grasp.training.fine_tuning_recipe import FineTuningRecipe

STEPS = (6, 12, 24)


def warmed_up(world: World, work: Path, steps: int, *, of_world: bool) -> ArtifactReader:
    """Build from the model after so many steps."""
    settings = build_settings(further_artifact(world, work).manifest.settings)
    recipe = FineTuningRecipe(
        learning_rate=world.kind.recipe.learning_rate, per_device_train_batch_size=16, lr_scheduler_type="linear"
    )
    label = f"warm-up-{steps}-{'world' if of_world else 'default'}"
    model = warm_up(
        settings.model,
        settings.corpus,
        steps,
        work / label,
        recipe=recipe if of_world else None,
        shard_rows=settings.shard_rows,
        seed=settings.features.seed,
    )
    return artifact_of(world.name, work, model, world.tokenizer, FEATURES, 8192, label)


def scored(artifact: ArtifactReader, utilities: Utilities) -> tuple[F64, F64]:
    """Score every row by the default rule, for targets (N, T) and units (N, E)."""
    columns = np.concatenate([artifact.unit_columns(target) for target in dict.fromkeys(utilities.targets)])
    assert tuple(artifact.units["unit_id"].take(columns).to_pylist()) == utilities.unit_ids
    kernel_of = {kernel: relevance(artifact, kernel, columns) for kernel in ("gradient", *FORWARD)}
    score_NE, score_NT = forms(kernel_of, np.ones(artifact.n_rows))[DEFAULT].predict(
        np.eye(artifact.n_rows), list(utilities.targets)
    )
    return score_NT, score_NE


def compare(name: Any, data: Path, work: Path) -> list[dict[str, Any]]:
    """Compare artifacts after warm-ups with that of the model itself."""
    world = World.open(name, data, work)
    environment = RetrainedRuns.open(FOLDER / name)
    utilities = environment.utilities(seeds=(0,), partial=True)
    share_BN = shares(environment, world.corpus.store, utilities)
    realized_BE = utilities.values_BSE.mean(axis=1)
    base_NT, base_NE = scored(further_artifact(world, work), utilities)
    comparison = Comparison(utilities, share_BN, base_NT)

    def lds(score_NE: F64) -> F64:
        pairs = [share_BN @ score_NE, realized_BE]
        of_unit_ER = np.nan_to_num(rank_correlations(pairs, [(0, 1)], comparison.weights_RB)[0])
        return np.asarray(of_unit_ER.mean(axis=0))

    base_R = lds(base_NE)
    lines = [{"world": name, "warm_up": 0, "recipe": ""} | comparison.record(base_NT) | {"lds": interval(base_R)}]
    for of_world in (True, False):
        for steps in STEPS:
            score_NT, score_NE = scored(warmed_up(world, work, steps, of_world=of_world), utilities)
            lds_R = lds(score_NE)
            line = {"world": name, "warm_up": steps, "recipe": "of the world" if of_world else "default"}
            line |= comparison.record(score_NT)
            lines.append(line | {"lds": interval(lds_R), "lds_difference": interval(lds_R - base_R)})
            print(json.dumps(lines[-1]), flush=True)
    return lines


def main() -> None:
    """Parse, compare, write."""
    options = parse_options(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    lines = []
    for name in options.names:
        lines += compare(name, options.data, options.work)
        write_atomically(options.out, (json.dumps(lines, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
