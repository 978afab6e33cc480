"""Laws: the type of a label column does not depend on the grouping of values, and no value is lost."""

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grasp.corpus import labels as lb

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.integers(2**62, 2**66), st.floats(), st.text(max_size=5)
)


@given(st.lists(VALUES), st.lists(VALUES))
def test_the_type_of_two_groups_is_the_wider_of_their_types(first_group, second_group):
    kinds = [lb.kind_of_all(first_group), lb.kind_of_all(second_group)]
    assert lb.kind_of_all(first_group + second_group) == lb.widest(kinds) == lb.widest(kinds[::-1])


@given(st.lists(VALUES, min_size=1), st.lists(VALUES))
@example([2**62, 0.0], [False])  # beside a float 2^62 would be one, and read 4.6e+18 as text
def test_a_column_widened_later_equals_one_that_was_wide_at_once(values, others):
    kind = lb.kind_of_all(values + others)
    narrow = lb.column_of(values, lb.kind_of_all(values))
    widened, at_once = lb.column_of(narrow.to_pylist(), kind), lb.column_of(values, kind)
    assert widened.type == at_once.type == lb.ARROW_TYPE[kind]
    assert str(widened.to_pylist()) == str(at_once.to_pylist())  # as text: nan is nan


@given(st.lists(VALUES))
def test_only_none_is_null(values):
    column = lb.column_of(values, lb.kind_of_all(values))
    assert [value is None for value in column.to_pylist()] == [value is None for value in values]


@pytest.mark.parametrize(
    ("values", "kind", "stored"),
    [
        ([1, None, 2], "int", [1, None, 2]),
        ([1, 2.5], "float", [1.0, 2.5]),
        ([True, None], "bool", [True, None]),
        ([1, "x", 2.0, 2.5, True], "string", ["1", "x", "2", "2.5", "true"]),
        ([2**70], "string", [str(2**70)]),
        ([None], "null", [None]),
    ],
)
def test_kinds_of_columns(values, kind, stored):
    assert lb.kind_of_all(values) == kind
    assert lb.column_of(values, kind).to_pylist() == stored


@pytest.mark.parametrize(
    ("column", "name"),
    [("topic", "topic"), ("loss", "loss_"), ("loss_", "loss__"), ("Row_ID", "Row_ID_"), ("loss_x", "loss_x")],
)
def test_labels_with_names_of_internal_columns_get_an_underscore(column, name):
    assert lb.label_name(column) == name


@given(st.lists(st.text("lostr_idw", max_size=8), unique=True))
def test_renaming_never_merges_two_labels(names):
    assert len({lb.label_name(name) for name in [*names, "loss", "loss_", "row_id"]}) == len(
        {*names, "loss", "loss_", "row_id"}
    )


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.struct([("a", pa.int32())]), pa.binary()])
def test_nested_and_binary_columns_are_not_labels(kind):
    assert not lb.is_label(kind)
