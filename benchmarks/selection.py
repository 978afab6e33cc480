"""`grasp select` on a large synthetic pool: seconds and peak memory of the whole command, and what becomes of copies.

    python benchmarks/selection.py --rows 1_000_000 --budget 20% --diversity 0 4 --out bench-out/selection.json

The pool has clusters of unlike size and worth; a tenth of it are copies of one row that helps. The artifact is written
first (and kept beside the result, for the next run); each selection is then a process of its own, so that its peak is
not that of the writing. Without diversity every copy is worth taking; the more of it, the fewer are taken.
Shape letters: N rows of a shard, C clusters.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grasp.artifact.writer import ArraySpec, ArtifactWriter, lock_artifact

CLUSTERS, WIDTH, SHARD_ROWS = 200, 64, 16_384
UNITS = {"unit_id": ["a", "b", "c", "d"], "target": ["sciq", "sciq", "boolq", "boolq"]}
COPIES = 0.1
COPY, COPY_WORTH = "a copy", 1.5


def write_pool(path: Path, n_rows: int) -> None:
    """An artifact of `n_rows` rows, shard by shard."""
    rng = np.random.default_rng(0)
    centres_CD = rng.standard_normal((CLUSTERS, 2 * WIDTH)) * 0.7
    worth_CE = 0.5 * rng.standard_normal((CLUSTERS, len(UNITS["unit_id"])))
    sketch = ArraySpec(WIDTH, "1", "none")
    specs = {"hidden_sketch": sketch, "residual_sketch": sketch}
    specs["relevance_output_layer"] = ArraySpec(worth_CE.shape[1], "1", "positive: lowers the loss")
    with lock_artifact(path):
        writer = ArtifactWriter.open(
            path, identity={}, n_rows=n_rows, shard_rows=SHARD_ROWS, arrays=specs, dtype="float16"
        )
        for k in range(writer.grid.n_shards):
            start, stop = writer.grid.bounds(k)
            arrays, rows = shard(rng, centres_CD, worth_CE, start, stop)
            writer.write_shard(k, arrays, rows, {})
        writer.finish(manifest={"settings": {"features": {}}}, moments={}, units=pa.table(UNITS))


def shard(
    rng: np.random.Generator, centres_CD: np.ndarray, worth_CE: np.ndarray, start: int, stop: int
) -> tuple[dict[str, np.ndarray], pa.Table]:
    """Rows around the centre of their cluster, and copies of one."""
    n_rows = stop - start
    cluster_N = rng.zipf(1.3, n_rows) % CLUSTERS
    sketch_ND = centres_CD[cluster_N] + 0.7 * rng.standard_normal((n_rows, 2 * WIDTH))
    relevance_NE = worth_CE[cluster_N] + rng.standard_normal((n_rows, worth_CE.shape[1]))
    copy_N = rng.random(n_rows) < COPIES
    sketch_ND[copy_N], relevance_NE[copy_N] = centres_CD[0], COPY_WORTH
    arrays = {
        "hidden_sketch": sketch_ND[:, :WIDTH] / np.sqrt(WIDTH),
        "residual_sketch": sketch_ND[:, WIDTH:] / np.sqrt(WIDTH) + 0.05,
        "relevance_output_layer": relevance_NE,
    }
    rows = pa.table(
        {
            "row_id": [f"r{i}" for i in range(start, stop)],
            "doc_id": [f"d{i}" for i in range(start, stop)],
            "loss": np.ones(n_rows, dtype=np.float32),
            "snippet": [""] * n_rows,
            "n_tokens": pa.array(rng.integers(10, 512, n_rows), pa.int32()),
            "topic": [COPY if copied else f"t{c}" for c, copied in zip(cluster_N, copy_N, strict=True)],
        }
    )
    return {name: array.astype(np.float32) for name, array in arrays.items()}, rows


def measured(art: Path, budget: str, diversity: float, out: Path) -> dict[str, Any]:
    """One `grasp select`: wall seconds, seconds of processor, peak of resident memory, and what it chose."""
    arguments = ["select", str(art), "--budget", budget, "--target", "sciq=2,boolq=1", "--by", "topic"]
    arguments += ["--diversity", str(diversity), "--out", str(out)]
    began = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "grasp", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"grasp {' '.join(arguments)}: exit code {process.returncode}")
    summary = json.loads(out.with_suffix(".json").read_text())
    (copies,) = (line for line in summary["labels"] if line["value"] == COPY)
    return {
        "diversity": diversity,
        "seconds": time.perf_counter() - began,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "peak_mb": usage.ru_maxrss / 1e3,
        "rows": pq.read_metadata(out).num_rows,
        "value": summary["value"],
        "bound": summary["bound"],
        "copies": copies["pool"],
        "copies_taken": copies["taken"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--diversity", type=float, nargs="+", default=[0.0, 4.0])
    parser.add_argument("--out", type=Path, default=Path("bench-out/selection.json"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    art = args.out.with_name(f"selection-{args.rows}")
    if not art.exists():
        write_pool(art, args.rows)
    runs = []
    for diversity in args.diversity:
        run = measured(art, args.budget, diversity, args.out.with_suffix(".parquet"))
        runs.append(run)
        print(
            f"diversity {diversity}: {run['rows']:,} of {args.rows:,} rows in {run['seconds']:.1f} s "
            f"({run['cpu_seconds']:.1f} s of processor), peak {run['peak_mb']:,.0f} MB; value {run['value']:.1f}, "
            f"bound {run['bound']:.1f}; {run['copies_taken']:,} of {run['copies']:,} copies taken",
            flush=True,
        )
    args.out.write_text(json.dumps({"rows": args.rows, "budget": args.budget, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
