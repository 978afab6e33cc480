"""Scores of one forward pass side by side, against the runs that there are.

    python -m experiments.finetune.compare documents --data ../shared/data --out experiments/finetune/documents.json
    python -m experiments.finetune.compare cc-topic --out experiments/finetune/cc-topic.json

Features and scores are kept in --work; the comparison itself takes seconds and is made anew each time.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata
from transformers.utils import logging as hf_logging

from experiments.finetune.evaluate import Method, compare, noise
from experiments.finetune.run import HERE
from experiments.finetune.scores import (
    Sides,
    delta_kernel,
    hidden_cosine,
    hidden_kernel,
    input_kernel,
    kernel_lm,
    ngram_lm,
)
from experiments.finetune.setting import NAMES
from experiments.finetune.worlds import World, from_scratch, pretrained
from grasp.errors import GraspError
from grasp.files import write_whole
from grasp.seeds import stream

F64 = NDArray[np.float64]
FROM_SCRATCH = "cc-topic"
SHIPS = "ships"
RIDGES = {"raw": None, ".01": 0.01, "1": 1.0}  # of whitening; raw: none
AGREEMENT = ("token", "input", "repsim", "kernel lm", "delta h raw d .01", "bm25")

SUMS: dict[str, tuple[str, ...]] = {
    SHIPS: ("token", "input"),
    "ships + repsim": ("token", "input", "repsim"),
    "ships + kernel lm": ("token", "input", "kernel lm"),
    "delta + input flat": ("delta h raw d .01", "input flat .01"),
    "delta + input flat + repsim": ("delta h raw d .01", "input flat .01", "repsim"),
    "whitened delta + input flat": ("delta h .01 d .01", "input flat .01"),
    "whitened delta + input flat + repsim": ("delta h .01 d .01", "input flat .01", "repsim"),
    "whitened delta (1) + input flat + repsim": ("delta h 1 d .01", "input flat .01", "repsim"),
    "whitened delta (1) + input": ("delta h 1 d .01", "input"),
    "whitened delta (1) + input + repsim": ("delta h 1 d .01", "input", "repsim"),
    "delta + input flat + kernel lm": ("delta h raw d .01", "input flat .01", "kernel lm"),
    "delta + input flat + repsim + kernel lm": ("delta h raw d .01", "input flat .01", "repsim", "kernel lm"),
    "whitened delta + input + kernel lm": ("delta h .01 d .01", "input", "kernel lm"),
    "ships + delta + input flat + repsim": ("token", "input", "delta h raw d .01", "input flat .01", "repsim"),
    "kernel lm + repsim": ("kernel lm", "repsim"),
    "input + repsim": ("input", "repsim"),
    "input + kernel lm": ("input", "kernel lm"),
    "input + kernel lm + repsim": ("input", "kernel lm", "repsim"),
    # added after the first comparison on 14 subsets, for what had come out best there
    "delta (1, 1) + input": ("delta h 1 d 1", "input"),
    "delta (1, 1) + kernel lm": ("delta h 1 d 1", "kernel lm"),
    "delta (1, 1) + input + kernel lm": ("delta h 1 d 1", "input", "kernel lm"),
    "ships + delta (1, 1) + kernel lm": ("token", "input", "delta h 1 d 1", "kernel lm"),
    "whitened delta + input flat + kernel lm": ("delta h .01 d .01", "input flat .01", "kernel lm"),
}


def kernels(world: World) -> dict[str, Callable[[], F64]]:
    """What is computed once and kept: a matrix (N, E) a name."""
    sides = world.sides
    out: dict[str, Callable[[], F64]] = world.built | {
        "repsim": lambda: hidden_cosine(sides),
        "repsim loss": lambda: hidden_cosine(sides, supervised=True),
        "bm25": world.bm25,
        "kernel lm": lambda: kernel_lm(sides),
        "ngram lm": lambda: ngram_lm(sides),
        "loss": lambda: _of_rows(sides, -np.bincount(sides.rows.owner_P, sides.rows.loss_P) / sides.rows.count_N),
        "length": lambda: _of_rows(sides, sides.rows.count_N.astype(np.float64)),
        "random": lambda: stream(0, "finetune", "random").normal(size=(sides.rows.n, sides.units.n)),
    }
    for label, ridge in RIDGES.items():
        out[f"hidden kernel {label}"] = lambda ridge=ridge: hidden_kernel(sides, ridge)
        out[f"input flat {label}"] = lambda ridge=ridge: input_kernel(sides, ridge, by_frequency=False)
        for of_delta, delta in RIDGES.items():
            out[f"delta h {label} d {of_delta}"] = lambda ridge=ridge, delta=delta: delta_kernel(sides, ridge, delta)
    return out


def methods_of(kernel_of: dict[str, F64]) -> dict[str, Method]:
    """Every kernel and every sum, negative scores times .25 as what ships has them, and in full."""
    named = {name: (name,) for name in kernel_of} | SUMS
    out = {SHIPS: Method(tuple(kernel_of[part] for part in SUMS[SHIPS]), negative=0.25)}
    for name, parts in named.items():
        out.setdefault(name, Method(tuple(kernel_of[part] for part in parts), negative=0.25))
        out[f"{name} (in full)"] = Method(tuple(kernel_of[part] for part in parts))
    return out


def share_of_top_row(kernel_NE: F64) -> float:
    """Median over units of the share of a unit's squared scores that its largest row holds."""
    square_NE = kernel_NE**2
    return float(np.median(square_NE.max(axis=0) / np.maximum(square_NE.sum(axis=0), 1e-300)))


def agreement(kernel_of: dict[str, F64]) -> dict[str, float]:
    """Mean over units of the rank correlation over rows of pairs of kernels."""
    rank_of = {name: rankdata(kernel_of[name], axis=0) for name in AGREEMENT}
    z_of = {name: (rank - rank.mean(axis=0)) / rank.std(axis=0) for name, rank in rank_of.items()}
    pairs = [(a, b) for k, a in enumerate(AGREEMENT) for b in AGREEMENT[k + 1 :]]
    return {f"{a} ~ {b}": round(float(np.mean(z_of[a] * z_of[b])), 3) for a, b in pairs}


def report(world: World) -> dict[str, object]:
    """Scores, computed or read, and their comparison with the runs."""
    world.scores.mkdir(exist_ok=True)
    kernel_of = {label: _kept(world.scores / f"{label}.npy", kernel) for label, kernel in kernels(world).items()}
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
        "units": len(world.units),
        "noise": noise(world.environment, world.utilities),
        "constant": constant,
        "share_of_top_row": {label: round(share_of_top_row(kernel), 3) for label, kernel in kernel_of.items()},
        "rank_agreement": agreement(kernel_of),
        "methods": compare(methods_of(kernel_of), world.utilities, world.share_BN, base=SHIPS),
    }


def _kept(path: Path, make: Callable[[], F64]) -> F64:
    if not path.exists():
        np.save(path, make().astype(np.float32))
        print(path.stem, flush=True)
    return np.load(path).astype(np.float64)


def _of_rows(sides: Sides, score_N: F64) -> F64:
    return np.repeat(score_N[:, None], sides.units.n, axis=1)


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, say what went wrong in one line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.finetune.compare", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=(*NAMES, FROM_SCRATCH))
    parser.add_argument("--data", type=Path, help="Folder of pool.parquet and instructions.parquet.")
    parser.add_argument("--environments", type=Path, help="Where the runs are; none: beside this script.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    parser.add_argument("--work", type=Path, default=HERE / "work", help="Model, rows, features and scores.")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    if given.name != FROM_SCRATCH and given.data is None:
        parser.error("--data: the folder of pool.parquet and instructions.parquet is needed")
    try:
        if given.name == FROM_SCRATCH:
            kept = given.environments or HERE.parent / "environments"
            world = from_scratch(given.work / FROM_SCRATCH, kept / FROM_SCRATCH)
        else:
            world = pretrained(given.name, given.data, given.work, given.environments or HERE)
        write_whole(given.out, (json.dumps(report(world), indent=1) + "\n").encode())
    except GraspError as err:
        print(f"error: {err}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
