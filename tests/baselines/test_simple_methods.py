"""Simple methods equal their definitions."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from tests.baselines.world import N_ROWS, N_UNITS, scored


@pytest.mark.parametrize(("name", "column", "sign"), [("loss", "loss", -1), ("length", "n_tokens", 1)])
def test_loss_and_length_are_those_of_the_row_table(name, column, sign, world, tmp_path):
    expected = sign * pq.read_table(world.artifact.rows_path)[column].to_numpy()
    np.testing.assert_allclose(scored(world, tmp_path, name)[:, 0], expected, rtol=1e-6)


def test_random_scores_depend_on_the_seed(world, tmp_path):
    first, second = (scored(world, tmp_path, "random", seed=seed)[:, 0] for seed in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.4
    assert first.std() == pytest.approx(1.0, abs=0.4)


@pytest.mark.parametrize("centre", [False, True])
def test_activation_similarity_is_the_cosine_of_mean_hidden_states(centre, world, tmp_path):
    inputs = world.inputs()
    rows = inputs.rows(0, N_ROWS)
    row_NH = np.stack([slow_mean(inputs.model, rows.ids(i)) for i in range(N_ROWS)])
    unit_EH = np.stack([slow_mean(inputs.model, unit.input_ids) for unit in inputs.unit_tokens])
    mean_H = row_NH.mean(axis=0) if centre else 0.0
    expected = np.empty((N_ROWS, N_UNITS))
    for i, row in enumerate(row_NH - mean_H):
        for e, unit in enumerate(unit_EH - mean_H):
            expected[i, e] = row @ unit / np.linalg.norm(row) / np.linalg.norm(unit)
    np.testing.assert_allclose(scored(world, tmp_path, "activation_similarity", centre=centre), expected, atol=2e-5)


def slow_mean(model, ids):
    """Return the mean state of positions that predict a token, from the plain Hugging Face model."""
    with torch.inference_mode():
        output = model.model(input_ids=torch.tensor(ids[None].astype(int)), output_hidden_states=True)
    return output.hidden_states[-1][0, :-1].double().numpy().mean(axis=0)
