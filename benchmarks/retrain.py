"""Seconds of a training step, and of a model.

    python benchmarks/retrain.py --recipe tiny --steps 60 --out bench-out/retrain.json

Rows are random token ids: what is measured is the program, not what is learned. Start-up of kernels is kept out by a
few steps of warm-up; host and device run apart, so the clock is read after the device has finished.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `tests`

from grasp.training.recipe import TrainingRecipe, named_recipe
from grasp.training.row_order import batch_order, relative_weights, token_batches
from grasp.training.train import start_training
from tests.models.toy import InMemoryRows

WARM_UP = 5


def seconds_a_step(recipe: TrainingRecipe, rows: InMemoryRows, steps: int, device: str) -> float:
    """Seconds of one step, batches included: by the wall on a GPU, else of the CPU."""
    frequency_N = relative_weights(rows.n_rows, recipe.batch_rows, None)
    order = batch_order(frequency_N, seed=0, batch_rows=recipe.batch_rows, first_step=0, last_step=steps + WARM_UP)
    training = start_training(recipe, 0, device)
    began = 0.0
    for batch in token_batches(rows, order, context=recipe.shape.context, vocab_size=recipe.shape.vocab_size):
        if training.step == WARM_UP:
            finish(device)
            began = clock(device)
        training.backward(batch.ids_BL, batch.weight_BL)
        training.update()
    finish(device)
    return (clock(device) - began) / steps


def clock(device: str) -> float:
    return time.perf_counter() if device == "cuda" else time.process_time()


def finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def random_rows(recipe: TrainingRecipe, n_rows: int) -> InMemoryRows:
    length, vocab_size = recipe.shape.context, recipe.shape.vocab_size
    ids = np.random.default_rng(0).integers(0, vocab_size, size=n_rows * length).astype(np.int32)
    return InMemoryRows(ids, np.arange(n_rows + 1, dtype=np.int64) * length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    recipe = named_recipe(args.recipe)
    rows = random_rows(recipe, args.rows)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    step = seconds_a_step(recipe, rows, args.steps, args.device)
    print(f"{recipe.name} on {name}: {step * 1e3:.1f} ms a step, {step * recipe.steps:.2f} s a model")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(
            json.dumps({"recipe": recipe.name, "device": name, "seconds_a_step": step}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
