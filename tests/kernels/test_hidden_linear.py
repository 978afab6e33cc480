"""Law: tilt relevance is the inner product of exact gradients of one matrix that acts on every hidden state."""

import numpy as np
import torch

from grasp.kernels.hidden_linear import RIDGE, hidden_linear_relevance, prepare_hidden_linear
from grasp.kernels.kernel import CorpusMoments
from grasp.kernels.whitening import HiddenMoments
from tests.kernels.test_hidden_bias import TERMS, E, H, N, V, delta, world
from tests.rounding import rounding


def gradient(head, hidden, label, owner, which, mean) -> np.ndarray:
    """d (mean loss) / d M at h + M (h - mean), by autograd, as h x delta."""
    matrix = torch.zeros(H, H, requires_grad=True)
    mine = owner == which
    moved = hidden[mine] + (hidden[mine] - mean) @ matrix.T
    loss = torch.nn.functional.cross_entropy(head.linear(moved), label[mine])
    (actual,) = torch.autograd.grad(loss, matrix)
    return actual.double().numpy().T


def moments_of(hidden_PH, delta_PH):
    actual = []
    for dense_PH in (hidden_PH, delta_PH):
        accumulator = HiddenMoments(CorpusMoments(V))
        accumulator.add(dense_PH.numpy(), np.zeros((len(dense_PH), 1), np.int64), np.ones((len(dense_PH), 1)))
        actual.append(accumulator.value)
    return actual


def test_tilt_relevance_is_the_inner_product_of_exact_gradients():
    head, rows, units = world()
    moments = moments_of(rows[0], delta(head, *rows[:2]))
    targets = prepare_hidden_linear(units[0], delta(head, *units[:2]), units[2], E, *moments)
    actual = hidden_linear_relevance(targets, rows[0], delta(head, *rows[:2]), rows[2], N).numpy()
    mean = torch.from_numpy(moments[0].mean_H).float()
    of_rows, of_units = (
        np.stack([gradient(head, *side, k, mean) for k in range(n)]) for side, n in ((rows, N), (units, E))
    )
    hidden, by_delta = (
        np.linalg.inv(second + RIDGE * np.trace(second) / H * np.eye(H))
        for second in (moments[0].covariance_HH, moments[1].second_moment)
    )
    expected = np.einsum("nhd,hi,eij,jd->ne", of_rows, hidden, of_units, by_delta)
    close = np.einsum("nhd,hi,eij,jd->ne", *map(np.abs, (of_rows, hidden, of_units, by_delta)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rounding(TERMS + H + H, close))
