"""What averaging more seeds does to the agreement with one and the same prediction.

    python experiments/seeds/reliability.py bench-out/cc-completion experiments/environments/cc-seeds \
        --out experiments/seeds/reliability.json

The masks and the prediction (the shipped protocol's) stay; the realized utilities are means over every choice of k of
the environment's seeds. Where LDS grows with k, what is missing to 1 is in part the noise of the retraining.
Shape letters: B subsets, S seeds, E units.
"""

import argparse
import json
import sys
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from grasp.artifact.reader import Artifact
from grasp.errors import GraspError
from grasp.fidelity.environment import Environment
from grasp.fidelity.files import write_whole
from grasp.fidelity.metrics import spearman
from grasp.protocol.development import Scored
from grasp.protocol.scoring import default_protocol


def run(artifact: Artifact, environment: Environment) -> dict[str, Any]:
    """By number of seeds and target: mean LDS, positive fraction and task rho, averaged over the choices of seeds."""
    scored = Scored.of(environment, artifact)
    names = list(scored.renamed.values())
    protocol = default_protocol()
    (predicted,) = scored.predict({protocol.name: protocol}, names)
    utilities = environment.utilities()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for k in range(1, len(utilities.seeds) + 1):
        figures: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
        for chosen in combinations(range(len(utilities.seeds)), k):
            for name in names:
                own = utilities.of(name)
                unit_BE, task_B = predicted.aligned(own.subset_ids, name, own.unit_ids)
                assert unit_BE is not None
                assert task_B is not None
                realized_BE = own.values_BSE[:, list(chosen)].mean(axis=1)
                rho_E = spearman(unit_BE, realized_BE)
                task = float(spearman(task_B[:, None], realized_BE.mean(axis=1, keepdims=True))[0])
                figures[name].append((float(np.mean(rho_E)), float(np.mean(rho_E > 0)), task))
        means = {name: np.mean(values, axis=0) for name, values in figures.items()}
        means["average"] = np.mean(list(means.values()), axis=0)
        found[str(k)] = {
            name: dict(zip(("mean_lds", "positive", "task_rho"), map(float, row), strict=True))
            for name, row in means.items()
        }
    return {"environment": environment.name, "protocol": protocol.name, "by_number_of_seeds": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        found = run(Artifact.open(args.artifact), Environment.open(args.environment))
    except GraspError as err:
        sys.exit(f"error: {err}")
    text = json.dumps(found, indent=1, allow_nan=False) + "\n"
    print(text, end="")
    if args.out is not None:
        write_whole(args.out, text.encode())


if __name__ == "__main__":
    main()
