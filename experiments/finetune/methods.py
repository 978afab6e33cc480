"""Published methods on the pretrained model, through the entry point of `grasp score --method`.

    python -m experiments.finetune.methods documents --data ../shared/data

Scores (N, E) lie in `work/documents-scores`, one file a method. `compare` makes those without gradients itself, and
reads the others if they are there. The artifact is built in bfloat16, which takes half of the time. Its model has an
output layer of its own, equal to its embedding: K-FAC of the last layer has no meaning for a tied one. LESS looks at
the end of a warm-up: 12 steps on 96 rows that are drawn from the corpus, with their Adam moments.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging as hf_logging

from experiments.worlds.artifacts import artifact_of
from experiments.worlds.prepare import model_directory, prepared
from experiments.worlds.run import FOLDER
from experiments.worlds.setting import (
    ENVIRONMENTS,
    NAMES,
    Name,
    open_corpus,
)
from experiments.worlds.training import SHORT, Recipe, load_model, train
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.methods.registry import configure_methods, score_artifact
from grasp.models.tokenizer import HfTokenizer
from grasp.seeds import stream

LAST_BLOCK = ["block:-1", "final_norm"]
FORWARD: dict[str, dict[str, Any]] = {
    "bm25": {"method": "bm25"},
    "loss": {"method": "loss"},
    "length": {"method": "length"},
    "random": {"method": "random"},
}
GRADIENTS: dict[str, dict[str, Any]] = {
    "tracin": {"method": "tracin", "layers": LAST_BLOCK},
    "trak": {"method": "trak", "layers": LAST_BLOCK},
    "influence of the last layer": {"method": "influence", "layers": ["head"], "curvature": "kfac"},
    "ekfac": {"method": "influence", "layers": LAST_BLOCK, "curvature": "ekfac", "memory_mb": 4096},
    "less": {"method": "less", "layers": LAST_BLOCK, "adam": "always", "betas": [0.9, 0.999]},
}
AS_PUBLISHED: dict[str, dict[str, Any]] = {  # all layers but the embedding, 8,192 numbers a row: `decide` alone
    "LESS": GRADIENTS["less"] | {"layers": ["blocks", "final_norm"], "dimension": 8192},
}
METHODS = FORWARD | GRADIENTS | AS_PUBLISHED
AFTER_WARM_UP = ("less",)


def untied(name: Name, work: Path) -> Path:
    """The model with a copy of its embedding as its output layer, where it has none of its own."""
    tied = model_directory(name, work)
    model = load_model(tied)
    if not model.config.tie_word_embeddings:
        return tied
    directory = work / "untied"
    if not directory.exists():
        config = model.config
        config.tie_word_embeddings = False
        apart = LlamaForCausalLM(config)
        apart.load_state_dict(model.state_dict())
        part = directory.with_suffix(".part")
        apart.save_pretrained(part)
        AutoTokenizer.from_pretrained(tied).save_pretrained(part)
        part.replace(directory)
    return directory


def warm_up(name: Name, work: Path, start: Path, tokenizer: HfTokenizer) -> Path:
    """See `warmed_up`: on rows of all sources of an environment."""
    corpus, kind = open_corpus(name, work, tokenizer), ENVIRONMENTS[name]
    recipe = SHORT if kind.recipe.bfloat16 else kind.recipe
    return warmed_up(work / f"{name}-warm-up", start, corpus.rows, corpus.first_N, recipe)


def warmed_up(
    directory: Path, start: Path, rows: Sequence[NDArray[np.int32]], first_N: NDArray[np.int64], recipe: Recipe = SHORT
) -> Path:
    """A checkpoint after one run on rows drawn, with Adam's moments, as the Hugging Face trainer leaves it."""
    if directory.exists():
        return directory
    drawn = stream(0, "finetune", "warm-up").permutation(len(rows))[: recipe.steps * recipe.batch_rows]
    model = load_model(start)
    moments: dict[str, torch.Tensor] = {}
    train(model, rows, first_N, [int(i) for i in drawn], recipe, moments)
    part = directory.with_suffix(".part")
    model.save_pretrained(part)
    AutoTokenizer.from_pretrained(start).save_pretrained(part)
    save_file(moments, part / "optimizer.safetensors")
    last = recipe.learning_rate / (recipe.steps - 1)
    state = {"global_step": recipe.steps, "log_history": [{"learning_rate": last}]}
    (part / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
    part.replace(directory)
    return directory


def pretrained_artifact(name: Name, data: Path, work: Path) -> tuple[ArtifactReader, HfTokenizer]:
    """Built once, with everything that it needs."""
    _, tokenizer = prepared(name, data, work)
    return artifact_of(name, work, untied(name, work), tokenizer), tokenizer


def method_scores(artifact: ArtifactReader, label: str, checkpoints: Sequence[Path] = ()) -> F64:
    """Scores of a method, (N, E); one that looks at no unit has the same for all."""
    (configured,) = configure_methods([label], {label: METHODS[label]}, __file__)
    began, used = time.time(), time.process_time()
    score_by_method = score_artifact(artifact, configured, checkpoints=checkpoints).scores
    score_NE = np.concatenate([block for _, block in score_by_method]).astype(np.float64)
    cost = f"{time.time() - began:.0f} s, {time.process_time() - used:.0f} s of CPU"
    print(f"{artifact.path.name} {label}: {cost}; {'; '.join(score_by_method.account.notes)}", flush=True)
    return np.broadcast_to(score_NE, (artifact.n_rows, len(artifact.units)))


def score(name: Name, data: Path, work: Path, labels: list[str]) -> None:
    """Write the scores that are not there yet."""
    artifact, tokenizer = pretrained_artifact(name, data, work)
    scores = work / f"{name}-scores"
    scores.mkdir(exist_ok=True)
    for label in labels:
        path = scores / f"{label}.npy"
        if not path.exists():
            start = untied(name, work)
            places = [start] if label in GRADIENTS else []
            if label in AFTER_WARM_UP:
                places = [warm_up(name, work, start, tokenizer)]
            np.save(path, method_scores(artifact, label, places).astype(np.float32))


def main() -> None:
    """Parse, score."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--data", type=Path, required=True, help="Folder of pool.parquet and instructions.parquet.")
    parser.add_argument("--work", type=Path, default=FOLDER / "work", help="Model, rows, artifacts and scores.")
    parser.add_argument("--methods", default=",".join(GRADIENTS), help="Some of them, separated by commas.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    score(args.name, args.data, args.work, args.methods.split(","))


if __name__ == "__main__":
    main()
