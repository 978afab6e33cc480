"""The order of rows: the predictor of `score`, `select` and `explain`, and rows written as they are ranked.

Shape letters: N rows.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.artifact.tables import LOSS_TOKENS
from grasp.errors import ProtocolError
from grasp.files import written_aside
from grasp.predict.predictor import Predictor
from grasp.predict.protocol import ScoringProtocol, as_protocol, protocol_from
from grasp.predict.relevance import UnitSelection
from grasp.predict.row_arrays import length_column, row_tokens
from grasp.results import write_table
from grasp.store.sealed import SealedWriter

ROWS_AT_ONCE = 1 << 18  # of the row table, while all rows are written in order
SHORT = 32  # tokens: the relevance of shorter rows is noisy


def additive_predictor(
    artifact: ArtifactReader,
    target: str,
    *,
    protocol: ScoringProtocol | Path | str | None = None,
    match: str | None = None,
    unit: str | None = None,
) -> Predictor:
    """What `select` orders rows by: `effect_NT` has one column.

    Args:
        match: one kernel in the place of the protocol's.
        unit: one unit in the place of all those of the target.
    """
    chosen = as_protocol(protocol)
    if match is not None:
        alone = {"name": f"{chosen.name}, {match} alone", "match": {match: 1.0}, "selected_on": None}
        chosen = protocol_from(chosen.model_dump() | alone, f"match {match}")
    return Predictor.from_artifact(artifact, chosen.additive, [target], units=_one_unit(artifact, target, unit))


def ranked(
    values_N: NDArray[np.floating[Any]], *, among_N: NDArray[np.bool_] | None = None, count: int | None = None
) -> NDArray[np.int64]:
    """Row indices, highest value first; equal ones in corpus order.

    Args:
        count: the first so many, which are found without sorting all others; None: all.
    """
    down = -values_N if among_N is None else -values_N[among_N]
    if count is not None and 0 < count < len(down):
        last = np.partition(down, count - 1)[count - 1]
        head = np.flatnonzero(~(down > last))  # with all that equal the last one: which come first is seen below
        order = head[_ascending(down[head])][:count]
    else:
        order = _ascending(down)[:count]
    return order if among_N is None else np.flatnonzero(among_N)[order]


def _ascending(values_N: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """A stable sort of finite values in half of the time: numpy's fast one, then equal values by their place."""
    order = np.argsort(values_N)
    sorted_N = values_N[order]
    equal_N = sorted_N[1:] == sorted_N[:-1]
    tied = np.flatnonzero(np.append(equal_N, False) | np.insert(equal_N, 0, False))
    order[tied] = order[tied][np.lexsort((order[tied], sorted_N[tied]))]
    return order


def best(values_N: NDArray[np.floating[Any]], count: int) -> NDArray[np.int64]:
    """The rows with the `count` highest values, in corpus order; of equal ones the first."""
    last = np.partition(values_N, -count)[-count]
    above_N = values_N > last
    above_N[np.flatnonzero(values_N == last)[: count - int(above_N.sum())]] = True
    return np.flatnonzero(above_N)


def short_rows(artifact: ArtifactReader, row_index: NDArray[np.int64]) -> int:
    """How many of some rows are too short for their relevance to be trusted; 0 where all rows are, as images are."""
    length_N = row_tokens(artifact, length_column(artifact))
    return int((length_N[row_index] < SHORT).sum()) if length_N.max() >= SHORT else 0


def short_of(column: str) -> str:
    """What short rows have too few of, in words: what `length_column` counts."""
    return "tokens with loss" if column == LOSS_TOKENS else "tokens"


def write_ranked(
    artifact: ArtifactReader, values_N: NDArray[np.floating[Any]], order: NDArray[np.int64], path: Path, by: str
) -> None:
    """Rows in order; Parquet some at a time. The file appears only when whole."""
    if path.suffix != ".parquet":
        write_table(ranked_table(artifact, order, values_N, by), path)
        return
    schema = ranked_table(artifact, order[:0], values_N, by).schema
    with written_aside(path) as part, SealedWriter(part, schema) as writer:
        for start in range(0, len(order), ROWS_AT_ONCE):
            writer.write(ranked_table(artifact, order[start : start + ROWS_AT_ONCE], values_N, by).cast(schema))


def ranked_table(
    artifact: ArtifactReader, row_index: NDArray[np.int64], values_N: NDArray[np.floating[Any]], by: str
) -> pa.Table:
    """Chosen rows of the row table, in the order given, with what they are ordered by."""
    table = artifact.rows(row_index)
    kept = [name for name in table.column_names if name not in ("row_index", by)]
    values = pa.array(np.asarray(values_N[row_index], dtype=np.float64))
    return table.select(kept).append_column(by, values)


def _one_unit(artifact: ArtifactReader, target: str, unit: str | None) -> UnitSelection | None:
    if unit is None:
        return None
    columns = artifact.unit_columns(target)
    names = artifact.units.column("unit_id").to_pylist()
    found = [int(e) for e in columns if names[e] == unit]
    if not found:
        some = ", ".join(names[e] for e in columns[:3])
        raise ProtocolError(f"unit: {target} has no unit {unit!r}; it has {len(columns):,}, e.g. {some}")
    return UnitSelection((target,), np.array(found[:1]), np.ones(1, dtype=np.int64))
