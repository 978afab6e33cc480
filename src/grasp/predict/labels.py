"""A label column in little memory (its values, and for each row the position of its value in them), and conditions.

A condition is a label expression out of values: what a person, or a table that is sent to one, can paste behind --drop.
"""

import functools
import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.text import different

Label: TypeAlias = str | int | float | bool | None
NO_LABEL = "(no label)"
EMPTY = "(empty)"
PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_]*")
LONGEST_LITERAL = 80  # characters; longer text is named by its checksum


@dataclass(frozen=True, slots=True)
class LabelColumn:
    """Values in order of first appearance and each row's code, 4 bytes a row; a missing label is `None`."""

    name: str
    values: tuple[Label, ...]
    codes_N: NDArray[np.int32]

    @classmethod
    def from_values(cls, labels: Sequence[Label], name: str = "label") -> "LabelColumn":
        """From a plain sequence of labels."""
        code_of: dict[Label, int] = {}
        codes_N = np.fromiter((code_of.setdefault(label, len(code_of)) for label in labels), np.int32, len(labels))
        return cls(name, tuple(code_of), codes_N)

    @classmethod
    def from_batches(cls, name: str, batches: Iterable[pa.Array]) -> "LabelColumn":
        """From a column of a table that arrives in batches."""
        code_of: dict[Label, int] = {}
        parts: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        for batch in batches:
            encoded = batch.dictionary_encode(null_encoding="encode")
            codes = [code_of.setdefault(value, len(code_of)) for value in encoded.dictionary.to_pylist()]
            parts.append(np.asarray(codes, np.int32)[encoded.indices.to_numpy()])
        return cls(name, tuple(code_of), np.concatenate(parts))

    @property
    def n_rows(self) -> int:
        return len(self.codes_N)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Rows per value."""
        return np.bincount(self.codes_N, minlength=len(self.values)).astype(np.int64)

    def names(self) -> tuple[str, ...]:
        """What people call the values, each another name; floors and caps speak of them by it.

        A value goes by its own text: where one is spelled `(no label)`, what has none is `(no label) #2`.
        """
        spelled = [NO_LABEL if value is None else str(value) for value in self.values]
        made = [value is None or not name.strip() for value, name in zip(self.values, spelled, strict=True)]
        order = sorted(range(len(spelled)), key=made.__getitem__)
        names = different([spelled[code] if spelled[code].strip() else EMPTY for code in order])
        of_code = dict(zip(order, names, strict=True))
        return tuple(of_code[code] for code in range(len(spelled)))


# ----------------------------------------------------------------------------------------------------------- conditions


def equals(column: str, value: Label) -> str:
    """The condition that a column has this value.

    Text that cannot be printed, or is very long, is named by its MD5 checksum: what is pasted into a terminal holds
    no control character, whatever the corpus holds.
    """
    name = identifier(column)
    if value is None:
        return f"{name} IS NULL"
    if isinstance(value, float) and not math.isfinite(value):
        return f"isnan({name})" if math.isnan(value) else f"isinf({name}) AND {name} {'>' if value > 0 else '<'} 0"
    if isinstance(value, str) and not _is_shown(value):
        return f"md5({name}) = '{hashlib.md5(value.encode(), usedforsecurity=False).hexdigest()}'"
    return f"{name} = {_literal(value)}"


def none_of(column: str, values: Sequence[Label]) -> str:
    """The condition that a column has a value, and none of these."""
    name = identifier(column)
    listed = [value for value in values if value is not None]
    if not listed:
        return f"{name} IS NOT NULL"
    if all((isinstance(value, str) and _is_shown(value)) or isinstance(value, bool | int) for value in listed):
        return f"{name} NOT IN ({', '.join(_literal(value) for value in listed)})"
    return f"{name} IS NOT NULL AND NOT ({' OR '.join(equals(column, value) for value in listed)})"


def identifier(column: str) -> str:
    """The column as an expression names it: in double quotes where it must be."""
    if PLAIN_NAME.fullmatch(column) and column not in _keywords():
        return column
    return '"' + column.replace('"', '""') + '"'


def _is_shown(text: str) -> bool:
    return len(text) <= LONGEST_LITERAL and text.isprintable()


def _literal(value: Label) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return str(value).lower() if isinstance(value, bool) else repr(value)


@functools.cache
def _keywords() -> frozenset[str]:
    """Words that DuckDB does not take for the name of a column."""
    with duckdb.connect(":memory:") as db:
        found = db.execute("SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category <> 'unreserved'")
        return frozenset(name for (name,) in found.fetchall())
