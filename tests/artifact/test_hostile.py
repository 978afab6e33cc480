"""Untrusted artifacts: nothing outside of them is read or written, and every refusal is one line."""

import os
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from artifact_world import World, contents

from grasp.artifact.inspection import info, verify
from grasp.artifact.manifest import MANIFEST, SIGNED_MANIFEST
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import row_tokens
from grasp.errors import ArtifactError
from grasp.files import checksum, entry_of
from grasp.store.remote import publish
from tests.resigned import resign

NAMES = (
    "/etc/passwd",
    "../secret",
    "arrays/../../secret",
    "arrays//x",
    "arrays/.hidden",
    "C:secret",
    "..\\secret",
    "a\0b",
    "a\x1b[31mb",
    "rows.parquet\n",
    "",
    "x" * 400,
)


@pytest.fixture
def art(tmp_path) -> Path:
    return World().write(tmp_path / "art")


def refusal(path: Path) -> str:
    """Return the one line with which every function refuses an artifact."""
    messages = set()
    for look in (ArtifactReader.open, info, verify):
        with pytest.raises(ArtifactError) as caught:
            look(path)
        messages.add(str(caught.value))
    (message,) = messages
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["files", "units", "moments", "group", "array"])
def test_file_names_outside_the_artifact_are_refused_by_every_function(name, place, art, tmp_path):
    def change(raw):
        if place == "files":
            raw["files"][name] = {"bytes": 3, "checksum": "0" * 32}
        elif place in ("units", "moments"):
            raw[place] = [name]
        elif place == "group":
            raw["arrays"]["hidden_sketch"]["groups"][0]["name"] = name
        else:
            raw["arrays"][name] = raw["arrays"]["hidden_sketch"]

    resign(art, change)
    assert refusal(art).startswith(f"{art / MANIFEST}: ")


CHANGES = {
    "a gain below zero": lambda raw: raw["arrays"]["hidden_sketch"].update(gain=-1),
    "a gain beyond float32": lambda raw: raw["arrays"]["hidden_sketch"].update(gain=1e308),
    "another type of numbers": lambda raw: raw["arrays"]["hidden_sketch"]["groups"][0].update(dtype="object"),
    "a width as text": lambda raw: raw["arrays"]["hidden_sketch"].update(width="3"),
    "no rows": lambda raw: raw.update(n_rows=0),
    "files as a list": lambda raw: raw.update(files=[]),
    "a field of its own": lambda raw: raw.update(run="rm"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_invalid_manifests_are_refused_by_every_function(change, art):
    resign(art, change)
    assert refusal(art).startswith(f"{art / MANIFEST}: ")


def everything(artifact: ArtifactReader) -> None:
    for name in artifact.array_names:
        list(artifact.array_blocks(name))
    _ = artifact.units, dict(artifact.moments), artifact.rows_path, artifact.rows(np.arange(artifact.n_rows))


@pytest.mark.parametrize("kind", ["link", "link to a directory", "pipe", "device", "directory"])
def test_only_regular_files_are_opened(kind, art, tmp_path):
    chunk = art / "arrays" / "hidden_sketch" / "00001.npy"
    content = chunk.read_bytes()
    chunk.unlink()
    if kind == "link":
        (tmp_path / "secret").write_bytes(content)
        chunk.symlink_to(tmp_path / "secret")
    elif kind == "link to a directory":
        chunk.write_bytes(content)
        chunk.parent.rename(tmp_path / "elsewhere")
        chunk.parent.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(chunk)
    elif kind == "device":
        chunk.symlink_to("/dev/zero")
    else:
        chunk.mkdir()
    assert any("expected a" in damage for damage in verify(art).problems.values())
    with pytest.raises(ArtifactError, match=r"symbolic link|pipe|directory"):
        everything(ArtifactReader.open(art))


@pytest.mark.parametrize("change", ["shape", "dtype", "pickle", "header"])
def test_an_array_that_differs_from_the_manifest_is_refused(change, art, tmp_path):
    chunk = art / "arrays" / "hidden_sketch" / "00001.npy"
    array = np.load(chunk)
    ran = tmp_path / "ran"
    if change == "shape":
        np.save(chunk, array[:-1])
    elif change == "dtype":
        np.save(chunk, array.astype(np.int16))
    elif change == "pickle":
        np.save(chunk, np.array([Runs(ran)], dtype=object), allow_pickle=True)
    else:
        chunk.write_bytes(b"\x93NUMPY\x01\x00\xff\xff" + b"(" * 65_535)
    entry = entry_of(chunk).model_dump()
    resign(art, lambda raw: raw["files"].update({"arrays/hidden_sketch/00001.npy": entry}))
    assert verify(art).ok
    with pytest.raises(ArtifactError, match=r"00001\.npy: (.*array|damaged)") as caught:
        everything(ArtifactReader.open(art))
    assert "\n" not in str(caught.value)
    assert not ran.exists()


class Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("rows.parquet", lambda table: table[:0], "rows.parquet: got 0 rows, expected 23; build"),
        ("rows.parquet", lambda table: table.drop_columns(["row_index"]), "row_index: missing, expected integers"),
        ("rows.parquet", lambda table: as_text(table, "row_index"), "row_index: got string, expected integers"),
        ("rows.parquet", lambda table: as_text(table, "n_tokens"), "n_tokens: got string, expected integers"),
        ("shards/00000.parquet", lambda table: as_text(table, "row_index"), "damaged: .*row_index"),
        ("shards/00000.parquet", lambda table: table[:0], "damaged: .*out of bounds"),
    ],
)
def test_a_row_table_that_differs_from_the_manifest_is_refused(name, change, message, art):
    pq.write_table(change(pq.read_table(art / name)), art / name)
    resign(art, lambda raw: raw["files"].update({name: entry_of(art / name).model_dump()}))
    artifact = ArtifactReader.open(art)
    with pytest.raises(ArtifactError, match=message) as caught:
        _ = row_tokens(artifact), artifact.rows([0])
    assert "\n" not in str(caught.value)


def as_text(table: pa.Table, name: str) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, table[name].cast(pa.string()))


def test_an_artifact_at_a_url_writes_nothing_outside_of_the_cache(art, tmp_path, monkeypatch):
    monkeypatch.setenv("GRASP_CACHE", str(tmp_path / "cache"))
    publish(art, "memory://hostile/art", SIGNED_MANIFEST)
    filesystem, root = fsspec.core.url_to_fs("memory://hostile/art")
    victim = tmp_path / "victim"
    victim.write_text("mine")
    try:
        for name in (str(victim), "../../../victim", "units.parquet"):
            filesystem.pipe_file(f"{root}/{name}", b"theirs")
            resign(
                art, lambda raw, name=name: raw["files"].update({name: {"bytes": 6, "checksum": checksum(b"theirs")}})
            )
            filesystem.pipe_file(f"{root}/{MANIFEST}", (art / MANIFEST).read_bytes())
            try:
                artifact = ArtifactReader.open("memory://hostile/art")
            except ArtifactError:
                assert name != "units.parquet"
                resign(art, lambda raw, name=name: raw["files"].pop(name))
                continue
            artifact.path.joinpath("units.parquet").symlink_to(victim)
            with pytest.raises(ArtifactError, match=r"units\.parquet: damaged"):
                _ = artifact.units
        assert victim.read_text() == "mine"
        assert {path.name for path in tmp_path.iterdir()} == {"art", "cache", "victim"}
    finally:
        filesystem.rm(root, recursive=True)


def test_a_directory_that_grasp_did_not_write_is_not_changed(tmp_path):
    theirs = tmp_path / "theirs"
    (theirs / "work").mkdir(parents=True)
    for name in ("work/thesis.tex", "rows.parquet", "download.part", "lock", "run.yaml"):
        (theirs / name).write_text("mine")
    before = contents(theirs)
    with pytest.raises(Exception, match=r"theirs: .*not empty"):
        World().begin(theirs)
    assert contents(theirs) == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(Exception, match=r"file: .*directory"):
        World().begin(tmp_path / "file")
    with pytest.raises(Exception, match="current directory"):
        World().begin(Path(""))
