"""What float16 storage costs in fidelity: the task rho of an artifact, and of the same with every number rounded again.

    python benchmarks/rounding.py bench-out/cc-completion --runs experiments/environments/cc-format

Rounding to float16 moves a number by at most 2^-11 of itself. Every number that is read is moved by as much again, at
random; what that changes, several times over, is what the rounding of the stored numbers has changed already.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from grasp.api.evaluate import compare
from grasp.artifact.reader import ArtifactReader
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.predict.scoring_rule import ScoringProtocol, load_protocol
from grasp.runs.retrained import RetrainedRuns

RELATIVE = 2.0**-11


class RoundedAgain(ArtifactReader):
    """Every number moved by as much as float16 rounding may have moved it."""

    draw = np.random.default_rng(0)

    def array_blocks(self, name: str, **how: Any) -> Any:
        for start, block in super().array_blocks(name, **how):
            yield start, block * (1 + self.draw.uniform(-RELATIVE, RELATIVE, block.shape)).astype(np.float32)


def fidelity(
    artifact: ArtifactReader, environment: RetrainedRuns, protocols: dict[str, ScoringProtocol]
) -> dict[tuple[str, str], float]:
    """Task rho of every method and target."""
    lines = compare(artifact, environment, protocols, resamples=10).records()
    return {(line["method"], line["target"]): line["task_rho"] for line in lines if line["task_rho"] is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--protocol", type=Path, help="also evaluate this scoring rule, besides the built-in one")
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    protocols = {"default": DEFAULT_PROTOCOL} | ({"selected": load_protocol(args.protocol)} if args.protocol else {})
    environment = RetrainedRuns.open(args.environment)
    stored = fidelity(ArtifactReader.open(args.artifact), environment, protocols)
    rounded = [fidelity(RoundedAgain.open(args.artifact), environment, protocols) for _ in range(args.draws)]
    changes = {key: [abs(draw[key] - rho) for draw in rounded] for key, rho in stored.items()}
    average = [change for (_, target), differences in changes.items() if target == "average" for change in differences]
    single = [change for (_, target), differences in changes.items() if target != "average" for change in differences]
    summary = {"draws": args.draws, "methods": len({method for method, _ in stored})} | {
        f"{name}_{what}": float(how(values))
        for name, values in (("average", average), ("target", single))
        for what, how in (("mean", np.mean), ("largest", np.max))
    }
    print(
        "\n".join(f"{name:18} {value:.5f}" if "_" in name else f"{name:18} {value}" for name, value in summary.items())
    )
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
