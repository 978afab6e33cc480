"""Imported runs: the training mixture and the results of each run. Created by `grasp.runs.import_runs`.

    runs.json         meaning of the weights, direction of each metric, and checksums of the other files
    trained.parquet   run, name, weight: `name` is a label value or the id of a row or document
    results.parquet   run, seed, size, metric, value: as measured

Start with `RunTable.open` and `RunTable.utility_RST`. Here, a run is one training mixture, possibly trained with more
than one seed. Imported runs do not depend on an artifact, its rows or its reference model; `imported_runs.bind_runs`
matches them with one.
Shape letters: R runs, S seeds, G label values or rows that have weights, T metrics.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from grasp.arrays import F64, I64
from grasp.errors import RunsError
from grasp.files import UNSIGNED, FileEntry
from grasp.predict.weights import MAX_WEIGHT, MIN_WEIGHT
from grasp.runs.gaussian_process import varies
from grasp.runs.metrics import mean_defined, spearman
from grasp.runs.retrained import RetrainedRuns
from grasp.settings import Settings
from grasp.store.contents import parquet_bytes, read_table
from grasp.store.directory import write_at_once
from grasp.store.records import Signed
from grasp.store.remote import open_store
from grasp.text import plain, text_table

INFO = "runs.json"
TRAINED = "trained.parquet"
RESULTS = "results.parquet"
ROUNDING = 1e-9  # sums of shares that differ from 1 by no more than this are exact
SUM_TOLERANCE = 0.01  # shares whose sum differs from 1 by at most this are normalized
MAX_UTILITY = 1e30  # largest absolute value of a metric, so that sums of squares stay finite
MAX_LISTED = 3
MIN_MIXTURES = 2  # minimum number of different mixtures
MIXTURE_DECIMALS = 9  # mixtures are different if they differ when rounded to this many decimals
MIN_COMMON_RUNS = 3  # minimum number of common runs to compare model sizes

Kind = Literal["shares", "times", "rows"]
Measure = Literal["tokens", "rows", "documents"]
Direction = Literal["higher", "lower"]

TRAINED_SCHEMA = pa.schema({"run": pa.string(), "name": pa.string(), "weight": pa.float64()})
RESULTS_SCHEMA = pa.schema(
    {"run": pa.string(), "seed": pa.int64(), "size": pa.string(), "metric": pa.string(), "value": pa.float64()}
)


class RunsInfo(Settings):
    """Contents of runs.json."""

    format: Literal["grasp-runs"] = "grasp-runs"
    format_version: Literal[1] = 1
    checksum: str = Field(UNSIGNED, description="Checksum of this file, computed with zeros in its place.")
    files: dict[Literal["trained.parquet", "results.parquet"], FileEntry] = Field(default_factory=dict)
    kind: Kind = Field(description="What has weights: shares of label values, times each value is seen, or rows.")
    label: str | None = Field(None, description="The label, for shares and times.")
    measure: Measure = Field("tokens", description="What shares are shares of: the training tokens, rows or documents.")
    metrics: dict[str, Direction] = Field(description="higher or lower is better, by metric.")


RECOVERY_HINT = "import the runs again"
SIGNED_INFO = Signed(
    INFO,
    RunsInfo,
    "a record of runs",
    "grasp-runs",
    1,
    RECOVERY_HINT,
    RunsError,
    missing_message="contains no runs; import them with grasp runs import",
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
        locations: tuple[str, str] | None = None,
    ) -> Self:
        """Validate runs and create the table.

        Args:
            name: name of the runs.
            info: what has weights, and the metrics.
            trained: weights, with TRAINED_SCHEMA.
            results: metrics, with RESULTS_SCHEMA.
            notes: what was skipped or changed on import.
            locations: files of the weights and of the results, for messages. Default: `name`.
        Raises:
            RunsError: wrong column types, negative weights, shares that do not add up to 1, duplicate runs, results
                that are not numbers, runs without results, or results of unknown runs.
        """
        try:
            trained, results = trained.cast(TRAINED_SCHEMA), results.cast(RESULTS_SCHEMA)
        except (pa.ArrowException, ValueError) as err:
            raise RunsError(f"{name}: a column has the wrong type: {' '.join(str(err).split())}") from err
        weights_location, results_location = locations or (name, name)
        if problem := next(_problems(trained, results, info, weights_location, results_location), None):
            raise RunsError(problem)
        if info.kind == "shares":  # divide shares that add up to 1 approximately by their sum
            sum_of_run = _sum_of_weights(trained)
            sum_of_line = np.array([sum_of_run[run] for run in trained["run"].to_pylist()])
            sum_of_line[np.abs(sum_of_line - 1.0) <= ROUNDING] = 1.0
            trained = trained.set_column(2, "weight", pa.array(trained["weight"].to_numpy() / sum_of_line))
        runs = cls(name, info, trained, results, tuple(notes))
        # No model can be fitted to runs with the same mixture.
        is_mixture = info.kind in ("shares", "times") and len(runs) >= MIN_MIXTURES
        if is_mixture and len(np.unique(runs.weights_RG().round(MIXTURE_DECIMALS), axis=0)) < MIN_MIXTURES:
            raise RunsError(
                f"{weights_location}: all {len(runs):,} runs have the same mixture; expected at least {MIN_MIXTURES} "
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
        """Label values or rows that have weights."""
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
        r, g = (
            _positions(self.trained[column], names) for column, names in (("run", self.runs), ("name", self.values))
        )
        weight_RG[r, g] = self.trained["weight"].to_numpy()
        return weight_RG

    def select_size(self, size: str) -> "RunTable":
        """Return the runs of one model size."""
        if size not in self.sizes:
            raise RunsError(f"{self.name}: has no runs of size {size!r}, expected one of {list(self.sizes)}")
        results = self.results.filter(pc.equal(self.results["size"], size))
        trained = self.trained.filter(pc.is_in(self.trained["run"], pc.unique(results["run"])))
        return RunTable(f"{self.name} ({size})", self.info, trained, results, self.notes)

    def select_metrics(self, metrics: Collection[str]) -> "RunTable":
        """Return the runs with some of their metrics."""
        info = self.info.model_copy(update={"metrics": {name: self.info.metrics[name] for name in metrics}})
        results = self.results.filter(pc.is_in(self.results["metric"], pa.array(list(metrics), pa.string())))
        return RunTable(self.name, info, self.trained, results, self.notes)

    def constant_metrics(self) -> tuple[str, ...]:
        """Return the metrics that are the same in all runs, from which nothing can be learned."""
        return tuple(itertools.compress(self.metrics, ~varies(self.utility_RST())))

    def agreement_of_sizes(self) -> list[tuple[str, str, int, float]]:
        """Return (size, size, common runs, rank correlation) for every pair of model sizes.

        The correlation is Spearman's over the common runs, averaged over the metrics; nan below three common runs.
        """
        values: dict[tuple[str, str], dict[str, float]] = {}  # by size and metric: value of each run
        for line in self.results.group_by(["size", "metric", "run"]).aggregate([("value", "mean")]).to_pylist():
            values.setdefault((line["size"], line["metric"]), {})[line["run"]] = line["value_mean"]
        agreements = []
        for size, other in itertools.combinations(self.sizes, 2):
            values_by_metric = [(values.get((size, name), {}), values.get((other, name), {})) for name in self.metrics]
            # (common runs, 2) for each metric: the values at both sizes
            pairs = [np.array([(a[run], b[run]) for run in a if run in b]).reshape(-1, 2) for a, b in values_by_metric]
            rhos = [
                spearman(values_R2[:, 0], values_R2[:, 1]) for values_R2 in pairs if len(values_R2) >= MIN_COMMON_RUNS
            ]
            rho = mean_defined(np.array(rhos), axis=0)
            agreements.append((size, other, max(map(len, pairs)), float(rho)))
        return agreements

    def utility_RST(self) -> F64:  # noqa: N802 - a shape suffix
        """Return utilities (R, S, T) by `runs` and `metrics`; higher is better, nan if a run has fewer seeds.

        Raises:
            RunsError: runs have several model sizes, or a run lacks a metric.
        """
        if len(self.sizes) > 1:
            raise RunsError(f"{self.name}: has runs of sizes {list(self.sizes)}; import one of them with --size")
        seeds = pc.unique(self.results["seed"]).to_pylist()
        axes = {"run": self.runs, "seed": seeds, "metric": self.metrics}
        values_RST = np.full(tuple(map(len, axes.values())), np.nan)
        index = tuple(_positions(self.results[column], names) for column, names in axes.items())
        values_RST[index] = self.results["value"].to_numpy()
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
        n_seeds = len(pc.unique(self.results["seed"]))
        head = (
            f"{len(self):,} runs by {self.info.label or self.info.kind}, {len(self.values):,} values, {n_seeds} "
            f"seed{'s' * (n_seeds != 1)}"
        )
        head += f"; shares of {self.info.measure}" if self.info.kind == "shares" else ""
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


def constant_note(metrics: Sequence[str]) -> list[str]:
    """Return a note on metrics that are left out, since they are the same in all runs, if there are any."""
    listed = ", ".join(metrics[:MAX_LISTED])
    note = f"left out {len(metrics)} metric{'s' * (len(metrics) > 1)}, the same in all runs: {listed}"
    return [note] if metrics else []


def _problems(
    trained: pa.Table, results: pa.Table, info: RunsInfo, weights_location: str, results_location: str
) -> Iterator[str]:
    """Yield a message for each thing that is wrong with the weights or the results of runs."""
    for location, column in (
        *((weights_location, trained[name]) for name in ("run", "name")),
        *((results_location, results[name]) for name in ("run", "seed", "metric")),
    ):
        if column.null_count:
            yield f"{location}: {column.null_count} cells with names or seeds are empty; expected none"
    if unknown := sorted(set(results["metric"].to_pylist()) ^ set(info.metrics)):
        yield f"{results_location}: metric {unknown[0]!r} is missing in the results or in {INFO}"
    if info.kind in ("shares", "times") and info.label is None:
        yield f"{weights_location}: label: missing, expected one for {info.kind}"
    weight = pc.coalesce(trained["weight"], float("nan"))  # nan compares false
    in_range = pc.and_(pc.greater_equal(weight, MIN_WEIGHT), pc.less_equal(weight, MAX_WEIGHT))
    invalid = trained.filter(pc.invert(pc.or_(pc.equal(weight, 0.0), in_range))).to_pylist()
    for line in invalid:
        yield (
            f"{weights_location}: run {line['run']!r}: weight of {line['name']!r} is {line['weight']} ({len(invalid)} "
            f"such); expected 0, or {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        )
    for line in _repeated(trained, ["run", "name"]):
        yield (
            f"{weights_location}: run {line['run']!r} occurs twice: {line['name']!r} has {line['count_all']} weights; "
            "give every run a unique name"
        )
    sum_of_run = _sum_of_weights(trained)
    wrong = [run for run, weight_sum in sum_of_run.items() if abs(weight_sum - 1.0) > SUM_TOLERANCE]
    for run in wrong if info.kind == "shares" else ():
        yield (
            f"{weights_location}: run {run!r}: shares add up to {sum_of_run[run]:.4g} ({len(wrong)} such), expected 1; "
            "divide percent by 100; if they are numbers of epochs of each value, import them with --times"
        )
    for run, weight_sum in sum_of_run.items():
        if weight_sum <= 0:
            yield f"{weights_location}: run {run!r}: all weights are 0"
    value = pc.coalesce(results["value"], float("nan"))
    failed = results.filter(pc.invert(pc.less_equal(pc.abs(value), MAX_UTILITY))).to_pylist()
    for line in failed:
        yield (
            f"{results_location}: run {line['run']!r}: {line['metric']} is {line['value']} ({len(failed)} such); skip "
            "such runs with --skip-failed, or correct the value"
        )
    repeated = _repeated(results, ["run", "seed", "size", "metric"])
    for line in repeated:
        yield (
            f"{results_location}: run {line['run']!r} has {line['metric']} {line['count_all']} times ({len(repeated)} "
            "such); use unique run names, or add a column seed"
        )
    with_results, with_weights = set(results["run"].to_pylist()), set(sum_of_run)
    for incomplete_runs, problem, location in (
        (with_weights - with_results, "no results", results_location),
        (with_results - with_weights, "results, but no weights", weights_location),
    ):
        if incomplete_runs:
            listed = ", ".join(sorted(incomplete_runs)[:MAX_LISTED])
            yield f"{location}: {len(incomplete_runs)} run(s) have {problem}: {listed}"


def _sum_of_weights(trained: pa.Table) -> dict[str, float]:
    """Return the sum of the weights of each run."""
    total = trained.group_by("run", use_threads=False).aggregate([("weight", "sum")])
    return dict(zip(total["run"].to_pylist(), total["weight_sum"].to_pylist(), strict=True))


def _repeated(table: pa.Table, keys: list[str]) -> list[dict[str, Any]]:
    """Return keys that occur more than once, each with its `count_all`."""
    counts = table.group_by(keys).aggregate([([], "count_all")])
    lines: list[dict[str, Any]] = counts.filter(pc.greater(counts["count_all"], 1)).to_pylist()
    return lines


def _positions(column: pa.ChunkedArray, names: Sequence[object]) -> I64:
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
