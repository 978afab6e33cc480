"""Rows and units on their way through the reference model: which go together, and the features of each batch."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.corpus.shard_files import Shard
from grasp.corpus.store import RowShard
from grasp.features.extract import Pass, Reference, extract
from grasp.models.causal_lm import ReferenceModel, batches, pad_rows
from grasp.targets.units import UnitTokens


class OtherRows(Shard, Protocol):
    """Rows that are no texts: their own model reads them."""

    table: pa.Table
    n_tokens: int

    def tokens_of(self, index: NDArray[np.int64]) -> int:
        """Positions of some rows."""


Rows = RowShard | OtherRows
Units = Sequence[UnitTokens] | OtherRows


def row_passes(model: Reference, rows: Rows, specs: tuple[str, ...], top_k: int) -> Iterator[Pass]:
    """Batches of rows, each with the index of its rows and their features at the positions of `specs`."""
    if not isinstance(model, ReferenceModel):
        yield from model.passes(rows, len(specs), top_k)
        return
    assert isinstance(rows, RowShard)
    for index in batches(np.diff(rows.offsets), model.batch_tokens):
        padded = pad_rows([rows.ids(int(i)) for i in index], [rows.mask(int(i)) for i in index])
        yield index, extract(model, *padded, specs, top_k)


def unit_passes(model: Reference, units: Units, specs: tuple[str, ...], top_k: int) -> Iterator[Pass]:
    """Batches of units, as those of rows; of a text only what carries loss is supervised."""
    if not isinstance(model, ReferenceModel):
        yield from model.passes(units, len(specs), top_k)
        return
    assert isinstance(units, Sequence)
    length_E = np.fromiter((len(unit.input_ids) for unit in units), dtype=np.int64, count=len(units))
    for index in batches(length_E, model.batch_tokens):
        padded = pad_rows([units[e].input_ids for e in index], [units[e].first for e in index])
        yield index, extract(model, *padded, specs, top_k)
