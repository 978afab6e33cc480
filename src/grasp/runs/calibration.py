"""Fit a model of the outcomes of training runs to an artifact's predictions. Start with `fit_outcomes`.

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
from grasp.artifact.rows import label_column, row_tokens
from grasp.errors import ProtocolLeakError, RunsError
from grasp.predict.predictor import SIMILAR, KernelRelevance, Predictor
from grasp.predict.slices import label_slices, suggest_labels
from grasp.predict.weights import RowSums, Weights
from grasp.runs.alignment import Alignment, bind_runs
from grasp.runs.gaussian_process import WITHIN_SLICE_WEIGHT, GaussianProcess, SubsetFeatures
from grasp.runs.metrics import spearman
from grasp.runs.retrained import TrainingRuns
from grasp.runs.table import RunTable
from grasp.seeds import stream

COVERAGE = 0.9
OUTSIDE = "outside of what the runs covered"
NAMED = 3  # subsets in a sentence
FAR = 1 + 1e-6
COUNTS, DRAWS = (4, 8, 16, 32), 4  # runs of a learning curve, and how often so many are drawn
LEFT_OUT = 12, 256  # runs that are ranked, at least and at most


@dataclass(frozen=True, slots=True)
class NatsTable:
    """Change of realized utility of B subsets in nats a token, (B, T); nan where a target has no line."""

    nats_BT: F64
    low_BT: F64
    high_BT: F64
    outside: tuple[str, ...]  # for each subset: in which way it lies beyond the runs; empty: it does not
    unit: str = "nats"  # nats a token, or the metric of the runs

    @property
    def columns(self) -> dict[str, F64]:
        """By the names that they have in every table."""
        return {self.unit: self.nats_BT, f"{self.unit}_low": self.low_BT, f"{self.unit}_high": self.high_BT}


class ExtrapolationLog:
    """Counts, while predictions are made, the subsets that lie beyond what the runs covered."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._count = 0

    def add(self, names: Sequence[str], nats: NatsTable) -> None:
        """One block of subsets."""
        messages = [f"{name} ({words})" for name, words in zip(names, nats.outside, strict=True) if words]
        self._count += len(messages)
        self._first += messages[: NAMED - len(self._first)]

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence, if there is anything to say."""
        if not self._count:
            return ()
        more = f" and {self._count - len(self._first):,} more" if self._count > len(self._first) else ""
        return (f"{OUTSIDE}, so the interval is wider: {'; '.join(self._first)}{more}",)


@dataclass(frozen=True, slots=True)
class SubsetFeaturizer:
    """What an artifact knows of any subset: means over its rows.

    Runs that were drawn by a label vary the slices' shares, and teach what a slice's relevance is worth. One row's is
    noisier, and choosing takes what the noise made look best. So the relevance of a row against the mean of its slice
    counts WITHIN as much. That was measured on models trained from scratch; by gradients, for a model that is trained
    further, it counts whole: there it tells which rows of a slice a run had.
    """

    predictor: Predictor
    indicators: tuple[RowSums, ...]  # of the slices, a label each
    kernels: tuple[RowSums, ...]
    codes_N: Integers  # slice of each row, by the first label; one slice for all where there is no label
    effect_GT: F64  # its mean over these slices
    kernel_GTM: F64
    sketch_GD: F64
    within_slice_weight: float  # what relevance within a slice counts

    @classmethod
    def from_predictor(cls, predictor: Predictor, artifact: ArtifactReader, labels: Sequence[str]) -> Self:
        """Args: labels: whose slices' shares are features; the first is the one that runs were drawn by, if any."""
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
        """Of one block of subsets."""
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
            self._less(relevance_BT, of_slices_BT),
            self._less(kernel_BTM, of_slices_BTM),
            self._less(np.concatenate([nothing_B0, *sketch], axis=1), in_slice_BG @ self.sketch_GD) / effective_B1,
            relevance_BT - of_slices_BT,
        )

    def row_contributions(self, slope: SubsetFeatures, weights: Weights) -> F64:
        """What every row adds to a linear function of the features of one subset, (N,), under the weighting `mean`.

        Args:
            slope: of that function.
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
        out_N = self._less(relevant_N, self._of_slices(relevant_N)) + chosen_N - self._of_slices(chosen_N)
        widths = np.cumsum([part.width for part in self.indicators])
        for part, slope_G in zip(self.indicators, np.split(slope.share_BG[0], widths), strict=False):
            out_N += part.dot(slope_G)
        return out_N

    def _less(self, values: F64, of_slices: F64) -> F64:
        return np.asarray(of_slices + self.within_slice_weight * (values - of_slices))

    def _of_slices(self, values_N: F64) -> F64:
        """The mean over its slice instead of each value."""
        sum_G, rows_G = np.bincount(self.codes_N, values_N), np.bincount(self.codes_N)
        return np.asarray((sum_G / np.maximum(rows_G, 1))[self.codes_N])

    def corpus(self) -> SubsetFeatures:
        """Of the corpus itself."""
        return self.features(Weights(csr_array((1, self.predictor.n_rows)), base=1.0))


@dataclass(frozen=True, slots=True)
class OutcomePredictor:
    """What runs say of the predictions of one predictor: the change in their own unit, with an interval.

    It is fitted to all targets of the runs, so that the prediction for a target does not depend on which others are
    requested.
    """

    unit: str  # what columns are called: nats, or the metric of the runs
    title: str  # what the numbers are, in words
    notes: tuple[str, ...]
    targets: tuple[str, ...]  # asked
    featurizer: SubsetFeaturizer  # of the targets that teach
    process: GaussianProcess
    runs: SubsetFeatures
    utility_RST: F64

    @property
    def columns(self) -> dict[str, int]:
        """Asked target -> its task among those learned; those without runs are not in it."""
        fitted = self.featurizer.predictor.units.targets
        return {target: fitted.index(target) for target in self.targets if target in fitted}

    def predict(self, weights: Weights) -> NatsTable:
        """Change of subsets against the corpus; nan where a target has no runs."""
        features, corpus = self.featurizer.features(weights), self.featurizer.corpus()
        mean_BT, half_BT = self._change(features, corpus)
        far_B = self.process.reach(features, corpus)
        outside = [f"{far:.1f} times as far from the corpus as any run" if far > FAR else "" for far in far_B]
        expected, half = self._select_targets(mean_BT), self._select_targets(half_BT)
        return NatsTable(expected, expected - half, expected + half, tuple(outside), self.unit)

    def rise(self, weights: Weights, weights_T: F64, *, cautious: bool = False) -> F64:
        """How fast the weighted change rises as one subset takes in a row, (N,), but for what all rows share."""
        corpus = self.featurizer.corpus()

        def value(features: SubsetFeatures) -> F64:
            mean_BT, half_BT = self._change(features, corpus)
            return np.asarray(
                np.nan_to_num(self._select_targets(mean_BT - half_BT if cautious else mean_BT)) @ weights_T
            )

        return self.featurizer.row_contributions(self.process.slope(self.featurizer.features(weights), value), weights)

    def _change(self, features: SubsetFeatures, corpus: SubsetFeatures) -> tuple[F64, F64]:
        """Of the tasks learned: change against the corpus, and half of the interval."""
        mean_BT, spread_BT = self.process.change(features, corpus)
        return mean_BT, self.process.quantile(COVERAGE) * spread_BT

    def _select_targets(self, predicted_BT: F64) -> F64:
        """The targets asked out of the tasks learned; nan where a target has no runs."""
        out_BT = np.full((len(predicted_BT), len(self.targets)), np.nan)
        for target, column in self.columns.items():
            out_BT[:, self.targets.index(target)] = predicted_BT[:, column]
        return out_BT


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """How well a few runs, drawn at random, rank the runs that were not drawn: rank correlation with what came out.

    Attributes:
        counts: runs that were learned from, (K,); 0: relevance alone. Every count ranks the same runs.
        rho_KT: mean over the draws, by task as in `OutcomePredictor.columns`.
        spread_KT: standard deviation over the draws.
    """

    counts: tuple[int, ...]
    rho_KT: F64
    spread_KT: F64


def learning_curve(expected: OutcomePredictor) -> LearningCurve | None:
    """Would more runs help? None with too few runs to leave some out. Learns from 32 of them at most: seconds."""
    runs, utility_RST = expected.runs, expected.utility_RST
    counts = [k for k in COUNTS if k + LEFT_OUT[0] <= len(runs)]
    if not counts:
        return None
    realized_RT = np.nanmean(utility_RST, axis=1)
    rho_KDT = np.full((1 + len(counts), DRAWS, realized_RT.shape[1]), np.nan)
    for d in range(DRAWS):
        order = stream(0, "learning curve", len(runs), d).permutation(len(runs))
        rest = order[counts[-1] :][: LEFT_OUT[1]]
        rho_KDT[0, d] = spearman(runs.relevance_BT[rest], realized_RT[rest])
        for place, k in enumerate(counts, start=1):
            if np.ptp(realized_RT[order[:k]], axis=0).min() > 0:  # nothing is learned from runs that are all alike
                process = GaussianProcess.fit(runs.take(order[:k]), utility_RST[order[:k]])
                rho_KDT[place, d] = spearman(process.predict(runs.take(rest))[0], realized_RT[rest])
    known = np.flatnonzero(np.isfinite(rho_KDT).all(axis=(1, 2)))
    rho_KDT = rho_KDT[known]
    return LearningCurve(tuple([0, *counts][k] for k in known), rho_KDT.mean(axis=1), rho_KDT.std(axis=1, ddof=1))


def fit_outcomes(
    predictor: Predictor, artifact: ArtifactReader, runs: TrainingRuns | RunTable | Path | str
) -> OutcomePredictor:
    """Learn from runs what a predictor's changes are in the runs' own unit.

    Raises:
        ProtocolLeakError: the environment is held out, or all of the targets are.
        RunsError: runs and artifact have no target or no label in common, or there are too few runs.
    """
    environment = bind_runs(artifact, runs)
    if environment.role != "dev":
        raise ProtocolLeakError(
            f"{environment.path}: is held out; intervals are fitted on development environments only, or nothing is "
            "left to test them on"
        )
    alignment = Alignment.from_runs(environment, artifact)
    common = {target: theirs for target, theirs in alignment.run_targets.items() if target in predictor.units.targets}
    if not common:
        raise RunsError(
            f"{environment.path}: has targets {list(environment.targets)}, asked are "
            f"{list(predictor.units.targets)}; none is common to both"
        )
    targets = {
        target: theirs for target, theirs in alignment.run_targets.items() if environment.role_of(theirs) == "dev"
    }
    requested = {target: theirs for target, theirs in common.items() if target in targets}
    if not requested:
        raise ProtocolLeakError(
            f"{environment.path}: intervals were asked for {list(common.values())}, which are held out; they are "
            "fitted on development targets only"
        )
    utility_RST = environment.task_utilities(list(targets.values()))
    # a target whose runs all came out the same teaches nothing, and is refused only where it is asked
    teaches_T = np.ptp(np.nanmean(utility_RST, axis=1), axis=0) > 0
    teaches_T |= np.array([name in requested for name in targets])
    targets = {target: theirs for (target, theirs), teaches in zip(targets.items(), teaches_T, strict=True) if teaches}
    utility_RST = utility_RST[:, :, teaches_T]
    runs_predictor = Predictor.from_artifact(artifact, predictor.protocol, list(targets), sketches=SIMILAR)
    labels = dict.fromkeys([*([environment.label] if environment.label else []), *suggest_labels(artifact)])
    featurizer = SubsetFeaturizer.from_predictor(runs_predictor, artifact, tuple(labels))
    parts = [featurizer.features(block.weights) for block in alignment.blocks]
    whole_ST = environment.task_reference(list(targets.values()))
    if len(whole_ST) == utility_RST.shape[1]:
        parts.append(featurizer.corpus())
        utility_RST = np.concatenate([utility_RST, whole_ST[None]])
    features = SubsetFeatures.concatenate(parts)
    centred_RT = features.relevance_BT - features.relevance_BT.mean(axis=0)
    rise_T = (centred_RT * np.nanmean(utility_RST, axis=1)).sum(axis=0)  # covariance over the runs
    notes = [*environment.notes]
    if predictor.protocol.chosen_on(alignment.runs_fingerprint):
        notes.append(f"the protocol was selected on {environment.name}: its intervals are somewhat too narrow")
    notes += [
        f"{name}: what came out does not rise with the prediction; the runs correct it"
        for name, rise in zip(targets, rise_T, strict=True)
        if rise < 0 and name in requested
    ]
    if missing := [name for name in predictor.units.targets if name not in requested]:
        notes.append(f"no runs for {', '.join(missing)}: no expected change")
    unit, (measured, models) = environment.unit, environment.measurement
    return OutcomePredictor(
        unit,
        f"{unit}, {unit}_low, {unit}_high: change in {measured}, {COVERAGE:.0%} interval, {models}",
        tuple(notes),
        predictor.units.targets,
        featurizer,
        GaussianProcess.fit(features, utility_RST),
        features,
        utility_RST,
    )


def _indicators(codes_N: I32, n_slices: int) -> RowSums:
    """Sums of which say how many rows of each slice a subset has."""
    identity_GG = np.eye(n_slices, dtype=np.float32)
    step = 1 << 16
    return RowSums(
        lambda: ((at, identity_GG[codes_N[at : at + step]]) for at in range(0, len(codes_N), step)),
        len(codes_N),
        n_slices,
    )
