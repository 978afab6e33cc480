"""Rank metrics of predicted utilities with bootstrap intervals, and noise ceilings. Start with `target_metrics`.

    task_rho                 Spearman's rho over subsets of predicted and realized mean utility of a target
    mean_lds                 mean over units of Spearman's rho of the unit's predicted and realized utility
    positive                 fraction of units whose rho is above 0
    pairwise                 fraction of pairs of subsets that the predicted mean utility orders correctly

Labels such as eq:lds-spearman are those of the paper's equations, see docs/paper_map.md.
Shape letters: B subsets, E units of one target, S retraining seeds, R bootstrap resamples, T targets.

Intervals. Subsets are the sampling unit, so subsets are resampled, with the same draws for every unit, target and
metric. The 95 % interval is the estimate plus the 2.5 % and 97.5 % quantiles of the deviations of the resamples from
*their own* mean, clipped to the range of the metric. Resampling adds noise, which biases e.g. a positive fraction
towards one half; therefore only the spread of the resamples is used, not their centre.

Undefined values. Spearman's rho of a constant column does not exist and is never replaced by a number: the `Estimate`
has value None and a reason, and units without a rho are counted and excluded from means and fractions.

Noise ceiling. Let U = truth + noise with noise independent between seeds. With r1 the mean over all pairs of seeds of
the rank correlation between two seeds' utilities, the mean over S seeds has reliability (Spearman-Brown)

    reliability = S r1 / (1 + (S - 1) r1),        ceiling = sqrt(reliability),

which is the correlation of a predictor equal to the truth with the mean over S seeds. It is exact for Pearson's
correlation; for rank correlations of normal variables it is too high by less than 0.01. For mean LDS, r1 is averaged
over the units first; since sqrt and Spearman-Brown are concave, the result is an upper bound if units differ in
reliability.
The ceiling is undefined for a single seed, or if seeds do not agree (r1 <= 0).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.stats import rankdata

from grasp.arrays import F64, Floats, ratio
from grasp.text import number, unique_names

# Lowest value of each metric; the highest is 1.
METRICS = {"task_rho": -1.0, "mean_lds": -1.0, "positive": 0.0, "pairwise": 0.0}
CEILINGS = ("task_ceiling", "lds_ceiling")
RESAMPLES = 1_000
AVERAGE = "average"
LEVEL = 0.95
_BLOCK_NUMBERS = 500_000  # numbers per block of comparisons or ranks, which fit the CPU cache

CONSTANT_PREDICTION = "predictions are constant"
CONSTANT_UTILITY = "utilities are constant"
MIN_SUBSETS = 3
TOO_FEW_SUBSETS = f"fewer than {MIN_SUBSETS} subsets"
SINGLE_SEED = "one seed: the noise between seeds is unknown"
NO_UNIT_PREDICTIONS = "no predictions for units"
NO_DEFINED_UNIT = "no unit has a defined rho"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A metric and its 95 % bootstrap interval; value None means undefined, for the given reason."""

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return "undefined"
        if self.low is None or self.high is None:
            return number(self.value)
        return f"{number(self.value)} [{number(self.low)}, {number(self.high)}]"


@dataclass(frozen=True, slots=True)
class TargetMetrics:
    """Metrics of one prediction on one target, or the mean over targets. `metrics["task_rho"]` is an `Estimate`.

    Attributes:
        target: name of the target.
        n_subsets: number of subsets.
        n_units: number of units of the target.
        estimates: estimate by name, for all METRICS and CEILINGS.
        undefined_units: number of units without a rho, by reason.
        resamples: each metric of each resample, (R,); required to average targets.
    """

    target: str
    n_subsets: int
    n_units: int
    estimates: Mapping[str, Estimate]
    undefined_units: Mapping[str, int]
    resamples: Mapping[str, F64] = field(repr=False)

    def __getitem__(self, name: str) -> Estimate:
        return self.estimates[name]


def rank_correlations(columns: Sequence[F64], pairs: Sequence[tuple[int, int]], weights_RB: Floats) -> F64:
    """Compute Spearman's rho between pairs of column sets, for every unit and every resample.

    A resample is a row of integer weights: the number of times each subset was drawn. The mid-rank of a subset minus
    the mean rank is (weight below it - weight above it) / 2, so the ranks of all resamples are one matrix product of
    weights and pairwise comparisons, which are computed once. Ranks are multiples of 1/2 and thereby exact.

    Args:
        columns: arrays (B, E) of one shape: predictions, utilities, or utilities of one seed, in any unit.
        pairs: indices of the columns to correlate.
        weights_RB: resamples; a row of ones gives the estimate. The dtype sets the precision: 1e-6 for float32.
    Returns:
        Correlations of each pair, unit and resample, (pairs, E, R); nan if one of the two columns is constant on the
        drawn subsets; ties as in scipy.
    Source: eq:lds-spearman. Deviation: none. Cost: O(E B^2 R) multiply-adds per column set.
    """
    columns = [np.asarray(column, dtype=np.float64) for column in columns]
    n_subsets, n_units = columns[0].shape
    assert all(column.shape == columns[0].shape for column in columns)
    n_resamples = len(weights_RB)
    out = np.full((len(pairs), n_units, n_resamples), np.nan)
    root_RB = np.sqrt(weights_RB)
    units_per_block = max(1, _BLOCK_NUMBERS // (len(columns) * n_subsets * n_subsets))
    for start in range(0, n_units, units_per_block):
        block = slice(start, start + units_per_block)
        block_columns = [column[:, block].T for column in columns]  # (E, B) each
        # (E, B, B): 1/2 if the first subset is below the second, 0 for ties, -1/2 if above
        comparisons = [np.sign(x[:, None, :] - x[:, :, None]).astype(weights_RB.dtype) / 2 for x in block_columns]
        draws_per_block = max(1, _BLOCK_NUMBERS // (comparisons[0].shape[0] * n_subsets * len(columns)))
        for first_draw in range(0, n_resamples, draws_per_block):
            draws = slice(first_draw, first_draw + draws_per_block)
            # A subset that was drawn w times counts w times in sums over subsets: each factor of a product of ranks is
            # multiplied by sqrt(w).
            root_rB = root_RB[draws]
            ranks = [np.matmul(weights_RB[draws], comparison_EBB) for comparison_EBB in comparisons]
            ranks = [np.multiply(rank_ErB, root_rB, out=rank_ErB) for rank_ErB in ranks]
            # centred ranks of a constant column are exactly 0, and so is their norm
            norms = [np.sqrt(np.einsum("erb,erb->er", rank, rank)) for rank in ranks]
            for p, (first_column, second_column) in enumerate(pairs):
                scale_Er = norms[first_column] * norms[second_column]
                covariance_Er = np.einsum("erb,erb->er", ranks[first_column], ranks[second_column])
                np.divide(covariance_Er, scale_Er, out=out[p, block, draws], where=scale_Er > 0)
    return np.asarray(np.clip(out, -1.0, 1.0))


def spearman(x_BE: F64, y_BE: F64) -> F64:
    """Return Spearman's rho of every pair of columns, (E,); nan if one of the two is constant.

    Equals `rank_correlations` with weights of 1 to the last bit, since centred ranks are multiples of 1/2 and their
    products are added up without rounding. Cost: O(B log B) for each column.

    Args:
        x_BE: first column of each pair; (B,) for a single pair, which gives a single number.
        y_BE: second column of each pair, of the same shape.
    """
    assert x_BE.shape == y_BE.shape
    x_BE, y_BE = (rankdata(values_BE, axis=0) - (len(values_BE) + 1) / 2 for values_BE in (x_BE, y_BE))
    norm_E = np.sqrt(np.square(x_BE).sum(axis=0)) * np.sqrt(np.square(y_BE).sum(axis=0))
    return np.clip(ratio((x_BE * y_BE).sum(axis=0), norm_E, undefined=np.nan), -1.0, 1.0)


def pairwise_accuracy(predicted_B: F64, realized_B: F64, weights_RB: Floats) -> F64:
    """Return the share of pairs of subsets that are ordered as by their realized utilities, (R,).

    Pairs with tied utilities are excluded; pairs with tied predictions count one half. In a resample, a pair has the
    product of the weights of its subsets. nan if there are no pairs.
    """
    weights_RB = np.asarray(weights_RB, dtype=np.float64)
    predicted_sign_BB = np.sign(predicted_B[:, None] - predicted_B[None, :])
    realized_sign_BB = np.sign(realized_B[:, None] - realized_B[None, :])
    untied_BB = (realized_sign_BB != 0).astype(np.float64)
    agreement_BB = untied_BB * (0.5 + 0.5 * predicted_sign_BB * realized_sign_BB)  # 1, 1/2 or 0
    # Sums over pairs of a resample are quadratic forms w' M w of its weights.
    total_R = np.einsum("rb,rb->r", weights_RB, weights_RB @ untied_BB)
    agreement_R = np.einsum("rb,rb->r", weights_RB, weights_RB @ agreement_BB)
    return ratio(agreement_R, total_R, undefined=np.nan)


def bootstrap_interval(value: float, resampled_R: F64, *, lowest: float, highest: float, reason: str) -> Estimate:
    """Return the centred bootstrap interval of the module docstring; undefined resamples are ignored.

    Args:
        value: the estimate; nan: undefined.
        resampled_R: the metric of each resample.
        lowest: lowest value of the metric.
        highest: highest value of the metric.
        reason: why the metric is undefined, if it is.
    """
    if not np.isfinite(value):
        return Estimate(None, reason=reason)
    finite_R = resampled_R[np.isfinite(resampled_R)]
    if len(finite_R) < 2:
        return Estimate(float(value))
    tail_share = (1 - LEVEL) / 2
    low, high = value + np.quantile(finite_R - finite_R.mean(), [tail_share, 1 - tail_share])
    return Estimate(float(value), float(max(low, lowest)), float(min(high, highest)))


def mean_defined(values: F64, axis: int) -> F64:
    """Return the mean of the finite values; nan if there are none (numpy's nanmean would warn)."""
    defined = np.isfinite(values)
    total = np.where(defined, values, 0.0).sum(axis=axis)
    count = defined.sum(axis=axis)
    return ratio(total, count, undefined=np.nan)


def ceiling_from_correlation(correlation: F64, n_seeds: int) -> F64:
    """Return the square root of the reliability of the mean of `n_seeds` seeds; nan for correlations <= 0."""
    correlation = np.asarray(correlation, dtype=np.float64)
    is_positive = np.isfinite(correlation) & (correlation > 0)
    r1 = correlation[is_positive]
    out = np.full(correlation.shape, np.nan)
    out[is_positive] = np.sqrt(n_seeds * r1 / (1.0 + (n_seeds - 1) * r1))
    return out


def seed_agreement(realized_BSE: F64, weights_RB: Floats) -> F64:
    """Return the mean rank correlation between two seeds over all pairs of seeds, (E, R); nan if S < 2."""
    _, n_seeds, n_units = realized_BSE.shape
    pairs = [(a, b) for a in range(n_seeds) for b in range(a + 1, n_seeds)]
    if not pairs:
        return np.full((n_units, len(weights_RB)), np.nan)
    runs = [realized_BSE[:, s] for s in range(n_seeds)]
    return mean_defined(rank_correlations(runs, pairs, weights_RB), axis=0)


def noise_ceilings(realized_BSE: F64, weights_RB: Floats) -> dict[str, Estimate]:
    """Return the CEILINGS of one target; they depend only on the utilities, so all methods share them.

    Args:
        realized_BSE: realized utilities of each seed.
        weights_RB: from `bootstrap_weights`.
    Source: design section 4, point 11; see the module docstring for the formula.
    """
    n_subsets, n_seeds, _ = realized_BSE.shape
    ceilings = {}
    for name, values_BSE in (("task_ceiling", realized_BSE.mean(axis=2, keepdims=True)), ("lds_ceiling", realized_BSE)):
        if n_seeds < 2 or n_subsets < MIN_SUBSETS:
            ceilings[name] = Estimate(None, reason=SINGLE_SEED if n_seeds < 2 else TOO_FEW_SUBSETS)
            continue
        correlation = mean_defined(seed_agreement(values_BSE, np.ones((1, n_subsets))), axis=0)
        resampled_R = mean_defined(seed_agreement(values_BSE, weights_RB), axis=0)
        ceilings[name] = bootstrap_interval(
            float(ceiling_from_correlation(correlation, n_seeds)[0]),
            ceiling_from_correlation(resampled_R, n_seeds),
            lowest=0.0,
            highest=1.0,
            reason=CONSTANT_UTILITY
            if np.isnan(correlation[0])
            else f"the seeds do not agree (mean rank correlation {correlation[0]:.2f})",
        )
    return ceilings


def target_metrics(
    target: str,
    predicted_BE: F64 | None,
    realized_BSE: F64,
    weights_RB: Floats,
    *,
    task_predicted_B: F64 | None = None,
    ceilings: Mapping[str, Estimate] | None = None,
) -> TargetMetrics:
    """Compute all metrics of one prediction on one target.

    Args:
        target: name of the target, for messages.
        predicted_BE: predicted utilities on any increasing scale. None: only the task was predicted, so metrics of
            units are undefined.
        realized_BSE: realized utilities of each seed; the metrics use the mean over seeds.
        weights_RB: from `bootstrap_weights`; shared by all targets of the runs.
        task_predicted_B: prediction of the task; default: the mean of the predictions of its units.
        ceilings: result of `noise_ceilings`, if known.
    Source: eq:lds-spearman and the paper's task-level rho, positive fraction and pairwise accuracy.
    """
    realized_BSE = np.asarray(realized_BSE, np.float64)
    n_subsets, _, n_units = realized_BSE.shape
    only_task = predicted_BE is None
    predicted_BE = np.zeros((n_subsets, n_units)) if predicted_BE is None else np.asarray(predicted_BE, np.float64)
    assert predicted_BE.shape == (n_subsets, n_units)
    realized_BE = realized_BSE.mean(axis=1)
    task_B = predicted_BE.mean(axis=1) if task_predicted_B is None else np.asarray(task_predicted_B, np.float64)
    ones_1B = np.ones((1, n_subsets))  # weights that give the estimate itself
    values = _metrics(predicted_BE, task_B, realized_BE, ones_1B)
    resamples = _metrics(predicted_BE, task_B, realized_BE, weights_RB)

    # reasons of undefined values
    constant_prediction_E, constant_utility_E = (np.ptp(x_BE, axis=0) == 0 for x_BE in (predicted_BE, realized_BE))
    task_reason = CONSTANT_UTILITY if np.ptp(task_B) > 0 else CONSTANT_PREDICTION
    unit_reason = NO_DEFINED_UNIT
    undefined = {
        CONSTANT_PREDICTION: int(constant_prediction_E.sum()),
        CONSTANT_UTILITY: int((constant_utility_E & ~constant_prediction_E).sum()),
    }
    if n_subsets < MIN_SUBSETS:
        task_reason = unit_reason = TOO_FEW_SUBSETS
        undefined = {TOO_FEW_SUBSETS: n_units}
    if only_task:
        unit_reason, undefined = NO_UNIT_PREDICTIONS, {NO_UNIT_PREDICTIONS: n_units}
    reasons = dict.fromkeys(METRICS, unit_reason) | {"task_rho": task_reason, "pairwise": task_reason}
    estimates = {
        name: bootstrap_interval(
            float(values[name][0]), resamples[name], lowest=lowest, highest=1.0, reason=reasons[name]
        )
        for name, lowest in METRICS.items()
    }
    return TargetMetrics(
        target=target,
        n_subsets=n_subsets,
        n_units=n_units,
        estimates=estimates | dict(ceilings or noise_ceilings(realized_BSE, weights_RB)),
        undefined_units={reason: count for reason, count in undefined.items() if count},
        resamples=resamples,
    )


def _metrics(predicted_BE: F64, task_B: F64, realized_BE: F64, weights_RB: Floats) -> dict[str, F64]:
    """Compute every metric for every resample, (R,) each."""
    if len(task_B) < MIN_SUBSETS:
        return {name: np.full(len(weights_RB), np.nan) for name in METRICS}
    rho_ER = rank_correlations([predicted_BE, realized_BE], [(0, 1)], weights_RB)[0]
    realized_B = realized_BE.mean(axis=1)
    task_rho_1R = rank_correlations([task_B[:, None], realized_B[:, None]], [(0, 1)], weights_RB)[0]
    pairs_R = pairwise_accuracy(task_B, realized_B, weights_RB)
    if task_B.max() == task_B.min():
        pairs_R = np.full_like(pairs_R, np.nan)  # a constant prediction orders no pair; 1/2 would look like a result
    return {
        "task_rho": task_rho_1R[0],
        "mean_lds": mean_defined(rho_ER, axis=0),
        "positive": mean_defined(np.where(np.isfinite(rho_ER), rho_ER > 0, np.nan), axis=0),
        "pairwise": pairs_R,
    }


def average(by_target: Sequence[TargetMetrics]) -> TargetMetrics:
    """Average metrics over targets; a metric that is undefined on a target is undefined, with the target as reason.

    Resamples are averaged draw by draw, so that intervals account for targets that share subsets. The mean ceiling has
    no interval.
    """
    estimates: dict[str, Estimate] = {}
    resamples = {name: np.mean([metrics.resamples[name] for metrics in by_target], axis=0) for name in METRICS}
    for name in (*METRICS, *CEILINGS):
        undefined_on = [metrics.target for metrics in by_target if metrics[name].value is None]
        estimates[name] = bootstrap_interval(
            np.nan if undefined_on else float(np.mean([metrics[name].value for metrics in by_target])),
            resamples.get(name, np.empty(0)),
            lowest=METRICS.get(name, 0.0),
            highest=1.0,
            reason=f"undefined on {', '.join(undefined_on)}",
        )
    # a target may have the same name
    label = unique_names([*(metrics.target for metrics in by_target), AVERAGE])[-1]
    n_units = sum(metrics.n_units for metrics in by_target)
    return TargetMetrics(label, by_target[0].n_subsets, n_units, estimates, {}, resamples)
