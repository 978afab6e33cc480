"""What is asked of an artifact: which targets and rows, columns of its row table, what an earlier question made, and
rows in the order of their values.

Shape letters: N rows.
"""

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
from grasp.artifact.manifest import LOSS_TOKENS
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.where import LabelColumn, LabelTable
from grasp.errors import ProtocolError, SettingsError
from grasp.results import write_tables
from grasp.text import did_you_mean, listed

T = TypeVar("T")

ROWS_AT_ONCE = 1 << 18  # of the row table, while all rows are written in order
SHORT = 32  # tokens: the relevance of shorter rows is noisy
CACHED_BYTES = 512 << 20  # of what the questions of one opened artifact share

_lock = Lock()  # of what is cached, never held while something is made; two threads may make one thing, alike
_cached: WeakKeyDictionary[ArtifactReader, dict[Hashable, tuple[Any, int]]] = WeakKeyDictionary()


def cached(artifact: ArtifactReader, key: Hashable, n_bytes: int, make: Callable[[], T]) -> T:
    """What one question of an opened artifact made, for the next one; nobody writes into an array of it.

    What is oldest goes first where all of it would take more than CACHED_BYTES, before anything new is made.
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
    """The targets asked for, all of the artifact's if none were.

    Raises:
        ProtocolError: no target, one that the artifact lacks, or one twice.
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
    """One target: the one asked for, or the only one.

    Raises:
        ProtocolError: the artifact lacks it, or has several and none was named.
    """
    if target is None and len(artifact.targets) > 1:
        raise ProtocolError(f"target: got none, and the artifact has {', '.join(artifact.targets)}; name one")
    return checked_targets(artifact, target)[0]


def leak_notes(artifact: ArtifactReader, targets: Iterable[str]) -> list[str]:
    """Return how many rows contain questions of some targets, a line each; nothing of targets without such rows."""
    leaks = {target: artifact.leaks(target) for target in targets}
    return [
        f"{target}: {target_leaks}, and relevance there is too high; grasp select --drop-leaks leaves them out"
        for target, target_leaks in leaks.items()
        if target_leaks is not None and len(target_leaks.row_index)
    ]


def leaked_rows(artifact: ArtifactReader, targets: Iterable[str]) -> I64:
    """Return the rows that contain questions of some targets, ascending.

    Raises:
        SettingsError: nobody looked for them.
    """
    leaks = {target: artifact.leaks(target) for target in targets}
    if unknown := [target for target, target_leaks in leaks.items() if target_leaks is None]:
        raise SettingsError(
            f"drop_leaks: {artifact.where}: its rows were not compared with questions of {', '.join(unknown)}, since "
            "an earlier version built it or its rows are images; build it again"
        )
    return np.unique(
        np.concatenate([target_leaks.row_index for target_leaks in leaks.values() if target_leaks is not None])
    )


def row_tokens(artifact: ArtifactReader, column: str = "n_tokens") -> I64:
    """Tokens of every row, (N,); the column `length_column(artifact)` counts those that carry loss."""
    batches = artifact.row_batches([column])
    read = (np.asarray(batch.column(0), dtype=np.int64) for batch in batches)
    return cached(artifact, column, 8 * artifact.n_rows, lambda: np.concatenate(list(read)))


def length_column(artifact: ArtifactReader) -> str:
    """The column by which a row is short: its tokens, of conversations those that carry loss."""
    return LOSS_TOKENS if LOSS_TOKENS in pq.read_schema(artifact.rows_path).names else "n_tokens"


def row_documents(artifact: ArtifactReader) -> I64:
    """The document of every row as a number, in order of first appearance, (N,)."""
    read = (batch.column(0) for batch in artifact.row_batches(["doc_id"]))
    return cached(
        artifact,
        "documents",
        8 * artifact.n_rows,
        lambda: pa.chunked_array(list(read)).combine_chunks().dictionary_encode().indices.to_numpy().astype(np.int64),
    )


def label_column(artifact: ArtifactReader, name: str, where: str = "label") -> LabelColumn:
    """One label of every row; `where` is what a message names."""
    table = LabelTable(artifact.rows_path)
    return cached(artifact, ("label", name), 8 * table.n_rows, lambda: table.column(name, where))


def row_places(artifact: ArtifactReader, rows: Sequence[str]) -> dict[str, int]:
    """Where the rows of these row_ids stand; without those that there are not."""
    wanted, start, places = pa.array(rows, pa.string()), 0, dict[str, int]()
    for batch in artifact.row_batches(["row_id"]):
        names = batch.column(0)
        matches = np.flatnonzero(pc.is_in(names, value_set=wanted).to_numpy(zero_copy_only=False))
        places |= {names[int(i)].as_py(): start + int(i) for i in matches}
        start += batch.num_rows
    return places


def row_index(artifact: ArtifactReader, rows: Sequence[str]) -> I64:
    """Where rows stand.

    Raises:
        SettingsError: there is none of a row_id.
    """
    places = row_places(artifact, rows)
    if unknown := [row for row in rows if row not in places]:
        examples = ", ".join(next(artifact.row_batches(["row_id"])).column(0)[:3].to_pylist())
        raise SettingsError(
            f"row: got {unknown[0]!r}, which {artifact.where} does not have; a row_id is e.g. {examples}"
        )
    return np.array([places[row] for row in rows], dtype=np.int64)


# ----------------------------------------------------------------------------------------------------- rows in order


def ranked(values_N: Floats, *, among_N: Bool | None = None, count: int | None = None) -> I64:
    """Row indices, highest value first; equal ones in corpus order.

    Args:
        count: the first so many, which are found without sorting all others; None: all.
    """
    down, among = -values_N, None if among_N is None else np.flatnonzero(among_N)
    if among is not None:
        down = down[among]
    if count is not None and 0 < count < len(down):
        last = np.partition(down, count - 1)[count - 1]
        head = np.flatnonzero(~(down > last))  # with all that equal the last one: which come first is seen below
        down, among = down[head], head if among is None else among[head]
    # A stable sort of finite values in half of the time: numpy's fast one, then equal values by their place.
    order = np.argsort(down)
    sorted_N = down[order]
    equal_N = sorted_N[1:] == sorted_N[:-1]
    tied = np.flatnonzero(np.append(equal_N, False) | np.insert(equal_N, 0, False))
    order[tied] = order[tied][np.lexsort((order[tied], sorted_N[tied]))]
    return order[:count] if among is None else among[order[:count]]


def short_rows(artifact: ArtifactReader, row_index: I64) -> int:
    """How many of some rows are too short for their relevance to be trusted; 0 where all rows are, as images are."""
    length_N = row_tokens(artifact, length_column(artifact))
    return int((length_N[row_index] < SHORT).sum()) if length_N.max() >= SHORT else 0


def short_of(column: str) -> str:
    """What short rows have too few of, in words: what `length_column` counts."""
    return "tokens with loss" if column == LOSS_TOKENS else "tokens"


def write_ranked(artifact: ArtifactReader, values_N: Floats, order: I64, path: Path, by: str) -> None:
    """Rows in order, some at a time. The file appears only when whole."""
    schema, starts = ranked_table(artifact, order[:0], values_N, by).schema, range(0, len(order), ROWS_AT_ONCE)
    parts = (ranked_table(artifact, order[start : start + ROWS_AT_ONCE], values_N, by) for start in starts)
    write_tables(schema, (part.cast(schema) for part in parts), path)


def ranked_table(artifact: ArtifactReader, row_index: I64, values_N: Floats, by: str) -> pa.Table:
    """Chosen rows of the row table, in the order given, with what they are ordered by."""
    table = artifact.rows(row_index)
    columns = [name for name in table.column_names if name not in ("row_index", by)]
    values = pa.array(np.asarray(values_N[row_index], dtype=np.float64))
    return table.select(columns).append_column(by, values)
