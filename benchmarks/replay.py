"""Peak memory and time of replaying a fine-tuning, relative to the fine-tuning alone.

    OMP_NUM_THREADS=1 python benchmarks/replay.py --hidden 512 --layers 8 --out bench-out/replay.json

A Llama model with random weights is fine-tuned on random tokens; each measurement is a process of its own. Memory is
the peak of a process less what it used before the training, when model and rows were loaded. The states of the training
are on disk, as in a build whose states do not fit in `replay.memory_mb`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from memory import peak_bytes
from transformers import LlamaConfig, LlamaForCausalLM

from grasp.corpus.row_store import TokenRows
from grasp.seeds import stream
from grasp.targets.units import UnitTokens
from grasp.training.adamw import AdamWTraining
from grasp.training.metagradient import MetagradientSettings, Target, metagradient
from grasp.training.recipe import OptimizerRecipe
from grasp.training.trajectory import Trajectory

N_ROWS, UNITS = 256, 8


class RandomRows:
    """Rows of random tokens, all of the same length."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.n_rows, self.fingerprint = N_ROWS, f"{vocabulary}-{length}"
        self._ids_NL = stream(0, "rows").integers(vocabulary, size=(N_ROWS, length)).astype(np.int32)

    def rows(self, row_index: Any) -> TokenRows:
        ids_BL = self._ids_NL[row_index]
        offsets = np.arange(len(ids_BL) + 1, dtype=np.int64) * ids_BL.shape[1]
        empty: Any = None
        return TokenRows(ids_BL.reshape(-1), offsets, empty, np.tile(np.arange(ids_BL.shape[1]) > 0, len(ids_BL)))


def measure(options: argparse.Namespace, targets: int) -> dict[str, float]:
    """Train, and replay if there are targets; return seconds, and peak bytes above those before the training."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        max_position_embeddings=options.length,
    )
    model, rows = LlamaForCausalLM(config), RandomRows(options.vocabulary, options.length)
    recipe = OptimizerRecipe(steps=options.steps, batch_rows=options.batch_rows, learning_rate=1e-4)
    draws = stream(0, "order").integers(N_ROWS, size=(options.steps, options.batch_rows))
    ids = stream(0, "units").integers(options.vocabulary, size=(UNITS, 32)).astype(np.int32)
    units = [Target(f"target {t}", [UnitTokens(tokens, 16) for tokens in ids]) for t in range(targets)]
    any_rows: Any = rows
    before, begun = peak_bytes(), time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="grasp-replay-") as place:
        training = AdamWTraining(model, recipe)
        parameters = training.n_parameters
        where, memory_bytes = (Path(place), 1) if targets else (None, 1 << 40)
        trajectory = Trajectory(training, any_rows, list(draws), directory=where, memory_bytes=memory_bytes)
        if targets:
            trajectory.train()
            probes = (options.steps // 2,)  # of which one takes as much memory as several
            settings = MetagradientSettings(
                curvature="one-sided", probe_steps=probes, batch_tokens=options.batch_rows * options.length
            )
            metagradient(trajectory, units, settings)
        else:
            trajectory.retrain(trajectory.weight_N)  # stores no states
    return {
        "parameters": parameters,
        "seconds": round(time.perf_counter() - begun, 1),
        "peak_bytes": peak_bytes() - before,
    }


def main() -> None:
    """Measure the training alone, then replays of several numbers of targets."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch-rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--targets", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options, options.one)))
        return
    results: dict[str, Any] = {"settings": {k: v for k, v in vars(options).items() if k not in ("out", "one")}}
    for targets in (0, *options.targets):
        command = [sys.executable, *sys.argv, "--one", str(targets)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        results[f"{targets} targets"] = record = json.loads(output.splitlines()[-1])
        if targets:
            training = results["0 targets"]
            record["trainings"] = round(record["seconds"] / training["seconds"], 1)
            extra = record["peak_bytes"] - training["peak_bytes"]
            record["floats_per_parameter_and_target"] = round(extra / 4 / record["parameters"] / targets, 2)
            record["allowed"] = bool(extra <= 0.3 * training["peak_bytes"] + 12 * record["parameters"] * targets)
        print(f"{targets} targets: {record}", flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
