"""Tell which metrics of training runs can be decided at all, from the noise of a run and the spread over mixtures.

With s the standard deviation of a metric over mixtures without noise, and e the error of a prediction for a held-out
run without noise, a metric is decidable if e^2 <= s^2 / 2, so that predictions and results correlate by .7 or more.
e^2 falls as 1 / R with the number R of runs, which tells how many are needed. A metric whose spread is not above the
noise is noise: no number of runs helps, but more questions or seeds do. Start with `assess_metrics`.

The noise of a run is known from runs with several seeds. Without them it is bounded by the errors for held-out runs,
and a metric that is not predicted may be noise or have too few runs. Held-out predictions are slightly optimistic,
since settings of the law are chosen by them, so that a correlation counts from a significance of .005 on.
Shape letters: R runs, S seeds, T metrics.
"""

import math

import numpy as np
import pyarrow as pa
from scipy.stats import f as f_distribution
from scipy.stats import norm

from grasp.arrays import ratio
from grasp.mixing.mixture_model import MixtureModel, Runs
from grasp.results import Result

DECIDABLE, NOISE = "decidable", "noise"
MAX_ERROR = 0.5  # of decidable metrics, e^2 / s^2
SIGNIFICANCE = 0.05  # of the spread above the noise of seeds
CORRELATION_SIGNIFICANCE = 0.005  # of held-out predictions, without seeds
UNCLEAR = "noise or too few runs: repeat some with another seed"
MAX_RUNS = 10_000  # a larger number of runs counts as noise


def assess_metrics(runs: Runs) -> Result:
    """Tell which metrics of the runs can be decided, and how many runs the others need.

    Args:
        runs: imported runs, see `grasp runs import`.
    Returns:
        One row per metric, most decidable first: metric, noise (standard deviation of a run), spread (over mixtures),
        signal_to_noise, correlation (of predictions for held-out runs and their results), runs_needed (null if the
        metric is noise), verdict.
    Raises:
        RunsError: the runs have no shares or are too few.
    """
    return assess(MixtureModel.from_runs(runs))


def assess(model: MixtureModel) -> Result:
    """Return what `assess_metrics` does, of a fitted model."""
    utility_RST, n_runs = model.table.utility_RST(), len(model.table)
    if model.scale_RX is not None:  # relative to the mean at each size and length
        _, scale_R = np.unique(model.scale_RX, axis=0, return_inverse=True)
        for scale in np.unique(scale_R):
            utility_RST[scale_R == scale] -= np.nanmean(utility_RST[scale_R == scale], axis=(0, 1))
    utility_RT = np.nanmean(utility_RST, axis=1)
    variance_T = utility_RT.var(axis=0, ddof=1)
    residual_RT = model.gaussian_process.held_out_residuals()[:, :-1]
    error_T, predicted_RT = (residual_RT**2).mean(axis=0), utility_RT - residual_RT
    covariance_T = ((predicted_RT - predicted_RT.mean(axis=0)) * (utility_RT - utility_RT.mean(axis=0))).mean(axis=0)
    correlation_T = ratio(covariance_T, predicted_RT.std(axis=0) * utility_RT.std(axis=0))
    seeds_RT = (~np.isnan(utility_RST)).sum(axis=1)
    freedom_T, seeds = (seeds_RT - 1).sum(axis=0), float(seeds_RT[:, 0].mean())
    has_seeds = bool(freedom_T.all())
    if has_seeds:
        noise_T = np.sqrt(np.nansum((utility_RST - utility_RT[:, None]) ** 2, axis=(0, 1)) / freedom_T)
        ratio_T = variance_T * seeds_RT.mean(axis=0) / np.maximum(noise_T**2, np.finfo(np.float64).tiny)
        is_noise_T = ratio_T < f_distribution.isf(SIGNIFICANCE, n_runs - 1, freedom_T)
    else:
        noise_T = np.sqrt(error_T)
        is_noise_T = correlation_T < norm.isf(CORRELATION_SIGNIFICANCE) / math.sqrt(n_runs)
    spread_T = np.sqrt(np.maximum(variance_T - noise_T**2 / seeds, 0.0))
    excess_T = np.maximum(error_T - noise_T**2 / seeds, 0.0) if has_seeds else error_T
    signal_T = spread_T**2 if has_seeds else variance_T
    needed_T = ratio(n_runs * excess_T, MAX_ERROR * signal_T, undefined=np.inf)
    is_noise_T |= needed_T > MAX_RUNS
    pairs = list(zip(needed_T.tolist(), is_noise_T.tolist(), strict=True))
    runs_needed = [None if is_noise else max(math.ceil(needed), 1) for needed, is_noise in pairs]
    noise = NOISE if has_seeds else UNCLEAR
    verdicts = [
        noise if count is None else DECIDABLE if count <= n_runs else f"needs about {count} runs"
        for count in runs_needed
    ]
    order = np.lexsort((-correlation_T, is_noise_T))
    table = pa.table(
        {
            "metric": pa.array(model.table.metrics, pa.string()),
            "noise": noise_T,
            "spread": spread_T,
            "signal_to_noise": spread_T / np.maximum(noise_T, np.finfo(np.float64).tiny),
            "correlation": correlation_T,
            "runs_needed": pa.array(runs_needed, pa.int64()),
            "verdict": pa.array(verdicts, pa.string()),
        }
    ).take(pa.array(order))
    n_decidable = verdicts.count(DECIDABLE)
    bound = "" if has_seeds else " at most, from errors for held-out runs, as none has several seeds"
    notes = [
        f"noise: standard deviation of a run{bound}",
        "decidable: predictions for held-out runs correlate by .7 or more with results without noise",
    ]
    return Result(
        table,
        f"{n_decidable} of {len(table)} metrics can be decided with {n_runs:,} runs; "
        f"{runs_needed.count(None)} {'are noise' if has_seeds else 'may be noise'}",
        (*notes, *model.notes[1:]),
        signs=False,
    )
