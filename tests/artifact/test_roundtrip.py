"""Law: data are read as written, independently of block size, order of shards and columns."""

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from artifact_world import World
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import ArraySpec


@settings(max_examples=20)
@given(
    n_rows=st.integers(1, 30),
    shard_rows=st.integers(1, 12),
    block_rows=st.one_of(st.none(), st.integers(1, 40)),
    dtype=st.sampled_from(["float16", "float32"]),
    order=st.randoms(use_true_random=False),
)
def test_rows_are_read_as_written(n_rows, shard_rows, block_rows, dtype, order):
    world = World(n_rows=n_rows, shard_rows=shard_rows, dtype=dtype)
    with tempfile.TemporaryDirectory() as directory:
        with world.open(Path(directory) / "art") as writer:
            shards = list(range(writer.grid.n_shards))
            order.shuffle(shards)
            world.fill(writer, shards)
            world.finish(writer)
        artifact = ArtifactReader.open(Path(directory) / "art")
        for name, values in world.values.items():
            blocks = list(artifact.array_blocks(name, block_rows=block_rows))
            assert [start for start, _ in blocks] == list(range(0, n_rows, block_rows or shard_rows))
            assert all(block.dtype == np.float32 for _, block in blocks)
            np.testing.assert_array_equal(np.concatenate([block for _, block in blocks]), values)


def test_every_float16_is_read_as_numpy_reads_it(tmp_path):
    """Compare bits, including subnormal numbers and the sign of zero, for every scale."""
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite_N = every[np.isfinite(every)].astype(np.float32)
    scale_E = np.array([1.0, 2.0**-90, 2.0**14, 2.0**15, 2.0**60])
    for picked in (scale_E[:3], scale_E[3:]):
        world = World(n_rows=len(finite_N), shard_rows=50_000, n_units=len(picked))
        world.values["relevance_output_layer"] = (finite_N[:, None] * picked).astype(np.float32)
        world.specs["relevance_output_layer"] = ArraySpec(len(picked), "1", "none", picked)
        artifact = ArtifactReader.open(world.write(tmp_path / f"art-{picked[0]}"))
        actual_NE = np.concatenate(
            [block for _, block in artifact.array_blocks("relevance_output_layer", block_rows=999)]
        )
        np.testing.assert_array_equal(actual_NE.view(np.int32), world.values["relevance_output_layer"].view(np.int32))


def test_arrays_are_files_that_numpy_reads(world, tmp_path):
    path = world.write(tmp_path / "art")
    for name, values in world.values.items():
        parts = [np.load(path / "arrays" / name / f"{k:05d}.npy") for k in range(5)]
        assert [(len(part), part.dtype) for part in parts] == [(5, np.float16)] * 4 + [(3, np.float16)]
        scale = np.load(path / "arrays" / name / "scale.npy")
        np.testing.assert_array_equal(np.concatenate(parts).astype(np.float32) * scale, values)


def test_the_row_table_has_index_internal_columns_and_labels_in_this_order(world, tmp_path):
    artifact = ArtifactReader.open(world.write(tmp_path / "art"))
    expected = world.rows.add_column(0, "row_index", pa.array(range(world.n_rows)))
    assert pq.read_table(artifact.rows_path).equals(expected)
    batches = list(artifact.row_batches(["row_id", "topic"], batch_rows=4))
    assert pa.Table.from_batches(batches).equals(expected.select(["row_id", "topic"]).combine_chunks())
    rows = np.array([20, 3, 3, 0, 11])
    assert artifact.rows(rows).equals(expected.take(rows))
    assert artifact.rows(np.array([], dtype=np.int64)).num_rows == 0


def test_a_label_that_is_null_in_one_shard_keeps_its_type(world, tmp_path):
    world.rows = world.rows.drop_columns("topic").append_column("year", pa.array([None] * 5 + [1999] * 18))
    with world.open(tmp_path / "art") as writer:
        for k in range(writer.grid.n_shards):
            arrays, rows, sums = world.shard(k)
            if k == 0:
                rows = rows.set_column(5, "year", pa.nulls(5))
            writer.write_shard(k, arrays, rows, sums)
        world.finish(writer)
    artifact = ArtifactReader.open(tmp_path / "art")
    assert pq.read_table(artifact.rows_path)["year"].to_pylist() == [None] * 5 + [1999] * 18
    assert artifact.rows(np.array([6, 2]))["year"].to_pylist() == [1999, None]


def test_units_moments_and_sums(world, tmp_path):
    artifact = ArtifactReader.open(world.write(tmp_path / "art"))
    assert artifact.units.equals(world.units)
    assert artifact.targets == ("sciq", "openbookqa")
    assert artifact.unit_columns("sciq").tolist() == [0, 1, 2]
    assert artifact.unit_columns("openbookqa").tolist() == [3]
    assert set(artifact.moments) == {*world.moments, *(f"sum.{name}" for name in world.values)}
    for name, value in world.moments.items():
        np.testing.assert_array_equal(artifact.moments[name], value)
        assert artifact.moments[name].dtype == value.dtype
    for name, values in world.values.items():
        np.testing.assert_allclose(
            artifact.moments[f"sum.{name}"], values.sum(axis=0, dtype=np.float64) / 3, rtol=1e-12
        )
    assert artifact.manifest.skipped == {"empty": 2}
    assert artifact.relevance_name("output_layer") == "relevance_output_layer"


def test_a_gain_multiplies_what_is_read(world, tmp_path):
    with world.open(tmp_path / "art") as writer:
        world.fill(writer)
        gains = {"hidden_sketch": 0.125, "relevance_output_layer": 3.0}
        writer.finish(manifest={}, moments={}, units=world.units, gains=gains)
    artifact = ArtifactReader.open(world.extend(tmp_path / "art"))
    whole = np.concatenate([world.values["relevance_output_layer"], world.new_values], axis=1)
    rows = np.arange(world.n_rows)
    np.testing.assert_array_equal(artifact.array_rows("relevance_output_layer", rows), whole * np.float32(3))
    np.testing.assert_array_equal(artifact.array_rows("hidden_sketch", rows), world.values["hidden_sketch"] / 8)
