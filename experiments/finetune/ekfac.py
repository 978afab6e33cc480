"""EK-FAC over all layers: the same sample of coordinates as ours, taken in the eigenbasis of the Kronecker factors.

    python -m experiments.finetune.ekfac documents --data ../shared/data --out experiments/finetune/ekfac.json

Whole gradients of 106 million numbers for every question fill no common memory. But EK-FAC is a diagonal in another
basis: factors of every layer by one pass over the rows, with labels drawn from the model, then the second moments
Lambda of turned gradients by another. What each layer received, and what came back, are turned before the coordinates
are taken, as `grasp build` takes them: n tiles a matrix, unbiased. Scores, for a damping d:

    a_ie = sum_k w_k g_ik g_ek / (Lambda_k + d mean Lambda),    the mean over the layer

Some 24 minutes of CPU an environment, which a kill costs; what is done is in the JSON and is not made again.
Shape letters: N rows, E units, B rows of a batch, K coordinates.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from experiments.one_line_errors import in_one_line
from experiments.worlds.artifacts import shares
from experiments.worlds.evaluate import Method, compare
from experiments.worlds.prepare import environments_parser, prepared, write_reports
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import LENGTH, Name, open_corpus, target_settings
from grasp.arrays import F64
from grasp.baselines.gradients.curvature import Basis, Fisher, second_moments
from grasp.kernels.gradient import SampledGradients, by_member
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradients import Example, GradientFactors, Output
from grasp.runs.retrained import RetrainedRuns
from grasp.seeds import stream
from grasp.settings import FeatureSettings
from grasp.targets import load_units

FULL_WIDTH = 4_096  # every layer of the body has whole factors
BATCH_TOKENS = 1_024
DAMPINGS = {".1 of a layer's mean (as published)": 0.1, ".01 of it": 0.01}
PUBLISHED = f"EK-FAC, all layers, damping {next(iter(DAMPINGS))}"


class Turned:
    """Coordinates of gradients in the eigenbasis of every layer's factors."""

    def __init__(self, gradients: SampledGradients, fisher: Fisher) -> None:
        self.gradients, self.fisher = gradients, fisher
        self.bases = [Basis.from_factors(factors) for factors in second_moments(gradients.engine, fisher, FULL_WIDTH)]

    def sample_gradients(
        self, examples: Sequence[Example], output: Output = "loss", uniforms: Sequence[F64] | None = None
    ) -> torch.Tensor:
        """Of the gradient of each example's mean loss, (B, K)."""
        sample, engine = self.gradients.sample, self.gradients.engine
        out_BK = torch.zeros(len(examples), sample.size, dtype=engine.work)

        def consume(number: int, use: GradientFactors, rows: slice) -> None:
            tile, turned = sample.tiles[number], self.bases[number].rotate_use(use)
            some = slice(tile.start, tile.start + tile.size)
            out_BK[rows, some] += tile.sampled_gradient(by_member(turned.left), by_member(turned.right))

        engine.run(examples, consume, output, uniforms)
        return out_BK

    def batches(self, examples: Sequence[Example]) -> Iterator[tuple[NDArray[np.int64], torch.Tensor]]:
        """Examples in batches of like length, with their coordinates."""
        for index_B in self.gradients.batches(examples):
            yield index_B, self.sample_gradients([examples[int(i)] for i in index_B])

    def eigenvalues(self) -> F64:
        """Lambda, (K,): the second moment of one label's gradient, as `curvature.corrected_eigenvalues` has it."""
        sum_K = np.zeros(self.gradients.sample.size)
        for index_B in self.gradients.batches(self.fisher.rows):
            examples, uniforms = self.fisher.batch(index_B)
            sampled_BK = self.sample_gradients(examples, self.fisher.output, uniforms).double()
            labels_B1 = torch.tensor([[example.labels] for example in examples], dtype=torch.float64)
            sum_K += (sampled_BK.square() * labels_B1).sum(dim=0).numpy()
        return sum_K / len(self.fisher.rows)


def damped(lambda_K: F64, gradients: SampledGradients, damping: float) -> F64:
    """w / (Lambda + damping mean Lambda), the mean over each layer's own coordinates, (K,)."""
    weight_K, out_K = gradients.sample.weight_K.double().numpy(), np.empty_like(lambda_K)
    for tile in gradients.sample.tiles:
        some = slice(tile.start, tile.start + tile.size)
        out_K[some] = weight_K[some] / (lambda_K[some] + damping * max(float(lambda_K[some].mean()), 1e-30))
    return out_K


def scores(rows: Sequence[Example], units: Sequence[Example], gradients: SampledGradients) -> dict[str, F64]:
    """(N, E) by damping, of a row's mean loss as published and of its whole loss."""
    uniforms = [stream(0, "finetune", "ekfac", i).random(row.labels) for i, row in enumerate(rows)]
    began = time.process_time()
    turned = Turned(gradients, Fisher(rows, uniforms))
    print(f"factors: {time.process_time() - began:.0f} s of CPU", flush=True)
    lambda_K = turned.eigenvalues()
    print(f"eigenvalues: {time.process_time() - began:.0f} s of CPU", flush=True)
    unit_EK = torch.zeros(len(units), gradients.sample.size)
    for index_B, sampled_BK in turned.batches(units):
        unit_EK[torch.from_numpy(index_B)] = sampled_BK.float()
    factors = {name: torch.from_numpy(damped(lambda_K, gradients, d)).float() for name, d in DAMPINGS.items()}
    out = {name: np.zeros((len(rows), len(units))) for name in DAMPINGS}
    for index_B, sampled_BK in turned.batches(rows):
        for name, factor_K in factors.items():
            out[name][index_B] = ((sampled_BK.float() * factor_K) @ unit_EK.T).double().numpy()
    print(f"rows: {time.process_time() - began:.0f} s of CPU", flush=True)
    labels_N1 = np.array([[row.labels] for row in rows])
    score_by_name = {}
    for name, score_NE in out.items():
        score_by_name[f"EK-FAC, all layers, damping {name}"] = score_NE
        score_by_name[f"EK-FAC, all layers, damping {name}, whole loss"] = score_NE * labels_N1
    return score_by_name


def report(name: Name, data: Path, work: Path) -> dict[str, Any]:
    """Against the runs that there are."""
    model, reader = prepared(name, data, work)
    corpus = open_corpus(name, work, reader)
    units = load_units(target_settings(name, work)).tokenize(reader, LENGTH)
    read = ReferenceModel(model.to(torch.bfloat16), reader, batch_tokens=BATCH_TOKENS)
    gradients = SampledGradients.choose(read, FeatureSettings())
    rows = [Example(ids, int(first)) for ids, first in zip(corpus.rows, corpus.first_N, strict=True)]
    began = time.process_time()
    score_by_name = scores(rows, [Example(unit.input_ids, unit.first) for unit in units], gradients)
    environment = RetrainedRuns.open(FOLDER / name)
    utilities = environment.utilities(seeds=(0,), partial=True)
    methods = {label: Method((score_NE,)) for label, score_NE in score_by_name.items()}
    share_BN = shares(environment, corpus.store, utilities)
    return {
        "environment": name,
        "role": environment.role,
        "subsets": len(share_BN),
        "coordinates": gradients.sample.size,
        "cpu_seconds": round(time.process_time() - began),
        "methods": compare(methods, utilities, share_BN, base=PUBLISHED),
    }


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, compare what is missing, write after each."""
    write_reports(environments_parser("finetune.ekfac", __doc__).parse_args(arguments), report)


if __name__ == "__main__":
    main()
