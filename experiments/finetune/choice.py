"""Which kernels ship: candidates on development results, by the lower bound of mean LDS.

    python -m experiments.finetune.choice documents lengths --data ../shared/data --out choice.json
    python -m experiments.finetune.choice cc-topic --out choice-from-scratch.json

Every candidate stands there twice: with rows that count alike, and with rows that count by their loss tokens. The bound
over several environments is that of `grasp.paper.protocol_selection`. A held-out environment (`instructions`) gives
the same table as a test; it cannot stand beside others.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import norm

from experiments.finetune.compare import share_of_top_row
from experiments.finetune.forward_worlds import World, from_scratch, pretrained
from experiments.finetune.scores import (
    Sides,
    delta_kernel,
    input_kernel,
    local_kernel,
    neighbour_kernel,
    shift_kernel,
    token_kernel,
)
from experiments.one_line_errors import in_one_line
from experiments.worlds.evaluate import Method, agreement, compare
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import ENVIRONMENTS, NAMES
from grasp.arrays import F64
from grasp.errors import GraspError
from grasp.files import write_atomically
from grasp.paper.agreement import standard_errors
from grasp.seeds import bootstrap_weights

BASE, SHIPPED_AT_FIRST = "shift", "token + input"  # of them the first shipped when these were compared
BY_TOKENS = ", rows by loss tokens"
DELTA = 0.05
SUMS: dict[str, tuple[str, ...]] = {
    SHIPPED_AT_FIRST: ("token", "input"),
    "token + input, alpha 1/2": ("token alpha 1/2", "input alpha 1/2"),
    "token + input + neighbour": ("token", "input", "neighbour"),
    "input + neighbour": ("input", "neighbour"),
    "token + input + shift": ("token", "input", "shift"),
    "input + shift": ("input", "shift"),
    "input alpha 1/2 + shift": ("input alpha 1/2", "shift"),
    "neighbour + shift": ("neighbour", "shift"),
    "shift + tilt": ("shift", "tilt"),
    "token + input + local": ("token", "input", "local, width 1/2"),
    "input + local": ("input", "local, width 1/2"),
    "token + input + neighbour + local": ("token", "input", "neighbour", "local, width 1/2"),
    "token + input + shift, ridge .1": ("token, ridge .1", "input, ridge .1", "shift, ridge .1"),
    "token + input + shift, ridge 1": ("token, ridge 1", "input, ridge 1", "shift, ridge 1"),
    "shift + tilt, ridge .1": ("shift, ridge .1", "tilt, ridge .1"),
    "shift + tilt, ridge 1": ("shift, ridge 1", "tilt"),
    "token + input + shift + tilt": ("token", "input", "shift", "tilt"),
    "token + input + shift + tilt, ridge 1": ("token, ridge 1", "input, ridge 1", "shift, ridge 1", "tilt"),
}
NOT_ALONE = {"token, ridge 1", "input, ridge 1", *(f"{name}, ridge .1" for name in ("token", "input", "shift", "tilt"))}


def kernels(world: World) -> dict[str, Callable[[], F64]]:
    """Those that a world can compute; of the small one residuals were not kept, its build has them."""
    sides: Sides = world.sides
    out = ridged(sides) | {
        "token": world.built["token"],
        "input": world.built["input"],
        "neighbour": lambda: neighbour_kernel(sides),
        "local, width 1/2": lambda: local_kernel(sides, 0.5, 1.0),
        "input alpha 1/2": lambda: input_kernel(sides, alpha=0.5),
        "repsim": world.built["repsim"],
        "bm25": world.built["bm25"],
    }
    if sides.rows.index_PK.shape[1]:
        out["token alpha 1/2"] = lambda: token_kernel(sides, alpha=0.5)
    return out


def ridged(sides: Sides) -> dict[str, Callable[[], F64]]:
    """Kernels that are whitened, by the ridge of it; that of a build is .01, of the tilt kernel 1."""
    out: dict[str, Callable[[], F64]] = {
        "shift": lambda: shift_kernel(sides),
        "tilt": lambda: delta_kernel(sides, 1.0, 1.0),
        "tilt, ridge .1": lambda: delta_kernel(sides, 0.1, 0.1),
    }
    for name, ridge in ((".1", 0.1), ("1", 1.0)):
        out[f"shift, ridge {name}"] = lambda ridge=ridge: shift_kernel(sides, ridge)
        out[f"input, ridge {name}"] = lambda ridge=ridge: input_kernel(sides, ridge)
        if sides.rows.index_PK.shape[1]:
            out[f"token, ridge {name}"] = lambda ridge=ridge: token_kernel(sides, tau=ridge)
    return out


def candidates(world: World) -> tuple[dict[str, F64], dict[str, Method]]:
    """Matrices (N, E), computed once and kept, and what is made of them; negative scores times .25."""
    world.scores.mkdir(exist_ok=True)
    kernel_of = {}
    for name, kernel in kernels(world).items():
        path = world.scores / f"choice {name.replace('/', ':')}.npy"
        if not path.exists():
            np.save(path, kernel().astype(np.float32))
            print(world.name, name, flush=True)
        kernel_of[name] = np.load(path).astype(np.float64)
    parts = {name: (name,) for name in kernel_of if name not in NOT_ALONE} | SUMS
    known = {name: of for name, of in parts.items() if all(part in kernel_of for part in of)}
    tokens_N = world.sides.rows.count_N.astype(np.float64)
    methods = {}
    for name, of in known.items():
        matrices = tuple(kernel_of[part] for part in of)
        methods[name] = Method(matrices, negative=0.25)
        methods[f"{name}{BY_TOKENS}"] = Method(matrices, negative=0.25, tokens_N=tokens_N)
    return kernel_of, methods


def report(world: World) -> tuple[dict[str, Any], dict[str, F64]]:
    """Every candidate against the runs with its bound, and its mean LDS by target and resample, (T, 1 + R)."""
    kernel_of, methods = candidates(world)
    z = _z(len(methods))
    weights_RB = np.concatenate([np.ones((1, len(world.share_BN))), bootstrap_weights(len(world.share_BN))])
    figures = {
        name: agreement(method, world.utilities, world.share_BN, weights_RB).lds_TR for name, method in methods.items()
    }
    records = compare(methods, world.utilities, world.share_BN, base=BASE)
    for record in records:
        value_TR = figures[record["method"]]
        se = float(standard_errors([value_TR[None, :, 1:]])[0])
        record["bound"] = round(float(value_TR[:, 0].mean()) - z * se, 4)
    bounds = {
        "environment": world.name,
        "role": world.environment.role,
        "subsets": len(world.utilities.subset_ids),
        "seeds": list(world.utilities.seeds),
        "z": round(z, 3),
        "share_of_top_row": {name: round(share_of_top_row(kernel), 3) for name, kernel in kernel_of.items()},
        "methods": sorted(records, key=lambda record: -record["bound"]),
    }
    return bounds, figures


def together(names: list[str], figures: list[dict[str, F64]]) -> dict[str, Any]:
    """One choice over several environments: the mean over all their targets less z of its standard errors."""
    common = [name for name in figures[0] if all(name in figure for figure in figures)]
    each = [np.stack([figure[name] for name in common]) for figure in figures]  # (C, T, 1 + R)
    mean_C = np.concatenate([value[:, :, 0] for value in each], axis=1).mean(axis=1)
    z, se_C = _z(len(common)), standard_errors([value[:, :, 1:] for value in each])
    methods = [
        {
            "method": name,
            "mean_lds": round(float(mean_C[c]), 4),
            "se": round(float(se_C[c]), 4),
            "bound": round(float(mean_C[c] - z * se_C[c]), 4),
            "less_shift": [round(float(v), 4) for v in _apart(each, c, common.index(BASE))],
        }
        for c, name in enumerate(common)
    ]
    best_first = sorted(methods, key=lambda method: -method["bound"])
    return {"environment": " + ".join(names), "candidates": len(common), "z": round(z, 3), "methods": best_first}


def _apart(each: list[F64], c: int, base: int) -> list[float]:
    """Mean LDS less that of the base, environments counting alike, with a 95 % interval over the subsets of each."""
    apart_R = np.mean([(value[c] - value[base]).mean(axis=0) for value in each], axis=0)
    spread = np.percentile(apart_R[1:] - apart_R[1:].mean(), [2.5, 97.5])
    return [float(apart_R[0]), *(float(apart_R[0] + deviation) for deviation in spread)]


def _z(n_candidates: int) -> float:
    return float(norm.ppf(1 - DELTA / n_candidates))


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, compare, write, say what went wrong in one line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.finetune.choice", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=(*NAMES, "cc-topic"))
    parser.add_argument("--data", type=Path, help="Folder of pool.parquet and instructions.parquet.")
    parser.add_argument("--work", type=Path, default=FOLDER / "work", help="Model, rows, features and scores.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    roles = {name: ENVIRONMENTS[name].role for name in args.names if name != "cc-topic"}
    if len(args.names) > 1 and "held-out" in roles.values():
        raise GraspError(
            f"{', '.join(args.names)}: one of them is held out, expected it alone; nothing is chosen on it"
        )
    reports, figures = [], []
    for name in args.names:
        if name == "cc-topic":
            world = from_scratch(args.work / name, FOLDER.parent / "environments" / name)
        else:
            world = pretrained(name, args.data, args.work, FOLDER)
        results, of_world = report(world)
        reports.append(results)
        figures.append(of_world)
    if len(reports) > 1:
        reports.append(together(args.names, figures))
    write_atomically(args.out, (json.dumps(reports, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
