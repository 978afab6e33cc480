"""Agreement of scores from some questions with the mean relevance to others, without training.

    python -m experiments.selection.agreement --artifact ART --out experiments/selection/agreement-cc.json

The questions of each task are split in two halves, and a method knows some of one half. `rank` is the rank correlation
over rows with the mean relevance to the other half, `best` the mean relevance to it of the top fifth of the rows, as a
share of what the best fifth for the other half has.
"""

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from experiments.one_line_errors import in_one_line
from experiments.selection.choices import METHODS, World
from experiments.selection.run import interval
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.files import write_atomically

BEST = 0.2


def share_of_best(score_N: F64, relevance_N: F64) -> float:
    """Return the mean relevance of the top rows by score, relative to the top rows by relevance."""
    count, centred_N = round(BEST * len(score_N)), relevance_N - relevance_N.mean()
    return float(centred_N[np.argsort(-score_N)[:count]].mean() / np.sort(centred_N)[-count:].mean())


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.selection.agreement", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--artifact", type=Path, required=True, help="Artifact with many questions per task.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    parser.add_argument("--methods", nargs="+", default=["mean", "estimate"])
    parser.add_argument("--questions", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--draws", type=int, default=1, help="Splits of the questions.")
    arguments = parser.parse_args(argv)
    world = World(ArtifactReader.open(arguments.artifact))
    lines: list[dict[str, Any]] = []
    for draw, target in product(range(arguments.draws), world.artifact.targets):
        known, others = world.questions(target, draw)
        relevance_N = METHODS["mean"](world, target, others, draw)
        for count, method in product(arguments.questions, arguments.methods):
            score_N = METHODS[method](world, target, np.sort(known[:count]), draw)
            rank = float(spearmanr(score_N, relevance_N)[0])
            best = share_of_best(score_N, relevance_N)
            lines.append(
                {"method": method, "target": target, "questions": count, "draw": draw, "rank": rank, "best": best}
            )
            print(f"{target} {count} {method}: {rank:.3f} {best:.3f}", flush=True)
        cells = [
            {"method": method, "questions": count}
            | {
                name: interval([line[name] for line in lines if (line["method"], line["questions"]) == (method, count)])
                for name in ("rank", "best")
            }
            for method, count in product(arguments.methods, arguments.questions)
        ]
        result = {"summary": cells, "lines": lines}
        write_atomically(arguments.out, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
