"""Which trainings are replayed: the recipes of `experiments.worlds`, with other orders of all of its rows.

A run of an environment trains on what its subset keeps; a replay trains on rows of the whole corpus, by the same
recipe, in an order of its own. Rows that carry loss in part only keep their first token with loss.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from experiments.worlds.prepare import prepared
from experiments.worlds.setting import ENVIRONMENTS, LENGTH, Corpus, Kind, Name, open_corpus, target_settings
from experiments.worlds.training import WARMUP_STEPS, Recipe
from grasp.arrays import I64
from grasp.corpus.row_store import RowStore, TokenRows
from grasp.models.tokenizer import HfTokenizer
from grasp.seeds import stream
from grasp.targets import UnitSet, load_units
from grasp.training.adamw import AdamWTraining
from grasp.training.metagradient import Target
from grasp.training.recipe import OptimizerRecipe


@dataclass(frozen=True)
class Rows:
    """Rows of an environment, with the tokens that carry loss there."""

    corpus: Corpus

    @property
    def n_rows(self) -> int:
        return self.corpus.store.n_rows

    @property
    def fingerprint(self) -> str:
        return self.corpus.store.fingerprint

    def rows(self, row_index: I64) -> TokenRows:
        shard = self.corpus.store.rows(row_index)
        starts, lengths = shard.offsets[:-1], np.diff(shard.offsets)
        first_B = np.minimum(self.corpus.first_N[row_index], lengths)
        position = np.arange(len(shard.flat_ids)) - np.repeat(starts, lengths)
        return TokenRows(shard.flat_ids, shard.offsets, shard.table, position >= np.repeat(first_B, lengths))


@dataclass(frozen=True)
class World:
    """What replays of an environment need."""

    name: Name
    kind: Kind
    model: LlamaForCausalLM
    tokenizer: HfTokenizer
    rows: RowStore
    corpus: Corpus
    units: UnitSet
    targets: tuple[Target, ...]

    @classmethod
    def open(cls, name: Name, data: Path, work: Path) -> "World":
        """Prepare model, rows and units, or read them."""
        model, tokenizer = prepared(name, data, work)
        corpus = open_corpus(name, work, tokenizer)
        units = load_units(target_settings(name, work))
        tokens = units.tokenize(tokenizer, LENGTH)
        names = [unit.target for unit in units.units]
        targets = tuple(
            Target(target, [unit for unit, name_of in zip(tokens, names, strict=True) if name_of == target])
            for target in dict.fromkeys(names)
        )
        rows: Any = Rows(corpus)
        return cls(name, ENVIRONMENTS[name], model, tokenizer, rows, corpus, units, targets)

    @cached_property
    def _start(self) -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def training(self) -> AdamWTraining:
        """Begin a training of the model by the recipe of the runs."""
        self.model.load_state_dict(self._start)
        return AdamWTraining(self.model, OptimizerRecipe(**optimizer_settings(self.kind.recipe)))

    def order(self, seed: int) -> list[NDArray[np.int64]]:
        """Rows of every step: a permutation of all rows, again from the beginning where they do not suffice."""
        drawn = stream(seed, "replay", "order").permutation(self.rows.n_rows)
        return [np.array(batch, dtype=np.int64) for batch in self.kind.recipe.batches(drawn.tolist())]


def optimizer_settings(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe of the runs in the terms of the package."""
    return {
        "steps": recipe.steps,
        "batch_rows": recipe.batch_rows,
        "learning_rate": recipe.learning_rate,
        "warmup_steps": WARMUP_STEPS,
        "betas": (0.9, 0.999),
        "weight_decay": 0.0,
        "clip_norm": 1.0,
    }
