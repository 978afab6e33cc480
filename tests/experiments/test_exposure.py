"""Mixtures with independent shares and repetition, and coverage of predicted intervals."""

import json
from pathlib import Path

import numpy as np

from experiments.exposure.repeated import drawn
from grasp.runs.retrained import RetrainedRuns

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TRAINED = {
    "chosen.json": "demo-chosen",
    "chosen-pool-groups.json": "pool-groups-chosen",
    "chosen-demo-shares.json": "demo-shares-chosen",
}


def test_equal_shares_are_drawn_from_all_rows_and_from_few():
    codes_N = np.repeat(np.arange(4), 60)
    subsets = drawn(codes_N, 4, 6)
    for large, small in zip(subsets[::2], subsets[1::2], strict=True):
        assert (large.subset_id[-2:], small.subset_id[-2:]) == (small.subset_id[-2:], large.subset_id[-2:])
        shares = [np.bincount(codes_N[subset.row_index], subset.weights, 4) / 240 for subset in (large, small)]
        np.testing.assert_allclose(*shares)
        np.testing.assert_allclose(shares[0].sum(), 1.0)
        assert set(small.row_index) <= set(large.row_index)
    assert min(len(subset.row_index) for subset in subsets[1::2]) < 0.5 * max(
        len(subset.row_index) for subset in subsets[::2]
    )


def test_intervals_of_trained_selections_cover_the_stored_results():
    """Recompute results from the stored runs; predictions would need the artifacts."""
    pairs = []
    for name, environment in TRAINED.items():
        stored = json.loads((EXPERIMENTS / "exposure" / name).read_text())["pairs"]
        trained = RetrainedRuns.open(EXPERIMENTS / "environments" / environment)
        came_BST = trained.task_utilities(trained.targets) - trained.task_reference(trained.targets)
        came = {
            (subset, target): float(came_BST[b, :, t].mean())
            for b, subset in enumerate(trained.subset_ids)
            for t, target in enumerate(trained.targets)
        }
        np.testing.assert_allclose(
            [pair["came"] for pair in stored], [came[pair["subset"], pair["target"]] for pair in stored]
        )
        pairs += stored
    inside = np.array([pair["low"] <= pair["came"] <= pair["high"] for pair in pairs])
    is_chosen_target = np.array([pair["chosen_for"] for pair in pairs])
    assert len(pairs) == 130
    assert inside.mean() >= 0.85
    assert inside[is_chosen_target].mean() >= 0.85
