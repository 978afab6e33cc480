"""Law: neighbour relevance is the kernel language model's log-probability, to first order in what a row adds."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grasp.kernels.kernel import CorpusMoments
from grasp.kernels.knn import KERNEL_WIDTH, PRIOR, knn_relevance, prepare_knn
from grasp.kernels.whitening import HiddenMoments, Whitener
from grasp.models.residuals import sparse_residual
from tests.rounding import rounding

V, H, E, N, M = 12, 6, 5, 4, 40
POSITIONS, UNIT_POSITIONS = 60, 23
TERMS = H + H + POSITIONS + UNIT_POSITIONS + M  # whitened, distances, sums over positions and the sample


def world(seed: int, positions: int = POSITIONS, unit_positions: int = UNIT_POSITIONS):
    torch.manual_seed(seed)
    weight = torch.randn(V, H)
    hidden, unit_hidden = torch.randn(positions, H) + 0.5, torch.randn(unit_positions, H) + 0.5
    residual, unit_residual = (
        sparse_residual(states @ weight.T, torch.randint(0, V, (len(states),)), 3) for states in (hidden, unit_hidden)
    )
    accumulator = HiddenMoments(CorpusMoments(V))
    accumulator.add(hidden.numpy(), residual.index_PK.numpy(), residual.value_PK.numpy())
    whitener = Whitener.fit(accumulator.value, tau=0.01, alpha=1.0, epsilon=0.3)
    moments = accumulator.value, hidden[:M].numpy(), residual.label_P[:M].numpy()
    row = torch.arange(positions) * N // positions
    unit = torch.arange(unit_positions) % E  # out of order, as batches of like lengths leave them
    return (hidden, residual.label_P, row), (unit_hidden, unit_residual, unit), whitener, moments


def prepared(units, whitener, moments):
    return prepare_knn(*units, E, whitener, *moments)


class Definition:
    """Reference in float64, one pair of positions at a time."""

    def __init__(self, rows, units, whitener, moments) -> None:
        _, states_MH, label_M = moments
        self.rows, self.units = rows, units
        white = [
            (states - whitener.mean_H) @ whitener.map_HH
            for states in (rows[0].double().numpy(), units[0].double().numpy(), states_MH.astype(np.float64))
        ]
        tau = KERNEL_WIDTH * np.sqrt(np.mean([((x - y) ** 2).sum() for x in white[0] for y in white[0]]))
        label, label_S = rows[1].numpy(), units[1].label_P.numpy()

        def near(x, y):
            return np.exp(-((x - y) ** 2).sum() / (2 * tau**2))

        self.near_PS = np.array([[near(x, y) for y in white[1]] for x in white[0]])
        self.same_PS = self.near_PS * (label[:, None] == label_S)
        near_MS = np.array([[near(x, y) for y in white[1]] for x in white[2]])
        self.near_S = (1 + near_MS.sum(axis=0)) / len(near_MS)
        self.same_S = (near_MS * (label_M[:, None] == label_S)).sum(axis=0) / len(near_MS)
        self.prior_S = PRIOR * np.exp(-units[1].loss_P.double().numpy()) + 1 / len(near_MS)

    def log_probability(self, near_S, same_S):
        """Return the log probability of the correct token at unit positions by the kernel language model."""
        prior_S = self.prior_S * self.near_S
        return np.log(same_S + prior_S) - np.log(near_S + PRIOR * self.near_S)

    def of_row(self, i):
        mask = self.rows[2].numpy() == i
        return self.near_PS[mask].mean(axis=0), self.same_PS[mask].mean(axis=0)

    def relevance(self):
        unit = self.units[2].numpy()
        out = np.zeros((N, E))
        for i in range(N):
            near_S, same_S = self.of_row(i)
            score_S = same_S / (self.same_S + self.prior_S * self.near_S) - near_S / ((1 + PRIOR) * self.near_S)
            out[i] = [score_S[unit == e].mean() for e in range(E)]
        return out


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_neighbour_relevance_equals_its_definition(seed):
    rows, units, whitener, moments = inputs = world(seed)
    actual = knn_relevance(prepared(units, whitener, moments), *rows, N).numpy()
    expected = Definition(*inputs).relevance()
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rounding(TERMS, expected))


def test_it_equals_the_derivative_of_the_kernel_language_model():
    inputs = world(3)
    law, small = Definition(*inputs), 1e-6
    unit = inputs[1][2].numpy()
    for i in range(N):
        near_S, same_S = law.of_row(i)
        more, less = (law.log_probability(law.near_S + w * near_S, law.same_S + w * same_S) for w in (small, -small))
        slope_S = (more - less) / (2 * small)
        expected_E = [slope_S[unit == e].mean() for e in range(E)]
        # of a difference of logarithms only the digits above `small` are left
        close = rounding(H + POSITIONS, np.abs(slope_S).max(), np.float64) / small
        np.testing.assert_allclose(law.relevance()[i], expected_E, rtol=0, atol=close)


def test_a_row_with_the_text_of_the_unit_helps_and_one_with_another_continuation_harms():
    _, (unit_hidden, unit_residual, unit), whitener, moments = world(5)
    targets = prepared((unit_hidden, unit_residual, unit), whitener, moments)
    first = unit == 0
    hidden, label = unit_hidden[first], unit_residual.label_P[first]
    row = torch.zeros(len(hidden), dtype=torch.int64)
    assert knn_relevance(targets, hidden, label, row, 1)[0, 0] > 0
    assert knn_relevance(targets, hidden, (label + 1) % V, row, 1)[0, 0] < 0


def test_relevance_to_units_far_from_the_sample_is_bounded():
    _, (unit_hidden, unit_residual, unit), whitener, moments = world(5)
    far = 40.0 * unit_hidden  # nothing of the corpus is near
    targets = prepared((far, unit_residual, unit), whitener, moments)
    row = torch.arange(len(far)) % N
    actual = knn_relevance(targets, far, unit_residual.label_P, row, N)
    assert actual.isfinite().all()
    assert float(actual.abs().max()) <= M**2
