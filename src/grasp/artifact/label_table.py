"""Labels of rows: factorised columns, conditions that select a value, and expressions that select or label rows.

A condition such as `topic = 'Games'` is generated from a value, for options like --drop. An expression such as
`topic = 'Games' AND format != 'FAQs'` is untrusted input. DuckDB parses it without running it, the parse tree is
validated against a list of allowed nodes and functions, and only then it is evaluated, on in-memory batches of rows, by
a connection without external access and with locked configuration. An expression that passes the validation by mistake
still cannot reach a file, the environment, or another table. Start with `LabelTable.selection`.

A label may be an expression as well, such as `host(url)`: its value is the label of a row. A dotted path such as
`metadata.source` names a column, since nested fields have a column each.
"""

import functools
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.arrays import Bool
from grasp.artifact.label_functions import DEFAULT_BINS, GRASP_FUNCTIONS, MAX_BINS, define, quantile_edges
from grasp.corpus.values import plain_values
from grasp.errors import SubsetError
from grasp.store.contents import readable, readable_table
from grasp.text import did_you_mean, plain, unique_names

Label: TypeAlias = str | int | float | bool | None
NO_LABEL = "(no label)"
EMPTY = "(empty)"
PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_]*")
MAX_LITERAL_CHARS = 80  # characters; longer text is compared by its checksum

BATCH = 1 << 16
MAX_VALUES_SHOWN = 5  # values in a message
MAX_COMPARED_VALUES = 10_000  # values among which similar spellings are searched for
MAX_VALUE_CHARS = 60
MAX_EXPRESSION_CHARS = 20_000
MAX_UNBINNED_VALUES = 100  # of a numeric label; more are grouped into bins
_NON_NAME_CHARACTER = re.compile(r"[^\w\s.\"-]")  # a character that occurs in expressions but not in column names
LOCKING_STATEMENTS = """
    SET threads = 1;  -- keeps the order of rows
    SET python_enable_replacements = false;
    SET autoinstall_known_extensions = false;
    SET autoload_known_extensions = false;
    SET enable_external_access = false;
    SET lock_configuration = true;
"""
QUERY_PREFIX = "SELECT (\n"  # the line break keeps a comment in the expression from hiding the parenthesis

_CLASSES = """
    CONJUNCTION COMPARISON OPERATOR BETWEEN CONSTANT COLUMN_REF FUNCTION CAST CASE COLLATE TYPE
"""
EXPRESSION_CLASSES = frozenset(_CLASSES.split())
_FUNCTION_NAMES = """
    + - * / // % ** || ~~ !~~ ~~* !~~* ~~~ like_escape ilike_escape not_like_escape not_ilike_escape
    regexp_matches regexp_full_match lower upper trim ltrim rtrim length strlen contains starts_with ends_with
    prefix suffix substring substr left right replace concat split_part levenshtein jaccard
    abs floor ceil ceiling round sign sqrt ln log log2 log10 exp pow power greatest least isnan isfinite isinf
    year month day hour date_part date_trunc to_days to_months to_years to_hours ifnull hash md5
"""
FUNCTIONS = frozenset((*_FUNCTION_NAMES.split(), *GRASP_FUNCTIONS, "list_value"))
FORBIDDEN_CLAUSES = frozenset(
    ("where_clause", "group_expressions", "group_sets", "having", "sample", "qualify", "modifiers")
)


@dataclass(frozen=True, slots=True)
class LabelColumn:
    """A factorised label column: values in order of first appearance, and a 4-byte code per row; missing is `None`."""

    name: str
    values: tuple[Label, ...]
    codes_N: NDArray[np.int32]
    sql: str = ""  # expression that defines the label; empty: the column of this name
    note: str = ""  # how the values were derived, if this was not requested

    @property
    def operand(self) -> str:
        """Return the label as conditions name it."""
        return self.sql or identifier(self.name)

    @classmethod
    def from_values(cls, labels: Sequence[Label], name: str = "label") -> "LabelColumn":
        """Factorise a sequence of labels."""
        code_of: dict[Label, int] = {}
        codes_N = np.fromiter((code_of.setdefault(label, len(code_of)) for label in labels), np.int32, len(labels))
        return cls(name, tuple(code_of), codes_N)

    @property
    def counts(self) -> NDArray[np.int64]:
        """Return the number of rows per value."""
        return np.bincount(self.codes_N, minlength=len(self.values)).astype(np.int64)

    def names(self) -> tuple[str, ...]:
        """Return a distinct display name of each value, which floors and caps refer to.

        The name is the text of the value; if a value is `(no label)`, the missing label is `(no label) #2`.
        """
        spelled = [NO_LABEL if value is None else str(value) for value in self.values]
        is_placeholder = [value is None or not name.strip() for value, name in zip(self.values, spelled, strict=True)]
        # real values first, so that `different` numbers a placeholder rather than a value of the same spelling
        order = sorted(range(len(spelled)), key=is_placeholder.__getitem__)
        names = unique_names([spelled[code] if spelled[code].strip() else EMPTY for code in order])
        of_code = dict(zip(order, names, strict=True))
        return tuple(of_code[code] for code in range(len(spelled)))


# ----------------------------------------------------------------------------------------------------------- conditions


def equals(name: str, value: Label) -> str:
    """Return the condition that a label has this value.

    Args:
        name: `LabelColumn.operand`: an identifier, or an expression that is a single operand.

    Text that is long or not printable is compared by its MD5 checksum, so that conditions are safe to paste into a
    terminal.
    """
    if value is None:
        return f"{name} IS NULL"
    if isinstance(value, float) and not math.isfinite(value):
        return f"isnan({name})" if math.isnan(value) else f"isinf({name}) AND {name} {'>' if value > 0 else '<'} 0"
    if isinstance(value, str) and not (len(value) <= MAX_LITERAL_CHARS and value.isprintable()):
        return f"md5({name}) = '{hashlib.md5(value.encode(), usedforsecurity=False).hexdigest()}'"
    if isinstance(value, str):
        return f"{name} = '" + value.replace("'", "''") + "'"
    return f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}"


def none_of(name: str, values: Sequence[Label]) -> str:
    """Return the condition that a label has a value, and none of these; `name` as in `equals`."""
    listed = [value for value in values if value is not None]
    if not listed:
        return f"{name} IS NOT NULL"
    conditions, prefix = [equals(name, value) for value in listed], f"{name} = "
    if all(
        condition.startswith(prefix) and not isinstance(value, float)
        for condition, value in zip(conditions, listed, strict=True)
    ):
        return f"{name} NOT IN ({', '.join(condition.removeprefix(prefix) for condition in conditions)})"
    return f"{name} IS NOT NULL AND NOT ({' OR '.join(conditions)})"


def identifier(column: str) -> str:
    """Return a column name, or a dotted path, for expressions, in double quotes if needed."""
    if all(PLAIN_NAME.fullmatch(step) and step not in _keywords() for step in column.split(".")):
        return column
    return '"' + column.replace('"', '""') + '"'


@functools.cache
def _keywords() -> frozenset[str]:
    """Return the words that DuckDB does not accept as unquoted column names."""
    with duckdb.connect(":memory:") as db:
        result = db.execute("SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category <> 'unreserved'")
        return frozenset(name for (name,) in result.fetchall())


# --------------------------------------------------------------------------------------------------------- expressions


@dataclass(frozen=True, slots=True)
class Matched:
    """Rows that satisfy an expression, (N,); for `n_null` rows it is null, and they are not selected."""

    mask_N: Bool
    n_null: int
    columns: tuple[str, ...]  # named in the expression


class RowBatches(NamedTuple):
    """Rows that are not in one file; `read` yields batches with the columns that are named, in the order of rows."""

    schema: pa.Schema
    n_rows: int
    read: Callable[[list[str]], Iterator[pa.RecordBatch]]


class LabelTable:
    """The label columns of a Parquet file, or of other rows; they are read in batches."""

    def __init__(self, source: "Path | str | RowBatches") -> None:
        if isinstance(source, RowBatches):
            self.schema, self.n_rows, self.read_batches = source
        else:
            path = Path(source)
            with readable_table(path, SubsetError, "a table of rows"), pq.ParquetFile(path) as file:
                self.schema, self.n_rows = file.schema_arrow, int(file.metadata.num_rows)

            def read_batches(names: list[str]) -> Iterator[pa.RecordBatch]:
                with readable(path, "restore it from a copy", SubsetError), pq.ParquetFile(path) as file:
                    yield from file.iter_batches(batch_size=BATCH, columns=names)

            self.read_batches = read_batches
        self.columns: tuple[str, ...] = tuple(self.schema.names)  # allowed in expressions

    def selection(self, expression: str) -> Matched:
        """Evaluate a condition on the columns.

        Raises:
            SubsetError: a syntax error, an unknown column, anything but a condition on the columns of one row, or
                values that cannot be compared.
        """
        with duckdb.connect(":memory:") as db:
            query = _Query(self, db, expression, f"expression {expression!r}")
            if query.kind != pa.bool_():
                raise SubsetError(
                    f"{query.location}: has type {query.kind}, expected a condition that is true or false"
                )
            results = pa.chunked_array(list(query.values(query.sql, query.columns)), pa.bool_())
        mask_N = np.asarray(results.fill_null(False), dtype=np.bool_)
        return Matched(mask_N, results.null_count, query.columns)

    def matching(self, expression: str) -> Matched:
        """Evaluate a condition as `selection`, and require that it matches some rows but not all.

        Raises:
            SubsetError: it matches no row, or every row; the message lists frequent values.
        """
        selection = self.selection(expression)
        matched = int(selection.mask_N.sum())
        if 0 < matched < self.n_rows:
            return selection
        literals = [text.replace("''", "'") for text in re.findall(r"'((?:[^']|'')*)'", expression)]
        hints = []
        for name in selection.columns:  # the most frequent values, and similar spellings
            column = self.column(name)
            spelled = {str(value) for value in column.values} if len(column.values) <= MAX_COMPARED_VALUES else set()
            suggestions = "".join(did_you_mean(text, spelled) for text in literals if text not in spelled)
            first = []
            for code in np.argsort(-column.counts, kind="stable")[:MAX_VALUES_SHOWN]:
                value = column.values[code]
                text = "NULL" if value is None else str(value)
                text = f"'{plain(value)[:MAX_VALUE_CHARS]}'" if isinstance(value, str) else text
                first.append(f"{text} ({column.counts[code]:,} rows)")
            more = (
                f" and {len(column.values) - MAX_VALUES_SHOWN:,} more" if len(column.values) > MAX_VALUES_SHOWN else ""
            )
            hints.append(f"{identifier(name)} has {', '.join(first)}{more}{suggestions}")
        if not hints:
            known = ", ".join(identifier(name) for name in self.columns)
            hints = [
                "it names no column: 'single quotes' are for values, \"double quotes\" for a column with blanks, as in "
                f"\"doc type\" = 'FAQs'; the columns are {known}"
            ]
        how_many = "every row" if matched else "no row"
        raise SubsetError(f"expression {expression!r}: matches {how_many}; {'; '.join(hints)}")

    def column(self, name: str, location: str = "label") -> LabelColumn:
        """Read a label: a column, or the values of an expression; `location` is the argument that messages name.

        A column of numbers with more than `MAX_UNBINNED_VALUES` values is grouped into bins, with a note.

        Raises:
            SubsetError: an unknown column, or an expression that is invalid or has no single values.
        """
        if self.spelled(name) is None and _NON_NAME_CHARACTER.search(name):
            return self._computed(name, f"{location}: expression {name!r}")
        name = self.known(name, location)
        kind = self.schema.field(name).type
        is_numeric = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        most = MAX_UNBINNED_VALUES if is_numeric else sys.maxsize
        if (column := _factorised(name, self.read_batches([name]), most)) is not None:
            return column
        bins = f"bins({identifier(name)}, {DEFAULT_BINS})"
        note = (
            f"{name}: numbers with more than {MAX_UNBINNED_VALUES} values, grouped as {bins}; other edges: "
            f"bins({name}, [...])"
        )
        return replace(self._computed(bins, f"{location}: expression {bins!r}"), name=name, note=note)

    def _computed(self, expression: str, location: str) -> LabelColumn:
        with duckdb.connect(":memory:") as db:
            query = _Query(self, db, expression, location)
            if not query.columns:
                raise SubsetError(f"{location}: it names no column; the columns are {list(self.columns)}")
            arrays = query.values(query.sql, query.columns)
            column = _factorised(expression, (pa.record_batch([array], ["x"]) for array in arrays))
            assert column is not None
            return replace(column, sql=query.operand)

    def spelled(self, name: str) -> str | None:
        """Return the column name as the file spells it, or None; case is ignored, as in SQL."""
        if name in self.columns:
            return name
        return {column.lower(): column for column in self.columns}.get(name.lower())

    def known(self, name: str, location: str) -> str:
        """Return the column name as the file spells it; raise SubsetError if there is none."""
        if (spelled := self.spelled(name)) is not None:
            return spelled
        raise SubsetError(
            f"{location}: unknown column {name!r}{did_you_mean(name, self.columns)}; the columns are "
            f"{list(self.columns)}; text goes in 'single quotes'"
        )


def _factorised(name: str, batches: Iterator[pa.RecordBatch], most: int = sys.maxsize) -> LabelColumn | None:
    """Return the label in the only column of batches; None as soon as it has more than `most` values."""
    code_of: dict[Label, int] = {}
    parts = [np.empty(0, np.int32)]
    for batch in batches:
        array = batch.column(0)
        is_kind = (pa.types.is_string, pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating)
        if not any(test(array.type) for test in is_kind):  # e.g. a date, a decimal
            array = pa.array(plain_values(array))
        encoded = array.dictionary_encode(null_encoding="encode")
        if len(encoded.dictionary) > most + 1:  # one more: 0.0 and -0.0 are two entries, but one value
            return None
        codes = [code_of.setdefault(value, len(code_of)) for value in encoded.dictionary.to_pylist()]
        if len(code_of) > most:
            return None
        parts.append(np.asarray(codes, np.int32)[encoded.indices.to_numpy()])
    return LabelColumn(name, tuple(code_of), np.concatenate(parts))


class _Query:
    """A valid expression over the columns of a table; it locks the new connection that evaluates it."""

    def __init__(self, table: LabelTable, db: duckdb.DuckDBPyConnection, expression: str, location: str) -> None:
        self._table, self._db, self.location = table, db, location
        db.execute(LOCKING_STATEMENTS)
        self._statement = _parse(db, expression, table.columns, location)
        self.columns = self._resolve(self._statement)
        calls = [item for item in _expressions(self._statement) if item["class"] == "FUNCTION"]
        define(db, {call["function_name"].lower() for call in calls})
        for call in calls:
            if call["function_name"].lower() == "bins":
                self._set_edges([argument["expression"] for argument in call["arguments"]], call)
        self.sql = self._sql_of(self._statement["statements"][0]["node"]["select_list"][0])
        self.kind = self._kind(self.sql, self.columns)

    @property
    def operand(self) -> str:
        """Return the expression as an operand of a condition, as people write it."""
        sql = self.sql
        if "'" not in sql:  # no text that could look like a call; DuckDB prints "host"(url) and list_value(0.5, 0.8)
            sql = re.sub(r'"(\w+)"\(', r"\1(", re.sub(r"\blist_value\(([^()]*)\)", r"[\1]", sql))
        node = _parse_node(self._db, self.sql)
        is_call = node["class"] in ("FUNCTION", "COLUMN_REF") and not node.get("is_operator")
        return sql if is_call else f"({sql})"

    def values(self, sql: str, columns: Sequence[str]) -> Iterator[pa.Array]:
        """Yield the values of an expression, such as `sql` with its `columns`, batch by batch."""
        for batch in self._table.read_batches(self._inputs(columns)):
            yield self._evaluate(sql, batch)

    def _inputs(self, columns: Sequence[str]) -> list[str]:
        return list(columns) or list(self._table.columns[:1])  # one, if none is named, for the number of rows

    def _kind(self, sql: str, columns: Sequence[str]) -> pa.DataType:
        """Return the type of an expression; an empty batch reveals errors before the file is read."""
        fields = [self._table.schema.field(name) for name in self._inputs(columns)]
        return self._evaluate(sql, pa.RecordBatch.from_pylist([], schema=pa.schema(fields))).type

    def _evaluate(self, sql: str, batch: pa.RecordBatch) -> pa.Array:
        try:
            self._db.register("row_batch", pa.Table.from_batches([batch]))
            column = self._db.sql(f"SELECT ({sql}) AS selected FROM row_batch").to_arrow_table().column(0)
        except duckdb.Error as err:
            raise SubsetError(f"{self.location}: {_one_line(err)}") from err
        return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)

    def _resolve(self, tree: Any) -> tuple[str, ...]:
        """Replace dotted paths by the columns of nested fields, and return the columns that are named."""
        names = set()
        for node in _expressions(tree):
            if node["class"] == "COLUMN_REF":
                name = self._table.known(".".join(node["column_names"]), self.location)
                node["column_names"] = [name]
                names.add(name)
        return tuple(sorted(names))

    def _set_edges(self, arguments: Sequence[dict[str, Any]], call: dict[str, Any]) -> None:
        """Replace the number of bins of a call by the edges at quantiles of all rows, and validate given edges."""
        values, bins = arguments[0], arguments[-1]
        is_list = bins.get("function_name") == "list_value"
        nodes = [argument["expression"] for argument in bins["arguments"]] if is_list else [bins]
        try:
            numbers = [float(node["literal"]["text"]) for node in nodes]
        except (KeyError, ValueError):
            numbers = []
        is_ascending = all(low < high for low, high in pairwise(numbers))
        is_count = all(number.is_integer() and 2 <= number <= MAX_BINS for number in numbers)
        if len(arguments) != 2 or not numbers or not (is_ascending if is_list else is_count):
            raise SubsetError(
                f"{self.location}: bins: expected two arguments, values and 2 to {MAX_BINS:,} bins or ascending edges "
                "in brackets, e.g. bins(x, [0.5, 0.8])"
            )
        if is_list:
            return
        sql, columns, edges = self._sql_of(values), self._resolve(values), list[float]()
        kind = self._kind(sql, columns)
        if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
            values_N = pa.chunked_array(list(self.values(sql, columns)), kind).cast(pa.float64())
            edges = quantile_edges(values_N.to_numpy(), int(numbers[0]))
        if not edges:
            raise SubsetError(f"{self.location}: bins: got values of type {kind}, expected numbers that differ")
        call["arguments"][1]["expression"] = _parse_node(self._db, f"[{', '.join(map(repr, edges))}]")

    def _sql_of(self, node: dict[str, Any]) -> str:
        """Return a node of the statement as SQL text, without comments."""
        (statement,) = self._statement["statements"]
        selected = {**statement["node"], "select_list": [{**node, "alias": ""}]}
        changed = {**self._statement, "statements": [{**statement, "node": selected}]}
        text = str(self._db.execute("SELECT json_deserialize_sql(?)", [json.dumps(changed)]).fetchall()[0][0])
        return text.removeprefix("SELECT ").removesuffix(" FROM row_batch")


def _parse_node(db: duckdb.DuckDBPyConnection, sql: str) -> dict[str, Any]:
    """Return the parse tree of an expression that is known to be valid."""
    parsed = json.loads(db.execute("SELECT json_serialize_sql(?)", [f"SELECT {sql}"]).fetchall()[0][0])
    node: dict[str, Any] = parsed["statements"][0]["node"]["select_list"][0]
    return node


def _parse(db: duckdb.DuckDBPyConnection, expression: str, columns: Collection[str], location: str) -> dict[str, Any]:
    """Parse an expression into a statement, and validate that it is a single allowed expression."""
    parsed: dict[str, Any] = {}
    if not expression.strip():
        problem = "empty; expected a condition such as topic = 'Games'"
    elif len(expression) > MAX_EXPRESSION_CHARS or "\0" in expression:
        location = f"expression {expression[:60]!r}..."
        problem = f"{len(expression)} characters; expected at most {MAX_EXPRESSION_CHARS} of plain text"
    else:
        try:
            row = db.execute("SELECT json_serialize_sql(?)", [f"{QUERY_PREFIX}{expression}\n)"]).fetchall()[0]
            parsed = json.loads(row[0])
            problem = _problem_of(parsed, expression, columns)
        except RecursionError:
            location, problem = f"expression {expression[:60]!r}...", "nested too deeply; split it"
        except duckdb.Error as err:
            problem = _one_line(err)
    if problem:
        raise SubsetError(f"{location}: {problem}")
    return parsed


def _problem_of(parsed: dict[str, Any], expression: str, columns: Collection[str]) -> str:
    """Return why a parsed text is not a single allowed expression; empty if it is one."""
    if parsed.get("error"):
        need_quotes = [name for name in columns if identifier(name) != name]
        unquoted = [name for name in need_quotes if name in expression.replace(identifier(name), "")]
        hint = f"; write the column in double quotes: {', '.join(map(identifier, unquoted))}" if unquoted else ""
        if parsed.get("error_type") != "parser":
            return f"statements are refused; expected a condition on the columns, such as topic = 'Games'{hint}"
        message = " ".join(str(parsed["error_message"]).split())
        at = int(parsed["position"]) - len(QUERY_PREFIX) if parsed.get("position") else -1
        if not 0 <= at < len(expression):
            return f"{message.split(' at or near')[0]} at its end{hint}"
        around = f"{expression[max(0, at - 20) : at]}>>>{expression[at : at + 20]}"
        return f"{message} (character {at + 1}: ...{around}){hint}"
    statements = parsed["statements"]
    node = statements[0]["node"]
    is_plain = (
        node["type"] == "SELECT_NODE"
        and node["from_table"]["type"] == "EMPTY"
        and len(node["select_list"]) == 1
        and not any(node.get(key) for key in FORBIDDEN_CLAUSES)
        and not node["cte_map"]["map"]
    )
    if len(statements) != 1 or not is_plain:
        return "is not a single condition; expected one, such as topic = 'Games' AND n_tokens > 64"
    return next(filter(None, map(_problem_of_node, _expressions(node["select_list"][0]))), "")


def _problem_of_node(node: dict[str, Any]) -> str:
    """Return why a node or its function is not allowed; empty if it is."""
    kind, name = node["class"], node.get("function_name", "")
    if kind not in EXPRESSION_CLASSES or node["type"] == "OPERATOR_TRY":
        return f"{kind.lower()} is not allowed; expected columns, constants and plain functions"
    if kind == "FUNCTION" and (name.lower() not in FUNCTIONS or node.get("schema") or node.get("catalog")):
        allowed = " ".join(sorted(filter(str.isidentifier, FUNCTIONS)))
        return f"function {name!r} is not allowed{did_you_mean(name, FUNCTIONS)}; allowed are {allowed}"
    if name.lower() == "replace":  # the length of a NULL, a number or a column is unknown
        literals = [argument["expression"].get("literal", {}) for argument in node["arguments"][1:]]
        texts = [literal["text"] for literal in literals if literal.get("kind") == "STRING"]
        if len(texts) != 2 or len(texts[1].encode()) > len(texts[0].encode()):
            return (
                "replace must not lengthen text; expected constants, the new one no longer than the old one, e.g. "
                "replace(topic, ' ', '_')"
            )
    return ""


def _expressions(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield every node of a parse tree that has a class, in any order."""
    left = [tree]
    while left:
        item = left.pop()
        if isinstance(item, dict):
            if "class" in item:
                yield item
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)


def _one_line(err: duckdb.Error) -> str:
    return str(err).split("\n\n", maxsplit=1)[0].replace("\n", " ").replace("\t", " ")
