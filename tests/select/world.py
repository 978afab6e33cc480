"""A small artifact in memory of which single rows and a row table can be read, and slow answers about it."""

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
from scipy.sparse import csr_array

from grasp.artifact.label_table import LabelColumn
from grasp.predict.predictor import Predictor
from grasp.predict.scoring_rule import ScoringProtocol
from grasp.predict.weights import Weights
from tests.predict.source import FakeSource
from tests.rules import rule

TOPICS = ("games", "science", None, "travel")


@dataclass(eq=False)
class World(FakeSource):
    """`FakeSource` with rows: r0, r1, ... of 5 to 60 tokens, a topic each, several rows to a document."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rng = np.random.default_rng(self.seed + 1)
        self.tokens = rng.integers(5, 60, self.n_rows)
        self.topics = [TOPICS[i] for i in rng.integers(0, 4, self.n_rows)]
        self.topics[:4] = TOPICS
        self.chosen_rows = 0  # rows that were read one by one

    @property
    def labels(self) -> LabelColumn:
        return LabelColumn.from_values(self.topics, "topic")

    @property
    def table(self) -> pa.Table:
        return pa.table(
            {
                "row_index": np.arange(self.n_rows),
                "row_id": [f"r{i}" for i in range(self.n_rows)],
                "doc_id": [f"d{i // 2}" for i in range(self.n_rows)],
                "snippet": [f"text {i}" for i in range(self.n_rows)],
                "n_tokens": pa.array(self.tokens, pa.int32()),
                "topic": self.topics,
            }
        )

    @property
    def manifest(self) -> SimpleNamespace:
        details = {"labels": ["topic"]}
        return SimpleNamespace(fingerprints={"corpus": "c0ffee"}, settings={}, details=details, skipped={})

    where = "world"

    def array_rows(self, name, row_index):
        self.chosen_rows += len(row_index)
        return self.arrays[name][row_index]

    def row_batches(self, columns=None):
        yield from self.table.select(columns or self.table.column_names).to_batches(max_chunksize=self.block_rows)


def protocol(**changes) -> ScoringProtocol:
    settings = {"name": "p", "match": {"output_layer": 1.0}, "calibration": {"family": "uniform:0.5", "n_subsets": 16}}
    return rule(**(settings | changes))


def changes(source, chosen, subsets, targets) -> np.ndarray:
    """What the predictor says of subsets given as rows, (B, T)."""
    masks = np.zeros((len(subsets), source.n_rows))
    for b, rows in enumerate(subsets):
        masks[b, list(rows)] = 1.0
    return predictor_of(source, chosen, list(targets)).change(Weights(csr_array(masks)))


def best_subset(source, chosen, size, rows=None, *, allowed=lambda subset: True):
    """The value of the best subset of `size` rows for the first target, by trying all of them."""
    pool = range(source.n_rows) if rows is None else rows
    subsets = [subset for subset in itertools.combinations(pool, size) if allowed(subset)]
    return float(changes(source, chosen, subsets, source.targets[:1]).max())


def predictor_of(source, chosen, targets=None) -> Predictor:
    return Predictor.from_artifact(source, chosen, targets)
