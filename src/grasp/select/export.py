"""Export selected rows, or the whole documents that they are from, as a corpus to train on. Start with `Exporter`.

The build stores the rows as token ids and as character spans of their documents, so the text is read from the corpus
and no tokenizer is loaded. If the rows were not stored, or the files of the corpus have changed, the corpus is
tokenized and packed again. Every row must then have the same id as in the artifact, and all of them the same
fingerprint, which is a hash of ids and tokens.

The output is a directory of Parquet or JSON lines, which `datasets.load_dataset` and `grasp build` read, or one that
`datasets.load_from_disk` reads. It contains `_manifest.yaml` with the arguments, the corpus, the counts and a checksum
of each file. The directory is written to a temporary path and renamed when complete.
Shape letters: N rows, M documents of the corpus.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, cast, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grasp.arrays import F64, I64, Bool
from grasp.artifact.manifest import LOSS_TOKENS, TOKENS
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import row_tokens
from grasp.build.provenance import BuildSource, require_here
from grasp.corpus.documents import Corpus, records_in
from grasp.corpus.encoding import Tokenizer
from grasp.corpus.labels import DOCUMENT_COLUMN
from grasp.corpus.row_store import RowStore
from grasp.corpus.sources import ArrowChunk, JsonRecord, open_source, parquet_batches
from grasp.errors import CorpusError, SettingsError
from grasp.extras import require
from grasp.files import check_place, discard, entry_of, temporary_path, write_whole, written_aside
from grasp.predict.weights import mask_of
from grasp.results import write_table
from grasp.select.export_tables import readable_table, table_of_records, write_one_schema
from grasp.settings import CorpusSettings
from grasp.text import json_text
from grasp.yaml_files import validated, write_yaml

if TYPE_CHECKING:
    from grasp.select.selection import Selection

Format = Literal["parquet", "jsonl", "datasets"]
Rule = Literal["any", "half", "all"]
MANIFEST = "_manifest.yaml"  # `datasets` reads any .json as data, and Arrow any file without a leading underscore
SHARD_RECORDS = 50_000
SHARD_CHARS = 64 << 20  # characters of JSON records that are buffered before they become a table
BLOCK_ROWS = 4_096
TOKENS_TOLERANCE = 0.02  # relative difference in tokens of whole documents above which a note is added
ROW_COLUMNS = ("row_id", "doc_id", "n_tokens")
OMITTED_COLUMNS = ("row_index", LOSS_TOKENS, "loss", "snippet")  # columns of the row table that training does not need
NOTHING_LEFT_OUT = "left out: every row is selected, so there is nothing to write; lower the budget"

Item: TypeAlias = pa.Table | dict[str, Any]  # a table of rows, or a JSON record


@dataclass(frozen=True, slots=True)
class Export:
    """Summary of a written export."""

    path: Path
    holds: str  # rows or documents
    records: int
    tokens: int
    note: str = ""  # difference in tokens from the selected rows

    def __str__(self) -> str:
        size = f"{self.records:,} {self.holds}, {self.tokens:,} tokens{self.note}"
        return f"{self.path}: {size}; described in {MANIFEST}"


@dataclass(frozen=True, slots=True)
class Exporter:
    """Options of an export, validated before the selection is computed.

    Attributes:
        rule: which documents to write whole; None: only the selected rows.
        corpus: how to read the corpus.
        ids: file to write the ids of the whole documents to, if any.
    """

    artifact: ArtifactReader
    format: Format
    rule: Rule | None
    corpus: CorpusSettings
    ids: Path | None

    @classmethod
    def from_options(
        cls,
        artifact: ArtifactReader,
        *,
        documents: str | None = None,
        form: str = "parquet",
        corpus: str | None = None,
        ids: Path | str | None = None,
    ) -> Self:
        """Validate options, see `Selection.export`.

        Raises:
            SettingsError: the rule or format is unknown, `ids` is given without `documents`, or the corpus cannot be
                opened.
        """
        if form not in get_args(Format):
            raise SettingsError(f"format: got {form!r}, expected one of {', '.join(get_args(Format))}")
        rule = None if documents is None else checked_rule(documents)
        if ids is not None and rule is None:
            raise SettingsError("ids: requires `documents`: any, half or all")
        settings = corpus_settings(artifact, corpus)
        try:
            open_source(settings.path, settings.split)
        except CorpusError as err:
            raise SettingsError(f"{err}; pass its current path with `corpus`") from err
        return cls(artifact, cast(Format, form), rule, settings, None if ids is None else Path(ids))

    def write(
        self, selection: "Selection", out: Path, *, left_out: bool = False, say: Callable[[str], None] | None = None
    ) -> Export:
        """Write the selected rows, or the documents that they are from; with `left_out`, the others."""
        artifact, rule = self.artifact, self.rule
        facts: dict[str, Any] = {"corpus": artifact.manifest.fingerprints["corpus"], "artifact": artifact.where}
        facts |= {"params": dict(selection.params)} | ({"left_out": True} if left_out else {})
        # without a text column, a row is a record (a conversation, a pair, an instruction) and is written unchanged
        has_text = bool({"text", "input_ids"} & (artifact.manifest.details.get("columns") or {}).keys())
        source, corpus = BuildSource(artifact), Corpus(open_source(self.corpus.path, self.corpus.split), self.corpus)
        with stored_rows(artifact, corpus, lambda: source.tokenizer, temporary_path(out)) as rows:
            if rule is None and has_text:
                index = selection.left_out if left_out else selection.row_index
                if not len(index):
                    raise SettingsError(NOTHING_LEFT_OUT)
                effect = selection.effect_N[index]
                tables = row_tables(artifact, rows, corpus, index, effect, lambda: source.tokenizer)
                tokens = int(row_tokens(artifact)[index].sum())
                return write_corpus(out, self.format, "rows", tables, tokens, facts)
            chosen_N = mask_of(selection.row_index, artifact.n_rows)
            documents = select_documents(rows, chosen_N, rule or "all", others=left_out)
        if say is not None and rule is not None:
            line = f"whole documents ({rule}): {len(documents.names):,} with {documents.tokens:,} tokens"
            if documents.added:
                line += f"; {documents.added:,} of them in rows that are not selected"
            if documents.lost:
                line += f"; {documents.lost:,} tokens of selected rows are dropped with their documents"
            say(line)
        if self.ids is not None:
            documents.write_ids(self.ids)
        facts |= {} if rule is None else {"documents": rule}
        records = iter_records(self.corpus, documents.mask_M)
        written = write_corpus(out, self.format, "documents", records, documents.tokens, facts)
        missed = 0.0 if rule is None or left_out else documents.tokens / selection.n_tokens - 1
        if abs(missed) <= TOKENS_TOLERANCE:
            return written
        more = "more" if missed > 0 else "fewer"
        note = f", {abs(missed):.0%} {more} than the selected rows ({selection.n_tokens:,}); to select whole documents"
        return replace(written, note=f"{note} within the budget, pass --documents all")


def checked_rule(text: str) -> Rule:
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
        SettingsError: the artifact does not record its corpus, or its rows are images.
        ArtifactError: the artifact was merged from parts with different corpora.
    """
    artifact.require_one_corpus()
    recorded = artifact.manifest.settings.get("corpus")
    if not isinstance(recorded, dict):
        raise SettingsError(f"{artifact.where}: does not record the corpus that it was built from; rebuild it")
    if (artifact.manifest.settings.get("model") or {}).get("classifier") is not None:
        raise SettingsError(f"{artifact.where}: images cannot be exported; save the list of row_ids with --out instead")
    settings = validated(CorpusSettings, recorded, f"{artifact.where}: settings.corpus")
    if path is None:
        path = artifact.place(settings.path)
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
    fingerprint, place = artifact.manifest.fingerprints.get("corpus"), artifact.path / TOKENS
    if place.is_dir():
        rows = RowStore.open(place)
        if rows.fingerprint == fingerprint and rows.keeps_spans_of(corpus.source):
            yield rows
            return
    try:
        rows = RowStore.write(aside, corpus.settings, tokenizer(), shard_rows=artifact.grid.shard_rows, corpus=corpus)
        if rows.fingerprint != fingerprint:
            raise CorpusError(f"{corpus.settings.path}: {_difference(artifact, rows)}")
        yield rows
    finally:
        discard(aside)


def _difference(artifact: ArtifactReader, rows: RowStore) -> str:
    """Describe the first difference between the rows of a corpus and those of the artifact, and what to do."""
    remedy = "the artifact was built from another corpus; pass the path of that one with `corpus`"
    expected = (name for batch in artifact.row_batches(["row_id"]) for name in batch.column(0).to_pylist())
    names = (name for k in range(rows.n_shards) for name in rows.columns(k, ("row_id",))["row_id"].to_pylist())
    for row, name in zip_longest(names, expected):
        if name is None:
            return f"has {row!r} beyond the {artifact.n_rows:,} rows of {artifact.where}; {remedy}"
        if row != name:
            return f"{'ends' if row is None else f'has {row!r}'} where {artifact.where} has row {name!r}; {remedy}"
    return f"its rows have the ids of {artifact.where} but other tokens; {remedy}, or restore the tokenizer"


@dataclass(frozen=True, slots=True)
class DocumentSelection:
    """Selected whole documents, compared with the selected rows.

    Attributes:
        mask_M: whether a document is selected.
        names: ids of the selected documents: the row_id or doc_id of the corpus, or a generated one.
        records: their positions in the corpus.
        tokens: their number of tokens.
        added: how many of these tokens are in rows that are not selected.
        lost: tokens of selected rows whose documents are not selected.
    """

    mask_M: Bool
    names: tuple[str, ...]
    records: tuple[int, ...]
    tokens: int
    added: int
    lost: int

    def write_ids(self, path: Path) -> None:
        """Write a table with columns name and record, or a text file with one name per line, atomically.

        Raises:
            SettingsError: a name contains a line break and the file is text.
        """
        if path.suffix in (".csv", ".parquet"):
            write_table(pa.table({"name": pa.array(self.names, pa.string()), "record": pa.array(self.records)}), path)
            return
        for name in self.names:
            if "\n" in name or "\r" in name:
                raise SettingsError(
                    f"document {name!r}: contains a line break; write the ids to a .csv or .parquet file"
                )
        write_whole(path, ("\n".join(self.names) + "\n").encode())


def select_documents(rows: RowStore, chosen_N: Bool, rule: Rule, *, others: bool = False) -> DocumentSelection:
    """Select the documents that have any, half or all of their tokens in selected rows, or the other documents.

    A packed row contains parts of several documents and is assigned to the one with the most tokens in it.

    Args:
        chosen_N: whether a row is selected.
        others: select the complement.

    Raises:
        SettingsError: no document is selected.
    """
    table = pa.concat_tables(rows.columns(k, (DOCUMENT_COLUMN, "n_tokens")) for k in range(rows.n_shards))
    document_N, tokens_N = (column.to_numpy().astype(np.int64) for column in table.columns)
    tokens_M, chosen_M = (
        np.bincount(document_N, count_N).astype(np.int64) for count_N in (tokens_N, tokens_N * chosen_N)
    )
    least = {"any": 0.0, "half": 0.5, "all": 1.0}[rule]
    mask_M = (tokens_M > 0) & (((chosen_M > 0) & (chosen_M >= least * tokens_M)) != others)
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
        names += rows.columns(k, ("row_id",))["row_id"].filter(is_named).to_pylist()
    whole, chosen = int(tokens_M[mask_M].sum()), int(chosen_M[mask_M].sum())
    records = tuple(np.flatnonzero(mask_M).tolist())
    return DocumentSelection(mask_M, tuple(names), records, whole, whole - chosen, int(chosen_M.sum()) - chosen)


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
    tokens, including end-of-text tokens), n_tokens, order (rank in the selection, from 0), effect, and the labels.

    Args:
        rows: all rows of the artifact.
        corpus: the corpus that they were packed from.
        row_index: selected rows, best first.
        effect: effect of each selected row, in the order of `row_index`.
        tokenizer: loads the tokenizer; only called for rows without a text span, e.g. conversations.
    """
    order_N = np.full(artifact.n_rows, -1, dtype=np.int64)
    order_N[row_index] = np.arange(len(row_index))
    texts = rows.texts(np.flatnonzero(order_N >= 0), corpus, tokenizer)
    start, text = 0, (artifact.manifest.details.get("columns") or {}).get("text", "text")
    for batch in artifact.row_batches(None, batch_rows=BLOCK_ROWS):
        order_n = order_N[start : start + batch.num_rows]
        in_batch = np.flatnonzero(order_n >= 0)
        shard = rows.rows(start + in_batch) if len(in_batch) else None
        start += batch.num_rows
        if shard is None:
            continue
        table = pa.Table.from_batches([batch.take(pa.array(in_batch))]).replace_schema_metadata(None)
        ids = [shard.ids(i) for i in range(len(shard))]
        known = islice(texts, len(shard))
        ours = {
            "row_id": table["row_id"],
            "doc_id": table["doc_id"],
            text: pa.array(
                [
                    tokenizer().decode([row.tolist()])[0] if words is None else words
                    for row, words in zip(ids, known, strict=True)
                ],
                pa.large_string(),
            ),
            "input_ids": pa.array(ids, pa.list_(pa.int32())),
            "n_tokens": table["n_tokens"],
            "order": pa.array(order_n[in_batch]),
            "effect": pa.array(effect[order_n[in_batch]]),
        }
        labels = [name for name in table.column_names if name not in (*ROW_COLUMNS, *OMITTED_COLUMNS)]
        yield pa.table({**ours, **{f"{name}_" if name in ours else name: table[name] for name in labels}})


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
        known_M = mask_M[chunk.index : chunk.index + chunk.batch.num_rows]
        if known_M.any():
            batch = chunk.batch.slice(0, len(known_M))
            table = batch if isinstance(batch, pa.Table) else pa.Table.from_batches([batch])
            yield readable_table(table).filter(pa.array(known_M))  # converted first: Arrow cannot filter view types


def write_corpus(
    out: Path, kind: Format, holds: str, items: Iterable[Item], tokens: int, request: Mapping[str, Any]
) -> Export:
    """Write rows or documents to a directory, atomically.

    Args:
        holds: rows or documents.
        items: tables or JSON records.
        tokens: number of tokens in them; 0 if unknown.
        request: arguments to record in the manifest.

    Raises:
        CorpusError: a record cannot be represented in the format.
        MissingExtraError: the format is `datasets` and the library is not installed.
    """
    check_place(out)
    if kind == "datasets":
        require("datasets", extra="datasets", feature="writing a `datasets` directory")
    order = "of the corpus" + "; column `order` has the rank in the selection" * (holds == "rows")
    with written_aside(out) as part:
        items = iter(items)
        first = next(items, None)
        items = items if first is None else chain([first], items)
        are_lines = kind == "jsonl" and isinstance(first, dict)
        shards = part if kind == "parquet" or are_lines else part / "shards"
        shards.mkdir(parents=True)
        if are_lines:
            n_records = _json_lines(part, items)
        else:
            tables = _parquet(shards, items)
            n_records = sum(pq.read_metadata(file).num_rows for file in tables)
            if kind == "jsonl":  # written from tables, so that all records have the same columns
                _json_lines(part, _records_of(tables))
            elif kind == "datasets":
                _as_datasets(shards, part)
        if shards != part:
            discard(shards)
        files = {file.name: entry_of(file).model_dump() for file in sorted(part.iterdir())}
        contents = {
            "holds": holds,
            "order": order,
            "records": n_records,
            "tokens": tokens,
            "format": kind,
            "files": files,
        }
        write_yaml({**request, **contents}, part / MANIFEST)
    return Export(out, holds, n_records, tokens)


def _records_of(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for path in files:
        with pq.ParquetFile(path) as file:
            for batch in parquet_batches(file, file.schema_arrow.names):
                yield from (record for _, record in records_in(ArrowChunk(0, path.name, 0, batch)))


def _json_lines(shards: Path, records: Iterable[dict[str, Any]]) -> int:
    """Write part-00000.jsonl, ..., with one record per line, and return the number of records."""
    n_records = 0
    with ExitStack() as stack:
        for record in records:
            if n_records % SHARD_RECORDS == 0:
                stack.close()
                path = shards / f"part-{n_records // SHARD_RECORDS:05d}.jsonl"
                file = stack.enter_context(path.open("w", encoding="utf-8", newline="\n"))
            try:
                file.write(f"{json_text(record, None, only_ascii=False)}\n")
            except TypeError as err:
                raise CorpusError(f"record {n_records:,}: {err}; not representable as JSON, write parquet") from err
            n_records += 1
    return n_records


def _parquet(shards: Path, items: Iterable[Item]) -> list[Path]:
    """Write part-00000.parquet, ..., all with one schema, and return their paths.

    JSON records are buffered up to SHARD_RECORDS or SHARD_CHARS; each buffer becomes a file.
    """
    writer: pq.ParquetWriter | None = None
    files: list[Path] = []
    in_file = chars = 0
    waiting: list[dict[str, Any]] = []
    with ExitStack() as stack:
        for item in chain(items, [None]):
            table = item
            if isinstance(item, dict):
                waiting.append(item)
                chars += sum(len(value) for value in item.values() if isinstance(value, str))
            if waiting and (item is None or len(waiting) == SHARD_RECORDS or chars >= SHARD_CHARS):
                table = table_of_records(waiting)
                chars, waiting, writer = 0, [], None
            if not isinstance(table, pa.Table):
                continue
            if writer is None or in_file >= SHARD_RECORDS or not writer.schema.equals(table.schema):
                stack.close()
                files.append(shards / f"part-{len(files):05d}.parquet")
                writer = stack.enter_context(pq.ParquetWriter(files[-1], table.schema, compression="zstd"))
                in_file = 0
            writer.write_table(table)
            in_file += table.num_rows
    write_one_schema(files)
    return files


def _as_datasets(shards: Path, out: Path) -> None:
    """Write Parquet shards as a `datasets` directory."""
    datasets = require("datasets", extra="datasets", feature="writing a `datasets` directory")
    files = sorted(str(file) for file in shards.glob("*.parquet"))
    were_shown = not datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()
    try:
        datasets.Dataset.from_parquet(files, cache_dir=str(shards / "cache")).save_to_disk(str(out))
    finally:
        if were_shown:
            datasets.utils.enable_progress_bars()
