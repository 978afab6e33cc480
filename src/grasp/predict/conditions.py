"""Label expressions out of values: what a person, or a table that is sent to one, can paste behind --drop."""

import functools
import hashlib
import math
import re
from collections.abc import Sequence

import duckdb

from grasp.predict.labels import Label

PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_]*")
LONGEST_LITERAL = 80  # characters; longer text is named by its checksum


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
        return f"md5({name}) = '{_checksum(value)}'"
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


def _checksum(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


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
