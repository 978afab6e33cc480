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

The Gaussian process takes the law as its prior mean (`fit_process`), in the place of the relevance of an artifact, if
that lowers its held-out errors. It receives what the law predicts for runs that were held out, and so learns how far
the law can be trusted. Measured in experiments/runs.
Shape letters: R runs, S seeds, B mixtures, G label values, T metrics, K settings, J values and the constant.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Self

import numpy as np
from scipy.optimize import nnls

from grasp.arrays import F64, Bool
from grasp.runs.gaussian_process import GaussianProcess
from grasp.runs.subset_features import SubsetFeatures

EXPONENTS = (0.2, 0.35, 0.5, 0.7, 1.0)
MARGINS = (0.05, 0.2, 0.5, 1.0, 3.0)  # u* minus the largest utility of a run, over the range of the runs
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1)
SETTINGS = tuple(product(EXPONENTS, MARGINS, PENALTIES))
MAX_FOLDS = 8
MIN_RUNS = 8  # with fewer runs held-out errors do not show whether the law holds
SMALLEST = 1e-12  # of z, where the prediction is the floor


@dataclass(frozen=True, slots=True)
class MixtureLaw:
    """The law of each metric; create it with `fit`.

    Attributes:
        exponent_T: gamma.
        ceiling_T: u*, in the unit of the metric.
        coefficient_TJ: c of each value, and last c_0.
        floor_T: least utility that is predicted: one range of the runs below their least.
        mean_T: mean of the predictions for held-out runs, which predictions are relative to.
    """

    exponent_T: F64
    ceiling_T: F64
    coefficient_TJ: F64
    floor_T: F64
    mean_T: F64

    @classmethod
    def fit(cls, share_RG: F64, utility_RT: F64) -> tuple[Self, F64]:
        """Fit the law to runs.

        Args:
            share_RG: mixture of each run; rows add up to 1.
            utility_RT: metrics of each run; higher is better, and each metric differs between runs.

        Returns:
            The law, and its predictions (R, T) for the runs of each fold from those of all other folds, with mean 0.
        Cost: linear in metrics, settings and folds; 13 metrics of 64 runs take a second.
        """
        n_metrics = utility_RT.shape[1]
        fits = [[_MetricFit.of(share_RG, utility_RT[:, t], *setting) for setting in SETTINGS] for t in range(n_metrics)]
        held_out_TKR = np.array([[fit.held_out() for fit in of_metric] for of_metric in fits])
        floor_T = utility_RT.min(axis=0) - np.ptp(utility_RT, axis=0)
        held_out_TKR = np.maximum(held_out_TKR, floor_T[:, None, None])
        error_TK = ((held_out_TKR - utility_RT.T[:, None]) ** 2).mean(axis=2) / utility_RT.var(axis=0)[:, None]
        chosen_T = (error_TK + error_TK.mean(axis=0)).argmin(axis=1)
        chosen = [of_metric[k] for of_metric, k in zip(fits, chosen_T, strict=True)]
        held_out_RT = held_out_TKR[np.arange(n_metrics), chosen_T].T
        mean_T = held_out_RT.mean(axis=0)
        law = cls(
            np.array([fit.exponent for fit in chosen]),
            np.array([fit.ceiling for fit in chosen]),
            np.stack([fit.coefficients(np.ones(len(share_RG), dtype=bool)) for fit in chosen]),
            floor_T,
            mean_T,
        )
        return law, held_out_RT - mean_T

    def predict(self, share_BG: F64) -> F64:
        """Return the metrics of mixtures minus `mean_T`, (B, T)."""
        laws = zip(self.exponent_T, self.ceiling_T, self.coefficient_TJ, strict=True)
        value_BT = np.stack([_utility(ceiling, _powers(share_BG, gamma) @ c_J) for gamma, ceiling, c_J in laws], axis=1)
        return np.maximum(value_BT, self.floor_T) - self.mean_T


@dataclass(frozen=True, slots=True)
class _MetricFit:
    """The regression of one metric with one setting."""

    exponent: float
    ceiling: float
    power_RJ: F64
    weighted_RJ: F64  # rows times (u* - u)^2
    target_R: F64
    equal: float  # the coefficient that all would have
    penalty: float

    @classmethod
    def of(cls, share_RG: F64, utility_R: F64, exponent: float, margin: float, penalty: float) -> Self:
        ceiling = float(utility_R.max() + margin * np.ptp(utility_R))
        power_RJ, target_R = _powers(share_RG, exponent), ceiling - utility_R
        weighted_RJ = power_RJ * target_R[:, None] ** 2
        equal = float(target_R.sum() / weighted_RJ.sum())
        scaled = penalty * float((weighted_RJ**2).sum()) / power_RJ.shape[1]
        return cls(exponent, ceiling, power_RJ, weighted_RJ, target_R, equal, scaled)

    def coefficients(self, fitted_R: Bool) -> F64:
        """Minimise |weighted c - target|^2 + penalty |c - equal|^2 over c >= 0."""
        root_JJ = np.sqrt(self.penalty) * np.eye(self.power_RJ.shape[1])
        rows = np.concatenate([self.weighted_RJ[fitted_R], root_JJ])
        coefficient_J, _ = nnls(rows, np.concatenate([self.target_R[fitted_R], root_JJ.sum(axis=0) * self.equal]))
        return np.asarray(coefficient_J)

    def held_out(self) -> F64:
        fold_R = np.arange(len(self.target_R)) % MAX_FOLDS
        predicted_R = np.empty(len(fold_R))
        for fold in np.unique(fold_R):
            predicted_R[fold_R == fold] = self.power_RJ[fold_R == fold] @ self.coefficients(fold_R != fold)
        return _utility(self.ceiling, predicted_R)


def _powers(share_BG: F64, exponent: float) -> F64:
    return np.concatenate([share_BG**exponent, np.ones((len(share_BG), 1))], axis=1)


def _utility(ceiling: float, z_B: F64) -> F64:
    return np.asarray(ceiling - 1.0 / np.maximum(z_B, SMALLEST))


def fit_process(share_RG: F64, utility_RST: F64) -> tuple[MixtureLaw | None, GaussianProcess]:
    """Fit the process to runs, with the law as its prior mean where that predicts held-out runs better.

    Returns:
        The law whose predictions are the relevance of mixtures in the process, or None; and the process.
    """
    utility_RT = np.nanmean(utility_RST, axis=1)
    features = SubsetFeatures.from_shares(share_RG, utility_RT.shape[1])
    process = GaussianProcess.fit(features, utility_RST)
    if len(share_RG) < MIN_RUNS:
        return None, process
    law, held_out_RT = MixtureLaw.fit(share_RG, utility_RT)
    with_law = GaussianProcess.fit(replace(features, relevance_BT=held_out_RT), utility_RST)
    errors = [
        float(((fit.held_out_residuals() ** 2).mean(axis=0) / utility_RT.var(axis=0)).mean())
        for fit in (process, with_law)
    ]
    return (law, with_law) if errors[1] < errors[0] else (None, process)
