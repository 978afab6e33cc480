"""Build the tables of an export: types that `datasets`, pyarrow and TRL read, and one schema for all files.

`table_of_records` infers the types of JSON records. `to_readable_table` converts the types of an Arrow table.
`unify_schemas` makes the schemas of all files of an export equal.

Arrow fills fields that a record lacks with null, and a chat template may write these nulls into the text of a
conversation. So if the records of a column differ in their fields, in the order of the fields or in the types of
values, the column is stored as JSON (`arrow.json`, the `Json` feature of `datasets`), and is read as the records were.
`datasets.load_dataset` chooses the same type for such columns of JSON lines.

A column of scalars of several types has the widest of them, e.g. text for numbers and text, like a label column of the
artifact; see `grasp.corpus.labels`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import isnan
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from grasp.corpus.labels import (
    ARROW_TYPE,
    Kind,
    column_of,
    is_json,
    is_label,
    is_list,
    is_text,
    kind_of_all,
    widest,
)
from grasp.corpus.sources import parquet_batches
from grasp.corpus.values import plain_values
from grasp.errors import CorpusError
from grasp.files import temporary_path
from grasp.text import json_text

# Arrow type of a column in all files, and how the column is converted to it: "cast" by Arrow, "json" to JSON text, or
# by `column_of` to labels of a Kind.
Conversion = tuple[pa.DataType, Literal["cast", "json"] | Kind]
_PROMOTABLE_TYPES = (  # tests of groups of types; within a group Arrow promotes without changing a value
    is_text,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_timestamp,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_duration,
    lambda arrow_type: pa.types.is_binary(arrow_type) or pa.types.is_large_binary(arrow_type),
)
_READABLE_TYPES = (  # tests of the types, besides nested ones, that `datasets` reads and Parquet can store
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_timestamp,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_duration,
    pa.types.is_decimal128,
    pa.types.is_decimal256,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
)


def table_of_records(records: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return JSON records as a table."""
    names = dict.fromkeys(name for record in records for name in record)
    return pa.table({name: _infer_column([record.get(name) for record in records]) for name in names})


def to_readable_table(table: pa.Table) -> pa.Table:
    """Return a table with types that `datasets` reads and Parquet can store; its schema has no metadata.

    Raises:
        CorpusError: the values of a column can be stored neither in Parquet nor as JSON.
    """
    return pa.table({name: _to_readable(name, table[name]) for name in table.column_names})


def unify_schemas(files: Sequence[Path]) -> None:
    """Rewrite Parquet files in place so that all have one schema; a column that a file lacks is filled with nulls.

    Raises:
        CorpusError: no type can hold the values of a column in all files.
    """
    schemas = [pq.read_schema(file) for file in files]
    names = dict.fromkeys(name for schema in schemas for name in schema.names)
    conversions = {name: _choose_conversion(files, schemas, name) for name in names}
    target = pa.schema([(name, arrow_type) for name, (arrow_type, _) in conversions.items()])
    for file, schema in zip(files, schemas, strict=True):
        if schema.equals(target):
            continue
        part = temporary_path(file)
        with pq.ParquetFile(file) as opened, pq.ParquetWriter(part, target, compression="zstd") as writer:
            for batch in parquet_batches(opened, schema.names):
                columns = [
                    _convert(name, batch.column(name), conversion)
                    if name in schema.names
                    else pa.nulls(len(batch), conversion[0])
                    for name, conversion in conversions.items()
                ]
                writer.write_table(pa.table(columns, schema=target))
        os.replace(part, file)


def _infer_column(values: Sequence[Any]) -> pa.Array:
    """Return JSON values as a column: of scalars, of an inferred nested type that preserves them, or of JSON."""
    if not any(isinstance(value, list | dict) for value in values):
        kind = kind_of_all(values)
        return pa.nulls(len(values)) if kind == "null" else column_of(values, kind)
    try:
        column = pa.array(values)
    except (pa.ArrowException, OverflowError):
        return _json_column(values)
    is_lossless = _is_inferred_exactly(column.type) or all(
        value is None or json_text(stored.as_py(), None) == json_text(value, None)
        for stored, value in zip(column, values, strict=True)
    )
    return column if is_lossless and _readable_type(column.type) == column.type else _json_column(values)


def _is_inferred_exactly(arrow_type: pa.DataType) -> bool:
    """Return whether the inference of this type cannot have changed a value, e.g. an integer into a float."""
    if is_list(arrow_type):
        return _is_inferred_exactly(arrow_type.value_type)
    # Arrow turns [1, 0.5] into [1.0, 0.5]
    return not (pa.types.is_struct(arrow_type) or pa.types.is_floating(arrow_type))


def _json_column(values: Sequence[Any]) -> pa.Array:
    """Return values as a column of JSON."""
    texts = [None if value is None else json_text(value, None, only_ascii=False) for value in values]
    return pa.array(texts, pa.string()).cast(pa.json_())


def _to_readable(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column in a type that `datasets` reads and Parquet can store."""
    target = _readable_type(column.type)
    if target == column.type:
        return column
    if target is not None and pa.types.is_nested(target):  # Arrow's cast of list views returns damaged arrays
        try:
            return pa.chunked_array([pa.array(column.to_pylist(), target)])
        except (pa.ArrowException, TypeError):
            target = None
    if target is None:
        return _convert(name, column, (pa.json_(), "json"))
    if is_text(target) and not is_text(column.type):
        return pa.chunked_array([column_of(plain_values(column), "string")])
    return column.cast(target)


def _readable_type(arrow_type: pa.DataType) -> pa.DataType | None:
    """Return the type in which `datasets` reads the values of an Arrow type; None: as JSON."""
    if is_json(arrow_type) or any(test(arrow_type) for test in _READABLE_TYPES):
        return arrow_type
    if isinstance(arrow_type, pa.BaseExtensionType):
        readable_extensions = {"arrow.uuid": pa.string(), "arrow.bool8": pa.bool_()}
        return readable_extensions.get(arrow_type.extension_name) or _readable_type(arrow_type.storage_type)
    if pa.types.is_dictionary(arrow_type):
        return _readable_type(arrow_type.value_type)
    if pa.types.is_string_view(arrow_type):
        return pa.string()
    if pa.types.is_binary_view(arrow_type):
        return pa.binary()
    if pa.types.is_decimal(arrow_type):
        return pa.decimal128(arrow_type.precision, arrow_type.scale)
    if is_list(arrow_type):
        element = _readable_type(arrow_type.value_type)
        if element is None or (element == arrow_type.value_type and not _is_view(arrow_type)):
            return None if element is None else arrow_type
        if pa.types.is_fixed_size_list(arrow_type):
            return pa.list_(element, arrow_type.list_size)
        is_large = pa.types.is_large_list(arrow_type) or pa.types.is_large_list_view(arrow_type)
        return pa.large_list(element) if is_large else pa.list_(element)
    if pa.types.is_struct(arrow_type) and arrow_type.num_fields:  # Parquet cannot store a struct without fields
        fields = [(field.name, _readable_type(field.type)) for field in arrow_type]
        return None if any(field_type is None for _, field_type in fields) else pa.struct(fields)
    return None


def _is_view(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(arrow_type) or pa.types.is_large_list_view(arrow_type))


def _column_batches(files: Sequence[Path], name: str) -> Iterator[pa.Array]:
    """Yield a column, batch by batch, from those files that have it."""
    for file in files:
        with pq.ParquetFile(file) as opened:
            if name in opened.schema_arrow.names:
                for batch in parquet_batches(opened, [name]):
                    yield batch.column(0)


def _choose_conversion(files: Sequence[Path], schemas: Sequence[pa.Schema], name: str) -> Conversion:
    """Return the type that holds a column of all files, and how the column is converted to it."""
    types = list(dict.fromkeys(schema.field(name).type for schema in schemas if name in schema.names))
    types = [arrow_type for arrow_type in types if not pa.types.is_null(arrow_type)] or [pa.null()]
    if len(types) == 1:
        return types[0], "cast"
    promoted = _promoted_type(types)
    if promoted is not None and all(_can_cast(column, promoted) for column in _column_batches(files, name)):
        return promoted, "cast"
    if all(is_label(arrow_type) and not is_json(arrow_type) for arrow_type in types):
        kind = widest({kind_of_all(plain_values(column)) for column in _column_batches(files, name)})
        return ARROW_TYPE[kind], kind
    return pa.json_(), "json"


def _promoted_type(types: Sequence[pa.DataType]) -> pa.DataType | None:
    """Return the type to which Arrow promotes all of these; None if their fields or kinds of values differ."""
    if all(pa.types.is_timestamp(arrow_type) and arrow_type.tz is not None for arrow_type in types):
        types = [pa.timestamp(arrow_type.unit, "UTC") for arrow_type in types]
    are_numbers = all(pa.types.is_integer(arrow_type) or pa.types.is_floating(arrow_type) for arrow_type in types)
    if not are_numbers and not all(_are_promotable(left, right) for left, right in combinations(types, 2)):
        return None
    try:
        schemas = [pa.schema([("", arrow_type)]) for arrow_type in types]
        return pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None


def _are_promotable(left: pa.DataType, right: pa.DataType) -> bool:
    """Return whether two types differ only in width, such as int32 and int64; structs need the same fields."""
    if pa.types.is_null(left) or pa.types.is_null(right):
        return True
    if is_list(left) and is_list(right):
        return _are_promotable(left.value_type, right.value_type)
    if pa.types.is_struct(left) and pa.types.is_struct(right):
        names = [[field.name for field in struct] for struct in (left, right)]
        return names[0] == names[1] and all(_are_promotable(a.type, b.type) for a, b in zip(left, right, strict=True))
    return left == right or any(test(left) and test(right) for test in _PROMOTABLE_TYPES)


def _can_cast(column: pa.Array, target: pa.DataType) -> bool:
    """Return whether all values of a column can be cast to a type."""
    try:
        column.cast(target)
    except pa.ArrowException:
        return False
    return True


def _convert(name: str, column: pa.Array | pa.ChunkedArray, conversion: Conversion) -> pa.Array | pa.ChunkedArray:
    """Convert a column to the type that all files have in common."""
    target, method = conversion
    if column.type == target:
        return column
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), target)
    if method == "cast":
        return column.cast(target)
    values = plain_values(column)
    if method != "json":  # labels have no NaN: it is stored as null
        return column_of([None if isinstance(v, float) and isnan(v) else v for v in values], method)
    try:
        return _json_column(values)
    except TypeError as err:
        raise CorpusError(
            f"column {name!r}: {err}: {column.type} cannot be written as JSON, the one type that would hold all its "
            "values; omit the column, or give it one type in all files"
        ) from err
