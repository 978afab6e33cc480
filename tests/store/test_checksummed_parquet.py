"""Law: a flipped bit is refused or changes nothing."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import grasp
from grasp.api.predict import read_subsets
from grasp.errors import GraspError
from grasp.predict.subset_tables import RowIndex
from grasp.store.checksummed_parquet import (
    read_checksummed,
    read_checksummed_batches,
    write_checksummed,
)
from tests.report.world import write_artifact

SCHEMA = pa.schema([("text", pa.string()), ("number", pa.int64())], {"corpus": "c0ffee"})
TABLE = pa.table({"text": ["a", "b", None], "number": [1, 2, 3]}, schema=SCHEMA)


def test_every_flipped_bit_is_refused_or_changes_nothing(tmp_path):
    path = tmp_path / "t.parquet"
    write_checksummed(TABLE, path, group_rows=2)
    assert read_checksummed(path).equals(TABLE)
    assert read_checksummed(path, ["number"]).equals(TABLE.select(["number"]))
    assert pa.Table.from_batches(read_checksummed_batches(path)).equals(TABLE)
    whole, refused = path.read_bytes(), 0
    for bit in range(8 * len(whole)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            assert read_checksummed(path).equals(TABLE), bit
            assert pq.read_schema(path).metadata == SCHEMA.metadata, bit
        except (pa.ArrowException, OSError, UnicodeDecodeError):
            refused += 1
    assert refused > 4 * len(whole)


def test_what_others_write_is_read(tmp_path):
    """A table that another program reads and writes again has no checksums."""
    path = tmp_path / "t.parquet"
    write_checksummed(TABLE, path)
    changed = pq.read_table(path).rename_columns(["text", "other"])
    pq.write_table(changed, path)
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
