"""Invalid input is refused in one line with location, value and expectation."""

import numpy as np
import pytest
from artifact_world import World, contents

from grasp.artifact.manifest import SIGNED_MANIFEST
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import ArraySpec
from grasp.errors import ArtifactError
from tests.mentions import assert_mentions


@pytest.mark.parametrize(
    ("dtype", "places", "value", "message"),
    [
        *(
            ("float16", ([2, 4], [3, 0]), bad, rf"relevance_output_layer: row 7 \(.*row-7.*\), column 3: .*{bad}")
            for bad in (np.nan, np.inf, -np.inf)
        ),
        ("float16", (1, 2), 65536 * 8, "row 6 .*column 2: 524288.*scale 8 .*array_dtype: float32"),
        ("float32", (0, 0), 1e300, r"row 5 .*float32 .*rescale"),
        ("float32", (1, 2), 65536 * 8, None),
    ],
)
def test_an_invalid_shard_is_refused_and_not_written(tmp_path, dtype, places, value, message):
    world = World(dtype=dtype)
    with world.open(tmp_path / "art") as writer:
        arrays, rows, sums = world.shard(1)
        relevance = arrays["relevance_output_layer"].astype(np.float64)
        relevance[places] = value
        shard = arrays | {"relevance_output_layer": relevance}, rows, sums
        if message is None:
            writer.write_shard(1, *shard)
            return
        with pytest.raises(ArtifactError, match=message):
            writer.write_shard(1, *shard)
        assert writer.left == list(range(5))
        assert not list((tmp_path / "art").rglob("00001.npy*"))


def test_another_build_is_refused_and_every_difference_named(world, tmp_path):
    with world.open(tmp_path / "art") as writer:
        world.fill(writer, [0])
    before = contents(tmp_path / "art")
    other = World(shard_rows=4)
    other.identity = {"model": {"dtype": "bfloat16", "path": "m"}, "seed": 0}
    other.specs["relevance_output_layer"] = ArraySpec(4, "1", "positive: lowers loss", world.scale * 2)
    with pytest.raises(ArtifactError, match="begun") as caught:
        other.begin(tmp_path / "art")
    message = str(caught.value)
    assert_mentions(message, 'model.dtype: was "float32", now "bfloat16"', "model.path", "shard_rows")
    assert_mentions(message, "relevance_output_layer.scale")
    assert "seed" not in message
    assert "\n" not in message
    assert contents(tmp_path / "art") == before
    assert world.begin(tmp_path / "art").left == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "not JSON"),
        ("[]", "manifest"),
        ('{"format": "grasp-artifact", "format_version": 2}', "checksum"),
        ('{"format": "grasp-artifact", "format_version": 3}', r"version 3\b.*\b2\b"),
    ],
)
def test_an_invalid_manifest_is_refused(tmp_path, text, what):
    with pytest.raises(ArtifactError, match=what):
        SIGNED_MANIFEST.parse(tmp_path / "manifest.json", text.encode())


def test_a_truncated_or_missing_chunk_is_named_by_the_reader(world, tmp_path):
    artifact = ArtifactReader.open(world.write(tmp_path / "art"))
    chunk = tmp_path / "art/arrays/hidden_sketch/00002.npy"
    chunk.write_bytes(chunk.read_bytes()[:-2])
    with pytest.raises(ArtifactError, match=r"00002\.npy: truncated.*verify"):
        list(artifact.array_blocks("hidden_sketch"))
    chunk.unlink()
    with pytest.raises(ArtifactError, match=r"00002\.npy: missing.*grasp verify"):
        artifact.array_rows("hidden_sketch", np.array([11]))
    np.testing.assert_array_equal(
        artifact.array_rows("hidden_sketch", np.array([1])), world.values["hidden_sketch"][[1]]
    )
