"""Mixtures in which how much a value gets and how often its rows are seen vary apart.

    python -m experiments.exposure.repeated demo-out/artifact --label source --out repeated.parquet

Every vector of shares comes twice: `large-07` gives a value its share with all of its rows, `small-07` the same share
with a part of them, which are seen more often for it. So the same shares meet different repetition.
"""

import argparse
from pathlib import Path

import numpy as np

from grasp.artifact.label_table import LabelTable
from grasp.artifact.reader import ArtifactReader
from grasp.predict.subset_tables import RowIndex, write_subsets
from grasp.predict.weights import WeightedRows, in_blocks
from grasp.seeds import stream

STRENGTH = 0.5  # of the Dirichlet distribution of the shares, around even ones
POOLS = (1 / 12, 1 / 6, 1 / 3, 1.0)  # part of a value's rows that its share is taken from
LEAST_ROWS = 16


def drawn(codes_N: np.ndarray, n_values: int, count: int) -> list[WeightedRows]:
    """Two subsets for each of `count` vectors of shares; weights have mean 1 over the corpus."""
    n_rows, subsets = len(codes_N), []
    for k in range(count):
        rng = stream(0, "exposure", "repeated", k)
        share_G = rng.dirichlet(np.full(n_values, STRENGTH))
        share_G[share_G < 1e-3] = 0.0
        share_G /= share_G.sum()
        part_G = rng.choice(POOLS, size=n_values)
        for name, pools_G in (("large", np.ones(n_values)), ("small", part_G)):
            weight_N = np.zeros(n_rows)
            for g in np.flatnonzero(share_G):
                rows = np.flatnonzero(codes_N == g)
                pool = rng.permutation(rows)[: max(LEAST_ROWS, round(pools_G[g] * len(rows)))]
                weight_N[pool] = share_G[g] * n_rows / len(pool)
            kept_rows = np.flatnonzero(weight_N)
            subsets.append(WeightedRows(f"{name}-{k:02d}", kept_rows, weight_N[kept_rows]))
    return subsets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--label", required=True)
    parser.add_argument("--count", type=int, default=14)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    artifact = ArtifactReader.open(args.artifact)
    column = LabelTable(artifact.rows_path).column(args.label)
    blocks = in_blocks(drawn(column.codes_N, len(column.values), args.count), artifact.n_rows)
    write_subsets(args.out, blocks, RowIndex.from_parquet(artifact.rows_path), weights=True)


if __name__ == "__main__":
    main()
