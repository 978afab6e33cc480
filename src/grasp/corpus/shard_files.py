"""A directory of finished shards, written so that a kill costs at most one of them; what they hold is their owner's.

`plan.json` says what is being written, `shard-00000.parquet` holds rows, `shard-00000.json`, written after
it, says that the shard is whole and where the next one begins, `store.json` says that the store is complete.
"""

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Protocol, Self, TypeVar, cast

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow.dataset import dataset

from grasp.corpus.labels import DOCUMENT_COLUMN, Kind, arrow_type, as_kind, column_of, kind_of_all, wider
from grasp.corpus.packing import Cursor, SkipLog, Skipped, StoredRow
from grasp.corpus.sources import Source
from grasp.errors import CorpusError
from grasp.files import aside, differences, discard, is_part, remove_parts, written_aside
from grasp.settings import CorpusSettings

FORMAT: Final = 1
PUBLIC_COLUMNS: Final = ("row_id", "doc_id", "n_tokens", "snippet")
SUMMARY: Final = "store.json"
_OURS: Final = re.compile(r"(?:plan|store|shard-\d+)\.(?:json|parquet)")


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

    def __init__(self, directory: Path, summary: Mapping[str, Any]) -> None:
        self._directory = directory
        self.n_rows: int = summary["n_rows"]
        self.n_shards: int = summary["n_shards"]
        self.shard_rows: int = summary["shard_rows"]
        self.n_tokens: int = summary["n_tokens"]
        self.n_documents: int = summary["n_documents"]
        self.fingerprint: str = summary["fingerprint"]
        self.details: dict[str, Any] = summary.get("details", {})
        self._kinds: dict[str, Kind] = dict(summary["labels"])
        self.label_columns: tuple[str, ...] = tuple(self._kinds)
        self.ignored_columns: tuple[str, ...] = tuple(summary["ignored_columns"])
        ids = {reason: tuple(names) for reason, names in summary["skipped"]["ids"].items()}
        self.skipped = Skipped(counts=summary["skipped"]["counts"], ids=ids)

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open a complete store.

        Raises:
            CorpusError: not there, not complete, of another format version, or of rows of another sort.
        """
        path = directory / SUMMARY
        if not path.exists():
            state = (
                "an unfinished row store; run the build again to go on" if directory.exists() else "no such row store"
            )
            raise CorpusError(f"{directory}: {state}")
        summary = read_json(path)
        if summary.get("format") != FORMAT:
            raise CorpusError(
                f"{path}: got format {summary.get('format')!r}, expected {FORMAT}; delete {directory} and build again"
            )
        if (found := summary.get("holds", "tokens")) != cls.holds:
            raise CorpusError(f"{path}: a store of {found}, expected one of {cls.holds}")
        return cls(directory, summary)

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
        begin(directory, plan, replace=replace)
        if not (directory / SUMMARY).exists():
            log, size = SkipLog(), shard_rows
            writer = _StoreWriter(directory, log)
            cursor = Cursor(**writer.states[-1]["cursor"]) if writer.states else Cursor()
            stream.next_document = cursor.document
            rows = stream.rows(cursor, log)
            while shard := list(islice(rows, size)):
                # A short shard is the last one: what came after its last row has been read and counted as well.
                after = shard[-1].after if len(shard) == size else Cursor(stream.next_document)
                writer.add(shard, stream.payload(shard), after)
                if progress is not None:
                    progress(writer.total("n_rows"))
            writer.check(stream)
            writer.close(
                holds=cls.holds,
                shard_rows=size,
                n_documents=stream.next_document,
                fingerprint=cls._fingerprint(directory, len(writer.states)),
                details=dict(details),
            )
        return cls.open(directory)

    @classmethod
    def _fingerprint(cls, directory: Path, n_shards: int) -> str:
        """Hash over the names and the content of all rows in order; shards do not enter."""
        digest = hashlib.blake2b(cls.seed, digest_size=16)
        for k in range(n_shards):
            for part in cls._hashed(read_shard(directory, k, ["row_id", *cls.content])):
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
        return self._shard(k * self.shard_rows, read_shard(self._directory, k))

    def table(self, k: int) -> pa.Table:
        """row_id, doc_id, n_tokens, snippet and the labels of shard k; its content is not read."""
        self._require(k)
        return self._public(read_shard(self._directory, k, [*PUBLIC_COLUMNS, *self._kinds]))

    def lengths(self) -> NDArray[np.int64]:
        """Tokens of every row, (N,); nothing else is read."""
        shards = [read_shard(self._directory, k, ["n_tokens"]) for k in range(self.n_shards)]
        return np.concatenate([np.asarray(table.column("n_tokens"), dtype=np.int64) for table in shards])

    def supervised(self) -> NDArray[np.int64]:
        """Positions of every row that carry loss, (N,)."""
        return self.lengths()

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

    def _require(self, k: int) -> None:
        if not 0 <= k < self.n_shards:
            raise CorpusError(f"{self._directory}: got shard {k}, expected 0 to {self.n_shards - 1}")

    def _public(self, whole: pa.Table) -> pa.Table:
        """The table that callers see: labels of the whole corpus, in one order and of one type."""
        columns = {name: whole.column(name) for name in PUBLIC_COLUMNS}
        for name, kind in self._kinds.items():
            found = name in whole.column_names
            column = whole.column(name) if found else pa.chunked_array([pa.nulls(len(whole), arrow_type(kind))])
            columns[name] = as_kind(column, kind)
        return pa.table(columns)


class _StoreWriter:
    """Writes shards one after the other, from the first that is missing on, then closes the store."""

    def __init__(self, directory: Path, log: SkipLog) -> None:
        self._directory = directory
        self._log = log
        self.states: list[dict[str, Any]] = []
        while (path := _file(directory, len(self.states), ".json")).exists():
            self.states.append(read_json(path))

    def total(self, name: str) -> int:
        """Sum over the finished shards of a number that their states hold."""
        return sum(state[name] for state in self.states)

    def add(self, rows: Sequence[StoredRow], payload: Mapping[str, pa.Array], after: Cursor) -> None:
        """Write one shard, and what was left out since the last one."""
        k = len(self.states)
        names = dict.fromkeys(name for row in rows for name in row.labels)
        _refuse_alike([*self._kinds(), *names])
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
        counts, ids = self._log.drain()
        state = {
            "n_rows": len(rows),
            "n_tokens": sum(row.n_tokens for row in rows),
            "cursor": asdict(after),
            "labels": list(kinds.items()),
            "ignored_columns": sorted({name for row in rows for name in row.ignored}),
            "skipped": {"counts": counts, "ids": ids},
        }
        path = _file(self._directory, k, ".parquet")
        _replace_file(path, lambda part: pq.write_table(table, part, compression="zstd"))
        write_json(_file(self._directory, k, ".json"), state)
        self.states.append(state)

    def check(self, stream: RowStream[Any]) -> None:
        """See that there are rows, and that no two have one name."""
        if not self.states:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._skipped().counts.items())
            raise CorpusError(
                f"{stream.settings.path}: none of its {stream.next_document} records gives a row "
                f"({reasons or 'it is empty'}); expected at least one, of two tokens or more"
            )
        twice = _first_duplicate(self._directory, len(self.states))
        if twice is not None:
            row_id, documents = twice
            shown = " and ".join(map(stream.where, documents))
            raise CorpusError(
                f"row_id {row_id!r} occurs twice: {shown}; give every row a name of its own, name another column "
                'of names with --id-column, or have names made with --id-column ""'
            )

    def close(self, **summary: Any) -> None:
        """Mark the store complete."""
        summary |= {
            "format": FORMAT,
            "n_rows": self.total("n_rows"),
            "n_tokens": self.total("n_tokens"),
            "n_shards": len(self.states),
            "labels": list(self._kinds().items()),
            "ignored_columns": sorted({name for state in self.states for name in state["ignored_columns"]}),
            "skipped": asdict(self._skipped()),
        }
        write_json(self._directory / SUMMARY, summary)

    def _skipped(self) -> Skipped:
        """What was left out, of the whole corpus; the log is part of it."""
        total = SkipLog()
        for state in self.states:
            total.extend(state["skipped"]["counts"], state["skipped"]["ids"])
        total.extend(self._log.counts, self._log.ids)
        return total.frozen()

    def _kinds(self) -> dict[str, Kind]:
        """Type of every label over the finished shards; order of first occurrence."""
        kinds: dict[str, Kind] = {}
        for name, kind in (pair for state in self.states for pair in state["labels"]):
            kinds[name] = wider(kinds.get(name, "null"), cast(Kind, kind))
        return kinds


def _refuse_alike(names: Sequence[str]) -> None:
    """DuckDB, which reads label expressions, holds `topic` and `Topic` to be one column."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name.casefold(), name)
        if other != name:
            raise CorpusError(
                f"labels {other!r} and {name!r} differ only in case, and an expression cannot tell them apart; rename "
                "or drop one of the columns"
            )


def begin(directory: Path, plan: Mapping[str, Any], *, replace: bool = False) -> None:
    """Claim the directory for this plan, or see that it was begun with the same one.

    Args:
        replace: what was begun with another plan is thrown away; without, only if no shard of it is finished.
    """
    path = directory / "plan.json"
    if path.exists():
        changes = list(differences(read_json(path), json.loads(json.dumps(plan))))
        if changes and (replace or not any(directory.glob("shard-*.json"))):
            for entry in directory.iterdir():
                if _OURS.fullmatch(entry.name) or is_part(entry):
                    discard(entry)
            write_json(path, plan)
        elif changes:
            raise CorpusError(
                f"{directory}: was begun with other input: {'; '.join(changes)}. "
                "Restore it, or delete the directory to start over"
            )
        remove_parts(directory)  # of a writer that was killed; another one waits at the lock
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        strange = [entry.name for entry in directory.iterdir() if not is_part(entry)]
    except OSError as err:
        raise CorpusError(f"{directory}: no directory can be made here: {err}; choose another one") from err
    if strange:
        raise CorpusError(f"{directory}: is not empty and not a row store; choose another directory")
    write_json(path, plan)


def _first_duplicate(directory: Path, n_shards: int) -> tuple[str, list[int]] | None:
    """First row_id that occurs more than once, and the documents of two of its rows.

    DuckDB counts them and spills to disk: memory does not grow with the corpus.
    """
    spill = aside(directory / "spill")
    config: dict[str, str | bool | int | float | list[str]] = {
        "temp_directory": str(spill),
        "memory_limit": "512MB",
        "threads": 2,
    }
    files = dataset([str(_file(directory, k, ".parquet")) for k in range(n_shards)], format="parquet")
    with duckdb.connect(config=config) as connection:
        connection.register("names", files)
        found = connection.execute(
            f"SELECT row_id, min({DOCUMENT_COLUMN}), max({DOCUMENT_COLUMN}) FROM names GROUP BY row_id "
            f"HAVING count(*) > 1 ORDER BY min({DOCUMENT_COLUMN}), row_id LIMIT 1"
        ).fetchone()
    discard(spill)
    return None if found is None else (found[0], [found[1], found[2]])


def _file(directory: Path, k: int, suffix: str) -> Path:
    return directory / f"shard-{k:05d}{suffix}"


def read_shard(directory: Path, k: int, columns: list[str] | None = None) -> pa.Table:
    """The table of a shard, or those of the columns that it has."""
    path = _file(directory, k, ".parquet")
    try:
        with pq.ParquetFile(path) as file:
            return file.read(columns)
    except (pa.ArrowException, OSError) as err:
        raise CorpusError(
            f"{path}: missing or damaged: {' '.join(str(err).split())}; delete {directory} and build again"
        ) from err


def read_json(path: Path) -> dict[str, Any]:
    """A mapping that this module wrote."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise CorpusError(f"{path}: damaged: {err}; delete {path.parent} and build again") from err
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """A mapping that `read_json` reads."""
    text = json.dumps(data, indent=1, ensure_ascii=False)
    _replace_file(path, lambda part: part.write_text(text, encoding="utf-8"))


def _replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that is whole when it is there."""
    try:
        with written_aside(path) as part:
            write(part)
    except OSError as err:
        raise CorpusError(
            f"{path}: cannot be written: {err}; make room and run again: finished shards are kept"
        ) from err
