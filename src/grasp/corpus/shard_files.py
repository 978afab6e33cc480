"""A directory of finished shards, written so that a kill costs at most one of them; what they hold is their owner's.

`plan.json` says what is being written, `shard-00000.parquet` holds rows, `shard-00000.json`, written after
it, says that the shard is whole and where the next one begins, `store.json` says that the store is complete.
"""

import json
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Protocol, Self, TypeVar, cast

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.corpus.labels import (
    DOCUMENT_COLUMN,
    Kind,
    Label,
    arrow_type,
    as_kind,
    column_of,
    kind_of_all,
    wider,
)
from grasp.corpus.packing import SkipLog, Skipped
from grasp.errors import CorpusError

FORMAT: Final = 1
PUBLIC_COLUMNS: Final = ("row_id", "doc_id", "n_tokens", "snippet")


class Shard(Protocol):
    """Some rows of a store, with the table of what is known of them."""

    def __len__(self) -> int: ...
    def take(self, index: NDArray[np.int64], /) -> Self:
        """Rows by position in the shard, in the order given."""

    @classmethod
    def joined(cls, parts: Sequence[Self], /) -> Self:
        """Rows of all parts, one after the other."""


S = TypeVar("S", bound=Shard)


class StoredRow(Protocol):
    """What every row has, whatever else it is made of."""

    @property
    def row_id(self) -> str: ...
    @property
    def doc_id(self) -> str: ...
    @property
    def document(self) -> int:
        """Index of the document that it is from."""

    @property
    def snippet(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, Label]: ...
    @property
    def ignored(self) -> tuple[str, ...]:
        """Columns of its document that cannot be labels."""


class ShardStore(ABC, Generic[S]):
    """A complete store on disk; opens without reading its rows."""

    holds: ClassVar[str]

    def __init__(self, directory: Path, summary: Mapping[str, Any]) -> None:
        self._directory = directory
        self.n_rows: int = summary["n_rows"]
        self.n_shards: int = summary["n_shards"]
        self.shard_rows: int = summary["shard_rows"]
        self.n_tokens: int = summary["n_tokens"]
        self.n_documents: int = summary["n_documents"]
        self.fingerprint: str = summary["fingerprint"]
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
        path = directory / "store.json"
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

    def shard(self, k: int) -> S:
        """Shard k, from 0.

        Raises:
            CorpusError: no such shard, or its file is damaged.
        """
        return self._shard(k * self.shard_rows, self._whole(k))

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

    def _whole(self, k: int) -> pa.Table:
        """All columns of shard k.

        Raises:
            CorpusError: no such shard, or its file is damaged.
        """
        if not 0 <= k < self.n_shards:
            raise CorpusError(f"{self._directory}: got shard {k}, expected 0 to {self.n_shards - 1}")
        return read_shard(self._directory, k)

    def _public(self, whole: pa.Table) -> pa.Table:
        """The table that callers see: labels of the whole corpus, in one order and of one type."""
        columns = {name: whole.column(name) for name in PUBLIC_COLUMNS}
        for name, kind in self._kinds.items():
            found = name in whole.column_names
            column = whole.column(name) if found else pa.chunked_array([pa.nulls(len(whole), arrow_type(kind))])
            columns[name] = as_kind(column, kind)
        return pa.table(columns)


class StoreWriter:
    """Writes shards one after the other, from the first that is missing on, then closes the store."""

    def __init__(self, directory: Path, log: SkipLog) -> None:
        self._directory = directory
        self._log = log
        self.states = finished_states(directory)

    @property
    def n_rows(self) -> int:
        """Rows that are in finished shards."""
        return sum(state["n_rows"] for state in self.states)

    def add(
        self,
        rows: Sequence[StoredRow],
        lengths: Sequence[int],
        payload: Mapping[str, pa.Array],
        after: Mapping[str, Any],
    ) -> None:
        """Write one shard, and what was left out since the last one.

        Args:
            lengths: tokens of each row.
            payload: columns that are not shown to callers as they are.
            after: where the row after its last begins.
        """
        k = len(self.states)
        names = dict.fromkeys(name for row in rows for name in row.labels)
        columns = {name: [row.labels.get(name) for row in rows] for name in names}
        kinds = {name: kind_of_all(values) for name, values in columns.items()}
        table = pa.table(
            {
                "row_id": pa.array([row.row_id for row in rows], pa.string()),
                "doc_id": pa.array([row.doc_id for row in rows], pa.string()),
                "n_tokens": pa.array(lengths, pa.int32()),
                "snippet": pa.array([row.snippet for row in rows], pa.string()),
                DOCUMENT_COLUMN: pa.array([row.document for row in rows], pa.int64()),
                **payload,
                **{name: column_of(values, kinds[name]) for name, values in columns.items()},
            }
        )
        counts, ids = self._log.drain()
        state = {
            "n_rows": len(rows),
            "n_tokens": sum(lengths),
            "cursor": dict(after),
            "labels": list(kinds.items()),
            "ignored_columns": sorted({name for row in rows for name in row.ignored}),
            "skipped": {"counts": counts, "ids": ids},
        }
        replace_file(shard_path(self._directory, k), lambda part: pq.write_table(table, part, compression="zstd"))
        write_json(state_path(self._directory, k), state)
        self.states.append(state)

    def close(self, *, holds: str, shard_rows: int, n_documents: int, fingerprint: str) -> None:
        """Mark the store complete."""
        summary = {
            "format": FORMAT,
            "holds": holds,
            "n_rows": self.n_rows,
            "n_tokens": sum(state["n_tokens"] for state in self.states),
            "n_documents": n_documents,
            "n_shards": len(self.states),
            "shard_rows": shard_rows,
            "fingerprint": fingerprint,
            "labels": list(kinds_of(self.states).items()),
            "ignored_columns": sorted({name for state in self.states for name in state["ignored_columns"]}),
            "skipped": asdict(self.skipped()),
        }
        write_json(self._directory / "store.json", summary)

    def skipped(self) -> Skipped:
        """What was left out, of the whole corpus; the log is part of it."""
        total = SkipLog()
        for state in self.states:
            total.extend(state["skipped"]["counts"], state["skipped"]["ids"])
        total.extend(self._log.counts, self._log.ids)
        return total.frozen()


def begin(directory: Path, plan: Mapping[str, Any]) -> None:
    """Claim the directory for this plan, or see that it was begun with the same one."""
    path = directory / "plan.json"
    if path.exists():
        changes = list(_changes(read_json(path), plan))
        if changes and not any(directory.glob("shard-*.json")):
            write_json(path, plan)  # nothing is finished that could disagree: the corpus was mended, say
        elif changes:
            raise CorpusError(
                f"{directory}: was begun with other input: {'; '.join(changes)}. "
                "Restore it, or delete the directory to start over"
            )
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        strange = [entry.name for entry in directory.iterdir() if not entry.name.endswith(".part")]
    except OSError as err:
        raise CorpusError(f"{directory}: no directory can be made here: {err}; choose another one") from err
    if strange:
        raise CorpusError(f"{directory}: is not empty and not a row store; choose another directory")
    write_json(path, plan)


def _changes(then: Mapping[str, Any], now: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Differences, one line each."""
    for key in sorted(then.keys() | now.keys()):
        name = f"{where}{key}"
        old, new = then.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _changes(old, new, "" if key == "settings" else f"{key} ")
        elif old != new:
            yield f"{name} was {_brief(old)}, is {_brief(new)}"


def _brief(value: object) -> str:
    if value is None:
        return "none"
    return f"{value[0]} bytes of stamp {value[1] or 'none'}" if isinstance(value, list) else str(value)


def finished_states(directory: Path) -> list[dict[str, Any]]:
    """States of the shards that are whole, in order."""
    states: list[dict[str, Any]] = []
    while (path := state_path(directory, len(states))).exists():
        states.append(read_json(path))
    return states


def kinds_of(states: Iterable[Mapping[str, Any]]) -> dict[str, Kind]:
    """Type of every label over the whole corpus; order of first occurrence."""
    kinds: dict[str, Kind] = {}
    for state in states:
        for name, kind in state["labels"]:
            kinds[name] = wider(kinds.get(name, "null"), cast(Kind, kind))
    return kinds


def first_duplicate(directory: Path, n_shards: int, shard_rows: int) -> tuple[str, list[tuple[int, int]]] | None:
    """First row_id that occurs more than once, with (row_index, document) of two of its rows."""
    schema = pa.schema([("row_id", pa.string()), ("row_index", pa.int64()), ("document", pa.int64())])

    def batches() -> Iterator[pa.RecordBatch]:
        for k in range(n_shards):
            table = read_shard(directory, k, ["row_id", DOCUMENT_COLUMN])
            index = pa.array(np.arange(len(table)) + k * shard_rows)
            columns = [table.column("row_id"), index, table.column(DOCUMENT_COLUMN)]
            yield from pa.table(columns, schema=schema).to_batches()

    spill = directory / "spill.part"
    config = {"temp_directory": str(spill), "memory_limit": "512MB", "threads": 2}
    with duckdb.connect(config=config) as connection:
        connection.register("names", pa.RecordBatchReader.from_batches(schema, batches()))
        found = connection.execute(
            "SELECT row_id, min(row_index), arg_min(document, row_index), max(row_index), "
            "arg_max(document, row_index) FROM names GROUP BY row_id HAVING count(*) > 1 "
            "ORDER BY min(row_index) LIMIT 1"
        ).fetchone()
    shutil.rmtree(spill, ignore_errors=True)
    return None if found is None else (found[0], [(found[1], found[2]), (found[3], found[4])])


def shard_path(directory: Path, k: int) -> Path:
    return directory / f"shard-{k:05d}.parquet"


def state_path(directory: Path, k: int) -> Path:
    return directory / f"shard-{k:05d}.json"


def read_shard(directory: Path, k: int, columns: list[str] | None = None) -> pa.Table:
    path = shard_path(directory, k)
    try:
        with pq.ParquetFile(path) as file:
            return file.read(columns)
    except (pa.ArrowException, OSError) as err:
        raise CorpusError(
            f"{path}: missing or damaged: {' '.join(str(err).split())}; delete {directory} and build again"
        ) from err


def read_json(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise CorpusError(f"{path}: damaged: {err}; delete {path.parent} and build again") from err
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    text = json.dumps(data, indent=1, ensure_ascii=False)
    replace_file(path, lambda part: part.write_text(text, encoding="utf-8"))


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write aside, flush to the disk, then rename: a file that is there is whole."""
    part = path.with_name(path.name + ".part")
    try:
        write(part)
        with part.open("rb") as handle:
            os.fsync(handle.fileno())
        part.replace(path)
    except OSError as err:
        part.unlink(missing_ok=True)
        raise CorpusError(
            f"{path}: cannot be written: {err}; make room and run again: finished shards are kept"
        ) from err
