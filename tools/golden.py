"""Write the numbers of the demo to a file, or compare them with a file that was written before a change.

    python tools/golden.py --write before.json      # before a change of structure
    python tools/golden.py --compare before.json    # after it: exit 1 if a number differs

Numbers: of each array of the demo's artifact its shape, mean and root mean square, and of each stored environment whose
models were trained on the demo's rows the rank correlation of every target with the default protocol. No model is
retrained, except for the reference model of the demo (`--demo`: a directory with a finished demo, which is reused).

Sums and correlations are compared, not checksums of bytes: CPUs and versions of torch round differently, and the demo
trains its reference model. Two runs on one machine agree to TOLERANCE; across machines pass a larger `--tolerance`.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))  # this checkout, from any directory

import grasp  # noqa: E402
from grasp.demo.demo import BUNDLED_RUNS, make_demo  # noqa: E402
from grasp.errors import GraspError  # noqa: E402
from grasp.predict.default_protocol import DEFAULT_PROTOCOL  # noqa: E402

ENVIRONMENTS = (BUNDLED_RUNS, *sorted((ROOT / "experiments" / "environments").glob("demo-*/")))
TOLERANCE = 1e-6  # of a number relative to its size, or of a correlation


def numbers_of(demo: Path) -> dict[str, Any]:
    """Return the numbers of a demo, which is made in this directory unless it is there."""
    artifact = grasp.open(make_demo(demo).artifact_path)
    reader = artifact.files
    arrays = {}
    for name in sorted(reader.array_names):
        value = np.concatenate([block for _, block in reader.array_blocks(name)]).astype(np.float64)
        arrays[name] = {"shape": list(value.shape), "mean": value.mean(), "rms": np.sqrt((value**2).mean())}
    return {"arrays": arrays, "task_rho": {path.name: task_rho(artifact, path) for path in ENVIRONMENTS}}


def task_rho(artifact: Any, environment: Path) -> dict[str, float] | str:
    """Return the rank correlation of each target, or the type of the error if the environment does not fit."""
    try:
        records = grasp.evaluate(artifact, environment).to_arrow().to_pylist()
    except GraspError as err:
        return type(err).__name__  # the message has paths
    return {record["target"]: record["task_rho"] for record in records if record["method"] == DEFAULT_PROTOCOL.name}


def differences(actual: Any, expected: Any, tolerance: float, where: str = "") -> list[str]:
    """Return a line for each number or text that differs."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        names = [*expected, *(name for name in actual if name not in expected)]
        pairs = [(f"{where}/{name}", actual.get(name), expected.get(name)) for name in names]
        return [line for path, *pair in pairs for line in differences(*pair, tolerance, path)]
    if isinstance(expected, float) and isinstance(actual, float):
        if abs(actual - expected) <= tolerance * max(1.0, abs(expected)):
            return []
    elif actual == expected:
        return []
    return [f"{where}: {actual}, expected {expected}"]


def main() -> None:
    """Compute the numbers, and write or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE", help="Write the numbers to a JSON file.")
    action.add_argument("--compare", type=Path, metavar="FILE", help="Exit with 1 if a number differs from the file.")
    parser.add_argument("--demo", type=Path, help="Directory of the demo, kept. Default: a temporary one.")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="Default: %(default)s.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        numbers = numbers_of(args.demo or Path(folder) / "demo")
    if args.write is not None:
        args.write.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    else:
        expected = json.loads(args.compare.read_text(encoding="utf-8"))
        if lines := differences(numbers, expected, args.tolerance):
            raise SystemExit("\n".join(lines))


if __name__ == "__main__":
    main()
