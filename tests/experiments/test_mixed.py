"""Trained mixtures: those by relevance are significantly better than the corpus, for every corpus and target."""

import json
from pathlib import Path

import numpy as np

from grasp.runs.retrained import RetrainedRuns

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def test_mixtures_by_relevance_beat_the_corpus_and_on_average_the_regressions():
    for world in ("demo-mixed", "pool-groups-mixed"):
        lines = json.loads((EXPERIMENTS / "mixed" / f"{world}.json").read_text())
        trained = RetrainedRuns.open(EXPERIMENTS / "environments" / world)
        change = {(line["method"], line["against"]): [] for line in lines}
        for line in lines:
            change[line["method"], line["against"]].append(line["change"])
            np.testing.assert_allclose(np.mean(line["seeds"]), line["change"])
            assert len(line["seeds"]) == len(trained.info.seeds) == 3
            if line["method"].startswith("relevance") and line["against"] == "the corpus":
                assert line["low"] > 0
        for method in ("relevance", "relevance and runs"):
            assert np.mean(change[method, "log-share regression"]) > 0
            assert np.mean(change[method, "RegMix"]) > 0
