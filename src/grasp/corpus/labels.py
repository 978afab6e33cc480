"""Label columns: their names, and the type of a column of mixed values.

A label is a scalar of a row, for slicing: topic, source, year. JSONL may mix types between lines, so the type of a
column is the narrowest one for all of its values. Types of parts can be combined: the result does not depend on shards.
Start with `kind_of_all` and `widest`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import pyarrow as pa

Label = str | int | float | bool | None
Kind = Literal[
    "null", "bool", "int", "long", "float", "string"
]  # long: integers beyond 2^53, which floats do not represent exactly

IDS_COLUMN = "__input_ids__"
LABELLED_COLUMN = "__labelled__"
DOCUMENT_COLUMN = "__document__"
SPANS_COLUMN = "__spans__"
CLASS_LABEL, HASH_LABEL = "image_class", "image_hash"  # labels of image rows
_HIDDEN = (IDS_COLUMN, LABELLED_COLUMN, DOCUMENT_COLUMN, SPANS_COLUMN)
RESERVED_COLUMNS = ("row_id", "doc_id", "n_tokens", "n_loss", "loss", "snippet", "row_index", *_HIDDEN)
# Ignores case: DuckDB, which evaluates label expressions, treats `Loss` and `loss` as one column.
_RESERVED = re.compile(rf"(?:{'|'.join(RESERVED_COLUMNS)})_*", re.IGNORECASE)

ARROW_TYPE: Mapping[Kind, pa.DataType] = {
    "null": pa.string(),  # a column without values is text
    "bool": pa.bool_(),
    "int": pa.int64(),
    "long": pa.int64(),
    "float": pa.float64(),
    "string": pa.string(),
}
_EXACT_FLOAT = 2**53


def label_name(column: str) -> str:
    """Return the name of a label column; reserved names get an underscore (`loss` -> `loss_` -> `loss__`)."""
    return f"{column}_" if _RESERVED.fullmatch(column) else column


def kind_of_all(values: Iterable[Label]) -> Kind:
    """Return the narrowest kind for all values; an integer of more than 64 bits is text."""
    kinds: set[Kind] = set()
    for value in values:
        if value is None:
            continue
        if isinstance(value, bool):
            kinds.add("bool")
        elif isinstance(value, int):
            is_exact, fits = abs(value) < _EXACT_FLOAT, -(2**63) <= value < 2**63
            kinds.add("int" if is_exact else "long" if fits else "string")
        else:
            kinds.add("float" if isinstance(value, float) else "string")
    return widest(kinds)


def widest(kinds: Iterable[Kind]) -> Kind:
    """Return the narrowest kind that includes all kinds, independent of order and grouping."""
    several = set(kinds) - {"null"}
    if len(several) < 2:
        return next(iter(several), "null")
    return "long" if several == {"int", "long"} else "float" if several == {"int", "float"} else "string"


def label_text(value: Label) -> str | None:
    """Return a value as text. 1 and 1.0 give the same text, which must not depend on other values of the column."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_FLOAT:
        return str(int(value))
    return str(value)


def column_of(values: Sequence[Label], kind: Kind) -> pa.Array:
    """Return an Arrow column of `kind`, which must include every value."""
    if kind in ("string", "null"):
        return pa.array([label_text(value) for value in values], pa.string())
    if kind == "float":
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array(values, ARROW_TYPE[kind])


def is_text(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is text."""
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is a list."""
    tests = (
        pa.types.is_list,
        pa.types.is_large_list,
        pa.types.is_fixed_size_list,
        pa.types.is_list_view,
        pa.types.is_large_list_view,
    )
    return any(test(kind) for test in tests)


def is_json(kind: pa.DataType) -> bool:
    """Return whether an Arrow type is JSON, whose values may have any kind."""
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json"


def is_label(kind: pa.DataType) -> bool:
    """Return whether an Arrow type can be a label: nested and binary types cannot."""
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return is_label(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return kind.extension_name in ("arrow.json", "arrow.uuid", "arrow.bool8")
    tests = (
        is_text,
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_decimal,
        pa.types.is_boolean,
        pa.types.is_timestamp,
        pa.types.is_date,
        pa.types.is_time,
        pa.types.is_duration,
        pa.types.is_null,
    )
    return any(test(kind) for test in tests)
