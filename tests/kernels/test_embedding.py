"""Law: input relevance is the mean over position pairs with the same token of c(x) <delta~_t, delta~_s>.

On a model whose body is the identity that is the inner product of the exact gradients of the input embedding.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from grasp.errors import ModelError
from grasp.kernels.embedding import embedding_relevance, one_hot_tokens
from grasp.kernels.kernel import CorpusMoments
from grasp.kernels.output_layer import prepare_targets
from grasp.kernels.whitening import HiddenMoments, Whitener
from grasp.models import residuals
from grasp.models.causal_lm import ReferenceModel, pad_rows
from grasp.models.forward_pass import extract
from grasp.models.head import OutputHead
from grasp.models.residuals import hidden_gradient, sparse_residual
from tests.models.test_residuals import dense
from tests.rounding import rounding

V, H, E, N = 50, 8, 6, 5
TAU, ALPHA, EPSILON = 0.01, 1.0, 0.3
POSITIONS, UNIT_POSITIONS, COORDINATES = 60, 23, 6 + 1
# through the head, whitened, multiplied coordinate by coordinate, summed over pairs
TERMS = COORDINATES + H + H + POSITIONS + UNIT_POSITIONS


def make_head(dtype=torch.float32, **link) -> OutputHead:
    linear = torch.nn.Linear(H, V, bias=False).to(dtype).requires_grad_(False)
    linear.weight.mul_(4.0)
    return OutputHead(linear, **link)


def world(seed: int, vocab: int = 12, tau: float = TAU, alpha: float = ALPHA, epsilon: float = EPSILON):
    """Return positions of rows and units with tokens from the first `vocab` ids, so that many are shared."""
    torch.manual_seed(seed)
    head = make_head()
    hidden, unit_hidden = torch.randn(POSITIONS, H) + 0.5, torch.randn(UNIT_POSITIONS, H) + 0.5
    residual = sparse_residual(head.linear_logits(hidden), torch.randint(0, V, (POSITIONS,)), 6)
    unit_residual = sparse_residual(head.linear_logits(unit_hidden), torch.randint(0, V, (UNIT_POSITIONS,)), 6)
    token, unit_token = torch.randint(0, vocab, (POSITIONS,)), torch.randint(3, vocab + 9, (UNIT_POSITIONS,))
    accumulator = HiddenMoments(CorpusMoments(V))
    tokens = one_hot_tokens(token)
    accumulator.add(hidden_gradient(head, residual).numpy(), tokens.index_PK.numpy(), tokens.value_PK.numpy())
    moments = accumulator.value
    whitener = Whitener.fit(moments, centred=False, tau=tau, alpha=alpha, epsilon=epsilon)
    row = torch.arange(POSITIONS) * N // POSITIONS
    unit = torch.sort(torch.arange(UNIT_POSITIONS) % E).values
    return head, (residual, token, row), (unit_residual, unit_token, unit), whitener


def prepared(head, units, whitener):
    residual, token, unit = units
    return prepare_targets(hidden_gradient(head, residual), one_hot_tokens(token), unit, E, whitener, N)


def reference(head, rows, units, tau=TAU, alpha=ALPHA, epsilon=EPSILON) -> np.ndarray:
    """Compute the definition in float64, including moments, one pair of positions at a time."""
    weight = head.linear.weight.double().numpy()
    weight = weight - weight.mean(axis=0)  # what top-k cut off is spread evenly
    delta, unit_delta = (dense(part[0], V) @ weight for part in (rows, units))
    (_, token, row), (_, unit_token, unit) = rows, units
    share = np.array([np.mean(token.numpy() == v) for v in range(V)])
    c = (share + epsilon * share[share > 0].mean()) ** -alpha
    second = sum(np.outer(line, line) for line in delta) / len(delta)
    value, vector = np.linalg.eigh(second + tau * np.trace(second) / H * np.eye(H))
    root = vector @ np.diag(value**-0.5) @ vector.T
    total, count = np.zeros((N, E)), np.zeros((N, E))
    for t in range(len(delta)):
        for s in range(len(unit_delta)):
            if token[t] == unit_token[s]:
                total[row[t], unit[s]] += c[token[t]] * (root @ delta[t]) @ (root @ unit_delta[s])
            count[row[t], unit[s]] += 1
    return total / count


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(1, 30),
    how=st.sampled_from([(TAU, ALPHA, EPSILON), (0.5, 0.5, 2.0), (0.5, 1.0, 2.0)]),
)
@example(seed=4, vocab=12, how=(0.5, 0.5, 2.0))
@example(seed=4, vocab=12, how=(0.5, 1.0, 2.0))
def test_input_relevance_is_the_mean_over_position_pairs_with_the_same_token(seed, vocab, how):
    head, rows, units, whitener = world(seed, vocab, *how)
    actual = embedding_relevance(prepared(head, units, whitener), head, *rows, N).numpy()
    expected = reference(head, rows, units, *how)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rounding(TERMS, expected))


def test_rows_without_a_token_of_any_unit_have_no_relevance():
    head, (residual, token, row), units, whitener = world(5)
    targets = prepared(head, units, whitener)
    strange = torch.where(row == 1, 40, token)
    result = embedding_relevance(targets, head, residual, strange, row, N)
    assert not result[1].any()
    assert result[[0, 2, 3, 4]].any(dim=1).all()
    assert not embedding_relevance(targets, head, residual, torch.full_like(token, 40), row, N).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("gathered", [1, 10**6])
def test_the_gradient_by_a_hidden_state_is_that_of_autograd_in_any_dtype(monkeypatch, dtype, gathered):
    monkeypatch.setattr(residuals, "GATHERED_ELEMENTS", gathered)
    torch.manual_seed(1)
    head, label = make_head(dtype, scale=0.7, cap=3.0), torch.randint(0, V, (9,))
    hidden = torch.randn(9, H).requires_grad_()
    logits = head.link(hidden @ head.matrix().float().T)
    torch.nn.functional.cross_entropy(logits, label, reduction="sum").backward()
    residual = sparse_residual(logits.detach(), label, V, head.slope(logits.detach()))
    for variant in (head, OutputHead(head.linear.float(), cap=3.0)):
        # H terms make a logit, V a gradient
        close = rounding(H + V, hidden.grad)
        torch.testing.assert_close(hidden_gradient(variant, residual), hidden.grad, rtol=0, atol=close)


def test_the_common_component_of_all_tokens_is_in_no_gradient_for_any_top_k():
    """A common component shifts all logits equally, so that no probability changes."""
    torch.manual_seed(2)
    head, hidden, label = make_head(), torch.randn(9, H), torch.randint(0, V, (9,))
    residual = sparse_residual(head.linear_logits(hidden), label, 6)
    moved = make_head()
    moved.linear.weight = torch.nn.Parameter(head.linear.weight + 10 * torch.randn(H), requires_grad=False)
    actual, expected = hidden_gradient(moved, residual), hidden_gradient(head, residual)
    torch.testing.assert_close(actual, expected, rtol=0, atol=rounding(V + COORDINATES, moved.linear.weight))


def test_a_quantised_head_is_refused():
    head = make_head()
    head.linear.weight = torch.nn.Parameter(head.linear.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match=r"Linear: .*torch\.int8.*float"):
        hidden_gradient(head, world(0)[1][0])


class Identity(torch.nn.Module):
    """A substitute for a final norm."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def embedding_as_body(*, tied: bool, cap: float | None) -> ReferenceModel:
    """A causal LM without layers and norm: its hidden state is the embedding of the token."""
    torch.manual_seed(3)
    config = LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=8, num_hidden_layers=0, num_attention_heads=1)
    config.tie_word_embeddings = tied
    model = LlamaForCausalLM(config)
    model.model.norm = Identity()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.randn(V, H))
        if not tied:
            model.lm_head.weight.copy_(torch.randn(V, H))
    reference = ReferenceModel(model, tokenizer=None)
    reference.head = replace(reference.head, cap=cap)  # a Llama has none of its own
    return reference


def embedding_gradients(model: ReferenceModel, sequences: list[np.ndarray]) -> np.ndarray:
    """Gradient of each sequence's mean loss by the embedding, by autograd, (sequences, V, H)."""
    results = []
    for ids in map(torch.from_numpy, sequences):
        embedding = model.body.embed_tokens.weight.detach().clone().double().requires_grad_()
        # an untied head, also where the model's is tied: the kernel is of the input embedding's own gradient
        logits = model.head.link(embedding[ids[:-1].long()] @ model.head.matrix().double().T)
        torch.nn.functional.cross_entropy(logits, ids[1:].long()).backward()
        results.append(embedding.grad.numpy())
    return np.stack(results)


@pytest.mark.parametrize(("tied", "cap"), [(False, None), (True, None), (False, 2.0)])
def test_with_an_identity_body_it_equals_the_inner_product_of_exact_embedding_gradients(tied, cap):
    model = embedding_as_body(tied=tied, cap=cap)
    rng = np.random.default_rng(2)
    rows, units = ([rng.integers(0, 20, size=n).astype(np.int32) for n in lengths] for lengths in ((9, 4, 14), (5, 7)))
    features = [extract(model, *pad_rows(sequences), "all", V) for sequences in (rows, units)]
    precondition = rng.uniform(0.5, 2.0, size=V)
    root = rng.normal(size=(H, H))
    whitener = Whitener(np.zeros(H), root @ root.T, precondition)
    row, unit = features
    delta_SH = hidden_gradient(model.head, unit.residual)
    targets = prepare_targets(delta_SH, one_hot_tokens(unit.input_P), unit.row_P, 2, whitener, 3)
    actual = embedding_relevance(targets, model.head, row.residual, row.input_P, row.row_P, 3).numpy()
    row_gradient, unit_gradient = (embedding_gradients(model, sequences) @ root @ root.T for sequences in (rows, units))
    expected = np.einsum("v,ivh,evh->ie", precondition, row_gradient, unit_gradient)
    assert np.abs(expected).max() > 0.1
    terms = V + H + H + H + 14 + 7  # logits, through the head, whitened twice, summed over pairs of positions
    size = np.einsum("v,ivh,evh->ie", precondition, np.abs(row_gradient), np.abs(unit_gradient))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rounding(terms, size))
