"""Documents a second that a scorer scores on one core.

    python benchmarks/distil.py --scorer scorer --corpus corpus.parquet [--bytes 1100]

256 tokens of English are some 1,100 bytes: texts are joined and cut to that length. `in memory` is scoring alone,
`apply` reads them from Parquet and writes the scores. CPU seconds of this process count. Aim: 20,000 a second.
"""

import argparse
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grasp.distil.apply import apply
from grasp.distil.scorer import Scorer

DOCUMENTS = 40_000


def main() -> None:
    """Score alone, then the whole verb."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scorer", required=True)
    parser.add_argument("--corpus", required=True, help="Parquet with a column `text`.")
    parser.add_argument("--bytes", type=int, default=1_100)
    args = parser.parse_args()
    whole = " ".join(pq.read_table(args.corpus, columns=["text"])["text"].to_pylist())
    pieces = [whole[i : i + args.bytes] for i in range(0, len(whole), args.bytes)]
    texts = (pieces * (1 + DOCUMENTS // len(pieces)))[:DOCUMENTS]
    scorer = Scorer.open(args.scorer)
    array = pa.array(texts, pa.large_string())
    size = sum(len(text.encode()) for text in texts) / DOCUMENTS
    print(f"{DOCUMENTS:,} documents of {size:,.0f} bytes")
    before = time.process_time()
    for start in range(0, DOCUMENTS, 4_096):
        scorer.score(array.slice(start, 4_096))
    print(f"in memory: {DOCUMENTS / (time.process_time() - before):,.0f} a CPU second")
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "corpus.parquet"
        pq.write_table(pa.table({"doc_id": [str(i) for i in range(DOCUMENTS)], "text": array}), path)
        before = time.process_time()
        apply(scorer, str(path), Path(place) / "out")
        print(f"apply: {DOCUMENTS / (time.process_time() - before):,.0f} a CPU second")


if __name__ == "__main__":
    main()
