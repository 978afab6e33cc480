"""Reopen the inputs of an artifact's build (settings, tokenizer, model) and verify their fingerprints.

Importing this module does not import torch. Start with `BuildSource`.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grasp.artifact.manifest import MODEL
from grasp.artifact.reader import ArtifactReader
from grasp.corpus.labels import IDS_COLUMN
from grasp.corpus.row_store import RowStore
from grasp.corpus.sources import IN_MEMORY, is_local
from grasp.errors import ArtifactError, SettingsError
from grasp.hub import only_here
from grasp.readers import load_reader
from grasp.settings import BuildSettings, ModelSettings, build_settings, without_foreign_code
from grasp.store.records import JsonModel, read_record
from grasp.targets.units import UnitSet, UnitTokens, stored_tokens, stored_units
from grasp.yaml_files import get_setting

WARM_UP = "warm-up.json"  # in the directory of a model that `grasp.pipeline.warm_up` trained, with the model before

if TYPE_CHECKING:
    from grasp.models.forward_pass import Reference
    from grasp.models.tokenizer import HfTokenizer


class WarmUpRecord(JsonModel):
    """The training of a model to a state in the middle of a training, see `grasp.pipeline.warm_up`.

    Attributes:
        model: path of the model before it.
        fingerprint: of this model.
        corpus: path of the corpus.
        recipe: training by name of setting. None: the default.
        steps: steps that were requested. None: half of the training.
        seed: seed of the order of the rows.
    """

    model: str
    fingerprint: str
    corpus: str
    recipe: dict[str, Any] | None
    steps: int | None
    seed: int


@dataclass(frozen=True)
class BuildSource:
    """The inputs of an artifact's build, loaded lazily.

    Attributes:
        overrides: settings of the user: custom code runs only if they name it too. `model.path`, `model.tokenizer` and
            `corpus.path` are the current paths; paths that only the artifact names are never downloaded.
    Raises:
        ArtifactError: an input is missing, or differs from that of the build.
        ModelError: the model or its tokenizer cannot be loaded.
        SettingsError: the artifact was built with custom code that the user does not name.
    """

    artifact: ArtifactReader
    overrides: Mapping[str, Any] | None = None

    @cached_property
    def settings(self) -> BuildSettings:
        """Return the settings of the build, with the resolved dtype, so that the same weights are loaded anywhere."""
        self.artifact.require_one_corpus()
        manifest = self.artifact.manifest
        location = str(self.artifact.path / "manifest.json")
        settings = build_settings(without_foreign_code(manifest.settings, location, self.overrides), location)
        trained = self.artifact.path / MODEL  # a path of the user is then that of the model before a warm-up
        path = str(trained) if (trained / WARM_UP).exists() else self._current_path("model.path", settings.model.path)
        model = settings.model.model_copy(
            update={
                "path": path,
                "tokenizer": settings.model.tokenizer
                and self._current_path("model.tokenizer", settings.model.tokenizer),
                "dtype": manifest.made_by.get("dtype", "auto"),
                "check": False,
            }
        )
        corpus = settings.corpus.model_copy(update={"path": self._current_path("corpus.path", settings.corpus.path)})
        return settings.model_copy(update={"model": model, "corpus": corpus})

    def _current_path(self, name: str, recorded_path: str) -> str:
        """Return the path that the user gives, else the path that the artifact records."""
        return str(get_setting(self.overrides or {}, name) or self.artifact.resolve_path(recorded_path))

    def _without_downloads(self) -> AbstractContextManager[None]:
        """Forbid downloads unless the user names the model: a path that only the artifact names must be local."""
        overrides, tokenizer = self.overrides or {}, self.settings.model.tokenizer
        if get_setting(overrides, "model.path") and (
            tokenizer is None or get_setting(overrides, "model.tokenizer") or Path(tokenizer).exists()
        ):
            return nullcontext()
        return only_here("get it with `hf download`, or give its place with --set model.path=...")

    def require_corpus_here(self, flag: str) -> None:
        """Check that the corpus can be read without network access, unless the user named it; see `require_here`."""
        if not get_setting(self.overrides or {}, "corpus.path"):
            require_here(self.artifact, self.settings.corpus.path, flag)

    @cached_property
    def rows(self) -> RowStore:
        """Return the rows as the model read them."""
        return self.artifact.open_rows()

    @cached_property
    def tokenizer(self) -> "HfTokenizer":
        """Load the tokenizer of the reference model, without the weights."""
        from grasp.models.checkpoint import tokenizer_of  # noqa: PLC0415 - brings torch
        from grasp.models.tokenizer import HfTokenizer  # noqa: PLC0415

        with self._without_downloads():
            hf_tokenizer = tokenizer_of(self.settings.model)
        vocab_size = self.artifact.manifest.details["vocab_size"]
        tokenizer = HfTokenizer.from_settings(hf_tokenizer, self.settings.model, vocab_size)
        self.artifact.prove(tokenizer=tokenizer.fingerprint)
        return tokenizer

    @cached_property
    def units(self) -> UnitSet:
        """Return all units of the artifact, in the order of its columns."""
        return UnitSet(stored_units(self.artifact.units, self.settings.targets.loss_on))

    @cached_property
    def unit_tokens(self) -> list[UnitTokens]:
        """Return the tokens of every unit; the labels that carry loss are `input_ids[first:]`."""
        table = self.artifact.units
        return stored_tokens(table, table[IDS_COLUMN].to_pylist())

    @cached_property
    def model(self) -> "Reference":
        """Load the reference model, in the dtype and on the device of the build's settings; frozen, in eval mode."""
        with self._without_downloads():
            model = load_reference(self.settings.model)
        reader, fingerprint = model.reader
        self.artifact.prove(**{"model": model.fingerprint(), reader: fingerprint})
        return model

    @cached_property
    def start_settings(self) -> ModelSettings:
        """Return the settings of the model that a training begins with: of a warm-up, those of the model before it."""
        model = self.settings.model
        if self.warm_up is None:
            return model
        return model.model_copy(update={"path": self._current_path("model.path", self.warm_up.model)})

    @cached_property
    def warm_up(self) -> WarmUpRecord | None:
        """Return the record of the warm-up that trained the model of this artifact, or of the artifact `like`."""
        directory = Path(self.settings.model.path)
        is_own = directory == self.artifact.path / MODEL or self.settings.like is not None
        return read_record(directory / WARM_UP, WarmUpRecord) if is_own and (directory / WARM_UP).exists() else None

    def start(self) -> "Reference":
        """Load the model that a training begins with."""
        if (record := self.warm_up) is None:
            return self.model
        with self._without_downloads():
            start = load_reference(self.start_settings)
        if start.fingerprint() != record.fingerprint:
            raise ArtifactError(
                f"{self.start_settings.path}: is not the model that {self.artifact.location} began with; give "
                "its place with --set model.path=..."
            )
        return start


def load_reference(settings: ModelSettings) -> "Reference":
    """Load the reference model: a causal LM, or that of a reader."""
    if settings.reader is not None:
        return load_reader(settings.reader).load_model(settings)  # type: ignore[no-any-return]
    from grasp.models.causal_lm import ReferenceModel  # noqa: PLC0415 - brings torch

    return ReferenceModel.load(settings)


def require_here(artifact: ArtifactReader, corpus: str, flag: str) -> None:
    """Check that the corpus that an artifact names can be read without network access."""
    if not (corpus.startswith(IN_MEMORY) or is_local(corpus)):
        raise SettingsError(
            f"{artifact.location}: was built from {corpus}, which is not on this disk; paths that only an "
            f"artifact names are not downloaded. Give the current place with {flag}"
        )
