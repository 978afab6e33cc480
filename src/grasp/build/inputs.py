"""Inputs of a build: rows on disk, units, the loaded model, and the provenance that the manifest records.

Start with `prepare`, which returns `Inputs`.
"""

import platform
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

import grasp
from grasp.arrays import I64
from grasp.artifact.manifest import UNITS
from grasp.artifact.reader import Leaks
from grasp.build.identity import Identity
from grasp.build.leaks import find_leaks
from grasp.build.modality import load_reference, vision
from grasp.build.model_pass import ModelPass, batch_arrays
from grasp.corpus.conversations import entry_notes, preference_note
from grasp.corpus.documents import Corpus
from grasp.corpus.labels import HASH_LABEL, IDS_COLUMN
from grasp.corpus.row_store import RowStore, ShardStore
from grasp.corpus.sources import Source, open_source
from grasp.errors import ModelError, SettingsError
from grasp.kernels.kernel import Batch, Kernel
from grasp.models.causal_lm import ReferenceModel, context_of
from grasp.models.checkpoint import check_readable, text_config_of, tokenizer_of
from grasp.models.forward_pass import Reference, Units
from grasp.models.tokenizer import HfTokenizer
from grasp.progress import Progress
from grasp.settings import BuildSettings
from grasp.targets import Unit, UnitSet, load_units
from grasp.targets.margins import refuse_accuracy
from grasp.targets.units import UnitTokens, unit_columns
from grasp.text import skipped_lines

Store = RowStore | ShardStore[Any, Any]


@dataclass(frozen=True)
class Inputs:
    """All inputs of a build. `units` pass through the model at the first access."""

    settings: BuildSettings
    model_pass: ModelPass
    store: Store
    unit_set: UnitSet
    unit_inputs: Units
    identity: Identity
    leaks: Mapping[str, Leaks] = field(default_factory=dict)  # by target; empty for images

    @property
    def model(self) -> Reference:
        """Return the model that reads the corpus."""
        return self.model_pass.model

    @property
    def unit_tokens(self) -> Sequence[UnitTokens]:
        """Return the token ids of the units; empty if they are images."""
        return self.unit_inputs if isinstance(self.unit_inputs, Sequence) else ()

    @cached_property
    def units(self) -> Batch:
        """Return the features of the units; the model is run on them at the first access."""
        return self.model_pass.units(self.unit_inputs, [unit.unit_id for unit in self.unit_set.units])


@dataclass(frozen=True, slots=True)
class InMemory:
    """Model, corpus and targets passed as objects; the settings name them by fingerprint instead of a path."""

    model: ReferenceModel | None = None
    source: Source | None = None
    units: Sequence[Unit] = ()


ON_DISK = InMemory()
UNIT_BYTES = 64 << 20  # of a target, see `unit_arrays`
SEARCHED_SHARDS = 8  # shards that are searched for a column of unique names
MIN_DOCUMENTS = 20  # documents that such a column must distinguish to be suggested as --id-column


def prepare(
    settings: BuildSettings,
    tokens: Path,
    progress: Progress,
    *,
    model: Reference | None = None,
    in_memory: InMemory = ON_DISK,
    replace: bool = False,
) -> Inputs:
    """Write the rows to disk, load the model, and complete the settings from model and corpus.

    Texts are tokenised before the weights of the model are loaded, so that errors in them are reported early.

    Args:
        settings: settings of the build.
        tokens: directory of the rows.
        progress: receives stages, notes and numbers of rows.
        model: the loaded model. Default: load it.
        in_memory: model, corpus and targets that are passed as objects.
        replace: delete rows of another corpus in `tokens`.
    """
    model = model or in_memory.model
    store: Store
    units: Units
    leaks: Mapping[str, Leaks] = {}
    if settings.model.classifier is None and isinstance(model, ReferenceModel | None):
        if model is None:
            check_readable(settings.model.path)
        unit_set = load_units(settings.targets, in_memory.units)
        refuse_accuracy(unit_set)
        if "pooled" in settings.features.kernels and any(unit.others for unit in unit_set.units):
            raise SettingsError(
                "features.kernels: got pooled, which is not linear in the gradient of a unit, so margins cannot be "
                "combined from answers; use --rule default, or targets without @margin"
            )
        corpus = Corpus(in_memory.source or open_source(settings.corpus.path, settings.corpus.split), settings.corpus)
        if model is None:
            config, hf_tokenizer = text_config_of(settings.model), tokenizer_of(settings.model)
            vocab_size = getattr(config, "vocab_size", None) or len(hf_tokenizer)
            tokenizer, context = HfTokenizer.from_settings(hf_tokenizer, settings.model, vocab_size), context_of(config)
        else:
            tokenizer, context = model.tokenizer, model.context
        progress.stage("rows", rows=None, tokens=None)
        if context is not None and (settings.corpus.max_length or 0) > context:
            raise ModelError(
                f"corpus.max_length: rows of {settings.corpus.max_length} tokens, the model has {context} positions; "
                f"set {context} or less"
            )
        longest = min(settings.targets.max_length, context or settings.targets.max_length)
        unit_set = unit_set.rendered(tokenizer)
        units = unit_set.tokenize(tokenizer, settings.targets.max_length, context)
        note_questions(unit_set, units, tokenizer, progress)
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
        updates: dict[str, Any] = {
            "corpus": settings.corpus.model_copy(update={"max_length": store.details["max_length"]}),
            "targets": settings.targets.model_copy(update={"max_length": longest}),
        }
        if tokenizer.writes_chats and tokenizer.writes_date:
            updates["model"] = settings.model.model_copy(update={"chat_date": tokenizer.chat_date})
        settings = settings.model_copy(update=updates)
        for note in entry_notes(settings.corpus):
            progress.note(note)
        note_corpus(store, unit_set, tokenizer, context, progress)
        leaks = find_leaks(store, unit_set.pool or unit_set.units, tokenizer.decode)
        for target, target_leaks in leaks.items():
            progress.note(f"{target}: {target_leaks}")
        if model is None:
            progress.stage("model", rows=None, tokens=None)
            model = ReferenceModel.load(settings.model)
        longest_row = max(store.longest(), *(unit.longest for unit in units))
        if model.context is not None and longest_row > model.context:
            raise ModelError(
                f"{settings.model.path}: reads {model.context} tokens, fewer than the {context} of its config.json; a "
                f"row or a question has {longest_row}: set --max-length and targets.max_length to {model.context}"
            )
        if model.vocab_size < tokenizer.vocab_size:
            raise ModelError(
                f"{settings.model.path}: config.json says a vocabulary of {tokenizer.vocab_size}, the output layer has "
                f"{model.vocab_size}; correct the config"
            )
    else:
        model = model or load_reference(settings.model)
        progress.stage("rows", rows=None, tokens=None)
        unit_set, units, store = vision().read(
            settings, model, tokens, replace=replace, progress=lambda rows: progress.advance(rows, 0)
        )
    progress.stage("units", rows=None, tokens=None)
    model_pass = ModelPass.choose(model, settings.features)
    reader, reader_fingerprint = model.reader
    identity = Identity(
        fingerprints={
            "model": model.fingerprint(),
            reader: reader_fingerprint,
            "corpus": store.fingerprint,
            "targets": unit_set.fingerprint,
        },
        dtype=str(model.dtype).removeprefix("torch."),
        features=settings.features.model_dump(mode="json"),
        rounding={"device": model.device.type, **model.batching},
    )
    return Inputs(
        settings=settings,
        model_pass=model_pass,
        store=store,
        unit_set=unit_set,
        unit_inputs=units,
        identity=identity,
        leaks=leaks,
    )


def note_questions(unit_set: UnitSet, units: Sequence[UnitTokens], tokenizer: HfTokenizer, progress: Progress) -> None:
    """Note questions that the model reads differently from a chat or from an evaluation harness, and skipped ones."""
    plain_text_targets = sorted({unit.target for unit in unit_set.units if unit.conversation is None})
    if plain_text_targets and tokenizer.writes_chats:
        progress.note(
            f"{', '.join(plain_text_targets)}: prompts are plain text; the model has a chat template, which is applied "
            "only to questions given as conversations (messages)"
        )
    for line in skipped_lines(unit_set.unwritten.counts, unit_set.unwritten.examples):
        progress.note(f"questions skipped: {line}")
    last_prompt_ids = [[int(example.input_ids[example.first - 1])] for example in units]
    trailing_space_units = [
        unit.unit_id
        for unit, end in zip(unit_set.units, tokenizer.decode(last_prompt_ids), strict=True)
        if unit.conversation is None and unit.prompt != unit.prompt.rstrip() and not end.strip()
    ]
    if trailing_space_units:
        progress.note(
            f"{len(trailing_space_units):,} prompts (e.g. {trailing_space_units[0]!r}) end in white space, which is "
            "not scored; lm-evaluation-harness scores it with the answer. To do the same, move it before the answer"
        )


def note_corpus(
    store: RowStore, unit_set: UnitSet, tokenizer: HfTokenizer, context: int | None, progress: Progress
) -> None:
    """Log the role of each column, the tokenisation, skipped documents, and the number of questions."""
    roles = store.details["columns"]
    names = {"input_ids": "token ids", "row_id": "row names", "doc_id": "document names"}
    columns = "columns: " + ", ".join(f"{names.get(role, role)} from {column!r}" for role, column in roles.items())
    if not {"row_id", "doc_id"} & roles.keys():
        columns += "; row names are generated from content and position"
        if label := next((name for name in store.label_columns if _names_documents(store, name)), None):
            columns += (
                f"; {label!r} has a different value in every document: use it with --id-column {shlex.quote(label)}"
            )
    progress.note(columns)
    labels = "labels: " + (", ".join(store.label_columns) or "none (no predictions by slice)")
    if store.ignored_columns:
        labels += f"; left out (binary, lists of numbers or of records): {', '.join(store.ignored_columns)}"
        labels += f"; request a value of them by its path, e.g. --set corpus.label_paths=[{store.ignored_columns[0]}.0]"
    progress.note(labels)
    text_column = roles.get("text", roles.get("turns"))
    all_columns = [*roles.values(), *store.label_columns, *store.ignored_columns]
    if "rejected" in roles:
        progress.note("preference pairs: rows are scored by the gradient of the DPO loss at this model")
    elif note := preference_note(text_column, all_columns, turns="turns" in roles):
        progress.note(note)
    rows = f"{store.n_rows:,} rows of {store.n_documents:,} documents, {store.n_tokens:,} tokens"
    if store.masked:
        rows += f", {store.n_loss_positions:,} with loss"
    reads = f"the model's context is {context:,}" if context else "the model has no context limit"
    rows += f", at most {store.details['max_length']:,} in a row ({reads})"
    if store.n_rows > store.n_documents:
        rows += "; longer documents are split into several rows"
    progress.note(rows)
    for line in skipped_lines(store.skipped.counts, store.skipped.examples):
        progress.note(f"skipped: {line}")
    progress.note(tokenizer.describe())
    if tokenizer.writes_chats and tokenizer.writes_date:
        progress.note(
            f"the chat template writes the date: fixed at {tokenizer.chat_date} (model.chat_date sets another)"
        )
    counts, available = Counter(unit.target for unit in unit_set.units), unit_set.drawn_from
    parts = [
        f"all {n:,} of {t}" if n == available[t] else f"{n:,} of the {available[t]:,} of {t}" for t, n in counts.items()
    ]
    progress.note(f"questions: {', '.join(parts)}")


def _names_documents(store: RowStore, label: str) -> bool:
    """Return whether a label has a different value for each document of the first `SEARCHED_SHARDS` shards."""
    shards = range(min(store.n_shards, SEARCHED_SHARDS))
    table = pa.concat_tables([store.table(k).select(["doc_id", label]) for k in shards])
    if not (pa.types.is_string(table[label].type) or pa.types.is_integer(table[label].type)) or table[label].null_count:
        return False
    documents = len(table["doc_id"].unique())
    return documents >= MIN_DOCUMENTS and len(table[label].unique()) == documents == len(
        table.group_by(["doc_id", label]).aggregate([])
    )


def describe_build(inputs: Inputs, build_seconds: Mapping[str, float] | None) -> dict[str, Any]:
    """Return the provenance fields of the manifest; `build_seconds` is None if the build was interrupted."""
    store, model = inputs.store, inputs.model
    return {
        "made_by": {
            "program": f"grasp {grasp.__version__}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "device": str(model.device),
            "dtype": inputs.identity.dtype,
        },
        "fingerprints": dict(inputs.identity.fingerprints),
        "settings": inputs.settings.model_dump(mode="json"),
        "skipped": {"rows": asdict(store.skipped), "columns": list(store.ignored_columns)},
        "details": {
            "model": type(model.model).__name__,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "n_tokens": store.n_tokens,
            "n_documents": store.n_documents,
            "labels": list(store.label_columns),
            "columns": store.details.get("columns"),
            "classes": None if isinstance(model, ReferenceModel) else list(model.classes),
            "loss": "nats per token, mean over the positions that the head was applied to",
            "build_seconds": build_seconds,
        },
    }


def leak_arrays(inputs: Inputs) -> dict[str, I64]:
    """Return the rows that contain questions, as arrays that are stored with the moments."""
    return {name: array for target, leaks in inputs.leaks.items() for name, array in leaks.arrays(target).items()}


def unit_arrays(inputs: Inputs, kernels: Sequence[Kernel]) -> dict[str, NDArray[Any]]:
    """Return what the model computed for the units of each target, as arrays that are stored with the moments.

    `explain` then need not run the model on the units. Of gradients only the mean over a target is stored. A target
    with more than `UNIT_BYTES` is left out.
    """
    if not inputs.unit_tokens:
        return {}
    arrays: dict[str, NDArray[Any]] = {}
    target_E = np.array([unit.target for unit in inputs.unit_set.units])
    for target in inputs.unit_set.targets:
        columns_E = np.flatnonzero(target_E == target)
        part = batch_arrays(0, np.arange(len(columns_E)), inputs.units.select_rows(columns_E))
        for kernel in kernels:
            part |= kernel.unit_means(columns_E)
        if sum(array.nbytes for array in part.values()) <= UNIT_BYTES:
            arrays |= {f"{UNITS}{target}.{name}": array for name, array in part.items()}
    return arrays


def unit_table(inputs: Inputs) -> pa.Table:
    """Return the unit table: one row per unit, in the order of the columns of the relevance arrays."""
    units, examples = inputs.unit_set.units, inputs.unit_tokens
    hashes = [unit.image_hash for unit in units]
    return pa.table(
        {
            "unit_id": [unit.unit_id for unit in units],
            "target": [unit.target for unit in units],
            "n_positions": pa.array(torch.bincount(inputs.units.row_P, minlength=len(units)).tolist(), pa.int32()),
            "loss": pa.array(inputs.units.loss_B.float().cpu().numpy(), pa.float32()),
            "prompt": [unit.prompt for unit in units],
            "completion": [unit.completion for unit in units],
        }
        | unit_columns(units, examples)
        | ({HASH_LABEL: pa.array(hashes, pa.string())} if any(hashes) else {})
        | ({IDS_COLUMN: pa.array([unit.input_ids for unit in examples], pa.list_(pa.int32()))} if examples else {})
    )
