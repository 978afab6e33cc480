"""Predict and optimise mixtures from training runs alone, without an artifact.

`MixtureModel` fits a law of mixtures and a Gaussian process to runs on mixtures of a label's values. Start
with `predict_runs` and `mix_runs`; results are in the units of the metrics. `grasp.mixing.proposals` proposes the
mixtures to train next.

Runs of several sizes or lengths are one model: a run is then a mixture at a size and length, and predictions are for
one of these, within or beyond those of the runs.

Shape letters: R runs, S seeds, B mixtures, b some of them, G label values, T metrics, J metrics and the objective, X
size and length.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from grasp.arrays import F64
from grasp.errors import RunsError
from grasp.mixing.import_runs import read_mixtures
from grasp.mixing.mixture_law import MixtureLaw, fit_process
from grasp.results import Result, first_notes
from grasp.runs.calibration import COVERAGE, outside_range
from grasp.runs.gaussian_process import GaussianProcess
from grasp.runs.metric_names import metric_kinds
from grasp.runs.metrics import spearman
from grasp.runs.subset_features import SubsetFeatures
from grasp.runs.table import MAX_LISTED, RunTable, constant_note, open_runs
from grasp.select.budget import first_few, parse_tokens
from grasp.select.guards import CONFIDENCE, Guards, parse_guards
from grasp.select.linear_program import MixtureProblem
from grasp.text import count_text, did_you_mean, parse_names

Runs = RunTable | Path | str

RANGE_STEPS = 10  # bisection steps of `move_into_range`, on the line from the centre to a mixture
LINE_SEARCH_POINTS = 20  # grid points of the line search of `informative_run`
MAX_LINE_FRACTION = 0.8  # a run farther along the line is hardly easier to predict than the mixture at its end
RUNS_PER_VALUE = 2  # with fewer runs than this times the number of values, a note says that intervals are wide
SHARES_SHOWN = 6  # label values of a mixture in a note
TOO_FAR = "no prediction, too far outside the range of the runs"
STARTS = 8  # best runs from which the optimal mixture is searched
MAX_REACH = 1.0  # how far beyond the largest runs a size or length may be, in ranges of the logarithms of the runs
SCALES = ("params", "tokens")


@dataclass(frozen=True, slots=True)
class MixtureModel:
    """Gaussian process fitted to runs with known mixtures.

    Its tasks are the metrics and, last, their weighted mean, the objective. Utilities are metrics with the sign for
    which higher is better.

    Attributes:
        table: the runs.
        share_RG: mixture of each run.
        law: prior mean of the Gaussian process, if it predicts held-out runs better than the process alone.
        scale_RX: logarithm of the parameters and tokens of each run; None: the runs differ in neither.
        at_X: logarithm of the parameters and tokens that are predicted; None with `scale_RX`.
        gaussian_process: fitted to the metrics and the objective.
        weights_T: weight of each metric in the objective; they add up to 1.
        sign_T: -1 for a metric of which lower is better, else 1.
        constant: metrics that are the same in all runs, which are left out.
        kinds: different kinds of the metrics of the objective. If there are several, each metric is divided by its
            standard deviation over the runs.
    """

    table: RunTable
    share_RG: F64
    law: MixtureLaw | None
    scale_RX: F64 | None
    at_X: F64 | None
    gaussian_process: GaussianProcess
    weights_T: F64
    sign_T: F64
    constant: tuple[str, ...]
    kinds: tuple[str, ...]

    @classmethod
    def from_runs(
        cls,
        runs: Runs,
        metric: str | Sequence[str] | Mapping[str, float] | None = None,
        params: str | float | None = None,
        tokens: str | float | None = None,
    ) -> Self:
        """Fit the model to runs.

        Args:
            runs: imported runs with the shares of a label's values.
            metric: metrics of the objective, or a mapping of metrics to weights. Default: all, with equal weights.
            params: number of parameters to predict for, e.g. 7B. Default: the largest of the runs.
            tokens: length of the training to predict for, e.g. 1T. Default: the largest of the runs.

        Raises:
            RunsError: the runs have no shares, a metric is unknown, all metrics are the same in all runs, there are too
                few different runs, or they support no prediction at this size and length.
        """
        table = open_runs(runs)
        if not isinstance(table, RunTable) or table.info.kind != "shares":
            raise RunsError(
                f"{table.name}: expected runs with shares of a label's values; import them with grasp runs import "
                "MIXTURES METRICS --label LABEL"
            )
        selected = metric or table.metrics
        if not isinstance(selected, Mapping):
            selected = dict.fromkeys(parse_names(selected, table.metrics), 1.0)
        weight_of = dict(selected)
        unknown = [name for name in weight_of if name not in table.metrics]
        if unknown or not sum(weight_of.values()) > 0 or min(weight_of.values()) < 0:
            hint = "".join(did_you_mean(name, table.metrics) for name in unknown)
            raise RunsError(
                f"{table.name}: got the metrics {weight_of}{hint}, expected some of "
                f"{', '.join(table.metrics[:MAX_LISTED])} ... with weights of 0 or more"
            )
        table, log_scale_RX = table.by_scale()
        at_X = _target_scale(table.name, log_scale_RX, (params, tokens))
        constant = table.constant_metrics()
        table = table.select_metrics([name for name in table.metrics if name not in constant])
        weights_T = np.array([weight_of.get(name, 0.0) for name in table.metrics])
        if not weights_T.any():
            raise RunsError(f"{table.name}: {', '.join(weight_of)}: the same in all runs; pass a metric that differs")
        weights_T /= weights_T.sum()
        utility_RST = table.utility_RST()
        kinds = tuple(dict.fromkeys(compress(metric_kinds(table.metrics, utility_RST), weights_T)))
        scale_T = np.nanmean(utility_RST, axis=1).std(axis=0) if len(kinds) > 1 else 1.0
        objective_RS1 = ((utility_RST / scale_T) @ weights_T)[:, :, None]
        share_RG = table.weights_RG()
        law, process = fit_process(share_RG, np.concatenate([utility_RST, objective_RS1], axis=2), log_scale_RX)
        return cls(table, share_RG, law, log_scale_RX, at_X, process, weights_T, table.sign_T, constant, kinds)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the predictions, for display; the first says what the intervals are."""
        size = f" of size {self.table.sizes[0]}" if self.table.sizes else f" of {self.scale}" if self.scale else ""
        notes = [f"{COVERAGE:.0%} intervals, for the mean of many seeds{size}"]
        if self.scale_RX is not None:
            share_BG, small = np.unique(self.share_RG, axis=0), replace(self, at_X=self.scale_RX.min(axis=0))
            rho = float(spearman(*(model.predict_objective(share_BG)[:, None] for model in (small, self)))[0])
            notes.append(f"predicted rank correlation between mixtures of {small.scale} and of {self.scale}: {rho:.2f}")
        notes += constant_note(self.constant)
        n_runs, n_values = self.share_RG.shape
        if n_runs < RUNS_PER_VALUE * n_values:
            notes.append(
                f"{n_runs} runs for {n_values} values of {self.table.info.label} are too few for useful intervals; "
                f"import {RUNS_PER_VALUE * n_values} or more"
            )
        return tuple(notes)

    @property
    def objective_unit(self) -> str:
        """Text that describes the unit of the objective."""
        if len(self.kinds) == 1:
            return "the unit of the metric"
        return f"standard deviations over the runs, since {', '.join(self.kinds)} are averaged"

    @property
    def scale(self) -> str:
        """Size and length that are predicted, such as `7B parameters, 1T tokens`; empty if all runs have one."""
        counts: Sequence[float] = [] if self.at_X is None else np.exp(self.at_X).tolist()
        units = zip(counts, ("parameters", "tokens"), strict=False)
        return ", ".join(f"{count_text(count)} {unit}" for count, unit in units if count > 1)

    def features(self, share_BG: F64) -> SubsetFeatures:
        """Return the features of mixtures for the Gaussian process."""
        features = SubsetFeatures.from_shares(share_BG, len(self.weights_T) + 1)
        if self.law is None:
            return features
        relevance_BT = self.law.predict(share_BG, self.at_X)
        if self.at_X is not None:
            relevance_BT -= self.law.level(self.share_RG, self.at_X)
        return replace(features, relevance_BT=relevance_BT)

    def predict(self, share_BG: F64) -> tuple[F64, F64]:
        """Return the utility of mixtures and its standard deviation, (B, J) each, for the mean of many seeds."""
        mean_BJ, std_BJ = self.gaussian_process.predict(self.features(share_BG))
        if self.law is None or self.at_X is None:
            return mean_BJ, std_BJ
        # what the process predicts is relative to the level of the size; the law's error grows with the distance
        level_J = self.law.level(self.share_RG, self.at_X)
        return mean_BJ + level_J, np.hypot(std_BJ, self.law.std(share_BG, self.at_X))

    def change(self, share_BG: F64, base_G: F64) -> tuple[F64, F64]:
        """Return the utility of mixtures minus that of a base mixture, and its standard deviation, (B, J) each."""
        change_BJ, std_BJ = self.gaussian_process.change(self.features(share_BG), self.features(base_G[None]))
        if self.law is None or self.at_X is None:
            return change_BJ, std_BJ
        return change_BJ, np.hypot(std_BJ, self.law.std(share_BG, self.at_X, base_G))

    def predict_objective(self, share_BG: F64, n_std: float = 0.0) -> F64:
        """Return the predicted objective minus `n_std` standard deviations, (B,); higher is better."""
        if n_std:
            mean_BJ, std_BJ = self.predict(share_BG)
            return np.asarray(mean_BJ[:, -1] - n_std * std_BJ[:, -1])
        level = 0.0 if self.law is None or self.at_X is None else self.law.level(self.share_RG, self.at_X)[-1]
        return np.asarray(self.gaussian_process.predict(self.features(share_BG))[0][:, -1] + level)

    def predictions_table(self, names: Sequence[str], share_BG: F64) -> pa.Table:
        """Return the table of mixture, metric, expected, low, high, in the units of the metrics."""
        mean_BT, std_BT = (value_BJ[:, :-1] for value_BJ in self.predict(share_BG))
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

    def is_too_far(self, share_BG: F64) -> NDArray[np.bool_]:
        """Return whether a mixture is too far outside the range of the runs for a prediction, (B, J)."""
        ends = self.share_RG.min(axis=0), self.share_RG.max(axis=0), self.table.values
        outside_B1 = np.array([bool(outside_range(share_G, *ends)) for share_G in share_BG], np.bool_)[:, None]
        return outside_B1 & (self.gaussian_process.relative_uncertainty(self.features(share_BG), COVERAGE) > 1.0)

    def has_prediction(self, share_BG: F64) -> NDArray[np.bool_]:
        """Return whether a mixture has a prediction for all metrics with a weight, (B,)."""
        is_too_far_BT = self.is_too_far(share_BG)[:, :-1]
        return np.asarray(~is_too_far_BT[:, self.weights_T > 0].any(axis=1))

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
        uncertainty_J = self.gaussian_process.relative_uncertainty(mixture, COVERAGE)[0]
        is_requested_J = np.append(self.weights_T > 0, True)
        least_certain = int(np.argmax(np.where(is_requested_J, uncertainty_J, 0.0)))
        mean_G = self.share_RG.mean(axis=0)
        fraction_B = np.linspace(0.0, 1.0, LINE_SEARCH_POINTS + 1)[1:]
        line_BG = mean_G + fraction_B[:, None] * (share_G - mean_G)
        after_B = self.gaussian_process.relative_uncertainty_after(
            mixture, self.features(line_BG), least_certain, COVERAGE
        )
        suffices_B = (after_B <= 1.0) & (fraction_B < MAX_LINE_FRACTION)
        return np.asarray(line_BG[int(np.argmax(suffices_B))]) if suffices_B.any() else None


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class RunsMixture(Result):
    """The optimal mixture, and what the model predicts for it and for the best run.

    Attributes:
        predictions: columns mixture, metric, expected, low, high, measured; measured is null for a mixture that was not
            trained.
    """

    predictions: pa.Table

    def _below(self) -> Sequence[str]:
        lines = [
            f"{line['metric']}: {line['mixture']}, predicted {line['expected']:.4g} ({line['low']:.4g} to "
            f"{line['high']:.4g})" + ("" if line["measured"] is None else f", measured {line['measured']:.4g}")
            for line in self.predictions.to_pylist()
        ]
        return [*lines, *first_notes(self.notes)]


def _target_scale(name: str, log_scale_RX: F64 | None, requested: Sequence[str | float | None]) -> F64 | None:
    """Return the logarithm of the parameters and tokens to predict for, the largest of the runs where none is given."""
    at = [
        None if value is None else float(np.log(parse_tokens(value, what)))
        for value, what in zip(requested, SCALES, strict=True)
    ]
    if log_scale_RX is None:
        if flags := [f"--{what}" for what, value in zip(SCALES, at, strict=True) if value is not None]:
            raise RunsError(
                f"{name}: {flags[0]}: all runs have one size and length, or the columns params and tokens are missing; "
                "train some of these mixtures, six or more, at another one and import them together"
            )
        return None
    low_X, high_X = log_scale_RX.min(axis=0), log_scale_RX.max(axis=0)
    for what, value, low, high in zip(SCALES, at, low_X, high_X, strict=True):
        if value is not None and not low - MAX_REACH * (high - low) <= value <= high + MAX_REACH * (high - low):
            runs = " to ".join(dict.fromkeys(count_text(float(np.exp(end))) for end in (low, high)))
            between = count_text(float(np.exp((value + low) / 2)))
            raise RunsError(
                f"{name}: --{what}: got {count_text(float(np.exp(value)))}, the runs have {runs}: too far for a "
                f"prediction; train some of these mixtures, six or more, at {between} and import them together"
            )
    return np.array([high if value is None else value for value, high in zip(at, high_X, strict=True)])


def predict_runs(
    runs: Runs,
    mixtures: Path | str | pa.Table,
    metric: str | Sequence[str] | None = None,
    *,
    params: str | float | None = None,
    tokens: str | float | None = None,
) -> Result:
    """Predict the metrics of mixtures from training runs alone, without an artifact.

    Intervals have a nominal coverage of 90 %. For a mixture that is too far outside the range of the runs, the result
    has no prediction but names a further run that would allow one.

    Args:
        runs: imported runs, see `grasp runs import`.
        mixtures: table with one row per mixture and one column per value of the label; shares add up to 1.
        metric: metrics, separated by commas. Default: all of them.
        params: number of parameters to predict for, e.g. 7B, if the runs have several. Default: their largest.
        tokens: length of the training to predict for, e.g. 1T, if the runs have several. Default: their largest.
    Raises:
        RunsError: the runs have no shares or are too few, a metric or a label value is unknown, shares do not add up
            to 1, or the size or length is too far from those of the runs.
    """
    model = MixtureModel.from_runs(runs, metric, params, tokens)
    names, share_BG = read_mixtures(mixtures, model.table.values, model.table.info.measure)
    too_far_B = ~model.has_prediction(share_BG)
    notes = [
        *outside_note(model, names, share_BG, ~too_far_B, "outside the range of the runs, so the interval is wider"),
        *outside_note(model, names, share_BG, too_far_B, TOO_FAR),
    ]
    for b in np.flatnonzero(too_far_B)[:MAX_LISTED].tolist():
        run_G = model.informative_run(share_BG[b])
        if run_G is None:
            notes.append(f"no nearer run would allow a prediction of {names[b]}: train it, or runs on the way to it")
            continue
        shares = ", ".join(f"{model.table.values[g]} {run_G[g]:.0%}" for g in np.argsort(-run_G)[:SHARES_SHOWN])
        more = f" and {len(run_G) - SHARES_SHOWN} more" if len(run_G) > SHARES_SHOWN else ""
        notes.append(f"a run that would allow a prediction of {names[b]}: {shares}{more}")
    intervals, *further = model.notes
    headline = f"{len(names):,} mixture{'s' * (len(names) != 1)}, predicted from {len(model.table):,} runs; {intervals}"
    return Result(model.predictions_table(names, share_BG), headline, (*notes, *further), signs=False)


def _guarded_changes(model: MixtureModel, names: Sequence[str], share_BG: F64) -> tuple[F64, F64]:
    """Return the changes of metrics from the mean mixture of the runs, and their lower bounds, (B, K) each."""
    columns = [model.table.metrics.index(name) for name in names]
    change_BJ, std_BJ = model.change(share_BG, model.share_RG.mean(axis=0))
    n_std = model.gaussian_process.quantile(2 * CONFIDENCE - 1)
    return change_BJ[:, columns], (change_BJ - n_std * std_BJ)[:, columns]


def outside_note(
    model: MixtureModel, names: Sequence[str], share_BG: F64, selected_B: NDArray[np.bool_], heading: str
) -> list[str]:
    """Return a note on the mixtures whose share of a value is outside the range of the runs, if there are any."""
    low_G, high_G = model.share_RG.min(axis=0), model.share_RG.max(axis=0)
    outside = [
        f"{names[b]} ({reason})"
        for b in np.flatnonzero(selected_B).tolist()
        for reason in outside_range(share_BG[b], low_G, high_G, model.table.values)
    ]
    return [f"{heading}: {first_few(outside, '; ')}"] if outside else []


def mix_runs(
    runs: Runs,
    metric: str | Sequence[str] | Mapping[str, float] | None = None,
    *,
    not_worse: str | Sequence[str] | None = None,
    tolerance: float = 0.0,
    cautious: float = 0.0,
    params: str | float | None = None,
    tokens: str | float | None = None,
) -> RunsMixture:
    """Find the mixture that maximises the mean of the metrics, from training runs alone.

    Metrics of different kinds, such as losses and accuracies, are divided by their standard deviation over the runs
    before they are averaged. The share of each value stays within the range of the runs.

    Args:
        runs: imported runs, see `grasp runs import`.
        metric: metrics, separated by commas. Default: all of them. In Python also a mapping of metrics to weights.
        not_worse: metrics, separated by commas, that must not become worse than at the mean mixture of the runs, with
            90 % probability.
        tolerance: how much worse they may become, in their units, e.g. 0.01.
        cautious: number of standard deviations to subtract from the predicted mean.
        params: number of parameters to mix for, e.g. 7B, if the runs have several. Default: their largest.
        tokens: length of the training to mix for, e.g. 1T, if the runs have several. Default: their largest.
    """
    model = MixtureModel.from_runs(runs, metric, params, tokens)
    low_G, high_G = model.share_RG.min(axis=0), model.share_RG.max(axis=0)
    problem = MixtureProblem(low_G, high_G, model.share_RG.mean(axis=0))
    starts = model.share_RG[np.argsort(-model.predict_objective(model.share_RG, cautious), kind="stable")[:STARTS]]
    names = parse_guards(not_worse, tolerance, model.table.metrics)
    objective = partial(model.predict_objective, n_std=cautious)
    guards = Guards(names, tolerance, partial(_guarded_changes, model, names)) if names else Guards()
    best_G, outcomes = guards.optimize(problem, objective, [*starts[:1], problem.current_G, *starts[1:]])
    messages = [outcome.note for outcome in outcomes]
    expected_R = model.predict_objective(model.share_RG)
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
    run = model.table.runs[r] if model.scale_RX is None else model.table.runs[r].rpartition(" (")[0]  # at any size
    predictions = model.predictions_table(["proposed mixture", f"best run {run}"], np.stack([best_G, run_G]))
    measured_T = (model.sign_T * np.nanmean(model.table.utility_RST()[r], axis=0))[model.weights_T > 0]
    if model.scale_RX is not None and (model.scale_RX[r] != model.at_X).any():
        measured_T = np.full(len(measured_T), np.nan)  # at another size or length
    measured = pa.array(np.concatenate([np.full(len(measured_T), np.nan), measured_T]), from_pandas=True)
    if len(model.kinds) > 1:
        messages.append(f"the objective is in {model.objective_unit}")
    headline = f"optimal mixture predicted from {len(model.table):,} runs of {model.table.name}"
    change_1J, std_1J = model.change(best_G[None], run_G)
    if change_1J[0, -1] <= model.gaussian_process.quantile(COVERAGE) * std_1J[0, -1] and not names:
        headline = f"not distinguishable from the best run {run}: {headline}"  # which need not meet guards
    return RunsMixture(
        shares,
        headline,
        (*messages, *model.notes),
        signs=False,
        predictions=predictions.append_column("measured", measured),
    )
