"""The filtered corpus: the right documents, untouched, in every format; another corpus is refused."""

import datetime
import decimal
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.artifact.reader import Artifact
from grasp.artifact.writer import ArraySpec, ArtifactWriter
from grasp.choose.documents import corpus_settings, document_rows, kept_documents, write_ids
from grasp.choose.export import checked_format, own_format, write_corpus
from grasp.choose.records import read_exclusion, write_summary
from grasp.corpus import RowStore
from grasp.errors import CorpusError, SettingsError
from tests.corpus.world import Words, settings_for, write_chunked, write_jsonl, write_parquet


def texts(n=25, seed=0):
    """Documents of 0 to 30 words: up to four rows of eight tokens, and none for the empty ones."""
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{rng.integers(99)}-{i}" for _ in range(rng.integers(0, 30))) for i in range(n)]


def records(n=25, named=True, seed=0):
    rows = [{"text": text, "topic": "ab"[i % 2], "nested": {"score": i}} for i, text in enumerate(texts(n, seed))]
    return [{"row_id": f"doc-{i}", **row} for i, row in enumerate(rows)] if named else rows


def build(directory, path, **changes) -> Artifact:
    """An artifact of the rows of a corpus; its arrays say nothing."""
    corpus = settings_for(path, **changes)
    store = RowStore.write(directory / "rows", corpus, Words(), shard_rows=6)
    fields = {"identity": {}, "n_rows": store.n_rows, "shard_rows": 6, "dtype": "float32"}
    arrays = {"relevance_token": ArraySpec(1, "1", "positive: lowers loss")}
    with ArtifactWriter.open(directory / "art", arrays=arrays, **fields) as writer:
        for k in range(writer.n_shards):
            table = store.shard(k).table
            table = table.append_column("loss", pa.array(np.ones(len(table), np.float32)))
            writer.write_shard(k, {"relevance_token": np.ones((len(table), 1), np.float32)}, table, {})
        writer.finish(
            manifest={
                "settings": {"corpus": corpus.model_dump(mode="json")},
                "details": {"n_documents": store.n_documents},
                "fingerprints": {"corpus": store.fingerprint},
            },
            moments={},
            units=pa.table({"unit_id": ["u"], "target": ["sciq"]}),
        )
    return Artifact.open(directory / "art")


def choose(artifact, seed=0, share=0.5):
    return np.random.default_rng(seed).random(artifact.n_rows) < share


def slow_kept(artifact, chosen_N, rule) -> list[str]:
    """Names of kept documents: rows are `name`, `name#1`, ...; no name of the tests holds a `#`."""
    tokens, chosen = {}, {}
    for row, is_chosen in zip(artifact.rows(np.arange(artifact.n_rows)).to_pylist(), chosen_N, strict=True):
        name = row["row_id"].split("#")[0]
        tokens[name] = tokens.get(name, 0) + row["n_tokens"]
        chosen[name] = chosen.get(name, 0) + row["n_tokens"] * bool(is_chosen)
    enough = {
        "any": lambda n: chosen[n] > 0,
        "half": lambda n: chosen[n] >= tokens[n] / 2,
        "all": lambda n: chosen[n] == tokens[n],
    }
    return [name for name in tokens if enough[rule](name)]


@pytest.mark.parametrize("rule", ["any", "half", "all"])
@pytest.mark.parametrize("packing", ["document", "concat"])
@pytest.mark.parametrize("named", [True, False])
def test_documents_are_kept_by_the_share_of_their_tokens(rule, packing, named, tmp_path):
    rows = records(named=named)
    path = write_chunked(tmp_path / "corpus", rows, [7, 15], ".jsonl")
    artifact = build(tmp_path, path, packing=packing)
    chosen_N = choose(artifact, share=0.6)
    kept = kept_documents(artifact, corpus_settings(artifact), chosen_N, rule)
    want = slow_kept(artifact, chosen_N, rule)
    write_ids(artifact, chosen_N, rule, tmp_path / "kept.txt")
    assert (tmp_path / "kept.txt").read_text().splitlines() == want
    names = [row["row_id"] for row in rows] if named else None
    positions = np.flatnonzero(kept.mask_M).tolist()
    assert positions == [names.index(n) for n in want] if names else [int(n.rpartition("-")[2]) for n in want]
    assert len(kept.mask_M) == 25
    assert kept.n_documents == len(want)
    assert kept.chosen <= kept.tokens
    assert {"any": kept.partly > 0, "half": True, "all": kept.chosen == kept.tokens}[rule]


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 1000), limit=st.sampled_from([None, 9]), packing=st.sampled_from(["document", "concat"]))
def test_every_row_belongs_to_one_document(seed, limit, packing, tmp_path_factory):
    place = tmp_path_factory.mktemp("export")
    artifact = build(place, write_parquet(place / "c.parquet", records(seed=seed)), packing=packing, limit=limit)
    chosen_N = choose(artifact, seed)
    found = list(document_rows(artifact, chosen_N))
    n_tokens = artifact.rows(np.arange(artifact.n_rows))["n_tokens"].to_numpy()
    assert sum(one.tokens for one in found) == n_tokens.sum()
    assert sum(one.chosen for one in found) == n_tokens[chosen_N].sum()
    kept = kept_documents(artifact, corpus_settings(artifact), np.ones(artifact.n_rows, dtype=bool), "all")
    assert len(kept.mask_M) == (limit or 25)
    assert kept.n_documents == len(found)


@pytest.mark.parametrize(("suffix", "kind"), [(".jsonl", "jsonl"), (".jsonl.gz", "jsonl"), (".parquet", "parquet")])
def test_records_are_copied_as_they_are(suffix, kind, tmp_path, monkeypatch):
    monkeypatch.setattr("grasp.choose.export.SHARD_RECORDS", 4)
    rows = records()
    path = write_chunked(tmp_path / "corpus", rows, [7, 15], suffix)
    artifact = build(tmp_path, path)
    kept = kept_documents(artifact, corpus_settings(artifact), choose(artifact), "half")
    assert own_format(str(path)) == kind
    n = write_corpus(str(path), kept.mask_M, tmp_path / "out", kind)
    want = [row for row, keep in zip(rows, kept.mask_M, strict=True) if keep]
    files = sorted((tmp_path / "out").iterdir())
    assert n == len(want) > 4
    assert len(files) > 1
    assert read(files) == want
    again = build(tmp_path / "again", tmp_path / "out")  # a corpus like any other
    assert again.n_rows <= artifact.n_rows


def read(files):
    if files[0].suffix == ".parquet":
        return [row for file in files for row in pq.read_table(file).to_pylist()]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_any_corpus_becomes_any_format(suffix, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = records()
    path = (write_jsonl if suffix == ".jsonl" else write_parquet)(tmp_path / f"corpus{suffix}", rows)
    kept_M = np.arange(25) % 3 == 0
    want = [row for row, keep in zip(rows, kept_M, strict=True) if keep]
    for kind in ("parquet", "jsonl"):
        write_corpus(str(path), kept_M, tmp_path / kind, kind)
        assert read(sorted((tmp_path / kind).iterdir())) == want
    write_corpus(str(path), kept_M, tmp_path / "saved", "datasets")
    saved = datasets.load_from_disk(str(tmp_path / "saved"))
    assert saved.to_list() == want
    assert own_format(str(tmp_path / "saved")) == "datasets"
    write_corpus(str(tmp_path / "saved"), np.ones(len(want), dtype=bool), tmp_path / "back", "jsonl")
    assert read(sorted((tmp_path / "back").iterdir())) == want
    assert not list(tmp_path.glob("*.part"))


def test_times_and_decimals_become_text_and_numbers_in_json(tmp_path):
    day = datetime.date(2020, 1, 2)
    table = pa.table({"text": ["a"], "day": [day], "price": pa.array([decimal.Decimal("1.50")]), "raw": ["\ud7ff"]})
    pq.write_table(table, tmp_path / "c.parquet")
    write_corpus(str(tmp_path / "c.parquet"), np.ones(1, dtype=bool), tmp_path / "out", "jsonl")
    (line,) = read(sorted((tmp_path / "out").iterdir()))
    assert line == {"text": "a", "day": "2020-01-02", "price": 1.5, "raw": "\ud7ff"}
    pq.write_table(pa.table({"text": ["a"], "image": [b"\xff"]}), tmp_path / "b.parquet")
    with pytest.raises(CorpusError, match="a value of type bytes; JSON lines cannot hold it, use --format parquet"):
        write_corpus(str(tmp_path / "b.parquet"), np.ones(1, dtype=bool), tmp_path / "bytes", "jsonl")
    assert not (tmp_path / "bytes").exists()


def test_records_that_no_table_can_hold_are_told(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": "a", "x": 1}, {"text": "b", "x": {"y": 2}}])
    with pytest.raises(CorpusError, match=r"records 0 on: .*a table cannot hold it, use --format jsonl"):
        write_corpus(str(path), np.ones(2, dtype=bool), tmp_path / "out", "parquet")


def test_directories_that_are_there_are_left_alone(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", records())
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "part-00099.jsonl").write_text("somebody's own")
    write_corpus(str(path), np.ones(25, dtype=bool), tmp_path / "out", "jsonl")
    assert (tmp_path / "out.part" / "part-00099.jsonl").exists()
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["part-00000.jsonl"]
    with pytest.raises(SettingsError, match="out: is there already; give another name, or remove it"):
        write_corpus(str(path), np.ones(25, dtype=bool), tmp_path / "out", "jsonl")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows[:-1], r"(has 24 documents, .* was built from 25|has no document 'doc-24')"),
        (lambda rows: [*rows, rows[0] | {"row_id": "new"}], "has 26 documents, .* was built from 25"),
        (lambda rows: [rows[1], rows[0], *rows[2:]], "has no document 'doc-0'|has no document 'doc-1'"),
        (
            lambda rows: [row | {"text": "x " + row["text"]} for row in rows],
            r"row 1: document 'doc-0' begins with 'x w|document 'doc-\d+' begins with 'x w",
        ),
        (lambda rows: [row | {"row_id": f"other-{i}"} for i, row in enumerate(rows)], r"has no document 'doc-\d+'"),
    ],
)
def test_another_corpus_is_refused(change, said, tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", records())
    artifact = build(tmp_path, path)
    other = write_jsonl(tmp_path / "other.jsonl", change(records()))
    with pytest.raises(CorpusError, match=said):
        kept_documents(artifact, corpus_settings(artifact, str(other)), np.ones(artifact.n_rows, dtype=bool), "half")


def test_the_corpus_may_have_moved(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", records())
    artifact = build(tmp_path, path)
    path.rename(tmp_path / "moved.jsonl")
    chosen_N = np.ones(artifact.n_rows, dtype=bool)
    with pytest.raises(CorpusError, match=r"c\.jsonl: no such file or directory"):
        kept_documents(artifact, corpus_settings(artifact), chosen_N, "half")
    moved = corpus_settings(artifact, str(tmp_path / "moved.jsonl"))
    assert kept_documents(artifact, moved, chosen_N, "half").n_documents > 0


def test_what_keeps_no_document_is_told(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", [{"text": " ".join("abcdefghijklmnopqrstuvwxyz")}])
    artifact = build(tmp_path, path)
    chosen_N = np.arange(artifact.n_rows) == 0
    for rule in ("half", "all"):
        with pytest.raises(SettingsError, match=f"{rule}: there is no document of whose tokens {rule} were chosen"):
            kept_documents(artifact, corpus_settings(artifact), chosen_N, rule)
        with pytest.raises(SettingsError, match=f"--documents {rule}: there is no document"):
            write_ids(artifact, chosen_N, rule, tmp_path / "kept.txt")
    assert not list(tmp_path.glob("kept*"))
    assert write_ids(artifact, chosen_N, "any", tmp_path / "kept.txt") == 1


def test_names_with_line_breaks_and_artifacts_without_a_corpus(tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", [{"row_id": "a\nb", "text": "some words here"}])
    artifact = build(tmp_path, path)
    with pytest.raises(CorpusError, match=r"document 'a\\nb': a list with one name a line cannot hold it"):
        write_ids(artifact, np.ones(1, dtype=bool), "any", tmp_path / "kept.txt")
    artifact.manifest.settings.clear()
    with pytest.raises(SettingsError, match="does not record the corpus that it was built from; build it again"):
        corpus_settings(artifact)


def test_formats():
    assert checked_format("datasets") == "datasets"
    with pytest.raises(SettingsError, match="--format: got 'csv', expected one of parquet, jsonl, datasets"):
        checked_format("csv")


def test_exclusion_lists_name_rows_or_documents(tmp_path):
    artifact = build(tmp_path, write_jsonl(tmp_path / "c.jsonl", records(named=False)))
    rows = artifact.rows(np.arange(artifact.n_rows)).to_pylist()
    (tmp_path / "list.txt").write_text(f"{rows[0]['row_id']}\r\n\nnot there\n{rows[5]['doc_id']}\n")
    found = read_exclusion(artifact, tmp_path / "list.txt")
    want = [i == 0 or row["doc_id"] in (rows[5]["doc_id"], rows[0]["row_id"]) for i, row in enumerate(rows)]
    np.testing.assert_array_equal(found.mask_N, want)
    assert (found.listed, found.unknown) == (3, 1)
    pq.write_table(pa.table({"doc_id": [rows[5]["doc_id"], None]}), tmp_path / "list.parquet")
    found = read_exclusion(artifact, tmp_path / "list.parquet")
    np.testing.assert_array_equal(found.mask_N, [row["doc_id"] == rows[5]["doc_id"] for row in rows])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "list.txt",
            b"nobody\n",
            r"none of its 1 names is a row_id or doc_id of the artifact; expected names like 'doc-",
        ),
        ("list.txt", b"\xff\xfe", "list.txt: cannot be read: 'utf-8' codec"),
        ("list.parquet", b"PAR", "list.parquet: cannot be read: "),
        ("gone.txt", None, "gone.txt: no such file"),
    ],
)
def test_exclusion_lists_that_are_none(name, content, said, tmp_path):
    artifact = build(tmp_path, write_jsonl(tmp_path / "c.jsonl", records()))
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match=said):
        read_exclusion(artifact, tmp_path / name)


def test_an_exclusion_table_needs_a_column_of_names(tmp_path):
    artifact = build(tmp_path, write_jsonl(tmp_path / "c.jsonl", records()))
    pq.write_table(pa.table({"url": ["a"]}), tmp_path / "list.parquet")
    with pytest.raises(SettingsError, match=r"has columns \['url'\]; expected Parquet with a column row_id or doc_id"):
        read_exclusion(artifact, tmp_path / "list.parquet")


def test_a_summary_that_is_no_json_leaves_nothing(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        write_summary({"x": float("nan")}, tmp_path / "summary.json")
    assert list(tmp_path.iterdir()) == []
