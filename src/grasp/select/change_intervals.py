"""Confidence intervals of predicted changes without runs: over units and, for mixtures, over rows.

For selected rows, the change on other questions of the task is expected to be the change times a slope that
`grasp.predict.task_scores` measures by holding out questions, and the interval is that of the slope. A mixture does not
depend on single rows: the units of a target are a sample of its task, and the bootstrap resamples them, as it does for
rows if questions cannot be held out. The rows of a label value are a sample of this value: with c_g the weight of a row
of slice g in the mean of the mixture, and s_g^2 the variance of the effects within the slice, sampling rows adds

    sum_g (c_g - 1 / N)^2 n_g s_g^2

to the variance of a change. The intervals express how much a change would differ for other units and rows of the same
kind, not how well predictions agree with retraining. Start with `change_interval`.
Shape letters: B subsets, E units, G slices, N rows, T targets, R resamples, C combinations of targets.
"""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array

from grasp.arrays import F64, I32
from grasp.artifact.reader import ArtifactReader
from grasp.predict.predictor import Predictor, relevance_blocks
from grasp.predict.weights import Weights, sums_over
from grasp.seeds import bootstrap_weights

RESAMPLES = 1_000
TAILS = (0.025, 0.975)
COVERAGE = TAILS[1] - TAILS[0]
NORMAL = 1.959964  # 97.5 % quantile of the standard normal distribution


@dataclass(frozen=True, slots=True)
class ChangeInterval:
    """95 % intervals of the changes of one subset; nan for a target with a single unit.

    Attributes:
        expected_T: expected change on other questions of each target; None: not measured, and the intervals are those
            of the change on the known questions.
        low_T: lower bound of each target.
        high_T: upper bound of each target.
        weighted: interval of the weighted mean over the targets.
        over: what is regarded as a sample: "questions", "units" or "units and rows".
    """

    expected_T: F64 | None
    low_T: F64
    high_T: F64
    weighted: tuple[float, float]
    over: str

    def notes(self, targets: tuple[str, ...]) -> list[str]:
        """Return a note on the intervals of the targets, unless the table has them."""
        if self.expected_T is not None or not (is_defined_T := np.isfinite(self.low_T)).any():
            return []
        lines = zip(targets, self.low_T, self.high_T, is_defined_T, strict=True)
        intervals = [f"{target} {low:+.3f} to {high:+.3f}" for target, low, high, is_defined in lines if is_defined]
        return [f"{COVERAGE:.0%} intervals of the change over {self.over}: {'; '.join(intervals)}"]


def change_interval(
    artifact: ArtifactReader, predictor: Predictor, weights: Weights, weights_T: F64, codes_N: I32 | None = None
) -> ChangeInterval:
    """Return the confidence intervals of the change of one subset.

    Args:
        artifact: artifact of the predictor.
        predictor: predictor of the targets.
        weights: row weights of the subset; for a mixture, made from its slices.
        weights_T: weights of the targets.
        codes_N: slice of each row, for a mixture; None: the rows are fixed, not a sample.

    Cost: one pass over the relevance of every kernel.
    """
    change_T = predictor.change(weights)[0]
    if codes_N is None and predictor.reliability:
        expected_T, half_width_T = np.array(
            [task.expected(change) for task, change in zip(predictor.reliability.values(), change_T, strict=True)]
        ).T
        expected, half_width = expected_T @ weights_T, np.linalg.norm(weights_T * half_width_T)
        weighted = float(expected - half_width), float(expected + half_width)
        return ChangeInterval(expected_T, expected_T - half_width_T, expected_T + half_width_T, weighted, "questions")
    change_1E = changes_by_unit(artifact, predictor, weights)
    counts_T = predictor.units.counts_T
    if predictor.prior is not None:  # text is not decomposed by unit: only the centre differs
        change_1E += np.repeat(change_T - predictor.units.mean_per_task(change_1E)[0], counts_T)
    stops = np.cumsum(counts_T)
    resampled_TR = np.full((len(counts_T), RESAMPLES), np.nan)
    for t, (start, stop) in enumerate(zip(stops - counts_T, stops, strict=True)):
        if stop - start > 1:
            weights_RE = bootstrap_weights(int(stop - start), resamples=RESAMPLES, seed=t) / (stop - start)
            resampled_TR[t] = weights_RE @ change_1E[0, start:stop]
    # the targets, and their weighted mean
    combined_TC = np.column_stack([np.eye(len(weights_T)), weights_T])
    change_C, resampled_CR = change_T @ combined_TC, np.vstack([resampled_TR, weights_T @ resampled_TR])
    error_C = np.zeros(len(change_C)) if codes_N is None else row_errors(predictor, weights, codes_N, combined_TC)
    low_C, high_C = np.quantile(resampled_CR, TAILS, axis=1)
    # the error over rows is added in quadrature to each half of the interval
    low_C = change_C - np.hypot(change_C - low_C, NORMAL * error_C)
    high_C = change_C + np.hypot(high_C - change_C, NORMAL * error_C)
    over, weighted = "units" if codes_N is None else "units and rows", (float(low_C[-1]), float(high_C[-1]))
    return ChangeInterval(None, low_C[:-1], high_C[:-1], weighted, over)


def changes_by_unit(artifact: ArtifactReader, predictor: Predictor, weights: Weights) -> F64:
    """Return the change of the target if only one of its units is used, (B, E).

    The mean over the units of a target is the change of the target.
    """
    columns_E, protocol = predictor.units.columns_E, predictor.protocol
    effective, corpus = predictor.effective_weights(weights), Weights(csr_array((1, predictor.n_rows)), base=1.0)
    sum_BE, all_1E = np.zeros((weights.shape[0], len(columns_E))), np.zeros((1, len(columns_E)))
    for kernel, factor_E in predictor.unit_relevance_to_effect.items():
        blocks = relevance_blocks(artifact, kernel, columns_E, protocol.negative_factor(kernel))
        part_BE, part_1E = sums_over(blocks, [effective, corpus], len(columns_E))
        sum_BE, all_1E = sum_BE + part_BE * factor_E, all_1E + part_1E * factor_E
    mean_E = all_1E[0] / predictor.n_rows
    return predictor.change_by_units(sum_BE - np.outer(effective.sums, mean_E), mean_E, predictor.sums(weights))


def row_errors(predictor: Predictor, weights: Weights, codes_N: I32, combined_TC: F64) -> F64:
    """Return the standard error over rows of linear combinations of the target changes of a mixture, (C,).

    Args:
        codes_N: slice of each row.
        combined_TC: coefficients of the combinations.
    """
    effective = predictor.effective_weights(weights)
    assert effective.mix is not None
    c_G = effective.mix[0] / weights.sums[0]
    n_rows_G = np.bincount(codes_N, minlength=len(c_G))
    variances = []
    for effect_N in (np.asarray(predictor.effect_NT, np.float64) @ combined_TC).T:
        mean_G = np.bincount(codes_N, effect_N, minlength=len(c_G)) / np.maximum(n_rows_G, 1)
        square_G = np.bincount(codes_N, (effect_N - mean_G[codes_N]) ** 2, minlength=len(c_G))
        unbiased_G = square_G * n_rows_G / np.maximum(n_rows_G - 1, 1)  # n_g s_g^2
        variances.append(float(((c_G - 1.0 / predictor.n_rows) ** 2) @ unbiased_G))
    return np.sqrt(variances)
