"""A law of mixtures: the utility of a model as a function of the shares of its training data, from few runs.

    u(h) = u* - 1 / z(h),     z(h) = c_0 + sum_g c_g h_g^gamma,     c >= 0

with h_g the share of value g, and u* the utility that no mixture exceeds. Each value adds to z with diminishing
returns, and c_0 is what the model knows without any of them. Source: arXiv 2507.09404, its law for the loss of a
mixture at one size. Deviation: one exponent for all values, so that the coefficients have a closed form, and the
constant c_0, which keeps the loss finite where all values with a coefficient are absent.

Given u* and gamma, z is linear in c, so that c follows from non-negative least squares. An error dz of z is an error
dz / z^2 = (u* - u)^2 dz of u, so runs are weighted by (u* - u)^2; then the target of the regression is
(u* - u)^2 / (u* - u) = u* - u. A ridge penalty draws the coefficients to an equal value: with fewer runs than values,
the sum of h^gamma, which is a measure of diversity, still predicts. u*, gamma and the penalty minimise the errors on
held-out folds of the runs, those of the metric plus the mean over all metrics, since metrics of one set of runs are
alike. The law is invariant to the scale and the offset of a metric.

Runs of several sizes or lengths have one law, the joint law of the same source, with exponents of 1 in it:

    u(h, N, D) = u* - 1 / z(h) - (N / N_0)^-a sum_g d_g h_g - (D / D_0)^-b sum_g e_g h_g,     d, e >= 0

with N parameters, D tokens and their geometric means N_0, D_0 over the runs. What a value costs a small or short run
may differ between values, so that the order of mixtures may change with the size. c and (d, e) are fitted in turn, as
the rest of each other. a and b are those of arXiv 2203.15556 (.34, .28), unless three or more sizes or lengths
determine them: then the errors at the largest one count too, predicted from all others. Folds hold out a mixture at
all of its sizes.

The Gaussian process takes the law as its prior mean (`fit_process`), in the place of the relevance of an artifact, if
that lowers its held-out errors. It receives what the law predicts for runs that were held out, and so learns how far
the law can be trusted. Measured in experiments/runs.
Shape letters: R runs, S seeds, B mixtures, G label values, T metrics, K settings, F folds and all runs, J coefficients,
X size and length.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Self

import numpy as np
from scipy.optimize import nnls

from grasp.arrays import F64, Bool, Integers
from grasp.runs.gaussian_process import GaussianProcess
from grasp.runs.subset_features import SubsetFeatures

EXPONENTS = (0.2, 0.35, 0.5, 0.7, 1.0)
MARGINS = (0.05, 0.2, 0.5, 1.0, 3.0)  # u* minus the largest utility of a run, over the range of the runs
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
SETTINGS = tuple(product(EXPONENTS, MARGINS, PENALTIES))
SCALED_SETTINGS = tuple(product((0.35, 0.7), (0.05, 0.2, 0.5, 1.0), (1e-2,)))  # with several sizes; a and b vary too
TURNS = 3  # fits of c and (d, e) in turn
MIN_REST = 0.05  # least part of u* - u that is left to 1 / z
GROWTH = (0.34, 0.28)  # a and b
GROWTHS = (0.2, 0.34, 0.5)  # values of a and b, if they can be determined
MIN_SCALES = 3  # sizes or lengths that determine a or b
MAX_FOLDS = 8
EQUAL_DECIMALS = 6  # mixtures of several sizes are the same if their shares agree to this many decimals
MIN_RUNS = 8  # with fewer runs held-out errors do not show whether the law holds
SMALLEST = 1e-12  # of z, where the prediction is the floor


@dataclass(frozen=True, slots=True)
class MetricLaw:
    """The law of one metric.

    Attributes:
        exponent: gamma.
        ceiling: u*, in the unit of the metric.
        growth_X: a and b; none for runs of one size and length.
        coefficient_J: c of each value and c_0, then d and e of each value if there are several sizes or lengths.
    """

    exponent: float
    ceiling: float
    growth_X: F64
    coefficient_J: F64

    def predict(self, share_BG: F64, scale_BX: F64) -> F64:
        """Return the metric of mixtures, (B,), at sizes and lengths relative to the logarithms of N_0 and D_0."""
        power_BJ, cost_BJ = _powers(share_BG, self.exponent), _costs(share_BG, scale_BX, self.growth_X)
        return _utility(self.ceiling, power_BJ, cost_BJ, self.coefficient_J)


@dataclass(frozen=True, slots=True)
class MixtureLaw:
    """The laws of all metrics; create it with `fit`.

    Attributes:
        laws: of each metric.
        variants: for each metric other laws with weights, which tell the error of predictions; none for runs of one
            size and length.
        centre_X: log N_0 and log D_0.
        largest_X: logarithm of the largest size and length; the step to it from the next one is `step_X`.
        extrapolation_T: root mean square error at the largest size, predicted from all others; 0 with fewer than three
            sizes.
        floor_T: least utility that is predicted: one range of the runs below their least.
        mean_T: mean of the predictions for held-out runs, which predictions are relative to.
    """

    laws: tuple[MetricLaw, ...]
    variants: tuple[tuple[tuple[float, MetricLaw], ...], ...]
    centre_X: F64
    largest_X: F64
    step_X: F64
    extrapolation_T: F64
    floor_T: F64
    mean_T: F64

    @classmethod
    def fit(cls, share_RG: F64, utility_RT: F64, log_scale_RX: F64 | None = None) -> tuple[Self, F64]:
        """Fit the law to runs.

        Args:
            share_RG: mixture of each run; rows add up to 1.
            utility_RT: metrics of each run; higher is better, and each metric differs between runs.
            log_scale_RX: logarithm of parameters and tokens of each run; None: all runs are alike in both.

        Returns:
            The law, and its predictions (R, T) for the runs of each fold from those of all other folds, with mean 0.
        Cost: linear in metrics, settings and folds; 13 metrics of 64 runs take a second.
        """
        n_runs, n_metrics = utility_RT.shape
        mixture_R, settings, has_scales = np.arange(n_runs), SETTINGS, log_scale_RX is not None
        log_scale_RX = np.empty((n_runs, 0)) if log_scale_RX is None else log_scale_RX
        if has_scales:
            settings = SCALED_SETTINGS
            mixture_R = np.unique(share_RG.round(EQUAL_DECIMALS), axis=0, return_inverse=True)[1].reshape(-1)
        centre_X, largest_X = log_scale_RX.mean(axis=0), log_scale_RX.max(axis=0)
        next_X = np.where(log_scale_RX < largest_X, log_scale_RX, -np.inf).max(axis=0)
        scale_RX, fold_R = log_scale_RX - centre_X, mixture_R % MAX_FOLDS
        n_scales_X = np.array([len(np.unique(scale_R)) for scale_R in scale_RX.T])
        # runs at the largest of enough sizes or lengths
        largest_R = (log_scale_RX >= largest_X)[:, n_scales_X >= MIN_SCALES].any(axis=1)
        growths_X = (
            (0.0,) if n_scales == 1 else (default,) if n_scales < MIN_SCALES else GROWTHS
            for n_scales, default in zip(n_scales_X, GROWTH, strict=False)
        )
        growths = list(product(*growths_X))
        fits: list[list[_MetricFit]] = [[] for _ in range(n_metrics)]  # by metric and setting
        for (exponent, margin, penalty), growth in product(settings, growths):
            growth_X = np.array(growth)
            power_RJ, cost_RJ = _powers(share_RG, exponent), _costs(share_RG, scale_RX, growth_X)
            for utility_R, of_metric in zip(utility_RT.T, fits, strict=True):
                ceiling = float(utility_R.max() + margin * np.ptp(utility_R))
                excess_R = ceiling - utility_R
                of_metric.append(_MetricFit(exponent, ceiling, growth_X, penalty, power_RJ, cost_RJ, excess_R, fold_R))
        held_out_TKR = np.array([[fit.held_out() for fit in of_metric] for of_metric in fits])
        floor_T, variance_T1 = utility_RT.min(axis=0) - np.ptp(utility_RT, axis=0), utility_RT.var(axis=0)[:, None]
        held_out_TKR = np.maximum(held_out_TKR, floor_T[:, None, None])
        error_TK = ((held_out_TKR - utility_RT.T[:, None]) ** 2).mean(axis=2) / variance_T1
        extrapolation_TK = np.zeros_like(error_TK)
        if largest_R.any():
            extrapolation_TK = np.array([[fit.error_beyond(largest_R) for fit in of_metric] for of_metric in fits])
        error_TK += extrapolation_TK / variance_T1
        error_TK += error_TK.mean(axis=0)
        chosen_T, every_R = error_TK.argmin(axis=1), np.ones(n_runs, dtype=bool)
        held_out_RT = held_out_TKR[np.arange(n_metrics), chosen_T].T
        mean_T = held_out_RT.mean(axis=0)
        variants: list[tuple[tuple[float, MetricLaw], ...]] = []
        if has_scales:
            folds, n_mixtures = np.unique(fold_R), len(np.unique(mixture_R))
            jackknife = (len(folds) - 1) / len(folds)
            for of_metric, error_K, k in zip(fits, error_TK, chosen_T, strict=True):
                likelihood_K = (error_K / error_K.min()) ** (-n_mixtures / 2)
                weights = (likelihood_K / likelihood_K.sum()).tolist()
                others = [(weight, fit.law(every_R)) for weight, fit in zip(weights, of_metric, strict=True)]
                variants.append((*((jackknife, of_metric[k].law(fold_R != fold)) for fold in folds), *others))
        law = cls(
            tuple(of_metric[k].law(every_R) for of_metric, k in zip(fits, chosen_T, strict=True)),
            tuple(variants),
            centre_X,
            largest_X,
            largest_X - next_X,  # infinite if there is no other
            np.sqrt(extrapolation_TK[np.arange(n_metrics), chosen_T]),
            floor_T,
            mean_T,
        )
        return law, held_out_RT - mean_T

    def predict(self, share_BG: F64, log_scale_X: F64 | None = None) -> F64:
        """Return the metrics of mixtures minus `mean_T`, (B, T), at a size and length if the runs have several."""
        scale_1X = self._relative(log_scale_X)
        value_BT = np.stack([law.predict(share_BG, scale_1X) for law in self.laws], axis=1)
        return np.asarray(np.maximum(value_BT, self.floor_T) - self.mean_T)

    def level(self, share_RG: F64, log_scale_X: F64) -> F64:
        """Return the mean prediction over the mixtures of the runs, (T,), at a size and length."""
        return np.asarray(self.predict(share_RG, log_scale_X).mean(axis=0))

    def std(self, share_BG: F64, log_scale_X: F64, relative_to_G: F64 | None = None) -> F64:
        """Return the standard deviation of `predict`, (B, T), or of its difference from that of one mixture.

        It has three parts: the jackknife over folds of the runs; the spread of other settings (u*, gamma, a and b),
        weighted by their likelihood given held-out errors; and beyond the largest size the error that was made one step
        ahead, times the number of steps.
        """
        n_steps = float(((log_scale_X - self.largest_X) / self.step_X).max(initial=0.0))
        scale_1X, base_BG = self._relative(log_scale_X), share_BG if relative_to_G is None else relative_to_G[None]
        variance_TB: list[Any] = []
        for law, others in zip(self.laws, self.variants, strict=True):
            law_B, base_B = law.predict(share_BG, scale_1X), law.predict(base_BG, scale_1X)
            errors = [
                (w, v.predict(share_BG, scale_1X) - law_B, v.predict(base_BG, scale_1X) - base_B) for w, v in others
            ]
            common = 0.0 if relative_to_G is None else 1.0
            variance_TB.append(sum(w * (error_B - common * base_error_B) ** 2 for w, error_B, base_error_B in errors))
        shared_T = n_steps * self.extrapolation_T if relative_to_G is None else 0.0  # which all mixtures have in common
        return np.hypot(np.sqrt(variance_TB).T, shared_T)

    def _relative(self, log_scale_X: F64 | None) -> F64:
        return np.zeros((1, 0)) if log_scale_X is None else (log_scale_X - self.centre_X)[None]


@dataclass(frozen=True, slots=True)
class _MetricFit:
    """The regression of one metric with one setting."""

    exponent: float
    ceiling: float
    growth_X: F64
    penalty: float
    power_RJ: F64  # what c is multiplied by
    cost_RJ: F64  # what d and e are multiplied by
    excess_R: F64  # u* - u
    fold_R: Integers

    def law(self, fitted_R: Bool) -> MetricLaw:
        return MetricLaw(self.exponent, self.ceiling, self.growth_X, self.coefficients(fitted_R))

    def coefficients(self, fitted_R: Bool) -> F64:
        """Return c, d and e, (J,); see the docstring of this module."""
        excess_R, power_RJ, cost_RJ = self.excess_R, self.power_RJ, self.cost_RJ
        if not cost_RJ.size:
            return self._regression(power_RJ * excess_R[:, None] ** 2, excess_R, fitted_R)
        cost_J = self._regression(np.concatenate([power_RJ, cost_RJ], axis=1), excess_R, fitted_R)[power_RJ.shape[1] :]
        for _ in range(TURNS):
            rest_R = np.maximum(excess_R - cost_RJ @ cost_J, MIN_REST * excess_R)
            value_J = self._regression(power_RJ * rest_R[:, None] ** 2, rest_R, fitted_R)
            rest_R = excess_R - 1.0 / np.maximum(power_RJ @ value_J, SMALLEST)
            cost_J = self._regression(cost_RJ, rest_R, fitted_R)
        return np.concatenate([value_J, cost_J])

    def _regression(self, feature_RJ: F64, target_R: F64, fitted_R: Bool) -> F64:
        """Minimise |features c - target|^2 + penalty |c - equal|^2 over c >= 0, with `equal` fitted to all runs."""
        n_columns = feature_RJ.shape[1]
        equal = max(float(target_R.sum() / feature_RJ.sum()), 0.0)
        scaled = self.penalty * float((feature_RJ**2).sum()) / n_columns
        root_JJ = np.sqrt(scaled) * np.eye(n_columns)
        rows = np.concatenate([feature_RJ[fitted_R], root_JJ])
        coefficient_J, _ = nnls(rows, np.concatenate([target_R[fitted_R], root_JJ.sum(axis=0) * equal]))
        return np.asarray(coefficient_J)

    def held_out(self) -> F64:
        predicted_R = np.empty(len(self.fold_R))
        for fold in np.unique(self.fold_R):
            predicted_R[self.fold_R == fold] = self._predicted(self.fold_R == fold, self.fold_R != fold)
        return predicted_R

    def error_beyond(self, largest_R: Bool) -> float:
        """Return the mean squared error at the largest size or length, predicted from all others."""
        predicted_R = self._predicted(largest_R, ~largest_R)
        return float(((self.ceiling - self.excess_R[largest_R] - predicted_R) ** 2).mean())

    def _predicted(self, selected_R: Bool, fitted_R: Bool) -> F64:
        coefficient_J = self.coefficients(fitted_R)
        return _utility(self.ceiling, self.power_RJ[selected_R], self.cost_RJ[selected_R], coefficient_J)


def _powers(share_BG: F64, exponent: float) -> F64:
    return np.concatenate([share_BG**exponent, np.ones((len(share_BG), 1))], axis=1)


def _costs(share_BG: F64, scale_BX: F64, growth_X: F64) -> F64:
    """Return shares times (N / N_0)^-a, and times (D / D_0)^-b, (B, J), of those in which runs differ."""
    columns = [np.exp(-growth_X[x] * scale_BX[:, x, None]) * share_BG for x in np.flatnonzero(growth_X)]
    return np.concatenate([np.empty((len(share_BG), 0)), *columns], axis=1)


def _utility(ceiling: float, power_BJ: F64, cost_BJ: F64, coefficient_J: F64) -> F64:
    """Return the law for one or several vectors of coefficients."""
    n_values = power_BJ.shape[1]
    z = np.maximum(power_BJ @ coefficient_J[:n_values], SMALLEST)
    return np.asarray(ceiling - 1.0 / z - cost_BJ @ coefficient_J[n_values:])


def fit_process(
    share_RG: F64, utility_RST: F64, log_scale_RX: F64 | None = None
) -> tuple[MixtureLaw | None, GaussianProcess]:
    """Fit the process to runs, with the law as its prior mean where that predicts held-out runs better.

    With several sizes or lengths the law is always taken: the process knows shares only.

    Returns:
        The law whose predictions are the relevance of mixtures in the process, or None; and the process.
    """
    utility_RT = np.nanmean(utility_RST, axis=1)
    features = SubsetFeatures.from_shares(share_RG, utility_RT.shape[1])
    if len(share_RG) < MIN_RUNS and log_scale_RX is None:
        return None, GaussianProcess.fit(features, utility_RST)
    law, held_out_RT = MixtureLaw.fit(share_RG, utility_RT, log_scale_RX)
    if log_scale_RX is not None:  # the process is fitted to what is left at each size, relative to its level
        scale_UX, scale_R = np.unique(log_scale_RX, axis=0, return_inverse=True)
        level_RT = np.stack([law.level(share_RG, scale_X) for scale_X in scale_UX])[scale_R.reshape(-1)]
        relevance = replace(features, relevance_BT=held_out_RT - level_RT)
        return law, GaussianProcess.fit(relevance, utility_RST - level_RT[:, None])
    process = GaussianProcess.fit(features, utility_RST)
    with_law = GaussianProcess.fit(replace(features, relevance_BT=held_out_RT), utility_RST)
    errors = [
        float(((fit.held_out_residuals() ** 2).mean(axis=0) / utility_RT.var(axis=0)).mean())
        for fit in (process, with_law)
    ]
    return (law, with_law) if errors[1] < errors[0] else (None, process)
