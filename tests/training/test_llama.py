"""The batched Llama equals K Hugging Face Llamas, and its hand-written gradients equal those of autograd."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from grasp.errors import ModelError
from grasp.training.llama import LlamaShape, StackedLlama, head_loss, rms_norm, rotate, swiglu
from tests.rounding import rounding

SHAPE = LlamaShape(vocab_size=40, hidden=16, intermediate=24, layers=2, heads=2, context=12)
CPU = torch.device("cpu")
TERMS = 2 * (4 * 16 + 24 + 10) + 16  # two layers, attention over 10 tokens, the head


def stacked(shape=SHAPE, seeds=(3, 4)):
    llama = StackedLlama(shape, len(seeds), CPU)
    llama.initialise(seeds)
    return llama


def draw(*size, seed=0, dtype=torch.float64):
    values = np.random.default_rng([seed, *size]).standard_normal(size)
    return torch.from_numpy(values).to(dtype).requires_grad_()


def plain_rms_norm(x, gain, eps):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * gain[:, None, :]


def plain_swiglu(packed):
    gate, up = packed.chunk(2, dim=-1)
    return functional.silu(gate) * up


def plain_rotate(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


@pytest.mark.parametrize("tied", [False, True])
def test_forward_equals_hugging_face(tied):
    llama = stacked(SHAPE.model_copy(update={"tied": tied}))
    ids_KBL = torch.arange(2 * 3 * 10).reshape(2, 3, 10) * 7 % SHAPE.vocab_size
    hidden = llama.hidden(ids_KBL)
    for k in range(2):
        model = llama.to_hf(k)
        expected = model.model(input_ids=ids_KBL[k]).last_hidden_state
        torch.testing.assert_close(hidden[k], expected, rtol=0, atol=rounding(TERMS, expected.detach()))
        logits = hidden[k] @ llama.head[k].T
        expected = model(input_ids=ids_KBL[k]).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=rounding(TERMS, expected.detach()))
        assert sum(parameter.numel() for parameter in model.parameters()) == llama.shape.n_parameters


def test_gradients_equal_hugging_face():
    llama = stacked()
    ids_KBL = torch.arange(2 * 3 * 10).reshape(2, 3, 10) * 7 % SHAPE.vocab_size
    labels_KT = ids_KBL.roll(-1, dims=2).flatten(1)
    weight_KT = (torch.arange(10) < 9).float().expand(2, 3, 10).flatten(1) / 27
    head_loss(llama.hidden(ids_KBL).flatten(1, 2), llama.head, labels_KT, weight_KT).sum().backward()
    for k in range(2):
        model = llama.to_hf(k)
        model(input_ids=ids_KBL[k], labels=ids_KBL[k]).loss.backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        for name, weight in llama.weights.items():
            ours = weight.grad[k]
            kind = name.split(".")[-1]
            if kind == "qkv":
                attention = f"model.{name.removesuffix('qkv')}self_attn."
                theirs = torch.cat([expected[f"{attention}{part}_proj.weight"] for part in "qkv"])
            elif kind in ("embed", "head"):
                theirs = expected["model.embed_tokens.weight" if kind == "embed" else "lm_head.weight"]
            else:
                continue
            # forward and back, and a sum over the 27 labels
            torch.testing.assert_close(ours, theirs, rtol=0, atol=rounding(2 * TERMS + 27, theirs))
        total = torch.stack([weight.grad[k].square().sum() for weight in llama.weights.values()]).sum()
        theirs = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum()
        torch.testing.assert_close(total, theirs, rtol=rounding(2 * TERMS + 27), atol=0)


def test_padding_on_the_right_has_no_effect():
    llama = stacked()
    ids = torch.arange(2 * 10).reshape(2, 1, 10)
    longer = torch.cat((ids, torch.full((2, 1, 2), 9)), dim=2)
    expected = llama.hidden(ids)
    torch.testing.assert_close(
        llama.hidden(longer)[:, :, :10], expected, rtol=0, atol=rounding(TERMS, expected.detach())
    )


def test_initialisation_depends_only_on_the_seed():
    single_state = stacked(seeds=(4,)).state(0)
    for name, tensor in stacked().state(1).items():
        assert torch.equal(tensor, single_state[name])
    assert not torch.equal(stacked().state(0)["lm_head.weight"], single_state["lm_head.weight"])


def test_conversion_does_not_change_the_random_state_of_the_caller():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    stacked().to_hf(0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("fused", "plain", "inputs"),
    [
        (rms_norm, plain_rms_norm, (draw(2, 3, 8), draw(2, 8), 1e-3)),
        (swiglu, plain_swiglu, (draw(2, 3, 8),)),
        (rotate, plain_rotate, (draw(2, 5, 2, 6), draw(5, 1, 3).detach().cos(), draw(5, 1, 3).detach().sin())),
    ],
)
def test_fused_pieces_equal_the_formula_and_its_gradient(fused, plain, inputs):
    torch.testing.assert_close(fused(*inputs), plain(*inputs), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(fused, inputs)


@pytest.mark.parametrize(
    "chunk", [{"CPU_CHUNK": 1}, {"CPU_CHUNK": 3}, {}, *({"CUDA_CHUNK_ELEMENTS": n} for n in (1, 20, 70, 1 << 27))]
)
def test_head_loss_equals_cross_entropy_and_its_gradient(chunk, monkeypatch):
    for name, size in chunk.items():
        monkeypatch.setattr(f"grasp.training.llama.{name}", size)
    if "CUDA_CHUNK_ELEMENTS" in chunk:  # the form that a GPU takes, on the CPU
        monkeypatch.setattr("grasp.training.llama.MIN_CUDA_POSITIONS", 2)
        monkeypatch.setattr("grasp.training.llama.SEQUENTIAL_DEVICES", ())
    hidden, head = draw(2, 7, 4, dtype=torch.float32), draw(2, 5, 4, dtype=torch.float32)
    labels = torch.arange(14).reshape(2, 7) % 5
    weight = torch.tensor([[0.0, 1, 2, 0, 0.5, 1, 0], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]])
    losses = head_loss(hidden, head, labels, weight)
    logits = torch.bmm(hidden, head.transpose(1, 2))
    every = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 7)
    expected = (every * weight).sum(dim=1)
    terms = 4 + 5 + 7  # a logit, the vocabulary, the positions
    torch.testing.assert_close(losses, expected, rtol=0, atol=rounding(terms, expected.detach()))
    upstream = torch.tensor([1.0, -3.0])
    ours = torch.autograd.grad(losses, (hidden, head), upstream)
    theirs = torch.autograd.grad(expected, (hidden, head), upstream)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=rounding(terms, other))


def test_head_loss_of_a_hopeless_label_is_finite_with_the_exact_gradient():
    hidden = torch.tensor([[[1.0]]], requires_grad=True)
    losses = head_loss(hidden, torch.tensor([[[400.0], [0.0]]]), torch.tensor([[1]]), torch.ones(1, 1))
    assert 87 < losses.item() < 88
    losses.sum().backward()
    assert hidden.grad.item() == 400.0


def test_head_widths_without_rotary_embeddings_are_refused():
    with pytest.raises(ModelError, match=r"hidden: .*\b15\b.*2 x 3 heads"):
        StackedLlama(SHAPE.model_copy(update={"hidden": 15, "heads": 3}), 1, CPU)
