"""A killed build resumes, a full disk leaves no incomplete shard; tests/store has the laws of all stores."""

import errno
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from artifact_world import World, contents

from grasp.errors import ArtifactError
from tests.faults import raising


@pytest.mark.slow  # kills at every replace of every kind of store: tests/store
def test_sigkill_at_random_moments(tmp_path):
    world = World(n_rows=60, shard_rows=2)
    expected = contents(world.write(tmp_path / "whole"))
    path = tmp_path / "killed"
    draw = random.Random(3)
    for _ in range(3):
        before = len(list(path.glob("shards/*.json")))
        child = start_build(path)
        wait_for(lambda seen=before: len(list(path.glob("shards/*.json"))) > seen + 2)
        time.sleep(draw.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert not (path / "manifest.json").exists()
    world.write(path)
    assert contents(path) == expected


def test_a_shard_with_missing_files_is_recomputed(world, tmp_path):
    expected = contents(world.write(tmp_path / "whole"))
    with world.open(tmp_path / "art") as writer:
        world.fill(writer, [0, 1, 2])
    (tmp_path / "art/arrays/hidden_sketch/00001.npy").write_bytes(b"cut")
    with world.open(tmp_path / "art") as writer:
        assert writer.left == [1, 3, 4]
        world.fill(writer)
        world.finish(writer)
    assert contents(tmp_path / "art") == expected


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_disk_full_in_a_shard_leaves_nothing_of_it(monkeypatch, world, tmp_path, call):
    path = tmp_path / "art"
    with world.open(path) as writer:
        writer.write_shard(0, *world.shard(0))
        before = contents(path)
        for nth in range(1, 100):
            with raising(monkeypatch, call, nth, OSError(errno.ENOSPC, "No space left on device")):
                try:
                    writer.write_shard(1, *world.shard(1))
                    break
                except ArtifactError as err:
                    message = str(err)
            assert re.search("shards/00001 .*no space.* 1 of 5 shards .*--resume", message)
            assert writer.left == [1, 2, 3, 4]
            assert contents(path) == before
        assert nth > 4
        world.fill(writer)
        world.finish(writer)
    assert contents(path) == contents(world.write(tmp_path / "whole"))


def test_a_mounted_disk_that_is_full(small_disk, tmp_path):
    world = World(n_rows=4000, shard_rows=500, width=64)
    path = small_disk(512) / "art"
    with (
        world.open(path) as writer,
        pytest.raises(ArtifactError, match=r"no space.* [1-9] of 8 shards"),
    ):
        world.fill(writer)
    assert not list(path.rglob("*.part"))
    with world.open(path) as writer:
        finished = 8 - len(writer.left)
    assert 0 < finished < 8
    assert len(list(path.glob("arrays/hidden_sketch/0*"))) == finished
    small_disk(65_536)
    assert contents(world.write(path)) == contents(world.write(tmp_path / "whole"))


def test_a_second_writer_is_refused_until_the_first_or_its_process_ends(world, tmp_path):
    path = tmp_path / "art"
    child = start_build(path, "--hold")
    wait_for((path / "build.json").exists)
    with pytest.raises(ArtifactError, match=rf"art: locked by process {child.pid} "):
        world.begin(path)
    child.send_signal(signal.SIGKILL)
    child.wait()
    World(n_rows=60, shard_rows=2).begin(path)
    path = world.write(tmp_path / "finished")
    with world.open_extension(path):
        for begin in (world.write, world.extend):
            with pytest.raises(ArtifactError, match=f"finished: locked by process {os.getpid()} "):
                begin(path)
    world.extend(path)


def start_build(path: Path, *arguments: str) -> subprocess.Popen[bytes]:
    script = Path(__file__).with_name("artifact_world.py")
    return subprocess.Popen([sys.executable, str(script), str(path), *arguments])


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
