"""Law: a spooled shard is whole or absent."""

import errno
import os

import numpy as np
import pytest

from grasp.artifact.shards import FeatureSpool
from grasp.errors import ArtifactError

ARRAYS = {
    "hidden": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "indptr": np.array([0, 2, 5], dtype=np.int64),
    "count": np.array(7.5),
    "none": np.zeros((0, 4), dtype=np.int32),
}


def test_what_is_spooled_is_read(tmp_path):
    spool = FeatureSpool(tmp_path / "features")
    assert spool.finished == frozenset()
    spool.write(11, ARRAYS)
    assert spool.finished == {11}
    assert spool.has(11)
    assert not spool.has(1)
    found = FeatureSpool(tmp_path / "features").read(11)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
    spool.write(11, {"other": np.ones(2)})
    assert list(spool.read(11)) == ["other"]
    spool.clear()
    assert not (tmp_path / "features").exists()
    spool.clear()


@pytest.mark.parametrize("call", ["replace", "fsync"])
@pytest.mark.parametrize("before", [False, True])
def test_a_full_disk_leaves_nothing_of_the_shard(monkeypatch, tmp_path, call, before):
    spool = FeatureSpool(tmp_path)
    spool.write(0, ARRAYS)
    real, used = getattr(os, call), [0]
    for nth in range(1, 20):
        if before:
            spool.write(1, ARRAYS)
        used[0] = 0

        def full(*arguments, nth=nth):
            used[0] += 1
            if used[0] == nth:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            try:
                spool.write(1, ARRAYS)
                break
            except ArtifactError as err:
                message = str(err)
        assert "shard-00001.safetensors: not written: no space left on the device; 1 shards are finished" in message
        assert spool.finished == {0}
        assert sorted(file.name for file in tmp_path.iterdir()) == ["shard-00000.json", "shard-00000.safetensors"]
    assert nth > 2
    assert spool.finished == {0, 1}


def test_what_is_missing_or_damaged(tmp_path):
    spool = FeatureSpool(tmp_path)
    with pytest.raises(ArtifactError, match=r"shard-00002.safetensors: shard 2 is not kept here"):
        spool.read(2)
    spool.write(2, ARRAYS)
    data = tmp_path / "shard-00002.safetensors"
    content = data.read_bytes()
    data.write_bytes(b"\xff" * len(content))
    with pytest.raises(ArtifactError, match=r"shard-00002.safetensors: damaged: .*; build it again"):
        spool.read(2)
    data.write_bytes(content[:-1])
    assert not spool.has(2)
