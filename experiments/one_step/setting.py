"""What the experiment is made of: rows and units of real text, disjoint games, models at the start and trained."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoTokenizer, LlamaForCausalLM

from grasp.artifact.reader import ArtifactReader
from grasp.corpus import RowStore, read_documents
from grasp.errors import SettingsError
from grasp.models.causal_lm import ReferenceModel
from grasp.models.gradients import Example
from grasp.models.tokenizer import HfTokenizer, train_tokenizer
from grasp.pipeline.pipeline import build_artifact
from grasp.seeds import stream
from grasp.settings import BuildSettings, CorpusSettings, ModelSettings, TargetSettings
from grasp.targets import load_units
from grasp.targets.units import UnitTokens
from grasp.training.llama import new_llama
from grasp.training.recipe import TrainingRecipe, named_recipe
from grasp.training.train import train

PLAYERS = 16
SUBSET = 8  # rows of a subset of fixed size
TOKENIZER_CHARS = 10_000_000


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers."""

    corpus: str
    targets: tuple[str, ...]
    documents: int
    units: int  # a target
    unit_tokens: int  # longest unit; a prompt loses its beginning
    steps: tuple[int, ...]  # training before the step, 0: at initialisation
    seeds: int
    batches: int  # games a seed
    rates: tuple[float, ...]  # of subset utilities
    shapley_rates: tuple[float, ...]
    shapley_steps: tuple[int, ...]  # states at which Shapley values are sampled
    permutations: int
    subsets: int
    sketch: int

    def described(self) -> dict[str, Any]:
        """As a record; the corpus by its name, since where it lies says nothing."""
        return asdict(self) | {"corpus": Path(self.corpus).name}

    @property
    def digest(self) -> str:
        """Of all but which rates and states are asked for: those are in the names of what is kept."""
        named = ("steps", "rates", "shapley_rates", "shapley_steps")
        deciding = {key: value for key, value in self.described().items() if key not in named}
        return hashlib.blake2b(json.dumps(deciding, sort_keys=True).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Case:
    """One model and one batch of rows: a game."""

    steps: int
    seed: int
    batch: int
    row_index: NDArray[np.int64]  # the players

    @property
    def name(self) -> str:
        return f"steps-{self.steps}-seed-{self.seed}-batch-{self.batch}"


class World:
    """Rows, units and models; what takes long is kept in a directory and found again."""

    def __init__(self, settings: Settings, work: Path) -> None:
        self.settings, self._work = settings, work / settings.digest
        self._work.mkdir(parents=True, exist_ok=True)
        self.recipe: TrainingRecipe = named_recipe("tiny")
        self.corpus = CorpusSettings(
            path=settings.corpus,
            max_length=self.recipe.shape.context,
            max_rows_per_document=1,
            limit=settings.documents,
        )
        self.tokenizer = self._tokenizer()
        self.store = RowStore.write(self._work / "tokens", self.corpus, self.tokenizer, shard_rows=1024)
        self.targets = TargetSettings(
            names=settings.targets, units_per_target=settings.units, max_length=settings.unit_tokens
        )
        self.unit_tokens: list[UnitTokens] = load_units(self.targets).tokenize(self.tokenizer, settings.unit_tokens)
        self._check()
        self._order = stream(0, "one-step", "rows").permutation(self.store.n_rows)

    @property
    def cache_directory(self) -> Path:
        """Where numbers of these rows are kept."""
        directory = self._work / f"numbers-{self.store.fingerprint[:16]}"
        directory.mkdir(exist_ok=True)
        return directory

    @property
    def units(self) -> list[Example]:
        return [Example(unit.input_ids, unit.first) for unit in self.unit_tokens]

    def players(self, case: Case) -> list[Example]:
        """The rows of a game."""
        rows = self.store.rows(case.row_index)
        return [Example(rows.ids(i)) for i in range(len(rows))]

    def cases(self) -> Iterator[Case]:
        """Every state, seed and batch; no row is in two batches."""
        for steps in self.settings.steps:
            for seed in range(self.settings.seeds):
                for batch in range(self.settings.batches):
                    first = (seed * self.settings.batches + batch) * PLAYERS
                    yield Case(steps, seed, batch, self._order[first : first + PLAYERS])

    def state(self, case: Case) -> dict[str, torch.Tensor]:
        """The weights of a case's model: as drawn, or trained on all rows that do not play."""
        if case.steps == 0:
            return new_llama(self.recipe.shape, case.seed).state_dict()
        recipe = self.recipe.model_copy(update={"steps": case.steps, "warmup_steps": min(20, case.steps - 1)})
        retained = np.ones(self.store.n_rows, dtype=bool)
        retained[self._order[: self._n_players]] = False
        out = self._work / f"model-{case.steps}-{case.seed}"
        trained = train(recipe, self.store, seed=case.seed, retained=retained, out=out)
        return {name: tensor.detach().clone() for name, tensor in trained.model.state_dict().items()}

    def reference(self, case: Case) -> ReferenceModel:
        """The same model as GRASP and gradients read it."""
        return ReferenceModel(self._hugging_face(case), self.tokenizer, batch_tokens=4096)

    def _hugging_face(self, case: Case) -> LlamaForCausalLM:
        model = new_llama(self.recipe.shape, case.seed)
        model.load_state_dict(self.state(case))
        return model

    def artifact(self, case: Case) -> ArtifactReader:
        """What GRASP builds for a case's model, of the whole corpus."""
        name = f"{case.steps}-{case.seed}"
        checkpoint = self._work / f"reference-{name}"
        if not checkpoint.exists():
            part = checkpoint.with_suffix(".part")
            self._hugging_face(case).save_pretrained(part)
            self.tokenizer.save(part)
            part.replace(checkpoint)
        model = ModelSettings(path=str(checkpoint), device="cpu")
        settings = BuildSettings(
            model=model,
            corpus=self.corpus,
            targets=self.targets,
            train="new",
            array_dtype="float32",
            keep_tokens=False,
        )
        return ArtifactReader.open(build_artifact(settings, self._work / f"artifact-{name}"))

    @property
    def _n_players(self) -> int:
        return self.settings.seeds * self.settings.batches * PLAYERS

    def _tokenizer(self) -> HfTokenizer:
        directory = self._work / "tokenizer"
        if not directory.exists():
            part = directory.with_suffix(".part")
            train_tokenizer(self._texts(), vocab_size=self.recipe.shape.vocab_size).save_pretrained(part)
            part.replace(directory)
        return HfTokenizer(AutoTokenizer.from_pretrained(directory), vocab_size=self.recipe.shape.vocab_size)

    def _texts(self) -> Iterator[str]:
        chars = 0
        for document in read_documents(self.corpus):
            if document.text is None:
                raise SettingsError(f"--corpus: {self.settings.corpus} holds token ids; expected text")
            yield document.text
            chars += len(document.text)
            if chars >= TOKENIZER_CHARS:
                return

    def _check(self) -> None:
        needed = self._n_players + self.recipe.batch_rows
        if self.store.n_rows < needed:
            raise SettingsError(
                f"--corpus: {self.settings.corpus} gives {self.store.n_rows} rows, expected at least {needed} for "
                f"{self._n_players} players and the rows beside them; raise --documents, or lower --batches"
            )


def fixed_subsets(case: Case, count: int) -> NDArray[np.bool_]:
    """Distinct subsets of eight of the players, (B, P), drawn for the case."""
    generator = stream(case.seed, "one-step", "subsets", case.batch)
    masks: dict[bytes, NDArray[np.bool_]] = {}
    while len(masks) < count:
        mask = np.zeros(PLAYERS, dtype=bool)
        mask[generator.choice(PLAYERS, size=SUBSET, replace=False)] = True
        masks.setdefault(mask.tobytes(), mask)
    return np.stack(list(masks.values()))
