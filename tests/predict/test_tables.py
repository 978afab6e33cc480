"""Tables of predictions: made block by block, saying what their numbers are."""

import numpy as np
import pytest
from scipy.sparse import csr_array

from grasp.errors import ShapeError
from grasp.predict.families import parse_family
from grasp.predict.predictor import Predictor
from grasp.predict.weights import SubsetBlock, Weights
from grasp.verbs.predict import prediction_table
from tests.predict.source import FakeSource
from tests.rules import rule

COMPONENTS = {"joint.pair": -0.25, "hidden.cent": 0.5}
PROTOCOL = rule(name="p", match={"token": 1.0, "pooled": 0.5}, components=COMPONENTS)


def subsets(n=6, block=256):
    return parse_family("bernoulli:0.4").draw(n, n_rows=40, seed=5, purpose="evaluation", block=block)


@pytest.mark.parametrize("block", [1, 2, 5])
def test_blocks_of_subsets_do_not_matter(block):
    predictor = Predictor.from_artifact(FakeSource(), PROTOCOL, per_unit=True)
    whole, cut = (prediction_table(predictor, FakeSource(), subsets(block=size)).read_all() for size in (256, block))
    keys = [("subset_id", "ascending"), ("target", "ascending"), ("unit_id", "ascending")]
    np.testing.assert_allclose(cut.sort_by(keys)["change"], whole.sort_by(keys)["change"], rtol=1e-4, atol=1e-5)


def test_columns_are_those_asked_for_and_the_table_says_what_its_numbers_are():
    predictor = Predictor.from_artifact(FakeSource(), PROTOCOL, components=True)
    plain = prediction_table(predictor, FakeSource(), subsets(3)).read_all()
    assert (plain.column_names, len(plain)) == (["subset_id", "target", "change"], 6)
    said = plain.schema.metadata[b"grasp.provenance"]
    assert b"in standard deviations over uniform:0.5, 256 subsets, seed 0: 0 = the corpus" in said
    table = prediction_table(predictor, FakeSource(), subsets(3), components=True).read_all()
    parts = ["part_token", "part_pooled", "part_joint.pair", "part_hidden.cent"]
    assert table.column_names[3:] == ["level", *parts, "value_joint.pair", "value_hidden.cent"]
    added = sum(table[name].to_numpy() for name in parts)
    np.testing.assert_allclose(added, table["change"], atol=1e-5)
    np.testing.assert_allclose(
        table["level"].to_numpy() - table["change"].to_numpy(), np.tile(predictor.task.whole_C, 3), atol=1e-9
    )


def test_subsets_of_another_corpus_are_refused():
    three = SubsetBlock(("s",), Weights(csr_array(np.ones((1, 3)))))
    with pytest.raises(ShapeError, match="subsets over 3 rows for an artifact of 40"):
        prediction_table(Predictor.from_artifact(FakeSource(), PROTOCOL), FakeSource(), [three]).read_all()
