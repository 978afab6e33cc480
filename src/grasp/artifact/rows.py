"""Helpers of queries to an artifact: validate targets and rows, read columns of the row table, and rank rows.

Shape letters: N rows.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grasp.arrays import F64, I64, Bool, Floats, Integers
from grasp.artifact.cache import cached
from grasp.artifact.label_table import Label, LabelColumn, LabelTable
from grasp.artifact.manifest import LOSS_TOKENS
from grasp.artifact.reader import ArtifactReader
from grasp.corpus.labels import RESERVED_COLUMNS
from grasp.errors import ProtocolError, SettingsError
from grasp.results import write_tables
from grasp.text import did_you_mean, parse_names

ROWS_AT_ONCE = 1 << 18  # rows per batch while writing all rows
MIN_RELIABLE_TOKENS = 32  # the relevance of shorter rows is noisy
MAX_SLICES = 100  # values of a label that is shown or used without being asked for
MAX_LABELS = 4


def checked_targets(artifact: ArtifactReader, target: str | Sequence[str] | None) -> tuple[str, ...]:
    """Validate targets, and return them. Default: all of the artifact.

    Raises:
        ProtocolError: no target, an unknown target, or a repeated one.
    """
    chosen = tuple(artifact.targets) if target is None else parse_names(target, artifact.targets)
    unknown = [target for target in chosen if target not in artifact.targets]
    twice = sorted({target for target in chosen if chosen.count(target) > 1})
    if unknown or not chosen:
        suggestion = did_you_mean(unknown[0], artifact.targets) if unknown else ""
        problem = f"{list(chosen)}{suggestion}, the artifact has {list(artifact.targets)}"
    elif twice:
        problem = f"{', '.join(twice)} more than once; name each once"
    else:
        return chosen
    raise ProtocolError(f"target: got {problem}")


def only_target(artifact: ArtifactReader, target: str | None) -> str:
    """Validate a target, and return it. Default: the only one.

    Raises:
        ProtocolError: an unknown target, or none is given and the artifact has several.
    """
    if target is None and len(artifact.targets) > 1:
        raise ProtocolError(f"target: missing; the artifact has {', '.join(artifact.targets)}; choose one")
    return checked_targets(artifact, target)[0]


def leak_notes(artifact: ArtifactReader, targets: Iterable[str]) -> list[str]:
    """Return a note on the targets that have rows with their questions, if there are any."""
    leaks = {target: artifact.leaks(target) for target in targets}
    counts = [f"{target}: {leak}" for target, leak in leaks.items() if leak is not None and len(leak.row_index)]
    advice = "their relevance is inflated, exclude them with grasp select --drop-leaks"
    return [f"{'; '.join(counts)}; {advice}"] if counts else []


def leaked_rows(artifact: ArtifactReader, targets: Iterable[str]) -> I64:
    """Return the indices of rows that contain questions of the targets, ascending.

    Raises:
        SettingsError: the artifact was built without this search.
    """
    leaks = {target: artifact.leaks(target) for target in targets}
    if unknown := [target for target, target_leaks in leaks.items() if target_leaks is None]:
        raise SettingsError(
            f"drop_leaks: {artifact.location}: its rows were not searched for questions of {', '.join(unknown)}: they "
            "are no texts"
        )
    return np.unique(
        np.concatenate([target_leaks.row_index for target_leaks in leaks.values() if target_leaks is not None])
    )


def row_tokens(artifact: ArtifactReader) -> I64:
    """Return the number of tokens of every row, (N,)."""
    return _row_counts(artifact, "n_tokens")


def row_lengths(artifact: ArtifactReader) -> I64:
    """Return the values of `length_column`, (N,)."""
    return _row_counts(artifact, length_column(artifact))


def _row_counts(artifact: ArtifactReader, column: str) -> I64:
    """Return a column of counts of the row table, (N,)."""
    counts = (np.asarray(batch.column(0), np.int64) for batch in artifact.row_batches([column]))
    return cached(artifact, column, 8 * artifact.n_rows, lambda: np.concatenate(list(counts)))


def length_column(artifact: ArtifactReader) -> str:
    """Return the column of row lengths: tokens, or tokens with loss if they differ (conversations)."""
    return LOSS_TOKENS if LOSS_TOKENS in pq.read_schema(artifact.rows_path).names else "n_tokens"


def row_documents(artifact: ArtifactReader) -> I64:
    """Return the document of every row as an integer, in order of first appearance, (N,)."""
    names = (batch.column(0) for batch in artifact.row_batches(["doc_id"]))
    return cached(
        artifact,
        "documents",
        8 * artifact.n_rows,
        lambda: np.asarray(pc.index_in(all_names := pa.chunked_array(list(names)), all_names.unique()), np.int64),
    )


def row_amounts(artifact: ArtifactReader, measure: str, codes_N: Integers) -> F64:
    """Return how much of the corpus every row is, (N,): 1 row, its tokens, or its part of a document.

    Args:
        measure: rows, tokens or documents.
        codes_N: label value of each row; the rows of one document with the same value add up to 1.
    """
    if measure == "rows":
        return np.ones(len(codes_N))
    if measure == "tokens":
        return row_tokens(artifact).astype(np.float64)
    document_N = row_documents(artifact) * (int(codes_N.max()) + 1) + codes_N
    _, position_N, counts = np.unique(document_N, return_inverse=True, return_counts=True)
    return np.asarray(1.0 / counts[position_N])


def label_column(artifact: ArtifactReader, name: str, location: str = "label") -> LabelColumn:
    """Read a label of every row: a column, or an expression such as host(url); messages name `location`."""
    table = LabelTable(artifact.rows_path)
    return cached(artifact, ("label", name), 8 * table.n_rows, lambda: table.column(name, location))


def suggest_labels(source: ArtifactReader) -> tuple[str, ...]:
    """Return up to MAX_LABELS label columns that have between 2 and MAX_SLICES values.

    Text columns are preferred; integer and boolean columns are used if no text column qualifies. A column whose values
    are all different is skipped. Reading a column stops as soon as it has too many values.
    """
    most = min(MAX_SLICES, source.n_rows - 1)  # skips columns whose values are all different
    fields = [field for field in source.rows(np.empty(0, np.int64)).schema if field.name not in RESERVED_COLUMNS]
    is_text, is_other = (pa.types.is_string, pa.types.is_large_string), (pa.types.is_integer, pa.types.is_boolean)
    for tests in (is_text, is_other):
        labels: list[str] = []
        for field in fields:
            if any(test(field.type) for test in tests) and len(labels) < MAX_LABELS:
                seen, batches = set[Label](), source.row_batches([field.name])
                while len(seen) <= most and (batch := next(batches, None)) is not None:
                    seen.update(batch.column(0).unique().to_pylist())
                if 2 <= len(seen) <= most:
                    labels.append(field.name)
        if labels:
            return tuple(labels)
    return ()


def indices_of_row_ids(artifact: ArtifactReader, row_ids: Sequence[str]) -> I64:
    """Return the row indices of row_ids.

    Raises:
        SettingsError: unknown row_id.
    """
    wanted, start, index_of = pa.array(row_ids, pa.string()), 0, dict[str, int]()
    for batch in artifact.row_batches(["row_id"]):
        names = batch.column(0)
        matches = np.flatnonzero(pc.is_in(names, value_set=wanted).to_numpy(zero_copy_only=False))
        index_of |= {names[int(i)].as_py(): start + int(i) for i in matches}
        start += batch.num_rows
    if unknown := [row_id for row_id in row_ids if row_id not in index_of]:
        examples = ", ".join(next(artifact.row_batches(["row_id"])).column(0)[:3].to_pylist())
        raise SettingsError(
            f"row: got {unknown[0]!r}, which is not a row of {artifact.location}; row_ids are e.g. {examples}"
        )
    return np.array([index_of[row_id] for row_id in row_ids], dtype=np.int64)


def ranked(values_N: Floats, *, among_N: Bool | None = None, count: int | None = None) -> I64:
    """Return indices of rows, or of those `among_N`, by descending value, ties in corpus order; the first `count`."""
    negated, row_index = -values_N, None if among_N is None else np.flatnonzero(among_N)
    if row_index is not None:
        negated = negated[row_index]
    if count is not None and 0 < count < len(negated):
        last = np.partition(negated, count - 1)[count - 1]
        head = np.flatnonzero(~(negated > last))  # with all ties of the last one, which are ordered below, and NaN
        negated, row_index = negated[head], head if row_index is None else row_index[head]
    order = np.argsort(negated, kind="stable")[:count]
    return order if row_index is None else row_index[order]


def count_short_rows(artifact: ArtifactReader, row_index: I64) -> int:
    """Return how many rows are too short for a reliable relevance; 0 if all rows are."""
    length_N = row_lengths(artifact)
    return int((length_N[row_index] < MIN_RELIABLE_TOKENS).sum()) if length_N.max() >= MIN_RELIABLE_TOKENS else 0


def length_unit(column: str) -> str:
    """Describe the unit of `length_column`."""
    return "tokens with loss" if column == LOSS_TOKENS else "tokens"


def write_ranked(artifact: ArtifactReader, values_N: Floats, order: I64, path: Path, by: str) -> None:
    """Write rows in order, in batches; the file is written atomically."""
    schema, starts = ranked_table(artifact, order[:0], values_N, by).schema, range(0, len(order), ROWS_AT_ONCE)
    parts = (ranked_table(artifact, order[start : start + ROWS_AT_ONCE], values_N, by) for start in starts)
    write_tables(schema, (part.cast(schema) for part in parts), path)


def ranked_table(artifact: ArtifactReader, row_index: I64, values_N: Floats, by: str) -> pa.Table:
    """Return rows of the row table, in the given order, with the column by which they are ranked.

    A label of the same name is renamed by trailing underscores, as those of reserved names are.
    """
    table, renamed = artifact.rows(row_index).drop_columns(["row_index"]), by
    while renamed in table.column_names:
        renamed += "_"
    table = table.rename_columns([renamed if name == by else name for name in table.column_names])
    return table.append_column(by, pa.array(np.asarray(values_N[row_index], dtype=np.float64)))
