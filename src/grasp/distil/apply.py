"""Scoring of a whole corpus with a scorer, without a model.

Start with `apply`. Each file of the corpus becomes one file of scores, which is written atomically: an interrupted run
resumes with the first unfinished file. Memory: one batch of texts, and about 20 bytes per document at the end. This
module runs in a single process; for more, `Scorer.add_scores` is a step for Ray Data.

Shape letters: N texts of a batch, M documents of the corpus.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grasp.arrays import I64
from grasp.artifact.rows import ranked
from grasp.corpus.conversations import Form, form_of
from grasp.corpus.documents import id_columns, records_in
from grasp.corpus.labels import is_text, label_text
from grasp.corpus.sources import (
    BATCH_ROWS,
    ArrowChunk,
    FileSource,
    JsonRecord,
    Source,
    is_parquet,
    open_source,
)
from grasp.corpus.values import plain_values
from grasp.distil.ngrams import as_bytes
from grasp.distil.scorer import SCORE, UNFAMILIAR, UNFAMILIAR_SHARE, Scorer, with_interval
from grasp.errors import CorpusError, SettingsError, at
from grasp.files import check_directory, claim_directory
from grasp.predict.weights import mask_of
from grasp.progress import Progress
from grasp.results import Result
from grasp.select.budget import parse_budget
from grasp.select.export import iter_records
from grasp.select.record_files import MANIFEST, FileFormat, write_corpus
from grasp.settings import CorpusSettings
from grasp.store.directory import Schema, Store
from grasp.store.locks import locked
from grasp.store.records import Mark
from grasp.yaml_files import read_yaml

MARKER = ".grasp-scores"
SCORED = Schema(  # names with a leading underscore are ignored by Parquet readers
    mark=Mark,
    marks="_scores-*.json",
    plan="_apply.json",
    other_files=("scores-*.parquet",),
    recovery_hint="delete it and score again",
    error_type=SettingsError,
)
SELECTED_DIRECTORY = "kept"  # directory with the selected documents
BATCH_DOCUMENTS = 4_096
BATCH_BYTES = 8 << 20
TOP_SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)  # shares of the documents whose score threshold is reported
MAX_UNFAMILIAR = 0.05  # share of unfamiliar documents above which a warning is added


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Applied(Result):
    """Result of `apply`; the table has the score threshold of the top 1 %, 5 %, 10 %, 20 % and 50 % of documents."""

    path: Path
    documents: int


def apply(
    scorer: Scorer | Path | str,
    corpus: str,
    out: Path | str,
    *,
    keep: str | float | None = None,
    text_column: str | None = None,
    id_column: str | None = None,
    split: str | None = None,
    progress: Progress | None = None,
) -> Applied:
    """Score every document of a corpus with a scorer, without a model.

    Writes Parquet with the identifiers and scores of the documents. Scores are in standard deviations of relevance; 0
    is the mean over the training rows of the scorer. An interrupted run resumes with the first unfinished file.

    Each file of the corpus has a file in `out` with the columns file, position (row index, or line number from 1),
    row_id and doc_id of the corpus, `score` and `unfamiliar`.

    Args:
        scorer: directory written by `grasp distil`.
        corpus: Parquet, JSONL, a directory or a URL of either.
        out: directory for the scores; an existing one of the same run is resumed.
        keep: copy the documents with the highest scores to DIR/kept: a share (20%) or a number of documents.
        text_column: column of the text or of the conversation. Default: text or messages.
        id_column: column of the identifiers. Default: row_id or id; "" for none.
        split: split to read, if the corpus has several.

    Raises:
        SettingsError: `out` holds other files, or scores of another scorer or corpus.
        CorpusError: the corpus cannot be read, or has no text.
        ArtifactError: the scorer does not exist or is damaged.
    """
    out, progress = Path(out), progress or Progress()
    inputs = {"is the scorer": None if isinstance(scorer, Scorer) else scorer, "is the corpus": str(corpus)}
    scorer = scorer if isinstance(scorer, Scorer) else Scorer.open(scorer)
    settings = CorpusSettings(path=str(corpus), split=split, text_column=text_column, row_id_column=id_column)
    budget = None if keep is None else parse_budget(keep)
    if budget is not None and budget.unit == "tokens":
        raise SettingsError(
            f"keep: got {keep}, but a scorer does not count tokens; expected 20% or a number of documents"
        )
    source = open_source(settings.path, settings.split)
    files = [source]
    if isinstance(source, FileSource):
        files = [replace(source, files=[file]) for file in source.files]
    claim_directory(out, MARKER, lambda _: False, inputs)
    with locked(out / MARKER):
        manifest = out / SELECTED_DIRECTORY / MANIFEST  # written last: the documents were copied before
        if budget is not None and manifest.exists() and read_yaml(manifest).get("keep") == str(keep):
            budget = None
        if budget is not None:
            check_directory(out / SELECTED_DIRECTORY)
        store = Store(out, SCORED)
        store.begin(
            {
                "scorer": scorer.card.weights.checksum,
                "corpus": {name: [size, stamp] for name, size, stamp in source.identity()},
                "settings": settings.model_dump(mode="json", exclude={"path", "label_paths", "path_labels"}),
            }
        )
        n_records = None  # unknown, unless Parquet metadata has it
        if isinstance(source, FileSource) and all(is_parquet(path) for _, path in source.files):
            n_records = source.approximate_length(0)  # exact
        progress.stage("scoring", rows=n_records, tokens=None)
        scores, unfamiliar = [], 0
        for k, file in enumerate(files):
            part = f"_scores-{k:05d}"
            is_complete = part in store.parts
            if not is_complete:
                write_scores = partial(_score_file, file, scorer, settings, progress=progress)
                store.put(part, {f"scores-{k:05d}.parquet": write_scores})
            table = pq.read_table(store.file(part), columns=[SCORE, UNFAMILIAR])
            if is_complete:
                progress.advance(len(table), 0)
            scores.append(table[SCORE].to_numpy())
            unfamiliar += pc.sum(table[UNFAMILIAR]).as_py() or 0
        score_M = np.concatenate(scores)
        documents = len(score_M)
        share, quality = unfamiliar / max(1, documents), scorer.card.quality
        remedy = "; their scores are unreliable: build an artifact that includes such documents and distil it"
        notes = [
            f"{share:.1%} of the documents are unlike the training rows of the scorer ({UNFAMILIAR_SHARE:.0%} of "
            f"held-out rows are){remedy * (share > MAX_UNFAMILIAR)}",
            f"accuracy on held-out rows: Spearman correlation with relevance {with_interval(quality.spearman, '.2f')}; "
            f"the top 20% by score have {with_interval(quality.gain, '.0%')} of the mean relevance of the true top 20%",
        ]
        if budget is not None:
            progress.stage("copying the best", rows=None, tokens=None)
            selected_M = mask_of(ranked(score_M, count=budget.resolve(documents, up=True)), documents)
            provenance = {"chosen by": "grasp apply", "keep": str(keep)}
            records = iter_records(settings, selected_M)
            export = write_corpus(out / SELECTED_DIRECTORY, FileFormat(), "documents", records, 0, provenance)
            text = f"the {export.records:,} documents with the highest scores, unchanged"
            notes.insert(0, f"{out / SELECTED_DIRECTORY}: {text}")
    descending_M = np.sort(score_M)[::-1]
    thresholds = [float(descending_M[math.ceil(share * documents) - 1]) if documents else None for share in TOP_SHARES]
    shares = [f"{share:.0%}" for share in TOP_SHARES]
    table = pa.table({"best": shares, "score at least": pa.array(thresholds, pa.float64())})
    headline = f"{out}: {documents:,} documents scored for {scorer.card.target}"
    return Applied(table, headline, tuple(notes), path=out, documents=documents)


def _score_file(source: Source, scorer: Scorer, settings: CorpusSettings, path: Path, progress: Progress) -> None:
    """Score the documents of one file of the corpus, and write the scores to `path`."""
    with pq.ParquetWriter(path, _SCHEMA, compression="zstd") as writer:
        for texts, table in _batches(source, settings):
            score_N, unfamiliar_N = scorer.score(texts)
            writer.write_table(pa.table([*table.columns, score_N, unfamiliar_N], schema=_SCHEMA))
            progress.advance(len(table), 0)


_SCHEMA = pa.schema(
    {
        "file": pa.string(),
        "position": pa.int64(),
        "row_id": pa.string(),
        "doc_id": pa.string(),
        SCORE: pa.float32(),
        UNFAMILIAR: pa.bool_(),
    }
)


def _batches(source: Source, settings: CorpusSettings) -> Iterator[tuple[pa.LargeBinaryArray, pa.Table]]:
    """Yield batches of texts with a table of their identifiers: file, position, row_id, doc_id."""
    texts: list[pa.Array] = []
    tables: list[pa.Table] = []
    size = 0
    for text, table in _chunks(source, settings):
        texts.append(text)
        tables.append(table)
        size += text.nbytes
        if size >= BATCH_BYTES or sum(map(len, tables)) >= BATCH_DOCUMENTS:
            yield pa.concat_arrays(texts), pa.concat_tables(tables)
            texts, tables, size = [], [], 0
    if texts:
        yield pa.concat_arrays(texts), pa.concat_tables(tables)


def _chunks(source: Source, settings: CorpusSettings) -> Iterator[tuple[pa.LargeBinaryArray, pa.Table]]:
    """Yield the same in the chunks of the source: one Arrow table, or at most `BATCH_ROWS` lines of JSON."""
    forms: dict[str, Form] = {}

    def select(schema: pa.Schema, name: str) -> list[str]:
        with at(name):
            ids = id_columns(settings, schema.names)
            form = forms[name] = form_of(tuple(schema.names), settings)
        if form.columns[0] not in schema.names:
            raise CorpusError(f"{name}: has token ids and no text; expected a corpus of text")
        return [column for column in schema.names if column in {*form.columns, *ids}]

    def text_of(form: Form, record: Mapping[str, Any], location: str) -> str:
        with at(location):
            content = form.read(record)
        return (content.text or "") if content.conversation is None else str(content.conversation)  # joined turns

    def identifiers(file: str, position: I64, *ids: Sequence[str | None]) -> pa.Table:
        columns = [pa.array([file] * len(position)), pa.array(position), *ids]
        return pa.table(columns, schema=pa.schema(list(_SCHEMA)[:4]))

    lines: list[JsonRecord] = []
    for chunk in chain(source.chunks(0, select), [None]):
        if isinstance(chunk, JsonRecord):
            lines.append(chunk)
        if lines and (chunk is None or len(lines) == BATCH_ROWS):
            texts, ids = [], []
            for location, record in chain.from_iterable(map(records_in, lines)):
                with at(location):
                    columns, form = id_columns(settings, record), form_of(tuple(record), settings)
                texts.append(text_of(form, record, location))
                ids.append([label_text(record.get(name or "")) for name in columns])
            row_ids, doc_ids = zip(*ids, strict=True)
            line_numbers = np.array([line.line for line in lines])
            yield as_bytes(texts), identifiers(lines[0].name, line_numbers, row_ids, doc_ids)
            lines = []
        if isinstance(chunk, ArrowChunk):
            batch, form = chunk.batch, forms[chunk.name]
            column = batch.column(form.columns[0])
            if form.kind == "text" and is_text(column.type):
                encoded = pc.fill_null(column.cast(pa.large_string()).cast(pa.large_binary()), b"")
            else:
                encoded = as_bytes([text_of(form, record, location) for location, record in records_in(chunk)])
            names, no_ids = batch.schema.names, [None] * batch.num_rows
            id_values = [
                [label_text(value) for value in plain_values(batch.column(name))] if name in names else no_ids
                for name in id_columns(settings, names)
            ]
            yield encoded, identifiers(chunk.name, np.arange(chunk.first, chunk.first + batch.num_rows), *id_values)
