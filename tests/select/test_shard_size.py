"""Files of an export have the size that was requested, and together hold every record once, in order."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.corpus.documents import read_documents
from grasp.errors import SettingsError
from grasp.select.export import SHARD_RECORDS, ShardSize, write_corpus
from tests.corpus.world import settings_for


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("250", ShardSize(records=250)),
        (250, ShardSize(records=250)),
        ("256MB", ShardSize(ShardSize.parse("1KB").records, 256_000_000)),
        ("1.5 GiB", ShardSize(ShardSize.parse("1KB").records, 3 << 29)),
        ("10b", ShardSize(ShardSize.parse("1KB").records, 10)),
    ],
)
def test_sizes(text, size):
    assert ShardSize.parse(text) == size
    assert ShardSize().records == SHARD_RECORDS


@pytest.mark.parametrize("text", ["", "0", "-5", "256MX", "many", "0.1B", "1e3"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(SettingsError, match=r"shard_size: got .*expected a size such as 256MB"):
        ShardSize.parse(text)


def written(place, kind, items, size):
    write_corpus(place, kind, "documents", items, 0, {}, size)
    return sorted(place.glob("part-*"))


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("as_tables", [True, False])
@settings(max_examples=15, deadline=None)
@given(blocks=st.lists(st.integers(1, 9), min_size=1, max_size=5), most=st.integers(1, 12))
def test_no_file_has_more_records(tmp_path_factory, kind, as_tables, blocks, most):
    texts = [f"text {k}" for k in range(sum(blocks))]
    records = [{"text": text} for text in texts]
    starts = [sum(blocks[:k]) for k in range(len(blocks))]
    tables = [pa.Table.from_pylist(records[at : at + n]) for at, n in zip(starts, blocks, strict=True)]
    place = tmp_path_factory.mktemp("export") / "out"
    files = written(place, kind, tables if as_tables else records, ShardSize(records=most))
    counts = [pq.read_metadata(f).num_rows if kind == "parquet" else f.read_text().count("\n") for f in files]
    assert sum(counts) == len(texts)
    assert max(counts) <= most
    assert [d.text for d in read_documents(settings_for(place))] == texts


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_no_file_is_much_larger(tmp_path, kind):
    rng = np.random.default_rng(0)
    texts = [rng.bytes(500).hex() for _ in range(300)]
    table = pa.table({"text": texts})
    items = [table] if kind == "parquet" else [{"text": text} for text in texts]
    files = written(tmp_path / "out", kind, items, ShardSize.parse("50KB"))
    assert len(files) > 3
    # a part of a Parquet table, at most as large as a file, is written whole; then follows the footer
    most = 50_000 if kind == "jsonl" else 2 * 50_000 + 2_000
    assert max(file.stat().st_size for file in files) <= most
    assert [d.text for d in read_documents(settings_for(tmp_path / "out"))] == texts
