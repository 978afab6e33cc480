"""Stacked retraining: seconds a model when K models of a recipe train at once, beside one at a time.

    python benchmarks/retrain.py --recipe tiny --stacks 1,8,64 --steps 60 --out bench-out/retrain.json

Rows are random token ids: what is measured is the program, not what is learned. Start-up of kernels is kept out by a
few steps of warm-up; host and device run apart, so the clock is read after the device has finished.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grasp.training.recipe import TrainingRecipe, named_recipe
from grasp.training.row_order import batch_order, relative_weights, token_batches
from grasp.training.train import Trainer
from tests.models.toy import InMemoryRows

WARM_UP = 5


def seconds_a_step(recipe: TrainingRecipe, rows: InMemoryRows, n_models: int, steps: int, device: str) -> float:
    """Seconds of one step of `n_models` models, batches included: by the wall on a GPU, else of the CPU."""
    frequency_N = relative_weights(rows.n_rows, recipe.batch_rows, None)
    orders = [
        batch_order(frequency_N, seed=k, batch_rows=recipe.batch_rows, first_step=0, last_step=steps + WARM_UP)
        for k in range(n_models)
    ]
    trainer = Trainer(recipe, list(range(n_models)), device)
    shape = recipe.shape
    batches = token_batches(rows, orders, steps=steps + WARM_UP, context=shape.context, vocab_size=shape.vocab_size)
    began = 0.0
    for batch in batches:
        if trainer.step == WARM_UP:
            finish(device)
            began = clock(device)
        trainer.advance(batch)
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
    parser.add_argument("--stacks", default="1,8,64")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    recipe = named_recipe(args.recipe)
    rows = random_rows(recipe, args.rows)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    results: list[dict[str, Any]] = []
    for n_models in (int(part) for part in args.stacks.split(",")):
        step = seconds_a_step(recipe, rows, n_models, args.steps, args.device)
        results.append({"models": n_models, "seconds_a_step": step, "seconds_a_model": step * recipe.steps / n_models})
        gain = results[0]["seconds_a_model"] / results[-1]["seconds_a_model"]
        print(
            f"{recipe.name} on {name}: {n_models} at once: {step * 1e3:.1f} ms a step, "
            f"{results[-1]['seconds_a_model']:.2f} s a model, {gain:.1f} x"
        )
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"recipe": recipe.name, "device": name, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
