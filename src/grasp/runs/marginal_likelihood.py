"""Hyperparameters of the Gaussian process of `grasp.runs.gaussian_process`, by maximum marginal likelihood.

The variances of the components of the covariance, its shape parameters and the variances of the noise are shared by all
tasks. They maximise the marginal likelihood times the log-normal `PRIORS`. The level and the scale of each task are
eliminated in closed form, see `ClosedFormFit`. Start with `MarginalLikelihood`.

Noise has two variances: "noise" per subset, which is what no component explains, and "seed noise" per training run.
Subsets that were trained with several seeds identify the second: their sums of squares within subsets enter the
likelihood, and the mean over n seeds has 1 / n of it.

Shape letters: n runs, T tasks. C is the number of covariance matrices: 1 if no component depends on the task, else T.
In formulas, 1 is the vector of ones, y the utilities of a task, r its predictions, K the covariance of the runs with
noise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from scipy.optimize import minimize

from grasp.arrays import F64, ratio
from grasp.runs.subset_covariance import (
    SHAPE_PARAMETERS,
    SHARE_COMPONENTS,
    ShareCovariance,
    linear_covariances,
    weighted_sum,
)
from grasp.runs.subset_features import TINY, SubsetFeatures
from grasp.seeds import stream

JITTER = 1e-6  # added to the diagonal of the covariance
MAX_ITERATIONS = 40  # of a search
PRIOR_BOUND = 4.0  # bounds of a hyperparameter, in standard deviations of its prior
# upper bound of the log variance of a component of the shares, which keeps the covariance well conditioned
MAX_LOG_VARIANCE = 3.0
LOG_STEP = 1e-4  # finite-difference step of log shape parameters
# Mean and standard deviation of the logarithm of each hyperparameter. Variances are relative to that of r, which is 1.
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


@dataclass(frozen=True, slots=True)
class RunData:
    """Standardized features and utilities of the runs.

    Attributes:
        runs: standardized features.
        utility_nT: mean over seeds, centred over the runs.
        seeds_n: number of seeds of each run.
        seed_squares_T: sum of squared deviations of seeds from the mean of their run.
        degrees_of_freedom: of `seed_squares_T`; 0 if every run has one seed.
    """

    runs: SubsetFeatures
    utility_nT: F64
    seeds_n: F64
    seed_squares_T: F64
    degrees_of_freedom: float

    def sample(self, max_runs: int) -> "RunData":
        """Return at most this many of the runs, a fixed random sample."""
        if len(self.runs) <= max_runs:
            return self
        index = np.sort(stream(0, "learned", "sample", len(self.runs)).permutation(len(self.runs))[:max_runs])
        fraction = max_runs / len(self.runs)
        utility_nT = self.utility_nT[index]
        return RunData(
            self.runs.take(index),
            utility_nT - utility_nT.mean(axis=0),
            self.seeds_n[index],
            self.seed_squares_T * fraction,
            self.degrees_of_freedom * fraction,
        )

    def noise_nn(self, hyperparameters: Mapping[str, float]) -> F64:
        """Return the covariance of the noise of the runs."""
        return np.asarray(np.diag(hyperparameters["noise"] + hyperparameters["seed noise"] / self.seeds_n + JITTER))


@dataclass(frozen=True, slots=True)
class ClosedFormFit:
    """Level and scale of each task, and the marginal likelihood, given the covariance of the runs.

    With u = 1 / s, the model is u y = level + r + g + noise. Integrating out a free level replaces K^-1 by
    P = K^-1 - K^-1 1 1'K^-1 / (1'K^-1 1) and adds log(1'K^-1 1) to log det K (restricted likelihood). With q = y'P y,
    p = r'P y and m degrees of freedom, the log likelihood is m log u - q u^2 / 2 + p u - r'P r / 2 - (log det) / 2.
    It is maximal at the positive root of q u^2 - p u - m = 0.

    Attributes:
        inverse_Cnn: P.
        level_weights_Cn: weights K^-1 1 / (1'K^-1 1) of the runs in the estimate of the level.
        level_precision_C: 1'K^-1 1, the inverse variance of the level.
        inverse_scale_T: maximum likelihood estimate of u.
        likelihood: maximum of the log likelihood, summed over tasks.
    """

    inverse_Cnn: F64
    level_weights_Cn: F64
    level_precision_C: F64
    inverse_scale_T: F64
    likelihood: float

    @classmethod
    def from_covariance(cls, k_Cnn: F64, data: RunData, hyperparameters: Mapping[str, float]) -> Self:
        """Compute the fit for the covariance K of the runs, noise included."""
        r_nT, y_nT = data.runs.relevance_BT, data.utility_nT
        # The inverse itself, not a Cholesky factor, since the gradient of the likelihood needs P.
        # The jitter on the diagonal of K bounds its condition number.
        full_inverse_Cnn = np.linalg.inv(k_Cnn)
        row_sums_Cn = full_inverse_Cnn.sum(axis=2)  # K^-1 1
        level_precision_C = row_sums_Cn.sum(axis=1)
        level_weights_Cn = row_sums_Cn / level_precision_C[:, None]
        inverse_Cnn = full_inverse_Cnn - row_sums_Cn[:, :, None] * level_weights_Cn[:, None, :]
        py_nT = matrix_product(inverse_Cnn, y_nT)
        q_T = np.einsum("nt,nt->t", y_nT, py_nT)
        p_T = np.einsum("nt,nt->t", r_nT, py_nT)
        log_det_C = np.linalg.slogdet(k_Cnn)[1] + np.log(level_precision_C)
        if data.degrees_of_freedom:  # the likelihood of deviations of seeds from the mean of their run
            q_T = q_T + data.seed_squares_T / hyperparameters["seed noise"]
            log_det_C = log_det_C + data.degrees_of_freedom * np.log(hyperparameters["seed noise"])
        m = len(y_nT) - 1 + data.degrees_of_freedom
        u_T = (p_T + np.sqrt(p_T**2 + 4 * q_T * m)) / (2 * q_T)
        r_square_T = np.einsum("nt,nt->t", r_nT, matrix_product(inverse_Cnn, r_nT))
        likelihood_T = m * np.log(u_T) - 0.5 * q_T * u_T**2 + p_T * u_T - 0.5 * r_square_T
        # of all tasks, also if they share one covariance
        half_log_det = 0.5 * float(log_det_C.sum()) * len(u_T) / len(k_Cnn)
        likelihood = float(likelihood_T.sum()) - half_log_det
        return cls(inverse_Cnn, level_weights_Cn, level_precision_C, u_T, likelihood)

    def residuals(self, data: RunData) -> F64:
        """Return u y - r, which the model explains by level, g and noise, (n, T), in units of s."""
        return np.asarray(data.utility_nT * self.inverse_scale_T - data.runs.relevance_BT)


class MarginalLikelihood:
    """Log posterior of the hyperparameters, as a function of their logarithms.

    Attributes:
        data: the runs.
        names: hyperparameters that are fitted: those of components that vary over the runs.
        prior: mean and standard deviation of their logarithms, (len(names), 2).
    """

    def __init__(self, data: RunData) -> None:
        runs = data.runs
        self.data = data
        self._linear_covariances = {
            name: k_Cnn
            for name, k_Cnn in linear_covariances(runs, runs).items()
            if np.abs(k_Cnn).max(initial=0.0) > TINY
        }
        self._has_shares = bool(runs.share_BG.size) and bool(np.ptp(runs.share_BG, axis=0).max() > 0)
        names = [*(SHAPE_PARAMETERS + SHARE_COMPONENTS if self._has_shares else ()), *self._linear_covariances, "noise"]
        self.names = (*names, *(("seed noise",) if data.degrees_of_freedom else ()))
        self.prior = np.array([PRIORS[name] for name in self.names])
        # Weight of the likelihood, between 1 if the utilities of tasks are uncorrelated over the runs and 1 / T if they
        # all agree. One model is evaluated on all tasks, so its noise is correlated between them; if it were counted T
        # times, it would be fitted as a pattern.
        unit_nT = data.utility_nT * ratio(1.0, np.sqrt((data.utility_nT**2).sum(axis=0)), minimum=TINY)
        self._likelihood_weight = float(unit_nT.shape[1] / np.maximum(((unit_nT.T @ unit_nT) ** 2).sum(), 1.0))

    def maximise(self) -> dict[str, float]:
        """Return the hyperparameters of the best of one or two searches, by the names in PRIORS.

        The variance of a component that does not vary over the runs is 0, and an unused shape parameter is 1.
        """
        mean, std = self.prior.T
        upper_limit = np.where([name in SHARE_COMPONENTS for name in self.names], MAX_LOG_VARIANCE, np.inf)
        lower, upper = mean - PRIOR_BOUND * std, np.minimum(mean + PRIOR_BOUND * std, upper_limit)
        starts: list[F64] = [mean]
        if self._has_shares:
            starts.append(mean + std * np.array([STRAIGHT_START.get(name, 0.0) for name in self.names]))
        bounds = list(zip(lower, upper, strict=True))
        fits = [
            minimize(self.loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options={"maxiter": MAX_ITERATIONS})
            for start in starts
        ]
        best_fit = min(fits, key=lambda result: float(result.fun))
        fitted = dict(zip(self.names, np.exp(best_fit.x).tolist(), strict=True))
        return {name: fitted.get(name, 1.0 if name in SHAPE_PARAMETERS else 0.0) for name in PRIORS}

    def loss(self, theta: F64) -> tuple[float, F64]:
        """Return the negative log posterior and its gradient.

        Args:
            theta: logarithms of the hyperparameters in the order of `names`.
        """
        hyperparameters = dict.fromkeys(PRIORS, 0.0)
        hyperparameters |= dict(zip(self.names, np.exp(theta).tolist(), strict=True))
        log_shape = theta[: len(SHAPE_PARAMETERS)]
        of_shares = self._share_covariances(log_shape)
        components = self._linear_covariances | {name: k_nn[None] for name, k_nn in of_shares.items()}
        k_Cnn = weighted_sum(hyperparameters, components) + self.data.noise_nn(hyperparameters)
        fit = ClosedFormFit.from_covariance(k_Cnn, self.data, hyperparameters)
        # M, the derivative of the negative log likelihood with respect to K, (C, n, n). u maximises the likelihood, so
        # its derivative vanishes: M = (P - (P e)(P e)') / 2 with e = u y - r, per task.
        p_Cnn = fit.inverse_Cnn
        pe_nT = matrix_product(p_Cnn, fit.residuals(self.data))
        if len(p_Cnn) == 1:
            m_Cnn = 0.5 * (pe_nT.shape[1] * p_Cnn - (pe_nT @ pe_nT.T)[None])
        else:
            m_Cnn = 0.5 * (p_Cnn - np.einsum("nt,mt->tnm", pe_nT, pe_nT))
        # The derivative with respect to a hyperparameter x is tr(M dK/dx), and d/d log x = x d/dx.
        derivatives = {name: hyperparameters[name] * (dk_Cnn * m_Cnn).sum() for name, dk_Cnn in components.items()}
        for k, name in enumerate(SHAPE_PARAMETERS if self._has_shares else ()):  # by finite differences of K
            shifted = self._share_covariances(log_shape + LOG_STEP * (np.arange(len(SHAPE_PARAMETERS)) == k))
            changes = (
                hyperparameters[component] * ((shifted[component] - of_shares[component]) * m_Cnn).sum()
                for component in SHARE_COMPONENTS
            )
            derivatives[name] = sum(changes) / LOG_STEP
        data, u_T = self.data, fit.inverse_scale_T
        diagonal_n = np.einsum("cnn->n", m_Cnn)  # the noise is on the diagonal of K
        derivatives["noise"] = hyperparameters["noise"] * diagonal_n.sum()
        if data.degrees_of_freedom:
            seed_noise = hyperparameters["seed noise"]
            within_runs = 0.5 * data.degrees_of_freedom * len(u_T)  # of the deviations of seeds from their run
            within_runs = within_runs - 0.5 * float(u_T**2 @ data.seed_squares_T) / seed_noise
            derivatives["seed noise"] = seed_noise * (diagonal_n / data.seeds_n).sum() + within_runs
        standardized = (theta - self.prior[:, 0]) / self.prior[:, 1]  # of the Gaussian prior of theta
        loss = float(0.5 * standardized @ standardized - self._likelihood_weight * fit.likelihood)
        likelihood_gradient = np.array([derivatives[name] for name in self.names])
        return loss, self._likelihood_weight * likelihood_gradient + standardized / self.prior[:, 1]

    def _share_covariances(self, log_shape: F64) -> dict[str, F64]:
        """Return the components of the covariance of the runs that depend on shares, (n, n) each."""
        if not self._has_shares:
            return {}
        share_nG = self.data.runs.share_BG
        return ShareCovariance.from_shares(share_nG, log_shape).between(share_nG, share_nG)


def matrix_product(matrix_Cbn: F64, values_nT: F64) -> F64:
    """Return the product of matrices and values, (b, T), with one matrix for all tasks or one per task."""
    if len(matrix_Cbn) == 1:
        return np.asarray(matrix_Cbn[0] @ values_nT)
    return np.asarray(np.einsum("tbn,nt->bt", matrix_Cbn, values_nT))
