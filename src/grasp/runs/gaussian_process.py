"""Gaussian process from features of subsets to the utilities of training runs. Start with `GaussianProcess.fit`.

The utility of a subset S for a task, in the unit of the runs, is modelled as

    utility(S) = level + s (r(S) + g(S) + noise),

where r is the change that the artifact predicts without runs (`SubsetFeatures.relevance_BT`), standardized over the
runs; s > 0 is the scale of the task; and the level is a free constant. g is a Gaussian process that corrects r. It is
computed in three modules:

    subset_features      the features, and their standardization over the runs
    subset_covariance    the covariance of g
    marginal_likelihood  the hyperparameters of the covariance, and the level and the scale of each task

This module has the posterior. Given the hyperparameters, everything is in closed form. Without an artifact, r = 0 and
the model is a regression on shares. Far from the runs the nonlinear components of g revert to their prior, the straight
trend continues, and intervals widen.

Errors that no component models grow with the distance from the runs. Beyond the root mean square distance of the runs
from their mean share, the standard deviation of a prediction is multiplied by the ratio of the distances. With this
factor, 90 % intervals contained about 90 % of the most extreme mixtures, which were held out: see
experiments/extrapolation.

Shape letters: B subsets (b those of a block), n runs, S seeds, T tasks, P values of a feature vector. C is the number
of covariance matrices: 1 if no component of the covariance depends on the task, else T.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from scipy.special import stdtrit

from grasp.arrays import F64, Bool, ratio
from grasp.errors import RunsError
from grasp.runs.marginal_likelihood import JITTER, ClosedFormFit, MarginalLikelihood, RunData, matrix_product
from grasp.runs.subset_covariance import SHAPE_PARAMETERS, Covariance, ShareCovariance
from grasp.runs.subset_features import TINY, FeatureScales, Standardization, SubsetFeatures

MIN_DIFFERENT_SUBSETS = 2  # minimum number of different subsets
EQUALITY_DECIMALS = 9  # subsets are the same if all features agree to this many decimals
MAX_TUNING_RUNS = 256  # maximum number of runs that hyperparameters are fitted to; the posterior uses all runs
BLOCK_SUBSETS = 4_096  # subsets predicted at once
TESTED_DISTANCE = 4.0  # distance, relative to the runs, up to which intervals were tested: experiments/extrapolation
FEATURE_STEP = 1e-4  # finite-difference step of features, relative to their standard deviation over the runs


@dataclass(frozen=True, slots=True)
class GaussianProcess:
    """Posterior of the model given runs. Create it with `fit`, then call `predict` or `change`.

    Attributes:
        hyperparameters: by the names in `grasp.runs.marginal_likelihood.PRIORS`; the variance of a component without
            features is 0.
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
    _covariance: Covariance  # of g, without noise
    _fit: ClosedFormFit
    _mean_T: F64  # mean utility of the runs, subtracted before the fit
    _run_weights_nT: F64  # P (u y - r), see `ClosedFormFit`: g is their sum times the covariance with each run
    _level_T: F64  # level, in units of s

    @classmethod
    def fit(cls, runs: SubsetFeatures, utility_nST: F64) -> Self:
        """Fit the model to runs.

        The mean over seeds is fitted; differences between seeds estimate the training noise. If every run has every
        seed, the mean effect of each seed is removed first.

        Args:
            runs: features of n different subsets.
            utility_nST: utility of each run with each seed, nan for missing seeds; higher is better.

        Raises:
            RunsError: fewer than 2 subsets are different, or all utilities of a task are equal.
        """
        n_runs, n_tasks = utility_nST.shape[0], utility_nST.shape[2]
        assert runs.relevance_BT.shape == (n_runs, n_tasks)
        if not np.isnan(utility_nST).any():  # remove the mean effect of each seed
            utility_nST = utility_nST - utility_nST.mean(axis=0) + utility_nST.mean(axis=(0, 1))
        seeds_n = (~np.isnan(utility_nST[:, :, 0])).sum(axis=1).astype(np.float64)
        utility_nT = np.nanmean(utility_nST, axis=1)
        seed_squares_T = np.nansum((utility_nST - utility_nT[:, None]) ** 2, axis=(0, 1))
        n_different = len(np.unique(runs.flat().round(EQUALITY_DECIMALS), axis=0))
        if n_different < MIN_DIFFERENT_SUBSETS or not varies(utility_nT[:, None]).all():
            raise RunsError(
                f"fit to runs: got {n_different} different subset(s) in {n_runs} run(s), expected "
                f"{MIN_DIFFERENT_SUBSETS} or more, and not that all runs have the same utility"
            )
        scales = FeatureScales.from_runs(runs)
        mean_T = utility_nT.mean(axis=0)
        data = RunData(scales.transform(runs), utility_nT - mean_T, seeds_n, seed_squares_T, float((seeds_n - 1).sum()))
        hyperparameters = MarginalLikelihood(data.sample(MAX_TUNING_RUNS)).maximise()
        log_shape = [np.log(hyperparameters[name]) for name in SHAPE_PARAMETERS]
        covariance = Covariance(hyperparameters, ShareCovariance.from_shares(data.runs.share_BG, log_shape))
        k_Cnn = covariance.between(data.runs, data.runs) + data.noise_nn(hyperparameters)
        fit = ClosedFormFit.from_covariance(k_Cnn, data, hyperparameters)
        residual_nT = fit.residuals(data)
        level_subscripts = "cn,nt->t" if len(fit.level_weights_Cn) == 1 else "tn,nt->t"
        return cls(
            hyperparameters=hyperparameters,
            runs=data.runs,
            scale_T=1.0 / fit.inverse_scale_T,
            range_T=np.ptp(utility_nT, axis=0),
            degrees_of_freedom=n_runs - 1 + data.degrees_of_freedom,
            _scales=scales,
            _covariance=covariance,
            _fit=fit,
            _mean_T=mean_T,
            _run_weights_nT=matrix_product(fit.inverse_Cnn, residual_nT),
            _level_T=np.einsum(level_subscripts, fit.level_weights_Cn, residual_nT),
        )

    def predict(self, features: SubsetFeatures) -> tuple[F64, F64]:
        """Return the utility of subsets and its standard deviation, (B, T) each, for the mean of many seeds."""
        means, stds = [], []
        for subsets in self._standardized_blocks(features):
            cross_Cbn = self._covariance.between(subsets, self.runs)
            mean_bT = self._level_T + subsets.relevance_BT + matrix_product(cross_Cbn, self._run_weights_nT)
            means.append(self._mean_T + self.scale_T * mean_bT)
            variance_bC = self._posterior_variance(subsets, cross_Cbn) + self.hyperparameters["noise"]
            stds.append(self._std(subsets, variance_bC))
        return np.concatenate(means), np.concatenate(stds)

    def change(self, features: SubsetFeatures, corpus: SubsetFeatures) -> tuple[F64, F64]:
        """Return the utility of subsets minus that of the corpus, and its standard deviation, (B, T) each.

        The subset noise of a change is proportional to the prior variance of the difference from the corpus: it is 0
        at the corpus itself, and the noise of two subsets at the mean distance of the runs.

        Args:
            features: features of the subsets.
            corpus: features of the corpus.
        """
        corpus_features = self._scales.transform(corpus)
        corpus_cross_C1n = self._covariance.between(corpus_features, self.runs)
        run_distance_C = self._covariance.difference_variance(self.runs, corpus_features).mean(axis=0)
        means, stds = [], []
        for subsets in self._standardized_blocks(features):
            cross_Cbn = self._covariance.between(subsets, self.runs) - corpus_cross_C1n
            distance_bC = self._covariance.difference_variance(subsets, corpus_features)
            variance_bC = np.maximum(distance_bC - _variance_reduction(cross_Cbn, self._fit.inverse_Cnn), 0.0)
            variance_bC += 2 * self.hyperparameters["noise"] * distance_bC / np.maximum(run_distance_C, TINY)
            difference_bT = subsets.relevance_BT - corpus_features.relevance_BT
            means.append(self.scale_T * (difference_bT + matrix_product(cross_Cbn, self._run_weights_nT)))
            stds.append(self._std(subsets, variance_bC))
        return np.concatenate(means), np.concatenate(stds)

    def joint_posterior(self, features: SubsetFeatures, task: int) -> tuple[F64, F64, float]:
        """Return the posterior mean, (B,), and covariance, (B, B), of one task, and the noise variance of a run."""
        subsets, fit = self._scales.transform(features), self._fit
        c = task if len(fit.inverse_Cnn) > 1 else 0
        cross_Bn = self._covariance.between(subsets, self.runs)[c]
        prior_BB = self._covariance.between(subsets, subsets)[c]
        # The terms of `_posterior_variance`, for pairs of subsets.
        level_B = cross_Bn @ fit.level_weights_Cn[c]
        covariance_BB = prior_BB - cross_Bn @ fit.inverse_Cnn[c] @ cross_Bn.T
        covariance_BB += 1 / fit.level_precision_C[c] - level_B[:, None] - level_B
        mean_B = self._level_T[task] + subsets.relevance_BT[:, task] + cross_Bn @ self._run_weights_nT[:, task]
        scale = float(self.scale_T[task])
        noise = self.hyperparameters["noise"] + self.hyperparameters["seed noise"] + JITTER
        return self._mean_T[task] + scale * mean_B, scale**2 * covariance_BB, scale**2 * noise

    def held_out_residuals(self) -> F64:
        """Return the utility of each run minus its prediction from all other runs, (n, T); hyperparameters are fixed.

        The residual of y_i from the others is (P y)_i / P_ii: the identity for kriging with an estimated level.
        """
        diagonal_nC = np.diagonal(self._fit.inverse_Cnn, axis1=1, axis2=2).T
        return np.asarray(self.scale_T * self._run_weights_nT / diagonal_nC)

    def quantile(self, coverage: float) -> float:
        """Return half the width of a central interval in standard deviations, by Student's t distribution."""
        return float(stdtrit(self.degrees_of_freedom, 0.5 + coverage / 2))

    def relative_uncertainty(self, features: SubsetFeatures, coverage: float) -> F64:
        """Return the relative uncertainty of predictions, (B, T); a prediction above 1 should not be used.

        It is half the width of the interval of the noise-free utility over the range of the runs, or the distance from
        the runs over TESTED_DISTANCE, whichever is larger.

        Args:
            features: features of the subsets.
            coverage: of the interval.
        """
        blocks = []
        for subsets in self._standardized_blocks(features):
            cross_Cbn = self._covariance.between(subsets, self.runs)
            factor_b1 = self._scales.extrapolation_factor(subsets.share_BG)
            std_bT = np.sqrt(self._posterior_variance(subsets, cross_Cbn) + subsets.within_slice_BT**2) * factor_b1
            half_width_bT = self.quantile(coverage) * self.scale_T * std_bT / self.range_T
            blocks.append(np.maximum(half_width_bT, factor_b1 / TESTED_DISTANCE))
        return np.concatenate(blocks)

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
        _, covariance, noise = self.joint_posterior(SubsetFeatures.concatenate([subset, runs]), task)
        run_variance_B = np.maximum(np.diag(covariance)[1:], 0.0) + noise
        variance_B = covariance[0, 0] - covariance[0, 1:] ** 2 / run_variance_B
        # The additional run also moves the mean share of the runs and increases their distance from it.
        factors = []
        for run_share_G in runs.share_BG:
            share_nG = np.concatenate([self.runs.share_BG, run_share_G[None]])
            scales = replace(self._scales, share=Standardization.of_vectors(share_nG))
            factors.append(float(scales.extrapolation_factor(subset.share_BG)[0, 0]))
        factor_B = np.array(factors)
        half_width_B = self.quantile(coverage) * factor_B * np.sqrt(np.maximum(variance_B, 0.0)) / self.range_T[task]
        return np.asarray(np.maximum(half_width_B, factor_B / TESTED_DISTANCE))

    def relative_distance(self, features: SubsetFeatures, corpus: SubsetFeatures) -> F64:
        """Return the distance of subsets from the corpus relative to that of the farthest run, (B,).

        It is measured by the prior standard deviation of the difference.
        """
        corpus_features = self._scales.transform(corpus)
        farthest = float(self._covariance.difference_variance(self.runs, corpus_features).mean(axis=1).max())
        squares = [
            self._covariance.difference_variance(subsets, corpus_features).mean(axis=1)
            for subsets in self._standardized_blocks(features)
        ]
        return np.sqrt(np.concatenate(squares) / max(farthest, TINY))

    def finite_difference_gradient(self, at: SubsetFeatures, value: Callable[[SubsetFeatures], F64]) -> SubsetFeatures:
        """Return the gradient of a function with respect to the features of one subset.

        Each feature is shifted in a subset of its own, so that `value` is called only twice. Steps are relative to the
        standard deviations over the runs, or for a share to the share itself plus an even share.

        Args:
            at: features of one subset.
            value: function of the features of several subsets, (B,).
        """
        scales = self._scales
        step_1T = FEATURE_STEP * ratio(1.0, scales.relevance.inverse_std, minimum=TINY)[None]
        step_1P = SubsetFeatures(  # 0 if a feature is constant over the runs; a share may be 0, so an even one is added
            share_BG=FEATURE_STEP * (at.share_BG + 1 / max(at.share_BG.shape[1], 1)),
            relevance_BT=step_1T,
            kernel_BTM=FEATURE_STEP * ratio(1.0, scales.kernel.inverse_std, minimum=TINY)[None],
            sketch_BD=np.full_like(at.sketch_BD, FEATURE_STEP * ratio(1.0, scales.sketch.inverse_std, minimum=TINY)),
            within_slice_BT=step_1T,
        ).flat()
        difference_P = value(at.unflatten(at.flat() + np.diag(step_1P[0]))) - value(at)
        return at.unflatten(ratio(difference_P, step_1P))

    def _standardized_blocks(self, features: SubsetFeatures) -> Iterator[SubsetFeatures]:
        """Yield the standardized features of blocks of subsets, which bound the memory of covariances."""
        for start in range(0, len(features), BLOCK_SUBSETS):
            yield self._scales.transform(features.take(slice(start, start + BLOCK_SUBSETS)))

    def _std(self, subsets: SubsetFeatures, variance_bC: F64) -> F64:
        """Return the standard deviation of predictions in the unit of the utilities, (b, T).

        Args:
            subsets: standardized features.
            variance_bC: variance by the model, in units of s^2. The factor for extrapolation and the uncertainty from
                selection within slices are added to it.
        """
        variance_bC = variance_bC * self._scales.extrapolation_factor(subsets.share_BG) ** 2
        return np.asarray(self.scale_T * np.sqrt(variance_bC + subsets.within_slice_BT**2))

    def _posterior_variance(self, subsets: SubsetFeatures, cross_Cbn: F64) -> F64:
        """Return the posterior variance of level and g, (b, C).

        With k the covariance of a subset with the runs, it is k_bb - k'P k + 1 / (1'K^-1 1) - 2 k'K^-1 1 / (1'K^-1 1):
        the last two terms are the variance of the estimated level, and its covariance with g. Where the runs determine
        a subset almost exactly, the difference cancels, and rounding may make it negative.

        Args:
            subsets: standardized features.
            cross_Cbn: covariance between the subsets and the runs.
        """
        variance_bC = (
            self._covariance.variance(subsets)
            - _variance_reduction(cross_Cbn, self._fit.inverse_Cnn)
            + 1 / self._fit.level_precision_C
            - 2 * np.einsum("cbn,cn->bc", cross_Cbn, self._fit.level_weights_Cn)
        )
        return np.asarray(np.maximum(variance_bC, 0.0))


def varies(utility_nST: F64) -> Bool:
    """Return whether the mean over seeds of each task differs between runs, (T,); True for a single run."""
    return np.asarray((np.ptp(np.nanmean(utility_nST, axis=1), axis=0) > 0) | (len(utility_nST) < 2))


def _variance_reduction(cross_Cbn: F64, inverse_Cnn: F64) -> F64:
    """Return k'P k, the reduction of the variance of each subset by the runs, (b, C)."""
    return np.asarray(np.einsum("cbn,cbn->bc", cross_Cbn @ inverse_Cnn, cross_Cbn))
