"""How many coordinates a gradient needs, and how steady ranks are: samples of several sizes, moments of half the rows.

    python -m experiments.finetune.coordinates documents lengths contrasts --data ../shared/data \\
        --out experiments/finetune/coordinates.json

All samples are taken in the same two forward and backward passes over the rows: one for second moments, one for scores.
Two samples of a size differ by their seed only. Rankings are compared by Spearman's rho over rows, mean and minimum
over targets: of two samples of a size, and of one sample with second moments from two halves of the rows. The value for
two whole corpora follows from the halves by the Spearman-Brown formula: 2 rho / (1 + rho). The built-in rule adds a
quarter each of token and input, from the artifact that `further` builds. An interruption costs one environment; those
in the JSON file are not repeated.
Shape letters: N rows, E units, T targets, B rows of a batch, K coordinates.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr

from experiments.one_line_errors import in_one_line
from experiments.worlds.artifacts import FEATURES, artifact_of, relevance, shares
from experiments.worlds.evaluate import Method, compare
from experiments.worlds.prepare import environments_parser, model_directory, prepared, write_reports
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import LENGTH, Name, open_corpus, target_settings
from grasp.arrays import F64
from grasp.kernels.gradient import (
    CHUNK_COORDINATES,
    CoordinateSample,
    SampledGradients,
    by_member,
    gradient_preconditioner,
)
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradients import Example, GradientFactors, PerExample
from grasp.runs.retrained import RetrainedRuns
from grasp.seeds import stream
from grasp.settings import FeatureSettings
from grasp.targets import load_units

SAMPLES = ((1, 0), (1, 1), (2, 0), (2, 1), (4, 0), (4, 1), (8, 0))  # millions of coordinates, and a seed
HALVED = (2, 0)  # what is ranked by moments of halves too
BATCH_TOKENS = 1_024
DAMPING = FeatureSettings().gradient_damping


@dataclass
class Samples:
    """Samples of the coordinates of one model, which share its passes."""

    engine: PerExample
    samples: list[CoordinateSample]

    @property
    def starts(self) -> NDArray[np.int64]:
        return np.cumsum([0, *(sample.size for sample in self.samples)])

    def batches(self, examples: Sequence[Example]) -> Iterator[tuple[NDArray[np.int64], torch.Tensor]]:
        """Yield example indices of a batch and their coordinates of all samples, (B, sum of K).

        Runs a forward and a backward pass per batch.
        """
        starts = self.starts
        for index_B in self.engine.batches(examples, BATCH_TOKENS):
            out_BK = torch.zeros(len(index_B), int(starts[-1]))

            def consume(number: int, use: GradientFactors, rows: slice, out_BK: torch.Tensor = out_BK) -> None:
                left, right = by_member(use.left), by_member(use.right)
                for start, sample in zip(starts, self.samples, strict=False):
                    tile = sample.tiles[number]
                    some = slice(int(start) + tile.start, int(start) + tile.start + tile.size)
                    out_BK[rows, some] += tile.sampled_gradient(left, right)

            self.engine.run([examples[int(i)] for i in index_B], consume)
            yield index_B, out_BK


def scores(rows: Sequence[Example], units: Sequence[Example], samples: Samples) -> dict[str, F64]:
    """(N, E) of rows' whole losses, by sample, and by moments of halves of the rows."""
    starts, began = samples.starts, time.process_time()
    half_N = stream(0, "finetune", "coordinates").permutation(len(rows)) % 2
    halves, count = np.zeros((2, int(starts[-1]))), np.zeros(2)
    for index_B, sampled_BK in samples.batches(rows):
        for number in range(2):
            some_BK = sampled_BK[torch.from_numpy(half_N[index_B] == number)]
            some_BK = some_BK[some_BK.isfinite().all(dim=1)]
            halves[number] += some_BK.double().square().sum(dim=0).numpy()
            count[number] += len(some_BK)
    print(f"moments: {time.process_time() - began:.0f} s of CPU", flush=True)
    unit_EK = torch.zeros(len(units), int(starts[-1]), dtype=torch.bfloat16)
    for index_B, sampled_BK in samples.batches(units):
        unit_EK[torch.from_numpy(index_B)] = sampled_BK.bfloat16()
    whole_K = halves.sum(axis=0) / count.sum()
    factors: dict[str, tuple[int, torch.Tensor]] = {}
    for place, ((millions, seed), sample) in enumerate(zip(SAMPLES, samples.samples, strict=True)):
        moments = {"": whole_K}
        if place == SAMPLES.index(HALVED):
            moments |= {f", half {n}": halves[n] / count[n] for n in range(2)}
        for named, mean_K in moments.items():
            square_K = mean_K[starts[place] : starts[place + 1]]
            factor_K = gradient_preconditioner(square_K, sample.weight_K.double().numpy(), DAMPING)
            factors[f"{millions} M, seed {seed}{named}"] = int(starts[place]), torch.from_numpy(factor_K).float()
    out = {name: np.zeros((len(rows), len(units))) for name in factors}
    for index_B, sampled_BK in samples.batches(rows):
        for name, (first, factor_K) in factors.items():
            for start in range(0, len(factor_K), CHUNK_COORDINATES):
                factor_k = factor_K[start : start + CHUNK_COORDINATES]
                some = slice(first + start, first + start + len(factor_k))
                out[name][index_B] += ((sampled_BK[:, some] * factor_k) @ unit_EK[:, some].float().T).double().numpy()
    print(f"scores: {time.process_time() - began:.0f} s of CPU", flush=True)
    labels_N1 = np.array([[row.labels] for row in rows])
    return {name: score_NE * labels_N1 for name, score_NE in out.items()}


def steadiness(first: Method, second: Method, targets: tuple[str, ...], n_rows: int) -> dict[str, float]:
    """Spearman's rho over rows of two rankings for each task: its mean and its least."""
    first_NT, second_NT = (method.predict(np.eye(n_rows), targets)[1] for method in (first, second))
    rho_T = [float(spearmanr(first_N, second_N)[0]) for first_N, second_N in zip(first_NT.T, second_NT.T, strict=True)]
    return {"mean": round(float(np.mean(rho_T)), 3), "least": round(min(rho_T), 3)}


def report(name: Name, data: Path, work: Path) -> dict[str, Any]:
    """Every sample against the runs that there are, and against its like."""
    model, reader = prepared(name, data, work)
    artifact = artifact_of(name, work, model_directory(name, work), reader, FEATURES, 8192, "further")
    corpus = open_corpus(name, work, reader)
    units = load_units(target_settings(name, work)).tokenize(reader, LENGTH)
    read = ReferenceModel(model.to(torch.bfloat16), reader, batch_tokens=BATCH_TOKENS)
    engine = SampledGradients.choose(read, FeatureSettings()).engine
    drawn = [CoordinateSample.draw(engine.layers, millions * 10**6, seed, read.device) for millions, seed in SAMPLES]
    rows = [Example(ids, int(first)) for ids, first in zip(corpus.rows, corpus.first_N, strict=True)]
    began = time.process_time()
    score_by_label = scores(rows, [Example(unit.input_ids, unit.first) for unit in units], Samples(engine, drawn))
    environment = RetrainedRuns.open(FOLDER / name)
    utilities = environment.utilities(seeds=(0,), partial=True)
    columns = np.concatenate([artifact.unit_columns(target) for target in dict.fromkeys(utilities.targets)])
    forward = tuple(relevance(artifact, kernel, columns) for kernel in ("token", "input"))
    single = {label: Method((score_NE,)) for label, score_NE in score_by_label.items()}
    ships = {
        label: Method((score_NE, *forward), (1.0, 0.25, 0.25), (1.0, 0.25, 0.25))
        for label, score_NE in score_by_label.items()
    }
    methods = {f"{label}: gradient": method for label, method in single.items() if "half" not in label}
    methods |= {f"{label}: what ships": ship for label, ship in ships.items() if "half" not in label}
    half = f"{HALVED[0]} M, seed {HALVED[1]}, half"
    pairs = {f"{m} M, two samples": (f"{m} M, seed 0", f"{m} M, seed 1") for m, seed in SAMPLES if seed}
    pairs["2 M, moments of two halves"] = f"{half} 0", f"{half} 1"
    steady = {
        pair: {
            form: steadiness(some[a], some[b], utilities.targets, len(rows))
            for form, some in (("gradient", single), ("what ships", ships))
        }
        for pair, (a, b) in pairs.items()
    }
    share_BN = shares(environment, corpus.store, utilities)
    return {
        "environment": name,
        "role": environment.role,
        "subsets": len(share_BN),
        "coordinates": {f"{m} M": sample.size for (m, seed), sample in zip(SAMPLES, drawn, strict=True) if not seed},
        "cpu_seconds": round(time.process_time() - began),
        "steadiness": steady,
        "methods": compare(methods, utilities, share_BN, base=f"{HALVED[0]} M, seed {HALVED[1]}: gradient"),
    }


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, compare what is missing, write after each."""
    write_reports(environments_parser("finetune.coordinates", __doc__).parse_args(arguments), report)


if __name__ == "__main__":
    main()
