"""Law: token relevance is the mean over position pairs of <h~_t, h~_s> (xi_t D xi_s), whatever the blocks."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.kernels import output_layer as token_match
from grasp.kernels.kernel import CorpusMoments
from grasp.kernels.whitening import HiddenMoments, Whitener
from grasp.models.residuals import pool, sparse_residual
from grasp.paper.product_sketch import ProductMaps
from tests.models.test_residuals import dense
from tests.rounding import rounding

V, H, E, N = 50, 8, 6, 5
POSITIONS, UNIT_POSITIONS, COORDINATES = 60, 23, 6 + 1
TERMS = H + COORDINATES + POSITIONS + UNIT_POSITIONS  # whitened, multiplied coordinate by coordinate, summed over pairs


def world(seed: int, positions: int = POSITIONS, unit_positions: int = UNIT_POSITIONS):
    torch.manual_seed(seed)
    weight = 2 * torch.randn(V, H) / H**0.5
    hidden, unit_hidden = torch.randn(positions, H) + 0.5, torch.randn(unit_positions, H) + 0.5
    residual = sparse_residual(hidden @ weight.T, torch.randint(0, V, (positions,)), 6)
    unit_residual = sparse_residual(unit_hidden @ weight.T, torch.randint(0, V, (unit_positions,)), 6)
    accumulator = HiddenMoments(CorpusMoments(V))
    accumulator.add(hidden.numpy(), residual.index_PK.numpy(), residual.value_PK.numpy())
    whitener = Whitener.fit(accumulator.value, tau=0.01, alpha=1.0, epsilon=0.3)
    row = torch.arange(positions) * N // positions
    unit = torch.sort(torch.arange(unit_positions) % E).values
    return hidden, unit_hidden, residual, unit_residual, whitener, row, unit


def reference(hidden, unit_hidden, residual, unit_residual, whitener, row, unit) -> np.ndarray:
    """Float64, one pair of positions at a time."""
    white = (hidden.double().numpy() - whitener.mean_H) @ whitener.map_HH
    unit_white = (unit_hidden.double().numpy() - whitener.mean_H) @ whitener.map_HH
    xi, unit_xi = dense(residual, V), dense(unit_residual, V)
    total, count = np.zeros((N, E)), np.zeros((N, E))
    for t in range(len(white)):
        for s in range(len(unit_white)):
            match = white[t] @ unit_white[s] * (xi[t] * whitener.precondition_V) @ unit_xi[s]
            total[row[t], unit[s]] += match
            count[row[t], unit[s]] += 1
    return total / count


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_token_relevance_is_the_mean_over_position_pairs(seed):
    hidden, unit_hidden, residual, unit_residual, whitener, row, unit = world(seed)
    targets = token_match.prepare_targets(unit_hidden, unit_residual, unit, E, whitener, N)
    actual = token_match.output_layer_relevance(targets, hidden, residual, row, N).numpy()
    expected = reference(hidden, unit_hidden, residual, unit_residual, whitener, row, unit)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rounding(TERMS, expected))


def test_product_sketch_is_unbiased_for_the_product_geometry():
    hidden, _, residual, _, whitener, row, _ = world(11)
    white = (hidden.double().numpy() - whitener.mean_H) @ whitener.map_HH
    scaled = dense(residual, V) * np.sqrt(whitener.precondition_V)
    gradient = np.stack(
        [np.einsum("th,tv->hv", white[row == i], scaled[row == i]) / int((row == i).sum()) for i in range(N)]
    ).reshape(N, -1)
    exact = gradient @ gradient.T
    grams = []
    for seed in range(300):
        sketch = ProductMaps.prepare(whitener, 32, seed, torch.device("cpu"))
        phi = sketch.apply(hidden, residual, row, N).double().numpy()
        grams.append(phi @ phi.T)
    error = np.std(grams, axis=0) / np.sqrt(len(grams))
    assert np.all(np.abs(np.mean(grams, axis=0) - exact) < 5 * error)


def test_pooling_averages_over_the_positions_of_a_row():
    hidden, _, residual, _, _, row, _ = world(2)
    actual = pool(hidden, residual, row, N, V)
    xi = dense(residual, V)
    for i in range(N):
        mine = row == i
        for pooled, parts in (
            (actual.hidden_NH[i], hidden[mine].numpy()),
            (actual.residual_NV[[i]].toarray()[0], xi[mine]),
        ):
            np.testing.assert_allclose(pooled, parts.mean(axis=0), rtol=0, atol=rounding(len(parts), parts))
    assert actual.residual_NV.has_canonical_format
