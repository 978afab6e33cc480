"""Law: a corpus gives the same documents in every format, and reading from k skips exactly k."""

import gzip
import json
import os
import re
import sys
import tracemalloc
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets
import fsspec
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.corpus import read_documents
from grasp.corpus.sources import IN_MEMORY, table_source
from grasp.errors import CorpusError, ModelError
from grasp.models.build_source import load_reference
from grasp.settings import ModelSettings
from tests.corpus.world import records, sentences, settings_for, write_chunked, write_jsonl, write_parquet

SUFFIXES = [".parquet", ".jsonl", ".jsonl.gz", ".jsonl.zst"]


def plain(documents):
    return [
        (d.index, d.doc_id, d.row_id, d.text, None if d.input_ids is None else d.input_ids.tolist(), dict(d.labels))
        for d in documents
    ]


def read(path, start=0, **changes):
    return list(read_documents(settings_for(path, **changes), start=start))


def labels_of(path, **changes):
    return [dict(d.labels) for d in read(path, **changes)]


def save_dataset(path: Path, rows) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


@pytest.fixture
def expected(tmp_path):
    return plain(read(write_jsonl(tmp_path / "expected.jsonl", records(20))))


@pytest.fixture(params=[".jsonl", ".parquet"])
def write(request, tmp_path):
    writer = write_parquet if request.param == ".parquet" else write_jsonl
    return lambda rows, name="c": writer(tmp_path / f"{name}{request.param}", rows)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("cuts", [[], [1, 7, 8], list(range(1, 20))], ids=["one", "four", "each"])
def test_a_directory_of_files_is_one_corpus(tmp_path, expected, suffix, cuts):
    path = write_chunked(tmp_path / "corpus", records(20), cuts, suffix)
    (path / "README.md").write_text("not a part of the corpus")
    write_jsonl(path / "_hidden" / "x.jsonl", records(3))
    assert plain(read(path)) == expected
    memory = fsspec.filesystem("memory")
    for file in path.glob("part-*"):
        memory.pipe(f"/{tmp_path.name}/{file.name}", file.read_bytes())
    remote = read(f"memory://{tmp_path.name}")
    assert plain(remote) == plain(read(f"file://{path}")) == expected
    assert re.match(rf"memory://(/|){tmp_path.name}/part-000", remote[0].location)


@pytest.mark.parametrize("suffix", SUFFIXES)
@given(start=st.integers(0, 25), cuts=st.lists(st.integers(1, 19), max_size=4, unique=True))
@settings(max_examples=12)
def test_reading_from_k_skips_exactly_k(tmp_path_factory, suffix, start, cuts):
    path = write_chunked(tmp_path_factory.mktemp("corpus"), records(20), cuts, suffix)
    whole, rest = read(path), read(path, start)
    assert plain(rest) == plain(whole[start:])
    assert [d.location for d in rest] == [d.location for d in whole[start:]]
    assert plain(read(path, start, limit=5)) == plain(whole[start:5])


def test_several_frames_of_gzip_and_zstd_are_read_to_the_end(tmp_path, expected):
    whole = write_jsonl(tmp_path / "c.jsonl", records(20)).read_bytes()
    gz, zst = gzip.compress, partial(pa.compress, codec="zstd", asbytes=True)
    end = len(whole[:600].rpartition(b"\n")[0]) + 1
    skipped = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"  # a frame of zstd that readers skip
    members = {
        "joined.jsonl.gz": gz(whole[:end]) + gz(whole[end:]),
        "joined.jsonl.zst": zst(whole[:end]) + zst(whole[end:]),
        "half.jsonl.gz": gz(whole[:301]) + gz(whole[301:]),  # in the middle of a line
        "half.jsonl.zst": zst(whole[:301]) + zst(whole[301:]),
        "empty.jsonl.gz": gz(b"") + gz(whole) + gz(b""),
        "skipped.jsonl.zst": skipped + zst(whole) + skipped,
        "c4.json.zst": zst(whole),  # as C4 and Dolma name their lines
        "crlf.jsonl": b"\xef\xbb\xbf" + whole.replace(b"\n", b"\r\n").rstrip(),
    }
    for name, content in members.items():
        (tmp_path / name).write_bytes(content)
        assert plain(read(tmp_path / name)) == expected


def test_a_datasets_directory(tmp_path, expected):
    path = save_dataset(tmp_path / "saved", records(20))
    assert plain(read(path)) == expected
    assert plain(read(path, start=7)) == expected[7:]
    datasets.Dataset.from_list(records(20)).select([5, 3, 17]).save_to_disk(tmp_path / "indexed")
    assert [d.text for d in read(tmp_path / "indexed")] == [sentences(20)[k] for k in (5, 3, 17)]


def test_splits_are_directories_or_beginnings_of_file_names(tmp_path, expected):
    splits = {"train": datasets.Dataset.from_list(records(20)), "test": datasets.Dataset.from_list(records(2))}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "splits")
    datasets.DatasetDict({"x": splits["train"]}).save_to_disk(tmp_path / "alone")
    file = write_jsonl(tmp_path / "data" / "train-0.jsonl", records(20))
    write_jsonl(tmp_path / "data" / "test-0.jsonl", records(2))
    for place in ("splits", "data"):
        assert plain(read(tmp_path / place, split="train")) == expected
        assert plain(read(tmp_path / place, split="test")) == expected[:2]
    assert plain(read(tmp_path / "splits" / "test")) == expected[:2]
    assert plain(read(tmp_path / "alone")) == expected
    for path, split, message in (
        (tmp_path / "splits", None, r"splits: .*test, train.*--split"),
        (tmp_path / "splits", "dev", r"split: .*'dev'.*test, train"),
        (tmp_path / "data", "dev", r"split: .*'dev'.*file"),
        (file, "train", r"split: .*'train'.*one file"),
    ):
        with pytest.raises(CorpusError, match=message):
            read(path, split=split)


@pytest.mark.parametrize(
    "make_table",
    [
        pa.Table.from_pylist,
        pd.DataFrame,
        datasets.Dataset.from_list,
        lambda r: list(r) and datasets.DatasetDict({"train": datasets.Dataset.from_list(r)}),
    ],
    ids=["arrow", "pandas", "datasets", "dict"],
)
def test_tables_in_memory_are_read_like_files_and_identified_by_content(expected, make_table):
    source = table_source(make_table(records(20)))
    assert plain(read_documents(settings_for("none"), source=source)) == expected
    assert plain(read_documents(settings_for("none"), source=source, start=7)) == expected[7:]
    assert source.identity() == table_source(make_table(records(20))).identity()
    assert source.identity() != table_source(make_table([*records(19), {**records(20)[19], "year": 1}])).identity()


def test_objects_in_memory_that_are_not_tables_are_refused():
    two = datasets.DatasetDict({name: datasets.Dataset.from_list(records(2)) for name in ("a", "b")})
    assert table_source(two, "b").table.num_rows == 2
    for value, message in (
        (["a", "b"], r"corpus: .*list.*path.*DataFrame"),
        (pd.DataFrame({"text": ["a", 3.5]}), "column"),
        (two, r"corpus: .*a, b.*--split"),
    ):
        with pytest.raises(CorpusError, match=message):
            table_source(value)


def test_a_row_name_is_the_document_name_without_another(write):
    first, second = read(write([{"id": "a", "text": "x"}, {"id": None, "text": "y"}]))
    assert (first.row_id, first.doc_id, second.row_id) == ("a", "a", None)
    assert second.doc_id.endswith("-1")


def test_names_of_hub_datasets_are_distinguished_from_paths(monkeypatch, tmp_path, expected):
    requested_names, dataset = [], datasets.DatasetDict({"train": datasets.Dataset.from_list(records(20))})

    def load(name):
        requested_names.append(name)
        if name != "someone/some-corpus":
            raise FileNotFoundError(f"Dataset '{name}' doesn't exist")
        return dataset

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    monkeypatch.setattr("grasp.hub.unreachable", lambda: None)
    monkeypatch.chdir(tmp_path)
    assert plain(read("someone/some-corpus")) == expected
    with pytest.raises(CorpusError, match=r"no/such: no such file.*hub dataset"):
        read("no/such")
    requested_names.clear()
    write_jsonl(tmp_path / "someone" / "corpus" / "a.jsonl", [{"text": "here"}])
    assert [d.text for d in read("someone/corpus")] == ["here"]
    for path in ("someone/corpus.parquet", "./someone/other", "/nowhere/at/all", "a/b/c"):
        with pytest.raises(CorpusError, match=rf"{path}: no such file.*\.parquet"):
            read(path)
    for name, to in (("circle", "other"), ("other", "circle"), ("dangling", "nothing")):
        os.symlink(to, name)
        with pytest.raises(CorpusError, match=f"^{name}: .*symbolic link"):
            read(name)
        with pytest.raises(ModelError, match=f"^model.path: `{name}` .*link"):
            load_reference(ModelSettings(path=name))
    assert not requested_names


def test_ids_names_and_labels(write):
    rows = [
        {"input_ids": [1, 2, 3], "text": "a b c", "row_id": 17, "doc_id": "x", "loss": 0.5, "mask": [1, 1, 1]},
        {"input_ids": [], "text": "", "row_id": None, "doc_id": None, "loss": None, "mask": [1]},
    ]
    first, second = read(write(rows))
    assert (first.row_id, first.doc_id, first.text) == ("17", "x", "a b c")
    assert (first.input_ids.dtype, first.input_ids.tolist()) == (np.int32, [1, 2, 3])
    assert (first.labels, first.ignored) == ({"loss_": 0.5}, ("mask",))
    assert (second.row_id, second.input_ids.tolist(), second.labels) == (None, [], {"loss_": None})
    assert second.doc_id.endswith("-1")


@pytest.mark.parametrize("kind", [pa.uint16(), pa.int32(), pa.int64()])
@pytest.mark.parametrize(
    "wrap", [pa.list_, pa.large_list, pa.list_view, pa.large_list_view, lambda kind: pa.list_(kind, 2)]
)
def test_token_ids_of_any_integer_and_list_type(tmp_path, kind, wrap):
    table = pa.table({"input_ids": pa.array([[1, 2], None, [3, 4]], wrap(kind))})
    pq.write_table(table, tmp_path / "c.parquet")
    ids = [d.input_ids for d in read(tmp_path / "c.parquet")]
    assert [None if array is None else array.tolist() for array in ids] == [[1, 2], None, [3, 4]]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"labels": [-100, 6, 7, 8]}, ([5, 6, 7, 8], [False, True, True, True])),
        ({"labels": [5, 6, 7, 8]}, ([5, 6, 7, 8], None)),
        ({"completion_mask": [0, 0, 1, 1]}, ([5, 6, 7, 8], [False, False, True, True])),
        ({"completion_mask": [0, 1, 1, 1], "assistant_masks": [True, True, False, True]}, ([5, 6, 7, 8], [0, 1, 0, 1])),
        ({"attention_mask": [0, 1, 1, 0]}, ([6, 7], None)),
        ({"attention_mask": [1, 1, 1, 0], "labels": [-100, 6, 7, -100]}, ([5, 6, 7], [False, True, True])),
        ({"labels": None}, ([5, 6, 7, 8], None)),
        ({"labels": [6, 7, 8, -100]}, r"c\..*: column 'labels' differs from input_ids.*not shifted"),
        ({"attention_mask": [1, 1]}, r"c\..*: column 'attention_mask' has 2 values.*4 token ids"),
        ({"labels": ["a"] * 4}, "labels.*integers"),
    ],
)
def test_columns_beside_token_ids_say_which_are_padding_and_which_carry_loss(write, columns, expected):
    path = write([{"input_ids": [5, 6, 7, 8], "topic": "a"} | columns])
    if isinstance(expected, str):
        with pytest.raises(CorpusError, match=expected):
            read(path)
        return
    (document,) = read(path)
    mask = document.loss_mask
    assert (document.input_ids.tolist(), None if mask is None else mask.tolist()) == expected
    assert dict(document.labels) == {"topic": "a"}


def test_labels_beside_a_text_stay_labels(write):
    (document,) = read(write([{"text": "a", "labels": ["x", "y"], "attention_mask": 3}]))
    assert dict(document.labels) == {"labels": '["x", "y"]', "attention_mask": 3}


def test_half_a_surrogate_pair_becomes_the_replacement_character(tmp_path):
    (tmp_path / "c.jsonl").write_text('{"text": "a \\ud83d b", "topic": "\\udc00", "doc_id": "\\ud83d\\ude00"}\n')
    (only,) = read(tmp_path / "c.jsonl")
    assert (only.text, only.labels, only.doc_id) == ("a \ufffd b", {"topic": "\ufffd"}, "\U0001f600")


def test_blank_lines_and_a_byte_order_mark_are_not_documents(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n  \r\n{"text": "b"}')
    result = [(d.index, d.text, d.location.rpartition(":")[2]) for d in read(tmp_path / "c.jsonl")]
    assert result == [(0, "a", "1"), (1, "b", "4")]


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


def call(**arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


USER = {"role": "user", "content": "go"}
CHATS = [
    {"id": 1, "messages": [USER, call(city="Paris")], "tools": [tool("a", city={"type": "string"})]},
    {
        "id": 2,
        "messages": [USER, call(to="Ann", n=[1, None])],
        "tools": [tool("b", n={"anyOf": [{"type": "null"}, {"type": "array"}]})],
    },
    {"id": 3, "messages": [USER, call()], "tools": None},
]


def test_a_conversation_is_the_same_from_every_format(tmp_path):
    """Members that a struct has only for other records are absent; JSON columns are parsed."""
    file = write_jsonl(tmp_path / "c.jsonl", CHATS)
    expected = plain_chats(read(file))
    assert expected[1][0][1]["tool_calls"][0]["function"]["arguments"] == {"to": "Ann", "n": [1, None]}
    nulls = [{**CHATS[0], "messages": [{**USER, "name": None}, call(city="Paris", to=None)]}, *CHATS[1:]]
    as_json = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    assert "Json" in str(as_json.features)
    as_json.save_to_disk(tmp_path / "json")
    as_json.to_parquet(tmp_path / "json.parquet")
    messages = pa.array([json.dumps(c["messages"]) for c in CHATS], pa.json_())
    pq.write_table(pa.Table.from_pylist(CHATS).set_column(1, "messages", messages), tmp_path / "one.parquet")
    places = [write_jsonl(tmp_path / "n.jsonl", nulls), write_parquet(tmp_path / "c.parquet", CHATS)]
    places += [save_dataset(tmp_path / "saved", CHATS)]
    places += [tmp_path / name for name in ("json", "json.parquet", "one.parquet")]
    sources = {str(place): read(place) for place in places}
    sources["memory"] = read_documents(settings_for("none"), source=table_source(pd.DataFrame(CHATS)))
    assert {name: plain_chats(documents) for name, documents in sources.items()} == dict.fromkeys(sources, expected)


def plain_chats(documents):
    return [(list(d.conversation.turns), list(d.conversation.tools), d.row_id, d.doc_id) for d in documents]


def test_a_class_label_is_its_number_as_in_json_lines(tmp_path):
    features = datasets.Features({"text": datasets.Value("string"), "y": datasets.ClassLabel(names=["no", "yes"])})
    table = datasets.Dataset.from_dict({"text": ["a", "b"], "y": ["yes", "no"]}, features=features)
    table.save_to_disk(tmp_path / "saved")
    table.to_parquet(tmp_path / "c.parquet")
    table.to_json(tmp_path / "c.jsonl")
    for name in ("saved", "c.parquet", "c.jsonl"):
        assert [labels["y"] for labels in labels_of(tmp_path / name)] == [1, 0]


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON: Expecting"), ("[" * 100_000, "nested")], ids=len)
@pytest.mark.parametrize("depth", [0, 1])
def test_invalid_json_is_an_error_with_its_row(tmp_path, text, message, depth):
    column = pa.array(["1", "2", "3", text, "5"])
    column = column if depth == 0 else pa.ListArray.from_arrays([0, 1, 2, 3, 4, 5], column)
    table = pa.table({"text": ["a"] * 5, "x": column.cast([pa.json_(), pa.list_(pa.json_())][depth])})
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=2)
    with pytest.raises(CorpusError, match=rf"parquet, row 3: .*'x': .*{message}"):
        read(tmp_path / "c.parquet", text_column="x" if depth else "text")


ODD_NAMES = ["meta", "meta.lang", "meta.lang.x", "a b", 'it\'s "so"', "\u00e9t\u00e9"]


def test_a_column_with_a_dot_in_its_name_is_not_a_struct_field(tmp_path):
    """Each column is read completely and once; a column takes precedence over a field of that path."""
    rows = [{"id": f"d{i}", "text": f"t {i}", **{name: f"{name} {i}" for name in ODD_NAMES[1:]}} for i in range(5)]
    nested = [{**row, "meta": {"lang": "no label", "x": i}} for i, row in enumerate(rows)]
    path = write_parquet(tmp_path / "c.parquet", nested)
    expected = [{name: row[name] for name in ODD_NAMES[1:]} | {"meta.x": i} for i, row in enumerate(rows)]
    assert [(d.text, dict(d.labels)) for d in read(path)] == [
        (row["text"], labels) for row, labels in zip(rows, expected, strict=True)
    ]
    assert [d.text for d in read(path, text_column="meta.lang")] == [row["meta.lang"] for row in rows]


SHARDS = [
    {"lang": pa.nulls(2), "n": pa.array([1, 2], pa.int32()), "m": pa.array(["a", "b"]), "tags": pa.nulls(2)},
    {"lang": ["en", None], "n": [0.5, None], "m": pa.array(["a", "c"]).dictionary_encode(), "tags": [["x"], []]},
    {"n": ["x", "1"], "m": pa.array(["a", None], pa.large_string()), "day": pa.array([0, 10**9], pa.timestamp("ns"))},
    {"lang": pa.array(["de", "en"], pa.string_view()), "n": [2**60 + 1, 1], "day": pa.array([0, 1], pa.timestamp("s"))},
]


def test_files_whose_columns_differ_are_one_corpus(tmp_path):
    for k, shard in enumerate(SHARDS):
        table = pa.table({"id": [f"{k}-0", f"{k}-1"], "text": [f"a {k}", f"b {k}"], **shard})
        pq.write_table(table, tmp_path / f"{k}.parquet")
    labels = labels_of(tmp_path)
    day = ["1970-01-01T00:00:00", "1970-01-01T00:00:01"]
    assert [row.get("lang") for row in labels] == [None, None, "en", None, None, None, "de", "en"]
    assert [row["n"] for row in labels] == [1, 2, 0.5, None, "x", "1", 2**60 + 1, 1]
    assert [row.get("m") for row in labels] == ["a", "b", "a", "c", "a", None, None, None]
    assert [row.get("day") for row in labels] == [None] * 4 + day * 2


def write_folders(root: Path, folders, suffix=".parquet", **columns):
    write = write_parquet if suffix == ".parquet" else write_jsonl
    for k, folder in enumerate(folders):
        write(root / folder / f"part{suffix}", [{"id": f"d{k}", "text": f"t {k}", **columns}])
    return settings_for(root)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize(
    ("values", "labels"),
    [
        (["a", "b"], ["a", "b"]),
        (["1", "02", "-3"], [2, -3, 1]),
        (["1", "x"], ["1", "x"]),
        (["1", str(2**70)], ["1", str(2**70)]),
        (["1", "__HIVE_DEFAULT_PARTITION__"], [1, None]),
        (["a%20b%2Fc", "\u00e9=f"], ["a b/c", "\u00e9=f"]),
        (["2024-01-01", "1.5"], ["1.5", "2024-01-01"]),
    ],
)
def test_folders_named_key_value_are_labels(tmp_path, suffix, values, labels):
    config = write_folders(tmp_path, [f"topic={value}" for value in values], suffix)
    result = list(read_documents(config))
    assert sorted(map(repr, (d.labels["topic"] for d in result))) == sorted(map(repr, labels))
    assert [d.location.split(",")[0].rsplit(":", 1)[0] for d in result] == sorted(
        str(tmp_path / f"topic={value}" / f"part{suffix}") for value in values
    )
    assert plain(read_documents(config, start=1)) == plain(result)[1:]
    if suffix == ".parquet":
        as_pyarrow = pads.dataset(tmp_path, partitioning="hive", format="parquet").to_table()
        assert set(as_pyarrow["topic"].to_pylist()) == {d.labels["topic"] for d in result}


def test_names_and_order_of_records_do_not_depend_on_folders(tmp_path):
    write_chunked(tmp_path / "a" / "x=1", records(6), [3], ".parquet")
    write_chunked(tmp_path / "b" / "x", records(6), [3], ".parquet")
    labelled, unlabelled = read(tmp_path / "a"), read(tmp_path / "b")
    assert [(d.doc_id, d.text) for d in labelled] == [(d.doc_id, d.text) for d in unlabelled]
    assert [dict(d.labels) for d in labelled] == [{**d.labels, "x": 1} for d in unlabelled]
    assert labels_of(tmp_path / "a" / "x=1") == labels_of(tmp_path / "b")  # folders above the corpus are not labels


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_column_that_its_folder_has_too_must_agree(tmp_path, suffix):
    config = write_folders(tmp_path / "same", ["month=01/lang=en"], suffix, month="01")
    assert [dict(d.labels) for d in read_documents(config)] == [{"month": "01", "lang": "en"}]
    config = write_folders(tmp_path / "other", ["month=02"], suffix, month=1)
    with pytest.raises(CorpusError, match=r"part\.\w+.*'month'.*\b1\b.*=02"):
        list(read_documents(config))
    config = write_folders(tmp_path / "twice", ["a=1/a=2"], suffix)
    with pytest.raises(CorpusError, match=r"values.*'a'"):
        list(read_documents(config))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_reading_jsonl_does_not_keep_the_file_in_memory(tmp_path, suffix):
    rng = np.random.default_rng(0)
    path = write_jsonl(tmp_path / f"big{suffix}", [{"text": rng.bytes(20_000).hex()} for _ in range(300)])
    tracemalloc.start()
    n = sum(1 for _ in read_documents(settings_for(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert n == 300
    assert peak < 6_000_000  # of 12 MB of text: blocks of 1 MiB and their lines


def test_an_endless_line_is_refused_before_it_fills_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("grasp.corpus.text_files.MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "c.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"text": "a"}\n{"text": "' + b"a" * (4 << 20))
    with pytest.raises(CorpusError, match=r"c\.jsonl\.gz:2: .*1 MiB"):
        read(path)


FIRST = b'{"text": "a"}\n\n'
TWICE = pa.Table.from_arrays([pa.array(["x"]), pa.array(["a"]), pa.array(["b"])], ["text", "topic", "topic"])
_SINK = pa.BufferOutputStream()
pq.write_table(pa.Table.from_pylist(records(200)), _SINK)
WHOLE = _SINK.getvalue().to_pybytes()
REFUSED = [
    *[("c.parquet", WHOLE[: int(len(WHOLE) * keep)], "damaged") for keep in (0.3, 0.9, 0.999)],
    ("c.parquet", WHOLE[:4] + bytes(196) + WHOLE[200:], "damaged"),
    ("c.parquet", pa.table({"body": ["x"]}), r"c\.parquet: .*text column.*\bbody\b"),
    ("c.jsonl", b'{"text": "a"}\n{"txet": "b"}', r"c\.jsonl:2: .*text column.*\btxet\b"),
    ("c.jsonl", FIRST + b'{"text": "b"', r"c\.jsonl:3: not JSON"),
    ("c.jsonl", FIRST + b'{"text": "\xff"}', r"c\.jsonl:3: not JSON: 'utf-8'"),
    ("c.jsonl", FIRST + b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", r"c\.jsonl:3: .*recursion"),
    ("c.jsonl", FIRST + b'["text"]', r"c\.jsonl:3: .*list"),
    ("c.jsonl", FIRST + b'{"text": 3}', r"c\.jsonl:3: .*\bint\b"),
    ("c.jsonl", FIRST + b'{"input_ids": [1, 2.5]}', r"c\.jsonl:3: .*integers"),
    ("c.jsonl", FIRST + b'{"input_ids": [1, 4294967296]}', r"c\.jsonl:3: .*32 bits"),
    ("c.jsonl", FIRST + b'{"input_ids": [1, 99999999999999999999]}', r"c\.jsonl:3: .*32 bits"),
    ("c.jsonl.gz", gzip.compress(FIRST * 200, mtime=0)[:-20], "damaged"),
    ("c.jsonl.zst", pa.compress(FIRST * 200, codec="zstd", asbytes=True)[:-20], "damaged"),
    ("c.jsonl.gz", gzip.compress(FIRST, mtime=0) + bytes(512), "damaged"),
    ("c.jsonl.gz", FIRST, "damaged"),
    ("c.jsonl.zst", FIRST, "damaged"),
    ("c.xls", b"text\nx\n", r"'\.xls'"),
    ("c.parquet", TWICE, "topic.*once"),
    ("c.parquet", pa.table({"text": [1, 2]}), "int64.*text"),
    ("c.parquet", pa.table({"input_ids": [[0.5]]}), "double>.*integers"),
    ("c.parquet", pa.table({"input_ids": ["1 2"]}), "string.*integers"),
    ("c.parquet", pa.table({"input_ids": [[1, None]]}), r"row 0: .*null"),
    ("c.parquet", pa.table({"input_ids": pa.array([[1, 2**64 - 1]], pa.list_(pa.uint64()))}), r"row 0: .*32 bits"),
    ("c.parquet", pa.table({"text": pa.array([b"ok", b"\xff\xfe"]).view(pa.string())}), "not UTF-8"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name, content, message):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        pq.write_table(content, tmp_path / name)
    with pytest.raises(CorpusError, match=message):
        read(tmp_path / name)


def test_a_requested_column_is_read_or_reported_missing(write):
    path = write([{"body": "x"}])
    assert [d.text for d in read(path, text_column="body")] == ["x"]
    with pytest.raises(CorpusError, match=r"'url'.*row_id_column.*\bbody\b"):
        read(path, text_column="body", row_id_column="url")


def test_paths_without_a_corpus_are_refused(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "c.xls").write_text("text\nx\n")
    write_parquet(tmp_path / "two" / "a.parquet", records(2))
    write_jsonl(tmp_path / "two" / "a.jsonl", records(2))
    saved = save_dataset(tmp_path / "saved", records(20))
    next(saved.glob("*.arrow")).write_bytes(b"")
    for path, message in (
        ("nope://x", "nope"),
        (IN_MEMORY + "12", "in memory, 12"),
        (tmp_path / "other", "no file of records"),
        (tmp_path / "two", "both Parquet and JSONL"),
        (saved, "`datasets` directory"),
    ):
        with pytest.raises(CorpusError, match=message):
            read(path)


def test_nested_fields_are_labels_in_every_format(tmp_path, write):
    meta = [
        {"source": "web", "quality": {"score": 0.5}, "spans": [{"a": 1}]},
        {"source": "wiki", "quality": {"score": 0.25}, "spans": [{"a": 2}]},
    ]
    rows = [{"text": f"t {i}", "tags": ["x", "y"][: i + 1], "v": [0.1, 0.2], "m": m} for i, m in enumerate(meta)]
    expected = [  # of lists only those of texts are labels
        {"tags": '["x"]', "m.source": "web", "m.quality.score": 0.5},
        {"tags": '["x", "y"]', "m.source": "wiki", "m.quality.score": 0.25},
    ]
    as_text = [{**row, "m": json.dumps(row["m"])} for row in rows]
    for source in (write(rows), write(as_text, "text"), save_dataset(tmp_path / "saved", rows)):
        assert labels_of(source) == expected
        assert {d.ignored for d in read(source)} == {("m.spans", "v")}
        labels = labels_of(source, label_paths=("m.spans.0.a", "v.1"))
        assert labels == [{**row, "m.spans.0.a": i + 1, "v.1": 0.2} for i, row in enumerate(expected)]


def test_names_of_files_are_labels_on_request(tmp_path):
    for place in ("web/part-0", "web/part-1", "lang=en/books/part-0"):
        write_jsonl(tmp_path / f"{place}.jsonl", [{"text": place}])
    assert {d.text: dict(d.labels) for d in read(tmp_path, path_labels=True)} == {
        "web/part-0": {"file": "web/part-0", "directory": "web"},
        "web/part-1": {"file": "web/part-1", "directory": "web"},
        "lang=en/books/part-0": {"file": "lang=en/books/part-0", "directory": "books", "lang": "en"},
    }
