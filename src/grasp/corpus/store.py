"""Rows on disk: a directory of finished shards, written so that a kill costs at most one of them.

`plan.json` says what is being written, `shard-00000.parquet` holds rows, `shard-00000.json`, written after
it, says that the shard is whole and where the next one begins, `store.json` says that the store is complete.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self, cast

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.corpus.documents import Document, Tokenizer, documents_of
from grasp.corpus.labels import (
    DOCUMENT_COLUMN,
    IDS_COLUMN,
    Kind,
    arrow_type,
    as_kind,
    column_of,
    kind_of_all,
    wider,
)
from grasp.corpus.packing import Cursor, Packer, Row, SkipLog, Skipped
from grasp.corpus.sources import Source, open_source
from grasp.errors import CorpusError
from grasp.settings import CorpusSettings

FORMAT: Final = 1
ENCODE_DOCUMENTS: Final = 256
ENCODE_CHARS: Final = 4_000_000  # long documents make smaller batches: memory is a shard and a batch
PROBE_TEXTS: Final = 16
PROBE_CHARS: Final = 2_000


@dataclass(frozen=True, slots=True)
class RowShard:
    """Rows and their token ids, ragged: row i is flat_ids[offsets[i]:offsets[i + 1]]."""

    start: int  # row_index of the first row; -1 for rows picked one by one
    flat_ids: NDArray[np.int32]
    offsets: NDArray[np.int64]  # (n + 1,)
    table: pa.Table  # row_id, doc_id, n_tokens, snippet, then the labels

    def ids(self, i: int) -> NDArray[np.int32]:
        """Token ids of row i of this shard."""
        return self.flat_ids[self.offsets[i] : self.offsets[i + 1]]

    def __len__(self) -> int:
        return len(self.offsets) - 1


class RowStore:
    """The rows of a corpus, complete and on disk; opens without reading them."""

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
    def write(
        cls,
        directory: Path,
        settings: CorpusSettings,
        tokenizer: Tokenizer,
        *,
        shard_rows: int,
        progress: Callable[[int], None] | None = None,
    ) -> Self:
        """Read, tokenise and pack the corpus; go on where an earlier call was cut off; open what is complete.

        Args:
            shard_rows: rows in a shard: what is held in memory, and what a kill can cost.
            progress: called with the number of rows finished so far, after each shard.
        Raises:
            CorpusError: the corpus is empty or malformed, names a row twice, or is not the one that
                `directory` was begun with.
        """
        source = open_source(settings.path)
        _begin(directory, _plan(source, settings, tokenizer, shard_rows))
        if not (directory / "store.json").exists():
            writer = _Writer(directory, source, settings, tokenizer, shard_rows)
            writer.write_shards(progress or _silent)
            writer.finish()
        return cls.open(directory)

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Open a complete store.

        Raises:
            CorpusError: not there, not complete, or of another format version.
        """
        path = directory / "store.json"
        if not path.exists():
            state = (
                "an unfinished row store; run the build again to go on" if directory.exists() else "no such row store"
            )
            raise CorpusError(f"{directory}: {state}")
        summary = _read_json(path)
        if summary.get("format") != FORMAT:
            raise CorpusError(
                f"{path}: got format {summary.get('format')!r}, expected {FORMAT}; delete {directory} and build again"
            )
        return cls(directory, summary)

    def shard(self, k: int) -> RowShard:
        """Shard k, from 0.

        Raises:
            CorpusError: no such shard, or its file is damaged.
        """
        if not 0 <= k < self.n_shards:
            raise CorpusError(f"{self._directory}: got shard {k}, expected 0 to {self.n_shards - 1}")
        whole = _read_shard(self._directory, k)
        ids = whole.column(IDS_COLUMN).combine_chunks()
        offsets = ids.offsets.to_numpy().astype(np.int64)
        return RowShard(k * self.shard_rows, ids.values.to_numpy(), offsets, self._public(whole))

    def rows(self, row_index: NDArray[np.int64]) -> RowShard:
        """Rows by position, in the order given, repeats allowed; only the shards they lie in are read.

        Raises:
            CorpusError: a position outside 0 to n_rows - 1.
        """
        row_index = np.asarray(row_index, dtype=np.int64)
        outside = row_index[(row_index < 0) | (row_index >= self.n_rows)]
        if outside.size:
            raise CorpusError(f"{self._directory}: got row_index {outside[0]}, expected 0 to {self.n_rows - 1}")
        if not row_index.size:
            empty = pa.table({name: pa.array([], kind) for name, kind in self._schema().items()})
            return RowShard(-1, np.zeros(0, np.int32), np.zeros(1, np.int64), empty)
        shard_of = row_index // self.shard_rows
        parts = [
            _picked(self.shard(int(k)), row_index[shard_of == k] - k * self.shard_rows) for k in np.unique(shard_of)
        ]
        # `parts` has the rows shard by shard; back to the order asked for
        return _picked(_joined(parts), np.argsort(np.argsort(shard_of, kind="stable"), kind="stable"))

    def _schema(self) -> dict[str, pa.DataType]:
        own = {"row_id": pa.string(), "doc_id": pa.string(), "n_tokens": pa.int32(), "snippet": pa.string()}
        return own | {name: arrow_type(kind) for name, kind in self._kinds.items()}

    def _public(self, whole: pa.Table) -> pa.Table:
        """The table that callers see: labels of the whole corpus, in one order and of one type."""
        columns = {name: whole.column(name) for name in ("row_id", "doc_id", "n_tokens", "snippet")}
        for name, kind in self._kinds.items():
            found = name in whole.column_names
            column = whole.column(name) if found else pa.chunked_array([pa.nulls(len(whole), arrow_type(kind))])
            columns[name] = as_kind(column, kind)
        return pa.table(columns)


def _picked(shard: RowShard, index: NDArray[np.int64]) -> RowShard:
    """Rows of one shard, by position in it, in the order given."""
    lengths = np.diff(shard.offsets)[index]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    flat = np.repeat(shard.offsets[:-1][index] - offsets[:-1], lengths) + np.arange(offsets[-1])
    return RowShard(-1, shard.flat_ids[flat], offsets, shard.table.take(pa.array(index)))


def _joined(parts: Sequence[RowShard]) -> RowShard:
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    flat = np.concatenate([part.flat_ids for part in parts])
    return RowShard(-1, flat, offsets, pa.concat_tables([part.table for part in parts]))


def _silent(_: int) -> None:
    return


class _Writer:
    """Writes the shards that are missing, then closes the store."""

    def __init__(
        self, directory: Path, source: Source, settings: CorpusSettings, tokenizer: Tokenizer, shard_rows: int
    ) -> None:
        self._directory = directory
        self._source = source
        self._settings = settings
        self._tokenizer = tokenizer
        self._shard_rows = shard_rows
        self._log = SkipLog()
        self._states = _finished(directory)

    def write_shards(self, progress: Callable[[int], None]) -> None:
        """Every shard from the cursor of the last finished one on."""
        cursor = Cursor(**self._states[-1]["cursor"]) if self._states else Cursor()
        packer = Packer(self._settings, self._tokenizer.eos_id, self._tokenizer.vocab_size, cursor, self._log)
        documents = documents_of(self._source, self._settings, start=cursor.document)
        rows = _packed(documents, self._tokenizer, packer)
        done = sum(state["n_rows"] for state in self._states)
        while shard := list(islice(rows, self._shard_rows)):
            # A short shard is the last one: what came after its last row has been read and counted as well.
            whole = len(shard) == self._shard_rows
            self._write_shard(shard, shard[-1].after if whole else Cursor(packer.next_document))
            done += len(shard)
            progress(done)
        self._end = packer.next_document

    def finish(self) -> None:
        """Check the names, compute the fingerprint, and mark the store complete."""
        skipped = SkipLog()
        for state in self._states:
            skipped.extend(state["skipped"]["counts"], state["skipped"]["ids"])
        skipped.extend(*self._log.drain())
        self._check_not_empty(skipped.frozen())
        self._check_names()
        summary = {
            "format": FORMAT,
            "n_rows": sum(state["n_rows"] for state in self._states),
            "n_tokens": sum(state["n_tokens"] for state in self._states),
            "n_documents": self._end,
            "n_shards": len(self._states),
            "shard_rows": self._shard_rows,
            "fingerprint": _fingerprint(self._directory, len(self._states)),
            "labels": list(_kinds(self._states).items()),
            "ignored_columns": sorted({name for state in self._states for name in state["ignored_columns"]}),
            "skipped": asdict(skipped.frozen()),
        }
        _write_json(self._directory / "store.json", summary)

    def _write_shard(self, rows: list[Row], after: Cursor) -> None:
        k = len(self._states)
        names = dict.fromkeys(name for row in rows for name in row.labels)
        columns = {name: [row.labels.get(name) for row in rows] for name in names}
        kinds = {name: kind_of_all(values) for name, values in columns.items()}
        lengths = [len(row.input_ids) for row in rows]
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
        table = pa.table(
            {
                "row_id": pa.array([row.row_id for row in rows], pa.string()),
                "doc_id": pa.array([row.doc_id for row in rows], pa.string()),
                "n_tokens": pa.array(lengths, pa.int32()),
                "snippet": pa.array([row.snippet for row in rows], pa.string()),
                DOCUMENT_COLUMN: pa.array([row.document for row in rows], pa.int64()),
                IDS_COLUMN: pa.ListArray.from_arrays(offsets, np.concatenate([row.input_ids for row in rows])),
                **{name: column_of(values, kinds[name]) for name, values in columns.items()},
            }
        )
        counts, ids = self._log.drain()
        state = {
            "n_rows": len(rows),
            "n_tokens": sum(lengths),
            "cursor": asdict(after),
            "labels": list(kinds.items()),
            "ignored_columns": sorted({name for row in rows for name in row.ignored}),
            "skipped": {"counts": counts, "ids": ids},
        }
        _replace(_shard_path(self._directory, k), lambda part: pq.write_table(table, part, compression="zstd"))
        _write_json(_state_path(self._directory, k), state)
        self._states.append(state)

    def _check_not_empty(self, skipped: Skipped) -> None:
        if self._states:
            return
        if not self._end:
            raise CorpusError(f"{self._settings.path}: the corpus is empty, expected at least one document")
        reasons = ", ".join(f"{count} {reason}" for reason, count in skipped.counts.items())
        raise CorpusError(
            f"{self._settings.path}: none of the {self._end} documents gives a row ({reasons}); "
            "expected one with at least two tokens"
        )

    def _check_names(self) -> None:
        """Every row_id once. DuckDB counts them and spills to disk: memory does not grow with the corpus."""
        twice = _first_duplicate(self._directory, len(self._states), self._shard_rows)
        if twice is None:
            return
        row_id, places = twice
        shown = " and ".join(f"{self._where(document)} (row_index {row})" for row, document in places)
        raise CorpusError(
            f"row_id {row_id!r} occurs twice: {shown}; give every row a name of its own in the column "
            f"{self._settings.row_id_column!r}, or drop one of them"
        )

    def _where(self, document: int) -> str:
        return next(documents_of(self._source, self._settings, start=document)).where


def _packed(documents: Iterable[Document], tokenizer: Tokenizer, packer: Packer) -> Iterator[Row]:
    """Rows of a stream of documents, tokenised a batch at a time; no document is packed before it is due."""
    for batch in _batches(documents):
        texts = [document.text for document in batch if document.text is not None and _is_tokenised(document)]
        encoded = iter(tokenizer.encode(texts) if texts else [])
        for document in batch:
            yield from packer.feed(document, next(encoded) if _is_tokenised(document) else None)
    yield from packer.finish()


def _is_tokenised(document: Document) -> bool:
    return document.input_ids is None and bool(document.text) and not str(document.text).isspace()


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    chars = 0
    for document in documents:
        batch.append(document)
        chars += len(document.text or "")
        if len(batch) == ENCODE_DOCUMENTS or chars >= ENCODE_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch


def _plan(source: Source, settings: CorpusSettings, tokenizer: Tokenizer, shard_rows: int) -> dict[str, Any]:
    """What makes this store this store. The path is not in it: a corpus may move."""
    eos_id, vocab_size = tokenizer.eos_id, tokenizer.vocab_size
    if eos_id is not None and not 0 <= eos_id < vocab_size:
        raise CorpusError(f"tokenizer: its EOS id {eos_id} is outside the vocabulary of {vocab_size}")
    return {
        "format": FORMAT,
        "settings": settings.model_dump(mode="json", exclude={"path"}) | {"shard_rows": shard_rows},
        "tokenizer": {
            "eos_id": eos_id,
            "vocab_size": vocab_size,
            "encoding": _probe(source, settings, tokenizer),
        },
        "corpus": {name: [size, stamp] for name, size, stamp in source.identity()},
    }


def _probe(source: Source, settings: CorpusSettings, tokenizer: Tokenizer) -> str:
    """Hash of what the tokenizer makes of the first texts: two that differ seldom agree on them."""
    first = islice(documents_of(source, settings), ENCODE_DOCUMENTS)
    tokenised = (document for document in first if _is_tokenised(document))
    texts = [str(document.text)[:PROBE_CHARS] for document in islice(tokenised, PROBE_TEXTS)]
    encoded = tokenizer.encode(texts) if texts else []
    return hashlib.blake2b(json.dumps(encoded).encode(), digest_size=16).hexdigest()


def _begin(directory: Path, plan: Mapping[str, Any]) -> None:
    """Claim the directory for this plan, or see that it was begun with the same one."""
    path = directory / "plan.json"
    if path.exists():
        changes = list(_changes(_read_json(path), plan))
        if changes and not any(directory.glob("shard-*.json")):
            _write_json(path, plan)  # nothing is finished that could disagree: the corpus was mended, say
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
    _write_json(path, plan)


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
    return f"{value[0]} bytes of {value[1] or 'no date'}" if isinstance(value, list) else str(value)


def _finished(directory: Path) -> list[dict[str, Any]]:
    """States of the shards that are whole, in order."""
    states: list[dict[str, Any]] = []
    while (path := _state_path(directory, len(states))).exists():
        states.append(_read_json(path))
    return states


def _kinds(states: Iterable[Mapping[str, Any]]) -> dict[str, Kind]:
    """Type of every label over the whole corpus; order of first occurrence."""
    kinds: dict[str, Kind] = {}
    for state in states:
        for name, kind in state["labels"]:
            kinds[name] = wider(kinds.get(name, "null"), cast(Kind, kind))
    return kinds


def _fingerprint(directory: Path, n_shards: int) -> str:
    """Hash over (row_id, input_ids) in row order, lengths included; shards do not enter."""
    digest = hashlib.blake2b(b"grasp rows 1", digest_size=16)
    for k in range(n_shards):
        table = _read_shard(directory, k, ["row_id", IDS_COLUMN])
        ids = table.column(IDS_COLUMN).combine_chunks()
        flat, offsets = ids.values.to_numpy().astype("<i4"), ids.offsets.to_numpy()
        for i, name in enumerate(table.column("row_id").to_pylist()):
            encoded, tokens = name.encode(), flat[offsets[i] : offsets[i + 1]]
            digest.update(len(encoded).to_bytes(4, "little") + encoded + len(tokens).to_bytes(4, "little"))
            digest.update(tokens.tobytes())
    return digest.hexdigest()


def _first_duplicate(directory: Path, n_shards: int, shard_rows: int) -> tuple[str, list[tuple[int, int]]] | None:
    """First row_id that occurs more than once, with (row_index, document) of two of its rows."""
    schema = pa.schema([("row_id", pa.string()), ("row_index", pa.int64()), ("document", pa.int64())])

    def batches() -> Iterator[pa.RecordBatch]:
        for k in range(n_shards):
            table = _read_shard(directory, k, ["row_id", DOCUMENT_COLUMN])
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


def _shard_path(directory: Path, k: int) -> Path:
    return directory / f"shard-{k:05d}.parquet"


def _state_path(directory: Path, k: int) -> Path:
    return directory / f"shard-{k:05d}.json"


def _read_shard(directory: Path, k: int, columns: list[str] | None = None) -> pa.Table:
    path = _shard_path(directory, k)
    try:
        with pq.ParquetFile(path) as file:
            return file.read(columns)
    except (pa.ArrowException, OSError) as err:
        raise CorpusError(
            f"{path}: missing or damaged: {' '.join(str(err).split())}; delete {directory} and build again"
        ) from err


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise CorpusError(f"{path}: damaged: {err}; delete {path.parent} and build again") from err
    return data


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    text = json.dumps(data, indent=1, ensure_ascii=False)
    _replace(path, lambda part: part.write_text(text, encoding="utf-8"))


def _replace(path: Path, write: Callable[[Path], object]) -> None:
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
