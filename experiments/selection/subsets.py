"""Rank correlation of predicted and measured utility of retrained subsets, on the known questions and on others.

    python -m experiments.selection.subsets --artifact ART --runs experiments/environments/cc-topic \
        --out experiments/selection/subsets-cc.json

The questions of each task that the runs measured are split in two halves, twice. Scores are computed from one half.
Shape letters: B subsets, N rows, S seeds, E units.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from experiments.mistakes import in_one_line
from experiments.selection.choices import World, predictor_of
from grasp.artifact.reader import ArtifactReader
from grasp.files import write_whole
from grasp.predict.subset_tables import RowIndex
from grasp.runs.retrained import RetrainedRuns
from grasp.seeds import stream

DRAWS = 2


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
                for task in ("mean", "estimate"):
                    change_B = predictor_of(world, target, known, task).change(block.weights)[:, 0]
                    for side, half in (("known", known), ("others", others)):
                        realized_B = mean_BE[:, [place[names[column]] for column in half]].mean(axis=1)
                        line[f"{task}, {side}"] = round(float(spearmanr(change_B, realized_B)[0]), 4)
                lines.append(line)
                print(line, flush=True)
    write_whole(arguments.out, (json.dumps({"runs": runs.name, "lines": lines}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
