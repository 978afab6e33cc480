"""Results on a GPU equal those on the CPU within the stated tolerances. Run with `pytest -m gpu`; skipped without one.

Relevance, sketches: 2e-3 of the largest entry of an array (float32 on both; the order of summation differs).
Unit losses of trained models: 1e-4 nats after 12 steps.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from grasp.artifact.reader import ArtifactReader
from grasp.models.unit_loss import evaluate_units
from grasp.pipeline.pipeline import build_artifact
from grasp.training.train import train
from tests.models.toy import RECIPE, corpus, units
from tests.pipeline.world import EVERY, world

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

ROWS = corpus()


def test_training_on_a_gpu_equals_that_on_a_cpu():
    recipe = RECIPE.model_copy(update={"cuda_autocast": False})
    models = {device: train(recipe, ROWS, seed=3, device=device).model for device in ("cpu", "cuda")}
    expected = evaluate_units(models["cpu"], units())
    np.testing.assert_allclose(evaluate_units(models["cuda"], units()), expected, atol=1e-4)


def test_low_precision_stays_close():
    recipe = RECIPE.model_copy(update={"cuda_autocast": True})
    low = evaluate_units(train(recipe, ROWS, seed=5, device="cuda").model, units())
    full = evaluate_units(train(recipe, ROWS, seed=5).model, units())
    np.testing.assert_allclose(low, full, atol=0.05)


@pytest.mark.parametrize("features", [{}, {"kernels": EVERY}, {"kernels": EVERY, "sample_positions": 10**6}])
def test_a_build_on_a_gpu_equals_that_on_a_cpu(tmp_path: Path, features: dict):
    """Build with moments of a sample, and of the whole corpus with features cached on disk."""
    artifacts = {}
    for device in ("cpu", "cuda"):
        settings = world(tmp_path, train="further", features=features)
        model = settings.model.model_copy(update={"device": device, "dtype": "float32"})
        artifacts[device] = ArtifactReader.open(
            build_artifact(settings.model_copy(update={"model": model}), tmp_path / device)
        )
    rows = np.arange(artifacts["cpu"].n_rows)
    assert artifacts["cpu"].array_names == artifacts["cuda"].array_names
    for name in artifacts["cpu"].array_names:
        expected = artifacts["cpu"].array_rows(name, rows)
        got = artifacts["cuda"].array_rows(name, rows)
        np.testing.assert_allclose(got, expected, atol=2e-3 * np.abs(expected).max(), err_msg=name)
