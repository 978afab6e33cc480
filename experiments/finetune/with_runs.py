"""What runs add to relevance by gradients: the learned predictor on 8, 16 and 23 of the runs, each run left out once.

    python -m experiments.finetune.with_runs small-12 small-48 documents instructions --data ../shared/data \\
        --out experiments/finetune/with_runs.json

A run is predicted by others, drawn at random, and by the artifact of `grasp build --train further`; or by relevance
alone, or by the runs alone. The prediction is its change against the corpus, by target: the level of the other runs,
which leaves this one out, does not enter. A number is the rank correlation over the runs, mean over targets and draws.
Shape letters: R runs, T targets, D draws.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments.one_line_errors import in_one_line
from experiments.worlds.artifacts import FEATURES, artifact_of
from experiments.worlds.prepare import environments_parser, model_directory, prepared
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import ENVIRONMENTS, Name, open_corpus
from grasp.arrays import F64
from grasp.files import write_atomically
from grasp.predict.predictor import SIMILARITY_SKETCHES, Predictor
from grasp.retraining.plan import row_names
from grasp.runs.calibration import SubsetFeaturizer
from grasp.runs.gaussian_process import GaussianProcess
from grasp.runs.metrics import rank_correlations
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.subset_features import SubsetFeatures
from grasp.seeds import bootstrap_weights, stream

COUNTS, DRAWS, RESAMPLES = (8, 16, 23), 4, 1_000
RUNS_ONLY, BOTH, RELEVANCE = "runs alone", "runs and relevance", "relevance alone"


def known_of(name: Name, data: Path, work: Path) -> tuple[SubsetFeatures, SubsetFeatures, F64]:
    """Of every run, of the corpus, and the utilities of the first seed, (R, T)."""
    _, reader = prepared(name, data, work)
    artifact = artifact_of(name, work, model_directory(name, work), reader, FEATURES, 8192, "further")
    environment = RetrainedRuns.open(FOLDER / name)
    utilities = environment.utilities(seeds=(0,))
    predictor = Predictor.from_artifact(artifact, sketches=SIMILARITY_SKETCHES)
    known = SubsetFeaturizer.from_predictor(predictor, artifact, (ENVIRONMENTS[name].label,))
    blocks = environment.subset_blocks(row_names(open_corpus(name, work, reader).store))
    every, corpus = SubsetFeatures.concatenate([known.features(block.weights) for block in blocks]), known.corpus()
    values_RT = np.stack(
        [utilities.select(target).values_BSE.mean(axis=(1, 2)) for target in predictor.units.targets], axis=1
    )
    return every, corpus, values_RT


def predict_runs(runs: SubsetFeatures, corpus: SubsetFeatures, values_RT: F64, count: int, draw: int) -> F64:
    """Predict the change of every run from `count` of the others, (R, T)."""
    out_RT = np.empty_like(values_RT)
    for left_out in range(len(runs)):
        others = np.delete(np.arange(len(runs)), left_out)
        seen = others[stream(0, "beside", left_out, draw).permutation(len(others))[:count]]
        process = GaussianProcess.fit(runs.take(seen), values_RT[seen][:, None])
        out_RT[left_out] = process.change(runs.take([left_out]), corpus)[0][0]
    return out_RT


def rho(predicted_DRT: F64, values_RT: F64) -> list[float]:
    """Mean over targets and draws, with a 95 % interval over runs."""
    n_runs = len(values_RT)
    weights_R = np.concatenate([np.ones((1, n_runs)), bootstrap_weights(n_runs, resamples=RESAMPLES)])
    correlations = [
        rank_correlations([predicted_RT, values_RT], [(0, 1)], weights_R)[0].mean(axis=0)
        for predicted_RT in predicted_DRT
    ]
    mean = np.mean(correlations, axis=0)
    spread = np.nanpercentile(mean[1:] - np.nanmean(mean[1:]), [2.5, 97.5])
    return [round(float(value), 4) for value in (mean[0], mean[0] + spread[0], min(1.0, mean[0] + spread[1]))]


def report(name: Name, data: Path, work: Path) -> dict[str, Any]:
    """Task rho by the number of other runs."""
    runs, corpus, values_RT = known_of(name, data, work)
    n_targets = values_RT.shape[1]
    features = {
        BOTH: (runs, corpus),
        RUNS_ONLY: tuple(SubsetFeatures.from_shares(features.share_BG, n_targets) for features in (runs, corpus)),
    }
    lines: list[dict[str, Any]] = [{"by": RELEVANCE, "runs": 0, "task_rho": rho(runs.relevance_BT[None], values_RT)}]
    for count in COUNTS:
        for by, (of_runs, of_corpus) in features.items():
            draws = DRAWS if count < len(runs) - 1 else 1
            predicted = np.stack([predict_runs(of_runs, of_corpus, values_RT, count, draw) for draw in range(draws)])
            lines.append({"by": by, "runs": count, "task_rho": rho(predicted, values_RT)})
            print(f"{name} {lines[-1]}", flush=True)
    return {"environment": name, "role": ENVIRONMENTS[name].role, "subsets": len(runs), "found": lines}


@in_one_line()
def main(arguments: list[str] | None = None) -> None:
    """Parse, build what is missing, compare, write."""
    args = environments_parser("finetune.with_runs", __doc__).parse_args(arguments)
    reports = [report(name, args.data, args.work) for name in args.names]
    write_atomically(args.out, (json.dumps({"environments": reports}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
