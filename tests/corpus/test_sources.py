"""Sources of records: parts of them, suffixes of files, files that are not read, errors of a network, their number."""

import gzip
import json
import random

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from grasp.corpus.documents import Corpus, read_documents
from grasp.corpus.sources import open_source
from grasp.errors import CorpusError, TargetError
from grasp.select.record_files import FileFormat
from grasp.targets.load import read_records
from tests.corpus.world import settings_for


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_the_length_of_large_json_lines_is_estimated_from_their_beginning(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr("grasp.corpus.sources._MEASURED_BYTES", 1 << 18)
    rng = random.Random(0)
    lines = [
        json.dumps({"text": "".join(rng.choices("abcdefgh ", k=rng.randrange(200)))}) + "\n" for _ in range(20_000)
    ]
    for k, part in enumerate((lines[:5_000], lines[5_000:])):
        text = "".join(part).encode()
        (tmp_path / f"{k}{suffix}").write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    # decompression reads a block of 64 kB ahead, a quarter of what is counted here
    assert 0.75 * 20_000 < open_source(str(tmp_path)).approximate_length(1_000) < 1.1 * 20_000


TEXTS = [f"text {k}" for k in range(600)]  # Parquet is read in batches of 256 rows


def write_texts(path, texts=TEXTS):
    lines = "".join(f"{json.dumps({'id': text, 'text': text})}\n" for text in texts).encode()
    path.parent.mkdir(exist_ok=True)
    if path.suffix.lower() in (".parquet", ".pq"):
        pq.write_table(pa.table({"id": texts, "text": texts}), path)
    elif path.suffix.lower().startswith(".z"):
        path.write_bytes(pa.compress(lines, codec="zstd", asbytes=True))
    else:
        path.write_bytes(gzip.compress(lines) if path.suffix.lower().startswith(".g") else lines)
    return path


@given(st.integers(1, 250), st.integers(-120, 120) | st.none(), st.integers(-120, 120) | st.none(), st.booleans())
def test_bounds_of_a_part_are_those_of_datasets(tmp_path_factory, n, start, stop, in_percent):
    datasets = pytest.importorskip("datasets")
    file = write_texts(tmp_path_factory.getbasetemp() / "bounds" / f"{n}.jsonl", TEXTS[:n])
    sign = "%" if in_percent and not any(bound is not None and abs(bound) > 100 for bound in (start, stop)) else ""
    bounds = ["" if bound is None else f"{bound}{sign}" for bound in (start, stop)]
    text = f"[{bounds[0]}:{bounds[1]}]"
    (theirs,) = datasets.ReadInstruction.from_spec(f"train{text}").to_absolute({"train": n})
    if theirs.from_ >= theirs.to:
        with pytest.raises(CorpusError, match="has no record"):
            open_source(str(file), text)
        return
    assert open_source(str(file), text).approximate_length(1) == theirs.to - theirs.from_


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "directory", "saved"])
def test_a_part_is_read_like_a_corpus_of_its_own(tmp_path, kind):
    split = "train[250:-50]"
    if kind == "saved":
        datasets = pytest.importorskip("datasets")
        table = datasets.Dataset.from_dict({"id": TEXTS, "text": TEXTS}, split="train")
        table.save_to_disk(path := tmp_path / "saved")
    elif kind == "directory":
        path = tmp_path / "c"
        write_texts(path / "train-0.jsonl", TEXTS[:300])
        write_texts(path / "train-1.jsonl", TEXTS[300:])
        write_texts(path / "test-0.jsonl", ["another split"])
    else:
        path, split = write_texts(tmp_path / f"c.{kind}"), "[250:-50]"
    for start in (0, 7, 290):
        documents = list(read_documents(settings_for(path, split=split), start=start))
        assert [document.text for document in documents] == TEXTS[250 + start : -50]
        assert [document.index for document in documents] == list(range(start, 300))
    whole, part, other = (
        open_source(str(path), part_of_split).identity()
        for part_of_split in (split.partition("[")[0] or None, split, split[:-2] + "1]")
    )
    assert len({json.dumps(identity) for identity in (whole, part, other)}) == 3
    assert FileFormat.parse("source", open_source(str(path), split)).kind == {
        "saved": "datasets",
        "directory": "jsonl",
    }.get(kind, kind)


@pytest.mark.parametrize("split", ["[:]]", "a[:10%", "a[1]", "a[:5]+b[:5]", "[:1.5%]"])
def test_other_parts_are_refused(tmp_path, split):
    with pytest.raises(CorpusError, match=r"split: .*expected one range of a split, such as train\[:10%\]"):
        open_source(str(write_texts(tmp_path / "c.jsonl")), split)


@pytest.mark.parametrize("name", ["a.JSONL", "a.jsonl.GZ", "a.ndjson.gzip", "a.jsonl.zstd", "a.Parquet", "a.pq"])
def test_suffixes_in_upper_case_and_other_usual_ones(tmp_path, name):
    file = write_texts(tmp_path / "c" / name, TEXTS[:3])
    usual = write_texts(tmp_path / "c" / ("b.parquet" if file.suffix.lower() in (".pq", ".parquet") else "b.jsonl"))
    assert [document.text for document in read_documents(settings_for(file))] == TEXTS[:3]
    documents = list(read_documents(settings_for(file.parent, path_labels=True)))
    assert [document.text for document in documents] == TEXTS[:3] + TEXTS
    assert {document.labels["file"] for document in documents} == {"a", "b"}
    written = FileFormat.parse("source", open_source(str(file)))
    renamed = {"a.ndjson.gzip": ".jsonl.gz", "a.jsonl.zstd": ".jsonl.zst", "a.pq": ".parquet"}
    assert f".{written.kind}{written.compression}" == renamed.get(name, name[1:].lower())
    assert usual.exists()


def test_files_that_are_not_read_are_counted(tmp_path):
    write_texts(tmp_path / "train-0.jsonl", TEXTS[:3])
    write_texts(tmp_path / "test-0.jsonl", TEXTS[:3])  # of another split
    assert Corpus(open_source(str(tmp_path)), settings_for(tmp_path)).notes == []
    for name in ("LICENSE", "README.md", "a.jsonl.lz4", "b.jsonl.lz4", ".hidden", "_SUCCESS", "info.json"):
        (tmp_path / name).write_text("x")
    for split in (None, "train", "train[:2]"):
        (note,) = Corpus(open_source(str(tmp_path), split), settings_for(tmp_path, split=split)).notes
        assert note == "5 files not read: LICENSE, README.md, a.jsonl.lz4, info.json, ..."


@pytest.fixture
def no_credentials(monkeypatch):
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: pip install '.[s3]'")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    yield
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_bucket_without_credentials_is_an_error_of_one_line(no_credentials):
    reason = r"s3://bucket/a.jsonl: cannot be reached: Unable to locate credentials; .*FSSPEC_S3_ANON=true"
    with pytest.raises(CorpusError, match=f"^{reason}"):
        open_source("s3://bucket/a.jsonl")
    with pytest.raises(TargetError, match=f"^targets.names: {reason}"):
        list(read_records("s3://bucket/a.jsonl"))


class Unplugged(MemoryFileSystem):
    protocol = "unplugged"
    method = ""
    cachable = False

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("unplugged://"))

    def __getattribute__(self, name):
        if name == Unplugged.method:
            raise pytest.importorskip("botocore.exceptions").EndpointConnectionError(endpoint_url="far")
        return super().__getattribute__(name)


def read(url: str) -> list:
    source = open_source(url)
    assert [name for name, *_ in source.identity()] == ["a.jsonl", "b.jsonl"]
    assert source.approximate_length(1) == 2
    return list(source.chunks(0, lambda schema, _: schema.names))


@pytest.mark.parametrize("method", ["exists", "find", "size", "open"])
def test_a_network_that_fails_during_a_read_is_an_error_of_one_line(monkeypatch, method):
    fsspec.register_implementation("unplugged", Unplugged, clobber=True)
    for name in ("a", "b"):
        fsspec.filesystem("memory").pipe(f"/corpus/{name}.jsonl", b'{"text": "x"}\n')
    assert len(read("unplugged://corpus")) == 2
    monkeypatch.setattr(Unplugged, "method", method)
    with pytest.raises(CorpusError, match=r"^unplugged://.*: cannot be reached: .*; check URL, credentials and"):
        read("unplugged://corpus")
