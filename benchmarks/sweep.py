"""Gather-sum of many subsets: several ways in one run, beside what the memory allows.

    python benchmarks/sweep.py --out bench-out/sweep.json

Every way is timed on the same blocks of subsets, in turns, so that a busy machine slows all of them alike; times are
given for all subsets (scaled up from the blocks), the median and the best over the rounds. The one that the package
uses (`Sweep`) is then run over all subsets. The limit is what reading every gathered number once would take at the
speed of a streaming read of memory, measured in the same run; a table that fits in the cache can beat it.

Then the other shapes, each through `RowSums`, which is what prediction calls: subsets of half the corpus as bits
(limit: a float32 product of that size), of nearly all of it, unions of slices, and the same gather-sum at 640 floats a
row, TRAK's cached width, plain and through `RowSums`.
Shape letters: B subsets, N rows, G slices, C columns.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array

from grasp.predict.weights import PackedMasks, RowSums, Weights

STREAM_BYTES = 512 << 20
PLAIN_SUBSETS = 200
TRAK_WIDTH, SLICES, FEW = 640, 100, 64


def draw_blocks(rng: np.random.Generator, args: argparse.Namespace) -> list[csr_array]:
    """A few blocks of uniform subsets; the run over all subsets takes them in turn."""
    indptr = np.arange(args.block + 1) * args.size
    blocks = []
    for _ in range(args.rounds):
        rows = np.stack([np.sort(rng.choice(args.rows, args.size, replace=False)) for _ in range(args.block)])
        weights = np.ones(args.block * args.size)
        blocks.append(csr_array((weights, rows.ravel(), indptr), shape=(args.block, args.rows)))
    return blocks


def numpy_loop(values_NC: np.ndarray, block: csr_array) -> np.ndarray:
    """The plain way: one gather and one sum a subset. Timed on a part of the block."""
    rows = block.indices.reshape(block.shape[0], -1)
    return np.stack([values_NC[chosen].sum(0) for chosen in rows[:PLAIN_SUBSETS]])


def ways(values_NC: np.ndarray) -> dict[str, Callable[[csr_array], Any]]:
    """Everything that is compared; each takes one block."""
    whole = torch.from_numpy(values_NC)

    def torch_csr(block: csr_array) -> torch.Tensor:
        crow, col = torch.from_numpy(block.indptr), torch.from_numpy(block.indices)
        weights = torch.sparse_csr_tensor(
            crow, col, torch.from_numpy(block.data.astype(np.float32)), size=block.shape, check_invariants=False
        )
        return weights @ whole

    def embedding_bag(block: csr_array) -> torch.Tensor:
        rows, starts = torch.from_numpy(block.indices), torch.from_numpy(block.indptr)
        return torch.nn.functional.embedding_bag(rows, whole, starts, mode="sum", include_last_offset=True)

    return {
        "numpy loop": lambda block: numpy_loop(values_NC, block),
        "scipy csr @ dense": lambda block: block.astype(np.float32) @ values_NC,
        "torch sparse csr": torch_csr,
        "torch embedding_bag": embedding_bag,
    }


def stream_bandwidth() -> float:
    """Bytes a second of a streaming read, best of 5."""
    data = torch.ones(STREAM_BYTES // 4)
    return STREAM_BYTES / min(timed(lambda _: data.sum(), None) for _ in range(5))


def timed(run: Callable[[Any], Any], block: Any) -> float:
    start = time.perf_counter()
    run(block)
    return time.perf_counter() - start


def compare(values_NC: np.ndarray, blocks: list[csr_array], n_subsets: int) -> dict[str, dict[str, float]]:
    """Seconds for all subsets by way: median and best over the rounds."""
    table = ways(values_NC)
    seconds: dict[str, list[float]] = {name: [] for name in table}
    for run in table.values():
        run(blocks[0])
    for block in blocks:
        for name, run in table.items():
            done = PLAIN_SUBSETS if name == "numpy loop" else block.shape[0]
            seconds[name].append(timed(run, block) * n_subsets / done)
    return {name: {"median_s": statistics.median(times), "best_s": min(times)} for name, times in seconds.items()}


def run_all(values_NC: np.ndarray, blocks: list[csr_array], n_subsets: int) -> tuple[float, float]:
    """The package's own path over all subsets: seconds, and the largest error against float64."""
    sweep = RowSums.over(values_NC)
    weights = [Weights(block) for block in blocks]
    sweep.sums(weights[0])
    start = time.perf_counter()
    for turn in range(n_subsets // blocks[0].shape[0]):
        sweep.sums(weights[turn % len(blocks)])
    seconds = time.perf_counter() - start
    exact = blocks[0] @ values_NC.astype(np.float64)
    bound = blocks[0] @ np.abs(values_NC.astype(np.float64))
    return seconds, float((np.abs(sweep.sums(weights[0]) - exact) / bound).max())


def shapes(rng: np.random.Generator, args: argparse.Namespace) -> dict[str, Weights]:
    """One block of every other shape; the numbers of rows are those of the corpus."""
    dense = rng.integers(0, 256, (args.block, -(-args.rows // 8)), dtype=np.uint8)
    dense[:, -1] &= 0xFF << (-args.rows % 8) & 0xFF
    few = np.sort(rng.integers(0, args.rows, (args.block, args.size)), axis=1)
    entries = csr_array(
        (np.ones(few.size), few.ravel(), np.arange(args.block + 1) * args.size), shape=(args.block, args.rows)
    )
    entries.sum_duplicates()
    entries.data[:] = -1.0
    share = (rng.random((args.block, SLICES)) < 0.5).astype(np.float64)
    return {
        "half of the rows, bits": Weights(PackedMasks(dense, args.rows)),
        f"all but {args.size:,} rows": Weights(entries, base=1.0),
        f"unions of {SLICES} slices": Weights.from_slices(rng.integers(0, SLICES, args.rows), SLICES).mixed(share),
    }


def time_shapes(
    rng: np.random.Generator, values_NC: np.ndarray, args: argparse.Namespace
) -> dict[str, dict[str, float]]:
    """Seconds for all subsets and the largest error against float64, over the first FEW subsets of each shape."""
    table: dict[str, dict[str, float]] = {}
    for name, weights in shapes(rng, args).items():
        sums = RowSums.over(values_NC)
        got = sums.sums(weights)
        seconds = min(timed(sums.sums, weights) for _ in range(3)) * args.subsets / args.block
        plain = _head(weights, FEW).csr()
        exact, bound = plain @ values_NC.astype(np.float64), abs(plain) @ np.abs(values_NC.astype(np.float64))
        table[name] = {"seconds": seconds, "error": float((np.abs(got[:FEW] - exact) / bound).max())}
    return table


def _head(weights: Weights, n: int) -> Weights:
    """The first n subsets."""
    if weights.mix is not None:
        return weights.mixed(weights.mix[:n])
    if isinstance(weights.matrix, PackedMasks):
        return Weights(PackedMasks(weights.matrix.bits_GN[:n], weights.matrix.n_rows))
    return Weights(weights.matrix[:n], base=weights.base)


def matmul_flops(args: argparse.Namespace) -> float:
    """Multiply-adds a second of a float32 product of the shape that bits are multiplied in, best of 5."""
    left = np.ones((args.block, 4096), dtype=np.float32)
    right = np.ones((4096, args.width), dtype=np.float32)
    return args.block * 4096 * args.width / min(timed(lambda _: left @ right, None) for _ in range(5))


def at_trak_width(rng: np.random.Generator, blocks: list[csr_array], args: argparse.Namespace) -> dict[str, float]:
    """Seconds for all subsets at 640 floats a row: as a plain NumPy loop, and through `RowSums`."""
    values = rng.standard_normal((args.rows, TRAK_WIDTH), dtype=np.float32)
    sweep, weights = RowSums.over(values), [Weights(block) for block in blocks]
    sweep.sums(weights[0])
    plain = min(timed(lambda block: numpy_loop(values, block), block) for block in blocks[:3])
    sweep_s = min(timed(sweep.sums, block) for block in weights[:3])
    return {"numpy_s": plain * args.subsets / PLAIN_SUBSETS, "sweep_s": sweep_s * args.subsets / args.block}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the corpus")
    parser.add_argument("--subsets", type=int, default=100_000, help="subsets in all, a multiple of --block")
    parser.add_argument("--size", type=int, default=1_000, help="rows of one subset")
    parser.add_argument("--width", type=int, default=129, help="float32 numbers a row: 64 + 64 + relevance")
    parser.add_argument("--block", type=int, default=1_000, help="subsets of one block")
    parser.add_argument("--rounds", type=int, default=7, help="blocks that every way is timed on")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers")
    args = parser.parse_args()
    if args.subsets % args.block:
        parser.error(f"--subsets {args.subsets} is not a multiple of --block {args.block}")
    torch.set_num_threads(args.threads)
    rng = np.random.default_rng(0)
    values_NC = rng.standard_normal((args.rows, args.width), dtype=np.float32)
    blocks = draw_blocks(rng, args)
    seconds = compare(values_NC, blocks, args.subsets)
    own_s, error = run_all(values_NC, blocks, args.subsets)
    bandwidth = stream_bandwidth()
    gathered = args.subsets * args.size * args.width * 4
    others = {"shapes": time_shapes(rng, values_NC, args), "matmul_per_s": matmul_flops(args)}
    others["trak_640"] = at_trak_width(rng, blocks, args)
    report(args, seconds, own_s, error, bandwidth, gathered, others)


def report(
    args: argparse.Namespace,
    seconds: dict[str, dict[str, float]],
    own_s: float,
    error: float,
    bandwidth: float,
    gathered: int,
    others: dict[str, Any],
) -> None:
    """Print the table, and write it where asked."""
    plain = seconds["numpy loop"]
    limit_s = gathered / bandwidth
    print(f"{args.subsets:,} subsets of {args.size:,} rows out of {args.rows:,}, {args.width} float32 a row")
    print(f"{'':34}{'median s':>10}{'best s':>10}{'x numpy':>9}")
    for name, row in seconds.items():
        ratio = plain["median_s"] / row["median_s"]
        print(f"{name:34}{row['median_s']:>10.2f}{row['best_s']:>10.2f}{ratio:>9.2f}")
    own_ratio = plain["median_s"] / own_s
    print(f"{'Sweep, all subsets':34}{own_s:>10.2f}{'':>10}{own_ratio:>9.2f}")
    print(
        f"limit of a streaming read: {limit_s:.2f} s ({gathered / 1e9:.1f} GB at {bandwidth / 1e9:.1f} GB/s); "
        f"Sweep reaches {limit_s / own_s:.0%} of it; largest error {error:.1e} of sum |x|"
    )
    trak, product_s = others["trak_640"], args.subsets * args.rows * args.width / others["matmul_per_s"]
    for name, row in others["shapes"].items():
        limit = f"; a float32 product alone {product_s:.2f} s" if "bits" in name else ""
        print(f"{name:34}{row['seconds']:>10.2f} s, largest error {row['error']:.1e} of sum |w x|{limit}")
    print(
        f"{TRAK_WIDTH} floats a row: NumPy loop {trak['numpy_s']:.2f} s ({trak['numpy_s'] / own_s:.1f} x Sweep at "
        f"{args.width}), Sweep {trak['sweep_s']:.2f} s ({trak['sweep_s'] / own_s:.1f} x)"
    )
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        sizes = {key: value for key, value in vars(args).items() if key != "out"}
        result = {
            "sizes": sizes,
            "ways": seconds,
            "sweep_s": own_s,
            "speed_up": own_ratio,
            "relative_error": error,
            "stream_bytes_per_s": bandwidth,
            "limit_s": limit_s,
            "share_of_limit": limit_s / own_s,
            **others,
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
