"""Gaussian process from features of subsets to the utilities of training runs. Start with `GaussianProcess.fit`.

The utility of a subset S for a task, in the unit of the runs, is modelled as

    utility(S) = level + s (r(S) + g(S) + noise),

where r is the prediction without runs, standardized over the runs; s > 0 is the scale of the task; and the level is a
free constant. g is a Gaussian process that corrects r. Its covariance is a sum of components, each one a way in which r
may be wrong:

    slope      linear in r: the task depends more or less strongly on its relevance
    kernels    linear in the relevance of each kernel: another kernel predicts this model better
    tasks      linear in the predictions for all tasks: tasks have effects in common
    sketch     linear in the mean sketch: the errors of similar rows are similar
    straight   linear in the shares of the slices of every label; only this trend continues far from the runs
    linear     linear in f(share) = log(share + c)
    additive   a smooth function of each f(share): the value of a slice saturates
    joint      a smooth function of all f(share): slices can substitute for each other

The variances of the components, the length scales, c and the noise are hyperparameters shared by all tasks. They
maximise the marginal likelihood times wide log-normal priors, with s and the level eliminated in closed form. Each
component is normalized by its mean variance over the runs, so that a prior on its variance is a prior on the share of
the variation that it explains. Given the hyperparameters, everything is in closed form. Without relevance, r = 0 and
the model is a regression on shares. Far from the runs the nonlinear components revert to their prior, the straight
trend continues, and intervals widen.

Errors that no component models grow with the distance from the runs. Beyond the root mean square distance of the runs
from their mean share, the standard deviation of a prediction is multiplied by the ratio of the distances. With this
factor, 90 % intervals contained about 90 % of the most extreme mixtures, which were held out: see
experiments/extrapolation.

Noise has two variances: one per subset (what no component explains), and one per training run. Subsets that were
trained with several seeds identify the second: their sums of squares within subsets enter the likelihood, and the mean
over n seeds has 1 / n of it.

Shape letters: B subsets (n of them runs), S seeds, G slices of all labels, T tasks, M relevance kernels, D sketch
width, P features. In `Gbn`, G is 1 if the tasks share one covariance and T otherwise.
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

MIN_DIFFERENT_SUBSETS = 2  # minimum number of different subsets
EQUALITY_DECIMALS = 9  # subsets are the same if all features agree to this many decimals
JITTER = 1e-6  # added to the diagonal of the covariance
TINY = 1e-12
MAX_TUNING_RUNS = 256  # maximum number of runs that hyperparameters are fitted to; the posterior uses all runs
BLOCK_SUBSETS = 4_096  # subsets predicted at once
PRIOR_BOUND = 4.0  # bounds of a hyperparameter, in standard deviations of its prior
# upper bound of the log variance of a component of the shares, which keeps the covariance well conditioned
MAX_LOG_VARIANCE = 3.0
TESTED_DISTANCE = 4.0  # distance, relative to the runs, up to which intervals were tested: experiments/extrapolation
STEP = 1e-4  # finite-difference step: of log hyperparameters, and of features relative to their standard deviation
# Weight of the deviations of rows' relevance from the mean of their slice, and its uncertainty: experiments/exposure.
WITHIN_SLICE_WEIGHT, WITHIN_SLICE_SD = 0.4, 0.4
SHAPES = ("c", "additive length", "joint length")  # hyperparameters of the curves, other than variances
CURVES = ("straight", "linear", "additive", "joint")  # components that depend on shares
# Priors: mean and standard deviation of the logarithm. Variances are relative to that of r, which is 1; length scales
# are relative to the standard deviation of f(share) over the runs; c is relative to an even share.
PRIORS = {
    "c": (np.log(0.05), 1.5),
    "additive length": (np.log(1.2), 0.7),
    "joint length": (0.0, 0.7),
    "straight": (-8.0, 4.0),  # covers both no straight trend and one that explains most of the variation
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
# The likelihood often has two local maxima, one with a straight and one with a logarithmic trend. The first search
# starts at the mean of the prior, the second at a straight trend, i.e. this many prior standard deviations away.
STRAIGHT_START = {"straight": 2.0, "linear": -1.5, "additive": -1.5, "joint": -1.5, "noise": -1.5}


# ---------------------------------------------------------------------------------------------------- features


@dataclass(frozen=True, slots=True)
class SubsetFeatures:
    """Features of B subsets that are known before training: means over their rows.

    Attributes:
        share_BG: shares of the slices of all labels, concatenated; no columns without labels.
        relevance_BT: predicted change of each task; 0 without an artifact.
        kernel_BTM: mean relevance of each kernel.
        sketch_BD: mean sketch.
        within_slice_BT: part of the predicted change that is due to deviations of rows from the mean of their slice.
    """

    share_BG: F64
    relevance_BT: F64
    kernel_BTM: F64
    sketch_BD: F64
    within_slice_BT: F64

    @classmethod
    def from_shares(cls, share_BG: F64, n_tasks: int) -> Self:
        """Return the features of mixtures without an artifact."""
        n = len(share_BG)
        share_BG, zero_BT = np.asarray(share_BG, np.float64), np.zeros((n, n_tasks))
        return cls(share_BG, zero_BT, np.zeros((n, n_tasks, 0)), np.zeros((n, 0)), zero_BT)

    @classmethod
    def concatenate(cls, parts: "Sequence[SubsetFeatures]") -> Self:
        """Concatenate blocks of subsets."""
        return cls(*map(np.concatenate, zip(*(part._arrays() for part in parts), strict=True)))

    def __len__(self) -> int:
        return len(self.share_BG)

    def _arrays(self) -> list[F64]:
        return [getattr(self, field.name) for field in fields(self)]

    def flat(self) -> F64:
        """Return all features of each subset as a vector, (B, P)."""
        return np.concatenate([array.reshape(len(self), -1) for array in self._arrays()], axis=1)

    def unflatten(self, flat_BP: F64) -> "SubsetFeatures":
        """Invert `flat`, for features of the same shapes as these."""
        shapes = [array.shape[1:] for array in self._arrays()]
        parts = np.split(flat_BP, np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1], axis=1)
        return SubsetFeatures(*(part.reshape(len(part), *shape) for part, shape in zip(parts, shapes, strict=True)))

    def take(self, index: Integers | slice) -> "SubsetFeatures":
        """Return the features of the subsets at these positions."""
        return SubsetFeatures(*(array[index] for array in self._arrays()))


@dataclass(frozen=True, slots=True)
class FeatureScales:
    """Standardize features to mean 0 and mean square 1 over the runs; shares are not changed.

    A prediction r beyond the range of the runs is compressed to sign(r) farthest (1 + log(|r| / farthest)), because
    selected subsets are extreme and realized only about half of a linear extrapolation (experiments/exposure). If the
    rows of a subset were selected within slices more strongly than those of any run, this adds a standard deviation.

    Attributes:
        relevance_T: mean and inverse standard deviation of the predictions for each task.
        kernel_TM: the same of the relevance of each kernel.
        sketch_D: mean of sketches, and the inverse of their root mean square distance from it, one number.
        share_G: the same of shares.
        farthest_T: largest absolute prediction of a run.
        within_slice_T: largest absolute `within_slice_BT` of a run.
    """

    relevance_T: tuple[F64, F64]
    kernel_TM: tuple[F64, F64]
    sketch_D: tuple[F64, F64]
    share_G: tuple[F64, F64]
    farthest_T: F64
    within_slice_T: F64

    @classmethod
    def from_runs(cls, runs: SubsetFeatures) -> Self:
        """Compute means and standard deviations over the runs."""
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
        """Compress predictions beyond the range of the runs logarithmically; others are not changed."""
        ratio_BT = np.maximum(np.abs(relevance_BT) / np.maximum(self.farthest_T, TINY), 1.0)
        return np.asarray(relevance_BT / ratio_BT * (1.0 + np.log(ratio_BT)))

    def extrapolation_factor(self, share_BG: F64) -> F64:
        """Return the distance of shares from the mean of the runs over the root mean square of the runs, (B, 1).

        It is at least 1.
        """
        mean_G, inverse_rms = self.share_G
        return np.asarray(np.maximum(inverse_rms * np.linalg.norm(share_BG - mean_G, axis=1, keepdims=True), 1.0))

    def step(self, at: SubsetFeatures, fraction: float) -> SubsetFeatures:
        """Return a finite-difference step for each feature, 0 if it is constant over the runs.

        Args:
            at: features of one subset.
            fraction: step relative to the standard deviation of a feature over the runs.
        """
        stds = [ratio(1.0, inverse, least=TINY) for _, inverse in (self.relevance_T, self.kernel_TM, self.sketch_D)]
        relevance_1T, kernel_1TM, sketch = (fraction * std[None] for std in stds)
        # A share may be 0, so an even share is added to it.
        share_BG = fraction * (at.share_BG + 1 / max(at.share_BG.shape[1], 1))
        return SubsetFeatures(share_BG, relevance_1T, kernel_1TM, np.full_like(at.sketch_BD, sketch), relevance_1T)

    def transform(self, features: SubsetFeatures) -> SubsetFeatures:
        """Standardize features; `within_slice_BT` becomes the additional standard deviation of r."""
        (mean_T, inverse_T), (mean_TM, inverse_TM), (mean_D, inverse) = self.relevance_T, self.kernel_TM, self.sketch_D
        # One standard deviation of r, from the part of the deviations within slices that exceeds that of any run. It is
        # compressed like r itself, by half the difference of the compressed bounds.
        std_BT = WITHIN_SLICE_SD * np.maximum(np.abs(features.within_slice_BT) - self.within_slice_T, 0.0)
        low_BT, high_BT = features.relevance_BT - std_BT, features.relevance_BT + std_BT
        return SubsetFeatures(
            features.share_BG,
            (self.compress(features.relevance_BT) - mean_T) * inverse_T,
            (features.kernel_BTM - mean_TM) * inverse_TM,
            (features.sketch_BD - mean_D) * inverse,
            (self.compress(high_BT) - self.compress(low_BT)) / 2 * inverse_T,
        )


def _mean_and_scale(values_nP: F64) -> tuple[F64, F64]:
    """Return the mean of vectors, (P,), and the inverse of their root mean square distance from it."""
    return values_nP.mean(axis=0), ratio(1.0, np.sqrt(values_nP.var(axis=0).sum()), least=TINY)


# ------------------------------------------------------------------------------------------ prior covariance of g


@dataclass(frozen=True, slots=True)
class ShareCovariance:
    """Components of the covariance that depend on shares, each with mean variance 1 over the runs.

    Attributes:
        c: offset in f(share) = log(share + c).
        mean_G: mean shares of the runs.
        log_mean_G: mean of f over the runs. It is subtracted because for a large c it is large relative to the
            differences between runs.
        log_std: root mean square over slices of the standard deviation of f over the runs.
        lengths: length scales of the components additive and joint.
        factors: normalization factor of each component.
    """

    c: float
    mean_G: F64
    log_mean_G: F64
    log_std: float
    lengths: tuple[float, float]
    factors: dict[str, float]

    @classmethod
    def from_shares(cls, share_nG: F64, shape: Sequence[float] | F64) -> Self:
        """Normalize the components over the runs.

        Args:
            share_nG: shares of the runs.
            shape: logarithms of c and of the two length scales.
        """
        c = float(np.exp(shape[0])) / max(share_nG.shape[1], 1)
        log_nG = np.log(share_nG + c)
        log_std = float(np.sqrt(log_nG.var(axis=0).mean())) if share_nG.size else 0.0
        log_std = log_std if log_std > TINY else 1.0
        lengths = (float(np.exp(shape[1])), float(np.exp(shape[2])))
        raw = cls(c, share_nG.mean(axis=0), log_nG.mean(axis=0), log_std, lengths, dict.fromkeys(CURVES, 1.0))
        # The mean variance over the runs about their mean is tr(K) / n - 1'K 1 / n^2: a constant offset of a component
        # is part of the level, and does not count.
        covariances = raw.between(share_nG, share_nG)
        variances = {name: float(np.diag(k_nn).mean() - k_nn.mean()) for name, k_nn in covariances.items()}
        return replace(raw, factors={name: 1.0 / v if v > TINY else 0.0 for name, v in variances.items()})

    def transform(self, share_BG: F64) -> F64:
        """Return f(share) = log(share + c), standardized over the runs."""
        return np.asarray((np.log(share_BG + self.c) - self.log_mean_G) / self.log_std)

    def between(self, share_BG: F64, other_share_nG: F64) -> dict[str, F64]:
        """Return the covariance between two sets of subsets, (B, n), by component."""
        log_BG, other_nG = self.transform(share_BG), self.transform(other_share_nG)
        n_slices = max(log_BG.shape[1], 1)
        additive_Bn = np.zeros((len(log_BG), len(other_nG)))
        square_Bn = np.zeros_like(additive_Bn)
        # Slice by slice and in place: an array of shape (B, n, G) would not fit memory. Squared differences are not
        # expanded to |x|^2 - 2 x y + |y|^2, which cancels for runs that are nearly equal.
        for g in range(log_BG.shape[1]):
            part_Bn = (log_BG[:, g, None] - other_nG[None, :, g]) ** 2
            square_Bn += part_Bn
            part_Bn *= -0.5 / self.lengths[0] ** 2
            additive_Bn += np.exp(part_Bn, out=part_Bn)
        square_Bn *= -0.5 / (n_slices * self.lengths[1] ** 2)
        parts = {
            "straight": (share_BG - self.mean_G) @ (other_share_nG - self.mean_G).T,
            "linear": log_BG @ other_nG.T / n_slices,
            "additive": additive_Bn / n_slices,
            "joint": np.exp(square_Bn, out=square_Bn),
        }
        return {name: part * self.factors[name] for name, part in parts.items()}

    def variance(self, share_BG: F64) -> dict[str, F64]:
        """Return the variance at each subset, (B,), by component: the diagonal of `between`."""
        log_BG = self.transform(share_BG)
        ones_B = np.ones(len(log_BG))
        linear_B = np.einsum("bg,bg->b", log_BG, log_BG) / max(log_BG.shape[1], 1)
        straight_B = ((share_BG - self.mean_G) ** 2).sum(axis=1)
        variances = {"straight": straight_B, "linear": linear_B, "additive": ones_B, "joint": ones_B}
        return {name: part * self.factors[name] for name, part in variances.items()}


def _linear_covariances(subsets: SubsetFeatures, runs: SubsetFeatures) -> dict[str, F64]:
    """Return the linear components of the covariance of standardized features, (1 or T, B, n), by component."""
    n_tasks, n_kernels = subsets.relevance_BT.shape[1], max(subsets.kernel_BTM.shape[2], 1)
    slope_TBn = np.einsum("bt,nt->tbn", subsets.relevance_BT, runs.relevance_BT)
    return {
        "slope": slope_TBn,
        "kernels": np.einsum("btm,ntm->tbn", subsets.kernel_BTM, runs.kernel_BTM) / n_kernels,
        "tasks": slope_TBn.sum(axis=0, keepdims=True) / max(n_tasks, 1),
        "sketch": (subsets.sketch_BD @ runs.sketch_BD.T)[None],
    }


def _linear_variances(subsets: SubsetFeatures) -> dict[str, F64]:
    """Return the variance of the linear components, (1 or T, B): the diagonal of `_linear_covariances`."""
    slope_TB = (subsets.relevance_BT**2).T
    return {
        "slope": slope_TB,
        "kernels": np.einsum("btm,btm->tb", subsets.kernel_BTM, subsets.kernel_BTM)
        / max(subsets.kernel_BTM.shape[2], 1),
        "tasks": slope_TB.mean(axis=0, keepdims=True),
        "sketch": np.einsum("bd,bd->b", subsets.sketch_BD, subsets.sketch_BD)[None],
    }


def _covariance(
    hyperparameters: Mapping[str, float],
    share_covariance: ShareCovariance,
    subsets: SubsetFeatures,
    other: SubsetFeatures,
) -> F64:
    """Return the covariance of g between two sets of standardized features, (1 or T, B, n)."""
    of_shares = share_covariance.between(subsets.share_BG, other.share_BG)
    return _weighted_sum(
        hyperparameters, _linear_covariances(subsets, other) | {name: part[None] for name, part in of_shares.items()}
    )


def _weighted_sum(hyperparameters: Mapping[str, float], parts: Mapping[str, F64]) -> F64:
    """Return the sum of the components times their variances; one copy if no component depends on the task."""
    zero = np.zeros((1, *parts["tasks"].shape[1:])) if "tasks" in parts else np.zeros((1, 1, 1))
    return np.asarray(
        sum((hyperparameters[name] * part for name, part in parts.items() if hyperparameters[name]), zero)
    )


# ---------------------------------------------------------------------------------------------------- posterior


@dataclass(frozen=True, slots=True)
class GaussianProcess:
    """Posterior of the model given runs. Create it with `fit`, then call `predict` or `change`.

    Attributes:
        hyperparameters: by the names in PRIORS; the variance of a component without features is 0.
        runs: standardized features of the runs.
        scale_T: scale s of each task, in the unit of the utilities.
        range_T: largest minus smallest utility of the runs.
        degrees_of_freedom: of the estimate of the scale; quantiles are those of Student's t.
    """

    hyperparameters: dict[str, float]
    runs: SubsetFeatures
    scale_T: F64
    range_T: F64
    degrees_of_freedom: float
    _scales: FeatureScales
    _share_covariance: ShareCovariance
    _solution: "_Solution"
    _mean_T: F64  # mean utility of the runs, subtracted before the fit
    _residual_nT: F64  # P (u y - r), see `_Solution`
    _level_T: F64

    @classmethod
    def fit(cls, runs: SubsetFeatures, utility_nST: F64) -> Self:
        """Fit the model to runs.

        The mean over seeds is fitted; differences between seeds estimate the training noise. If every run has every
        seed, the mean effect of each seed is removed first.

        Args:
            runs: features of n different subsets.
            utility_nST: utility of each run with each seed, nan for missing seeds; higher is better.

        Raises:
            ShapeError: the numbers of runs or tasks differ.
            RunsError: fewer than 2 subsets are different, or all utilities of a task are equal.
        """
        n_runs, n_tasks = utility_nST.shape[0], utility_nST.shape[2]
        if runs.relevance_BT.shape != (n_runs, n_tasks):
            raise ShapeError(f"fit: utilities have shape {utility_nST.shape}, features {runs.relevance_BT.shape}")
        if not np.isnan(utility_nST).any():  # remove the mean effect of each seed
            utility_nST = utility_nST - utility_nST.mean(axis=0) + utility_nST.mean(axis=(0, 1))
        seeds_n = (~np.isnan(utility_nST[:, :, 0])).sum(axis=1).astype(np.float64)
        utility_nT = np.nanmean(utility_nST, axis=1)
        seed_squares_T = np.nansum((utility_nST - utility_nT[:, None]) ** 2, axis=(0, 1))
        n_different = len(np.unique(runs.flat().round(EQUALITY_DECIMALS), axis=0))
        if n_different < MIN_DIFFERENT_SUBSETS:
            raise RunsError(
                f"fit to runs: got {n_different} different subset(s) in {n_runs} run(s), expected "
                f"{MIN_DIFFERENT_SUBSETS} or more"
            )
        if (np.ptp(utility_nT, axis=0) == 0).any():
            raise RunsError("fit to runs: all runs have the same utility; expected runs that differ")
        scales = FeatureScales.from_runs(runs)
        mean_T = utility_nT.mean(axis=0)
        data = _Data(scales.transform(runs), utility_nT - mean_T, seeds_n, seed_squares_T, float((seeds_n - 1).sum()))
        hyperparameters = _MarginalLikelihood(data.sample(MAX_TUNING_RUNS)).maximise()
        share_covariance = ShareCovariance.from_shares(
            data.runs.share_BG, [np.log(hyperparameters[name]) for name in SHAPES]
        )
        solution = _Solution.solve(
            _covariance(hyperparameters, share_covariance, data.runs, data.runs) + data.noise_nn(hyperparameters),
            data,
            hyperparameters,
        )
        error_nT = data.utility_nT * solution.u_T - data.runs.relevance_BT  # level + g + noise, in units of s
        return cls(
            hyperparameters,
            data.runs,
            1.0 / solution.u_T,
            np.ptp(utility_nT, axis=0),
            n_runs - 1 + data.degrees_of_freedom,
            scales,
            share_covariance,
            solution,
            mean_T,
            _apply(solution.inverse_Gnn, error_nT),
            np.einsum("gn,nt->t" if len(solution.level_Gn) == 1 else "tn,nt->t", solution.level_Gn, error_nT),
        )

    def predict(self, features: SubsetFeatures) -> tuple[F64, F64]:
        """Return the utility of subsets and its standard deviation, (B, T) each, for the mean of many seeds."""
        means, stds = [], []
        for subsets in self._standardized_blocks(features):
            cross_Gbn = _covariance(self.hyperparameters, self._share_covariance, subsets, self.runs)
            mean_bT = self._level_T + subsets.relevance_BT + _apply(cross_Gbn, self._residual_nT)
            means.append(self._mean_T + self.scale_T * mean_bT)
            variance_bG = self._posterior_variance(subsets, cross_Gbn) + self.hyperparameters["noise"]
            variance_bG *= self._scales.extrapolation_factor(subsets.share_BG) ** 2
            stds.append(self.scale_T * np.sqrt(variance_bG + subsets.within_slice_BT**2))
        return np.concatenate(means), np.concatenate(stds)

    def relative_uncertainty(self, features: SubsetFeatures, coverage: float) -> F64:
        """Return the relative uncertainty of predictions, (B, T); a prediction above 1 should not be used.

        It is half the width of the interval of the noise-free utility over the range of the runs, or the distance from
        the runs over TESTED_DISTANCE, whichever is larger.
        """
        parts = []
        for subsets in self._standardized_blocks(features):
            cross_Gbn = _covariance(self.hyperparameters, self._share_covariance, subsets, self.runs)
            factor_b1 = self._scales.extrapolation_factor(subsets.share_BG)
            std_bT = np.sqrt(self._posterior_variance(subsets, cross_Gbn) + subsets.within_slice_BT**2) * factor_b1
            half_width_bT = self.quantile(coverage) * self.scale_T * std_bT / self.range_T
            parts.append(np.maximum(half_width_bT, factor_b1 / TESTED_DISTANCE))
        return np.concatenate(parts)

    def relative_uncertainty_after(
        self, subset: SubsetFeatures, runs: SubsetFeatures, task: int, coverage: float
    ) -> F64:
        """Return `relative_uncertainty` of a subset for one task after one more run, (B,), for each candidate run.

        Hyperparameters and the range of the runs are held fixed.

        Args:
            subset: features of the subset.
            runs: features of the candidate runs.
            task: index of the task.
            coverage: of the interval.
        """
        # Conditioning on one more observation y_r = g_r + noise: Var' = Var - Cov(subset, r)^2 / (Var_r + noise).
        _, covariance_bb, noise = self.joint_posterior(SubsetFeatures.concatenate([subset, runs]), task)
        run_variance_B = np.maximum(np.diag(covariance_bb)[1:], 0.0) + noise
        variance_B = covariance_bb[0, 0] - covariance_bb[0, 1:] ** 2 / run_variance_B
        shares_with_run = (np.concatenate([self.runs.share_BG, run_G[None]]) for run_G in runs.share_BG)
        scales_by_run = (replace(self._scales, share_G=_mean_and_scale(share_nG)) for share_nG in shares_with_run)
        factor_B = np.array([float(scales.extrapolation_factor(subset.share_BG)[0, 0]) for scales in scales_by_run])
        half_width_B = self.quantile(coverage) * factor_B * np.sqrt(np.maximum(variance_B, 0.0)) / self.range_T[task]
        return np.asarray(np.maximum(half_width_B, factor_B / TESTED_DISTANCE))

    def joint_posterior(self, features: SubsetFeatures, task: int) -> tuple[F64, F64, float]:
        """Return the posterior mean, (B,), and covariance, (B, B), of one task, and the noise variance of a run."""
        subsets, solution = self._scales.transform(features), self._solution
        g = task if len(solution.inverse_Gnn) > 1 else 0
        cross_bn = _covariance(self.hyperparameters, self._share_covariance, subsets, self.runs)[g]
        between_bb = _covariance(self.hyperparameters, self._share_covariance, subsets, subsets)[g]
        level_b = cross_bn @ solution.level_Gn[g]
        covariance_bb = between_bb - cross_bn @ solution.inverse_Gnn[g] @ cross_bn.T
        covariance_bb += 1 / solution.level_precision_G[g] - level_b[:, None] - level_b
        mean_b = self._level_T[task] + subsets.relevance_BT[:, task] + cross_bn @ self._residual_nT[:, task]
        scale = float(self.scale_T[task])
        noise = self.hyperparameters["noise"] + self.hyperparameters["seed noise"] + JITTER
        return self._mean_T[task] + scale * mean_b, scale**2 * covariance_bb, scale**2 * noise

    def change(self, features: SubsetFeatures, corpus: SubsetFeatures) -> tuple[F64, F64]:
        """Return the utility of subsets minus that of the corpus, and its standard deviation, (B, T) each.

        The subset noise of a change is proportional to the prior variance of the difference from the corpus: it is 0
        at the corpus itself, and the noise of two subsets at the mean distance of the runs.

        Args:
            features: features of the subsets.
            corpus: features of the corpus.
        """
        corpus_features = self._scales.transform(corpus)
        corpus_cov_G1n = _covariance(self.hyperparameters, self._share_covariance, corpus_features, self.runs)
        mean_distance_G = self._difference_variance(self.runs, corpus_features).mean(axis=0)
        means, stds = [], []
        for subsets in self._standardized_blocks(features):
            cross_Gbn = _covariance(self.hyperparameters, self._share_covariance, subsets, self.runs) - corpus_cov_G1n
            distance_bG = self._difference_variance(subsets, corpus_features)
            variance_bG = np.maximum(distance_bG - _variance_reduction(cross_Gbn, self._solution.inverse_Gnn), 0.0)
            variance_bG += 2 * self.hyperparameters["noise"] * distance_bG / np.maximum(mean_distance_G, TINY)
            mean_bT = subsets.relevance_BT - corpus_features.relevance_BT + _apply(cross_Gbn, self._residual_nT)
            means.append(self.scale_T * mean_bT)
            variance_bG *= self._scales.extrapolation_factor(subsets.share_BG) ** 2
            stds.append(self.scale_T * np.sqrt(variance_bG + subsets.within_slice_BT**2))
        return np.concatenate(means), np.concatenate(stds)

    def gradient(self, at: SubsetFeatures, value: Callable[[SubsetFeatures], F64]) -> SubsetFeatures:
        """Return the gradient of a function of subsets with respect to the features of one, by finite differences.

        All features are shifted at once, each in a subset of its own, so that `value` is called twice.

        Args:
            at: features of one subset.
            value: function of the features of several subsets, (B,).
        """
        step_1P = self._scales.step(at, STEP).flat()
        difference_P = value(at.unflatten(at.flat() + np.diag(step_1P[0]))) - value(at)
        return at.unflatten(ratio(difference_P, step_1P))

    def relative_distance(self, features: SubsetFeatures, corpus: SubsetFeatures) -> F64:
        """Return the distance of subsets from the corpus relative to that of the farthest run, (B,).

        It is measured by the prior standard deviation of the difference.
        """
        corpus_features = self._scales.transform(corpus)
        farthest = float(self._difference_variance(self.runs, corpus_features).mean(axis=1).max())
        parts = [
            self._difference_variance(subsets, corpus_features).mean(axis=1)
            for subsets in self._standardized_blocks(features)
        ]
        return np.sqrt(np.concatenate(parts) / max(farthest, TINY))

    def quantile(self, coverage: float) -> float:
        """Return half the width of a central interval in standard deviations, by Student's t distribution."""
        return float(stdtrit(self.degrees_of_freedom, 0.5 + coverage / 2))

    def _standardized_blocks(self, features: SubsetFeatures) -> Iterator[SubsetFeatures]:
        """Yield the standardized features of blocks of subsets, which bound the memory of covariances."""
        for start in range(0, len(features), BLOCK_SUBSETS):
            yield self._scales.transform(features.take(slice(start, start + BLOCK_SUBSETS)))

    def _posterior_variance(self, subsets: SubsetFeatures, cross_Gbn: F64) -> F64:
        """Return the posterior variance of level and g, (B, 1 or T).

        With k the covariance of a subset with the runs, it is k_bb - k'P k + 1 / (1'K^-1 1) - 2 k'K^-1 1 / (1'K^-1 1):
        the last two terms are the variance of the estimated level, and its covariance with g. Where the runs determine
        a subset almost exactly, the difference cancels, and rounding may make it negative.

        Args:
            subsets: standardized features.
            cross_Gbn: covariance between the subsets and the runs.
        """
        level_precision_G = self._solution.level_precision_G
        level_bG = np.einsum("gbn,gn->bg", cross_Gbn, self._solution.level_Gn)
        variance_bG = (
            self._prior_variance(subsets)
            - _variance_reduction(cross_Gbn, self._solution.inverse_Gnn)
            + 1 / level_precision_G
            - 2 * level_bG
        )
        return np.asarray(np.maximum(variance_bG, 0.0))

    def _prior_variance(self, subsets: SubsetFeatures) -> F64:
        """Return the prior variance of g, (B, 1 or T)."""
        parts = _linear_variances(subsets) | {
            k: v[None] for k, v in self._share_covariance.variance(subsets.share_BG).items()
        }
        return np.asarray(_weighted_sum(self.hyperparameters, parts).T)

    def _difference_variance(self, subsets: SubsetFeatures, corpus: SubsetFeatures) -> F64:
        """Return the prior variance of the difference of g from its value at the corpus, (B, 1 or T).

        Var(g_b - g_0) = Var g_b + Var g_0 - 2 Cov(g_b, g_0); rounding may make it slightly negative near the corpus.
        """
        shared_Gb1 = _covariance(self.hyperparameters, self._share_covariance, subsets, corpus)
        return np.asarray(
            np.maximum(self._prior_variance(subsets) + self._prior_variance(corpus) - 2 * shared_Gb1[:, :, 0].T, 0.0)
        )


# --------------------------------------------------------------------------------------------- hyperparameters


@dataclass(frozen=True, slots=True)
class _Data:
    """Standardized features and utilities of the runs.

    Attributes:
        utility_nT: mean over seeds, centred over the runs.
        seeds_n: number of seeds of each run.
        seed_squares_T: sum of squared deviations of seeds from the mean of their run.
        degrees_of_freedom: of `seed_squares_T`.
    """

    runs: SubsetFeatures
    utility_nT: F64
    seeds_n: F64
    seed_squares_T: F64
    degrees_of_freedom: float

    def sample(self, max_runs: int) -> "_Data":
        """Return at most this many of the runs, a fixed random sample."""
        if len(self.runs) <= max_runs:
            return self
        index = np.sort(stream(0, "learned", "sample", len(self.runs)).permutation(len(self.runs))[:max_runs])
        fraction = max_runs / len(self.runs)
        utility_nT = self.utility_nT[index]
        return _Data(
            self.runs.take(index),
            utility_nT - utility_nT.mean(axis=0),
            self.seeds_n[index],
            self.seed_squares_T * fraction,
            self.degrees_of_freedom * fraction,
        )

    def noise_nn(self, hyperparameters: dict[str, float]) -> F64:
        """Return the covariance of the noise of the runs."""
        return np.asarray(np.diag(hyperparameters["noise"] + hyperparameters["seed noise"] / self.seeds_n + JITTER))


@dataclass(frozen=True, slots=True)
class _Solution:
    """Quantities that follow from the covariance K of the runs in closed form.

    Integrating out a free level replaces K^-1 by P = K^-1 - K^-1 1 1'K^-1 / (1'K^-1 1) and adds log(1'K^-1 1) to
    log det K (restricted likelihood). With u = 1 / s, q = y'P y, p = r'P y and m degrees of freedom, the log likelihood
    is m log u - q u^2 / 2 + p u - r'P r / 2 - (log det) / 2. It is maximal at the positive root of q u^2 - p u - m = 0.

    Attributes:
        inverse_Gnn: P.
        level_Gn: weights K^-1 1 / (1'K^-1 1) of the runs in the estimate of the level.
        level_precision_G: 1'K^-1 1, the inverse variance of the level.
        u_T: maximum likelihood estimate of 1 / s.
        likelihood: maximum of the log likelihood, summed over tasks.
    """

    inverse_Gnn: F64
    level_Gn: F64
    level_precision_G: F64
    u_T: F64
    likelihood: float

    @classmethod
    def solve(cls, k_Gnn: F64, data: _Data, hyperparameters: dict[str, float]) -> Self:
        """Compute the solution for the covariance `k_Gnn` of the runs, noise included."""
        r_nT, y_nT = data.runs.relevance_BT, data.utility_nT
        # The inverse itself, not a Cholesky factor, since the gradient of the likelihood needs P.
        # The jitter on the diagonal of K bounds its condition number.
        inverse_Gnn = np.linalg.inv(k_Gnn)
        ones_Gn = inverse_Gnn.sum(axis=2)  # K^-1 1
        level_precision_G = ones_Gn.sum(axis=1)
        level_Gn = ones_Gn / level_precision_G[:, None]
        projected_Gnn = inverse_Gnn - ones_Gn[:, :, None] * level_Gn[:, None, :]
        solved_nT = _apply(projected_Gnn, y_nT)
        q_T = np.einsum("nt,nt->t", y_nT, solved_nT)
        p_T = np.einsum("nt,nt->t", r_nT, solved_nT)
        log_det_G = np.linalg.slogdet(k_Gnn)[1] + np.log(level_precision_G)
        if data.degrees_of_freedom:  # the likelihood of deviations of seeds from the mean of their run
            q_T = q_T + data.seed_squares_T / hyperparameters["seed noise"]
            log_det_G = log_det_G + data.degrees_of_freedom * np.log(hyperparameters["seed noise"])
        m = len(y_nT) - 1 + data.degrees_of_freedom
        u_T = (p_T + np.sqrt(p_T**2 + 4 * q_T * m)) / (2 * q_T)
        r_square_T = np.einsum("nt,nt->t", r_nT, _apply(projected_Gnn, r_nT))
        likelihood_T = m * np.log(u_T) - 0.5 * q_T * u_T**2 + p_T * u_T - 0.5 * r_square_T
        log_det = (
            0.5 * float(log_det_G.sum()) * len(u_T) / len(k_Gnn)
        )  # of all tasks, also if they share one covariance
        return cls(projected_Gnn, level_Gn, level_precision_G, u_T, float(likelihood_T.sum()) - log_det)


class _MarginalLikelihood:
    """Log posterior of the hyperparameters, as a function of their logarithms."""

    def __init__(self, data: _Data) -> None:
        runs = data.runs
        self.data = data
        self.linear_covariances = {
            name: part for name, part in _linear_covariances(runs, runs).items() if np.abs(part).max(initial=0.0) > TINY
        }
        self.has_shares = bool(runs.share_BG.size) and bool(np.ptp(runs.share_BG, axis=0).max() > 0)
        names = [*(SHAPES + CURVES if self.has_shares else ()), *self.linear_covariances, "noise"]
        self.names = (*names, *(("seed noise",) if data.degrees_of_freedom else ()))
        self.prior = np.array([PRIORS[name] for name in self.names])
        # Weight of the likelihood, between 1 if the utilities of tasks are uncorrelated over the runs and 1 / T if they
        # all agree. One model is evaluated on all tasks, so its noise is correlated between them; if it were counted T
        # times, it would be fitted as a pattern.
        unit_nT = data.utility_nT * ratio(1.0, np.sqrt((data.utility_nT**2).sum(axis=0)), least=TINY)
        self.likelihood_weight = float(unit_nT.shape[1] / np.maximum(((unit_nT.T @ unit_nT) ** 2).sum(), 1.0))

    def maximise(self) -> dict[str, float]:
        """Return the hyperparameters of the best of one or two searches, by the names in PRIORS."""
        mean, std = self.prior.T
        upper_limit = np.where([name in CURVES for name in self.names], MAX_LOG_VARIANCE, np.inf)
        lower, upper = mean - PRIOR_BOUND * std, np.minimum(mean + PRIOR_BOUND * std, upper_limit)
        starts: list[F64] = [mean]
        if self.has_shares:
            starts.append(mean + std * np.array([STRAIGHT_START.get(name, 0.0) for name in self.names]))
        bounds = list(zip(lower, upper, strict=True))
        fits = [
            minimize(self.loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": 40})
            for start in starts
        ]
        best_fit = min(fits, key=lambda result: float(result.fun))
        fitted = dict(zip(self.names, np.exp(best_fit.x).tolist(), strict=True))
        return {name: fitted.get(name, 1.0 if name in SHAPES else 0.0) for name in PRIORS}

    def loss(self, theta: F64) -> tuple[float, F64]:
        """Return the negative log posterior and its gradient.

        The gradient with respect to a variance is tr(M dK) with M = d loss / dK; those with respect to c and the length
        scales use finite differences of K. All are with respect to the logarithm, d/d log x = x d/dx.

        Args:
            theta: logarithms of the hyperparameters in the order of `names`.
        """
        data, hyperparameters = self.data, dict.fromkeys(PRIORS, 0.0)
        hyperparameters |= dict(zip(self.names, np.exp(theta).tolist(), strict=True))
        shape = theta[: len(SHAPES)]
        of_shares = self._share_covariances(shape)
        parts = self.linear_covariances | {name: part[None] for name, part in of_shares.items()}
        solution = _Solution.solve(
            _weighted_sum(hyperparameters, parts) + data.noise_nn(hyperparameters), data, hyperparameters
        )
        # u minimises the loss, so its derivative vanishes: M = (P - (P e)(P e)') / 2 with e = u y - r, per task
        inverse_Gnn, u_T = solution.inverse_Gnn, solution.u_T
        residual_nT = _apply(inverse_Gnn, data.utility_nT * u_T - data.runs.relevance_BT)
        if len(inverse_Gnn) == 1:
            m_Gnn = 0.5 * (len(u_T) * inverse_Gnn - (residual_nT @ residual_nT.T)[None])
        else:
            m_Gnn = 0.5 * (inverse_Gnn - np.einsum("nt,mt->tnm", residual_nT, residual_nT))
        slope = {name: hyperparameters[name] * (part * m_Gnn).sum() for name, part in parts.items()}
        for k, name in enumerate(SHAPES if self.has_shares else ()):
            shifted = self._share_covariances(shape + STEP * (np.arange(len(SHAPES)) == k))
            changes = (hyperparameters[part] * ((shifted[part] - of_shares[part]) * m_Gnn).sum() for part in CURVES)
            slope[name] = sum(changes) / STEP
        diagonal_n = np.einsum("gnn->n", m_Gnn)
        slope["noise"] = hyperparameters["noise"] * diagonal_n.sum()
        if data.degrees_of_freedom:
            seed_noise = hyperparameters["seed noise"]
            seed_slope = (
                0.5 * data.degrees_of_freedom * len(u_T) - 0.5 * float(u_T**2 @ data.seed_squares_T) / seed_noise
            )
            slope["seed noise"] = seed_noise * (diagonal_n / data.seeds_n).sum() + seed_slope
        standardized = (theta - self.prior[:, 0]) / self.prior[:, 1]
        gradient = (
            self.likelihood_weight * np.array([slope[name] for name in self.names]) + standardized / self.prior[:, 1]
        )
        return float(0.5 * standardized @ standardized - self.likelihood_weight * solution.likelihood), gradient

    def _share_covariances(self, shape: F64) -> dict[str, F64]:
        """Return the components of the covariance of the runs that depend on shares, (n, n) each."""
        if not self.has_shares:
            return {}
        share_nG = self.data.runs.share_BG
        return ShareCovariance.from_shares(share_nG, shape).between(share_nG, share_nG)


def _apply(matrix_Gbn: F64, values_nT: F64) -> F64:
    """Return the product of matrices and values, (b, T), with one matrix for all tasks or one per task."""
    if len(matrix_Gbn) == 1:
        return np.asarray(matrix_Gbn[0] @ values_nT)
    return np.asarray(np.einsum("tbn,nt->bt", matrix_Gbn, values_nT))


def _variance_reduction(cross_Gbn: F64, inverse_Gnn: F64) -> F64:
    """Return k'P k, the reduction of the variance of each subset by the runs, (b, 1 or T)."""
    return np.asarray(np.einsum("gbn,gbn->bg", cross_Gbn @ inverse_Gnn, cross_Gbn))
