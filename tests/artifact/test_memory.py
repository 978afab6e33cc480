"""Law: reading an artifact needs the memory of a block, not of an array."""

from pathlib import Path

import numpy as np
from artifact_world import World

from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import ArraySpec

MIB = 2**20


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def test_reading_in_blocks_does_not_bring_the_array_into_memory(tmp_path):
    world = World(n_rows=16_384, shard_rows=512, width=1024, dtype="float32")  # 64 MiB in chunks of 2 MiB
    world.specs = {"hidden_sketch": ArraySpec(1024, "1", "none")}
    with world.open(tmp_path / "art") as writer:
        for k in range(writer.grid.n_shards):
            _, rows, _ = world.shard(k)
            block = world.values["hidden_sketch"][slice(*writer.grid.bounds(k))]
            writer.write_shard(k, {"hidden_sketch": block}, rows, {})
        world.finish(writer)
    expected = world.values["hidden_sketch"].sum(dtype=np.float64)
    world.values.clear()
    artifact = ArtifactReader.open(tmp_path / "art")
    before, peak, total = resident(), 0, 0.0
    for _, block in artifact.array_blocks("hidden_sketch", block_rows=700):
        total += block.sum(dtype=np.float64)
        peak = max(peak, resident())
    assert total == expected
    assert peak - before < 16 * MIB
