"""Records of JSON lines, JSON arrays, CSV and TSV in every compression; errors of damaged files name the location."""

import bz2
import csv
import gzip
import io
import json
import lzma

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grasp.corpus.text_files as text_files
from grasp.corpus.documents import read_documents
from grasp.errors import CorpusError
from tests.corpus.world import settings_for

PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
PACK[".zst"] = lambda data: pa.compress(data, codec="zstd", asbytes=True)
ROWS = [
    {"text": 'a, "b"\nc', "topic": "x;y", "year": "2020", "score": "0.5", "code": "007"},
    {"text": "d\te", "topic": None, "year": "2021", "score": "1e-3", "code": "8"},
    {"text": "f", "topic": "z", "year": None, "score": "-2", "code": "09"},
]
TYPED = [
    {"topic": "x;y", "year": 2020, "score": 0.5, "code": "007"},
    {"topic": None, "year": 2021, "score": 0.001, "code": 8},
    {"topic": "z", "year": None, "score": -2, "code": "09"},
]


def records(data: bytes, name: str = "c.json", skip: int = 0):
    return list(text_files.text_records(io.BytesIO(data), name, skip))


def delimited(rows, delimiter=","):
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("kind", ["jsonl", "ndjson", "json", "csv", "tsv"])
def test_a_corpus_is_the_same_in_every_format(tmp_path, kind, packed):
    typed = [{"text": row["text"], **labels} for row, labels in zip(ROWS, TYPED, strict=True)]
    data = {
        "json": json.dumps(typed, indent=1).encode(),
        "csv": b"\xef\xbb\xbf" + delimited(ROWS),
        "tsv": delimited(ROWS, "\t"),
    }.get(kind, "".join(f"{json.dumps(row)}\n" for row in typed).encode())
    path = tmp_path / f"c.{kind}{packed}"
    path.write_bytes(PACK[packed](data))
    for start in (0, 2):
        documents = list(read_documents(settings_for(path), start=start))
        assert [d.text for d in documents] == [row["text"] for row in ROWS][start:]
        assert [dict(d.labels) for d in documents] == TYPED[start:]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60)
@given(
    rows=st.lists(st.dictionaries(st.text(), VALUES, max_size=3), max_size=5),
    indent=st.sampled_from([None, 1]),
    ascii_only=st.booleans(),
    block=st.integers(1, 30),
    skip=st.integers(0, 3),
)
def test_a_json_array_is_read_in_blocks(rows, indent, ascii_only, block, skip):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "_BLOCK_BYTES", block)
        text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
        got = records(text.encode("utf-8", "surrogatepass"), skip=skip)
    assert got == [(k, None if k <= skip else row) for k, row in enumerate(rows, start=1)]


@settings(max_examples=60)
@given(cut=st.integers(1, 40))
def test_records_before_the_end_of_a_truncated_array_are_read(cut):
    data = json.dumps([{"text": "aé", "n": 12.5}, {"text": 'b"'}, {"ok": True}]).encode()
    cut = min(cut, len(data) - 1)
    got = []
    with pytest.raises(CorpusError) as caught:
        got.extend(iter(text_files.text_records(io.BytesIO(data[:-cut]), "c.json")))
    whole = data[:-cut].count(b"}")
    assert f"the array ends early, after {whole} whole records" in str(caught.value)
    assert f"corpus.limit={whole}" in str(caught.value)
    stream = text_files.text_records(io.BytesIO(data[:-cut]), "c.json")
    assert [next(stream)[0] for _ in range(whole)] == list(range(1, whole + 1))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("c.csv", "a,b\n1,2\n3\n", r"^c\.csv:3: has 1 fields, expected 2"),
        ("c.csv", 'a,b\n"x\ny",2\n3,4,5\n', r"^c\.csv:4: has 3 fields, expected 2"),
        ("c.csv", 'a,b\n"x"y,2\n', r"^c\.csv:2: .*expected"),
        ("c.csv", 'a,b\n1,"x\n', r"^c\.csv:2: unexpected end"),
        ("c.csv", "a;b\n1;2\n", r"^c\.csv:1: fields are separated by semicolons"),
        ("c.tsv", "a\ta\n1\t2\n", r"^c\.tsv:1: has the column 'a' more than once"),
        ("c.json", '[{"a": 1} {"a": 2}]', r"^c\.json, record 2: got '\{' before it, expected ','"),
        ("c.json", '{\n "data": [{"a": 1}]\n}', r"^c\.json:1: an object over several lines; write one record per line"),
        ("c.json", '[{"a": 1}, {"a": nope, "b": "a long text follows"}]', r"^c\.json, record 2: not JSON"),
        ("c.json", "[{}, 1]", r"^c\.json, record 2: got int, expected a JSON object"),
        ("c.json", "[" + '{"a":' * 100_000, r"^c\.json, record 1: nested too deeply"),
        ("c.json", '{"a": 1}\n[]\n', r"^c\.json:2: got list"),
        ("c.json", '{"a": 1}\nnull\n', r"^c\.json:2: got NoneType"),
        ("c.json", "[null]", r"^c\.json, record 1: got NoneType"),
        ("c.csv.gz", "a,b\n", r"^c\.csv\.gz: damaged or truncated"),
        ("c.jsonl.xz", "{}\n", r"^c\.jsonl\.xz: damaged or truncated"),
    ],
)
def test_errors_of_damaged_files_name_the_location(name, data, message):
    with pytest.raises(CorpusError, match=message):
        records(data.encode(), name)


def test_text_that_is_not_utf_8():
    for name in ("c.csv", "c.jsonl"):
        with pytest.raises(CorpusError, match=r"^c\..*: text is UTF-16, expected UTF-8; convert it: iconv"):
            records('{"a": 1}\n'.encode("utf-16"), name)
