"""Laws: a store does not depend on chunks, shards or interruptions; unusable input is refused."""

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.corpus import RowStore
from grasp.corpus.documents import Corpus
from grasp.corpus.sources import table_source
from grasp.errors import CorpusError
from tests.corpus.world import (
    TEXTS,
    Words,
    records,
    rows_of,
    settings_for,
    write_chunked,
    write_jsonl,
)
from tests.faults import Killed


def write(directory, path, shard_rows=4, tokenizer=None, progress=None, source=None, **changes):
    tokenizer, corpus_settings = tokenizer or Words(), settings_for(path, **changes)
    corpus = None if source is None else Corpus(source, corpus_settings)
    return RowStore.write(
        directory, corpus_settings, tokenizer, shard_rows=shard_rows, corpus=corpus, progress=progress
    )


@pytest.fixture
def corpus(tmp_path):
    return write_chunked(tmp_path / "corpus", records(30), [7, 8, 20], ".jsonl")


@given(
    texts=TEXTS,
    cuts=st.lists(st.integers(1, 12), max_size=3, unique=True),
    suffix=st.sampled_from([".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst"]),
    shard_rows=st.integers(1, 6),
)
@settings(max_examples=20)
def test_rows_and_fingerprint_depend_on_neither_files_nor_shards(texts, cuts, suffix, shard_rows):
    rows = [{"text": text, "n": i} for i, text in enumerate([*texts, "a closing line"])]
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        whole = write(base / "1", write_jsonl(base / "whole.jsonl", rows), 1000)
        chunked = write_chunked(base / "chunked", rows, cuts, suffix)
        other = write(base / "2", chunked, shard_rows)
        assert rows_of(whole) == rows_of(other)
        assert whole.fingerprint == other.fingerprint
        assert (whole.skipped.counts, whole.skipped.ids) == (other.skipped.counts, other.skipped.ids)
        assert (whole.n_rows, whole.n_tokens, whole.n_documents) == (other.n_rows, other.n_tokens, other.n_documents)
        assert other.n_shards == -(-other.n_rows // shard_rows)


@pytest.mark.parametrize(
    "change", ["token", "row_id", "order", "boundary"], ids=lambda field: f"a change of {field} is visible"
)
def test_the_fingerprint_changes_with_every_change_of_rows(tmp_path, change):
    ids = [[1, 2, 3], [4, 5, 6]]
    rows = [{"input_ids": x, "row_id": name} for x, name in zip(ids, "ab", strict=True)]
    changed = {
        "token": [{**rows[0], "input_ids": [1, 2, 4]}, rows[1]],
        "row_id": [{**rows[0], "row_id": "c"}, rows[1]],
        "order": rows[::-1],
        "boundary": [{**rows[0], "input_ids": [1, 2]}, {**rows[1], "input_ids": [3, 4, 5, 6]}],
    }[change]
    original = write(tmp_path / "1", write_jsonl(tmp_path / "1.jsonl", rows))
    other = write(tmp_path / "2", write_jsonl(tmp_path / "2.jsonl", changed))
    assert original.fingerprint != other.fingerprint


def test_the_fingerprint_is_that_of_the_format():
    """Compare with a recorded fingerprint: later versions must recognise existing stores."""
    with tempfile.TemporaryDirectory() as name:
        rows = [{"input_ids": [1, 2, 3], "row_id": "a"}, {"input_ids": [4, 5], "row_id": "b"}]
        store = write(Path(name) / "store", write_jsonl(Path(name) / "c.jsonl", rows))
    assert store.fingerprint == "4dd87b16904c788af5b76cb6d60f388e"


def test_a_corpus_gives_the_same_store_in_every_format(tmp_path):
    """Check also that a nested field that is null in some lines does not become a label without values."""
    rows = [{**row, "id": 2**60 + i, "meta": [None, {"a": i}][i % 2]} for i, row in enumerate(records(9))]
    table = pa.Table.from_pylist(rows)
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=2)
    stores = [
        write(tmp_path / "1", write_jsonl(tmp_path / "c.jsonl", rows)),
        write(tmp_path / "2", tmp_path / "c.parquet"),
        write(tmp_path / "3", tmp_path / "saved"),
        write(tmp_path / "4", "none", source=table_source(table)),
    ]
    results = [(rows_of(s), s.fingerprint, s.label_columns, s.ignored_columns, s.details["columns"]) for s in stores]
    assert results == [results[0]] * 4
    assert results[0][2:4] == (("topic", "year", "meta.a"), ())


def test_resuming_does_not_repeat_tokenization(tmp_path, corpus):
    done = []

    def stop(rows):
        done.append(rows)
        if sum(done) >= 32:
            raise Killed

    with pytest.raises(Killed):
        write(tmp_path / "store", corpus, progress=stop)
    state = json.loads((tmp_path / "store" / "shard-00007.json").read_text())
    tokenizer = Words()
    write(tmp_path / "store", corpus, tokenizer=tokenizer)
    probe, rest = tokenizer.seen[:16], tokenizer.seen[16:]
    texts = [row["text"] for row in records(30)]
    assert probe == texts[:16]
    assert state["cursor"]["document"] > 10
    assert rest == texts[state["cursor"]["document"] :]


def test_a_complete_store_is_opened_and_not_rewritten(tmp_path, corpus):
    write(tmp_path / "store", corpus)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()}
    assert rows_of(write(tmp_path / "store", corpus)) == rows_of(RowStore.open(tmp_path / "store"))
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "store").iterdir()} == before


def test_a_corpus_may_move(tmp_path, corpus):
    write(tmp_path / "store", corpus)
    shutil.move(corpus, tmp_path / "elsewhere")
    for path in (tmp_path / "elsewhere").iterdir():
        os.utime(path, (1, 1))  # as a copy would be
    assert write(tmp_path / "store", tmp_path / "elsewhere").n_documents == 30


def test_large_files_are_identified_by_their_modification_time(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr("grasp.corpus.sources._DIGEST_BYTES", 10)
    write(tmp_path / "store", corpus)
    rewrite_in_place(corpus)
    with pytest.raises(CorpusError, match=r"part-001\.jsonl: .*\[.*1\.0"):
        write(tmp_path / "store", corpus)


def add_a_line(corpus):
    with (corpus / "part-001.jsonl").open("a") as handle:
        handle.write('{"text": "late"}\n')


def rewrite_in_place(corpus):
    path = corpus / "part-001.jsonl"
    path.write_text(path.read_text().replace("1997", "1998"))
    os.utime(path, (1, 1))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, {"max_length": 16}, r"settings\.max_length:.*\b8\b.*\b16\b"),
        (None, {"shard_rows": 5}, r"settings\.shard_rows:.*\b4\b.*\b5\b"),
        (None, {"shortest_end": 2, "limit": 3}, r"settings\.limit: .*null.*\b3\b.*settings\.shortest_end: "),
        (None, {"tokenizer": Words(eos_id=1)}, r"tokenizer\.eos_id:.*\b0\b.*\b1\b"),
        (None, {"tokenizer": Words(salt="x")}, r"tokenizer\.encoding: "),
        (add_a_line, {}, r"corpus\.part-001\.jsonl: "),
        (rewrite_in_place, {}, r"corpus\.part-001\.jsonl: "),
        (lambda c: write_jsonl(c / "z.jsonl", records(1)), {}, r"corpus\.z\.jsonl:.*absent"),
        (lambda c: (c / "part-000.jsonl").unlink(), {}, r"corpus\.part-000\.jsonl:.*absent"),
    ],
)
@pytest.mark.parametrize("complete", [True, False])
def test_another_input_is_refused_on_resume(tmp_path, corpus, change, options, message, complete):
    def stop(_):
        if not complete:
            raise Killed

    with contextlib.suppress(Killed):
        write(tmp_path / "store", corpus, progress=stop)
    if change is not None:
        change(corpus)
    with pytest.raises(CorpusError, match=rf"begun.*{message}"):
        write(tmp_path / "store", corpus, **options)


@given(st.lists(st.integers(0, 29), max_size=12), st.sampled_from([1, 4, 7, 100]))
@settings(max_examples=30)
def test_rows_have_the_requested_order(tmp_path_factory, picked, shard_rows):
    base = tmp_path_factory.getbasetemp() / f"rows-{shard_rows}"
    if not base.exists():
        rows = [{"input_ids": list(range(1, 2 + i)), "row_id": f"r{i}", "i": i} for i in range(1, 31)]
        write(base, write_jsonl(base.with_suffix(".jsonl"), rows), shard_rows, max_length=64)
    store = RowStore.open(base)
    result = store.rows(np.array(picked, dtype=np.int64))
    assert len(result) == len(picked)
    assert result.table.column_names == ["row_id", "doc_id", "n_tokens", "snippet", "i"]
    assert result.table.column("i").to_pylist() == [i + 1 for i in picked]
    assert [result.ids(k).tolist() for k in range(len(result))] == [list(range(1, i + 3)) for i in picked]


def test_rows_reads_only_the_shards_it_needs(tmp_path, corpus):
    store = write(tmp_path / "store", corpus)
    for k in range(store.n_shards):
        if k != 2:
            (tmp_path / "store" / f"shard-{k:05d}.parquet").unlink()
    assert store.rows(np.array([11, 8])).table.equals(store.shard(2).table.take([3, 0]))
    with pytest.raises(CorpusError, match=r"shard-00001\.parquet: missing"):
        store.rows(np.array([8, 4]))


def test_labels_have_one_type_over_all_shards(tmp_path):
    labels = [{"x": 1}, {"x": 2.5}, {"x": "many"}, {"y": 3}, {"y": 0.5, "z": None}, {"x": True}]
    rows = [{"text": f"a b {i}", **label} for i, label in enumerate(labels)]
    path = write_jsonl(tmp_path / "c.jsonl", rows)
    tables = []
    for shard_rows in (1, 4, 10):
        store = write(tmp_path / f"{shard_rows}", path, shard_rows)
        tables.append(pa.concat_tables([store.shard(k).table for k in range(store.n_shards)]).combine_chunks())
    assert tables[0].equals(tables[1])
    assert tables[0].equals(tables[2])
    assert tables[0].column("x").to_pylist() == ["1", "2.5", "many", None, None, "true"]
    assert tables[0].column("y").to_pylist() == [None, None, None, 3.0, 0.5, None]
    assert tables[0].column("z").to_pylist() == [None] * 6


def test_clashing_and_nested_columns(tmp_path):
    rows = [{"text": "a b", "loss": 1.0, "n_tokens": "n", "__document__": 7, "meta": {"a": 1}, "tags": ["t"]}]
    for suffix in (".jsonl", ".parquet"):
        store = write(tmp_path / f"s{suffix}", write_chunked(tmp_path / f"c{suffix}", rows, [], suffix))
        assert store.label_columns == ("loss_", "n_tokens_", "__document___", "meta.a", "tags")
        assert store.ignored_columns == ()
        (row,) = store.shard(0).table.to_pylist()
        assert (row["n_tokens"], row["n_tokens_"], row["__document___"]) == (3, "n", 7)
        assert (row["meta.a"], row["tags"]) == (1, '["t"]')


def test_row_length_follows_the_model_and_rows_that_are_ids(tmp_path):
    texts = write_jsonl(tmp_path / "t.jsonl", [{"text": "x " * 3000}])
    ids = write_jsonl(tmp_path / "i.jsonl", [{"input_ids": [1] * n} for n in (3, 2500)])

    def lengths(path, **options):
        store = RowStore.write(
            tmp_path / f"{path.stem}-{options}", settings_for(path, max_length=None), Words(), shard_rows=9, **options
        )
        return store.details["max_length"], store.lengths().tolist()

    assert lengths(texts) == (2048, [2048, 953])
    assert lengths(texts, context=1500) == (1500, [1500, 1500])
    assert lengths(texts, context=100_000)[0] == 2048
    assert lengths(ids) == (2500, [3, 2500])
    assert lengths(ids, context=2000) == (2000, [3, 2000, 500])
    assert lengths(ids, context=100_000)[0] == 2500


def test_an_unfinished_store_of_other_input_is_replaced_if_allowed(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "a b", "row_id": name} for name in "xyx"])
    with pytest.raises(CorpusError, match=r"'x'.*twice"):
        write(tmp_path / "store", path, 2)
    write_jsonl(path, [{"text": "a b", "row_id": name} for name in "xyz"])
    with pytest.raises(CorpusError, match="begun"):
        write(tmp_path / "store", path, 2)
    (tmp_path / "store" / "notes.txt").write_text("the user's own")
    settings = settings_for(path)
    assert RowStore.write(tmp_path / "store", settings, Words(), shard_rows=2, replace=True).n_rows == 3
    assert (tmp_path / "store" / "notes.txt").exists()


def test_skipped_records_are_counted_and_listed(tmp_path):
    rows = [{"text": "a b"}, {"text": ""}, {"text": None}, {"text": " \n\t"}, {"text": "solo"}, {"text": "c d"}]
    path = write_jsonl(tmp_path / "c.jsonl", [{**row, "row_id": f"r{i}"} for i, row in enumerate(rows)])
    for shard_rows in (1, 2, 5):
        store = write(tmp_path / f"{shard_rows}", path, shard_rows, tokenizer=Words(eos_id=None))
        assert store.skipped.counts == {"empty": 2, "whitespace": 1, "one_token": 1}
        assert store.skipped.ids == {"empty": ["r1", "r2"], "whitespace": ["r3"], "one_token": ["r4"]}
        assert [row["row_id"] for row, _ in rows_of(store)] == ["r0", "r5"]
        assert store.n_documents == 6


def test_writing_reads_ahead_by_a_limited_number_of_documents(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": f"a b {i}"} for i in range(600)])
    tokenizer, row_counts, documents_ahead = Words(), [], []

    def record_rows(rows):
        row_counts.append(rows)
        documents_ahead.append(len(tokenizer.seen) - 16 - sum(row_counts))

    write(tmp_path / "s", path, 100, tokenizer, record_rows)
    assert row_counts == [100] * 6
    assert max(documents_ahead) <= 256


EMPTY = pa.table({"text": pa.array([], pa.string())})
REFUSED = [
    ([], {}, r"\b0 records.*empty"),
    (EMPTY, {}, r"\b0 records.*empty"),
    (
        [{"text": text} for text in ("", " ", "a")],
        {"tokenizer": Words(eos_id=None)},
        "1 empty documents.*1 documents of white space.*1 rows of one token",
    ),
    ([{"text": "a b c d e", "row_id": "x"}, {"text": "f g", "row_id": "x#1"}], {"max_length": 3}, r"'x#1'.*twice"),
    ([{"input_ids": [1, 2]}, {"input_ids": [3, 500]}], {}, r"token id 500\b.*\b1\b"),
    (
        [{"messages": [{"role": "user", "content": "hi"}], "chosen": [{"role": "assistant"}], "rejected": "b"}],
        {},
        "without an answer.*to train on the pairs: --loss dpo",
    ),
    ([{"text": "a b", "topic": "x"}, {"text": "c d", "Topic": "x"}], {"shard_rows": 1}, "case"),
    ([{"text": "a b", "topic": "x"}, {"text": "c d", "Topic": "x"}], {"shard_rows": 10}, "case"),
]


@pytest.mark.parametrize(("rows", "changes", "message"), REFUSED)
def test_a_corpus_without_usable_rows_is_refused(tmp_path, rows, changes, message):
    path = tmp_path / ("c.jsonl" if isinstance(rows, list) else "c.parquet")
    if isinstance(rows, list):
        write_jsonl(path, rows)
    else:
        pq.write_table(rows, path)
    with pytest.raises(CorpusError, match=message):
        write(tmp_path / "store", path, **changes)


@pytest.mark.parametrize("shard_rows", [1, 3, 100])
def test_a_row_id_that_occurs_twice_names_both_places(tmp_path, shard_rows):
    names = ["a", "b", "c", "d", "b", "e", "c"]
    path = write_chunked(tmp_path / "c", [{"text": "x y", "row_id": name} for name in names], [3], ".jsonl")
    with pytest.raises(CorpusError, match=r"'b'.*part-000\.jsonl:2.*part-001\.jsonl:2"):
        write(tmp_path / "store", path, shard_rows)
    assert not (tmp_path / "store" / "store.json").exists()
    assert not (tmp_path / "store" / "spill.part").exists()
