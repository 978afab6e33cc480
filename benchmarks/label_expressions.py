"""CPU time of a label that is an expression, against a plain column, over the rows of a synthetic corpus.

    python -m benchmarks.label_expressions --rows 1000000 --out benchmarks/measured/label_expressions.json

A table of rows has URLs with a skewed distribution of hosts. Each label is read `--repeats` times, with nothing cached;
the minimum of the CPU seconds counts. `predict --by LABEL` differs from `predict --by source` by
this time, since everything after the label is the same for as many values.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grasp.artifact.label_functions import domain_of
from grasp.artifact.label_table import LabelTable

LABELS = ("source", "host(url)", "domain(url)", "year(date)", "bins(score, 5)", "lower(meta.lang)")
CONDITIONS = ("source = 's1'", "host(url) = 'www.site7.co.uk'")


def write_rows(path: Path, n_rows: int) -> None:
    """Write the row table of a corpus with URLs."""
    rng = np.random.default_rng(0)
    site_N = np.minimum(rng.zipf(1.3, n_rows), 200_000)
    endings = np.array([".com", ".co.uk", ".org", ".github.io"])[site_N % 4]
    url = [f"https://www.site{s}{e}/page/{i}?q=1" for i, (s, e) in enumerate(zip(site_N, endings, strict=True))]
    table = pa.table(
        {
            "row_id": [f"r{i}" for i in range(n_rows)],
            "url": url,
            "source": [f"s{s % 50}" for s in site_N],
            "date": [f"20{10 + s % 15}-01-02T03:04:05Z" for s in site_N],
            "score": rng.beta(5, 2, n_rows),
            "meta.lang": np.array(["EN", "De", "fr"])[site_N % 3],
        }
    )
    pq.write_table(table, path, row_group_size=1 << 16)


def seconds(question: Callable[[], object], repeats: int) -> float:
    """Return the minimum CPU time of a call."""
    times = []
    for _ in range(repeats):
        domain_of.cache_clear()
        start = time.process_time()
        question()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "rows.parquet"
        write_rows(path, args.rows)
        table = LabelTable(path)
        result: dict[str, float] = {"rows": args.rows, "hosts": len(table.column("host(url)").values)}
        result |= {label: round(seconds(lambda label=label: table.column(label), args.repeats), 3) for label in LABELS}
        result |= {
            condition: round(seconds(lambda condition=condition: table.selection(condition), args.repeats), 3)
            for condition in CONDITIONS
        }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
