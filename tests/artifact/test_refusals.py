"""Invalid input is refused in one line with location, value and expectation."""

import numpy as np
import pyarrow as pa
import pytest
from artifact_world import World, contents

from grasp.artifact.manifest import SIGNED_MANIFEST
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.writer import ArraySpec, lock_artifact
from grasp.errors import ArtifactError, ShapeError


def changed(array, places, value):
    array = array.copy()
    array[places] = value
    return array


def relevance(places, value):
    """Return a shard with the given relevance value."""
    return lambda arrays, rows, sums: (
        arrays | {"relevance_output_layer": changed(arrays["relevance_output_layer"], places, value)},
        rows,
        sums,
    )


def loss(value):
    """Return a shard whose fourth row has the given loss."""

    def change(arrays, rows, sums):
        losses = rows["loss"].to_pylist()
        return arrays, rows.set_column(3, "loss", pa.array([*losses[:3], value, *losses[4:]])), sums

    return change


SHARDS = [
    *(
        (
            relevance(([2, 4], [3, 0]), bad),
            ArtifactError,
            rf"relevance_output_layer: row 7 \(.*row-7.*\), column 3: .*{bad}",
        )
        for bad in (np.nan, np.inf, -np.inf)
    ),
    (
        relevance((1, 2), 65536 * 8),
        ArtifactError,
        "row 6 .*column 2: 524288.*scale 8 .*array_dtype: float32",
    ),
    (loss(float("nan")), ArtifactError, "loss: row 8 .*nan"),
    (loss(None), ArtifactError, "loss: row 8 .*None"),
    (lambda a, r, s: (a, r, s | {"hidden_sketch": np.array([1.0, np.nan])}), ArtifactError, "sum hidden_sketch"),
    (lambda a, r, s: (a | {"hidden_sketch": np.zeros((5, 4))}, r, s), ShapeError, r"hidden_sketch:.*\(5, 4\)"),
    (lambda a, r, s: ({"phi": a.pop("hidden_sketch"), **a}, r, s), ArtifactError, r"\['hidden_sketch'\].*\['phi'\]"),
    (lambda a, r, s: (a, r.slice(1), s), ShapeError, "row table:.* 4 rows"),
    (lambda a, r, s: (a, r.drop_columns("loss"), s), ArtifactError, r"row table: .*missing \['loss'\]"),
]


@pytest.mark.parametrize(("change", "error", "message"), SHARDS)
def test_an_invalid_shard_is_refused_and_not_written(world, tmp_path, change, error, message):
    with world.open(tmp_path / "art") as writer:
        with pytest.raises(error, match=message):
            writer.write_shard(1, *change(*world.shard(1)))
        assert writer.left == list(range(5))
        assert not list((tmp_path / "art").rglob("00001.npy*"))


def test_values_beyond_float16_can_be_stored_in_float32_up_to_its_limit(tmp_path):
    world = World(dtype="float32")
    with world.open(tmp_path / "art") as writer:
        writer.write_shard(0, *relevance((1, 2), 65536 * 8)(*world.shard(0)))
        arrays, rows, sums = world.shard(1)
        with pytest.raises(ArtifactError, match=r"row 5 .*float32 .*rescale"):
            writer.write_shard(1, arrays | {"relevance_output_layer": np.full((5, 4), 1e300)}, rows, sums)


def test_shards_come_once_and_have_sums_of_one_shape(world, tmp_path):
    with world.open(tmp_path / "art") as writer:
        with pytest.raises(ArtifactError, match=r"shard 5:.*\b0\b.*\b4\b"):
            writer.write_shard(5, *world.shard(1))
        world.fill(writer, range(4))
        with pytest.raises(ArtifactError, match=r"shard 1 .*finished"):
            writer.write_shard(1, *world.shard(1))
        writer.write_shard(4, *world.shard(4)[:2], {"hidden_sketch": np.zeros(3)})
        with pytest.raises(ShapeError, match=r"sums: shard 4.*_sketch': \(3,"):
            writer.sums()


def test_a_label_that_changes_its_type_is_refused(world, tmp_path):
    with world.open(tmp_path / "art") as writer:
        world.fill(writer, range(4))
        arrays, rows, sums = world.shard(4)
        writer.write_shard(4, arrays, rows.set_column(5, "topic", pa.array([1, 2, 3])), sums)
        with pytest.raises(ArtifactError, match=r"type.*topic"):
            world.finish(writer)


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
    for field in (
        'model.dtype: was "float32", now "bfloat16"',
        "model.path",
        "shard_rows",
        "relevance_output_layer.scale",
    ):
        assert field in message
    assert "seed" not in message
    assert "\n" not in message
    assert contents(tmp_path / "art") == before
    assert world.begin(tmp_path / "art").left == [1, 2, 3, 4]


def test_tuples_and_lists_are_equal_in_the_identity_of_a_build(world, tmp_path):
    world.begin(tmp_path / "art", identity={"names": ("a", "b")})
    assert world.begin(tmp_path / "art", identity={"names": ["a", "b"]}).left == list(range(5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"identity": {"names": {"a"}}}, "identity: .*not JSON"),
        ({"dtype": "int8"}, "array_dtype: got 'int8'"),
        ({"n_rows": 0}, "n_rows=0"),
        ({"arrays": {"phi": ArraySpec(0, "1", "none")}}, "phi: .*width 0"),
        ({"arrays": {"phi": ArraySpec(2, "1", "none", np.array([1.0, 3.0]))}}, r"column 1:.*\b3\b.*power of two"),
        ({"arrays": {"phi": ArraySpec(2, "1", "none", np.array([1.0, -2.0]))}}, r"column 1:.*-2\b.*power of two"),
        (
            {"arrays": {f"relevance_{k}": ArraySpec(width, "1", "none") for k, width in (("knn", 4), ("pooled", 3))}},
            "relevance.*widths",
        ),
    ],
)
def test_invalid_arguments_are_refused(world, tmp_path, changes, message):
    with pytest.raises((ArtifactError, ShapeError), match=message):
        world.begin(tmp_path / "art", **changes)
    assert not (tmp_path / "art" / "build.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda units: {"units": units.slice(1)}, r"units: .*\b3\b.*\b4\b"),
        (lambda units: {"units": units.drop_columns("target")}, r"units: .*missing \['target'\]"),
        (lambda units: {"units": pa.concat_tables([units.slice(0, 3), units.slice(0, 1)])}, r"sciq/0.*\b2 times"),
        (lambda _: {"manifest": {"model": {}, "settings": 1}}, r"\['model'\].*\['settings'\]"),
        (lambda _: {"moments": {"sum.x": np.zeros(1)}}, r"moments: \['sum.x'\]"),
        (lambda _: {"gains": {"phi": 1.0}}, r"gains:.*\['phi'\]"),
        (lambda _: {"gains": {"hidden_sketch": np.inf}}, "gains: .*{'hidden_sketch': inf}"),
    ],
)
def test_inconsistent_final_data_are_refused(world, tmp_path, changes, message):
    with world.open(tmp_path / "art") as writer:
        world.fill(writer)
        with pytest.raises((ArtifactError, ShapeError), match=message):
            writer.finish(**({"manifest": {}, "moments": {}, "units": world.units} | changes(world.units)))
        assert not writer.complete


def test_finish_requires_every_shard(world, tmp_path):
    with world.open(tmp_path / "art") as writer:
        world.fill(writer, [0, 3, 4])
        for ask in (lambda: world.finish(writer), writer.sums, lambda: ArtifactReader.open(tmp_path / "art")):
            with pytest.raises(ArtifactError, match="3 of 5 shards"):
                ask()


def test_a_finished_artifact_is_not_written_again(world, tmp_path):
    world.write(tmp_path / "art")
    before = contents(tmp_path / "art")
    with world.open(tmp_path / "art") as writer:
        assert writer.complete
        assert not writer.left
        with pytest.raises(ArtifactError, match="finished"):
            world.finish(writer)
    assert contents(tmp_path / "art") == before


def test_opening_a_path_without_an_artifact_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with lock_artifact(tmp_path / "begun"):
        for name, message in [("nowhere", "no such"), (".", "artifact"), ("file", "artifact"), ("begun", "shard")]:
            with pytest.raises(ArtifactError, match=message):
                ArtifactReader.open(tmp_path / name)


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


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda artifact: artifact.unit_columns("boolq"), r"target 'boolq'.*\['sciq', 'openbookqa'\]"),
        (lambda artifact: next(artifact.array_blocks("logits")), "'logits'"),
        (lambda artifact: next(artifact.array_blocks("relevance_output_layer", columns=[0, 4])), "column 4"),
        (lambda artifact: next(artifact.array_blocks("relevance_output_layer", block_rows=0)), "block_rows: got 0"),
        (lambda artifact: artifact.array_rows("relevance_output_layer", np.array([1, 23])), "row_index: got 23"),
        (
            lambda artifact: artifact.relevance_name("pooled"),
            "'pooled'.*output_layer",
        ),
        (
            lambda artifact: artifact.relevance_name("both"),
            "'both'.*output_layer",
        ),
        (lambda artifact: next(artifact.row_batches(["genre"])), r"\['genre'\]"),
    ],
)
def test_errors_name_the_missing_column_or_array(world, tmp_path, ask, message):
    artifact = ArtifactReader.open(world.write(tmp_path / "art"))
    with pytest.raises(ArtifactError, match=message):
        ask(artifact)
