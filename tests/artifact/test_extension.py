"""Laws: added columns are read like original ones; original columns are not changed."""

import numpy as np
import pytest
from artifact_world import contents

from grasp.artifact.reader import ArtifactReader
from grasp.errors import ArtifactError


def open_extension(world, path, **changes):
    with world.open_extension(path, **changes):
        pass


@pytest.mark.parametrize("columns", [None, [5, 0, 4, 3], slice(2, 6), slice(4, 6), [4], slice(None, None, -2)])
@pytest.mark.parametrize("block_rows", [None, 1, 7])
def test_columns_are_joined(world, tmp_path, columns, block_rows):
    artifact = ArtifactReader.open(world.extend(world.write(tmp_path / "art")))
    whole = np.concatenate([world.values["relevance_output_layer"], world.new_values], axis=1)
    expected = whole if columns is None else whole[:, columns]
    blocks = artifact.array_blocks("relevance_output_layer", columns=columns, block_rows=block_rows)
    np.testing.assert_array_equal(np.concatenate([block for _, block in blocks]), expected)
    rows = np.array([22, 3, 3, 10])
    np.testing.assert_array_equal(artifact.array_rows("relevance_output_layer", rows, columns=columns), expected[rows])
    hidden = [block for _, block in artifact.array_blocks("hidden_sketch")]
    np.testing.assert_array_equal(np.concatenate(hidden), world.values["hidden_sketch"])


def test_units_targets_and_moments_are_joined(world, tmp_path):
    before = ArtifactReader.open(world.write(tmp_path / "art"))
    artifact = ArtifactReader.open(world.extend(tmp_path / "art"))
    assert artifact.targets == ("sciq", "openbookqa", "boolq", "piqa")
    assert artifact.units["unit_id"].to_pylist() == ["0", "1", "2", "3", "a", "b"]
    assert artifact.unit_columns("piqa").tolist() == [5]
    assert artifact.manifest.arrays["relevance_output_layer"].width == 6
    assert set(artifact.moments) == {*before.moments, "more"}
    assert artifact.manifest.fingerprints == {"corpus": "abc", "targets": "new"}
    assert before.units.equals(world.units)  # opened before, and reads on what it knew


def test_existing_files_are_not_rewritten_and_adding_the_same_targets_has_no_effect(world, tmp_path):
    old = contents(world.write(tmp_path / "art"))
    new = contents(world.extend(tmp_path / "art"))
    assert {name for name in old if new[name] != old[name]} == {"manifest.json"}
    assert contents(world.extend(tmp_path / "art")) == new
    with pytest.raises(ArtifactError, match=r"art:.*targets \['boolq', 'piqa'\]"):
        open_extension(world, tmp_path / "art", identity={"seed": 2})
