"""Label expressions: what they select, and everything that they refuse; an expression never reaches a file.

A condition made of a value selects exactly the rows that have it, whatever the value and the column are called.
"""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grasp.artifact.where import LabelTable, equals, identifier, none_of
from grasp.errors import SubsetError

HOSTILE = ["it's", '"', "a;b", "'; DROP TABLE x; --", "\x1b[2J", "a\nb", "\u202egnp", "{{ 1 }}", "", " ", "x" * 99]
TEXTS = st.one_of(st.none(), st.sampled_from(HOSTILE), st.text(st.characters(codec="utf-8"), max_size=6))
TOPICS = ["Games", "Health", None, "Games", "Law", "Health"]


def selected(table, expression):
    return table.selection(expression).mask_N


@pytest.fixture
def table(tmp_path):
    rows = pa.table(
        {
            "row_id": [f"r{i}" for i in range(6)],
            "topic": TOPICS,
            "n_tokens": [10, 20, 30, 40, 50, 60],
            "loss": pa.array([1.0, 2.5, 3.0, float("nan"), 5.0, 6.0], pa.float32()),
            "load": [True, False, True, False, None, True],
            "Odd Name": ["x", "y", "x", "y", "x", "y"],
        }
    )
    pq.write_table(rows, tmp_path / "rows.parquet", row_group_size=2)
    return LabelTable(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("expression", "rows"),
    [
        ("topic = 'Games'", [0, 3]),
        ("TOPIC = 'Games' AND n_tokens > 10", [3]),
        ("topic IN ('Games', 'Law') OR loss < 2.6", [0, 1, 3, 4]),
        ("topic != 'Games'", [1, 4, 5]),
        ("topic IS NULL", [2]),
        ("NOT (topic LIKE 'G%') -- a remark", [1, 4, 5]),
        ("n_tokens BETWEEN 20 AND 40", [1, 2, 3]),
        ("lower(topic) ~ '^h'", [1, 5]),
        ("CASE WHEN n_tokens > 30 THEN topic = 'Law' ELSE topic = 'Games' END", [0, 4]),
        ("coalesce(topic, 'none') = 'none'", [2]),
        ("n_tokens % 20 = 0", [1, 3, 5]),
        ("load", [0, 2, 5]),
        ("\"Odd Name\" = 'x'", [0, 2, 4]),
        ("topic = '; DROP TABLE rows'", []),
        ("true", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_selects(table, expression, rows):
    assert selected(table, expression).nonzero()[0].tolist() == rows


def test_nulls_are_counted_and_not_selected(table):
    selection = table.selection("topic != 'Games'")
    assert (selection.n_null, selection.mask_N[2]) == (1, False)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("topik = 'x'", "'topik'.*'topic'"),
        ('topic = "Games"', "'Games'.*'single quotes'"),
        ("topic.x = 1", r"'topic\.x'.*dot"),
        ("topic =", "syntax error.*end$"),
        ("topic = 'A' AND AND load", r'syntax error.*"AND".*\b17\b'),
        ("topic = 'unclosed", r"unterminated.*\b9\b"),
        ("/* unclosed", "unterminated"),
        ("Odd Name = 'x'", 'syntax error.*"Odd Name"$'),
        ("", "empty"),
        ("n_tokens", "int64.*condition"),
        ("topic > 3", "compare.*VARCHAR"),
        ("n_tokens > 'many'", "convert.*'many'"),
        ("not " * 900 + "true", "nested"),
        ("true" + " or true" * 4000, r"\b20000\b"),
    ],
)
def test_mistakes_say_where(table, expression, message):
    with pytest.raises(SubsetError, match=message):
        selected(table, expression)


@pytest.mark.parametrize(
    "expression",
    [
        "COPY rows TO '/tmp/stolen.csv'",
        "ATTACH '/tmp/other.db'",
        "select * from read_csv('/etc/passwd')",
        "topic = 'A'; COPY rows TO '/tmp/stolen.csv'",
        "true); COPY (SELECT 1) TO '/tmp/stolen.csv'; SELECT (true",
        "true); SELECT (true",
        "true) FROM read_csv('/etc/passwd') WHERE (true",
        "true) UNION SELECT (true",
        "true) ORDER BY (true",
        "true) LIMIT (1",
        "read_csv('/etc/passwd')",
        "read_text('/etc/passwd') = 'x'",
        "glob('/etc/*') = 'x'",
        "(SELECT content FROM read_text('/etc/passwd')) LIKE '%root%'",
        "EXISTS (FROM '/etc/passwd')",
        "topic IN (SELECT column0 FROM read_csv('/etc/passwd'))",
        "topic = ANY (SELECT 'Games')",
        "getenv('HOME') = '/root'",
        "getvariable('x') = 1",
        "current_setting('memory_limit') = 'x'",
        "query('SELECT 1') = 1",
        "query_table('row_batch') = 1",
        "nextval('s') = 1",
        "repeat('x', 1000000000) = 'x'",
        "sum(n_tokens) > 3",
        "row_number() OVER () > 3",
        "COLUMNS('n.*') > 3",
        "* = 1",
        "n_tokens = ?",
        "n_tokens = $1",
        "list_filter([1], x -> x > 0) = [1]",
        "{'a': load}.a",
        "topic.lower() = 'games'",
        "main.read_text('/etc/passwd') = 'x'",
        "TRY(n_tokens > 3)",
        "WITH t AS (SELECT 1) SELECT true",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "true \0",
    ],
)
def test_anything_but_a_condition_is_refused(table, expression):
    with pytest.raises(SubsetError, match=r"^expression "):
        selected(table, expression)


def test_the_second_wall_stands_without_the_first(table, monkeypatch):
    """Were the parse tree not checked at all, DuckDB itself would still refuse to touch a file or a variable."""
    secret_table = pa.table({"a": [1]})  # in scope of the caller, where DuckDB would look for it
    monkeypatch.setattr("grasp.artifact.where._parse_condition", lambda db, expression, columns: {})
    for expression, message in [
        ("EXISTS (SELECT * FROM read_text('/etc/passwd'))", "disabled"),
        ("EXISTS (SELECT * FROM '/etc/passwd')", "/etc/passwd"),
        ("getenv('HOME') = 'x'", "getenv"),
        ("EXISTS (SELECT * FROM secret_table)", "secret_table"),
    ]:
        with pytest.raises(SubsetError, match=message):
            selected(table, expression)
    assert secret_table.num_rows == 1


def test_values_group_the_rows_and_keep_the_unlabelled_apart(table):
    column = table.column("topic")
    groups = {value: np.flatnonzero(column.codes_N == code).tolist() for code, value in enumerate(column.values)}
    assert groups == {"Games": [0, 3], "Health": [1, 5], None: [2], "Law": [4]}
    assert table.column("n_tokens").values == (10, 20, 30, 40, 50, 60)
    assert table.column("TOPIC").values == column.values  # SQL does not mind case


def test_unknown_label_and_missing_file(table, tmp_path):
    with pytest.raises(SubsetError, match="column 'formt'"):
        table.column("formt")
    with pytest.raises(SubsetError, match="no such file"):
        LabelTable(tmp_path / "nowhere.parquet")


# conditions out of values


def labels_of(tmp_path, values, kind, column="topic"):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"row_id": [str(i) for i in range(len(values))], column: pa.array(values, kind)}), path)
    return LabelTable(path)


def same(value, other):
    both_nan = isinstance(value, float) and isinstance(other, float) and math.isnan(value) and math.isnan(other)
    return both_nan or value == other


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(TEXTS, min_size=1, max_size=6))
def test_text_is_found_and_nothing_else(tmp_path, values):
    labels = labels_of(tmp_path, values, pa.string())
    for value in dict.fromkeys(values):
        assert selected(labels, equals("topic", value)).tolist() == [same(value, other) for other in values]
    listed = values[::2]
    rest = [value is not None and value not in listed for value in values]
    assert selected(labels, none_of("topic", listed)).tolist() == rest


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([1, -5, None, 1, 2**40], pa.int64()),
        ([True, False, None], pa.bool_()),
        ([0.1, -1e300, math.inf, -math.inf, math.nan, None, 1 / 3], pa.float64()),
    ],
)
def test_numbers_are_found_and_nothing_else(tmp_path, values, kind):
    labels = labels_of(tmp_path, values, kind)
    for value in values:
        assert selected(labels, equals("topic", value)).tolist() == [same(value, other) for other in values]
    rest = [value is not None and not any(same(value, other) for other in values[:2]) for value in values]
    assert selected(labels, none_of("topic", values[:2])).tolist() == rest


@pytest.mark.parametrize("column", ["topic", "order", "left", "Topic", "my label", 'a"b', "1st"])
def test_a_column_of_any_name_can_be_asked_for(tmp_path, column):
    labels = labels_of(tmp_path, ["a", "b"], pa.string(), column)
    assert selected(labels, equals(column, "b")).tolist() == [False, True]


def test_plain_names_stay_plain_and_the_expression_reads_as_people_write_it():
    assert equals("topic", "Games") == "topic = 'Games'"
    assert none_of("topic", ["Games", None, "Law"]) == "topic NOT IN ('Games', 'Law')"
    assert identifier("order") == '"order"'


def test_what_is_pasted_into_a_terminal_can_be_printed():
    assert [text for text in HOSTILE if not (equals("topic", text) + none_of("topic", [text])).isprintable()] == []
