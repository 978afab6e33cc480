"""Simple methods equal their definitions."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.baselines.world import scored


@pytest.mark.parametrize(("name", "column", "sign"), [("loss", "loss", -1), ("length", "n_tokens", 1)])
def test_loss_and_length_are_those_of_the_row_table(name, column, sign, world, tmp_path):
    expected = sign * pq.read_table(world.artifact.rows_path)[column].to_numpy()
    np.testing.assert_allclose(scored(world, tmp_path, name)[:, 0], expected, rtol=1e-6)


def test_random_scores_depend_on_the_seed(world, tmp_path):
    first, second = (scored(world, tmp_path, "random", seed=seed)[:, 0] for seed in (0, 1))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.4
    assert first.std() == pytest.approx(1.0, abs=0.4)
