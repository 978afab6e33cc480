"""A condition made of a value selects exactly the rows that have it, whatever the value and the column are called."""

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grasp.predict.labels import LabelTable, equals, identifier, none_of

HOSTILE = ["it's", '"', "a;b", "'; DROP TABLE x; --", "\x1b[2J", "a\nb", "\u202egnp", "{{ 1 }}", "", " ", "x" * 99]


def selected(table, expression):
    return table.selection(expression).mask_N


def table(tmp_path, values, kind, column="topic"):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"row_id": [str(i) for i in range(len(values))], column: pa.array(values, kind)}), path)
    return LabelTable(path)


def same(value, other):
    both_nan = isinstance(value, float) and isinstance(other, float) and math.isnan(value) and math.isnan(other)
    return both_nan or value == other


TEXTS = st.one_of(st.none(), st.sampled_from(HOSTILE), st.text(st.characters(codec="utf-8"), max_size=6))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(TEXTS, min_size=1, max_size=6))
def test_text_is_found_and_nothing_else(tmp_path, values):
    labels = table(tmp_path, values, pa.string())
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
    labels = table(tmp_path, values, kind)
    for value in values:
        assert selected(labels, equals("topic", value)).tolist() == [same(value, other) for other in values]
    rest = [value is not None and not any(same(value, other) for other in values[:2]) for value in values]
    assert selected(labels, none_of("topic", values[:2])).tolist() == rest


@pytest.mark.parametrize("column", ["topic", "order", "left", "Topic", "my label", 'a"b', "1st"])
def test_a_column_of_any_name_can_be_asked_for(tmp_path, column):
    labels = table(tmp_path, ["a", "b"], pa.string(), column)
    assert selected(labels, equals(column, "b")).tolist() == [False, True]


def test_plain_names_stay_plain_and_the_expression_reads_as_people_write_it():
    assert equals("topic", "Games") == "topic = 'Games'"
    assert none_of("topic", ["Games", None, "Law"]) == "topic NOT IN ('Games', 'Law')"
    assert identifier("order") == '"order"'


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_pasted_into_a_terminal_can_be_printed(text):
    assert (equals("topic", text) + none_of("topic", [text])).isprintable()
