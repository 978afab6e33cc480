"""Mean LDS when a row's relevance to a unit is transformed before it is added up; development results only.

    python -m experiments.features.transforms bench-out/cc-completion --runs experiments/environments/cc-topic \
        --targets sciq,openbookqa --out experiments/features/transforms.json

Token and input relevance are brought to standard deviation 1 a unit, transformed, and added. `--scores NAME=FILE` reads
the matrix of another method beside them (rows x units, .npy); `--beside ART` adds an artifact of the same rows and
units by another reference model. Shape letters: B subsets, N rows, E units.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from experiments.kernel_names import KERNEL_OF
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.errors import RunsError
from grasp.files import write_atomically
from grasp.paper.development_runs import Development
from grasp.predict.predictor import downweight_negative
from grasp.runs.metrics import rank_correlations
from grasp.runs.retrained import RetrainedRuns

TRANSFORMS: Mapping[str, Callable[[F64], F64]] = {
    "as it is": lambda x: x,
    "negative x 0.5": lambda x: downweight_negative(x, 0.5),
    "negative x 0.25": lambda x: downweight_negative(x, 0.25),
    "negative x 0": lambda x: downweight_negative(x, 0.0),
    "negative alone": lambda x: np.minimum(x, 0.0),
    "power 0.5": lambda x: np.sign(x) * np.sqrt(np.abs(x)),
    "power 1.2": lambda x: np.sign(x) * np.abs(x) ** 1.2,
    "clipped at 4 sd": lambda x: np.clip(x, -4.0, 4.0),
    "clipped at 1 sd": lambda x: np.clip(x, -1.0, 1.0),
    "ranks": lambda x: rankdata(x, axis=0) / len(x),
}


def mean_lds(predicted_BE: F64, realized_BE: F64) -> float:
    """Mean over units of Spearman's rho over subsets."""
    rho_E = rank_correlations([predicted_BE, realized_BE], [(0, 1)], np.ones((1, len(predicted_BE))))[0, :, 0]
    return float(np.nanmean(rho_E))


def matrices(
    artifact: ArtifactReader, target: str, scores: Mapping[str, Path], others: Sequence[ArtifactReader]
) -> dict[str, list[F64]]:
    """What is transformed and added up, by the name of the method: standard deviation 1 a unit."""
    columns = artifact.unit_columns(target)
    kernels = {name: _scaled(_read(artifact, name, columns)) for name in ("token", "input")}
    kernel_sets = {"token": [kernels["token"]], "input": [kernels["input"]], "token+input": list(kernels.values())}
    kernel_sets["pooled"] = [_scaled(_read(artifact, "pooled", columns))]
    if others:
        artifacts = [artifact, *others]
        checked_units(artifacts, target)
        kernel_sets[f"{len(artifacts)} references"] = [
            _scaled(_read(each, name, each.unit_columns(target))) for each in artifacts for name in ("token", "input")
        ]
    for name, path in scores.items():
        whole = np.load(path, mmap_mode="r", allow_pickle=False)
        if whole.shape != (artifact.n_rows, len(artifact.units)):
            raise RunsError(f"{path}: scores {whole.shape}, expected {(artifact.n_rows, len(artifact.units))}")
        kernel_sets[name] = [_scaled(np.asarray(whole[:, columns], dtype=np.float64))]
    return kernel_sets


def checked_units(artifacts: Sequence[ArtifactReader], target: str) -> None:
    """See that artifacts have the same rows, and the same units of a target.

    Raises:
        RunsError: they have not.
    """
    first = artifacts[0]
    for artifact in artifacts:
        corpora = {a.manifest.fingerprints.get("corpus") for a in (first, artifact)}
        ids = [a.units.column("unit_id").take(a.unit_columns(target)).to_pylist() for a in (first, artifact)]
        if len(corpora) > 1 or ids[0] != ids[1]:
            raise RunsError(f"{artifact.path}: rows or units of {target} are not those of {first.path}")


def _read(artifact: ArtifactReader, kernel: str, columns: NDArray[np.int64]) -> F64:
    blocks = artifact.array_blocks(artifact.relevance_name(KERNEL_OF.get(kernel, kernel)), columns=columns)
    return np.concatenate([block.astype(np.float64) for _, block in blocks])


def _scaled(values_NE: F64) -> F64:
    return values_NE / values_NE.std(axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--runs", type=Path, required=True, help="A development environment.")
    parser.add_argument("--targets", required=True, help="Development targets, separated by commas.")
    parser.add_argument("--scores", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--beside", type=Path, action="append", default=[], help="Artifact by another reference model.")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    artifact, environment = ArtifactReader.open(args.artifact), RetrainedRuns.open(args.runs)
    development = Development.from_runs(
        environment, artifact, targets=args.targets.split(",")
    )  # refuses what is held out
    scored = development.predictor
    mean_BN = np.concatenate([block.weights_BN.toarray() for block in scored.blocks])
    mean_BN /= mean_BN.sum(axis=1, keepdims=True)
    mine = {name: known for known, name in scored.run_targets.items()}
    scores = {name: Path(path) for name, _, path in (text.partition("=") for text in args.scores)}
    others = [ArtifactReader.open(path) for path in args.beside]
    table: dict[str, dict[str, dict[str, float]]] = {}
    for target in development.targets:
        realized_BE = environment.utilities().select(target).values_BSE.mean(axis=1)
        for method, parts in matrices(artifact, mine[target], scores, others).items():
            for name, transform in TRANSFORMS.items():
                predicted_BE = mean_BN @ np.sum([_scaled(transform(part)) for part in parts], axis=0)
                table.setdefault(method, {}).setdefault(name, {})[target] = mean_lds(predicted_BE, realized_BE)
    for method, lines in table.items():
        for name, by_target in lines.items():
            by_target["mean"] = float(np.mean(list(by_target.values())))
            print(f"{method:12s} {name:18s} {by_target['mean']:.3f}")
    write_atomically(
        args.out, (json.dumps({"environment": environment.name, "mean_lds": table}, indent=1) + "\n").encode()
    )


if __name__ == "__main__":
    main()
