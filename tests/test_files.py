"""Files appear only when they are complete."""

import errno
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from grasp.errors import SettingsError
from grasp.files import (
    atomic_path,
    check_outputs,
    claim_directory,
    write_atomically,
)
from grasp.predict.subset_tables import RowIndex, write_subsets
from grasp.predict.weights import single_subset
from grasp.results import write_table
from grasp.yaml_files import write_yaml


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_a_file_appears_when_it_is_complete(tmp_path):
    path = tmp_path / "numbers.txt"
    with atomic_path(path) as part:
        part.write_text("half")
        assert not path.exists()
    assert names(tmp_path) == ["numbers.txt"]
    with atomic_path(tmp_path / "several") as part:
        part.mkdir()
        (part / "one").write_text("1")
    assert (tmp_path / "several" / "one").read_text() == "1"


def interrupted(path, stop):
    with atomic_path(path) as part:
        (part / "deep").mkdir(parents=True)
        raise stop


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_an_interrupted_write_leaves_the_old_file(stop, tmp_path):
    (tmp_path / "old").write_text("old")
    for name in ("new", "old"):
        with pytest.raises(stop):
            interrupted(tmp_path / name, stop)
    assert names(tmp_path) == ["old"]
    assert (tmp_path / "old").read_text() == "old"


@pytest.fixture
def special(tmp_path):
    """Create a directory, a pipe and other special files, which no output may replace."""
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("directory", "a directory"),
        ("pipe", "a pipe"),
        ("link", "a symbolic link"),
        ("dangling", "a symbolic link"),
        ("/dev/null", "a device"),
        ("/dev/stdout", "a symbolic link"),
    ],
)
def test_an_output_is_a_new_name_or_a_regular_file(name, kind, special):
    path = special / name
    with pytest.raises(SettingsError, match=f"^--out: .*{path}.*{kind}"):
        check_outputs({"--out": path})
    if kind != "a directory":
        with pytest.raises(SettingsError, match=f"^{path}: .*{kind}"), atomic_path(path):
            raise AssertionError
        with pytest.raises(SettingsError, match=f"^{path}: .*{kind}"):
            write_atomically(path, b"x")
    assert (special / "kept").read_text() == "kept"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/new", "/no does not exist"),
        ("a\0b", "valid file name"),
        ("\udcff\ud800", "valid file name"),
        ("a\udcff.parquet", "not UTF-8"),
    ],
)
def test_an_output_has_a_name_in_a_directory(tmp_path, name, message):
    check_outputs({"--out": tmp_path / "new", "--list": None})
    for stream in ("-", "/dev/stdout"):
        check_outputs({"--json": Path(stream)}, streamed=("--json",))
    for path, what in (
        (tmp_path / name, message),
        (Path("-"), "name"),
        (Path(), "directory"),
    ):
        with pytest.raises(SettingsError, match=f"--out: .*{what}"):
            check_outputs({"--out": path})
    with pytest.raises(SettingsError, match="UTF-8"):
        claim_directory(tmp_path / "a\udcff", ".mark", lambda path: False)
    assert list(tmp_path.iterdir()) == []


def test_an_output_is_never_an_input(special):
    input_file, directory = special / "kept", special / "directory"
    reads = {
        "is the corpus": input_file,
        "is the artifact": [directory, special / "nowhere"],
        "is far": "s3://a/b",
        "no": None,
    }
    check_outputs({"--out": special / "new", "--json": special / "nowhere"}, reads)
    for path in (input_file, special / "directory" / ".." / "kept"):
        with pytest.raises(SettingsError, match=r"--out: .*kept.*corpus"):
            check_outputs({"--out": path}, reads)
    with pytest.raises(SettingsError, match=r"/new.*/directory.*artifact"):
        check_outputs({"--out": directory / "new"}, reads)
    with pytest.raises(SettingsError, match=r"--json: .*/new.*--out"):
        check_outputs({"--out": special / "new", "--json": special / "new"}, reads)


def test_a_second_writer_of_a_directory_is_refused(tmp_path):
    def write():
        with atomic_path(tmp_path / "kept") as part:
            part.mkdir()
            (tmp_path / "kept").mkdir()
            (tmp_path / "kept" / "theirs").touch()

    with pytest.raises(SettingsError, match="another command"):
        write()
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "theirs"]


def test_the_error_of_a_full_disk_names_the_file(small_disk):
    full_disk = small_disk(64)
    noise = pa.table({"text": [os.urandom(500).hex() for _ in range(1_000)]})
    yaml = {"text": "x" * 500_000}

    def shards(path):
        with atomic_path(path) as part:
            part.mkdir()
            write_table(noise, part / "shard.parquet")

    for write in (
        lambda path: write_atomically(path, os.urandom(500_000)),
        lambda path: write_table(noise, path),
        lambda path: write_yaml(yaml, path),
        lambda path: write_subsets(path, [single_subset("s", np.ones(1_000, bool))], RowIndex.from_ids(noise["text"])),
        shards,
    ):
        path = full_disk / "out.parquet"
        with pytest.raises(OSError, match="No space left on device") as caught:
            write(path)
        assert caught.value.errno == errno.ENOSPC
        assert str(caught.value.filename) == str(path)
        assert list(full_disk.iterdir()) == []
