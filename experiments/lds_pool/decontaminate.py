"""The pool without the documents in which text of a benchmark was found: for the rest `eval_overlap` is empty.

python experiments/lds_pool/decontaminate.py ../shared/data/pool.parquet bench-out/pool_decontaminated.parquet
"""

import argparse
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pool", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    table = pq.read_table(args.pool)
    clean = table.filter(pc.equal(pc.fill_null(table["eval_overlap"], ""), ""))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    part = args.out.with_name(args.out.name + ".part")
    pq.write_table(clean, part)
    part.replace(args.out)
    print(f"{args.out}: {clean.num_rows:,} of {table.num_rows:,} documents")


if __name__ == "__main__":
    main()
