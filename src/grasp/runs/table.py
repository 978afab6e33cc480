"""Imported runs: the training mixture and the results of each run. Created by `grasp.runs.import_runs`.

    runs.json         meaning of the weights, direction of each metric, and checksums of the other files
    trained.parquet   run, name, weight: `name` is a label value, a row id, or an expression
    results.parquet   run, seed, size, tokens, metric, unit_id, value: as measured; unit_id empty: the whole task

Start with `RunTable.open` and `RunTable.utility_RST`. Imported runs do not depend on an artifact, its rows or its
reference model; see `alignment.bind_runs`. Shape letters: R runs, S seeds, G values of a label, T metrics.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from grasp.arrays import F64, I64
from grasp.errors import RunsError
from grasp.files import UNSIGNED, FileEntry
from grasp.predict.weights import MAX_WEIGHT, MIN_WEIGHT
from grasp.runs.metrics import mean_defined, spearman
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.utility_tables import MAX_UTILITY
from grasp.settings import Settings
from grasp.store.contents import parquet_bytes, read_table
from grasp.store.directory import write_at_once
from grasp.store.records import Signed
from grasp.store.remote import open_store
from grasp.text import plain, text_table

INFO = "runs.json"
TRAINED = "trained.parquet"
RESULTS = "results.parquet"
SUM_SLACK = 0.01  # shares whose sum differs from 1 by at most this are normalized
MAX_LISTED = 3
MIN_MIXTURES, MIXTURE_DECIMALS = 2, 9  # minimum number of mixtures that differ when rounded to this many decimals
MIN_COMMON_RUNS = 3  # minimum number of common runs to compare model sizes
MAX_INFO_BYTES = 16 << 20  # bytes

Kind = Literal["shares", "times", "rows", "expressions"]
Direction = Literal["higher", "lower"]

TRAINED_SCHEMA = pa.schema([("run", pa.string()), ("name", pa.string()), ("weight", pa.float64())])
RESULTS_SCHEMA = pa.schema(
    [
        ("run", pa.string()),
        ("seed", pa.int64()),
        ("size", pa.string()),
        ("tokens", pa.float64()),
        ("metric", pa.string()),
        ("unit_id", pa.string()),
        ("value", pa.float64()),
    ]
)


class RunsInfo(Settings):
    """Contents of runs.json."""

    format: Literal["grasp-runs"] = "grasp-runs"
    format_version: Literal[1] = 1
    checksum: str = Field(UNSIGNED, description="Checksum of this file, computed with zeros in its place.")
    files: dict[Literal["trained.parquet", "results.parquet"], FileEntry] = Field(default_factory=dict)
    kind: Kind = Field(description="shares of label values, times each value is seen, rows, or expressions")
    label: str | None = Field(None, description="The label, for shares and times.")
    metrics: dict[str, Direction] = Field(description="higher or lower is better, by metric.")
    read_from: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _has_a_label(self) -> Self:
        if self.kind in ("shares", "times") and self.label is None:
            raise ValueError(f"label: missing, expected one for {self.kind}")
        return self


RECOVERY_HINT = "import the runs again"
SIGNED_INFO = Signed(
    INFO,
    RunsInfo,
    "a record of runs",
    "grasp-runs",
    1,
    RECOVERY_HINT,
    RunsError,
    MAX_INFO_BYTES,
    none="contains no runs; import them with grasp runs import",
)


@dataclass(frozen=True, eq=False, repr=False)
class RunTable:
    """Runs that were imported from tables or evaluation harnesses.

    Attributes:
        trained: weights of the runs, in long form.
        results: metrics of the runs, in long form.
        notes: what was skipped or changed on import, one sentence each.
    """

    name: str
    info: RunsInfo
    trained: pa.Table
    results: pa.Table
    notes: tuple[str, ...] = ()

    @classmethod
    def from_results(
        cls,
        name: str,
        info: RunsInfo,
        trained: pa.Table,
        results: pa.Table,
        notes: Sequence[str] = (),
        places: tuple[str, str] | None = None,
    ) -> Self:
        """Validate runs and create the table.

        Args:
            name: name of the runs.
            info: kind of the weights, and metrics.
            trained: weights, with TRAINED_SCHEMA.
            results: metrics, with RESULTS_SCHEMA.
            notes: what was skipped or changed on import.
            places: files of the weights and of the results, for messages. Default: `name`.
        Raises:
            RunsError: wrong column types, negative weights, shares that do not add up to 1, duplicate runs, results
                that are not numbers, runs without results, or results of unknown runs.
        """
        try:
            trained, results = trained.cast(TRAINED_SCHEMA), results.cast(RESULTS_SCHEMA)
        except (pa.ArrowException, ValueError) as err:
            raise RunsError(f"{name}: a column has the wrong type: {' '.join(str(err).split())}") from err
        weights_place, results_place = places or (name, name)
        for table, columns, place in (
            (trained, ("run", "name"), weights_place),
            (results, ("run", "seed", "metric"), results_place),
        ):
            for column in columns:
                if empty := table[column].null_count:
                    raise RunsError(f"{place}: {empty} cells of {column} are empty; expected none")
        if unknown := sorted(set(results["metric"].to_pylist()) ^ set(info.metrics)):
            raise RunsError(f"{name}: metric {unknown[0]!r} is missing in its results or in {INFO}")

        # weights
        weight = trained["weight"].to_numpy(zero_copy_only=False)
        bad = np.flatnonzero(~((weight == 0) | (weight >= MIN_WEIGHT) & (weight <= MAX_WEIGHT)))
        if bad.size:
            run, value = (trained[column][int(bad[0])].as_py() for column in ("run", "name"))
            raise RunsError(
                f"{weights_place}: run {run!r}: weight of {value!r} is {weight[bad[0]]} ({bad.size} such); expected 0, "
                f"or {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
            )
        for line in _repeated(trained, ["run", "name"]):
            raise RunsError(
                f"{weights_place}: run {line['run']!r} occurs twice: {line['name']!r} has {line['count_all']} weights; "
                "give every run a unique name"
            )
        total = trained.group_by("run", use_threads=False).aggregate([("weight", "sum")])
        sums = dict(zip(total["run"].to_pylist(), total["weight_sum"].to_pylist(), strict=True))
        if empty_runs := [run for run, of_run in sums.items() if of_run <= 0]:
            raise RunsError(f"{weights_place}: run {empty_runs[0]!r}: all weights are 0")

        # results
        value = pc.coalesce(results["value"], float("nan"))
        wrong = results.filter(pc.invert(pc.less_equal(pc.abs(value), MAX_UTILITY))).to_pylist()  # nan compares false
        for line in wrong[:1]:
            raise RunsError(
                f"{results_place}: run {line['run']!r}: {line['metric']} is {line['value']} ({len(wrong)} such); skip "
                "such runs with --skip-failed, or correct the value"
            )
        repeated = _repeated(results, ["run", "seed", "size", "metric", "unit_id"])
        for line in repeated[:1]:
            raise RunsError(
                f"{results_place}: run {line['run']!r} has {line['metric']} {line['count_all']} times ({len(repeated)} "
                "such); use unique run names, or add a column seed"
            )
        with_results, with_weights = set(results["run"].to_pylist()), set(sums)
        for runs_without, problem, place in (
            (with_weights - with_results, "no results", results_place),
            (with_results - with_weights, "results, but no weights", weights_place),
        ):
            if runs_without:
                shown = ", ".join(sorted(runs_without)[:MAX_LISTED])
                raise RunsError(f"{place}: {len(runs_without)} run(s) have {problem}: {shown}")

        # shares must add up to 1, and mixtures must differ, otherwise no model can be fitted to them
        if info.kind == "shares":
            if off := [run for run, of_run in sums.items() if abs(of_run - 1.0) > SUM_SLACK]:
                raise RunsError(
                    f"{weights_place}: run {off[0]!r}: shares add up to {sums[off[0]]:.4g} ({len(off)} such), expected "
                    "1; divide percent by 100; if they are numbers of epochs of each value, import them with --times"
                )
            total_of_line = np.array([sums[run] for run in trained["run"].to_pylist()])
            trained = trained.set_column(2, "weight", pa.array(trained["weight"].to_numpy() / total_of_line))
        runs = cls(name, info, trained, results, tuple(notes))
        is_mixture = info.kind in ("shares", "times") and len(runs) >= MIN_MIXTURES
        if is_mixture and len(np.unique(runs.weights_RG().round(MIXTURE_DECIMALS), axis=0)) < MIN_MIXTURES:
            raise RunsError(
                f"{weights_place}: all {len(runs):,} runs have the same mixture; expected at least {MIN_MIXTURES} "
                "different ones"
            )
        return runs

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open a directory that `save` wrote.

        Raises:
            RunsError: not found, or damaged.
        """
        info, files = open_store(path, SIGNED_INFO)
        trained, results = (read_table(files.file(name), RECOVERY_HINT, RunsError) for name in (TRAINED, RESULTS))
        return cls.from_results(Path(path).name, info, trained, results)

    def save(self, path: Path | str) -> Path:
        """Write the runs to a new directory, atomically.

        Raises:
            SettingsError: the path exists.
        """
        path = Path(path)
        files = {TRAINED: parquet_bytes(self.trained), RESULTS: parquet_bytes(self.results)}
        write_at_once(path, SIGNED_INFO, files, lambda entries: self.info.model_copy(update={"files": entries}))
        return path

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the runs in order of first appearance."""
        return tuple(pc.unique(self.trained["run"]).to_pylist())

    @property
    def values(self) -> tuple[str, ...]:
        """Label values, rows or expressions that have weights."""
        return tuple(pc.unique(self.trained["name"]).to_pylist())

    @property
    def sizes(self) -> tuple[str, ...]:
        """Model sizes; empty if they are unknown."""
        return tuple(size for size in pc.unique(self.results["size"]).to_pylist() if size is not None)

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(self.info.metrics)

    def weights_RG(self) -> F64:  # noqa: N802 - a shape suffix
        """Return the weights of each run, (R, G), by `runs` and `values`."""
        weight_RG = np.zeros((len(self.runs), len(self.values)))
        r, g = (_codes(self.trained[column], names) for column, names in (("run", self.runs), ("name", self.values)))
        weight_RG[r, g] = self.trained["weight"].to_numpy()
        return weight_RG

    def select_size(self, size: str) -> "RunTable":
        """Return the runs of one model size."""
        if size not in self.sizes:
            raise RunsError(f"{self.name}: has no runs of size {size!r}, expected one of {list(self.sizes)}")
        results = self.results.filter(pc.equal(self.results["size"], size))
        trained = self.trained.filter(pc.is_in(self.trained["run"], pc.unique(results["run"])))
        return RunTable(f"{self.name} ({size})", self.info, trained, results, self.notes)

    def agreement_of_sizes(self) -> list[tuple[str, str, int, float]]:
        """Return (size, size, common runs, rank correlation) for every pair of model sizes.

        The correlation is Spearman's, averaged over the common metrics; nan below three common runs.
        """
        values: dict[tuple[str, str], dict[str, float]] = {}
        for line in self.results.group_by(["size", "metric", "run"]).aggregate([("value", "mean")]).to_pylist():
            values.setdefault((line["size"], line["metric"]), {})[line["run"]] = line["value_mean"]
        agreements = []
        for size, other in itertools.combinations(self.sizes, 2):
            values_by_metric = [(values.get((size, name), {}), values.get((other, name), {})) for name in self.metrics]
            common = [np.array([(a[run], b[run]) for run in a if run in b]).reshape(-1, 2) for a, b in values_by_metric]
            rhos = [spearman(both[:, :1], both[:, 1:])[0] for both in common if len(both) >= MIN_COMMON_RUNS]
            rho = mean_defined(np.array(rhos), axis=0)
            agreements.append((size, other, max(map(len, common)), float(rho)))
        return agreements

    def utility_RST(self) -> F64:  # noqa: N802 - a shape suffix
        """Return utilities (R, S, T) by `runs` and `metrics`; higher is better, nan if a run has fewer seeds.

        Metrics of units are averaged.

        Raises:
            RunsError: runs have several model sizes, or a run lacks a metric.
        """
        if len(self.sizes) > 1:
            raise RunsError(f"{self.name}: has runs of sizes {list(self.sizes)}; import one of them with --size")
        mean = self.results.group_by(["run", "seed", "metric"], use_threads=False).aggregate([("value", "mean")])
        r, t = (_codes(mean[column], names) for column, names in (("run", self.runs), ("metric", self.metrics)))
        seeds = pc.unique(mean["seed"])
        s = _codes(mean["seed"], seeds.to_pylist())
        values_RST = np.full((len(self.runs), len(seeds), len(self.metrics)), np.nan)
        values_RST[r, s, t] = mean["value_mean"].to_numpy()
        missing = np.argwhere(np.isnan(values_RST).all(axis=1))
        if len(missing):
            run, metric = self.runs[missing[0, 0]], self.metrics[missing[0, 1]]
            raise RunsError(
                f"{self.name}: run {run!r} lacks {metric} ({len(missing)} such); every run must have every metric"
            )
        sign_T = np.array([1.0 if self.info.metrics[name] == "higher" else -1.0 for name in self.metrics])
        return np.asarray(values_RST * sign_T)

    def __len__(self) -> int:
        return len(self.runs)

    def __repr__(self) -> str:
        what = f"by {self.info.label}" if self.info.label else f"by {self.info.kind}"
        seeds = len(pc.unique(self.results["seed"]))
        head = f"{len(self):,} runs {what}, {len(self.values):,} values, {seeds} seed{'s' * (seeds != 1)}"
        head += f"; sizes {', '.join(self.sizes)}" if self.sizes else ""
        lines = []
        for name, direction in self.info.metrics.items():
            value = self.results.filter(pc.equal(self.results["metric"], name))["value"].to_numpy()
            lines.append(
                (name, f"{direction} is better", *(f"{quantile:.4g}" for quantile in np.quantile(value, (0, 0.5, 1))))
            )
        text = [plain(head), text_table("", ("metric", "direction", "minimum", "median", "maximum"), lines)]
        if len(self.sizes) > 1:
            pairs = [(size, other, f"{n:,}", f"{rho:.3f}") for size, other, n, rho in self.agreement_of_sizes()]
            text.append(
                text_table(
                    "agreement of model sizes on the ranking of runs",
                    ("size", "other", "runs", "rank correlation"),
                    pairs,
                )
            )
        return "\n".join([*text, *map(plain, self.notes)])


def _repeated(table: pa.Table, keys: list[str]) -> list[dict[str, Any]]:
    """Return keys that occur more than once, each with its `count_all`."""
    counts = table.group_by(keys).aggregate([([], "count_all")])
    lines: list[dict[str, Any]] = counts.filter(pc.greater(counts["count_all"], 1)).to_pylist()
    return lines


def _codes(column: pa.ChunkedArray, names: Sequence[object]) -> I64:
    """Return the position in `names` of each value of a column."""
    return np.asarray(pc.index_in(column, pa.array(names, column.type)).to_numpy(), dtype=np.int64)


def open_runs(path: RetrainedRuns | RunTable | Path | str) -> RetrainedRuns | RunTable:
    """Open retrained or imported runs.

    Args:
        path: directory of the runs; opened runs are returned as they are.
    Raises:
        RunsError: not found, or damaged.
    """
    if not isinstance(path, Path | str):
        return path
    return RunTable.open(path) if (Path(path) / INFO).exists() else RetrainedRuns.open(path)
