"""A new model depends on its seed only."""

import numpy as np
import pytest
import torch

from grasp.seeds import stream
from grasp.training.llama import LlamaShape, new_llama

SHAPE = LlamaShape(vocab_size=40, hidden=16, intermediate=24, layers=2, heads=2, context=12)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_without_a_model(tied):
    shape = SHAPE.model_copy(update={"tied": tied})
    assert sum(parameter.numel() for parameter in new_llama(shape, 3).parameters()) == shape.n_parameters


@pytest.mark.parametrize("tied", [False, True])
def test_each_matrix_is_drawn_by_its_name_and_gains_are_one(tied):
    model = new_llama(SHAPE.model_copy(update={"tied": tied}), 4)
    for name, parameter in model.named_parameters():
        size = tuple(parameter.shape)
        drawn = 0.02 * stream(4, "init", name).standard_normal(size, dtype=np.float32) if len(size) > 1 else 1.0
        np.testing.assert_allclose(parameter.detach().numpy(), np.broadcast_to(drawn, size), rtol=1e-6)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_a_new_model_does_not_change_the_random_state_of_the_caller():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    new_llama(SHAPE, 3)
    assert torch.equal(torch.rand(3), expected)
