"""What the experiment is made of: an artifact, documents that nobody trains on, units that models are scored by.

Shape letters: N rows of the artifact.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.corpus.documents import Corpus
from grasp.corpus.sources import open_source
from grasp.errors import SettingsError
from grasp.files import temporary_path, write_atomically
from grasp.methods.contract import MethodInputs
from grasp.predict.default_protocol import DEFAULT_PROTOCOL
from grasp.predict.scoring_rule import ScoringProtocol, load_protocol
from grasp.retraining.settings import RetrainSettings, retrain_settings
from grasp.seeds import stream
from grasp.select.export import corpus_settings, iter_records, select_documents, stored_rows
from grasp.select.record_files import FileFormat, write_corpus
from grasp.settings import CorpusSettings, TargetSettings
from grasp.store.locks import locked
from grasp.targets import Unit, load_units

HELD_OUT = "held_out"  # the target that measures corpus loss


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers."""

    artifact: Path
    corpus: str | None = None  # where the corpus lies now; none: where the artifact was built from
    protocol: Path | None = None  # none: the built-in rule
    label: str = "topic"  # of mixtures
    first_target: str = "sciq"  # curated for alone, and together with all others
    budgets: tuple[float, ...] = (0.2, 0.4)
    seeds: tuple[int, ...] = (0, 1, 2)
    draws: int = 3  # random selections of each size
    held_out: int = 512  # documents
    fresh_units: int = 256  # of each target, beside those that were selected for
    recipe: str = "tiny"
    overrides: Mapping[str, Any] = field(default_factory=dict)  # of the recipe


@dataclass(frozen=True)
class ScoredUnit:
    """A multiple-choice unit, and where its choices are among the units of the environment."""

    unit_id: str
    target: str
    prompt: str
    choices: tuple[str, ...]
    gold: int
    is_fresh: bool  # not among the units that were selected for


class World:
    """One corpus: its pool, its held-out documents, its units. What is written is found again."""

    def __init__(self, settings: Settings, work: Path) -> None:
        self.settings, self.work = settings, work
        work.mkdir(parents=True, exist_ok=True)
        self.artifact = ArtifactReader.open(settings.artifact)
        if settings.first_target not in self.artifact.targets:
            raise SettingsError(
                f"--target: got {settings.first_target!r}, {settings.artifact} has {', '.join(self.artifact.targets)}"
            )
        if settings.held_out >= self.artifact.n_rows:
            raise SettingsError(f"--held-out: got {settings.held_out}, the corpus has {self.artifact.n_rows} rows")
        self._same_as_before()

    def _same_as_before(self) -> None:
        """What is kept in `work` was made of this artifact, these held-out documents and units, this label.

        Raises:
            SettingsError: of others.
        """
        settings, path = self.settings, self.work / "setting.json"
        identity = {
            "--artifact": dict(self.artifact.manifest.fingerprints),
            "--by": settings.label,
            "--held-out": settings.held_out,
            "--fresh-units": settings.fresh_units,
            "--recipe": [settings.recipe, dict(settings.overrides)],
        }
        text = json.dumps(identity, indent=1) + "\n"
        if not path.exists():
            write_atomically(path, text.encode())
        stored = json.loads(path.read_text(encoding="utf-8"))
        changed = [name for name, value in json.loads(text).items() if stored.get(name) != value]
        if changed:
            raise SettingsError(f"{self.work}: was made with another {', '.join(changed)}; give another --work")

    # ------------------------------------------------------------------------------------------------- rows

    @cached_property
    def row_ids(self) -> pa.ChunkedArray:
        return pa.chunked_array([batch.column(0) for batch in self.artifact.row_batches(["row_id"])])

    @cached_property
    def pool_N(self) -> NDArray[np.bool_]:  # noqa: N802 - a shape suffix
        """Rows that may be chosen: all but those of the held-out documents."""
        doc_ids = pa.chunked_array([batch.column(0) for batch in self.artifact.row_batches(["doc_id"])])
        codes_N = doc_ids.combine_chunks().dictionary_encode().indices.to_numpy()
        return ~np.isin(codes_N, held_out_documents(int(codes_N.max()) + 1, self.settings.held_out))

    def budget(self, share: float) -> int:
        """Rows of a selection."""
        return round(share * int(self.pool_N.sum()))

    def tokens_of(self, row_index: NDArray[np.int64]) -> int:
        """Tokens of some rows, each once."""
        return int(self._n_tokens[row_index].sum())

    @cached_property
    def _n_tokens(self) -> NDArray[np.int64]:
        batches = self.artifact.row_batches(["n_tokens"])
        return np.concatenate([np.asarray(batch.column(0), dtype=np.int64) for batch in batches])

    @cached_property
    def material(self) -> MethodInputs:
        """Rows as the artifact cut them, held-out ones among them, and its tokenizer."""
        return MethodInputs(self.artifact)

    # ------------------------------------------------------------------------------- what the models are given

    @cached_property
    def corpus(self) -> CorpusSettings:
        return corpus_settings(self.artifact, self.settings.corpus)

    @cached_property
    def targets(self) -> TargetSettings:
        return TargetSettings.model_validate(self.artifact.manifest.settings["targets"])

    @property
    def tokenizer_path(self) -> str:
        model = self.artifact.manifest.settings["model"]
        return str(model["tokenizer"] or model["path"])

    @cached_property
    def protocol(self) -> ScoringProtocol:
        path = self.settings.protocol
        return DEFAULT_PROTOCOL if path is None else load_protocol(path)

    def pool_corpus(self) -> Path:
        """The corpus without the held-out documents, written once."""
        out = self.work / "pool"
        with locked(self.work / ".pool.lock", wait=True):
            if not out.exists():
                corpus = Corpus(open_source(self.corpus.path, self.corpus.split), self.corpus)
                with stored_rows(self.artifact, corpus, lambda: self.material.tokenizer, temporary_path(out)) as rows:
                    documents = select_documents(rows, self.pool_N, "any")
                records = iter_records(self.corpus, documents.mask_M)
                write_corpus(out, FileFormat(), "documents", records, documents.tokens, {})
        return out

    def retraining(self, subsets: Path) -> RetrainSettings:
        """How every model is trained and scored."""
        corpus = self.corpus.model_dump(mode="json") | {"path": str(self.pool_corpus())}
        targets = {"names": [str(self.units_file())], "units_per_target": None, "max_length": self.targets.max_length}
        return retrain_settings(
            {
                "recipe": self.settings.recipe,
                "overrides": dict(self.settings.overrides),
                "corpus": corpus,
                "tokenizer": self.tokenizer_path,
                "targets": targets,
                "subsets": str(subsets),
                "seeds": list(self.settings.seeds),
                "role": "held-out",
                "threads": 1,
            }
        )

    # ------------------------------------------------------------------------------------------------ units

    @cached_property
    def scored_units(self) -> tuple[ScoredUnit, ...]:
        """Units with choices, target after target: those that were selected for, then as many fresh ones as asked."""
        drawn = load_units(self.targets.model_copy(update={"units_per_target": None})).units
        selected = set(self.artifact.units["unit_id"].to_pylist())
        scored: list[ScoredUnit] = []
        for target in self.artifact.targets:
            units = [unit for unit in drawn if unit.target == target]
            fresh = [unit for unit in units if unit.unit_id not in selected][: self.settings.fresh_units]
            scored += [with_choices(unit, False) for unit in units if unit.unit_id in selected]
            scored += [with_choices(unit, True) for unit in fresh]
        return tuple(scored)

    def units_file(self) -> Path:
        """Every choice of every unit, and the held-out documents, as lines that `grasp retrain` reads."""
        path = self.work / "units.jsonl"
        if not path.exists():
            lines = [*self._choice_lines(), *self._held_out_lines()]
            write_atomically(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
        return path

    def completion_tokens(self, texts: list[str]) -> NDArray[np.int64]:
        """Tokens of continuations, encoded apart as units are."""
        return np.array([len(ids) for ids in self.material.tokenizer.encode(texts)], dtype=np.int64)

    def _choice_lines(self) -> Iterator[dict[str, str]]:
        for unit in self.scored_units:
            for k, answer in enumerate(unit.choices):
                yield {
                    "task": unit.target,
                    "prompt": unit.prompt,
                    "completion": answer,
                    "unit_id": choice_id(unit.unit_id, k),
                }

    def _held_out_lines(self) -> Iterator[dict[str, str]]:
        """The beginnings of held-out documents, as long as a unit may be."""
        held_out = np.flatnonzero(~self.pool_N)
        rows = self.material.rows_at(held_out)
        names = self.row_ids.take(pa.array(held_out)).to_pylist()
        for i, name in enumerate(names):
            text = self._that_fits(rows.ids(i).tolist())
            if text.strip():
                yield {"task": HELD_OUT, "prompt": "", "completion": text, "unit_id": f"{HELD_OUT}:{name}"}

    def _that_fits(self, ids: list[int]) -> str:
        """Text of the first tokens that is no longer than a unit when it is encoded again."""
        most = self.targets.max_length - 1
        for length in range(min(most, len(ids)), 0, -1):
            (text,) = self.material.tokenizer.decode([ids[:length]])
            text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # a character that the cut went through
            if len(self.material.tokenizer.encode([text])[0]) <= most:
                return text
        return ""


def held_out_documents(n_documents: int, count: int) -> NDArray[np.int64]:
    """Positions of documents that are kept apart, the same for the same corpus; more of them hold fewer of them."""
    return stream(0, "curation", "held-out").permutation(n_documents)[:count]


def choice_id(unit_id: str, k: int) -> str:
    """Name of choice k of a unit."""
    return f"{unit_id}/{k}"


def with_choices(unit: Unit, is_fresh: bool) -> ScoredUnit:
    """A unit with its choices.

    Raises:
        SettingsError: it has none that follow its prompt.
    """
    if unit.gold is None or len(unit.choices) < 2 or unit.choices[unit.gold] != unit.completion:
        raise SettingsError(
            f"unit {unit.unit_id!r} of {unit.target}: has no choices that follow its prompt, so no accuracy; name "
            "multiple-choice targets"
        )
    return ScoredUnit(unit.unit_id, unit.target, unit.prompt, unit.choices, unit.gold, is_fresh)
