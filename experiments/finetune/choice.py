"""Which kernels ship: candidates on the development results of both kinds, by the lower bound of mean LDS.

    python -m experiments.finetune.choice documents cc-topic --data ../shared/data --out choice.json

With a held-out environment in their place (`instructions`) the same table is a test; nothing is chosen on it.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm

from experiments.finetune.compare import share_of_top_row
from experiments.finetune.evaluate import Method, compare
from experiments.finetune.run import HERE
from experiments.finetune.scores import (
    Sides,
    delta_kernel,
    input_kernel,
    local_kernel,
    neighbour_kernel,
    shift_kernel,
    token_kernel,
)
from experiments.finetune.worlds import World, from_scratch, pretrained
from grasp.files import write_whole

F64 = NDArray[np.float64]
SHIPPED = "token + input"
DELTA = 0.05
SUMS: dict[str, tuple[str, ...]] = {
    SHIPPED: ("token", "input"),
    "token + input, alpha 1/2": ("token alpha 1/2", "input alpha 1/2"),
    "token + input + neighbour": ("token", "input", "neighbour"),
    "input + neighbour": ("input", "neighbour"),
    "token + input + shift": ("token", "input", "shift"),
    "input + shift": ("input", "shift"),
    "input alpha 1/2 + shift": ("input alpha 1/2", "shift"),
    "neighbour + shift": ("neighbour", "shift"),
    "shift + hidden-space token": ("shift", "hidden-space token"),
    "token + input + local": ("token", "input", "local, width 1/2"),
    "input + local": ("input", "local, width 1/2"),
    "token + input + neighbour + local": ("token", "input", "neighbour", "local, width 1/2"),
}


def kernels(world: World) -> dict[str, Callable[[], F64]]:
    """Those that a world can compute; of the small one residuals were not kept, its build has them."""
    sides: Sides = world.sides
    out = {
        "token": world.built["token"],
        "input": world.built["input"],
        "neighbour": lambda: neighbour_kernel(sides),
        "shift": lambda: shift_kernel(sides),
        "shift, ridge 1": lambda: shift_kernel(sides, 1.0),
        "local, width 1/2": lambda: local_kernel(sides, 0.5, 1.0),
        "input alpha 1/2": lambda: input_kernel(sides, alpha=0.5),
        "hidden-space token": lambda: delta_kernel(sides, 1.0, 1.0),
        "repsim": world.built["repsim"],
        "bm25": world.built["bm25"],
    }
    if sides.rows.index_PK.shape[1]:
        out["token alpha 1/2"] = lambda: token_kernel(sides, alpha=0.5)
    return out


def report(world: World) -> dict[str, Any]:
    """Every candidate against the runs, negative scores times .25, with the bound that the rule looks at."""
    world.scores.mkdir(exist_ok=True)
    kernel_of = {}
    for name, kernel in kernels(world).items():
        path = world.scores / f"choice {name.replace('/', ':')}.npy"
        if not path.exists():
            np.save(path, kernel().astype(np.float32))
            print(world.name, name, flush=True)
        kernel_of[name] = np.load(path).astype(np.float64)
    parts = {name: (name,) for name in kernel_of} | SUMS
    known = {name: of for name, of in parts.items() if all(part in kernel_of for part in of)}
    methods = {name: Method(tuple(kernel_of[part] for part in of), negative=0.25) for name, of in known.items()}
    z = float(norm.ppf(1 - DELTA / len(methods)))
    records = compare(methods, world.utilities, world.share_BN, base=SHIPPED)
    for record in records:
        mean, low, high = record["mean_lds"]
        record["bound"] = round(mean - z * (high - low) / (2 * norm.ppf(0.975)), 4)
    return {
        "environment": world.name,
        "role": world.environment.role,
        "subsets": len(world.utilities.subset_ids),
        "z": round(z, 3),
        "share_of_top_row": {name: round(share_of_top_row(kernel), 3) for name, kernel in kernel_of.items()},
        "methods": sorted(records, key=lambda record: -record["bound"]),
    }


def main() -> None:
    """Parse, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=("documents", "instructions", "cc-topic"))
    parser.add_argument("--data", type=Path, help="Folder of pool.parquet and instructions.parquet.")
    parser.add_argument("--work", type=Path, default=HERE / "work", help="Model, rows, features and scores.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    reports = []
    for name in given.names:
        if name == "cc-topic":
            world = from_scratch(given.work / name, HERE.parent / "environments" / name)
        else:
            world = pretrained(name, given.data, given.work, HERE)
        reports.append(report(world))
    write_whole(given.out, (json.dumps(reports, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
