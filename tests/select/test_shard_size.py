"""Files of an export have the size that was requested, and together hold every record once, in order."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.corpus.documents import read_documents
from grasp.corpus.sources import open_source
from grasp.errors import SettingsError
from grasp.select.record_files import SHARD_RECORDS, FileFormat, ShardSize, write_corpus
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
def test_invalid_sizes_are_refused(text):
    with pytest.raises(SettingsError, match=r"shard_size: got .*256MB"):
        ShardSize.parse(text)


def written(place, form, items, size):
    write_corpus(place, form, "documents", items, 0, {}, size)
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
    files = written(place, FileFormat(kind), tables if as_tables else records, ShardSize(records=most))
    counts = [pq.read_metadata(f).num_rows if kind == "parquet" else f.read_text().count("\n") for f in files]
    assert sum(counts) == len(texts)
    assert max(counts) <= most
    assert [d.text for d in read_documents(settings_for(place))] == texts


def random_texts(n=300, n_bytes=2_500):
    rng = np.random.default_rng(0)
    return [rng.bytes(n_bytes).hex() for _ in range(n)]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "json", "csv"])
def test_no_file_is_larger(tmp_path, kind):
    texts = random_texts()
    table = pa.table({"text": texts})
    items = [table] if kind == "parquet" else [{"text": text} for text in texts]
    files = written(tmp_path / "out", FileFormat(kind), items, ShardSize.parse("200KB"))
    assert len(files) > 3
    assert max(file.stat().st_size for file in files) <= 200_000
    assert [d.text for d in read_documents(settings_for(tmp_path / "out"))] == texts


@settings(max_examples=15, deadline=None)
@given(blocks=st.lists(st.integers(1, 9), min_size=1, max_size=5), most=st.integers(1, 4_000))
def test_parquet_files_are_filled_up_to_the_size_of_their_tables(tmp_path_factory, blocks, most):
    place = tmp_path_factory.mktemp("export") / "out"
    rng = np.random.default_rng(sum(blocks))
    tables = [pa.table({"text": [rng.bytes(rng.integers(500)).hex() for _ in range(n)]}) for n in blocks]
    files = written(place, FileFormat("parquet"), tables, ShardSize(n_bytes=most))
    shards = [pq.read_table(file)["text"].to_pylist() for file in files]
    assert [text for shard in shards for text in shard] == [
        text for table in tables for text in table["text"].to_pylist()
    ]
    # characters and offsets of 4 bytes, with one more offset for each block
    sizes = [sum(len(text) + 4 for text in shard) for shard in shards]
    assert all(n_bytes <= most or len(shard) == 1 for n_bytes, shard in zip(sizes, shards, strict=True))
    slack = 4 * len(blocks)
    assert all(n + len(shard[0]) + 4 + slack > most for n, shard in zip(sizes, shards[1:], strict=False))


RECORDS = [
    {"text": 'He said "a, b"\tand\nleft.\r\n', "tags": ["x", "y"], "meta": {"url": "http://a.b"}, "score": 0.5},
    {"text": "  two  ", "tags": [], "meta": {"url": "http://c.d"}, "score": 2.0},
    {"text": "007", "tags": ["\u2028"], "meta": {"url": None}, "score": -1.25},
]


@pytest.mark.parametrize("compression", ["", ".gz", ".zst", ".bz2", ".xz"])
@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv"])
def test_text_files_give_the_records_again(tmp_path, kind, compression):
    form = FileFormat(kind, compression)
    files = written(tmp_path / "out", form, RECORDS, ShardSize(2))
    assert [file.name for file in files] == [f"part-0000{k}.{form.kind}{form.compression}" for k in range(2)]
    documents = list(read_documents(settings_for(tmp_path / "out")))
    assert [document.text for document in documents] == [record["text"] for record in RECORDS]
    assert [document.labels["score"] for document in documents] == [0.5, 2.0, -1.25]
    assert [document.labels.get("meta.url") for document in documents] == ["http://a.b", "http://c.d", None]
    # the format of a corpus is recognised again
    assert FileFormat.parse("source", open_source(str(tmp_path / "out"))) == form
    assert FileFormat.parse("jsonl", open_source(str(tmp_path / "out"))).compression == compression


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_datasets_loads_every_format(tmp_path, kind):
    datasets = pytest.importorskip("datasets")
    records = [{"text": f"text: {record['text']}", "score": record["score"]} for record in RECORDS]
    files = [str(file) for file in written(tmp_path / "out", FileFormat(kind), records, ShardSize(2))]
    builder = {"jsonl": "json", "tsv": "csv"}.get(kind, kind)
    options = {"sep": "\t"} if kind == "tsv" else {}
    loaded = datasets.load_dataset(builder, data_files=files, split="train", cache_dir=str(tmp_path / "c"), **options)
    assert loaded.to_list() == records


@pytest.mark.parametrize("name", ["arrow", "jsonl.gz", ""])
def test_unknown_formats_are_refused(tmp_path, name):
    written(tmp_path / "out", FileFormat("jsonl"), RECORDS, ShardSize())
    expected = f"format: got {name!r}, expected one of source, parquet, jsonl, json, csv, tsv, datasets"
    with pytest.raises(SettingsError, match=re.escape(expected)):
        FileFormat.parse(name, open_source(str(tmp_path / "out")))
