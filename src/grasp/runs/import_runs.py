"""Runs from the files that people have: CSV or Parquet tables, results of evaluation harnesses, wandb exports.

    mixtures.csv                       metrics.csv
    run,wikipedia,github,books         run,val_loss/arxiv,accuracy
    a,0.5,0.3,0.2                      a,3.21,0.41

Both may be one file, whose columns are then told apart by patterns. What a run was trained on may also be long:
`run, row_id[, weight]`, or `run, expression[, weight]`. Results may be a directory with a folder a run, each with the
files of a harness (see `results_files`), or the CSV that wandb writes of a table of runs or of a panel.
"""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from grasp.arrays import F64
from grasp.errors import RunsError
from grasp.files import check_place
from grasp.runs.results_files import HarnessResults, direction_by_name, read_results
from grasp.runs.table import RESULTS_SCHEMA, SUM_SLACK, TRAINED_SCHEMA, Direction, Kind, RunsInfo, RunTable
from grasp.store.checksummed_parquet import read_checksummed
from grasp.text import did_you_mean

NAMES = ("run", "run_name", "name", "index", "id", "run_id", "subset_id", "")  # of the column with a run's name
SEEDS, SIZES, TOKENS = ("seed",), ("size", "model_size", "params"), ("tokens", "train_tokens", "n_tokens")
STATES = ("state", "status")
FINISHED = ("finished", "completed", "success")
ROW_COLUMNS = ("row_id", "doc_id")
MIXTURES = ("proposed", "best_run", "mean_of_runs", "now")  # columns of what `mix` writes
SHOWN = 5
MOST_WHOLE = (1 << 63) - 1


def import_runs(
    trained: Path | str | pa.Table,
    results: Path | str | pa.Table | None = None,
    *,
    label: str | None = None,
    weights: str = "shares",
    columns: Sequence[str] = (),
    metrics: Sequence[str] = (),
    higher: Sequence[str] = (),
    lower: Sequence[str] = (),
    size: str | None = None,
    skip_failed: bool = False,
    out: Path | str | None = None,
) -> RunTable:
    """Read runs that you have made: what each was trained on, and what came out.

    RegMix-like CSVs, one wide table, results of lm-evaluation-harness or olmes, or an export of wandb. What takes
    retrained runs takes them as well.

    Args:
        trained: what each run was trained on: a line a run, a column a value of the label; or long, as said above.
        results: what came out: a table, or a directory of lm-evaluation-harness or olmes, a folder a run. Default: the
            same table has both.
        label: column of the corpus whose values the weights are of, e.g. source.
        weights: shares: of the training tokens, adding up to 1; times: how often each value is seen.
        columns: columns that are weights, e.g. 'train_*'. Default: all numbers that are no result.
        metrics: columns that are results, e.g. 'eval/*'. Default: all numbers that are no weight.
        higher: results of which more is better, where the name does not tell.
        lower: results of which less is better.
        size: runs of this model size alone.
        skip_failed: leave out runs with a result that is no number; they are counted.
        out: new directory to keep them in, for `open_runs`.
    Raises:
        RunsError: a file that cannot be read, no column with names of runs, a metric whose direction is not
            known, and all that `RunTable.from_results` refuses.
        SettingsError: something is at `out`.
    """
    if out is not None:
        check_place(Path(out), {"is read": [one for one in (trained, results) if isinstance(one, Path | str)]})
    places = [str(one) for one in (trained, results) if isinstance(one, Path | str)]
    called = Path(places[-1]).stem if places else "runs"
    if weights not in ("shares", "times"):
        raise RunsError(f"weights: got {weights!r}, expected shares or times")
    table, where = _table(trained)
    harness: HarnessResults | None = None
    if results is None:
        if not metrics:
            raise RunsError(f"{where}: holds weights and results; say which columns are results, --metrics")
        outcome, outcome_where = table, where
        columns = columns or [f"!{pattern}" for pattern in metrics]
    elif isinstance(results, Path | str) and Path(results).is_dir():
        harness = read_results(Path(results))
        outcome, outcome_where = harness.table, str(results)
    else:
        outcome, outcome_where = _table(results)
    kind, long = _trained(table, where, label, weights, columns)
    wide = _Wide(outcome, outcome_where)
    lines, failed = wide.results(metrics, skip_failed)
    found = tuple(dict.fromkeys(lines["metric"].to_pylist()))
    directions = _directions(found, harness.directions if harness else {}, higher, lower, outcome_where)
    notes = [f"left out as failed: {len(failed)} runs, e.g. {', '.join(failed[:SHOWN])}"] if failed else []
    if wide.ignored:
        notes.append(f"columns that are no numbers were left out: {', '.join(wide.ignored[:SHOWN])}")
    if harness is not None:
        harness.check_comparable(found)
        notes += harness.notes_about(found)
    if failed:
        keep = pa.array([run not in set(failed) for run in long["run"].to_pylist()])
        long = long.filter(keep)
    info = RunsInfo(kind=kind, label=label, metrics=directions, read_from=tuple(places))
    runs = RunTable.from_results(called, info, long, lines, notes)
    runs = runs if size is None else runs.select_size(size)
    if out is not None:
        runs.save(out)
    return runs


def read_mixtures(source: Path | str | pa.Table, values: Sequence[str]) -> tuple[tuple[str, ...], F64]:
    """Names of mixtures, and their shares (B, G) of `values`.

    A line a mixture and a column a value, of which those that get nothing may be absent; or a line a value and a column
    a mixture, as `mix` writes them.

    Raises:
        RunsError: no table; an unknown value; shares that are no numbers, or do not add up to 1.
    """
    table, where = _table(source)
    if "value" in table.column_names and "value" not in values:
        mixtures = [name for name in MIXTURES if name in table.column_names]
        if not mixtures:
            raise RunsError(f"{where}: has a column `value` and no shares: expected {', '.join(MIXTURES)}")
        lines = zip(_text(table, "value", where).to_pylist(), *(table[name] for name in mixtures), strict=True)
        table = pa.table({"mixture": mixtures} | {value: pa.array(shares) for value, *shares in lines})
    if not len(table):
        raise RunsError(f"{where}: has no mixture; expected a line for each")
    named = [name for name in table.column_names if name not in values and name in (*NAMES, "mixture")]
    if unknown := [name for name in table.column_names if name not in (*values, *named, "settles")]:
        meant = did_you_mean(unknown[0], values) or f"; they are {', '.join(values[:SHOWN])} ..."
        raise RunsError(f"{where}: {unknown[0]!r} is no value that the runs were trained on{meant}")
    absent = [name for name in values if name not in table.column_names]
    for name in absent:
        table = table.append_column(name, pa.array(np.zeros(len(table))))
    names = (
        tuple(_text(table, named[0], where).to_pylist())
        if named
        else tuple(f"mixture-{b + 1}" for b in range(len(table)))
    )
    columns = [_numbers(table[name]) for name in values]
    share_BG = np.stack([np.full(len(table), np.nan) if one is None else one for one in columns], axis=1)
    for name, share_G in zip(names, share_BG, strict=True):
        if not (np.isfinite(share_G) & (share_G >= 0)).all() or abs(share_G.sum() - 1.0) > SUM_SLACK:
            without = f" (no column, so nothing of: {', '.join(absent[:SHOWN])})" if absent else ""
            raise RunsError(
                f"{where}: mixture {name!r}: its shares add up to {share_G.sum():.4g}{without}, expected numbers of 0 "
                "or more that add up to 1"
            )
    return names, share_BG / share_BG.sum(axis=1, keepdims=True)


# --------------------------------------------------------------------------------------------- what was trained on


def _trained(
    table: pa.Table, where: str, label: str | None, weights: str, columns: Sequence[str]
) -> tuple[Kind, pa.Table]:
    """The kind, and run, name, weight."""
    names = {name.lower(): name for name in table.column_names}
    for kind, options in (("rows", ROW_COLUMNS), ("expressions", ("expression",))):
        column = next((names[one] for one in options if one in names), None)
        if column is not None:
            weight = table[names["weight"]] if "weight" in names else pa.array(np.ones(len(table)))
            arrays = [_text(table, _name_column(table, where), where), _text(table, column, where), weight]
            return kind, pa.table(arrays, TRAINED_SCHEMA.names)  # type: ignore[return-value]
    if label is None:
        raise RunsError(f"{where}: say which label its columns are values of, e.g. --label source")
    wide = _Wide(table, where)
    chosen = wide.chosen(columns)
    if len(chosen) < 2:
        raise RunsError(f"{where}: has {len(chosen)} columns of weights, expected two or more")
    weight_RG = np.stack([wide.numbers[name] for name in chosen], axis=1)
    first: dict[str, int] = {}
    for at, run in enumerate(wide.runs):  # a name may come again for another seed, but not with other weights
        was = first.setdefault(run, at)
        if was != at and not np.allclose(weight_RG[was], weight_RG[at], equal_nan=True):
            raise RunsError(f"{where}: run {run!r} is there twice, with different weights; rename one of them")
        if was != at and wide.meta("seed", was) == wide.meta("seed", at):
            raise RunsError(f"{where}: run {run!r} is there twice; rename one, or add a column seed")
    r, g = (index.ravel() for index in np.indices((len(first), len(chosen))))
    names_R, names_G = np.array([*first], object), np.array(chosen, object)
    arrays = [names_R[r], names_G[g], weight_RG[[*first.values()]].ravel()]
    long = pa.table([pa.array(one) for one in arrays], TRAINED_SCHEMA.names).cast(TRAINED_SCHEMA)
    return ("times" if weights == "times" else "shares"), long


# ------------------------------------------------------------------------------------------------- what came out


class _Wide:
    """A table with a line a run: its name, what is known of it, and columns of numbers."""

    def __init__(self, table: pa.Table, where: str) -> None:
        table = _panel(table)
        self.where = where
        by_name = _name_column(table, where)
        self.runs = _text(table, by_name, where).to_pylist()
        lower = {name.lower(): name for name in table.column_names if name != by_name}
        told = {"seed": SEEDS, "size": SIZES, "tokens": TOKENS, "state": STATES}
        column_of = {what: [lower[one] for one in options if one in lower] for what, options in told.items()}
        self._meta = {what: table[names[0]].to_pylist() for what, names in column_of.items() if names}
        used = {by_name, *(name for names in column_of.values() for name in names)}
        rest = [name for name in table.column_names if name not in used]
        self.numbers = {name: values for name in rest if (values := _numbers(table[name])) is not None}
        self.ignored = [name for name in rest if name not in self.numbers]

    def meta(self, what: str, at: int) -> Any:
        return self._meta[what][at] if what in self._meta else None

    def chosen(self, patterns: Sequence[str]) -> list[str]:
        """Columns by patterns; `!pattern` leaves out; none: all."""
        keep, drop = [one for one in patterns if one[:1] != "!"], [one[1:] for one in patterns if one[:1] == "!"]
        found = [name for name in self.numbers if (not keep or _matches(name, keep)) and not _matches(name, drop)]
        idle = [one for one in keep if not any(fnmatch.fnmatchcase(name, one) for name in self.numbers)]
        if idle:
            there = ", ".join(list(self.numbers)[:SHOWN])
            raise RunsError(f"{self.where}: no column of numbers is like {idle[0]!r}; there are {there}")
        return found

    def results(self, patterns: Sequence[str], skip_failed: bool) -> tuple[pa.Table, list[str]]:
        """RESULTS_SCHEMA, and the runs that were left out."""
        chosen = self.chosen(patterns)
        if not chosen:
            raise RunsError(f"{self.where}: has no columns of numbers that are results")
        failed: list[str] = []
        lines: list[tuple[Any, ...]] = []
        for at, run in enumerate(self.runs):
            state = str(self.meta("state", at) or FINISHED[0]).lower()
            values = [float(self.numbers[name][at]) for name in chosen]
            if skip_failed and (state not in FINISHED or not np.isfinite(values).all()):
                failed.append(run)
                continue
            size = self.meta("size", at)
            seed, tokens = self._whole("seed", at) or 0, self._whole("tokens", at)
            what = (run, seed, None if size is None else str(size), None if tokens is None else float(tokens))
            lines += [(*what, name, None, value) for name, value in zip(chosen, values, strict=True)]
        columns = list(zip(*lines, strict=True)) or [() for _ in RESULTS_SCHEMA]
        arrays = [pa.array(column, field.type) for column, field in zip(columns, RESULTS_SCHEMA, strict=True)]
        return pa.table(arrays, schema=RESULTS_SCHEMA), failed

    def _whole(self, what: str, at: int) -> int | None:
        """A seed, or a count of tokens."""
        value = self.meta(what, at)
        try:
            number = None if value is None else int(float(value)) if isinstance(value, str) else int(value)
        except (ValueError, OverflowError, TypeError):
            number = MOST_WHOLE + 1
        if number is not None and not 0 <= number <= MOST_WHOLE:
            raise RunsError(f"{self.where}: run {self.runs[at]!r}: {what} is {value!r}, expected a whole number")
        return number


def _panel(table: pa.Table) -> pa.Table:
    """What wandb exports of a panel, `Step, <run> - <metric>, ...`: the last value of every column, a line a run."""
    if not table.column_names or table.column_names[0].lower() not in ("step", "_step"):
        return table
    last: dict[str, dict[str, float]] = {}
    for name in table.column_names[1:]:
        run, _, metric = name.rpartition(" - ")
        if not run or metric.endswith(("__MIN", "__MAX")):
            continue
        values = _numbers(table[name])
        seen = values[np.isfinite(values)] if values is not None else np.empty(0)
        last.setdefault(run, {})[metric] = float(seen[-1]) if seen.size else float("nan")
    metrics = list(dict.fromkeys(metric for one in last.values() for metric in one))
    columns = {metric: pa.array([one.get(metric, float("nan")) for one in last.values()]) for metric in metrics}
    return pa.table({"run": pa.array(list(last)), **columns})


# --------------------------------------------------------------------------------------------------------- inside


def _directions(
    metrics: Sequence[str], known: Mapping[str, Direction], higher: Sequence[str], lower: Sequence[str], where: str
) -> dict[str, Direction]:
    """Of each metric whether more is better: as its file says, as it was said, or as its name tells."""
    directions: dict[str, Direction] = {}
    unknown = []
    for metric in metrics:
        said: Direction | None = "higher" if _matches(metric, higher) else "lower" if _matches(metric, lower) else None
        if direction := known.get(metric) or said or direction_by_name(metric):
            directions[metric] = direction
        else:
            unknown.append(metric)
    if unknown:
        others = f" (the same of {', '.join(unknown[1:])})" if unknown[1:] else ""
        raise RunsError(
            f"{where}: metric {unknown[0]!r}: is more of it better or worse? say --higher '{unknown[0]}' or --lower "
            f"'{unknown[0]}', or name the results with --metrics{others}"
        )
    return directions


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _table(source: Path | str | pa.Table) -> tuple[pa.Table, str]:
    if isinstance(source, pa.Table):
        return source, "runs"
    path = Path(source)
    try:
        table = read_checksummed(path) if path.suffix == ".parquet" else pacsv.read_csv(path)
        names = table.column_names
    except FileNotFoundError as err:
        raise RunsError(f"{path}: no such file") from err
    except UnicodeDecodeError as err:
        raise RunsError(f"{path}: names of columns are no text in UTF-8; save the table as UTF-8") from err
    except (pa.ArrowException, OSError, ValueError) as err:
        raise RunsError(f"{path}: cannot be read as a table: {' '.join(str(err).split())}") from err
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise RunsError(f"{path}: has the column {twice[0]!r} more than once; rename or drop one of them")
    return table, str(path)


def _name_column(table: pa.Table, where: str) -> str:
    lower = {name.lower(): name for name in reversed(table.column_names)}
    found = next((lower[one] for one in NAMES if one in lower), None)
    if found is None:
        raise RunsError(
            f"{where}: has no column with the names of runs (one of {', '.join(NAMES[:-1])}); its columns are "
            f"{', '.join(table.column_names[:SHOWN])}"
        )
    return str(found)


def _text(table: pa.Table, name: str, where: str) -> pa.ChunkedArray:
    """A column as names."""
    try:
        found = table[name].cast(pa.string())
    except pa.ArrowException as err:
        raise RunsError(
            f"{where}: column {name!r} holds {table[name].type} that is no text in UTF-8, expected names"
        ) from err
    if found.null_count:
        raise RunsError(f"{where}: {found.null_count} cells of {name!r} are empty, expected names")
    return found


def _numbers(column: pa.ChunkedArray) -> np.ndarray | None:
    """float64, nan where a cell is empty; None: no numbers. A column of texts such as `nan` counts as numbers."""
    if pa.types.is_string(column.type):
        try:
            return np.array([float(one) if one not in (None, "") else np.nan for one in column.to_pylist()])
        except ValueError:
            return None
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return None
    return np.asarray(column.cast(pa.float64()).to_numpy(), dtype=np.float64)
