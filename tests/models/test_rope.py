"""Law: results of a row do not depend on its batch, also if rotary embeddings depend on the longest row."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from grasp.models.causal_lm import ReferenceModel, batches, length_class
from grasp.models.forward_pass import forward_passes
from grasp.models.gradients import Example, PerExample, layers_of
from grasp.models.unit_loss import evaluate_units
from grasp.targets.units import UnitTokens
from tests.models.zoo import POSITIONS, SMALL, VOCAB, WIDTH
from tests.rounding import rounding

BORDER = 12  # tokens in which the model was trained
LENGTHS = (30, 9, BORDER, BORDER + 1, 22, 30, 5)
TERMS = 2 * (4 * WIDTH + 48 + POSITIONS) + WIDTH + VOCAB
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.02, 1.03, 1.05],
    "long_factor": [1.1, 4.0, 24.0, 60.0],
    "original_max_position_embeddings": BORDER,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 1.0}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
CASES = {
    "phi3": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": BORDER}),
    "llama-longrope": ("llama", {"rope_parameters": LONG}),
    "phimoe": ("phimoe", {"rope_parameters": LONG | {"short_mscale": 1.1, "long_mscale": 1.3}}),
    "by-type-of-layer": (
        "gemma3_text",
        {
            "rope_parameters": {"full_attention": LONG, "sliding_attention": PLAIN},
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": BORDER}),
    "gpt_neox-dynamic": ("gpt_neox", {"rope_parameters": DYNAMIC, "max_position_embeddings": BORDER}),
    "dynamic-by-type-of-layer": (
        "gemma3_text",
        {
            "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": PLAIN},
            "layer_types": ["sliding_attention", "full_attention"],
            "max_position_embeddings": BORDER,
        },
    ),
    "llama-yarn": ("llama", {"rope_parameters": DYNAMIC | {"rope_type": "yarn"}}),
}


def model_of(case: str) -> nn.Module:
    torch.manual_seed(0)
    name, changes = CASES[case]
    fields = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}
    known = {field: value for field, value in SMALL.items() if hasattr(AutoConfig.for_model(name), field)}
    config = AutoConfig.for_model(name, **known | fields | changes)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double()


def units() -> list[UnitTokens]:
    generator = np.random.default_rng(0)
    return [UnitTokens(generator.integers(1, VOCAB, size=n).astype(np.int32), 1) for n in LENGTHS]


def unbatched_loss(model: nn.Module, unit: UnitTokens) -> float:
    """Return the loss of a unit by a copy of the model that has seen no other row."""
    ids = torch.from_numpy(unit.input_ids.astype(np.int64))[None]
    logits = copy.deepcopy(model)(input_ids=ids, use_cache=False).logits[0, :-1]
    return float(nn.functional.cross_entropy(logits.double(), ids[0, 1:]))


@pytest.mark.parametrize("case", CASES)
def test_the_loss_of_a_row_does_not_depend_on_its_batch_or_on_earlier_rows(case):
    model = model_of(case)
    class_N = length_class(model.config, np.array(LENGTHS))
    assert (class_N is None) == ("yarn" in case)
    if class_N is not None:  # beyond the border all rows together, or each length alone
        assert len(batches(np.array(LENGTHS), 8192, class_N)) == (2 if "dynamic" not in case else 4)
    with torch.no_grad():
        expected = [unbatched_loss(model, unit) for unit in units()]
    close = rounding(TERMS, expected)
    reference = ReferenceModel(copy.deepcopy(model), tokenizer=None)
    reference.check()
    norms = [name for name, _ in model.named_parameters() if "norm" in name and "self_attn" not in name]
    engine = PerExample(reference, layers_of(reference, norms))
    examples = [Example(unit.input_ids) for unit in units()]
    for _ in range(2):  # state of the first pass does not affect the second
        losses = np.empty(len(LENGTHS))
        for index, features in forward_passes(reference, units(), "all", VOCAB):
            losses[index] = features.row_loss(len(index))
        np.testing.assert_allclose(losses, expected, rtol=0, atol=close)
        for index in engine.batches(examples):
            losses[index] = engine.run([examples[i] for i in index], lambda *_: None).loss_B
        np.testing.assert_allclose(losses, expected, rtol=0, atol=close)
        np.testing.assert_allclose(evaluate_units(reference.model, units()), expected, rtol=0, atol=close)


def test_rows_of_one_length_class_are_batched_as_usual():
    length_N = np.random.default_rng(1).integers(2, 60, size=300)
    plain = batches(length_N, 128)
    same = batches(length_N, 128, np.ones_like(length_N))
    assert all(np.array_equal(a, b) for a, b in zip(plain, same, strict=True))
    class_N = (length_N > 30) + 1
    cut = batches(length_N, 128, class_N)
    assert sorted(np.concatenate(cut)) == list(range(300))
    assert all(len(set(class_N[index])) == 1 for index in cut)
