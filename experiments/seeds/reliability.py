"""What averaging more seeds does to the agreement with one and the same prediction.

    python -m experiments.seeds.reliability bench-out/cc-completion experiments/environments/cc-seeds \
        --out experiments/seeds/reliability.json

The masks and the prediction (the shipped protocol's) stay; the realized utilities are means over every choice of k of
the environment's seeds. Where LDS grows with k, what is missing to 1 is in part the noise of the retraining.
Shape letters: B subsets, S seeds, E units.
"""

import argparse
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lds_main.explain import Compared, compared, write_json
from experiments.mistakes import in_one_line
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.runs.metrics import spearman
from grasp.runs.retrained import RetrainedRuns


def run(artifact: ArtifactReader, environment: RetrainedRuns) -> dict[str, Any]:
    """By number of seeds and target: mean LDS, positive fraction and task rho, averaged over the choices of seeds."""
    protocol = DEFAULT_PROTOCOL
    targets = list(compared(artifact, environment, protocol))
    results: dict[str, dict[str, dict[str, float]]] = {}
    for k in range(1, targets[0].values_BSE.shape[1] + 1):
        means = {target.target: _mean_over_choices(target, k) for target in targets}
        means["average"] = np.mean(list(means.values()), axis=0)
        results[str(k)] = {
            name: dict(zip(("mean_lds", "positive", "task_rho"), map(float, row), strict=True))
            for name, row in means.items()
        }
    return {"environment": environment.name, "protocol": protocol.name, "by_number_of_seeds": results}


def _mean_over_choices(compared: Compared, k: int) -> F64:
    figures = []
    for chosen in combinations(range(compared.values_BSE.shape[1]), k):
        realized_BE = compared.values_BSE[:, list(chosen)].mean(axis=1)
        rho_E = spearman(compared.predicted_BE, realized_BE)
        task = spearman(compared.predicted_B[:, None], realized_BE.mean(axis=1, keepdims=True))[0]
        figures.append((rho_E.mean(), (rho_E > 0).mean(), task))
    return np.mean(figures, axis=0)


@in_one_line()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = run(ArtifactReader.open(args.artifact), RetrainedRuns.open(args.environment))
    write_json(results, args.out)


if __name__ == "__main__":
    main()
