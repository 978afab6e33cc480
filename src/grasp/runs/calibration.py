"""Calibrate the predictions of an artifact on training runs: changes in the unit of the runs, with intervals.

A run is a model trained on a subset of the corpus, and its utility for each target. `fit_outcomes` computes features of
the subset of each run (`SubsetFeaturizer`), such as its mean relevance and the shares of slices, and fits a Gaussian
process from these features to the utilities. The result, an `OutcomePredictor`, predicts the utility of any subset.

Shape letters: R runs, S seeds, B subsets, N rows, G slices of a label, T targets, M relevance kernels, D sketch width.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Self

import numpy as np
from scipy.sparse import csr_array

from grasp.arrays import F64, I32, Integers
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import label_column, row_amounts, row_tokens, suggest_labels
from grasp.errors import ProtocolLeakError, RunsError
from grasp.predict.predictor import SIMILARITY_SKETCHES, Predictor, task_kernels
from grasp.predict.slices import LabelSlices, label_slices
from grasp.predict.weights import RowSums, Weights
from grasp.runs.alignment import Alignment
from grasp.runs.gaussian_process import GaussianProcess, varies
from grasp.runs.imported_runs import bind_runs
from grasp.runs.metric_names import metric_kinds
from grasp.runs.subset_features import SubsetFeatures
from grasp.runs.table import constant_note
from grasp.runs.training_runs import TrainingRuns

COVERAGE = 0.9  # of intervals
# Weight of the deviations of rows' relevance from the mean of their slice: experiments/exposure.
WITHIN_SLICE_WEIGHT = 0.4
OUTSIDE = "outside the range of the runs"
SHARE_TOLERANCE = 0.005  # a share beyond the range of the runs by no more than this counts as inside
MAX_SUBSETS_NAMED = 3  # subsets named in a note
MAX_DISTANCE_INSIDE = 1 + 1e-6  # distance above which a subset is outside the range of the runs; 1 is the farthest run


@dataclass(frozen=True, slots=True)
class PredictedChanges:
    """Predicted change of B subsets in the unit of the runs, with intervals; nan for a target without runs.

    Attributes:
        change_BT: predicted change relative to the corpus.
        low_BT: lower bound of the interval.
        high_BT: upper bound of the interval.
        outside: for each subset how it is outside the range of the runs, or an empty text.
        unit: nats (per token), or the metric of the runs.
    """

    change_BT: F64
    low_BT: F64
    high_BT: F64
    outside: tuple[str, ...]
    unit: str = "nats"

    @property
    def columns(self) -> dict[str, F64]:
        """Return the three arrays by column name."""
        return {self.unit: self.change_BT, f"{self.unit}_low": self.low_BT, f"{self.unit}_high": self.high_BT}


class ExtrapolationLog:
    """Count the subsets outside the range of the runs while blocks of predictions are made."""

    def __init__(self) -> None:
        self._examples: list[str] = []
        self._count = 0

    def add(self, names: Sequence[str], changes: PredictedChanges) -> None:
        """Add a block of subsets with these names."""
        messages = [f"{name} ({reason})" for name, reason in zip(names, changes.outside, strict=True) if reason]
        self._count += len(messages)
        self._examples += messages[: MAX_SUBSETS_NAMED - len(self._examples)]

    @property
    def notes(self) -> tuple[str, ...]:
        """Return a note, if there are any such subsets."""
        if not self._count:
            return ()
        more = f" and {self._count - len(self._examples):,} more" if self._count > len(self._examples) else ""
        return (f"{OUTSIDE}, so the interval is wider: {'; '.join(self._examples)}{more}",)


def outside_range(share_G: F64, low_G: F64, high_G: F64, values: Sequence[str]) -> list[str]:
    """Describe the share of a mixture that is farthest outside the range of the runs; empty if none is outside.

    This is the rule of all commands for what lies outside of the runs.
    """
    beyond_G = np.maximum(share_G - high_G, low_G - share_G)
    if beyond_G.max(initial=0.0) <= SHARE_TOLERANCE:
        return []
    g = int(np.argmax(beyond_G))
    return [f"{values[g]} {share_G[g]:.0%}, in the runs {low_G[g]:.0%} to {high_G[g]:.0%}"]


@dataclass(frozen=True, slots=True)
class SubsetFeaturizer:
    """Compute features of subsets from an artifact: means over the rows of a subset.

    Runs whose subsets were drawn by a label vary the shares of its slices, and so determine the effect of the mean
    relevance of a slice. The relevance of a single row is noisier, and selecting by it selects the noise too. The
    deviation of a row's relevance from the mean of its slice is therefore multiplied by WITHIN_SLICE_WEIGHT, which was
    measured on models trained from scratch. With the gradient kernel, for models that are trained further, the weight
    is 1, because there the deviations do predict which rows of a slice help.

    Attributes:
        predictor: predictor of the targets of the runs, with `SIMILARITY_SKETCHES`.
        slice_rows: indicator of the slice of each row under the first label.
        amounts: amount of each row in its slice, in what the shares of the runs are shares of; one per label.
        kernels: relevance of each kernel.
        codes_N: slice of each row under the first label; a single slice if there is no label. Deviations are from the
            means of these slices.
        effect_GT: mean effect of the rows of each slice.
        kernel_GTM: mean relevance of each kernel over the rows of each slice.
        sketch_GD: mean sketch of each slice; hidden and residual sketches are concatenated.
        within_slice_weight: factor of deviations from the mean of a slice.
    """

    predictor: Predictor
    slice_rows: RowSums
    amounts: tuple[RowSums, ...]
    kernels: tuple[RowSums, ...]
    codes_N: Integers
    effect_GT: F64
    kernel_GTM: F64
    sketch_GD: F64
    within_slice_weight: float

    @classmethod
    def from_predictor(
        cls, predictor: Predictor, artifact: ArtifactReader, slices: Sequence[LabelSlices], measure: str = "rows"
    ) -> Self:
        """Compute the means of the slices in one pass over the relevance.

        Args:
            predictor: predictor of the targets of the runs.
            artifact: artifact of the predictor.
            slices: labels whose slice shares are features. The first one defines the slices whose means are used.
            measure: what the shares are shares of: rows, tokens or documents.
        """
        codes = [(of_label.codes_N, len(of_label.slices)) for of_label in slices]
        amounts = tuple(_amounts(codes_N, n, row_amounts(artifact, measure, codes_N)) for codes_N, n in codes)
        factors = dict.fromkeys(artifact.kernels, 1.0)
        read = task_kernels(artifact, predictor.protocol, predictor.units, factors)
        names, kernels = list(read), tuple(kernel.relevance for kernel in read.values())
        codes_N = slices[0].codes_N if slices else np.zeros(predictor.n_rows, dtype=np.int32)
        slice_weights = slices[0].each if slices else Weights.from_slices(codes_N, 1)
        n_rows_G1 = slice_weights.sizes[:, None]
        slice_rows = _amounts(codes_N, len(n_rows_G1), np.ones(len(codes_N)))
        effect_GT = predictor.task.effects.sums(slice_weights) / n_rows_G1
        kernel_GTM = np.stack([relevance.sums(slice_weights) / n_rows_G1 for relevance in kernels], axis=2)
        sketches = [sketch.sums(slice_weights) for sketch in predictor.sketches.values()]
        sketch_GD = np.concatenate([np.empty((len(n_rows_G1), 0)), *sketches], axis=1) / n_rows_G1
        within_slice_weight = 1.0 if "gradient" in names else WITHIN_SLICE_WEIGHT
        return cls(
            predictor, slice_rows, amounts, kernels, codes_N, effect_GT, kernel_GTM, sketch_GD, within_slice_weight
        )

    def features(self, weights: Weights) -> SubsetFeatures:
        """Return the features of a block of subsets."""
        sums = self.predictor.sums(weights)
        effective_weights = self.predictor.effective_weights(weights)  # repeated rows count with diminishing returns
        effective_B1 = effective_weights.sums[:, None]
        empty_B0 = np.empty((len(effective_B1), 0))
        slice_weight_BG = self.slice_rows.sums(effective_weights)
        # Each feature is computed twice: from the rows, and with every row replaced by the mean of its slice.
        relevance_BT = self.predictor.change_of(sums)
        slice_relevance_BT = self.predictor.change_of(replace(sums, effect_BT=slice_weight_BG @ self.effect_GT))
        kernel_BTM = np.stack([relevance.sums(effective_weights) / effective_B1 for relevance in self.kernels], axis=2)
        slice_kernel_BTM = np.einsum("bg,gtm->btm", slice_weight_BG / effective_B1, self.kernel_GTM)
        sketch_BD, slice_sketch_BD = (
            np.concatenate([empty_B0, *sums.sketch.values()], axis=1),
            slice_weight_BG @ self.sketch_GD,
        )
        amounts = (of_label.sums(weights) for of_label in self.amounts)
        shares = (amount_BG / amount_BG.sum(axis=1, keepdims=True) for amount_BG in amounts)
        return SubsetFeatures(
            share_BG=np.concatenate([empty_B0, *shares], axis=1),
            relevance_BT=self._shrink(relevance_BT, slice_relevance_BT),
            kernel_BTM=self._shrink(kernel_BTM, slice_kernel_BTM),
            sketch_BD=self._shrink(sketch_BD, slice_sketch_BD) / effective_B1,
            within_slice_BT=relevance_BT - slice_relevance_BT,
        )

    def row_contributions(self, slope: SubsetFeatures, weights: Weights) -> F64:
        """Return the contribution of each row to a linear function of the features, (N,), under the weighting `mean`.

        The transpose of `features`: coefficients of features become coefficients of rows. Shrinking towards the means
        of slices is its own transpose, so it is applied once, to the sum over relevance, kernels and sketches.

        Args:
            slope: coefficients of the function.
            weights: the subset at which the function is evaluated; it determines the repetition factor.
        """
        repetition_factor = self.predictor.sums(weights, ()).repetition_factor(self.predictor.repetition_law)
        effect_NT = self.predictor.effect_NT
        relevance_N = np.asarray(effect_NT @ (slope.relevance_BT[0] * repetition_factor), np.float64)
        for relevance, slope_T in zip(self.kernels, slope.kernel_BTM[0].T, strict=True):
            relevance_N += relevance.dot(slope_T)
        for sketch, slope_D in _split_coefficients(slope.sketch_BD[0], tuple(self.predictor.sketches.values())):
            relevance_N += sketch.dot(slope_D)
        within_slice_N = np.asarray(effect_NT @ (slope.within_slice_BT[0] * repetition_factor), np.float64)
        contribution_N = self._shrink(relevance_N, self._slice_means(relevance_N))
        contribution_N = contribution_N + within_slice_N - self._slice_means(within_slice_N)
        for amounts, slope_G in _split_coefficients(slope.share_BG[0], self.amounts):
            # the derivative of <slope, amounts / their sum> times the sum of the weights, as that of a mean over rows
            amount_G = amounts.sums(weights)[0]
            share_G = amount_G / amount_G.sum()
            contribution_N += weights.sums[0] / amount_G.sum() * amounts.dot(slope_G - slope_G @ share_G)
        return contribution_N

    def _shrink(self, values: F64, slice_means: F64) -> F64:
        """Multiply the deviations of values from the means of slices by `within_slice_weight`."""
        return np.asarray(slice_means + self.within_slice_weight * (values - slice_means))

    def _slice_means(self, values_N: F64) -> F64:
        """Return the mean over the slice of each row, (N,)."""
        sum_G, n_rows_G = np.bincount(self.codes_N, values_N), np.bincount(self.codes_N)
        return np.asarray((sum_G / np.maximum(n_rows_G, 1))[self.codes_N])

    def corpus(self) -> SubsetFeatures:
        """Return the features of the whole corpus."""
        return self.features(Weights(csr_array((1, self.predictor.n_rows)), base=1.0))


@dataclass(frozen=True, slots=True)
class OutcomePredictor:
    """Predict changes in the unit of the runs, with intervals, from features of subsets.

    The Gaussian process is fitted to all targets of the runs, so that the prediction for a target does not depend on
    which others are requested.

    Attributes:
        unit: name of the columns: nats, or the metric of the runs.
        title: description of the columns.
        notes: notes on the fit, for display.
        targets: requested targets.
        kinds: kind of the metric of each target of the runs, see `metric_names.metric_kind`.
        featurizer: features with the targets of the runs.
        labels: labels whose shares are features, with the names of their slices.
        gaussian_process: from features to the utilities of all targets of the runs.
        runs: features of the runs.
        utility_RST: utilities of the runs.
    """

    unit: str
    title: str
    notes: tuple[str, ...]
    targets: tuple[str, ...]
    kinds: Mapping[str, str]
    featurizer: SubsetFeaturizer
    labels: Mapping[str, tuple[str, ...]]
    gaussian_process: GaussianProcess
    runs: SubsetFeatures
    utility_RST: F64

    @property
    def requested_kinds(self) -> tuple[str, ...]:
        """Return the different kinds of metrics of the requested targets; changes of several must not be averaged."""
        return tuple(dict.fromkeys(self.kinds[target] for target in self.task_by_target))

    @property
    def task_by_target(self) -> dict[str, int]:
        """Return the task of the Gaussian process for each requested target that has runs."""
        fitted = self.featurizer.predictor.units.targets
        return {target: fitted.index(target) for target in self.targets if target in fitted}

    def predict(self, weights: Weights) -> PredictedChanges:
        """Return the change of each subset relative to the corpus; nan for a target without runs."""
        features, corpus = self.featurizer.features(weights), self.featurizer.corpus()
        expected_BT, half_width_BT = self._change(features, corpus)
        names = next(iter(self.labels.values()), ())
        run_RG, share_BG = self.runs.share_BG[:, : len(names)], features.share_BG[:, : len(names)]
        low_G, high_G, outside = run_RG.min(axis=0), run_RG.max(axis=0), list[str]()
        for b, distance in enumerate(self.gaussian_process.relative_distance(features, corpus)):
            reasons = [f"{distance:.1f} times as far from the corpus as any run"] * int(distance > MAX_DISTANCE_INSIDE)
            outside.append("; ".join(reasons + outside_range(share_BG[b], low_G, high_G, names)))
        low_BT, high_BT = expected_BT - half_width_BT, expected_BT + half_width_BT
        return PredictedChanges(expected_BT, low_BT, high_BT, tuple(outside), self.unit)

    def row_shares(self, label: str, rows_G: Integers) -> F64:
        """Return the shares of rows of a label's slices in the runs, (R, G), also if the runs have shares of tokens."""
        names = list(self.labels)
        start = sum(len(self.labels[name]) for name in names[: names.index(label)])
        share_RG, corpus_G = (
            of.share_BG[:, start : start + len(rows_G)] for of in (self.runs, self.featurizer.corpus())
        )
        row_RG = share_RG * rows_G / corpus_G
        return np.asarray(row_RG / row_RG.sum(axis=1, keepdims=True))

    def row_gradients(self, weights: Weights, weights_T: F64, *, cautious: bool = False) -> F64:
        """Return the derivative of the weighted change with respect to adding each row, (N,), up to a constant.

        Args:
            weights: the subset to which rows are added.
            weights_T: weight of each requested target.
            cautious: differentiate the lower bound of the interval instead of the predicted change.
        """
        corpus = self.featurizer.corpus()

        def weighted_change(features: SubsetFeatures) -> F64:
            mean_BT, half_width_BT = self._change(features, corpus)
            value_BT = mean_BT - half_width_BT if cautious else mean_BT
            return np.asarray(np.nan_to_num(value_BT) @ weights_T)

        features = self.featurizer.features(weights)
        slope = self.gaussian_process.finite_difference_gradient(features, weighted_change)
        return self.featurizer.row_contributions(slope, weights)

    def _change(self, features: SubsetFeatures, corpus: SubsetFeatures) -> tuple[F64, F64]:
        """Return the change relative to the corpus and half the width of its interval; nan if a target has no runs."""
        mean_BJ, std_BJ = self.gaussian_process.change(features, corpus)  # J: tasks of the Gaussian process
        change_BT, half_width_BT = np.full((2, len(features), len(self.targets)), np.nan)
        for target, task in self.task_by_target.items():
            change_BT[:, self.targets.index(target)] = mean_BJ[:, task]
            half_width_BT[:, self.targets.index(target)] = self.gaussian_process.quantile(COVERAGE) * std_BJ[:, task]
        return change_BT, half_width_BT


def fit_outcomes(predictor: Predictor, artifact: ArtifactReader, runs: TrainingRuns | Path | str) -> OutcomePredictor:
    """Fit a predictor of changes in the unit of the runs.

    Args:
        predictor: predictor of the requested targets, with the protocol to use.
        artifact: artifact of the corpus that the runs were trained on.
        runs: retrained or imported runs, or their path.

    Raises:
        ProtocolLeakError: the runs are held out, or all requested targets are.
        RunsError: runs and artifact have no target or no label in common, or there are too few runs.
    """
    training_runs = bind_runs(artifact, runs)
    if training_runs.role != "dev":
        raise ProtocolLeakError(
            f"{training_runs.path}: is held out; intervals are fitted to development runs only, so that held-out runs "
            "can test them"
        )
    alignment = Alignment.from_runs(training_runs, artifact)
    requested, run_name_of = predictor.units.targets, alignment.run_targets
    # the name in the runs of each common target that is not held out, by its name in the artifact
    targets = {name: run_name for name, run_name in run_name_of.items() if training_runs.role_of(run_name) == "dev"}
    common = {name: run_name for name, run_name in run_name_of.items() if name in requested}
    if not common:
        raise RunsError(
            f"{training_runs.path}: has targets {list(training_runs.targets)}, requested are {list(requested)}; none "
            "is in both"
        )
    if not common.keys() & targets:
        raise ProtocolLeakError(
            f"{training_runs.path}: intervals were requested for {list(common.values())}, which are held out; they are "
            "fitted to development targets only"
        )
    utility_RST = training_runs.task_utilities(list(targets.values()))
    varies_T = varies(utility_RST)
    metrics = {name: training_runs.metric_of_target.get(run_name, f"{name}/loss") for name, run_name in targets.items()}
    constant = [metrics[name] for name in compress(targets, ~varies_T)]
    if not set(predictor.units.targets) & set(compress(targets, varies_T)):
        raise RunsError(f"{training_runs.path}: {', '.join(constant)}: the same in all runs; expected runs that differ")
    targets, utility_RST = dict(compress(targets.items(), varies_T)), utility_RST[:, :, varies_T]

    runs_predictor = Predictor.from_artifact(artifact, predictor.protocol, list(targets), sketches=SIMILARITY_SKETCHES)
    names = dict.fromkeys([*([training_runs.label] if training_runs.label else []), *suggest_labels(artifact)])
    labels = {name: label_slices(label_column(artifact, name), row_tokens(artifact)) for name in names}
    measure = training_runs.info.measure if training_runs.info.kind == "shares" else "rows"
    featurizer = SubsetFeaturizer.from_predictor(runs_predictor, artifact, tuple(labels.values()), measure)
    blocks = [featurizer.features(block.weights) for block in alignment.blocks]
    reference_ST = training_runs.task_reference(list(targets.values()))
    if len(reference_ST) == utility_RST.shape[1]:  # trained on the whole corpus with every seed: one more run
        blocks.append(featurizer.corpus())
        utility_RST = np.concatenate([utility_RST, reference_ST[None]])
    features = SubsetFeatures.concatenate(blocks)

    unit, (measurement, model_text) = training_runs.unit, training_runs.measurement
    return OutcomePredictor(
        unit=unit,
        title=f"{unit}, {unit}_low, {unit}_high: {measurement}, {COVERAGE:.0%} interval, {model_text}",
        notes=(*_fit_notes(alignment, predictor, list(targets), features, utility_RST), *constant_note(constant)),
        targets=predictor.units.targets,
        kinds=dict(zip(targets, metric_kinds(map(metrics.__getitem__, targets), utility_RST), strict=True)),
        featurizer=featurizer,
        labels={name: of_label.names for name, of_label in labels.items()},
        gaussian_process=GaussianProcess.fit(features, utility_RST),
        runs=features,
        utility_RST=utility_RST,
    )


def _fit_notes(
    alignment: Alignment, predictor: Predictor, targets: Sequence[str], features: SubsetFeatures, utility_RST: F64
) -> list[str]:
    """Return notes on the fit; `targets` are the fitted ones, in the order of the last axis of the arrays."""
    notes = [*alignment.runs.notes]
    if predictor.protocol.targets_selected_on(alignment.runs_fingerprint):
        notes.append(f"the protocol was selected on {alignment.runs.name}, so its intervals are somewhat too narrow")
    centred_RT = features.relevance_BT - features.relevance_BT.mean(axis=0)
    covariance_T = (centred_RT * np.nanmean(utility_RST, axis=1)).sum(axis=0)  # times the number of runs
    notes += [
        f"{name}: utilities do not increase with the prediction; the fit to the runs corrects this"
        for name, covariance in zip(targets, covariance_T, strict=True)
        if covariance < 0 and name in predictor.units.targets
    ]
    if missing := [name for name in predictor.units.targets if name not in targets]:
        notes.append(f"no runs for {', '.join(missing)}, so no prediction in the unit of the runs")
    return notes


def _split_coefficients(coefficient_D: F64, columns: Sequence[RowSums]) -> Iterator[tuple[RowSums, F64]]:
    """Yield each group of columns with its segment of the coefficients of all columns."""
    ends = np.cumsum([group.width for group in columns])
    return zip(columns, np.split(coefficient_D, ends), strict=False)  # the last segment is empty


def _amounts(codes_N: I32, n_slices: int, amount_N: F64) -> RowSums:
    """Return the amount of each row in the column of its slice; their sum over a subset is its amount per slice."""
    identity_GG = np.eye(n_slices, dtype=np.float32)
    amount_N1 = amount_N.astype(np.float32)[:, None]
    block_rows = 1 << 16
    blocks = [slice(start, start + block_rows) for start in range(0, len(codes_N), block_rows)]  # bound the memory
    return RowSums(
        lambda: ((rows.start, identity_GG[codes_N[rows]] * amount_N1[rows]) for rows in blocks), len(codes_N), n_slices
    )
