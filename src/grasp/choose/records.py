"""Rows that a list names, and rows in an order of their own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.artifact.reader import ArtifactReader
from grasp.artifact.tables import readable
from grasp.errors import SettingsError

NAMES = ("row_id", "doc_id")
EXPECTED = "Parquet with a column row_id or doc_id, or text with one name a line"


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Rows that an exclusion list names, by row_id or doc_id."""

    where: str  # what the list is called
    mask_N: NDArray[np.bool_] = field(repr=False)
    listed: int  # different names in the list
    unknown: int  # of these, names that the corpus does not have


def read_exclusion(artifact: ArtifactReader, given: Path | str | Sequence[str]) -> Exclusion:
    """Rows named in a list, or in a file: Parquet with a column row_id or doc_id, or text with one name a line.

    Raises:
        SettingsError: not such a file, or none of its names, if it has any, is one of the corpus.
    """
    where = str(given) if isinstance(given, Path | str) else "exclude"
    values = pa.array(sorted(set(_file_names(Path(given)) if isinstance(given, Path | str) else given)), pa.string())
    mask_N = np.zeros(artifact.n_rows, dtype=np.bool_)
    seen = np.zeros(len(values), dtype=np.bool_)
    start = 0
    for batch in artifact.row_batches(list(NAMES)):
        for name in NAMES:
            column = batch.column(name).cast(pa.string())
            place = pc.index_in(column, values)
            hit = place.is_valid().to_numpy(zero_copy_only=False)
            mask_N[start : start + batch.num_rows] |= hit
            seen[place.drop_null().to_numpy()] = True
        start += batch.num_rows
    if len(values) and not seen.any():
        example = str(next(artifact.row_batches(["row_id"])).column(0)[0].as_py())
        raise SettingsError(
            f"exclude {where}: none of its {len(values):,} names is a row_id or doc_id of the artifact; "
            f"expected names like {example!r}"
        )
    return Exclusion(where, mask_N, len(values), int((~seen).sum()))


def rows_in_order(artifact: ArtifactReader, row_index: NDArray[np.int64], columns: list[str]) -> pa.Table:
    """Columns of chosen rows, in the order given; the row table streams past."""
    wanted_N = np.zeros(artifact.n_rows, dtype=np.bool_)
    wanted_N[row_index] = True
    parts: list[pa.RecordBatch] = []
    start = 0
    for batch in artifact.row_batches(columns):
        parts.append(batch.filter(pa.array(wanted_N[start : start + batch.num_rows])))
        start += batch.num_rows
    place = np.argsort(np.argsort(row_index))  # in corpus order -> in the order taken
    return pa.Table.from_batches(parts).take(pa.array(place)).combine_chunks()


def _file_names(path: Path) -> list[str]:
    if path.exists() and not path.is_file():
        raise SettingsError(f"exclude: {path}: is no file; expected {EXPECTED}")
    with readable(f"exclude: {path}", SettingsError, EXPECTED):
        if path.suffix != ".parquet":
            lines = path.read_text(encoding="utf-8-sig").split("\n")
            return [line.rstrip("\r") for line in lines if line.strip()]
        columns = pq.read_schema(path).names
        found = [name for name in NAMES if name in columns]
        if not found:
            raise SettingsError(f"exclude: {path}: has columns {columns}; expected {EXPECTED}")
        names: list[str] = pq.read_table(path, columns=found[:1]).column(0).cast(pa.string()).drop_null().to_pylist()
        return names
