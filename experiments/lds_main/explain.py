"""Why the units of a task are predicted better than the task: how far noise between seeds is common to the units.

    python -m experiments.lds_main.explain bench-out/cc-completion experiments/environments/cc-topic --targets sciq

With U = truth + noise and noise independent between seeds, the covariance of two seeds over subsets is the variance of
the truth, and half the variance of their difference that of the noise. Both are taken of the mean over units (the
task), of the average single unit, and of three other summaries of a task: the median, the mean of units standardised
over subsets, and the mean without the tenth of the units that lead it most. Beside them stands the rho of the
protocol's prediction of the task with each. Shape letters: B subsets, S seeds, E units.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from experiments.one_line_errors import in_one_line
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.files import write_atomically
from grasp.paper.candidate_predictor import CandidatePredictor
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.predict.scoring_rule import ScoringProtocol, load_protocol
from grasp.runs.metrics import spearman
from grasp.runs.retrained import RetrainedRuns


def unit_leverage(values_BE: F64) -> F64:
    """Share of each unit in the variance of the units' mean, (E,), sums to 1; nan if the mean is constant."""
    mean_B = values_BE.mean(axis=1)
    if mean_B.max() == mean_B.min():
        return np.full(values_BE.shape[1], np.nan)
    mean_B = mean_B - mean_B.mean()
    return np.asarray(mean_B @ values_BE / (mean_B @ mean_B * values_BE.shape[1]))


def standardised_mean(values_BSE: F64) -> F64:
    scale_E = values_BSE.mean(axis=1).std(axis=0)
    return np.asarray((values_BSE[:, :, scale_E > 0] / scale_E[scale_E > 0]).mean(axis=2))


def trimmed_mean(values_BSE: F64) -> F64:
    leverage_E = np.abs(unit_leverage(values_BSE.mean(axis=1)))
    kept_units = np.argsort(leverage_E)[: int(0.9 * len(leverage_E))]
    return np.asarray(values_BSE[:, :, kept_units].mean(axis=2))


SUMMARIES: dict[str, Callable[[F64], F64]] = {
    "mean": lambda values_BSE: np.asarray(values_BSE.mean(axis=2)),
    "median": lambda values_BSE: np.asarray(np.median(values_BSE, axis=2)),
    "mean of standardised units": standardised_mean,
    "mean without the leading tenth": trimmed_mean,
}


def truth_and_noise(values_BS: F64) -> tuple[float, float]:
    """Variances over subsets of the truth and of one seed's noise, averaged over pairs of seeds."""
    pairs = list(combinations(range(values_BS.shape[1]), 2))
    truth = np.mean([np.cov(values_BS[:, a], values_BS[:, b])[0, 1] for a, b in pairs])
    noise = np.mean([np.var(values_BS[:, a] - values_BS[:, b], ddof=1) / 2 for a, b in pairs])
    return float(truth), float(noise)


def common_share(values_BE: F64) -> float:
    """Share of the first principal component in the variance of the units."""
    centred = values_BE - values_BE.mean(axis=0)
    spectrum = np.linalg.svd(centred, compute_uv=False) ** 2
    return float(spectrum[0] / spectrum.sum())


def explain(values_BSE: F64, predicted_B: F64, predicted_BE: F64) -> dict[str, Any]:
    """All figures of one target."""
    units = [truth_and_noise(values_BSE[:, :, e]) for e in range(values_BSE.shape[2])]
    realized_BE = values_BSE.mean(axis=1)
    difference_BE = values_BSE[:, 0] - values_BSE[:, 1]
    return {
        "unit": {
            "truth_variance": float(np.mean([truth for truth, _ in units])),
            "noise_variance": float(np.mean([noise for _, noise in units])),
            "mean_rho": float(np.nanmean(spearman(predicted_BE, realized_BE))),
        },
        "first_component": {"mean_of_seeds": common_share(realized_BE), "noise": common_share(difference_BE)},
        "task": {name: _of_task(summary(values_BSE), predicted_B) for name, summary in SUMMARIES.items()},
    }


def _of_task(values_BS: F64, predicted_B: F64) -> dict[str, float]:
    truth, noise = truth_and_noise(values_BS)
    realized_B1 = values_BS.mean(axis=1, keepdims=True)
    return {
        "truth_variance": truth,
        "noise_variance": noise,
        "rho": float(spearman(predicted_B[:, None], realized_B1)[0]),
    }


@dataclass(frozen=True, slots=True)
class Compared:
    """One target: what was predicted, and what each seed gave."""

    target: str
    predicted_B: F64
    predicted_BE: F64
    values_BSE: F64


def compared(
    artifact: ArtifactReader,
    environment: RetrainedRuns,
    protocol: ScoringProtocol,
    targets: Sequence[str] | None = None,
) -> Iterator[Compared]:
    """Every target that environment and artifact share, or those named."""
    scored = CandidatePredictor.from_runs(environment, artifact)
    names = list(targets or scored.run_targets.values())
    (predicted,) = scored.predict({protocol.name: protocol}, names)
    utilities = environment.utilities()
    for name in names:
        target_utilities = utilities.select(name)
        unit_BE, task_B = predicted.aligned(target_utilities.subset_ids, name, target_utilities.unit_ids)
        assert unit_BE is not None
        assert task_B is not None
        yield Compared(name, task_B, unit_BE, target_utilities.values_BSE)


def write_json(results: dict[str, Any], out: Path | None) -> None:
    """Print, and keep."""
    text = json.dumps(results, indent=1, allow_nan=False) + "\n"
    print(text, end="")
    if out is not None:
        write_atomically(out, text.encode())


def run(artifact: ArtifactReader, environment: RetrainedRuns, path: Path | None, targets: Sequence[str] | None) -> Any:
    """Figures of every target that environment and artifact share."""
    protocol = DEFAULT_PROTOCOL if path is None else load_protocol(path)
    records = {
        record.target: explain(record.values_BSE, record.predicted_B, record.predicted_BE)
        for record in compared(artifact, environment, protocol, targets)
    }
    return {"environment": environment.name, "protocol": protocol.name, "targets": records}


@in_one_line()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--protocol", type=Path)
    parser.add_argument("--targets", nargs="+")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = run(ArtifactReader.open(args.artifact), RetrainedRuns.open(args.environment), args.protocol, args.targets)
    write_json(results, args.out)


if __name__ == "__main__":
    main()
