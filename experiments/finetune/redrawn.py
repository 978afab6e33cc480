"""How far rankings move when moments are drawn again: every form of `choice` by moments of two halves of the rows.

    python -m experiments.finetune.redrawn documents lengths --data ../shared/data --out redrawn.json

Spearman's rho over rows, target by target, between the two rankings. No run is looked at.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr

from experiments.finetune.choice import SHIPPED_AT_FIRST, SUMS, ridged
from experiments.finetune.compare import share_of_top_row
from experiments.finetune.forward_worlds import World, pretrained
from experiments.finetune.scores import Sides, input_kernel, token_kernel
from experiments.one_line_errors import in_one_line
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import NAMES
from grasp.arrays import F64
from grasp.files import write_atomically
from grasp.predict.predictor import downweight_negative
from grasp.seeds import stream

NEGATIVE = 0.25


def redrawn(world: World) -> dict[str, object]:
    """Agreement of both rankings by every form that is made of whitened kernels: its mean and least over targets."""
    sides = world.sides
    half_N = stream(0, "finetune", "redrawn").permutation(sides.rows.n) % 2
    drawn = [np.flatnonzero(half_N[sides.rows.owner_P] == half) for half in (0, 1)]
    first, second = (_scores(Sides(sides.rows, sides.units, sides.vocabulary, drawn_P)) for drawn_P in drawn)
    forms = {name: (name,) for name in first} | {
        name: parts for name, parts in SUMS.items() if set(parts) <= set(first) and name != SHIPPED_AT_FIRST
    }
    out = {}
    for name, parts in forms.items():
        ranked = [_ranking(scores, parts, world.utilities.targets) for scores in (first, second)]
        rho_T = [float(spearmanr(*pair)[0]) for pair in zip(*(ranks.T for ranks in ranked), strict=True)]
        top = share_of_top_row(sum(_scaled(first[part]) for part in parts))  # type: ignore[arg-type]
        out[name] = {key: round(float(value), 3) for key, value in _numbers(rho_T, top)}
    return {"environment": world.name, "positions": min(map(len, drawn)), "forms": out}


def _numbers(rho_T: list[float], top: float) -> list[tuple[str, float]]:
    return [("mean", float(np.mean(rho_T))), ("least", min(rho_T)), ("share_of_top_row", top)]


def _scores(sides: Sides) -> dict[str, F64]:
    kernels = {"token": lambda: token_kernel(sides), "input": lambda: input_kernel(sides)} | ridged(sides)
    return {name: kernel() for name, kernel in kernels.items()}


def _ranking(scores: dict[str, F64], parts: tuple[str, ...], targets: tuple[str, ...]) -> F64:
    """(N, T), as the default protocol adds kernels up."""
    of_target_TE = [[target == name for target in targets] for name in dict.fromkeys(targets)]
    tasks = [
        np.stack(
            [downweight_negative(scores[part], NEGATIVE)[:, of_target_E].mean(axis=1) for of_target_E in of_target_TE],
            axis=1,
        )
        for part in parts
    ]
    return np.asarray(sum(_scaled(task_NT) for task_NT in tasks))


def _scaled(value_NC: F64) -> F64:
    return np.asarray(value_NC / value_NC.std(axis=0))


@in_one_line()
def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(prog="python -m experiments.finetune.redrawn", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=NAMES)
    parser.add_argument("--data", type=Path, required=True, help="Folder of pool.parquet and instructions.parquet.")
    parser.add_argument("--work", type=Path, default=FOLDER / "work", help="Model, rows and features.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = [redrawn(pretrained(name, args.data, args.work, FOLDER)) for name in args.names]
    write_atomically(args.out, (json.dumps(results, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
