"""Convert Arrow columns and parsed JSON to plain Python values that do not depend on the stored type.

A corpus may store a timestamp in seconds or nanoseconds, text as `string`, `large_string` or a dictionary, a record as
JSON or as a struct. The values are equal in all cases. Start with `plain_values`.

- A timestamp is ISO 8601 text: `2024-01-01T09:30:00`, in UTC with a `Z` if it has a time zone. A fraction of a second
  has three, six or nine digits, and none if it is zero. Dates and times of day are written alike.
- A decimal is an integer if it is whole. Otherwise it is a float if the float has the same digits, else text. A
  duration is a number of seconds by the same rule.
- A number in single precision is the float with the same shortest digits: 1.1 is 1.1 in shards of either precision.
- A member of a record that is null is absent, at any depth: a struct has the members of all records, so that a null
  cannot be told from a member that was never there. Elements of lists may be null.
- `arrow.json` is parsed, a map is a dict, and a UUID is text.
"""

import json
from decimal import Decimal
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from grasp.corpus.labels import is_list, label_text
from grasp.text import parse_json

_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}  # of a second, by unit
_ZERO_FRACTION = r"\.?(?:000)+$"  # whole groups of three zeros; without a fraction a time ends in `:SS`


def plain_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Return the values of an Arrow column as plain Python values.

    Raises:
        ValueError: text that is not UTF-8, or a value of `arrow.json` that is not JSON.
    """
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in plain_values(chunk)]
    data_type = column.type
    if isinstance(data_type, pa.BaseExtensionType):
        return _extension_values(column)
    if pa.types.is_dictionary(data_type):
        if not pa.types.is_string_view(data_type.value_type):
            return plain_values(column.dictionary_decode())
        # Arrow decodes no dictionary of views
        without_views = pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(pa.large_string()))
        return plain_values(without_views.dictionary_decode())
    if pa.types.is_map(data_type):
        pairs = pa.list_(pa.struct([("key", data_type.key_type), ("value", data_type.item_type)]))
        entries_of = plain_values(pc.cast(column, pairs))
        return [
            None
            if entries is None
            else {label_text(entry["key"]): entry["value"] for entry in entries if "value" in entry}
            for entries in entries_of
        ]
    if is_list(data_type):
        elements = iter(plain_values(column.flatten()))
        lengths = pc.list_value_length(column).to_pylist()
        return [None if length is None else list(islice(elements, length)) for length in lengths]
    if pa.types.is_struct(data_type):
        names = [field.name for field in data_type]
        columns = [plain_values(column.field(k)) for k in range(len(names))]
        rows = zip(*columns, strict=True) if columns else [()] * len(column)
        return [  # without null members
            {name: part for name, part in zip(names, row, strict=True) if part is not None} if valid else None
            for valid, row in zip(column.is_valid().to_pylist(), rows, strict=True)
        ]
    if pa.types.is_duration(data_type):
        scale = _DIGITS[data_type.unit]
        counts = pc.cast(column, pa.int64()).to_pylist()
        return [None if count is None else _exact_number(Decimal(count).scaleb(-scale)) for count in counts]
    if pa.types.is_decimal(data_type):
        return [None if value is None else _exact_number(value) for value in column.to_pylist()]
    plain = column
    if pa.types.is_timestamp(data_type) or pa.types.is_date(data_type) or pa.types.is_time(data_type):
        is_timestamp = pa.types.is_timestamp(data_type)
        # Arrow stores timestamps with a time zone in UTC
        plain = pc.cast(column.view(pa.timestamp(data_type.unit)) if is_timestamp else column, pa.string())
        if not pa.types.is_date(data_type):
            plain = pc.replace_substring_regex(plain, _ZERO_FRACTION, "")
        if is_timestamp:
            plain = pc.replace_substring_regex(plain, r"^([-\d]+) ", r"\1T")  # for years that Arrow can format
            plain = pc.binary_join_element_wise(plain, "Z", "") if data_type.tz is not None else plain
    elif pa.types.is_floating(data_type):  # text has the shortest digits of a number in single precision
        plain = pc.cast(pc.cast(column, pa.string()) if pa.types.is_float32(data_type) else column, pa.float64())
    values: list[Any] = plain.to_pylist()
    return values


def plain_json(value: Any, *, repair: bool = True) -> Any:
    """Return a value that was parsed from JSON without null members of objects.

    Args:
        repair: replace unpaired surrogates, which JSON can encode but no tokenizer accepts.
    """
    if isinstance(value, str):
        if value.isascii() or not repair:
            return value
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {
            plain_json(name, repair=repair): plain_json(part, repair=repair)
            for name, part in value.items()
            if part is not None
        }
    return [plain_json(part, repair=repair) for part in value] if isinstance(value, list) else value


def _extension_values(column: pa.ExtensionArray) -> list[Any]:
    """Return the values of a column of an Arrow extension type: JSON, UUID, bool8, or the stored values of another."""
    name = column.type.extension_name
    if name == "arrow.json":
        try:
            return [None if text is None else plain_json(parse_json(text)) for text in column.storage.to_pylist()]
        except json.JSONDecodeError as err:
            raise ValueError(f"not JSON: {err}") from err
    if name == "arrow.uuid":
        return [None if value is None else str(value) for value in column.to_pylist()]
    return plain_values(pc.cast(column, pa.bool_()) if name == "arrow.bool8" else column.storage)


def _exact_number(value: Decimal) -> int | float | str:
    """Return a decimal without loss: as an integer, as a float that reads the same, or as text."""
    if value == value.to_integral_value():
        return int(value)
    nearest = float(value)
    return nearest if Decimal(repr(nearest)) == value else f"{value:f}".rstrip("0")
