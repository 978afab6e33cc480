"""Helpers of queries to an artifact: validate targets and rows, read columns of the row table, cache, and rank rows.

Shape letters: N rows.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grasp.arrays import I64, Bool, Floats
from grasp.artifact.label_table import Label, LabelColumn, LabelTable
from grasp.artifact.manifest import LOSS_TOKENS
from grasp.artifact.reader import ArtifactReader
from grasp.corpus.labels import RESERVED_COLUMNS
from grasp.errors import ProtocolError, SettingsError
from grasp.results import write_tables
from grasp.text import did_you_mean, listed

T = TypeVar("T")

ROWS_AT_ONCE = 1 << 18  # rows per batch while writing all rows
SHORT = 32  # tokens: the relevance of shorter rows is noisy
MAX_SLICES = 100  # values of a label that is shown or used without being asked for
MAX_LABELS = 4
CACHED_BYTES = 512 << 20  # limit of the cache of one opened artifact

_lock = Lock()  # of the cache; not held while a value is computed, which two threads may do twice
_cached: WeakKeyDictionary[ArtifactReader, dict[Hashable, tuple[Any, int]]] = WeakKeyDictionary()


def cached(artifact: ArtifactReader, key: Hashable, n_bytes: int, make: Callable[[], T]) -> T:
    """Return a cached value of an opened artifact, or compute it; arrays are made read-only.

    The oldest values are evicted beyond CACHED_BYTES, before the new value is computed.
    """
    with _lock:
        values = _cached.setdefault(artifact, {})
        if key in values:
            stored: T = values[key][0]
            return stored
        while values and sum(size for _, size in values.values()) + n_bytes > CACHED_BYTES:
            values.pop(next(iter(values)))
    value = make()
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    with _lock:
        if n_bytes <= CACHED_BYTES:
            values[key] = value, n_bytes
    return value


def checked_targets(artifact: ArtifactReader, target: str | Sequence[str] | None) -> tuple[str, ...]:
    """Validate targets, and return them. Default: all of the artifact.

    Raises:
        ProtocolError: no target, an unknown target, or a repeated one.
    """
    chosen = tuple(artifact.targets) if target is None else listed(target, artifact.targets)
    unknown = [target for target in chosen if target not in artifact.targets]
    if unknown or not chosen:
        suggestion = did_you_mean(unknown[0], artifact.targets) if unknown else ""
        raise ProtocolError(f"target: got {list(chosen)}{suggestion}, the artifact has {list(artifact.targets)}")
    if twice := sorted({target for target in chosen if chosen.count(target) > 1}):
        raise ProtocolError(f"target: got {', '.join(twice)} more than once; name each once")
    return chosen


def only_target(artifact: ArtifactReader, target: str | None) -> str:
    """Validate a target, and return it. Default: the only one.

    Raises:
        ProtocolError: an unknown target, or none is given and the artifact has several.
    """
    if target is None and len(artifact.targets) > 1:
        raise ProtocolError(f"target: missing; the artifact has {', '.join(artifact.targets)}; choose one")
    return checked_targets(artifact, target)[0]


def leak_notes(artifact: ArtifactReader, targets: Iterable[str]) -> list[str]:
    """Return a note per target that has rows with its questions."""
    leaks = {target: artifact.leaks(target) for target in targets}
    return [
        f"{target}: {target_leaks}; their relevance is inflated, exclude them with grasp select --drop-leaks"
        for target, target_leaks in leaks.items()
        if target_leaks is not None and len(target_leaks.row_index)
    ]


def leaked_rows(artifact: ArtifactReader, targets: Iterable[str]) -> I64:
    """Return the indices of rows that contain questions of the targets, ascending.

    Raises:
        SettingsError: the artifact was built without this search.
    """
    leaks = {target: artifact.leaks(target) for target in targets}
    if unknown := [target for target, target_leaks in leaks.items() if target_leaks is None]:
        raise SettingsError(
            f"drop_leaks: {artifact.location}: its rows were not searched for questions of {', '.join(unknown)}, since "
            "an earlier version built it or its rows are images; rebuild it"
        )
    return np.unique(
        np.concatenate([target_leaks.row_index for target_leaks in leaks.values() if target_leaks is not None])
    )


def row_tokens(artifact: ArtifactReader, column: str = "n_tokens") -> I64:
    """Return the tokens of every row, (N,), or another column of counts, see `length_column`."""
    batches = artifact.row_batches([column])
    read = (np.asarray(batch.column(0), dtype=np.int64) for batch in batches)
    return cached(artifact, column, 8 * artifact.n_rows, lambda: np.concatenate(list(read)))


def length_column(artifact: ArtifactReader) -> str:
    """Return the column of row lengths: tokens, or tokens with loss if they differ (conversations)."""
    return LOSS_TOKENS if LOSS_TOKENS in pq.read_schema(artifact.rows_path).names else "n_tokens"


def row_documents(artifact: ArtifactReader) -> I64:
    """Return the document of every row as an integer, in order of first appearance, (N,)."""
    read = (batch.column(0) for batch in artifact.row_batches(["doc_id"]))
    return cached(
        artifact,
        "documents",
        8 * artifact.n_rows,
        lambda: pa.chunked_array(list(read)).combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64),
    )


def label_column(artifact: ArtifactReader, name: str, where: str = "label") -> LabelColumn:
    """Read a label of every row: a column, or an expression such as host(url).

    Args:
        where: argument that messages name.
    Raises:
        SubsetError: no such column, or an invalid expression.
    """
    table = LabelTable(artifact.rows_path)
    return cached(artifact, ("label", name), 8 * table.n_rows, lambda: table.column(name, where))


def suggest_labels(source: ArtifactReader, *, most: int = MAX_SLICES) -> tuple[str, ...]:
    """Return up to MAX_LABELS label columns that have between 2 and `most` values.

    Text columns are preferred; integer and boolean columns are used if no text column qualifies. A column whose values
    are all different is skipped. Reading a column stops as soon as it has more than `most` values.
    """
    most = min(most, source.n_rows - 1)

    def is_suitable(name: str) -> bool:
        seen: set[Label] = set()
        for batch in source.row_batches([name]):
            seen.update(batch.column(0).unique().to_pylist())
            if len(seen) > most:
                return False
        return len(seen) >= 2

    schema = source.rows(np.empty(0, dtype=np.int64)).schema
    corpus_fields = [field for field in schema if field.name not in RESERVED_COLUMNS]
    text = [
        field.name for field in corpus_fields if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
    ]
    other = [
        field.name for field in corpus_fields if pa.types.is_integer(field.type) or pa.types.is_boolean(field.type)
    ]
    for names in (text, other):
        if labels := tuple(itertools.islice(filter(is_suitable, names), MAX_LABELS)):
            return labels
    return ()


def row_places(artifact: ArtifactReader, rows: Sequence[str]) -> dict[str, int]:
    """Return the row index of each row_id that exists."""
    wanted, start, places = pa.array(rows, pa.string()), 0, dict[str, int]()
    for batch in artifact.row_batches(["row_id"]):
        names = batch.column(0)
        matches = np.flatnonzero(pc.is_in(names, value_set=wanted).to_numpy(zero_copy_only=False))
        places |= {names[int(i)].as_py(): start + int(i) for i in matches}
        start += batch.num_rows
    return places


def row_index(artifact: ArtifactReader, rows: Sequence[str]) -> I64:
    """Return the row indices of row_ids.

    Raises:
        SettingsError: unknown row_id.
    """
    places = row_places(artifact, rows)
    if unknown := [row for row in rows if row not in places]:
        examples = ", ".join(next(artifact.row_batches(["row_id"])).column(0)[:3].to_pylist())
        raise SettingsError(
            f"row: got {unknown[0]!r}, which is not a row of {artifact.location}; row_ids are e.g. {examples}"
        )
    return np.array([places[row] for row in rows], dtype=np.int64)


# ----------------------------------------------------------------------------------------------------- rows in order


def ranked(values_N: Floats, *, among_N: Bool | None = None, count: int | None = None) -> I64:
    """Return row indices by descending value; ties in corpus order.

    Args:
        count: return only the first `count`, without sorting the others. Default: all.
    """
    down, among = -values_N, None if among_N is None else np.flatnonzero(among_N)
    if among is not None:
        down = down[among]
    if count is not None and 0 < count < len(down):
        last = np.partition(down, count - 1)[count - 1]
        head = np.flatnonzero(~(down > last))  # with all ties of the last one, which are ordered below
        down, among = down[head], head if among is None else among[head]
    # A stable sort of finite values in half the time: numpy's unstable sort, then ties by position.
    order = np.argsort(down)
    sorted_N = down[order]
    equal_N = sorted_N[1:] == sorted_N[:-1]
    tied = np.flatnonzero(np.append(equal_N, False) | np.insert(equal_N, 0, False))
    order[tied] = order[tied][np.lexsort((order[tied], sorted_N[tied]))]
    return order[:count] if among is None else among[order[:count]]


def short_rows(artifact: ArtifactReader, row_index: I64) -> int:
    """Return how many rows are too short for a reliable relevance; 0 if all rows are, e.g. images."""
    length_N = row_tokens(artifact, length_column(artifact))
    return int((length_N[row_index] < SHORT).sum()) if length_N.max() >= SHORT else 0


def short_of(column: str) -> str:
    """Describe the unit of `length_column`."""
    return "tokens with loss" if column == LOSS_TOKENS else "tokens"


def write_ranked(artifact: ArtifactReader, values_N: Floats, order: I64, path: Path, by: str) -> None:
    """Write rows in order, in batches; the file is written atomically."""
    schema, starts = ranked_table(artifact, order[:0], values_N, by).schema, range(0, len(order), ROWS_AT_ONCE)
    parts = (ranked_table(artifact, order[start : start + ROWS_AT_ONCE], values_N, by) for start in starts)
    write_tables(schema, (part.cast(schema) for part in parts), path)


def ranked_table(artifact: ArtifactReader, row_index: I64, values_N: Floats, by: str) -> pa.Table:
    """Return rows of the row table, in the given order, with the column by which they are ranked."""
    table = artifact.rows(row_index)
    columns = [name for name in table.column_names if name not in ("row_index", by)]
    values = pa.array(np.asarray(values_N[row_index], dtype=np.float64))
    return table.select(columns).append_column(by, values)
