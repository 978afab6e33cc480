"""The one-step experiment: predictions against enumeration and autograd, utilities against manual steps."""

import copy

import numpy as np
import pytest
import torch

from experiments.one_step.game import Expansion, Gradients, StepUtility
from grasp.models.causal_lm import ReferenceModel
from grasp.targets.units import UnitTokens
from grasp.training.llama import LlamaShape, new_llama
from grasp.training.recipe import named_recipe
from tests.baselines.gradient_world import NoTokenizer, autograd, objective, rows, units

SHAPE = LlamaShape(vocab_size=97, hidden=16, intermediate=24, layers=2, heads=2, context=32)
RECIPE = named_recipe("tiny").model_copy(update={"shape": SHAPE})


@pytest.fixture(scope="module")
def model():
    drawn = new_llama(SHAPE, 3)
    with torch.no_grad():
        for tensor in drawn.parameters():
            tensor.mul_(4.0 if tensor.ndim == 2 else 1.0)  # away from the flat start
    return ReferenceModel(drawn, NoTokenizer(), batch_tokens=256)


@pytest.fixture(scope="module")
def game(model):
    """Return gradients of five rows, and their products with those of four units."""
    gradients = Gradients(model)
    players = gradients.compute(rows())
    return gradients, players, gradients.products(players, units())


def flat(gradients):
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


def test_products_and_curvature_are_those_of_autograd(model, game):
    gradients, players, linear_PE = game
    curvature_PPE = gradients.curvature(players, units())
    wide = ReferenceModel(copy.deepcopy(model.model).double(), NoTokenizer())
    rows_PD = torch.stack([flat(autograd(wide, row)) for row in rows()])
    named = dict(sorted(wide.model.named_parameters()))
    for e, unit in enumerate(units()):
        for parameter in named.values():
            parameter.requires_grad_(True)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            ids = torch.from_numpy(unit.input_ids.astype(np.int64))[None]
            loss = objective(wide.model(input_ids=ids, use_cache=False).logits[0], unit)
            first = torch.autograd.grad(loss, list(named.values()), create_graph=True)
            gradient = torch.cat([part.flatten() for part in first])
            expected = torch.stack(
                [
                    rows_PD
                    @ torch.cat(
                        [
                            h.flatten()
                            for h in torch.autograd.grad(gradient @ row, list(named.values()), retain_graph=True)
                        ]
                    )
                    for row in rows_PD
                ]
            )
        np.testing.assert_allclose(linear_PE[:, e], rows_PD @ gradient.detach(), rtol=1e-3, atol=1e-6)
        error = np.abs(curvature_PPE[..., e] - expected.numpy()).max()
        assert error < 1e-3 * np.abs(expected.numpy()).max()


def step_utility(model, game, rate):
    gradients, players, _ = game
    named = [gradients.named([player[i] for player in players]) for i in range(5)]
    tokens = [UnitTokens(unit.input_ids, unit.first) for unit in units()]
    return StepUtility(RECIPE, dict(model.model.state_dict()), named, tokens, rate)


def test_a_realized_utility_equals_a_step_of_the_model(model, game):
    gradients, players, _ = game
    mask, rate = np.array([True, False, True, False, True]), 0.1
    result = step_utility(model, game, rate)(np.stack([mask, np.zeros(5, bool)]))
    state = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}

    def losses():
        with torch.no_grad():
            return np.array(
                [
                    float(objective(model.model(torch.from_numpy(unit.input_ids).long()[None]).logits[0], unit))
                    for unit in units()
                ]
            )

    before = losses()
    with torch.no_grad():
        for i in np.flatnonzero(mask):
            for name, gradient in gradients.named([player[i] for player in players]).items():
                model.model.get_parameter(name).sub_(rate * gradient)
    after = losses()
    model.model.load_state_dict(state)
    np.testing.assert_allclose(result[0], before - after, atol=3e-6)
    np.testing.assert_allclose(result[1], 0.0, atol=1e-6)


def test_the_second_order_is_closer_to_the_realized_utility(model, game):
    gradients, players, linear_PE = game
    curvature_PPE = gradients.curvature(players, units())
    masks, rate = np.random.default_rng(1).random((20, 5)) < 0.6, 0.03
    realized = step_utility(model, game, rate)(masks)
    errors = [
        np.abs(predictor.utility(masks, rate) - realized).max()
        for predictor in (Expansion(linear_PE), Expansion(linear_PE, curvature_PPE))
    ]
    assert errors[1] < 0.25 * errors[0]
