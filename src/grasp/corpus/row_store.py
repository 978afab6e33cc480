"""Stores of rows on disk, written shard by shard and resumable. A row is one training sequence.

`plan.json` identifies the input, `shard-00000.parquet` has rows, its completion mark `shard-00000.json` the cursor of
the next shard, and `store.json` is written when the store is complete. `RowStore` has rows of token ids, which it reads
as `TokenRows`; a reader of other rows (`grasp.readers`) may store them as a subclass.

A corpus is read once: the fingerprint is computed for each shard while it is in memory, and only a resumed build
rereads its finished shards. The text of a row is not stored, only its document and span of characters.
Start with `RowStore.write` and `RowStore.open`.
Shape letters: N rows.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final, Self

import duckdb
import numpy as np
import pyarrow as pa
from pyarrow.dataset import dataset
from pydantic import ConfigDict, Field

from grasp.arrays import I32, I64, Bool
from grasp.corpus.conversations import PAIR, PAIRS_HINT
from grasp.corpus.documents import Corpus
from grasp.corpus.encoding import Tokenizer
from grasp.corpus.labels import (
    ARROW_TYPE,
    DOCUMENT_COLUMN,
    IDS_COLUMN,
    LOSS_MASK_COLUMN,
    SPANS_COLUMN,
    SPLIT_COLUMN,
    Kind,
    column_of,
    kind_of_all,
    widest,
)
from grasp.corpus.packing import START, Cursor, Row, Skipped, pack, render_document
from grasp.corpus.sources import Source, open_source
from grasp.errors import CorpusError
from grasp.files import UNSIGNED, FileEntry, is_part, kind_of
from grasp.settings import CorpusSettings
from grasp.store.contents import parquet_bytes, read_table
from grasp.store.directory import Files, Schema, Store
from grasp.store.records import FileName, JsonModel, Mark, Signed
from grasp.text import parse_json, skipped_lines

FORMAT: Final = 2
PUBLIC_COLUMNS: Final = ("row_id", "doc_id", "n_tokens", "snippet")
SUMMARY: Final = "store.json"
RECOVERY_HINT: Final = "delete its directory and rebuild"
PROBE_TEXTS: Final = 16
PROBE_CHARS: Final = 2_000
# default maximum tokens of a row, if the model's context is not shorter and the first rows of token ids are not longer
DEFAULT_MAX_LENGTH: Final = 2_048


class RowsMark(Mark):
    """Completion mark of a shard, with the cursor of the next one."""

    n_rows: int
    n_tokens: int
    cursor: Cursor
    labels: list[tuple[str, Kind]]
    ignored_columns: list[str]
    skipped: Skipped


class StoreSummary(JsonModel):
    """Summary of a store, store.json."""

    model_config = ConfigDict(extra="ignore")

    holds: str = "tokens"
    format_version: int = FORMAT
    checksum: str = Field(UNSIGNED, description="Checksum of this file, with zeros in its place.")
    n_rows: int
    n_tokens: int
    n_shards: int
    shard_rows: int
    n_documents: int
    fingerprint: str
    labels: list[tuple[str, Kind]]
    ignored_columns: list[str]
    skipped: Skipped
    details: dict[str, Any] = Field({})
    files: dict[FileName, FileEntry] = Field({})


ROWS = Schema(
    mark=RowsMark,
    marks="shard-*.json",
    plan="plan.json",
    other_files=("shard-*.parquet", SUMMARY),
    recovery_hint=RECOVERY_HINT,
    error_type=CorpusError,
)


def summary_of(holds: str) -> Signed[StoreSummary]:
    """Return the record type of the summary of a store of tokens, or of other rows."""
    return Signed(
        SUMMARY,
        StoreSummary,
        f"a store of {holds}",
        holds,
        FORMAT,
        RECOVERY_HINT,
        CorpusError,
        missing_message="an unfinished row store; run the build again to resume it",
        format_field="holds",
    )


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows as ragged arrays: the token ids of row i are flat_ids[offsets[i]:offsets[i + 1]]."""

    flat_ids: I32
    offsets: I64  # (N + 1,)
    table: pa.Table  # row_id, doc_id, n_tokens, snippet, then the labels
    loss_mask: Bool | None = None  # tokens that carry loss, aligned with flat_ids; None: all but a row's first
    split_N: I64 | None = None  # of preference pairs: number of tokens of the chosen side; None: rows are texts

    @classmethod
    def from_table(cls, with_content: pa.Table, public_columns: Sequence[str]) -> Self:
        """Return the rows of a table of the store, with these columns in `table`."""
        ids = with_content.column(IDS_COLUMN).combine_chunks()
        offsets, loss_mask, split_N = ids.offsets.to_numpy().astype(np.int64), None, None
        if LOSS_MASK_COLUMN in with_content.column_names:
            masks = with_content.column(LOSS_MASK_COLUMN).combine_chunks()
            loss_mask = np.ones(offsets[-1], dtype=np.bool_)  # of rows from shards without masks: all but the first
            loss_mask[offsets[:-1]] = False
            has_mask = np.repeat(masks.is_valid().to_numpy(zero_copy_only=False), np.diff(offsets))
            loss_mask[has_mask] = masks.flatten().to_numpy(zero_copy_only=False)
        if SPLIT_COLUMN in with_content.column_names:
            split_N = np.asarray(with_content.column(SPLIT_COLUMN), dtype=np.int64)
        return cls(ids.flatten().to_numpy(), offsets, with_content.select(public_columns), loss_mask, split_N)

    def take(self, index: I64) -> "TokenRows":
        """Return the rows at these positions, in this order."""
        spans = [slice(self.offsets[i], self.offsets[i + 1]) for i in index]
        return TokenRows(
            np.concatenate([self.flat_ids[span] for span in spans]),
            np.cumsum([0, *(span.stop - span.start for span in spans)], dtype=np.int64),
            self.table.take(pa.array(index)),
            None if self.loss_mask is None else np.concatenate([self.loss_mask[span] for span in spans]),
            None if self.split_N is None else self.split_N[index],
        )

    def sides(self) -> "TokenRows":
        """Return the sides of preference pairs as rows: chosen and rejected of the first pair, then of the next."""
        assert self.split_N is not None
        starts = np.stack([self.offsets[:-1], self.offsets[:-1] + self.split_N], axis=1).ravel()
        table = self.table.take(pa.array(np.repeat(np.arange(len(self)), 2)))
        return TokenRows(self.flat_ids, np.append(starts, self.offsets[-1]), table, self.loss_mask)

    def ids(self, i: int) -> I32:
        """Return the token ids of row i."""
        return self.flat_ids[self.offsets[i] : self.offsets[i + 1]]

    def mask(self, i: int) -> Bool | None:
        """Return the loss mask of row i; None: all but the first token."""
        return None if self.loss_mask is None else self.loss_mask[self.offsets[i] : self.offsets[i + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_tokens(self) -> int:
        """Return the number of tokens of all rows."""
        return len(self.flat_ids)

    def tokens_of(self, index: I64) -> int:
        """Return the number of tokens of the rows at these positions."""
        return int(np.diff(self.offsets)[index].sum())


class RowStore:
    """A complete store of rows on disk, which are read lazily."""

    signed: ClassVar[Signed[StoreSummary]] = summary_of("tokens")
    content: ClassVar[tuple[str, ...]] = (IDS_COLUMN, LOSS_MASK_COLUMN, SPLIT_COLUMN)  # columns of the content of rows
    seed: ClassVar[bytes] = b"grasp rows 1"  # initial bytes of the fingerprint

    def __init__(self, directory: Path, summary: StoreSummary) -> None:
        self._directory = directory
        self._files = Files(directory, summary.files, RECOVERY_HINT, CorpusError)
        self.n_rows, self.n_shards, self.shard_rows = summary.n_rows, summary.n_shards, summary.shard_rows
        self.n_tokens, self.n_documents, self.fingerprint = summary.n_tokens, summary.n_documents, summary.fingerprint
        self.details, self.skipped = summary.details, summary.skipped
        self._kinds = dict(summary.labels)
        self.label_columns, self.ignored_columns = tuple(self._kinds), tuple(summary.ignored_columns)
        self._public_columns = (*PUBLIC_COLUMNS, *self.label_columns)  # columns of `table`, in this order

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open a complete store.

        Raises:
            CorpusError: missing, incomplete, of another format version, or of another kind.
        """
        return cls(directory, cls.signed.read(directory))

    @classmethod
    def write(
        cls,
        directory: Path,
        settings: CorpusSettings,
        tokenizer: Tokenizer,
        *,
        shard_rows: int,
        context: int | None = None,
        corpus: Corpus | None = None,
        replace: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Self:
        """Read, tokenise and pack the corpus; resume an interrupted call; open a complete store.

        Args:
            directory: directory of the store.
            settings: settings of the corpus.
            tokenizer: tokenizer of the model.
            shard_rows: rows per shard, which bounds memory and the work lost by an interruption.
            context: context length of the model, used if `settings.max_length` is not set.
            corpus: the open corpus. Default: open it.
            replace: delete rows of other input in `directory`.
            progress: callback that receives the number of rows of each finished shard; the first call includes those
                of earlier runs.
        Raises:
            CorpusError: the corpus is empty or malformed, has duplicate row names, or differs from the one with which
                `directory` was started.
        """
        opened = corpus or Corpus(open_source(settings.path, settings.split), settings)
        first_documents = [render_document(document, tokenizer, settings) for document in opened.first]
        row_settings = settings
        if settings.max_length is None:
            lengths = [len(document.input_ids) for document in first_documents if document.input_ids is not None]
            longest = max([DEFAULT_MAX_LENGTH, *lengths])
            row_settings = settings.model_copy(update={"max_length": min(longest, context or longest)})
        # A tokenizer is identified by its special ids, and by the encoding of the first texts, which seldom agree.
        probes = [document for document in first_documents if document.needs_tokenizer][:PROBE_TEXTS]
        encoded: list[Any] = tokenizer.encode([str(document.text)[:PROBE_CHARS] for document in probes])
        encoded += [document.answers for document in probes if document.answers is not None]
        encoded += [tokenizer.prefix_ids] if tokenizer.prefix_ids else []
        identity = {
            "eos_id": tokenizer.eos_id,
            "vocab_size": tokenizer.vocab_size,
            "encoding": hashlib.blake2b(json.dumps(encoded).encode(), digest_size=16).hexdigest(),
        }
        return cls._write(
            directory,
            source=opened.source,
            settings=row_settings,
            documents=opened.documents,
            rows=lambda documents, cursor, skipped: pack(documents, row_settings, tokenizer, cursor, skipped),
            progress=progress,
            shard_rows=shard_rows,
            replace=replace,
            reader={"tokenizer": identity},
            details={"max_length": row_settings.max_length, "columns": opened.columns},
        )

    @classmethod
    def _write(
        cls,
        directory: Path,
        *,
        source: Source,
        settings: CorpusSettings,
        documents: Callable[[int], Iterator[Any]],
        rows: Callable[[Iterator[Any], Cursor, Skipped], Iterator[Row]],
        progress: Callable[[int], None] | None,
        shard_rows: int,
        replace: bool,
        reader: Mapping[str, Any],
        details: Mapping[str, Any],
    ) -> Self:
        """Write the missing shards and the summary, or open a complete store; other arguments as in `write`."""
        is_other = directory.exists() and not (directory / ROWS.plan).exists()
        if is_other and (not directory.is_dir() or any(not is_part(entry) for entry in directory.iterdir())):
            raise CorpusError(f"{directory}: not empty, and not a row store; choose another directory")
        complete = cls.open(directory) if kind_of(directory / SUMMARY) == "file" else None
        # Newer settings identify a store only if they are set, since older stores lack them. A corpus may be moved.
        unset = {name for name in ("label_paths", "path_labels") if not getattr(settings, name)}
        identifying = settings.model_dump(mode="json", exclude={"path", *unset})
        plan = {
            "format": FORMAT,
            "settings": identifying | {"shard_rows": shard_rows},
            **reader,
            "corpus": {name: [size, stamp] for name, size, stamp in source.identity()},
        }
        store = Store(directory, ROWS)
        store.begin(plan, replace=replace)  # deletes rows of other input, the summary too
        if complete is not None and (directory / SUMMARY).exists():
            return complete
        marks, skipped, n_documents, fingerprint = cls._write_shards(store, documents, rows, shard_rows, progress)
        if not marks:
            reasons = "; ".join(skipped_lines(skipped.counts, skipped.examples)) or "it is empty"
            first = next(documents(0), None)
            columns = set() if first is None else {name.partition(".")[0] for name in (*first.labels, *first.ignored)}
            hint = f"; {PAIRS_HINT}" if columns.issuperset(PAIR) else ""
            raise CorpusError(
                f"{settings.path}: none of its {n_documents} records gives a row ({reasons}); "
                f"expected at least one of two tokens or more{hint}"
            )
        if duplicate := first_duplicate([([store.file(part) for part in store.parts], DOCUMENT_COLUMN)]):
            row_id, *positions, _ = duplicate
            raise CorpusError(
                f"row_id {row_id!r} occurs twice: "
                f"{' and '.join(next(documents(position)).location for position in positions)}; use unique names, "
                'another column (corpus.row_id_column: NAME), or generated names (corpus.row_id_column: "")'
            )
        ignored = {name for mark in marks for name in mark.ignored_columns}
        kinds_of: dict[str, list[Kind]] = {}  # of a label in each shard
        for label, kind in (pair for mark in marks for pair in mark.labels):
            kinds_of.setdefault(label, []).append(kind)
        # A nested JSON field that is null in some lines looks there like a label without values, and is left out.
        paths = [label.split(".") for label in kinds_of]
        nested = {".".join(path[:depth]) for path in paths for depth in range(1, len(path))} | ignored
        labels = {label: widest(kinds) for label, kinds in kinds_of.items()}
        summary = StoreSummary(
            holds=cls.signed.format,
            n_rows=sum(mark.n_rows for mark in marks),
            n_tokens=sum(mark.n_tokens for mark in marks),
            n_shards=len(marks),
            shard_rows=shard_rows,
            n_documents=n_documents,
            fingerprint=fingerprint,
            labels=[(label, kind) for label, kind in labels.items() if kind != "null" or label not in nested],
            ignored_columns=sorted(ignored),
            skipped=skipped,
            details=dict(details),
            files={name: entry for mark in marks for name, entry in mark.files.items()},
        )
        cls.signed.write(directory, summary)
        return cls.open(directory)

    @classmethod
    def _write_shards(
        cls,
        store: Store[RowsMark],
        documents: Callable[[int], Iterator[Any]],
        rows: Callable[[Iterator[Any], Cursor, Skipped], Iterator[Row]],
        shard_rows: int,
        progress: Callable[[int], None] | None,
    ) -> tuple[list[RowsMark], Skipped, int, str]:
        """Write the shards that are missing; see `_write` for the arguments."""
        n_finished = next(k for k in count() if f"shard-{k:05d}" not in store.parts)
        for name in list(store.parts)[n_finished:]:  # after a gap
            store.drop(name)
        marks = [store.mark(name) for name in store.parts]
        cursor = marks[-1].cursor if marks else START
        n_documents = cursor.document  # up to the last one that was read

        def counted_documents() -> Iterator[Any]:
            nonlocal n_documents
            for document in documents(cursor.document):
                n_documents = document.index + 1
                yield document

        digest = hashlib.blake2b(cls.seed, digest_size=16)  # of names and content in order, independent of shards
        for name in store.parts:
            finished = read_table(store.file(name), RECOVERY_HINT, CorpusError, ["row_id", *cls.content])
            for content in cls._row_bytes(finished):
                digest.update(content)
        skipped = Skipped()  # since the last shard
        n_unreported = sum(mark.n_rows for mark in marks)
        spelling_of = {label.casefold(): label for mark in marks for label, _ in mark.labels}  # by case-folded name
        remaining = rows(counted_documents(), cursor, skipped)
        while shard := list(islice(remaining, shard_rows)):
            name = f"shard-{len(marks):05d}"
            table, kinds = cls._shard_table(shard, spelling_of)
            for content in cls._row_bytes(table):
                digest.update(content)
            mark = store.put(
                name,
                {f"{name}.parquet": parquet_bytes(table)},
                n_rows=len(shard),
                n_tokens=sum(row.n_tokens for row in shard),
                # A short shard is the last one: all documents after its last row have been read.
                cursor=shard[-1].next_cursor if len(shard) == shard_rows else Cursor(n_documents),
                labels=list(kinds.items()),
                ignored_columns=sorted({column for row in shard for column in row.ignored}),
                skipped=skipped.drain(),
            )
            marks.append(mark)
            if progress is not None:
                progress(n_unreported + len(shard))
            n_unreported = 0
        all_skipped = Skipped()
        for part in (*(mark.skipped for mark in marks), skipped):
            all_skipped.extend(part.counts, part.ids, part.examples)
        return marks, all_skipped, n_documents, digest.hexdigest()

    @classmethod
    def _shard_table(cls, rows: Sequence[Row], spelling_of: dict[str, str]) -> tuple[pa.Table, dict[str, Kind]]:
        """Return the table of a shard and the kinds of its labels, and add the labels to `spelling_of`."""
        labels = dict.fromkeys(name for row in rows for name in row.labels)
        for label in labels:  # DuckDB, which evaluates label expressions, treats `topic` and `Topic` as one
            if (other := spelling_of.setdefault(label.casefold(), label)) != label:
                raise CorpusError(
                    f"labels {other!r} and {label!r} differ only in case, which expressions ignore; "
                    "rename or drop one of the columns"
                )
        values = {label: [row.labels.get(label) for row in rows] for label in labels}
        kinds = {label: kind_of_all(column) for label, column in values.items()}
        table = pa.table(
            {
                "row_id": pa.array([row.row_id for row in rows], pa.string()),
                "doc_id": pa.array([row.doc_id for row in rows], pa.string()),
                "n_tokens": pa.array([row.n_tokens for row in rows], pa.int32()),
                "snippet": pa.array([row.snippet for row in rows], pa.string()),
                DOCUMENT_COLUMN: pa.array([row.document for row in rows], pa.int64()),
                **cls._content_columns(rows),
                **{label: column_of(column, kinds[label]) for label, column in values.items()},
            }
        )
        return table, kinds

    @staticmethod
    def _content_columns(rows: Sequence[Row]) -> dict[str, pa.Array]:
        """Return the columns of token ids and character spans, and of loss masks and splits if a row has them."""
        offsets = np.cumsum([0, *(row.n_tokens for row in rows)], dtype=np.int32)
        columns = {
            SPANS_COLUMN: pa.array([row.span for row in rows], pa.list_(pa.int64())),
            IDS_COLUMN: pa.ListArray.from_arrays(offsets, np.concatenate([row.input_ids for row in rows])),
        }
        if any(row.split is not None for row in rows):
            columns[SPLIT_COLUMN] = pa.array([row.split for row in rows], pa.int32())
        if any(row.loss_mask is not None for row in rows):
            masks = [np.arange(row.n_tokens) > 0 if row.loss_mask is None else row.loss_mask for row in rows]
            columns[LOSS_MASK_COLUMN] = pa.ListArray.from_arrays(offsets, pa.array(np.concatenate(masks)))
        return columns

    @staticmethod
    def _row_bytes(with_content: pa.Table) -> Iterator[bytes]:
        """Yield the bytes of each row for the fingerprint: name, tokens, loss mask and chosen tokens."""
        rows = TokenRows.from_table(with_content, ["row_id"])
        for i, row_id in enumerate(rows.table.column("row_id").to_pylist()):
            ids, mask, name = rows.ids(i), rows.mask(i), row_id.encode()
            content = [len(name).to_bytes(4, "little"), name, len(ids).to_bytes(4, "little")]
            content.append(ids.astype("<i4", copy=False).tobytes())
            if mask is not None and not mask[1:].all():
                content += [b"loss_mask", np.packbits(mask).tobytes()]
            if rows.split_N is not None:
                content += [b"split", int(rows.split_N[i]).to_bytes(4, "little")]
            yield b"".join(content)

    def _rows_from(self, with_content: pa.Table) -> TokenRows:
        """Build rows from a table of their public columns and their content."""
        return TokenRows.from_table(with_content, self._public_columns)

    def shard(self, k: int) -> TokenRows:
        """Read shard k, from 0.

        Raises:
            CorpusError: its file is damaged.
        """
        return self._rows_from(self.read_columns(k, self._public_columns + self.content))

    def table(self, k: int) -> pa.Table:
        """Read row_id, doc_id, n_tokens, snippet and labels of shard k, without the content."""
        return self.read_columns(k, self._public_columns)

    def lengths(self) -> I64:
        """Return the number of tokens of every row, (N,)."""
        columns = [self.read_columns(k, ("n_tokens",)).column("n_tokens") for k in range(self.n_shards)]
        return np.concatenate(columns).astype(np.int64)

    def loss_counts(self, k: int | None = None) -> I64:
        """Return the number of positions with loss of every row, (N,), or of the rows of shard k."""
        counts = []
        for shard in range(self.n_shards) if k is None else (k,):
            table = self.read_columns(shard, ("n_tokens", LOSS_MASK_COLUMN))
            lengths = np.asarray(table.column("n_tokens"), dtype=np.int64)
            if LOSS_MASK_COLUMN not in table.column_names:
                counts.append(lengths - 1)  # all but the first token
                continue
            loss_mask = table.column(LOSS_MASK_COLUMN).combine_chunks().values.to_numpy(zero_copy_only=False)
            counts.append(np.add.reduceat(loss_mask.astype(np.int64), np.cumsum(lengths) - lengths))
        return np.concatenate(counts)

    @cached_property
    def n_loss_positions(self) -> int:
        """Return the total number of positions with loss."""
        return int(self.loss_counts().sum())

    @property
    def masked(self) -> bool:
        """Return whether only a part of some rows carries loss, e.g. of conversations."""
        # without masks, all tokens of a row carry loss except the first, which nothing predicts
        return self.n_loss_positions < self.n_tokens - self.n_rows

    def rows(self, row_index: I64) -> TokenRows:
        """Read rows by position, in the given order, possibly repeated, from only the shards that contain them."""
        row_index = np.asarray(row_index, dtype=np.int64)
        assert not row_index.size or (row_index.min() >= 0 and row_index.max() < self.n_rows)
        shard_of_row = row_index // self.shard_rows
        tables = []
        for k in np.unique(shard_of_row) if row_index.size else (0,):  # no rows: read one shard for the schema
            in_shard = row_index[shard_of_row == k] - k * self.shard_rows
            tables.append(self.read_columns(int(k), self._public_columns + self.content).take(pa.array(in_shard)))
        # The tables are in order of shards. The inverse of the permutation that sorts by shard restores the order of
        # `row_index`; the argsort of a permutation is its inverse.
        inverse = np.argsort(np.argsort(shard_of_row, kind="stable"), kind="stable")
        return self._rows_from(pa.concat_tables(tables, promote_options="default").take(pa.array(inverse)))

    def read_columns(self, k: int, names: Sequence[str]) -> pa.Table:
        """Read columns of shard k; labels have the same type in all shards, missing content columns are omitted.

        Raises:
            CorpusError: its file is damaged.
        """
        assert 0 <= k < self.n_shards
        stored = read_table(self._files.file(f"shard-{k:05d}.parquet"), RECOVERY_HINT, CorpusError, list(names))
        columns = {name: stored.column(name) for name in names if name in stored.column_names}
        for label in names:
            if (kind := self._kinds.get(label)) is None:
                continue
            if label not in columns:
                columns[label] = pa.chunked_array([pa.nulls(len(stored), ARROW_TYPE[kind])])
            elif columns[label].type != ARROW_TYPE[kind]:
                columns[label] = pa.chunked_array([column_of(columns[label].to_pylist(), kind)])
        return pa.table({name: columns[name] for name in names if name in columns})

    def longest(self) -> int:
        """Return the number of tokens of the longest sequence: a row, or a side of a preference pair."""
        longest = 0
        for k in range(self.n_shards):
            table = self.read_columns(k, ("n_tokens", SPLIT_COLUMN))
            lengths = np.asarray(table.column("n_tokens"), dtype=np.int64)
            # the chosen side of a pair; a row that is not a pair has no other side
            split_N = np.asarray(table.column(SPLIT_COLUMN)) if SPLIT_COLUMN in table.column_names else lengths
            longest = max(longest, int(split_N.max()), int((lengths - split_N).max()))
        return longest

    def was_built_from(self, source: Source) -> bool:
        """Return whether a source has the files from which the rows were built, so that their texts can be read.

        Files are compared by name, size and stamp: a digest of the content, or the modification time.
        """
        try:
            plan = parse_json((self._directory / ROWS.plan).read_bytes())
        except (OSError, ValueError):
            return False
        files = {name: [size, stamp] for name, size, stamp in source.identity()}
        return bool(plan.get("corpus") == files) and all(stamp for _, stamp in files.values())

    def texts(self, row_index: I64, corpus: Corpus, tokenizer: Callable[[], Tokenizer]) -> Iterator[str | None]:
        """Yield the texts of rows: their spans of documents; None if the span is unknown.

        Args:
            row_index: ascending row indices.
            corpus: corpus from which the rows were built, see `was_built_from`.
            tokenizer: called only to render conversations.
        """
        documents, document = corpus.documents(0), None
        shard_of_row = row_index // self.shard_rows
        for k in np.unique(shard_of_row).tolist():
            table = self.read_columns(k, ("doc_id", SPANS_COLUMN))
            selected = table.take(row_index[shard_of_row == k] - k * self.shard_rows)
            for doc_id, span in zip(*(column.to_pylist() for column in selected.columns), strict=True):
                if span is None:
                    yield None
                    continue
                index, start, end = span
                if document is None or document.index != index:
                    document = next(later for later in documents if later.index == index)
                    if document.conversation is not None:
                        document = render_document(document, tokenizer(), corpus.settings)
                assert document.doc_id == doc_id
                yield str(document.text)[start:end]


def first_duplicate(tables: Sequence[tuple[Sequence[Path], str]]) -> tuple[Any, ...] | None:
    """Return the first row_id that occurs twice: its name, first and last place, and the number of such names.

    DuckDB counts the names and spills to disk, so that memory is bounded.

    Args:
        tables: Parquet files, and the place of their rows as an SQL expression over their columns.
    """
    selected = " UNION ALL ".join(
        f"SELECT CAST(row_id AS VARCHAR) AS row_id, {place} AS place FROM names_{k}"
        for k, (_, place) in enumerate(tables)
    )
    with (
        TemporaryDirectory(prefix="grasp-names-") as spill,
        duckdb.connect(config={"temp_directory": spill, "memory_limit": "512MB", "threads": 2}) as connection,
    ):
        for k, (files, _) in enumerate(tables):
            connection.register(f"names_{k}", dataset(list(map(str, files)), format="parquet"))
        return connection.execute(
            f"SELECT row_id, min(place), max(place), count(*) OVER () FROM ({selected}) GROUP BY row_id "
            "HAVING count(*) > 1 ORDER BY min(place), row_id LIMIT 1"
        ).fetchone()
