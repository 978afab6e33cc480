"""Mixtures with independent shares and repetition, and coverage of predicted intervals."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from experiments.exposure import repetition
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


def test_the_worth_of_repeated_tokens_is_read_from_the_losses_of_new_ones():
    """Losses of a world in which each repeated token is worth .6 of a new one up to 8 times, and nothing beyond."""
    loss_at = {1.0: 4.0} | {1 / part: 4.0 + 0.2 * np.log(part) for part in repetition.DILUTED}
    loss_of = {f"share-{part}": loss_at[1 / part] for part in repetition.DILUTED} | {"times-1": 4.0}
    planted = {times: 0.6 if times <= 8 else 0.0 for times in repetition.TIMES[1:]}
    for times, worth in planted.items():
        loss_of[f"times-{times}"] = 4.0 - 0.2 * np.log(1 / times + worth * (1 - 1 / times))
    got = repetition.worth_of_repeated(loss_of)
    assert {times: got[times] for times in (4, 8, 16)} == pytest.approx({4: 0.6, 8: 0.6, 16: 0.0})
    assert 8 < repetition.most_repetitions(got) < 16
    stored = json.loads((EXPERIMENTS / "exposure" / "repetition.json").read_text())
    for target, kind in product(("science", "sciq"), ("plain", "corrected")):
        values = {name: entry["value"] for name, entry in stored["targets"][target][kind].items()}
        excess = {name.removeprefix("excess "): value for name, value in values.items() if name.startswith("excess")}
        for times, value in repetition.worth_of_repeated(excess).items():
            assert values[f"worth {times}"] == pytest.approx(value, abs=5e-3)
