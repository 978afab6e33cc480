"""Laws: an export says what its corpus says in every format, has one schema, and is read by `datasets` and pyarrow."""

import datetime
import json
import uuid
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grasp.corpus import RowStore, read_documents
from grasp.corpus.values import plain_values
from grasp.errors import CorpusError
from grasp.select.export import iter_records
from grasp.select.export_tables import table_of_records, to_readable_table
from grasp.select.record_files import FileFormat, write_corpus
from tests.corpus.test_documents import CHATS, ODD_NAMES, plain_chats, write_folders
from tests.corpus.world import Words, settings_for, write_jsonl, write_parquet

datasets = pytest.importorskip("datasets")
FORMATS = ["parquet", "jsonl", "datasets"]


def export(path, out, kind):
    return write_corpus(
        out, FileFormat(kind), "documents", iter_records(settings_for(path), np.ones(1_000, bool)), 0, {}
    )


def load(out, kind, cache):
    """What `datasets`, and so TRL, reads of an export."""
    if kind == "datasets":
        return datasets.load_from_disk(str(out))
    return datasets.load_dataset(str(out), split="train", cache_dir=str(cache))


def labels_of(directory, path):
    """Label columns of the artifact that would be built of a corpus."""
    store = RowStore.write(directory, settings_for(path), Words(), shard_rows=3)
    tables = pa.concat_tables(store.shard(k).table for k in range(store.n_shards))
    return tables.select(["row_id", *store.label_columns]).to_pydict(), store.fingerprint


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([1.0, 0.5]), st.sampled_from("ab"))
NESTED = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, max_size=3),
        st.dictionaries(st.sampled_from("ab"), parts.filter(lambda part: part is not None), max_size=2),
    ),
    max_leaves=6,
)


@given(st.lists(NESTED, min_size=1, max_size=5))
def test_records_are_the_same_json_again_from_a_table(values):
    """Members, their order, and whether a number is an integer: the text of a conversation depends on all of these."""
    (column,) = table_of_records([{"x": value} for value in values]).columns
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"x": column}), sink)
    stored = plain_values(pq.read_table(sink.getvalue())["x"])
    if any(isinstance(value, list | dict) for value in values):
        assert json.dumps(stored) == json.dumps(values)
    else:  # scalars have the type of a label
        assert [value is None for value in stored] == [value is None for value in values]
        assert len({type(value) for value in stored if value is not None}) <= 1


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("write", [write_jsonl, write_parquet])
def test_a_conversation_says_the_same_from_its_export(tmp_path, kind, write):
    path = write(tmp_path / f"c.{'jsonl' if write is write_jsonl else 'parquet'}", CHATS)
    expected = plain_chats(read_documents(settings_for(write_jsonl(tmp_path / "as-lines.jsonl", CHATS))))
    export(path, tmp_path / "kept", kind)
    assert plain_chats(read_documents(settings_for(tmp_path / "kept"))) == expected
    if write is write_jsonl:  # no null member is added, which trainers may write into the text
        assert load(tmp_path / "kept", kind, tmp_path / "cache").to_list() == CHATS


MOMENT = datetime.datetime(2024, 1, 1)
UUID = uuid.UUID(int=5).bytes
# The same column in several files, and its type in the export.
DRIFTS = {
    "null and text": ([pa.nulls(2), ["a", "b"]], pa.string()),
    "missing and text": ([None, ["a", "b"]], pa.string()),
    "integers and floats": ([[1, 2], [0.5, None]], pa.float64()),
    "large integers and floats": ([[2**60 + 1, 2], [0.5, None]], pa.string()),
    "integers and text": ([[1, 2], ["1", "a"]], pa.string()),
    "flags and text": ([[True, False], ["true", "a"]], pa.string()),
    "integers": ([pa.array([1, 2], pa.int32()), [2**40, None]], pa.int64()),
    "unsigned": ([pa.array([2**63 + 5, 2], pa.uint64()), [-1, 1]], pa.string()),
    "text": (
        [["a", "b"], pa.array(["a", "b"]).dictionary_encode(), pa.array(["a", None], pa.string_view())],
        pa.string(),
    ),
    "large text": ([["a", "b"], pa.array(["a", "b"], pa.large_string())], pa.large_string()),
    "units": ([pa.array([MOMENT] * 2, pa.timestamp(unit)) for unit in ("ms", "us", "ns")], pa.timestamp("ns")),
    "zones": (
        [pa.array([MOMENT] * 2, pa.timestamp("us", zone)) for zone in ("UTC", "Asia/Tokyo")],
        pa.timestamp("us", "UTC"),
    ),
    "a zone and none": ([pa.array([MOMENT] * 2, pa.timestamp("us", zone)) for zone in ("UTC", None)], pa.string()),
    "days and moments": ([[datetime.date(2024, 1, 1)] * 2, [MOMENT] * 2], pa.string()),
    "decimals": (
        [pa.array([Decimal("1.50"), None], pa.decimal32(5, 2)), pa.array([Decimal("1.5"), None], pa.decimal128(38, 5))],
        pa.decimal128(38, 5),
    ),
    "decimals and floats": ([[Decimal("1.50"), Decimal(2)], [0.5, 2.0]], pa.float64()),
    "names": ([pa.array([UUID, None], pa.uuid()), ["a", "b"]], pa.string()),
    "structs": ([[{"a": 1}, None], [{"a": 1, "b": "x"}, None]], pa.json_()),
    "structs of numbers": ([[{"a": 1}, None], [{"a": 1.5}, None]], pa.json_()),
    "structs of integers": (
        [[{"a": 1}, None], pa.array([{"a": 1}, None], pa.struct([("a", pa.int8())]))],
        pa.struct([("a", pa.int64())]),
    ),
    "a struct and text": ([[{"a": 1}, None], ["x", None]], pa.json_()),
    "JSON and a struct": ([pa.array(['{"a": {}}', "5"], pa.json_()), [{"a": 1}, None]], pa.json_()),
    "maps": ([pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int8())), [{"b": 1}, None]], pa.json_()),
    "lists": (
        [
            [["a"], []],
            pa.nulls(2),
            pa.array([["a"], []], pa.list_view(pa.string_view())),
            pa.array([[], []], pa.list_(pa.null())),
        ],
        pa.list_(pa.string()),
    ),
    "lists of records": (
        [
            [[{"a": [1]}], None],
            pa.array([[{"a": [1]}], None], pa.large_list_view(pa.struct([("a", pa.list_(pa.int8()))]))),
        ],
        pa.large_list(pa.struct([("a", pa.list_(pa.int64()))])),
    ),
}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("name", DRIFTS)
def test_files_whose_columns_differ_have_one_schema(tmp_path, kind, name):
    shards, expected = DRIFTS[name]
    (tmp_path / "corpus").mkdir()
    for k, column in enumerate(shards):
        table = pa.table({"id": [f"{k}-0", f"{k}-1"], "text": [f"a {k}", f"b {k}"]})
        if column is not None:
            table = table.append_column("x", column if isinstance(column, pa.Array) else pa.array(column))
        pq.write_table(table, tmp_path / "corpus" / f"{k}.parquet")
    export(tmp_path / "corpus", tmp_path / "kept", kind)
    ours, _ = labels_of(tmp_path / "1", tmp_path / "corpus")
    relabelled, _ = labels_of(tmp_path / "2", tmp_path / "kept")
    if any(value is not None for value in ours.get("x", ())) and not pa.types.is_nested(expected):
        assert relabelled == ours
    assert len(load(tmp_path / "kept", kind, tmp_path / "cache").to_list()) == 2 * len(shards)
    if kind == "parquet":
        for table in (pq.read_table(tmp_path / "kept"), pads.dataset(tmp_path / "kept").to_table()):
            assert table.schema.field("x").type == expected
            values = [value for column in shards for value in plain_values(pa.array(column or [None, None]))]
            if pa.types.is_nested(expected) or isinstance(expected, pa.JsonType):
                assert plain_values(table["x"]) == values


def test_a_column_that_nothing_holds_is_named(tmp_path):
    (tmp_path / "corpus").mkdir()
    for k, column in enumerate((["a"], [b"a"])):
        pq.write_table(pa.table({"text": ["a b"], "x": column}), tmp_path / "corpus" / f"{k}.parquet")
    for kind in FORMATS:
        with pytest.raises(CorpusError, match=r"column 'x': .*bytes.*type"):
            export(tmp_path / "corpus", tmp_path / kind, kind)
    assert not list(tmp_path.glob("*kept*"))


@pytest.mark.parametrize("kind", FORMATS)
def test_names_and_folders_are_carried(tmp_path, kind):
    """Columns beside a struct of the same name, and the labels of folders."""
    config = write_folders(
        tmp_path / "corpus", ["lang=en/n=1", "lang=__HIVE_DEFAULT_PARTITION__/n=2"], **dict.fromkeys(ODD_NAMES, "x")
    )
    write_parquet(
        tmp_path / "corpus" / "lang=de" / "n=3" / "p.parquet", [{"id": "a", "text": "a b", "meta": {"lang": "c"}}]
    )
    export(config.path, tmp_path / "kept", kind)
    assert labels_of(tmp_path / "1", tmp_path / "kept") == labels_of(tmp_path / "2", config.path)
    loaded = load(tmp_path / "kept", kind, tmp_path / "cache").to_list()
    assert [(row["lang"], row["n"], row["meta"], row["meta.lang"]) for row in loaded] == [
        (None, 2, "x", "x"),
        ("de", 3, {"lang": "c"}, None),
        ("en", 1, "x", "x"),
    ]


def test_types_that_datasets_does_not_know_are_written_as_others():
    table = pa.table(
        {
            "key": pa.array([UUID, None], pa.uuid()),
            "flag": pa.array([1, None], pa.int8()).cast(pa.bool8()),
            "price": pa.array([Decimal("1.50"), None], pa.decimal64(15, 2)),
            "nested": pa.array([[{"a": "x"}], None], pa.list_view(pa.struct([("a", pa.string_view())]))),
            "keys": pa.array([{"k": UUID}, None], pa.struct([("k", pa.binary(16))])).cast(
                pa.struct([("k", pa.uuid())])
            ),
            "empty": pa.array([{}, None], pa.struct([])),
        },
        metadata={"a": "b"},
    )
    result = to_readable_table(table)
    sink = pa.BufferOutputStream()
    pq.write_table(result, sink)
    datasets.Features.from_arrow_schema(pq.read_table(sink.getvalue()).schema)
    assert [plain_values(column) for column in result.columns] == [plain_values(column) for column in table.columns]
    assert result.schema.metadata is None


FEATURES = {
    "label": datasets.ClassLabel(names=["neg", "pos"]),
    "pic": datasets.Image(),
    "tags": datasets.List(datasets.ClassLabel(names=["a", "b"])),
}


def labelled(n=4):
    features = datasets.Features({"text": datasets.Value("string"), **FEATURES})
    pictures = [{"bytes": bytes([k]), "path": f"{k}.png"} for k in range(n)]
    columns = {"label": [k % 2 for k in range(n)], "pic": pictures, "tags": [[0, 1]] * n}
    return datasets.Dataset.from_dict({"text": [f"t{k}" for k in range(n)], **columns}, features=features)


@pytest.mark.parametrize("kind", ["parquet", "datasets"])
@pytest.mark.parametrize("saved", ["c.parquet", "saved"])
def test_names_of_classes_and_images_survive(tmp_path, saved, kind):
    path = tmp_path / saved
    (labelled().to_parquet if saved.endswith("parquet") else labelled().save_to_disk)(path)
    export(path, tmp_path / "out", kind)
    read_back = load(tmp_path / "out", kind, tmp_path / "cache")
    assert {name: read_back.features[name] for name in FEATURES} == FEATURES
    assert read_back.with_format("arrow")[:] == labelled().with_format("arrow")[:]


def test_classes_of_several_names_have_none(tmp_path):
    """Files that give one number different names keep their numbers; other columns keep their features."""
    (tmp_path / "c").mkdir()
    for k, names in enumerate((["neg", "pos"], ["no", "yes"])):
        table = labelled().cast_column("label", datasets.ClassLabel(names=names))
        table.to_parquet(tmp_path / "c" / f"{k}.parquet")
    export(tmp_path / "c", tmp_path / "out", "parquet")
    read_back = load(tmp_path / "out", "parquet", tmp_path / "cache")
    assert read_back.features["label"] == datasets.Value("int64")
    assert read_back.features["pic"] == datasets.Image()
    assert read_back["label"][:] == [0, 1, 0, 1] * 2
