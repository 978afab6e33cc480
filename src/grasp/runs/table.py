"""Imported runs: the training mixture and the results of each run. Created by `grasp.mixing.import_runs`.

    environment.json     meaning of the weights, direction of each metric, and checksums of the other files
    subsets.parquet      subset_id, row_id, weight: `subset_id` is the run, `row_id` a label value, a row or a document
    utilities.parquet    results, as in `grasp.runs.utility_tables`

Start with `open_runs` and `RunTable.utility_RST`. Here, a run is one training mixture, possibly trained with more
than one seed. Imported runs do not depend on an artifact, its rows or its reference model; `imported_runs.bind_runs`
matches them with one.
Shape letters: R runs, S seeds, G label values or rows that have weights, T metrics.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from grasp.arrays import F64
from grasp.artifact.label_table import LabelColumn
from grasp.errors import RunsError
from grasp.predict.subset_tables import RowIndex
from grasp.predict.weights import MAX_WEIGHT, MIN_WEIGHT, SubsetBlock
from grasp.runs.gaussian_process import varies
from grasp.runs.metrics import mean_defined
from grasp.runs.predictions import WHOLE_TASK
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.training_runs import (
    INFO,
    SIGNED_INFO,
    SUBSETS,
    UTILITIES,
    RunsInfo,
    TrainingRuns,
)
from grasp.runs.utility_tables import RESULTS_SCHEMA, encode_results, read_results, result_array
from grasp.store.contents import parquet_bytes, read_table
from grasp.store.directory import write_at_once
from grasp.store.remote import local_path, open_store, remote_url
from grasp.text import count_text, plain, text_table

ROUNDING = 1e-9  # sums of shares that differ from 1 by no more than this are exact
SUM_TOLERANCE = 0.01 + ROUNDING  # shares whose sum differs from 1 by at most this are normalized
MAX_UTILITY = 1e30  # largest absolute value of a metric, so that sums of squares stay finite
MAX_LISTED = 3
MAX_SHARES_LISTED = 5  # shares of a run that are listed if they do not add up to 1
MIN_MIXTURES = 2  # minimum number of different mixtures
MIXTURE_DECIMALS = 9  # mixtures are different if they differ when rounded to this many decimals
SCALE = ["size", "params", "tokens"]  # columns of results that differ between runs of one mixture
MIN_COMMON_RUNS = 3  # minimum number of common runs to compare model sizes
RECOVERY_HINT = "import the runs again"

WEIGHTS_SCHEMA = pa.schema({"subset_id": pa.string(), "row_id": pa.string(), "weight": pa.float64()})


@dataclass(eq=False, repr=False, kw_only=True)
class RunTable(TrainingRuns):
    """Runs that were imported from tables or evaluation harnesses; also runs that are bound to an artifact.

    Attributes:
        trained: weights of the runs, in long form, with WEIGHTS_SCHEMA.
        results: metrics of the runs, in long form, with RESULTS_SCHEMA.
        blocks: subsets in the rows of an artifact; empty before the runs are bound to one.
    """

    trained: pa.Table
    results: pa.Table
    blocks: tuple[SubsetBlock, ...] = ()

    @classmethod
    def from_results(
        cls,
        name: Path | str,
        info: RunsInfo,
        trained: pa.Table,
        results: pa.Table,
        notes: Sequence[str] = (),
        locations: tuple[str, str] | None = None,
    ) -> Self:
        """Validate runs and create the table.

        Args:
            name: name of the runs, or their directory.
            info: what has weights, and the metrics.
            trained: weights, with WEIGHTS_SCHEMA.
            results: metrics, with RESULTS_SCHEMA.
            notes: what was skipped or changed on import, one sentence each.
            locations: files of the weights and of the results, for messages. Default: `name`.
        Raises:
            RunsError: wrong column types, negative weights, shares that do not add up to 1, duplicate runs, results
                that are not numbers, runs without results, or results of unknown runs.
        """
        path = Path(name)
        try:
            trained, results = trained.cast(WEIGHTS_SCHEMA), results.cast(RESULTS_SCHEMA)
        except (pa.ArrowException, ValueError) as err:
            raise RunsError(f"{path.name}: a column has the wrong type: {' '.join(str(err).split())}") from err
        weights_location, results_location = locations or (path.name, path.name)
        if problem := next(_problems(trained, results, info, weights_location, results_location), None):
            raise RunsError(problem)
        if info.kind == "shares":  # divide shares that add up to 1 approximately by their sum
            sum_of_run = _sum_of_weights(trained)
            sum_of_line = np.array([sum_of_run[run] for run in trained["subset_id"].to_pylist()])
            sum_of_line[np.abs(sum_of_line - 1.0) <= ROUNDING] = 1.0
            trained = trained.set_column(2, "weight", pa.array(trained["weight"].to_numpy() / sum_of_line))
        runs = cls(path, info, tuple(notes), trained=trained, results=results)
        # No model can be fitted to runs with the same mixture.
        is_mixture = info.kind in ("shares", "times") and len(runs) >= MIN_MIXTURES
        if is_mixture and len(np.unique(runs.weights_RG().round(MIXTURE_DECIMALS), axis=0)) < MIN_MIXTURES:
            raise RunsError(
                f"{weights_location}: all {len(runs):,} runs have the same mixture; expected at least {MIN_MIXTURES} "
                "different ones"
            )
        return runs

    def save(self, path: Path | str) -> None:
        """Write the runs to a new directory, atomically.

        Raises:
            SettingsError: the path exists.
        """
        files = {SUBSETS: parquet_bytes(self.trained), UTILITIES: encode_results(self.results)}
        write_at_once(Path(path), SIGNED_INFO, files, lambda entries: self.info.model_copy(update={"files": entries}))

    @property
    def runs(self) -> tuple[str, ...]:
        """Names of the runs in order of first appearance."""
        return tuple(pc.unique(self.trained["subset_id"]).to_pylist())

    @property
    def values(self) -> tuple[str, ...]:
        """Label values or rows that have weights."""
        return tuple(pc.unique(self.trained["row_id"]).to_pylist())

    @property
    def sizes(self) -> tuple[str, ...]:
        """Model sizes; empty if they are unknown."""
        return tuple(pc.unique(self.results["size"].drop_null()).to_pylist())

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(self.info.metrics)

    @property
    def sign_T(self) -> F64:  # noqa: N802 - a shape suffix
        """-1 for a metric of which lower is better, else 1, (T,)."""
        return np.array([1.0 if direction == "higher" else -1.0 for direction in self.info.metrics.values()])

    def weights_RG(self) -> F64:  # noqa: N802 - a shape suffix
        """Return the weights of each run, (R, G), by `runs` and `values`."""
        axes = {"subset_id": self.runs, "row_id": self.values}
        index = [pc.index_in(self.trained[name], pa.array(axis)).to_numpy() for name, axis in axes.items()]
        weight_RG = np.zeros([len(axis) for axis in axes.values()])
        weight_RG[tuple(index)] = self.trained["weight"].to_numpy()
        return weight_RG

    def select_size(self, size: str) -> "RunTable":
        """Return the runs of one model size."""
        if size not in self.sizes:
            raise RunsError(f"{self.name}: has no runs of size {size!r}, expected one of {list(self.sizes)}")
        results = self.results.filter(pc.equal(self.results["size"], size))
        trained = self.trained.filter(pc.is_in(self.trained["subset_id"], pc.unique(results["subset_id"])))
        return replace(self, path=Path(f"{self.name} ({size})"), trained=trained, results=results)

    def by_scale(self) -> "tuple[RunTable, F64 | None]":
        """Return one run for each mixture, size and length, and the logarithm of its parameters and tokens, (R, 2).

        Runs of one size and length are returned as they are, and None.

        Raises:
            RunsError: sizes differ, but not every run has a number of parameters, or tokens if one has them.
        """
        frame = self.results.to_pandas()
        if len(frame[SCALE].drop_duplicates()) == 1:
            return self, None
        has_tokens = frame["tokens"].notna().any()
        if frame["params"].isna().any() or (has_tokens and frame["tokens"].isna().any()):
            raise RunsError(
                f"{self.name}: has runs of sizes {list(self.sizes)}, but not the parameters and tokens of all; add "
                "columns params and tokens, or import one size with --size"
            )
        runs = frame[["subset_id", *SCALE]].drop_duplicates().reset_index(drop=True)
        scales = [count_text(count) for count in runs["params"]]
        if has_tokens:
            scales = [f"{size}, {count_text(count)} tokens" for size, count in zip(scales, runs["tokens"], strict=True)]
        runs["name"] = runs["subset_id"] + " (" + np.array(scales, object) + ")"
        trained = self.trained.to_pandas().merge(runs[["subset_id", "name"]], on="subset_id")
        results = frame.merge(runs, on=["subset_id", *SCALE])
        results["subset_id"], results["size"] = results["name"], None
        trained["subset_id"] = trained["name"]
        of_run = runs.set_index("name")
        table = replace(
            self,
            trained=pa.Table.from_pandas(trained[WEIGHTS_SCHEMA.names], WEIGHTS_SCHEMA, preserve_index=False),
            results=pa.Table.from_pandas(results[RESULTS_SCHEMA.names], RESULTS_SCHEMA, preserve_index=False),
        )
        scale_R2 = of_run.loc[list(table.runs), ["params", "tokens"]].fillna(1.0).to_numpy(dtype=np.float64)
        return table, np.log(scale_R2)

    def select_metrics(self, metrics: Collection[str]) -> "RunTable":
        """Return the runs with some of their metrics."""
        info = self.info.model_copy(update={"metrics": {name: self.info.metrics[name] for name in metrics}})
        results = self.results.filter(pc.is_in(self.results["target"], pa.array(list(metrics), pa.string())))
        return replace(self, info=info, results=results)

    def constant_metrics(self) -> tuple[str, ...]:
        """Return the metrics that are the same in all runs, from which nothing can be learned."""
        return tuple(itertools.compress(self.metrics, ~varies(self.utility_RST())))

    def agreement_of_sizes(self) -> list[tuple[str, str, int, float]]:
        """Return (size, size, common runs, rank correlation) for every pair of model sizes.

        The correlation is Spearman's over the common runs, averaged over the metrics; nan below three common runs.
        """
        frame = self.results.select(["subset_id", "size", "target", "utility"]).to_pandas()
        by_run = frame.pivot_table("utility", "subset_id", ["size", "target"], sort=False)  # mean over seeds
        rho, n_runs = by_run.corr("spearman", min_periods=MIN_COMMON_RUNS), by_run.notna().astype(int)
        agreements = []
        for size, other in itertools.combinations(self.sizes, 2):
            common = [name for name in self.metrics if (size, name) in rho and (other, name) in rho]
            counts = [int((n_runs[size, name] * n_runs[other, name]).sum()) for name in common]
            mean_rho = mean_defined(np.array([rho.loc[(size, name), (other, name)] for name in common]), axis=0)
            agreements.append((size, other, max(counts, default=0), float(mean_rho)))
        return agreements

    def utility_RST(self) -> F64:  # noqa: N802 - a shape suffix
        """Return utilities (R, S, T) by `runs` and `metrics`; higher is better, nan if a run has fewer seeds.

        Raises:
            RunsError: runs have several model sizes, or a run lacks a metric.
        """
        if len(self.sizes) > 1:
            raise RunsError(f"{self.name}: has runs of sizes {list(self.sizes)}; import one of them with --size")
        seeds = pc.unique(self.results["seed"]).to_pylist()
        units = [(metric, WHOLE_TASK) for metric in self.metrics]
        values_RST = result_array(self.results, self.runs, seeds, units, self.name)
        missing = np.argwhere(np.isnan(values_RST).all(axis=1))
        if len(missing):
            run, metric = self.runs[missing[0, 0]], self.metrics[missing[0, 1]]
            raise RunsError(
                f"{self.name}: run {run!r} lacks {metric} ({len(missing)} such); every run must have every metric"
            )
        return values_RST

    # ------------------------------------------------------------------------- runs that are bound to an artifact

    def subset_blocks(
        self, rows: RowIndex, labels: LabelColumn | None = None, *, block: int = 256
    ) -> Iterator[SubsetBlock]:
        yield from self.blocks

    def task_utilities(self, targets: Sequence[str]) -> F64:
        return self.utility_RST()[:, :, [self.metrics.index(self.metric_of_target[name]) for name in targets]]

    def _values_by_subset(self) -> F64:
        values_RST = self.task_utilities(self.targets)  # one unit per target: the whole task
        if len(self.info.seeds) < values_RST.shape[1]:  # some runs lack seeds: use the mean of the available ones
            values_RST = np.nanmean(values_RST, axis=1, keepdims=True)
        return values_RST

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
            utility = self.results.filter(pc.equal(self.results["target"], name))["utility"].to_numpy()
            quantiles = np.quantile(utility if direction == "higher" else -utility, (0, 0.5, 1))
            lines.append((name, f"{direction} is better", *(f"{quantile:.4g}" for quantile in quantiles)))
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
        *((weights_location, trained[name]) for name in ("subset_id", "row_id")),
        *((results_location, results[name]) for name in ("subset_id", "seed", "target", "unit_id")),
    ):
        if column.null_count:
            yield f"{location}: {column.null_count} cells with names or seeds are empty; expected none"
    if unknown := sorted(set(results["target"].to_pylist()) ^ set(info.metrics)):
        yield f"{results_location}: metric {unknown[0]!r} is missing in the results or in {INFO}"
    if info.kind in ("shares", "times") and info.label is None:
        yield f"{weights_location}: label: missing, expected one for {info.kind}"
    weight = pc.coalesce(trained["weight"], float("nan"))  # nan compares false
    in_range = pc.and_(pc.greater_equal(weight, MIN_WEIGHT), pc.less_equal(weight, MAX_WEIGHT))
    invalid = trained.filter(pc.invert(pc.or_(pc.equal(weight, 0.0), in_range))).to_pylist()
    for run, name, wrong_weight in map(dict.values, invalid):
        yield (
            f"{weights_location}: run {run!r}: weight of {name!r} is {wrong_weight} ({len(invalid)} such); expected 0, "
            f"or {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        )
    for run, name, count in _repeated(trained, ["subset_id", "row_id"]):
        yield (
            f"{weights_location}: run {run!r} occurs twice: {name!r} has {count} weights; give every run a unique name"
        )
    sum_of_run = _sum_of_weights(trained)
    wrong = [run for run, weight_sum in sum_of_run.items() if abs(weight_sum - 1.0) > SUM_TOLERANCE]
    for run in wrong if info.kind == "shares" else ():
        shares = trained.filter(pc.equal(trained["subset_id"], run)).sort_by([("weight", "descending")]).to_pylist()
        listed = ", ".join(f"{name} {share:.4g}" for _, name, share in map(dict.values, shares[:MAX_SHARES_LISTED]))
        yield (
            f"{weights_location}: run {run!r}: shares add up to {sum_of_run[run]:.4g} ({len(wrong)} such), expected 1; "
            f"the largest of its {len(shares)} columns are {listed}; select the columns of shares with --weights; "
            "if they are numbers of epochs of each value, import them with --times"
        )
    for run, weight_sum in sum_of_run.items():
        if weight_sum <= 0:
            yield f"{weights_location}: run {run!r}: all weights are 0"
    utility = pc.coalesce(results["utility"], float("nan"))
    is_failed = pc.invert(pc.less_equal(pc.abs(utility), MAX_UTILITY))
    failed = results.set_column(results.num_columns - 1, "utility", utility).filter(is_failed).to_pylist()
    for line in failed:
        value = -line["utility"] if info.metrics[line["target"]] == "lower" else line["utility"]
        yield (
            f"{results_location}: run {line['subset_id']!r}: {line['target']} is {value} ({len(failed)} such); skip "
            "such runs with --skip-failed, or correct the value"
        )
    repeated = _repeated(results, ["subset_id", "target", "seed", *SCALE])
    for run, metric, *_, count in repeated:
        yield (
            f"{results_location}: run {run!r} has {metric} {count} times ({len(repeated)} such); use unique run names, "
            "or add a column seed"
        )
    with_results, with_weights = set(results["subset_id"].to_pylist()), set(sum_of_run)
    for incomplete_runs, problem, location in (
        (with_weights - with_results, "no results", results_location),
        (with_results - with_weights, "results, but no weights", weights_location),
    ):
        if incomplete_runs:
            listed = ", ".join(sorted(incomplete_runs)[:MAX_LISTED])
            yield f"{location}: {len(incomplete_runs)} run(s) have {problem}: {listed}"


def _sum_of_weights(trained: pa.Table) -> dict[str, float]:
    """Return the sum of the weights of each run."""
    total = trained.group_by("subset_id", use_threads=False).aggregate([("weight", "sum")])
    return dict(zip(total["subset_id"].to_pylist(), total["weight_sum"].to_pylist(), strict=True))


def _repeated(table: pa.Table, keys: list[str]) -> list[list[Any]]:
    """Return keys that occur more than once, each with its number of rows."""
    counts = table.group_by(keys).aggregate([([], "count_all")]).select([*keys, "count_all"])
    return [list(line.values()) for line in counts.filter(pc.greater(counts["count_all"], 1)).to_pylist()]


Place = Path | str
Runs = TrainingRuns | RunTable | Place


def open_runs(path: TrainingRuns | Path | str) -> RetrainedRuns | RunTable:
    """Open retrained or imported runs.

    Args:
        path: directory of the runs; opened runs are returned as they are.
    Raises:
        RunsError: not found, or damaged.
    """
    if not isinstance(path, Path | str):
        assert isinstance(path, RetrainedRuns | RunTable)
        return path
    if remote_url(path) is None and not local_path(path).exists():
        raise RunsError(f"{path}: no such file or directory; pass one written by grasp retrain or grasp runs import")
    info, files = open_store(path, SIGNED_INFO, RECOVERY_HINT)
    if not info.metrics:
        return RetrainedRuns.open(path)
    trained = read_table(files.file(SUBSETS), RECOVERY_HINT, RunsError)
    results = read_results(files.file(UTILITIES), RESULTS_SCHEMA.names)
    return RunTable.from_results(path, info, trained, results)


def float_column(column: pa.ChunkedArray) -> np.ndarray | None:
    """Return a column as float64, nan for empty cells; None if it is not numeric. Strings of numbers are parsed."""
    if pa.types.is_string(column.type):
        try:
            return np.array([float(cell) if cell not in (None, "") else np.nan for cell in column.to_pylist()])
        except ValueError:
            return None
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return None
    return np.asarray(column.cast(pa.float64()).to_numpy(), dtype=np.float64)
