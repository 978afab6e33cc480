"""The table of the results of runs: one row per run and unit, in any order. Start with `result_array`.

    subset_id, seed         the run
    size, params, tokens    model size as a text, number of parameters, training tokens; only of imported runs, or null
    target, unit_id         the unit; of imported runs a metric, which has a single unit
    utility                 -loss in nats per token, or a metric of imported runs with its sign; higher is better

Files of retrained runs have the columns `COLUMNS`, with utilities as float32; files of imported runs have all columns.
They contain their checksums, which are verified on reading. Shape letters: R runs, B subsets, S seeds, E units of all
targets.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grasp.arrays import F64
from grasp.errors import RunsError
from grasp.runs.training_runs import INFO, Run
from grasp.store.checksummed_parquet import checksummed_writer, read_checksummed

SEPARATOR = "\0"  # between the two names of a pair
COLUMNS = ("subset_id", "seed", "target", "unit_id", "utility")
RESULTS_SCHEMA = pa.schema(
    {"subset_id": pa.string(), "seed": pa.int64(), "size": pa.string(), "params": pa.float64(), "tokens": pa.float64()}
    | {"target": pa.string(), "unit_id": pa.string(), "utility": pa.float64()}
)


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
    arrays = [
        pa.array([run.subset_id for run in runs], pa.string()).take(run_index),
        pa.array([run.seed for run in runs], pa.int64()).take(run_index),
        pa.array([target for target, _ in units], pa.string()).take(unit_index),
        pa.array([unit_id for _, unit_id in units], pa.string()).take(unit_index),
        pa.array(utility_RE.ravel(), pa.float32()),
    ]
    return encode_results(pa.table(arrays, COLUMNS))


def encode_results(results: pa.Table) -> bytes:
    """Return a Parquet file of results."""
    sink = io.BytesIO()
    # Names repeat, so they are dictionary-encoded. The bytes of similar numbers compress better if those of the same
    # significance are stored together.
    names = results.column_names[:-1]
    encoding = {"utility": "BYTE_STREAM_SPLIT"}
    with checksummed_writer(
        sink, results.schema, compression_level=19, use_dictionary=names, column_encoding=encoding
    ) as writer:
        writer.write(results)
    return sink.getvalue()


def read_results(path: Path, columns: Sequence[str] = COLUMNS) -> pa.Table:
    """Read columns of a table of results, with the types of `RESULTS_SCHEMA`.

    Raises:
        RunsError: the file is damaged, or a column is missing or has another type.
        FileNotFoundError: no such file; expected if runs are merged concurrently.
    """
    try:
        table = read_checksummed(path, columns).select(columns)
        table = table.cast(pa.schema([RESULTS_SCHEMA.field(name) for name in columns]))
        table.validate(full=True)  # a flipped bit may result in invalid UTF-8
    except FileNotFoundError:  # a subclass of OSError, and not an error of the file
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError) as err:  # KeyError: a column is missing
        raise RunsError(
            f"{path}: cannot be read as Parquet: {' '.join(str(err).split())}; restore it, or delete it and retrain"
        ) from err
    return table


def result_array(
    results: pa.Table,
    subset_ids: Sequence[str],
    seeds: Sequence[int],
    units: Sequence[tuple[str, str]],
    location: str,
) -> F64:
    """Return the utilities by subset, seed and unit, (B, S, E); nan if there is no result, the last one if several.

    Args:
        results: table of results.
        subset_ids: all subsets that may occur.
        seeds: all seeds that may occur.
        units: all units (target, unit_id) that may occur.
        location: path of the runs, for messages.
    Raises:
        RunsError: other runs or units occur.
    """
    axes = (subset_ids, seeds, [f"{target}{SEPARATOR}{unit_id}" for target, unit_id in units])
    columns = [results[name] for name in COLUMNS[:2]]
    columns.append(pc.binary_join_element_wise(results["target"], results["unit_id"], SEPARATOR))
    positions = [pc.index_in(column, pa.array(axis, column.type)) for column, axis in zip(columns, axes, strict=True)]
    if any(position.null_count for position in positions):
        raise RunsError(f"{location}: has runs or units that {INFO} does not list; restore both from one copy")
    values_BSE = np.full([len(axis) for axis in axes], np.nan)
    values_BSE[tuple(position.to_numpy() for position in positions)] = results["utility"].to_numpy()
    return values_BSE
