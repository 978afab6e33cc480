"""What changed when one scale took the place of a drawn family: two results of `grasp evaluate` side by side.

grasp evaluate ART --runs experiments/environments/cc-format --json new.json
python -m experiments.scale.compare cc-format=old.json,new.json ... --out experiments/scale/result.json
"""

import argparse
import json
from pathlib import Path
from typing import Any

METRICS = ("task_rho", "mean_lds", "mean_lds_low", "mean_lds_high", "positive")


def averages(path: Path) -> dict[str, dict[str, Any]]:
    """By method: its metrics over all targets."""
    lines = json.loads(path.read_text(encoding="utf-8"))["results"]
    return {line["method"]: {name: line[name] for name in METRICS} for line in lines if line["target"] == "average"}


def compare(old: Path, new: Path) -> dict[str, Any]:
    """Methods that are in both results."""
    before, after = averages(old), averages(new)
    return {name: {"old": before[name], "new": after[name]} for name in before if name in after}


def main() -> None:
    """Read pairs of results, write what changed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="+", metavar="NAME=OLD,NEW")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result = {}
    for pair in args.pairs:
        name, _, files = pair.partition("=")
        result[name] = compare(*(Path(file) for file in files.split(",")))
    args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
