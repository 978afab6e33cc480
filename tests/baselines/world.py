"""A small world for methods: a trained model with checkpoints, its artifact, and retraining runs.

The first rows of the corpus have the texts of the units: row 3 is the prompt and the completion of unit `facts-3`.
"""

import json
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from grasp.artifact.reader import ArtifactReader
from grasp.entry_points import package_of
from grasp.methods.contract import AlignedRuns, MethodInputs, MethodScores
from grasp.methods.registry import ConfiguredMethod, configure_methods, registered_methods, score_rows
from grasp.models.tokenizer import train_tokenizer
from grasp.pipeline.pipeline import build_artifact
from grasp.retraining.settings import retrain_settings
from grasp.retraining.worker import retrain
from grasp.runs.alignment import Alignment
from grasp.runs.retrained import RetrainedRuns
from grasp.settings import build_settings
from tests.faults import Killed
from tests.pipeline.world import TOPICS, texts, write_targets

METHODS = [name for name, entry in registered_methods().items() if package_of(entry) == "grasp-attribution"]
N_ROWS = 40
N_UNITS = 6
SHAPE = {"vocab_size": 300, "hidden": 16, "intermediate": 32, "layers": 2, "heads": 2, "context": 64}


@dataclass(frozen=True)
class World:
    """Paths of the files of the world."""

    root: Path

    @property
    def environment(self) -> RetrainedRuns:
        return RetrainedRuns.open(self.root / "env")

    @cached_property
    def artifact(self) -> ArtifactReader:
        return ArtifactReader.open(self.root / "art")

    def inputs(self, **changes: Any) -> MethodInputs:
        """Open the artifact with its retraining runs."""
        scored = Alignment.from_runs(self.environment, self.artifact)
        known = AlignedRuns.from_alignment(scored, self.environment.utilities())
        return replace(MethodInputs(self.artifact, runs=known), **changes)


def make(root: Path) -> World:
    """Write texts, targets, tokenizer, eight retrained subsets, and the artifact of the reference model."""
    targets = write_targets(root / "facts.jsonl", n_units=N_UNITS)
    units = [json.loads(line) for line in targets.read_text().splitlines()]
    rows = [unit["prompt"] + unit["completion"] for unit in units] + texts(N_ROWS - N_UNITS)
    with (root / "corpus.jsonl").open("w") as file:
        for i, text in enumerate(rows):
            file.write(json.dumps({"row_id": f"row-{i}", "text": text, "topic": TOPICS[i % 3]}) + "\n")
    train_tokenizer(rows, vocab_size=300).save_pretrained(root / "tokenizer")
    corpus = {"path": str(root / "corpus.jsonl"), "max_length": 64, "max_rows_per_document": 1}
    named = {"names": [str(targets)], "max_length": 64}
    retrain(
        retrain_settings(
            {
                "tokenizer": str(root / "tokenizer"),
                "overrides": {"steps": 24, "warmup_steps": 2, "batch_rows": 4, "shape": SHAPE},
                "corpus": corpus,
                "targets": named,
                "family": "uniform:0.5",
                "n_subsets": 8,
                "seeds": [0],
                "checkpoints": [8, 16],
                "device": "cpu",
                "threads": 1,
            }
        ),
        root / "env",
    )
    features = {"top_k": 12, "hidden_width": 8, "residual_width": 8, "sample_positions": 200}
    build_artifact(
        build_settings(
            {
                "model": {"path": str(root / "env/reference/seed-0"), "threads": 1, "device": "cpu"},
                "corpus": corpus,
                "targets": named,
                "features": features,
                "shard_rows": 16,
            }
        ),
        root / "art",
    )
    return World(root)


def configured_method(name: str, **settings: Any) -> ConfiguredMethod:
    """Return a method with settings, including `seed`."""
    (result,) = configure_methods([name], {name: settings})
    return result


def matrix(result: MethodScores) -> np.ndarray:
    """Return all stored scores in float64."""
    return np.concatenate([block for _, block in result]).astype(np.float64)


def copies(inputs: MethodInputs) -> np.ndarray:
    """Return the index (E,) of the row with the text of each unit."""
    return np.array([int(unit.unit_id.removeprefix("facts-")) for unit in inputs.units.units])


def scored(world: World, place: Path, name: str, **settings: Any) -> np.ndarray:
    """Return all scores of a method with these settings in float64, computed or read from the cache."""
    return matrix(score_rows(configured_method(name, **settings), world.inputs(), place))


@dataclass
class Clock:
    """Progress that records the rows of each stage, and kills the run after a number of blocks."""

    left: int | None = None
    announced: Counter[str] = field(default_factory=Counter)

    def stage(self, name: str, *, rows: int, tokens: int) -> None:
        del tokens
        self.announced[name.partition(",")[0]] += rows

    def advance(self, rows: int, tokens: int) -> None:
        del rows, tokens
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                raise Killed
