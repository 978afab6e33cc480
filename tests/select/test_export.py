"""Exports: exactly the chosen rows, or the right documents, untouched, in every format; another corpus is refused."""

import datetime
import decimal
import json
import shutil
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

import grasp
from grasp.artifact.label_table import LabelTable
from grasp.artifact.reader import ArtifactReader
from grasp.corpus import RowStore
from grasp.corpus.documents import Corpus
from grasp.corpus.sources import open_source
from grasp.errors import ArtifactError, CorpusError, SettingsError
from grasp.files import entry_of, temporary_path
from grasp.runs.imported_runs import row_weights
from grasp.select.budget import load_exclusions
from grasp.select.export import (
    DocumentSelection,
    Exporter,
    corpus_settings,
    iter_records,
    row_tables,
    select_documents,
    stored_rows,
)
from grasp.select.record_files import FileFormat, ShardSize, write_corpus
from grasp.targets import Unit
from grasp.yaml_files import read_yaml
from tests.corpus.world import Words, settings_for, write_chunked, write_jsonl
from tests.runs.environments import write_arrays


def texts(n=25, seed=0):
    """Documents of 0 to 30 words: up to four rows of eight tokens, and none for the empty ones."""
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{rng.integers(99)}-{i}" for _ in range(rng.integers(0, 30))) for i in range(n)]


def records(n=25, named=True, seed=0):
    rows = [{"text": text, "topic": "ab"[i % 2], "nested": {"score": i}} for i, text in enumerate(texts(n, seed))]
    return [{"row_id": f"doc-{i}", **row} for i, row in enumerate(rows)] if named else rows


def build(directory, path, **changes) -> ArtifactReader:
    """An artifact of the rows of a corpus; its arrays say nothing."""
    corpus = settings_for(path, **changes)
    store = RowStore.write(directory / "rows", corpus, Words(), shard_rows=6)
    table = pa.concat_tables(store.shard(k).table for k in range(store.n_shards))
    ones = np.ones((store.n_rows, 1), np.float32)
    artifact = write_arrays(
        directory / "art",
        {"relevance_output_layer": ones},
        table.append_column("loss", pa.array(ones[:, 0])),
        [Unit("u", "sciq", "", "x")],
        6,
        settings={"corpus": corpus.model_dump(mode="json")},
        details={"n_documents": store.n_documents, "columns": store.details["columns"]},
        fingerprints={"corpus": store.fingerprint},
    )
    shutil.copytree(directory / "rows", artifact.path / "tokens")
    return artifact


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


class Numbers(Words):
    """Decodes ids to their numbers."""

    def decode(self, rows):
        return [" ".join(map(str, ids)) for ids in rows]


def opened(artifact, path=None):
    corpus = corpus_settings(artifact, path)
    return Corpus(open_source(corpus.path, corpus.split), corpus)


@contextmanager
def rows_and_corpus(artifact, path=None):
    corpus = opened(artifact, path)
    with stored_rows(artifact, corpus, Numbers, temporary_path(artifact.path)) as rows:
        yield rows, corpus


def rows_of(artifact):
    return RowStore.open(artifact.path / "tokens")


def export(artifact, row_index, out, kind="parquet", path=None):
    """What `Selection.export` does, with a tokenizer that can be read by eye; the lines that were written."""
    index = np.asarray(row_index)
    with rows_and_corpus(artifact, path) as (rows, corpus):
        tables = row_tables(artifact, rows, corpus, index, -1.0 * index, Numbers)
        export = write_corpus(out, FileFormat(kind), "rows", tables, 0, {"corpus": "x"})
    lines = read(sorted(file for file in out.iterdir() if file.name != "_manifest.yaml"))
    assert export.records == len(lines)
    return lines


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("expected", [True, False], ids=["rows kept", "rows made again"])
def test_exactly_the_chosen_rows_are_written(kind, named, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("grasp.select.export.BLOCK_ROWS", 5)
    rows = records(named=named)
    artifact = build(tmp_path, write_chunked(tmp_path / "corpus", rows, [7, 15], ".jsonl"))
    if not expected:
        shutil.rmtree(artifact.path / "tokens")
    store = RowStore.open(tmp_path / "rows")
    chosen = np.random.default_rng(1).permutation(artifact.n_rows)[: artifact.n_rows // 3]
    lines = export(artifact, chosen, tmp_path / "kept", kind)
    wanted = np.sort(chosen)
    shard, table = store.rows(wanted), artifact.rows(wanted).to_pylist()
    assert [line["input_ids"] for line in lines] == [shard.ids(i).tolist() for i in range(len(shard))]
    for line, row in zip(lines, table, strict=True):
        assert {name: line[name] for name in ("row_id", "doc_id", "n_tokens", "topic")} == {
            name: row[name] for name in ("row_id", "doc_id", "n_tokens", "topic")
        }
        assert line["effect"] == -1.0 * chosen[line["order"]]
        words = len(line["text"].split())  # Words has a token a word, and one at the end of each document
        assert words <= len(line["input_ids"]) <= words + 1 + 2 * line["text"].count("\n\n")
    manifest = read_yaml(tmp_path / "kept" / "_manifest.yaml")
    assert (manifest["corpus"], manifest["holds"], manifest["records"]) == ("x", "rows", len(chosen))
    for name, entry in manifest["files"].items():
        assert entry_of(tmp_path / "kept" / name).model_dump() == entry


def test_an_exported_corpus_gives_the_same_rows_again(tmp_path):
    """Tokens are used as they are, so training reads what was chosen."""
    artifact = build(tmp_path, write_jsonl(tmp_path / "c.jsonl", records()))
    chosen = np.arange(artifact.n_rows)[::3]
    export(artifact, chosen, tmp_path / "kept")
    rebuilt = build(tmp_path / "again", tmp_path / "kept")
    assert rebuilt.rows(np.arange(rebuilt.n_rows))["row_id"].to_pylist() == artifact.rows(chosen)["row_id"].to_pylist()
    shard, expected = RowStore.open(tmp_path / "again" / "rows").shard(0), RowStore.open(tmp_path / "rows").rows(chosen)
    assert [shard.ids(i).tolist() for i in range(len(shard))] == [expected.ids(i).tolist() for i in range(len(shard))]


def test_rows_that_were_cut_beforehand_and_share_a_document(tmp_path):
    """`page0` and `page0#1` are rows of the user's own: each is chosen or not for itself."""
    pages = [
        {"row_id": f"page{p}" + (f"#{c}" if c else ""), "doc_id": f"page{p}", "text": f"chunk {c} of page {p}"}
        for p in range(4)
        for c in range(3)
    ]
    artifact = build(tmp_path, write_jsonl(tmp_path / "c.jsonl", pages))
    chosen = [10, 1, 5]
    lines = export(artifact, chosen, tmp_path / "kept")
    assert [(line["row_id"], line["text"]) for line in lines] == [
        (pages[i]["row_id"], pages[i]["text"]) for i in sorted(chosen)
    ]
    assert [line["doc_id"] for line in lines] == ["page0", "page1", "page3"]
    expected = select_documents(rows_of(artifact), np.isin(np.arange(12), chosen), "half")
    assert expected.names == ("page0#1", "page1#2", "page3#1")
    expected.write_ids(tmp_path / "kept.csv")
    assert [pages[record]["row_id"] for record in pacsv.read_csv(tmp_path / "kept.csv")["record"].to_pylist()] == [
        "page0#1",
        "page1#2",
        "page3#1",
    ]


@pytest.mark.parametrize("rule", ["any", "half", "all"])
@pytest.mark.parametrize("named", [True, False])
def test_documents_are_kept_by_the_share_of_their_tokens(rule, named, tmp_path):
    rows = records(named=named)
    artifact = build(tmp_path, write_chunked(tmp_path / "corpus", rows, [7, 15], ".jsonl"))
    chosen_N = choose(artifact, share=0.6)
    expected = select_documents(rows_of(artifact), chosen_N, rule)
    want = slow_kept(artifact, chosen_N, rule)
    assert list(expected.names) == want
    names = [row["row_id"] for row in rows] if named else None
    positions = np.flatnonzero(expected.mask_M).tolist()
    assert positions == [names.index(n) for n in want] if names else [int(n.rpartition("-")[2]) for n in want]
    n_tokens = artifact.rows(np.arange(artifact.n_rows))["n_tokens"].to_numpy()
    assert expected.tokens - expected.added + expected.lost == n_tokens[chosen_N].sum()
    assert {"any": expected.lost == 0, "half": True, "all": expected.added == 0}[rule]


def parts(directory):
    return sorted(file for file in directory.iterdir() if file.name != "_manifest.yaml")


def copy(path, mask_M, out, kind, size=50_000):
    """Whole documents by position."""
    records = iter_records(settings_for(path), mask_M)
    return write_corpus(out, FileFormat(kind), "documents", records, 0, {}, ShardSize(size))


def read(files):
    if files[0].suffix == ".parquet":
        return [row for file in files for row in pq.read_table(file).to_pylist()]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".parquet"])
def test_records_of_every_format_are_exported_unchanged(suffix, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = records()
    path = write_chunked(tmp_path / "corpus", rows, [7, 15], suffix)
    artifact = build(tmp_path, path)
    expected = select_documents(rows_of(artifact), choose(artifact), "half")
    want = [row for row, keep in zip(rows, expected.mask_M, strict=False) if keep]
    for kind in ("parquet", "jsonl"):
        assert copy(path, expected.mask_M, tmp_path / kind, kind, size=4).records == len(want) > 4
        assert len(parts(tmp_path / kind)) > 1
        assert read(parts(tmp_path / kind)) == want
        assert build(tmp_path / f"again-{kind}", tmp_path / kind).n_rows <= artifact.n_rows  # a corpus like any other
    copy(path, expected.mask_M, tmp_path / "saved", "datasets")
    assert datasets.load_from_disk(str(tmp_path / "saved")).to_list() == want
    copy(tmp_path / "saved", np.ones(len(want), dtype=bool), tmp_path / "back", "jsonl")
    assert read(parts(tmp_path / "back")) == want
    assert not list(tmp_path.glob("*.part"))


def test_times_and_decimals_become_text_and_numbers_in_json(tmp_path):
    day = datetime.date(2020, 1, 2)
    table = pa.table({"text": ["a"], "day": [day], "price": pa.array([decimal.Decimal("1.50")]), "raw": ["\ud7ff"]})
    pq.write_table(table, tmp_path / "c.parquet")
    copy(tmp_path / "c.parquet", np.ones(1, dtype=bool), tmp_path / "out", "jsonl")
    (line,) = read(parts(tmp_path / "out"))
    assert line == {"text": "a", "day": "2020-01-02", "price": 1.5, "raw": "\ud7ff"}
    pq.write_table(pa.table({"text": ["a"], "image": [b"\xff"]}), tmp_path / "b.parquet")
    with pytest.raises(CorpusError, match=r"bytes.*JSON, write parquet"):
        copy(tmp_path / "b.parquet", np.ones(1, dtype=bool), tmp_path / "bytes", "jsonl")
    assert not (tmp_path / "bytes").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-1], "ends where .* has row 'doc-24'|has 'doc.*' where"),
        (lambda rows: [*rows, {"row_id": "new", "text": "a b c"}], "has 'new' beyond the"),
        (lambda rows: [rows[1], rows[0], *rows[2:]], "where .* has row 'doc-[01]'"),
        (lambda rows: [row | {"row_id": f"other-{i}"} for i, row in enumerate(rows)], r"has 'other-\d+' where"),
        (
            lambda rows: [*rows[:-1], rows[-1] | {"text": "v" + rows[-1]["text"][1:]}],
            "other tokens",
        ),
    ],
)
def test_another_corpus_is_refused_and_nothing_is_left(change, message, tmp_path):
    path = write_jsonl(tmp_path / "c.jsonl", records())
    artifact = build(tmp_path, path)
    other = write_jsonl(tmp_path / "other.jsonl", change(records()))
    before = sorted(file.name for file in tmp_path.iterdir())
    with pytest.raises(CorpusError, match=message):
        export(artifact, np.arange(artifact.n_rows), tmp_path / "kept", path=str(other))
    assert sorted(file.name for file in tmp_path.iterdir()) == before


def test_what_cannot_be_exported_is_refused(tmp_path):
    long = build(tmp_path / "long", write_jsonl(tmp_path / "long.jsonl", [{"text": " ".join("abcdefghijklmnopqrst")}]))
    first_N = np.arange(long.n_rows) == 0
    assert len(select_documents(rows_of(long), first_N, "any").names) == 1
    artifact = build(tmp_path, write_jsonl(tmp_path / "c.jsonl", records()))
    selection = DocumentSelection(np.ones(1, bool), ("a\nb",), 1, 0, 0)
    for message, attempt in (
        ("has half of its tokens", lambda: select_documents(rows_of(long), first_N, "half")),
        ("has all of its tokens", lambda: select_documents(rows_of(long), first_N, "all")),
        ("format: got 'arrow'", lambda: Exporter.from_options(artifact, form="arrow")),
        (r"'a\\nb': contains a line break", lambda: selection.write_ids(tmp_path / "kept.txt")),
    ):
        with pytest.raises(SettingsError, match=message):
            attempt()
    assert not list(tmp_path.glob("kept*"))
    artifact.manifest.details["reader"] = "classifier"
    with pytest.raises(ArtifactError, match="its rows are no texts"):
        corpus_settings(artifact)
    artifact.manifest.settings.clear()
    with pytest.raises(SettingsError, match="does not record the corpus"):
        corpus_settings(artifact)


def test_exclusion_lists_name_rows_or_documents(tmp_path):
    artifact = build(tmp_path, write_jsonl(tmp_path / "c.jsonl", records(named=False)))
    rows = artifact.rows(np.arange(artifact.n_rows)).to_pylist()
    (tmp_path / "list.txt").write_text(f"{rows[0]['row_id']}\r\n\nnot there\n{rows[5]['doc_id']}\n")
    mask_N, note = load_exclusions(artifact, tmp_path / "list.txt")
    want = [i == 0 or row["doc_id"] in (rows[5]["doc_id"], rows[0]["row_id"]) for i, row in enumerate(rows)]
    np.testing.assert_array_equal(mask_N, want)
    assert note.endswith(f": 3 names exclude {sum(want)} rows; 1 are unknown")
    long = build(
        tmp_path / "long", write_jsonl(tmp_path / "long.jsonl", [{"id": 2**60 + i, "text": "a b"} for i in range(3)])
    )
    listed = pa.array([decimal.Decimal(2**60 + 1)], pa.decimal128(20, 0))
    pq.write_table(pa.table({"row_id": listed}), tmp_path / "decimals.parquet")
    assert load_exclusions(long, tmp_path / "decimals.parquet")[0].tolist() == [False, True, False]
    pq.write_table(pa.table({"doc_id": [rows[5]["doc_id"], None]}), tmp_path / "list.parquet")
    mask_N, _ = load_exclusions(artifact, tmp_path / "list.parquet")
    np.testing.assert_array_equal(mask_N, [row["doc_id"] == rows[5]["doc_id"] for row in rows])


def test_an_id_names_all_rows_of_its_document(tmp_path):
    corpus = [{"id": f"doc{i}", "text": " ".join(["word"] * 30)} for i in range(3)]
    artifact = build(tmp_path, write_jsonl(tmp_path / "c.jsonl", corpus))
    rows = artifact.rows(np.arange(artifact.n_rows)).to_pylist()
    of_document_N = [row["row_id"].split("#")[0] == "doc1" for row in rows]
    assert sum(of_document_N) > 1
    assert LabelTable(artifact.rows_path).matching("doc_id = 'doc1'").mask_N.tolist() == of_document_N
    (tmp_path / "list.txt").write_text("doc1\n")
    assert load_exclusions(artifact, tmp_path / "list.txt")[0].tolist() == of_document_N
    assert load_exclusions(artifact, ["doc1"])[0].tolist() == of_document_N
    table = pa.table({"run": ["a", "b"], "doc_id": ["doc1", "doc2"]})
    runs = grasp.import_runs(table, pa.table({"run": ["a", "b"], "sciq/acc": [0.1, 0.2]}))
    (block,), notes = row_weights(runs, artifact)
    assert block.weights_BN.toarray()[0].tolist() == of_document_N
    assert notes == [f"the names are read as 2 documents, with {2 * sum(of_document_N)} rows"]
    # a table of selected rows names rows
    pq.write_table(pa.table({"row_id": ["doc1"], "doc_id": ["doc1"]}), tmp_path / "rows.parquet")
    assert load_exclusions(artifact, tmp_path / "rows.parquet")[0].tolist() == [row["row_id"] == "doc1" for row in rows]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("list.txt", b"nobody\n", "none of its 1 names is a row_id or doc_id"),
        ("list.txt", b"\xff\xfe", "cannot be read: 'utf-8' codec"),
        ("list.parquet", b"PAR", "cannot be read: "),
        ("list.parquet", pa.table({"url": ["a"]}), r"has columns \['url'\]"),
        ("gone.txt", None, "no such file"),
    ],
)
def test_exclusion_lists_that_are_none(name, content, message, tmp_path):
    artifact = build(tmp_path, write_jsonl(tmp_path / "c.jsonl", records()))
    if isinstance(content, pa.Table):
        pq.write_table(content, tmp_path / name)
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(SettingsError, match=f"{name}: .*{message}"):
        load_exclusions(artifact, tmp_path / name)


@pytest.mark.parametrize(
    ("names", "settings", "written"),
    [
        ({"text": "some words 2"}, {}, {"text": "some words 2"}),
        ({"body": "some words 2"}, {"text_column": "body"}, {"body": "some words 2"}),
        ({"input_ids": [3, 4, 5]}, {}, {"input_ids": [3, 4, 5], "text": "3 4 5"}),  # decoded
        ({"text": "a", "effect": "high", "order": 7}, {}, {"effect": -2.0, "effect_": "high", "order": 0, "order_": 7}),
    ],
)
def test_columns_of_the_corpus_keep_their_names_next_to_added_columns(names, settings, written, tmp_path):
    first = [{name: value if name != "input_ids" else [1, 2] for name, value in names.items()}] * 2
    artifact = build(tmp_path, write_jsonl(tmp_path / "c.jsonl", [*first, names]), **settings)
    (line,) = export(artifact, [2], tmp_path / "kept", "jsonl")
    assert line.items() >= written.items()
    assert ("text" in line) == ("body" not in names)


NESTED = [
    {
        "text": text or "x",
        "metadata": {"source": "ab"[i % 2], "score": i / 2},
        "tags": ["x", "y"][: i % 3],
        "vector": [1.0, float(i)],
        "extra": json.dumps({"lang": "en", "n": i}),
        "effect": f"own-{i}",
    }
    for i, text in enumerate(texts())
]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rows_keep_the_other_columns_of_their_records(suffix, kind, tmp_path, monkeypatch):
    monkeypatch.setattr("grasp.select.export.BLOCK_ROWS", 5)
    rows = [{"id": f"doc-{i}", **record} for i, record in enumerate(NESTED)]
    artifact = build(tmp_path, write_chunked(tmp_path / "corpus", rows, [7, 15], suffix))
    chosen = np.flatnonzero(choose(artifact))
    lines = export(artifact, chosen, tmp_path / "kept", kind)
    store = rows_of(artifact)
    documents = np.concatenate([store.read_columns(k, ("__document__",)).column(0) for k in range(store.n_shards)])
    for line, document in zip(lines, documents[chosen].tolist(), strict=True):
        expected = rows[document]
        assert {name: line[name] for name in ("metadata", "tags", "vector", "extra")} == {
            name: expected[name] for name in ("metadata", "tags", "vector", "extra")
        }
        assert line["effect_"] == expected["effect"]
        assert line["id"] == line["doc_id"] == expected["id"]
        assert "metadata.source" not in line
    rebuilt = build(tmp_path / "again", tmp_path / "kept")
    columns = ["metadata.source", "tags", "extra.lang"]
    labels = artifact.rows(chosen).select(columns).to_pylist()
    assert rebuilt.rows(np.arange(rebuilt.n_rows)).select(columns).to_pylist() == labels


@pytest.mark.parametrize("mask", ["labels", "completion_mask"])
def test_the_loss_mask_of_token_ids_is_exported_as_labels(mask, tmp_path):
    ids = [[k, 1, 2, 3] for k in range(5)]
    masked = {"labels": [-100, -100, 2, 3], "completion_mask": [0, 0, 1, 1]}[mask]
    path = write_jsonl(tmp_path / "c.jsonl", [{"input_ids": row, mask: masked} for row in ids])
    artifact = build(tmp_path, path)
    assert rows_of(artifact).loss_counts().tolist() == [2] * 5
    lines = export(artifact, [3, 0], tmp_path / "kept")
    assert [(line["input_ids"], line["labels"]) for line in lines] == [(ids[k], [-100, -100, 2, 3]) for k in (0, 3)]
    assert mask == "labels" or mask not in lines[0]
    assert rows_of(build(tmp_path / "again", tmp_path / "kept")).loss_counts().tolist() == [2, 2]


def test_rows_keep_the_names_of_classes(tmp_path):
    datasets = pytest.importorskip("datasets")
    classes = datasets.ClassLabel(names=["neg", "pos"])
    names = {"text": datasets.Value("string"), "label": classes, "order": classes}
    table = {"text": texts(9), "label": [0, 1, 0] * 3, "order": [1, 0, 0] * 3}
    datasets.Dataset.from_dict(table, features=datasets.Features(names)).to_parquet(tmp_path / "c.parquet")
    artifact = build(tmp_path, tmp_path / "c.parquet")
    row_index = np.arange(artifact.n_rows)
    with rows_and_corpus(artifact) as (rows, corpus):
        tables = row_tables(artifact, rows, corpus, row_index, np.ones(len(row_index)), Numbers)
        write_corpus(tmp_path / "out", FileFormat(), "rows", tables, 0, {})
    read_back = datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    features = {name: read_back.features[name] for name in ("label", "order", "order_")}
    assert features == {"label": classes, "order": datasets.Value("int64"), "order_": classes}
