"""Rows kept shard by shard, so that a kill costs at most one of them; what they hold is their owner's.

`plan.json` says what is being written, `shard-00000.parquet` holds rows, its mark `shard-00000.json` says where the
next shard begins, `store.json` that the store is complete.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Protocol, Self, TypeVar

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow.dataset import dataset
from pydantic import ConfigDict, Field

from grasp.corpus.labels import ARROW_TYPE, DOCUMENT_COLUMN, Kind, column_of, kind_of_all, widest
from grasp.corpus.packing import Cursor, SkipLog, Skipped, StoredRow
from grasp.corpus.sources import Source
from grasp.errors import CorpusError
from grasp.files import UNSIGNED, FileEntry, discard, is_part, temporary_path
from grasp.settings import CorpusSettings
from grasp.store.contents import parquet_bytes, read_table
from grasp.store.directory import Files, Schema, Store
from grasp.store.records import FileName, JsonModel, Mark, Signed

FORMAT: Final = 1
PUBLIC_COLUMNS: Final = ("row_id", "doc_id", "n_tokens", "snippet")
SUMMARY: Final = "store.json"
AGAIN: Final = "delete its directory and build again"


class RowsMark(Mark):
    """What is known of a shard, and where the next one begins."""

    n_rows: int
    n_tokens: int
    cursor: Cursor
    labels: list[tuple[str, Kind]]
    ignored_columns: list[str]
    skipped: Skipped


class StoreSummary(JsonModel):
    """store.json. Of a store that an earlier version wrote, `files` is empty: the artifact's manifest has them."""

    model_config = ConfigDict(extra="ignore")

    holds: str = "tokens"
    format_version: int = FORMAT
    checksum: str = Field(UNSIGNED, description="Of this file, with the checksum itself as zeros.")
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
    ours=("shard-*.parquet", SUMMARY),
    again=AGAIN,
    mistake=CorpusError,
)


class Shard(Protocol):
    """Some rows of a store, with the table of what is known of them."""

    def __len__(self) -> int: ...
    def take(self, index: NDArray[np.int64], /) -> Self:
        """Rows by position in the shard, in the order given."""

    @classmethod
    def joined(cls, parts: Sequence[Self], /) -> Self:
        """Rows of all parts, one after the other."""


S = TypeVar("S", bound=Shard)
R = TypeVar("R", bound=StoredRow)


class RowStream(ABC, Generic[R]):
    """Where a store gets its rows from: a reader that can begin at any cursor."""

    def __init__(self, settings: CorpusSettings) -> None:
        self.settings = settings
        self.next_document = 0  # the first that was not read

    @abstractmethod
    def rows(self, cursor: Cursor, log: SkipLog) -> Iterator[R]:
        """Rows from `cursor` on; what is left out goes to the log."""

    @abstractmethod
    def payload(self, rows: Sequence[R]) -> Mapping[str, pa.Array]:
        """Columns of a shard that are not shown to callers as they are."""

    @abstractmethod
    def where(self, document: int) -> str:
        """File and line of a document, for messages."""


class ShardStore(ABC, Generic[S]):
    """A complete store on disk; opens without reading its rows."""

    holds: ClassVar[str]  # what rows are made of
    content: ClassVar[tuple[str, ...]]  # the columns that hold it
    seed: ClassVar[bytes]  # of the fingerprint

    def __init__(self, directory: Path, summary: StoreSummary) -> None:
        self._directory = directory
        self._files = Files(directory, summary.files, AGAIN, CorpusError)
        self.n_rows, self.n_shards, self.shard_rows = summary.n_rows, summary.n_shards, summary.shard_rows
        self.n_tokens, self.n_documents, self.fingerprint = summary.n_tokens, summary.n_documents, summary.fingerprint
        self.details, self.skipped = summary.details, summary.skipped
        self._kinds = dict(summary.labels)
        self.label_columns, self.ignored_columns = tuple(self._kinds), tuple(summary.ignored_columns)

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open a complete store.

        Raises:
            CorpusError: not there, not complete, of another format version, or of rows of another sort.
        """
        return cls(directory, cls._signed(directory.exists()).read(directory))

    @classmethod
    def _signed(cls, begun: bool = True) -> Signed[StoreSummary]:
        none = "an unfinished row store; run the build again to go on" if begun else "no such row store"
        what = f"a store of {cls.holds}"
        return Signed(
            SUMMARY, StoreSummary, what, cls.holds, FORMAT, AGAIN, CorpusError, none=none, unsigned=True, key="holds"
        )

    @classmethod
    def _write(
        cls,
        directory: Path,
        source: Source,
        stream: RowStream[R],
        reader: Mapping[str, Any],
        progress: Callable[[int], None] | None,
        *,
        shard_rows: int,
        replace: bool,
        details: Mapping[str, Any],
    ) -> Self:
        """Every shard from the first that is missing on, then the end of the store; open what is complete.

        Args:
            reader: what else than settings and corpus makes this store this store.
        """
        plan = {  # the path is not in it: a corpus may move
            "format": FORMAT,
            "settings": stream.settings.model_dump(mode="json", exclude={"path"}) | {"shard_rows": shard_rows},
            **reader,
            "corpus": {name: [size, stamp] for name, size, stamp in source.identity()},
        }
        foreign = directory.exists() and not (directory / ROWS.plan).exists()
        if foreign and (not directory.is_dir() or any(not is_part(entry) for entry in directory.iterdir())):
            raise CorpusError(f"{directory}: is not empty and not a row store; choose another directory")
        store = Store(directory, ROWS)
        store.begin(plan, replace=replace)
        if not (directory / SUMMARY).exists():
            log, size = SkipLog(), shard_rows
            done = next(k for k in count() if _name(k) not in store.parts)
            for name in list(store.parts)[done:]:
                store.drop(name)
            marks = [store.mark(name) for name in store.parts]
            cursor = marks[-1].cursor if marks else Cursor()
            stream.next_document = cursor.document
            rows = stream.rows(cursor, log)
            untold = sum(mark.n_rows for mark in marks)
            while shard := list(islice(rows, size)):
                # A short shard is the last one: what came after its last row has been read and counted as well.
                after = shard[-1].after if len(shard) == size else Cursor(stream.next_document)
                marks.append(_add(store, marks, shard, stream.payload(shard), after, log))
                if progress is not None:
                    progress(untold + len(shard))
                untold = 0
            skipped = _skipped(marks, log)
            _check(store, stream, skipped)
            summary = StoreSummary(
                holds=cls.holds,
                n_rows=sum(mark.n_rows for mark in marks),
                n_tokens=sum(mark.n_tokens for mark in marks),
                n_shards=len(marks),
                shard_rows=size,
                n_documents=stream.next_document,
                fingerprint=cls._fingerprint(store),
                labels=list(_kinds(marks).items()),
                ignored_columns=sorted({name for mark in marks for name in mark.ignored_columns}),
                skipped=skipped,
                details=dict(details),
                files={name: entry for mark in marks for name, entry in mark.files.items()},
            )
            cls._signed().write(directory, summary)
        return cls.open(directory)

    @classmethod
    def _fingerprint(cls, store: Store[RowsMark]) -> str:
        """Hash over the names and the content of all rows in order; shards do not enter."""
        digest = hashlib.blake2b(cls.seed, digest_size=16)
        for name in store.parts:
            for part in cls._hashed(read_table(store.file(name), AGAIN, CorpusError, ["row_id", *cls.content])):
                digest.update(part)
        return digest.hexdigest()

    @staticmethod
    @abstractmethod
    def _hashed(whole: pa.Table) -> Iterator[bytes]:
        """What of each row of a shard's table enters the fingerprint."""

    def shard(self, k: int) -> S:
        """Shard k, from 0.

        Raises:
            CorpusError: no such shard, or its file is damaged.
        """
        self._require(k)
        return self._shard(k * self.shard_rows, self._read(k))

    def table(self, k: int) -> pa.Table:
        """row_id, doc_id, n_tokens, snippet and the labels of shard k; its content is not read."""
        self._require(k)
        return self._public(self._read(k, [*PUBLIC_COLUMNS, *self._kinds]))

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every row, (N,); nothing else is read."""
        shards = [self._read(k, ["n_tokens"]) for k in range(self.n_shards)]
        return np.concatenate([np.asarray(table.column("n_tokens"), dtype=np.int64) for table in shards])

    def supervised(self) -> NDArray[np.int64]:
        """Positions of every row that carry loss, (N,)."""
        return self.lengths()

    @cached_property
    def n_supervised(self) -> int:
        """Positions that carry loss."""
        return int(self.supervised().sum())

    def rows(self, row_index: NDArray[np.int64]) -> S:
        """Rows by position, in the order given, repeats allowed; only the shards they lie in are read.

        Raises:
            CorpusError: a position outside 0 to n_rows - 1.
        """
        row_index = np.asarray(row_index, dtype=np.int64)
        outside = row_index[(row_index < 0) | (row_index >= self.n_rows)]
        if outside.size:
            raise CorpusError(f"{self._directory}: got row_index {outside[0]}, expected 0 to {self.n_rows - 1}")
        shard_of = row_index // self.shard_rows
        touched = np.unique(shard_of) if row_index.size else np.zeros(1, np.int64)
        parts = [self.shard(int(k)).take(row_index[shard_of == k] - k * self.shard_rows) for k in touched]
        # `parts` has the rows shard by shard; back to the order asked for
        back = np.argsort(np.argsort(shard_of, kind="stable"), kind="stable")
        return type(parts[0]).joined(parts).take(back)

    @abstractmethod
    def _shard(self, start: int, whole: pa.Table) -> S:
        """The rows of a shard's table, of which the first is row `start` of the corpus."""

    def _read(self, k: int, columns: list[str] | None = None) -> pa.Table:
        """The table of a shard, or those of the columns that it has; it is the one that was written."""
        name = f"{_name(k)}.parquet"
        path = self._files.file(name) if self._files.entries else self._directory / name
        return read_table(path, AGAIN, CorpusError, columns)

    def _require(self, k: int) -> None:
        if not 0 <= k < self.n_shards:
            raise CorpusError(f"{self._directory}: got shard {k}, expected 0 to {self.n_shards - 1}")

    def _public(self, whole: pa.Table) -> pa.Table:
        """The table that callers see: labels of the whole corpus, in one order and of one type."""
        columns = {name: whole.column(name) for name in PUBLIC_COLUMNS}
        for name, kind in self._kinds.items():
            found = name in whole.column_names
            column = whole.column(name) if found else pa.chunked_array([pa.nulls(len(whole), ARROW_TYPE[kind])])
            if column.type != ARROW_TYPE[kind]:
                column = pa.chunked_array([column_of(column.to_pylist(), kind)])
            columns[name] = column
        return pa.table(columns)


def _add(
    store: Store[RowsMark],
    before: Sequence[RowsMark],
    rows: Sequence[StoredRow],
    payload: Mapping[str, pa.Array],
    after: Cursor,
    log: SkipLog,
) -> RowsMark:
    """Write the next shard, and what was left out since the last one."""
    names = dict.fromkeys(name for row in rows for name in row.labels)
    first: dict[str, str] = {}
    for name in (*_kinds(before), *names):  # DuckDB, which reads label expressions, holds `topic` and `Topic` to be one
        if (other := first.setdefault(name.casefold(), name)) != name:
            raise CorpusError(
                f"labels {other!r} and {name!r} differ only in case, and an expression cannot tell them apart; rename "
                "or drop one of the columns"
            )
    columns = {name: [row.labels.get(name) for row in rows] for name in names}
    kinds = {name: kind_of_all(values) for name, values in columns.items()}
    table = pa.table(
        {
            "row_id": pa.array([row.row_id for row in rows], pa.string()),
            "doc_id": pa.array([row.doc_id for row in rows], pa.string()),
            "n_tokens": pa.array([row.n_tokens for row in rows], pa.int32()),
            "snippet": pa.array([row.snippet for row in rows], pa.string()),
            DOCUMENT_COLUMN: pa.array([row.document for row in rows], pa.int64()),
            **payload,
            **{name: column_of(values, kinds[name]) for name, values in columns.items()},
        }
    )
    name = _name(len(before))
    return store.put(
        name,
        {f"{name}.parquet": parquet_bytes(table)},
        n_rows=len(rows),
        n_tokens=sum(row.n_tokens for row in rows),
        cursor=after,
        labels=list(kinds.items()),
        ignored_columns=sorted({name for row in rows for name in row.ignored}),
        skipped=log.drain(),
    )


def _check(store: Store[RowsMark], stream: RowStream[Any], skipped: Skipped) -> None:
    """See that there are rows, and that no two have one name."""
    if not store.parts:
        reasons = ", ".join(f"{number} {reason}" for reason, number in skipped.counts.items())
        raise CorpusError(
            f"{stream.settings.path}: none of its {stream.next_document} records gives a row "
            f"({reasons or 'it is empty'}); expected at least one, of two tokens or more"
        )
    spill = temporary_path(store.root / "spill")  # DuckDB counts the names: memory does not grow with the corpus
    config: dict[str, str | bool | int | float | list[str]] = {
        "temp_directory": str(spill),
        "memory_limit": "512MB",
        "threads": 2,
    }
    files = dataset([str(store.file(name)) for name in store.parts], format="parquet")
    with duckdb.connect(config=config) as connection:
        connection.register("names", files)
        twice = connection.execute(
            f"SELECT row_id, min({DOCUMENT_COLUMN}), max({DOCUMENT_COLUMN}) FROM names GROUP BY row_id "
            f"HAVING count(*) > 1 ORDER BY min({DOCUMENT_COLUMN}), row_id LIMIT 1"
        ).fetchone()
    discard(spill)
    if twice is not None:
        row_id, *documents = twice
        shown = " and ".join(map(stream.where, documents))
        raise CorpusError(
            f"row_id {row_id!r} occurs twice: {shown}; give every row a name of its own, name another column "
            'of names with --id-column, or have names made with --id-column ""'
        )


def _skipped(marks: Sequence[RowsMark], log: SkipLog) -> Skipped:
    """What was left out, of the whole corpus; the log is part of it."""
    total = SkipLog()
    for skipped in (*(mark.skipped for mark in marks), log.frozen()):
        total.extend(skipped.counts, {reason: list(names) for reason, names in skipped.ids.items()})
    return total.frozen()


def _kinds(marks: Sequence[RowsMark]) -> dict[str, Kind]:
    """Type of every label over the finished shards; order of first occurrence."""
    kinds: dict[str, Kind] = {}
    for name, kind in (pair for mark in marks for pair in mark.labels):
        kinds[name] = widest([kinds.get(name, "null"), kind])
    return kinds


def _name(k: int) -> str:
    return f"shard-{k:05d}"
