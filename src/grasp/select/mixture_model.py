"""Predict, optimise and propose mixtures from training runs alone, without an artifact.

`MixtureModel` fits a Gaussian process to the results of runs that were trained on mixtures of a label's values. Start
with `predict_runs`, `mix_runs` and `propose_runs`; results are in the units of the metrics.

`propose_runs` selects mixtures by the information that a run is expected to yield. Given the joint posterior of the
Gaussian process at the candidates (mean m, covariance S), observing candidate x changes the posterior means by
S_x z / sqrt(S_xx + noise) with a standard normal z. The acquisition functions are

    best:    E max(m + S_x z / sqrt(S_xx + noise)) - max m, by quadrature (the knowledge gradient)
    values:  sum_g (d_g' S_x)^2 / (S_xx + noise), the reduction in the variance of d_g, the effects of the values

and further candidates are selected conditionally on the earlier ones.
Shape letters: R runs, S seeds, B mixtures, G label values, T metrics, x candidates of one step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.sparse import csr_array

from grasp.api.retrain import Opened
from grasp.arrays import F64
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import label_column, row_tokens
from grasp.errors import RunsError, SettingsError
from grasp.predict.families import draw_dirichlet_shares
from grasp.predict.slices import label_slices
from grasp.predict.subset_tables import RowIndex, write_subsets
from grasp.results import Result
from grasp.runs.calibration import COVERAGE
from grasp.runs.gaussian_process import GaussianProcess, SubsetFeatures
from grasp.runs.import_runs import read_mixtures
from grasp.runs.imported_runs import row_weights
from grasp.runs.retrained import RetrainedRuns
from grasp.runs.table import MAX_LISTED, RESULTS_SCHEMA, TRAINED_SCHEMA, RunsInfo, RunTable, open_runs
from grasp.seeds import stream
from grasp.select.budget import amounts_by_value, describe_value, parse_bounds, parse_tokens
from grasp.select.mix import MAX_REPEAT
from grasp.select.quadratic_program import MixtureProblem, frank_wolfe
from grasp.text import listed

Runs = RunTable | Path | str

CANDIDATES = 1_000  # random mixtures
EVALUATED_CANDIDATES = 250  # candidates that are evaluated: the most promising ones and a random sample of the others
MAX_PROPOSALS = EVALUATED_CANDIDATES // 2  # maximum number of proposals
QUADRATURE_NODES = 21  # of the Gauss-Hermite quadrature
SHARE_TOLERANCE = 0.005  # a share beyond the range of the runs by no more than this counts as inside
# a proposal is exploratory if more than this part of the candidates have a higher predicted mean
EXPLORATION_SHARE = 0.5
BISECTION_STEPS = 80  # bisection steps
RANGE_STEPS = 10  # bisection steps on the line from the mean of the runs to a candidate
LINE_SEARCH_POINTS = 20  # grid points of the line search of `informative_run`
NEARLY_ITSELF = 0.8  # a run at this part of the line or beyond is hardly easier to predict than the mixture itself
RUNS_PER_VALUE = 2  # with fewer runs than this times the number of values, a note says that intervals are wide
SHARES_SHOWN = 6  # label values of a mixture in a note
TOO_FAR = "no prediction, too far outside the range of the runs"
STARTS = 8  # best runs from which the optimal mixture is searched


@dataclass(frozen=True, slots=True)
class MixtureModel:
    """Gaussian process fitted to runs with known mixtures.

    Its tasks are the metrics and, last, their weighted mean, the objective. Utilities are metrics with the sign for
    which higher is better.

    Attributes:
        table: the runs.
        share_RG: mixture of each run.
        gaussian_process: fitted to the metrics and the objective.
        weights_T: weight of each metric in the objective; they add up to 1.
        sign_T: -1 for a metric of which lower is better, else 1.
    """

    table: RunTable
    share_RG: F64
    gaussian_process: GaussianProcess
    weights_T: F64
    sign_T: F64

    @classmethod
    def from_runs(cls, runs: Runs, metric: str | Sequence[str] | Mapping[str, float] | None = None) -> Self:
        """Fit the model to runs.

        Args:
            runs: imported runs with the shares of a label's values.
            metric: metrics of the objective, or a mapping of metrics to weights. Default: all, with equal weights.

        Raises:
            RunsError: the runs have no shares, a metric is unknown, or there are too few different runs.
        """
        table = open_runs(runs)
        if not isinstance(table, RunTable) or table.info.kind != "shares":
            raise RunsError(
                f"{table.name}: expected runs with shares of a label's values; import them with grasp runs import "
                "MIXTURES METRICS --label LABEL"
            )
        selected = metric or table.metrics
        weight_of = (
            dict(selected) if isinstance(selected, Mapping) else dict.fromkeys(listed(selected, table.metrics), 1.0)
        )
        unknown = [name for name in weight_of if name not in table.metrics]
        if unknown or not sum(weight_of.values()) > 0 or min(weight_of.values()) < 0:
            raise RunsError(
                f"{table.name}: got the metrics {weight_of}, expected some of {', '.join(table.metrics[:MAX_LISTED])} "
                "... with weights of 0 or more"
            )
        weights_T = np.array([weight_of.get(name, 0.0) for name in table.metrics]) / sum(weight_of.values())
        utility_RST = table.utility_RST()
        objective_RS1 = (utility_RST @ weights_T)[:, :, None]
        share_RG = table.weights_RG()
        features = SubsetFeatures.from_shares(share_RG, len(weights_T) + 1)
        gaussian_process = GaussianProcess.fit(features, np.concatenate([utility_RST, objective_RS1], axis=2))
        sign_T = np.array([1.0 if table.info.metrics[name] == "higher" else -1.0 for name in table.metrics])
        return cls(table, share_RG, gaussian_process, weights_T, sign_T)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the predictions, for display."""
        size = f" of size {self.table.sizes[0]}" if self.table.sizes else ""
        intervals = f"{COVERAGE:.0%} intervals, for the mean of many seeds{size}"
        n_runs, n_values = self.share_RG.shape
        if n_runs >= RUNS_PER_VALUE * n_values:
            return (intervals,)
        few = (
            f"{n_runs} runs for {n_values} values of {self.table.info.label} are too few for useful intervals; import "
            f"{RUNS_PER_VALUE * n_values} or more"
        )
        return intervals, few

    def features(self, share_BG: F64) -> SubsetFeatures:
        """Return the features of mixtures for the Gaussian process."""
        return SubsetFeatures.from_shares(share_BG, len(self.weights_T) + 1)

    def predict_objective(self, share_BG: F64, cautious: float = 0.0) -> F64:
        """Return the predicted objective minus `cautious` standard deviations, (B,); higher is better."""
        mean_BT, std_BT = self.gaussian_process.predict(self.features(share_BG))
        return np.asarray(mean_BT[:, -1] - cautious * std_BT[:, -1])

    def predictions_table(self, names: Sequence[str], share_BG: F64) -> pa.Table:
        """Return the table of mixture, metric, expected, low, high, in the units of the metrics."""
        mean_BT, std_BT = (values[:, :-1] for values in self.gaussian_process.predict(self.features(share_BG)))
        half_width_BT = self.gaussian_process.quantile(COVERAGE) * std_BT
        columns = np.flatnonzero(self.weights_T)
        b, t = (index.reshape(-1) for index in np.meshgrid(np.arange(len(names)), columns, indexing="ij"))
        value = np.where(self.is_too_far(share_BG)[:, :-1], np.nan, self.sign_T * mean_BT)[b, t]
        return pa.table(
            {
                "mixture": pa.array(np.array(names, object)[b], pa.string()),
                "metric": pa.array(np.array(self.table.metrics, object)[t], pa.string()),
                "expected": pa.array(value, from_pandas=True),
                "low": pa.array(value - half_width_BT[b, t], from_pandas=True),
                "high": pa.array(value + half_width_BT[b, t], from_pandas=True),
            }
        )

    def distance_outside(self, share_BG: F64) -> F64:
        """Return by how much each share lies outside the range of the runs, (B, G); 0 or less is inside."""
        return np.asarray(np.maximum(share_BG - self.share_RG.max(axis=0), self.share_RG.min(axis=0) - share_BG))

    def is_too_far(self, share_BG: F64) -> NDArray[np.bool_]:
        """Return whether a mixture is too far outside the range of the runs for a prediction, (B, T + 1)."""
        outside_B1 = (self.distance_outside(share_BG) > SHARE_TOLERANCE).any(axis=1, keepdims=True)
        return outside_B1 & (self.gaussian_process.relative_uncertainty(self.features(share_BG), COVERAGE) > 1.0)

    def has_prediction(self, share_BG: F64) -> NDArray[np.bool_]:
        """Return whether a mixture has a prediction for all metrics with a weight, (B,)."""
        return np.asarray(~self.is_too_far(share_BG)[:, :-1][:, self.weights_T > 0].any(axis=1))

    def move_into_range(self, share_BG: F64, centre_G: F64) -> F64:
        """Move mixtures without a prediction towards a centre until they have one, (B, G).

        Mixtures stay within all bounds that the centre satisfies. Without a prediction for the centre, they are
        returned unchanged.
        """
        outside_B = ~self.has_prediction(share_BG)
        if not outside_B.any() or not self.has_prediction(centre_G[None])[0]:
            return share_BG
        step_bG = share_BG[outside_B] - centre_G
        low_b1, high_b1 = np.zeros((len(step_bG), 1)), np.ones((len(step_bG), 1))
        for _ in range(RANGE_STEPS):
            middle_b1 = (low_b1 + high_b1) / 2
            inside_b1 = self.has_prediction(centre_G + middle_b1 * step_bG)[:, None]
            low_b1, high_b1 = np.where(inside_b1, middle_b1, low_b1), np.where(inside_b1, high_b1, middle_b1)
        moved_BG = share_BG.copy()
        moved_BG[outside_B] = centre_G + low_b1 * step_bG
        return moved_BG

    def informative_run(self, share_G: F64) -> F64 | None:
        """Return the mixture of a further run after which this mixture would have a prediction, (G,).

        Of the points on the line from the mean of the runs to the mixture, it is the nearest to the mean that suffices.
        None if no point suffices that is clearly nearer than the mixture itself.
        """
        mixture = self.features(share_G[None])
        uncertainty_T = self.gaussian_process.relative_uncertainty(mixture, COVERAGE)[0]
        task = int(np.argmax(uncertainty_T * np.append(self.weights_T > 0, True)))  # requested metrics and objective
        mean_G = self.share_RG.mean(axis=0)
        part_B = np.linspace(0.0, 1.0, LINE_SEARCH_POINTS + 1)[1:]
        line_BG = mean_G + part_B[:, None] * (share_G - mean_G)
        after_B = self.gaussian_process.relative_uncertainty_after(mixture, self.features(line_BG), task, COVERAGE)
        is_nearer_B = (after_B <= 1.0) & (part_B < NEARLY_ITSELF)
        return np.asarray(line_BG[int(np.argmax(is_nearer_B))]) if is_nearer_B.any() else None


@dataclass(frozen=True, eq=False, repr=False)
class Proposal(Result):
    """Mixtures to train; printed with one row per value."""

    def _shown(self) -> tuple[list[str], list[list[str]]]:
        mixtures, gains, *shares = (column.to_pylist() for column in self.table.columns)
        lines = [
            [name, *(f"{share:.1%}" for share in column)]
            for name, column in zip(self.table.column_names[2:], shares, strict=True)
        ]
        return ["", *mixtures], [["gain", *(f"{value:.2g}" for value in gains)], *lines]

    def _below(self) -> Sequence[str]:
        return self.notes


def predict_runs(runs: Runs, mixtures: Path | str | pa.Table, metric: str | Sequence[str] | None = None) -> Result:
    """Predict the metrics of mixtures from training runs alone, without an artifact.

    Intervals have a nominal coverage of 90 %. For a mixture that is too far outside the range of the runs, the result
    has no prediction but names a further run that would allow one.

    Args:
        runs: imported runs, see `grasp runs import`.
        mixtures: table with one row per mixture and one column per value of the label; shares add up to 1.
        metric: metrics, separated by commas. Default: all of them.
    Raises:
        RunsError: the runs have no shares or are too few, a metric or a label value is unknown, or shares do not add up
            to 1.
    """
    model = MixtureModel.from_runs(runs, metric)
    names, share_BG = read_mixtures(mixtures, model.table.values)
    too_far_B = ~model.has_prediction(share_BG)
    notes = [
        *_outside_note(model, names, share_BG, ~too_far_B, "outside the range of the runs, so the interval is wider"),
        *_outside_note(model, names, share_BG, too_far_B, TOO_FAR),
    ]
    for b in np.flatnonzero(too_far_B)[:MAX_LISTED].tolist():
        run_G = model.informative_run(share_BG[b])
        if run_G is None:
            notes.append(f"no nearer run would allow a prediction of {names[b]}: train it, or runs on the way to it")
            continue
        shares = ", ".join(f"{model.table.values[g]} {run_G[g]:.0%}" for g in np.argsort(-run_G)[:SHARES_SHOWN])
        more = f" and {len(run_G) - SHARES_SHOWN} more" if len(run_G) > SHARES_SHOWN else ""
        notes.append(f"a run that would allow a prediction of {names[b]}: {shares}{more}")
    headline = f"{len(names):,} mixture{'s' * (len(names) != 1)}, predicted from {len(model.table):,} runs"
    return Result(model.predictions_table(names, share_BG), headline, (*notes, *model.notes), signs=False)


def _outside_note(
    model: MixtureModel, names: Sequence[str], share_BG: F64, selected_B: NDArray[np.bool_], heading: str
) -> list[str]:
    """Return a note on the mixtures whose share of a value is outside the range of the runs, if there are any."""
    low_G, high_G = model.share_RG.min(axis=0), model.share_RG.max(axis=0)
    beyond_BG = model.distance_outside(share_BG)
    outside = []
    for b in np.flatnonzero(selected_B & (beyond_BG > SHARE_TOLERANCE).any(axis=1)).tolist():
        g = int(np.argmax(beyond_BG[b]))
        covered = f"in the runs {low_G[g]:.0%} to {high_G[g]:.0%}"
        outside.append(f"{names[b]} ({model.table.values[g]} {share_BG[b, g]:.0%}, {covered})")
    more = f" and {len(outside) - MAX_LISTED:,} more" if len(outside) > MAX_LISTED else ""
    return [f"{heading}: {'; '.join(outside[:MAX_LISTED])}{more}"] if outside else []


def mix_runs(
    runs: Runs, metric: str | Sequence[str] | Mapping[str, float] | None = None, *, cautious: float = 0.0
) -> Result:
    """Find the mixture that maximises the mean of the metrics, from training runs alone.

    The share of each value stays within the range of the runs.

    Args:
        runs: imported runs, see `grasp runs import`.
        metric: metrics, separated by commas. Default: all of them. In Python also a mapping of metrics to weights.
        cautious: number of standard deviations to subtract from the predicted mean.
    """
    model = MixtureModel.from_runs(runs, metric)
    low_G, high_G = model.share_RG.min(axis=0), model.share_RG.max(axis=0)
    problem = MixtureProblem(np.zeros(len(low_G)), low_G, high_G, model.share_RG.mean(axis=0))
    starts = model.share_RG[np.argsort(-model.predict_objective(model.share_RG, cautious), kind="stable")[:STARTS]]
    best_G = frank_wolfe(problem, lambda share_BG: model.predict_objective(share_BG, cautious), list(starts))
    expected_R = model.gaussian_process.predict(model.features(model.share_RG))[0][:, -1]
    r = int(np.argmax(expected_R))
    run_G = model.share_RG[r]
    shares = pa.table(
        {
            "value": pa.array(model.table.values, pa.string()),
            "mean_of_runs": model.share_RG.mean(axis=0),
            "best_run": run_G,
            "proposed": best_G,
        }
    ).sort_by([("proposed", "descending")])
    measured_T = model.sign_T * np.nanmean(model.table.utility_RST()[r], axis=0)
    measured = {name: f", measured {value:.4g}" for name, value in zip(model.table.metrics, measured_T, strict=True)}
    best_run = f"best run {model.table.runs[r]}"
    messages = [
        f"{line['metric']}: {line['mixture']}, predicted {line['expected']:.4g} ({line['low']:.4g} to "
        f"{line['high']:.4g}){measured[line['metric']] if line['mixture'] == best_run else ''}"
        for line in model.predictions_table(["proposed mixture", best_run], np.stack([best_G, run_G])).to_pylist()
    ]
    headline = f"optimal mixture predicted from {len(model.table):,} runs of {model.table.name}"
    return Result(shares, headline, (*messages, *model.notes), signs=False)


def propose_runs(
    runs: Runs | RetrainedRuns,
    metric: str | Sequence[str] | Mapping[str, float] | None = None,
    *,
    count: int = 4,
    decide: str = "best",
    floor: str | Sequence[str] = (),
    cap: str | Sequence[str] = (),
    max_repeat: float = MAX_REPEAT,
    train_tokens: str | float | None = None,
    subsets: Path | str | None = None,
    seed: int = 0,
    artifact: Opened | None = None,
) -> Result:
    """Propose the mixtures to train next so that few runs suffice for a decision.

    Proposals lie near the range of the runs, so that `predict_runs` predicts their results. If the bounds exclude this
    range, proposals have no prediction, and a note says so.

    Args:
        runs: imported runs, see `grasp runs import`; with an artifact also retrained runs.
        metric: metrics, separated by commas. Default: all of them. In Python also a mapping of metrics to weights.
        count: number of mixtures to propose.
        decide: goal: best (find the optimal mixture) or values (estimate the effect of each value).
        floor: minimum share in every proposal, e.g. web:5%, or 1% for every value.
        cap: maximum share in every proposal, e.g. web:40%, or 30% for every value.
        max_repeat: maximum number of times that a row is repeated (requires an artifact).
        train_tokens: length of the proposed runs in tokens, e.g. 100B, for `max_repeat`. Default: the tokens of the
            corpus.
        subsets: file to write the mixtures to as row weights, for `grasp retrain` --set subsets=FILE.
        seed: seed of the candidate mixtures.
        artifact: artifact of the corpus; required for retrained runs, for `subsets`, and for `max_repeat`.
    Returns:
        One row per mixture, in the order in which to train them: mixture, gain, and the share of each value.
        For `best`, gain is the expected increase of the optimum, in the unit of the metric; for `values` it is the
        share of the total variance of the effects that the run removes. Notes name exploratory proposals, i.e.
        mixtures with a low predicted mean or without a prediction.
    Raises:
        SettingsError: no mixture satisfies the floors and caps, one of them is not a share, or the runs are so long
            that some value must be repeated more often than `max_repeat`.
    """
    if decide not in ("best", "values") or not 1 <= count <= MAX_PROPOSALS:
        raise SettingsError(
            f"propose: got decide {decide!r} and {count} runs, expected best or values, and 1 to {MAX_PROPOSALS} runs; "
            "for more, train these first and import them"
        )
    run_table = open_runs(runs)
    if isinstance(run_table, RetrainedRuns):
        if artifact is None:
            raise SettingsError(f"propose: {run_table.path} holds retrained subsets; pass the artifact of their corpus")
        run_table = runs_by_shares(run_table, artifact.files)
    model = MixtureModel.from_runs(run_table, metric)
    table = model.table
    rng = stream(seed, "propose", len(table))
    even_G = model.share_RG.mean(axis=0)
    label, values = table.info.label, table.values
    largest_G = np.ones(len(values))
    notes = ["repetition is not limited, as the sizes of the values are unknown without an artifact (--art); see --cap"]
    if artifact is not None:
        in_rows = isinstance(open_runs(runs), RetrainedRuns)
        largest_G, notes = repetition_caps(artifact.files, label, values, max_repeat, train_tokens, in_rows=in_rows)
    low_G, high_G = share_bounds(label, values, floor, cap, largest_G)
    share_BG = project_to_bounds(
        np.stack([draw_dirichlet_shares(rng, np.maximum(even_G, 1e-3)) for _ in range(CANDIDATES)]), low_G, high_G
    )
    share_BG = model.move_into_range(share_BG, project_to_bounds(even_G[None], low_G, high_G)[0])
    selected, gains = most_informative(model.gaussian_process, model.features(share_BG), count, decide, rng)
    names = [f"next-{k + 1}" for k in range(len(selected))]
    if subsets is not None:
        if artifact is None:
            raise SettingsError("propose: subsets requires an artifact; pass it with --art")
        files, trained = artifact.files, _weights_table(names, table.values, share_BG[selected])
        blocks, _ = row_weights(replace(table, trained=trained), files)
        corpus = files.manifest.fingerprints.get("corpus", "")
        write_subsets(Path(subsets), blocks, RowIndex.from_parquet(files.rows_path), weights=True, corpus=corpus)
    if decide == "best":
        purpose = "find the optimal mixture"
        gain = "expected increase of the optimum through this run, in the unit of the metric"
    else:
        purpose = f"estimate the effect of each {table.info.label}"
        gain = "share of the total variance of the effects of the values that this run removes"
    if len(selected) < count or not any(gains):
        notes.append("no further run is expected to change the result; train one outside these bounds, or stop here")
    predicted_K = model.has_prediction(share_BG[selected])
    notes += _outside_note(model, names, share_BG[selected], ~predicted_K, f"exploratory, {TOO_FAR}")
    columns = {name: share_BG[selected, g] for g, name in enumerate(table.values)}
    expected_B = model.predict_objective(share_BG)
    better_K = [float((expected_B > expected_B[b]).mean()) for b in selected]
    exploratory = [
        f"{name} ({better:.0%})"
        for name, better, predicted in zip(names, better_K, predicted_K, strict=True)
        if predicted and better > EXPLORATION_SHARE
    ]
    if exploratory:
        more = f" and {len(exploratory) - MAX_LISTED:,} more" if len(exploratory) > MAX_LISTED else ""
        notes.append(
            "exploratory, proposed for information rather than for its result: "
            f"{', '.join(exploratory[:MAX_LISTED])}{more}; in brackets the share of mixtures with a higher predicted "
            "mean"
        )
    return Proposal(
        pa.table({"mixture": names, "gain": gains} | columns),
        f"{len(selected)} mixture{'s' * (len(selected) != 1)} to train next to {purpose}, in this order, given "
        f"{len(table):,} runs",
        (f"gain: {gain}", *notes, *model.notes),
        signs=False,
    )


def repetition_caps(
    artifact: ArtifactReader,
    label: str | None,
    values: Sequence[str],
    max_repeat: float,
    train_tokens: str | float | None,
    *,
    in_rows: bool,
) -> tuple[F64, list[str]]:
    """Return the largest share of each value that repeats no row more than `max_repeat` times, (G,), and a note.

    Args:
        in_rows: shares are shares of rows, not of tokens.

    Raises:
        SettingsError: `max_repeat` is below 1, or the runs are so long that no mixture satisfies it.
    """
    if not 1 <= max_repeat < np.inf:
        raise SettingsError(f"max_repeat: got {max_repeat:g}, expected a number of repetitions of 1 or more")
    assert label is not None
    column = label_column(artifact, label)
    slices = label_slices(column, row_tokens(artifact), most=len(column.values))
    size_of = {entry.name: entry.rows if in_rows else entry.tokens for entry in slices.slices}
    total = sum(entry.tokens for entry in slices.slices)
    epochs = 1.0 if train_tokens is None else parse_tokens(train_tokens) / total
    size_G = np.array([size_of.get(value, 0) for value in values], dtype=np.float64)
    if not size_G.any():
        raise SettingsError(
            f"propose: {artifact.path} has none of the values {', '.join(values[:MAX_LISTED])} ... of {label}"
        )
    largest_G = np.minimum(max_repeat * size_G / sum(size_of.values()) / epochs, 1.0)
    if largest_G.sum() < 1.0:
        raise SettingsError(
            f"max_repeat, train_tokens: {epochs:.3g} epochs of the corpus repeat some value more than {max_repeat:g} "
            "times, whatever the mixture; raise --max-repeat or train on fewer tokens"
        )
    length = "one epoch" if train_tokens is None else f"{epochs:.2g} epochs"
    return largest_G, [f"no value is seen more than {max_repeat:g} times in {length} (--max-repeat)"]


def share_bounds(
    label: str | None, values: Sequence[str], floor: str | Sequence[str], cap: str | Sequence[str], largest_G: F64
) -> tuple[F64, F64]:
    """Return the lower and upper bound of the share of each value, (G,).

    Args:
        largest_G: upper bounds due to repetition.

    Raises:
        SettingsError: a bound is not a share, its value is unknown, or no mixture satisfies all bounds.
    """
    bounds_G = []
    for flag, texts, unbounded in (("floor", floor, 0.0), ("cap", cap, 1.0)):
        bounds = parse_bounds(texts, flag)
        for value, amount in bounds.items():
            if not amount.is_share or amount.unit is not None:
                raise SettingsError(f"{flag} {describe_value(value)}: expected a share of the mixture such as web:5%")
        amounts = amounts_by_value(bounds, flag, label or "mixture", values)
        bounds_G.append(np.array([unbounded if amount is None else amount.value for amount in amounts]))
    low_G, high_G = bounds_G[0], np.minimum(bounds_G[1], largest_G)
    for g in np.flatnonzero(low_G > high_G)[:1].tolist():
        raise SettingsError(
            f"floor, cap: {values[g]} has a floor of {low_G[g]:.1%} and at most {high_G[g]:.1%} (--cap, --max-repeat)"
        )
    if low_G.sum() > 1.0 or high_G.sum() < 1.0:
        raise SettingsError(
            f"floor, cap: no mixture satisfies them: floors add up to {low_G.sum():.1%}, caps to {high_G.sum():.1%}"
        )
    return low_G, high_G


def project_to_bounds(share_BG: F64, low_G: F64, high_G: F64) -> F64:
    """Return clip(m p, low, high) for each mixture p, with the factor m for which it adds up to 1, (B, G).

    The sum is monotone in m, which is found by bisection of log m.
    """
    tiny = np.finfo(np.float64).eps
    share_BG = share_BG + tiny  # a share of 0 must be able to grow, if all others are at their bounds
    high_B1 = np.full((len(share_BG), 1), -2 * np.log(tiny))
    low_B1 = -high_B1
    for _ in range(BISECTION_STEPS):
        middle_B1 = (low_B1 + high_B1) / 2
        is_above_B1 = np.clip(np.exp(middle_B1) * share_BG, low_G, high_G).sum(axis=1, keepdims=True) >= 1.0
        low_B1, high_B1 = np.where(is_above_B1, low_B1, middle_B1), np.where(is_above_B1, middle_B1, high_B1)
    return np.asarray(np.clip(np.exp(high_B1) * share_BG, low_G, high_G))


def most_informative(
    gaussian_process: GaussianProcess, candidates: SubsetFeatures, count: int, decide: str, rng: np.random.Generator
) -> tuple[list[int], list[float]]:
    """Select candidates greedily by an acquisition function, see the docstring of this module.

    Args:
        candidates: features of the candidate mixtures.
        decide: acquisition function, best or values.

    Returns:
        Indices of the selected candidates, in order, and the value of the acquisition function of each; fewer than
        `count` if no other is above zero.
    """
    n_slices, n = candidates.share_BG.shape[1], len(candidates)
    points = candidates
    if decide == "values":
        even_G = gaussian_process.runs.share_BG.mean(axis=0)
        without_GG = np.where(np.eye(n_slices, dtype=bool), 0.0, even_G)
        share_BG = np.concatenate([without_GG / without_GG.sum(axis=1, keepdims=True), even_G[None]])
        points = SubsetFeatures.concatenate(
            [candidates, SubsetFeatures.from_shares(share_BG, candidates.relevance_BT.shape[1])]
        )
    mean_B, covariance_BB, noise = gaussian_process.joint_posterior(points, -1)
    std_B = np.sqrt(np.maximum(np.diag(covariance_BB)[:n], 0.0))
    promising = np.argsort(-(mean_B[:n] + 2 * std_B))[: EVALUATED_CANDIDATES // 2]
    evaluated = np.unique(np.concatenate([promising, rng.permutation(n)[: EVALUATED_CANDIDATES // 2]]))
    selected: list[int] = []
    gains: list[float] = []
    for _ in range(min(count, len(evaluated))):
        # change of the posterior means by one standard deviation of the observation at each candidate
        step_Bx = covariance_BB[:, evaluated] / np.sqrt(np.maximum(np.diag(covariance_BB)[evaluated], 0.0) + noise)
        if decide == "best":  # E max(m + s z) - max m for every column of s
            nodes, weights = np.polynomial.hermite_e.hermegauss(QUADRATURE_NODES)
            best_x = sum(
                weight * (mean_B[:n, None] + node * step_Bx[:n]).max(axis=0)
                for node, weight in zip(nodes, weights / weights.sum(), strict=True)
            )
            gain_x = np.asarray(best_x - mean_B[:n].max())
            # E max - max cancels; differences within rounding error count as 0
            rounding = 4 * QUADRATURE_NODES * np.finfo(float).eps * np.abs(mean_B[:n]).max()
            gain_x = np.where(gain_x > rounding, gain_x, 0.0)
        else:
            effect_Gx = step_Bx[n:-1] - step_Bx[-1]
            # total variance of the effects of leaving a value out; the last point is the mean of the runs
            variance_G = np.diag(covariance_BB)[n:-1] + covariance_BB[-1, -1] - 2 * covariance_BB[n:-1, -1]
            total_variance = float(np.maximum(variance_G, 0.0).sum())
            gain_x = (effect_Gx**2).sum(axis=0) / max(total_variance, np.finfo(float).tiny)
        gain_x[np.isin(evaluated, selected)] = -np.inf
        x = int(np.lexsort((mean_B[evaluated], gain_x))[-1])  # of equal gains, the one with the best prediction
        if selected and gain_x[x] <= 0:
            break
        selected.append(int(evaluated[x]))
        gains.append(float(gain_x[x]))
        # posterior covariance after observing x: a rank-one update
        covariance_BB = covariance_BB - np.outer(step_Bx[:, x], step_Bx[:, x])
    return selected, gains


def runs_by_shares(runs: RetrainedRuns, artifact: ArtifactReader) -> RunTable:
    """Convert retrained subsets to runs with shares of the label that they were drawn by; metrics are target losses."""
    if runs.label is None:
        raise RunsError(f"{runs.path}: its subsets were not drawn by a label, so they have no shares")
    column = label_column(artifact, runs.label)
    slices = label_slices(column, row_tokens(artifact), most=len(column.values))
    blocks = list(runs.subset_blocks(RowIndex.from_parquet(artifact.rows_path), column))
    n_rows = len(slices.codes_N)
    slice_NG = csr_array((np.ones(n_rows), slices.codes_N, np.arange(n_rows + 1)), shape=(n_rows, len(slices.slices)))
    share_RG = np.concatenate(
        [(block.weights_BN @ slice_NG).toarray() / block.weights.sums[:, None] for block in blocks]
    )
    subset_ids = runs.subset_ids
    utility_RST = runs.task_utilities(runs.targets)
    lines = [
        (run, seed, None, None, f"{target}/loss", None, -float(utility_RST[r, s, t]))
        for r, run in enumerate(subset_ids)
        for s, seed in enumerate(runs.info.seeds)
        for t, target in enumerate(runs.targets)
    ]
    columns = zip(*lines, strict=True)
    results = pa.table(
        [pa.array(values, field.type) for values, field in zip(columns, RESULTS_SCHEMA, strict=True)],
        schema=RESULTS_SCHEMA,
    )
    metrics = {f"{target}/loss": "lower" for target in runs.targets}
    info = RunsInfo.model_validate({"kind": "shares", "label": runs.label, "metrics": metrics})
    return RunTable.from_results(runs.name, info, _weights_table(subset_ids, slices.names, share_RG), results)


def _weights_table(runs: Sequence[str], values: Sequence[str], share_RG: F64) -> pa.Table:
    """Return what runs were trained on, one row per run and value."""
    r, g = (index.ravel() for index in np.indices(share_RG.shape))
    columns = [np.array(runs, object)[r], np.array(values, object)[g], share_RG.ravel()]
    return pa.table([pa.array(column) for column in columns], TRAINED_SCHEMA.names).cast(TRAINED_SCHEMA)
