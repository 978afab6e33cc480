"""Tables of predictions: made block by block, saying what their numbers are; a real artifact serves as the fake one."""

import numpy as np
import pyarrow as pa
import pytest

from grasp.api.predict import prediction_table
from grasp.api.score import score
from grasp.artifact.label_table import LabelTable
from grasp.predict.families import parse_family
from grasp.predict.predictor import Predictor
from grasp.predict.subset_tables import RowIndex, read_subsets, write_subsets
from grasp.targets import Unit
from tests.mentions import assert_mentions
from tests.predict.source import FakeSource
from tests.rules import rule
from tests.runs.environments import write_arrays

COMPONENTS = {"joint.pair": -0.25, "hidden.cent": 0.5}
PROTOCOL = rule(name="p", match={"output_layer": 1.0, "pooled": 0.5}, components=COMPONENTS)
FAKE = FakeSource(columns={"topic": [["a", "b", None][i % 3] for i in range(40)]})


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    rows = FAKE.table.append_column("loss", pa.array(np.ones(40, np.float32)))
    rows = rows.set_column(rows.column_names.index("n_tokens"), "n_tokens", rows["n_tokens"].cast(pa.int32()))
    units = [Unit(f"u{i}", target, "", "x") for i, target in enumerate(FAKE.unit_targets)]
    path = tmp_path_factory.mktemp("artifact") / "art"
    return write_arrays(path, FAKE.arrays, rows, units, 16, settings={"features": FAKE.feature_settings})


def subsets(n=6, block=256):
    return parse_family("bernoulli:0.4").draw(n, n_rows=40, seed=5, purpose="evaluation", block=block)


@pytest.mark.parametrize("block", [1, 2, 5])
def test_tables_do_not_depend_on_blocks_of_subsets(block):
    predictor = Predictor.from_artifact(FakeSource(), PROTOCOL, per_unit=True)
    whole, cut = (prediction_table(predictor, FakeSource(), subsets(block=size)).read_all() for size in (256, block))
    keys = [("subset_id", "ascending"), ("target", "ascending"), ("unit_id", "ascending")]
    np.testing.assert_allclose(cut.sort_by(keys)["change"], whole.sort_by(keys)["change"], rtol=1e-4, atol=1e-5)


def test_metadata_describes_the_numbers():
    predictor = Predictor.from_artifact(FakeSource(), PROTOCOL)
    plain = prediction_table(predictor, FakeSource(), subsets(3)).read_all()
    assert (plain.column_names, len(plain)) == (["subset_id", "target", "change"], 6)
    provenance = plain.schema.metadata[b"grasp.provenance"]
    assert_mentions(provenance.decode(), "standard deviations", "uniform:0.5", "256 subsets", "seed 0")


def test_predictions_equal_those_of_the_arrays(artifact, tmp_path):
    protocol = rule(
        name="p",
        components={"joint.pair": -0.3, "product.cent": 0.1},
        requires={"summary_positions": "tail:32", "alpha": 1.0},
        calibration={"family": "mixture:topic", "n_subsets": 8},
    )
    table = LabelTable(artifact.rows_path)
    index = RowIndex.from_parquet(artifact.rows_path)
    family = parse_family("groups:topic")
    drawn = family.draw(7, n_rows=40, labels=table.column("topic"), seed=0, purpose="evaluation")
    write_subsets(tmp_path / "s.parquet", drawn, index)
    got, want = (
        prediction_table(
            Predictor.from_artifact(source, protocol, per_unit=True),
            source,
            read_subsets(tmp_path / "s.parquet", index, 3),
        ).read_all()
        for source in (artifact, FAKE)
    )
    assert got.num_rows == 7 * (2 + 5)
    assert got.select(["subset_id", "target", "unit_id"]).equals(want.select(["subset_id", "target", "unit_id"]))
    np.testing.assert_allclose(got.column("change"), want.column("change"), rtol=1e-5, atol=1e-6)


def test_rows_are_sorted_by_effect(artifact):
    effect_N = Predictor.from_artifact(artifact).effect_NT[:, FAKE.targets.index("sciq")]
    ranked = score(artifact, "sciq").to_pandas()
    assert ranked["row_id"].tolist() == [f"r{i}" for i in np.argsort(-effect_N, kind="stable")]
    np.testing.assert_allclose(ranked["effect"], np.sort(effect_N)[::-1], atol=1e-6)
    worst = score(artifact, "sciq", top=0, bottom=3).to_pandas()
    assert worst["row_id"].tolist() == [f"r{i}" for i in np.argsort(effect_N, kind="stable")[:3]]


def test_a_label_named_effect_is_kept_under_another_name(tmp_path):
    rows = FAKE.table.append_column("loss", pa.array(np.ones(40, np.float32)))
    rows = rows.set_column(rows.column_names.index("n_tokens"), "n_tokens", rows["n_tokens"].cast(pa.int32()))
    for name in ("effect", "effect_"):
        rows = rows.append_column(name, pa.array([f"{name}{i}" for i in range(40)]))
    units = [Unit(f"u{i}", target, "", "x") for i, target in enumerate(FAKE.unit_targets)]
    artifact = write_arrays(
        tmp_path / "art", FAKE.arrays, rows, units, 16, settings={"features": FAKE.feature_settings}
    )
    ranked = score(artifact, "sciq").to_pandas().set_index("row_id")
    assert ranked.loc["r7", "effect__"] == "effect7"
    assert ranked.loc["r7", "effect_"] == "effect_7"
    assert ranked["effect"].dtype == float
