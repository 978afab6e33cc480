"""Datamodels predict planted linear utilities out of fold, a null world at chance, and are marked as oracles."""

from dataclasses import replace

import numpy as np
import pytest

from grasp.methods.contract import AlignedRuns, MethodInputs
from grasp.methods.registry import method_predictions
from grasp.predict.families import parse_family
from grasp.runs.metrics import spearman
from tests.baselines.world import N_ROWS, configured_method


def planted(world, utility, n_subsets=64, seed=0):
    """Return the artifact with runs whose utilities are a function of the masks plus small noise."""
    known = world.inputs().required_runs
    (block,) = parse_family("uniform:0.5").draw(n_subsets, n_rows=N_ROWS, seed=seed, purpose="planted", block=n_subsets)
    masks = block.weights_BN.toarray()
    rng = np.random.default_rng(seed)
    values = np.stack([utility(masks, e) for e in range(6)], axis=1)
    values = values + 0.05 * values.std(axis=0) * rng.normal(size=values.shape) + 1e-9 * rng.normal(size=values.shape)
    utilities = replace(known.utilities, values_BSE=values[:, None], subset_ids=block.subset_ids)
    environment = known.runs
    info = environment.info.model_copy(update={"subset_ids": block.subset_ids})
    environment = type(environment)(environment.path, info)
    return MethodInputs(world.artifact, runs=AlignedRuns(environment, utilities, (block,))), values


def few_rows(masks, e):
    return 2.0 * masks[:, e] - 3.0 * masks[:, e + 7] + masks[:, 20]


def run(inputs, place, **settings):
    subsets = inputs.required_runs.subsets
    return method_predictions(configured_method("datamodels", **settings), inputs, subsets, place)


@pytest.mark.parametrize("penalty", ["lasso", "ridge"])
def test_planted_linear_utilities_are_predicted_out_of_fold(penalty, world, tmp_path):
    inputs, values = planted(world, few_rows)
    result = run(inputs, tmp_path, penalty=penalty)
    assert spearman(result.values_BE, values).min() > (0.9 if penalty == "lasso" else 0.6)
    assert result.method_role == "supervised oracle"


def test_utilities_that_masks_do_not_explain_stay_at_chance(world, tmp_path):
    noise = np.random.default_rng(3).normal(size=(64, 6))
    inputs, values = planted(world, lambda masks, e: noise[:, e])
    result = run(inputs, tmp_path)
    rho = np.nan_to_num(spearman(result.values_BE, values))  # nan: no coefficient is left, so it ranks nothing
    assert abs(rho.mean()) < 0.25


def test_shares_of_a_label_can_be_features(world, tmp_path):
    topic = np.arange(N_ROWS) % 3
    inputs, values = planted(world, lambda masks, e: (masks * (topic == e % 3)).sum(axis=1) / masks.sum(axis=1))
    result = run(inputs, tmp_path, sees="topic", penalty="ridge")
    assert spearman(result.values_BE, values).min() > 0.9
    assert result.notes[0].startswith("datamodels: covers 3 topic-share-of-subset; ridge on 64 subsets")
