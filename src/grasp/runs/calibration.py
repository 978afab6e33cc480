"""Calibrate the predictions of an artifact on training runs: changes in the unit of the runs, with intervals.

`fit_outcomes` describes the subset of each run by features that are known before training, and fits a Gaussian process
from these features to the utilities of the runs. Start with `fit_outcomes`.
Shape letters: R runs, S seeds, B subsets, N rows, G slices, T targets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
from scipy.sparse import csr_array

from grasp.arrays import F64, I32, Integers
from grasp.artifact.reader import ArtifactReader
from grasp.artifact.rows import label_column, row_tokens, suggest_labels
from grasp.errors import ProtocolLeakError, RunsError
from grasp.predict.predictor import SIMILARITY_SKETCHES, KernelRelevance, Predictor
from grasp.predict.slices import label_slices
from grasp.predict.weights import RowSums, Weights
from grasp.runs.alignment import Alignment, bind_runs
from grasp.runs.gaussian_process import WITHIN_SLICE_WEIGHT, GaussianProcess, SubsetFeatures
from grasp.runs.metrics import spearman
from grasp.runs.retrained import TrainingRuns
from grasp.runs.table import RunTable
from grasp.seeds import stream

COVERAGE = 0.9
OUTSIDE = "outside the range of the runs"
MAX_SUBSETS_NAMED = 3  # subsets named in a note
MAX_DISTANCE_INSIDE = 1 + 1e-6  # distance above which a subset is outside the range of the runs; 1 is the farthest run
FIT_SIZES, DRAWS = (4, 8, 16, 32), 4  # training set sizes of a learning curve, and random draws per size
TEST_RUNS = 12, 256  # minimum and maximum number of test runs


@dataclass(frozen=True, slots=True)
class PredictedChanges:
    """Predicted change of B subsets in the unit of the runs, with intervals; nan for a target without runs.

    Attributes:
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
        self._first: list[str] = []
        self._count = 0

    def add(self, names: Sequence[str], nats: PredictedChanges) -> None:
        """Add a block of subsets."""
        messages = [f"{name} ({words})" for name, words in zip(names, nats.outside, strict=True) if words]
        self._count += len(messages)
        self._first += messages[: MAX_SUBSETS_NAMED - len(self._first)]

    @property
    def notes(self) -> tuple[str, ...]:
        """Return a note, if there are any such subsets."""
        if not self._count:
            return ()
        more = f" and {self._count - len(self._first):,} more" if self._count > len(self._first) else ""
        return (f"{OUTSIDE}, so the interval is wider: {'; '.join(self._first)}{more}",)


@dataclass(frozen=True, slots=True)
class SubsetFeaturizer:
    """Compute features of subsets from an artifact: means over the rows of a subset.

    Runs whose subsets were drawn by a label vary the shares of its slices, and so determine the effect of the mean
    relevance of a slice. The relevance of a single row is noisier, and selecting by it selects the noise too. The
    deviation of a row's relevance from the mean of its slice is therefore multiplied by WITHIN_SLICE_WEIGHT, which was
    measured on models trained from scratch. With the gradient kernel, for models that are trained further, the weight
    is 1, because there the deviations do predict which rows of a slice help.

    Attributes:
        predictor: predictor of the targets of the runs.
        indicators: indicator of the slice of each row, one per label.
        kernels: relevance of each kernel.
        codes_N: slice of each row under the first label; a single slice if there is no label.
        effect_GT: mean effect of each of these slices.
        kernel_GTM: mean relevance of each of these slices, per kernel.
        sketch_GD: mean sketch of each of these slices.
        within_slice_weight: factor of deviations from the mean of a slice.
    """

    predictor: Predictor
    indicators: tuple[RowSums, ...]
    kernels: tuple[RowSums, ...]
    codes_N: Integers
    effect_GT: F64
    kernel_GTM: F64
    sketch_GD: F64
    within_slice_weight: float

    @classmethod
    def from_predictor(cls, predictor: Predictor, artifact: ArtifactReader, labels: Sequence[str]) -> Self:
        """Compute the means of the slices in one pass over the relevance.

        Args:
            labels: labels whose slice shares are features. The first one defines the slices whose means are used.
        """
        slices = [label_slices(label_column(artifact, name), row_tokens(artifact)) for name in labels]
        indicators = tuple(_indicators(values.codes_N, len(values.slices)) for values in slices)
        names = [name.removeprefix("relevance_") for name in artifact.array_names if name.startswith("relevance_")]
        negative_of = predictor.protocol.negative_of
        kernels = tuple(
            KernelRelevance.for_tasks(artifact, name, predictor.units, negative_of(name), 1.0).held for name in names
        )
        codes_N = slices[0].codes_N if slices else np.zeros(predictor.n_rows, dtype=np.int32)
        each = slices[0].each if slices else Weights.from_slices(codes_N, 1)
        rows_G1 = each.sizes[:, None]
        effect_GT = predictor.task.effects.sums(each) / rows_G1
        kernel_GTM = np.stack([values.sums(each) / rows_G1 for values in kernels], axis=2)
        sketch = [sketch_part.sums(each) for half, sketch_part in predictor.sketches.items() if half != "product"]
        sketch_GD = np.concatenate([np.empty((len(rows_G1), 0)), *sketch], axis=1) / rows_G1
        within_slice_weight = 1.0 if "gradient" in names else WITHIN_SLICE_WEIGHT
        return cls(predictor, indicators, kernels, codes_N, effect_GT, kernel_GTM, sketch_GD, within_slice_weight)

    def features(self, weights: Weights) -> SubsetFeatures:
        """Return the features of a block of subsets."""
        sums = self.predictor.sums(weights)
        mass_B1, effective = weights.sums[:, None], self.predictor.effective_weights(weights)
        effective_B1 = effective.sums[:, None]
        nothing_B0 = np.empty((len(mass_B1), 0))
        sketch = [total_BD for half, total_BD in sums.sketch.items() if half != "product"]
        in_slice_BG = self.indicators[0].sums(effective) if self.indicators else effective_B1
        relevance_BT = self.predictor.change_of(sums)
        of_slices_BT = self.predictor.change_of(replace(sums, effect_BT=in_slice_BG @ self.effect_GT))
        kernel_BTM = np.stack([part.sums(effective) / effective_B1 for part in self.kernels], axis=2)
        of_slices_BTM = np.einsum("bg,gtm->btm", in_slice_BG / effective_B1, self.kernel_GTM)
        return SubsetFeatures(
            np.concatenate([nothing_B0, *(part.sums(weights) / mass_B1 for part in self.indicators)], axis=1),
            self._shrink(relevance_BT, of_slices_BT),
            self._shrink(kernel_BTM, of_slices_BTM),
            self._shrink(np.concatenate([nothing_B0, *sketch], axis=1), in_slice_BG @ self.sketch_GD) / effective_B1,
            relevance_BT - of_slices_BT,
        )

    def row_contributions(self, slope: SubsetFeatures, weights: Weights) -> F64:
        """Return the contribution of each row to a linear function of the features, (N,), under the weighting `mean`.

        Args:
            slope: coefficients of the function.
            weights: the subset at which the function is evaluated; it determines the repetition factor.
        """
        worth = self.predictor.sums(weights, ()).repetition_factor(self.predictor.exposure)
        relevant_N = np.asarray(self.predictor.effect_NT @ (slope.relevance_BT[0] * worth), np.float64)
        for part, slope_T in zip(self.kernels, slope.kernel_BTM[0].T, strict=True):
            relevant_N += part.dot(slope_T)
        halves = [sketch for half, sketch in self.predictor.sketches.items() if half != "product"]
        widths = np.cumsum([sketch.width for sketch in halves])
        for sketch, slope_D in zip(halves, np.split(slope.sketch_BD[0], widths), strict=False):
            relevant_N += sketch.dot(slope_D)
        chosen_N = np.asarray(self.predictor.effect_NT @ (slope.within_slice_BT[0] * worth), np.float64)
        out_N = self._shrink(relevant_N, self._slice_means(relevant_N)) + chosen_N - self._slice_means(chosen_N)
        widths = np.cumsum([part.width for part in self.indicators])
        for part, slope_G in zip(self.indicators, np.split(slope.share_BG[0], widths), strict=False):
            out_N += part.dot(slope_G)
        return out_N

    def _shrink(self, values: F64, of_slices: F64) -> F64:
        return np.asarray(of_slices + self.within_slice_weight * (values - of_slices))

    def _slice_means(self, values_N: F64) -> F64:
        """Replace each value by the mean over its slice."""
        sum_G, rows_G = np.bincount(self.codes_N, values_N), np.bincount(self.codes_N)
        return np.asarray((sum_G / np.maximum(rows_G, 1))[self.codes_N])

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
        targets: requested targets.
        featurizer: features with the targets of the runs.
        runs: features of the runs.
        utility_RST: utilities of the runs.
    """

    unit: str
    title: str
    notes: tuple[str, ...]
    targets: tuple[str, ...]
    featurizer: SubsetFeaturizer
    gaussian_process: GaussianProcess
    runs: SubsetFeatures
    utility_RST: F64

    @property
    def task_by_target(self) -> dict[str, int]:
        """Return the task of the Gaussian process for each requested target that has runs."""
        fitted = self.featurizer.predictor.units.targets
        return {target: fitted.index(target) for target in self.targets if target in fitted}

    def predict(self, weights: Weights) -> PredictedChanges:
        """Return the change of each subset relative to the corpus; nan for a target without runs."""
        features, corpus = self.featurizer.features(weights), self.featurizer.corpus()
        mean_BT, half_width_BT = self._change(features, corpus)
        far_B = self.gaussian_process.relative_distance(features, corpus)
        outside = [
            f"{far:.1f} times as far from the corpus as any run" if far > MAX_DISTANCE_INSIDE else "" for far in far_B
        ]
        expected, half_width = self._select_targets(mean_BT), self._select_targets(half_width_BT)
        return PredictedChanges(expected, expected - half_width, expected + half_width, tuple(outside), self.unit)

    def row_gradients(self, weights: Weights, weights_T: F64, *, cautious: bool = False) -> F64:
        """Return the derivative of the weighted change with respect to adding each row, (N,), up to a constant."""
        corpus = self.featurizer.corpus()

        def value(features: SubsetFeatures) -> F64:
            mean_BT, half_width_BT = self._change(features, corpus)
            return np.asarray(
                np.nan_to_num(self._select_targets(mean_BT - half_width_BT if cautious else mean_BT)) @ weights_T
            )

        return self.featurizer.row_contributions(
            self.gaussian_process.gradient(self.featurizer.features(weights), value), weights
        )

    def _change(self, features: SubsetFeatures, corpus: SubsetFeatures) -> tuple[F64, F64]:
        """Return the change relative to the corpus and half the width of its interval, for all tasks."""
        mean_BT, spread_BT = self.gaussian_process.change(features, corpus)
        return mean_BT, self.gaussian_process.quantile(COVERAGE) * spread_BT

    def _select_targets(self, predicted_BT: F64) -> F64:
        """Select the requested targets from all tasks; nan for a target without runs."""
        out_BT = np.full((len(predicted_BT), len(self.targets)), np.nan)
        for target, task in self.task_by_target.items():
            out_BT[:, self.targets.index(target)] = predicted_BT[:, task]
        return out_BT


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """Rank correlation of predictions with the utilities of held-out runs, by the number of runs in the fit.

    Attributes:
        counts: number of runs in the fit, (K,); 0: relevance alone. All counts share the same test runs.
        rho_KT: mean over random draws, for the tasks of `OutcomePredictor`.
        spread_KT: standard deviation over random draws.
    """

    counts: tuple[int, ...]
    rho_KT: F64
    spread_KT: F64


def learning_curve(expected: OutcomePredictor) -> LearningCurve | None:
    """Estimate whether more runs would help; return None if there are too few runs to hold some out.

    Fits use at most 32 runs, so this takes seconds.
    """
    runs, utility_RST = expected.runs, expected.utility_RST
    counts = [k for k in FIT_SIZES if k + TEST_RUNS[0] <= len(runs)]
    if not counts:
        return None
    realized_RT = np.nanmean(utility_RST, axis=1)
    rho_KDT = np.full((1 + len(counts), DRAWS, realized_RT.shape[1]), np.nan)
    for d in range(DRAWS):
        order = stream(0, "learning curve", len(runs), d).permutation(len(runs))
        rest = order[counts[-1] :][: TEST_RUNS[1]]
        rho_KDT[0, d] = spearman(runs.relevance_BT[rest], realized_RT[rest])
        for place, k in enumerate(counts, start=1):
            if np.ptp(realized_RT[order[:k]], axis=0).min() > 0:  # a fit needs runs that differ
                gaussian_process = GaussianProcess.fit(runs.take(order[:k]), utility_RST[order[:k]])
                rho_KDT[place, d] = spearman(gaussian_process.predict(runs.take(rest))[0], realized_RT[rest])
    known = np.flatnonzero(np.isfinite(rho_KDT).all(axis=(1, 2)))
    rho_KDT = rho_KDT[known]
    return LearningCurve(tuple([0, *counts][k] for k in known), rho_KDT.mean(axis=1), rho_KDT.std(axis=1, ddof=1))


def fit_outcomes(
    predictor: Predictor, artifact: ArtifactReader, runs: TrainingRuns | RunTable | Path | str
) -> OutcomePredictor:
    """Fit a predictor of changes in the unit of the runs.

    Args:
        predictor: predictor of the requested targets, with the protocol to use.
        artifact: artifact of the corpus that the runs were trained on.
        runs: retrained or imported runs, or their path.

    Raises:
        ProtocolLeakError: the runs are held out, or all requested targets are.
        RunsError: runs and artifact have no target or no label in common, or there are too few runs.
    """
    runs_set = bind_runs(artifact, runs)
    if runs_set.role != "dev":
        raise ProtocolLeakError(
            f"{runs_set.path}: is held out; intervals are fitted to development runs only, so that held-out runs can "
            "test them"
        )
    alignment = Alignment.from_runs(runs_set, artifact)
    common = {
        target: run_target for target, run_target in alignment.run_targets.items() if target in predictor.units.targets
    }
    if not common:
        raise RunsError(
            f"{runs_set.path}: has targets {list(runs_set.targets)}, requested are "
            f"{list(predictor.units.targets)}; none is in both"
        )
    targets = {
        target: run_target
        for target, run_target in alignment.run_targets.items()
        if runs_set.role_of(run_target) == "dev"
    }
    requested = {target: run_target for target, run_target in common.items() if target in targets}
    if not requested:
        raise ProtocolLeakError(
            f"{runs_set.path}: intervals were requested for {list(common.values())}, which are held out; they are "
            "fitted to development targets only"
        )
    utility_RST = runs_set.task_utilities(list(targets.values()))
    # drop targets whose utilities are all equal, unless they are requested: then `GaussianProcess.fit` raises an error
    varies_T = np.ptp(np.nanmean(utility_RST, axis=1), axis=0) > 0
    varies_T |= np.array([name in requested for name in targets])
    targets = {
        target: run_target for (target, run_target), varies in zip(targets.items(), varies_T, strict=True) if varies
    }
    utility_RST = utility_RST[:, :, varies_T]
    runs_predictor = Predictor.from_artifact(artifact, predictor.protocol, list(targets), sketches=SIMILARITY_SKETCHES)
    labels = dict.fromkeys([*([runs_set.label] if runs_set.label else []), *suggest_labels(artifact)])
    featurizer = SubsetFeaturizer.from_predictor(runs_predictor, artifact, tuple(labels))
    features_of_blocks = [featurizer.features(block.weights) for block in alignment.blocks]
    reference_ST = runs_set.task_reference(list(targets.values()))
    if len(reference_ST) == utility_RST.shape[1]:
        features_of_blocks.append(featurizer.corpus())
        utility_RST = np.concatenate([utility_RST, reference_ST[None]])
    features = SubsetFeatures.concatenate(features_of_blocks)
    centred_RT = features.relevance_BT - features.relevance_BT.mean(axis=0)
    covariance_T = (centred_RT * np.nanmean(utility_RST, axis=1)).sum(axis=0)  # covariance over the runs
    notes = [*runs_set.notes]
    if predictor.protocol.chosen_on(alignment.runs_fingerprint):
        notes.append(f"the protocol was selected on {runs_set.name}, so its intervals are somewhat too narrow")
    notes += [
        f"{name}: utilities do not increase with the prediction; the fit to the runs corrects this"
        for name, covariance in zip(targets, covariance_T, strict=True)
        if covariance < 0 and name in requested
    ]
    if missing := [name for name in predictor.units.targets if name not in requested]:
        notes.append(f"no runs for {', '.join(missing)}, so no prediction in the unit of the runs")
    unit, (measurement, model_text) = runs_set.unit, runs_set.measurement
    return OutcomePredictor(
        unit,
        f"{unit}, {unit}_low, {unit}_high: {measurement}, {COVERAGE:.0%} interval, {model_text}",
        tuple(notes),
        predictor.units.targets,
        featurizer,
        GaussianProcess.fit(features, utility_RST),
        features,
        utility_RST,
    )


def _indicators(codes_N: I32, n_slices: int) -> RowSums:
    """Return indicators of the slice of each row; their sum over a subset is its number of rows per slice."""
    identity_GG = np.eye(n_slices, dtype=np.float32)
    step = 1 << 16
    return RowSums(
        lambda: ((at, identity_GG[codes_N[at : at + step]]) for at in range(0, len(codes_N), step)),
        len(codes_N),
        n_slices,
    )
