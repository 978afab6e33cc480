"""Where scores are compared with retraining: those of the pretrained model, and a from-scratch one.

The from-scratch one is `cc-topic`: 0.36 M parameters, 10,482 pages, 64 subsets with two seeds, and of its targets the
two that things may be chosen on. It needs their reference model, rows and artifact (experiments/lds_main/run.sh).

Shape letters: N rows, E units, B subsets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer, LlamaForCausalLM

from experiments.finetune.features import Features, features_of
from experiments.finetune.methods import FORWARD, method_scores, pretrained_artifact
from experiments.finetune.scores import Sides, input_kernel, pooled_kernel, token_kernel
from experiments.kernel_names import KERNEL_OF
from experiments.worlds.artifacts import shares
from experiments.worlds.prepare import prepared
from experiments.worlds.setting import ENVIRONMENTS, LENGTH, Name, open_corpus, target_settings
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.corpus import RowStore
from grasp.models.tokenizer import HfTokenizer
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import Utilities
from grasp.settings import TargetSettings
from grasp.targets import load_units

Rows = list[NDArray[np.int32]]
MATRICES = ("token", "input", "pooled")  # what a build computes


@dataclass(frozen=True)
class World:
    """Rows and units with their features, the runs that there are, and what is computed of either.

    Attributes:
        built: the kernels of a build, and published methods that need no gradients; each makes a matrix (N, E).
    """

    name: str
    environment: RetrainedRuns
    sides: Sides
    built: dict[str, Callable[[], F64]]
    utilities: Utilities
    share_BN: F64  # of each subset that has a run; adds up to 1
    scores: Path  # where they are kept


def pretrained(name: Name, data: Path, work: Path, environments: Path) -> World:
    """One environment of the pretrained model; its first seed."""
    artifact, reader = pretrained_artifact(name, data, work)
    model, _ = prepared(name, data, work)
    kind = ENVIRONMENTS[name]
    bfloat16 = kind.recipe.bfloat16
    corpus = open_corpus(name, work, reader)
    units = load_units(target_settings(name, work))
    tokens = units.tokenize(reader, LENGTH)
    rows = _features(work / f"{kind.rows}-rows.npz", model, corpus.rows, corpus.first_N, bfloat16=bfloat16)
    ids, firsts = [t.input_ids for t in tokens], [t.first for t in tokens]
    unit_features = _features(work / f"{kind.rows}-units.npz", model, ids, firsts, bfloat16=bfloat16)
    sides = Sides(rows, unit_features, model.config.vocab_size)
    environment = RetrainedRuns.open(environments / name)
    utilities = environment.utilities(seeds=(0,), partial=True)
    return World(
        name,
        environment,
        sides,
        {
            "token": lambda: token_kernel(sides),
            "input": lambda: input_kernel(sides),
            "pooled": lambda: pooled_kernel(sides),
            **_published(artifact, utilities),
        },
        utilities,
        shares(environment, corpus.store, utilities),
        work / f"{name}-scores",
    )


def from_scratch(work: Path, environment_path: Path) -> World:
    """cc-topic, on the targets that things may be chosen on; `work` has `reference`, `tokens` and `artifact`."""
    environment = RetrainedRuns.open(environment_path)
    store = RowStore.open(work / "tokens")
    artifact = ArtifactReader.open(work / "artifact")
    environment.check_corpus(store.fingerprint, str(work / "tokens"))
    dev = [target for target in artifact.targets if environment.role_of(target) == "dev"]
    settings = TargetSettings.model_validate(artifact.manifest.settings["targets"]).model_copy(update={"names": dev})
    units = load_units(settings)
    model = LlamaForCausalLM.from_pretrained(work / "reference")
    tokenizer = AutoTokenizer.from_pretrained(work / "reference")
    reader = HfTokenizer(tokenizer, vocab_size=model.config.vocab_size)
    rows = [
        ids for k in range(store.n_shards) for shard in [store.shard(k)] for ids in map(shard.ids, range(len(shard)))
    ]
    tokens = units.tokenize(reader, settings.max_length)
    plain = {"residuals": False, "bfloat16": False}  # sparse residuals are those of its artifact
    sides = Sides(
        _features(work / "rows.npz", model, rows, np.ones(len(rows), np.int64), **plain),
        _features(work / "units.npz", model, [t.input_ids for t in tokens], [t.first for t in tokens], **plain),
        model.config.vocab_size,
    )
    columns = np.concatenate([artifact.unit_columns(target) for target in dev])
    utilities = environment.utilities().select(*dev)
    return World(
        environment.name,
        environment,
        sides,
        {kernel: lambda kernel=kernel: _array(artifact, kernel, columns) for kernel in MATRICES}
        | _published(artifact, utilities),
        utilities,
        shares(environment, store, utilities),
        work / "scores",
    )


def _published(artifact: ArtifactReader, utilities: Utilities) -> dict[str, Callable[[], F64]]:
    """Methods of the product on the units that were measured, which the artifact may have more of."""
    columns = np.concatenate([artifact.unit_columns(target) for target in dict.fromkeys(utilities.targets)])
    assert tuple(artifact.units["unit_id"].take(columns).to_pylist()) == utilities.unit_ids
    return {label: lambda label=label: method_scores(artifact, label)[:, columns] for label in FORWARD}


def _array(artifact: ArtifactReader, kernel: str, columns: NDArray[np.int64]) -> F64:
    blocks = artifact.array_blocks(artifact.relevance_name(KERNEL_OF.get(kernel, kernel)), columns=columns)
    return np.concatenate([block for _, block in blocks]).astype(np.float64)


def _features(
    path: Path, model: LlamaForCausalLM, ids: Rows, first_N: Sequence[int] | NDArray[np.int64], **how: bool
) -> Features:
    """Kept on disk."""
    if not path.exists():
        features_of(model, ids, first_N, **how).save(path)
    return Features.load(path)
