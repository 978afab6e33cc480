"""What a newcomer waits for: the demo, and the build of its small model with one thread and with as many as it takes.

    python benchmarks/demo.py --out bench-out/demo.json            # some minutes
    python benchmarks/demo.py --demo demo-out --skip-demo          # only the builds, of a demo that is there

The model has 0.36 M parameters and a vocabulary of 1,536; 9,468 rows of at most 128 tokens, 640 units. Every command is
a process of its own. CPU seconds are of all threads, user and system: on a machine that others use, wall seconds say
more about the others. Aims: demo 60 s on an idle machine, build 40 CPU s with one thread, and default threads at most
1.3 times as many.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def measured(arguments: list[str], threads: int | None = None) -> dict[str, float]:
    """Wall and CPU seconds of a command of ours; threads None: as many as it takes by itself."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "grasp", *arguments], env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"wall_s": round(time.perf_counter() - begun, 1), "cpu_s": round(cpu, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, help="Directory of the demo; none: a temporary one.")
    parser.add_argument("--skip-demo", action="store_true", help="Measure the builds of a demo that is there.")
    parser.add_argument("--limit", type=int, help="Build of the first passages alone.")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers.")
    args = parser.parse_args()
    result: dict[str, Any] = {"load_before": os.getloadavg()[0], "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as place:
        demo = args.demo or Path(place) / "demo"
        if not args.skip_demo:
            result["demo"] = measured(["demo", "--out", str(demo)])
            print("demo", result["demo"], flush=True)
        for name, threads in (("build, one thread", 1), ("build, default threads", None)):
            out = Path(place) / "artifact"
            build = ["build", "--config", str(demo / "artifact" / "run.yaml"), "--out", str(out)]
            build += [] if args.limit is None else ["--limit", str(args.limit)]
            result[name] = measured(build, threads)
            shutil.rmtree(out)
            print(name, result[name], flush=True)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
