"""Everything a build reads, ready: rows on disk, units through the model; and what the artifact says of it all."""

import platform
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

import grasp
from grasp.arrays import I64
from grasp.artifact.reader import Leaks
from grasp.build.identity import Identity
from grasp.build.leaks import find_leaks
from grasp.build.modality import load_reference, vision
from grasp.build.model_pass import ModelPass
from grasp.corpus.conversations import preference_note
from grasp.corpus.documents import Corpus
from grasp.corpus.labels import HASH_LABEL, IDS_COLUMN
from grasp.corpus.row_store import RowStore, ShardStore
from grasp.corpus.sources import Source, open_source
from grasp.errors import ModelError
from grasp.kernels.kernel import Batch
from grasp.models.causal_lm import ReferenceModel, context_of
from grasp.models.checkpoint import refuse_unreadable, text_config_of, tokenizer_of
from grasp.models.forward_pass import Reference, Units
from grasp.models.tokenizer import HfTokenizer
from grasp.progress import Progress
from grasp.settings import BuildSettings
from grasp.targets import Unit, UnitSet, load_units
from grasp.targets.units import UnitTokens
from grasp.text import skipped_lines

Store = RowStore | ShardStore[Any, Any]


@dataclass(frozen=True)
class Inputs:
    """Everything a build reads. `units` pass the model when they are first asked for."""

    settings: BuildSettings
    ready: ModelPass
    store: Store
    unit_set: UnitSet
    unit_inputs: Units
    identity: Identity
    leaks: Mapping[str, Leaks] = field(default_factory=dict)  # by target; of pictures there are none

    @property
    def model(self) -> Reference:
        """Return the model that reads the corpus."""
        return self.ready.model

    @property
    def unit_tokens(self) -> Sequence[UnitTokens]:
        """Return the token ids of the units; empty if they are images."""
        return self.unit_inputs if isinstance(self.unit_inputs, Sequence) else ()

    @cached_property
    def units(self) -> Batch:
        """Pass the units through the model, once."""
        return self.ready.units(self.unit_inputs, [unit.unit_id for unit in self.unit_set.units])


@dataclass(frozen=True, slots=True)
class InMemory:
    """Objects handed in (model, corpus, targets) in the place of paths; settings name them by fingerprint."""

    model: ReferenceModel | None = None
    source: Source | None = None
    units: Sequence[Unit] = ()


ON_DISK = InMemory()
SEEN_SHARDS, FEWEST_DOCUMENTS = 8, 20  # by which a column is taken for names of documents


def prepare(
    settings: BuildSettings,
    tokens: Path,
    progress: Progress,
    *,
    model: Reference | None = None,
    in_memory: InMemory = ON_DISK,
    replace: bool = False,
) -> Inputs:
    """Write the rows to disk and pass the units through the model; settings get what follows from model and corpus.

    Rows and units of texts are tokenised before the weights of the model are loaded, so that what is wrong with them is
    said at once.

    Args:
        model: loaded already; None: it is loaded.
        replace: rows of another corpus that lie in `tokens` are thrown away.
    """
    model = model or in_memory.model
    store: Store
    units: Units
    leaks: Mapping[str, Leaks] = {}
    if settings.model.classifier is None and isinstance(model, ReferenceModel | None):
        if model is None:
            refuse_unreadable(settings.model.path)
        unit_set = load_units(settings.targets, in_memory.units)
        corpus = Corpus(in_memory.source or open_source(settings.corpus.path, settings.corpus.split), settings.corpus)
        if model is None:
            config, made = text_config_of(settings.model), tokenizer_of(settings.model)
            vocab_size = getattr(config, "vocab_size", None) or len(made)
            tokenizer, context = HfTokenizer.from_settings(made, settings.model, vocab_size), context_of(config)
        else:
            tokenizer, context = model.tokenizer, model.context
        progress.stage("rows", rows=None, tokens=None)
        if context is not None and (settings.corpus.max_length or 0) > context:
            raise ModelError(
                f"corpus.max_length: rows of {settings.corpus.max_length} tokens, the model has {context} positions; "
                f"set {context} or less"
            )
        longest = min(settings.targets.max_length, context or settings.targets.max_length)
        as_text = sorted({unit.target for unit in unit_set.units if unit.conversation is None})
        if as_text and tokenizer.writes_chats:
            progress.note(
                f"{', '.join(as_text)}: asked as plain text, without the chat template that this model has; questions "
                "that are conversations (messages) are asked with it"
            )
        unit_set = unit_set.written_out(tokenizer)
        for line in skipped_lines(unit_set.unwritten.counts, unit_set.unwritten.examples):
            progress.note(f"left out of questions: {line}")
        units = unit_set.tokenize(tokenizer, longest)
        ends = [[int(one.input_ids[one.first - 1])] for one in units]
        spaced = [
            unit.unit_id
            for unit, end in zip(unit_set.units, tokenizer.decode(ends), strict=True)
            if unit.conversation is None and unit.prompt != unit.prompt.rstrip() and not end.strip()
        ]
        if spaced:
            progress.note(
                f"{len(spaced):,} prompts, {spaced[0]!r} for one, end in white space that is not scored; "
                "lm-evaluation-harness scores it with the answer: to do so too, write it before the answer"
            )
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
        tell_rows(store, unit_set, tokenizer, context, progress)
        leaks = find_leaks(store, unit_set.pool or unit_set.units, tokenizer.decode)
        for target, found in leaks.items():
            progress.note(f"{target}: {found}")
        if model is None:
            progress.stage("model", rows=None, tokens=None)
            model = ReferenceModel.load(settings.model)
        longest_row = max(int(store.lengths().max()), *(len(unit.input_ids) for unit in units))
        if model.context is not None and longest_row > model.context:
            raise ModelError(
                f"{settings.model.path}: reads {model.context} tokens, fewer than the {context} of its config.json; a "
                f"row or a question has {longest_row}: set --max-length and targets.max_length to {model.context}"
            )
        if model.vocab_size < tokenizer.vocab_size:
            raise ModelError(
                f"{settings.model.path}: config.json says a vocabulary of {tokenizer.vocab_size}, the output layer has "
                f"{model.vocab_size}; mend the config"
            )
    else:
        model = model or load_reference(settings.model)
        progress.stage("rows", rows=None, tokens=None)
        unit_set, units, store = vision().read(
            settings, model, tokens, replace=replace, progress=lambda rows: progress.advance(rows, 0)
        )
    progress.stage("units", rows=None, tokens=None)
    ready = ModelPass.choose(model, settings.features)
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
        ready=ready,
        store=store,
        unit_set=unit_set,
        unit_inputs=units,
        identity=identity,
        leaks=leaks,
    )


def tell_rows(
    store: RowStore, unit_set: UnitSet, tokenizer: HfTokenizer, context: int | None, progress: Progress
) -> None:
    """Note which column became what, how texts were tokenised, what was left out, and how many questions are scored."""
    roles = store.details["columns"]
    names = {"input_ids": "token ids", "row_id": "names of rows", "doc_id": "names of documents"}
    columns = "columns: " + ", ".join(f"{names.get(role, role)} from {column!r}" for role, column in roles.items())
    if not {"row_id", "doc_id"} & roles.keys():
        columns += "; names of rows are made from content and position"
        if label := next((name for name in store.label_columns if _names_documents(store, name)), None):
            columns += f"; {label!r} differs in every document: --id-column {shlex.quote(label)} takes it"
    progress.note(columns)
    labels = "labels: " + (", ".join(store.label_columns) or "none, so no question can be asked by slice")
    if store.ignored_columns:
        labels += f"; columns left out, nested or binary: {', '.join(store.ignored_columns)}"
    progress.note(labels)
    text_column = roles.get("text", roles.get("turns"))
    known = [*roles.values(), *store.label_columns, *store.ignored_columns]
    if note := preference_note(text_column, known, turns="turns" in roles):
        progress.note(note)
    rows = f"{store.n_rows:,} rows of {store.n_documents:,} documents, {store.n_tokens:,} tokens"
    if store.masked:
        rows += f", {store.n_supervised:,} with loss"
    reads = f"the model reads {context:,}" if context else "the model names no limit"
    rows += f", at most {store.details['max_length']:,} in a row ({reads})"
    if store.n_rows > store.n_documents:
        rows += "; longer documents are cut into several rows"
    progress.note(rows)
    for line in skipped_lines(store.skipped.counts, store.skipped.examples):
        progress.note(f"left out: {line}")
    progress.note(tokenizer.describe())
    if tokenizer.writes_chats and tokenizer.writes_date:
        progress.note(
            f"the chat template writes today's date: {tokenizer.chat_date} on every day (model.chat_date sets another)"
        )
    counts, there = Counter(unit.target for unit in unit_set.units), unit_set.drawn_from
    parts = [f"all {n:,} of {t}" if n == there[t] else f"{n:,} of the {there[t]:,} of {t}" for t, n in counts.items()]
    progress.note(f"questions: {', '.join(parts)}")


def _names_documents(store: RowStore, label: str) -> bool:
    """Whether a label could name the documents: another one in each of the first `SEEN_SHARDS` shards."""
    shards = range(min(store.n_shards, SEEN_SHARDS))
    table = pa.concat_tables([store.table(k).select(["doc_id", label]) for k in shards])
    if not (pa.types.is_string(table[label].type) or pa.types.is_integer(table[label].type)) or table[label].null_count:
        return False
    documents = len(table["doc_id"].unique())
    return documents >= FEWEST_DOCUMENTS and len(table[label].unique()) == documents == len(
        table.group_by(["doc_id", label]).aggregate([])
    )


def describe_build(inputs: Inputs, build_seconds: Mapping[str, float] | None) -> dict[str, Any]:
    """Where the artifact comes from, what was left out, and the time it took; None: it was killed in between."""
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
            "loss": "nats a token, mean over the positions that the head was applied to",
            "build_seconds": build_seconds,
        },
    }


def leak_arrays(inputs: Inputs) -> dict[str, I64]:
    """Return the rows that contain questions, as arrays that stand among the moments of an artifact."""
    return {name: array for target, found in inputs.leaks.items() for name, array in found.arrays(target).items()}


def unit_table(inputs: Inputs) -> pa.Table:
    """One row a unit, in the order of the columns of the relevance arrays."""
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
        | ({HASH_LABEL: pa.array(hashes, pa.string())} if any(hashes) else {})
        | ({IDS_COLUMN: pa.array([unit.input_ids for unit in examples], pa.list_(pa.int32()))} if examples else {})
    )
