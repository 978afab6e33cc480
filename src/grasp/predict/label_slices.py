"""The values of a label as slices that people look at: a few, named, each with the expression that selects it.

A label with too many values keeps the largest of them; the others share one slice, and how many they are is said.
Shape letters: G slices, N rows.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.errors import SubsetError
from grasp.predict.conditions import equals, none_of
from grasp.predict.labels import Label, LabelColumn
from grasp.predict.row_arrays import RowArrays
from grasp.predict.weights import SliceShares, indicators
from grasp.text import different

MOST_SLICES = 100
MOST_LABELS = 4
OWN_COLUMNS = ("row_index", "row_id", "doc_id", "n_tokens", "loss", "snippet")


@dataclass(frozen=True, slots=True)
class Slice:
    """All rows that an expression selects."""

    name: str  # for people; no other slice of the label has it
    expression: str  # what `grasp predict --drop` takes
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LabelSlices:
    """The slices of one label, largest first as far as they are single values; every row is in one of them."""

    label: str
    slices: tuple[Slice, ...]
    codes_N: NDArray[np.int32]
    n_grouped: int  # values that share the last slice; 0: every value has a slice of its own

    @property
    def rows_G(self) -> NDArray[np.int64]:  # noqa: N802 - a shape suffix
        """Rows of each slice."""
        return np.array([one.rows for one in self.slices], dtype=np.int64)

    @property
    def tokens_G(self) -> NDArray[np.int64]:  # noqa: N802 - a shape suffix
        """Tokens of each slice."""
        return np.array([one.tokens for one in self.slices], dtype=np.int64)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.slices)

    @property
    def column(self) -> LabelColumn:
        """The label of every row, with the values that share a slice merged into one."""
        return LabelColumn(self.label, self.names, self.codes_N)

    def indicators(self) -> csr_array:
        """(G, N), 1 where a row is in the slice."""
        return indicators(self.codes_N, len(self.slices))

    def weights(self, share_BG: NDArray[np.float64]) -> SliceShares:
        """(B, N) weights of subsets that give every row of a slice the weight of the slice."""
        return SliceShares(np.asarray(share_BG, dtype=np.float64), self.codes_N)


def label_slices(column: LabelColumn, tokens_N: NDArray[np.integer], *, most: int = MOST_SLICES) -> LabelSlices:
    """Slices of one label.

    Args:
        most: slices at most; the values beyond the largest `most - 1` share one.
    Raises:
        SubsetError: fewer than two values: nothing can be told apart by them.
    """
    if len(column.values) < 2:
        raise SubsetError(
            f"--by {column.name}: has the single value {column.values[0]!r}; expected a label with two values or more"
        )
    order = np.argsort(-column.counts, kind="stable").tolist()
    single = order if len(order) <= most else order[: most - 1]
    grouped = order[len(single) :]
    slice_of = np.full(len(order), len(single), dtype=np.int32)
    slice_of[single] = np.arange(len(single))
    codes_N = slice_of[column.codes_N]
    values = [column.values[code] for code in single]
    called = column.names()
    names = [called[code] for code in single]
    expressions = [equals(column.name, value) for value in values]
    if grouped:
        names += different([*called, f"{len(grouped):,} other values"])[-1:]
        expressions.append(_rest(column, values, [column.values[code] for code in grouped]))
    rows_G = np.bincount(codes_N, minlength=len(names))
    tokens_G = np.bincount(codes_N, weights=tokens_N, minlength=len(names))
    slices = [
        Slice(name, expression, int(rows), int(tokens))
        for name, expression, rows, tokens in zip(names, expressions, rows_G, tokens_G, strict=True)
    ]
    return LabelSlices(column.name, tuple(slices), codes_N, len(grouped))


def sensible_labels(source: RowArrays, *, most: int = MOST_SLICES) -> tuple[str, ...]:
    """Label columns that cut the corpus into 2 to `most` slices: text if there is any, else whole numbers and flags.

    A column with another value in every row tells none apart. Reads each no further than it takes to see that it has
    more values.
    """
    most = min(most, source.n_rows - 1)
    schema = source.rows(np.empty(0, dtype=np.int64)).schema
    own = [field for field in schema if field.name not in OWN_COLUMNS]
    text = [field.name for field in own if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)]
    other = [field.name for field in own if pa.types.is_integer(field.type) or pa.types.is_boolean(field.type)]
    for names in (text, other):
        found = itertools.islice((name for name in names if 2 <= _n_values(source, name, most) <= most), MOST_LABELS)
        if chosen := tuple(found):
            return chosen
    return ()


def _n_values(source: RowArrays, name: str, most: int) -> int:
    """Different values, counted up to one more than `most`."""
    seen: set[Label] = set()
    batches: Iterator[pa.RecordBatch] = source.row_batches([name])
    for batch in batches:
        seen.update(batch.column(0).unique().to_pylist())
        if len(seen) > most:
            break
    return min(len(seen), most + 1)


def _rest(column: LabelColumn, values: Sequence[Label], grouped: Sequence[Label]) -> str:
    others = none_of(column.name, values)
    return f"{equals(column.name, None)} OR {others}" if None in grouped else others
