"""Read and write subset tables in long form: `[subset_id, ]row_id[, weight]`, one line per retained row.

Start with `read_subsets` and `write_subsets`. A table without `subset_id` is a single subset. DuckDB joins row names
to positions and sorts the lines out of core, so neither the table nor the row names are in memory as a whole. The whole
table is validated before the first block is returned.

Tables in DuckDB:

    entry    lines of the subset table: subset_id, row_id, weight, entry (position of the line)
    name     rows of the corpus: row_id, row_index
    line     entries with their row_index, which is NULL if the corpus has no such row
    subset   one per subset_id: first (its first entry), n_named, total weight
"""

import difflib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grasp.arrays import F64, I64
from grasp.errors import SubsetError
from grasp.files import atomic_path
from grasp.predict.weights import (
    MAX_WEIGHT,
    MIN_WEIGHT,
    WEIGHT_RANGE,
    SubsetBlock,
    WeightedRows,
    in_blocks,
)
from grasp.store.checksummed_parquet import checksummed_writer, read_checksummed_batches
from grasp.store.contents import readable, readable_table

DEFAULT_SUBSET_ID = "subset"  # name of the subset of a table without subset_id
CORPUS_KEY = "corpus"  # metadata key of the corpus fingerprint
EXPECTED_TABLE = "Parquet with columns row_id[, subset_id, weight]"
MEMORY_LIMIT = "512MB"
BATCH_ROWS = 1 << 16
MAX_EXAMPLES = 5
ID_SCHEMA = pa.schema([("row_id", pa.string()), ("row_index", pa.int64())])
ENTRY_SCHEMA = pa.schema(
    [("subset_id", pa.string()), ("row_id", pa.string()), ("weight", pa.float64()), ("entry", pa.int64())]
)


@dataclass(frozen=True, slots=True)
class RowIndex:
    """The position of each `row_id` in the corpus, read in batches every time it is used."""

    n_rows: int
    names: Callable[[], Iterator[pa.Array]]

    @classmethod
    def from_parquet(cls, path: Path | str) -> "RowIndex":
        """Index the `row_id` column of a rows.parquet."""
        with pq.ParquetFile(path) as file:
            n_rows = int(file.metadata.num_rows)

        def names() -> Iterator[pa.Array]:
            with readable(Path(path), "restore it from a copy", SubsetError), pq.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=["row_id"]):
                    yield batch.column(0).cast(pa.string())

        return cls(n_rows, names)

    @classmethod
    def from_ids(cls, row_ids: Sequence[str]) -> "RowIndex":
        """Index names that are in memory."""
        return cls(len(row_ids), lambda: iter([pa.array(row_ids, pa.string())]))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield batches of (row_id, row_index)."""
        start = 0
        for row_ids in self.names():
            yield pa.record_batch(
                [row_ids, pa.array(np.arange(start, start + len(row_ids)), pa.int64())], schema=ID_SCHEMA
            )
            start += len(row_ids)

    def ids(self) -> pa.ChunkedArray:
        """Return all names in row order; about 30 bytes per row."""
        return pa.chunked_array(list(self.names()), pa.string())


def read_subsets(
    source: Path | str | pa.Table,
    row_index_of: RowIndex,
    block: int = 256,
    *,
    corpus: str | None = None,
) -> Iterator[SubsetBlock]:
    """Read a long table of subsets in blocks, subsets in order of first appearance.

    Args:
        source: Parquet file or table.
        row_index_of: positions of the rows of the corpus.
        block: maximum number of subsets per block.
        corpus: expected corpus fingerprint; None accepts a table of any corpus.
    Raises:
        SubsetError: not Parquet, made from another corpus, missing columns, no lines, unknown rows, a row twice in one
            subset, a subset without rows, or weights that are out of range or all 0. The message names subset and
            rows.
    """
    table: Path | pa.Table = source if isinstance(source, pa.Table) else Path(source)
    location = "subsets" if isinstance(source, pa.Table) else str(source)
    if isinstance(table, pa.Table):
        schema = table.schema
    else:
        with readable_table(table, SubsetError, EXPECTED_TABLE):
            schema = pq.read_schema(table)
    names, origin = list(schema.names), (schema.metadata or {}).get(CORPUS_KEY.encode(), b"").decode(errors="replace")
    problems = []
    if corpus and origin and origin != corpus:
        problems.append(f"was made from corpus {origin!r}, the artifact has {corpus!r}; create it from this artifact")
    if "row_id" not in names:
        problems.append(f"has columns {names}, lacks ['row_id']; expected row_id[, subset_id, weight]")
    if duplicates := [name for name in ("subset_id", "row_id", "weight") if names.count(name) > 1]:
        problems.append(f"has column {duplicates[0]} more than once; drop one of them")
    others = [name for name in names if name not in ("subset_id", "row_id")]
    for name, meaning in (("subset_id", "names of subsets"), ("weight", "weights")):
        close = difflib.get_close_matches(name, others, 1)
        if name not in names and close:
            problems.append(f"column {close[0]!r} looks like {meaning}; rename it to {name!r} or drop it")
    if problems:
        raise SubsetError(f"{location}: {'; '.join(problems)}")
    subsets = _read_subset_rows(table, location, names, row_index_of)
    return in_blocks(subsets, row_index_of.n_rows, block)


def write_subsets(
    path: Path | str,
    blocks: Iterable[SubsetBlock],
    row_index_of: RowIndex,
    *,
    weights: bool = False,
    corpus: str = "",
    compression_level: int | None = None,
) -> None:
    """Write subsets as long-form Parquet, atomically; optionally with weights and the corpus fingerprint."""
    row_ids = row_index_of.ids()
    fields = [("subset_id", pa.string()), ("row_id", pa.string())] + ([("weight", pa.float64())] if weights else [])
    schema = pa.schema(fields, {CORPUS_KEY: corpus} if corpus else None)
    with (
        atomic_path(Path(path)) as temporary,
        checksummed_writer(temporary, schema, compression_level=compression_level) as writer,
    ):
        for block in blocks:
            matrix = block.weights_BN
            ids = pa.array(block.subset_ids, pa.string()).take(
                pa.array(np.repeat(np.arange(len(block.subset_ids)), block.sizes_B))
            )
            columns = [ids, row_ids.take(pa.array(matrix.indices)).combine_chunks()]
            if weights:
                columns.append(pa.array(matrix.data))
            writer.write(pa.table(columns, schema=schema))


def _entries(source: Path | pa.Table, location: str, names: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield the lines of a table in batches of ENTRY_SCHEMA."""
    columns = [name for name in ("subset_id", "row_id", "weight") if name in names]
    start = 0
    with readable_table(location, SubsetError, EXPECTED_TABLE):
        if isinstance(source, pa.Table):
            batches = iter(source.select(columns).to_batches(max_chunksize=BATCH_ROWS))
        else:
            batches = read_checksummed_batches(source, columns)
        for batch in batches:
            n = batch.num_rows
            batch.validate(full=True)  # invalid UTF-8 would abort DuckDB
            weight = batch.column("weight").cast(pa.float64()) if "weight" in names else pa.array(np.ones(n))
            row_ids = batch.column("row_id").cast(pa.string())
            if "subset_id" in names:
                subset_ids = batch.column("subset_id").cast(pa.string())
            else:
                subset_ids = pa.repeat(DEFAULT_SUBSET_ID, n)
            entry = pa.array(np.arange(start, start + n), pa.int64())
            yield pa.record_batch([subset_ids, row_ids, weight, entry], schema=ENTRY_SCHEMA)
            start += n


def _read_subset_rows(
    source: Path | pa.Table, location: str, names: list[str], index: RowIndex
) -> Iterator[WeightedRows]:
    """Yield subsets in order of first appearance with ascending rows, with one subset in memory at a time."""
    with tempfile.TemporaryDirectory(prefix="grasp-subsets-") as spill, duckdb.connect(":memory:") as db:
        db.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
        db.execute(f"SET temp_directory = '{spill}'")
        _insert(db, "entry", ENTRY_SCHEMA, _entries(source, location, names))
        _insert(db, "name", ID_SCHEMA, index.batches())
        db.execute(
            "CREATE TABLE line AS SELECT e.subset_id, e.row_id, n.row_index, e.weight, e.entry "
            "FROM entry e LEFT JOIN name n ON e.row_id = n.row_id"
        )
        db.execute("DROP TABLE entry")
        db.execute("DROP TABLE name")
        db.execute(
            "CREATE TABLE subset AS SELECT subset_id, min(entry) AS first, count(row_id) AS n_named, "
            "sum(weight) AS total FROM line GROUP BY subset_id"
        )
        if problems := list(_problems(db)):
            raise SubsetError(f"{location}: " + "; ".join(problems))
        subset_ids = [row[0] for row in db.execute("SELECT subset_id FROM subset ORDER BY first").fetchall()]
        reader = db.sql(
            "SELECT rank, row_index, weight FROM line "
            "JOIN (SELECT subset_id, row_number() OVER (ORDER BY first) - 1 AS rank FROM subset) USING (subset_id) "
            "WHERE row_index IS NOT NULL ORDER BY rank, row_index"
        ).to_arrow_reader(BATCH_ROWS)
        pending: list[tuple[I64, F64]] = []  # rows and weights of the current subset; a batch may end within a subset
        current = 0
        for batch in reader:
            ranks, rows, weights = (batch.column(i).to_numpy(zero_copy_only=False) for i in range(3))
            for lines in np.split(np.arange(len(ranks)), np.flatnonzero(np.diff(ranks)) + 1):  # of one subset each
                if not lines.size:
                    continue
                if ranks[lines[0]] != current:
                    yield _join(subset_ids[current], pending)
                    pending, current = [], int(ranks[lines[0]])
                pending.append((rows[lines], weights[lines]))
        yield _join(subset_ids[current], pending)


def _insert(db: duckdb.DuckDBPyConnection, table: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    """Create a table from batches, one by one: DuckDB would hide the exception of a failing stream."""
    db.register("batch", schema.empty_table())
    db.execute(f"CREATE TABLE {table} AS SELECT * FROM batch")
    for batch in batches:
        db.register("batch", pa.Table.from_batches([batch]))
        db.execute(f"INSERT INTO {table} SELECT * FROM batch")
    db.unregister("batch")


def _join(subset_id: str, pieces: Sequence[tuple[I64, F64]]) -> WeightedRows:
    """Return consecutive rows and weights as one subset."""
    row_index, weights = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
    return WeightedRows(subset_id, row_index, weights if (weights != 1.0).any() else None)


def _problems(db: duckdb.DuckDBPyConnection) -> Iterator[str]:
    """Yield every problem of the lines, so that one message reports all of them."""

    def first_rows(query: str) -> list[tuple[Any, ...]]:
        """Return the first rows of a query."""
        return db.execute(f"{query} LIMIT {MAX_EXAMPLES}").fetchall()

    def subsets(condition: str) -> list[str]:
        """Return the first subsets that meet a condition."""
        return [row[0] for row in first_rows(f"SELECT subset_id FROM subset WHERE {condition} ORDER BY first")]

    unnamed, without_row, n_lines = first_rows(
        "SELECT count(*) FILTER (subset_id IS NULL), count(*) FILTER (row_id IS NULL), count(*) FROM line"
    )[0]
    if not n_lines:
        yield "has no lines; expected at least one subset with one row"
    if unnamed:
        yield f"{unnamed} lines have no subset_id"
    elif empty := subsets("n_named = 0"):
        yield f"subsets {empty} name no rows"
    elif without_row:
        yield f"{without_row} lines have no row_id"
    unknown = first_rows(
        f"SELECT subset_id, count(*), list(row_id ORDER BY entry)[:{MAX_EXAMPLES}] FROM line "
        "WHERE row_id IS NOT NULL AND row_index IS NULL GROUP BY subset_id ORDER BY min(entry)"
    )
    if unknown:
        named = [
            f"subset {name!r} names {n} rows that the corpus does not have, e.g. {ids}" for name, n, ids in unknown
        ]
        yield "; ".join(named) + "; expected row_id of this artifact's rows.parquet"
    duplicates = first_rows(
        "SELECT subset_id || ': ' || row_id FROM line WHERE row_id IS NOT NULL GROUP BY subset_id, row_id "
        "HAVING count(*) > 1 ORDER BY min(entry)"
    )
    if duplicates:
        yield f"rows named twice in one subset: {[row[0] for row in duplicates]}; name a row once, or set its weight"
    bad = first_rows(
        "SELECT subset_id, row_id, weight FROM line WHERE weight IS NULL OR NOT (weight = 0 OR weight BETWEEN "
        f"{MIN_WEIGHT!r} AND {MAX_WEIGHT!r}) ORDER BY entry"
    )
    if bad:
        yield f"weights {[f'{s}: {r}: {w}' for s, r, w in bad]}; {WEIGHT_RANGE}"
    elif zero := subsets("n_named > 0 AND total <= 0"):
        yield f"subsets {zero} have weights that sum to 0; at least one must be positive"
