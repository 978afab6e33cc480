"""Sources of records: their number is estimated without reading all of them, and errors of a network are one line."""

import gzip
import json
import random

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from grasp.corpus.sources import open_source
from grasp.errors import CorpusError, TargetError
from grasp.targets.load import read_records


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
    with pytest.raises(TargetError, match=f"^targets: {reason}"):
        list(read_records("s3://bucket/a.jsonl"))


class Unplugged(MemoryFileSystem):
    """Files in memory, one method of which fails as if the network were unplugged."""

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
