"""What curation reads and leaves behind: exclusion lists, tables of rows and of weights, and summaries as JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from grasp.choose.mixture import Mixture
from grasp.choose.select import RowSelection
from grasp.choose.sketches import ChosenRows
from grasp.errors import SettingsError
from grasp.files import written_aside

SUBSET = "selection"
NAMES = ("row_id", "doc_id")
GROUP_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Rows that an exclusion list names, by row_id or doc_id."""

    mask_N: NDArray[np.bool_] = field(repr=False)
    listed: int  # different names in the list
    unknown: int  # of these, names that the corpus does not have


def read_exclusion(source: ChosenRows, path: Path) -> Exclusion:
    """Rows named in a list: Parquet with a column row_id or doc_id, or text with one name a line.

    Raises:
        SettingsError: not such a file, or none of its names, if it has any, is one of the corpus.
    """
    if not path.is_file():
        raise SettingsError(f"--exclude: {path}: no such file; expected a list of row_ids or doc_ids")
    names = _parquet_names(path) if path.suffix == ".parquet" else _text_names(path)
    values = pa.array(sorted(set(names)), pa.string())
    mask_N = np.zeros(source.n_rows, dtype=np.bool_)
    seen = np.zeros(len(values), dtype=np.bool_)
    start = 0
    for batch in source.row_batches(list(NAMES)):
        for name in NAMES:
            column = batch.column(name).cast(pa.string())
            place = pc.index_in(column, values)
            hit = place.is_valid().to_numpy(zero_copy_only=False)
            mask_N[start : start + batch.num_rows] |= hit
            seen[place.drop_null().to_numpy()] = True
        start += batch.num_rows
    if len(values) and not seen.any():
        raise SettingsError(
            f"--exclude {path}: none of its {len(values):,} names is a row_id or doc_id of the artifact; "
            f"expected names like {_example(source)!r}"
        )
    return Exclusion(mask_N, len(values), int((~seen).sum()))


def selection_table(selection: RowSelection, source: ChosenRows, label: str | None = None) -> pa.Table:
    """Rows in the order in which they were taken: subset_id, row_id, doc_id, order, gain, n_tokens[, label].

    `grasp predict --subsets` reads it as one subset.
    """
    columns = [*NAMES, "n_tokens", *([label] if label else [])]
    table = _rows_in_order(source, selection.row_index, columns)
    n_taken = table.num_rows
    table = table.add_column(0, "subset_id", pa.array([SUBSET]).take(pa.array(np.zeros(n_taken, dtype=np.int64))))
    table = table.append_column("order", pa.array(np.arange(n_taken)))
    table = table.append_column("gain", pa.array(selection.gain))
    names = ["subset_id", *NAMES, "order", "gain", "n_tokens", *([label] if label else [])]
    return table.select(names).replace_schema_metadata(None)


def write_summary(data: Mapping[str, Any], path: Path) -> None:
    """JSON; it appears only when whole."""
    with written_aside(path) as part:
        part.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def write_table(table: pa.Table, path: Path) -> None:
    """Parquet; it appears only when whole."""
    with written_aside(path) as part:
        pq.write_table(table, part, compression="zstd", row_group_size=GROUP_ROWS)


def mixture_table(mixture: Mixture) -> pa.Table:
    """One line a slice: value, expression, rows, current, proposed, factor."""
    return pa.table(
        {
            "value": list(mixture.names),
            "expression": list(mixture.expressions),
            "rows": pa.array(mixture.rows_G.astype(np.int64)),
            "current": pa.array(mixture.current_G),
            "proposed": pa.array(mixture.proposed_G),
            "factor": pa.array(mixture.factor_G),
        }
    )


def _rows_in_order(source: ChosenRows, row_index: NDArray[np.int64], columns: list[str]) -> pa.Table:
    """Columns of chosen rows, in the order given; the row table streams past."""
    wanted_N = np.zeros(source.n_rows, dtype=np.bool_)
    wanted_N[row_index] = True
    parts: list[pa.RecordBatch] = []
    start = 0
    for batch in source.row_batches(columns):
        parts.append(batch.filter(pa.array(wanted_N[start : start + batch.num_rows])))
        start += batch.num_rows
    place = np.argsort(np.argsort(row_index))  # in corpus order -> in the order taken
    return pa.Table.from_batches(parts).take(pa.array(place)).combine_chunks()


def _parquet_names(path: Path) -> list[str]:
    expected = f"expected Parquet with a column {' or '.join(NAMES)}, or text with one name a line"
    try:
        found = [name for name in NAMES if name in pq.read_schema(path).names]
        if not found:
            raise SettingsError(f"--exclude {path}: has columns {pq.read_schema(path).names}; {expected}")
        return _without_none(pq.read_table(path, columns=found[:1]).column(0).cast(pa.string()).to_pylist())
    except (pa.ArrowException, OSError) as err:
        raise SettingsError(f"--exclude {path}: cannot be read: {' '.join(str(err).split())}; {expected}") from err


def _text_names(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
        return [line.rstrip("\r") for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError) as err:
        raise SettingsError(f"--exclude {path}: cannot be read: {' '.join(str(err).split())}") from err


def _without_none(values: list[str | None]) -> list[str]:
    return [value for value in values if value is not None]


def _example(source: ChosenRows) -> str:
    return str(next(source.row_batches(["row_id"])).column(0)[0].as_py())
