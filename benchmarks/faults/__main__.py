"""Count faults: each is one child process, or one call, and one check.

The numbers of each kind, and every fault that was not mended, are written as JSON after each fault, so that the harness
itself may be killed: the same command goes on after the last fault in it. What is drawn for a fault follows
from the seed and its number.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from traceback import format_exception_only
from typing import Any

from benchmarks.faults import accidents, attacks
from benchmarks.faults.bench import Bench, FaultError, failing_disk_at_hand, prepare
from grasp.errors import GraspError
from grasp.files import write_atomically

KINDS: dict[str, tuple[Callable[[Bench], None], int]] = {  # and how often of 50
    "kill build": (accidents.kill_build, 4),
    "kill retrain": (accidents.kill_retrain, 3),
    "kill writer": (accidents.kill_writer, 4),
    "full disk": (accidents.full_disk, 3),
    "failing disk": (accidents.failing_disk, 4),
    "flip": (accidents.flip, 4),
    "flip, then read": (accidents.flip_read, 8),
    "cut": (accidents.cut, 2),
    "slow read": (accidents.slow_read, 1),
    "failing read": (accidents.failing_read, 1),
    "hostile manifest": (attacks.hostile_manifest, 5),
    "hostile scorer": (attacks.hostile_scorer, 2),
    "hostile runs": (attacks.hostile_runs, 3),
    "hostile name": (attacks.hostile_name, 2),
    "output on input": (attacks.output_on_input, 4),
}
RARE: dict[str, tuple[Callable[[Bench], None], int]] = {
    "ray": (accidents.kill_worker, 2),
    "tmpfs": (accidents.full_tmpfs, 2),
}
BUGS = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError, RuntimeError, MemoryError)


def load_report(out: Path, of: dict[str, Any], kinds: Iterable[str]) -> dict[str, Any]:
    """Load the report at --out if it has the same seed and kinds, else return an empty one."""
    if out.exists():
        report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
        if of.items() <= report.items():
            return report
        sys.exit(f"faults: {out} counts faults of another run; delete it, or name another file with --out")
    empty = {kind: {"faults": 0, "mended": 0} for kind in kinds}
    return {**of, "faults": 0, "mended": 0, "kinds": empty, "failures": []}


def count(
    report: dict[str, Any], kinds: dict[str, tuple[Callable[[Bench], None], int]], faults: int, out: Path
) -> None:
    """Go on counting up to `faults`."""
    wheel = [kind for kind, (_, often) in kinds.items() for _ in range(often)]
    random.Random(report["seed"]).shuffle(wheel)
    with tempfile.TemporaryDirectory() as directory, failing_disk_at_hand(Path(directory)):
        bench = prepare(Path(directory) / "world", report["seed"])
        for i in range(report["faults"], faults):
            kind = wheel[i % len(wheel)]
            bench.draw.seed(f"{report['seed']} {i}")
            report["kinds"][kind]["faults"] += 1
            try:
                kinds[kind][0](bench)
                report["kinds"][kind]["mended"] += 1
            except (FaultError, GraspError, subprocess.TimeoutExpired, *BUGS) as err:
                message = " ".join(format_exception_only(err)).strip()
                report["failures"].append({"fault": i, "kind": kind, "what": message})
            report |= {"faults": i + 1, "mended": i + 1 - len(report["failures"])}
            out.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(out, (json.dumps(report, indent=1) + "\n").encode())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{accidents.__doc__}\n{attacks.__doc__}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="kinds, separated by commas; those with a comma in their name by its beginning")
    parser.add_argument("--ray", action="store_true", help="kill workers of the Ray engine as well")
    parser.add_argument("--tmpfs", action="store_true", help="fill a small tmpfs as well; needs the right to mount")
    parser.add_argument("--out", type=Path, required=True, help="JSON of the counts")
    args = parser.parse_args()
    kinds = KINDS | {kind: attack for kind, attack in RARE.items() if getattr(args, kind)}
    if args.only:
        chosen = tuple(part.strip() for part in args.only.split(","))
        kinds = {kind: known for kind, known in kinds.items() if kind.startswith(chosen)}
    report = load_report(args.out, {"seed": args.seed, "ray": args.ray, "tmpfs": args.tmpfs, "only": args.only}, kinds)
    if report["faults"] < args.faults:
        count(report, kinds, args.faults, args.out)
    failures = len(report["failures"])
    print(f"{report['mended']} of {report['faults']} faults did no harm; see {args.out}")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
