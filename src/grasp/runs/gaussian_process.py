"""The learned predictor: what runs teach beyond relevance. Arrays in, arrays out; start with `GaussianProcess.fit`.

What a subset S does for a task is, in the runs' own unit,

    utility(S) = level + s (r(S) + g(S) + noise),

r the prediction without runs, brought to standard deviation 1 over the runs; s > 0 the task's scale; the level is free.
g is a Gaussian process, a sum of independent parts, and each says in which way r may be wrong:

    slope      linear in r: this task listens more or less to its relevance
    kernels    linear in each relevance kernel by itself: another kernel counts for this model
    tasks      linear in the predictions for all tasks: what helps one task helps this one
    sketch     linear in the mean sketch: similar rows err alike
    straight   linear in the shares of the slices of every label: the only part that keeps its direction far away
    linear     linear in f(share) = log(share + c), of the slices of every label
    additive   a smooth curve in each f(share): value saturates
    joint      a smooth function of all f(share) together: slices stand in for each other

How much each part counts (its variance), the lengths of the curves, c and the noise are one set of numbers for all
tasks. They maximise the marginal likelihood times wide log-normal priors, s and the level being eliminated exactly.
Each part is divided by its own mean variance over the runs, so that a prior means a share of what varies. Given these
numbers everything is in closed form. With no relevance r = 0, and it is a regression on shares; far from the runs what
they taught about curves fades, their straight trend goes on, and the interval widens.

Extrapolation errs by what no part models, and the farther the more. Beyond the root mean square distance of the runs'
shares from their mean, the standard deviation of a prediction is multiplied by the distance over it: then intervals of
90 % hold about 90 % of the most extreme mixtures, which were left out (experiments/extrapolation).

Noise has two variances: of a subset (what no part explains), and of a training run, which runs of one subset with
several seeds tell apart: their squares within a subset enter the likelihood, and a mean over n seeds has 1 / n of it.

Shape letters: B subsets (n of them runs), G slices of all labels, T tasks, M relevance kernels, D sketch width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from scipy.optimize import minimize
from scipy.special import stdtrit

from grasp.arrays import F64, Integers, ratio
from grasp.errors import RunsError, ShapeError
from grasp.seeds import stream

FEWEST = 2  # different subsets that anything is learned from
ALIKE_DIGITS = 9  # of features of subsets that count as one
JITTER = 1e-6
TINY = 1e-12
TUNED_ON = 256  # runs at most that the hyperparameters are fitted to; all of them are learned from
BLOCK = 4_096  # subsets predicted at once
FARTHEST = 4.0  # standard deviations of its prior that a hyperparameter may go
LARGEST = 3.0  # logarithm of the variance of a curve; K stays well conditioned
TESTED = 4.0  # root mean square distances of the runs, up to which intervals were tested: experiments/extrapolation
STEP = 1e-4  # of the difference quotients: of lengths and c, and of features against their spread
WITHIN_SLICE_WEIGHT, WITHIN_SLICE_SD = (
    0.4,
    0.4,
)  # what relevance within a slice is worth against that of the slice: experiments/exposure
SHAPES = ("c", "additive length", "joint length")
CURVES = ("straight", "linear", "additive", "joint")
# Mean and standard deviation of the logarithm. Variances are against that of r (1); lengths against the spread of
# f(share) over the runs; c against an even share.
PRIORS = {
    "c": (np.log(0.05), 1.5),
    "additive length": (np.log(1.2), 0.7),
    "joint length": (0.0, 0.7),
    "straight": (-8.0, 4.0),  # absent, or most of what varies
    "linear": (-3.0, 1.5),
    "additive": (-3.0, 1.5),
    "joint": (-3.0, 1.5),
    "slope": (-3.0, 1.0),
    "kernels": (-3.5, 1.5),
    "tasks": (-3.5, 1.5),
    "sketch": (-3.5, 1.5),
    "noise": (0.0, 2.0),
    "seed noise": (0.0, 2.0),
}
# The likelihood often has two local maxima, where the trend is straight and where it is logarithmic. The first search
# starts at the mean of the prior, the second where the trend is straight: so many standard deviations from there.
STRAIGHT_START = {"straight": 2.0, "linear": -1.5, "additive": -1.5, "joint": -1.5, "noise": -1.5}


# ------------------------------------------------------------------------------------------- what is known of a subset


@dataclass(frozen=True, slots=True)
class SubsetFeatures:
    """What is known of B subsets before any run: means over the rows that they retain.

    Attributes:
        share_BG: of the slices of every label, the labels side by side; no columns: no labels.
        relevance_BT: predicted change of each task; 0 for a task that is learned from runs alone.
        kernel_BTM: the mean of each relevance kernel.
        sketch_BD: the mean sketch.
        within_BT: what rows were chosen by within slices, as a part of the predicted change, before it is made less.
    """

    share_BG: F64
    relevance_BT: F64
    kernel_BTM: F64
    sketch_BD: F64
    within_slice_BT: F64

    @classmethod
    def from_shares(cls, share_BG: F64, n_tasks: int) -> Self:
        """Of mixtures without an artifact."""
        n = len(share_BG)
        share_BG, nothing_BT = np.asarray(share_BG, np.float64), np.zeros((n, n_tasks))
        return cls(share_BG, nothing_BT, np.zeros((n, n_tasks, 0)), np.zeros((n, 0)), nothing_BT)

    @classmethod
    def concatenate(cls, parts: "Sequence[SubsetFeatures]") -> Self:
        """Of several blocks, one after the other."""
        return cls(*map(np.concatenate, zip(*(part._arrays() for part in parts), strict=True)))

    def __len__(self) -> int:
        return len(self.share_BG)

    def _arrays(self) -> list[F64]:
        return [getattr(self, field.name) for field in fields(self)]

    def flat(self) -> F64:
        """All features of a subset side by side, (B, P)."""
        return np.concatenate([array.reshape(len(self), -1) for array in self._arrays()], axis=1)

    def unflatten(self, flat_BP: F64) -> "SubsetFeatures":
        """The opposite, for features of the same shapes as these."""
        shapes = [array.shape[1:] for array in self._arrays()]
        parts = np.split(flat_BP, np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1], axis=1)
        return SubsetFeatures(*(part.reshape(len(part), *shape) for part, shape in zip(parts, shapes, strict=True)))

    def take(self, index: Integers | slice) -> "SubsetFeatures":
        """Some of the subsets."""
        return SubsetFeatures(*(array[index] for array in self._arrays()))


@dataclass(frozen=True, slots=True)
class FeatureScales:
    """Brings features to one scale: over the runs they have mean 0 and mean square 1.

    Beyond the runs a prediction r counts by its logarithm: farthest (1 + log(|r| / farthest)), of its sign. Choosing
    goes there by what looks best, and what came true of it along a straight line was half: see experiments/exposure.
    Shares stay as they are. Rows chosen within slices, more than those of any run, leave a standard deviation.
    """

    relevance_T: tuple[F64, F64]  # mean, and one over the spread; so the others
    kernel_TM: tuple[F64, F64]
    sketch_D: tuple[F64, F64]  # one spread for all, as for the shares
    share_G: tuple[F64, F64]
    farthest_T: F64  # largest prediction of a run, whatever its sign
    within_slice_T: F64  # the same of what its rows were chosen by within slices

    @classmethod
    def from_runs(cls, runs: SubsetFeatures) -> Self:
        relevance, kernels = (
            (values.mean(axis=0), ratio(1.0, values.std(axis=0), least=TINY))
            for values in (runs.relevance_BT, runs.kernel_BTM)
        )
        sketch, share = _mean_and_scale(runs.sketch_BD), _mean_and_scale(runs.share_BG)
        farthest_T, within_slice_T = (
            np.abs(values).max(axis=0, initial=0.0) for values in (runs.relevance_BT, runs.within_slice_BT)
        )
        return cls(relevance, kernels, sketch, share, farthest_T, within_slice_T)

    def compress(self, relevance_BT: F64) -> F64:
        """Predictions as they are among the runs, and less and less of them beyond."""
        far_BT = np.maximum(np.abs(relevance_BT) / np.maximum(self.farthest_T, TINY), 1.0)
        return np.asarray(relevance_BT / far_BT * (1.0 + np.log(far_BT)))

    def extrapolation_factor(self, share_BG: F64) -> F64:
        """Distance of shares from their mean over the runs, (B, 1): 1 is the runs' root mean square, and the least."""
        mean_G, inverse = self.share_G
        return np.asarray(np.maximum(inverse * np.linalg.norm(share_BG - mean_G, axis=1, keepdims=True), 1.0))

    def step(self, at: SubsetFeatures, part: float) -> SubsetFeatures:
        """A small part of what each feature varies by over the runs; 0 where it does not vary."""
        spreads = [ratio(1.0, inverse, least=TINY) for _, inverse in (self.relevance_T, self.kernel_TM, self.sketch_D)]
        relevance_1T, kernel_1TM, sketch = (part * spread[None] for spread in spreads)
        share_BG = part * (at.share_BG + 1 / max(at.share_BG.shape[1], 1))
        return SubsetFeatures(share_BG, relevance_1T, kernel_1TM, np.full_like(at.sketch_BD, sketch), relevance_1T)

    def transform(self, features: SubsetFeatures) -> SubsetFeatures:
        (mean_T, inverse_T), (mean_TM, inverse_TM), (mean_D, inverse) = self.relevance_T, self.kernel_TM, self.sketch_D
        beyond_BT = WITHIN_SLICE_SD * np.maximum(np.abs(features.within_slice_BT) - self.within_slice_T, 0.0)
        less_BT, more_BT = features.relevance_BT - beyond_BT, features.relevance_BT + beyond_BT
        return SubsetFeatures(
            features.share_BG,
            (self.compress(features.relevance_BT) - mean_T) * inverse_T,
            (features.kernel_BTM - mean_TM) * inverse_TM,
            (features.sketch_BD - mean_D) * inverse,
            (self.compress(more_BT) - self.compress(less_BT)) / 2 * inverse_T,
        )


def _mean_and_scale(values_nP: F64) -> tuple[F64, F64]:
    """Mean of vectors, (P,), and one over their root mean square distance from it."""
    return values_nP.mean(axis=0), ratio(1.0, np.sqrt(values_nP.var(axis=0).sum()), least=TINY)


# ------------------------------------------------------------------------------- covariances of g, before any run


@dataclass(frozen=True, slots=True)
class Curves:
    """The parts of g that see shares, for one c and one pair of lengths, each with mean variance 1 over the runs."""

    c: float
    mean_G: F64  # shares, over the runs
    centre_G: F64  # mean of log(share + c) over the runs: where c is large, it is large against their differences
    spread: float  # its standard deviation
    lengths: tuple[float, float]  # additive, joint
    units: dict[str, float]

    @classmethod
    def from_shares(cls, share_nG: F64, shape: Sequence[float] | F64) -> Self:
        """Curves for runs.

        Args:
            share_nG: of the runs.
            shape: logarithms of c, the additive length and the joint length.
        """
        c = float(np.exp(shape[0])) / max(share_nG.shape[1], 1)
        seen_nG = np.log(share_nG + c)
        spread = float(np.sqrt(seen_nG.var(axis=0).mean())) if share_nG.size else 0.0
        lengths = (float(np.exp(shape[1])), float(np.exp(shape[2])))
        spread = spread if spread > TINY else 1.0
        bare = cls(c, share_nG.mean(axis=0), seen_nG.mean(axis=0), spread, lengths, dict.fromkeys(CURVES, 1.0))
        variance = {k: float(np.diag(v).mean() - v.mean()) for k, v in bare.between(share_nG, share_nG).items()}
        return replace(bare, units={k: 1.0 / v if v > TINY else 0.0 for k, v in variance.items()})

    def seen(self, share_BG: F64) -> F64:
        """log(share + c), less its mean over the runs, over its spread."""
        return np.asarray((np.log(share_BG + self.c) - self.centre_G) / self.spread)

    def between(self, share_BG: F64, other_share_nG: F64) -> dict[str, F64]:
        """(B, n) covariance of two sets of subsets, by part."""
        seen_BG, other_nG = self.seen(share_BG), self.seen(other_share_nG)
        n_slices = max(seen_BG.shape[1], 1)
        additive_Bn = np.zeros((len(seen_BG), len(other_nG)))
        square_Bn = np.zeros_like(additive_Bn)
        for g in range(seen_BG.shape[1]):
            part_Bn = (seen_BG[:, g, None] - other_nG[None, :, g]) ** 2
            square_Bn += part_Bn
            part_Bn *= -0.5 / self.lengths[0] ** 2
            additive_Bn += np.exp(part_Bn, out=part_Bn)
        square_Bn *= -0.5 / (n_slices * self.lengths[1] ** 2)
        parts = {
            "straight": (share_BG - self.mean_G) @ (other_share_nG - self.mean_G).T,
            "linear": seen_BG @ other_nG.T / n_slices,
            "additive": additive_Bn / n_slices,
            "joint": np.exp(square_Bn, out=square_Bn),
        }
        return {name: part * self.units[name] for name, part in parts.items()}

    def variance(self, share_BG: F64) -> dict[str, F64]:
        """(B,) variance of each part at subsets."""
        seen_BG = self.seen(share_BG)
        ones_B = np.ones(len(seen_BG))
        linear_B = np.einsum("bg,bg->b", seen_BG, seen_BG) / max(seen_BG.shape[1], 1)
        straight_B = ((share_BG - self.mean_G) ** 2).sum(axis=1)
        variances = {"straight": straight_B, "linear": linear_B, "additive": ones_B, "joint": ones_B}
        return {name: part * self.units[name] for name, part in variances.items()}


def _linear_parts(subsets: SubsetFeatures, runs: SubsetFeatures) -> dict[str, F64]:
    """Covariances that are linear in what is known, by part: (1 or T, B, n). Both are measured by one ruler."""
    n_tasks, n_kernels = subsets.relevance_BT.shape[1], max(subsets.kernel_BTM.shape[2], 1)
    slope_TBn = np.einsum("bt,nt->tbn", subsets.relevance_BT, runs.relevance_BT)
    return {
        "slope": slope_TBn,
        "kernels": np.einsum("btm,ntm->tbn", subsets.kernel_BTM, runs.kernel_BTM) / n_kernels,
        "tasks": slope_TBn.sum(axis=0, keepdims=True) / max(n_tasks, 1),
        "sketch": (subsets.sketch_BD @ runs.sketch_BD.T)[None],
    }


def _linear_variances(subsets: SubsetFeatures) -> dict[str, F64]:
    """The same of each subset with itself: (1 or T, B)."""
    slope_TB = (subsets.relevance_BT**2).T
    return {
        "slope": slope_TB,
        "kernels": np.einsum("btm,btm->tb", subsets.kernel_BTM, subsets.kernel_BTM)
        / max(subsets.kernel_BTM.shape[2], 1),
        "tasks": slope_TB.mean(axis=0, keepdims=True),
        "sketch": np.einsum("bd,bd->b", subsets.sketch_BD, subsets.sketch_BD)[None],
    }


def _covariance(numbers: Mapping[str, float], curves: Curves, subsets: SubsetFeatures, other: SubsetFeatures) -> F64:
    """(1 or T, B, n) covariance of g between two sets of measured subsets."""
    curved = curves.between(subsets.share_BG, other.share_BG)
    return _add_parts(numbers, _linear_parts(subsets, other) | {name: part[None] for name, part in curved.items()})


def _add_parts(numbers: Mapping[str, float], parts: Mapping[str, F64]) -> F64:
    """The parts by their variances; one copy where no part differs between tasks."""
    nothing = np.zeros((1, *parts["tasks"].shape[1:])) if "tasks" in parts else np.zeros((1, 1, 1))
    return np.asarray(sum((numbers[name] * part for name, part in parts.items() if numbers[name]), nothing))


# ---------------------------------------------------------------------------------------------------- what runs add


@dataclass(frozen=True, slots=True)
class GaussianProcess:
    """Runs learned from. Made by `fit`; `predict` and `change` say what any subset does.

    Attributes:
        numbers: the hyperparameters, by the names of PRIORS; the variance of a part that sees nothing is 0.
        runs: the different subsets that were learned from, measured by the ruler.
        scale_T: s, in the unit of the utilities.
        range_T: largest minus smallest utility of the runs.
    """

    hyperparameters: dict[str, float]
    runs: SubsetFeatures
    scale_T: F64
    range_T: F64
    freedom: float
    _scales: FeatureScales
    _curves: Curves
    _solved: "_Solution"
    _mean_T: F64  # of the utilities, taken off before
    _rest_nT: F64  # P (u y - r)
    _level_T: F64

    @classmethod
    def fit(cls, runs: SubsetFeatures, utility_nST: F64) -> Self:
        """Learn from runs. Seeds are averaged; how far they differ says how much of the noise is that of training.

        What a seed adds to all runs alike is taken off, where every run has every seed.

        Args:
            runs: of n different subsets.
            utility_nST: of each with each seed, nan where it has fewer seeds; higher is better.
        Raises:
            ShapeError: numbers of runs or tasks differ.
            RunsError: fewer than 2 different subsets, or runs whose utilities are all the same for a task.
        """
        n_runs, n_tasks = utility_nST.shape[0], utility_nST.shape[2]
        if runs.relevance_BT.shape != (n_runs, n_tasks):
            raise ShapeError(f"learned: utilities {utility_nST.shape}, features of {runs.relevance_BT.shape}")
        if not np.isnan(utility_nST).any():
            utility_nST = utility_nST - utility_nST.mean(axis=0) + utility_nST.mean(axis=(0, 1))
        seeds_n = (~np.isnan(utility_nST[:, :, 0])).sum(axis=1).astype(np.float64)
        utility_nT = np.nanmean(utility_nST, axis=1)
        within_slice_T = np.nansum((utility_nST - utility_nT[:, None]) ** 2, axis=(0, 1))
        different = len(np.unique(runs.flat().round(ALIKE_DIGITS), axis=0))
        if different < FEWEST:
            raise RunsError(
                f"learning from runs: got {different} different subset(s) in {n_runs} run(s), expected {FEWEST} or more"
            )
        if (np.ptp(utility_nT, axis=0) == 0).any():
            raise RunsError("learning from runs: all of them came out the same; expected runs that differ")
        scales = FeatureScales.from_runs(runs)
        mean_T = utility_nT.mean(axis=0)
        data = _Data(scales.transform(runs), utility_nT - mean_T, seeds_n, within_slice_T, float((seeds_n - 1).sum()))
        numbers = _MarginalLikelihood(data.sample(TUNED_ON)).maximise()
        curves = Curves.from_shares(data.runs.share_BG, [np.log(numbers[name]) for name in SHAPES])
        solved = _Solution.solve(
            _covariance(numbers, curves, data.runs, data.runs) + data.noise_nn(numbers), data, numbers
        )
        error_nT = data.utility_nT * solved.u_T - data.runs.relevance_BT
        return cls(
            numbers,
            data.runs,
            1.0 / solved.u_T,
            np.ptp(utility_nT, axis=0),
            n_runs - 1 + data.freedom,
            scales,
            curves,
            solved,
            mean_T,
            _apply(solved.inverse_Gnn, error_nT),
            np.einsum("gn,nt->t" if len(solved.level_Gn) == 1 else "tn,nt->t", solved.level_Gn, error_nT),
        )

    def predict(self, features: SubsetFeatures) -> tuple[F64, F64]:
        """Utility of subsets and its standard deviation, (B, T) each, for the mean of many seeds."""
        means, spreads = [], []
        for subsets in self._measured(features):
            cross_Gbn = _covariance(self.hyperparameters, self._curves, subsets, self.runs)
            mean_bT = self._level_T + subsets.relevance_BT + _apply(cross_Gbn, self._rest_nT)
            means.append(self._mean_T + self.scale_T * mean_bT)
            variance_bG = self._unexplained(subsets, cross_Gbn) + self.hyperparameters["noise"]
            variance_bG *= self._scales.extrapolation_factor(subsets.share_BG) ** 2
            spreads.append(self.scale_T * np.sqrt(variance_bG + subsets.within_slice_BT**2))
        return np.concatenate(means), np.concatenate(spreads)

    def relative_uncertainty(self, features: SubsetFeatures, coverage: float) -> F64:
        """How little runs say of subsets, (B, T); above 1 nothing that was tested.

        Half of the interval of the expected utility, without noise, over the range of all runs: above 1 they leave more
        open than they differ by. Or the distance from the runs over TESTED, if that is larger.
        """
        parts = []
        for subsets in self._measured(features):
            cross_Gbn = _covariance(self.hyperparameters, self._curves, subsets, self.runs)
            edge_b1 = self._scales.extrapolation_factor(subsets.share_BG)
            spread_bT = np.sqrt(self._unexplained(subsets, cross_Gbn) + subsets.within_slice_BT**2) * edge_b1
            open_bT = self.quantile(coverage) * self.scale_T * spread_bT / self.range_T
            parts.append(np.maximum(open_bT, edge_b1 / TESTED))
        return np.concatenate(parts)

    def relative_uncertainty_after(
        self, subset: SubsetFeatures, runs: SubsetFeatures, task: int, coverage: float
    ) -> F64:
        """Return `relative_uncertainty` of a subset for one task after one more run, (B,), for each candidate run.

        Hyperparameters and the range of the results stay as they are.
        """
        _, cover_bb, noise = self.joint(SubsetFeatures.concatenate([subset, runs]), task)
        left_B = cover_bb[0, 0] - cover_bb[0, 1:] ** 2 / (np.maximum(np.diag(cover_bb)[1:], 0.0) + noise)
        with_one = (np.concatenate([self.runs.share_BG, run_G[None]]) for run_G in runs.share_BG)
        scales_by_run = (replace(self._scales, share_G=_mean_and_scale(share_nG)) for share_nG in with_one)
        edge_B = np.array([float(scales.extrapolation_factor(subset.share_BG)[0, 0]) for scales in scales_by_run])
        open_B = self.quantile(coverage) * edge_B * np.sqrt(np.maximum(left_B, 0.0)) / self.range_T[task]
        return np.asarray(np.maximum(open_B, edge_B / TESTED))

    def joint(self, features: SubsetFeatures, task: int) -> tuple[F64, F64, float]:
        """Mean (B,) and covariance (B, B) of one task at subsets, all together, and the variance of a run's noise."""
        subsets, solved = self._scales.transform(features), self._solved
        g = task if len(solved.inverse_Gnn) > 1 else 0
        cross_bn = _covariance(self.hyperparameters, self._curves, subsets, self.runs)[g]
        between_bb = _covariance(self.hyperparameters, self._curves, subsets, subsets)[g]
        level_b = cross_bn @ solved.level_Gn[g]
        covariance_bb = between_bb - cross_bn @ solved.inverse_Gnn[g] @ cross_bn.T
        covariance_bb += 1 / solved.mass_G[g] - level_b[:, None] - level_b
        mean_b = self._level_T[task] + subsets.relevance_BT[:, task] + cross_bn @ self._rest_nT[:, task]
        scale = float(self.scale_T[task])
        noise = self.hyperparameters["noise"] + self.hyperparameters["seed noise"] + JITTER
        return self._mean_T[task] + scale * mean_b, scale**2 * covariance_bb, scale**2 * noise

    def change(self, features: SubsetFeatures, corpus: SubsetFeatures) -> tuple[F64, F64]:
        """Utility of subsets minus that of the corpus, and its standard deviation, (B, T) each.

        What no part explains grows with the distance from the corpus as the parts do, beyond the runs as well: at the
        distance of the mean run it is the noise of two.

        Args:
            corpus: the one subset that changes are counted from.
        """
        whole = self._scales.transform(corpus)
        whole_G1n = _covariance(self.hyperparameters, self._curves, whole, self.runs)
        far_G = self._difference_variance(self.runs, whole).mean(axis=0)
        means, spreads = [], []
        for subsets in self._measured(features):
            cross_Gbn = _covariance(self.hyperparameters, self._curves, subsets, self.runs) - whole_G1n
            apart_bG = self._difference_variance(subsets, whole)
            variance_bG = np.maximum(apart_bG - _explained(cross_Gbn, self._solved.inverse_Gnn), 0.0)
            variance_bG += 2 * self.hyperparameters["noise"] * apart_bG / np.maximum(far_G, TINY)
            mean_bT = subsets.relevance_BT - whole.relevance_BT + _apply(cross_Gbn, self._rest_nT)
            means.append(self.scale_T * mean_bT)
            variance_bG *= self._scales.extrapolation_factor(subsets.share_BG) ** 2
            spreads.append(self.scale_T * np.sqrt(variance_bG + subsets.within_slice_BT**2))
        return np.concatenate(means), np.concatenate(spreads)

    def slope(self, at: SubsetFeatures, value: Callable[[SubsetFeatures], F64]) -> SubsetFeatures:
        """How fast a function of subsets rises with each feature of one subset, by difference quotients."""
        step_1P = self._scales.step(at, STEP).flat()
        rise_P = value(at.unflatten(at.flat() + np.diag(step_1P[0]))) - value(at)
        return at.unflatten(ratio(rise_P, step_1P))

    def reach(self, features: SubsetFeatures, corpus: SubsetFeatures) -> F64:
        """How far subsets are from the corpus, (B,): 1 is the run that is farthest, by the parts that were learned."""
        whole = self._scales.transform(corpus)
        most = float(self._difference_variance(self.runs, whole).mean(axis=1).max())
        parts = [self._difference_variance(subsets, whole).mean(axis=1) for subsets in self._measured(features)]
        return np.sqrt(np.concatenate(parts) / max(most, TINY))

    def quantile(self, coverage: float) -> float:
        """Standard deviations on either side of the mean that hold `coverage`: Student's, the scale being estimated."""
        return float(stdtrit(self.freedom, 0.5 + coverage / 2))

    def _measured(self, features: SubsetFeatures) -> Iterator[SubsetFeatures]:
        for start in range(0, len(features), BLOCK):
            yield self._scales.transform(features.take(slice(start, start + BLOCK)))

    def _unexplained(self, subsets: SubsetFeatures, cross_Gbn: F64) -> F64:
        """(B, 1 or T) variance of level and g after the runs, by the covariances of measured subsets with them."""
        mass_G = self._solved.mass_G
        level_bG = np.einsum("gbn,gn->bg", cross_Gbn, self._solved.level_Gn)
        variance_bG = (
            self._prior_variance(subsets) - _explained(cross_Gbn, self._solved.inverse_Gnn) + 1 / mass_G - 2 * level_bG
        )
        return np.asarray(np.maximum(variance_bG, 0.0))

    def _prior_variance(self, subsets: SubsetFeatures) -> F64:
        """(B, 1 or T) variance of g before any run."""
        parts = _linear_variances(subsets) | {k: v[None] for k, v in self._curves.variance(subsets.share_BG).items()}
        return np.asarray(_add_parts(self.hyperparameters, parts).T)

    def _difference_variance(self, subsets: SubsetFeatures, whole: SubsetFeatures) -> F64:
        """(B, 1 or T) variance of the difference of g to one subset, before any run."""
        shared_Gb1 = _covariance(self.hyperparameters, self._curves, subsets, whole)
        return np.asarray(
            np.maximum(self._prior_variance(subsets) + self._prior_variance(whole) - 2 * shared_Gb1[:, :, 0].T, 0.0)
        )


# --------------------------------------------------------------------------------------------- hyperparameters


@dataclass(frozen=True, slots=True)
class _Data:
    """Measured runs and what came out; utilities have mean 0."""

    runs: SubsetFeatures
    utility_nT: F64
    seeds_n: F64
    within_slice_T: F64
    freedom: float  # of `within`

    def sample(self, most: int) -> "_Data":
        """Some of the runs, the same at every call."""
        if len(self.runs) <= most:
            return self
        chosen = np.sort(stream(0, "learned", "sample", len(self.runs)).permutation(len(self.runs))[:most])
        fraction = most / len(self.runs)
        utility_nT = self.utility_nT[chosen]
        return _Data(
            self.runs.take(chosen),
            utility_nT - utility_nT.mean(axis=0),
            self.seeds_n[chosen],
            self.within_slice_T * fraction,
            self.freedom * fraction,
        )

    def noise_nn(self, numbers: dict[str, float]) -> F64:
        """What noise adds to the covariance of the runs."""
        return np.asarray(np.diag(numbers["noise"] + numbers["seed noise"] / self.seeds_n + JITTER))


@dataclass(frozen=True, slots=True)
class _Solution:
    """What follows from the covariance K of the runs in closed form.

    A free level is eliminated by P = K^-1 - K^-1 1 1'K^-1 / (1'K^-1 1), which stands where K^-1 stood, and adds
    log(1'K^-1 1) to log det K (restricted likelihood). With q = y'P y, p = r'P y and m observations the logarithm of
    the likelihood is m log u - q u^2 / 2 + p u - r'P r / 2 - (log det) / 2 by u = 1 / s; it is largest where
    q u^2 - p u - m = 0.
    """

    inverse_Gnn: F64  # P; one copy where K is the same for all tasks
    level_Gn: F64  # K^-1 1 / (1'K^-1 1): weights of the runs in the level
    mass_G: F64  # 1'K^-1 1
    u_T: F64
    likelihood: float  # its logarithm, all tasks together

    @classmethod
    def solve(cls, k_Gnn: F64, data: _Data, numbers: dict[str, float]) -> Self:
        r_nT, y_nT = data.runs.relevance_BT, data.utility_nT
        inverse_Gnn = np.linalg.inv(k_Gnn)
        ones_Gn = inverse_Gnn.sum(axis=2)
        mass_G = ones_Gn.sum(axis=1)
        level_Gn = ones_Gn / mass_G[:, None]
        projected_Gnn = inverse_Gnn - ones_Gn[:, :, None] * level_Gn[:, None, :]
        solved_nT = _apply(projected_Gnn, y_nT)
        q_T = np.einsum("nt,nt->t", y_nT, solved_nT)
        p_T = np.einsum("nt,nt->t", r_nT, solved_nT)
        log_det_G = np.linalg.slogdet(k_Gnn)[1] + np.log(mass_G)
        if data.freedom:
            q_T = q_T + data.within_slice_T / numbers["seed noise"]
            log_det_G = log_det_G + data.freedom * np.log(numbers["seed noise"])
        count = len(y_nT) - 1 + data.freedom
        u_T = (p_T + np.sqrt(p_T**2 + 4 * q_T * count)) / (2 * q_T)
        fixed_T = np.einsum("nt,nt->t", r_nT, _apply(projected_Gnn, r_nT))
        value_T = count * np.log(u_T) - 0.5 * q_T * u_T**2 + p_T * u_T - 0.5 * fixed_T
        log_det = 0.5 * float(log_det_G.sum()) * len(u_T) / len(k_Gnn)
        return cls(projected_Gnn, level_Gn, mass_G, u_T, float(value_T.sum()) - log_det)


class _MarginalLikelihood:
    """Marginal likelihood of the runs by the logarithms of the hyperparameters."""

    def __init__(self, data: _Data) -> None:
        runs = data.runs
        self.data = data
        self.linear = {
            name: part for name, part in _linear_parts(runs, runs).items() if np.abs(part).max(initial=0.0) > TINY
        }
        self.has_curves = bool(runs.share_BG.size) and bool(np.ptp(runs.share_BG, axis=0).max() > 0)
        names = [*(SHAPES + CURVES if self.has_curves else ()), *self.linear, "noise"]
        self.names = (*names, *(("seed noise",) if data.freedom else ()))
        self.prior = np.array([PRIORS[name] for name in self.names])
        # Share of the tasks that are news: 1 if their utilities are uncorrelated over the runs, 1 / T if all agree. One
        # model is scored on all tasks, so its noise is in all of them; counted T times it would pass for a pattern.
        unit_nT = data.utility_nT * ratio(1.0, np.sqrt((data.utility_nT**2).sum(axis=0)), least=TINY)
        self.worth = float(unit_nT.shape[1] / np.maximum(((unit_nT.T @ unit_nT) ** 2).sum(), 1.0))

    def maximise(self) -> dict[str, float]:
        start, spread = self.prior.T
        most = np.where([name in CURVES for name in self.names], LARGEST, np.inf)
        bounds = list(zip(start - FARTHEST * spread, np.minimum(start + FARTHEST * spread, most), strict=True))
        starts: list[F64] = [start]
        if self.has_curves:
            starts.append(start + spread * np.array([STRAIGHT_START.get(name, 0.0) for name in self.names]))
        fits = [
            minimize(self.loss, at, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40})
            for at in starts
        ]
        best_fit = min(fits, key=lambda result: float(result.fun))
        fitted = dict(zip(self.names, np.exp(best_fit.x).tolist(), strict=True))
        return {name: fitted.get(name, 1.0 if name in SHAPES else 0.0) for name in PRIORS}

    def loss(self, theta: F64) -> tuple[float, F64]:
        """Minus log posterior and its gradient: tr(M dK), M = d loss / dK; lengths and c by difference quotients."""
        data, numbers = self.data, dict.fromkeys(PRIORS, 0.0)
        numbers |= dict(zip(self.names, np.exp(theta).tolist(), strict=True))
        shape = theta[: len(SHAPES)]
        curves = self._curves(shape)
        parts = self.linear | {name: part[None] for name, part in curves.items()}
        solved = _Solution.solve(_add_parts(numbers, parts) + data.noise_nn(numbers), data, numbers)
        # u being where the loss is least, M = (P - (P e)(P e)') / 2 with e = u y - r, by task
        inverse_Gnn, u_T = solved.inverse_Gnn, solved.u_T
        rest_nT = _apply(inverse_Gnn, data.utility_nT * u_T - data.runs.relevance_BT)
        if len(inverse_Gnn) == 1:
            m_Gnn = 0.5 * (len(u_T) * inverse_Gnn - (rest_nT @ rest_nT.T)[None])
        else:
            m_Gnn = 0.5 * (inverse_Gnn - np.einsum("nt,mt->tnm", rest_nT, rest_nT))
        slope = {name: numbers[name] * (part * m_Gnn).sum() for name, part in parts.items()}
        for k, name in enumerate(SHAPES if self.has_curves else ()):
            moved = self._curves(shape + STEP * (np.arange(len(SHAPES)) == k))
            slope[name] = (
                sum(numbers[values] * ((moved[values] - curves[values]) * m_Gnn).sum() for values in CURVES) / STEP
            )
        diagonal_n = np.einsum("gnn->n", m_Gnn)
        slope["noise"] = numbers["noise"] * diagonal_n.sum()
        if data.freedom:
            seed_noise = numbers["seed noise"]
            slope_of_spread = 0.5 * data.freedom * len(u_T) - 0.5 * float(u_T**2 @ data.within_slice_T) / seed_noise
            slope["seed noise"] = seed_noise * (diagonal_n / data.seeds_n).sum() + slope_of_spread
        far = (theta - self.prior[:, 0]) / self.prior[:, 1]
        gradient = self.worth * np.array([slope[name] for name in self.names]) + far / self.prior[:, 1]
        return float(0.5 * far @ far - self.worth * solved.likelihood), gradient

    def _curves(self, shape: F64) -> dict[str, F64]:
        if not self.has_curves:
            return {}
        share_nG = self.data.runs.share_BG
        return Curves.from_shares(share_nG, shape).between(share_nG, share_nG)


def _apply(matrix_Gbn: F64, values_nT: F64) -> F64:
    """(b, T) matrices times values; one matrix for all tasks, or one for each."""
    if len(matrix_Gbn) == 1:
        return np.asarray(matrix_Gbn[0] @ values_nT)
    return np.asarray(np.einsum("tbn,nt->bt", matrix_Gbn, values_nT))


def _explained(cross_Gbn: F64, inverse_Gnn: F64) -> F64:
    """(b, 1 or T) what the runs take off the variance."""
    return np.asarray(np.einsum("gbn,gbn->bg", cross_Gbn @ inverse_Gnn, cross_Gbn))
