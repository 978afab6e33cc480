"""Laws: digests do not depend on how a table is cut; a flipped bit is refused or changes nothing."""

import contextlib
import datetime

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grasp
from grasp.api.predict import read_subsets
from grasp.errors import GraspError
from grasp.predict.subset_tables import RowIndex
from grasp.store.checksummed_parquet import (
    CHECKSUMS_KEY,
    ChecksummedParquetWriter,
    ChecksumMismatchError,
    read_checksummed,
    read_checksummed_batches,
    write_checksummed,
)
from tests.report.world import write_artifact

COLUMNS = {
    "text": st.none() | st.text(max_size=4),
    "number": st.none() | st.integers(-(2**60), 2**60),
    "real": st.none() | st.floats(),
    "yes": st.none() | st.booleans(),
    "when": st.none() | st.dates(datetime.date(1990, 1, 1), datetime.date(2030, 1, 1)),
    "several": st.none() | st.lists(st.text(max_size=2), max_size=2),
}
TYPES = (pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.date32(), pa.list_(pa.string()))
SCHEMA = pa.schema(list(zip(COLUMNS, TYPES, strict=True)), {"corpus": "c0ffee"})


def stored_digests(path):
    return (pq.ParquetFile(path).metadata.metadata or {}).get(CHECKSUMS_KEY)


def write_as_damaged(table, path, digests):
    """Another table with the digests of the first, as flipped bits leave it."""
    with pq.ParquetWriter(path, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({CHECKSUMS_KEY: digests})


@settings(max_examples=50)
@given(st.lists(st.fixed_dictionaries(COLUMNS), max_size=12), st.integers(1, 12))
def test_a_table_is_read_as_written_for_any_batch_size(tmp_path_factory, lines, size):
    path = tmp_path_factory.mktemp("checksummed") / "t.parquet"
    table = pa.Table.from_pylist(lines, SCHEMA)
    with ChecksummedParquetWriter(path, SCHEMA) as writer:
        for start in range(0, len(lines), size):
            writer.write(table.slice(start, size))
    in_parts = stored_digests(path)
    assert str(read_checksummed(path).to_pylist()) == str(table.to_pylist())
    for columns in (["real", "text"], ["several"]):
        assert str(read_checksummed(path, columns).select(columns).to_pylist()) == str(
            table.select(columns).to_pylist()
        )
    write_checksummed(table, path, group_rows=3)
    assert stored_digests(path) == in_parts


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.set_column(0, "text", pa.array(["a", "c", None])),
        lambda t: t.set_column(0, "text", pa.array(["a", "b", ""])),
        lambda t: t.set_column(1, "number", pa.array([1, 2, 4])),
        lambda t: t.rename_columns(["text", "other"]),
        lambda t: t.replace_schema_metadata(t.schema.metadata | {b"corpus": b"other"}),
        lambda t: t.slice(1),
    ],
)
def test_what_is_not_as_written_is_refused_and_what_others_write_is_read(change, tmp_path):
    path = tmp_path / "t.parquet"
    schema = pa.schema([("text", pa.string()), ("number", pa.int64())], {"corpus": "c0ffee"})
    write_checksummed(pa.table({"text": ["a", "b", None], "number": [1, 2, 3]}, schema=schema), path)
    changed = change(pq.read_table(path))
    write_as_damaged(changed, path, stored_digests(path))
    with pytest.raises(ChecksumMismatchError, match="damaged"):
        read_checksummed(path)
    pq.write_table(changed, path)  # as whoever reads it and writes it again
    assert read_checksummed(path).to_pylist() == changed.to_pylist()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A selection, a scored list, and weights of a mixture of one artifact."""
    place = tmp_path_factory.mktemp("tables")
    write_artifact(place / "art")
    art = grasp.open(place / "art")
    art.select("20%", "sciq").save(place / "kept.parquet")
    art.score("sciq", top=20, bottom=20, out=place / "ranked.parquet")
    art.mix("topic", "sciq").write_weights(place / "weights.parquet")
    return art, place


def readings(art, place, name):
    """What commands make of a table."""
    path = place / name
    if name == "weights.parquet":
        return [
            block.weights_BN.toarray().tolist()
            for block in read_subsets(path, RowIndex.from_parquet(art.files.rows_path))
        ]
    return art.select(3, "sciq", exclude=path).row_ids


@pytest.mark.parametrize("name", ["kept.parquet", "ranked.parquet", "weights.parquet"])
def test_a_flipped_bit_is_refused_or_changes_nothing(written, name):
    art, place = written
    whole, path = (place / name).read_bytes(), place / name
    before, rng, refused = readings(art, place, name), np.random.default_rng(0), 0
    try:
        for bit in rng.choice(8 * len(whole), 60, replace=False).tolist():
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            try:
                assert readings(art, place, name) == before, bit
            except GraspError:
                refused += 1
    finally:
        path.write_bytes(whole)
    assert refused > 20
    assert readings(art, place, name) == before


def test_one_name_that_becomes_another_is_refused(written, tmp_path):
    """As a flip that Parquet does not notice: a name becomes another that is there as well."""
    art, place = written
    table = pq.read_table(place / "kept.parquet")
    other = table.set_column(
        table.column_names.index("row_id"), "row_id", pa.array([*table["row_id"].to_pylist()[1:], "row-0"])
    )
    write_as_damaged(other, tmp_path / "kept.parquet", stored_digests(place / "kept.parquet"))
    for ask in (
        lambda path: art.select(3, "sciq", exclude=path),
        lambda path: art.predict(subsets=path),
    ):
        with pytest.raises(GraspError, match=r"kept\.parquet: .*read.*'row_id'"):
            ask(tmp_path / "kept.parquet")


def test_an_incomplete_table_has_no_digests(tmp_path):
    with (
        contextlib.suppress(ZeroDivisionError),
        ChecksummedParquetWriter(tmp_path / "t", pa.schema([("n", pa.int64())])),
    ):
        raise ZeroDivisionError
    assert stored_digests(tmp_path / "t") is None
    assert list(read_checksummed_batches(tmp_path / "t")) == []
