"""Law: shift relevance is the inner product of exact gradients of one vector that is added to every hidden state."""

import numpy as np
import torch

from grasp.kernels.embedding import one_hot_tokens
from grasp.kernels.hidden_bias import hidden_bias_relevance, prepare_hidden_bias
from grasp.kernels.kernel import CorpusMoments
from grasp.kernels.whitening import HiddenMoments, Whitener
from grasp.models.head import OutputHead
from grasp.models.residuals import hidden_gradient, sparse_residual
from tests.rounding import rounding

V, H, E, N = 20, 6, 4, 3
TERMS = H + V + H + 10  # a logit, a gradient, an inner product, the positions of a row


def world(seed: int = 0):
    torch.manual_seed(seed)
    linear = torch.nn.Linear(H, V, bias=False).requires_grad_(False)
    hidden, unit_hidden = torch.randn(30, H), torch.randn(17, H)
    label, unit_label = torch.randint(0, V, (30,)), torch.randint(0, V, (17,))
    row, unit = torch.arange(30) * N // 30, torch.arange(17) % E
    return OutputHead(linear), (hidden, label, row), (unit_hidden, unit_label, unit)


def plain_whitener() -> Whitener:
    return Whitener(np.zeros(H), np.eye(H), np.ones(V))


def delta(head, hidden, label):
    return hidden_gradient(head, sparse_residual(head.linear_logits(hidden), label, V))


def gradient(head, hidden, label, owner, which) -> np.ndarray:
    """d (mean loss) / d shift, by autograd."""
    shift = torch.zeros(H, requires_grad=True)
    mine = owner == which
    loss = torch.nn.functional.cross_entropy(head.linear(hidden[mine] + shift), label[mine])
    (actual,) = torch.autograd.grad(loss, shift)
    return actual.double().numpy()


def test_shift_relevance_is_the_inner_product_of_exact_gradients():
    head, rows, units = world()
    unit_EH = prepare_hidden_bias(delta(head, *units[:2]), units[2], E, plain_whitener())
    actual = hidden_bias_relevance(unit_EH, delta(head, *rows[:2]), rows[2], N).numpy()
    of_rows, of_units = (np.stack([gradient(head, *side, k) for k in range(n)]) for side, n in ((rows, N), (units, E)))
    close = rounding(TERMS, np.abs(of_rows) @ np.abs(of_units).T)
    np.testing.assert_allclose(actual, of_rows @ of_units.T, rtol=0, atol=close)


def test_common_directions_of_all_rows_have_less_weight():
    head, rows, units = world(1)
    accumulator = HiddenMoments(CorpusMoments(V))
    delta_PH, tokens = delta(head, *rows[:2]), one_hot_tokens(torch.zeros(30, dtype=torch.int64))
    accumulator.add(delta_PH.numpy(), tokens.index_PK.numpy(), tokens.value_PK.numpy())
    whitener = Whitener.fit(accumulator.value, centred=False, tau=0.01, alpha=1.0, epsilon=0.3)
    unit_EH = prepare_hidden_bias(delta(head, *units[:2]), units[2], E, whitener)
    second = (delta_PH.T @ delta_PH).double().numpy() / 30
    inverse = np.linalg.inv(second + 0.01 * np.trace(second) / H * np.eye(H))
    of_rows, of_units = (np.stack([gradient(head, *side, k) for k in range(n)]) for side, n in ((rows, N), (units, E)))
    actual = hidden_bias_relevance(unit_EH, delta_PH, rows[2], N).numpy()
    close = rounding(TERMS + H, np.abs(of_rows) @ np.abs(inverse) @ np.abs(of_units).T)
    np.testing.assert_allclose(actual, of_rows @ inverse @ of_units.T, rtol=0, atol=close)
