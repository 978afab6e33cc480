"""`grasp detect` on a large synthetic artifact: seconds and peak memory of the whole command, and what it finds.

    python benchmarks/detection.py --rows 1_000_000 --units 128 --out bench-out/detection.json

Rows, which stand for images, lie round the centres of clusters, and so do units; a row's class is its cluster's, but
for a planted hundredth of the rows, which have another one and lower relevance. The artifact is written first, and kept
beside the result for the next run; each command is a process of its own, so that its peak is not that of the writing.
Shape letters: N rows of a shard, C clusters, E units.
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

from grasp.artifact.writer import ArraySpec, ArtifactWriter, lock_artifact

CLUSTERS, TOPICS, WIDTH, SHARD_ROWS = 400, 40, 64, 16_384
PLANTED = 0.01
QUERIES = {"with labels": "planted"}
DETECT = """import sys
import numpy as np
import grasp
from grasp.vision.detect import detect
from experiments.detection import evaluate_scores
artifact = grasp.open(sys.argv[1]).files
suspects = detect(artifact, "trusted", top=0)
batches = artifact.row_batches([sys.argv[2]])
planted_N = np.concatenate([rows.column(0).to_numpy(zero_copy_only=False) for rows in batches])
print(*((name, evaluate_scores(score_N, planted_N)) for name, score_N in suspects.scores.items()), suspects, sep="\\n")
suspects.write(sys.argv[3])
"""


def write_artifact(path: Path, n_rows: int, n_units: int) -> None:
    """An artifact of `n_rows` rows, shard by shard."""
    rng = np.random.default_rng(0)
    centres_CD = 0.7 * rng.standard_normal((CLUSTERS, WIDTH))
    worth_CE = 0.5 * rng.standard_normal((CLUSTERS, n_units))
    specs = {
        "hidden_sketch": ArraySpec(WIDTH, "1", "none"),
        "relevance_output_layer": ArraySpec(n_units, "1", "positive: lowers the loss"),
    }
    with lock_artifact(path):
        writer = ArtifactWriter.open(
            path, identity={}, n_rows=n_rows, shard_rows=SHARD_ROWS, arrays=specs, dtype="float16"
        )
        for k in range(writer.grid.n_shards):
            start, stop = writer.grid.bounds(k)
            arrays, rows = shard(rng, centres_CD, worth_CE, start, stop)
            writer.write_shard(k, arrays, rows, {})
        texts = [f"image {e}, 1 x 1 pixels" for e in range(n_units)]
        units = {"unit_id": texts, "target": ["trusted"] * n_units, "prompt": texts, "completion": ["t0"] * n_units}
        writer.finish(
            manifest={"settings": {"features": {}}, "details": {"reader": "classifier"}},
            moments={},
            units=pa.table(units),
        )


def shard(
    rng: np.random.Generator, centres_CD: np.ndarray, worth_CE: np.ndarray, start: int, stop: int
) -> tuple[dict[str, np.ndarray], pa.Table]:
    """Rows round the centre of their cluster; a hundredth with another label, and less relevance."""
    n_rows = stop - start
    cluster_N = rng.zipf(1.3, n_rows) % CLUSTERS
    planted_N = rng.random(n_rows) < PLANTED
    topic_N = np.where(planted_N, cluster_N + rng.integers(1, TOPICS, n_rows), cluster_N) % TOPICS
    relevance_NE = worth_CE[cluster_N] + rng.standard_normal((n_rows, worth_CE.shape[1]))
    relevance_NE[planted_N] -= 0.2
    arrays = {
        "hidden_sketch": centres_CD[cluster_N] + 0.7 * rng.standard_normal((n_rows, WIDTH)),
        "relevance_output_layer": relevance_NE,
    }
    rows = pa.table(
        {
            "row_id": [f"r{i}" for i in range(start, stop)],
            "doc_id": [f"d{i}" for i in range(start, stop)],
            "loss": np.ones(n_rows, dtype=np.float32),
            "snippet": [f"image {i}" for i in range(start, stop)],
            "n_tokens": pa.array(np.full(n_rows, 100), pa.int32()),
            "image_class": [f"t{t}" for t in topic_N],
            "image_hash": [f"h{i}" for i in range(start, stop)],
            "planted": planted_N,
        }
    )
    return {name: array.astype(np.float32) for name, array in arrays.items()}, rows


def measured(art: Path, truth: str, out: Path) -> dict[str, Any]:
    """One `detect`: wall seconds, seconds of processor, peak of resident memory, and what it said."""
    command = [sys.executable, "-c", DETECT, str(art), truth, str(out)]
    log = out.with_suffix(".txt")
    began = time.perf_counter()
    with (
        log.open("w") as text,
        subprocess.Popen(command, stdout=text, stderr=subprocess.DEVNULL) as process,
    ):
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"detect {art}: exit code {process.returncode}")
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_mb": round(usage.ru_maxrss / 1e3),
        "said": log.read_text().splitlines(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--units", type=int, default=128)
    parser.add_argument("--only", choices=list(QUERIES), action="append", help="Of the commands; none: all.")
    parser.add_argument("--out", type=Path, default=Path("bench-out/detection.json"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    art = args.out.with_name(f"detection-{args.rows}-{args.units}")
    if not art.exists():
        write_artifact(art, args.rows, args.units)
    runs = {}
    for name in args.only or QUERIES:
        runs[name] = measured(art, QUERIES[name], args.out.with_suffix(".parquet"))
        print(name, {key: value for key, value in runs[name].items() if key != "said"}, *runs[name]["said"], sep="\n  ")
    args.out.write_text(json.dumps({"rows": args.rows, "units": args.units, "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
