"""Export selected rows, or the whole documents that they are from, as a corpus to train on. Start with `Exporter`.

The build stores the rows as token ids and as character spans of their documents, so the text is read from the corpus
and no tokenizer is loaded. If the rows were not stored, or the files of the corpus have changed, the corpus is
tokenized and packed again. Every row must then have the same id as in the artifact, and all of them the same
fingerprint, which is a hash of ids and tokens.
Shape letters: N rows, M documents of the corpus.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast, get_args

import numpy as np
import pyarrow as pa

from grasp.arrays import F64, I64, Bool
from grasp.artifact.manifest import TOKENS
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import row_tokens
from grasp.corpus.documents import (
    DOC_ID_COLUMN,
    LOSS_MASKS,
    ROW_ID_COLUMNS,
    Corpus,
    content_columns,
    id_columns,
    records_in,
)
from grasp.corpus.encoding import Tokenizer
from grasp.corpus.labels import DOCUMENT_COLUMN
from grasp.corpus.row_store import RowStore
from grasp.corpus.sources import JsonRecord, open_source
from grasp.corpus.text_files import DELIMITER
from grasp.errors import CorpusError, SettingsError
from grasp.files import discard, temporary_path, write_atomically
from grasp.models.build_source import BuildSource, require_here
from grasp.predict.weights import mask_of
from grasp.results import write_table
from grasp.select.export_tables import to_readable_table
from grasp.select.record_files import Export, FileFormat, Item, ShardSize, batch_tables, write_corpus
from grasp.settings import CorpusSettings
from grasp.yaml_files import validated

if TYPE_CHECKING:
    from grasp.select.selection import Selection

Rule = Literal["any", "half", "all"]
BLOCK_ROWS = 4_096
TOKENS_TOLERANCE = 0.02  # relative difference in tokens of whole documents above which a note is added
NOTHING_LEFT_OUT = "left out: every row is selected, so there is nothing to write; lower the budget"


@dataclass(frozen=True, slots=True)
class Exporter:
    """Options of an export, validated before the selection is computed.

    Attributes:
        rule: which documents to write whole; None: only the selected rows.
        corpus: how to read the corpus.
        ids: file to write the ids of the whole documents to, if any.
    """

    artifact: ArtifactReader
    format: FileFormat
    rule: Rule | None
    corpus: CorpusSettings
    ids: Path | None
    shard_size: ShardSize

    @classmethod
    def from_options(
        cls,
        artifact: ArtifactReader,
        *,
        documents: str | None = None,
        form: str = "parquet",
        corpus: str | None = None,
        ids: Path | str | None = None,
        shard_size: str | int | None = None,
    ) -> Self:
        """Validate options, see `Selection.export`.

        Raises:
            SettingsError: the rule or format is unknown, `ids` is given without `documents`, or the corpus cannot be
                opened.
        """
        rule = None if documents is None else parse_document_rule(documents)
        if ids is not None and rule is None:
            raise SettingsError("ids: requires `documents`: any, half or all")
        size = ShardSize() if shard_size is None else ShardSize.parse(shard_size)
        settings = corpus_settings(artifact, corpus)
        try:
            source = open_source(settings.path, settings.split)
        except CorpusError as err:
            raise SettingsError(f"{err}; pass its current path with `corpus`") from err
        file_format = FileFormat.parse(form, source)
        return cls(artifact, file_format, rule, settings, None if ids is None else Path(ids), size)

    def write(
        self, selection: "Selection", out: Path, *, left_out: bool = False, say: Callable[[str], None] | None = None
    ) -> Export:
        """Write the selected rows, or the documents that they are from.

        Args:
            selection: selection of rows.
            out: new directory.
            left_out: write the rows or documents that are not selected instead.
            say: callback that receives a line on what whole documents add and drop, before anything is written.
        Raises:
            SettingsError: there is nothing to write.
            CorpusError: the corpus or its tokenizer is not the one that the artifact was built from.
        """
        artifact, rule = self.artifact, self.rule
        provenance: dict[str, Any] = {"corpus": artifact.manifest.fingerprints["corpus"], "artifact": artifact.location}
        provenance |= {"params": dict(selection.params)} | ({"left_out": True} if left_out else {})
        # without a text column, a row is a record (a conversation, a pair, an instruction) and is written unchanged
        has_text = bool({"text", "input_ids"} & (roles := artifact.manifest.details.get("columns") or {}).keys())
        source, corpus = BuildSource(artifact), Corpus(open_source(self.corpus.path, self.corpus.split), self.corpus)
        with stored_rows(artifact, corpus, lambda: source.tokenizer, temporary_path(out)) as rows:
            if rule is None and has_text:
                row_index = selection.left_out if left_out else selection.row_index
                if not len(row_index):
                    raise SettingsError(NOTHING_LEFT_OUT)
                effect = selection.effect_N[row_index]
                tables = row_tables(artifact, rows, corpus, row_index, effect, lambda: source.tokenizer)
                if self.format.kind in DELIMITER:  # a cell cannot hold a list of token ids
                    lists = ["input_ids", *(() if roles.keys().isdisjoint(LOSS_MASKS) else ("labels",))]
                    tables = (table.drop_columns(lists) for table in tables)
                tokens = int(row_tokens(artifact)[row_index].sum())
                return write_corpus(out, self.format, "rows", tables, tokens, provenance, self.shard_size)
            selected_N = mask_of(selection.row_index, artifact.n_rows)
            documents = select_documents(rows, selected_N, rule or "all", others=left_out)
        if say is not None and rule is not None:
            text = f"whole documents ({rule}): {len(documents.names):,} with {documents.tokens:,} tokens"
            if documents.added:
                text += f"; {documents.added:,} of them in rows that are not selected"
            if documents.lost:
                text += f"; {documents.lost:,} tokens of selected rows are dropped with their documents"
            say(text)
        if self.ids is not None:
            documents.write_ids(self.ids)
        provenance |= {} if rule is None else {"documents": rule}
        records = iter_records(self.corpus, documents.mask_M)
        written = write_corpus(out, self.format, "documents", records, documents.tokens, provenance, self.shard_size)
        note = ""
        if self.corpus.fields is not None and self.corpus.fields.origin:
            # how the trainer of a dataset entry reads the files
            origin, files = self.corpus.fields.origin, sorted(out.glob("part-*"))
            field = "file_name" if origin.startswith("LLaMA-Factory") else "path"
            several = f" (one entry for each of the {len(files)} files)" if len(files) > 1 else ""
            note = f"; to train on it, copy the {origin} with {field}: {files[0] if files else out}{several}"
        difference = documents.tokens / selection.n_tokens - 1
        if rule is not None and not left_out and abs(difference) > TOKENS_TOLERANCE:
            more = "more" if difference > 0 else "fewer"
            note = (
                f", {abs(difference):.0%} {more} than the selected rows ({selection.n_tokens:,}); to select whole "
                f"documents within the budget, pass --documents all{note}"
            )
        return replace(written, note=note)


def parse_document_rule(text: str) -> Rule:
    """Validate the name of a rule for whole documents.

    Raises:
        SettingsError: the name is unknown.
    """
    if text not in get_args(Rule):
        raise SettingsError(
            f"documents: got {text!r}, expected any, half or all: how much of a document must be selected"
        )
    return cast(Rule, text)


def corpus_settings(artifact: ArtifactReader, path: str | None = None) -> CorpusSettings:
    """Return the settings with which the corpus was read when the artifact was built.

    Args:
        path: current path of the corpus; None: the path of the build.

    Raises:
        SettingsError: the artifact does not record its corpus.
        ArtifactError: the artifact was merged from parts with different corpora, or its rows are no texts.
    """
    artifact.require_one_corpus()
    recorded = artifact.manifest.settings.get("corpus")
    if not isinstance(recorded, dict):
        raise SettingsError(f"{artifact.location}: does not record the corpus that it was built from; rebuild it")
    artifact.require_texts("save the list of row_ids with --out instead")
    settings = validated(CorpusSettings, recorded, f"{artifact.location}: settings.corpus")
    if path is None:
        path = artifact.resolve_path(settings.path)
        require_here(artifact, path, "`corpus`")
    return settings.model_copy(update={"path": path})


@contextmanager
def stored_rows(
    artifact: ArtifactReader, corpus: Corpus, tokenizer: Callable[[], Tokenizer], aside: Path
) -> Iterator[RowStore]:
    """Open the stored rows of the artifact, or pack the corpus again in the temporary directory `aside`.

    Raises:
        CorpusError: the corpus or its tokenizer is not the one that the artifact was built from.
    """
    fingerprint, directory = artifact.manifest.fingerprints.get("corpus"), artifact.path / TOKENS
    if directory.is_dir():
        rows = RowStore.open(directory)
        if rows.fingerprint == fingerprint and rows.was_built_from(corpus.source):
            yield rows
            return
    try:
        rows = RowStore.write(aside, corpus.settings, tokenizer(), shard_rows=artifact.grid.shard_rows, corpus=corpus)
        if rows.fingerprint == fingerprint:
            yield rows
            return
        expected_ids = (row_id for batch in artifact.row_batches(["row_id"]) for row_id in batch.column(0).to_pylist())
        shards = (rows.read_columns(k, ("row_id",))["row_id"] for k in range(rows.n_shards))
        pairs = zip_longest((row_id for shard in shards for row_id in shard.to_pylist()), expected_ids)
        row_id, expected = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
        remedy = "the artifact was built from another corpus; pass the path of that one with `corpus`"
        if row_id == expected:  # all ids are the same
            remedy += ", or restore the tokenizer"
            difference = f"its rows have the ids of {artifact.location} but other tokens"
        elif expected is None:
            difference = f"has {row_id!r} beyond the {artifact.n_rows:,} rows of {artifact.location}"
        else:
            got = "ends" if row_id is None else f"has {row_id!r}"
            difference = f"{got} where {artifact.location} has row {expected!r}"
        raise CorpusError(f"{corpus.settings.path}: {difference}; {remedy}")
    finally:
        discard(aside)


@dataclass(frozen=True, slots=True)
class DocumentSelection:
    """Selected whole documents, compared with the selected rows.

    Attributes:
        mask_M: whether a document is selected.
        names: ids of the selected documents: the row_id or doc_id of the corpus, or a generated one.
        tokens: their number of tokens.
        added: how many of these tokens are in rows that are not selected.
        lost: tokens of selected rows whose documents are not selected.
    """

    mask_M: Bool
    names: tuple[str, ...]
    tokens: int
    added: int
    lost: int

    def write_ids(self, path: Path) -> None:
        """Write a table with columns name and record, or a text file with one name per line, atomically.

        Raises:
            SettingsError: a name contains a line break and the file is text.
        """
        if path.suffix in (".csv", ".parquet"):
            names, records = pa.array(self.names, pa.string()), pa.array(np.flatnonzero(self.mask_M))
            write_table(pa.table({"name": names, "record": records}), path)
            return
        for name in self.names:
            if "\n" in name or "\r" in name:
                raise SettingsError(
                    f"document {name!r}: contains a line break; write the ids to a .csv or .parquet file"
                )
        write_atomically(path, ("\n".join(self.names) + "\n").encode())


def select_documents(rows: RowStore, selected_N: Bool, rule: Rule, *, others: bool = False) -> DocumentSelection:
    """Select the documents that have any, half or all of their tokens in selected rows, or the other documents.

    Args:
        rows: all rows of the artifact.
        selected_N: whether a row is selected.
        rule: share of a document's tokens that must be selected.
        others: select the complement.

    Raises:
        SettingsError: no document is selected.
    """
    table = pa.concat_tables(rows.read_columns(k, (DOCUMENT_COLUMN, "n_tokens")) for k in range(rows.n_shards))
    document_N, tokens_N = (column.to_numpy().astype(np.int64) for column in table.columns)
    tokens_M, selected_tokens_M = (
        np.bincount(document_N, count_N).astype(np.int64) for count_N in (tokens_N, tokens_N * selected_N)
    )
    min_share = {"any": 0.0, "half": 0.5, "all": 1.0}[rule]
    mask_M = (tokens_M > 0) & (((selected_tokens_M > 0) & (selected_tokens_M >= min_share * tokens_M)) != others)
    if not mask_M.any() and others:
        raise SettingsError(NOTHING_LEFT_OUT)
    if not mask_M.any():
        raise SettingsError(
            f"documents: no document has {rule} of its tokens in selected rows; pass any, or raise the budget"
        )
    # the id of a document is that of its first row; rows are in the order of their documents
    first_N = np.diff(document_N, prepend=-1) > 0
    names: list[str] = []
    for k in range(rows.n_shards):
        shard = slice(k * rows.shard_rows, (k + 1) * rows.shard_rows)
        is_named = pa.array(first_N[shard] & mask_M[document_N[shard]])
        names += rows.read_columns(k, ("row_id",))["row_id"].filter(is_named).to_pylist()
    n_tokens, n_selected = int(tokens_M[mask_M].sum()), int(selected_tokens_M[mask_M].sum())
    n_lost = int(selected_tokens_M.sum()) - n_selected
    return DocumentSelection(mask_M, tuple(names), n_tokens, n_tokens - n_selected, n_lost)


def row_tables(
    artifact: ArtifactReader,
    rows: RowStore,
    corpus: Corpus,
    row_index: I64,
    effect: F64,
    tokenizer: Callable[[], Tokenizer],
) -> Iterator[pa.Table]:
    """Yield tables of the selected rows in corpus order, a batch of the corpus at a time.

    Columns: row_id, doc_id, the text (the span of the row in its document) under its name in the corpus, input_ids (the
    tokens, including end-of-text tokens), n_tokens, order (rank in the selection, from 0), effect, labels of token ids
    with a loss mask (-100: no loss), and the other columns of the record that the row is from, unchanged.

    Args:
        artifact: artifact of the rows.
        rows: all rows of the artifact.
        corpus: the corpus that they were packed from.
        row_index: selected rows, best first.
        effect: effect of each selected row, in the order of `row_index`.
        tokenizer: loads the tokenizer; only called for rows without a text span, e.g. conversations.
    """
    rank_N = np.full(artifact.n_rows, -1, dtype=np.int64)  # -1: not selected
    rank_N[row_index] = np.arange(len(row_index))
    selected = np.flatnonzero(rank_N >= 0)
    texts = rows.texts(selected, corpus, tokenizer)
    document_N = np.concatenate([rows.read_columns(k, (DOCUMENT_COLUMN,)).column(0) for k in range(rows.n_shards)])
    roles = artifact.manifest.details.get("columns") or {}
    text_name, is_masked = roles.get("text", "text"), not roles.keys().isdisjoint(LOSS_MASKS)
    path_labels = ("file", "directory") if corpus.settings.path_labels else ()  # no record has them
    for table in batch_tables(_other_columns(corpus, document_N[selected].astype(np.int64))):
        for start in range(0, len(table), BLOCK_ROWS):
            others = table.slice(start, BLOCK_ROWS)
            part, selected = selected[: len(others)], selected[len(others) :]
            stored, shard = artifact.rows(part), rows.rows(part)
            ids = [shard.ids(i) for i in range(len(part))]
            row_texts = [
                tokenizer().decode([row.tolist()])[0] if text is None else text
                for row, text in zip(ids, islice(texts, len(part)), strict=True)
            ]
            row_columns = {
                "row_id": stored["row_id"],
                "doc_id": stored["doc_id"],
                text_name: pa.array(row_texts, pa.large_string()),
                "input_ids": pa.array(ids, pa.list_(pa.int32())),
                "n_tokens": stored["n_tokens"],
                "order": pa.array(rank_N[part]),
                "effect": pa.array(effect[rank_N[part]]),
            }
            if is_masked:  # in the form that trainers read
                masks = map(shard.mask, range(len(part)))
                labels = [row if m is None else np.where(m, row, -100) for row, m in zip(ids, masks, strict=True)]
                row_columns["labels"] = pa.array(labels, pa.list_(pa.int32()))
            columns = pa.table(
                row_columns | {name: stored[name] for name in path_labels if name in stored.column_names}
            )
            for other in others.drop_columns(DOCUMENT_COLUMN).schema:
                name = f"{other.name}_" if other.name in row_columns else other.name
                columns = columns.append_column(other.with_name(name), others[other.name])
            yield columns


def _other_columns(corpus: Corpus, documents: I64) -> Iterator[Item]:
    """Yield the records of documents, ascending and possibly repeated, without content and ids, with the document."""
    names_by_file: dict[str, list[str]] = {}

    def names_of_others(columns: Mapping[str, Any]) -> list[str]:
        content, _ = content_columns(corpus.settings, dict.fromkeys(columns))
        ids = {*id_columns(corpus.settings, columns)} & {ROW_ID_COLUMNS[0], DOC_ID_COLUMN}  # ours
        return [name for name in columns if name not in content and name not in ids]

    def select(schema: pa.Schema, name: str) -> Sequence[str]:
        names = names_by_file[name] = names_of_others({column.name: column.type for column in schema})
        return names or schema.names[:1]  # Arrow does not count the rows of a table without columns

    for chunk in corpus.source.chunks(0, select):
        if chunk.index > documents[-1]:
            return
        stop = chunk.index + (1 if isinstance(chunk, JsonRecord) else chunk.batch.num_rows)
        in_chunk = documents[slice(*np.searchsorted(documents, [chunk.index, stop]))]
        if not len(in_chunk):
            continue
        if isinstance(chunk, JsonRecord):
            ((_, values),) = records_in(chunk)
            names = names_of_others(values)
            yield from [{DOCUMENT_COLUMN: chunk.index} | {name: values[name] for name in names}] * len(in_chunk)
        else:
            table = to_readable_table(chunk.batch).take(pa.array(in_chunk - chunk.index))
            table = table.append_column(DOCUMENT_COLUMN, pa.array(in_chunk))
            yield table.select([DOCUMENT_COLUMN, *names_by_file[chunk.name]])


def iter_records(corpus: CorpusSettings, mask_M: Bool) -> Iterator[Item]:
    """Yield the selected records of a corpus; those beyond the end of `mask_M` are not selected.

    Null members of JSON records are absent, as they are when read.
    """
    for chunk in open_source(corpus.path, corpus.split).chunks(0, lambda schema, _: list(schema.names)):
        if chunk.index >= len(mask_M):
            return
        if isinstance(chunk, JsonRecord):
            if mask_M[chunk.index]:
                yield from (record for _, record in records_in(chunk))
            continue
        in_chunk_M = mask_M[chunk.index : chunk.index + chunk.batch.num_rows]
        if in_chunk_M.any():
            # converted first: Arrow cannot filter view types
            yield to_readable_table(chunk.batch.slice(0, len(in_chunk_M))).filter(pa.array(in_chunk_M))
