"""Rank correlation of predicted and measured utility of retrained subsets, on the known questions and on others.

    python -m experiments.selection.subsets --artifact ART --runs experiments/environments/cc-topic \
        --out experiments/selection/subsets-cc-topic.json

The questions of each task that the runs measured are split in two halves, twice. Scores are computed from one half.
The summary has means over tasks and splits, with 95 % intervals of a bootstrap over subsets, and the paired difference.
Shape letters: B subsets, N rows, S seeds, E units, R resamples.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.one_line_errors import in_one_line
from experiments.selection.choices import World, predictor_of
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.files import write_atomically
from grasp.predict.subset_tables import RowIndex
from grasp.runs.metrics import rank_correlations
from grasp.runs.retrained import RetrainedRuns
from grasp.seeds import bootstrap_weights, stream

DRAWS = 2
TASKS, SIDES = ("mean", "estimate"), ("known", "others")


def summary(rho_R: F64) -> list[float]:
    """Return the value on all subsets, and the 95 % interval of the deviations of the resamples from their mean."""
    low, high = np.quantile(rho_R[1:] - rho_R[1:].mean(), (0.025, 0.975))
    return [round(float(rho_R[0] + shift), 4) for shift in (0.0, low, high)]


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m experiments.selection.subsets", description=__doc__.split("\n")[0])
    parser.add_argument("--artifact", type=Path, required=True, help="Artifact with the questions of the runs.")
    parser.add_argument("--runs", type=Path, required=True, help="Retrained runs.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    arguments = parser.parse_args(argv)
    world, runs = World(ArtifactReader.open(arguments.artifact)), RetrainedRuns.open(arguments.runs)
    names, utilities = world.artifact.units.column("unit_id").to_pylist(), runs.utilities()
    (block,) = runs.subset_blocks(RowIndex.from_parquet(world.artifact.rows_path))
    lines: list[dict[str, Any]] = []
    n_subsets = len(utilities.select(world.artifact.targets[0]).values_BSE)
    weights_RB = np.concatenate([np.ones((1, n_subsets), np.float32), bootstrap_weights(n_subsets)])
    rho_R: dict[str, list[F64]] = {f"{task}, {side}": [] for task in TASKS for side in SIDES}
    for target in world.artifact.targets:
        measured = utilities.select(target)
        place = {name: e for e, name in enumerate(measured.unit_ids)}
        columns_E = np.array([column for column in world.artifact.unit_columns(target) if names[column] in place])
        mean_BE = measured.values_BSE.mean(axis=1)
        for draw in range(DRAWS):
            order = stream(draw, "selection", "subsets", target).permutation(len(columns_E))
            halves = np.sort(columns_E[order[: len(order) // 2]]), np.sort(columns_E[order[len(order) // 2 :]])
            for known, others in (halves, halves[::-1]):
                line: dict[str, Any] = {"target": target, "draw": draw, "questions": len(known)}
                for task in TASKS:
                    change_B = predictor_of(world, target, known, task).change(block.weights)[:, 0]
                    for side, half in zip(SIDES, (known, others), strict=True):
                        realized_B1 = mean_BE[:, [place[names[column]] for column in half]].mean(axis=1, keepdims=True)
                        rho_1R = rank_correlations([change_B[:, None], realized_B1], [(0, 1)], weights_RB)[0]
                        rho_R[f"{task}, {side}"].append(rho_1R[0])
                        line[f"{task}, {side}"] = round(float(rho_1R[0, 0]), 4)
                lines.append(line)
                print(line, flush=True)
    mean_R = {name: np.mean(values, axis=0) for name, values in rho_R.items()}
    mean_R |= {f"estimate - mean, {side}": mean_R[f"estimate, {side}"] - mean_R[f"mean, {side}"] for side in SIDES}
    result = {"runs": runs.name, "summary": {name: summary(values) for name, values in mean_R.items()}, "lines": lines}
    print(json.dumps(result["summary"], indent=1))
    write_atomically(arguments.out, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
