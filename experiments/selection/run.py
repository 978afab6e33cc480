"""Select rows for a task by some of its questions, train on them, and measure the loss on its other questions.

    python -m experiments.selection.run --artifact ART --work bench-out/selection/cc \
        --out experiments/selection/cc.json

After an interruption the same command continues. A training is named by its rows, recipe and seed, so that equal
selections are trained once.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from transformers.utils import logging as hf_logging

from experiments.one_line_errors import in_one_line
from experiments.selection.choices import METHODS, Request, World
from grasp.arrays import F64, I64
from grasp.artifact.reader import ArtifactReader
from grasp.files import atomic_path, write_atomically
from grasp.models.unit_loss import evaluate_units
from grasp.training.recipe import TrainingRecipe, named_recipe
from grasp.training.train import train

RANDOM = "random"
LEVEL = 0.95


class Trainer:
    """Trains models on rows, and stores the loss of every question."""

    def __init__(self, world: World, work: Path, recipe: TrainingRecipe) -> None:
        self.world, self.work, self.recipe = world, work, recipe
        self._recipe = json.dumps(recipe.model_dump(mode="json"), sort_keys=True).encode()
        (work / "runs").mkdir(parents=True, exist_ok=True)

    def losses(self, rows: I64, seed: int) -> F64:
        """Return the loss of every question in nats per token, (E,), after training on the rows."""
        name = hashlib.blake2b(self._recipe + rows.astype("<i8").tobytes(), digest_size=8).hexdigest()
        path = self.work / "runs" / f"{name}-{seed}.npy"
        if not path.exists():
            weight_N = np.zeros(self.world.artifact.n_rows)
            weight_N[rows] = 1.0
            inputs = self.world.inputs
            trained = train(self.recipe, inputs.store, seed=seed, retained=weight_N)
            loss_E = evaluate_units(trained.model, inputs.unit_tokens)
            with atomic_path(path) as part, part.open("wb") as handle:
                np.save(handle, loss_E, allow_pickle=False)
        return np.load(path, allow_pickle=False)


def measured(world: World, trainer: Trainer, request: Request, seed: int) -> dict[str, Any]:
    """Return the gain over random rows of every known question and of every other question."""
    known, others = world.questions(request.target, request.draw)
    random_rows = world.rows(replace(request, method=RANDOM))
    gain_E = trainer.losses(random_rows, seed) - trainer.losses(world.rows(request), seed)
    return asdict(request) | {
        "seed": seed,
        "known": [round(float(gain), 5) for gain in gain_E[known[: request.questions]]],
        "others": [round(float(gain), 5) for gain in gain_E[others]],
    }


def interval(values: Sequence[float]) -> list[float]:
    """Return the mean and its 95 % interval; of a single value the value alone."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return [round(mean, 3)]
    half = float(student.ppf(0.5 + LEVEL / 2, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return [round(mean, 3), round(mean - half, 3), round(mean + half, 3)]


def summary(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return mean gains by method, share and number of questions, with intervals over tasks."""
    cells: dict[tuple[str, float, int], list[dict[str, Any]]] = {}
    for line in lines:
        cells.setdefault((line["method"], line["share"], line["questions"]), []).append(line)
    cells_summary = []
    for (method, share, questions), cell_lines in sorted(cells.items()):
        tasks = sorted({line["target"] for line in cell_lines})
        by_task = {
            side: [
                float(np.mean([np.mean(line[side]) for line in cell_lines if line["target"] == task])) for task in tasks
            ]
            for side in ("others", "known")
        }
        cells_summary.append(
            {
                "method": method,
                "share": share,
                "questions": questions,
                "others": interval(by_task["others"]),
                "known": interval(by_task["known"]),
                "carried": round(float(np.mean(by_task["others"]) / np.mean(by_task["known"])), 3),
                "tasks": {task: round(gain, 3) for task, gain in zip(tasks, by_task["others"], strict=True)},
                "seeds": len({line["seed"] for line in cell_lines}),
            }
        )
    return cells_summary


@in_one_line()
def main(argv: list[str] | None = None) -> None:
    """Select, train, write; finished trainings are not repeated."""
    parser = argparse.ArgumentParser(prog="python -m experiments.selection.run", description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, required=True, help="Artifact with many questions per task.")
    parser.add_argument("--work", type=Path, required=True, help="Directory of finished trainings.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    parser.add_argument("--methods", nargs="+", default=[name for name in METHODS if name != RANDOM])
    parser.add_argument("--targets", nargs="+", help="Tasks. Default: all of the artifact.")
    parser.add_argument("--questions", type=int, nargs="+", default=[64], help="Numbers of known questions.")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.2], help="Shares of the rows.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="Training seeds.")
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--steps", type=int, help="Overrides the recipe.")
    parser.add_argument("--batch-rows", type=int, help="Overrides the recipe.")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    world = World(ArtifactReader.open(arguments.artifact))
    changes = {"steps": arguments.steps, "batch_rows": arguments.batch_rows}
    recipe = named_recipe(arguments.recipe).model_copy(update={name: value for name, value in changes.items() if value})
    trainer = Trainer(world, arguments.work, recipe)
    targets = arguments.targets or list(world.artifact.targets)
    lines: list[dict[str, Any]] = []
    began = time.perf_counter()
    for seed, share, questions, target, method in product(
        arguments.seeds, arguments.shares, arguments.questions, targets, arguments.methods
    ):
        line = measured(world, trainer, Request(target, method, questions, share), seed)
        lines.append(line)
        gains = f"others {np.mean(line['others']):.3f}, known {np.mean(line['known']):.3f}"
        print(
            f"[{time.perf_counter() - began:5.0f} s] {method} {target} {questions} {share} {seed}: {gains}", flush=True
        )
        result = {
            "rows": world.artifact.n_rows,
            "recipe": recipe.model_dump(mode="json"),
            "summary": summary(lines),
            "lines": lines,
        }
        write_atomically(arguments.out, (json.dumps(result, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
