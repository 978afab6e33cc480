"""Long-form subset tables: `[subset_id, ]row_id[, weight]`, one line a retained row; without names all are one subset.

DuckDB joins row names to positions and puts the lines in order out of core, so neither the table nor the
names of the rows are ever whole in memory. Everything is checked before the first block comes out.
"""

import difflib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.errors import SubsetError
from grasp.files import written_aside
from grasp.predict.weights import (
    LEAST_WEIGHT,
    MOST_WEIGHT,
    WEIGHT_RANGE,
    MissingRows,
    Side,
    SubsetBlock,
    WeightedRows,
    in_blocks,
)
from grasp.store.contents import readable_table
from grasp.store.sealed import SealedWriter, sealed_batches

ONE_SUBSET = "subset"  # name of the only subset of a table that names none
CORPUS = "corpus"  # key of the corpus' fingerprint in the metadata of what we write
EXPECTED = "Parquet with columns row_id[, subset_id, weight]"
MEMORY_LIMIT = "512MB"
BATCH = 1 << 16
EXAMPLES = 5
ID_SCHEMA = pa.schema([("row_id", pa.string()), ("row_index", pa.int64())])
ENTRY_SCHEMA = pa.schema(
    [("subset_id", pa.string()), ("row_id", pa.string()), ("weight", pa.float64()), ("entry", pa.int64())]
)


@dataclass(frozen=True, slots=True)
class RowIndex:
    """Where each `row_id` stands in the corpus, read afresh in batches each time it is needed."""

    n_rows: int
    names: Callable[[], Iterator[pa.Array]]

    @classmethod
    def from_parquet(cls, path: Path | str) -> "RowIndex":
        """Index over the `row_id` column of a rows.parquet."""
        with pq.ParquetFile(path) as file:
            n_rows = int(file.metadata.num_rows)

        def names() -> Iterator[pa.Array]:
            try:
                with pq.ParquetFile(path) as file:
                    for batch in file.iter_batches(batch_size=BATCH, columns=["row_id"]):
                        yield batch.column(0).cast(pa.string())
            except (pa.ArrowException, OSError) as err:
                raise SubsetError(f"{path}: damaged: {' '.join(str(err).split())}; restore it from a copy") from err

        return cls(n_rows, names)

    @classmethod
    def from_ids(cls, row_ids: Sequence[str]) -> "RowIndex":
        """Index over names that are in memory already."""
        return cls(len(row_ids), lambda: iter([pa.array(row_ids, pa.string())]))

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Batches of (row_id, row_index)."""
        start = 0
        for row_ids in self.names():
            yield pa.record_batch(
                [row_ids, pa.array(np.arange(start, start + len(row_ids)), pa.int64())], schema=ID_SCHEMA
            )
            start += len(row_ids)

    def ids(self) -> pa.ChunkedArray:
        """All names, in row order: some 30 bytes a row."""
        return pa.chunked_array(list(self.names()), pa.string())


def read_subsets(
    source: Path | str | pa.Table,
    row_index_of: RowIndex,
    block: int = 256,
    *,
    side: Side = "retained",
    corpus: str | None = None,
) -> Iterator[SubsetBlock]:
    """Read a long table of subsets in blocks, subsets in order of first appearance.

    Args:
        source: Parquet file, or the table itself.
        side: what the table names. The rows of an `omitted` table are taken out of the corpus; what is
            left is the subset, and weights make no sense there.
        corpus: fingerprint of the corpus that is asked about; None: whichever the table was made from.
    Raises:
        SubsetError: not Parquet, made from another corpus, missing columns, no lines, unknown rows, a row twice in one
            subset, a subset without rows, weights out of range, or all 0. The message names subset and
            rows.
    """
    table = source if isinstance(source, pa.Table) else Path(source)
    has_weight = _check_schema(table, corpus)
    if side == "omitted" and has_weight:
        raise SubsetError(
            f"{_where(table)}: names omitted rows with a column 'weight'; omitted rows have none, drop the column"
        )
    return in_blocks(_subsets(table, row_index_of, has_weight, side), row_index_of.n_rows, block)


def write_subsets(
    path: Path | str,
    blocks: Iterable[SubsetBlock],
    row_index_of: RowIndex,
    *,
    weights: bool = False,
    corpus: str = "",
    compression_level: int | None = None,
) -> None:
    """Write long-form Parquet, with weights and a corpus' fingerprint if given; the file appears only when whole."""
    row_ids = row_index_of.ids()
    fields = [("subset_id", pa.string()), ("row_id", pa.string())] + ([("weight", pa.float64())] if weights else [])
    schema = pa.schema(fields, {CORPUS: corpus} if corpus else None)
    with (
        written_aside(Path(path)) as part,
        SealedWriter(part, schema, compression_level=compression_level) as writer,
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


def _where(source: Path | pa.Table) -> str:
    """What a message names."""
    return "subsets" if isinstance(source, pa.Table) else str(source)


def _check_schema(source: Path | pa.Table, corpus: str | None) -> bool:
    """Whether the table has weights; refuses what is not a table of subsets, or one of another corpus."""
    where, schema = _where(source), _schema(source)
    names, made_from = list(schema.names), (schema.metadata or {}).get(CORPUS.encode(), b"").decode(errors="replace")
    if corpus and made_from and made_from != corpus:
        raise SubsetError(
            f"{where}: was made from another artifact: corpus {made_from!r}, here {corpus!r}; make it from this one"
        )
    if "row_id" not in names:
        raise SubsetError(f"{where}: has columns {names}, lacks ['row_id']; expected row_id[, subset_id, weight]")
    if twice := [name for name in ("subset_id", "row_id", "weight") if names.count(name) > 1]:
        raise SubsetError(f"{where}: has column {twice[0]} more than once; drop one of them")
    others = [name for name in names if name not in ("subset_id", "row_id")]
    for name, meaning in (("subset_id", "names of subsets"), ("weight", "weights")):
        close = difflib.get_close_matches(name, others, 1)
        if name not in names and close:
            raise SubsetError(f"{where}: column {close[0]!r} looks like {meaning}; rename it to {name!r} or drop it")
    return "weight" in names


def _schema(source: Path | pa.Table) -> pa.Schema:
    if isinstance(source, pa.Table):
        return source.schema
    with readable_table(source, SubsetError, EXPECTED):
        return pq.read_schema(source)


def _batches(source: Path | pa.Table, columns: list[str]) -> Iterator[pa.RecordBatch]:
    if isinstance(source, pa.Table):
        yield from source.select(columns).to_batches(max_chunksize=BATCH)
        return
    yield from sealed_batches(source, columns)


def _entries(source: Path | pa.Table, has_weight: bool) -> Iterator[pa.RecordBatch]:
    has_id = "subset_id" in _schema(source).names
    columns = [*(["subset_id"] if has_id else []), "row_id", *(["weight"] if has_weight else [])]
    start = 0
    with readable_table(_where(source), SubsetError, EXPECTED):
        for batch in _batches(source, columns):
            n = batch.num_rows
            batch.validate(full=True)  # names that are no text would stop DuckDB
            weight = batch.column("weight").cast(pa.float64()) if has_weight else pa.array(np.ones(n))
            row_ids = batch.column("row_id").cast(pa.string())
            subset_ids = batch.column("subset_id").cast(pa.string()) if has_id else pa.repeat(ONE_SUBSET, n)
            entry = pa.array(np.arange(start, start + n), pa.int64())
            yield pa.record_batch([subset_ids, row_ids, weight, entry], schema=ENTRY_SCHEMA)
            start += n


def _subsets(
    source: Path | pa.Table, index: RowIndex, has_weight: bool, side: Side
) -> Iterator[WeightedRows | MissingRows]:
    with tempfile.TemporaryDirectory(prefix="grasp-subsets-") as spill, duckdb.connect(":memory:") as db:
        db.execute(f"SET memory_limit = '{MEMORY_LIMIT}'")
        db.execute(f"SET temp_directory = '{spill}'")
        _join(db, source, index, has_weight)
        _check_lines(db, _where(source))
        for item in _in_order(db):
            if side == "retained":
                yield item
            else:
                yield MissingRows(item.subset_id, item.row_index)


def _join(db: duckdb.DuckDBPyConnection, source: Path | pa.Table, index: RowIndex, has_weight: bool) -> None:
    """Make the tables `line` (one a named row; row_index NULL if unknown) and `subset` (one a subset)."""
    _fill(db, "entry", ENTRY_SCHEMA, _entries(source, has_weight))
    _fill(db, "name", ID_SCHEMA, index.batches())
    db.execute(
        "CREATE TABLE line AS SELECT e.subset_id, e.row_id, n.row_index, e.weight, e.entry "
        "FROM entry e LEFT JOIN name n ON e.row_id = n.row_id"
    )
    db.execute("DROP TABLE entry")
    db.execute("DROP TABLE name")
    db.execute(
        "CREATE TABLE subset AS SELECT subset_id, min(entry) AS first, count(row_id) AS n_named, "
        "count(row_index) AS n_known, sum(weight) AS total FROM line GROUP BY subset_id"
    )


def _fill(db: duckdb.DuckDBPyConnection, table: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    """Copy batches into a new table, one at a time: a stream that fails inside DuckDB loses its own error."""
    db.register("batch", schema.empty_table())
    db.execute(f"CREATE TABLE {table} AS SELECT * FROM batch")
    for batch in batches:
        db.register("batch", pa.Table.from_batches([batch]))
        db.execute(f"INSERT INTO {table} SELECT * FROM batch")
    db.unregister("batch")


def _check_lines(db: duckdb.DuckDBPyConnection, where: str) -> None:
    """Every mistake of the table in one message."""
    problems = [text for check in (_unnamed, _unknown, _repeated, _bad_weights) if (text := check(db))]
    if not db.execute("SELECT count(*) FROM subset").fetchall()[0][0]:
        problems.append("has no lines; expected at least one subset with one row")
    if problems:
        raise SubsetError(f"{where}: " + "; ".join(problems))


def _unnamed(db: duckdb.DuckDBPyConnection) -> str | None:
    lines = db.execute("SELECT count(*) FROM line WHERE subset_id IS NULL").fetchall()[0][0]
    if lines:
        return f"{lines} lines have no subset_id"
    empty = db.execute(f"SELECT subset_id FROM subset WHERE n_named = 0 ORDER BY first LIMIT {EXAMPLES}").fetchall()
    if empty:
        return f"subsets {[row[0] for row in empty]} name no rows"
    lines = db.execute("SELECT count(*) FROM line WHERE row_id IS NULL").fetchall()[0][0]
    return f"{lines} lines have no row_id" if lines else None


def _unknown(db: duckdb.DuckDBPyConnection) -> str | None:
    counted = db.execute(
        "SELECT subset_id, n_named - n_known FROM subset WHERE n_known < n_named ORDER BY first"
    ).fetchmany(EXAMPLES)
    if not counted:
        return None
    parts = []
    for subset_id, n in counted:
        rows = db.execute(
            "SELECT row_id FROM line WHERE subset_id = ? AND row_id IS NOT NULL AND row_index IS NULL "
            f"ORDER BY entry LIMIT {EXAMPLES}",
            [subset_id],
        ).fetchall()
        parts.append(f"subset {subset_id!r} names {n} rows that the corpus does not have, e.g. {[r[0] for r in rows]}")
    return "; ".join(parts) + "; expected row_id of this artifact's rows.parquet"


def _repeated(db: duckdb.DuckDBPyConnection) -> str | None:
    twice = db.execute(
        "SELECT subset_id, row_id FROM line WHERE row_id IS NOT NULL GROUP BY subset_id, row_id "
        f"HAVING count(*) > 1 ORDER BY min(entry) LIMIT {EXAMPLES}"
    ).fetchall()
    if not twice:
        return None
    named = [f"{subset_id}: {row_id}" for subset_id, row_id in twice]
    return f"rows named twice in one subset: {named}; name a row once, or give it a weight"


def _bad_weights(db: duckdb.DuckDBPyConnection) -> str | None:
    bad = db.execute(
        "SELECT subset_id, row_id, weight FROM line WHERE weight IS NULL OR NOT (weight = 0 OR weight BETWEEN "
        f"{LEAST_WEIGHT!r} AND {MOST_WEIGHT!r}) ORDER BY entry LIMIT {EXAMPLES}"
    ).fetchall()
    if bad:
        return f"weights {[f'{s}: {r}: {w}' for s, r, w in bad]}; {WEIGHT_RANGE}"
    zero = db.execute(
        f"SELECT subset_id FROM subset WHERE n_named > 0 AND total <= 0 ORDER BY first LIMIT {EXAMPLES}"
    ).fetchall()
    return f"subsets {[row[0] for row in zero]} have weights that sum to 0; one must be positive" if zero else None


def _in_order(db: duckdb.DuckDBPyConnection) -> Iterator[WeightedRows]:
    """Subsets in order of first appearance, their rows ascending; only one subset is held at a time."""
    names = [row[0] for row in db.execute("SELECT subset_id FROM subset ORDER BY first").fetchall()]
    reader = db.sql(
        "SELECT rank, row_index, weight FROM line "
        "JOIN (SELECT subset_id, row_number() OVER (ORDER BY first) - 1 AS rank FROM subset) USING (subset_id) "
        "WHERE row_index IS NOT NULL ORDER BY rank, row_index"
    ).to_arrow_reader(BATCH)
    held: list[tuple[NDArray[np.int64], NDArray[np.float64]]] = []
    current = 0
    for batch in reader:
        rank, row, weight = (batch.column(i).to_numpy(zero_copy_only=False) for i in range(3))
        cuts = np.flatnonzero(np.diff(rank)) + 1
        for part in np.split(np.arange(len(rank)), cuts):
            if not part.size:
                continue
            if rank[part[0]] != current:
                yield _gathered(names[current], held)
                held, current = [], int(rank[part[0]])
            held.append((row[part], weight[part]))
    yield _gathered(names[current], held)


def _gathered(subset_id: str, parts: list[tuple[NDArray[np.int64], NDArray[np.float64]]]) -> WeightedRows:
    weights = np.concatenate([weight for _, weight in parts])
    row_index = np.concatenate([row for row, _ in parts])
    return WeightedRows(subset_id, row_index, weights if (weights != 1.0).any() else None)
