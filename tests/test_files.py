"""Files that appear only when they are whole."""

import os
import time

import pytest

from grasp.files import NAME_BYTES, PART, STALE_SECONDS, aside, write_whole, written_aside


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_a_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "numbers.txt"
    with written_aside(path) as part:
        part.write_text("half")
        assert not path.exists()
    assert names(tmp_path) == ["numbers.txt"]
    with written_aside(tmp_path / "several") as part:
        part.mkdir()
        (part / "one").write_text("1")
    assert (tmp_path / "several" / "one").read_text() == "1"


def interrupted(path, stop):
    with written_aside(path) as part:
        (part / "deep").mkdir(parents=True)
        raise stop


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_what_is_interrupted_leaves_what_was_there(stop, tmp_path):
    (tmp_path / "old").write_text("old")
    for name in ("new", "old"):
        with pytest.raises(stop):
            interrupted(tmp_path / name, stop)
    assert names(tmp_path) == ["old"]
    assert (tmp_path / "old").read_text() == "old"


def test_two_writers_never_share_a_part_and_long_names_have_room(tmp_path):
    path = tmp_path / ("ä" * 125 + ".yaml")
    assert aside(path) != aside(path)
    assert len(aside(path).name.encode()) <= NAME_BYTES + 39
    write_whole(path, b"x")
    assert path.read_bytes() == b"x"


def test_a_killed_writer_leaves_nothing_for_longer_than_a_day(tmp_path):
    path = tmp_path / "a[1].txt"
    old, old_directory, young = (aside(path) for _ in range(3))
    for part in (old, young):
        part.write_text("cut off")
    old_directory.mkdir()
    (old_directory / "one").write_text("1")
    other = tmp_path / f".b.{'0' * 32}{PART}"
    other.write_text("of another file")
    for part in (old, old_directory, other):
        long_ago = time.time() - STALE_SECONDS - 60
        os.utime(part, (long_ago, long_ago))
    with written_aside(path) as part:
        part.write_text("whole")
    assert names(tmp_path) == sorted([young.name, other.name, path.name])
