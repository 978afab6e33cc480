"""A model trained in memory equals the one that `train` writes, and its losses do not depend on the batch."""

import numpy as np
import pytest
import torch

from grasp.errors import ModelError
from grasp.models.unit_loss import evaluate_units
from grasp.training.train import train, train_in_memory
from tests.models.toy import RECIPE, corpus, units
from tests.rounding import rounding

ROWS = corpus()
PASS = 2 * (4 * 16 + 24 + 12) + 32  # forward and back through two layers and a vocabulary of 32


@pytest.mark.parametrize("retained", [None, np.arange(40) % 3 > 0, (1.0 + np.arange(40)) * (np.arange(40) < 25)])
def test_a_model_trained_in_memory_is_that_of_train(retained):
    trainer = train_in_memory(RECIPE, ROWS, seed=5, retained=retained)
    single = train(RECIPE, ROWS, seed=5, retained=retained)
    for name, tensor in trainer.model.to_hf(0).state_dict().items():
        assert torch.equal(tensor, single.model.state_dict()[name])
    np.testing.assert_array_equal(trainer.losses[:, 0], single.losses)
    expected = evaluate_units(single.model, units())
    for batch_tokens in (8192, 1):
        losses = trainer.model.unit_losses(units(), batch_tokens)[0]
        np.testing.assert_allclose(losses, expected, rtol=0, atol=rounding(PASS, expected))


def test_fewer_rows_than_a_batch_are_refused():
    with pytest.raises(ModelError, match="retained: 2 of 40 rows"):
        train_in_memory(RECIPE, ROWS, seed=1, retained=np.arange(40) < 2)
