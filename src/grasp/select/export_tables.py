"""Build the tables of an export: types that `datasets`, pyarrow and TRL read, and one schema for all files.

Start with `table_of_records`, `to_readable_table`, `schema_of_file` and `unify_schemas`.

Arrow fills fields that a record lacks with null, and a chat template may write these nulls into the text of a
conversation. So if the records of a column differ in their fields, in the order of the fields or in the types of
values, the column is stored as JSON (`arrow.json`, the `Json` feature of `datasets`), and is read as the records were.
`datasets.load_dataset` chooses the same type for such columns of JSON lines.

Features of `datasets` that Arrow types do not imply (names of classes, images) stay with their columns: in tables as
metadata of the field, in files as metadata of the schema, where `datasets` reads them.

A column of scalars of several types has the widest of them, e.g. text for numbers and text, like a label column of the
artifact; see `grasp.corpus.labels`.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from math import isnan
from pathlib import Path
from typing import Any

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

_PROMOTABLE_TESTS = (  # tests for groups of types that Arrow promotes to one another without changing a value
    is_text,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_timestamp,
    pa.types.is_date,
    pa.types.is_time,
    pa.types.is_duration,
    lambda dtype: pa.types.is_binary(dtype) or pa.types.is_large_binary(dtype),
)
_READABLE_TESTS = (  # tests for types that `datasets` reads and Parquet stores, besides numbers and times
    pa.types.is_null,
    pa.types.is_decimal128,
    pa.types.is_decimal256,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
)
_FEATURES = b"huggingface"  # key of the metadata
_IMPLIED_FEATURES = {"Value", "List", "LargeList", "Sequence", "Json"}  # by Arrow types


def table_of_records(records: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return JSON records as a table."""
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(name for record in records for name in record):
        values = [record.get(name) for record in records]
        if not any(isinstance(value, list | dict) for value in values):
            kind = kind_of_all(values)
            columns[name] = pa.nulls(len(values)) if kind == "null" else column_of(values, kind)
            continue
        try:
            column = pa.array(values)
        except (pa.ArrowException, OverflowError):
            columns[name] = _json_column(values)
            continue
        is_lossless = all(  # Arrow turns [1, 0.5] into [1.0, 0.5], and adds members that a record lacks
            value is None or json_text(part.as_py(), indent=None) == json_text(value, indent=None)
            for part, value in zip(column, values, strict=True)
        )
        is_kept = is_lossless and _readable_type(column.type) == column.type
        columns[name] = column if is_kept else _json_column(values)
    return pa.table(columns)


def to_readable_table(table: pa.Table | pa.RecordBatch) -> pa.Table:
    """Return a table with types that `datasets` reads and Parquet can store; its fields have features as metadata.

    Raises:
        CorpusError: the values of a column can be stored neither in Parquet nor as JSON.
    """
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    features = _features_in(table.schema)
    columns = {name: _to_readable(name, table[name]) for name in table.column_names}
    fields = [pa.field(name, column.type, metadata=features.get(name)) for name, column in columns.items()]
    return pa.table(list(columns.values()), pa.schema(fields))


def _features_in(schema: pa.Schema) -> dict[str, dict[bytes, str]]:
    """Return the features that `datasets` has written to the metadata of a schema, as metadata of fields."""
    try:
        features = json.loads((schema.metadata or {})[_FEATURES])["info"]["features"].items()
    except (ValueError, KeyError, TypeError, AttributeError):  # absent, or written by something else
        return {}
    texts = {name: json.dumps(feature) for name, feature in features}
    kinds = {name: set(re.findall(r'"_type": "(\w+)"', text)) for name, text in texts.items()}
    return {name: {_FEATURES: text} for name, text in texts.items() if kinds[name] - _IMPLIED_FEATURES}


def schema_of_file(schema: pa.Schema) -> pa.Schema:
    """Return the schema of a file for tables with this one, with the features of its fields in its metadata.

    `datasets` ignores a feature whose type is not that of the column.
    """
    features = {field.name: json.loads(field.metadata[_FEATURES]) for field in schema if field.metadata}
    metadata = {_FEATURES: json.dumps({"info": {"features": features}})} if features else None
    return pa.schema([field.remove_metadata() for field in schema], metadata)


def unify_schemas(files: Sequence[Path]) -> None:
    """Rewrite Parquet files in place so that all have one schema; a column that a file lacks is filled with nulls.

    A feature remains if all files with the column have it.

    Raises:
        CorpusError: no type can hold the values of a column in all files.
    """
    schemas = [pq.read_schema(file) for file in files]
    names = dict.fromkeys(name for schema in schemas for name in schema.names)
    conversions = {name: _choose_conversion(files, schemas, name) for name in names}
    features = [_features_in(schema) for schema in schemas]
    fields = []
    for name, (dtype, _) in conversions.items():
        in_files = [features[k].get(name) for k, schema in enumerate(schemas) if name in schema.names]
        is_same = in_files.count(in_files[0]) == len(in_files)
        fields.append(pa.field(name, dtype, metadata=in_files[0] if is_same else None))
    target = schema_of_file(pa.schema(fields))
    for file, schema in zip(files, schemas, strict=True):
        if schema.equals(target, check_metadata=True):
            continue
        part = temporary_path(file)
        with pq.ParquetFile(file) as opened, pq.ParquetWriter(part, target, compression="zstd") as writer:
            for batch in parquet_batches(opened, schema.names):
                columns = [
                    _convert(name, batch.column(name), dtype, kind)
                    if name in schema.names
                    else pa.nulls(len(batch), dtype)
                    for name, (dtype, kind) in conversions.items()
                ]
                writer.write_table(pa.table(columns, schema=target))
        os.replace(part, file)


def _json_column(values: Sequence[Any]) -> pa.Array:
    """Return values as a column of JSON."""
    texts = [None if value is None else json_text(value, indent=None, only_ascii=False) for value in values]
    return pa.array(texts, pa.string()).cast(pa.json_())


def _to_readable(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column in a type that `datasets` reads and Parquet can store."""
    target = _readable_type(column.type)
    if target == column.type:
        return column
    if target is not None and pa.types.is_nested(target):
        # Arrow's cast of list views returns damaged arrays, so nested values are converted by way of Python; values
        # that do not fit become JSON.
        try:
            return pa.chunked_array([pa.array(column.to_pylist(), target)])
        except (pa.ArrowException, TypeError):
            target = None
    if target is None:
        return _convert(name, column, pa.json_())
    if is_text(target) and not is_text(column.type):
        return pa.chunked_array([column_of(plain_values(column), "string")])
    return column.cast(target)


def _readable_type(dtype: pa.DataType) -> pa.DataType | None:
    """Return the type in which `datasets` reads the values of an Arrow type; None: as JSON."""
    is_number = pa.types.is_primitive(dtype) and not pa.types.is_interval(dtype)  # or a time
    if is_number or is_json(dtype) or any(test(dtype) for test in _READABLE_TESTS):
        return dtype
    if isinstance(dtype, pa.BaseExtensionType):
        plain_types = {"arrow.uuid": pa.string(), "arrow.bool8": pa.bool_()}
        return plain_types.get(dtype.extension_name) or _readable_type(dtype.storage_type)
    if pa.types.is_dictionary(dtype):
        return _readable_type(dtype.value_type)
    if pa.types.is_string_view(dtype):
        return pa.string()
    if pa.types.is_binary_view(dtype):
        return pa.binary()
    if pa.types.is_decimal(dtype):  # decimal32 and decimal64; wider ones are readable
        return pa.decimal128(dtype.precision, dtype.scale)
    if is_list(dtype):
        element = _readable_type(dtype.value_type)
        if element is None:
            return None
        is_view = pa.types.is_list_view(dtype) or pa.types.is_large_list_view(dtype)
        if element == dtype.value_type and not is_view:
            return dtype
        if pa.types.is_fixed_size_list(dtype):
            return pa.list_(element, dtype.list_size)
        is_large = pa.types.is_large_list(dtype) or pa.types.is_large_list_view(dtype)
        return pa.large_list(element) if is_large else pa.list_(element)
    if pa.types.is_struct(dtype) and dtype.num_fields:  # Parquet cannot store a struct without members
        members = [(member.name, _readable_type(member.type)) for member in dtype]
        return None if any(member is None for _, member in members) else pa.struct(members)
    return None


def _choose_conversion(
    files: Sequence[Path], schemas: Sequence[pa.Schema], name: str
) -> tuple[pa.DataType, Kind | None]:
    """Return the type that holds a column of all files, and the kind of label that its values become, if any."""

    def batches() -> Iterator[pa.Array]:
        for file, schema in zip(files, schemas, strict=True):
            if name in schema.names:
                with pq.ParquetFile(file) as opened:
                    yield from (batch.column(0) for batch in parquet_batches(opened, [name]))

    types = list(dict.fromkeys(schema.field(name).type for schema in schemas if name in schema.names))
    types = [dtype for dtype in types if not pa.types.is_null(dtype)] or [pa.null()]
    if len(types) == 1:
        return types[0], None
    # Time zones do not change the moment that is stored, but Arrow does not promote one to another.
    if all(pa.types.is_timestamp(dtype) and dtype.tz is not None for dtype in types):
        types = [pa.timestamp(dtype.unit, "UTC") for dtype in types]
    numbers = all(pa.types.is_integer(dtype) or pa.types.is_floating(dtype) for dtype in types)
    if numbers or all(_same_kind(left, right) for left, right in combinations(types, 2)):
        with suppress(pa.ArrowException):  # not promoted, or a value cannot be cast
            single_columns = [pa.schema([("", dtype)]) for dtype in types]
            promoted = pa.unify_schemas(single_columns, promote_options="permissive").field(0).type
            for column in batches():
                column.cast(promoted)
            return promoted, None
    if all(is_label(dtype) and not is_json(dtype) for dtype in types):
        kind = widest({kind_of_all(plain_values(column)) for column in batches()})
        return ARROW_TYPE[kind], kind
    return pa.json_(), None


def _same_kind(left: pa.DataType, right: pa.DataType) -> bool:
    """Return whether two types hold the same kind of value, with the same members, in different widths."""
    if pa.types.is_null(left) or pa.types.is_null(right):
        return True
    if is_list(left) and is_list(right):
        return _same_kind(left.value_type, right.value_type)
    if pa.types.is_struct(left) and pa.types.is_struct(right):
        names = [[member.name for member in dtype] for dtype in (left, right)]
        return names[0] == names[1] and all(_same_kind(a.type, b.type) for a, b in zip(left, right, strict=True))
    return left == right or any(test(left) and test(right) for test in _PROMOTABLE_TESTS)


def _convert(
    name: str, column: pa.Array | pa.ChunkedArray, target: pa.DataType, kind: Kind | None = None
) -> pa.Array | pa.ChunkedArray:
    """Convert a column to the type that all files have in common: as labels of a kind, as JSON text, or by a cast."""
    if column.type == target:
        return column
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), target)
    if kind is not None:  # labels have no NaN: it is stored as null
        return column_of([None if isinstance(v, float) and isnan(v) else v for v in plain_values(column)], kind)
    if not is_json(target):
        return column.cast(target)
    try:
        return _json_column(plain_values(column))
    except TypeError as err:
        raise CorpusError(
            f"column {name!r}: {err}: {column.type} cannot be written as JSON, the one type that would hold all its "
            "values; leave the column out, or give it one type in all files"
        ) from err
