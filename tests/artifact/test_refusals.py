"""Bad input: each is refused in one line that says where, what was found, what was expected."""

import json
import re

import numpy as np
import pyarrow as pa
import pytest
from artifact_world import World, contents

from grasp.artifact.manifest import SIGNED_MANIFEST
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.shards import ArraySpec
from grasp.artifact.writer import lock_artifact
from grasp.errors import ArtifactError, ShapeError


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_names_array_and_row(world, tmp_path, value):
    arrays, rows, sums = world.shard(1)
    arrays["relevance_token"] = arrays["relevance_token"].copy()
    arrays["relevance_token"][[2, 4], [3, 0]] = value
    with world.open(tmp_path / "art") as writer:
        expected = f"relevance_token: row 7 (row_id 'row-7'), column 3: got {value}, expected a finite number"
        with pytest.raises(ArtifactError, match=re.escape(expected)):
            writer.write_shard(1, arrays, rows, sums)
        assert writer.finished == frozenset()
        assert not list((tmp_path / "art").rglob("00001.npy*"))


def test_a_loss_or_a_sum_that_is_not_finite(world, tmp_path):
    arrays, rows, sums = world.shard(1)
    loss = rows["loss"].to_pylist()
    for value in (float("nan"), None):
        loss[3] = value
        with world.open(tmp_path / "art") as writer:
            with pytest.raises(ArtifactError, match=rf"loss: row 8 \(row_id 'row-8'\): got {value}, expected a f"):
                writer.write_shard(1, arrays, rows.set_column(3, "loss", pa.array(loss)), sums)
            with pytest.raises(ArtifactError, match="sum hidden_sketch of shard 1: got a number that is not"):
                writer.write_shard(1, arrays, rows, sums | {"hidden_sketch": np.array([1.0, np.nan])})


def test_overflow_names_array_row_column_and_the_setting(world, tmp_path):
    arrays, rows, sums = world.shard(0)
    arrays["relevance_token"] = arrays["relevance_token"].copy()
    arrays["relevance_token"][1, 2] = 65536 * 8
    with world.open(tmp_path / "art") as writer:
        expected = (
            "relevance_token: row 1 (row_id 'row-1'), column 2: 524288 at scale 8 does not fit float16 "
            "(largest 65504); set array_dtype: float32 and build again"
        )
        with pytest.raises(ArtifactError, match=re.escape(expected)):
            writer.write_shard(0, arrays, rows, sums)
    world.dtype = "float32"
    with world.open(tmp_path / "wide") as writer:
        writer.write_shard(0, arrays, rows, sums)
        arrays["relevance_token"] = np.full((5, 4), 1e300)
        with pytest.raises(ArtifactError, match=r"row 5 .*does not fit float32 .*; rescale the column"):
            writer.write_shard(1, arrays, world.shard(1)[1], sums)


def test_shapes_and_names_of_a_shard(world, tmp_path):
    arrays, rows, sums = world.shard(1)
    wide = {**arrays, "hidden_sketch": np.zeros((5, 4))}
    with world.open(tmp_path / "art") as writer:
        with pytest.raises(ShapeError, match=r"hidden_sketch: got shape \(5, 4\), expected \(5, 3\)"):
            writer.write_shard(1, wide, rows, sums)
        renamed = {"phi": arrays["hidden_sketch"], "relevance_token": arrays["relevance_token"]}
        with pytest.raises(ArtifactError, match=r"missing \['hidden_sketch'\], unexpected \['phi'\]"):
            writer.write_shard(1, renamed, rows, sums)
        with pytest.raises(ShapeError, match=r"row table: got 4 rows, expected 5 \(5 to 10\)"):
            writer.write_shard(1, arrays, rows.slice(1), sums)
        with pytest.raises(ArtifactError, match=r"row table: .* missing \['loss'\]"):
            writer.write_shard(1, arrays, rows.drop_columns("loss"), sums)
        with pytest.raises(ArtifactError, match="shard 5: expected 0 to 4"):
            writer.write_shard(5, arrays, rows, sums)
        writer.write_shard(1, arrays, rows, sums)
        with pytest.raises(ArtifactError, match="shard 1 is finished already"):
            writer.write_shard(1, arrays, rows, sums)
        world.fill(writer, [0, 2, 3])
        writer.write_shard(4, *world.shard(4)[:2], {"hidden_sketch": np.zeros(3)})
        with pytest.raises(ShapeError, match=r"sums: shard 4 has {'hidden_sketch': \(3,\)}, shard 0 has {'hid"):
            writer.sums()


def test_a_label_that_changes_its_type(world, tmp_path):
    with world.open(tmp_path / "art") as writer:
        world.fill(writer, range(4))
        arrays, rows, sums = world.shard(4)
        writer.write_shard(4, arrays, rows.set_column(5, "topic", pa.array([1, 2, 3])), sums)
        with pytest.raises(ArtifactError, match=r"shards: a label column changes its type: .*topic"):
            world.finish(writer)


def test_another_build_is_refused_and_every_difference_named(world, tmp_path):
    with world.open(tmp_path / "art") as writer:
        world.fill(writer, [0])
    before = contents(tmp_path / "art")
    other = World(shard_rows=4)
    other.identity = {"model": {"dtype": "bfloat16", "path": "m"}, "seed": 0}
    other.specs["relevance_token"] = ArraySpec(4, "1", "positive: lowers loss", world.scale * 2)
    with pytest.raises(ArtifactError, match="art: was begun with other input: ") as caught:
        other.open(tmp_path / "art")
    message = str(caught.value)
    for difference in (
        'model.dtype: was "float32", now "bfloat16";',
        'model.path: was absent, now "m";',
        "shard_rows: was 5, now 4;",
        "arrays.relevance_token.scale: was ",
    ):
        assert difference in message
    assert "seed" not in message
    assert "\n" not in message
    assert contents(tmp_path / "art") == before
    assert world.open(tmp_path / "art").finished == {0}


def test_identity_must_be_json(world, tmp_path):
    with pytest.raises(ArtifactError, match=r"identity: holds something that is not JSON: .*set"):
        world.open(tmp_path / "art", identity={"names": {"a"}})
    world.open(tmp_path / "art", identity={"names": ("a", "b")}).close()
    assert world.open(tmp_path / "art", identity={"names": ["a", "b"]}).finished == frozenset()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "int8"}, r"array_dtype: got 'int8', expected one of \['float16', 'float32'\]"),
        ({"n_rows": 0}, "shards: got n_rows=0, shard_rows=5, expected positive numbers"),
        ({"arrays": {"phi": ArraySpec(0, "1", "none")}}, "phi: got width 0, expected at least one column"),
        (
            {"arrays": {"phi": ArraySpec(2, "1", "none", np.array([1.0, 3.0]))}},
            "scale: column 1: got 3, expected a power of two",
        ),
        (
            {"arrays": {"phi": ArraySpec(2, "1", "none", np.array([1.0, -2.0]))}},
            "scale: column 1: got -2, expected a power of two",
        ),
    ],
)
def test_arguments_that_make_no_artifact(world, tmp_path, changes, message):
    with pytest.raises(ArtifactError, match=message):
        world.open(tmp_path / "art", **changes)
    assert not (tmp_path / "art" / "build.json").exists()


def test_relevance_arrays_have_one_column_for_each_unit(world, tmp_path):
    world.specs["relevance_pooled"] = ArraySpec(3, "1", "positive: lowers loss")
    with pytest.raises(ShapeError, match=r"relevance arrays have different widths {'relevance_token': 4, 'rel"):
        world.open(tmp_path / "art")


def test_units_that_do_not_fit(world, tmp_path):
    with world.open(tmp_path / "art") as writer:
        world.fill(writer)
        for units, message in (
            (world.units.slice(1), "units: got 3, expected 4: one for each relevance column"),
            (world.units.drop_columns("target"), r"units: columns \['unit_id'\]: missing \['target'\]"),
            (pa.concat_tables([world.units.slice(0, 3), world.units.slice(0, 1)]), "units: sciq/0 comes 2 times"),
        ):
            with pytest.raises((ArtifactError, ShapeError), match=message):
                writer.finish(manifest={}, moments={}, units=units)
        with pytest.raises(ArtifactError, match=r"manifest: unknown fields \['model'\], .* \['settings'\]"):
            writer.finish(manifest={"model": {}, "settings": 1}, moments={}, units=world.units)
        with pytest.raises(ArtifactError, match=r"moments: \['sum.x'\]: names beginning with 'sum.' are kept"):
            writer.finish(manifest={}, moments={"sum.x": np.zeros(1)}, units=world.units)


def test_finish_needs_every_shard(world, tmp_path):
    with world.open(tmp_path / "art") as writer:
        world.fill(writer, [0, 3, 4])
        with pytest.raises(ArtifactError, match=r"3 of 5 shards are finished; write the others first, from shard 1"):
            world.finish(writer)
        with pytest.raises(ArtifactError, match="3 of 5 shards are finished: totals need all of them"):
            writer.sums()
    with pytest.raises(ArtifactError, match=r"art: not finished: 3 of 5 shards; run the same `grasp build` again"):
        ArtifactReader.open(tmp_path / "art")


def test_a_finished_artifact_is_not_written_again(world, tmp_path):
    world.write(tmp_path / "art")
    before = contents(tmp_path / "art")
    with world.open(tmp_path / "art") as writer:
        assert writer.complete
        assert writer.finished == set(range(5))
        with pytest.raises(ArtifactError, match="art: is complete; a finished artifact is not written again"):
            world.finish(writer)
    assert contents(tmp_path / "art") == before
    with pytest.raises(ArtifactError, match="art: this writer is closed"):
        writer.write_shard(0, *world.shard(0))


def test_opening_what_is_no_artifact(tmp_path):
    with pytest.raises(ArtifactError, match="nowhere: no such artifact; make one with `grasp build --out"):
        ArtifactReader.open(tmp_path / "nowhere")
    with pytest.raises(ArtifactError, match=r"not an artifact \(no build.json\)"):
        ArtifactReader.open(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match=r"file: not an artifact \(no build.json\)"):
        ArtifactReader.open(tmp_path / "file")


def test_opening_what_a_build_has_only_begun(tmp_path):
    with (
        lock_artifact(tmp_path / "art"),
        pytest.raises(ArtifactError, match="art: a build was begun here, and no shard of it is finished; wait for it"),
    ):
        ArtifactReader.open(tmp_path / "art")


def test_another_format_version_says_both(world, tmp_path):
    path = world.write(tmp_path / "art") / "manifest.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps(raw | {"format_version": 3}))
    with pytest.raises(ArtifactError, match="format version 3, this program reads 2; build the artifact again"):
        ArtifactReader.open(tmp_path / "art")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "damaged: not JSON"),
        ("[]", "not the manifest of an artifact: expected `format` to be 'grasp-artifact'"),
        ('{"format": "grasp-artifact", "format_version": 2}', "damaged: its checksum does not match"),
    ],
)
def test_a_manifest_that_is_none(tmp_path, text, message):
    with pytest.raises(ArtifactError, match=message):
        SIGNED_MANIFEST.parse(tmp_path / "manifest.json", text.encode())


def test_a_chunk_that_is_cut_or_gone_is_named_by_the_reader(world, tmp_path):
    artifact = ArtifactReader.open(world.write(tmp_path / "art"))
    chunk = tmp_path / "art/arrays/hidden_sketch/00002.npy"
    chunk.write_bytes(chunk.read_bytes()[:-2])
    with pytest.raises(ArtifactError, match=r"00002\.npy: truncated: \d+ of \d+ bytes; `grasp verify` names"):
        list(artifact.array_blocks("hidden_sketch"))
    chunk.unlink()
    with pytest.raises(ArtifactError, match=r"00002\.npy: missing; `grasp verify` names everything"):
        artifact.array_rows("hidden_sketch", np.array([11]))
    np.testing.assert_array_equal(
        artifact.array_rows("hidden_sketch", np.array([1])), world.values["hidden_sketch"][[1]]
    )
