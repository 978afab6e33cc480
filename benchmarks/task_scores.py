"""CPU seconds and peak memory of estimating the scores of five tasks for a million rows.

    OMP_NUM_THREADS=1 python benchmarks/task_scores.py --rows 1_000_000 --tokens 128 --out bench-out/task_scores.json

Relevance is read from a file of random float16 numbers, the type of an artifact's arrays; the file is written first and
kept beside the result: run the command twice, since its pages count as memory while it is written. Tokens are drawn
block by block; rows have two labels, of 24 and 100 values. `cpu_seconds` is the CPU time of the process without drawing
tokens, which an artifact reads from disk instead.
Shape letters: N rows, E units.
"""

import argparse
import json
import resource
import time
from functools import partial
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from grasp.arrays import I32, I64, Blocks
from grasp.moments import StreamingMoments
from grasp.predict.task_scores import Texts, fit_prior
from grasp.seeds import stream

KERNELS = ("output_layer", "embedding", "knn")
BLOCK_ROWS, VOCABULARY = 16_384, 50_000


def relevance_file(path: Path, n_rows: int, n_units: int) -> None:
    """Write random relevance of one kernel; all kernels read the same file."""
    if path.exists() and np.load(path, mmap_mode="r").shape == (n_rows, n_units):
        return
    values_NE = open_memmap(path, mode="w+", dtype=np.float16, shape=(n_rows, n_units))
    for start in range(0, n_rows, BLOCK_ROWS):
        rng = stream(0, "relevance", start)
        values_NE[start : start + BLOCK_ROWS] = rng.standard_normal(values_NE[start : start + BLOCK_ROWS].shape, "f4")
    values_NE.flush()


def blocks(path: Path) -> Blocks:
    """Yield blocks of rows like `ArtifactReader.array_blocks`."""
    n_rows = len(np.load(path, mmap_mode="r"))
    for start in range(0, n_rows, BLOCK_ROWS):
        values_NE = np.load(path, mmap_mode="r")  # mapped anew for each block, so that pages do not count as memory
        yield start, values_NE[start : start + BLOCK_ROWS].astype(np.float32)


class DrawnTokens:
    """Rows of random tokens with a skewed distribution; measures its own CPU seconds."""

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens, self.cpu_seconds = n_tokens, 0.0

    def read(self, row_index: I64) -> tuple[I32, I64]:
        """Return flat token ids and offsets of rows."""
        before, rng = time.process_time(), stream(0, "tokens", int(row_index[0]), len(row_index))
        ids = (VOCABULARY * rng.random(len(row_index) * self.n_tokens, "f4") ** 3).astype(np.int32)
        self.cpu_seconds += time.process_time() - before
        return ids, np.arange(len(row_index) + 1) * self.n_tokens


def main() -> None:
    """Measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--questions", type=int, default=64, help="Of each task.")
    parser.add_argument("--tokens", type=int, default=128, help="Of each row.")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    path, counts_T = arguments.out.with_suffix(".npy"), np.full(arguments.tasks, arguments.questions)
    relevance_file(path, arguments.rows, int(counts_T.sum()))
    tokens = DrawnTokens(arguments.tokens)
    texts = Texts(np.full(arguments.rows, arguments.tokens), tokens.read)
    before, began = time.process_time(), time.perf_counter()
    coefficients = {name: StreamingMoments.from_blocks(blocks(path)).mean_std.inverse_std_C for name in KERNELS}
    moments = time.process_time() - before
    names = [f"row-{i}" for i in range(arguments.rows)]
    read = {name: partial(blocks, path) for name in KERNELS}
    labels = [stream(0, "labels", count).integers(count, size=arguments.rows, dtype=np.int32) for count in (24, 100)]
    prior = fit_prior(read, coefficients, counts_T, names, np.arange(arguments.rows), texts, labels)
    result = {
        "rows": arguments.rows,
        "tasks": arguments.tasks,
        "questions": arguments.questions,
        "tokens": arguments.tokens,
        "cpu_seconds": round(time.process_time() - before - tokens.cpu_seconds, 1),
        "of_these_moments_of_questions": round(moments, 1),
        "drawing_tokens_cpu_seconds": round(tokens.cpu_seconds, 1),
        "wall_seconds": round(time.perf_counter() - began, 1),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "rho": prior.rho_T.tolist(),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
