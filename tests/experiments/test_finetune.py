"""Fine-tuning experiment: numerical parts, against laws and slow references."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.finetune.with_runs import predict_runs, rho
from experiments.worlds.evaluate import Method
from experiments.worlds.setting import ENVIRONMENTS, NAMES
from experiments.worlds.training import (
    at_loss,
    packed,
    padded,
)
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.subset_features import SubsetFeatures

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "worlds"


def tiny_llama(layers: int = 1) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2
    )


@pytest.mark.parametrize("name", NAMES)
def test_stored_runs_record_the_settings_of_their_recipe(name):
    kind, info = ENVIRONMENTS[name], RetrainedRuns.open(EXPERIMENT / name).info
    assert (info.role, info.recipe_settings) == (kind.role, kind.recipe.settings())
    assert len(info.subset_ids) == kind.subsets


def test_packed_rows_have_the_states_of_padded_rows():
    torch.manual_seed(0)
    config = tiny_llama(layers=2)
    model = LlamaForCausalLM(config).eval()
    rows = [np.array([5, 6, 7, 8, 2], np.int32), np.array([9, 3], np.int32), np.array([4, 4, 4], np.int32)]
    padded_states, packed_states = (at_loss(model, *form(rows, [2, 1, 1])) for form in (padded, packed))
    assert packed_states[1].tolist() == padded_states[1].tolist() == [7, 8, 2, 3, 4, 4]
    assert torch.allclose(packed_states[0], padded_states[0], atol=1e-6)


def test_the_prediction_of_a_run_does_not_use_that_run():
    generator = np.random.default_rng(0)
    share_BG = generator.dirichlet(np.ones(4), size=10)
    runs, corpus = SubsetFeatures.from_shares(share_BG, 1), SubsetFeatures.from_shares(np.full((1, 4), 0.25), 1)
    values_RT = share_BG[:, :1] + 0.01 * generator.normal(size=(10, 1))
    predictions = predict_runs(runs, corpus, values_RT, 8, 0)
    assert rho(predictions[None], values_RT)[0] > 0.8
    changed = values_RT.copy()
    changed[3] += 100.0
    assert predict_runs(runs, corpus, changed, 8, 0)[3] == pytest.approx(predictions[3])


def test_a_method_sums_standardised_kernels():
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=(2, 30, 4))
    share_BN = (generator.random((5, 30)) < 0.5).astype(float)
    share_BN /= share_BN.sum(axis=1, keepdims=True)
    units_BE, tasks_BT = Method((first, 100.0 * second)).predict(share_BN, ["a", "a", "b", "b"])
    for e in range(4):
        expected = sum((kernel[:, e] - kernel[:, e].mean()) / kernel[:, e].std() for kernel in (first, second))
        assert units_BE[:, e] == pytest.approx(share_BN @ expected)
    of_a = [kernel[:, :2].mean(axis=1) for kernel in (first, second)]
    assert tasks_BT[:, 0] == pytest.approx(share_BN @ sum((a - a.mean()) / a.std() for a in of_a))


def test_negative_scores_can_have_less_weight():
    kernel = np.array([[-4.0], [0.0], [2.0]])
    share = np.eye(3)
    units_BE, _ = Method((kernel,), negative=0.25).predict(share, ["a"])
    expected = np.array([-1.0, 0.0, 2.0])
    assert units_BE[:, 0] == pytest.approx((expected - expected.mean()) / expected.std())
