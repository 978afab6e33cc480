"""Can models that are trained on one source each, and merged by the shares of a mixture, stand for a training on it?

    python -m experiments.runs.merged small-12 small-48 small-192 small-48-slow documents-lora --data ../shared/data \\
        --out experiments/runs/merged.json

One training a source, from the model and with the recipe of an environment of experiments/worlds, on rows of this
source alone, which repeat until the training is as long as a run. A mixture is predicted by the losses of the model
whose change is the mean of these changes, weighted by the shares. At equal cost: the same number of runs on mixtures, from
which the law and process of `grasp runs predict` learn; they predict the other runs, over draws. Killed, trainings that
are done are kept.
Shape letters: B subsets, G sources, E units, N rows, T targets.
"""

import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from experiments.one_line_errors import in_one_line
from experiments.worlds.artifacts import shares
from experiments.worlds.evaluate import Predictions, compare, noise
from experiments.worlds.prepare import environments_parser, prepared, write_reports
from experiments.worlds.run import FOLDER, open_world
from experiments.worlds.setting import Name
from experiments.worlds.training import train, unit_losses
from grasp.arrays import F64
from grasp.mixing.mixture_law import fit_process
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.subset_features import SubsetFeatures
from grasp.seeds import stream

DRAWS = 8  # draws of the runs that the law learns from


def source_changes(
    name: Name, data: Path, work: Path
) -> tuple[Any, dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """The world, its weights before, and the change of the trained weights by a training on each source."""
    model, reader = prepared(name, data, work)
    world = open_world(name, model, reader, work, work / "merged-environments")
    before = {key: value.clone() for key, value in model.named_parameters() if value.requires_grad}
    state = copy.deepcopy(model.state_dict())
    rows, recipe = world.corpus.rows, world.kind.recipe
    codes_N = np.asarray(world.corpus.label.codes_N)
    changes = []
    for source in range(len(world.corpus.label.values)):
        path = work / f"merged-{name}-{source}.pt"
        if not path.exists():
            model.load_state_dict(state)
            index = np.flatnonzero(codes_N == source)
            passes = -(-recipe.steps * recipe.batch_rows // len(index))
            order = np.concatenate([stream(k, "merged", name, source).permutation(index) for k in range(passes)])
            train(model, rows, world.corpus.first_N, order[: recipe.steps * recipe.batch_rows].tolist(), recipe)
            trained = {key: value.detach() - before[key] for key, value in model.named_parameters() if key in before}
            torch.save(trained, path)
            print(f"{name}: source {source} trained", flush=True)
        changes.append(torch.load(path, weights_only=True))
    model.load_state_dict(state)
    return world, before, changes


def merged_losses(
    world: Any, before: dict[str, torch.Tensor], changes: list[dict[str, torch.Tensor]], share_BG: F64
) -> F64:
    """Losses of every unit by the merged model of each mixture, (B, E)."""
    parameters = dict(world.model.named_parameters())
    losses = []
    for share_G in share_BG:
        with torch.no_grad():
            for key, value in before.items():
                moved = sum(float(share) * change[key] for share, change in zip(share_G, changes, strict=True))
                parameters[key].copy_(value + moved)
        losses.append(unit_losses(world.model, world.units, bfloat16=world.kind.recipe.bfloat16))
    return np.array(losses)


def report(name: Name, data: Path, work: Path) -> dict[str, Any]:
    """Merged models, and the law at equal cost, against the runs that there are."""
    began = time.process_time()
    world, before, changes = source_changes(name, data, work)
    environment = RetrainedRuns.open(FOLDER / name)
    utilities = environment.utilities(seeds=(0,), partial=True)
    share_BN = shares(environment, world.corpus.store, utilities)
    n_sources = len(changes)
    codes_N = np.asarray(world.corpus.label.codes_N)
    share_BG = np.stack([share_BN[:, codes_N == source].sum(axis=1) for source in range(n_sources)], axis=1)
    order = [
        list(dict.fromkeys(world.environment.units)).index(pair)
        for pair in zip(utilities.targets, utilities.unit_ids, strict=True)
    ]
    merged_BE = -merged_losses(world, before, changes, share_BG)[:, order]
    names = list(dict.fromkeys(utilities.targets))
    columns = [[k for k, target in enumerate(utilities.targets) if target == wanted] for wanted in names]

    def of_tasks(value_BE: F64) -> F64:
        return np.stack([value_BE[:, of_task].mean(axis=1) for of_task in columns], axis=1)

    methods = {"merged": Predictions(merged_BE, of_tasks(merged_BE))}
    realized_BE = utilities.values_BSE[:, 0]
    task_BT = of_tasks(realized_BE)
    law_BT = np.full((DRAWS, *task_BT.shape), np.nan)
    for draw in range(DRAWS if len(task_BT) > n_sources + 2 else 0):
        known = stream(draw, "merged", "law").permutation(len(task_BT))[:n_sources]
        held = np.setdiff1d(np.arange(len(task_BT)), known)
        law, process = fit_process(share_BG[known], task_BT[known, None])
        features = SubsetFeatures.from_shares(share_BG[held], len(names))
        if law is not None:
            features = replace(features, relevance_BT=law.predict(share_BG[held]))
        law_BT[draw, held] = process.predict(features)[0]
    rho: dict[str, list[float]] = {"law": [], "merged": []}
    for draw in range(DRAWS):
        held = ~np.isnan(law_BT[draw, :, 0])
        if held.any():
            rho["law"].append(_task_rho(law_BT[draw, held], task_BT[held]))
            rho["merged"].append(_task_rho(of_tasks(merged_BE)[held], task_BT[held]))
    return {
        "environment": name,
        "sources": n_sources,
        "subsets": len(share_BN),
        "noise": noise(environment, utilities),
        "cpu_seconds": round(time.process_time() - began),
        "methods": compare(methods, utilities, share_BN, base="merged"),
        "at_equal_cost": {
            key: {"task_rho": round(float(np.mean(values)), 3), "std_over_draws": round(float(np.std(values)), 3)}
            for key, values in rho.items()
            if values
        },
    }


def _task_rho(predicted_BT: F64, realized_BT: F64) -> float:
    return float(np.mean([spearmanr(p_B, r_B)[0] for p_B, r_B in zip(predicted_BT.T, realized_BT.T, strict=True)]))


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, train, compare, write."""
    write_reports(environments_parser("runs.merged", __doc__).parse_args(arguments), report)


if __name__ == "__main__":
    main()
