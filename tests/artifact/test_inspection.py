"""Law: `verify` names every file that was changed."""

import json

import numpy as np
import pytest
from artifact_world import World, contents

from grasp.artifact.inspection import info, verify
from grasp.artifact.manifest import SIGNED_MANIFEST, ArrayFiles
from grasp.errors import ArtifactError
from grasp.yaml_files import write_yaml
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


def test_an_artifact_is_valid_as_written(path):
    report = verify(path)
    assert report.ok
    assert report.complete
    assert report.n_files == len(contents(path)) - 1  # all but the manifest, which speaks for itself
    assert report.n_bytes == sum(map(len, contents(path).values())) - (path / "manifest.json").stat().st_size


def test_a_flipped_byte_in_any_file_is_found_and_named(path):
    rng = np.random.default_rng(5)
    for name, data in contents(path).items():
        for place in {0, len(data) - 1, int(rng.integers(len(data)))}:
            flipped = bytearray(data)
            flipped[place] ^= 1 << int(rng.integers(8))
            (path / name).write_bytes(flipped)
            (problem,) = verify(path).problems
            assert (problem.file, problem.what[:9]) == (name, "damaged: ")
        (path / name).write_bytes(data)
    assert verify(path).ok


def test_a_change_of_any_byte_of_the_manifest_is_found(world, tmp_path):
    manifest = world.write(tmp_path / "art") / "manifest.json"
    data = manifest.read_bytes()
    for place in range(0, len(data), 29):
        manifest.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert [problem.file for problem in verify(tmp_path / "art").problems] == ["manifest.json"]


def test_every_damaged_file_is_named(path):
    files = contents(path)
    (path / "rows.parquet").unlink()
    (path / "shards/00002.parquet").write_bytes(files["shards/00002.parquet"][:-3])
    (path / "arrays/hidden_sketch/00004.npy").write_bytes(files["arrays/hidden_sketch/00004.npy"] + b"x")
    (path / "arrays/relevance_output_layer.1/00000.npy").write_bytes(
        b"\xff" * len(files["arrays/relevance_output_layer.1/00000.npy"])
    )
    whole = len(files["arrays/hidden_sketch/00004.npy"])
    problems = {problem.file: problem.what for problem in verify(path).problems}
    assert len(problems) == 4
    size = len(files["shards/00002.parquet"])
    assert_mentions(problems["shards/00002.parquet"], "truncated", f"{size - 3} of {size} bytes")
    assert problems["rows.parquet"] == "missing"
    assert_mentions(problems["arrays/hidden_sketch/00004.npy"], "long", f"{whole + 1} of {whole} bytes")
    assert_mentions(problems["arrays/relevance_output_layer.1/00000.npy"], "damaged", "checksum")


def test_with_a_damaged_manifest_the_shards_are_still_checked(path):
    (path / "manifest.json").write_bytes(b"{}")
    (path / "arrays/hidden_sketch/00001.npy").unlink()
    (path / "shards/00003.json").write_bytes(b"{")
    assert [(problem.file, problem.what.partition(":")[0]) for problem in verify(path).problems] == [
        ("manifest.json", "damaged"),
        ("shards/00003.json", "damaged"),
        ("arrays/hidden_sketch/00001.npy", "missing"),
    ]


@pytest.mark.parametrize(
    ("run_settings", "damaged"),
    [
        ({"shard_rows": 5, "targets": {"max_length": 128, "seed": 0}}, False),
        ({"shard_rows": 5, "targets": {"max_length": 512, "seed": 0}}, False),  # the build reduces it to the context
        ({"shard_rows": None, "targets": {"max_length": 128, "seed": None}}, False),  # the build resolves unset values
        ({"shard_rows": 5, "targets": {"max_length": 64, "seed": 0}}, True),
        ({"shard_rows": "now null", "targets": {"max_length": 128, "seed": 0}}, True),
        ({"shard_rows": 5, "targets": {"max_length": 128}}, True),
    ],
)
def test_run_yaml_is_damaged_if_it_sets_other_values_than_the_manifest(path, run_settings, damaged):
    settings = {"shard_rows": 5, "targets": {"max_length": 128, "seed": 0}}
    SIGNED_MANIFEST.write(path, SIGNED_MANIFEST.read(path).model_copy(update={"settings": settings}))
    write_yaml(run_settings, path / "run.yaml")
    assert [problem.file for problem in verify(path).problems] == ["run.yaml"] * damaged


def test_a_manifest_without_a_maximum_length_is_compared(path):
    SIGNED_MANIFEST.write(path, SIGNED_MANIFEST.read(path).model_copy(update={"settings": {"targets": {"seed": 0}}}))
    for max_length, damaged in ((None, False), (128, True)):
        write_yaml({"targets": {"max_length": max_length, "seed": 0}}, path / "run.yaml")
        assert [problem.file for problem in verify(path).problems] == ["run.yaml"] * damaged


def test_verify_and_info_of_a_missing_artifact(tmp_path):
    for look in (verify, info):
        with pytest.raises(ArtifactError, match="nowhere: no such"):
            look(tmp_path / "nowhere")


def test_info_of_a_finished_artifact(path, world):
    artifact_info = info(path)
    assert (artifact_info.complete, artifact_info.finished_shards, artifact_info.n_shards, artifact_info.n_rows) == (
        True,
        5,
        5,
        23,
    )
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
    assert artifact_info.extension_in_progress is None
    json.dumps(artifact_info.to_dict())


def test_info_of_an_unfinished_artifact_reports_its_progress(world, tmp_path):
    with world.open(tmp_path / "art") as writer:
        world.fill(writer, [1, 2])
    artifact_info = info(tmp_path / "art")
    assert (artifact_info.complete, artifact_info.finished_shards, artifact_info.n_shards) == (False, 2, 5)
    assert {array.name: array.bytes_per_row for array in artifact_info.arrays} == {
        "hidden_sketch": 6.0,
        "relevance_output_layer": 8.0,
    }
    assert artifact_info.details == {"identity": world.identity}
    assert verify(tmp_path / "art").n_files == 6


def test_info_shows_an_extension_in_progress(world, tmp_path):
    world.write(tmp_path / "art")
    with world.open_extension(tmp_path / "art") as extension:
        world.fill_extension(extension, [4])
    artifact_info = info(tmp_path / "art")
    assert artifact_info.complete
    assert artifact_info.extension_in_progress == "1 of 5 shards"
    assert artifact_info.targets == {"sciq": 3, "openbookqa": 1}


def test_bytes_per_row_of_a_corpus_smaller_than_a_shard(tmp_path):
    world = World(n_rows=3, shard_rows=1024)
    assert {array.bytes_per_row for array in info(world.write(tmp_path / "art")).arrays} == {6.0, 8.0}
