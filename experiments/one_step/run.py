"""One-step fidelity: predictions of what one step of SGD on a subset does, against taking the step.

    python -m experiments.one_step.run --corpus cc_weborganizer.parquet --targets sciq \
        --out experiments/one_step/result.json

Killed at any moment, the same command goes on where it was: every game is kept in --work when it is done.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers.utils import logging as hf_logging

from experiments.one_line_errors import in_one_line
from experiments.one_step.figure import draw
from experiments.one_step.measure import Measured, ResultCache, measure, sampling_noise, summary
from experiments.one_step.predictors import label
from experiments.one_step.setting import Settings, World
from grasp.files import write_atomically


def run(settings: Settings, out: Path, work: Path, scatter_rate: float) -> None:
    """Measure every case, then write the table and the figure beside it."""
    began = time.perf_counter()

    def say(text: str) -> None:
        print(f"[{time.perf_counter() - began:6.0f} s] {text}", flush=True)

    say("rows and units")
    world = World(settings, work)
    cache = ResultCache(world.cache_directory)
    games: list[Measured] = []
    subsets: list[Measured] = []
    for case in world.cases():
        of_games, of_subsets = measure(world, case, cache, say)
        games += of_games
        subsets += of_subsets
    of_shapley, of_utility = summary(games), summary(subsets)
    result = {
        "settings": settings.described() | {"recipe": world.recipe.name, "rows": world.store.n_rows},
        "step": "w - rate * sum of the gradients of the subset's rows, each of its own mean loss",
        "realized": "loss before - loss after, nats: the mean over units, and every unit alone",
        "cases": settings.seeds * settings.batches,
        "predictors": {line["predictor"]: label(line["predictor"]) for line in of_utility},
        "shapley": of_shapley,
        "shapley_sampling_noise": sampling_noise(games),
        "subsets": of_utility,
    }
    draw(of_shapley, of_utility, subsets, scatter_rate, out.with_suffix(".svg"))
    write_atomically(out, (json.dumps(result, indent=1) + "\n").encode())
    say(f"{out}, {out.with_suffix('.svg')}")


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, run, say what went wrong in one line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.one_step.run", description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", required=True, help="Parquet or JSONL with a column `text`.")
    parser.add_argument("--targets", default="sciq", help="Names of targets, separated by commas.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write; the figure goes beside it as SVG.")
    parser.add_argument("--work", type=Path, help="Where finished games are kept; none: `work` beside --out.")
    parser.add_argument("--documents", type=int, default=3000, help="First documents of the corpus that are read.")
    parser.add_argument("--units", type=int, default=8, help="Units of a target in the validation loss.")
    parser.add_argument("--unit-tokens", type=int, default=32, help="Longest unit; its prompt loses its beginning.")
    parser.add_argument("--steps", type=_integers, default=(0, 320), help="States: steps of training before the step.")
    parser.add_argument("--seeds", type=int, default=2, help="Initialisation seeds.")
    parser.add_argument("--batches", type=int, default=2, help="Disjoint games of 16 rows a seed.")
    parser.add_argument("--rates", type=_numbers, default=(5e-4, 5e-3, 1.5e-2, 5e-2, 1.5e-1), help="Learning rates.")
    parser.add_argument("--shapley-rates", type=_numbers, default=(5e-3, 5e-2, 1.5e-1), help="Those of Shapley values.")
    parser.add_argument("--shapley-steps", type=_integers, default=(0,), help="States of Shapley values.")
    parser.add_argument("--permutations", type=int, default=1000, help="Permutations of a game.")
    parser.add_argument("--subsets", type=int, default=128, help="Subsets of eight rows of a game.")
    parser.add_argument("--sketch", type=int, default=64, help="Width of the CountSketch.")
    parser.add_argument("--scatter-rate", type=float, default=5e-3, help="Learning rate of the scatter plot.")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads.")
    args = vars(parser.parse_args(arguments))
    out, work, threads, scatter_rate = (args.pop(name) for name in ("out", "work", "threads", "scatter_rate"))
    if scatter_rate not in args["rates"]:
        parser.error(f"--scatter-rate: got {scatter_rate:g}, expected one of --rates")
    torch.set_num_threads(threads)
    hf_logging.disable_progress_bar()
    settings = Settings(**args | {"targets": tuple(args["targets"].split(","))})
    run(settings, out, work or out.parent / "work", scatter_rate)


if __name__ == "__main__":
    main()
