"""What estimating tasks costs beside reading relevance: CPU seconds and peak memory for a million rows and five tasks.

    python benchmarks/task_scores.py --rows 1_000_000 --tokens 128 --out bench-out/task_scores.json

Relevance lies in a file of random float16 numbers, as an artifact's arrays do; tokens are drawn by blocks. The file is
written first and kept beside the result. Seconds are of the process, with one thread: OMP_NUM_THREADS=1.
Shape letters: N rows, E units.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap

from grasp.arrays import I32, I64, Blocks
from grasp.predict.predictor import RowMoments
from grasp.predict.task_scores import fit_prior
from grasp.seeds import stream

KERNELS = ("output_layer", "embedding", "knn")
BLOCK_ROWS, VOCABULARY = 16_384, 50_000


def relevance_file(path: Path, n_rows: int, n_units: int) -> None:
    """Random relevance of one kernel, which the others share."""
    if path.exists() and np.load(path, mmap_mode="r").shape == (n_rows, n_units):
        return
    values_NE = open_memmap(path, mode="w+", dtype=np.float16, shape=(n_rows, n_units))
    for start in range(0, n_rows, BLOCK_ROWS):
        rng = stream(0, "relevance", start)
        values_NE[start : start + BLOCK_ROWS] = rng.standard_normal(values_NE[start : start + BLOCK_ROWS].shape, "f4")
    values_NE.flush()


def blocks(path: Path) -> Blocks:
    """As `ArtifactReader.array_blocks`."""
    values_NE = np.load(path, mmap_mode="r")
    for start in range(0, len(values_NE), BLOCK_ROWS):
        yield start, values_NE[start : start + BLOCK_ROWS].astype(np.float32)


def drawn_tokens(n_tokens: int) -> Callable[[I64], tuple[I32, I64]]:
    """Rows of random tokens, common ones more often."""

    def texts(row_index: I64) -> tuple[I32, I64]:
        rng = stream(0, "tokens", int(row_index[0]), len(row_index))
        ids = (VOCABULARY * rng.random(len(row_index) * n_tokens, "f4") ** 3).astype(np.int32)
        return ids, np.arange(len(row_index) + 1) * n_tokens

    return texts


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
    before, began = time.process_time(), time.perf_counter()
    spread = {name: RowMoments.from_blocks(blocks(path)).spread for name in KERNELS}
    moments = time.process_time() - before
    coefficients = {name: kernel.inverse_E for name, kernel in spread.items()}
    names = [f"row-{i}" for i in range(arguments.rows)]
    read = {name: partial(blocks, path) for name in KERNELS}
    prior = fit_prior(read, coefficients, counts_T, names, np.arange(arguments.rows), drawn_tokens(arguments.tokens))
    result = {
        "rows": arguments.rows,
        "tasks": arguments.tasks,
        "questions": arguments.questions,
        "tokens": arguments.tokens,
        "cpu_seconds": round(time.process_time() - before, 1),
        "of_these_moments_of_questions": round(moments, 1),
        "wall_seconds": round(time.perf_counter() - began, 1),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "rho": prior.rho_T.tolist(),
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
