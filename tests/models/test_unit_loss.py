"""The loss of a unit is the mean over its labels, independently of its batch."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from grasp.errors import ModelError
from grasp.models.unit_loss import evaluate_units
from grasp.targets import UnitTokens
from tests.rounding import rounding

from .toy import units


@pytest.fixture(scope="module")
def gpt2():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3)
        return GPT2LMHeadModel(config).eval()


def reference(model, unit):
    """Compute the loss of one unit without a batch, label by label."""
    logits = model(input_ids=torch.from_numpy(unit.input_ids[None].astype(np.int64))).logits[0].double()
    labels = unit.input_ids[unit.first :]
    positions = range(unit.first - 1, len(unit.input_ids) - 1)
    losses = [-logits[t].log_softmax(0)[int(y)].item() for t, y in zip(positions, labels, strict=True)]
    return np.mean(losses)


@pytest.mark.parametrize("batch_tokens", [1, 20, 8192])
def test_losses_equal_the_definition_in_any_batch(gpt2, batch_tokens):
    losses = evaluate_units(gpt2, units(), batch_tokens)
    assert losses.dtype == np.float64
    terms = 2 * (4 * 16 + 64 + 16) + 32  # two layers, and the vocabulary
    expected = [reference(gpt2, unit) for unit in units()]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=rounding(terms, expected))


def test_no_units_have_no_losses(gpt2):
    assert evaluate_units(gpt2, []).shape == (0,)


def test_a_model_that_is_not_a_number_is_refused(gpt2):
    broken = GPT2LMHeadModel(gpt2.config).eval()
    with torch.no_grad():
        broken.transformer.wte.weight[31] = torch.nan
    clean = UnitTokens(np.array([1, 2], np.int32), 1)
    with pytest.raises(ModelError, match=r"unit 0: .*loss.*nan"):
        evaluate_units(broken, [clean])
