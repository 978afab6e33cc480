"""Parquet tables of utilities: one row per run and unit, in any order, with the columns `COLUMNS`.

    subset_id, seed       the run
    target, unit_id       the unit
    utility               -loss in nats per token, as float32; higher is better

The files have checksums, which are verified on reading. Start with `encode_utilities` and `read_utilities`.
Shape letters: R runs, E units of all targets.
"""

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grasp.arrays import F64, I64
from grasp.errors import RunsError
from grasp.runs.training_runs import Run
from grasp.store.checksummed_parquet import checksummed_writer, read_checksummed

SEPARATOR = "\0"  # between the two names of a pair
COLUMNS = ("subset_id", "seed", "target", "unit_id", "utility")


def encode_utilities(runs: Sequence[Run], units: Sequence[tuple[str, str]], utility_RE: F64) -> bytes:
    """Return a Parquet file of the utilities of `runs`; it takes 3 to 4 bytes per utility.

    Args:
        runs: run of each row of `utility_RE`.
        units: (target, unit_id) of each column of `utility_RE`.
        utility_RE: -loss, nats per token.
    """
    n_runs, n_units = utility_RE.shape
    unit_index = pa.array(np.tile(np.arange(n_units), n_runs))
    run_index = pa.array(np.repeat(np.arange(n_runs), n_units))
    table = pa.table(
        {
            "subset_id": pa.array([run.subset_id for run in runs], pa.string()).take(run_index),
            "seed": pa.array([run.seed for run in runs], pa.int64()).take(run_index),
            "target": pa.array([target for target, _ in units], pa.string()).take(unit_index),
            "unit_id": pa.array([unit_id for _, unit_id in units], pa.string()).take(unit_index),
            "utility": pa.array(utility_RE.ravel(), pa.float32()),
        }
    )
    sink = io.BytesIO()
    # Names repeat, so they are dictionary-encoded. The bytes of similar numbers compress better if those of the same
    # significance are stored together.
    options: dict[str, Any] = {
        "use_dictionary": list(COLUMNS[:-1]),
        "column_encoding": {"utility": "BYTE_STREAM_SPLIT"},
    }
    with checksummed_writer(sink, table.schema, compression_level=19, **options) as writer:
        writer.write(table)
    return sink.getvalue()


def read_utilities(path: Path, runs: Sequence[Run], units: Sequence[tuple[str, str]]) -> F64:
    """Read utilities of `runs`, (R, E); nan for runs that do not occur in the table.

    Args:
        path: Parquet file.
        runs: all runs that may occur.
        units: (target, unit_id) of each unit; a run must have all units.
    Raises:
        RunsError: the file is damaged, or has other runs or units, or a utility of a run is missing or not finite.
        FileNotFoundError: no such file; expected if runs are merged concurrently.
    """
    table = read_columns(path, list(COLUMNS))
    r = _positions(table, ("subset_id", "seed"), [(run.subset_id, run.seed) for run in runs])
    e = _positions(table, ("target", "unit_id"), units)
    if (r < 0).any() or (e < 0).any():
        raise RunsError(f"{path}: has runs or units that environment.json does not list; restore both from one copy")
    values_RE = np.full((len(runs), len(units)), np.nan)
    values_RE[r, e] = table.column("utility").to_numpy().astype(np.float64)
    if n_invalid := int((~np.isfinite(values_RE[np.unique(r)])).sum()):
        raise RunsError(
            f"{path}: {n_invalid} utilities are missing, nan or infinite; delete these runs and retrain them"
        )
    return values_RE


def read_columns(path: Path, columns: list[str]) -> pa.Table:
    """Read columns of a table of utilities.

    Raises:
        RunsError: the file is damaged.
        FileNotFoundError: no such file.
    """
    try:
        table = read_checksummed(path, columns).select(columns)
        table.validate(full=True)  # a flipped bit may result in invalid UTF-8
    except FileNotFoundError:  # a subclass of OSError, and not an error of the file
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError) as err:  # KeyError: a column is missing
        raise RunsError(
            f"{path}: cannot be read as Parquet: {' '.join(str(err).split())}; delete it and retrain, or restore it"
        ) from err
    return table


def _positions(table: pa.Table, columns: tuple[str, str], pairs: Iterable[tuple[object, object]]) -> I64:
    """Return the position in `pairs` of the pair of names in each row of a table; -1 if it is unknown."""
    names = (table.column(column).cast(pa.string()) for column in columns)
    known = pa.array([f"{first}{SEPARATOR}{second}" for first, second in pairs], pa.string())
    positions = pc.index_in(pc.binary_join_element_wise(*names, SEPARATOR), known)
    return np.asarray(pc.fill_null(positions, -1).to_numpy(), dtype=np.int64)
