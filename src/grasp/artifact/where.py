"""Labels of rows: factorised columns, conditions that select a value, and expressions that select rows.

A condition such as `topic = 'Games'` is generated from a value, for options like --drop. An expression such as
`topic = 'Games' AND format != 'FAQs'` is untrusted input. DuckDB parses it without running it, the parse tree is
validated against a list of allowed nodes and functions, and only then it is evaluated, on in-memory batches of rows, by
a connection without external access and with locked configuration. An expression that passes the validation by mistake
still cannot reach a file, the environment, or another table. Start with `LabelTable.selection`.
"""

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.arrays import Bool
from grasp.errors import SubsetError
from grasp.store.contents import readable, readable_table
from grasp.text import did_you_mean, different, plain

Label: TypeAlias = str | int | float | bool | None
NO_LABEL = "(no label)"
EMPTY = "(empty)"
PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_]*")
LONGEST_LITERAL = 80  # characters; longer text is compared by its checksum

BATCH = 1 << 16
SHOWN = 5  # values in a message
MOST_COMPARED = 10_000  # values among which similar spellings are searched for
LONGEST = 60
MAX_LENGTH = 20_000
LOCKED = """
    SET threads = 1;  -- keeps the order of rows
    SET python_enable_replacements = false;
    SET autoinstall_known_extensions = false;
    SET autoload_known_extensions = false;
    SET enable_external_access = false;
    SET lock_configuration = true;
"""
OPENING = "SELECT (\n"  # the line break keeps a comment in the expression from hiding the parenthesis

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
FUNCTIONS = frozenset(_FUNCTION_NAMES.split())
_STATEMENT_WORDS = """
    attach call copy create delete detach drop export from import insert install load pragma select set update with
"""
STATEMENTS = frozenset(_STATEMENT_WORDS.split())
STATEMENT_REFUSED = "statements are refused; expected a condition on the columns, such as topic = 'Games'"
PLAIN_SELECT = frozenset(
    ("where_clause", "group_expressions", "group_sets", "having", "sample", "qualify", "modifiers")
)


@dataclass(frozen=True, slots=True)
class LabelColumn:
    """A factorised label column: values in order of first appearance, and a 4-byte code per row; missing is `None`."""

    name: str
    values: tuple[Label, ...]
    codes_N: NDArray[np.int32]

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
        order = sorted(range(len(spelled)), key=is_placeholder.__getitem__)
        names = different([spelled[code] if spelled[code].strip() else EMPTY for code in order])
        of_code = dict(zip(order, names, strict=True))
        return tuple(of_code[code] for code in range(len(spelled)))


# ----------------------------------------------------------------------------------------------------------- conditions


def equals(column: str, value: Label) -> str:
    """Return the condition that a column has this value.

    Text that is long or not printable is compared by its MD5 checksum, so that conditions are safe to paste into a
    terminal.
    """
    name = identifier(column)
    if value is None:
        return f"{name} IS NULL"
    if isinstance(value, float) and not math.isfinite(value):
        return f"isnan({name})" if math.isnan(value) else f"isinf({name}) AND {name} {'>' if value > 0 else '<'} 0"
    if isinstance(value, str) and not (len(value) <= LONGEST_LITERAL and value.isprintable()):
        return f"md5({name}) = '{hashlib.md5(value.encode(), usedforsecurity=False).hexdigest()}'"
    if isinstance(value, str):
        return f"{name} = '" + value.replace("'", "''") + "'"
    return f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}"


def none_of(column: str, values: Sequence[Label]) -> str:
    """Return the condition that a column has a value, and none of these."""
    name, listed = identifier(column), [value for value in values if value is not None]
    if not listed:
        return f"{name} IS NOT NULL"
    conditions, prefix = [equals(column, value) for value in listed], f"{name} = "
    if all(
        condition.startswith(prefix) and not isinstance(value, float)
        for condition, value in zip(conditions, listed, strict=True)
    ):
        return f"{name} NOT IN ({', '.join(condition.removeprefix(prefix) for condition in conditions)})"
    return f"{name} IS NOT NULL AND NOT ({' OR '.join(conditions)})"


def identifier(column: str) -> str:
    """Return a column name for expressions, in double quotes if needed."""
    if PLAIN_NAME.fullmatch(column) and column not in _keywords():
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


class LabelTable:
    """The label columns of an artifact; the file is read in batches."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        with readable_table(self.path, SubsetError, "a table of rows"), pq.ParquetFile(self.path) as file:
            self._schema: pa.Schema = file.schema_arrow
            self.n_rows = int(file.metadata.num_rows)
        self.columns: tuple[str, ...] = tuple(self._schema.names)  # allowed in expressions

    def selection(self, expression: str) -> Matched:
        """Evaluate a condition on the columns.

        Raises:
            SubsetError: a syntax error, an unknown column, anything but a condition on the columns of one row, or
                values that cannot be compared.
        """
        where, query = f"expression {expression!r}", f"{OPENING}{expression}\n) AS selected FROM row_batch"
        with duckdb.connect(":memory:") as db:
            db.execute(LOCKED)
            tree = _parse_condition(db, expression, self.columns)
            paths = [node["column_names"] for node in _expressions(tree) if node["class"] == "COLUMN_REF"]
            if dotted := [".".join(path) for path in paths if len(path) != 1]:
                raise SubsetError(f"{where}: {dotted[0]!r} has a dot; expected a column among {list(self.columns)}")
            names = sorted({self._known(path[0], where) for path in paths})

            def evaluate(batch: pa.RecordBatch) -> pa.Table:
                try:
                    db.register("row_batch", pa.Table.from_batches([batch]))
                    return db.sql(query).to_arrow_table()
                except duckdb.Error as err:
                    raise SubsetError(f"{where}: {_one_line(err)}") from err

            fields = [self._schema.field(name) for name in names or self.columns[:1]]
            # an empty batch reveals type errors before the file is read
            kind = evaluate(pa.RecordBatch.from_pylist([], schema=pa.schema(fields))).schema.types[0]
            if kind != pa.bool_():
                raise SubsetError(f"{where}: has type {kind}, expected a condition that is true or false")
            mask_N = np.zeros(self.n_rows, dtype=np.bool_)
            start = n_null = 0
            for batch in self._batches(names):
                result = evaluate(batch).column(0)
                n_null += result.null_count
                mask_N[start : start + batch.num_rows] = result.fill_null(False).to_numpy()
                start += batch.num_rows
        return Matched(mask_N, n_null, tuple(names))

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
            spelled = {str(value) for value in column.values} if len(column.values) <= MOST_COMPARED else set()
            suggestions = "".join(did_you_mean(text, spelled) for text in literals if text not in spelled)
            first = []
            for code in np.argsort(-column.counts, kind="stable")[:SHOWN]:
                value = column.values[code]
                text = "NULL" if value is None else str(value)
                text = f"'{plain(value)[:LONGEST]}'" if isinstance(value, str) else text
                first.append(f"{text} ({column.counts[code]:,} rows)")
            more = f" and {len(column.values) - SHOWN:,} more" if len(column.values) > SHOWN else ""
            hints.append(f"{identifier(name)} has {', '.join(first)}{more}{suggestions}")
        if not hints:
            known = ", ".join(identifier(name) for name in self.columns)
            hints = [
                "it names no column: 'single quotes' are for values, \"double quotes\" for a column with blanks, as in "
                f"\"doc type\" = 'FAQs'; the columns are {known}"
            ]
        how_many = "every row" if matched else "no row"
        raise SubsetError(f"expression {expression!r}: matches {how_many}; {'; '.join(hints)}")

    def column(self, name: str, where: str = "label") -> LabelColumn:
        """Read a label column; `where` is the argument that messages name."""
        name = self._known(name, where)
        code_of: dict[Label, int] = {}
        parts = [np.empty(0, np.int32)]
        for batch in self._batches([name]):
            encoded = batch.column(0).dictionary_encode(null_encoding="encode")
            codes = [code_of.setdefault(value, len(code_of)) for value in encoded.dictionary.to_pylist()]
            parts.append(np.asarray(codes, np.int32)[encoded.indices.to_numpy()])
        return LabelColumn(name, tuple(code_of), np.concatenate(parts))

    def _batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        with readable(self.path, "restore it from a copy", SubsetError), pq.ParquetFile(self.path) as file:
            yield from file.iter_batches(batch_size=BATCH, columns=names or self.columns[:1])

    def _known(self, name: str, where: str) -> str:
        """Return the column name as the file spells it; case is ignored, as in SQL."""
        if name in self.columns:
            return name
        spelled = {column.lower(): column for column in self.columns}
        if name.lower() in spelled:
            return spelled[name.lower()]
        raise SubsetError(
            f"{where}: unknown column {name!r}{did_you_mean(name, self.columns)}; the columns are "
            f"{list(self.columns)}; text goes in 'single quotes'"
        )


def _parse_condition(db: duckdb.DuckDBPyConnection, expression: str, columns: tuple[str, ...]) -> dict[str, Any]:
    """Parse an expression, and validate that it is a single allowed condition."""
    where = f"expression {expression!r}"
    if not expression.strip():
        raise SubsetError(f"{where}: empty; expected a condition such as topic = 'Games'")
    if len(expression) > MAX_LENGTH or "\0" in expression:
        raise SubsetError(
            f"expression {expression[:60]!r}...: {len(expression)} characters; "
            f"expected at most {MAX_LENGTH} of plain text"
        )
    if (word := expression.split(maxsplit=1)[0].lower()) in STATEMENTS and word not in columns:
        raise SubsetError(f"{where}: {STATEMENT_REFUSED}")
    try:
        row = db.execute("SELECT json_serialize_sql(?)", [f"{OPENING}{expression}\n)"]).fetchall()[0]
        parsed: dict[str, Any] = json.loads(row[0])
    except RecursionError as err:
        raise SubsetError(f"expression {expression[:60]!r}...: nested too deeply; split it") from err
    except duckdb.Error as err:
        raise SubsetError(f"{where}: {_one_line(err)}") from err
    if parsed.get("error"):
        problem = STATEMENT_REFUSED
        if parsed.get("error_type") == "parser":
            problem = " ".join(str(parsed["error_message"]).split())
            at = int(parsed["position"]) - len(OPENING) if parsed.get("position") else -1
            if 0 <= at < len(expression):
                around = f"{expression[max(0, at - 20) : at]}>>>{expression[at : at + 20]}"
                problem = f"{problem} (character {at + 1}: ...{around})"
            else:
                problem = f"{problem.split(' at or near')[0]} at its end"
        unquoted = [name for name in columns if identifier(name) != name]
        unquoted = [name for name in unquoted if name in expression.replace(identifier(name), "")]
        quoting = f"; write the column in double quotes: {', '.join(map(identifier, unquoted))}" if unquoted else ""
        raise SubsetError(f"{where}: {problem}{quoting}")
    statements = parsed["statements"]
    node = statements[0]["node"]
    is_plain = (
        node["type"] == "SELECT_NODE"
        and node["from_table"]["type"] == "EMPTY"
        and len(node["select_list"]) == 1
        and not any(node.get(key) for key in PLAIN_SELECT)
        and not node["cte_map"]["map"]
    )
    if len(statements) != 1 or not is_plain:
        raise SubsetError(
            f"{where}: is not a single condition; expected one, such as topic = 'Games' AND n_tokens > 64"
        )
    condition: dict[str, Any] = node["select_list"][0]
    for item in _expressions(condition):
        kind, name = item["class"], item.get("function_name", "")
        if kind not in EXPRESSION_CLASSES or item["type"] == "OPERATOR_TRY":
            raise SubsetError(
                f"{where}: {kind.lower()} is not allowed; expected columns, constants and plain functions"
            )
        if kind == "FUNCTION" and (name.lower() not in FUNCTIONS or item.get("schema") or item.get("catalog")):
            raise SubsetError(f"{where}: function {name!r} is not allowed; allowed are {' '.join(sorted(FUNCTIONS))}")
        if name.lower() == "replace":  # the length of a NULL, a number or a column is unknown
            literals = [argument["expression"].get("literal", {}) for argument in item["arguments"][1:]]
            texts = [literal["text"] for literal in literals if literal.get("kind") == "STRING"]
            if len(texts) != 2 or len(texts[1].encode()) > len(texts[0].encode()):
                raise SubsetError(
                    f"{where}: replace must not lengthen text, since nested calls could exhaust the memory; expected "
                    "constants, the new one no longer than the old one, e.g. replace(topic, ' ', '_')"
                )
    return condition


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
