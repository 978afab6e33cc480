"""Laws: a control leaves what it says; a shuffle keeps the multiset of similarities and moves them."""

import numpy as np
import pytest
from scipy.spatial.distance import squareform

from grasp.paper import shuffled_pairs
from grasp.paper.candidates import CONTROLS
from grasp.paper.shuffled_pairs import ShuffledPairs
from tests.rounding import rounding

FULL = ("joint.self", "joint.pair", "hidden.raw", "residual.raw", "product.cent")
LEFT = {
    "full": FULL,
    "additive": (),
    "additive-self-norm": ("joint.self", "hidden.self", "residual.self"),
    "pair-only": ("joint.pair", "hidden.pair", "residual.pair"),
    "pair-shuffled": FULL,
    "without-hidden-geometry": ("residual.self", "residual.pair", "residual.raw"),
    "without-residual-geometry": ("hidden.self", "hidden.pair", "hidden.raw"),
    "without-residual-alignment": ("hidden.self", "hidden.pair", "hidden.raw"),
    "without-self": ("joint.pair", "hidden.pair", "residual.pair"),
}


def test_a_control_retains_only_its_components():
    assert {control.name: control.components(FULL) for control in CONTROLS} == LEFT
    without_relevance = [control.name for control in CONTROLS if not control.relevance]
    assert without_relevance == ["pair-only", "without-residual-alignment"]


def test_shuffled_pairs_are_the_same_values_in_other_places():
    sketch = np.random.default_rng(0).normal(size=(40, 5))
    shuffled = ShuffledPairs.draw(sketch, seed=1)
    plain = (sketch @ sketch.T)[np.triu_indices(40, 1)]
    np.testing.assert_allclose(np.sort(squareform(shuffled.gram_NN)), np.sort(plain), rtol=0, atol=rounding(5, plain))
    assert np.mean(np.isclose(squareform(shuffled.gram_NN), plain)) < 0.05
    np.testing.assert_array_equal(squareform(shuffled.gram_NN), squareform(ShuffledPairs.draw(sketch, seed=1).gram_NN))
    assert (squareform(shuffled.gram_NN) != squareform(ShuffledPairs.draw(sketch, seed=2).gram_NN)).any()


@pytest.mark.parametrize("block", [3, 256])
def test_shuffled_pair_geometry_is_the_double_sum(monkeypatch, block):
    monkeypatch.setattr(shuffled_pairs, "BLOCK_ROWS", block)
    rng = np.random.default_rng(2)
    shuffled = ShuffledPairs.draw(rng.normal(size=(17, 4)), seed=0)
    weights = rng.random(size=(6, 17)) * (rng.random(size=(6, 17)) < 0.5)
    similarity = shuffled.gram_NN.astype(np.float64)
    expected = [sum(w[i] * w[j] * similarity[i, j] for i in range(17) for j in range(17) if i != j) for w in weights]
    np.testing.assert_allclose(shuffled.k_pair(weights), expected, rtol=1e-10)
