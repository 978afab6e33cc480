"""DSIR: importance weights of rows by hashed words and pairs of words, to resample the corpus toward a target.

Start with `Dsir`.

Shape letters: n rows of a block, N rows, E units, T targets, H buckets.
"""

import re
import zlib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from pydantic import Field
from scipy.sparse import csr_array

from grasp.arrays import F64
from grasp.baselines.bm25 import COVERS, texts_by_target
from grasp.baselines.stored import BlockMethod, RowScorer, cached
from grasp.methods.contract import Account, MethodInputs, Scores
from grasp.seeds import stream
from grasp.settings import Settings

WORD = re.compile(r"\w+|[^\w\s]+")  # NLTK's wordpunct tokenizer, as in the authors' code
MIN_PROBABILITY = 1e-8  # added to the probability of every bucket, as in the authors' code


class DsirSettings(Settings):
    """Settings of DSIR; the defaults are the authors'."""

    buckets: int = Field(10_000, ge=1, description="Buckets that words and pairs are hashed into. Authors: 10,000.")
    resample: bool = Field(
        True, description="Add Gumbel noise: the top rows are a sample by importance weight. Authors: true."
    )


class Dsir(BlockMethod[DsirSettings]):
    """Log importance weight of the row: its probability under the target's words, relative to the corpus's.

    log p(row | target) - log p(row | corpus) under bags of hashed words and pairs of words, plus Gumbel noise: the top
    rows are a sample without replacement, in proportion to the importance weights.

    Source: Xie et al. 2023, arXiv 2302.03169.
    As published: 10,000 buckets; resamples documents of the Pile toward target texts, to train on the sample.
    Deviation: rows are decoded from their tokens; words are assigned to buckets by CRC-32.
    """

    settings_type = DsirSettings
    requires = frozenset({"tokens"})

    def prepare(self, inputs: MethodInputs, work: Path, part: int) -> RowScorer:
        del part
        buckets = self.settings.buckets

        def count_buckets() -> dict[str, F64]:
            total_H = np.zeros(buckets)
            for start, stop in inputs.blocks():
                total_H += np.asarray(bucket_counts(inputs.texts(start, stop), buckets).sum(axis=0))
            return {"corpus_H": total_H}

        corpus_H = cached(work / "buckets.safetensors", count_buckets)["corpus_H"]
        by_target, target_E = texts_by_target(inputs.units.units)
        weight_HT = np.stack([log_ratio(texts, corpus_H) for texts in by_target], axis=1)
        noise_NT = np.zeros((inputs.n_rows, len(by_target)))
        if self.settings.resample:
            noise_NT = stream(self.seed, "baselines", "dsir").gumbel(size=noise_NT.shape)

        def score(start: int, stop: int) -> Scores:
            score_nT = bucket_counts(inputs.texts(start, stop), buckets) @ weight_HT + noise_NT[start:stop]
            return np.asarray(score_nT)[:, target_E]

        noise = ("Gumbel noise: the top rows are a sample",) if self.settings.resample else ()
        account = Account(
            covers=COVERS,
            notes=("one distribution per target: all units of a target have the same score", *noise),
        )
        return RowScorer(score, account)


def bucket_counts(texts: Iterable[str], buckets: int) -> csr_array:
    """Count the words and pairs of words of each text by bucket, (n, H)."""
    columns: list[int] = []
    ends = [0]
    for text in texts:
        words = WORD.findall(text.lower())
        columns += [zlib.crc32(word.encode()) % buckets for word in words]
        columns += [zlib.crc32(f"{first} {second}".encode()) % buckets for first, second in pairwise(words)]
        ends.append(len(columns))
    indices, indptr = np.array(columns, dtype=np.int64), np.array(ends, dtype=np.int64)
    return csr_array((np.ones(len(indices)), indices, indptr), shape=(len(ends) - 1, buckets))


def log_ratio(questions: Sequence[str], corpus_H: F64) -> F64:
    """Return log(share of each bucket in the questions / its share in the corpus), (H,)."""
    target_H = np.asarray(bucket_counts(questions, len(corpus_H)).sum(axis=0), dtype=np.float64)
    shares = [counts_H / max(counts_H.sum(), 1.0) + MIN_PROBABILITY for counts_H in (target_H, corpus_H)]
    return np.asarray(np.log(shares[0]) - np.log(shares[1]))
