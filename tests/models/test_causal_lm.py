"""Law: for every family, head(hidden) equals the model's logits, and features of a row do not depend on its batch."""

import numpy as np
import pytest
import torch
from transformers import BertGenerationConfig, BertGenerationDecoder

from grasp.errors import ModelError
from grasp.models.causal_lm import BATCH_ROWS, ReferenceModel, batches, pad_rows
from grasp.models.forward_pass import extract
from tests.models.families import EVERY_FAMILY, VOCAB, make_model
from tests.rounding import rounding

# Float32 sums in another order: two layers with four maps of 32 and one of 48, attention over 40 tokens, the head.
TERMS = 2 * (4 * 32 + 48 + 40) + 32


def reference(family: str, **options) -> ReferenceModel:
    return ReferenceModel(make_model(family), tokenizer=None, **options)


def rows(*lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCAB, size=length).astype(np.int32) for length in lengths]


@EVERY_FAMILY
def test_head_of_hidden_is_the_models_logits(family):
    model = reference(family)
    model.check()
    ids, _ = pad_rows(rows(7, 7))
    expected = model.model(input_ids=ids).logits
    actual = model.logits(model.hidden(ids).flatten(0, 1)).view_as(expected)
    torch.testing.assert_close(actual, expected, rtol=0, atol=rounding(TERMS, expected))


@EVERY_FAMILY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_check_holds_in_half_precision(family, dtype):
    ReferenceModel(make_model(family).to(dtype), tokenizer=None).check()


def test_a_head_with_further_operations_is_refused():
    model = make_model("llama")
    forward = model.forward

    def shifted(**inputs):
        output = forward(**inputs)
        output.logits = output.logits + torch.arange(VOCAB)
        return output

    model.forward = shifted
    with pytest.raises(ModelError, match=r"LlamaForCausalLM: .*output layer"):
        ReferenceModel(model, tokenizer=None)


def test_a_head_whose_logits_depend_on_more_than_its_layer_is_refused():
    """Subtract the largest logit of each position, which only real outputs reveal."""
    model = make_model("llama")
    forward = model.forward

    def shifted(**inputs):
        output = forward(**inputs)
        logits = output.logits
        output.logits = torch.where(logits[..., :1] == -64.0, logits, logits - logits.amax(dim=-1, keepdim=True))
        return output

    model.forward = shifted
    with pytest.raises(ModelError, match=r"LlamaForCausalLM: head.*\d"):
        ReferenceModel(model, tokenizer=None).check()


def test_a_model_that_is_not_causal_is_refused():
    config = BertGenerationConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    model = ReferenceModel(BertGenerationDecoder(config), tokenizer=None)
    with pytest.raises(ModelError, match=r"BertGenerationDecoder: .*causal LM"):
        model.check()  # its head is linear: only the changed token can tell


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ModelError, match=r"LlamaModel: .*causal LM"):
        ReferenceModel(make_model("llama").model, tokenizer=None)


def dense(features, row: int) -> tuple[np.ndarray, np.ndarray]:
    hidden, residual, row_P = features.hidden_PH, features.residual, features.row_P
    chosen = row_P == row
    out = np.zeros((int(chosen.sum()), VOCAB))
    for line, index, value in zip(out, residual.index_PK[chosen], residual.value_PK[chosen], strict=True):
        np.add.at(line, index.numpy(), value.numpy())
    return hidden[chosen].numpy(), out


@EVERY_FAMILY
def test_features_of_a_row_do_not_depend_on_its_batch(family):
    model = reference(family)
    short, long, other = rows(9, 40, 9)
    results = []
    for batch in ([short], [other, short, other], [long, short]):
        features = extract(model, *pad_rows(batch), "all", VOCAB - 1)
        results.append(dense(features, [line is short for line in batch].index(True)))
    for hidden, residual in results[1:]:
        np.testing.assert_allclose(hidden, results[0][0], rtol=0, atol=rounding(TERMS, hidden))
        np.testing.assert_allclose(residual, results[0][1], rtol=0, atol=rounding(TERMS + VOCAB))


@EVERY_FAMILY
def test_residual_times_hidden_is_the_gradient_of_the_output_layer(family):
    """Check the basic identity d loss / d W = sum_t xi_t (x) h_t, with every coordinate stored."""
    model = reference(family)
    ids, loss_mask = pad_rows(rows(12))
    features = extract(model, ids, loss_mask, "all", VOCAB)
    hidden, residual = dense(features, 0)

    leaf = model.hidden(ids)[0, :-1].clone()
    weight = model.head.linear.weight.detach().clone().requires_grad_(True)
    bias = getattr(model.head.linear, "bias", None)
    z = leaf @ weight.T + (0 if bias is None else bias)
    loss = torch.nn.functional.cross_entropy(model.head.link(z), ids[0, 1:], reduction="sum")
    loss.backward()
    close = rounding(TERMS + VOCAB, weight.grad)
    np.testing.assert_allclose(residual.T @ hidden, weight.grad.numpy(), rtol=0, atol=close)
    assert features.residual.loss_P.sum().item() == pytest.approx(loss.item(), rel=rounding(TERMS + VOCAB))


def test_batches_cover_every_row_once_within_the_budget():
    length = np.random.default_rng(1).integers(2, 60, size=300)
    cut = batches(length, 128)
    assert sorted(np.concatenate(cut)) == list(range(300))
    assert all(len(index) <= BATCH_ROWS for index in cut)
    assert all(len(index) == 1 or len(index) * length[index].max() <= 128 for index in cut)


def test_fingerprint_follows_weights_and_buffers_without_a_dimension():
    assert reference("llama").fingerprint() == reference("llama").fingerprint()
    model = make_model("llama", seed=1)
    known = {reference("llama").fingerprint(), ReferenceModel(model, tokenizer=None).fingerprint()}
    model.register_buffer("steps", torch.tensor(3.0))
    known.add(ReferenceModel(model, tokenizer=None).fingerprint())
    model.steps.fill_(4.0)
    assert len(known | {ReferenceModel(model, tokenizer=None).fingerprint()}) == 4
