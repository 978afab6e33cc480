"""Read the inputs of a build: write the rows of the corpus to disk, tokenise the questions, and load the model.

A row is a training sequence of the corpus. A unit is one question of a target with its answer, or more generally one
element of it that has a score. Start with `prepare_inputs`, which returns `Inputs`.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from grasp.artifact.reader import ArtifactReader
from grasp.corpus.conversations import column_notes
from grasp.corpus.documents import Corpus
from grasp.corpus.row_store import RowStore
from grasp.corpus.sources import Source, open_source
from grasp.errors import ModelError, SettingsError
from grasp.files import differences
from grasp.kernels.kernel import kernel_class
from grasp.models.batch import Batch
from grasp.models.build_source import load_reference
from grasp.models.causal_lm import ReferenceModel, tokenizer_and_context
from grasp.models.checkpoint import check_readable
from grasp.models.forward_pass import Reference, Units
from grasp.models.tokenizer import HfTokenizer
from grasp.pipeline.model_pass import ModelPass
from grasp.progress import Progress
from grasp.readers import load_reader
from grasp.settings import BuildSettings
from grasp.targets import Unit, UnitSet, load_units
from grasp.targets.load import unread_files_notes
from grasp.targets.margins import refuse_accuracy
from grasp.targets.units import UnitTokens
from grasp.text import skipped_lines
from grasp.training.fine_tuning_recipe import FineTuningRecipe, default_recipe


@dataclass(frozen=True)
class Inputs:
    """All inputs of a build.

    Attributes:
        settings: settings of the build, completed from model and corpus.
        model_pass: the model, and the features that it computes for the kernels.
        store: rows of the corpus, on disk.
        unit_set: units of all targets.
        unit_inputs: the units as inputs of the model: token ids, or other inputs of a reader.
        identity: everything that determines the numbers of the artifact, as JSON: `fingerprints` of the model, its
            input encoding (e.g. `tokenizer`), the corpus and the targets; `dtype` of the model; `features`, the
            settings of the kernels; and `rounding`, what determines the last digits: device, batch sizes, threads.
    """

    settings: BuildSettings
    model_pass: ModelPass
    store: RowStore
    unit_set: UnitSet
    unit_inputs: Units
    identity: dict[str, Any]

    @property
    def model(self) -> Reference:
        """Return the model that reads the corpus."""
        return self.model_pass.model

    @property
    def unit_tokens(self) -> Sequence[UnitTokens]:
        """Return the token ids of the units; empty if a reader read them."""
        return self.unit_inputs if isinstance(self.unit_inputs, Sequence) else ()

    @cached_property
    def units(self) -> Batch:
        """Return the features of the units; the model is run on them at the first access."""
        return self.model_pass.units(self.unit_inputs, [unit.unit_id for unit in self.unit_set.units])


@dataclass(frozen=True, slots=True)
class InMemory:
    """Model, corpus and targets passed as objects; the settings name them by fingerprint instead of a path."""

    model: Reference | None = None
    source: Source | None = None
    units: Sequence[Unit] = ()


ON_DISK = InMemory()  # all inputs have a path


def prepare_inputs(
    settings: BuildSettings,
    tokens: Path,
    progress: Progress,
    *,
    in_memory: InMemory = ON_DISK,
    replace: bool = False,
) -> Inputs:
    """Write the rows to disk, load the model, and complete the settings from model and corpus.

    Args:
        settings: settings of the build.
        tokens: directory of the rows.
        progress: receives stages, notes and numbers of rows.
        in_memory: model, corpus and targets that are passed as objects.
        replace: delete rows of another corpus in `tokens`.
    Raises:
        GraspError: an input cannot be read, or they do not fit each other, e.g. rows that are longer than the context
            of the model.
    """
    model: Reference
    unit_inputs: Units
    if settings.model.reader is None:
        settings, model, store, unit_set, unit_inputs = _prepare_text(
            settings, tokens, progress, in_memory, replace=replace
        )
    else:
        model = in_memory.model or load_reference(settings.model)
        progress.stage("rows", rows=None, tokens=None)
        unit_set, unit_inputs, store = load_reader(settings.model.reader).read(
            settings, model, tokens, replace=replace, progress=lambda rows: progress.advance(rows, 0)
        )
    progress.stage("units", rows=None, tokens=None)
    encoding, encoding_fingerprint = model.reader  # e.g. `tokenizer`
    identity = {
        "fingerprints": {
            "model": model.fingerprint(),
            encoding: encoding_fingerprint,
            "corpus": store.fingerprint,
            "targets": unit_set.fingerprint,
        },
        "dtype": str(model.dtype).removeprefix("torch."),
        "features": settings.features.model_dump(mode="json"),
        "rounding": {"device": model.device.type, **model.batching},
    }
    return Inputs(settings, ModelPass.choose(model, settings.features), store, unit_set, unit_inputs, identity)


def identity_of(artifact: ArtifactReader) -> dict[str, Any]:
    """Return the `Inputs.identity` that a manifest records, without `rounding`."""
    manifest = artifact.manifest
    return {
        "fingerprints": manifest.fingerprints,
        "dtype": manifest.made_by.get("dtype"),
        "features": dict(artifact.feature_settings),
    }


def identity_changes(before: Mapping[str, Any], now: Mapping[str, Any], fingerprints: Iterable[str]) -> list[str]:
    """Return lines `field: was X, now Y` on what changes the meaning of numbers, with these of the fingerprints."""
    names = sorted(fingerprints)
    earlier, current = (
        {
            "fingerprints": {name: identity["fingerprints"].get(name) for name in names},
            "model.dtype": identity["dtype"],
            "features": identity["features"],
        }
        for identity in (before, now)
    )
    # with `like` the length of the training is that of the other artifact, and unset
    features = earlier["features"], current["features"]
    unset = [name for name in ("learning_rate_sum", "batch_rows") if None in [side.get(name) for side in features]]
    for side in (earlier, current):
        side["features"] = {name: value for name, value in side["features"].items() if name not in unset}
    return list(differences(earlier, current))


def _prepare_text(
    settings: BuildSettings,
    tokens: Path,
    progress: Progress,
    in_memory: InMemory,
    *,
    replace: bool,
) -> tuple[BuildSettings, ReferenceModel, RowStore, UnitSet, Sequence[UnitTokens]]:
    """Return completed settings, model, rows, units and their tokens of a language model.

    Texts are tokenised before the weights of the model are loaded, so that errors in them are reported early.
    """
    model = in_memory.model
    assert isinstance(model, ReferenceModel | None)
    if model is None:
        check_readable(settings.model.path)
    unit_set = load_units(settings.targets, in_memory.units)
    for note in unread_files_notes(settings.targets):
        progress.note(note)
    refuse_accuracy(unit_set)
    nonlinear = [name for name in settings.features.kernels if not kernel_class(name).is_linear]
    if nonlinear and any(unit.others for unit in unit_set.units):
        raise SettingsError(
            f"features.kernels: got {', '.join(nonlinear)}, which is not linear in the gradient of a unit, so margins "
            "cannot be combined from answers; use --rule default, or targets without @margin"
        )
    corpus = Corpus(in_memory.source or open_source(settings.corpus.path, settings.corpus.split), settings.corpus)
    tokenizer, context = (model.tokenizer, model.context) if model else tokenizer_and_context(settings.model)

    progress.stage("rows", rows=None, tokens=None)
    if context is not None and (settings.corpus.max_length or 0) > context:
        raise ModelError(
            f"corpus.max_length: rows of {settings.corpus.max_length} tokens, the model has {context} positions; "
            f"set {context} or less"
        )
    unit_set = unit_set.rendered(tokenizer)
    unit_tokens = unit_set.tokenize(tokenizer, settings.targets.max_length, context)
    store = RowStore.write(
        tokens,
        settings.corpus,
        tokenizer,
        shard_rows=settings.shard_rows,
        context=context,
        corpus=corpus,
        replace=replace,
        progress=lambda rows: progress.advance(rows, 0),
    )
    # the lengths of rows and questions, and the date of chats, as they were used
    max_unit_length = min(settings.targets.max_length, context or settings.targets.max_length)
    updates: dict[str, Any] = {
        "corpus": settings.corpus.model_copy(update={"max_length": store.details["max_length"]}),
        "targets": settings.targets.model_copy(update={"max_length": max_unit_length}),
    }
    if "gradient" in settings.features.kernels and settings.like is None:  # else as in the artifact `like`
        recipe = default_recipe(store.n_rows) if settings.recipe is None else FineTuningRecipe(**settings.recipe)
        training = recipe.optimizer(store.n_rows)
        updates["features"] = settings.features.completed(
            learning_rate_sum=training.learning_rate_sum, batch_rows=training.batch_rows
        )
    if tokenizer.writes_chats and tokenizer.writes_date:
        updates["model"] = settings.model.model_copy(update={"chat_date": tokenizer.chat_date})
    settings = settings.model_copy(update=updates)
    for note in _input_notes(corpus, store, unit_set, tokenizer, context):
        progress.note(note)

    if model is None:
        progress.stage("model", rows=None, tokens=None)
        model = ReferenceModel.load(settings.model)
    # the texts were tokenised by config.json alone
    longest, problem = max(store.longest(), *(unit.longest for unit in unit_tokens)), ""
    if model.context is not None and longest > model.context:
        problem = (
            f"reads {model.context} tokens, fewer than the {context} of its config.json; a row or a question has "
            f"{longest}: set --max-length and targets.max_length to {model.context}"
        )
    elif model.vocab_size < tokenizer.vocab_size:
        problem = (
            f"config.json says a vocabulary of {tokenizer.vocab_size}, the output layer has {model.vocab_size}; "
            "correct the config"
        )
    if problem:
        raise ModelError(f"{settings.model.path}: {problem}")
    return settings, model, store, unit_set, unit_tokens


def _input_notes(
    corpus: Corpus, store: RowStore, unit_set: UnitSet, tokenizer: HfTokenizer, context: int | None
) -> list[str]:
    """Return notes on how corpus and questions were read: columns, labels, rows and tokens, and what was skipped."""
    roles = store.details["columns"]
    notes = [*corpus.notes, *column_notes(roles, store.label_columns, store.ignored_columns)]
    notes.append("labels: " + (", ".join(store.label_columns) or "none (no predictions by slice)"))
    if not {"row_id", "doc_id"} & roles.keys():
        notes.append("row names are generated from content and position")
    if "rejected" in roles:
        notes.append("preference pairs: rows are scored by the gradient of the DPO loss at this model")
    loss = f", {store.n_loss_positions:,} with loss" if store.masked else ""
    limit = f"the model's context is {context:,}" if context else "the model has no context limit"
    split = "; longer documents are split into several rows" if store.n_rows > store.n_documents else ""
    notes.append(
        f"{store.n_rows:,} rows of {store.n_documents:,} documents, {store.n_tokens:,} tokens{loss}, at most "
        f"{store.details['max_length']:,} in a row ({limit}){split}"
    )
    notes += skipped_lines(store.skipped.counts, store.skipped.examples, "skipped", store.n_documents)
    notes.append(tokenizer.describe())
    if tokenizer.writes_chats and tokenizer.writes_date:
        notes.append(
            f"the chat template writes the date: fixed at {tokenizer.chat_date} (model.chat_date sets another)"
        )
    n_units, n_available = Counter(unit.target for unit in unit_set.units), unit_set.drawn_from
    questions = [
        f"all {n:,} of {target}" if n == n_available[target] else f"{n:,} of the {n_available[target]:,} of {target}"
        for target, n in n_units.items()
    ]
    notes.append(f"questions: {', '.join(questions)}")
    plain_text_targets = sorted({unit.target for unit in unit_set.units if unit.conversation is None})
    if plain_text_targets and tokenizer.writes_chats:
        notes.append(
            f"{', '.join(plain_text_targets)}: prompts are plain text; the model has a chat template, which is applied "
            "only to questions given as conversations (messages)"
        )
    return notes + skipped_lines(unit_set.unwritten.counts, unit_set.unwritten.examples, "questions skipped")
