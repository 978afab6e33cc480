"""Laws: xi = p - onehot exactly on the stored coordinates; top-k selects the k largest; position masks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grasp.models.forward_pass import position_mask
from grasp.models.head import OutputHead
from grasp.models.residuals import head_residual, sparse_residual, top_k
from tests.rounding import rounding


def dense(residual, vocab: int) -> np.ndarray:
    out = np.zeros((len(residual.index_PK), vocab))
    for line, index, value in zip(out, residual.index_PK, residual.value_PK, strict=True):
        np.add.at(line, index.numpy(), value.numpy())
    return out


def reference(logits: np.ndarray, label: np.ndarray, k: int) -> np.ndarray:
    """Compute the residual in float64, one position at a time."""
    out = np.zeros_like(logits)
    for p, (z, y) in enumerate(zip(logits, label, strict=True)):
        probability = np.exp(z - z.max())
        probability /= probability.sum()
        token_ids = set(np.argsort(-z)[:k]) | {y}
        for v in token_ids:
            out[p, v] = probability[v] - (v == y)
    return out


@given(seed=st.integers(0, 2**32 - 1), vocab=st.sampled_from([5, 40, 600, 5000]), k=st.integers(1, 20))
def test_sparse_residual_is_p_minus_onehot_on_the_top_k_and_the_label(seed, vocab, k):
    generator = np.random.default_rng(seed)
    logits = generator.normal(scale=3.0, size=(4, vocab)).astype(
        np.float32
    )  # float32 in both, so that the order is the same
    label = generator.integers(0, vocab, size=4)
    residual = sparse_residual(torch.from_numpy(logits), torch.from_numpy(label), min(k, vocab))
    expected = reference(logits.astype(np.float64), label, min(k, vocab))
    # z - log(sum of exp) is rounded at the size of the logits, then made a probability
    np.testing.assert_allclose(dense(residual, vocab), expected, rtol=0, atol=rounding(2, logits))


@given(seed=st.integers(0, 2**32 - 1), vocab=st.integers(64 * 4 * 3, 4000))
def test_two_level_top_k_equals_topk(seed, vocab):
    values = torch.from_numpy(np.random.default_rng(seed).normal(size=(3, vocab))).float()
    expected = values.topk(3, dim=1).values
    actual = values.gather(1, top_k(values, 3)).sort(dim=1, descending=True).values
    assert torch.equal(actual, expected)


def test_half_precision_logits_give_the_residuals_of_their_float32_copy():
    logits, label = torch.randn(20, 5000).bfloat16(), torch.randint(0, 5000, (20,))
    half, copied = (sparse_residual(of, label, 9) for of in (logits, logits.float()))
    for name in ("index_PK", "value_PK", "loss_P"):
        got, expected = getattr(half, name), getattr(copied, name)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected), name


def test_logits_in_chunks_give_the_same_residuals(monkeypatch):
    torch.manual_seed(0)
    head = OutputHead(torch.nn.Linear(8, 50))
    hidden, label = torch.randn(37, 8), torch.randint(0, 50, (37,))
    with torch.inference_mode():
        whole = head_residual(head, hidden, label, 6, 50)
        monkeypatch.setattr("grasp.models.residuals.LOGIT_ELEMENTS", 50 * 5)
        parts = head_residual(head, hidden, label, 6, 50)
    terms = 8 + 50  # a logit, and the sum over the vocabulary
    np.testing.assert_allclose(dense(parts, 50), dense(whole, 50), rtol=0, atol=rounding(terms))
    np.testing.assert_allclose(parts.loss_P, whole.loss_P, rtol=0, atol=rounding(terms, whole.loss_P))


@pytest.mark.parametrize(
    ("spec", "first", "length", "expected"),
    [
        ("all", 0, 5, [0, 1, 2, 3]),
        ("tail:2", 0, 5, [2, 3]),
        ("tail:32", 0, 5, [0, 1, 2, 3]),
        ("stride:2", 0, 6, [0, 2, 4]),
        ("stride:3", 0, 6, [1, 4]),
        ("all", 3, 6, [3, 4]),
        ("tail:1", 3, 6, [4]),
        ("stride:2", 3, 7, [3, 5]),
    ],
)
def test_position_masks(spec, first, length, expected):
    place = torch.arange(8)
    mask = position_mask(spec, ((place > first) & (place < length))[None])
    assert mask[0].nonzero()[:, 0].tolist() == expected


@pytest.mark.parametrize(("spec", "expected"), [("all", [0, 1, 4, 6]), ("tail:2", [4, 6]), ("stride:2", [1, 6])])
def test_position_masks_skip_tokens_without_loss(spec, expected):
    loss_mask = torch.tensor([[False, True, True, False, False, True, False, True, False]])
    assert position_mask(spec, loss_mask)[0].nonzero()[:, 0].tolist() == expected
