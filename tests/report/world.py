"""Artifacts and environments on disk for reports: whole, poor, hostile, or large."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from grasp.artifact.reader import ArtifactReader
from grasp.runs.retrained import RetrainedRuns
from grasp.targets import Unit
from tests.runs.environments import begin_environment, write_arrays

TOPICS = ("games", "science", "travel", "art", None)
# Text that would run, close an element, break a quote, template or shell, turn the line around, or dress as a colour.
HOSTILE = (
    "<script>window.hacked=1</script>",
    "</script><script>window.hacked=2</script>",
    "<img src=x onerror=window.hacked=3>",
    """it's "quoted" & `dollar $HOME` \\ !""",
    "{{ 7*7 }}{% raw %}${7*7}%{y}",
    "\u202egnp.exe\x1b[2J\x00",
    "var(--help)",
    "javascript:window.hacked=4",
    "-->]]></style></title><b>bold",
    None,
)
LINE = "<script>window.hacked=5</script> " + "water " * 170_000  # a megabyte


def units(targets: Sequence[str], per_target: int = 5) -> list[Unit]:
    return [
        Unit(unit_id=f"{target}-{e}", target=target, prompt=f"Question {e}:", completion=" yes", loss_on="completion")
        for target in targets
        for e in range(per_target)
    ]


def write_artifact(
    path: Path,
    *,
    n_rows: int = 200,
    topics: Sequence[str | None] = TOPICS,
    targets: Sequence[str] = ("sciq", "boolq"),
    text: Sequence[str] = ("some text", "more text"),
    corpus: str = "c0ffee",
    labels: bool = True,
    sketches: bool = True,
    model: str = "models/last",
    seed: int = 0,
    pull: float = 2.0,
    worth: Sequence[float | Sequence[float]] = (),
) -> ArtifactReader:
    """Two kernels, three sketches, a topic and a format for every row.

    Args:
        pull: how much a topic matters to a unit, whichever way.
        worth: what each topic is worth to all units, or to those of each target.
    """
    rng = np.random.default_rng(seed)
    topic = np.concatenate([np.arange(len(topics)), rng.integers(0, len(topics), n_rows - len(topics))])
    all_units = units(targets)
    worth_GE = np.array(
        [np.repeat(topic_worth, len(all_units) // np.size(topic_worth)) for topic_worth in worth or [0.0]]
    )
    pull_GE = pull * rng.standard_normal((len(topics), len(all_units))) + worth_GE
    wide = rng.standard_normal((len(topics), 6))
    arrays = {
        "relevance_output_layer": rng.standard_normal((n_rows, len(all_units))) + pull_GE[topic] + 1.0,
        "relevance_pooled": rng.standard_normal((n_rows, len(all_units))),
    }
    if sketches:
        arrays["hidden_sketch"] = rng.standard_normal((n_rows, 6)) + wide[topic]
        arrays["residual_sketch"] = rng.standard_normal((n_rows, 4)) + 0.5
        arrays["product_sketch"] = rng.standard_normal((n_rows, 3))
    columns = {
        "row_id": [f"row-{i}<img src=x onerror=window.hacked=6>" for i in range(n_rows)],
        "doc_id": [f"doc-{i}" for i in range(n_rows)],
        "n_tokens": pa.array(rng.integers(33, 60, n_rows), pa.int32()),
        "loss": np.ones(n_rows, dtype=np.float32),
        "snippet": [text[i % len(text)] for i in range(n_rows)],
    }
    if labels:
        columns["topic"] = [topics[i] for i in topic]
        columns["format"] = [("page", "forum")[i % 2] for i in range(n_rows)]
    arrays = {name: array.astype("f4") for name, array in arrays.items()}
    rows = pa.table(columns)
    settings = {"model": {"path": model}, "corpus": {"path": "corpus.parquet"}, "features": {"top_k": 64}}
    manifest = {
        "settings": settings,
        "fingerprints": {"corpus": corpus},
        "made_by": {"program": "grasp"},
        "skipped": {"rows": {"counts": {"empty": 2}}},
    }
    return write_arrays(path, arrays, rows, all_units, 64, **manifest)


def write_environment(
    path: Path,
    artifact: ArtifactReader,
    *,
    n_subsets: int = 24,
    seeds: tuple[int, ...] = (0, 1),
    done: int | None = None,
    **info,
) -> RetrainedRuns:
    """Utilities that follow the first target's best topic, with noise; `done` runs of them."""
    artifact_units = units(artifact.targets)
    environment, blocks = begin_environment(
        path, artifact, artifact_units, "mixture:topic", n_subsets, seeds=seeds, **info
    )
    relevance_NE = np.concatenate([block for _, block in artifact.array_blocks("relevance_output_layer")])
    mean_BE = np.concatenate([block.weights_BN @ relevance_NE / block.sizes_B[:, None] for block in blocks])
    rng = np.random.default_rng(0)
    for run in environment.pending()[:done]:
        b = environment.subset_ids.index(run.subset_id)
        environment.write_run(run, -3.0 + 0.05 * mean_BE[b] + 0.01 * rng.standard_normal(mean_BE.shape[1]))
    if done is None:
        environment.compact()
    return environment
