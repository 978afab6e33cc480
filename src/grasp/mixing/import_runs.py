"""Import runs from CSV or Parquet tables, and from what readers of other forms convert to tables.

Start with `import_runs`. The training mixtures and the results are tables such as

    mixtures.csv                       metrics.csv
    run,wikipedia,github,books         run,val_loss/arxiv,accuracy
    a,0.5,0.3,0.2                      a,3.21,0.41

Both may be columns of one file, which are then selected by patterns. Mixtures may also be in long form: `run,
row_id[, weight]` or `run, doc_id[, weight]`. Readers of `mixture`, `results` and `run_table` convert the files of
trainers, harnesses and trackers (`grasp.file_readers`). A reader of `results` returns an object with

    table                   one row per run and one column per metric; NaN if missing
    directions              `higher` or `lower` is better, for the metrics of which the files say so
    notes_about(metrics)    notes on these metrics, after checking that all runs have the same conditions on them
"""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from grasp.arrays import F64
from grasp.errors import RunsError, SettingsError
from grasp.file_readers import claimed
from grasp.files import check_directory
from grasp.mixtures import MEASURES, mixture_files, read_mixtures_of_runs
from grasp.runs.metric_names import SHARE, SPLIT_NAMES, direction_by_name, is_standard_error, metric_kind
from grasp.runs.predictions import WHOLE_TASK
from grasp.runs.table import SUM_TOLERANCE, WEIGHTS_SCHEMA, RunTable, float_column
from grasp.runs.training_runs import Direction, Kind, RunsInfo
from grasp.runs.utility_tables import RESULTS_SCHEMA
from grasp.select.budget import parse_tokens
from grasp.store.checksummed_parquet import read_checksummed
from grasp.text import count_text, did_you_mean

NAME_COLUMNS = ("run", "run_name", "name", "index", "id", "run_id", "subset_id", "")  # columns with the name of a run
PARAMS = ("params", "n_params", "num_params", "parameters")
METADATA_COLUMNS = {  # names of the columns with fields of a run, the preferred one first
    "seed": ("seed",),
    "size": ("size", "model_size", *PARAMS),
    "params": (*PARAMS, "size", "model_size"),
    "tokens": ("tokens", "train_tokens", "n_tokens", "num_tokens", "tokens_seen"),
    "state": ("state", "status"),
}
FINISHED_STATES = ("finished", "completed", "success")
ROW_COLUMNS = ("row_id", "doc_id")
MIXTURE_COLUMNS = ("proposed", "best_run", "mean_of_runs", "now")  # columns with shares in the output of `mix`
ROW_SHARES_COLUMN = "times_as_often"  # column of the output of `grasp mix`, whose shares are shares of rows
IGNORED_COLUMNS = ("gain",)  # column of the output of `runs propose` that is no share
# fields of the record that imported runs only have once they are bound to an artifact
IMPORTED = {"role": "dev", "recipe": "imported", "seeds": (), "corpus_fingerprint": "", "n_rows": 0, "targets": {}}
IMPORTED |= {"subset_ids": (), "masks_checksum": "", "reference": False}
MAX_LISTED = 5
MAX_INTEGER = (1 << 63) - 1
MIN_COUNT = 1_000  # smaller numbers are no numbers of parameters or tokens, but of millions or of a name


def import_runs(
    trained: Path | str | pa.Table,
    results: Path | str | pa.Table | None = None,
    *,
    label: str | None = None,
    weights: str = "shares",
    measure: str = "tokens",
    columns: Sequence[str] = (),
    metrics: Sequence[str] = (),
    higher: Sequence[str] = (),
    lower: Sequence[str] = (),
    size: str | None = None,
    skip_failed: bool = False,
    out: Path | str | None = None,
) -> RunTable:
    """Import your own training runs: the training mixture and the results of each run.

    Supports RegMix-like CSVs, a single wide table, results of evaluation harnesses, and exports of trackers. The result
    can be used wherever retrained runs can.

    Args:
        trained: mixtures: one line per run and one column per value of the label; or a table in long form with columns
            run, row_id or doc_id, and optionally weight; or a directory of mixtures as `grasp mix` --format writes
            them, one file per run.
        results: table, or directory of an evaluation harness with one folder per run. Default: the table `trained`
            contains both.
        label: label column of the corpus that the columns are values of, e.g. source.
        weights: shares: shares of the training data, which add up to 1; times: number of times each value is seen.
        measure: what shares are shares of: tokens, rows or documents. Files that `grasp mix` wrote say it themselves.
        columns: columns with weights, e.g. 'train_*', or '!eval_*' for all others. Default: all numeric columns that
            are not results.
        metrics: columns with results, e.g. 'eval/*'. Default: all numeric columns that are not weights.
        higher: results for which higher is better, if the name is ambiguous.
        lower: results for which lower is better, if the name is ambiguous.
        size: only import runs of this model size.
        skip_failed: skip runs with results that are not numbers, and report their number.
        out: new directory to save the runs in, for `open_runs`.
    Raises:
        RunsError: a file cannot be read, there is no column with run names, the direction of a metric is unknown, or
            `RunTable.from_results` rejects the runs.
        SettingsError: `out` exists.
    """
    if out is not None:
        check_directory(
            Path(out), {"is read": [source for source in (trained, results) if isinstance(source, Path | str)]}
        )
    paths = [str(source) for source in (trained, results) if isinstance(source, Path | str)]
    name = Path(paths[-1]).stem if paths else "runs"
    if weights not in ("shares", "times"):
        raise RunsError(f"weights: got {weights!r}, expected shares or times")
    if measure not in MEASURES:
        raise RunsError(f"measure: got {measure!r}, expected one of {', '.join(MEASURES)}")
    notes: list[str] = []

    files = mixture_files(Path(trained)) if isinstance(trained, Path | str) else []
    if files:
        if results is None:
            raise RunsError(f"{trained}: contains only mixtures; pass the results of the runs too")
        weights_location = str(trained)
        if label is None:
            raise RunsError(f"{files[0]}: pass the label whose values it mixes, e.g. --label source")
        measure_of_files, weights_of_run = read_mixtures_of_runs(files)
        lines = [(run, value, weight) for run, mixture in weights_of_run.items() for value, weight in mixture.items()]
        trained_table = pa.table([pa.array(column) for column in zip(*lines, strict=True)], WEIGHTS_SCHEMA.names)
        kind: Kind = "times" if measure_of_files == "times" else "shares"
        measure = measure if kind == "times" else measure_of_files
        notes.append(f"weights of the mixtures are {'repetitions' if kind == 'times' else f'shares of {measure}'}")
    else:
        weights_table, weights_location = _read_table(trained)
        if results is None:
            if not metrics:
                raise RunsError(
                    f"{weights_location}: contains weights and results; pass the columns with results: --metrics"
                )
            columns = columns or [f"!{pattern}" for pattern in metrics]
        kind, trained_table = _read_weights(weights_table, weights_location, label, weights, columns, notes)
    harness: Any = None
    if results is None:
        results_table, results_location = weights_table, weights_location
    elif isinstance(results, Path | str) and (claim := claimed("results", Path(results))) is not None:
        harness = claim.reader.read(Path(results))
        results_table, results_location = harness.table, str(results)
    else:
        results_table, results_location = _read_table(results)

    wide = _WideTable(results_table, results_location)
    results_long, failed = wide.results(metrics, skip_failed, notes)
    metric_names = tuple(dict.fromkeys(results_long["target"].to_pylist()))
    _refuse_mixed_scales(results_long, results_location)
    directions = _resolve_directions(
        metric_names, harness.directions if harness else {}, higher, lower, results_location
    )
    if failed:
        count = f"{len(failed)} result{'s' * (len(failed) > 1)}"
        notes.append(f"skipped as failed: {count}, e.g. of run {', '.join(list(dict.fromkeys(failed))[:MAX_LISTED])}")
        # a run of which every seed failed has no results, so that its weights are of no use
        without_results = set(failed).difference(results_long["subset_id"].to_pylist())
        is_unused = pc.is_in(trained_table["subset_id"], pa.array(without_results, pa.string()))
        trained_table = trained_table.filter(pc.invert(is_unused))
    if wide.ignored:
        notes.append(f"ignored columns that are not numeric: {', '.join(wide.ignored[:MAX_LISTED])}")
    if wide.standard_errors:
        n_columns, examples = len(wide.standard_errors), wide.standard_errors[:MAX_LISTED]
        notes.append(f"left out {n_columns} column{'s' * (n_columns > 1)} of standard errors: {', '.join(examples)}")
    if harness is not None:
        notes += harness.notes_about(metric_names)
    sign = [-1.0 if directions[metric] == "lower" else 1.0 for metric in results_long["target"].to_pylist()]
    utility = pa.array(results_long["utility"].to_numpy() * sign)
    results_long = results_long.set_column(results_long.num_columns - 1, "utility", utility)
    results_long = _without_prefix(results_long, "target", metrics, notes)
    metric_names = pc.unique(results_long["target"]).to_pylist()
    directions = dict(zip(metric_names, directions.values(), strict=True))
    meaning = {"kind": kind, "label": label, "measure": measure, "metrics": directions}
    info = RunsInfo.model_validate(IMPORTED | meaning)
    locations = weights_location, results_location
    runs = RunTable.from_results(name, info, trained_table, results_long, notes, locations)
    runs = runs if size is None else runs.select_size(size)
    if out is not None:
        runs.save(out)
    return runs


def read_mixtures(source: Path | str | pa.Table, values: Sequence[str], measure: str) -> tuple[tuple[str, ...], F64]:
    """Read mixtures: their names, and their shares (B, G) of `values`.

    The table has one line per mixture and one column per value, and columns of zeros may be missing; or one line per
    value and one column per mixture, as written by `mix`.

    Args:
        source: table, or its file.
        values: label values of the runs.
        measure: what the shares of the runs are shares of.
    Raises:
        RunsError: not a table, an unknown value, or shares that are not numbers or do not add up to 1.
    """
    table, location = _read_table(source)
    if "value" in table.column_names and "value" not in values:
        has_other_measure = ROW_SHARES_COLUMN in table.column_names and measure != "rows"
        columns_of_mix = (f"share_of_{measure}", *(() if has_other_measure else MIXTURE_COLUMNS))
        mixtures = [name for name in columns_of_mix if name in table.column_names]
        if not mixtures:
            raise RunsError(
                f"{location}: has a column `value` but no shares of {measure}; expected {', '.join(columns_of_mix)}"
            )
        row_names = _string_column(table, "value", location).to_pylist()
        lines = zip(row_names, *(table[name] for name in mixtures), strict=True)
        table = pa.table({"mixture": mixtures} | {value: pa.array(shares) for value, *shares in lines})
    if not len(table):
        raise RunsError(f"{location}: has no mixtures; expected one per line")
    name_columns = [name for name in table.column_names if name not in values and name in (*NAME_COLUMNS, "mixture")]
    known_columns = (*values, *name_columns, *IGNORED_COLUMNS)
    if unknown := [name for name in table.column_names if name not in known_columns]:
        hint = did_you_mean(unknown[0], values) or f"; they are {', '.join(values[:MAX_LISTED])} ..."
        raise RunsError(f"{location}: {unknown[0]!r} is not a value that the runs were trained on{hint}")
    absent = [name for name in values if name not in table.column_names]
    for name in absent:
        table = table.append_column(name, pa.array(np.zeros(len(table))))
    names = tuple(f"mixture-{b + 1}" for b in range(len(table)))
    if name_columns:
        names = tuple(_string_column(table, name_columns[0], location).to_pylist())
    columns = [float_column(table[name]) for name in values]
    share_BG = np.stack([np.full(len(table), np.nan) if column is None else column for column in columns], axis=1)
    for name, share_G in zip(names, share_BG, strict=True):
        if not (np.isfinite(share_G) & (share_G >= 0)).all() or abs(share_G.sum() - 1.0) > SUM_TOLERANCE:
            without = f" (no columns, so share 0: {', '.join(absent[:MAX_LISTED])})" if absent else ""
            raise RunsError(
                f"{location}: mixture {name!r}: shares add up to {share_G.sum():.4g}{without}, expected numbers of 0 "
                "or more that add up to 1"
            )
    return names, share_BG / share_BG.sum(axis=1, keepdims=True)


def _read_weights(
    table: pa.Table, location: str, label: str | None, weights: str, columns: Sequence[str], notes: list[str]
) -> tuple[Kind, pa.Table]:
    """Return what the weights are of (rows, shares or times), and a table of run, name and weight."""
    # a table in long form is recognized by its columns; otherwise there is one column of weights per label value
    names = {name.lower(): name for name in table.column_names}
    row_column = next((names[option] for option in ROW_COLUMNS if option in names), None)
    if row_column is not None:
        arrays = [
            _string_column(table, _name_column(table, location), location),
            _string_column(table, row_column, location),
            table[names["weight"]] if "weight" in names else pa.array(np.ones(len(table))),
        ]
        return "rows", pa.table(arrays, WEIGHTS_SCHEMA.names)
    if label is None:
        raise RunsError(f"{location}: pass the label that its columns are values of, e.g. --label source")
    wide = _WideTable(table, location)
    weight_columns = wide.select_columns(columns)
    if len(weight_columns) < 2:
        raise RunsError(f"{location}: has {len(weight_columns)} columns of weights, expected two or more")
    weight_RG = np.stack([wide.numbers[name] for name in weight_columns], axis=1)
    if weights == "shares" and (np.abs(weight_RG.sum(axis=1) / 100 - 1) <= SUM_TOLERANCE).all():
        weight_RG /= 100
        notes.append("shares add up to 100 in every run: percent, divided by 100")
    run_index, value_index = (index.ravel() for index in np.indices(weight_RG.shape))
    columns_of_long = np.array(wide.runs, object)[run_index], np.array(weight_columns, object)[value_index]
    long = pa.table([*map(pa.array, (*columns_of_long, weight_RG.ravel()))], WEIGHTS_SCHEMA.names)
    # a run may occur again with another seed, but only with the same weights
    long = long.group_by(long.column_names, use_threads=False).aggregate([])
    return ("times" if weights == "times" else "shares"), _without_prefix(long, "row_id", columns, notes)


class _WideTable:
    """A table with one line per run: its name, metadata columns, and numeric columns."""

    def __init__(self, table: pa.Table, location: str) -> None:
        self.location = location
        name_column = _name_column(table, location)
        self.runs = _string_column(table, name_column, location).to_pylist()
        original_name = {name.lower(): name for name in table.column_names if name != name_column}
        used = {name_column}
        self.metadata: dict[str, pa.Array] = {}  # by the names of `METADATA_COLUMNS`; null if there is no such column
        self.metadata_columns: dict[str, str] = {}
        for field, options in METADATA_COLUMNS.items():
            names = [original_name[option] for option in options if option in original_name]
            self.metadata[field] = table[names[0]] if names else pa.nulls(len(table))
            self.metadata_columns[field] = names[0] if names else ""
            used.update(names)
        self.standard_errors = [name for name in table.column_names if is_standard_error(name)]
        others = [name for name in table.column_names if name not in (*used, *self.standard_errors)]
        self.numbers = {name: values for name in others if (values := float_column(table[name])) is not None}
        self.ignored = [name for name in others if name not in self.numbers]

    def select_columns(self, patterns: Sequence[str]) -> list[str]:
        """Select columns by patterns; `!pattern` excludes columns; without patterns, all are selected."""
        included = [pattern for pattern in patterns if pattern[:1] != "!"]
        excluded = [pattern[1:] for pattern in patterns if pattern[:1] == "!"]
        selected = [
            name for name in self.numbers if (not included or _matches(name, included)) and not _matches(name, excluded)
        ]
        unmatched = [
            pattern for pattern in included if not any(fnmatch.fnmatchcase(name, pattern) for name in self.numbers)
        ]
        if unmatched:
            available = ", ".join(list(self.numbers)[:MAX_LISTED])
            raise RunsError(f"{self.location}: no numeric column matches {unmatched[0]!r}; available: {available}")
        return selected

    def results(self, patterns: Sequence[str], skip_failed: bool, notes: list[str]) -> tuple[pa.Table, list[str]]:
        """Return results with RESULTS_SCHEMA, and the run of each line that is skipped as failed; add notes."""
        metrics = self.select_columns(patterns)
        if not metrics:
            raise RunsError(f"{self.location}: has no numeric columns with results; standard errors are no results")
        value_RT = np.stack([self.numbers[name] for name in metrics], axis=1)
        states = [str(state or FINISHED_STATES[0]).lower() for state in self.metadata["state"].to_pylist()]
        is_failed_R = ~np.isfinite(value_RT).all(axis=1) | [state not in FINISHED_STATES for state in states]
        is_failed_R &= skip_failed
        chosen_R = np.flatnonzero(~is_failed_R)
        seeds, sizes = (self.metadata[name].to_pylist() for name in ("seed", "size"))
        fields_of_run: list[Any] = [
            [self.runs[r] for r in chosen_R],
            [_parse_seed(seeds[r], f"{self.location}: run {self.runs[r]!r}") for r in chosen_R],
            [count_text(sizes[r]) if isinstance(sizes[r], int | float) else sizes[r] for r in chosen_R],
        ]
        for name in ("params", "tokens"):
            numbers = float_column(self.metadata[name])
            if numbers is None:  # such as `1.2B`
                numbers = np.zeros(len(self.runs))
                for i, cell in enumerate(self.metadata[name].to_pylist()):
                    with suppress(SettingsError):
                        numbers[i] = parse_tokens(str(cell))
            counts = [count if MIN_COUNT <= count < np.inf else None for count in numbers.tolist()]
            if any(count is not None for count in counts):
                notes.append(f"{name} of the runs: from the column {self.metadata_columns[name]!r}")
            fields_of_run.append([counts[r] for r in chosen_R])
        r, t = (index.ravel() for index in np.indices((len(chosen_R), len(metrics))))
        columns = [
            pa.array(values, field.type, from_pandas=True).take(pa.array(r))
            for values, field in zip(fields_of_run, RESULTS_SCHEMA, strict=False)
        ]
        columns += [pa.array(metrics).take(pa.array(t)), pa.array([WHOLE_TASK] * len(t)), value_RT[chosen_R].ravel()]
        return pa.table(columns, RESULTS_SCHEMA), [self.runs[r] for r in np.flatnonzero(is_failed_R)]


def _parse_seed(value: Any, location: str) -> int:
    """Return a seed; 0 if it is missing."""
    if value is None:
        return 0
    try:
        number = int(float(value)) if isinstance(value, str) else int(value)
    except (ValueError, OverflowError, TypeError):
        number = -1  # refused below
    if not 0 <= number <= MAX_INTEGER:
        raise RunsError(f"{location}: seed is {value!r}, expected a whole number")
    return number


def _resolve_directions(
    metrics: Sequence[str],
    directions_in_files: Mapping[str, Direction],
    higher: Sequence[str],
    lower: Sequence[str],
    location: str,
) -> dict[str, Direction]:
    """Return whether higher or lower is better: by the results files, else by `higher` and `lower`, else by name."""
    directions: dict[str, Direction] = {}
    for metric in metrics:
        requested: Direction | None = (
            "higher" if _matches(metric, higher) else "lower" if _matches(metric, lower) else None
        )
        if direction := directions_in_files.get(metric) or requested or direction_by_name(metric):
            directions[metric] = direction
    unknown = [metric for metric in metrics if metric not in directions]
    if unknown:
        others = f" (likewise {', '.join(unknown[1:])})" if unknown[1:] else ""
        raise RunsError(
            f"{location}: metric {unknown[0]!r}: unknown direction; pass --higher '{unknown[0]}' or --lower "
            f"'{unknown[0]}', or select the results with --metrics{others}"
        )
    return directions


def _refuse_mixed_scales(results: pa.Table, location: str) -> None:
    """Raise an error if some values of a metric are fractions of 1 and others are percent."""
    for metric in pc.unique(results["target"]).to_pylist():
        metric_results = results.filter(pc.equal(results["target"], metric))
        value = metric_results["utility"].to_numpy()
        shares, percent = value[(value > 0) & (value <= 1)], value[value > 1]
        if not (metric_kind(metric) == SHARE and shares.size and percent.size):
            continue
        # as percent, the shares are similar to the other values: 0.47 and 63, not 0.9 and 3.4
        if percent.min() / 2 <= 100 * shares.min() and 100 * shares.max() <= 2 * percent.max():
            first, second = (
                metric_results["subset_id"][int(np.flatnonzero(value == values[0])[0])] for values in (shares, percent)
            )
            raise RunsError(
                f"{location}: {metric} is {shares[0]:g} of run {first.as_py()!r} and {percent[0]:g} of run "
                f"{second.as_py()!r}: shares and percent are mixed; use one unit"
            )


def _without_prefix(table: pa.Table, column: str, patterns: Sequence[str], notes: list[str]) -> pa.Table:
    """Remove what all `patterns` begin with, such as `train_` or `eval/`, from the targets or row ids of a table.

    Names of an artifact remain: `sciq/*` removes nothing from targets, as `acc` is no metric of a task.
    """
    literals = [re.split(r"[*?[]", pattern)[0] for pattern in patterns if pattern[:1] != "!"]
    common = commonprefix(literals)  # noqa: RUF071 - of characters, as in train_web, train_code
    prefix, names = common[: common.rfind("/") + 1], table[column].to_pylist()
    if (column == "target" or not prefix) and not all(name.removeprefix(prefix).count("/") for name in names):
        match = re.match(rf"({SPLIT_NAMES})[/_.]", common)
        prefix = match[0] if match else ""
    if prefix:
        notes.append(f"names are without {prefix!r}, with which the patterns begin")
    short = pa.array([name.removeprefix(prefix) for name in names], pa.string())
    return table.set_column(table.column_names.index(column), column, short)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of the patterns, case-sensitively."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _read_table(source: Path | str | pa.Table) -> tuple[pa.Table, str]:
    """Return a table with one line per run, from memory, Parquet or CSV, and its location for messages."""
    location = "runs" if isinstance(source, pa.Table) else str(source)
    try:
        if isinstance(source, pa.Table):
            table = source
        else:
            table = read_checksummed(source) if location.endswith(".parquet") else pacsv.read_csv(source)
        names = table.column_names
    except FileNotFoundError as err:
        raise RunsError(f"{location}: no such file") from err
    except UnicodeDecodeError as err:
        raise RunsError(f"{location}: column names are not UTF-8; save the table as UTF-8") from err
    except (pa.ArrowException, OSError, ValueError) as err:
        raise RunsError(f"{location}: cannot be read as a table: {' '.join(str(err).split())}") from err
    if duplicates := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise RunsError(f"{location}: has the column {duplicates[0]!r} more than once; rename or drop one of them")
    claim = claimed("run_table", table)  # a tracker may export another form
    return table if claim is None else claim.reader.read(table), location


def _name_column(table: pa.Table, location: str) -> str:
    """Return the name of the column with run names, ignoring case."""
    lower = {name.lower(): name for name in reversed(table.column_names)}
    column = next((lower[name] for name in NAME_COLUMNS if name in lower), None)
    if column is None:
        raise RunsError(
            f"{location}: has no column with run names (one of {', '.join(NAME_COLUMNS[:-1])}); its columns are "
            f"{', '.join(table.column_names[:MAX_LISTED])}"
        )
    return str(column)


def _string_column(table: pa.Table, name: str, location: str) -> pa.ChunkedArray:
    """Return a column as strings."""
    try:
        column = table[name].cast(pa.string())
    except pa.ArrowException as err:
        raise RunsError(
            f"{location}: column {name!r} contains {table[name].type} that is not UTF-8 text, expected names"
        ) from err
    if column.null_count:
        raise RunsError(f"{location}: {column.null_count} cells of {name!r} are empty, expected names")
    return column
