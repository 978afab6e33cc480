"""Compare the built-in rule and every other score with the runs of one environment.

    python -m experiments.finetune.compare documents --data ../shared/data --out experiments/finetune/documents.json

Scores are kept in --work; the comparison itself takes seconds and is made anew each time. Gradient methods are there
if `experiments.finetune.methods` has made their scores. Nothing is chosen here: `choice` does that, on `documents`.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers.utils import logging as hf_logging

from experiments.finetune.forward_worlds import World, pretrained
from experiments.finetune.methods import GRADIENTS
from experiments.finetune.scores import delta_kernel, neighbour_kernel, shift_kernel
from experiments.one_line_errors import in_one_line
from experiments.worlds.evaluate import Method, Predictions, compare, noise
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import NAMES
from grasp.arrays import F64
from grasp.baselines.oracles import OracleFeatures, oracle
from grasp.errors import GraspError
from grasp.files import write_atomically
from grasp.kernels.hidden_linear import RIDGE

SHIPS = "token + input + shift + tilt"
RIDGE_ON_RUNS = "ridge on the other runs"
OURS = (
    "shift",
    "tilt",
    "token",
    "input",
    "pooled",
    "neighbour",
)  # count negative scores a quarter, as the built-in rule does
SUMS = {name: tuple(name.split(" + ")) for name in (SHIPS, "token + input + shift", "token + input")}


def kernels(world: World) -> dict[str, Callable[[], F64]]:
    """What is computed once and kept: a matrix (N, E) a name."""
    return world.built | {
        "shift": lambda: shift_kernel(world.sides),
        "tilt": lambda: delta_kernel(world.sides, RIDGE, RIDGE),
        "neighbour": lambda: neighbour_kernel(world.sides),
    }


def nearest_example(cosine_NE: F64, targets: Sequence[str]) -> F64:
    """A row's cosine with the most similar example of the target, for each of its units: the ranking of BETR.

    Deviation: the model's own mean hidden states are the embedding, as in RepSim.
    """
    out_NE = np.empty_like(cosine_NE)
    for target in set(targets):
        columns = np.flatnonzero([name == target for name in targets])
        out_NE[:, columns] = cosine_NE[:, columns].max(axis=1, keepdims=True)
    return out_NE


def methods_of(kernel_of: dict[str, F64]) -> dict[str, Method]:
    """Ours with negative scores times .25, others as they are published and, for the record, so."""
    out = {name: Method((kernel_of[name],), negative=0.25) for name in OURS if name in kernel_of}
    for name, parts in SUMS.items():
        out[name] = Method(tuple(kernel_of[part] for part in parts), negative=0.25)
    for name, kernel_NE in kernel_of.items():
        if name not in out:
            out[name] = Method((kernel_NE,))
            out[f"{name} (negative x .25)"] = Method((kernel_NE,), negative=0.25)
    return out


def ridge_on_runs(world: World) -> Predictions:
    """Predict each run by a ridge regression of all others on their retained rows: a datamodel.

    No competitor, since it has seen runs: it says what so many real trainings tell of one more.
    """
    subset_ids = tuple(world.utilities.subset_ids)
    rows = OracleFeatures("rows", subset_ids, world.share_BN)
    prediction = oracle("ridge", rows, world.utilities, folds=len(subset_ids))
    return Predictions(prediction.values_BE, np.stack([prediction.task_B[name] for name in prediction.targets], axis=1))


def share_of_top_row(kernel_NE: F64) -> float:
    """Median over units of the share of a unit's squared scores that its largest row holds."""
    square_NE = kernel_NE**2
    return float(np.median(square_NE.max(axis=0) / np.maximum(square_NE.sum(axis=0), 1e-300)))


def report(world: World) -> dict[str, object]:
    """Scores, computed or read, and their comparison with the runs."""
    world.scores.mkdir(exist_ok=True)
    kernel_of = {label: _cached(world.scores / f"{label}.npy", kernel) for label, kernel in kernels(world).items()}
    kernel_of["betr"] = nearest_example(kernel_of["repsim"], world.utilities.targets)
    for label in GRADIENTS:
        path = world.scores / f"{label}.npy"
        if path.exists():
            kernel_of[label] = np.load(path).astype(np.float64)
    constant = [label for label, kernel in kernel_of.items() if not kernel.std(axis=0).any()]
    for label in constant:
        del kernel_of[label]
    return {
        "environment": world.name,
        "role": world.environment.role,
        "targets": list(dict.fromkeys(world.utilities.targets)),
        "subsets": len(world.utilities.subset_ids),
        "planned": len(world.environment.subset_ids),
        "seeds": list(world.utilities.seeds),
        "units": world.sides.units.n,
        "loss": round(float(world.sides.rows.loss_P.mean()), 3),
        "noise": noise(world.environment, world.utilities),
        "constant": constant,
        "share_of_top_row": {label: round(share_of_top_row(kernel), 3) for label, kernel in kernel_of.items()},
        "methods": compare(
            {**methods_of(kernel_of), RIDGE_ON_RUNS: ridge_on_runs(world)}, world.utilities, world.share_BN, base=SHIPS
        ),
    }


def _cached(path: Path, make: Callable[[], F64]) -> F64:
    if not path.exists():
        np.save(path, make().astype(np.float32))
        print(path.stem, flush=True)
    return np.load(path).astype(np.float64)


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, run, say what went wrong in one line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.finetune.compare", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--data", type=Path, required=True, help="Folder of pool.parquet and instructions.parquet.")
    parser.add_argument("--environments", type=Path, default=FOLDER, help="Where the runs are.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    parser.add_argument("--work", type=Path, default=FOLDER / "work", help="Model, rows, features and scores.")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    world = pretrained(args.name, args.data, args.work, args.environments)
    result = report(world)
    if result["role"] == "held-out" and result["subsets"] != result["planned"]:
        raise GraspError(f"{args.name}: {result['subsets']} of {result['planned']} runs are there; wait for all")
    write_atomically(args.out, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
