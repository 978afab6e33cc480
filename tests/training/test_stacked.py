"""K models trained at once equal K models trained one at a time."""

import numpy as np
import pytest
import torch

from grasp.errors import ModelError, ShapeError
from grasp.models.unit_loss import evaluate_units
from grasp.training.train import train, train_stacked
from tests.models.toy import RECIPE, corpus, units
from tests.rounding import rounding

ROWS = corpus()
SEEDS = (5, 5, 6)
# Forward and back through two layers and a vocabulary of 32, and 12 steps that round the weights.
PASS = 2 * (4 * 16 + 24 + 12) + 32
TERMS = 2 * PASS + 12
RETAINED = (None, np.arange(40) % 3 > 0, (1.0 + np.arange(40)) * (np.arange(40) < 25))


@pytest.fixture(scope="module")
def stacked():
    return train_stacked(RECIPE, ROWS, seeds=SEEDS, retained=RETAINED)


@pytest.fixture(scope="module")
def single_models():
    return [train(RECIPE, ROWS, seed=seed, retained=retained) for seed, retained in zip(SEEDS, RETAINED, strict=True)]


def test_utilities_are_those_of_models_trained_alone(stacked, single_models):
    losses = stacked.model.unit_losses(units())
    assert losses.shape == (3, 9)
    expected = [evaluate_units(single.model, units()) for single in single_models]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=rounding(TERMS, expected))
    assert np.ptp(losses, axis=0).min() > 1e-3  # the three models do differ


def test_weights_and_training_losses_are_those_of_models_trained_alone(stacked, single_models):
    for k, single in enumerate(single_models):
        for name, tensor in stacked.model.to_hf(k).state_dict().items():
            expected = single.model.state_dict()[name]
            torch.testing.assert_close(tensor, expected, rtol=0, atol=rounding(TERMS, expected))
        np.testing.assert_allclose(stacked.losses[:, k], single.losses, rtol=0, atol=rounding(TERMS, single.losses))


def test_a_model_does_not_depend_on_other_models_of_the_stack(stacked):
    swapped = train_stacked(RECIPE, ROWS, seeds=SEEDS[::-1], retained=RETAINED[::-1])
    expected = stacked.model.unit_losses(units())
    close = rounding(TERMS, expected)
    np.testing.assert_allclose(swapped.model.unit_losses(units())[::-1], expected, rtol=0, atol=close)


def test_unit_losses_do_not_depend_on_the_batch(stacked):
    expected = stacked.model.unit_losses(units())
    close = rounding(PASS, expected)
    np.testing.assert_allclose(stacked.model.unit_losses(units(), 1), expected, rtol=0, atol=close)


@pytest.mark.parametrize(
    ("seeds", "retained", "error", "message"),
    [
        ((1, 2), (None,), ShapeError, r"\b2 seeds.*\b1 subsets"),
        ((), (), ShapeError, r"\b0 seeds"),
        ((1,), (np.arange(40) < 2,), ModelError, "retained: 2 of 40 rows"),
    ],
)
def test_inconsistent_seeds_and_subsets_are_refused(seeds, retained, error, message):
    with pytest.raises(error, match=message):
        train_stacked(RECIPE, ROWS, seeds=seeds, retained=retained)
