"""Label columns: their names, and the type of a column of mixed values.

A label is a scalar of a row, for slicing: topic, source, year. JSONL may mix types between lines, so the type of a
column is the narrowest one for all of its values. The types of two shards can be combined (`widest`), so that the
result does not depend on the shards.

Nested values give a label per field: `{"source": "web"}` in `metadata` is the label `metadata.source`. Text that holds
a JSON object is treated as the object. A list of texts is one label, its JSON text. Start with `kind_of_all` and
`Flattener`.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import pyarrow as pa

Label = str | int | float | bool | None
# Types of label columns; long: integers beyond 2^53, which floats do not represent exactly
Kind = Literal["null", "bool", "int", "long", "float", "string"]

IDS_COLUMN = "__input_ids__"
LOSS_MASK_COLUMN = "__labelled__"
SPLIT_COLUMN = "__split__"  # of preference pairs: number of tokens of the chosen side
DOCUMENT_COLUMN = "__document__"
SPANS_COLUMN = "__spans__"
_HIDDEN = (IDS_COLUMN, LOSS_MASK_COLUMN, SPLIT_COLUMN, DOCUMENT_COLUMN, SPANS_COLUMN)
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
MAX_FIELDS = 200  # nested fields of a corpus that become labels; keys may be data, e.g. counts by word
MAX_LIST_ELEMENTS, MAX_LIST_CHARS = 64, 2_048  # of a list of texts that is a label


class Flattener:
    """Flatten nested values of records to labels, named by dotted paths.

    Names are compared without case, as in expressions: the first spelling is used.
    """

    def __init__(self, paths: Iterable[str] = ()) -> None:
        """Start without known fields.

        Args:
            paths: nested fields that are labels in any case, e.g. `turns.0.role`, with positions in lists.
        """
        self._names: dict[str, str] = {}
        self._paths = [path.split(".") for path in paths]

    def is_nested(self, name: str, value: Any) -> bool:
        """Return whether a column may have nested labels; otherwise its value is the label."""
        if isinstance(value, str):
            return value.startswith("{") or any(path[0] == name for path in self._paths)
        return isinstance(value, list | dict)

    def labels(self, name: str, value: Any, not_labels: set[str]) -> Iterator[tuple[str, Label]]:
        """Yield the labels of a column of a record, and add fields that cannot be labels to `not_labels`."""
        for path in self._paths:  # of the settings, whatever the number of fields; `_flattened` yields them again
            if path[0] == name and len(path) > 1:
                yield ".".join(path), _value_at_path(value, path[1:])
        parsed = value
        if isinstance(value, str) and value.startswith("{") and value.rstrip().endswith("}"):
            with suppress(ValueError, RecursionError):
                parsed = json.loads(value)
        yield from self._flattened(name, parsed, not_labels, is_field=False)

    def _flattened(
        self, name: str, value: Any, not_labels: set[str], *, is_field: bool = True
    ) -> Iterator[tuple[str, Label]]:
        """Yield the labels of a value and of its members, recursively.

        `not_labels` receives paths of fields that cannot be labels, and columns with more fields than `MAX_FIELDS`.
        """
        if isinstance(value, dict):
            for key, member in value.items():
                yield from self._flattened(f"{name}.{key}", member, not_labels)
            return
        scalar = value
        if isinstance(value, list):
            are_texts = len(value) <= MAX_LIST_ELEMENTS and all(isinstance(part, str) for part in value)
            scalar = json.dumps(value, ensure_ascii=False) if are_texts else ""
            if not value or not 0 < len(scalar) <= MAX_LIST_CHARS:
                if value:
                    not_labels.add(name)
                return
        label = name
        if is_field:
            folded = name.casefold()
            if folded not in self._names and len(self._names) >= MAX_FIELDS:
                not_labels.add(name.partition(".")[0])
                return
            label = self._names.setdefault(folded, name)
        yield label, None if isinstance(scalar, float) and math.isnan(scalar) else scalar


def _value_at_path(value: Any, path: Sequence[str]) -> Label:
    """Return the scalar at a path of member names and list positions; None if there is none."""
    current = value
    for step in path:
        if isinstance(current, str):
            try:
                current = json.loads(current)
            except (ValueError, RecursionError):
                return None
        if isinstance(current, list) and step.lstrip("-").isdigit() and -len(current) <= int(step) < len(current):
            current = current[int(step)]
        elif isinstance(current, dict):
            current = current.get(step)
        else:
            return None
    return None if isinstance(current, list | dict) else current


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
    typed = set(kinds) - {"null"}
    if len(typed) < 2:
        return next(iter(typed), "null")
    # Floats do not represent `long` exactly, so these two have no common numeric kind.
    return "long" if typed == {"int", "long"} else "float" if typed == {"int", "float"} else "string"


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
    """Return an Arrow column of a type that holds every value."""
    if kind in ("string", "null"):
        return pa.array([label_text(value) for value in values], pa.string())
    if kind == "float":
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array(values, ARROW_TYPE[kind])


def is_text(data_type: pa.DataType) -> bool:
    """Return whether an Arrow type is text."""
    if pa.types.is_dictionary(data_type):
        return is_text(data_type.value_type)
    return bool(
        pa.types.is_string(data_type) or pa.types.is_large_string(data_type) or pa.types.is_string_view(data_type)
    )


def is_list(data_type: pa.DataType) -> bool:
    """Return whether an Arrow type is a list."""
    return isinstance(
        data_type, (pa.ListType, pa.LargeListType, pa.FixedSizeListType, pa.ListViewType, pa.LargeListViewType)
    )


def is_json(data_type: pa.DataType) -> bool:
    """Return whether an Arrow type is JSON, whose values may have any data_type."""
    return isinstance(data_type, pa.BaseExtensionType) and data_type.extension_name == "arrow.json"


def has_labels(data_type: pa.DataType) -> bool:
    """Return whether values of an Arrow type have labels: scalars, lists of text, and records with such fields."""
    if pa.types.is_struct(data_type):
        return any(has_labels(field.type) for field in data_type)
    if pa.types.is_map(data_type):
        return has_labels(data_type.item_type)
    return is_text(data_type.value_type) if is_list(data_type) else is_label(data_type)


def is_label(data_type: pa.DataType) -> bool:
    """Return whether an Arrow type can be a label: nested and binary types cannot."""
    if pa.types.is_dictionary(data_type):
        return is_label(data_type.value_type)
    if isinstance(data_type, pa.BaseExtensionType):
        return data_type.extension_name in ("arrow.json", "arrow.uuid", "arrow.bool8")
    is_scalar = pa.types.is_primitive(data_type) and not pa.types.is_interval(data_type)
    return bool(is_scalar or is_text(data_type) or pa.types.is_decimal(data_type) or pa.types.is_null(data_type))
