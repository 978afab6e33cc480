"""Law: `verify` names every file that was changed."""

import json

import numpy as np
import pytest
from artifact_world import World, contents

from grasp.artifact.inspection import info, verify
from grasp.artifact.manifest import ArrayFiles
from tests.mentions import assert_mentions


@pytest.fixture
def path(world, tmp_path):
    with world.open(tmp_path / "art") as writer:
        world.fill(writer)
        spool = ArrayFiles(tmp_path / "art" / "features")
        for k in range(writer.grid.n_shards):
            spool.write(k, {"hidden": np.ones((5, 8), dtype=np.float32)})
        world.finish(writer)
    return world.extend(tmp_path / "art")


def test_a_flipped_byte_in_any_file_is_found_and_named(path):
    rng = np.random.default_rng(5)
    for name, data in contents(path).items():
        if name == "manifest.json":
            continue
        for place in {0, len(data) - 1, int(rng.integers(len(data)))}:
            flipped = bytearray(data)
            flipped[place] ^= 1 << int(rng.integers(8))
            (path / name).write_bytes(flipped)
            ((file, damage),) = verify(path).problems.items()
            assert (file, damage[:9]) == (name, "damaged: ")
        (path / name).write_bytes(data)
    assert verify(path).ok


def test_every_damaged_file_is_named(path):
    files = contents(path)
    (path / "rows.parquet").unlink()
    (path / "shards/00002.parquet").write_bytes(files["shards/00002.parquet"][:-3])
    (path / "arrays/hidden_sketch/00004.npy").write_bytes(files["arrays/hidden_sketch/00004.npy"] + b"x")
    (path / "arrays/relevance_output_layer.1/00000.npy").write_bytes(
        b"\xff" * len(files["arrays/relevance_output_layer.1/00000.npy"])
    )
    whole = len(files["arrays/hidden_sketch/00004.npy"])
    problems = verify(path).problems
    assert len(problems) == 4
    size = len(files["shards/00002.parquet"])
    assert_mentions(problems["shards/00002.parquet"], "truncated", f"{size - 3} of {size} bytes")
    assert problems["rows.parquet"] == "missing"
    assert_mentions(problems["arrays/hidden_sketch/00004.npy"], "long", f"{whole + 1} of {whole} bytes")
    assert_mentions(problems["arrays/relevance_output_layer.1/00000.npy"], "damaged", "checksum")


def test_info_of_a_finished_artifact(path, world, tmp_path):
    artifact_info = info(path)
    assert (artifact_info.n_shards, artifact_info.n_rows) == (5, 23)
    assert artifact_info.targets == {"sciq": 3, "openbookqa": 1, "boolq": 1, "piqa": 1}
    by_name = {array.name: array for array in artifact_info.arrays}
    relevance = by_name["relevance_output_layer"]
    assert relevance.shape == (23, 6)
    assert relevance.groups == ("relevance_output_layer", "relevance_output_layer.1")
    assert relevance.dtype == "float16/float32"
    assert relevance.bytes == 23 * (4 * 2 + 2 * 4)
    assert relevance.bytes_per_row == pytest.approx(relevance.bytes / 23)
    assert by_name["hidden_sketch"].bytes == 23 * 3 * 2
    assert artifact_info.bytes_total == verify(path).n_bytes
    assert artifact_info.bytes_per_row == pytest.approx(artifact_info.bytes_total / 23)
    assert artifact_info.bytes["rows"] == (path / "rows.parquet").stat().st_size
    assert artifact_info.bytes["features"] > 5 * 5 * 8 * 4
    assert artifact_info.fingerprints == {"corpus": "abc", "targets": "new"}
    assert (artifact_info.settings, artifact_info.skipped) == (world.manifest["settings"], {"empty": 2})
    json.dumps(artifact_info.to_dict())

    small = info(World(n_rows=3, shard_rows=1024).write(tmp_path / "small"))  # fewer rows than a shard
    assert {array.bytes_per_row for array in small.arrays} == {6.0, 8.0}
