"""What a projection costs: gradients of all layers, kept whole or as k random numbers, against the runs.

    python -m experiments.finetune.width documents --data ../shared/data --out experiments/finetune/width.json

Four draws of a ninety-sixth of the coordinates are kept of every row and question (gigabytes in --work); killed, the
same command goes on. Then forms of published methods are made of them, each with 128 to 262,144 numbers kept by a
random projection, and without one:

    TracIn   <g_i, g_e>
    LESS     the cosine of g_i / sqrt(v) with g_e: a step of Adam. Its second moments are those of the rows
    TRAK     <g_i, (G'G + ridge)^-1 g_e>, the ridge a tenth of the mean eigenvalue
    ours     sum_j g_ij g_ej / (v_j + .01 mean v)

Deviations: loss for TRAK's margin, one checkpoint, the model before training. A projection is CountSketch: each
coordinate is added to one of k numbers with a random sign, whose inner products are unbiased as those of signs are.
Shape letters: N rows, E units, K coordinates, k numbers kept.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.utils import logging as hf_logging

from experiments.one_line_errors import in_one_line
from experiments.worlds.artifacts import shares
from experiments.worlds.evaluate import Method, compare
from experiments.worlds.prepare import prepared
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import LENGTH, NAMES, Name, open_corpus, target_settings
from grasp.arrays import F32, F64
from grasp.files import write_atomically
from grasp.kernels.gradient import CoordinateSample, SampledGradients, gradient_preconditioner
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradients import Example
from grasp.runs.retrained import RetrainedRuns
from grasp.seeds import stream
from grasp.settings import FeatureSettings
from grasp.targets import load_units

SHARE, DRAWS = 96, 4
WIDTHS = (128, 1_024, 8_192, 65_536, 262_144)
SCALE, LARGEST = 1_024.0, 65_504.0  # of float16
BLOCK = 1 << 17
BATCH_TOKENS = 1_024


class StoredCoordinates:
    """Coordinates of rows and of questions on disk, float16 times SCALE, and what each counts for."""

    def __init__(self, name: Name, data: Path, work: Path) -> None:
        model, reader = prepared(name, data, work)
        self.corpus = open_corpus(name, work, reader)
        units = load_units(target_settings(name, work)).tokenize(reader, LENGTH)
        read = ReferenceModel(model, reader, batch_tokens=BATCH_TOKENS)
        body = SampledGradients.choose(read, FeatureSettings())
        layers = body.engine.layers
        matrices = sum(block.size for block in layers.blocks if block.left > 1)
        count = layers.size - matrices + matrices // SHARE
        samples = [CoordinateSample.draw(layers, count, seed, read.device) for seed in range(DRAWS)]
        self.weight_K = np.concatenate([sample.weight_K.numpy() for sample in samples]).astype(np.float64)
        rows = [Example(ids, int(first)) for ids, first in zip(self.corpus.rows, self.corpus.first_N, strict=True)]
        self.parts = [replace(body, sample=sample, batch_tokens=BATCH_TOKENS) for sample in samples]
        self.rows_NK = self._load_or_compute(work / f"{name}-rows", rows)
        self.units_EK = self._load_or_compute(
            work / f"{name}-asked", [Example(unit.input_ids, unit.first) for unit in units]
        )

    def _load_or_compute(self, path: Path, examples: list[Example]) -> NDArray[np.float16]:
        """A part is written when it is whole, one batch after the other."""
        path.mkdir(exist_ok=True)
        batches = self.parts[0].batches(examples)
        for number, index in enumerate(batches):
            place = path / f"{number:04d}.npy"
            if not place.exists():
                batch = [examples[int(i)] for i in index]
                coordinates = torch.cat([part.compute(batch)[0] for part in self.parts], dim=1)
                part = place.with_suffix(".part")
                with part.open("wb") as file:
                    np.save(file, (coordinates * SCALE).clamp(-LARGEST, LARGEST).half().numpy())
                part.replace(place)
                print(f"{path.name}: {number + 1} of {len(batches)} batches", flush=True)
        whole = np.empty((len(examples), len(self.weight_K)), dtype=np.float16)
        for number, index in enumerate(batches):
            whole[index] = np.load(path / f"{number:04d}.npy")
        return whole

    def blocks(self) -> Iterator[tuple[slice, F32, F32]]:
        """Some coordinates at a time: rows and units, float32."""
        for start in range(0, len(self.weight_K), BLOCK):
            some = slice(start, start + BLOCK)
            yield some, *(part[:, some].astype(np.float32) / SCALE for part in (self.rows_NK, self.units_EK))


def projected(stored: StoredCoordinates, scale_K: F64, width: int, side: Callable[[F32, F32], F32]) -> F64:
    """One side's coordinates times their scale as `width` numbers; of `None` numbers there is nothing to do."""
    draw = stream(0, "finetune", "width", width)
    place_K, sign_K = draw.integers(width, size=len(scale_K)), draw.choice([-1.0, 1.0], size=len(scale_K))
    out: F64 | None = None
    for some, rows_Nk, units_Ek in stored.blocks():
        values = side(rows_Nk, units_Ek) * (scale_K[some] * sign_K[some]).astype(np.float32)
        out = np.zeros((len(values), width)) if out is None else out
        for i, value in enumerate(values):
            out[i] += np.bincount(place_K[some], weights=value, minlength=width)
    assert out is not None
    return out


def whole_products(stored: StoredCoordinates, row_K: F64, unit_K: F64) -> tuple[F64, F64, F64]:
    """(N, E) products of rows and units, (N, N) of rows, and (E,) squared norms; coordinates times their scales."""
    n, e = len(stored.rows_NK), len(stored.units_EK)
    of_both, of_rows, of_units = np.zeros((n, e)), np.zeros((n, n)), np.zeros(e)
    for some, rows_Nk, units_Ek in stored.blocks():
        rows, units = rows_Nk * row_K[some].astype(np.float32), units_Ek * unit_K[some].astype(np.float32)
        of_both += rows @ units.T
        of_rows += rows @ rows.T
        of_units += (units.astype(np.float64) ** 2).sum(axis=1)
    return of_both, of_rows, of_units


def scores(stored: StoredCoordinates) -> dict[str, F64]:
    """(N, E) by form and by numbers kept."""
    v_K = np.zeros(len(stored.weight_K))
    for some, rows_Nk, _ in stored.blocks():
        v_K[some] = (rows_Nk.astype(np.float64) ** 2).mean(axis=0)
    root_K = np.sqrt(stored.weight_K)
    adam_K = 1.0 / np.sqrt(v_K + 1e-6 * v_K.mean())
    ours_K = np.sqrt(gradient_preconditioner(v_K, stored.weight_K, 0.01) / stored.weight_K)
    out = {}
    for width in (*WIDTHS, None):
        name = "whole" if width is None else f"{width:,}"
        for form, row_K, unit_K in (
            ("TracIn", root_K, root_K),
            ("LESS", root_K * adam_K, root_K),
            ("ours", root_K * ours_K, root_K * ours_K),
        ):
            if width is None:
                of_both, of_rows, of_units = whole_products(stored, row_K, unit_K)
            else:
                rows = projected(stored, row_K, width, lambda rows, units: rows)
                units = projected(stored, unit_K, width, lambda rows, units: units)
                of_both, of_rows, of_units = rows @ units.T, rows @ rows.T, (units**2).sum(axis=1)
            norm_N = np.sqrt(np.diag(of_rows))
            if form == "TracIn":
                out[f"TRAK, {name}"] = trak(of_rows, of_both)
            out[f"{form}, {name}"] = of_both / np.outer(norm_N, np.sqrt(of_units)) if form == "LESS" else of_both
        print(name, flush=True)
    return out


def trak(of_rows: F64, of_both: F64) -> F64:
    """G (G'G + ridge)^-1 g_e by way of the rows' own products: (GG' + ridge)^-1 G g_e."""
    ridge = 0.1 * float(np.trace(of_rows)) / len(of_rows)
    return np.asarray(np.linalg.solve(of_rows + ridge * np.eye(len(of_rows)), of_both))


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, compare, write."""
    parser = argparse.ArgumentParser(prog="python -m experiments.finetune.width", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--data", type=Path, required=True, help="Folder of pool.parquet and instructions.parquet.")
    parser.add_argument("--work", type=Path, default=FOLDER / "work", help="Model, rows and coordinates.")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write.")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    stored = StoredCoordinates(args.name, args.data, args.work)
    environment = RetrainedRuns.open(FOLDER / args.name)
    utilities = environment.utilities(seeds=(0,), partial=True)
    methods = {name: Method((score_NE,)) for name, score_NE in scores(stored).items()}
    share_BN = shares(environment, stored.corpus.store, utilities)
    results: list[dict[str, Any]] = compare(methods, utilities, share_BN, base="ours, whole")
    write_atomically(args.out, (json.dumps({"environment": args.name, "methods": results}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
