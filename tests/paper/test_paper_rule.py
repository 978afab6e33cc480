"""One flag, `--rule paper`, builds and scores the paper: pooled relevance, and K_self and K_pair of both sketches.

Law: V(S) = z(A(S)) + sum_c omega_c z(K_c(S)), with means and standard deviations over all halves of the corpus, each
written out row by row and pair by pair.
"""

from itertools import combinations

import numpy as np
import pytest
from scipy.sparse import csr_array

import grasp
from grasp.paper.protocol import PAPER
from grasp.pipeline.pipeline import build_artifact
from grasp.predict.default_protocol import DEFAULT_PROTOCOL, resolve_protocol
from grasp.predict.predictor import Predictor
from grasp.predict.weights import Weights
from tests.pipeline.world import SKETCHES, world
from tests.rounding import rounding


@pytest.fixture(scope="module")
def art(tmp_path_factory):
    root = tmp_path_factory.mktemp("paper")
    settings = world(root / "world", n_rows=10, features={"rule": "paper"}, corpus=corpus(root))
    return grasp.open(build_artifact(settings, root / "art"))


def corpus(root):
    return {"path": str(root / "world" / "corpus.jsonl"), "max_length": 128, "shortest_end": 1}


def components(phi_ND, rows):
    """K_self and K_pair of a subset by their definitions, under the weights 1 / size."""
    weight = 1.0 / len(rows)
    self_norm = sum(weight**2 * float(phi_ND[i] @ phi_ND[i]) for i in rows)
    pair = sum(weight**2 * float(phi_ND[i] @ phi_ND[j]) for i in rows for j in rows if i != j)
    return self_norm, pair


def test_the_flag_builds_and_scores_with_the_rule_of_the_paper(art):
    files = art.files
    assert set(files.array_names) == {"relevance_pooled", "hidden_sketch", "residual_sketch"}
    predictor = Predictor.from_artifact(files)
    assert predictor.protocol == PAPER
    n_rows = files.n_rows
    assert n_rows <= 14
    read = {name: next(files.array_blocks(name, block_rows=n_rows))[1].astype(np.float64) for name in files.array_names}
    relevance_N = read["relevance_pooled"].mean(axis=1)  # of the one task, over its units
    phi_ND = np.concatenate([read["hidden_sketch"], read["residual_sketch"]], axis=1)
    omega = PAPER.components["joint.self"], PAPER.components["joint.pair"]

    def parts(rows):
        return np.array([relevance_N[list(rows)].mean(), *components(phi_ND, rows)])

    half_H3 = np.array([parts(rows) for rows in combinations(range(n_rows), n_rows // 2)])
    mean_3, std_3 = half_H3.mean(axis=0), half_H3.std(axis=0)

    def value(rows):
        z_3 = (parts(rows) - mean_3) / std_3
        return z_3[0] + omega[0] * z_3[1] + omega[1] * z_3[2]

    subsets = [(0,), (1, 2, 5), tuple(range(n_rows - 1)), tuple(range(0, n_rows, 2))]
    mask_BN = np.array([[float(i in rows) for i in range(n_rows)] for rows in subsets])
    actual_B = predictor.change(Weights(csr_array(mask_BN)))[:, 0]
    expected_B = np.array([value(rows) - value(range(n_rows)) for rows in subsets])
    np.testing.assert_allclose(actual_B, expected_B, rtol=0, atol=rounding(64, half_H3 / std_3))


def test_every_function_uses_the_rule_of_the_artifact(art):
    assert art.predict(by="topic").notes[-1].endswith("protocol paper")
    assert art.predict(drop="topic = 'sky'").unit.startswith("standard deviations over uniform:0.5")
    for chosen in (art.select("50%", "facts"), art.mix("topic", "facts")):
        assert chosen.protocol == PAPER.additive
        assert chosen.protocol.match == {"pooled": 1.0}
        assert "protocol paper is not additive: rows are selected by its additive part" in chosen.notes


def test_other_kernels_than_those_of_the_rule_are_scored_by_the_default(art, tmp_path):
    kernels = ("output_layer", *SKETCHES)
    settings = world(tmp_path / "world", n_rows=10, features={"rule": "paper", "kernels": kernels})
    other = grasp.open(build_artifact(settings, tmp_path / "art"))
    assert resolve_protocol(None, other.files) is DEFAULT_PROTOCOL
    assert resolve_protocol(None, art.files) == PAPER
