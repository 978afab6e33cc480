"""An artifact at a URL equals the local one: in memory, on an S3 server, and over HTTP."""

import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import fsspec
import numpy as np
import pytest
from artifact_world import World

from grasp.artifact.inspection import info, verify
from grasp.artifact.manifest import SIGNED_MANIFEST
from grasp.artifact.reader import ArtifactReader
from grasp.errors import ArtifactError, MissingExtraError
from grasp.store import remote as module
from grasp.store.remote import local_path
from tests.faults import Killed


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("GRASP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def local(tmp_path_factory) -> Path:
    return World().write(tmp_path_factory.mktemp("local") / "art")


@pytest.fixture(scope="module")
def s3():
    """Start an S3 server with a bucket for the tests of this file."""
    pytest.importorskip("moto", reason="moto is not installed: pip install 'moto[server]'")
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install '.[s3]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    endpoint = f"http://127.0.0.1:{port}"
    settings = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        _wait_for(endpoint)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    finally:
        server.terminate()
        server.wait()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _wait_for(endpoint: str) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(endpoint, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.2)


WARNS = pytest.mark.filterwarnings("default")  # the libraries of S3
on_s3_too = pytest.mark.parametrize("place", ["memory", pytest.param("s3", marks=WARNS)], indirect=True)
slowly_on_s3 = pytest.mark.parametrize(
    "place", ["memory", pytest.param("s3", marks=[WARNS, pytest.mark.slow])], indirect=True
)


@pytest.fixture
def place(request):
    """Return a URL at which nothing is stored yet."""
    base = "memory:/" if request.param == "memory" else request.getfixturevalue("s3")
    url = f"{base}/{request.node.name.partition('[')[0]}"
    yield url
    filesystem, root = fsspec.core.url_to_fs(url)
    if filesystem.exists(root):
        filesystem.rm(root, recursive=True)
    for journal in request.getfixturevalue("local").glob("published-*"):
        journal.unlink()


def assert_same(actual: ArtifactReader, expected: ArtifactReader) -> None:
    assert actual.array_names == expected.array_names
    for name in expected.array_names:
        ours = np.concatenate([block for _, block in actual.array_blocks(name)])
        np.testing.assert_array_equal(ours, np.concatenate([block for _, block in expected.array_blocks(name)]))
    some = np.array([7, 0, 3])
    assert actual.rows(some).equals(expected.rows(some))
    assert actual.units.equals(expected.units)
    for name, array in expected.moments.items():
        np.testing.assert_array_equal(actual.moments[name], array)


@on_s3_too
def test_data_read_from_a_url_equal_those_written(local, place):
    assert not is_published(place)
    with pytest.raises(ArtifactError, match=f"^{place}: .*`grasp build"):
        ArtifactReader.open(place)
    publish_artifact(local, place)
    assert is_published(place)
    assert_same(ArtifactReader.open(place), ArtifactReader.open(local))
    assert_same(ArtifactReader.open(Path(place)), ArtifactReader.open(local))
    report = verify(place)
    assert (report.ok, report.path, report.n_files) == (True, place, len(ArtifactReader.open(local).manifest.files))
    assert info(place).bytes_total == info(local).bytes_total
    assert info(place).path == place


def publish_artifact(local, place):
    module.publish(local, place, SIGNED_MANIFEST)


def is_published(place):
    return module.is_published(place, SIGNED_MANIFEST)


@slowly_on_s3
def test_publishing_resumes_and_is_atomic(local, place, monkeypatch):
    filesystem, _ = fsspec.core.url_to_fs(place)  # fsspec gives the same one to whoever asks
    sent, resent, real = [], [], filesystem.put_file

    def put(source, target):
        if len(sent) == 4:
            raise Killed
        sent.append(target)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "put_file", put)
        with pytest.raises(Killed):
            publish_artifact(local, place)
    assert not is_published(place)
    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "put_file", lambda source, target: (resent.append(target), real(source, target)))
        publish_artifact(local, place)
    assert resent
    assert not set(resent) & set(sent)
    assert_same(ArtifactReader.open(place), ArtifactReader.open(local))
    publish_artifact(local, place)


def test_a_file_url_is_a_path(local):
    assert local_path(Path("file:///tmp/art")) == local_path("file:///tmp/art") == Path("/tmp/art")
    assert local_path("art") == Path("art")
    artifact = ArtifactReader.open(f"file://{local}")
    assert artifact.location == str(local)
    assert verify(f"file://{local}").ok


@slowly_on_s3
def test_another_artifact_is_not_overwritten(local, place, tmp_path):
    publish_artifact(local, place)
    other = World(n_rows=9).write(tmp_path / "other")
    with pytest.raises(ArtifactError, match=f"^{place}: [^\n]*URL$"):
        publish_artifact(other, place)


def test_a_filesystem_that_is_not_installed_names_the_extra(monkeypatch):
    def missing(url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(module.fsspec.core, "url_to_fs", missing)
    with pytest.raises(MissingExtraError, match=r"^s3://b/x: .*pip install .*s3"):
        ArtifactReader.open("s3://b/x")


class Hostile(http.server.BaseHTTPRequestHandler):
    """A server of an artifact with configurable answers."""

    local: Path
    how = ""

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        name = self.path.removeprefix("/art/")
        if self.how in ("500", name):
            self.send_error(500)
        elif self.how in ("loop", "file"):
            self.send_response(302)
            self.send_header("Location", self.path if self.how == "loop" else "file:///etc/passwd")
            self.end_headers()
        else:
            data = (self.local / name).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data) + 1000 * (self.how == "long")))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)


@pytest.fixture
def web(local):
    handler = type("Handler", (Hostile,), {"local": local})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler, f"http://127.0.0.1:{server.server_port}/art"
    server.shutdown()
    server.server_close()


@WARNS
@pytest.mark.parametrize("how", ["500", "loop", "file", "long"])
def test_errors_and_false_answers_of_a_server_are_one_line(web, how):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install aiohttp")
    handler, url = web
    handler.how = how
    for ask in (ArtifactReader.open, info, verify):
        with pytest.raises(ArtifactError, match=f"^{url}(/manifest.json)?: .*cred"):
            ask(url)


@WARNS
def test_an_artifact_over_http_is_read_and_a_missing_file_is_named(web, local):
    pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install aiohttp")
    handler, url = web
    assert_same(ArtifactReader.open(url), ArtifactReader.open(local))
    shutil.rmtree(os.environ["GRASP_CACHE"])
    handler.how = "units.parquet"
    with pytest.raises(ArtifactError, match=f"^{url}/units.parquet: .*500"):
        _ = ArtifactReader.open(url).units
