"""Rows on a map for Embedding Atlas: columns and coordinates."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from grasp.api.score import score
from tests.cli.grasp_command import succeed
from tests.report.world import HOSTILE, write_artifact


def test_the_map_has_text_labels_relevance_and_two_coordinates(tmp_path):
    artifact = write_artifact(tmp_path / "art", topics=HOSTILE)
    printed = succeed("report", tmp_path / "art", "--atlas", tmp_path / "map").lines
    path = tmp_path / "map" / "rows.parquet"
    assert printed[-1].split() == f"embedding-atlas {path} --text text --x projection_x --y projection_y".split()
    table = pq.read_table(path)
    expected = ["row_id", "doc_id", "n_tokens", "loss", "text", "topic", "format"]
    expected += ["relevance_sciq", "relevance_boolq", "projection_x", "projection_y"]
    assert table.column_names == expected
    assert table["topic"].to_pylist() == artifact.rows(np.arange(200))["topic"].to_pylist()
    ranked = score(artifact, "sciq").table
    effect = dict(zip(ranked["row_id"].to_pylist(), ranked["effect"].to_pylist(), strict=True))
    mapped = dict(zip(table["row_id"].to_pylist(), table["relevance_sciq"].to_pylist(), strict=True))
    assert mapped == pytest.approx(effect, abs=1e-6)


def test_the_coordinates_are_the_principal_axes_of_the_sketches(tmp_path):
    artifact = write_artifact(tmp_path / "art")
    succeed("report", tmp_path / "art", "--atlas", tmp_path / "map")
    halves = [
        np.concatenate([block for _, block in artifact.array_blocks(f"{half}_sketch")])
        for half in ("hidden", "residual")
    ]
    sketch_ND = np.concatenate(halves, axis=1).astype(np.float64)
    left_NN, size_N, _ = np.linalg.svd(sketch_ND - sketch_ND.mean(axis=0), full_matrices=False)
    table = pq.read_table(tmp_path / "map" / "rows.parquet")
    place_N2 = np.stack([table["projection_x"].to_numpy(), table["projection_y"].to_numpy()], axis=1)
    np.testing.assert_allclose(np.abs(place_N2), np.abs(left_NN[:, :2] * size_N[:2]), atol=1e-3)
