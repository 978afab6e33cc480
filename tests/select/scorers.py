"""A scorer of any tables, which nothing was learned for."""

import numpy as np

import grasp
from grasp.arrays import F32
from grasp.distil.ngrams import LENGTHS, SLOTS
from grasp.distil.scorer import Card, Quality, Scorer
from grasp.files import FileEntry

QUALITY = Quality(rows=20, spearman=(0.5, 0.4, 0.6), recall=(0.5, 0.4, 0.6), gain=(0.5, 0.4, 0.6))


def scorer_of(tables_KV: F32, rarity_S: F32) -> Scorer:
    card = Card(
        target="facts",
        scored_by="tests",
        made_by={"grasp": grasp.__version__},
        fingerprints={"corpus": "c0ffee"},
        rows=20,
        penalty=1.0,
        intercept=0.25,
        rarest=1.0,
        quality=QUALITY,
        weights=FileEntry(bytes=0, checksum="0" * 32),
    )
    return Scorer(card, tables_KV, rarity_S)


def silent_scorer() -> Scorer:
    """It says nothing of any text."""
    return scorer_of(np.zeros((len(LENGTHS), SLOTS), np.float32), np.zeros(SLOTS, np.float32))
