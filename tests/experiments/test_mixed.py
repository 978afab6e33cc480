"""Mixtures that were trained: a mixture by relevance is better than the corpus for sure, on every world and target."""

import json
from pathlib import Path

import numpy as np

from grasp.runs.retrained import RetrainedRuns

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def test_proposed_mixtures_beat_the_corpus_for_sure_and_the_regressions_on_average():
    for world in ("demo-mixed", "pool-groups-mixed"):
        lines = json.loads((EXPERIMENTS / "mixed" / f"{world}.json").read_text())
        trained = RetrainedRuns.open(EXPERIMENTS / "environments" / world)
        change = {(one["method"], one["against"]): [] for one in lines}
        for one in lines:
            change[one["method"], one["against"]].append(one["change"])
            np.testing.assert_allclose(np.mean(one["seeds"]), one["change"])
            assert len(one["seeds"]) == len(trained.info.seeds) == 3
            if one["method"].startswith("relevance") and one["against"] == "the corpus":
                assert one["low"] > 0
        for method in ("relevance", "relevance and runs"):
            assert np.mean(change[method, "log-share regression"]) > 0
            assert np.mean(change[method, "RegMix"]) > 0
