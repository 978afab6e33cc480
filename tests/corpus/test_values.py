"""Laws: equal values of every Arrow type are read alike; JSON and Arrow give the same record."""

import datetime
import json
import uuid
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.corpus import labels as lb
from grasp.corpus.values import plain_json, plain_values

PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
UUID = uuid.UUID(int=5)
# within the range of nanoseconds in 64 bits
MOMENTS = st.datetimes(datetime.datetime(1700, 1, 1), datetime.datetime(2250, 1, 1))
ZONES = (None, "UTC", "+05:30", "America/New_York")


def isoformat(moment: datetime.datetime | datetime.time) -> str:
    text = moment.isoformat()
    return text[:-3] if moment.microsecond and moment.microsecond % 1000 == 0 else text


@given(MOMENTS, st.sampled_from(["s", "ms", "us"]), st.sampled_from(ZONES))
def test_a_moment_has_one_spelling_in_every_unit_that_holds_it(moment, unit, zone):
    step = 10**6 // PER_SECOND[unit]
    moment = moment.replace(microsecond=moment.microsecond // step * step)
    result = set()
    for other, per_second in PER_SECOND.items():
        if per_second >= PER_SECOND[unit]:
            seconds = (moment - datetime.datetime(1970, 1, 1)) // datetime.timedelta(seconds=1)
            count = seconds * per_second + moment.microsecond * per_second // 10**6
            result.update(plain_values(pa.array([count, None], pa.timestamp(other, zone))))
    assert result == {isoformat(moment) + "Z" * (zone is not None), None}


@given(st.times())
def test_a_time_of_day_has_one_spelling_in_every_unit_that_holds_it(time):
    kinds = [pa.time64("us"), pa.time64("ns")]
    kinds += [pa.time32("ms")] * (time.microsecond % 1000 == 0) + [pa.time32("s")] * (time.microsecond == 0)
    assert {text for kind in kinds for text in plain_values(pa.array([time], kind))} == {isoformat(time)}


@given(st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**30), max_value=10**30))
def test_a_decimal_keeps_its_value_and_has_one_spelling_in_every_precision_and_scale(value):
    kinds = [pa.decimal128(38, 3), pa.decimal128(38, 5), pa.decimal256(60, 20)]
    (result,) = {repr(*plain_values(pa.array([value], kind))) for kind in kinds}
    assert Decimal(str(json.loads(result.replace("'", '"')))) == value
    assert ("." in result or "e" in result) == (value != int(value))


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_decimal_without_a_scale_is_an_integer_with_all_digits(number):
    kinds = [pa.int64(), pa.decimal128(20, 0), pa.decimal128(38, 0), pa.decimal256(60, 0), pa.decimal128(38, 2)]
    assert [plain_values(pa.array([number], pa.int64()).cast(kind)) for kind in kinds] == [[number]] * len(kinds)


@given(st.integers(-(2**50), 2**50))
def test_a_duration_is_a_number_of_seconds_in_every_unit(milliseconds):
    counts = {"ms": milliseconds, "us": milliseconds * 1000}
    counts |= {"s": milliseconds // 1000} if milliseconds % 1000 == 0 else {}
    result = {repr(*plain_values(pa.array([count], pa.duration(unit)))) for unit, count in counts.items()}
    assert len(result) == 1
    assert Decimal(result.pop()) == Decimal(milliseconds).scaleb(-3)


@pytest.mark.parametrize(
    ("array", "values"),
    [
        (pa.array([datetime.date(2020, 1, 2), None]), ["2020-01-02", None]),
        (pa.array([datetime.date(2020, 1, 2), None], pa.date64()), ["2020-01-02", None]),
        (pa.array([1704067200123456789], pa.timestamp("ns")), ["2024-01-01T00:00:00.123456789"]),
        (pa.array([3_723_000_000_001], pa.time64("ns")), ["01:02:03.000000001"]),
        (pa.array([1], pa.duration("ns")), [1e-9]),
        (pa.array([2**63 - 1], pa.duration("ns")), ["9223372036.854775807"]),
        (pa.array([Decimal("1.50")], pa.decimal32(5, 2)), [1.5]),
        (pa.array([Decimal("12345678901234567.50")]), ["12345678901234567.5"]),
        (pa.array(["a", "b", None, "a"]).dictionary_encode(), ["a", "b", None, "a"]),
        (pa.array(["a", "b"], pa.string_view()).cast(pa.string()).dictionary_encode(), ["a", "b"]),
        (
            pa.DictionaryArray.from_arrays(pa.array([1, None, 0]), pa.array(["a", "b"], pa.string_view())),
            ["b", None, "a"],
        ),
        (pa.array(["x", None], pa.large_string()), ["x", None]),
        (pa.array(["x", None], pa.string_view()), ["x", None]),
        (pa.array([2**63 + 1], pa.uint64()), [2**63 + 1]),
        (pa.array([0.5], pa.float16()), [0.5]),
        (pa.array([1.1, 1e30, None], pa.float32()), [1.1, 1e30, None]),
        (pa.array([True, None]), [True, None]),
        (pa.array([1, None, 0], pa.int8()).cast(pa.bool8()), [True, None, False]),
        (pa.array([UUID.bytes, None], pa.uuid()), [str(UUID), None]),
        (pa.array(['"x"', None, "5", "null"], pa.json_()), ["x", None, 5, None]),
        (pa.nulls(2), [None, None]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)  # fmt: skip
def test_values_of_label_columns(array, values):
    assert lb.is_label(array.type)
    assert [repr(value) for value in plain_values(array)] == [repr(value) for value in values]  # 1 is not 1.0, nor True
    assert plain_values(pa.chunked_array([array, array[:1]])) == [*values, values[0]]


LEAVES = st.one_of(st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False), st.text(max_size=4))
KEYS = st.sampled_from(["a", "b", "c", "meta.lang", "é '\""])
NESTED = st.recursive(
    st.one_of(st.none(), st.text(max_size=4)),
    lambda parts: st.one_of(st.lists(parts, max_size=3), st.dictionaries(KEYS, parts, max_size=3)),
    max_leaves=8,
)


def without_nulls(value):
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


@given(st.lists(st.dictionaries(KEYS, NESTED, max_size=3), max_size=5))
def test_json_and_arrow_give_one_record(records):
    expected = [without_nulls(record) for record in records]
    assert [plain_json(record) for record in records] == expected
    column = pa.array([json.dumps(record) for record in records], pa.json_())
    assert plain_values(column) == expected
    try:
        column = pa.array(records)
    except pa.ArrowException:
        return  # text beside a list: no struct holds both
    assert plain_values(column) == expected
    assert plain_values(column[1:]) == expected[1:]


LISTS = [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda kind: pa.list_(kind, 2)]


@pytest.mark.parametrize("wrap", LISTS)
@given(
    st.lists(st.none() | st.lists(st.none() | st.fixed_dictionaries({"a": LEAVES.map(str) | st.none()}),
                                  min_size=2, max_size=2), min_size=1, max_size=4),
    st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=25)
def test_lists_of_every_type_are_lists(wrap, lists, start):
    array = pa.array(lists, wrap(pa.struct([("a", pa.string())])))
    expected = [without_nulls(value) for value in lists]
    assert plain_values(array) == expected
    assert plain_values(array[start:]) == expected[start:]


@given(st.lists(st.none() | st.dictionaries(st.text(max_size=3), st.none() | st.integers(0, 9)), max_size=5))
def test_a_map_is_an_object(objects):
    pairs = [None if value is None else list(value.items()) for value in objects]
    array = pa.array(pairs, pa.map_(pa.string(), pa.int8()))
    assert plain_values(array) == [without_nulls(value) for value in objects]
    assert plain_values(array[1:]) == [without_nulls(value) for value in objects[1:]]


def test_an_empty_object_is_distinguished_from_a_missing_one():
    array = pa.array([{"a": {}}, {"a": None}, {}, None], pa.struct([("a", pa.struct([]))]))
    assert plain_values(array) == [{"a": {}}, {}, {}, None]
    array = pa.array([{"a": {}}, {"a": None}, {"a": {"b": 1}}])
    assert plain_values(array) == [{"a": {}}, {}, {"a": {"b": 1}}]
