"""Label expressions: selected rows, refused expressions, and no access to files.

A condition made from a value selects exactly the rows that have it, for any value and column name.
"""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grasp.artifact.label_functions import DEFAULT_BINS, bin_names, domain_of, quantile_edges
from grasp.artifact.label_table import LabelTable, equals, identifier, none_of
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
        ("NOT (topic LIKE 'G%') -- a remark", [1, 4, 5]),
        ("n_tokens BETWEEN 20 AND 40", [1, 2, 3]),
        ("lower(topic) ~ '^h'", [1, 5]),
        ("CASE WHEN n_tokens > 30 THEN topic = 'Law' ELSE topic = 'Games' END", [0, 4]),
        ("n_tokens % 20 = 0", [1, 3, 5]),
        ("load", [0, 2, 5]),
        ("\"Odd Name\" = 'x'", [0, 2, 4]),
        ("true", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_selects(table, expression, rows):
    assert selected(table, expression).nonzero()[0].tolist() == rows


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("topik = 'x'", "'topik'.*'topic'"),
        ('topic = "Games"', "'Games'.*'single quotes'"),
        ("topic =", "syntax error.*end$"),
        ("topic = 'A' AND AND load", r'syntax error.*"AND".*\b17\b'),
        ("topic = 'unclosed", r"unterminated.*\b9\b"),
        ("Odd Name = 'x'", 'syntax error.*"Odd Name"$'),
        ("", "empty"),
        ("n_tokens", "int64.*condition"),
        ("topic > 3", "compare.*VARCHAR"),
        ("n_tokens > 'many'", "convert.*'many'"),
        ("not " * 900 + "true", "nested"),
        ("true" + " or true" * 4000, r"\b20000\b"),
    ],
)
def test_errors_name_the_position(table, expression, message):
    with pytest.raises(SubsetError, match=message):
        selected(table, expression)


@pytest.mark.parametrize(
    "expression",
    [
        "COPY rows TO '/tmp/stolen.csv'",
        "ATTACH '/tmp/other.db'",
        "select * from read_csv('/etc/passwd')",
        "true); COPY (SELECT 1) TO '/tmp/stolen.csv'; SELECT (true",
        "true) FROM read_csv('/etc/passwd') WHERE (true",
        "true) UNION SELECT (true",
        "read_text('/etc/passwd') = 'x'",
        "(SELECT content FROM read_text('/etc/passwd')) LIKE '%root%'",
        "EXISTS (FROM '/etc/passwd')",
        "getenv('HOME') = '/root'",
        "current_setting('memory_limit') = 'x'",
        "query('SELECT 1') = 1",
        "nextval('s') = 1",
        "repeat('x', 1000000000) = 'x'",
        "sum(n_tokens) > 3",
        "row_number() OVER () > 3",
        "COLUMNS('n.*') > 3",
        "n_tokens = ?",
        "list_filter([1], x -> x > 0) = [1]",
        "topic.lower() = 'games'",
        "main.read_text('/etc/passwd') = 'x'",
        "TRY(n_tokens > 3)",
        "WITH t AS (SELECT 1) SELECT true",
        "SET enable_external_access = true",
        "true \0",
    ],
)
def test_anything_but_a_condition_is_refused(table, expression):
    with pytest.raises(SubsetError, match=r"^expression "):
        selected(table, expression)


def test_duckdb_refuses_access_to_files_without_the_check_of_the_parse_tree(table, monkeypatch):
    """Disable the check: DuckDB must still refuse to read files and variables."""
    secret_table = pa.table({"a": [1]})  # in scope of the caller, where DuckDB would look for it
    monkeypatch.setattr("grasp.artifact.label_table._problem_of_node", lambda node: "")
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
    assert table.selection("topic != 'Games'").n_null == 1


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
def test_text_conditions_select_exactly_the_matching_rows(tmp_path, values):
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
def test_number_conditions_select_exactly_the_matching_rows(tmp_path, values, kind):
    labels = labels_of(tmp_path, values, kind)
    for value in values:
        assert selected(labels, equals("topic", value)).tolist() == [same(value, other) for other in values]
    rest = [value is not None and not any(same(value, other) for other in values[:2]) for value in values]
    assert selected(labels, none_of("topic", values[:2])).tolist() == rest


@pytest.mark.parametrize("column", ["topic", "order", "left", "Topic", "my label", 'a"b', "1st"])
def test_columns_of_any_name_can_be_used(tmp_path, column):
    labels = labels_of(tmp_path, ["a", "b"], pa.string(), column)
    assert selected(labels, equals(identifier(column), "b")).tolist() == [False, True]


# labels that are expressions


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://a.b/c", "a.b"),
        ("HTTP://A.B.?x", "a.b"),
        ("https://me:secret@a.b:80/c@d", "a.b"),
        ("https://[2001:db8::1]:80/c", "[2001:db8::1]"),
        ("svn+ssh://a.b/c", "a.b"),
        ("//a.b/c", "a.b"),
        ("a.b/c://d.e", "a.b"),
        ("https:///c", None),
        ("localhost", None),
        ("not a url.", None),
        ("https://m\u00fcnchen.de/", "m\u00fcnchen.de"),
    ],
)
def test_hosts(tmp_path, url, host):
    assert labels_of(tmp_path, [url], pa.string(), "url").column("host(url)").values == (host,)


@pytest.mark.parametrize(
    ("host", "domain"),
    [
        ("news.bbc.co.uk", "bbc.co.uk"),
        ("co.uk", "co.uk"),
        ("me.github.io", "me.github.io"),
        ("1.2.3.4", "1.2.3.4"),
        ("localhost", "localhost"),
        ("a.b.unknown-suffix", "b.unknown-suffix"),
    ],
)
def test_domains_by_the_public_suffix_list(host, domain):
    assert domain_of(host) == domain


@pytest.fixture
def web(tmp_path):
    """Rows of a corpus with URLs, dates, numbers and nested fields."""
    urls = ["https://www.bbc.co.uk/x", "http://me@Example.COM:80/a?b", "foo.github.io/x", None, "no url", "//1.2.3.4"]
    rows = {
        "row_id": [f"r{i}" for i in range(6)],
        "url": urls,
        "meta.source": ["cc", "cc", "wiki", None, "cc", "arxiv"],
        "meta.score": [0.1, 0.5, 0.7, None, math.nan, 0.9],
        "tags": ['["a", "b"]', '["b"]', None, '["c"]', "x", '["it\'s"]'],
        "date": ["2024-01-01", "2023-05-06T01:02:03Z", None, "x", "2023", "2022-07"],
    }
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet", row_group_size=4)
    return LabelTable(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("label", "values"),
    [
        ("meta.source", ["cc", "cc", "wiki", None, "cc", "arxiv"]),
        ("upper(meta.source)", ["CC", "CC", "WIKI", None, "CC", "ARXIV"]),
        ("host(url)", ["www.bbc.co.uk", "example.com", "foo.github.io", None, None, "1.2.3.4"]),
        ("domain(url)", ["bbc.co.uk", "example.com", "foo.github.io", None, None, "1.2.3.4"]),
        ("year(date)", [2024, 2023, None, None, 2023, 2022]),
        ("meta.score > 0.6", [False, False, True, None, True, True]),  # in DuckDB nan is above all numbers
        ("bins(meta.score, 2)", ["below 0.7", "below 0.7", "0.7 and above", None, None, "0.7 and above"]),
        ("bins(meta.score, [0.2, 0.7])", ["below 0.2", "0.2 to 0.7", "0.7 and above", None, None, "0.7 and above"]),
        ("has(tags, 'b')", [True, True, None, False, None, False]),
    ],
)
def test_a_label_may_be_an_expression_and_its_conditions_select_its_values(web, label, values):
    column = web.column(label)
    assert [column.values[code] for code in column.codes_N] == values
    for value in dict.fromkeys(values):
        assert selected(web, equals(column.operand, value)).tolist() == [same(value, other) for other in values]
    rest = [value is not None and value != values[0] for value in values]
    assert selected(web, none_of(column.operand, values[:1])).tolist() == rest


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("meta.sorce", r"unknown column 'meta\.sorce' \(did you mean 'meta\.source'\?\)"),
        ("upper(meta.sorce)", r"did you mean 'meta\.source'"),
        ("hosst(url)", r"'hosst' is not allowed \(did you mean 'host'\?\)"),
        ("bins(meta.score, [0.7, 0.2])", "bins: expected .* ascending edges"),
        ("bins(meta.score, url)", "bins: expected two arguments"),
        ("bins(meta.score, 1)", "bins: expected .* 2 to"),
        ("bins(url, 2)", "values of type string, expected numbers"),
        ("host('https://a.b')", "names no column"),
        ("read_text('/etc/passwd')", "not allowed"),
        ("host(", "syntax error"),
    ],
)
def test_the_error_of_a_label_that_cannot_be_computed_gives_the_reason(web, label, message):
    with pytest.raises(SubsetError, match=f"^label: .*{message}"):
        web.column(label)


def test_a_number_with_many_values_is_binned_with_a_note(tmp_path):
    values = np.random.default_rng(0).normal(size=1_000)
    column = labels_of(tmp_path, values.tolist(), pa.float64(), "score").column("score")
    assert (column.name, len(column.values)) == ("score", DEFAULT_BINS)
    assert column.counts.min() > 150
    assert "grouped as bins(score, 5)" in column.note
    few = labels_of(tmp_path, [2020 + i % 7 for i in range(1_000)], pa.int64(), "year").column("year")
    assert (len(few.values), few.note) == (7, "")


@given(
    values=st.lists(st.floats(-1e9, 1e9) | st.integers(-5, 5).map(float), min_size=2, max_size=60),
    n_bins=st.integers(2, 9),
)
def test_no_bin_is_empty_and_names_are_distinct(values, n_bins):
    edges = quantile_edges(np.array(values), n_bins)
    assert edges == sorted(set(edges))
    assert len(edges) < n_bins
    if edges:
        assert np.bincount(np.searchsorted(edges, values, side="right"), minlength=len(edges) + 1).all()
    else:
        assert len(set(values)) == 1
    assert len(set(bin_names(edges))) == len(edges) + 1
