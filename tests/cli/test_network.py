"""Names in untrusted artifacts are not fetched: commands open no connection that the user did not request."""

import shutil
import socket

import pytest

import grasp
from grasp.errors import GraspError
from tests.cli.grasp_command import refused, run, succeed
from tests.mentions import assert_mentions
from tests.resigned import resign

FAR = "http://127.0.0.1:9/corpus.jsonl"


@pytest.fixture
def requested_addresses(monkeypatch):
    """Record every requested address, and refuse the connection."""
    addresses = []

    def reach(*args, **_):
        addresses.append(args)
        raise OSError("no network in tests")

    for name in ("getaddrinfo", "create_connection", "gethostbyname"):
        monkeypatch.setattr(socket, name, reach)
    monkeypatch.setattr(socket.socket, "connect", reach)
    grasp.hub.unreachable.cache_clear()
    yield addresses
    grasp.hub.unreachable.cache_clear()


def strange(art, tmp_path, **names):
    """Copy the artifact with other locations in its manifest, as an untrusted author could."""
    path = shutil.copytree(art, tmp_path / "art")

    def change(raw):
        for name, value in names.items():
            group, _, field = name.partition("_")
            raw["settings"][group][field] = value

    resign(path, change)
    return path


@pytest.mark.parametrize(
    "names",
    [
        {"corpus_path": FAR},
        {"corpus_path": "someone/dataset"},
        {"model_path": "someone/model"},
        {"model_tokenizer": "someone/tokenizer"},
        {"corpus_path": "s3://bucket/corpus", "model_path": "someone/model", "model_tokenizer": "someone/model"},
    ],
)
def test_no_command_connects_to_locations_in_an_artifact(names, art, root, requested_addresses, tmp_path):
    path = strange(art, tmp_path, **names)
    target = tmp_path / "more.jsonl"
    target.write_text('{"task": "more", "prompt": "is it so", "completion": " yes"}\n')
    row = grasp.open(art).rows.to_pandas()["row_id"][0]
    for command in (
        ("info", path),
        ("verify", path),
        ("score", path, "--target", "facts"),
        ("predict", path, "--by", "topic"),
        ("explain", path, "--target", "facts", "--row", row),
        ("report", path, "--out", tmp_path / "page.html"),
        ("select", path, "--budget", "5", "--target", "facts", "--export", tmp_path / "kept"),
        ("retrain", "--like", path, "--family", "mixture:topic", "--out", tmp_path / "env"),
        ("build", "--out", path, "--add-target", target),
    ):
        outcome = run(*command)
        assert outcome.code in (0, 1, 2), outcome
        assert requested_addresses == [], command


def test_missing_inputs_are_named_with_the_flag_that_sets_them(art, root, requested_addresses, tmp_path):
    path = strange(art, tmp_path, corpus_path=FAR, model_path="someone/model")
    select = ("select", path, "--budget", "5", "--target", "facts", "--export", tmp_path / "kept")
    assert_mentions(refused(*select), FAR, "`corpus`")
    succeed(*select, "--corpus", root / "corpus.jsonl")  # spans of rows are stored: no tokenizer is needed
    target = tmp_path / "more.jsonl"
    target.write_text('{"task": "more", "prompt": "is it so", "completion": " yes"}\n')
    added = ("build", "--out", path, "--add-target", target)
    assert_mentions(refused(*added), FAR, "--corpus")
    assert "someone/model" in refused(*added, "--corpus", root / "corpus.jsonl")
    succeed(*added, "--corpus", root / "corpus.jsonl", "--model", root / "model")
    assert grasp.open(path).targets == {"facts": 6, "more": 1}
    assert requested_addresses == []


def test_locations_that_the_user_passes_are_fetched(art, root, requested_addresses, tmp_path):
    path = strange(art, tmp_path, corpus_path=FAR)
    with pytest.raises(GraspError, match=r"opened|no such file|reached"):
        grasp.open(path).select(5, "facts").export(tmp_path / "kept", corpus=FAR)
    assert requested_addresses
